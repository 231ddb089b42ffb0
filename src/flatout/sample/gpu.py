"""The GPUs, through NVML; and what their SMs really do, through its GPM where the GPU has it (Hopper and
later).

GPU-Util says that a kernel was resident. GPM's counters say what share of the SMs, the tensor cores and the
memory had work; two readings of them, at least 100 ms apart, give the mean between. Nothing here changes a
GPU's settings.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter, itemgetter
from typing import Any

from flatout.model.errors import UsageError
from flatout.trace import GpuProcess, GpuSample

_PULSE_EVERY_S = 0.12  # GPM wants 100 ms between samples
_SLOW_EVERY_S = 5.0

# NVML's reasons for holding the clocks down, in words. The bits are fixed by its header.
THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "clocks set by an application",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software slowdown)",
    0x40: "heat (hardware slowdown)",
    0x80: "power brake",
    0x100: "display clocks",
}

# NVML's error numbers, by what they mean here. After any other error the question is asked again the
# next time. Bad argument, not supported, no permission, no such function, deprecated.
_NEVER = (2, 3, 4, 13, 26)
_NOTHING_NEW = (6, 21, 27)  # not found, no data, not ready
_LOST = (1, 9, 15, 16, 28)  # driver gone, GPU lost, reset required, no such GPU

# What is asked, and how often: NVML's function, its arguments, a factor to our unit, and the fields
# that it fills. What hardly changes is asked seldom, and so are energy and the highest clock: the
# driver takes 4 ms and 1 ms of CPU time.
Question = tuple[str, tuple[int, ...], float, Mapping[str, Callable[[Any], Any]]]
_WHOLE, _FIRST = (lambda answer: answer), itemgetter(0)
_MEMORY = {"memory_used_bytes": attrgetter("used"), "memory_total_bytes": attrgetter("total")}
_QUESTIONS: dict[float, tuple[Question, ...]] = {
    0.0: (
        ("nvmlDeviceGetUtilizationRates", (), 1.0, {"gpu_util_pct": attrgetter("gpu")}),
        ("nvmlDeviceGetMemoryInfo", (), 1, _MEMORY),
        ("nvmlDeviceGetPowerUsage", (), 1e-3, {"power_w": _WHOLE}),
        ("nvmlDeviceGetTemperature", (0,), 1.0, {"temperature_c": _WHOLE}),
        ("nvmlDeviceGetClockInfo", (1,), 1.0, {"sm_clock_mhz": _WHOLE}),
    ),
    _SLOW_EVERY_S: (
        ("nvmlDeviceGetEnforcedPowerLimit", (), 1e-3, {"power_limit_w": _WHOLE}),
        ("nvmlDeviceGetClockInfo", (2,), 1.0, {"memory_clock_mhz": _WHOLE}),
        ("nvmlDeviceGetDecoderUtilization", (), 1.0, {"decoder_util_pct": _FIRST}),
        ("nvmlDeviceGetJpgUtilization", (), 1.0, {"jpeg_util_pct": _FIRST}),
    ),
    30.0: (
        ("nvmlDeviceGetTotalEnergyConsumption", (), 1e-3, {"energy_j": _WHOLE}),
        ("nvmlDeviceGetMaxClockInfo", (1,), 1.0, {"sm_clock_max_mhz": _WHOLE}),
    ),
}

# The field that each GPM metric fills, and the factor to our unit. The numbers are fixed by NVML's header.
_SM_ACTIVE = "sm_active_pct"
_GPM_METRICS = {
    2: (_SM_ACTIVE, 1.0),
    3: ("sm_occupancy_pct", 1.0),
    5: ("tensor_active_pct", 1.0),
    10: ("dram_active_pct", 1.0),
    20: ("pcie_tx_bytes_s", 2.0**20),
    21: ("pcie_rx_bytes_s", 2.0**20),
}


class Gpus:
    """The GPUs asked for, by default all of them."""

    def __init__(self, indices: Sequence[int] | None, note: Callable[[str], None], nvml: Any = None) -> None:
        self._gpus: list[_Gpu] = []
        self._nvml = nvml or importlib.import_module("pynvml")
        try:
            self._nvml.nvmlInit()
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as problem:
            self._nvml = None
            if indices:
                raise UsageError(f"there is no GPU {indices[0]}: no NVIDIA driver answers ({problem})") from None
            note(f"no NVIDIA driver answers ({problem}): only the host is shown")
            return
        if indices is None:
            indices = range(count)
        for index in dict.fromkeys(indices):
            if not 0 <= index < count:
                self.close()
                raise UsageError(f"there is no GPU {index}: this machine has {count}, counted from 0")
            try:
                self._gpus.append(_Gpu(self._nvml, index, note))
            except self._nvml.NVMLError as problem:
                note(f"GPU {index} does not answer ({problem}): it is left out")

    def pulse(self, now_s: float) -> None:
        """Note how busy each GPU was since the last pulse."""
        for gpu in self._gpus:
            gpu.pulse(now_s)

    def read(self, now_s: float) -> tuple[GpuSample, ...]:
        """Each GPU since the last read."""
        return tuple(gpu.read(now_s) for gpu in self._gpus)

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is None:
            return
        for gpu in self._gpus:
            gpu.close()
        self._gpus.clear()
        with suppress(self._nvml.NVMLError):  # it is gone already
            self._nvml.nvmlShutdown()
        self._nvml = None


class _Gpu:
    def __init__(self, nvml: Any, index: int, note: Callable[[str], None]) -> None:
        self._nvml = nvml
        self._index = index
        self._note = note
        self._never: set[tuple[object, ...]] = set()
        self._lost = False
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._name = str(self._ask("nvmlDeviceGetName") or "unknown GPU")
        self._uuid = str(self._ask("nvmlDeviceGetUUID") or f"index-{index}")
        self._figures: dict[str, Any] = {}
        self._asked_s = dict.fromkeys(_QUESTIONS, -math.inf)
        self._pulses: list[float] = []
        self._last_util_us = 0
        self._last_use_us = 0
        self._gpm = _Gpm.on(nvml, self._handle)
        if self._gpm is None:
            note(f"GPU {index} ({self._name}) has no GPM counters: power share and clocks stand in for SM active")

    def pulse(self, now_s: float) -> None:
        if self._gpm is None or self._lost:
            return
        try:
            self._pulses += self._gpm.pulse(now_s)
        except self._nvml.NVMLError as problem:
            self._explain("nvmlGpmSampleGet", problem)

    def read(self, now_s: float) -> GpuSample:
        for every_s, questions in _QUESTIONS.items():
            if now_s - self._asked_s[every_s] >= every_s:
                self._asked_s[every_s] = now_s
                for question in questions:
                    self._figures |= self._answers(*question)
                if every_s == _SLOW_EVERY_S:
                    self._figures["processes"] = self._processes()
        self.pulse(now_s)
        activity: dict[str, float] = {}
        if self._gpm is not None:
            activity = self._gpm.since_last_read()
        else:
            self._pulses += self._util_history()
        pulses, self._pulses = tuple(self._pulses), []
        throttle = throttle_words(self._ask("nvmlDeviceGetCurrentClocksThrottleReasons"))
        known: dict[str, Any] = {"index": self._index, "uuid": self._uuid, "name": self._name}
        if self._lost:  # meanwhile: half a reading is worth nothing
            return GpuSample(**known)
        return GpuSample(**known, throttle=throttle, pulses=pulses, **(self._figures | activity))

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()

    def _answers(
        self, function: str, arguments: tuple[int, ...], factor: float, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The fields that one question fills; None in them without an answer."""
        answer = self._ask(function, *arguments)
        if answer is None:
            return dict.fromkeys(fields)
        return {field: take(answer) * factor for field, take in fields.items()}

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        running = self._ask("nvmlDeviceGetComputeRunningProcesses")
        if running is None:
            return None
        use = self._use_by_process()
        return tuple([self._process(answer, use) for answer in running])

    def _process(self, answer: Any, use: dict[int, float] | None) -> GpuProcess:
        sm_pct = None
        if use is not None:
            sm_pct = use.get(answer.pid, 0.0)
        try:
            name = str(self._nvml.nvmlSystemGetProcessName(answer.pid)).rsplit("/", 1)[-1] or None
        except self._nvml.NVMLError:
            name = None  # it has ended, or a container hides it
        return GpuProcess(pid=answer.pid, used_bytes=answer.usedGpuMemory, name=name, sm_pct=sm_pct)

    def _use_by_process(self) -> dict[int, float] | None:
        """How much of the recent time each process had work on the GPU; None where the driver does
        not say."""
        # A driver may never answer this. If one has answered before and does not now, nobody used the GPU.
        silence: list[Any] | None = None
        if self._last_use_us:
            silence = []
        answer = self._ask("nvmlDeviceGetProcessUtilization", self._last_use_us, nothing_new=silence)
        if answer is None:
            return None
        # Some drivers hand out memory they never wrote to.
        valid = [s for s in answer if s.smUtil <= 100]
        self._last_use_us = max((s.timeStamp for s in valid), default=self._last_use_us)
        return {s.pid: float(s.smUtil) for s in valid}

    def _util_history(self) -> list[float]:
        """GPU-Util at the driver's own pace (a few a second), for GPUs without GPM."""
        answer = self._ask("nvmlDeviceGetSamples", 1, self._last_util_us)
        if answer is None:
            return []
        new = [s for s in answer[1] if s.timeStamp > self._last_util_us]
        first_read = self._last_util_us == 0
        if new:
            self._last_util_us = new[-1].timeStamp
        if first_read:
            return []
        return [float(s.sampleValue.uiVal) for s in new]

    def _ask(self, function: str, *arguments: object, nothing_new: Any = None) -> Any:
        """What NVML answers, None without an answer, or `nothing_new`. What it will never answer is
        not asked again."""
        if self._lost or (function, *arguments) in self._never:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except AttributeError:
            self._never.add((function, *arguments))
            self._note(f"GPU {self._index}: {function} is not known (this nvidia-ml-py is too old)")
        except self._nvml.NVMLError as problem:
            if problem.value in _NEVER:
                self._never.add((function, *arguments))
            if problem.value in _NOTHING_NEW:
                return nothing_new
            self._explain(function, problem)
        return None

    def _explain(self, function: str, problem: Any) -> None:
        if problem.value in _LOST:
            self._lost = True
            self._note(f"GPU {self._index} is gone ({problem}): its figures end here")
        else:
            self._note(f"GPU {self._index}: {function} is not known ({problem})")


class _Gpm:
    """GPM counters of one GPU. Each pulse fills one of two buffers by turns; between two of them lie
    the figures."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._latest, self._before = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._query = nvml.c_nvmlGpmMetricsGet_t()
        self._query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._query.numMetrics = len(_GPM_METRICS)
        for slot, number in enumerate(_GPM_METRICS):
            self._query.metrics[slot].metricId = number
        self._latest_s: float | None = None
        self._sums = defaultdict[str, float](float)  # since the last read, each value times its seconds
        self._seconds = defaultdict[str, float](float)
        self._values: dict[str, float] = {}

    @classmethod
    def on(cls, nvml: Any, handle: Any) -> _Gpm | None:
        """GPM, where the GPU has it and permits it."""
        gpm = None
        try:
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                gpm = cls(nvml, handle)
                nvml.nvmlGpmSampleGet(handle, gpm._latest)
        except (nvml.NVMLError, AttributeError):
            if gpm is not None:
                gpm.close()
            return None
        return gpm

    def pulse(self, now_s: float) -> list[float]:
        """SM active since the last pulse: a list of one, or empty when it is too soon to say."""
        before_s = self._latest_s
        if before_s is not None and now_s - before_s < _PULSE_EVERY_S:
            return []
        self._latest, self._before, self._latest_s = self._before, self._latest, None
        try:
            self._nvml.nvmlGpmSampleGet(self._handle, self._latest)
        except self._nvml.NVMLError:
            self._values = {}  # the activity before is not that of now
            raise
        self._latest_s = now_s
        if before_s is None:
            return []
        found = self._since_before()
        for name, value in found.items():
            self._sums[name] += value * (now_s - before_s)
            self._seconds[name] += now_s - before_s
        return [found[_SM_ACTIVE]] if _SM_ACTIVE in found else []

    def since_last_read(self) -> dict[str, float]:
        """All metrics from the last read to the last pulse; those of the read before while no new
        pulse came."""
        if self._sums:
            self._values = {name: total / self._seconds[name] for name, total in self._sums.items()}
            self._sums.clear()
            self._seconds.clear()
        return self._values

    def close(self) -> None:
        for buffer in (self._latest, self._before):
            with suppress(self._nvml.NVMLError):  # it goes with the GPU
                self._nvml.nvmlGpmSampleFree(buffer)

    def _since_before(self) -> dict[str, float]:
        self._query.sample1, self._query.sample2 = self._before, self._latest
        try:
            self._nvml.nvmlGpmMetricsGet(self._query)
        except self._nvml.NVMLError:
            return {}
        found = {}
        for answer in itertools.islice(self._query.metrics, len(_GPM_METRICS)):
            if answer.nvmlReturn == 0 and math.isfinite(answer.value):
                name, factor = _GPM_METRICS[answer.metricId]
                found[name] = answer.value * factor
        return found


def throttle_words(bits: int | None) -> tuple[str, ...] | None:
    """NVML's bit mask of clock reasons in words."""
    if bits is None:
        return None
    return tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)
