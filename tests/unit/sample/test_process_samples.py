"""Trainers, loader workers and the rest told apart: on a recorded machine, and on real trainings here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from flatout.sample.process import Tree, find_trainings
from flatout.trace import ProcessSample

Machine = Callable[[str], Path]


@pytest.fixture
def trainer() -> int:
    """The PID of the recorded training; its workers are the two processes after it in the recording."""
    return 18503


def roles(root: Path, roots: list[int], holders: list[int] | None = None) -> dict[int, str]:
    tree = Tree(root)
    samples = tree.read(0.0, roots, holders or ())
    return {sample.pid: sample.role for sample in samples}


def plant(root: Path, pid: int, parent: int, *, name: str, command: str, session: int | None = None) -> None:
    """One more process in a recorded machine, of its parent's session."""
    folder = root / "proc" / str(pid)
    folder.mkdir()
    above = root / "proc" / str(parent) / "stat"
    of_parent = above.read_text().rpartition(")")[2].split()[3] if above.exists() else "0"
    stat = [str(pid), f"({name})", "S", str(parent), str(pid), str(session or of_parent), *["0"] * 46]
    (folder / "stat").write_text(" ".join(stat) + "\n")
    (folder / "cmdline").write_text("\0".join(command.split(" ")) + "\0")


def rename(root: Path, pid: int, name: str) -> None:
    """Give a recorded process another name."""
    stat = root / "proc" / str(pid) / "stat"
    before, _, behind = stat.read_text().rpartition(")")
    stat.write_text(f"{before.partition('(')[0]}({name}){behind}")


def workers_of(root: Path, trainer: int) -> list[int]:
    stats = [(path.parent.name, path.read_text().split()) for path in (root / "proc").glob("[0-9]*/stat")]
    return sorted(int(pid) for pid, words in stats if words[3] == str(trainer))


def test_the_trainer_and_its_workers(machine: Machine, trainer: int) -> None:
    root = machine("vm-cgroup-v1-before")
    first, second = workers_of(root, trainer)
    assert roles(root, [trainer]) == {trainer: "trainer", first: "worker", second: "worker"}


def test_the_launcher_above_is_neither(machine: Machine, trainer: int) -> None:
    root = machine("vm-cgroup-v1-before")
    launcher = 18502
    found = roles(root, [launcher])
    assert (found[launcher], found[trainer]) == ("other", "trainer")
    assert sorted(found.values()) == ["other", "trainer", "worker", "worker"]


def test_what_a_process_did_between_two_moments(machine: Machine, trainer: int) -> None:
    def counters(root: Path) -> tuple[int, int, int]:
        folder = root / "proc" / str(trainer)
        words = (folder / "stat").read_text().rsplit(") ")[1].split()
        delay = int((folder / "schedstat").read_text().split()[1])
        return int(words[11]) + int(words[12]), delay, int((folder / "io").read_text().split()[1])

    root = machine("vm-cgroup-v1-before")
    before = counters(root)
    tree = Tree(root)
    first = tree.read(10.0, [trainer])[0]
    machine("vm-cgroup-v1-after")
    second = tree.read(12.0, [trainer])[0]

    after = counters(root)
    assert (first.cpu_pct, first.run_delay_pct, first.read_bytes_s) == (None, None, None)
    assert second.cpu_pct == pytest.approx((after[0] - before[0]) / 2)  # ticks are hundredths of a second
    assert second.run_delay_pct == pytest.approx((after[1] - before[1]) / 2e9 * 100)
    assert second.read_bytes_s == (after[2] - before[2]) / 2
    assert (second.name, second.role) == ("python", "trainer")
    assert (second.rss_bytes or 0) > 50e6
    assert (second.threads or 0) >= 1


def test_ranks_that_hold_memory_on_a_gpu_or_have_workers_are_trainers(machine: Machine, trainer: int) -> None:
    root = machine("vm-cgroup-v1-before")
    for pid in workers_of(root, trainer):
        rename(root, pid, "python")
    command = "python -c spawn_main() --multiprocessing-fork"
    for rank in (90001, 90002):
        plant(root, rank, trainer, name="python", command=command)
    plant(root, 90012, 90002, name="pt_data_worker", command=command)
    found = roles(root, [trainer], holders=[90001])
    assert [found[pid] for pid in (90001, 90002, 90012, trainer)] == ["trainer", "trainer", "worker", "other"]


def test_behind_a_fork_server_workers_belong_to_who_started_it(machine: Machine, trainer: int) -> None:
    root = machine("vm-cgroup-v1-before")
    server = "python -c from multiprocessing.forkserver import main; main(8, 9)"
    for pid in workers_of(root, trainer):
        rename(root, pid, "python")
    plant(root, 90001, trainer, name="python", command=server)
    plant(root, 90002, 90001, name="pt_data_worker", command=server)
    found = roles(root, [trainer])
    assert (found[trainer], found[90001], found[90002]) == ("trainer", "other", "worker")
    assert find_trainings(root) == (trainer,)


def test_trainings_are_found_by_their_workers(machine: Machine, trainer: int) -> None:
    assert find_trainings(machine("vm-cgroup-v1-before")) == (trainer,)


@pytest.mark.parametrize(
    ("adopter", "session"),
    [("/sbin/init", 1), ("tini -- bash train.sh", None), ("bash", None), ("python supervisor.py", 1)],
)
def test_who_has_adopted_a_worker_whose_trainer_died_trains_nothing(
    machine: Machine, trainer: int, adopter: str, session: int | None
) -> None:
    root = machine("vm-cgroup-v1-before")
    name = adopter.split()[0].rpartition("/")[2]
    plant(root, 90000, 0, name=name, command=adopter, session=session)
    plant(root, 90002, 90000, name="pt_data_worker", command="python train.py", session=90001)
    if session is None:
        plant(root, 90003, 90000, name="pt_data_worker", command="python train.py")
    assert find_trainings(root) == (trainer,)
    found = roles(root, [90000, trainer])
    assert (found[90000], found[90002], found[trainer]) == ("other", "worker", "trainer")


def test_a_training_that_has_changed_its_command_line_since_is_one(machine: Machine, trainer: int) -> None:
    root = machine("vm-cgroup-v1-before")
    (root / "proc" / str(trainer) / "cmdline").write_text("ray::train (python)\0")
    assert find_trainings(root) == (trainer,)


def test_a_name_with_brackets_and_spaces_does_not_confuse(machine: Machine, trainer: int) -> None:
    root = machine("vm-cgroup-v1-before")
    plant(root, 90001, trainer, name="my (odd) name", command="odd")
    tree = Tree(root)
    [odd] = [sample for sample in tree.read(0.0, [trainer]) if sample.pid == 90001]
    assert (odd.name, odd.state, odd.role) == ("my (odd) name", "S", "other")


def test_files_one_may_not_read_are_none(machine: Machine, trainer: int) -> None:
    root = machine("vm-cgroup-v1-before")
    for name in ("io", "schedstat"):
        (root / "proc" / str(trainer) / name).unlink()
    tree = Tree(root)
    tree.read(0.0, [trainer])
    sample = tree.read(1.0, [trainer])[0]
    assert (sample.read_bytes_s, sample.run_delay_pct) == (None, None)
    assert sample.cpu_pct == 0


def test_a_pid_that_is_not_to_be_seen_gives_nothing(machine: Machine) -> None:
    assert roles(machine("vm-cgroup-v1-before"), [4242]) == {}


# One worker forked and one spawned: both ways to be told apart, at the price of starting torch twice.
TRAINING = """
import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    torch.set_num_threads(1)
    loaders = [DataLoader(list(range(8)), num_workers=1, multiprocessing_context=way) for way in ("fork", "spawn")]
    batches = [iter(loader) for loader in loaders]
    for batch in batches:
        next(batch)
    print("ready", flush=True)
    input()
"""


def live(pid: int) -> dict[int, ProcessSample]:
    tree = Tree()
    tree.read(0.0, [pid])
    samples = tree.read(1.0, [pid])
    return {sample.pid: sample for sample in samples}


def test_a_real_training_here(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    with subprocess.Popen([sys.executable, script], stdin=PIPE, stdout=PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        found = live(child.pid)
        trainings = find_trainings()
        children = {process.pid: process.cmdline() for process in psutil.Process(child.pid).children()}
        child.communicate("\n")
    assert child.returncode == 0
    assert child.pid in trainings
    assert found[child.pid].role == "trainer"
    workers = [sample for sample in found.values() if sample.role == "worker"]
    assert sorted("--multiprocessing-fork" in children[worker.pid] for worker in workers) == [False, True]
    assert all((worker.rss_bytes or 0) > 10e6 for worker in workers)


def test_a_process_that_ends_between_reads_is_gone() -> None:
    tree = Tree()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=PIPE) as child:
        assert [sample.pid for sample in tree.read(0.0, [child.pid])] == [child.pid]
        child.kill()
        child.wait()
        assert tree.read(1.0, [child.pid]) == ()
        assert tree.read(20.0, [child.pid]) == ()


def test_a_process_nobody_has_waited_for_yet_is_gone_too() -> None:
    tree = Tree()
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert tree.read(0.0, [child.pid]) == ()
