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

from flatout.errors import UsageError
from flatout.top.figures import GpuFigures, HostFigures

__all__ = ["DEFAULT_TARGETS", "Target", "TargetResult", "check_targets", "parse_targets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One wish: a quantity, and the bounds it should stay in."""

    name: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def wish(self) -> str:
        """The bounds in words."""
        unit = _QUANTITIES[self.name].unit
        if self.at_least is None:
            return f"at most {self.at_most:g}{unit}"
        if self.at_most is None:
            return f"at least {self.at_least:g}{unit}"
        return f"{self.at_least:g} to {self.at_most:g}{unit}"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantity:
    what: str
    unit: str
    better: str  # "more", "less" or "between"
    of_gpu: Callable[[GpuFigures], float | None] | None = None
    of_host: Callable[[HostFigures], float | None] | None = None


def _mean(level: str) -> Callable[[GpuFigures], float | None]:
    return lambda gpu: stats.mean if (stats := gpu.levels.get(level)) is not None else None


def _peak(level: str) -> Callable[[GpuFigures], float | None]:
    return lambda gpu: stats.high if (stats := gpu.levels.get(level)) is not None else None


_QUANTITIES = {
    "sm": _Quantity(what="SM active, mean", unit="%", better="more", of_gpu=lambda gpu: gpu.work_pct),
    "util": _Quantity(what="GPU-Util, mean", unit="%", better="more", of_gpu=_mean("gpu_util_pct")),
    "fluctuation": _Quantity(what="fluctuation", unit=" points", better="less", of_gpu=lambda g: g.fluctuation_pct),
    "memory": _Quantity(what="GPU memory, peak", unit="%", better="between", of_gpu=_peak("memory_pct")),
    "power": _Quantity(what="power share, mean", unit="%", better="more", of_gpu=_mean("power_share_pct")),
    "temperature": _Quantity(what="temperature, peak", unit=" °C", better="less", of_gpu=_peak("temperature_c")),
    "cpu": _Quantity(
        what="CPU, mean",
        unit="%",
        better="less",
        of_host=lambda host: host.cpu_pct.mean if host.cpu_pct is not None else None,
    ),
}

DEFAULT_TARGETS = (
    Target(name="sm", at_least=80),
    Target(name="util", at_least=85),
    Target(name="fluctuation", at_most=10),
    Target(name="memory", at_least=70, at_most=90),
    Target(name="power", at_least=80),
    Target(name="temperature", at_most=85),
    Target(name="cpu", at_most=90),
)


def parse_targets(text: str) -> tuple[Target, ...]:
    """`sm=85,memory=70-90` as targets."""
    targets: list[Target] = []
    for part in text.split(","):
        name, equals, bounds = (piece.strip() for piece in part.partition("="))
        if name not in _QUANTITIES:
            raise UsageError(f"--target: there is no {name!r}{_nearest(name)}; known are {', '.join(_QUANTITIES)}")
        if not equals or not bounds:
            raise UsageError(f"--target: {name} needs a number, such as {name}={_example(name)}")
        if any(target.name == name for target in targets):
            raise UsageError(f"--target: {name} is given twice")
        targets.append(_target(name, bounds))
    return tuple(targets)


def check_targets(
    targets: tuple[Target, ...], gpus: tuple[GpuFigures, ...], host: HostFigures
) -> tuple[TargetResult, ...]:
    """Each target against each card, or against the host."""
    results: list[TargetResult] = []
    for target in targets:
        quantity = _QUANTITIES[target.name]
        if quantity.of_host is not None:
            results.append(_result(target, None, quantity.what, quantity.of_host(host)))
        elif quantity.of_gpu is not None:
            for gpu in gpus:
                stands_in = " (stand-in: power share)" if target.name == "sm" and not gpu.has_gpm else ""
                results.append(_result(target, gpu.index, quantity.what + stands_in, quantity.of_gpu(gpu)))
    return tuple(results)


def _result(target: Target, gpu: int | None, what: str, value: float | None) -> TargetResult:
    margin: float | None = None
    if value is not None:
        above = value - target.at_least if target.at_least is not None else math.inf
        below = target.at_most - value if target.at_most is not None else math.inf
        margin = min(above, below)
    return TargetResult(
        name=target.name,
        gpu=gpu,
        what=what,
        wish=target.wish,
        unit=_QUANTITIES[target.name].unit,
        value=value,
        met=margin >= 0 if margin is not None else None,
        margin=margin,
    )


def _target(name: str, bounds: str) -> Target:
    better = _QUANTITIES[name].better
    low, dash, high = (piece.strip() for piece in bounds.partition("-"))
    if dash:
        target = Target(name=name, at_least=_number(name, low), at_most=_number(name, high))
        if _number(name, low) > _number(name, high):
            raise UsageError(f"--target: {name}={bounds} is the wrong way round: write {name}={high}-{low}")
        return target
    if better == "between":
        raise UsageError(f"--target: {name} needs a range, such as {name}={_example(name)} (got {bounds!r})")
    number = _number(name, bounds)
    return Target(name=name, at_least=number) if better == "more" else Target(name=name, at_most=number)


def _number(name: str, text: str) -> float:
    most = 200.0 if name == "temperature" else 100.0
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 <= number <= most:
        raise UsageError(f"--target: {name} needs a number from 0 to {most:g}, such as {_example(name)} (got {text!r})")
    return number


def _example(name: str) -> str:
    target = next(target for target in DEFAULT_TARGETS if target.name == name)
    bounds = [f"{bound:g}" for bound in (target.at_least, target.at_most) if bound is not None]
    return "-".join(bounds)


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), _QUANTITIES, n=1, cutoff=0.0)
    return f" (did you mean {close[0]}?)" if name and close else ""
