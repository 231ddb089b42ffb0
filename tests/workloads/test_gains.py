"""What benchmarks/gains.py makes of promises and measurements; and whether recorded workloads show their mistakes."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from running import ROOT

from benchmarks import gains, workloads
from benchmarks.mended import MISTAKES, Edit, Flags, Mistake
from flatout import trace
from flatout.diagnose.rules import diagnose
from flatout.model.finding import Finding


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_among_the_findings_of_its_recording(name: str, tmp_path: Path) -> None:
    (recording,) = (ROOT / "tests" / "traces").glob(f"h200-*-{name}.tgz")
    with tarfile.open(recording) as archive:
        archive.extractall(tmp_path, filter="data")
    found = {(finding.code, finding.change) for finding in diagnose(trace.read(tmp_path))}
    assert not [m.what for m in MISTAKES[name] if m.named_by and not found & set(m.named_by)]


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_can_be_mended_alone(name: str) -> None:
    for mistake in MISTAKES[name]:
        edits = [(name, mend) for mend in mistake.mends if isinstance(mend, Edit)]
        with workloads.copied(edits) as root:
            for _, edit in edits:
                script = root / "workloads" / name / edit.file
                compile(script.read_text(), edit.file, "exec")


def finding(code: str, low: float, high: float, change: str = "amp") -> Finding:
    return Finding(
        code=code, title="", share=0.1, gain_low=low, gain_high=high, derived="", confidence=1.0, change=change
    )


MISTAKE = Mistake("slow", (Flags("", "--amp"),), (("compute.precision", "amp"), ("compute.layout", "amp")))


@pytest.mark.parametrize(
    ("found", "speed", "promised", "fits"),
    [
        ([finding("compute.precision", 1.2, 1.6)], 140.0, [1.2, 1.6], True),
        ([finding("compute.precision", 1.2, 1.6)], 170.0, [1.2, 1.6], False),
        ([finding("compute.precision", 1.2, 1.6)], 118.5, [1.2, 1.6], True),  # as far as runs differ: 4% here
        ([finding("compute.precision", 1.2, 1.6), finding("compute.layout", 1.0, 1.1)], 170.0, [1.2, 1.76], True),
        ([finding("compute.precision", 1.2, 1.6, change="other")], 100.0, None, True),  # costs nothing
        ([], 140.0, None, False),  # missed
    ],
)
def test_a_promise_is_held_against_what_mending_gave(
    found: list[Finding], speed: float, promised: list[float] | None, fits: bool
) -> None:
    speeds = {gains.BEFORE: [98.0, 102.0], "slow": [speed]}
    row = gains.row(MISTAKE, found, speeds)
    assert (row["promised"], row["fits"]) == (pytest.approx(promised) if promised else None, fits)
    assert row["measured"] == pytest.approx(speed / 100, rel=1e-3)


def test_runs_of_every_script_say_how_far_runs_differ() -> None:
    assert gains.runs_differ_by({gains.BEFORE: [98.0, 102.0], "slow": [140.0]}) == pytest.approx(0.04, rel=0.01)
    assert gains.runs_differ_by({gains.BEFORE: [100.0, 100.0], "slow": [140.0, 140.0 * 1.06]}) == pytest.approx(
        0.0583 / 2**0.5, rel=0.01
    )
    assert gains.runs_differ_by({gains.BEFORE: [100.0]}) == 0.0


def test_what_is_in_the_book_is_not_measured_again(tmp_path: Path) -> None:
    calls = []

    def measured() -> dict[str, float]:
        calls.append(1)
        return {"samples_per_s": 5.0}

    for _ in range(2):  # the second one from the file
        book = gains.Book(tmp_path / "gains.json")
        assert book.figures("gray", gains.BEFORE, {"seconds": 5}, measured)["samples_per_s"] == 5.0
    assert len(calls) == 1
    with pytest.raises(workloads.Failed, match="other settings"):
        book.figures("gray", gains.AGAIN, {"seconds": 9}, measured)
