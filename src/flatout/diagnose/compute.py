"""Rules about computing: launches, precision, layout, the optimizer, small batches. All but the last need an X-ray.

What the card waits for its host does not shrink with the card's work. `uncovered` tells of such costs that are small
now, and are worth a word once that work is as short as other findings promise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from flatout.diagnose.gains import KERNELS, WORTH, computed, data_saved, rounded
from flatout.diagnose.rank_metrics import LAUNCHES_LATE, LAUNCHING, RankMetrics
from flatout.model.finding import Finding
from flatout.trace import Xray

_MUCH_FOR_AN_OPTIMIZER = 0.05  # of the step
FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")
_LARGER_BATCH = "a larger batch, with the learning rate scaled (what is learned changes)"
_TURNING = re.compile("nchwToNhwc|nhwcToNchw")
_NORMS = re.compile("batch_?norm|bn_[fb]w")
_JOINABLE = re.compile(f"elementwise|reduce_kernel|layer_norm|softmax|dropout|{_NORMS.pattern}")


def launch_bound(case: RankMetrics) -> Finding | None:
    xray = case.xray
    if xray is None or not xray.steps or not case.mean_ms:
        return None
    lost = case.waits_for_launches()
    idle, working = (
        sum(spent.get(phase, 0.0) for phase in LAUNCHING) for spent in (xray.idle_by_phase_ms, xray.busy_by_phase_ms)
    )
    median_us = xray.kernel_us.quantile(0.5) or 0.0
    # Beside a long wait for data the step as a whole may lose little by it.
    if idle < LAUNCHES_LATE * (idle + working) or lost < WORTH or median_us > 20:
        return None
    return Finding(
        code="launch.bound",
        title=f"{xray.kernels / xray.steps:,.0f} kernels a step, half of them below {median_us:.0f} µs: "
        f"the host cannot launch them as fast as the card ends them",
        share=lost,
        **computed(case, lost / 2, lost),  # twice the batch has half of these launches for a sample
        confidence=0.85,
        evidence={"kernels_a_step": xray.kernels / xray.steps, "kernel_us_median": rounded(median_us)},
        change="batch_size",
        value=2 * case.loader.batch_size if case.loader.batch_size else None,
        advice="a larger batch, torch.compile (mode reduce-overhead), or CUDA graphs",
    )


def precision(case: RankMetrics) -> Finding | None:
    xray = case.xray
    if xray is None or not xray.busy_ms or any(name != "None" for name in case.facts.autocast):
        return None
    if case.facts.parameter_dtypes != ("float32",):
        return None
    matrix, outside = min(1.0, xray.matrix_ms / xray.busy_ms), _outside_ms(xray) / xray.busy_ms
    working = case.busy_share or 1.0
    if working * matrix < 0.10:
        return None
    # Outside the tensor cores a product becomes at least twice as fast, and eight times at best; all else, inside them
    # or bound by memory, moves half the bytes at best.
    sure, most = outside / 2 * case.exposed, (outside * 7 / 8 + (1 - outside) / 2) * case.card_bound
    return Finding(
        code="compute.precision",
        title=f"matrix work runs in fp32: {matrix:.0%} of the card's time, {outside:.0%} outside the tensor cores",
        share=working * matrix,
        **computed(case, working * sure, working * most),
        confidence=0.8,
        evidence={"matrix_share": rounded(matrix), "outside_tensor_cores": rounded(outside)},
        change="precision",
        value="bf16",
        advice="torch.autocast('cuda', torch.bfloat16) around the forward pass (fp16 with a scaler on older cards)",
    )


def with_tf32(case: RankMetrics) -> dict[str, Any]:
    """What TF32 would give: matrix work outside the tensor cores moves in, and is eight times as fast at best."""
    outside_ms = _outside_ms(case.xray) if case.xray is not None else 0.0
    return computed(case, 0.0, _share(case, outside_ms) * 7 / 8 * case.card_bound)


def with_benchmark(case: RankMetrics) -> dict[str, Any]:
    """What cuDNN's search for faster kernels would give, if it makes none more than twice as fast."""
    matrix_ms = min(case.xray.matrix_ms, case.xray.busy_ms) if case.xray is not None else 0.0
    return computed(case, 0.0, _share(case, matrix_ms) / 2 * case.card_bound)


def _outside_ms(xray: Xray) -> float:
    """Matrix work outside the tensor cores."""
    return max(0.0, xray.matrix_ms - xray.tensor_core_ms)


def _share(case: RankMetrics, ms: float) -> float:
    """The share of the time that so much of the X-ray's kernels takes."""
    xray = case.xray
    return ms / xray.busy_ms * (case.busy_share or 1.0) if xray is not None and xray.busy_ms else 0.0


def _kernel_share(case: RankMetrics, pattern: re.Pattern[str]) -> float:
    """The same for kernels of these names, by those that take the most."""
    top_ms = case.xray.top_ms if case.xray is not None else {}
    return _share(case, sum(ms for name, ms in top_ms.items() if pattern.search(name)))


def layout(case: RankMetrics) -> Finding | None:
    share = _kernel_share(case, _TURNING)
    if case.facts.channels_last is not False or share < WORTH:
        return None
    return Finding(
        code="compute.layout",
        title=f"convolutions turn their data from NCHW to NHWC and back: {share:.0%} of the step",
        share=share,
        # The turning goes, and its launches, where the card waits for those; batch norms in NHWC read their data in
        # fewer passes, in half of them at best.
        **computed(case, 0.0, share + _kernel_share(case, _NORMS) / 2 * case.card_bound),
        confidence=0.75,
        evidence={"transposing_share": rounded(share)},
        change="channels_last",
        value=True,
        advice="model.to(memory_format=torch.channels_last), and the inputs too",
    )


def optimizer(case: RankMetrics) -> Finding | None:
    return _not_fused(case, at_least=_MUCH_FOR_AN_OPTIMIZER)


def _not_fused(case: RankMetrics, *, at_least: float) -> Finding | None:
    xray = case.xray
    if xray is None or case.facts.optimizer_fused or not case.step_ms:
        return None
    spent = (xray.busy_by_phase_ms.get("optimizer", 0.0) + xray.idle_by_phase_ms.get("optimizer", 0.0)) / xray.steps
    share = spent / (xray.wall_ms / xray.steps)
    if share < at_least:
        return None
    name = str(case.facts.optimizer)
    fusable, loops = name in FUSABLE, case.facts.optimizer_foreach is False
    how = "steps in a loop of small kernels:" if loops or not fusable else "is not fused, and takes"
    return Finding(
        code="compute.optimizer",
        title=f"{name} {how} {share:.0%} of the step",
        share=share,
        **computed(case, 0.0, share),
        confidence=0.7,
        evidence={"optimizer_ms": rounded(spent)},
        change="fused_optimizer" if fusable else None,
        value=True if fusable else None,
        advice=f"torch.optim.{name}(…, fused=True)" if fusable else "an optimizer that has fused=True or foreach=True",
    )


def eager(case: RankMetrics) -> Finding | None:
    share = max(0.0, _kernel_share(case, _JOINABLE) - _looping_optimizer(case))
    if case.facts.compiled or share < 0.20:
        return None
    return Finding(
        code="compute.eager",
        title=f"kernels that torch.compile would join, elementwise ones and norms, take {share:.0%} of the time",
        share=share,
        **computed(case, 0.0, share * 2 / 3),  # of three in a row one is left: a norm, what is added, an activation
        confidence=0.6,
        evidence={"joinable_share": rounded(share)},
        change="compile",
        value="default",
        advice="model.compile()",
    )


def _looping_optimizer(case: RankMetrics) -> float:
    """The share of the time that an optimizer's elementwise kernels take: compiling the model joins none of them."""
    xray = case.xray
    if xray is None or any("multi_tensor" in name for name in xray.top_ms):
        return 0.0
    return _share(case, xray.busy_by_phase_ms.get("optimizer", 0.0))


def underused(case: RankMetrics) -> Finding | None:
    small, active = _small_batch(case), case.card("sm_active_pct").mean
    if small is None or active is None or active > 40:
        return None
    batch, used = small
    room = min(4.0, 0.7 / used)
    return Finding(
        code="memory.underused",
        title=f"a batch of {batch} uses {used:.0%} of the card's memory and {active:.0f}% of its processors",
        share=1 - active / 100,
        gain_high=max(1.0, min(room, 100 / max(1.0, active))),
        derived=KERNELS,
        confidence=0.5,
        evidence={"memory_share": rounded(used), "sm_active_pct": rounded(active)},
        change="batch_size",
        value=int(2 ** math.floor(math.log2(batch * room))),
        advice=_LARGER_BATCH,
    )


def _small_batch(case: RankMetrics) -> tuple[int, float] | None:
    """The batch and the share of the card's memory that it uses, where there is room for a larger one."""
    total, peak = case.card("memory_total_bytes").high, case.facts.memory_reserved_bytes
    if not peak or not math.isfinite(total) or peak / total > 0.3 or data_saved(case) > 0.2:
        return None
    return (case.loader.batch_size, peak / total) if case.loader.batch_size else None


def uncovered(case: RankMetrics, found: Iterable[Finding]) -> list[Finding]:
    """What will be worth a word when the card has less to do, by as much as these findings promise (of each range the
    middle). Their own ranges are for mending them alone: small, and never the verdict."""
    shorter = math.prod(
        (f.gain_low + f.gain_high) / 2
        for f in found
        if f.derived.startswith(KERNELS) and f.change not in ("batch_size", "fused_optimizer")
    )
    if shorter == 1:
        return []
    named = {finding.code for finding in found}
    then = [_not_fused(case, at_least=WORTH / shorter), _gaps(case, at_least=WORTH / shorter)]
    return [finding for finding in then if finding is not None and finding.code not in named]


def _gaps(case: RankMetrics, *, at_least: float) -> Finding | None:
    """Gaps between kernels come with each step: for as many samples twice the batch has half of them."""
    small, lost = _small_batch(case), case.waits_for_launches()
    if small is None or lost / 2 < at_least:
        return None
    batch, used = small
    return Finding(
        code="memory.underused",
        title=f"a batch of {batch} uses {used:.0%} of the card's memory, and in each step the card waits for launches: "
        f"{lost:.0%} of the time",
        share=lost,
        **computed(case, 0.0, lost),  # the X-ray slows the host down: such gaps are shorter without it
        confidence=0.5,
        evidence={"memory_share": rounded(used), "waiting_for_launches": rounded(lost)},
        change="batch_size",
        value=2 * batch,
        advice=_LARGER_BATCH,
    )
