"""A training as one YAML file: read, completed by a preset and by key=value, and checked to the last key.

    file ─► preset ─► key=value ─► Config        a mistake is one line: the key, what is wrong, the nearest right name

`Settings` is what the trainer itself goes by; `Config` adds the parts it is made of, by import path.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from flatout.engine.checkpoint import CheckpointConfig
from flatout.engine.data import DataConfig
from flatout.engine.evaluation import EvaluateConfig
from flatout.engine.progress import LogConfig
from flatout.engine.section import Part, Section, nearest
from flatout.engine.step import TrainConfig
from flatout.model.errors import UsageError
from flatout.model.inputs import load_yaml, short, text_of, yaml_loader
from flatout.redact import redact_setting

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


class Settings(Section):
    """How to train, whatever is trained."""

    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    out: str | None = None  # the run's folder; None: runs/<name of the config>

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        train = self.train
        if train.lr_rule != "none" and train.lr_batch is None:
            raise ValueError("train.lr_rule needs train.lr_batch, the batch that the learning rate was chosen for")
        if train.batch_size != "auto" and train.accumulate > train.batch_size:
            raise ValueError(f"train.accumulate must be at most train.batch_size (got {train.accumulate})")
        return self

    def unknown_best(self, metrics: Iterable[str]) -> str:
        """What is wrong with a best checkpoint by a metric that nobody measures; "" where nothing is."""
        known = ["loss", *metrics]
        best = self.checkpoint.best
        if "best" not in self.checkpoint.model_fields_set or best is None or best.split(".")[0] in known:
            return ""
        return f"checkpoint.best must be one of {', '.join(known)} (got {short(best)}){nearest(best, known)}"


class Config(Settings):
    """A whole training: its parts and its settings."""

    model: Part
    data: DataConfig
    optimizer: Part
    criterion: Part | None = None  # None: the model returns the loss
    scheduler: Part | None = None
    metrics: dict[str, Part] = Field(default_factory=dict)
    augment: Part | None = None

    @model_validator(mode="after")
    def _best_is_measured(self) -> Config:
        if wrong := self.unknown_best(self.metrics):
            raise ValueError(wrong)
        return self


def load(
    path: Path, overrides: Sequence[str] = (), preset: str | None = None, notes: list[str] | None = None
) -> Config:
    """The config in a file, after its preset and the overrides; what has no effect here goes to `notes`."""
    whole = amp_is_precision(_read(path), str(path))
    if preset is not None:
        if preset not in PRESETS:
            known = ", ".join(PRESETS)
            raise UsageError(f"there is no preset {preset!r}: {known}{nearest(preset, PRESETS)}")
        _apply_preset(whole, preset, notes if notes is not None else [])
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError(f"{text!r} is not key=value, such as train.batch_size=256")
        _set(whole, "train.precision" if key == "train.amp" else key, load_yaml(value, text, _Loader))
    if len({text.partition("=")[0] for text in overrides} & {"train.amp", "train.precision"}) == 2:
        raise UsageError("train.amp and train.precision are the same setting: give one")
    return checked(Config, amp_is_precision(whole, str(path)), str(path))


def without_effect(config: Config) -> Iterator[str]:
    """What was set to something else than its default and does nothing here, a line each."""
    never = config.checkpoint.every is None
    idle = {
        "there is no data.val": [("evaluate", "every"), ("evaluate", "batch_size")] * (config.data.val is None),
        "train.batch_size is not auto": [("train", "memory_share")] * (config.train.batch_size != "auto"),
        "train.lr_rule is none": [("train", "lr_batch")] * (config.train.lr_rule == "none"),
        "evaluate.every is never": [("evaluate", "batch_size")] * (config.evaluate.every is None),
        "there is no scheduler": [("train", "scheduler_per")] * (config.scheduler is None),
        "checkpoint.every is never": [("checkpoint", name) for name in ("keep", "best", "best_is") if never],
    }
    for why, keys in idle.items():
        for section, name in keys:
            settings = getattr(config, section)
            if getattr(settings, name) not in (None, type(settings).model_fields[name].default):
                yield f"{section}.{name} has no effect: {why}"


def effective(config: Config) -> str:
    """The config as YAML, with every default in it."""
    return _as_yaml(config.model_dump())


def shown(config: Config) -> str:
    """The same for a person's eyes: without secrets."""
    return _as_yaml(redact_setting("", config.model_dump()))


def _as_yaml(settings: dict[str, Any]) -> str:
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def checked(kind: type[Kind], data: Any, source: str) -> Kind:
    """`data` as a model of that kind, or a UsageError that says which key is wrong and how."""
    try:
        return kind.model_validate(data)
    except ValidationError as problem:
        errors = sorted(problem.errors(), key=lambda error: error["type"] != "extra_forbidden")  # a misspelling first
        first = errors[0]
        same = [dict(error) for error in errors if _key(error) == _key(first)]  # the branches of a union
        raise UsageError(f"{source}: {_in_words(kind, same)}") from None


# -- the layers --------------------------------------------------------------------------------------------------------


class _Loader(yaml_loader()):  # type: ignore[misc]
    """YAML as people write it: 1e-3 is a number."""


_Loader.yaml_implicit_resolvers = copy.deepcopy(yaml.SafeLoader.yaml_implicit_resolvers)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read(path: Path) -> dict[str, Any]:
    return _mapping(load_yaml(text_of(path), str(path), _Loader), str(path))


def _mapping(data: Any, source: str) -> dict[str, Any]:
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"{source}: a mapping of settings is wanted, such as  train: {{epochs: 3}}")
    return data


def _apply_preset(whole: dict[str, Any], name: str, notes: list[str]) -> None:
    augment = whole.get("augment")
    replaceable = (augment.get("factory") if isinstance(augment, dict) else augment) in _AUGMENT_PRESETS
    for key, value in PRESETS[name].items():
        if key.startswith("augment.") and not replaceable:
            notes.append(f"preset {name}: {key}={value} has no effect, the file's augment is none of flatout's presets")
        else:
            _set(whole, key, value)


def _set(whole: dict[str, Any], key: str, value: Any) -> None:
    """Put a value where a dotted key points; what stood there is gone."""
    *sections, name = key.split(".")
    for section in sections:
        inner = whole.get(section)
        if isinstance(inner, str) and ":" in inner:
            inner = {"factory": inner}
        whole[section] = whole = dict(inner) if isinstance(inner, dict) else {}
    whole[name] = value


def amp_is_precision(layer: dict[str, Any], source: str) -> dict[str, Any]:
    """The settings, with `train.amp` under its other name."""
    train = layer.get("train")
    if not isinstance(train, dict) or "amp" not in train:
        return layer
    if "precision" in train:
        raise UsageError(f"{source}: train.amp and train.precision are the same setting: give one")
    renamed = {"precision" if key == "amp" else key: value for key, value in train.items()}
    return {**layer, "train": renamed}


# -- mistakes in words -------------------------------------------------------------------------------------------------


_LONGEST_KEY = 100
_BRANCH = re.compile(r"(constrained-|function-|literal\[|lax-|list\[).*|int|str|bool|float|none")
_WORDS = (
    (r"^(Input|Value|String|List|Dictionary) should (be )?", ""),
    (r"a valid integer", "a whole number"),
    (r"a valid dictionary or instance of Part", "an import path, or factory and args"),
    (r"a valid dictionary( or instance of \w+)?", "a group of settings"),
    (r"a valid (boolean|list|string|number)", r"a \1"),
    (r"a boolean", "true or false"),
    (r"^greater than or equal to", "at least"),
    (r"^less than or equal to", "at most"),
)


def _key(error: Any) -> str:
    """The key it is about; pydantic also names the branch of a union that failed, which is no key."""
    key = ".".join(str(part) for part in error["loc"] if not _BRANCH.fullmatch(str(part)))
    return key if len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}…"


def _in_words(kind: type[BaseModel], errors: list[dict[str, Any]]) -> str:
    """What is wrong with one key, from all that pydantic has to say about it."""
    key, first = _key(errors[0]), errors[0]
    if first["type"] == "extra_forbidden":
        return f"there is no setting {key}{_nearest_key(kind, key)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    if not key:
        return str(first["ctx"]["error"])
    wanted = " or ".join(dict.fromkeys(_wanted(error) for error in errors))
    return f"{key} must be {wanted} (got {short(redact_setting(key, first.get('input')))})"


def _wanted(error: dict[str, Any]) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    text = str(error["msg"])
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return text


def _nearest_key(kind: type[BaseModel], key: str) -> str:
    """The nearest key beside it, or else one of that name in another section."""
    every = list(_keys(kind))
    section, _, name = key.rpartition(".")
    beside = [known for known in every if known.rpartition(".")[0] == section]
    elsewhere = [known for known in every if known.rpartition(".")[2] == name]
    return nearest(key, beside) or (f"; did you mean {elsewhere[0]}?" if elsewhere else nearest(key, every))


def _keys(kind: type[BaseModel], before: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield before + name
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        for section in inner:
            if issubclass(section, BaseModel):
                yield from _keys(section, f"{before}{name}.")
