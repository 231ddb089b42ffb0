"""How fast each plan ran, every time it did; what that says of their gains, and of the noise from run to run."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.fix.runs import Run
from flatout.fix.speed import Speed, pooled
from flatout.model.plan import Change, Figure
from flatout.model.stats import USUAL_RUN_NOISE, RunNoise

ALIKE = 1.5  # times as fast: likely to be held up by the same things


class Speeds:
    """Plan by plan, over as many steps as are usual or, apart from those, over a `long` run with its pauses."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, bool], list[Speed]] = {}

    def note(self, changes: Sequence[Change], run: Run, *, long: bool = False) -> None:
        """One run more, if it came to anything."""
        if run.speed is not None and not run.hung:
            self._runs.setdefault(_key(changes, long), []).append(run.speed)

    def of(self, changes: Sequence[Change], *, long: bool = False) -> list[Speed]:
        """All runs of a plan, the first one first."""
        return self._runs.get(_key(changes, long), [])

    def figure_without(self, changes: Sequence[Change], plan: Sequence[Change]) -> Figure | None:
        """How fast the last run of a plan was that has no change of these names in it."""
        names = {change.name for change in changes}
        runs = self.of([change for change in plan if change.name not in names])
        return runs[-1].figure if runs else None

    def forget(self) -> None:
        """Nothing of it counts."""
        self._runs.clear()

    @property
    def noise(self) -> RunNoise:
        return RunNoise.seen_in(self._runs.values())

    def noise_near(self, *plans: Sequence[Speed], usual: float = USUAL_RUN_NOISE) -> RunNoise:
        """From plans about as fast as these: what is far slower waits for something else, with noise of its own."""
        known = [(pooled(runs).value, runs) for runs in self._runs.values()]
        speeds = [pooled(runs).value for runs in plans]
        near = (runs for value, runs in known if any(1 / ALIKE < value / speed < ALIKE for speed in speeds))
        return RunNoise.seen_in(near, usual)


def _key(changes: Sequence[Change], long: bool) -> tuple[str, bool]:
    return "; ".join(sorted(f"{change.name}={change.value!r}@{change.knob}" for change in changes)), long
