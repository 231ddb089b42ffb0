"""Trace → Findings: the rules, what became of them together, and the verdict.

A rule is a small function that looks at the metrics of one rank (or of all) and says nothing unless the
evidence is there. What each finding would give alone is worked out in `gains`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from flatout.diagnose import (
    compute_rules,
    copy_rules,
    drift_rules,
    loading_rules,
    machine_rules,
    own_code_rules,
    rank_rules,
    stream_rules,
)
from flatout.diagnose.breakdown import REST
from flatout.diagnose.by_cause import CauseAccount, by_cause
from flatout.diagnose.gains import (
    FROM_CEILING,
    FROM_STEP,
    MIN_SHARE,
    data_saved,
    factor,
    gain_if_removed,
    rounded,
)
from flatout.diagnose.hot_lines import COLLATE, SAMPLES, in_workers
from flatout.diagnose.ignored_settings import ignored_settings
from flatout.diagnose.own_code_rules import as_evidence
from flatout.diagnose.rank_metrics import RankMetrics, metrics_of
from flatout.model.causes import BY_CODE
from flatout.model.changes import SETTING
from flatout.model.finding import Finding
from flatout.trace import Trace

Rule = Callable[[RankMetrics], Finding | None]

_ABOUT_SAMPLES = (
    "data.main-thread",
    "data.too-few-workers",
    "data.cpu-bound",
    "data.slow-samples",
    "data.disk-bound",
    "data.collate-bound",
)
_IN_WORDS = {SAMPLES: "a sample", COLLATE: "joining a batch"}
_SATURATED = 0.90  # of the time that the GPU has work
_MIN_VERDICT = 0.10  # of the time, where the rest of the run is healthy
_DANGERS = ("memory.host", "memory.pressure")  # they may end the run
_MOST_OUTSIDE_PHASES = 0.20  # of the time: a framework's own bookkeeping takes less


def diagnose(trace: Trace) -> tuple[Finding, ...]:
    """What is wrong, the most rewarding first. Empty when there is too little to judge by."""
    return diagnose_ranks(metrics_of(trace))


def diagnose_ranks(ranks: Sequence[RankMetrics]) -> tuple[Finding, ...]:
    """The same, from the metrics of every rank."""
    if not ranks or not ranks[0].breakdown.enough:
        return ()
    metrics = ranks[0]
    found = [finding for rule in RULES if (finding := rule(metrics)) is not None]
    found += [finding for rule in RANK_RULES if (finding := rule(ranks)) is not None]
    assert all(map(_change_is_known, found)), [(finding.code, finding.change) for finding in found]
    later = compute_rules.worth_it_later(metrics, found)
    ignored = ignored_settings(metrics, [*found, *later])
    explained = {finding.evidence.get("cause") for finding in ignored}
    found = [*(finding for finding in found if finding.code not in explained), *ignored]
    account = by_cause(metrics, found)
    charged = (_as_charged(finding, account, metrics) for finding in found)
    found = sorted((_with_lines(finding, metrics) for finding in charged), key=_rank(account))
    healthy = _saturated(metrics)
    is_healthy = healthy is not None and not any(map(_is_a_verdict, found))
    if found:
        found[1:] = sorted([*found[1:], *(f for f in later if f.code not in explained)], key=_rank(account))
    if healthy is not None and is_healthy:
        found = [healthy, *found]
    return tuple(_one_for_each_change(found))


def _change_is_known(finding: Finding) -> bool:
    """Whether the definition of the cause names the change."""
    change = finding.change
    return change is None or change.startswith(SETTING) or change in BY_CODE[finding.code].changes


def _is_a_verdict(finding: Finding) -> bool:
    """Whether a run that is healthy for the rest is not called so."""
    return finding.share >= _MIN_VERDICT or finding.code in (*_DANGERS, "config.ignored")


def _as_charged(finding: Finding, account: CauseAccount, metrics: RankMetrics) -> Finding:
    """The same with the share of the account. What an idle GPU costs is promised at most.

    Where batches were replayed from the GPU, the whole step was seen to be shorter: then that counts.
    """
    charge = account.charge_of(finding)
    share = finding.share
    if charge is not None:
        share = max(charge.share, finding.share)
    most = factor(share)
    if charge is None or charge.kind == "wasteful" or (metrics.on_gpu and finding.derived == FROM_CEILING):
        most = math.inf
    high = min(finding.gain_high, most)
    return dataclasses.replace(finding, share=share, gain_high=high, gain_low=min(finding.gain_low, high))


def _with_lines(finding: Finding, metrics: RankMetrics) -> Finding:
    """A finding about loading with the lines of samples, or of collate, that take the time."""
    if finding.where is not None or finding.code not in _ABOUT_SAMPLES:
        return finding
    phase = COLLATE if finding.code == "data.collate-bound" else SAMPLES
    functions = in_workers(metrics.rank, metrics.loader.dataset.rpartition(".")[2], (phase,))
    if not functions:
        return finding
    hottest = functions[0]
    share = f"{hottest.hottest} takes {hottest.share:.0%} of the time of {_IN_WORDS[phase]}"
    advice = f"{finding.advice}; {share}" if finding.advice else share
    evidence = finding.evidence | {"lines": as_evidence(functions)}
    return dataclasses.replace(finding, where=hottest.hottest.where, advice=advice, evidence=evidence)


def _rank(account: CauseAccount) -> Callable[[Finding], tuple[bool, float, bool, float, str]]:
    """What endangers the run first, then the largest share of the time."""

    def rank(finding: Finding) -> tuple[bool, float, bool, float, str]:
        charge = account.charge_of(finding)
        middle = (finding.gain_low + finding.gain_high) / 2
        share = min(finding.share, 1 - 1 / middle)
        if charge is not None:
            share = charge.share
        elif finding.code.startswith("data."):  # another way to see a wait that is charged to a surer finding
            share = min(share, account.waits_for_data)
        promise = (middle - 1) * finding.confidence
        return finding.code not in _DANGERS, -round(share, 3), charge is None, -promise, finding.code

    return rank


def _one_for_each_change(ranked: list[Finding]) -> list[Finding]:
    """The same, without those whose change a better one names already."""
    kept: list[Finding] = []
    for finding in ranked:
        if finding.change is None or all(finding.change != better.change for better in kept):
            kept.append(finding)
    return kept


def _pause(phase: str, code: str, advice: str) -> Rule:
    change = next(iter(BY_CODE[code].changes), None)

    def rule(metrics: RankMetrics) -> Finding | None:
        share = metrics.share(phase)
        if share < MIN_SHARE:
            return None
        times = sum(any(span.name == phase for span in step.spans) for step in metrics.steps)
        title, confidence = f"training stands still for {phase} {share:.0%} of the time", 0.9
        if times == 1 and len(metrics.steps) == metrics.breakdown.steps:
            title, confidence = f"{title}, all at once", 0.3  # how often it comes, one does not tell
        return Finding(
            code=code,
            title=title,
            share=share,
            **gain_if_removed(share / 2, share),  # half as often, or hardly ever
            confidence=confidence,
            evidence={"share": rounded(share), "steps_recorded_with_it": times},
            change=change,
            advice=advice,
        )

    return rule


def _saturated(metrics: RankMetrics) -> Finding | None:
    """That all is well, where it is seen to be: on a GPU by the X-ray alone; without one, where neither waits
    for data nor the script's own code between the phases (a simulator, batches made by hand) take the
    time."""
    busy = metrics.busy_share
    if busy is not None:
        share, what = busy, f"the GPU has work {busy:.0%} of the time"
    elif metrics.on_gpu or metrics.share(REST) > _MOST_OUTSIDE_PHASES:
        return None
    else:
        share, what = 1 - data_saved(metrics), "the step is spent computing"
    if share < _SATURATED:
        return None
    return Finding(
        code="compute.saturated",
        title=f"healthy: {what}",
        share=share,
        derived=FROM_CEILING if metrics.has_ceiling else FROM_STEP,
        confidence=0.9,
        evidence={"busy_share": rounded(busy), "samples_per_s": rounded(metrics.breakdown.samples_per_s)},
        advice="nothing to fix",
    )


RULES: tuple[Rule, ...] = (
    loading_rules.main_thread,
    loading_rules.workers_behind,
    stream_rules.few_shards,
    loading_rules.augmentation_on_cpu,
    loading_rules.worker_threads,
    loading_rules.idle_workers,
    loading_rules.worker_start,
    own_code_rules.own_code,
    copy_rules.slow_copies,
    copy_rules.waits_for_gpu,
    compute_rules.launch_bound,
    compute_rules.precision,
    compute_rules.layout,
    compute_rules.optimizer,
    compute_rules.eager,
    compute_rules.padding,
    compute_rules.attention,
    compute_rules.small_batch,
    _pause("evaluation", "pause.eval", "evaluate less often"),
    _pause("checkpoint", "pause.checkpoint", "save less often, or in the background"),
    _pause("logging", "pause.logging", "log every n-th step"),
    _pause("gc", "pause.gc", "gc.freeze() after the set-up"),
    machine_rules.gpu_memory,
    machine_rules.checkpointing,
    machine_rules.host_memory,
    machine_rules.throttled,
    machine_rules.shared_gpu,
    machine_rules.shared_cores,
    machine_rules.idle_gpus,
    drift_rules.drift,
    rank_rules.data_parallel,
    rank_rules.unused_parameters,
)
RANK_RULES: tuple[Callable[[Sequence[RankMetrics]], Finding | None], ...] = (
    rank_rules.straggler,
    rank_rules.gradient_exchange,
    rank_rules.scaling,
)
