"""A training as one YAML file: read, completed by a preset and by key=value, and checked to the last key.

    file ─► preset ─► key=value ─► Config        a mistake is one line: the key, what is wrong, the nearest right name

`TrainerConfig` is what the trainer itself goes by. `Config` adds what it trains: model, data, optimizer
and so on, each made by a factory that is named by its import path (`package.module:name`). There is no
registry; an argument that is itself `{factory: …, args: …}` is built first.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
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
from flatout.model.inputs import load_yaml, short, text_of, yaml_loader
from flatout.redact import redact_setting


class Section(BaseModel):
    """A group of settings. A key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


MAX_PATH_LETTERS, MAX_KEY_LETTERS = 200, 100
Count = Annotated[int, Field(ge=1, le=2**53)]


@dataclass(frozen=True, slots=True)
class Every:
    """How often something happens: "5 epochs", "1000 steps", "10 minutes"."""

    number: float
    unit: Literal["epoch", "step", "minute"]

    def __str__(self) -> str:
        plural = "s" * (self.number != 1)
        return f"{self.number:g} {self.unit}{plural}"


def _read_every(value: Any) -> Any:
    if value is None or value is False or value == "never":
        return None
    if isinstance(value, Every):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)?\s*(epoch|step|minute)s?", value if isinstance(value, str) else "")
    if match is not None:
        number = float(match[1] or 1)
        if 0 < number < 2**53 and (match[2] == "minute" or number == int(number)):
            return Every(number, match[2])  # type: ignore[arg-type]
    raise ValueError('such as "5 epochs", "1000 steps", "10 minutes" or never')


Often = Annotated[Every | None, BeforeValidator(_read_every), PlainSerializer(lambda every: every and str(every))]


class FactoryConfig(Section):
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
        if len(value) > MAX_PATH_LETTERS or not re.fullmatch(
            r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", value
        ):
            raise ValueError("an import path such as package.module:name")
        return value


# How people spell a precision.
_SPELLINGS = {
    "auto": ("auto",),
    "off": ("off", "false", "no", "none", "fp32", "float32", "32", "full"),
    "tf32": ("tf32", "tensorfloat32"),
    "bf16": ("bf16", "bfloat16", "bf16-mixed", "true", "on", "yes", "amp", "mixed"),
    "fp16": ("fp16", "float16", "half", "16", "16-mixed"),
}
_PRECISIONS = {word: name for name, words in _SPELLINGS.items() for word in words}


def _read_precision(value: Any) -> Any:
    """The name of a precision, however it is spelled; YAML reads `off` as False and `16` as a number."""
    word = str(value).strip().lower().removeprefix("torch.")
    if isinstance(value, str | bool | int) and word in _PRECISIONS:
        return _PRECISIONS[word]
    hint = "" if word.isdigit() else nearest(word, _PRECISIONS)
    raise ValueError(f"one of {', '.join(_SPELLINGS)}{hint}")


PrecisionName = Annotated[Literal["auto", "off", "tf32", "bf16", "fp16"], BeforeValidator(_read_precision)]
COMPILE_MODES = ("auto", True, False, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _compile_mode(value: Any) -> Any:
    if not any(value is mode or (isinstance(value, str) and value == mode) for mode in COMPILE_MODES):
        raise ValueError(f"one of {', '.join(str(mode).lower() for mode in COMPILE_MODES)}")
    return value


class TrainConfig(Section):
    """How long, how much at a time, in what numbers."""

    epochs: Count = 1
    max_steps: Count | None = None
    batch_size: Count | Literal["auto"] = 32  # samples of one optimizer step, on each rank
    # Pieces a batch is computed in; what is learned from it stays the same.
    accumulate: Count = 1
    # Of the GPU, for batch_size: auto.
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    # How the learning rate follows from lr_batch to the batch.
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    # The effective batch that the learning rate was chosen for.
    lr_batch: Count | None = None
    precision: PrecisionName = "auto"
    compile: Annotated[bool | str, BeforeValidator(_compile_mode)] = "auto"
    channels_last: Literal["auto"] | bool = "auto"
    checkpoint_activations: bool | list[str] = False  # or names of modules, * allowed
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    on_nan: Literal["stop", "skip"] = "stop"
    scheduler_per: Literal["step", "epoch"] = "step"
    deterministic: bool = False
    device: str = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @field_validator("device")
    @classmethod
    def _is_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
            raise ValueError("auto, cpu, cuda or cuda:N")
        return value


class DataConfig(Section):
    """Where samples come from. `args` go to both factories, beside their own."""

    train: FactoryConfig
    val: FactoryConfig | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    workers: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = "auto"
    collate: str | None = None  # an import path
    shuffle: bool = True
    drop_last: bool = True
    on_bad_sample: Literal["raise", "skip"] = "raise"


class EvaluateConfig(Section):
    """When the validation data is looked at."""

    every: Often = Every(1, "epoch")
    batch_size: Count | None = None  # None: train.batch_size


class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    every: Often = Every(1, "epoch")
    keep: Count = 2
    # The validation metric that chooses best.pt.
    best: Annotated[str, Field(min_length=1)] | None = "loss"
    best_is: Literal["min", "max"] = "min"


class LogConfig(Section):
    """How much is said and written."""

    every: Count = 50  # steps; the loss is read from the GPU only then
    quiet: bool = False
    tensorboard: bool = False
    wandb: bool = False
    mlflow: bool = False


class TrainerConfig(Section):
    """How to train, whatever is trained."""

    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    out: str | None = None  # the run's folder; None: runs/<name of the config>

    @model_validator(mode="after")
    def _fits_together(self) -> TrainerConfig:
        train = self.train
        if train.lr_rule != "none" and train.lr_batch is None:
            raise ValueError("train.lr_rule needs train.lr_batch, the batch that the learning rate was chosen for")
        if train.batch_size != "auto" and train.accumulate > train.batch_size:
            raise ValueError(f"train.accumulate must be at most train.batch_size (got {train.accumulate})")
        return self

    def unknown_best(self, metrics: Iterable[str]) -> str:
        """What is wrong with `checkpoint.best`, if it names a metric that is not measured; else ""."""
        known = ["loss", *metrics]
        best = self.checkpoint.best
        if "best" not in self.checkpoint.model_fields_set or best is None or best.split(".")[0] in known:
            return ""
        return f"checkpoint.best must be one of {', '.join(known)} (got {short(best)}){nearest(best, known)}"


class Config(TrainerConfig):
    """A whole training: its parts and its settings."""

    model: FactoryConfig
    data: DataConfig
    optimizer: FactoryConfig
    criterion: FactoryConfig | None = None  # None: the model returns the loss
    scheduler: FactoryConfig | None = None
    metrics: dict[str, FactoryConfig] = Field(default_factory=dict)
    augment: FactoryConfig | None = None

    @model_validator(mode="after")
    def _best_is_measured(self) -> Config:
        if wrong := self.unknown_best(self.metrics):
            raise ValueError(wrong)
        return self


def load(
    path: Path, overrides: Sequence[str] = (), preset: str | None = None, notes: list[str] | None = None
) -> Config:
    """The config in a file, with a preset and the overrides; `notes` receives what of the preset has no effect."""
    whole = amp_is_precision(_read(path), str(path))
    if preset is not None:
        if preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise UsageError(f"there is no preset {preset!r}: {known}{nearest(preset, PRESETS)}")
        _apply_preset(whole, preset, [] if notes is None else notes)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError(f"{text!r} is not key=value, such as train.batch_size=256")
        _set(whole, "train.precision" if key == "train.amp" else key, load_yaml(value, text, _YamlLoader))
    if len({text.partition("=")[0] for text in overrides} & {"train.amp", "train.precision"}) == 2:
        raise UsageError("train.amp and train.precision are the same setting: give one")
    return validate(Config, amp_is_precision(whole, str(path)), str(path))


def without_effect(config: Config) -> Iterator[str]:
    """A line for each setting that is not at its default, but does nothing in this training."""
    idle = (
        (config.data.val is None, "there is no data.val", "evaluate.every evaluate.batch_size"),
        (config.train.batch_size != "auto", "train.batch_size is not auto", "train.memory_share"),
        (config.train.lr_rule == "none", "train.lr_rule is none", "train.lr_batch"),
        (config.evaluate.every is None, "evaluate.every is never", "evaluate.batch_size"),
        (config.scheduler is None, "there is no scheduler", "train.scheduler_per"),
        (
            config.checkpoint.every is None,
            "checkpoint.every is never",
            "checkpoint.keep checkpoint.best checkpoint.best_is",
        ),
    )
    for is_idle, why, keys in idle:
        for key in keys.split() if is_idle else ():
            section, name = key.split(".")
            settings = getattr(config, section)
            if getattr(settings, name) not in (None, type(settings).model_fields[name].default):
                yield f"{key} has no effect: {why}"


def as_yaml(config: Config, *, secrets: bool) -> str:
    """The config with every default in it; without `secrets` for people to see."""
    settings = config.model_dump()
    if not secrets:
        settings = redact_setting("", settings)
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def validate(kind: type[Kind], data: Any, source: str) -> Kind:
    """`data` as a config of that kind, or a UsageError that says which key is wrong and how."""
    try:
        return kind.model_validate(data)
    except ValidationError as problem:
        # A misspelled key may be the reason for the other errors.
        errors = sorted(problem.errors(), key=lambda error: error["type"] != "extra_forbidden")
        first = errors[0]
        # pydantic reports each branch of a union.
        same = [dict(error) for error in errors if _key(error) == _key(first)]
        raise UsageError(f"{source}: {_in_words(kind, same)}") from None


Kind = TypeVar("Kind", bound=BaseModel)

PRESETS: dict[str, dict[str, Any]] = {
    "fastest": {"train.batch_size": "auto", "data.workers": "auto", "train.precision": "bf16"},
    "small-memory": {
        "train.batch_size": 64, "train.accumulate": 4, "data.workers": 2, "train.precision": "bf16",
        "augment.factory": "flatout.augment:Minimal",
    },
    "debug": {
        "train.batch_size": 8, "data.workers": 0, "train.precision": "off", "train.device": "cpu",
        "train.compile": False, "train.deterministic": True,
    },
}  # fmt: skip


_AUGMENT_PRESETS = ("flatout.augment:Minimal", "flatout.augment:Standard", "flatout.augment:Strong")


# ------------------------------------------------------------ reading


class _YamlLoader(yaml_loader()):  # type: ignore[misc]
    """YAML as people write it: 1e-3 is a number."""


_YamlLoader.yaml_implicit_resolvers = copy.deepcopy(yaml.SafeLoader.yaml_implicit_resolvers)
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read(path: Path) -> dict[str, Any]:
    return _mapping(load_yaml(text_of(path), str(path), _YamlLoader), str(path))


def _mapping(data: Any, source: str) -> dict[str, Any]:
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{source}: expected a mapping of settings, such as  train: {{epochs: 3}}")
    return data


def _apply_preset(whole: dict[str, Any], name: str, notes: list[str]) -> None:
    augment = whole.get("augment")
    if isinstance(augment, dict):
        augment = augment.get("factory")
    replaceable = augment in _AUGMENT_PRESETS
    for key, value in PRESETS[name].items():
        if key.startswith("augment.") and not replaceable:
            notes.append(f"preset {name}: {key}={value} has no effect, the file's augment is none of flatout's presets")
        else:
            _set(whole, key, value)


def _set(whole: dict[str, Any], key: str, value: Any) -> None:
    """Put a value where a dotted key points."""
    *sections, name = key.split(".")
    for section in sections:
        inner = whole.get(section)
        if isinstance(inner, str) and ":" in inner:
            inner = {"factory": inner}
        if not isinstance(inner, dict):
            inner = {}
        whole[section] = whole = dict(inner)
    whole[name] = value


def amp_is_precision(layer: dict[str, Any], source: str) -> dict[str, Any]:
    """The settings, with `train.amp` under its other name."""
    train = layer.get("train")
    if not isinstance(train, dict) or "amp" not in train:
        return layer
    if "precision" in train:
        raise UsageError(f"{source}: train.amp and train.precision are the same setting: give one")
    renamed = {**train, "precision": train["amp"]}
    del renamed["amp"]
    return {**layer, "train": renamed}


# ------------------------------------------------------------ messages


_BRANCH = re.compile(r"(constrained-|function-|literal\[|lax-|list\[).*|int|str|bool|float|none")
_WORDS = (
    (r"^(Input|Value|String|List|Dictionary) should (be )?", ""),
    (r"a valid integer", "a whole number"),
    (r"a valid dictionary or instance of FactoryConfig", "an import path, or factory and args"),
    (r"a valid dictionary( or instance of \w+)?", "a group of settings"),
    (r"a valid (boolean|list|string|number)", r"a \1"),
    (r"a boolean", "true or false"),
    (r"^greater than or equal to", "at least"),
    (r"^less than or equal to", "at most"),
)


def _key(error: Any) -> str:
    """The key it is about; pydantic also names the branch of a union that failed, which is no key."""
    key = ".".join(str(part) for part in error["loc"] if not _BRANCH.fullmatch(str(part)))
    if len(key) > MAX_KEY_LETTERS:
        return f"{key[:MAX_KEY_LETTERS]}…"
    return key


def _in_words(kind: type[BaseModel], errors: list[dict[str, Any]]) -> str:
    """What is wrong with one key, from all that pydantic has to say about it."""
    key, first = _key(errors[0]), errors[0]
    if first["type"] == "extra_forbidden":
        return f"there is no setting {key}{_nearest_key(kind, key)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    if not key:
        return str(first["ctx"]["error"])
    expected = " or ".join(dict.fromkeys(_expected(error) for error in errors))
    return f"{key} must be {expected} (got {short(redact_setting(key, first.get('input')))})"


def _expected(error: dict[str, Any]) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text = str(error["msg"])
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


def _nearest_key(kind: type[BaseModel], key: str) -> str:
    """The nearest key beside it, or else one of that name in another section."""
    known_keys = list(_keys(kind))
    section, _, name = key.rpartition(".")
    beside = [known for known in known_keys if known.rpartition(".")[0] == section]
    elsewhere = [known for known in known_keys if known.rpartition(".")[2] == name]
    if hint := nearest(key, beside):
        return hint
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return nearest(key, known_keys)


def _keys(kind: type[BaseModel], before: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield before + name
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        for section in inner:
            if issubclass(section, BaseModel):
                yield from _keys(section, f"{before}{name}.")


# ------------------------------------------------------------ parts, by their import path


def build(part: FactoryConfig, where: str, *first: Any, **more: Any) -> Any:
    """Call a part's factory with `first`, its own arguments, and those of `more` that it does not give itself."""
    return _call(import_path(part.factory, f"{where}.factory"), where, first, {**more, **part.args})


def import_path(path: str, where: str) -> Any:
    """The object that an import path names."""
    module_name, _, names = path.partition(":")
    try:
        thing = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{module_name}.".startswith(f"{problem.name}."):
            raise _users_error(f"{where}: {module_name} cannot be imported", problem) from problem
        raise UsageError(f"{where}: there is no module {problem.name!r} (from {path!r})") from None
    except (Exception, SystemExit) as problem:
        raise _users_error(f"{where}: {module_name} cannot be imported", problem) from problem
    for name in names.split("."):
        if not hasattr(thing, name):
            raise UsageError(f"{where}: {module_name} has no {name!r}{nearest(name, dir(thing))}")
        thing = getattr(thing, name)
    return thing


def _call(factory: Callable[..., Any], where: str, first: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
    arguments = {name: _build_nested(value, f"{where}.args.{name}") for name, value in given.items()}
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        signature = None  # some built-in functions have none
    if not callable(factory):
        raise UsageError(f"{where}.factory: {factory!r} cannot be called")
    name = getattr(factory, "__qualname__", factory)
    if signature is not None:
        try:
            signature.bind(*first, **arguments)
        except TypeError as problem:
            unknown = [name for name in arguments if name not in signature.parameters]
            hint = nearest((unknown or [""])[0], signature.parameters)
            raise UsageError(f"{where}.args: {name} {problem}{hint}") from None
    try:
        return factory(*first, **arguments)
    except UsageError:
        raise
    except (Exception, SystemExit) as problem:
        raise _users_error(f"{where}: {name} failed", problem) from problem


def _users_error(what: str, problem: BaseException) -> UsageError:
    """An error of the person's own code: they get its traceback too, from that code on."""
    frame = problem.__traceback__
    while frame is not None and (frame.tb_frame.f_code.co_filename in (__file__, importlib.__file__) or _frozen(frame)):
        frame = frame.tb_next
    problem.with_traceback(frame)
    return UsageError(f"{what}: {type(problem).__name__}: {problem}")


def _frozen(frame: Any) -> bool:
    return bool(frame.tb_frame.f_code.co_filename.startswith("<frozen importlib"))


def _build_nested(value: Any, where: str) -> Any:
    """An argument, with every `{factory: …}` inside it built."""
    if isinstance(value, dict):
        if "factory" in value and set(value) <= {"factory", "args"}:
            try:
                part = FactoryConfig.model_validate(value)
            except ValidationError as problem:
                wrong = problem.errors()[0]
                key = ".".join(map(str, (where, *wrong["loc"])))
                words = wrong["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
                raise UsageError(f"{key} must be {words} (got {short(wrong['input'])})") from None
            return build(part, where)
        return {key: _build_nested(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_build_nested(inner, f"{where}[{place}]") for place, inner in enumerate(value)]
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean …?", if something like it is known; else ""."""
    public = [name for name in known if not name.startswith("_")]
    return "".join(f"; did you mean {close}?" for close in difflib.get_close_matches(word, public, n=1, cutoff=0.6))
