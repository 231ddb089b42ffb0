"""The table of hardware figures is complete: every measured field has an entry, every entry a value."""

from __future__ import annotations

from dataclasses import fields

from flatout.model.formatting import GPU_READINGS, HOST_READINGS, Reading, amount, shown_in
from flatout.model.hardware_samples import GpuSample, HostSample
from flatout.top.figures import host_readings
from flatout.trace import Sample

NOT_FIGURES = {"index", "uuid", "name", "processes", "pulses", "cores_pct", "disks"}
NOT_SHOWN = {"sm_clock_max_mhz", "shm_total_bytes"}  # limits of other readings
FROM_PULSES = {"pulse_low_pct", "pulse_high_pct"}


def test_every_measured_field_of_a_gpu_is_a_reading() -> None:
    measured = {field.name for field in fields(GpuSample)} - NOT_FIGURES - NOT_SHOWN
    assert not measured - _names(GPU_READINGS), "without a Reading in model/formatting.py"


def test_every_measured_field_of_the_host_is_a_reading() -> None:
    measured = {field.name for field in fields(HostSample)} - NOT_FIGURES - NOT_SHOWN
    assert not measured - _names(HOST_READINGS), "without a Reading in model/formatting.py"


def test_a_reading_is_in_no_place_that_does_not_show_it() -> None:
    """The live view and the report draw GPUs from the table; of the machine they say what is written there."""
    drawn = {reading.name for reading in HOST_READINGS if reading.shown & {"gauge", "report"}}
    assert not drawn, "write it in a panel of top/view.py and in report/run_view.py: no table draws the machine there"
    in_json = [reading.name for reading in shown_in("run", (*GPU_READINGS, *HOST_READINGS))]
    assert len(in_json) == len(set(in_json)), "the JSON of a run has GPU and machine in one object"
    of_machine = _names(shown_in("run", HOST_READINGS)) - {field.name for field in fields(HostSample)}
    assert not of_machine, "only top works these out"


def test_every_reading_can_be_read_from_a_sample() -> None:
    sample = Sample(time_s=1.0, interval_s=1.0, host=HostSample())
    assert _names(HOST_READINGS) <= host_readings(sample, None).keys()
    assert all(hasattr(GpuSample, name) for name in _names(GPU_READINGS) - FROM_PULSES)


def test_limits_are_fields_and_short_labels_fit_a_gauge() -> None:
    for reading, sample in [(r, GpuSample) for r in GPU_READINGS] + [(r, HostSample) for r in HOST_READINGS]:
        assert not reading.limit or hasattr(sample, reading.limit), reading.name
        if "gauge" in reading.shown:
            assert len(reading.short or reading.label) <= 10, reading.name


def test_a_reading_has_one_entry() -> None:
    for readings in (GPU_READINGS, HOST_READINGS):
        names = [reading.name for reading in readings]
        assert len(names) == len(set(names))
        assert all(reading.shown for reading in readings)


def test_values_are_written_with_their_unit() -> None:
    assert amount(71.4, "%") == "71%"
    assert amount(350.2, "W") == "350 W"
    assert amount(70 * 2**30, "GiB", 140 * 2**30) == "70.0/140.0 GiB"
    assert amount(3 * 2**20, "MiB/s") == "3.0 MiB/s"
    assert amount(None, "W") == "–"


def test_a_place_lists_its_readings_in_order() -> None:
    assert [r.name for r in shown_in("run", GPU_READINGS)] == [
        "gpu_util_pct",
        "sm_active_pct",
        "tensor_active_pct",
        "dram_active_pct",
        "memory_used_bytes",
        "power_w",
    ]


def _names(readings: tuple[Reading, ...]) -> set[str]:
    return {reading.name for reading in readings}
