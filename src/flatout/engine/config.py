"""A training as one YAML file: read, completed by a preset and by key=value, and checked to the last key.

    file ─► preset ─► key=value ─► Config        a mistake is one line: the key, what is wrong, the nearest right name

`TrainerConfig` is what the trainer itself goes by. `Config` adds what it trains: model, data, optimizer
and so on, each made by a factory that is named by its import path (`package.module:name`). There is no
registry; an argument that is itself `{factory: …, args: …}` is built first.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from flatout.model.errors import UsageError
from flatout.model.inputs import load_yaml, short, text_of, yaml_loader
from flatout.redact import redact_setting


class Section(BaseModel):
    """A group of settings. A key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


Count = Annotated[int, Field(ge=1, le=2**53)]


def _read_often(value: Any) -> Any:
    if value is None or value is False or value == "never":
        return None
    often = re.fullmatch(r"(\d{1,15}) (epoch|step)s?|(\d{1,15}(\.\d+)?) minutes?", str(value))
    if often is None or float(often[1] or often[3]) == 0:
        raise ValueError('such as "5 epochs", "1000 steps", "10 minutes" or never')
    return value


Often = Annotated[str | None, BeforeValidator(_read_often)]


class FactoryConfig(Section):
    """A factory and its arguments; `package.module:name` alone stands for one without arguments."""

    factory: str
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"factory": value}
        if not isinstance(value, dict | FactoryConfig):
            raise ValueError("an import path, or factory and args")
        return value

    @field_validator("factory")
    @classmethod
    def _is_path(cls, value: str) -> str:
        module, _, names = value.partition(":")
        if not all(name.isidentifier() for name in (*module.split("."), *names.split("."))):
            raise ValueError("an import path such as package.module:name")
        return value


PRECISIONS = ("auto", "off", "tf32", "bf16", "fp16")


def _read_precision(value: Any) -> Any:
    """The name of a precision; YAML reads `off` as False."""
    name = value
    if isinstance(value, bool):
        name = "bf16" if value else "off"
    if name not in PRECISIONS:
        raise ValueError(f"one of {', '.join(PRECISIONS)}{nearest(str(value), PRECISIONS)}")
    return name


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
    precision: Annotated[str, BeforeValidator(_read_precision)] = "auto"
    compile: bool | Literal["auto", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "auto"
    channels_last: bool | Literal["auto"] = "auto"
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

    every: Often = "1 epoch"
    batch_size: Count | None = None  # None: train.batch_size


class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    every: Often = "1 epoch"
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


class Config(TrainerConfig):
    """A whole training: its parts and its settings."""

    model: FactoryConfig
    data: DataConfig
    optimizer: FactoryConfig
    criterion: FactoryConfig | None = None  # None: the model returns the loss
    scheduler: FactoryConfig | None = None
    metrics: dict[str, FactoryConfig] = Field(default_factory=dict)
    augment: FactoryConfig | None = None


PRESETS: dict[str, dict[str, Any]] = {
    "fastest": {"train.batch_size": "auto", "data.workers": "auto", "train.precision": "bf16"},
    "small-memory": {"train.batch_size": 64, "train.accumulate": 4, "data.workers": 2, "train.precision": "bf16"},
    "debug": {
        "train.batch_size": 8, "data.workers": 0, "train.precision": "off", "train.device": "cpu",
        "train.compile": False, "train.deterministic": True,
    },
}  # fmt: skip


def load(path: Path, overrides: Sequence[str] = (), preset: str | None = None) -> Config:
    """The config in a file, with a preset and the overrides."""
    settings = load_yaml(text_of(path), str(path), _YamlLoader)
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise UsageError(f"{path}: expected a mapping of settings, such as  train: {{epochs: 3}}")
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"there is no preset {preset!r}: {', '.join(PRESETS)}{nearest(preset, PRESETS)}")
    values = dict(PRESETS[preset]) if preset is not None else {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError(f"{text!r} is not key=value, such as train.batch_size=256")
        values[key] = load_yaml(value, text, _YamlLoader)
    for key, value in values.items():
        _set(settings, key, value)
    return validate(Config, settings, str(path))


class _YamlLoader(yaml_loader()):  # type: ignore[misc]
    """YAML as people write it: 1e-3 is a number."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _set(settings: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        inner = settings.get(section)
        if isinstance(inner, str) and ":" in inner:
            inner = {"factory": inner}
        # A copy: aliases in the file may share it with another section.
        settings[section] = settings = dict(inner) if isinstance(inner, dict) else {}
    settings[name] = value


def without_effect(config: Config) -> Iterator[str]:
    """A line for each setting that is not at its default, but does nothing in this training."""
    idle = (
        (config.data.val is None, "there is no data.val", "evaluate.every evaluate.batch_size"),
        (config.train.batch_size != "auto", "train.batch_size is not auto", "train.memory_share"),
        (config.train.lr_rule == "none", "train.lr_rule is none", "train.lr_batch"),
        (config.scheduler is None, "there is no scheduler", "train.scheduler_per"),
        (config.checkpoint.every is None, "checkpoint.every is never", "checkpoint.keep checkpoint.best"),
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


Kind = TypeVar("Kind", bound=BaseModel)


def validate(kind: type[Kind], data: Any, source: str) -> Kind:
    """`data` as a config of that kind, or a UsageError that says which key is wrong and how."""
    try:
        return kind.model_validate(data)
    except ValidationError as problem:
        # A misspelled key may be the reason for the other errors.
        errors = sorted(problem.errors(), key=lambda error: error["type"] != "extra_forbidden")
        key, kind_of_error = _key(errors[0], data), errors[0]["type"]
        if kind_of_error == "extra_forbidden":
            raise UsageError(f"{source}: there is no setting {key}{nearest(key, _keys(kind))}") from None
        if kind_of_error == "missing":
            raise UsageError(f"{source}: {key} is missing") from None
        # pydantic reports each branch of a union.
        of_key = (str(error["msg"]) for error in errors if _key(error, data) == key)
        wordy = r"^(Input should be|Value error,) | or instance of \w+$"
        expected = " or ".join(re.sub(wordy, "", text) for text in of_key)
        if not key:
            raise UsageError(f"{source}: {expected}") from None
        given = redact_setting(key, errors[0]["input"])
        raise UsageError(f"{source}: {key} must be {expected} (got {short(given)})") from None


def _key(error: Any, data: Any) -> str:
    """The key it is about: pydantic's path also names the branch of a union that failed, which is no key."""
    key = []
    for part in error["loc"]:
        if not isinstance(data, Mapping):
            break
        key.append(str(part))
        data = data.get(part)
    return ".".join(key)


def _keys(kind: type[BaseModel], before: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield before + name
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _keys(inner, f"{before}{name}.")


# ------------------------------------------------------------ parts, by their import path


def build(part: FactoryConfig, where: str, *first: Any, **more: Any) -> Any:
    """Call a part's factory with `first`, its own arguments, and those of `more` that it does not
    give itself."""
    factory = import_path(part.factory, f"{where}.factory")
    given = {**more, **part.args}
    arguments = {name: _build_nested(value, f"{where}.args.{name}") for name, value in given.items()}
    if not callable(factory):
        raise UsageError(f"{where}.factory: {factory!r} cannot be called")
    name = part.factory.rpartition(":")[2]
    try:
        inspect.signature(factory).bind(*first, **arguments)
    except ValueError:
        pass  # some built-in functions have no signature
    except TypeError as problem:
        known = inspect.signature(factory).parameters
        hints = [nearest(argument, known) for argument in arguments if argument not in known]
        raise UsageError(f"{where}.args: {name} {problem}{''.join(hints[:1])}") from None
    try:
        return factory(*first, **arguments)
    except UsageError:
        raise
    except (Exception, SystemExit) as problem:  # the person's own code: they get its traceback too
        raise UsageError(f"{where}: {name} failed: {type(problem).__name__}: {problem}") from problem


def import_path(path: str, where: str) -> Any:
    """The object that an import path names."""
    module_name, _, names = path.partition(":")
    try:
        thing = importlib.import_module(module_name)
    except (Exception, SystemExit) as problem:
        if isinstance(problem, ModuleNotFoundError) and f"{module_name}.".startswith(f"{problem.name}."):
            raise UsageError(f"{where}: there is no module {problem.name!r} (from {path!r})") from None
        why = f"{type(problem).__name__}: {problem}"
        raise UsageError(f"{where}: {module_name} cannot be imported: {why}") from problem
    for name in names.split("."):
        if not hasattr(thing, name):
            raise UsageError(f"{where}: {module_name} has no {name!r}{nearest(name, dir(thing))}")
        thing = getattr(thing, name)
    return thing


def _build_nested(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        if "factory" in value and set(value) <= {"factory", "args"}:
            return build(validate(FactoryConfig, value, where), where)
        return {key: _build_nested(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [_build_nested(inner, f"{where}[{place}]") for place, inner in enumerate(value)]
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean …?", if something like it is known; else ""."""
    public = [name for name in known if not name.startswith("_")]
    return "".join(f"; did you mean {close}?" for close in difflib.get_close_matches(word, public, n=1, cutoff=0.6))
