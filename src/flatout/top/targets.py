"""Targets people set for a training, and whether they were met.

sm=85              at least 85        power, sm, util: more is better
temperature=85     at most 85         cpu, fluctuation, temperature: less is better
memory=70-90       between the two    memory always; any of the others too, when written as a range
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flatout.model.errors import UsageError
from flatout.top.figures import GpuFigures, HostFigures


@dataclass(frozen=True, slots=True)
class _Quantity:
    """What can be wished for, of each card or of the host; `usual` is what one wishes for when nothing is said."""

    what: str
    unit: str
    usual: str
    read: Callable[[Any], float | None]
    more_is_better: bool = False
    highest: float = 100.0
    of_host: bool = False


_QUANTITIES = {
    "sm": _Quantity("SM active, mean", "%", "80", lambda gpu: gpu.work_pct, more_is_better=True),
    "util": _Quantity("GPU-Util, mean", "%", "85", lambda gpu: gpu.mean("gpu_util_pct"), more_is_better=True),
    "fluctuation": _Quantity("fluctuation", " points", "10", lambda gpu: gpu.fluctuation_pct),
    "memory": _Quantity("GPU memory, peak", "%", "70-90", lambda gpu: gpu.peak("memory_pct")),
    "power": _Quantity("power share, mean", "%", "80", lambda gpu: gpu.mean("power_share_pct"), more_is_better=True),
    "temperature": _Quantity("temperature, peak", " °C", "85", lambda gpu: gpu.peak("temperature_c"), highest=200.0),
    "cpu": _Quantity("CPU, mean", "%", "90", lambda host: host.mean("cpu_pct"), of_host=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One wish: a quantity, and the bounds it should stay in."""

    name: str
    at_least: float = -math.inf
    at_most: float = math.inf

    @property
    def wish(self) -> str:
        """The bounds in words."""
        unit = _QUANTITIES[self.name].unit
        if self.at_least > -math.inf and self.at_most < math.inf:
            return f"{self.at_least:g} to {self.at_most:g}{unit}"
        return f"at least {self.at_least:g}{unit}" if self.at_least > -math.inf else f"at most {self.at_most:g}{unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetResult:
    """A target against what was measured: `margin` is how far inside its bounds it is (below 0: missed).

    `met` and `margin` are None where the quantity could not be measured.
    """

    name: str
    gpu: int | None
    what: str
    wish: str
    unit: str
    value: float | None
    met: bool | None
    margin: float | None


def parse_targets(text: str) -> tuple[Target, ...]:
    """`sm=85,memory=70-90` as targets."""
    targets: dict[str, Target] = {}
    for part in text.split(","):
        name, _, bounds = (piece.strip() for piece in part.partition("="))
        if name not in _QUANTITIES:
            near = difflib.get_close_matches(name.lower(), _QUANTITIES, n=1, cutoff=0.0) if name else ()
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(f"--target: there is no {name!r}{meant}; known are {', '.join(_QUANTITIES)}")
        if not bounds:
            raise UsageError(f"--target: {name} needs a number, such as {name}={_QUANTITIES[name].usual}")
        if name in targets:
            raise UsageError(f"--target: {name} is given twice")
        targets[name] = _target(name, bounds)
    return tuple(targets.values())


def check_targets(
    targets: tuple[Target, ...], gpus: tuple[GpuFigures, ...], host: HostFigures
) -> tuple[TargetResult, ...]:
    """Each target against each card, or against the host."""
    chosen = ((target, (host,) if _QUANTITIES[target.name].of_host else gpus) for target in targets)
    return tuple(_against(target, figures) for target, all_figures in chosen for figures in all_figures)


def _against(target: Target, figures: GpuFigures | HostFigures) -> TargetResult:
    known = _QUANTITIES[target.name]
    value = known.read(figures)
    margin = min(value - target.at_least, target.at_most - value) if value is not None else None
    card = figures if isinstance(figures, GpuFigures) else None
    stands_in = target.name == "sm" and card is not None and not card.has_gpm
    return TargetResult(
        name=target.name,
        gpu=card.index if card is not None else None,
        what=f"{known.what} (stand-in: power share)" if stands_in else known.what,
        wish=target.wish,
        unit=known.unit,
        value=value,
        met=margin >= 0 if margin is not None else None,
        margin=margin,
    )


def _target(name: str, bounds: str) -> Target:
    known = _QUANTITIES[name]
    low, dash, high = (piece.strip() for piece in bounds.partition("-"))
    if dash:
        target = Target(name=name, at_least=_number(name, low), at_most=_number(name, high))
        if float(low) > float(high):
            raise UsageError(f"--target: {name}={bounds} is the wrong way round: write {name}={high}-{low}")
        return target
    if "-" in known.usual:
        raise UsageError(f"--target: {name} needs a range, such as {name}={known.usual} (got {bounds!r})")
    number = _number(name, bounds)
    return Target(name=name, at_least=number) if known.more_is_better else Target(name=name, at_most=number)


def _number(name: str, text: str) -> float:
    known = _QUANTITIES[name]
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= known.highest:
        wanted = f"a number from 0 to {known.highest:g}, such as {known.usual}"
        raise UsageError(f"--target: {name} needs {wanted} (got {text!r})")
    return number


DEFAULT_TARGETS = parse_targets(",".join(f"{name}={known.usual}" for name, known in _QUANTITIES.items()))
