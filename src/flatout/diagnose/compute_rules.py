"""Rules about computing: launches, precision, layout, the optimizer, small batches. All but the last need an
X-ray.

The time the GPU waits for its host does not shrink with the GPU's work. `worth_it_later` reports such costs
that are small now, and matter once that work is as short as other findings promise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from flatout.diagnose.gains import FROM_KERNELS, MIN_SHARE, data_saved, gain_if_gpu_spared, rounded
from flatout.diagnose.hot_lines import in_training
from flatout.diagnose.rank_metrics import LATE_LAUNCHES, LAUNCHING, RankMetrics
from flatout.model.finding import Finding
from flatout.trace import Xray

FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")
_MIN_OPTIMIZER = 0.05  # of the step
_MIN_MATRIX = 0.10  # of the time
_MIN_JOINABLE = 0.20  # of the time
_MIN_PADDING = 0.15  # of the tokens
_SMALL_KERNEL_US = 20
_IDLE_MEMORY = 0.3  # of the GPU's memory in use, at the most, where a larger batch has room
_IDLE_SM_PCT = 40
_LARGER_BATCH = "a larger batch, with the learning rate scaled (what is learned changes)"
_TRANSPOSES = re.compile("nchwToNhwc|nhwcToNchw")
_NORMS = re.compile("batch_?norm|bn_[fb]w")
_SOFTMAX = re.compile("(?<!log)(?<!log_)softmax", re.IGNORECASE)
_JOINABLE = re.compile(f"elementwise|reduce_kernel|layer_norm|softmax|dropout|{_NORMS.pattern}")


def launch_bound(metrics: RankMetrics) -> Finding | None:
    """The host cannot launch kernels as fast as the GPU ends them."""
    xray = metrics.xray
    if xray is None or not xray.steps or not metrics.mean_ms:
        return None
    idle_ms = sum(xray.idle_by_phase_ms.get(phase, 0.0) for phase in LAUNCHING)
    busy_ms = sum(xray.busy_by_phase_ms.get(phase, 0.0) for phase in LAUNCHING)
    late = idle_ms >= LATE_LAUNCHES * (idle_ms + busy_ms)
    lost, median_us = metrics.waits_for_launches(), xray.kernel_us.quantile(0.5) or 0.0
    # Beside a long wait for data the step as a whole may lose little by it.
    if not late or lost < MIN_SHARE or median_us > _SMALL_KERNEL_US:
        return None
    kernels, batch = xray.kernels / xray.steps, metrics.loader.batch_size
    return Finding(
        code="launch.bound",
        title=f"{kernels:,.0f} kernels a step, half of them below {median_us:.0f} µs: "
        f"the host cannot launch them as fast as the GPU ends them",
        share=lost,
        **gain_if_gpu_spared(metrics, lost / 2, lost),  # twice the batch has half as many launches a sample
        confidence=0.85,
        evidence={"kernels_a_step": kernels, "kernel_us_median": rounded(median_us)},
        change="batch_size",
        value=2 * batch if batch else None,
        advice="a larger batch, torch.compile (mode reduce-overhead), or CUDA graphs",
    )


def precision(metrics: RankMetrics) -> Finding | None:
    """Matrix work runs in fp32."""
    xray, facts = metrics.xray, metrics.facts
    if xray is None or not xray.busy_ms or facts.parameter_dtypes != ("float32",):
        return None
    if any(dtype != "None" for dtype in facts.autocast):
        return None
    matrix, outside = min(1.0, xray.matrix_ms / xray.busy_ms), _outside_tensor_cores_ms(xray) / xray.busy_ms
    working = metrics.busy_share or 1.0
    if working * matrix < _MIN_MATRIX:
        return None
    # Outside the tensor cores a product becomes at least twice as fast, and eight times at best. Everything else
    # moves half the bytes at best.
    sure = outside / 2 * metrics.saved_for_sure
    most = (outside * 7 / 8 + (1 - outside) / 2) * metrics.saved_at_most
    return Finding(
        code="compute.precision",
        title=f"matrix work runs in fp32: {matrix:.0%} of the GPU's time, {outside:.0%} outside the tensor cores",
        share=working * matrix,
        **gain_if_gpu_spared(metrics, working * sure, working * most),
        confidence=0.8,
        evidence={"matrix_share": rounded(matrix), "outside_tensor_cores": rounded(outside)},
        change="precision",
        value="bf16",
        advice="torch.autocast('cuda', torch.bfloat16) around the forward pass (fp16 with a scaler on older GPUs)",
    )


def gain_of_tf32(metrics: RankMetrics) -> dict[str, Any]:
    """Matrix work outside the tensor cores moves in, and is eight times as fast at best."""
    outside = _share_of_gpu(metrics, _outside_tensor_cores_ms(metrics.xray))
    return gain_if_gpu_spared(metrics, 0.0, outside * 7 / 8 * metrics.saved_at_most)


def gain_of_cudnn_benchmark(metrics: RankMetrics) -> dict[str, Any]:
    """cuDNN finds faster kernels, none more than twice as fast."""
    matrix = 0.0
    if metrics.xray is not None:
        matrix = _share_of_gpu(metrics, min(metrics.xray.matrix_ms, metrics.xray.busy_ms))
    return gain_if_gpu_spared(metrics, 0.0, matrix / 2 * metrics.saved_at_most)


def layout(metrics: RankMetrics) -> Finding | None:
    """Convolutions transpose their data from NCHW to NHWC and back."""
    share = _share_of_kernels(metrics, _TRANSPOSES)
    if metrics.facts.channels_last is not False or share < MIN_SHARE:
        return None
    # The transposes go, and batch norms in NHWC read their data in fewer passes, half of them at best.
    saved = share + _share_of_kernels(metrics, _NORMS) / 2 * metrics.saved_at_most
    return Finding(
        code="compute.layout",
        title=f"convolutions turn their data from NCHW to NHWC and back: {share:.0%} of the step",
        share=share,
        **gain_if_gpu_spared(metrics, 0.0, saved),
        confidence=0.75,
        evidence={"transposing_share": rounded(share)},
        change="channels_last",
        value=True,
        advice="model.to(memory_format=torch.channels_last), and the inputs too",
    )


def optimizer(metrics: RankMetrics) -> Finding | None:
    """The optimizer step is not fused, and takes long."""
    return _unfused_optimizer(metrics, at_least=_MIN_OPTIMIZER)


def _unfused_optimizer(metrics: RankMetrics, *, at_least: float) -> Finding | None:
    xray, facts = metrics.xray, metrics.facts
    if xray is None or facts.optimizer_fused or not metrics.step_ms:
        return None
    spent_ms = xray.busy_by_phase_ms.get("optimizer", 0.0) + xray.idle_by_phase_ms.get("optimizer", 0.0)
    share, name = spent_ms / xray.wall_ms, facts.optimizer
    if share < at_least:
        return None
    how = "steps in a loop of small kernels:"
    more: dict[str, Any] = {"advice": "an optimizer that has fused=True or foreach=True"}
    if name in FUSABLE:
        more = {"change": "fused_optimizer", "value": True, "advice": f"torch.optim.{name}(…, fused=True)"}
        if facts.optimizer_foreach is not False:
            how = "is not fused, and takes"
    return Finding(
        code="compute.optimizer",
        title=f"{name} {how} {share:.0%} of the step",
        share=share,
        **gain_if_gpu_spared(metrics, 0.0, share),
        confidence=0.7,
        evidence={"optimizer_ms": rounded(spent_ms / xray.steps)},
        **more,
    )


def eager(metrics: RankMetrics) -> Finding | None:
    """Elementwise kernels run one by one that torch.compile would join."""
    share = max(0.0, _share_of_kernels(metrics, _JOINABLE) - _share_of_looping_optimizer(metrics))
    if metrics.facts.compiled or share < _MIN_JOINABLE:
        return None
    return Finding(
        code="compute.eager",
        title=f"kernels that torch.compile would join, elementwise ones and norms, take {share:.0%} of the time",
        share=share,
        **gain_if_gpu_spared(metrics, 0.0, share * 2 / 3),  # of three in a row one is left
        confidence=0.6,
        evidence={"joinable_share": rounded(share)},
        change="compile",
        value="default",
        advice="model.compile()",
    )


def attention(metrics: RankMetrics) -> Finding | None:
    """Attention is written out by hand."""
    written = metrics.facts.attention
    if written is None:
        return None
    if metrics.xray is not None:
        share = _share_of_kernels(metrics, _SOFTMAX)
    else:
        lines = [line for function in in_training(metrics.rank, ("forward",)) for line in function.lines]
        share = metrics.share("forward") * sum(line.share for line in lines if line.where == written.where)
    if share < MIN_SHARE:
        return None
    return Finding(
        code="compute.attention",
        title=f"attention over {written.length} tokens is written out by hand: softmax takes {share:.0%} of the time",
        share=share,
        **gain_if_gpu_spared(metrics, 0.0, share * metrics.saved_at_most),
        confidence=0.7,
        evidence={"length": written.length, "softmax_share": rounded(share)},
        advice="torch.nn.functional.scaled_dot_product_attention",
        where=written.where,
    )


def padding(metrics: RankMetrics) -> Finding | None:
    """Much of what is computed is padding."""
    tokens = metrics.loader.tokens
    if tokens is None or tokens.padding is None or tokens.padding < _MIN_PADDING:
        return None
    share = metrics.computing * tokens.padding
    if share < MIN_SHARE:
        return None
    return Finding(
        code="compute.padding",
        title=f"{tokens.padding:.0%} of the tokens in a batch are padding",
        share=share,
        **gain_if_gpu_spared(metrics, 0.0, share * metrics.saved_at_most),
        confidence=0.7,
        evidence={"padding": rounded(tokens.padding), "tokens_a_sample": rounded(tokens.a_sample)},
        advice="batches of samples of like length, padded to the longest of them (`group_by_length` of transformers), "
        "or several samples packed into one row",
    )


def small_batch(metrics: RankMetrics) -> Finding | None:
    """The batch uses a small part of the GPU's memory and of its processors."""
    small, active = _batch_and_memory(metrics), metrics.gpu("sm_active_pct").mean
    if small is None or active is None or active > _IDLE_SM_PCT:
        return None
    batch, used = small
    room = min(4.0, 0.7 / used)
    return Finding(
        code="memory.underused",
        title=f"a batch of {batch} uses {used:.0%} of the GPU's memory and {active:.0f}% of its processors",
        share=1 - active / 100,
        gain_high=max(1.0, min(room, 100 / max(1.0, active))),
        derived=FROM_KERNELS,
        confidence=0.5,
        evidence={"memory_share": rounded(used), "sm_active_pct": rounded(active)},
        change="batch_size",
        value=int(2 ** math.floor(math.log2(batch * room))),
        advice=_LARGER_BATCH,
    )


def worth_it_later(metrics: RankMetrics, found: Iterable[Finding]) -> list[Finding]:
    """What will matter when the GPU has less to do, by as much as these findings promise (the middle of each
    range).

    Their own ranges are for fixing them alone: small, and never the verdict.
    """
    found = list(found)
    shorter = 1.0
    for finding in found:
        asks_for_other_work = finding.change in ("batch_size", "fused_optimizer")
        if finding.derived.startswith(FROM_KERNELS) and not asks_for_other_work:
            shorter *= (finding.gain_low + finding.gain_high) / 2
    if shorter == 1:
        return []
    later = (
        _unfused_optimizer(metrics, at_least=MIN_SHARE / shorter),
        _gaps_between_kernels(metrics, at_least=MIN_SHARE / shorter),
    )
    known = {finding.code for finding in found}
    return [finding for finding in later if finding is not None and finding.code not in known]


def _gaps_between_kernels(metrics: RankMetrics, *, at_least: float) -> Finding | None:
    """Gaps come with each step: for as many samples twice the batch has half of them."""
    small, lost = _batch_and_memory(metrics), metrics.waits_for_launches()
    if small is None or lost / 2 < at_least:
        return None
    batch, used = small
    return Finding(
        code="memory.underused",
        title=f"a batch of {batch} uses {used:.0%} of the GPU's memory, and in each step the GPU waits for launches: "
        f"{lost:.0%} of the time",
        share=lost,
        **gain_if_gpu_spared(metrics, 0.0, lost),  # the X-ray slows the host down: gaps are shorter without it
        confidence=0.5,
        evidence={"memory_share": rounded(used), "waiting_for_launches": rounded(lost)},
        change="batch_size",
        value=2 * batch,
        advice=_LARGER_BATCH,
    )


def _batch_and_memory(metrics: RankMetrics) -> tuple[int, float] | None:
    """The batch and the share of the GPU's memory it uses, where there is room for a larger one."""
    total, reserved = metrics.gpu("memory_total_bytes").high, metrics.facts.memory_reserved_bytes
    batch = metrics.loader.batch_size
    if not reserved or not math.isfinite(total) or not batch:
        return None
    if reserved / total > _IDLE_MEMORY or data_saved(metrics) > 0.2:
        return None
    return batch, reserved / total


def _outside_tensor_cores_ms(xray: Xray | None) -> float:
    return max(0.0, xray.matrix_ms - xray.tensor_core_ms) if xray is not None else 0.0


def _share_of_gpu(metrics: RankMetrics, ms: float) -> float:
    """The share of the time that so much of the X-ray's kernels takes."""
    xray = metrics.xray
    if xray is None or not xray.busy_ms:
        return 0.0
    return ms / xray.busy_ms * (metrics.busy_share or 1.0)


def _share_of_kernels(metrics: RankMetrics, pattern: re.Pattern[str]) -> float:
    """The share of the time that kernels of these names take, among those that take the most."""
    if metrics.xray is None:
        return 0.0
    return _share_of_gpu(metrics, sum(ms for name, ms in metrics.xray.top_ms.items() if pattern.search(name)))


def _share_of_looping_optimizer(metrics: RankMetrics) -> float:
    """The share of the time that an optimizer's elementwise kernels take: compiling the model joins none of them."""
    xray = metrics.xray
    if xray is None or any("multi_tensor" in name for name in xray.top_ms):
        return 0.0
    return _share_of_gpu(metrics, xray.busy_by_phase_ms.get("optimizer", 0.0))
