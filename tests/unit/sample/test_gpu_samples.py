"""The GPUs, from NVML's answers as recorded on an H200, and what becomes of errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pynvml
import pytest
from recorded_nvml import RecordedNvml

from flatout.model.errors import UsageError
from flatout.sample.gpu import Gpus, throttle_words
from flatout.trace import GpuSample

NOT_SUPPORTED, NOT_FOUND, TIMEOUT, LIBRARY_NOT_FOUND, GPU_IS_LOST = 3, 6, 10, 12, 15


@pytest.fixture
def nvml() -> RecordedNvml:
    return RecordedNvml()


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def watch(nvml: RecordedNvml, notes: list[str]) -> Iterator[Callable[..., Gpus]]:
    """Makes Gpus as they are at that moment, and closes them in the end."""
    made: list[Gpus] = []

    def make(indices: list[int] | None = None) -> Gpus:
        made.append(Gpus(indices, lambda text: None if text in notes else notes.append(text), nvml))
        return made[-1]

    yield make
    for gpus in made:
        gpus.close()
    assert nvml.gpm_buffers == 0
    assert not nvml.running


def read(gpus: Gpus, now_s: float) -> GpuSample:
    [sample] = gpus.read(now_s)
    return sample


def test_an_idle_gpu(watch: Callable[..., Gpus], notes: list[str]) -> None:
    gpus = watch()
    gpus.read(0.0)
    sample = read(gpus, 1.0)
    assert (sample.index, sample.name) == (0, "NVIDIA H200")
    assert sample.uuid.startswith("GPU-")
    assert sample.gpu_util_pct == 0
    assert sample.sm_active_pct is not None
    assert sample.sm_active_pct < 1
    assert sample.throttle == ("idle",)
    assert sample.processes == ()
    assert sample.memory_pct is not None
    assert sample.memory_pct < 5
    assert (sample.decoder_util_pct, sample.jpeg_util_pct) == (0, 0)
    assert sample.power_limit_w == 700
    assert notes == []


def test_a_gpu_full_of_matrix_products(nvml: RecordedNvml, watch: Callable[..., Gpus]) -> None:
    nvml.moment = "matmul"
    gpus = watch()
    gpus.read(0.0)
    sample = read(gpus, 1.0)
    assert sample.gpu_util_pct == 100
    assert (sample.sm_active_pct or 0) > 75
    assert (sample.tensor_active_pct or 0) > 60
    assert (sample.power_w or 0) > 300
    assert (sample.energy_j or 0) > 1e3
    assert [(p.name or "").startswith("python") for p in sample.processes or ()] == [True]
    assert sample.processes is not None
    assert (sample.processes[0].used_bytes or 0) > 400e6
    assert (sample.processes[0].sm_pct or 0) > 80


def test_a_process_that_only_holds_memory_uses_none_of_the_gpu(
    nvml: RecordedNvml, watch: Callable[..., Gpus], notes: list[str]
) -> None:
    """GIVEN a process on the GPU that the driver reported, WHEN it tells nothing new THEN that is 0, and WHEN it cannot
    be asked for once THEN nothing is known."""
    nvml.moment = "matmul"
    gpus = watch()
    seen = []
    for now_s, error in ((0.0, None), (5.0, NOT_FOUND), (10.0, TIMEOUT), (15.0, None)):
        nvml.failing = {} if error is None else {"nvmlDeviceGetProcessUtilization": error}
        [process] = read(gpus, now_s).processes or ()
        seen.append(process.sm_pct)
    assert seen == [88.0, 0.0, None, 88.0]
    assert notes == ["GPU 0: nvmlDeviceGetProcessUtilization is not known (Timeout)"]


@pytest.mark.parametrize(("error", "asked", "noted"), [(NOT_SUPPORTED, 1, True), (NOT_FOUND, 3, False)])
def test_a_driver_that_never_told_which_process_uses_the_gpu_leaves_it_open(
    nvml: RecordedNvml, watch: Callable[..., Gpus], notes: list[str], error: int, asked: int, noted: bool
) -> None:
    nvml.moment = "matmul"
    nvml.failing = {"nvmlDeviceGetProcessUtilization": error}
    gpus = watch()
    seen = [process.sm_pct for now_s in (0.0, 5.0, 10.0) for process in read(gpus, now_s).processes or ()]
    assert seen == [None, None, None]
    assert nvml.asked.count("nvmlDeviceGetProcessUtilization") == asked
    assert bool(notes) == noted


def test_a_use_that_cannot_be_is_not_believed(
    nvml: RecordedNvml, watch: Callable[..., Gpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is its time: asked for from then on, the driver would be silent for good."""
    nvml.moment = "matmul"
    [told] = nvml.nvmlDeviceGetProcessUtilization(0, 0)
    since = []

    def use(_handle: int, since_us: int) -> list[SimpleNamespace]:
        since.append(since_us)
        return [told, SimpleNamespace(pid=told.pid, timeStamp=2**63, smUtil=2147483632)]

    monkeypatch.setattr(nvml, "nvmlDeviceGetProcessUtilization", use, raising=False)
    gpus = watch()
    seen = [process.sm_pct for now_s in (0.0, 5.0) for process in read(gpus, now_s).processes or ()]
    assert seen == [88.0, 88.0]
    assert since == [0, told.timeStamp]


def test_tiny_kernels_look_busy_and_are_not(nvml: RecordedNvml, watch: Callable[..., Gpus]) -> None:
    nvml.moment = "tiny"
    gpus = watch()
    gpus.read(0.0)
    sample = read(gpus, 1.0)
    assert (sample.gpu_util_pct or 0) > 90
    assert sample.sm_active_pct is not None
    assert sample.sm_active_pct < 15


def test_the_first_read_has_levels_but_no_activity_yet(watch: Callable[..., Gpus]) -> None:
    first = read(watch(), 0.0)
    assert first.sm_active_pct is None
    assert first.pulses == ()
    assert first.power_w is not None


def test_pulses_come_out_with_the_next_read_and_never_too_close(nvml: RecordedNvml, watch: Callable[..., Gpus]) -> None:
    gpus = watch()
    gpus.read(0.0)
    nvml.moment = "matmul"
    for now_s in (0.125, 0.150, 0.250, 0.375):  # 0.150 comes 25 ms after the one before: GPM could not tell
        gpus.pulse(now_s)
    sample = read(gpus, 0.5)
    assert len(sample.pulses) == 4
    assert min(sample.pulses) > 75
    assert read(gpus, 0.55).pulses == ()
    assert read(gpus, 0.56).sm_active_pct == sample.sm_active_pct


def test_a_second_gpu_is_read_for_itself(nvml: RecordedNvml, watch: Callable[..., Gpus]) -> None:
    nvml.gpus = [0, 0]
    assert [sample.index for sample in watch().read(0.0)] == [0, 1]
    assert [sample.index for sample in watch([1, 1]).read(0.0)] == [1]


def test_a_counter_a_gpu_lacks_is_none_noted_once_and_not_asked_again(
    nvml: RecordedNvml, watch: Callable[..., Gpus], notes: list[str]
) -> None:
    nvml.failing = {"nvmlDeviceGetJpgUtilization": NOT_SUPPORTED}
    gpus = watch()
    samples = [read(gpus, float(second)) for second in range(3)]
    assert [sample.jpeg_util_pct for sample in samples] == [None, None, None]
    assert all(sample.power_w is not None for sample in samples)
    assert notes == ["GPU 0: nvmlDeviceGetJpgUtilization is not known (Not Supported)"]
    assert nvml.asked.count("nvmlDeviceGetJpgUtilization") == 1


def test_an_error_that_may_pass_is_asked_again(
    nvml: RecordedNvml, watch: Callable[..., Gpus], notes: list[str]
) -> None:
    gpus = watch()
    nvml.failing = {"nvmlDeviceGetPowerUsage": TIMEOUT}
    assert read(gpus, 0.0).power_w is None
    nvml.failing = {}
    assert read(gpus, 1.0).power_w is not None
    assert notes == ["GPU 0: nvmlDeviceGetPowerUsage is not known (Timeout)"]


def test_one_clock_unknown_does_not_cost_the_other(
    nvml: RecordedNvml, watch: Callable[..., Gpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    def clock(_handle: int, which: int) -> int:
        if which == 2:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return 1234

    monkeypatch.setattr(nvml, "nvmlDeviceGetClockInfo", clock, raising=False)
    gpus = watch()
    gpus.read(0.0)
    sample = read(gpus, 1.0)
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz) == (1234, None)


def test_a_gpu_that_falls_off_the_bus_is_noted_once_and_reads_as_nothing(
    nvml: RecordedNvml, watch: Callable[..., Gpus], notes: list[str]
) -> None:
    nvml.moment = "matmul"
    gpus = watch()
    gpus.read(0.0)
    assert (read(gpus, 1.0).sm_active_pct or 0) > 75
    nvml.failing = {"*": GPU_IS_LOST}
    for now_s in (2.0, 2.2, 40.0):
        gpus.pulse(now_s - 0.1)
        lost = read(gpus, now_s)
        assert lost == GpuSample(index=0, uuid=lost.uuid, name="NVIDIA H200")
    assert notes == ["GPU 0 is gone (GPU is lost): its figures end here"]


def test_gpm_that_stops_answering_leaves_no_old_figures(
    nvml: RecordedNvml, watch: Callable[..., Gpus], notes: list[str]
) -> None:
    nvml.moment = "matmul"
    gpus = watch()
    gpus.read(0.0)
    gpus.read(1.0)
    nvml.failing = {"nvmlGpmSampleGet": TIMEOUT}
    sample = read(gpus, 2.0)
    assert (sample.sm_active_pct, sample.pulses) == (None, ())
    assert sample.gpu_util_pct == 100
    assert notes == ["GPU 0: nvmlGpmSampleGet is not known (Timeout)"]
    nvml.failing = {}
    assert read(gpus, 3.0).sm_active_pct is None  # the first sample after the gap is a new start
    assert (read(gpus, 4.0).sm_active_pct or 0) > 75


def test_a_gpm_value_that_is_not_a_number_is_none(
    nvml: RecordedNvml, watch: Callable[..., Gpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    def metrics(query: SimpleNamespace) -> None:
        for slot in range(query.numMetrics):
            query.metrics[slot].value, query.metrics[slot].nvmlReturn = math.nan, 0

    monkeypatch.setattr(nvml, "nvmlGpmMetricsGet", metrics)
    gpus = watch()
    gpus.read(0.0)
    sample = read(gpus, 1.0)
    assert (sample.sm_active_pct, sample.pulses) == (None, ())


@pytest.fixture
def without_gpm(nvml: RecordedNvml) -> RecordedNvml:
    nvml.failing = {"nvmlGpmQueryDeviceSupport": NOT_SUPPORTED}
    return nvml


def test_without_gpm_it_says_what_stands_in(
    without_gpm: RecordedNvml, watch: Callable[..., Gpus], notes: list[str]
) -> None:
    sample = read(watch(), 0.0)
    assert sample.sm_active_pct is None
    assert sample.power_share_pct is not None
    [note] = notes
    assert "has no GPM counters: power share and clocks stand in for SM active" in note


def test_without_gpm_the_drivers_history_of_gpu_util_makes_the_pulses(
    without_gpm: RecordedNvml, watch: Callable[..., Gpus], notes: list[str]
) -> None:
    """GIVEN no news between two reads, THEN the history is asked for again, and nothing counts twice."""
    gpus = watch()
    assert read(gpus, 0.0).pulses == ()  # what was before the first read is not ours
    without_gpm.moment = "matmul"
    new = read(gpus, 1.0).pulses
    assert len(new) > 3
    assert min(new[-3:]) >= 99.0
    assert read(gpus, 2.0).pulses == ()
    without_gpm.failing["nvmlDeviceGetSamples"] = NOT_FOUND
    assert read(gpus, 3.0).pulses == ()
    del without_gpm.failing["nvmlDeviceGetSamples"]
    without_gpm.reading = 3
    assert len(read(gpus, 4.0).pulses) > 0
    assert len(notes) == 1


def test_no_driver_is_said_once_and_costs_only_the_gpus(
    nvml: RecordedNvml, watch: Callable[..., Gpus], notes: list[str]
) -> None:
    nvml.failing = {"nvmlInit": LIBRARY_NOT_FOUND}
    gpus = watch()
    gpus.pulse(0.0)
    assert gpus.read(0.0) == ()
    assert notes == ["no NVIDIA driver answers (NVML Shared Library Not Found): only the host is shown"]
    with pytest.raises(UsageError, match="there is no GPU 0: no NVIDIA driver answers"):
        watch([0])


@pytest.mark.parametrize(
    ("there", "asked", "text"),
    [(1, 3, "there is no GPU 3: this machine has 1"), (2, -1, "there is no GPU -1"), (0, 0, "this machine has 0")],
)
def test_an_index_that_is_not_there_is_refused(
    nvml: RecordedNvml, watch: Callable[..., Gpus], there: int, asked: int, text: str
) -> None:
    nvml.gpus = [0] * there
    with pytest.raises(UsageError, match=text):
        watch([asked])


def test_a_gpu_that_does_not_answer_at_the_start_is_left_out(
    nvml: RecordedNvml, watch: Callable[..., Gpus], notes: list[str]
) -> None:
    nvml.failing = {"nvmlDeviceGetHandleByIndex": GPU_IS_LOST}
    assert watch().read(0.0) == ()
    assert notes == ["GPU 0 does not answer (GPU is lost): it is left out"]


def test_throttle_reasons_in_words() -> None:
    assert throttle_words(0x44) == ("power cap", "heat (hardware slowdown)")
    assert throttle_words(0) == ()
