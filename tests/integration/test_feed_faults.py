"""Workers, fork server and parent dying in every way, with real processes and real signals."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from flatout.feed import BadSampleError, DataLoader
from flatout.feed.scheduler import Auto

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(Dataset[Any]):
    """Samples that say who they are and draw a random number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full((16,), index), index, torch.rand(2)


def batches(loader: Any, seed: int = 0) -> list[Any]:
    """All batches of one pass, the sampler's order fixed by the seed."""
    torch.manual_seed(seed)
    return [[part.clone() for part in batch] for batch in loader]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


# --- killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "most"), [(Auto(1), 500), (3, 60)], ids=["while scaling", "of three declared"])
def test_five_hundred_kills_lose_repeat_and_reorder_nothing(workers: int, most: int) -> None:
    """GIVEN a loader that goes 1 → 8 → 2 → 6 workers, or has three, WHEN random children (workers, fork server) are
    killed after every batch, THEN each batch is bit for bit what it is without."""
    dataset = Numbers(19200)
    expected = batches(DataLoader(dataset, 16, shuffle=True, num_workers=2))
    loader = DataLoader(dataset, 16, shuffle=True, num_workers=workers, persistent_workers=True)
    pick = random.Random(7)
    me = psutil.Process()
    found, kills = [], 0
    torch.manual_seed(0)
    with ended(loader) as passing:
        for number, batch in enumerate(passing):
            found.append(batch)
            assert loader.feed is not None
            if number in (20, 150, 300):
                loader.feed.resize({20: 8, 150: 2, 300: 6}[number])
            kills += kill_some(me.children(recursive=True), pick, most=min(3, most - kills))
        assert kills == most
        assert loader.feed is not None
        assert loader.feed.account.redone > 0
        assert_same(found, expected)


@contextlib.contextmanager
def ended(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """A pass, and no worker after it: the traceback of a test that fails keeps the loader."""
    passing = iter(loader)
    try:
        yield passing
    finally:
        assert loader.feed is not None
        loader.feed.close()


def kill_some(children: list[psutil.Process], pick: random.Random, most: int) -> int:
    """Kill some of them, and say how many; those that have just died of an earlier kill do not count."""
    kills = 0
    for child in pick.sample(children, len(children)):
        if kills == most:
            break
        try:
            if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):  # the standard library's, no worker
                child.kill()
                kills += 1
        except psutil.Error:
            continue
    return kills


def test_sixty_workers_that_die_with_their_fork_server_are_replaced() -> None:
    """None of them has made a batch yet; nor have those that die while the loop uses up what lies ready."""
    loader = DataLoader(Numbers(2000), 4, num_workers=60)
    with ended(loader) as passing:
        kill_the_fork_server()
        found = [next(passing) for _ in range(10)]
        feed = loader.feed
        assert feed is not None
        wait_until(lambda: feed.is_ready() and feed.account.made_by_workers >= feed.batches_ahead + 10)
        for _ in range(50):
            kill_the_fork_server()
            found.append(next(passing))
        assert feed.account.deaths > 100
        found += passing
    assert torch.cat([index for _, index, _ in found]).tolist() == list(range(2000))


def kill_the_fork_server() -> None:
    for child in psutil.Process().children():
        if child.name().startswith("flatout") and child.status() != psutil.STATUS_ZOMBIE:
            child.kill()


class NoWorkersLookAtIt:
    home = os.getpid()

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        if os.getpid() != self.home:
            os._exit(3)
        return {}


def test_workers_that_always_die_before_their_first_batch_end_the_pass() -> None:
    dataset = Numbers(64)
    dataset.part = NoWorkersLookAtIt()  # type: ignore[attr-defined]
    loader = DataLoader(dataset, 8, num_workers=2)
    with ended(loader) as passing, pytest.raises(RuntimeError, match=r"before their first .* exited with code 3"):
        next(passing)


def test_the_scripts_own_signal_handlers_are_not_called_in_workers(tmp_path: Path) -> None:
    """GIVEN a script that saves a checkpoint on SIGUSR1, and a sender that sends it to all of its processes."""
    before = signal.signal(signal.SIGUSR1, lambda *_: (tmp_path / str(os.getpid())).touch())
    try:
        loader = DataLoader(range(64), batch_size=4, num_workers=2)  # type: ignore[arg-type]
        batches = iter(loader)
        next(batches)
        assert loader.feed is not None
        wait_until(lambda: len(pids_of(loader)) == 2)
        pids = pids_of(loader)
        for pid in (*pids, os.getpid()):
            os.kill(pid, signal.SIGUSR1)
        assert len([next(batches) for _ in range(15)]) == 15
        assert pids_of(loader) == pids
        assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
    finally:
        signal.signal(signal.SIGUSR1, before)


def pids_of(loader: DataLoader[Any]) -> list[int]:
    """Of the workers that have begun to work."""
    assert loader.feed is not None
    return [worker.pid for worker in loader.feed.pool if worker.pid]


def kill_a_worker(loader: DataLoader[Any]) -> None:
    wait_until(lambda: bool(pids_of(loader)))
    os.kill(pids_of(loader)[0], signal.SIGKILL)


def wait_until(true: Callable[[], bool], patience_s: float = 30) -> None:
    """Wait for a thing, not for a time."""
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# --- hung, lethal, raising --------------------------------------------------------------------------------------------


class HangsOnce(Numbers):
    def __init__(self, length: int, mark: Path) -> None:
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, index: int) -> Any:
        if index == 13 and not self.mark.exists():
            self.mark.touch()
            signal.pause()
        return super().__getitem__(index)


def test_a_hung_worker_is_replaced(tmp_path: Path) -> None:
    expected = batches(DataLoader(Numbers(64), 8, num_workers=1))
    loader = DataLoader(HangsOnce(64, tmp_path / "hung"), 8, num_workers=2, hang_timeout=1.0)
    assert_same(batches(loader), expected)
    assert loader.feed is not None
    assert loader.feed.account.deaths == 1


class Lethal(Numbers):
    """A sample that no worker survives, as a broken file does to a C library."""

    def __init__(self, length: int, lethal: int = 21) -> None:
        super().__init__(length)
        self.lethal = lethal
        self.samples = [(f"images/{number}.jpg", 0) for number in range(length)]

    def __getitem__(self, index: int) -> Any:
        if index == self.lethal:
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(index)


def test_a_sample_that_always_kills_is_named() -> None:
    loader = DataLoader(Lethal(64), 8, num_workers=2)
    with pytest.raises(BadSampleError, match=r"sample 21 \(images/21.jpg\) cannot be loaded: .*SIGSEGV"):
        list(loader)
    del loader
    gc.collect()


def test_a_sample_that_kills_is_named_in_the_midst_of_many_small_batches() -> None:
    loader = DataLoader(Lethal(2000, lethal=901), 4, num_workers=Auto(2), persistent_workers=True)
    found: list[int] = []
    with pytest.raises(BadSampleError, match=r"sample 901 \(images/901.jpg\)"):
        found.extend(row for _, index, _ in loader for row in index.tolist())
    assert found == list(range(900)), "the batches before it come first"
    del loader
    gc.collect()


def test_a_sample_that_always_kills_can_be_skipped_and_is_counted() -> None:
    loader = DataLoader(Lethal(64), 8, num_workers=2, on_bad_sample="skip")
    found = torch.cat([index for _, index, _ in loader]).tolist()
    assert found == [index for index in range(64) if index != 21]
    assert loader.feed is not None
    (bad,) = loader.feed.account.bad
    assert (bad.index, bad.name) == (21, "images/21.jpg")
    deaths = loader.feed.account.deaths
    assert torch.cat([index for _, index, _ in loader]).tolist() == found
    assert loader.feed.account.deaths == deaths, "it was tried again"


class Raising(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index in (8, 9, 10, 11, 21):
            raise OSError("truncated")
        return super().__getitem__(index)


def test_samples_that_raise_can_be_skipped_and_an_empty_batch_with_them() -> None:
    loader = DataLoader(Raising(32), 4, num_workers=2, on_bad_sample="skip")
    found = [index.tolist() for _, index, _ in loader]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19], [20, 22, 23],
                     [24, 25, 26, 27], [28, 29, 30, 31]]  # fmt: skip
    assert loader.feed is not None
    assert [bad.index for bad in loader.feed.account.bad] == [8, 9, 10, 11, 21]
    assert "truncated" in loader.feed.account.bad[0].why


class WaitsForTheOthers(Numbers):
    """Sample 0 takes until nearly all others of the first batches were made."""

    def __init__(self, length: int, marks: Path) -> None:
        super().__init__(length)
        self.marks = marks

    def __getitem__(self, index: int) -> Any:
        (self.marks / str(index)).touch()
        while index == 0 and len(list(self.marks.iterdir())) < 15:
            time.sleep(0.005)
        return super().__getitem__(index)


def test_a_slow_sample_does_not_hold_up_what_lies_behind_it(tmp_path: Path) -> None:
    """GIVEN two workers and batches of 4, WHEN sample 0 is not ready until 15 samples are begun, THEN the other worker
    takes over what lay behind it; without that this test would not end."""
    loader = DataLoader(WaitsForTheOthers(40, tmp_path), 4, num_workers=Auto(2))
    assert torch.cat([index for _, index, _ in loader]).tolist() == list(range(40))


# --- the parent's end -------------------------------------------------------------------------------------------------

SCRIPT = """
    import os, signal, sys, time
    import psutil, torch
    from flatout.feed import DataLoader

    class Pictures(torch.utils.data.Dataset):
        def __len__(self):
            return 400
        def __getitem__(self, index):
            return torch.full((64, 1024), index % 256, dtype=torch.uint8)

    if __name__ == "__main__":
        torch.set_num_threads(1)
        loader = DataLoader(Pictures(), 16, num_workers=2)
        for number, batch in enumerate(loader):
            if number == 3:
                while len(pids := psutil.Process().children(recursive=True)) < 3:
                    time.sleep(0.01)
                print(*(child.pid for child in pids), flush=True)
                {ending}
        print("end", flush=True)
"""

ENDINGS = {
    "break": "break",
    "exception": "raise ValueError('in the loop')",
    "exit": "sys.exit(3)",
    "hard exit": "os._exit(4)",
    "ctrl-c": "os.kill(0, signal.SIGINT); time.sleep(60)",
    "sigterm": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
    "sigkill": "os.kill(os.getpid(), signal.SIGKILL)",
    "dropped": "del loader; break",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_behind_however_the_script_ends(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{ending}", ENDINGS[ending]))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False, start_new_session=True
    )
    pids = [int(pid) for pid in done.stdout.splitlines()[0].split()]
    assert len(pids) == 3, done.stderr
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    named_after_them = [path for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in pids)]
    assert not named_after_them
    expected = {"break": 0, "dropped": 0, "exception": 1, "exit": 3, "hard exit": 4, "ctrl-c": -2, "sigterm": -15,
                "sigkill": -9}  # fmt: skip
    assert done.returncode == expected[ending], done.stderr
    assert "flatout/feed/fork_server" not in done.stderr  # no traceback of a child


def test_spawned_workers_end_with_a_killed_parent_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = (
        textwrap.dedent(SCRIPT).replace("{ending}", ENDINGS["sigkill"]).replace("num_workers=2", "num_workers=2, **HOW")
    )
    script.write_text("HOW = {'multiprocessing_context': 'spawn'}\n" + text)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    pids = [int(pid) for pid in done.stdout.splitlines()[0].split()]
    assert len(pids) == 3, done.stderr  # two workers, and multiprocessing's book-keeper
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    """GIVEN a /dev/shm of 64 MB as in a container, WHEN 200 MB are under way, THEN nothing is said and all arrives."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        from flatout.feed import DataLoader

        class Large(torch.utils.data.Dataset):
            def __len__(self):
                return 48
            def __getitem__(self, index):
                return torch.full((8 << 20,), index, dtype=torch.uint8)

        if __name__ == "__main__":
            torch.set_num_threads(1)
            total = sum(int(batch[:, 0].sum()) for batch in DataLoader(Large(), 4, num_workers=2))
            print("total", total)
        """)
    )
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a small /dev/shm")
    command = ["unshare", "-m", "sh", "-c", f"{mount} && exec '{sys.executable}' '{script}'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["total", str(sum(range(48)))], done.stderr


# --- start methods ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_every_start_method_gives_the_same_batches_and_survives_a_kill(method: str) -> None:
    expected = batches(DataLoader(Numbers(64), 8, shuffle=True, num_workers=1))
    loader = DataLoader(Numbers(64), 8, shuffle=True, num_workers=1, multiprocessing_context=method)
    torch.manual_seed(0)
    found = []
    for number, batch in enumerate(loader):
        found.append(batch)
        if number == 2:
            kill_a_worker(loader)
    assert_same(found, expected)
    if method == "forkserver":
        del loader
        forkserver._forkserver._stop()  # the standard library keeps one for ever


@pytest.mark.filterwarnings("ignore:Got pickle error")  # PyTorch's advice, beside the error
def test_a_dataset_that_cannot_be_pickled_gets_pytorchs_error() -> None:
    dataset = Numbers(8)
    dataset.open = lambda: None  # type: ignore[attr-defined]
    errors = []
    for loader_class in (TorchLoader, DataLoader):
        loader = loader_class(dataset, 2, num_workers=1, multiprocessing_context="spawn")
        with pytest.raises((AttributeError, pickle.PicklingError)) as caught:
            iter(loader)
        errors.append((type(caught.value), str(caught.value)))
        del caught, loader
    assert errors[0] == errors[1]
    gc.collect()


class _Rubbish:
    """In a circle with itself, so that only the collector finds it; tells of its end anywhere but at home."""

    def __init__(self, told: Path) -> None:
        self.itself = self
        self.home, self.told = os.getpid(), told

    def __del__(self) -> None:
        if os.getpid() != self.home:
            self.told.touch()


class _Collecting(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


@pytest.mark.parametrize("kind", [DataLoader, TorchLoader])
def test_workers_leave_the_rubbish_of_the_training_process_alone(kind: Any, tmp_path: Path) -> None:
    """There may be GPU memory in it, and to free that in a forked child aborts."""
    told = tmp_path / "freed elsewhere"
    gc.disable()
    try:
        rubbish = _Rubbish(told)
        del rubbish
        assert [int(n) for batch in kind(_Collecting(), batch_size=2, num_workers=2) for n in batch] == [*range(8)]
    finally:
        gc.enable()
    assert not told.exists()
    assert gc.isenabled()
