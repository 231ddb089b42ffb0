"""Rules about computing: launches, precision, layout, the optimizer, small batches. All but the last need an X-ray."""

from __future__ import annotations

import math

from flatout.diagnose.case import LAUNCHING, Case
from flatout.diagnose.finding import Finding
from flatout.diagnose.gains import WORTH, compute_gain, data_saved, rounded


def launch_bound(case: Case) -> Finding | None:
    xray, idle = case.xray, case.xray_idle(*LAUNCHING)
    if xray is None or idle is None or not case.step_ms or data_saved(case) > 0.5:
        return None
    lost = min(0.99, idle / max(case.step_ms, xray.wall_ms / xray.steps))
    median_us = xray.kernel_us.quantile(0.5) or 0.0
    if lost < 0.15 or median_us > 20:
        return None
    return Finding(
        code="launch.bound",
        title=f"{xray.kernels / xray.steps:,.0f} kernels a step, half of them below {median_us:.0f} µs: "
        f"the host cannot launch them as fast as the card ends them",
        share=lost,
        **compute_gain(0.2 * lost, lost),
        confidence=0.85,
        evidence={"kernels_a_step": xray.kernels / xray.steps, "kernel_us_median": rounded(median_us)},
        change="batch_size",
        value=2 * int(case.loader["batch_size"]) if case.loader and case.loader.get("batch_size") else None,
        advice="a larger batch, torch.compile (mode reduce-overhead), or CUDA graphs",
    )


def precision(case: Case) -> Finding | None:
    xray = case.xray
    if xray is None or not xray.busy_ms or any(name != "None" for name in case.facts.get("autocast", ())):
        return None
    if case.facts.get("parameter_dtypes") != ["float32"]:
        return None
    matrix = min(1.0, xray.matrix_ms / xray.busy_ms)
    plain = matrix * (1 - xray.tensor_core_ms / xray.matrix_ms) if xray.matrix_ms else 0.0
    weight = (case.busy_share or 1.0) * matrix
    if weight < 0.10:
        return None
    # bf16 halves what TF32 does in the tensor cores; what ran outside them may become eight times as fast.
    high = (case.busy_share or 1.0) * (plain * 7 / 8 + (matrix - plain) / 2)
    return Finding(
        code="compute.precision",
        title=f"matrix work runs in fp32: {matrix:.0%} of the card's time, {plain:.0%} of it outside the tensor cores",
        share=weight,
        **compute_gain(0.25 * high, high),
        confidence=0.8,
        evidence={"matrix_share": rounded(matrix), "outside_tensor_cores": rounded(plain)},
        change="precision",
        value="bf16",
        advice="torch.autocast('cuda', torch.bfloat16) around the forward pass (fp16 with a scaler on older cards)",
    )


def _kernel_share(case: Case, *words: str) -> float:
    xray = case.xray
    if xray is None or not xray.busy_ms:
        return 0.0
    return sum(ms for name, ms in xray.top_ms.items() if any(w in name for w in words)) / xray.busy_ms


def layout(case: Case) -> Finding | None:
    share = _kernel_share(case, "nchwToNhwc", "nhwcToNchw") * (case.busy_share or 1.0)
    if case.facts.get("channels_last") is not False or share < WORTH:
        return None
    return Finding(
        code="compute.layout",
        title=f"convolutions turn their data from NCHW to NHWC and back: {share:.0%} of the step",
        share=share,
        **compute_gain(0.5 * share, 1.5 * share),
        confidence=0.75,
        evidence={"transposing_share": rounded(share)},
        change="channels_last",
        value=True,
        advice="model.to(memory_format=torch.channels_last), and the inputs too",
    )


def optimizer(case: Case) -> Finding | None:
    xray = case.xray
    if xray is None or case.facts.get("optimizer_fused") or not case.step_ms:
        return None
    spent = (xray.busy_by_phase_ms.get("optimizer", 0.0) + xray.idle_by_phase_ms.get("optimizer", 0.0)) / xray.steps
    share = spent / (xray.wall_ms / xray.steps)
    if share < 0.05:
        return None
    return Finding(
        code="compute.optimizer",
        title=f"{case.facts.get('optimizer')} steps in a loop of small kernels: {share:.0%} of the step",
        share=share,
        **compute_gain(0.2 * share, 0.9 * share),
        confidence=0.7,
        evidence={"optimizer_ms": rounded(spent)},
        change="fused_optimizer",
        value=True,
        advice=f"torch.optim.{case.facts.get('optimizer')}(…, fused=True)",
    )


def eager(case: Case) -> Finding | None:
    share = _kernel_share(case, "elementwise", "reduce_kernel", "batch_norm") * (case.busy_share or 1.0)
    if case.facts.get("compiled") or share < 0.20:
        return None
    return Finding(
        code="compute.eager",
        title=f"elementwise kernels that torch.compile would join take {share:.0%} of the step",
        share=share,
        **compute_gain(0.1 * share, 0.7 * share),
        confidence=0.6,
        evidence={"elementwise_share": rounded(share)},
        change="compile",
        value="default",
        advice="model.compile()",
    )


def underused(case: Case) -> Finding | None:
    total = case.card("memory_total_bytes").high
    peak, active = case.facts.get("memory_reserved_bytes"), case.card("sm_active_pct").mean
    if not peak or not math.isfinite(total) or peak / total > 0.3 or data_saved(case) > 0.2:
        return None
    if active is None or active > 40 or case.loader is None or not case.loader.get("batch_size"):
        return None
    batch = int(case.loader["batch_size"])
    room = min(4.0, 0.7 * total / peak)
    return Finding(
        code="memory.underused",
        title=f"a batch of {batch} uses {peak / total:.0%} of the card's memory and {active:.0f}% of its processors",
        share=1 - active / 100,
        gain_low=1.0,
        gain_high=max(1.0, min(room, 100 / max(1.0, active))),
        derived="model of the kernels",
        confidence=0.5,
        evidence={"memory_share": rounded(peak / total), "sm_active_pct": rounded(active)},
        change="batch_size",
        value=int(2 ** math.floor(math.log2(batch * room))),
        advice="a larger batch, with the learning rate scaled (what is learned changes)",
    )
