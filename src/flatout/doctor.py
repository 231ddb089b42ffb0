"""`flatout doctor`: what this machine has, what is missing, and what that costs.

`examine` builds the findings as data, `report_lines` puts them into words. torch is asked in a process of its
own, so that a broken installation cannot break the doctor. Nothing here needs a GPU, a driver or torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.sample import budget
from flatout.sample.budget import Budget, CgroupFiles

__all__ = ["Examination", "GpuFound", "Torch", "examine", "probe_torch", "report_lines"]

SCHEMA = 1
TORCH_WITHIN_S = 60
SMALL_SHM_BYTES = 1 << 30
WIDTH, _NARROWEST = 80, 40

_OPTIONAL = {
    "triton": "GPU augmentation in one kernel instead of operation by operation",
    "torchvision": "transforms that can be taken over to the GPU",
    "pillow": "pictures of the workloads",
    "simplejpeg": "JPEG pictures of the workloads",
    "av": "videos of the workloads",
    "pyarrow": "parquet files of the workloads",
}
_PROBE = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda or getattr(torch.version, "hip", None)}
devices = []
try:
    if found["cuda"]:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append({"name": properties.name, "uuid": str(getattr(properties, "uuid", ""))})
except Exception as problem:
    found["problem"] = str(problem).strip().splitlines()[0]
print(json.dumps(found | {"devices": devices}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFound:
    """A GPU as the driver sees it. `cuda_index` is the number that programs use; None where they do not see it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    compute_capability: str | None
    gpm: bool
    mig_instances: int | None
    cuda_index: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The torch of this Python. `problem`: why it does not import, or does not see a GPU."""

    version: str | None = None
    cuda: str | None = None
    devices: tuple[dict[str, str], ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Everything that was found. `pieces` are packages that are not needed, but give something."""

    flatout: str
    python: str
    system: str
    driver: str | None
    driver_cuda: str | None
    driver_problem: str | None
    gpus: tuple[GpuFound, ...]
    torch: Torch
    budget: Budget
    cgroup: str | None
    visible_devices: str | None
    device_order: str | None
    pieces: tuple[dict[str, str | None], ...]
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything, for a program."""
        data = dataclasses.asdict(self)
        data["cards"] = data.pop("gpus")
        return {"record": "doctor", "schema": SCHEMA, **data}


def examine(
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    nvml: Any = None,
    ask_torch: Callable[[], Torch] | None = None,
) -> Examination:
    """Look at everything. The arguments are for tests with recorded data."""
    torch = (ask_torch or probe_torch)()
    driver, pids = _ask_driver(nvml or importlib.import_module("pynvml"), torch)
    found = Examination(
        flatout=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        **driver,
        torch=torch,
        budget=budget.measure(root, environ),
        cgroup=CgroupFiles(root).version,
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        device_order=environ.get("CUDA_DEVICE_ORDER"),
        pieces=tuple({"name": name, "version": _version(name), "gives": gives} for name, gives in _OPTIONAL.items()),
        missing=(),
    )
    missing = (*_missing_gpu(found, pids, root), *_missing_torch(found), *_missing_host(found.budget, root))
    return dataclasses.replace(found, missing=missing)


def probe_torch() -> Torch:
    """Import torch in a process of its own and see what it finds."""
    command, quiet = [sys.executable, "-c", _PROBE], subprocess.DEVNULL
    try:
        answer = subprocess.run(command, stdin=quiet, capture_output=True, text=True, timeout=TORCH_WITHIN_S)
    except subprocess.TimeoutExpired:
        return Torch(problem=f"importing torch took more than {TORCH_WITHIN_S} s")
    if answer.returncode != 0:
        return Torch(problem=(answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1])
    found = json.loads(answer.stdout.splitlines()[-1])
    return Torch(**found | {"devices": tuple(found["devices"])})


def _ask_driver(nvml: Any, torch: Torch) -> tuple[dict[str, Any], set[int]]:
    """What NVML says about the machine, as fields of an Examination; and the processes on its GPUs."""
    found: dict[str, Any] = {"driver": None, "driver_cuda": None, "driver_problem": None, "gpus": ()}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return found | {"driver_problem": str(problem)}, set()

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    number = ask("nvmlSystemGetCudaDriverVersion")
    found["driver"] = ask("nvmlSystemGetDriverVersion")
    if number:
        found["driver_cuda"] = f"{number // 1000}.{number % 1000 // 10}"
    handles = {index: ask("nvmlDeviceGetHandleByIndex", index) for index in range(ask("nvmlDeviceGetCount") or 0)}
    there = {index: handle for index, handle in handles.items() if handle is not None}
    found["gpus"] = tuple(_gpu(ask, index, handle, torch) for index, handle in there.items())
    running = [ask("nvmlDeviceGetComputeRunningProcesses", handle) or () for handle in there.values()]
    nvml.nvmlShutdown()
    return found, {process.pid for processes in running for process in processes}


def _gpu(ask: Callable[..., Any], index: int, handle: Any, torch: Torch) -> GpuFound:
    uuid = str(ask("nvmlDeviceGetUUID", handle) or "")
    capability, memory = ask("nvmlDeviceGetCudaComputeCapability", handle), ask("nvmlDeviceGetMemoryInfo", handle)
    gpm = ask("nvmlGpmQueryDeviceSupport", handle)
    seen = [device["uuid"].removeprefix("GPU-") for device in torch.devices]
    bare = uuid.removeprefix("GPU-")
    found: dict[str, Any] = {"memory_bytes": None, "compute_capability": None, "cuda_index": None}
    if memory is not None:
        found["memory_bytes"] = int(memory.total)
    if capability is not None:
        found["compute_capability"] = ".".join(map(str, capability))
    if bare in seen:
        found["cuda_index"] = seen.index(bare)
    return GpuFound(
        index=index,
        uuid=uuid,
        name=str(ask("nvmlDeviceGetName", handle) or "unknown GPU"),
        gpm=bool(gpm is not None and gpm.isSupportedDevice),
        mig_instances=_mig_instances(ask, handle),
        **found,
    )


def _mig_instances(ask: Callable[..., Any], handle: Any) -> int | None:
    """Into how many instances a GPU is split; None where it is not."""
    mode = ask("nvmlDeviceGetMigMode", handle)
    if not mode or not mode[0]:
        return None
    places = range(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    return sum(ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place) is not None for place in places)


def _missing_gpu(found: Examination, pids: set[int], root: Path) -> Iterator[str]:
    if found.driver_problem is not None:
        said = f"No NVIDIA driver answers ({found.driver_problem})"
        yield f"{said}. Nothing can be said about a GPU: flatout top shows the host only."
    for gpu in found.gpus:
        if gpu.mig_instances is not None:
            yield f"GPU {gpu.index} is split (MIG): the driver gives no activity of the whole GPU, only its memory."
        elif not gpu.gpm:
            without = f"GPU {gpu.index} ({gpu.name}) has no GPM counters"
            yield f"{without}: how busy its SMs are is not known; power share and clocks stand in."
    if sys.platform == "linux" and any(not (root / "proc" / str(pid)).exists() for pid in pids):
        hidden = "This container hides the processes that use the GPUs"
        yield f"{hidden}: trainings are found by their loader workers, or with --pid."


def _missing_torch(found: Examination) -> Iterator[str]:
    torch, visible = found.torch, found.visible_devices
    if torch.version is None:
        yield (
            f"torch does not import in {sys.executable} ({torch.problem}): flatout train does not work there. "
            "flatout run and fix work for a training in another Python: flatout run -- /path/to/python train.py"
        )
        return
    if torch.problem is not None:
        yield f"torch {torch.version} sees no GPU: {torch.problem}"
    elif found.gpus and not torch.cuda:
        yield f"torch {torch.version} is built without CUDA: trainings of this Python run on the CPU."
    unseen = [str(gpu.index) for gpu in found.gpus if gpu.cuda_index is None]
    if torch.devices and unseen and visible is not None:
        yield f"CUDA_VISIBLE_DEVICES={visible} hides GPU {', '.join(unseen)} from trainings started here."
    renumbered = [gpu for gpu in found.gpus if gpu.cuda_index not in (None, gpu.index)]
    if renumbered:
        first, cure = renumbered[0], ""
        if not visible:
            cure = " CUDA_DEVICE_ORDER=PCI_BUS_ID makes them agree."
        yield f"CUDA calls the GPU {first.cuda_index} that nvidia-smi and flatout call {first.index}.{cure}"


def _missing_host(allowed: Budget, root: Path) -> Iterator[str]:
    if sys.platform != "linux":
        yield f"This is {platform.system()}: flatout top and doctor work with what there is; training needs Linux."
        return
    if not (root / "proc/pressure").is_dir():
        yield "The kernel keeps no pressure figures (PSI): whether the disk is the brake is judged by iowait alone."
    if allowed.shm_bytes is None:
        yield "There is no /dev/shm: loader workers cannot hand over batches."
    elif allowed.shm_bytes < SMALL_SHM_BYTES:
        yield (
            f"/dev/shm has only {allowed.shm_bytes / 2**20:.0f} MiB: loader workers hand batches over through it, "
            "and die when it is full. In docker, --shm-size=8g helps."
        )
    if allowed.cores_allowed < 2:
        yield "There are fewer than two cores: loader workers would take time from the training process."


def report_lines(found: Examination, width: int = WIDTH) -> Iterator[str]:
    """The examination in words, at most 80 columns wide."""
    width = max(_NARROWEST, min(WIDTH, width))
    yield f"flatout {found.flatout} · Python {found.python} · {found.system}"
    yield ""
    for label, text in _entries(found):
        yield from textwrap.wrap(text, width, initial_indent=f"{label:<10}", subsequent_indent=" " * 10)
    yield ""
    if found.missing:
        yield "Missing, and what that costs"
    else:
        yield "Nothing is missing."
    for text in found.missing:
        yield from textwrap.wrap(text, width, initial_indent="  – ", subsequent_indent="    ")


def _entries(found: Examination) -> Iterator[tuple[str, str]]:
    """What was found, each under its label."""
    if found.driver_problem is not None:
        yield "GPUs", f"none: no NVIDIA driver answers ({found.driver_problem})"
    else:
        driver = f"driver {found.driver or 'unknown'}, made for CUDA up to {found.driver_cuda or '?'}"
        yield "GPUs", f"{len(found.gpus)}, {driver}"
    yield from ((f"  GPU {gpu.index}", _gpu_words(gpu)) for gpu in found.gpus)
    for name, value in (("CUDA_VISIBLE_DEVICES", found.visible_devices), ("CUDA_DEVICE_ORDER", found.device_order)):
        if value is not None:
            yield "", f"{name}={value}"
    yield "torch", _torch_words(found.torch)
    allowed = found.budget
    each, reasons = "", ""
    if allowed.ranks_on_node > 1:
        each = f" for each of {allowed.ranks_on_node} ranks"
    if allowed.reasons:
        reasons = f": {'; '.join(allowed.reasons)}"
    yield "cores", f"{allowed.cores} for loading data, of {allowed.cores_of_machine}{each}{reasons}"
    yield "memory", f"{_gib(allowed.memory_bytes)}, {_gib(allowed.memory_available_bytes)} available{each}"
    if allowed.shm_bytes is not None:
        yield "/dev/shm", f"{_gib(allowed.shm_bytes)}, {_gib(allowed.shm_free_bytes)} free"
    yield "cgroup", found.cgroup or "none"
    there = [f"{piece['name']} {piece['version']}" for piece in found.pieces if piece["version"]]
    yield "extras", ", ".join(there) or "none"
    for piece in found.pieces:
        if not piece["version"]:
            yield "", f"not there: {piece['name']} ({piece['gives']})"


def _gpu_words(gpu: GpuFound) -> str:
    gpm, split, number = "no GPM", "not split", "not seen by CUDA"
    if gpu.gpm:
        gpm = "GPM"
    if gpu.mig_instances is not None:
        split = f"MIG: {gpu.mig_instances} instances"
    if gpu.cuda_index is not None:
        number = f"CUDA {gpu.cuda_index}"
    capability = f"compute capability {gpu.compute_capability or 'unknown'}"
    return " · ".join((gpu.name, _gib(gpu.memory_bytes), capability, gpm, split, number, gpu.uuid))


def _torch_words(torch: Torch) -> str:
    if torch.version is None:
        return f"not usable: {torch.problem}"
    if not torch.cuda:
        return f"{torch.version}, built without CUDA"
    return f"{torch.version}, built for CUDA {torch.cuda}, sees {len(torch.devices)} GPUs"


def _gib(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
