"""Rules about computing: launches, precision, layout, the optimizer, padding, small batches. Most
need an X-ray."""

from __future__ import annotations

import math
import re

from flatout.diagnose.breakdown import in_training
from flatout.diagnose.gains import gain_if_gpu_spared
from flatout.diagnose.rank_metrics import LATE_LAUNCHES, LAUNCHING, MIN_SHARE, RankMetrics, rounded
from flatout.model.causes import Finding

FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")
_MIN_OPTIMIZER = 0.05  # of the step
_MIN_MATRIX = 0.10  # of the time
_MIN_JOINABLE = 0.20  # of the time
_MIN_PADDING = 0.15  # of the tokens
_IDLE_MEMORY = 0.3  # of the GPU's memory in use, at the most, where a larger batch has room
_IDLE_SM_PCT = 40
_TRANSPOSES = re.compile("nchwToNhwc|nhwcToNchw")
_NORMS = re.compile("batch_?norm|bn_[fb]w")
_SOFTMAX = re.compile("(?<!log)(?<!log_)softmax", re.IGNORECASE)
_ATTENDS = re.compile(r"softmax|matmul|bmm|einsum|\s@\s|mask|tril|dropout")
_JOINABLE = re.compile(f"elementwise|reduce_kernel|layer_norm|softmax|dropout|{_NORMS.pattern}")


def launch_bound(metrics: RankMetrics) -> Finding | None:
    """The host cannot launch kernels as fast as the GPU ends them."""
    xray = metrics.xray
    if xray is None:
        return None
    idle_ms = sum(xray.idle_by_phase_ms.get(phase, 0.0) for phase in LAUNCHING)
    busy_ms = sum(xray.busy_by_phase_ms.get(phase, 0.0) for phase in LAUNCHING)
    lost, median_us = metrics.waits_for_launches(), xray.kernel_us.quantile(0.5) or 0.0
    # Beside a long wait for data the step as a whole may lose little by it.
    if idle_ms < LATE_LAUNCHES * (idle_ms + busy_ms) or lost < MIN_SHARE:
        return None
    kernels, batch = xray.kernels / xray.steps, metrics.loader.batch_size
    return Finding(
        code="launch.bound",
        title=f"the GPU waits {lost:.0%} of the time for the host to launch its kernels: {kernels:,.0f} a step, "
        f"half of them below {median_us:.0f} µs",
        share=lost,
        **gain_if_gpu_spared(metrics, lost, lost / 2),  # twice the batch has half as many launches a sample
        confidence=0.85,
        evidence={"kernels_a_step": kernels, "kernel_us_median": rounded(median_us)},
        change="batch_size",
        value=2 * batch if batch else None,
        advice="a larger batch, torch.compile (mode reduce-overhead), or CUDA graphs",
    )


def precision(metrics: RankMetrics) -> Finding | None:
    """Matrix work runs in fp32."""
    xray, facts = metrics.xray, metrics.facts
    if xray is None or facts.parameter_dtypes != ("float32",) or any(dtype != "None" for dtype in facts.autocast):
        return None
    working = metrics.busy_share or 1.0
    matrix = min(1.0, xray.matrix_ms / xray.busy_ms)
    outside = max(0.0, xray.matrix_ms - xray.tensor_core_ms) / xray.busy_ms
    if working * matrix < _MIN_MATRIX:
        return None
    # Outside the tensor cores a product becomes at least twice as fast, and eight times at best.
    # Everything else moves half the bytes at best.
    sure = outside / 2 * metrics.saved_for_sure
    most = (outside * 7 / 8 + (1 - outside) / 2) * metrics.saved_at_most
    return Finding(
        code="compute.precision",
        title=f"matrix work runs in fp32: {matrix:.0%} of the GPU's time, {outside:.0%} outside the tensor cores",
        share=working * matrix,
        **gain_if_gpu_spared(metrics, working * most, working * sure),
        confidence=0.8,
        evidence={"matrix_share": rounded(matrix), "outside_tensor_cores": rounded(outside)},
        change="precision",
        value="bf16",
        advice="torch.autocast('cuda', torch.bfloat16) around the forward pass (fp16 with a scaler on older GPUs)",
    )


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
        **gain_if_gpu_spared(metrics, saved),
        confidence=0.75,
        evidence={"transposing_share": rounded(share)},
        change="channels_last",
        value=True,
        advice="model.to(memory_format=torch.channels_last), and the inputs too",
    )


def optimizer(metrics: RankMetrics) -> Finding | None:
    """The optimizer step is not fused, and takes long."""
    xray, facts = metrics.xray, metrics.facts
    if xray is None or facts.optimizer_fused:
        return None
    spent_ms = xray.busy_by_phase_ms.get("optimizer", 0.0) + xray.idle_by_phase_ms.get("optimizer", 0.0)
    share, name = spent_ms / xray.wall_ms, facts.optimizer
    if share < _MIN_OPTIMIZER:
        return None
    how, change, advice = "steps in a loop of small kernels:", None, "an optimizer that has fused=True or foreach=True"
    if name in FUSABLE:
        change, advice = "fused_optimizer", f"torch.optim.{name}(…, fused=True)"
        if facts.optimizer_foreach is not False:
            how = "is not fused, and takes"
    return Finding(
        code="compute.optimizer",
        title=f"{name} {how} {share:.0%} of the step",
        share=share,
        **gain_if_gpu_spared(metrics, share),
        confidence=0.7,
        evidence={"optimizer_ms": rounded(spent_ms / xray.steps)},
        change=change,
        value=change and True,
        advice=advice,
    )


def eager(metrics: RankMetrics) -> Finding | None:
    """Elementwise kernels run one by one that torch.compile would join."""
    share = _share_of_kernels(metrics, _JOINABLE)
    xray = metrics.xray
    if xray is not None and not any("multi_tensor" in name for name in xray.top_ms):
        # An optimizer's elementwise kernels: compiling the model joins none of them.
        share -= _share_of_gpu(metrics, xray.busy_by_phase_ms.get("optimizer", 0.0))
    if metrics.facts.compiled or share < _MIN_JOINABLE:
        return None
    return Finding(
        code="compute.eager",
        title=f"kernels that torch.compile would join, elementwise ones and norms, take {share:.0%} of the time",
        share=share,
        **gain_if_gpu_spared(metrics, share * 2 / 3),  # of three in a row one is left
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
    share, what = _share_of_kernels(metrics, _SOFTMAX), "softmax takes"
    if metrics.xray is None:
        share, what = metrics.computing * _attention_of_forward(metrics, written.where), "it takes"
    if share < MIN_SHARE:
        return None
    return Finding(
        code="compute.attention",
        title=f"attention over {written.length} tokens is written out by hand: {what} {share:.0%} of the time",
        share=share,
        **gain_if_gpu_spared(metrics, share * metrics.saved_at_most),
        confidence=0.7,
        evidence={"length": written.length, "share": rounded(share)},
        advice="torch.nn.functional.scaled_dot_product_attention",
        where=written.where,
    )


def _attention_of_forward(metrics: RankMetrics, where: str) -> float:
    """The part of forward that goes into attention: lines beside its softmax with products, masks and
    dropout. Backward goes through the same again."""
    for function in in_training(metrics.rank, ("forward",)):
        if any(line.where == where for line in function.lines):
            attends = (line for line in function.lines if line.where == where or _ATTENDS.search(line.source or ""))
            return sum(line.share for line in attends)
    return 0.0


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
        **gain_if_gpu_spared(metrics, share * metrics.saved_at_most),
        confidence=0.7,
        evidence={"padding": rounded(tokens.padding), "tokens_a_sample": rounded(tokens.a_sample)},
        advice="batches of samples of like length, padded to the longest of them (`group_by_length` of transformers), "
        "or several samples packed into one row",
    )


def small_batch(metrics: RankMetrics) -> Finding | None:
    """The batch uses a small part of the GPU's memory and of its processors."""
    total, reserved = metrics.machine.gpu("memory_total_bytes").high, metrics.facts.memory_reserved_bytes
    batch, active = metrics.loader.batch_size, metrics.machine.gpu("sm_active_pct").mean
    if not reserved or not math.isfinite(total) or not batch or active is None or active > _IDLE_SM_PCT:
        return None
    used = reserved / total
    if used > _IDLE_MEMORY or metrics.data_saved > 0.2:
        return None
    room = min(4.0, 0.7 / used)
    faster = max(1.0, min(room, 100 / max(1.0, active)))
    return Finding(
        code="memory.underused",
        title=f"a batch of {batch} uses {used:.0%} of the GPU's memory and {active:.0f}% of its processors",
        share=1 - active / 100,
        **gain_if_gpu_spared(metrics, (metrics.busy_share or 1.0) * (1 - 1 / faster)),
        confidence=0.5,
        evidence={"memory_share": rounded(used), "sm_active_pct": rounded(active)},
        change="batch_size",
        value=int(2 ** math.floor(math.log2(batch * room))),
        advice="a larger batch, with the learning rate scaled (what is learned changes)",
    )


def _share_of_gpu(metrics: RankMetrics, ms: float) -> float:
    """The share of the time that so much of the X-ray's kernels takes."""
    xray = metrics.xray
    if xray is None:
        return 0.0
    return ms / xray.busy_ms * (metrics.busy_share or 1.0)


def _share_of_kernels(metrics: RankMetrics, pattern: re.Pattern[str]) -> float:
    """The share of the time that kernels of these names take, among those that take the most."""
    if metrics.xray is None:
        return 0.0
    return _share_of_gpu(metrics, sum(ms for name, ms in metrics.xray.top_ms.items() if pattern.search(name)))
