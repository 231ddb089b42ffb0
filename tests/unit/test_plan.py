"""Plans survive the way to a file and back, and a slip of the pen is named with its place."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.model.errors import UsageError
from flatout.model.plan import Change, Figure, Outcome, Plan, Safety

PLAN = Plan(
    changes=(
        Change(name="loader.workers", value=8, safety="reseeded", note="the GPU waits for data 42% of the time"),
        Change(name="precision", value="off", safety="equivalent"),
    )
)
words = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), max_size=20)  # no line break is a word
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
changes = st.builds(
    Change,
    name=words,
    value=values,
    safety=st.sampled_from(get_args(Safety)),
    note=words,
    knob=words,
)


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    PLAN.save(path)
    assert Plan.load(path) == PLAN


def test_the_file_explains_itself(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    PLAN.save(path)
    text = path.read_text()
    assert all(f"#   {name} " in text for name in get_args(Safety))
    assert "- name: loader.workers\n  value: 8\n  safety: reseeded\n  note: the GPU waits for data 42%" in text


@given(st.lists(changes, max_size=3, unique_by=lambda change: change.name).map(tuple))
def test_any_plan_comes_back_from_its_file(made: tuple[Change, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.yaml")
        Plan(changes=made).save(path)
        assert Plan.load(path) == Plan(changes=made)


def test_what_was_tried_and_not_kept_comes_back_too(tmp_path: Path) -> None:
    change = Change(name="compile", value="default", safety="equivalent")
    undone = Outcome(change=change, verdict="undone", note="1.01× (0.97 to 1.04): no gain over 2% was shown")
    path = tmp_path / "plan.yaml"
    Plan(tried=(undone,)).save(path)
    assert Plan.load(path) == Plan(tried=(undone,))
    assert "verdict: undone\n  why: '1.01× (0.97 to 1.04)" in path.read_text()


def test_an_empty_list_of_changes_is_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("plan: 1\nchanges:\n")
    assert Plan.load(path) == Plan()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("plan: 1\nchnages: []", "unknown key 'chnages' (did you mean changes?)"),
        ("plan: 1\nchanges: []\nextra: 1", "unknown key 'extra' (there are plan, changes, tried)"),
        ("plan: 2\nchanges: []", "plan version 2, this flatout reads version 1"),
        ("changes: []", "'plan' is missing"),
        ("plan: 1\nchanges: 5", "changes must be a list, each entry beginning with '- name:'"),
        ("plan: 1\nchanges: [3]", "change 1 must have a name, a value and a safety (got 3)"),
        ("plan: 1\nchanges: [{name: a, value: 1}]", "change 1: 'safety' is missing"),
        (
            "plan: 1\nchanges: [{name: 7, value: 1, safety: identical}]",
            "change 1: name must be text of at most 200 letters (got 7)",
        ),
        (
            "plan: 1\nchanges: [{name: a, value: 1, safty: identical}]",
            "change 1: unknown key 'safty' (did you mean safety?)",
        ),
        (
            "plan: 1\nchanges: [{name: a, value: 1, safety: safe}]",
            "change 1 (a): safety must be one of identical, reseeded, equivalent, semantic (got 'safe')",
        ),
        (
            "plan: 1\nchanges: [{name: a, value: 1, safety: identical}, {name: a, value: 2, safety: identical}]",
            "a is changed more than once",
        ),
        ("plan: 1\nchanges: [", "line 2: this is not YAML: expected the node content"),
        ("plan: 1\nchanges: []\ntried: 3", "tried must be a list"),
        (
            "plan: 1\nchanges: []\ntried: [{name: a, value: 1, safety: identical, verdict: good}]",
            "tried 1: verdict must be one of kept, undone, unsafe, not applicable (got 'good')",
        ),
        ("just words", "is not a plan: it should begin with 'plan: 1' and 'changes:'"),
        ("", "is not a plan"),
    ],
)
def test_a_mistake_is_reported_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(str(path))
    assert complaint in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        Plan.load(tmp_path / "none.yaml")
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UsageError, match="is not text in UTF-8"):
        Plan.load(tmp_path / "picture")
    with pytest.raises(UsageError, match="cannot write"):
        PLAN.save(tmp_path / "no" / "such" / "folder.yaml")


def test_an_outcome_holds_what_was_measured_and_cannot_be_altered() -> None:
    before, after = (Figure(median=ms, spread=0.1, n=100, unit="ms") for ms in (10.0, 6.0))
    outcome = Outcome(change=PLAN.changes[0], verdict="kept", before=before, after=after, proof="the same batches")
    with pytest.raises(dataclasses.FrozenInstanceError):
        outcome.verdict = "undone"  # type: ignore[misc]
