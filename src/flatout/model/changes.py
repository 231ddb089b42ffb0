"""The changes flatout knows how to make, and the values each takes. A plan that names another is refused before a run.

What each does, how it gets in and what it cannot do is in docs/CHANGES.md; `inside/changes` makes them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flatout.model.errors import PlanError
from flatout.model.inputs import short
from flatout.model.plan import Change, Plan

__all__ = ["KNOWN", "SETTING", "auto", "check"]

SETTING = "setting:"  # any value the script reads, by its knob
STRICT = "elastic-strict"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a change takes: whether a value will do, in words, and whether it can only be made by a knob."""

    fits: Callable[[Any], bool]
    takes: str
    by_knob_only: bool = False


def _one_of(*names: str) -> Kind:
    return Kind(lambda value: isinstance(value, str) and value in names, " or ".join(names))


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_SWITCH = Kind(lambda value: value is True or value is False, "true or false")
_ON = Kind(lambda value: value is True, "true")
_COUNT = Kind(lambda value: _is_count(value, 1), "a whole number from 1")
_INTERVAL = Kind(lambda value: _is_count(value, 1), "a whole number from 1", by_knob_only=True)

KNOWN: dict[str, Kind] = {
    "loader": _one_of("elastic", STRICT),
    "num_workers": Kind(lambda value: _is_count(value, 0), "a whole number from 0"),
    "prefetch_factor": _COUNT,
    "pin_memory": _SWITCH,
    "persistent_workers": _SWITCH,
    "worker_threads": _COUNT,
    "device_prefetch": _ON,
    "gpu_transforms": _ON,
    "precision": _one_of("tf32", "bf16", "fp16"),
    "fused_optimizer": _ON,
    "channels_last": _ON,
    "compile": _one_of("default", "reduce-overhead", "max-autotune"),
    "cudnn_benchmark": _ON,
    "gc_freeze": _ON,
    "batch_size": _INTERVAL,
    "eval_interval": _INTERVAL,
    "checkpoint_interval": _INTERVAL,
    "learning_rate": Kind(
        lambda value: isinstance(value, int | float) and value is not True and value > 0,
        "a number above 0",
        by_knob_only=True,
    ),
}


def check(plan: Plan, where: str) -> None:
    """Refuse a plan that could not be carried out as it says; `where` is what to call it."""
    for number, change in enumerate(plan.changes, 1):
        place = f"{where}: change {number} ({change.name})"
        if change.name.startswith(SETTING):
            if not change.knob:
                raise PlanError(f"{place}: needs a knob, such as --amp or train.yaml:amp")
            continue
        kind = KNOWN.get(change.name)
        if kind is None:
            near = difflib.get_close_matches(change.name, KNOWN, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KNOWN)} and {SETTING}KEY"
            raise PlanError(f"{place}: flatout knows no such change ({hint})")
        if change.knob:
            continue  # the script says what it takes there
        if kind.by_knob_only:
            raise PlanError(
                f"{place}: needs a knob, such as --{change.name.replace('_', '-')}: nothing else can set it"
            )
        if not kind.fits(change.value):
            raise PlanError(f"{place}: value must be {kind.takes} (got {short(change.value)})")


def auto(*, strict: bool) -> Plan:
    """What `flatout run --auto` does without any trial: loader-side changes that are safe wherever they apply."""
    return Plan(
        changes=(
            Change(name="loader", value=STRICT, safety="identical")
            if strict
            else Change(name="loader", value="elastic", safety="reseeded"),
            Change(name="pin_memory", value=True, safety="identical"),
            Change(name="device_prefetch", value=True, safety="identical"),
        )
    )
