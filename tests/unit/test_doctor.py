"""The doctor: what it finds, what it says is missing, and its words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_nvml import RecordedNvml

from flatout import doctor
from flatout.doctor import Examination, Torch, examine, probe_torch, report_lines

Machine = Callable[[str], Path]
LIBRARY_NOT_FOUND, NOT_SUPPORTED = 12, 3
CPU_TORCH = Torch(version="2.13.0+cpu")


@pytest.fixture
def nvml() -> RecordedNvml:
    return RecordedNvml()


@pytest.fixture
def uuid(nvml: RecordedNvml) -> str:
    return str(nvml.nvmlDeviceGetUUID(0))


@pytest.fixture
def look(machine: Machine, nvml: RecordedNvml) -> Callable[..., Examination]:
    """Examines the recorded machine with the recorded gpu, and the torch and environment one gives."""

    def examined(torch: Torch = CPU_TORCH, **environ: str) -> Examination:
        root = machine("vm-cgroup-v1-before")
        (root / "dev/shm").mkdir(parents=True, exist_ok=True)
        return examine(root=root, environ=environ, nvml=nvml, ask_torch=lambda: torch)

    return examined


def seen_by_cuda(*uuids: str) -> Torch:
    return Torch(version="2.11.0", cuda="12.8", uuids=tuple(uuid.removeprefix("GPU-") for uuid in uuids))


def test_a_machine_with_a_gpu(look: Callable[..., Examination], nvml: RecordedNvml, uuid: str) -> None:
    found = look(seen_by_cuda(uuid))
    [gpu] = found.gpus
    assert (gpu.index, gpu.name, gpu.uuid, gpu.cuda_index) == (0, "NVIDIA H200", uuid, 0)
    assert (gpu.gpm, gpu.mig, gpu.compute_capability) == (True, False, "9.0")
    assert (gpu.memory_bytes or 0) > 140e9
    assert found.driver.problem is None
    assert found.missing == ()
    assert not nvml.running


def test_its_words_fit_eighty_columns(look: Callable[..., Examination], uuid: str) -> None:
    lines = list(report_lines(look(seen_by_cuda(uuid), CUDA_VISIBLE_DEVICES="0")))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "GPUs      1, driver " in text
    assert "  GPU 0   NVIDIA H200 · 140." in text
    assert "CUDA_VISIBLE_DEVICES=0" in text
    assert "torch     2.11.0, built for CUDA 12.8, sees 1 GPU" in text
    assert "cores     1 for loading data, of 2: 1 of 2 cores are left to the training" in text
    assert lines[-1] == "Nothing is missing."


def test_without_a_driver(look: Callable[..., Examination], nvml: RecordedNvml) -> None:
    nvml.failing = {"nvmlInit": LIBRARY_NOT_FOUND}
    found = look()
    assert found.gpus == ()
    lines = list(report_lines(found))
    assert "GPUs      none: no NVIDIA driver answers (NVML Shared Library Not Found)" in lines
    assert lines[-3:] == [
        "Missing, and what that costs",
        "  – No NVIDIA driver answers (NVML Shared Library Not Found). Nothing can be",
        "    said about a GPU: flatout top shows the host only.",
    ]


def test_without_gpm(look: Callable[..., Examination], nvml: RecordedNvml, uuid: str) -> None:
    nvml.failing = {"nvmlGpmQueryDeviceSupport": NOT_SUPPORTED}
    [missing] = look(seen_by_cuda(uuid)).missing
    assert missing == (
        "GPU 0 (NVIDIA H200) has no GPM counters: how busy its SMs are is not known; power share and clocks stand in."
    )


def test_a_gpu_split_by_mig(
    look: Callable[..., Examination], nvml: RecordedNvml, uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "nvmlDeviceGetMigMode", lambda _handle: [1, 1], raising=False)
    found = look(seen_by_cuda(uuid))
    assert found.gpus[0].mig
    assert found.missing[0].startswith("GPU 0 is split (MIG)")


def test_no_torch(look: Callable[..., Examination]) -> None:
    found = look(Torch(problem="ModuleNotFoundError: No module named 'torch'"))
    assert "not usable: ModuleNotFoundError: No module named 'torch'" in "\n".join(report_lines(found))
    assert "flatout run and fix work for a training in another Python" in found.missing[0]


def test_a_torch_without_cuda_beside_a_gpu(look: Callable[..., Examination]) -> None:
    assert look().missing[0].startswith("torch 2.13.0+cpu is built without CUDA")


def test_a_torch_that_cannot_reach_the_gpu(look: Callable[..., Examination]) -> None:
    found = look(Torch(version="2.11.0", cuda="12.8", problem="The NVIDIA driver on your system is too old"))
    assert found.missing[0] == "torch 2.11.0 sees no GPU: The NVIDIA driver on your system is too old"


def test_two_orders_of_gpus(look: Callable[..., Examination], nvml: RecordedNvml) -> None:
    """CUDA counts the fastest GPU first, the driver by its slot."""
    nvml.gpus = [0, 0]
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"  # type: ignore[attr-defined]
    found = look(seen_by_cuda("GPU-1", "GPU-0"))
    assert [gpu.cuda_index for gpu in found.gpus] == [1, 0]
    assert found.missing == (
        "CUDA calls the GPU 1 that nvidia-smi and flatout call 0. CUDA_DEVICE_ORDER=PCI_BUS_ID makes them agree.",
    )


def test_gpus_hidden_from_cuda(look: Callable[..., Examination], nvml: RecordedNvml) -> None:
    nvml.gpus = [0, 0]
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"  # type: ignore[attr-defined]
    found = look(seen_by_cuda("GPU-1"), CUDA_VISIBLE_DEVICES="1")
    assert found.missing == (
        "CUDA_VISIBLE_DEVICES=1 hides GPU 0 from trainings started here.",
        "CUDA calls the GPU 0 that nvidia-smi and flatout call 1.",
    )


def test_a_container_that_hides_pids(look: Callable[..., Examination], nvml: RecordedNvml, uuid: str) -> None:
    nvml.moment = "matmul"
    assert "hides the processes that use the GPUs" in look(seen_by_cuda(uuid)).missing[0]


def test_a_small_shm_and_few_cores(machine: Machine, nvml: RecordedNvml, uuid: str) -> None:
    def examined() -> tuple[str, ...]:
        root = machine("container-cgroup-v1")
        environ = {"LOCAL_WORLD_SIZE": "4"}
        return examine(root=root, environ=environ, nvml=nvml, ask_torch=lambda: seen_by_cuda(uuid)).missing

    pressure, shm, cores = examined()
    assert "pressure figures" in pressure
    assert "no /dev/shm" in shm
    assert "fewer than two cores" in cores


def test_a_docker_shm(monkeypatch: pytest.MonkeyPatch, look: Callable[..., Examination], uuid: str) -> None:
    monkeypatch.setattr(doctor, "SMALL_SHM_BYTES", 1 << 62)
    assert "die when it is full. In docker, --shm-size=8g helps." in look(seen_by_cuda(uuid)).missing[0]


def test_elsewhere_it_says_what_is_linux_only(
    look: Callable[..., Examination], uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    [missing] = look(seen_by_cuda(uuid)).missing
    assert missing.endswith("flatout top and doctor work with what there is; training needs Linux.")


def test_torch_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GIVEN a torch that says what it is, one that breaks, and one that hangs."""
    probe = doctor._PROBE

    def with_torch(body: str) -> Torch:
        (tmp_path / "torch.py").write_text(body)
        monkeypatch.setattr(doctor, "_PROBE", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{probe}")
        return probe_torch()

    fine = "__version__ = '9.9'\nclass version: cuda = None\nprint('hello from a plugin')"
    assert with_torch(fine) == Torch(version="9.9")
    broken = with_torch("raise ImportError('libcudart.so.99: cannot open shared object file')")
    assert broken.problem == "ImportError: libcudart.so.99: cannot open shared object file"
    assert with_torch("import os; os._exit(3)").problem == "exit code 3"
    monkeypatch.setattr(doctor, "TORCH_WITHIN_S", 0.3)
    assert with_torch("import threading; threading.Event().wait()").problem == "importing torch took more than 0.3 s"


def test_the_command_on_this_machine() -> None:
    """The real thing, once: words on stdout, JSON to a file, and no torch in the doctor's own process."""
    code = "import sys; from flatout.cli import app; app(['doctor', '--json', '-'], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["record"] == "doctor"
    assert found["torch"]["version"] is not None
    assert found["budget"]["cores"] >= 1
