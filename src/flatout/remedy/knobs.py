"""Where a script reads a value that a change is about: its own option, a line of its YAML, a name in its config.

A knob is believed in when its name fits and, where the value in force was seen, its value too. The value read last
comes first: scripts read a file, then let the command line have the last word. Whether turning a knob does anything
is then seen in the trial.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_EVERY = r"_?(every|interval|freq|frequency|period|each)(_?n)?(_?(epochs?|steps?|iters?))?"

# What people call it. The name is that of the change.
NAMES = {
    "batch_size": r"(train_?|micro_?|per_device_?|per_gpu_?|local_?)*batch(_?size)?(_per_(gpu|device))?|bs",
    "num_workers": r"(num_?|n_?)?(data_?(loader)?_?|loader_?|train_?)?(num_?)?workers|workers_per_gpu|nw",
    "prefetch_factor": r"(dataloader_?)?prefetch(_?factor)?",
    "persistent_workers": r"(dataloader_?)?persistent(_?workers)?",
    "pin_memory": r"(dataloader_?)?pin(_?mem(ory)?)?|pinned(_?memory)?",
    "learning_rate": r"(base_?|max_?|init_?|peak_?)?(lr|learning_?rate)(_?init)?",
    "eval_interval": rf"(eval|evaluate|evaluation|val|valid|validate|validation|test){_EVERY}|check_val_every_n_epoch",
    "checkpoint_interval": rf"(save|checkpoint|ckpt){_EVERY}",
    "precision": r"(use_?)?(amp|bf16|mixed_?precision|autocast)(_?dtype)?",
    "channels_last": r"(use_?)?channels_?last",
    "compile": r"(use_?)?(torch_?)?compile(_?model)?",
    "threads": r"(decode|decoder|reader|read|io|video|cv|opencv|transform|aug\w*)_?(num_?)?threads|threads_per_worker",
    "augment_on": r"(aug\w*|jitter|transforms?|preprocess\w*)_?(on|device|where|backend)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One place where a value is read: `text` is how a Change names it."""

    text: str
    key: str
    value: Any


def knobs(settings: list[dict[str, Any]], name: str, fits: Callable[[Any], bool] = lambda value: True) -> list[Knob]:
    """The places for a change, the likeliest first."""
    pattern = re.compile(NAMES[name], re.I)
    found = [
        knob
        for source in settings
        for knob in _knobs_of(source)
        if pattern.fullmatch(knob.key.rpartition(".")[2].replace("-", "_")) and fits(knob.value)
    ]
    return list({knob.text: knob for knob in reversed(found)}.values())


def _knobs_of(source: dict[str, Any]) -> Iterator[Knob]:
    values, file = source.get("values"), source.get("file")
    if source.get("source") == "argparse":
        for key, option in (source.get("options") or {}).items():
            if isinstance(values, dict) and key in values:
                yield Knob(text=str(option), key=str(key), value=values[key])
    elif file or source.get("source") in ("yaml", "json"):  # text that was read without a file has its kind for a name
        for key, value in _leaves(values):
            yield Knob(text=f"{file or source['source']}:{key}", key=key, value=value)


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
