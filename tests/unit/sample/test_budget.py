"""The budget, on machines recorded or written as text, and on this one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flatout.sample import budget

GIB = 2**30
Machine = Callable[[str], Path]


def test_a_machine_of_ones_own(machine: Machine) -> None:
    found = budget.measure(machine("vm-cgroup-v1-before"), environ={}, affinity=2)
    assert (found.cores_of_machine, found.cores_allowed, found.cores, found.ranks_on_node) == (2, 2.0, 1, 1)
    assert found.memory_bytes == 24682416 * 1024
    assert 0 < found.memory_available_bytes < found.memory_bytes
    assert found.reasons == ("1 of 2 cores are left to the training process and the system",)


def test_a_container_under_cgroup_v2(machine: Machine) -> None:
    found = budget.measure(machine("container-cgroup-v2"), environ={}, affinity=64)
    assert (found.cores_of_machine, found.cores_allowed, found.cores) == (64, 6.5, 5)
    assert found.memory_bytes == 32 * GIB
    assert found.memory_available_bytes == 34359738368 - (20000000000 - 12000000000)  # the page cache can be given back
    assert found.reasons[0] == "the cgroup's CPU quota is 6.5 cores"
    assert found.reasons[-1] == "the cgroup's memory limit is 32.0 GiB"


def test_a_container_under_cgroup_v1(machine: Machine) -> None:
    found = budget.measure(machine("container-cgroup-v1"), environ={}, affinity=16)
    assert (found.cores_allowed, found.cores) == (4.0, 2)
    assert found.memory_bytes == 16 * GIB
    assert found.memory_available_bytes == 16 * GIB - 4 * GIB
    assert found.reasons[:2] == (
        "the affinity mask allows 16 of 64 cores",
        "the cgroup's CPU quota is 4 cores",
    )


def test_a_quota_on_a_parent_counts(machine: Machine) -> None:
    found = budget.measure(machine("slice-cgroup-v2"), environ={}, affinity=64)
    assert found.cores_allowed == 8.0
    assert found.memory_bytes == 527988736 * 1024  # "max" is no limit


def test_an_affinity_mask(machine: Machine) -> None:
    found = budget.measure(machine("slice-cgroup-v2"), environ={}, affinity=6)
    assert (found.cores_allowed, found.cores) == (6.0, 4)
    assert found.reasons[0] == "the affinity mask allows 6 of 64 cores"


def test_ranks_share_the_cores_and_what_memory_is_left(machine: Machine) -> None:
    found = budget.measure(machine("container-cgroup-v2"), environ={"LOCAL_WORLD_SIZE": "2"}, affinity=64)
    alone = budget.measure(machine("container-cgroup-v2"), environ={}, affinity=64)
    assert (found.ranks_on_node, found.cores_allowed, found.cores) == (2, 3.25, 2)
    assert found.memory_available_bytes == alone.memory_available_bytes // 2
    assert "2 ranks share the node's cores" in found.reasons


def test_ranks_bound_to_cores_of_their_own_share_nothing(machine: Machine) -> None:
    """Slurm gave the job 32 cores; four tasks of 8 cores each have a mask, and the cgroup says it is not the job's."""
    environ = {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    found = budget.measure(machine("slurm-cgroup-v2"), environ=environ, affinity=8)
    assert (found.ranks_on_node, found.cores_allowed) == (4, 8.0)
    assert "each of the 4 ranks on this node has cores of its own" in found.reasons
    assert found.memory_bytes == 128 * GIB


def test_ranks_that_share_a_cpuset_do_not_each_have_all_of_it(machine: Machine) -> None:
    """The mask allows 16 of 64 cores, but that is the container's cpuset: two ranks have 16 cores together."""
    environ = {"LOCAL_WORLD_SIZE": "2"}
    found = budget.measure(machine("container-cgroup-v1"), environ=environ, affinity=16)
    assert "2 ranks share the node's cores" in found.reasons
    assert found.cores_allowed == 2.0


def test_a_quota_is_for_all_ranks_together_whatever_their_masks(machine: Machine) -> None:
    found = budget.measure(machine("container-cgroup-v2"), environ={"LOCAL_WORLD_SIZE": "4"}, affinity=4)
    assert "each of the 4 ranks on this node has cores of its own" in found.reasons
    assert found.cores_allowed == 6.5 / 4


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"WORLD_SIZE": "64"}, 1),
    ],
)
def test_launchers_say_how_many_ranks_share_the_node(machine: Machine, environ: dict[str, str], ranks: int) -> None:
    assert budget.measure(machine("slice-cgroup-v2"), environ=environ, affinity=64).ranks_on_node == ranks


def test_a_group_that_is_not_visible_is_read_at_the_mount(machine: Machine) -> None:
    root = machine("container-cgroup-v2")
    for path in ("/../../elsewhere", "/kubepods/pod1/container2"):
        (root / "proc/self/cgroup").write_text(f"0::{path}\n")
        assert budget.CgroupFiles(root).cpu_quota() == 6.5


def test_periods_in_which_the_quota_held_the_group_back(machine: Machine) -> None:
    assert budget.CgroupFiles(machine("container-cgroup-v2")).quota_periods() == (1000, 4000)
    assert budget.CgroupFiles(machine("slice-cgroup-v2")).quota_periods() == (20, 500)


def test_without_any_of_the_files_the_machine_itself_counts(tmp_path: Path) -> None:
    found = budget.measure(tmp_path, environ={}, affinity=os.cpu_count())
    assert found.cores_allowed == os.cpu_count()
    assert found.memory_bytes == psutil.virtual_memory().total
    assert found.shm_bytes is None


def test_files_that_make_no_sense_are_no_limit(machine: Machine) -> None:
    root = machine("container-cgroup-v2")
    for name in ("cpu.max", "memory.max", "cpu.stat"):
        (root / "sys/fs/cgroup" / name).write_text("nonsense here\n")
    found = budget.measure(root, environ={}, affinity=64)
    assert (found.cores_allowed, found.memory_bytes) == (64.0, 527988736 * 1024)


def test_here() -> None:
    found = budget.measure()
    assert 1 <= found.cores <= found.cores_allowed <= found.cores_of_machine == os.cpu_count()
    assert found.memory_available_bytes <= found.memory_bytes <= psutil.virtual_memory().total
