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
from flatout.model.formatting import amount, count_of
from flatout.sample import budget
from flatout.sample.budget import Budget, CgroupFiles

SCHEMA = 1
TORCH_WITHIN_S = 60
SMALL_SHM_BYTES = 1 << 30
WIDTH = 80
_NARROWEST = 40
_CUDA_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")

# Packages that are not needed, and what each gives.
_EXTRAS = {
    "triton": "GPU augmentation in one kernel instead of operation by operation",
    "torchvision": "transforms that can be taken over to the GPU",
}
_PROBE = """
import json, torch
cuda = torch.version.cuda or getattr(torch.version, "hip", None)
found = {"version": torch.__version__, "cuda": cuda, "uuids": []}
try:
    if cuda:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            found["uuids"].append(str(getattr(torch.cuda.get_device_properties(index), "uuid", "")))
except Exception as problem:
    found["problem"] = str(problem).strip().splitlines()[0]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFound:
    """A GPU as the driver sees it. `cuda_index`: its number in programs; None where they do not see it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    compute_capability: str
    gpm: bool
    mig: bool
    cuda_index: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The torch of this Python, and the GPUs it sees. `problem`: why it does not import or sees none."""

    version: str | None = None
    cuda: str | None = None
    uuids: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What the driver says of itself. `problem`: why it does not answer; `pids`: processes on its GPUs."""

    version: str = "unknown"
    cuda: str = "unknown"
    problem: str | None = None
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Everything that was found."""

    flatout: str
    python: str
    system: str
    driver: Driver
    gpus: tuple[GpuFound, ...]
    torch: Torch
    budget: Budget
    cgroup: str | None
    environment: dict[str, str]
    extras: dict[str, str | None]
    missing: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything, for a program."""
        return {"record": "doctor", "schema": SCHEMA, **dataclasses.asdict(self)}


def examine(
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    nvml: Any = None,
    ask_torch: Callable[[], Torch] | None = None,
) -> Examination:
    """Look at everything. The arguments are for tests with recorded data."""
    torch = (ask_torch or probe_torch)()
    driver, gpus = _ask_driver(nvml or importlib.import_module("pynvml"), torch)
    found = Examination(
        flatout=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        driver=driver,
        gpus=gpus,
        torch=torch,
        budget=budget.measure(root, environ),
        cgroup=CgroupFiles(root).version,
        environment={name: environ[name] for name in _CUDA_VARIABLES if name in environ},
        extras={name: _version(name) for name in _EXTRAS},
    )
    missing = (*_missing_gpu(found, root), *_missing_torch(found), *_missing_host(found.budget, root))
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
    return Torch(**found | {"uuids": tuple(found["uuids"])})


def _ask_driver(nvml: Any, torch: Torch) -> tuple[Driver, tuple[GpuFound, ...]]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return Driver(problem=str(problem)), ()

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    count = ask("nvmlDeviceGetCount") or 0
    handles = {index: ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)}
    there = {index: handle for index, handle in handles.items() if handle is not None}
    gpus = tuple(_gpu(ask, index, handle, torch) for index, handle in there.items())
    running = [ask("nvmlDeviceGetComputeRunningProcesses", handle) or () for handle in there.values()]
    cuda = ask("nvmlSystemGetCudaDriverVersion") or 0
    driver = Driver(
        version=ask("nvmlSystemGetDriverVersion") or "unknown",
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        pids=tuple(process.pid for processes in running for process in processes),
    )
    nvml.nvmlShutdown()
    return driver, gpus


def _gpu(ask: Callable[..., Any], index: int, handle: Any, torch: Torch) -> GpuFound:
    uuid = str(ask("nvmlDeviceGetUUID", handle) or "")
    memory, gpm = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlGpmQueryDeviceSupport", handle)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle) or ["unknown"]
    seen = {seen.removeprefix("GPU-"): place for place, seen in enumerate(torch.uuids)}
    return GpuFound(
        index=index,
        uuid=uuid,
        name=str(ask("nvmlDeviceGetName", handle) or "unknown GPU"),
        memory_bytes=int(memory.total) if memory is not None else None,
        compute_capability=".".join(map(str, capability)),
        gpm=bool(gpm is not None and gpm.isSupportedDevice),
        mig=bool((ask("nvmlDeviceGetMigMode", handle) or [0])[0]),
        cuda_index=seen.get(uuid.removeprefix("GPU-")),
    )


def _missing_gpu(found: Examination, root: Path) -> Iterator[str]:
    if found.driver.problem is not None:
        said = f"No NVIDIA driver answers ({found.driver.problem})"
        yield f"{said}. Nothing can be said about a GPU: flatout top shows the host only."
    for gpu in found.gpus:
        if gpu.mig:
            yield f"GPU {gpu.index} is split (MIG): the driver gives no activity of the whole GPU, only its memory."
        elif not gpu.gpm:
            without = f"GPU {gpu.index} ({gpu.name}) has no GPM counters"
            yield f"{without}: how busy its SMs are is not known; power share and clocks stand in."
    if sys.platform == "linux" and any(not (root / "proc" / str(pid)).exists() for pid in found.driver.pids):
        hidden = "This container hides the processes that use the GPUs"
        yield f"{hidden}: trainings are found by their loader workers, or with --pid."


def _missing_torch(found: Examination) -> Iterator[str]:
    torch, visible = found.torch, found.environment.get("CUDA_VISIBLE_DEVICES")
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
    if torch.uuids and unseen and visible is not None:
        yield f"CUDA_VISIBLE_DEVICES={visible} hides GPU {', '.join(unseen)} from trainings started here."
    for gpu in found.gpus:
        if gpu.cuda_index not in (None, gpu.index):
            differ = f"CUDA calls the GPU {gpu.cuda_index} that nvidia-smi and flatout call {gpu.index}."
            if not visible:
                differ += " CUDA_DEVICE_ORDER=PCI_BUS_ID makes them agree."
            yield differ
            return


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
    if not found.missing:
        yield "Nothing is missing."
        return
    yield "Missing, and what that costs"
    for text in found.missing:
        yield from textwrap.wrap(text, width, initial_indent="  – ", subsequent_indent="    ")


def _entries(found: Examination) -> Iterator[tuple[str, str]]:
    driver, torch, allowed = found.driver, found.torch, found.budget
    if driver.problem is not None:
        yield "GPUs", f"none: no NVIDIA driver answers ({driver.problem})"
    else:
        yield "GPUs", f"{len(found.gpus)}, driver {driver.version}, made for CUDA up to {driver.cuda}"
    yield from ((f"  GPU {gpu.index}", " · ".join(_about_gpu(gpu))) for gpu in found.gpus)
    yield from (("", f"{name}={value}") for name, value in found.environment.items())
    if torch.version is None:
        yield "torch", f"not usable: {torch.problem}"
    elif torch.cuda:
        seen = count_of(len(torch.uuids), "GPU")
        yield "torch", f"{torch.version}, built for CUDA {torch.cuda}, sees {seen}"
    else:
        yield "torch", f"{torch.version}, built without CUDA"
    each = ""
    if allowed.ranks_on_node > 1:
        each = f" for each of {allowed.ranks_on_node} ranks"
    cores = f"{allowed.cores} for loading data, of {allowed.cores_of_machine}{each}"
    yield "cores", ": ".join(filter(None, (cores, "; ".join(allowed.reasons))))
    sizes = allowed.memory_bytes, allowed.memory_available_bytes, allowed.shm_bytes, allowed.shm_free_bytes
    memory, available, shm, free = (amount(size, "GiB") for size in sizes)
    yield "memory", f"{memory}, {available} available{each}"
    if allowed.shm_bytes is not None:
        yield "/dev/shm", f"{shm}, {free} free"
    yield "cgroup", found.cgroup or "none"
    there = [f"{name} {version}" for name, version in found.extras.items() if version]
    yield "extras", ", ".join(there) or "none"
    yield from (("", f"not there: {name} ({_EXTRAS[name]})") for name, version in found.extras.items() if not version)


def _about_gpu(gpu: GpuFound) -> Iterator[str]:
    yield gpu.name
    yield amount(gpu.memory_bytes, "GiB")
    yield f"compute capability {gpu.compute_capability}"
    yield "GPM" if gpu.gpm else "no GPM"
    if gpu.mig:
        yield "MIG"
    yield "not seen by CUDA" if gpu.cuda_index is None else f"CUDA {gpu.cuda_index}"
    yield gpu.uuid


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
