"""Trace → Findings: one small function a cause. Each looks at one Case and says nothing unless the evidence is there.

What each would give by itself is worked out in `gains`. Opposites are told apart by evidence: too few workers are busy
while cores are free, too many wait for a core, a slow disk leaves both idle.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from flatout.diagnose import compute, data, machine
from flatout.diagnose.breakdown import REST
from flatout.diagnose.gains import BOUNDED, WORTH, data_saved, removed, rounded
from flatout.diagnose.ignored_settings import ignored_settings
from flatout.diagnose.rank_metrics import RankMetrics, cases
from flatout.model.causes import BY_CODE
from flatout.model.changes import SETTING
from flatout.model.finding import Finding
from flatout.trace import Trace

Rule = Callable[[RankMetrics], Finding | None]

_SATURATED = 0.90
_ELSEWHERE = 0.20  # of the time between the phases: a framework's own bookkeeping takes less


def diagnose(trace: Trace) -> tuple[Finding, ...]:
    """What is wrong, the most rewarding first. Empty when there is too little to judge by."""
    return diagnose_ranks(cases(trace))


def diagnose_ranks(every: tuple[RankMetrics, ...]) -> tuple[Finding, ...]:
    """The same, from the metrics of every rank of a trace."""
    if not every or not every[0].breakdown.enough:
        return ()
    case = every[0]
    found = [finding for rule in RULES if (finding := rule(case)) is not None]
    found += [finding for rule in RANK_RULES if (finding := rule(every)) is not None]
    assert all(map(_change_is_known, found)), [(finding.code, finding.change) for finding in found]
    beside = compute.uncovered(case, found)
    ignored = ignored_settings(case, [*found, *beside])
    explained = {finding.evidence.get("cause") for finding in ignored}
    found = sorted([*(f for f in found if f.code not in explained), *ignored], key=_rank)
    if found:
        found[1:] = sorted([*found[1:], *(f for f in beside if f.code not in explained)], key=_rank)
        return tuple(_within(_one_for_each_change(found), case.headroom))
    healthy = _saturated(case)
    return (healthy,) if healthy is not None else ()


def _change_is_known(finding: Finding) -> bool:
    """Whether the definition of the cause names the change."""
    change = finding.change
    return change is None or change.startswith(SETTING) or change in BY_CODE[finding.code].changes


def _rank(finding: Finding) -> tuple[float, str]:
    return -((finding.gain_low + finding.gain_high) / 2 - 1) * finding.confidence, finding.code


def _one_for_each_change(ranked: list[Finding]) -> list[Finding]:
    """The same, without those whose remedy a better one has asked for already."""
    kept: list[Finding] = []
    for finding in ranked:
        if finding.change is None or all(finding.change != better.change for better in kept):
            kept.append(finding)
    return kept


def _within(ranked: list[Finding], headroom: float) -> list[Finding]:
    """The same, with gains that together promise no more than exists: each takes its part of what is left.

    Remedies for one wait are ways to the same end: only the best of them counts.
    """
    taken: dict[str, float] = {}
    shared = []
    for finding in ranked:
        if finding.derived in BOUNDED:
            wait = finding.code if finding.code == "data.worker-start" else finding.code.partition(".")[0]
            left = headroom / math.prod(taken[other] for other in taken if other != wait)
            high = min(finding.gain_high, max(1.0, left))
            taken[wait] = max(taken.get(wait, 1.0), high)
            finding = dataclasses.replace(finding, gain_high=high, gain_low=min(finding.gain_low, high))
        shared.append(finding)
    return shared


def _pause(phase: str, code: str, change: str | None, advice: str) -> Rule:
    def rule(case: RankMetrics) -> Finding | None:
        share = case.share(phase)
        if share < WORTH:
            return None
        times = sum(any(span.name == phase for span in step.spans) for step in case.steps)
        once = times == 1 and len(case.steps) == case.breakdown.steps  # how often it comes, one does not tell
        return Finding(
            code=code,
            title=f"training stands still for {phase} {share:.0%} of the time" + (", all at once" if once else ""),
            share=share,
            **removed(share / 2, share),  # half as often, or hardly ever
            confidence=0.3 if once else 0.9,
            evidence={"share": rounded(share), "steps_recorded_with_it": times},
            change=change,
            advice=advice,
        )

    return rule


def _saturated(case: RankMetrics) -> Finding | None:
    """That all is well, where it is seen to be: on a card by the X-ray alone; without one, where neither waits for data
    nor the script's own code between the phases (a simulator, batches made by hand) take the time."""
    busy = case.busy_share
    share = busy if busy is not None else 0.0 if case.on_gpu else 1 - data_saved(case)
    if busy is None and case.share(REST) > _ELSEWHERE:
        return None
    if share < _SATURATED:
        return None
    what = f"the card has work {busy:.0%} of the time" if busy is not None else "the step is spent computing"
    return Finding(
        code="compute.saturated",
        title=f"healthy: {what}",
        share=share,
        derived="measured ceiling" if case.has_ceiling else "model of the step",
        confidence=0.9,
        evidence={"busy_share": rounded(busy), "samples_per_s": rounded(case.breakdown.samples_per_s)},
        advice="nothing to mend",
    )


RULES: tuple[Rule, ...] = (
    data.main_thread,
    data.workers_behind,
    data.work_for_the_card,
    data.threads_of_workers,
    data.idle_workers,
    data.worker_start,
    data.copies,
    data.waits_for_card,
    compute.launch_bound,
    compute.precision,
    compute.layout,
    compute.optimizer,
    compute.eager,
    _pause("evaluation", "pause.eval", "eval_interval", "evaluate less often"),
    _pause("checkpoint", "pause.checkpoint", "checkpoint_interval", "save less often, or in the background"),
    _pause("logging", "pause.logging", None, "log every n-th step"),
    _pause("gc", "pause.gc", "gc_freeze", "gc.freeze() after the set-up"),
    compute.underused,
    machine.pressure,
    machine.host_memory,
    machine.throttled,
    machine.shared_card,
    machine.shared_cores,
    machine.idle_gpus,
)
RANK_RULES: tuple[Callable[[tuple[RankMetrics, ...]], Finding | None], ...] = (machine.straggler, machine.collectives)
