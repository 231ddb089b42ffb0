"""The sampler: GPUs, machine and processes in one sample, and whom it follows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from recorded_nvml import RecordedNvml

from flatout.model.errors import UsageError
from flatout.sample.hardware import Sampler

Machine = Callable[[str], Path]
TRAINER = 18503  # of the recorded machine
LIBRARY_NOT_FOUND, GPU_IS_LOST = 12, 15


class Clock:
    """A clock one sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def nvml() -> RecordedNvml:
    return RecordedNvml()


def test_one_sample_holds_everything(machine: Machine, nvml: RecordedNvml) -> None:
    nvml.moment = "matmul"
    clock = Clock()
    with Sampler(pids=[TRAINER], clock=clock, root=machine("vm-cgroup-v1-before"), nvml=nvml) as sampler:
        assert sampler.read().interval_s == 0
        for clock.now_s in (100.5, 101.0, 101.5):
            sampler.pulse()
        machine("vm-cgroup-v1-after")
        clock.now_s = 102.0
        sample = sampler.read()
    assert (sample.time_s, sample.interval_s) == (102.0, 2.0)
    assert len(sample.gpus[0].pulses) == 4
    assert (sample.gpus[0].sm_active_pct or 0) > 75
    assert (sample.host.cpu_pct or 0) > 0
    assert [process.role for process in sample.processes] == ["trainer", "worker", "worker"]
    assert sampler.notes == []


def test_it_follows_who_holds_memory_on_a_gpu(machine: Machine, nvml: RecordedNvml) -> None:
    nvml.moment = "matmul"
    root = machine("vm-cgroup-v1-before")
    with Sampler(root=root, nvml=nvml) as sampler:
        [holder] = [process.pid for process in sampler.read().gpus[0].processes or ()]
    (root / "proc" / str(TRAINER)).rename(root / "proc" / str(holder))
    with Sampler(root=root, nvml=nvml) as sampler:
        assert [(p.pid, p.role) for p in sampler.read().processes] == [(holder, "trainer")]
        assert sampler.notes == []


def test_a_container_that_hides_pids_does_not_hide_the_training(machine: Machine, nvml: RecordedNvml) -> None:
    """The driver names processes of the host that this container cannot see; the training in it is found anyway."""
    nvml.moment = "matmul"
    with Sampler(root=machine("vm-cgroup-v1-before"), nvml=nvml) as sampler:
        assert [process.role for process in sampler.read().processes] == ["trainer", "worker", "worker"]
        sampler.read()
        [note] = sampler.notes
    assert "the processes that use the GPUs are not to be seen here" in note


def test_without_a_driver_the_host_half_works(machine: Machine, nvml: RecordedNvml) -> None:
    nvml.failing = {"nvmlInit": LIBRARY_NOT_FOUND}
    with Sampler(root=machine("vm-cgroup-v1-before"), nvml=nvml) as sampler:
        sampler.pulse()
        sample = sampler.read()
    assert sample.gpus == ()
    assert sample.host.memory_total_bytes is not None
    assert [process.role for process in sample.processes] == ["trainer", "worker", "worker"]
    assert [note for note in sampler.notes if "no NVIDIA driver" in note] == sampler.notes


def test_sampling_goes_on_after_a_gpu_is_lost(machine: Machine, nvml: RecordedNvml) -> None:
    with Sampler(root=machine("vm-cgroup-v1-before"), nvml=nvml) as sampler:
        sampler.read()
        nvml.failing = {"*": GPU_IS_LOST}
        sample = sampler.read()
    assert sample.gpus[0].power_w is None
    assert sample.host.cpu_pct is not None


def test_a_pid_that_is_not_there_is_refused_before_anything_is_opened(nvml: RecordedNvml) -> None:
    with pytest.raises(UsageError, match="there is no process 999999999"):
        Sampler(pids=[os.getpid(), 999999999], nvml=nvml)
    assert nvml.asked == []


def test_closing_lets_go_of_the_driver_and_no_descriptor_stays_open(machine: Machine, nvml: RecordedNvml) -> None:
    before = psutil.Process().num_fds()
    sampler = Sampler(root=machine("vm-cgroup-v1-before"), pids=[TRAINER], nvml=nvml)
    sampler.read()
    sampler.close()
    assert psutil.Process().num_fds() == before
    assert nvml.gpm_buffers == 0
