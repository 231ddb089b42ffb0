"""What every section of a config is made of: pydantic models that refuse what they do not know, and `Part`.

A `Part` is something a factory makes, the factory named by its import path: `package.module:name`. There is no
registry; an argument that is itself `{factory: …, args: …}` is made first.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)

from flatout.model.errors import UsageError
from flatout.model.inputs import short


class Section(BaseModel):
    """A group of settings. A key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


_LONGEST_PATH = 200  # letters
Count = Annotated[int, Field(ge=1, le=2**53)]


@dataclass(frozen=True, slots=True)
class Every:
    """How often something happens: "5 epochs", "1000 steps", "10 minutes"."""

    number: float
    unit: Literal["epoch", "step", "minute"]

    def __str__(self) -> str:
        return f"{self.number:g} {self.unit}{'' if self.number == 1 else 's'}"


def _read_every(value: Any) -> Any:
    if value is None or value is False or value == "never":
        return None
    if isinstance(value, Every):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)?\s*(epoch|step|minute)s?", value) if isinstance(value, str) else None
    number = float(found[1] or 1) if found else 0.0
    if found is None or not 0 < number < 2**53 or (found[2] != "minute" and number != int(number)):
        raise ValueError('such as "5 epochs", "1000 steps", "10 minutes" or never')
    return Every(number, found[2])  # type: ignore[arg-type]


Often = Annotated[Every | None, BeforeValidator(_read_every), PlainSerializer(lambda every: every and str(every))]


class Part(Section):
    """A factory and its arguments; `package.module:name` alone stands for one without arguments."""

    factory: str
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"factory": value} if isinstance(value, str) else value

    @field_validator("factory")
    @classmethod
    def _is_path(cls, value: str) -> str:
        if len(value) > _LONGEST_PATH or not re.fullmatch(
            r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", value
        ):
            raise ValueError("an import path such as package.module:name")
        return value


def build(part: Part, where: str, *first: Any, **more: Any) -> Any:
    """What the part's factory makes of `first`, its own arguments, and `more` where it gives none of that name."""
    return _call(found(part.factory, f"{where}.factory"), where, first, {**more, **part.args})


def found(path: str, where: str) -> Any:
    """The object an import path leads to."""
    module_name, _, names = path.partition(":")
    try:
        thing = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{module_name}.".startswith(f"{problem.name}."):
            raise _theirs(f"{where}: {module_name} cannot be imported", problem) from problem
        raise UsageError(f"{where}: there is no module {problem.name!r} (from {path!r})") from None
    except (Exception, SystemExit) as problem:
        raise _theirs(f"{where}: {module_name} cannot be imported", problem) from problem
    for name in names.split("."):
        if not hasattr(thing, name):
            raise UsageError(f"{where}: {module_name} has no {name!r}{nearest(name, dir(thing))}")
        thing = getattr(thing, name)
    return thing


def _call(factory: Callable[..., Any], where: str, first: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
    arguments = {name: _made(value, f"{where}.args.{name}") for name, value in given.items()}
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        signature = None  # of some built-in functions nothing is known before they are called
    if not callable(factory):
        raise UsageError(f"{where}.factory: {factory!r} cannot be called")
    name = getattr(factory, "__qualname__", factory)
    if signature is not None:
        try:
            signature.bind(*first, **arguments)
        except TypeError as problem:
            unknown = [name for name in arguments if name not in signature.parameters]
            hint = nearest(unknown[0], signature.parameters) if unknown else ""
            raise UsageError(f"{where}.args: {name} {problem}{hint}") from None
    try:
        return factory(*first, **arguments)
    except UsageError:
        raise
    except (Exception, SystemExit) as problem:
        raise _theirs(f"{where}: {name} failed", problem) from problem


def _theirs(what: str, problem: BaseException) -> UsageError:
    """An error of the person's own code: they get its traceback too, from that code on."""
    frame = problem.__traceback__
    while frame is not None and (frame.tb_frame.f_code.co_filename in (__file__, importlib.__file__) or _frozen(frame)):
        frame = frame.tb_next
    problem.with_traceback(frame)
    return UsageError(f"{what}: {type(problem).__name__}: {problem}")


def _frozen(frame: Any) -> bool:
    return bool(frame.tb_frame.f_code.co_filename.startswith("<frozen importlib"))


def _made(value: Any, where: str) -> Any:
    """An argument, with every `{factory: …}` inside it made."""
    if isinstance(value, dict):
        if "factory" in value and set(value) <= {"factory", "args"}:
            try:
                part = Part.model_validate(value)
            except ValidationError as problem:
                wrong = problem.errors()[0]
                key = ".".join(map(str, (where, *wrong["loc"])))
                words = wrong["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
                raise UsageError(f"{key} must be {words} (got {short(wrong['input'])})") from None
            return build(part, where)
        return {key: _made(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_made(inner, f"{where}[{place}]") for place, inner in enumerate(value)]
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean …?", if something like it is known."""
    close = difflib.get_close_matches(word, [name for name in known if not name.startswith("_")], n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
