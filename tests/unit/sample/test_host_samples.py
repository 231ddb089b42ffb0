"""The machine, from files recorded on one, written by hand for what it lacked, and live."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flatout.sample.hardware import Host, host_of
from flatout.trace import HostSample

Machine = Callable[[str], Path]


def read_twice(machine: Machine, seconds: float = 2.0) -> HostSample:
    """The recorded machine at its two moments, said to be `seconds` apart."""
    host = Host(machine("vm-cgroup-v1-before"))
    host.read(100.0)
    machine("vm-cgroup-v1-after")
    return host.read(100.0 + seconds)


def numbers(root: Path, name: str, label: str) -> list[int]:
    """The numbers behind a label in a file, the plain way."""
    for line in (root / name).read_text().splitlines():
        words = line.split()
        if label in words:
            return [int(word) for word in words[words.index(label) + 1 :] if word.isdigit()]
    raise AssertionError(f"no {label} in {name}")


def test_the_first_read_has_levels_but_no_rates(machine: Machine) -> None:
    host = Host(machine("vm-cgroup-v1-before"))
    sample = host.read(0.0)
    assert sample.memory_total_bytes == 24682416 * 1024
    assert sample.run_queue is not None
    assert (sample.cpu_pct, sample.cores_pct, sample.disks, sample.switches_s) == (None, None, None, None)


def test_cores_and_their_mean(machine: Machine) -> None:
    before = machine("vm-cgroup-v1-before")
    ticks = {core: numbers(before, "proc/stat", core) for core in ("cpu", "cpu0", "cpu1")}
    sample = read_twice(machine)
    after = {core: numbers(machine("vm-cgroup-v1-after"), "proc/stat", core) for core in ticks}

    def busy(core: str) -> float:
        passed = [now - was for now, was in zip(after[core][:8], ticks[core][:8], strict=True)]
        return 100 * (1 - (passed[3] + passed[4]) / sum(passed))

    assert sample.cpu_pct == pytest.approx(busy("cpu"))
    assert sample.cores_pct == pytest.approx((busy("cpu0"), busy("cpu1")))


def test_counters_become_rates(machine: Machine) -> None:
    before = machine("vm-cgroup-v1-before")
    switches = numbers(before, "proc/stat", "ctxt")[0]
    written = numbers(before, "proc/diskstats", "vda")[6]
    sample = read_twice(machine, seconds=2.0)
    after = machine("vm-cgroup-v1-after")
    assert sample.switches_s == (numbers(after, "proc/stat", "ctxt")[0] - switches) / 2
    assert sample.disks is not None
    [disk] = sample.disks  # neither loop devices nor zram count as disks
    assert disk.name == "vda"
    assert disk.write_bytes_s == (numbers(after, "proc/diskstats", "vda")[6] - written) * 512 / 2
    assert disk.busy_pct is not None
    assert 0 <= disk.busy_pct <= 100


def test_pressure_is_the_share_of_time_somebody_waited(machine: Machine) -> None:
    def total(root: Path, name: str) -> int:
        return int((root / "proc/pressure" / name).read_text().split("total=")[1].split()[0])

    before = total(machine("vm-cgroup-v1-before"), "cpu")
    sample = read_twice(machine, seconds=4.0)
    after = total(machine("vm-cgroup-v1-after"), "cpu")
    assert sample.pressure_cpu_pct == pytest.approx((after - before) / 4e6 * 100)
    assert sample.pressure_memory_pct == 0


def test_levels(machine: Machine) -> None:
    sample = read_twice(machine)
    root = machine("vm-cgroup-v1-after")
    kib = {name: numbers(root, "proc/meminfo", f"{name}:")[0] for name in ("MemTotal", "MemAvailable", "Cached")}
    assert sample.memory_used_bytes == (kib["MemTotal"] - kib["MemAvailable"]) * 1024
    assert sample.page_cache_bytes == kib["Cached"] * 1024
    assert sample.swap_used_bytes == 0
    assert sample.run_queue == numbers(root, "proc/stat", "procs_running")[0]


def test_in_a_container_memory_is_the_containers(machine: Machine) -> None:
    host = Host(machine("container-cgroup-v2"))
    sample = host.read(0.0)
    assert (sample.memory_total_bytes, sample.memory_used_bytes) == (34359738368, 8000000000)


def test_a_quota_that_holds_back_is_the_share_of_its_periods(machine: Machine) -> None:
    root = machine("container-cgroup-v2")
    host = Host(root)
    host.read(0.0)
    stat = root / "sys/fs/cgroup/cpu.stat"
    stat.write_text(stat.read_text().replace("nr_periods 4000", "nr_periods 4020").replace("led 1000", "led 1005"))
    assert host.read(2.0).throttled_pct == 25.0
    assert host.read(3.0).throttled_pct == 0.0  # nothing ran: nothing was held back


def test_raid_and_lvm_do_not_count_what_their_disks_count_already(machine: Machine) -> None:
    root = machine("vm-cgroup-v1-before")
    (root / "sys/block/dm-0/slaves/vda").mkdir(parents=True)
    with (root / "proc/diskstats").open("a") as file:
        file.write(" 253       0 dm-0 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9 9\n")
    host = Host(root)
    host.read(0.0)
    sample = host.read(1.0)
    assert [disk.name for disk in sample.disks or ()] == ["vda"]


def test_files_that_are_not_there_are_none(machine: Machine) -> None:
    root = machine("vm-cgroup-v1-before")
    for name in ("proc/pressure", "sys/block"):
        shutil.rmtree(root / name)
    (root / "proc/diskstats").unlink()
    (root / "proc/meminfo").unlink()
    host = Host(root)
    host.read(0.0)
    sample = host.read(1.0)
    assert (sample.pressure_cpu_pct, sample.pressure_io_pct, sample.disks) == (None, None, ())
    assert (sample.memory_total_bytes, sample.swap_used_bytes) == (None, None)
    assert sample.cpu_pct is not None


def test_no_proc_at_all_is_none_everywhere(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.read(0.0)
    sample = host.read(1.0)
    assert (sample.cpu_pct, sample.run_queue, sample.memory_used_bytes) == (None, None, None)


def test_this_machine() -> None:
    host = host_of(Path("/"))
    host.read(0.0)
    before = os.cpu_count()
    sample = host.read(1.0)
    assert len(sample.cores_pct or ()) == before
    assert 0 <= (sample.cpu_pct or 0) <= 100
    memory = psutil.virtual_memory()
    assert 0 < (sample.memory_used_bytes or 0) < (sample.memory_total_bytes or 0) <= memory.total
    assert (sample.run_queue or 0) >= 1  # at least this test runs


def test_elsewhere_psutil_gives_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    host = host_of(Path("/"))
    assert host.read(0.0).cpu_pct is None
    sample = host.read(1.0)
    assert len(sample.cores_pct or ()) == os.cpu_count()
    assert sample.memory_total_bytes == psutil.virtual_memory().total
    assert sample.disks is not None
    assert sample.iowait_pct is None
