"""LoaderWork: what the workers of the loader did, all together; with `num_workers=0` the training process.

Each worker reports now and then how long it loaded samples, joined them, and waited. Shares are 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flatout.trace import Sketch, WorkerReport

_MOST_SLOW_SAMPLES = 5


@dataclass(frozen=True)
class LoaderWork:
    """The last report of each worker, and what they come to."""

    reports: tuple[WorkerReport, ...]

    def total(self, figure: str) -> float:
        """A figure of their reports, added up."""
        return sum(getattr(report, figure) or 0.0 for report in self.reports)

    @cached_property
    def sample_ms(self) -> Sketch:
        """How long a sample takes to load."""
        return Sketch.merged(report.sample_ms for report in self.reports)

    @cached_property
    def transforms_ms(self) -> dict[str, float]:
        """How long each transform takes of a sample."""
        samples = self.total("samples")
        spent_ms: dict[str, float] = {}
        for report in self.reports:
            for name, seconds in report.transforms_s.items():
                spent_ms[name] = spent_ms.get(name, 0.0) + seconds * 1e3 / samples
        return spent_ms

    @property
    def slowest(self) -> list[tuple[float, int]]:
        """Milliseconds and index of the slowest samples."""
        samples = ((ms, int(index)) for report in self.reports for ms, index in report.slowest)
        return sorted(samples, reverse=True)[:_MOST_SLOW_SAMPLES]

    @cached_property
    def worked_s(self) -> float:
        """How long they loaded samples and joined them."""
        return self.total("sample_wall_s") + self.total("collate_s")

    @property
    def busy(self) -> float | None:
        """The share of their time in which they did not wait for something to do."""
        return share_of(self.worked_s, self.worked_s + self.total("waiting_s"))

    @property
    def on_core(self) -> float | None:
        """The share of loading time that was spent on a core."""
        return share_of(self.total("sample_cpu_s"), self.total("sample_wall_s"))

    @property
    def delay(self) -> float | None:
        """How long they were ready to run but had no core, as a share of the time that they worked."""
        if all(report.run_delay_s is None for report in self.reports):
            return None
        return share_of(self.total("run_delay_s"), self.worked_s)

    @property
    def collating(self) -> float | None:
        """The share of their work that is joining samples."""
        return share_of(self.total("collate_s"), self.worked_s)


def share_of(part: float, whole: float) -> float | None:
    """A part as a share, at most all of it; None of nothing."""
    return min(1.0, part / whole) if whole else None
