"""The words, to the letter."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest

from flatout.top.figures import Figures
from flatout.top.summary import TopSummary, line_of, reading_lines, size, style_of, sum_up, summary_lines
from flatout.trace import DiskSample, Sample

Make = Callable[..., Sample]


def summed(*samples: Sample, notes: tuple[str, ...] = ()) -> TopSummary:
    return sum_up(Figures(samples, cores_allowed=16.0), hostname="node-1", notes=notes)


def test_a_line_a_sample(make_sample: Make) -> None:
    disks = (DiskSample(name="sda", read_bytes_s=3 * 2**20, write_bytes_s=0.0),)
    sample = make_sample(sm=71.4, util=98, trainer_cpu=97, workers=8, cpu=43, host={"disks": disks})
    noon = time.mktime((2026, 11, 15, 12, 0, 5, 0, 0, -1))
    assert line_of(sample, noon, 16.0) == (
        "12:00:05 | GPU 0 SM 71% util 98% 70.0/140.0 GiB 350 W 60 °C 1980 MHz"
        " | CPU 43% iowait 0% memory 25% disk read 3.0 MiB/s | trainer 97% of a core, 8 workers 50% each"
    )


def test_a_line_names_the_stand_in_and_leaves_out_what_is_not_there(make_sample: Make) -> None:
    absent = dict.fromkeys(("temperature_c", "sm_clock_mhz", "memory_used_bytes"))
    sample = make_sample(util=98, cpu=None, gpu=absent, host={"iowait_pct": None, "memory_used_bytes": None})
    assert list(reading_lines(sample)) == ["GPU 0 power share 50% (for SM) util 98% 350 W", "CPU –"]


def test_a_process_whose_use_of_the_cpu_is_not_known_yet_is_not_idle(make_sample: Make) -> None:
    sample = make_sample(sm=50, trainer_cpu=97, workers=2)
    trainer, first, second = sample.processes
    unknown = [dataclasses.replace(process, cpu_pct=None) for process in (trainer, first)]
    *_, training = reading_lines(dataclasses.replace(sample, processes=(*unknown, second)))
    assert training == "trainer – of a core, 2 workers 50% each"


def test_the_summary_of_one_gpu(make_sample: Make) -> None:
    pulses = (0.0, 100.0)
    samples = [make_sample(float(t), sm=50, util=60, pulses=pulses, trainer_cpu=40, workers=2) for t in range(4)]
    assert list(summary_lines(summed(*samples, notes=("the disk is not known",)))) == [
        "flatout top · node-1 · 4.0 s · 4 samples",
        "",
        "Verdict: fluctuating – SM active swings between 0% (p5) and 100% (p95): idle 50%",
        "of the time, up to 0.5 s in a row.",
        "",
        "GPU 0 · NVIDIA H200                     mean      sd      p5     p50     p95",
        "  SM active, %                            50      50       0       0     100",
        "  GPU-Util, %                             60       0      60      60      60",
        "  memory, GiB of 140.0                  70.0     0.0    70.0    70.0    70.0",
        "  power, W of 700                        350       0     350     350     350",
        "  temperature, °C                         60       0      60      60      60",
        "  SM clock, MHz of 1980                 1980       0    1980    1980    1980",
        "  fluctuation 50.0 points, idle 50% of the time, longest 0.5 s, energy 0.39 Wh",
        "",
        "Host · 16 cores · 2 workers             mean      sd      p5     p50     p95",
        "  CPU, %                                  10       0      10      10      10",
        "  iowait, %                                0       0       0       0       0",
        "  memory, % of 128.0 GiB                  25       0      25      25      25",
        "  trainer, of a core, %                   40       0      40      40      40",
        "  each worker, of a core, %               50       0      50      50      50",
        "",
        "Targets",
        "  ✗ SM active, mean                         at least 80%                     50%",
        "  ✗ GPU-Util, mean                          at least 85%                     60%",
        "  ✗ fluctuation                             at most 10 points          50 points",
        "  ✗ GPU memory, peak                        70 to 90%                        50%",
        "  ✗ power share, mean                       at least 80%                     50%",
        "  ✓ temperature, peak                       at most 85 °C                  60 °C",
        "  ✓ CPU, mean                               at most 90%                      10%",
        "",
        "Note: the disk is not known.",
    ]


def test_one_core_and_one_point_are_not_written_as_plurals(make_sample: Make) -> None:
    samples = [make_sample(float(t), sm=sm, util=60) for t, sm in enumerate((90, 92, 92, 90))]
    one = sum_up(Figures(samples, cores_allowed=1.0), hostname="node-1")
    lines = list(summary_lines(one))
    assert any(line.startswith("Host · 1 core  ") for line in lines)
    assert any(line.endswith(" 1 point") for line in lines)
    assert "a fluctuation of 1 point," in one.verdict.reason


def test_several_gpus_have_a_row_each_and_targets_show_the_worst(make_sample: Make) -> None:
    hot = {"temperature_c": 88.0, "memory_used_bytes": 139 << 30}
    samples = [make_sample(float(t), sm=90, util=95, gpus=2) for t in range(3)]
    samples.append(make_sample(3.0, sm=90, util=95, gpu=hot))
    lines = list(summary_lines(summed(*samples)))
    assert lines[5:9] == [
        "GPU active   sd util idle   mem   power   heat  verdict",
        "  0    90%    0  95%   0%   99%   350 W  88 °C  near out of memory",
        "  1    90%    0  95%   0%   50%   350 W  60 °C  healthy",
        "  active: SM active, mean; mem and heat: peak",
    ]
    assert "  ✗ temperature, peak                       at most 85 °C          88 °C (GPU 0)" in lines


def test_a_gpu_without_gpm_says_what_stands_in(make_sample: Make) -> None:
    lines = list(summary_lines(summed(*(make_sample(float(t), util=99) for t in range(3)))))
    assert any(line.startswith("  power share, as there is no SM active, %") for line in lines)
    assert any(line.startswith("  ✗ SM active, mean (stand-in: power share) ") for line in lines)
    assert not any(line.startswith("  SM active, %") for line in lines)


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_nothing_is_wider_than_80_columns(make_sample: Make, gpus: int) -> None:
    everything = {"throttle": ("heat (hardware slowdown)",), "tensor_active_pct": 3.0, "dram_active_pct": 4.0}
    fields = {"sm": 100.0, "util": 100.0, "gpu": everything, "trainer_cpu": 100.0, "workers": 12, "gpus": gpus}
    samples = [make_sample(float(t), **fields) for t in range(200)]
    assert max(len(line) for line in summary_lines(summed(*samples, notes=("a long note " * 20,)))) <= 80


@pytest.mark.parametrize(
    ("line", "style"),
    [
        ("Verdict: healthy – all is well.", "bold green"),
        ("Verdict: starved – it waits.", "bold yellow"),
        ("Verdict: idle – nobody is there.", "bold"),
        ("  ✓ met", "green"),
        ("  ✗ missed", "red"),
        ("  – unknown", ""),
        ("  SM active, %", ""),
    ],
)
def test_colors(line: str, style: str) -> None:
    assert style_of(line) == style


def test_sizes_as_people_write_them() -> None:
    assert [size(n) for n in (None, 0, 2048, 150 * 2**20, 12.34 * 2**30, 3 * 2**40)] == [
        "–",
        "0 B",
        "2.0 KiB",
        "150 MiB",
        "12.3 GiB",
        "3.0 TiB",
    ]
