"""Real trainings, each with one fault, recorded by tests/traces/record.py: the verdict is the fault, and nothing else
is said of the healthy ones. A recording is a folder or a .tgz, named MACHINE-CODE[-VARIANT]."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from flatout import trace
from flatout.diagnose.rules import diagnose
from flatout.model.causes import CODES

TRACES = Path(__file__).parents[2] / "traces"
HEALTHY = "compute.saturated"
NAME = re.compile(rf"(?P<machine>[a-z0-9]+)-(?P<code>{'|'.join(sorted(map(re.escape, CODES), key=len)[::-1])})(-|$)")
RECORDINGS = sorted(path for path in TRACES.glob("*-*") if path.suffix == ".tgz" or path.is_dir())
MOST_BYTES = 100_000

# What no machine at hand produces by itself: tests/unit/diagnose/test_rules.py has these causes built by hand.
BUILT_BY_HAND = {
    "hardware.throttled",
    "hardware.idle-gpus",
    "compute.padding",
    "compute.attention",
    "memory.checkpointing",
    "dist.scaling",
    "dist.data-parallel",
    "dist.unused-parameters",
}


def code_of(recording: Path) -> str:
    match = NAME.match(recording.name.removesuffix(".tgz"))
    assert match is not None, f"{recording.name}: not MACHINE-CODE[-VARIANT]"
    return match["code"]


def unpacked(recording: Path, folder: Path) -> trace.Trace:
    if recording.is_dir():
        return trace.read(recording)
    with tarfile.open(recording) as archive:
        archive.extractall(folder, filter="data")
    return trace.read(folder)


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.name.removesuffix(".tgz"))
def test_the_verdict_is_the_fault(recording: Path, tmp_path: Path) -> None:
    found = [finding.code for finding in diagnose(unpacked(recording, tmp_path))]
    expected = code_of(recording)
    assert found == [HEALTHY] if expected == HEALTHY else found[:1] == [expected], found


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.name.removesuffix(".tgz"))
def test_a_recording_is_small_and_names_no_machine(recording: Path, tmp_path: Path) -> None:
    assert recording.is_dir() or recording.stat().st_size <= MOST_BYTES
    unpacked(recording, tmp_path)
    files = recording.iterdir() if recording.is_dir() else tmp_path.iterdir()
    text = "".join(path.read_text() for path in files)
    assert not re.search(r'"/(home|work|root|tmp|var)/', text)


def test_every_cause_is_recorded_or_built_by_hand() -> None:
    recorded = {code_of(path) for path in RECORDINGS}
    missing = set(CODES) - recorded - BUILT_BY_HAND
    assert not missing, "record it (tests/traces/record.py), or build it by hand and name it in BUILT_BY_HAND"
    assert set(CODES) >= BUILT_BY_HAND
    assert sum(code_of(path) == HEALTHY for path in RECORDINGS) >= 5
