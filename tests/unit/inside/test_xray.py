"""What a few kernels, by the names an H200 gave them, say about two steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flatout.inside.xray import Kernel, read_kernels
from flatout.trace import Span, Step

US = 1_000
TF32 = "sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32"
FP32 = "sm80_xmma_fprop_implicit_gemm_indexed_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize32x32x8_ffma"
NORM = "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float, cudnnTensorStruct)"
TURNED = "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true>()"


def step(start_s: float) -> Step:
    spans = (Span(name="data", start_ms=0.0, host_ms=0.4), Span(name="forward", start_ms=0.4, host_ms=0.6))
    return Step(index=0, start_s=start_s, wall_ms=1.0, spans=spans)


def kernel(name: str, start_us: int, end_us: int, launched_us: int | None = None) -> Kernel:
    return Kernel(name, start_us * US, end_us * US, launched_us * US if launched_us is not None else None)


ON_THE_HOST = """
import sys
import torch.autograd.profiler as profiler
from flatout.inside.xray import Profiler

class OnTheHost(profiler.profile):  # there is no GPU to look at
    def __init__(self, **options):
        assert options["use_device"] == "cuda", options
        super().__init__(**{**options, "use_cpu": True, "use_device": None})

profiler.profile = OnTheHost
ours = Profiler()
ours.start()
assert ours.running and not ours.available()
ours.stop()
assert not ours.running and ours.available()
loaded = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
assert not loaded, loaded
"""


def test_its_start_does_not_load_torch_s_compiler() -> None:
    """Which takes seconds, in the middle of a training."""
    done = subprocess.run([sys.executable, "-c", ON_THE_HOST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_matrix_work_is_told_from_what_else_cudnn_does() -> None:
    names = (TF32, FP32, NORM, TURNED, "void cudnn::dropout_apply_mask<__half, float, 4>()")
    seen = read_kernels([kernel(name, 100 * n, 100 * n + 50) for n, name in enumerate(names)], [step(0.0)])
    assert seen is not None
    assert (seen.matrix_ms, seen.tensor_core_ms) == pytest.approx((0.1, 0.05))
    assert seen.kernels == 5


def test_a_gap_belongs_to_what_the_host_did_meanwhile() -> None:
    # GIVEN a GPU that works from 0.5 to 0.9 ms of each step, on what was launched in the forward pass
    work = [kernel(TF32, at + 500, at + 900, at + 450) for at in (0, 1000)]
    seen = read_kernels(work, [step(0.0), step(0.001)])
    # THEN it stood still while batches were fetched, and 0.1 ms before and after the forward pass's own work
    assert seen is not None
    assert seen.idle_by_phase_ms == pytest.approx({"data": 0.8, "forward": 0.4})
    assert seen.busy_by_phase_ms == pytest.approx({"forward": 0.8})
    assert (seen.wall_ms, seen.busy_ms) == pytest.approx((2.0, 0.8))


def test_where_the_host_runs_ahead_the_gpu_s_work_on_the_steps_is_waited_for() -> None:
    # GIVEN two steps launched within 2 ms, each 5 ms of work, behind 3 ms of an earlier step
    earlier = kernel(TF32, 0, 3000, -100)
    work = [kernel(TF32, 3000, 8000, 450), kernel(FP32, 8000, 13_000, 1450)]
    seen = read_kernels([earlier, *work], [step(0.0), step(0.001)])
    # THEN all of their work is counted, nothing of the earlier one's, and the GPU never stood still
    assert seen is not None
    assert (seen.wall_ms, seen.busy_ms) == pytest.approx((10.0, 10.0))
    assert seen.busy_by_phase_ms == pytest.approx({"forward": 10.0})
    assert (seen.kernels, seen.matrix_ms) == (2, pytest.approx(10.0))


def test_what_is_launched_after_the_steps_is_not_theirs() -> None:
    seen = read_kernels([kernel(TF32, 500, 900, 450), kernel(TF32, 1100, 1600, 1050)], [step(0.0)])
    assert seen is not None
    assert (seen.kernels, seen.wall_ms, seen.busy_ms) == (1, pytest.approx(1.0), pytest.approx(0.4))


def test_without_kernels_there_is_nothing_to_say() -> None:
    assert read_kernels([], [step(0.0)]) is None
