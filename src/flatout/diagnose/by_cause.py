"""What each cause takes of the time, and so what fixing it may promise.

    useful       the GPU computes what training needs (without a GPU: the phases that compute)
    idle         the GPU waits, for one cause; or in one phase, where no cause was found
    wasteful     the GPU computes what a finding would spare
    measuring    flatout's own work
    remainder    waits too short to be told apart

Training's time lies in pools: the GPU's idle time by phase, and its useful time. Findings take from them one after the
other, the surest first, so no time is charged twice and the charges add up to one. A finding promises at most what
taking away its charge gives; all of them together then promise at most wall time ÷ useful time.

The gains are keyword arguments of a Finding: a range of factors of speed. Its upper end is what the evidence leaves
room for, its lower end what the evidence makes sure of, 1.0 for nothing.

Without a GPU everything shares the processor, and removing one thing frees it for the rest. Workers that have less to
do leave their cores to training: that time is measured, and charged with the wait for them. What runs beside the step
also takes caches and memory from it, which no clock tells apart: the upper ends leave room for it (`BESIDE`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flatout.diagnose.breakdown import REST, UNSPLIT, Part
from flatout.diagnose.rank_metrics import LAUNCHING, MAX_SAVED, RankMetrics
from flatout.model.causes import Finding

Kind = Literal["useful", "idle", "wasteful", "measuring", "remainder"]

MIN_SHARE = 0.03  # of the time: a cause that takes less is not reported
USEFUL, LAUNCH = "useful work", "launch"  # pools beside the phases
FROM_KERNELS = "model of the kernels"
FROM_CORES = ", with the cores that loading takes from training"
# Without a GPU, a cause that takes all of the time but a moment makes that moment take so much longer, a small one
# accordingly less. Of the faults of benchmarks/truth.py it was 0 to 0.6 of its share of the time.
BESIDE = 0.4
FROM_BESIDE = ", with what it takes from the rest of the step"
LOADER_LIMITS = ", as far as the loader can follow"
FROM_CEILING, FROM_STEP, FROM_TIME = "measured ceiling", "model of the step", "share of the time"
_SUPPLY_ERROR = 1.05  # workers were timed while they shared the cores
_OWN = "flatout"
_COMPUTES = ("forward", "loss", "backward", "optimizer", "copy", "held")
_MOST_OF_USEFUL = 0.95  # that one finding may call wasteful
_LEAST = 0.005  # of the time: less is part of the remainder
# The pools a finding takes from, by how its code begins; those of no entry take from the useful time.
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
_WASTEFUL = ("compute.", "memory.", "copy.", "dist.", "hardware.", "config.")


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
    """All of training's time: what is useful first, then the causes, the largest first, then the remainder."""

    charges: tuple[Charge, ...]
    beside: float = 0.0  # how much longer the rest takes beside a cause, as a part of the share of the cause

    def most(self, share: float) -> float:
        """What removing a share of the time gives at most."""
        return factor(share) / (1 - self.beside * min(MAX_SAVED, share))

    @property
    def useful(self) -> float:
        """The share of useful work."""
        return sum(charge.share for charge in self.charges if charge.kind == "useful")

    @property
    def remainder(self) -> float:
        """The share that no cause explains."""
        return sum(charge.share for charge in self.charges if charge.kind == "remainder")

    def share_of(self, finding: Finding) -> float:
        """The share of time that a finding is charged with: 0 where others explain all of it."""
        return sum(charge.share for charge in self.charges if charge.name == finding.title)

    def bounded(self, finding: Finding) -> Finding:
        """The same finding with the share it is charged with, and no promise beyond that.

        One about a wait for data that a surer finding is charged with may promise as much, in place of that one.
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
            high, derived = self.most(share), derived + FROM_BESIDE
        return dataclasses.replace(finding, share=share, gain_high=high, gain_low=min(low, high), derived=derived)


def by_cause(metrics: RankMetrics, findings: Sequence[Finding]) -> CauseAccount:
    """The account of one rank."""
    pools = _idle_by_phase(metrics)
    measuring = pools.pop(_OWN, 0.0)
    useful = pools[USEFUL] = max(0.0, 1.0 - sum(pools.values()) - measuring)
    charges = [Charge(kind="measuring", name="flatout's own work", share=measuring)]
    for finding in sorted(findings, key=_turn):
        share = 0.0
        for pool, most in _wants(finding, metrics, pools, useful):
            taken = min(pools.get(pool, 0.0), most)
            pools[pool] = pools.get(pool, 0.0) - taken
            share += taken
        if share >= _LEAST:
            kind: Kind = "idle"
            if finding.code.startswith(_WASTEFUL) and not _lacks_cores(finding):
                kind = "wasteful"
            charges.append(Charge(kind=kind, name=finding.title, share=share, code=finding.code, where=finding.where))
        else:
            pools[USEFUL] += share
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
        if part.name not in _COMPUTES:
            idle[part.name] = idle.get(part.name, 0.0) + _idle_share(metrics, part)
    own_code = sum(metrics.own_code_inside.values())
    if metrics.on_gpu:
        launch = metrics.waits_for_launches(*(phase for phase in LAUNCHING if phase not in idle))
        if metrics.busy_share is not None:  # between its events the GPU may work longer than it seems
            room, own = 1.0 - metrics.busy_share, idle.pop(_OWN, 0.0)
            scale = min(1.0, room / (sum(idle.values()) or 1.0))
            idle = {phase: share * scale for phase, share in idle.items()}
            launch = max(0.0, min(launch, room - sum(idle.values()) - own))  # an X-ray slows the host down
            idle[_OWN] = own
        own_code = min(own_code, launch)
        idle[LAUNCH] = launch - own_code
    if own_code:
        idle[REST] = idle.get(REST, 0.0) + own_code
    return idle


def _idle_share(metrics: RankMetrics, part: Part) -> float:
    if not metrics.on_gpu or part.name == _OWN:
        return part.share
    if part.name in ("evaluation", "checkpoint"):
        return part.share  # whatever the GPU does in it, it does not train
    if part.gpu_idle_ms is not None and part.ms:
        return part.share * min(1.0, part.gpu_idle_ms / part.ms)
    saved = metrics.saved_without(part.name)
    return part.share if saved is None else min(part.share, saved)


def _turn(finding: Finding) -> tuple[int, float]:
    """What is known to the millisecond takes first, then waits by how sure they are, then what the GPU's own work would
    be spared. The load of others explains what is left."""
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


def _cause(finding: Finding) -> str:
    """What a finding is about: a setting without effect stands for the cause that it would have cured."""
    return str(finding.evidence.get("cause", finding.code)) if finding.code == "config.ignored" else finding.code


def _wants(
    finding: Finding, metrics: RankMetrics, pools: dict[str, float], useful: float
) -> Iterable[tuple[str, float]]:
    """How much a finding takes from which pools, at most."""
    cause = _cause(finding)
    if _lacks_cores(finding):
        for pool in pools:
            waits = pools[pool] * finding.share
            if pool == "data" and metrics.workers:
                waits = math.inf  # workers that have no core are late
            elif pool == USEFUL and metrics.on_gpu and metrics.steps_with_events:
                waits = 0.0  # the GPU was seen to be at work
            yield pool, waits
        return
    names = next((names for begin, names in _POOLS.items() if cause.startswith(begin)), (USEFUL,))
    if names[0] in metrics.beside_pauses:
        yield REST, sum(metrics.beside_pauses[names[0]].values())
    left = math.inf
    if cause == "drift.slower":
        names = (finding.evidence["grows_most"].replace(UNSPLIT, REST), USEFUL)
    if cause in _FREES_CORES:
        yield USEFUL, min(pools[USEFUL], cores_freed(metrics))
    if cause == "data.worker-start":
        left = min(finding.share, metrics.start_share)
    elif cause.startswith(_TAKES_ITS_SHARE):
        left = finding.share
    elif names == (USEFUL,):
        spared = 1 - 1 / finding.gain_high  # of all the time: each takes that part of what is left
        left = pools[USEFUL] * min(_MOST_OF_USEFUL, spared / useful) if useful else 0.0
    for name in names:
        taken = min(left, pools.get(name, 0.0))
        yield name, taken
        left -= taken


# What fixing one cause alone would give


def gain_if_fed(metrics: RankMetrics, saved: float, least: float = 1.0, most: float = math.inf) -> dict[str, Any]:
    """Waiting for batches takes a share `saved` less; the loader delivers `least` to `most` times what is used now."""
    if not metrics.on_gpu:  # training needs the cores that load, so nothing is sure
        least, most = 1.0, min(most, 1 / max(0.01, metrics.own_cpu_share or 0.0))
    ceiling = metrics.headroom
    if metrics.ceiling is None:
        ceiling = min(factor(saved), ceiling)
    return _range(min(factor(saved), least), min(most, ceiling), _source(metrics))


def gain_if_samples_spared(metrics: RankMetrics, saved: float, least: float = 1.0) -> dict[str, Any]:
    """Waiting for batches takes a share `saved` less because samples cost less: cores are then free for training."""
    if metrics.on_gpu:
        return gain_if_fed(metrics, saved, least)
    freed = cores_freed(metrics)
    return _range(1.0, factor(saved + freed), FROM_TIME + (FROM_CORES if freed else ""))


def cores_freed(metrics: RankMetrics) -> float:
    """The share of the time in which training has no core because workers have them; on a GPU it is not counted."""
    return 0.0 if metrics.on_gpu else metrics.held_up_by_workers


def gain_if_host_spared(metrics: RankMetrics, low: float, high: float) -> dict[str, Any]:
    """The host needs these shares of the step less: no further than the measured ceiling."""
    return _range(factor(low), min(factor(high), metrics.headroom), _source(metrics))


def gain_if_gpu_spared(metrics: RankMetrics, low: float, high: float) -> dict[str, Any]:
    """The GPU needs these shares of the time less: no further than the loader delivers as it is."""
    most, derived = factor(high), FROM_KERNELS
    if most > metrics.supply:
        derived += LOADER_LIMITS
    return _range(min(factor(low), metrics.supply), min(most, _SUPPLY_ERROR * metrics.supply), derived)


def gain_if_removed(low: float, high: float) -> dict[str, Any]:
    """These shares of the time are no longer spent."""
    return _range(factor(low), factor(high), FROM_TIME)


def factor(saved: float) -> float:
    """How many times as fast training is when a share of its time is saved."""
    return 1 / (1 - min(MAX_SAVED, max(0.0, saved)))


def data_saved(metrics: RankMetrics) -> float:
    """The share of a step that would be saved if batches were there when asked for."""
    return metrics.saved_without("data") or 0.0


def rounded(value: float | None) -> float | None:
    """As many digits as evidence needs."""
    return round(value, 4) if value is not None else None


def _range(low: float, high: float, derived: str) -> dict[str, Any]:
    high = max(1.0, high)
    return {"gain_low": max(1.0, min(low, high)), "gain_high": high, "derived": derived}


def _source(metrics: RankMetrics) -> str:
    return FROM_CEILING if metrics.ceiling is not None else FROM_STEP
