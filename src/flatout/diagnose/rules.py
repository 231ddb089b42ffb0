"""Trace → Diagnosis: the rules, what became of them together, and the verdict.

A rule is a small function that looks at the metrics of one rank (or of all) and says nothing unless
the evidence is there. What each finding is charged with, and so may promise, is worked out in
`by_cause`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flatout.diagnose import compute_rules, host_rules, loading_rules, machine_rules
from flatout.diagnose.breakdown import REST
from flatout.diagnose.by_cause import CauseAccount, by_cause
from flatout.diagnose.knobs import ignored_settings
from flatout.diagnose.rank_metrics import RankMetrics, metrics_of, rounded
from flatout.model.causes import BY_CODE, Finding
from flatout.model.changes import SETTING
from flatout.trace import Trace

_NO_GAIN = 1.005
_SATURATED = 0.90  # of the time that the GPU has work
_MIN_VERDICT = 0.10  # of the time, where the rest of the run is healthy
_DANGERS = ("memory.host", "memory.pressure")  # they may end the run
_MOST_OUTSIDE_PHASES = 0.20  # of the time: a framework's own bookkeeping takes less


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is wrong, the verdict first, and where all of training's time went by cause."""

    findings: tuple[Finding, ...] = ()
    account: CauseAccount | None = None  # None where there is too little to judge by


def diagnose(trace: Trace) -> tuple[Finding, ...]:
    """What is wrong, the most rewarding first. Empty when there is too little to judge by."""
    return diagnosis(metrics_of(trace)).findings


def diagnosis(ranks: Sequence[RankMetrics]) -> Diagnosis:
    """The same with the account, from the metrics of every rank."""
    if not ranks or not ranks[0].breakdown.enough:
        return Diagnosis()
    metrics = ranks[0]
    found = [finding for rule in RULES if (finding := rule(metrics)) is not None]
    found += [finding for rule in RANK_RULES if (finding := rule(ranks)) is not None]
    assert all(map(_change_is_known, found)), [(finding.code, finding.change) for finding in found]
    ignored = ignored_settings(metrics, found)
    explained = {finding.evidence.get("cause") for finding in ignored}
    found = [*(finding for finding in found if finding.code not in explained), *ignored]
    ranked, _ = _charged(metrics, found)
    kept = {finding.title for finding in _one_for_each_change(ranked)}
    ranked, account = _charged(metrics, [finding for finding in found if finding.title in kept])
    healthy = _saturated(metrics)
    if healthy is not None and not any(map(_is_a_verdict, ranked)):
        ranked.insert(0, healthy)
    return Diagnosis(findings=tuple(ranked), account=account)


def _charged(metrics: RankMetrics, found: Sequence[Finding]) -> tuple[list[Finding], CauseAccount]:
    """These findings with what they are charged with, the verdict first; and the account.

    What endangers the run comes first, then the largest share of the time. Those whose time others
    explain say nothing.
    """
    account = by_cause(metrics, found)
    charged = {finding.title for finding in found if account.share_of(finding)}

    def rank(finding: Finding) -> tuple[bool, bool, float, float]:
        promise = (finding.gain_low + finding.gain_high - 2) * finding.confidence
        return finding.code not in _DANGERS, finding.title not in charged, -round(finding.share, 3), -promise

    told = []
    for finding in found:
        bounded = account.bounded(finding)
        if bounded.share or finding.gain_high <= _NO_GAIN:
            told.append(bounded)
    return sorted(told, key=rank), account


def _change_is_known(finding: Finding) -> bool:
    """Whether the definition of the cause names the change."""
    change = finding.change
    return change is None or change.startswith(SETTING) or change in BY_CODE[finding.code].changes


def _is_a_verdict(finding: Finding) -> bool:
    """Whether a run that is healthy for the rest is not called so."""
    return finding.share >= _MIN_VERDICT or finding.code in (*_DANGERS, "config.ignored")


def _one_for_each_change(ranked: list[Finding]) -> list[Finding]:
    """The same, without those whose change a better one names already."""
    kept: list[Finding] = []
    for finding in ranked:
        if finding.change is None or all(finding.change != better.change for better in kept):
            kept.append(finding)
    return kept


def _saturated(metrics: RankMetrics) -> Finding | None:
    """That all is well, where it is seen to be: on a GPU by the X-ray alone; without one, where
    neither waits for data nor the script's own code between the phases (a simulator, batches made by
    hand) take the time."""
    busy = metrics.busy_share
    if busy is not None:
        share, what = busy, f"the GPU has work {busy:.0%} of the time"
    elif metrics.on_gpu or metrics.share(REST) > _MOST_OUTSIDE_PHASES:
        return None
    else:
        share, what = 1 - metrics.data_saved, "the step is spent computing"
    if share < _SATURATED:
        return None
    return Finding(
        code="compute.saturated",
        title=f"healthy: {what}",
        share=share,
        derived=metrics.headroom_source,
        confidence=0.9,
        evidence={"busy_share": rounded(busy), "samples_per_s": rounded(metrics.breakdown.samples_per_s)},
        advice="nothing to fix",
    )


RULES: tuple[Callable[[RankMetrics], Finding | None], ...] = (
    loading_rules.main_thread,
    loading_rules.few_shards,
    loading_rules.workers_behind,
    loading_rules.augmentation_on_cpu,
    loading_rules.worker_threads,
    loading_rules.worker_start,
    host_rules.own_code,
    host_rules.slow_copies,
    host_rules.waits_for_gpu,
    host_rules.pause("evaluation", "pause.eval", "evaluate less often"),
    host_rules.pause("checkpoint", "pause.checkpoint", "save less often, or in the background"),
    host_rules.pause("logging", "pause.logging", "log every n-th step"),
    host_rules.pause("gc", "pause.gc", "gc.freeze() after the set-up"),
    host_rules.drift,
    compute_rules.launch_bound,
    compute_rules.precision,
    compute_rules.layout,
    compute_rules.optimizer,
    compute_rules.eager,
    compute_rules.padding,
    compute_rules.attention,
    compute_rules.small_batch,
    machine_rules.gpu_memory,
    machine_rules.checkpointing,
    machine_rules.host_memory,
    machine_rules.throttled,
    machine_rules.shared_gpu,
    machine_rules.shared_cores,
    machine_rules.idle_gpus,
    machine_rules.data_parallel,
    machine_rules.unused_parameters,
)
RANK_RULES = (machine_rules.straggler, machine_rules.exchange)
