"""What `flatout top` says of loads whose effect on a GPU is known. Needs a GPU with GPM counters, and it idle."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.loads import running
from benchmarks.observe import PERIOD_S, true_fluctuation, watch
from flatout.doctor import GpuFound, examine
from flatout.sample.hardware import Sampler

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def gpu() -> GpuFound:
    return examine().gpus[0]


@pytest.fixture(autouse=True)
def needs_gpm(gpu: GpuFound) -> None:
    if not gpu.gpm:
        pytest.skip(f"{gpu.name} has no GPM counters")


def test_the_doctor_knows_the_gpu_by_both_its_numbers(gpu: GpuFound) -> None:
    assert gpu.uuid.startswith("GPU-")
    assert (gpu.memory_bytes or 0) > 1 << 30
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        assert gpu.cuda_index is not None


def test_an_idle_gpu_reads_zero(tmp_path: Path) -> None:
    figures, _ = watch(tmp_path / "idle", seconds=3)
    assert figures["sm_active_pct"] < 1
    assert figures["verdict"] == "idle"


def test_matrix_products_fill_the_sms_and_the_tensor_cores(tmp_path: Path) -> None:
    with running("matmul"):
        figures, _ = watch(tmp_path / "matmul", seconds=4)
    assert figures["sm_active_pct"] > 75
    assert figures["tensor_active_pct"] > 60


def test_tiny_kernels_are_busy_but_wasteful(tmp_path: Path) -> None:
    with running("tiny"):
        figures, _ = watch(tmp_path / "tiny", seconds=4)
    assert figures["gpu_util_pct"] > 90
    assert figures["sm_active_pct"] < 15
    assert figures["verdict"] == "busy but wasteful"


def test_a_load_that_goes_on_and_off_has_the_fluctuation_it_has(tmp_path: Path) -> None:
    with running("matmul"):
        full, _ = watch(tmp_path / "matmul", seconds=3)
    with running("switched", "--period", str(PERIOD_S)) as load:
        figures, window_s = watch(tmp_path / "switched", seconds=4 * PERIOD_S)
    truth = true_fluctuation(load["on_s"], window_s, full_pct=full["sm_active_pct"])
    assert figures["fluctuation"] == pytest.approx(truth, rel=0.10)


def test_the_training_on_the_gpu_is_found_with_its_workers() -> None:
    with running("train", "--workers", "3") as load, Sampler() as sampler:
        roles = {process.pid: process.role for process in sampler.read().processes}
        assert roles[load["pid"]] == "trainer"
        assert list(roles.values()).count("worker") == 3
