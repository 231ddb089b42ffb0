"""What a worker does to its process before it loads anything."""

from __future__ import annotations

import subprocess
import sys

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
