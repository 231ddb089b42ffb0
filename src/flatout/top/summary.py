"""Figures → what a person wants to know at the end: targets met or missed, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flatout.model.records import to_json
from flatout.top.figures import FigureBuilder, GpuFigures, HostFigures
from flatout.top.targets import DEFAULT_TARGETS, Target, TargetResult, check_targets
from flatout.top.verdict import Verdict, judge, judge_all


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummary:
    """One card: its figures and the verdict on it."""

    figures: GpuFigures
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSummary:
    """Everything `flatout top` says at the end."""

    hostname: str
    samples: int
    seconds: float
    verdict: Verdict
    gpus: tuple[GpuSummary, ...]
    host: HostFigures
    targets: tuple[TargetResult, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data; docs/TOP.md names every field. What was not measured is left out."""
        gpus = [_flat(card.figures) | {"verdict": to_json(card.verdict)} for card in self.gpus]
        return {"record": "top-summary", **to_json(self), "gpus": gpus, "host": _flat(self.host)}


def sum_up(
    seen: FigureBuilder,
    *,
    targets: tuple[Target, ...] = DEFAULT_TARGETS,
    hostname: str = "",
    notes: Iterable[str] = (),
) -> TopSummary:
    """What the samples seen so far come to."""
    gpus, host = seen.gpus(), seen.host()
    cards = tuple(GpuSummary(figures=gpu, verdict=judge(gpu, host, seen.samples)) for gpu in gpus)
    return TopSummary(
        hostname=hostname,
        samples=seen.samples,
        seconds=seen.seconds,
        verdict=judge_all({card.figures.index: card.verdict for card in cards}, host, seen.samples),
        gpus=cards,
        host=host,
        targets=check_targets(targets, gpus, host),
        notes=tuple(notes),
    )


def _flat(figures: GpuFigures | HostFigures) -> dict[str, Any]:
    data: dict[str, Any] = to_json(figures)
    levels: dict[str, Any] = data.pop("levels")
    return data | levels
