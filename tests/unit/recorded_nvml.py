"""An `nvml` that answers from a recording (see tests/data/nvml/record.py), and fails when told to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

RECORDINGS = Path(__file__).parents[1] / "data" / "nvml"
GPM_SLOTS = 16


class RecordedNvml:
    """Stands in for the module pynvml. `moment` and `reading` say which of the recorded answers is given."""

    NVMLError = pynvml.NVMLError
    NVML_GPM_METRICS_GET_VERSION = pynvml.NVML_GPM_METRICS_GET_VERSION

    def __init__(self, name: str = "h200") -> None:
        recording = json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))
        self._system = recording["system"]
        self._moments: dict[str, list[list[dict[str, Any]]]] = recording["moments"]
        self.moment = "idle"
        self.reading = 0
        self.gpus = [0]  # which recorded GPU each index is: [0, 0] is a machine with two like it
        self.failing: dict[str, int] = {}  # function → NVML error number, or all functions with "*"
        self.asked: list[str] = []
        self.gpm_buffers = 0
        self.running = False

    def nvmlInit(self) -> None:
        self._may_fail("nvmlInit")
        self.running = True

    def nvmlShutdown(self) -> None:
        self.running = False

    def nvmlDeviceGetCount(self) -> int:
        self._may_fail("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._may_fail("nvmlDeviceGetHandleByIndex")
        return index

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        self._may_fail("nvmlSystemGetProcessName")
        return str(_answer(self._gpu(0)["nvmlSystemGetProcessName"][str(pid)]))

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:
        self.gpm_buffers += 1
        return SimpleNamespace(moment=None)

    def nvmlGpmSampleFree(self, _sample: SimpleNamespace) -> None:
        self.gpm_buffers -= 1

    def nvmlGpmSampleGet(self, handle: int, sample: SimpleNamespace) -> None:
        self._may_fail("nvmlGpmSampleGet")
        sample.metrics = self._gpu(handle)["gpm"]

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(GPM_SLOTS)])

    def nvmlGpmMetricsGet(self, query: SimpleNamespace) -> None:
        self._may_fail("nvmlGpmMetricsGet")
        assert query.sample1 is not query.sample2
        for slot in range(query.numMetrics):
            recorded = query.sample2.metrics[str(query.metrics[slot].metricId)]
            query.metrics[slot].value, query.metrics[slot].nvmlReturn = recorded["value"], recorded["nvmlReturn"]

    def __getattr__(self, function: str) -> Any:
        if not function.startswith("nvml"):
            raise AttributeError(function)

        def ask(*arguments: int) -> Any:
            self._may_fail(function)
            if function.startswith("nvmlSystem"):
                return _answer(self._system[function][""])
            handle, *rest = arguments
            recorded = self._gpu(handle)[function]
            key = ",".join(str(argument) for argument in rest)
            # What is asked for from another time on with each call was recorded from 0 on.
            since_0 = {"nvmlDeviceGetSamples": "1,0", "nvmlDeviceGetProcessUtilization": "0"}
            return _answer(recorded[since_0.get(function, key)])

        return ask

    def _gpu(self, handle: int) -> dict[str, Any]:
        taken = self._moments[self.moment]
        return taken[min(self.reading, len(taken) - 1)][self.gpus[handle]]

    def _may_fail(self, function: str) -> None:
        self.asked.append(function)
        error = self.failing.get(function, self.failing.get("*"))
        if error is not None:
            raise pynvml.NVMLError(error)


def _answer(recorded: Any) -> Any:
    if isinstance(recorded, dict) and "error" in recorded:
        raise pynvml.NVMLError(recorded["error"])
    return _revived(recorded)


def _revived(recorded: Any) -> Any:
    if isinstance(recorded, dict):
        return SimpleNamespace(**{name: _revived(item) for name, item in recorded.items()})
    if isinstance(recorded, list):
        return [_revived(item) for item in recorded]
    return recorded
