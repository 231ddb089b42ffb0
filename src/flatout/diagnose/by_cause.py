"""What each cause takes of the time, and so what fixing it may promise.

    useful       the GPU computes what training needs (without a GPU: the phases that compute)
    idle         the GPU waits, for one cause; or in one phase, where no cause was found
    wasteful     the GPU computes what a finding would spare
    measuring    flatout's own work
    remainder    waits too short to be told apart

Training's time lies in pools: the GPU's idle time by phase, and its useful time. Findings take from
them one after the other, the surest first, so the charges add up to one. A finding promises at most
what taking away its charge gives; all of them together at most wall time ÷ useful time.

Without a GPU everything shares the processor: workers that have less to do leave their cores to
training, which is measured and charged with the wait for them. What runs beside the step also takes
caches and memory from it, which no clock tells apart: the upper ends leave room for it (`BESIDE`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.diagnose.breakdown import COMPUTING, REST, UNSPLIT, Part
from flatout.diagnose.gains import factor
from flatout.diagnose.rank_metrics import LAUNCHING, MAX_SAVED, RankMetrics
from flatout.model.causes import Finding

Kind = Literal["useful", "idle", "wasteful", "measuring", "remainder"]

USEFUL, LAUNCH = "useful work", "launch"  # pools beside the phases
# Without a GPU, a cause that takes all of the time but a moment makes that moment take so much
# longer, a small one accordingly less. Of the faults of benchmarks/truth.py it was 0 to 0.6 of its
# share of the time.
BESIDE = 0.4
FROM_THE_REST = ", with what it takes from the rest of the step"
_NO_WAIT = (*COMPUTING, "copy", "held", "flatout")  # phases that keep no GPU waiting
_MOST_OF_USEFUL = 0.95  # that one finding may call wasteful
_LEAST = 0.005  # of the time: less is part of the remainder
# The pools a finding takes from, by how its code begins; those of no entry take from the useful time.
# What may take useful time is wasteful, but for drift.
_POOLS = {
    "data.worker-start": ("loader start", "data"),
    "data.": ("data",),
    "sync.item": ("sync", LAUNCH, REST),  # the host is held up: the GPU stands idle later, when launches come late
    "copy.": ("copy", LAUNCH, REST, USEFUL),
    "host.python": (REST,),
    "launch.bound": (LAUNCH,),
    "pause.eval": ("evaluation",),
    "pause.checkpoint": ("checkpoint",),
    "pause.logging": ("logging",),
    "pause.gc": ("gc",),
}
_TAKES_ITS_SHARE = ("drift.", "data.worker-start", "sync.", "copy.")  # in this order; the others take all there is
_FREES_CORES = ("data.cpu-bound", "data.collate-bound", "data.slow-samples")  # to cure them, workers work less


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """A share of training's time with one cause."""

    kind: Kind
    name: str  # the cause in words, or the phase
    share: float
    code: str | None = None
    where: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseAccount:
    """All of training's time: what is useful first, then the causes, the largest first, then the
    remainder."""

    charges: tuple[Charge, ...]
    beside: float = 0.0  # how much longer the rest takes beside a cause, as a part of the share of the cause

    def most(self, share: float) -> float:
        """What removing a share of the time gives at most."""
        return factor(share) / (1 - self.beside * min(MAX_SAVED, share))

    def share_of(self, finding: Finding) -> float:
        """The share of time that a finding is charged with: 0 where others explain all of it."""
        return sum(charge.share for charge in self.charges if charge.name == finding.title)

    def bounded(self, finding: Finding) -> Finding:
        """The same finding with the share it is charged with, and no promise beyond that.

        One about a wait for data that a surer finding is charged with may promise as much, in place
        of that one.
        """
        share = self.share_of(finding)
        if not share and finding.code.startswith("data."):
            waits = sum(charge.share for charge in self.charges if (charge.code or charge.name).startswith("data"))
            share = min(finding.share, waits)
        low, high = finding.gain_low, min(finding.gain_high, factor(share))
        if 1 < high < finding.gain_high:  # as sure of a part of it as before
            low = min(low, 1 + (low - 1) * (high - 1) / (finding.gain_high - 1))
        derived = finding.derived
        if high > 1 and high == factor(share) and self.beside:
            high = self.most(share)
            derived += FROM_THE_REST
        return dataclasses.replace(finding, share=share, gain_high=high, gain_low=min(low, high), derived=derived)


class _Pools(dict[str, float]):
    """The shares of the time that no cause is charged with yet."""

    def take(self, most: float, *names: str) -> float:
        """Take at most so much from these pools, one after the other. Returns how much there was."""
        taken = 0.0
        for name in names:
            part = min(self.get(name, 0.0), most)
            self[name] = self.get(name, 0.0) - part
            most -= part
            taken += part
        return taken


def by_cause(metrics: RankMetrics, findings: Sequence[Finding]) -> CauseAccount:
    """The account of one rank."""
    measuring, pools = metrics.share("flatout"), _Pools(_idle_by_phase(metrics))
    useful = pools[USEFUL] = max(0.0, 1.0 - sum(pools.values()) - measuring)
    charges = [Charge(kind="measuring", name="flatout's own work", share=measuring)]
    for finding in sorted(findings, key=_turn):
        share = _taken_by(finding, metrics, pools, useful)
        if share < _LEAST:
            pools[USEFUL] += share
            continue
        kind: Kind = "wasteful" if _is_wasteful(finding) else "idle"
        charges.append(Charge(kind=kind, name=finding.title, share=share, code=finding.code, where=finding.where))
    left = pools.pop(USEFUL)
    charges += [Charge(kind="idle", name=phase, share=share) for phase, share in pools.items() if share >= _LEAST]
    charges = sorted((charge for charge in charges if charge.share), key=lambda charge: -charge.share)
    short = sum(share for share in pools.values() if share < _LEAST)
    if short:
        charges.append(Charge(kind="remainder", name="short waits", share=short))
    beside = 0.0 if metrics.on_gpu else BESIDE
    return CauseAccount(charges=(Charge(kind="useful", name=USEFUL, share=left), *charges), beside=beside)


def _idle_by_phase(metrics: RankMetrics) -> dict[str, float]:
    """The share of the time in which the GPU stands idle, by phase; without a GPU, what is no computing."""
    idle: dict[str, float] = {}
    for part in metrics.breakdown.training:
        if part.name not in _NO_WAIT and part.share > 0:
            idle[part.name] = idle.get(part.name, 0.0) + _idle_share(metrics, part)
    own_code = sum(metrics.own_code_inside.values())
    if metrics.on_gpu:
        launch = metrics.waits_for_launches(*(phase for phase in LAUNCHING if phase not in idle))
        if metrics.busy_share is not None:  # between its events the GPU may work longer than it seems
            room = 1.0 - metrics.busy_share
            scale = min(1.0, room / (sum(idle.values()) or 1.0))
            idle = {phase: share * scale for phase, share in idle.items()}
            room -= sum(idle.values()) + metrics.share("flatout")
            launch = max(0.0, min(launch, room))  # an X-ray slows the host down
        own_code = min(own_code, launch)
        idle[LAUNCH] = launch - own_code
    if own_code:
        idle[REST] = idle.get(REST, 0.0) + own_code
    room, total = 1.0 - metrics.share("flatout"), sum(idle.values())
    if total > room:  # clocks that contradict each other
        return {phase: share * room / total for phase, share in idle.items()}
    return idle


def _idle_share(metrics: RankMetrics, part: Part) -> float:
    if not metrics.on_gpu or part.name in ("evaluation", "checkpoint"):
        return part.share  # whatever the GPU does in them, it does not train
    if part.gpu_idle_ms is not None and part.ms:
        return part.share * min(1.0, part.gpu_idle_ms / part.ms)
    saved = metrics.saved_without(part.name)
    return part.share if saved is None else min(part.share, saved)


def _turn(finding: Finding) -> tuple[int, float]:
    """What is known to the millisecond takes first, then waits by how sure they are, then what the
    GPU's own work would be spared. The load of others explains what is left."""
    cause = _cause(finding)
    if _lacks_cores(finding):
        return 3, 0.0
    for place, begin in enumerate(_TAKES_ITS_SHARE):
        if cause.startswith(begin):
            return 0, place
    if cause.startswith(tuple(_POOLS)):
        return 1, -finding.confidence
    return 2, -finding.gain_high


def _lacks_cores(finding: Finding) -> bool:
    return finding.code == "hardware.shared" and "without_a_core" in finding.evidence


def _is_wasteful(finding: Finding) -> bool:
    return USEFUL in _pools_of(_cause(finding)) and finding.code != "drift.slower" and not _lacks_cores(finding)


def _pools_of(cause: str) -> tuple[str, ...]:
    return next((names for begin, names in _POOLS.items() if cause.startswith(begin)), (USEFUL,))


def _cause(finding: Finding) -> str:
    """What a finding is about: a setting without effect stands for the cause that it would have cured."""
    return str(finding.evidence.get("cause", finding.code)) if finding.code == "config.ignored" else finding.code


def _taken_by(finding: Finding, metrics: RankMetrics, pools: _Pools, useful: float) -> float:
    """The share of the time that a finding takes from the pools."""
    if _lacks_cores(finding):
        return _taken_by_others(finding, metrics, pools)
    cause, share, most = _cause(finding), 0.0, math.inf
    names = _pools_of(cause)
    if cause == "drift.slower":
        names = (finding.evidence["grows_most"].replace(UNSPLIT, REST), USEFUL)
    elif names[0] in metrics.beside_pauses:
        share += pools.take(sum(metrics.beside_pauses[names[0]].values()), REST)
    elif cause in _FREES_CORES:
        share += pools.take(metrics.machine.held_up_by_workers, USEFUL)
    if cause == "data.worker-start":
        most = min(finding.share, metrics.start_share)
    elif cause.startswith(_TAKES_ITS_SHARE):
        most = finding.share
    elif names == (USEFUL,):
        spared = 1 - 1 / finding.gain_high  # of all the time: each takes that part of what is left
        most = pools[USEFUL] * min(_MOST_OF_USEFUL, spared / useful) if useful else 0.0
    return share + pools.take(most, *names)


def _taken_by_others(finding: Finding, metrics: RankMetrics, pools: _Pools) -> float:
    """What others that have the cores take from every pool."""
    share = 0.0
    for pool in tuple(pools):
        most = pools[pool] * finding.share
        if pool == "data" and metrics.workers:
            most = math.inf  # workers that have no core are late
        elif pool == USEFUL and metrics.on_gpu and metrics.steps_with_events:
            most = 0.0  # the GPU was seen to be at work
        share += pools.take(most, pool)
    return share
