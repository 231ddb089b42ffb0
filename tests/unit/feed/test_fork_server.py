"""What a worker does to its process before it loads anything, and what starting one does to the training's."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import psutil
import pytest

from flatout.feed import DataLoader

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
