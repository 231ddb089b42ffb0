"""Metrics and findings → CauseAccount: training's time by cause. Its charges add up to one.

    useful       the GPU computes what training needs (without a GPU: the phases that compute)
    idle         the GPU waits, for one cause; or for a phase in which no cause was found
    wasteful     the GPU computes what a finding would spare
    measuring    flatout's own work

A phase is charged to the finding that explains it (`CAUSE_OF_PHASE`). What a finding about the GPU's own work would
spare is taken out of the useful time. Waits too short for a finding are the remainder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.diagnose.breakdown import Part
from flatout.diagnose.rank_metrics import LAUNCHING, RankMetrics
from flatout.model.finding import Finding

Kind = Literal["useful", "idle", "wasteful", "measuring", "remainder"]

USEFUL = "useful work"
CAUSE_OF_PHASE = {
    "data": "data.",
    "loader start": "data.worker-start",
    "sync": "sync.item",
    "copy": "copy.",
    "evaluation": "pause.eval",
    "checkpoint": "pause.checkpoint",
    "logging": "pause.logging",
    "gc": "pause.gc",
    "rest": "host.python",
}
_OWN = "flatout"
_COMPUTES = ("forward", "loss", "backward", "optimizer", "copy", "held")
# What these findings would spare is computed, or waited for by kernels that run.
_IN_USEFUL_TIME = ("compute.", "memory.", "dist.", "hardware.", "copy.", "drift.")
_LEAST = 0.005  # of the time: less is part of the remainder


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

    @property
    def useful(self) -> float:
        """The share of useful work."""
        return sum(charge.share for charge in self.charges if charge.kind == "useful")

    @property
    def remainder(self) -> float:
        """The share that no cause explains."""
        return sum(charge.share for charge in self.charges if charge.kind == "remainder")

    @property
    def waits_for_data(self) -> float:
        """The share of waits for data, whatever their cause."""
        return sum(charge.share for charge in self.charges if (charge.code or charge.name).startswith("data"))

    def charge_of(self, finding: Finding) -> Charge | None:
        """What a finding is charged with; None where it explains no time of its own."""
        return next((charge for charge in self.charges if charge.name == finding.title), None)


def by_cause(metrics: RankMetrics, findings: Sequence[Finding]) -> CauseAccount:
    """The account of one rank."""
    idle = {phase: share for phase, share in _idle_by_phase(metrics).items() if share > 0}
    charges = [
        *_grown(findings, idle),
        *_starting_workers(metrics, findings, idle),
        *_held_up(findings, idle),
    ]
    unexplained = 0.0
    for phase, share in idle.items():
        if phase == _OWN:
            charges.append(Charge(kind="measuring", name="flatout's own work", share=share))
            continue
        finding = _explains(phase, findings)
        if finding is not None:
            charges.append(_charged("idle", finding, share))
        elif share >= _LEAST:
            charges.append(Charge(kind="remainder", name=phase, share=share))
        else:
            unexplained += share
    useful = max(0.0, 1.0 - sum(charge.share for charge in charges) - unexplained)
    wasted, useful = _wasted(findings, charges, useful)
    charges = sorted([*_merged(charges), *wasted], key=lambda charge: (charge.kind == "remainder", -charge.share))
    if unexplained:
        charges.append(Charge(kind="remainder", name="short waits", share=unexplained))
    return CauseAccount(charges=(Charge(kind="useful", name=USEFUL, share=useful), *charges))


def _idle_by_phase(metrics: RankMetrics) -> dict[str, float]:
    """The share of the time in which the GPU stands idle, by phase; without a GPU, what is no computing."""
    idle: dict[str, float] = {}
    for part in metrics.breakdown.training:
        if part.name not in _COMPUTES:
            idle[part.name] = idle.get(part.name, 0.0) + _idle_share(metrics, part)
    if not metrics.on_gpu:
        return idle
    launch = metrics.waits_for_launches(*(phase for phase in LAUNCHING if phase not in idle))
    if metrics.busy_share is not None:
        room = 1.0 - metrics.busy_share
        waits = sum(share for phase, share in idle.items() if phase != _OWN)
        launch = min(launch, max(0.0, room - waits))  # an X-ray slows the host down
    return idle | {"launch": launch}


def _idle_share(metrics: RankMetrics, part: Part) -> float:
    if not metrics.on_gpu or part.name == _OWN:
        return part.share
    if part.name in ("evaluation", "checkpoint"):
        return part.share  # whatever the GPU does in it, it does not train
    if part.gpu_idle_ms is not None and part.ms:
        return part.share * min(1.0, part.gpu_idle_ms / part.ms)
    saved = metrics.saved_without(part.name)
    return part.share if saved is None else min(part.share, saved)


def _starting_workers(metrics: RankMetrics, findings: Sequence[Finding], idle: dict[str, float]) -> list[Charge]:
    """The wait for a first batch belongs to the start of the workers that make it; it is taken out of `idle`."""
    finding = _explains("loader start", findings)
    if finding is None:
        return []
    started = idle.pop("loader start", 0.0)
    beyond = min(idle.get("data", 0.0), max(0.0, metrics.start_share - started))
    idle["data"] = idle.get("data", 0.0) - beyond
    return [_charged("idle", finding, started + beyond)]


def _grown(findings: Sequence[Finding], idle: dict[str, float]) -> list[Charge]:
    """What a phase has grown by over the run is charged to that, before what the phase takes anyway."""
    charges = []
    for finding in findings:
        taken = min(idle.get(finding.evidence.get("grows_most", ""), 0.0), finding.share)
        if taken > 0:
            idle[finding.evidence["grows_most"]] -= taken
            charges.append(_charged("idle", finding, taken))
    return charges


def _held_up(findings: Sequence[Finding], idle: dict[str, float]) -> list[Charge]:
    """Waits for the GPU and copies hold the host up: the GPU stands idle later, when launches come late. What they
    explain of that is taken out of `idle`."""
    charges = []
    for phase in ("sync", "copy"):
        finding = _explains(phase, findings)
        if finding is None:
            continue
        share = 0.0
        for late in (phase, "launch", "rest"):
            taken = min(idle.get(late, 0.0), finding.share - share)
            if taken > 0:
                idle[late] -= taken
                share += taken
        if phase == "copy":
            charges.append(_charged("wasteful", finding, max(share, finding.share)))  # the GPU copies, and computes not
        elif share:
            charges.append(_charged("idle", finding, share))
    return charges


def _explains(phase: str, findings: Sequence[Finding]) -> Finding | None:
    """The finding that a phase is charged to, the surest of them: of its cause, or of a setting that would have
    cured it."""
    code = "launch.bound" if phase == "launch" else CAUSE_OF_PHASE.get(phase)
    if code is None:
        return None
    fitting = []
    for finding in findings:
        cause = finding.evidence.get("cause", "") if finding.code == "config.ignored" else finding.code
        if cause.startswith(code) and (phase != "data" or cause != "data.worker-start"):
            fitting.append(finding)
    if phase == "data" and not fitting:  # workers that have no core are late
        fitting = [finding for finding in findings if "without_a_core" in finding.evidence]
    return max(fitting, key=lambda finding: finding.confidence, default=None)


def _charged(kind: Kind, finding: Finding, share: float) -> Charge:
    return Charge(kind=kind, name=finding.title, share=share, code=finding.code, where=finding.where)


def _wasted(findings: Sequence[Finding], charged: Sequence[Charge], useful: float) -> tuple[list[Charge], float]:
    """What findings about the GPU's own work would spare, each out of what the others leave."""
    known = {charge.name for charge in charged}
    charges = []
    for finding in sorted(findings, key=lambda finding: -finding.gain_high):
        in_useful_time = finding.code.startswith(_IN_USEFUL_TIME) or finding.code == "config.ignored"
        if finding.title in known or not in_useful_time:
            continue
        middle = (finding.gain_low + finding.gain_high) / 2
        share = min(useful, useful * (1 - 1 / middle))
        if share >= _LEAST:
            known.add(finding.title)
            useful -= share
            charges.append(_charged("wasteful", finding, share))
    return charges, useful


def _merged(charges: Sequence[Charge]) -> list[Charge]:
    """Entries of one cause as one: it may explain several phases."""
    merged: dict[tuple[str | None, str], Charge] = {}
    for charge in charges:
        key = charge.code, charge.name
        before = merged.get(key)
        if before is not None:
            charge = Charge(
                kind=charge.kind,
                name=charge.name,
                share=before.share + charge.share,
                code=charge.code,
                where=charge.where or before.where,
            )
        merged[key] = charge
    return list(merged.values())
