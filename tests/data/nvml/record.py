"""Records what NVML answers on this machine, for tests that have no GPU.

    python tests/data/nvml/record.py OUT.json

Every function that flatout asks, in three moments (idle, an 8192³ bf16 matmul, tiny kernels), a few readings each:
function → arguments → answer, or {"error": number}. Takes about 20 s.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pynvml

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.loads import running

READINGS = 4
APART_S = 0.5
WARM_UP_S = 2.0
HISTORY = 12

OF_SYSTEM: list[tuple[str, tuple[int, ...]]] = [
    ("nvmlSystemGetDriverVersion", ()),
    ("nvmlSystemGetCudaDriverVersion", ()),
    ("nvmlDeviceGetCount", ()),
]
OF_GPU: list[tuple[str, tuple[int, ...]]] = [
    ("nvmlDeviceGetName", ()),
    ("nvmlDeviceGetUUID", ()),
    ("nvmlDeviceGetPciInfo", ()),
    ("nvmlDeviceGetCudaComputeCapability", ()),
    ("nvmlDeviceGetMigMode", ()),
    ("nvmlDeviceGetMaxMigDeviceCount", ()),
    ("nvmlGpmQueryDeviceSupport", ()),
    ("nvmlDeviceGetUtilizationRates", ()),
    ("nvmlDeviceGetMemoryInfo", ()),
    ("nvmlDeviceGetPowerUsage", ()),
    ("nvmlDeviceGetEnforcedPowerLimit", ()),
    ("nvmlDeviceGetTotalEnergyConsumption", ()),
    ("nvmlDeviceGetTemperature", (0,)),
    ("nvmlDeviceGetClockInfo", (1,)),
    ("nvmlDeviceGetClockInfo", (2,)),
    ("nvmlDeviceGetMaxClockInfo", (1,)),
    ("nvmlDeviceGetCurrentClocksThrottleReasons", ()),
    ("nvmlDeviceGetDecoderUtilization", ()),
    ("nvmlDeviceGetJpgUtilization", ()),
    ("nvmlDeviceGetComputeRunningProcesses", ()),
    ("nvmlDeviceGetProcessUtilization", (0,)),
    ("nvmlDeviceGetSamples", (1, 0)),
]
GPM_METRICS = (1, 2, 3, 5, 10, 20, 21)


def main() -> None:
    out = Path(sys.argv[1])
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    moments = {}
    for name in ("idle", "matmul", "tiny"):
        with nullcontext() if name == "idle" else running(name):
            time.sleep(WARM_UP_S)
            moments[name] = readings(handles)
    recording = {
        "nvidia-ml-py": importlib.metadata.version("nvidia-ml-py"),
        "recorded_unix_s": round(time.time()),
        "system": ask_all(OF_SYSTEM),
        "moments": moments,
    }
    out.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
    for name, taken in moments.items():
        gpu = taken[-1][0]
        util, sm = gpu["nvmlDeviceGetUtilizationRates"], gpu["gpm"]
        print(f"{name}: utilization {util}, SM active {sm.get('2')}, tensor active {sm.get('5')}")


def readings(handles: list[Any]) -> list[list[dict[str, Any]]]:
    """Several readings, each a list of GPUs."""
    buffers = [(gpm_sample(handle), gpm_sample(handle)) for handle in handles]
    taken = []
    for _ in range(READINGS):
        time.sleep(APART_S)
        gpus = []
        for place, handle in enumerate(handles):
            answers = ask_all(OF_GPU, handle)
            shorten_history(answers)
            before, free = buffers[place]
            answers["gpm"] = gpm_between(handle, before, free)
            buffers[place] = (free, before)
            answers["nvmlSystemGetProcessName"] = process_names(answers)
            gpus.append(answers)
        taken.append(gpus)
    return taken


def ask_all(calls: list[tuple[str, tuple[int, ...]]], *handle: Any) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for function, arguments in calls:
        key = ",".join(str(argument) for argument in arguments)
        answers.setdefault(function, {})[key] = ask(getattr(pynvml, function), *handle, *arguments)
    return answers


def ask(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return plain(function(*arguments))
    except pynvml.NVMLError as problem:
        return {"error": problem.value}


def plain(value: Any) -> Any:
    """NVML's structures as what JSON knows."""
    if isinstance(value, ctypes.Union):
        return {"uiVal": value.uiVal}
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_ if not name.startswith("reserved")}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    if hasattr(value, "__dict__"):
        return {name: plain(item) for name, item in vars(value).items()}
    return value


def shorten_history(answers: dict[str, Any]) -> None:
    """The driver hands out minutes of GPU-Util; the last seconds will do."""
    history = answers["nvmlDeviceGetSamples"]["1,0"]
    if isinstance(history, list):
        history[1] = history[1][-HISTORY:]


def process_names(answers: dict[str, Any]) -> dict[str, Any]:
    """By PID, without the folders of the machine that recorded."""
    found = answers["nvmlDeviceGetComputeRunningProcesses"][""]
    names = {}
    for process in found if isinstance(found, list) else []:
        name = ask(pynvml.nvmlSystemGetProcessName, process["pid"])
        names[str(process["pid"])] = name.rsplit("/", 1)[-1] if isinstance(name, str) else name
    return names


def gpm_sample(handle: Any) -> Any:
    try:
        sample = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(handle, sample)
    except pynvml.NVMLError:
        return None
    return sample


def gpm_between(handle: Any, before: Any, free: Any) -> dict[str, Any]:
    """Metric number → value, from the reading before to now; empty on a GPU without GPM."""
    if before is None or free is None:
        return {}
    query = pynvml.c_nvmlGpmMetricsGet_t()
    query.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    query.numMetrics = len(GPM_METRICS)
    for slot, number in enumerate(GPM_METRICS):
        query.metrics[slot].metricId = number
    try:
        pynvml.nvmlGpmSampleGet(handle, free)
        query.sample1, query.sample2 = before, free
        pynvml.nvmlGpmMetricsGet(query)
    except pynvml.NVMLError as problem:
        return {"error": problem.value}
    answers = (query.metrics[slot] for slot in range(len(GPM_METRICS)))
    return {str(a.metricId): {"value": a.value, "nvmlReturn": a.nvmlReturn} for a in answers}


if __name__ == "__main__":
    main()
