"""`flatout explain` and `flatout skill`: what they print comes with the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.text import Text

from flatout.cli.entry import VERBS
from flatout.model import guide
from flatout.model.causes import CODES
from flatout.model.changes import BY_NAME

Run = Callable[..., Any]


def test_a_cause_is_explained_with_what_cures_it(flatout_says: Run) -> None:
    code, out, err = flatout_says("explain", "data.main-thread")
    assert (code, err) == (0, "")
    assert out.startswith("### data.main-thread\n\nSamples are loaded in the training process")
    assert "**Make sure**" in out
    assert out.endswith("- **Changes that cure it**: `num_workers`, `loader`.\n")


def test_a_symptom_is_explained_without_quotes_around_it(flatout_says: Run) -> None:
    code, out, _ = flatout_says("explain", "out", "of", "memory")
    assert code == 0
    assert "expandable_segments" in out
    assert "](" not in out  # a link leads nowhere here


def test_a_change_is_explained_by_either_of_its_names(flatout_says: Run) -> None:
    code, out, _ = flatout_says("explain", "pin-memory")
    assert code == 0
    assert "`DataLoader(..., pin_memory=True)`" in out
    assert "**Cures**: `copy.pageable`." in out
    assert flatout_says("explain", "pin_memory").out == out


def test_without_a_name_all_are_listed(flatout_says: Run) -> None:
    out = flatout_says("explain").out
    assert [name for name in (*CODES, *BY_NAME, "no gain") if name not in out] == []


@pytest.mark.parametrize(
    ("name", "nearest"), [("data.cpubound", "data.cpu-bound"), ("pin_memori", "pin_memory"), ("out", "out of memory")]
)
def test_of_a_misspelt_name_the_nearest_is_shown(flatout_says: Run, name: str, nearest: str) -> None:
    assert flatout_says("explain", name) == (2, "", f"flatout: nothing is called {name}: did you mean {nearest}?\n")


def test_everything_that_is_listed_has_an_entry() -> None:
    for name in (*CODES, *BY_NAME, "compile fails"):
        assert len(guide.explain(name)) > 100


def test_a_terminal_gets_it_rendered(flatout_says: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = Text.from_ansi(flatout_says("explain", "data.cpu-bound").out).plain
    assert "Make sure" in out
    assert "**" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_skill_is_short_and_names_verbs_that_exist(flatout_says: Run) -> None:
    code, out, _ = flatout_says("skill")
    assert code == 0
    assert re.match(r"---\nname: flatout\ndescription: .+\n---\n", out)
    assert out.count("\n") <= 80
    assert set(re.findall(r"^flatout (\w+)", out, re.MULTILINE)) <= set(VERBS)
