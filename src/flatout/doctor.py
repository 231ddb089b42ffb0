"""`flatout doctor`: what this machine has, what is missing, and what that costs.

`examine` builds the findings as data, `report_lines` puts them into words. torch is asked in a process of its own, so
that a broken installation cannot break the doctor. Nothing here needs a GPU, a driver or torch.
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

__all__ = ["Card", "Examination", "Torch", "examine", "probe_torch", "report_lines"]

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
class Card:
    """A card as the driver sees it; `cuda_index` is what programs call it, None where they do not see it."""

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
    """The torch of this Python. `problem`: why it does not import, or does not see a card."""

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
    cards: tuple[Card, ...]
    torch: Torch
    budget: Budget
    cgroup: str | None
    visible_devices: str | None
    device_order: str | None
    pieces: tuple[dict[str, str | None], ...]
    missing: tuple[str, ...]

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
    """What NVML says about the machine, as fields of an Examination; and the processes on its cards."""
    found: dict[str, Any] = {"driver": None, "driver_cuda": None, "driver_problem": None, "cards": ()}
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
    found["driver_cuda"] = f"{number // 1000}.{number % 1000 // 10}" if number else None
    handles = {index: ask("nvmlDeviceGetHandleByIndex", index) for index in range(ask("nvmlDeviceGetCount") or 0)}
    there = {index: handle for index, handle in handles.items() if handle is not None}
    found["cards"] = tuple(_card(ask, index, handle, torch) for index, handle in there.items())
    running = [ask("nvmlDeviceGetComputeRunningProcesses", handle) or () for handle in there.values()]
    nvml.nvmlShutdown()
    return found, {process.pid for processes in running for process in processes}


def _card(ask: Callable[..., Any], index: int, handle: Any, torch: Torch) -> Card:
    uuid = str(ask("nvmlDeviceGetUUID", handle) or "")
    capability, memory = ask("nvmlDeviceGetCudaComputeCapability", handle), ask("nvmlDeviceGetMemoryInfo", handle)
    gpm, mig = ask("nvmlGpmQueryDeviceSupport", handle), ask("nvmlDeviceGetMigMode", handle)
    places = range(ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0) if mig and mig[0] else ()
    instances = [ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place) for place in places]
    seen = [device["uuid"].removeprefix("GPU-") for device in torch.devices]
    bare = uuid.removeprefix("GPU-")
    return Card(
        index=index,
        uuid=uuid,
        name=str(ask("nvmlDeviceGetName", handle) or "unknown card"),
        memory_bytes=int(memory.total) if memory is not None else None,
        compute_capability=".".join(map(str, capability)) if capability is not None else None,
        gpm=bool(gpm is not None and gpm.isSupportedDevice),
        mig_instances=sum(one is not None for one in instances) if mig and mig[0] else None,
        cuda_index=seen.index(bare) if bare in seen else None,
    )


def _missing_gpu(found: Examination, pids: set[int], root: Path) -> Iterator[str]:
    if found.driver_problem is not None:
        said = f"No NVIDIA driver answers ({found.driver_problem})"
        yield f"{said}. Nothing can be said about a card: flatout top shows the host only."
    for card in found.cards:
        if card.mig_instances is not None:
            yield f"GPU {card.index} is split (MIG): the driver gives no activity of the whole card, only its memory."
        elif not card.gpm:
            without = f"GPU {card.index} ({card.name}) has no GPM counters"
            yield f"{without}: how busy its SMs are is not known; power share and clocks stand in."
    if sys.platform == "linux" and any(not (root / "proc" / str(pid)).exists() for pid in pids):
        hidden = "This container hides the processes that use the cards"
        yield f"{hidden}: trainings are found by their loader workers, or with --pid."


def _missing_torch(found: Examination) -> Iterator[str]:
    torch, visible = found.torch, found.visible_devices
    if torch.version is None:
        yield f"torch does not import in {sys.executable} ({torch.problem}): flatout can watch, but not run a training."
        return
    if torch.problem is not None:
        yield f"torch {torch.version} sees no card: {torch.problem}"
    elif found.cards and not torch.cuda:
        yield f"torch {torch.version} is built without CUDA: trainings of this Python run on the CPU."
    unseen = [str(card.index) for card in found.cards if card.cuda_index is None]
    if torch.devices and unseen and visible is not None:
        yield f"CUDA_VISIBLE_DEVICES={visible} hides GPU {', '.join(unseen)} from trainings started here."
    for card in [card for card in found.cards if card.cuda_index not in (None, card.index)][:1]:
        cure = "" if visible else " CUDA_DEVICE_ORDER=PCI_BUS_ID makes them agree."
        yield f"CUDA calls the card {card.cuda_index} that nvidia-smi and flatout call {card.index}.{cure}"


def _missing_host(allowed: Budget, root: Path) -> Iterator[str]:
    if sys.platform != "linux":
        yield f"This is {platform.system()}: flatout top and doctor work with what there is; training takes Linux."
        return
    if not (root / "proc/pressure").is_dir():
        yield "The kernel keeps no pressure figures (PSI): whether the disk holds things up is told from iowait alone."
    if allowed.shm_bytes is None:
        yield "There is no /dev/shm: loader workers cannot hand over batches."
    elif allowed.shm_bytes < SMALL_SHM_BYTES:
        yield (
            f"/dev/shm has only {allowed.shm_bytes / 2**20:.0f} MiB: loader workers hand batches over through it, "
            "and die when it is full. In docker, --shm-size=8g helps."
        )
    if allowed.cores_allowed < 2:
        yield "There is less than two cores: loader workers would take their time from the training process."


def report_lines(found: Examination, width: int = WIDTH) -> Iterator[str]:
    """The examination in words, at most 80 columns wide."""
    width = max(_NARROWEST, min(WIDTH, width))
    yield f"flatout {found.flatout} · Python {found.python} · {found.system}"
    yield ""
    for label, text in _entries(found):
        yield from textwrap.wrap(text, width, initial_indent=f"{label:<10}", subsequent_indent=" " * 10)
    yield ""
    yield "Missing, and what that costs" if found.missing else "Nothing is missing."
    for text in found.missing:
        yield from textwrap.wrap(text, width, initial_indent="  – ", subsequent_indent="    ")


def _entries(found: Examination) -> Iterator[tuple[str, str]]:
    """What was found, each under its label."""
    if found.driver_problem is not None:
        yield "GPUs", f"none: no NVIDIA driver answers ({found.driver_problem})"
    else:
        driver = f"driver {found.driver or 'unknown'}, made for CUDA up to {found.driver_cuda or '?'}"
        yield "GPUs", f"{len(found.cards)}, {driver}"
    yield from ((f"  GPU {card.index}", _card_words(card)) for card in found.cards)
    for name, value in (("CUDA_VISIBLE_DEVICES", found.visible_devices), ("CUDA_DEVICE_ORDER", found.device_order)):
        if value is not None:
            yield "", f"{name}={value}"
    yield "torch", _torch_words(found.torch)
    allowed = found.budget
    each = f" for each of {allowed.ranks_on_node} ranks" if allowed.ranks_on_node > 1 else ""
    reasons = f": {'; '.join(allowed.reasons)}" if allowed.reasons else ""
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


def _card_words(card: Card) -> str:
    words = (
        card.name,
        _gib(card.memory_bytes),
        f"compute capability {card.compute_capability or 'unknown'}",
        "GPM" if card.gpm else "no GPM",
        "not split" if card.mig_instances is None else f"MIG: {card.mig_instances} instances",
        f"CUDA {card.cuda_index}" if card.cuda_index is not None else "not seen by CUDA",
        card.uuid,
    )
    return " · ".join(words)


def _torch_words(torch: Torch) -> str:
    if torch.version is None:
        return f"not usable: {torch.problem}"
    if not torch.cuda:
        return f"{torch.version}, built without CUDA"
    return f"{torch.version}, built for CUDA {torch.cuda}, sees {len(torch.devices)} GPUs"


def _gib(size: int | None) -> str:
    return f"{size / 2**30:.1f} GiB" if size is not None else "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
