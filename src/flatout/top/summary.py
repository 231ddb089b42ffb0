"""Samples → what a person wants to know at the end: figures, targets met or missed, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flatout.top.figures import FigureBuilder, GpuFigures, HostFigures
from flatout.top.targets import DEFAULT_TARGETS, Target, TargetResult, check_targets
from flatout.top.verdict import Verdict, judge, judge_all
from flatout.trace import Sample
from flatout.trace.records import to_json

__all__ = ["GpuSummary", "SummaryBuilder", "TopSummary", "summarize"]


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
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready data; docs/TOP.md names every field. What was not measured is left out."""
        return {
            "record": "top-summary",
            "hostname": self.hostname,
            "samples": self.samples,
            "seconds": to_json(self.seconds),
            "verdict": to_json(self.verdict),
            "gpus": [_flat(card.figures) | {"verdict": to_json(card.verdict)} for card in self.gpus],
            "host": _flat(self.host),
            "targets": to_json(self.targets),
            "notes": list(self.notes),
        }


class SummaryBuilder:
    """Takes samples one by one; sums them up at any time."""

    def __init__(
        self,
        *,
        targets: tuple[Target, ...] = DEFAULT_TARGETS,
        hostname: str = "",
        cores_allowed: float | None = None,
    ) -> None:
        self._targets = targets
        self._hostname = hostname
        self._figures = FigureBuilder(cores_allowed=cores_allowed)

    def add(self, sample: Sample) -> None:
        """Count one sample in."""
        self._figures.add(sample)

    def summary(self, notes: Iterable[str] = ()) -> TopSummary:
        """What all samples so far come to."""
        built = self._figures
        gpus, host = built.gpus(), built.host()
        cards = tuple(GpuSummary(figures=gpu, verdict=judge(gpu, host, built.samples)) for gpu in gpus)
        return TopSummary(
            hostname=self._hostname,
            samples=built.samples,
            seconds=built.seconds,
            verdict=judge_all({card.figures.index: card.verdict for card in cards}, host, built.samples),
            gpus=cards,
            host=host,
            targets=check_targets(self._targets, gpus, host),
            notes=tuple(notes),
        )


def summarize(samples: Iterable[Sample], *, cores_allowed: float | None = None) -> TopSummary:
    """What these samples come to, against the usual targets."""
    builder = SummaryBuilder(cores_allowed=cores_allowed)
    for sample in samples:
        builder.add(sample)
    return builder.summary()


def _flat(figures: GpuFigures | HostFigures) -> dict[str, Any]:
    data: dict[str, Any] = to_json(figures)
    levels: dict[str, Any] = data.pop("levels")
    return data | levels
