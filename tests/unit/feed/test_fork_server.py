"""What a worker does to its process before it loads anything, and what starting one does to the training's."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from multiprocessing.popen_fork import Popen

import psutil
import pytest
from torch.utils.data import DataLoader as TorchLoader

from flatout.feed import DataLoader
from flatout.feed.loader import LoaderOptions, iterator_for

FAULTS = """
import resource
from flatout.feed import fork_server

def faults(rounds=4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        samples = [bytes(150_000) for _ in range(256)]
        del samples
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
fork_server._keep_freed_memory()
faults(1)
print(given_back, faults())
"""


def test_memory_of_a_batch_serves_the_next_one() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert kept < given_back / 20, (given_back, kept)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python warns of the fork itself there")
def test_a_warning_of_the_script_is_not_shown_again_because_workers_were_started() -> None:
    """GIVEN a warning that Python shows once for its line, WHEN a loader starts workers, THEN it stays at once."""

    def warn() -> None:
        warnings.warn("told once", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        warn()
        assert len(list(DataLoader(range(8), 4, num_workers=1))) == 2  # type: ignore[arg-type]
        warn()
    assert [str(warning.message) for warning in shown].count("told once") == 1


def test_workers_are_not_in_the_process_group_of_the_training() -> None:
    """GIVEN a loader's workers, THEN a Jupyter kernel, which at its end waits for the children in its group to be gone
    and reaps none, finds none of them there."""
    loader = DataLoader(range(64), 4, num_workers=1)  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    named = {child.name(): os.getpgid(child.pid) for child in psutil.Process().children(recursive=True)}
    ours = {name: group for name, group in named.items() if name.startswith("flatout-")}
    assert "flatout-worker" in ours
    assert os.getpgrp() not in ours.values()
    assert len(list(batches)) == 15


@pytest.fixture(params=[0, 1])
def forks_permitted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many workers a fork server can start: then it is at the user's limit on processes."""
    ours, left = os.getpid(), [request.param]
    launch = Popen._launch

    def limited(self: Popen, process: object) -> None:
        if os.getpid() != ours:
            if not left[0]:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            left[0] -= 1
        launch(self, process)

    monkeypatch.setattr(Popen, "_launch", limited)
    return int(request.param)


def test_at_the_limit_on_processes_the_workers_that_there_are_have_to_do(forks_permitted: int) -> None:
    """As many as were declared cannot be had: with none it is said why, as PyTorch says it; one makes all batches."""
    loader = DataLoader(list(range(40)), batch_size=4, num_workers=2)
    if not forks_permitted:
        with pytest.raises(RuntimeError, match=r"could not be started \(Resource temporarily unavailable\)"):
            list(loader)
    else:
        assert [batch.tolist() for batch in loader] == [list(range(first, first + 4)) for first in range(0, 40, 4)]


def test_a_script_that_asked_for_no_workers_goes_on_without(forks_permitted: int) -> None:
    """GIVEN `run --auto`, which gives a loader without workers some, WHEN the limit on processes permits none, THEN the
    script gets its batches all the same."""
    reasons: list[str] = []
    loader = TorchLoader(list(range(40)), batch_size=4)
    iterator, _ = iterator_for(loader, LoaderOptions(workers="auto"), give_back=reasons.append)
    assert iterator is not None
    assert [batch.tolist() for batch in iterator] == [list(range(first, first + 4)) for first in range(0, 40, 4)]
    assert ["could not be started" in reason for reason in reasons] == [True] * (not forks_permitted)
