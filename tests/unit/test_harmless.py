"""The comparison of harmless.py: what differs between runs of the same command is no difference; anything else is."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.examples import EXAMPLES, Example
from benchmarks.harmless import Run, differences, lines_of

EXAMPLE = EXAMPLES[0]
SEEN = {"rank-0": {"steps": 3, "weights": "a", "optimizer state": "b", "random numbers": "c"}}
BARE = Run(
    exit=0,
    lines=["step 1 loss 0.5 after 1.25", "step 2 loss 0.25 after 2.5"],
    files={"repo/model.pt": ["1234"], "repo/runs/events.#": ["12"], "repo/input.txt": ["deleted"]},
    seen=SEEN,
    left=[],
    seconds=1.0,
)
AGAIN = replace(
    BARE,
    lines=["step 1 loss 0.5 after 1.5", "step 2 loss 0.25 after 2.25"],
    files=BARE.files | {"repo/runs/events.#": ["13"]},
)


def test_what_differs_between_bare_runs_is_no_difference() -> None:
    """GIVEN bare runs with other times and another date in a name, THEN a third of the kind differs in nothing."""
    third = replace(
        BARE,
        lines=["step 1 loss 0.5 after 9.0", "step 2 loss 0.25 after 9.5"],
        files=BARE.files | {"repo/runs/events.#": ["14"]},
        seconds=9.0,
    )
    assert differences(third, [BARE, AGAIN]) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"exit": 1}, "exit code 1"),
        ({"exit": None}, "exit code None"),
        ({"lines": ["step 1 loss 0.5 after 1.25", "step 2 loss 0.26 after 2.5"]}, "output: line 2: step 2 loss 0.26"),
        ({"lines": ["step 1 loss 0.5 after 1.25"]}, "output: 1 lines, not 2"),
        ({"lines": [*BARE.lines, "a warning"]}, "output: 3 lines, not 2"),
        ({"files": BARE.files | {"repo/model.pt": ["9999"]}}, "files: repo/model.pt"),
        ({"files": BARE.files | {"repo/extra": ["1"]}}, "files: repo/extra"),
        ({"files": {"repo/model.pt": ["1234"], "repo/runs/events.#": ["12"]}}, "files: repo/input.txt"),
        ({"files": BARE.files | {"repo/runs/events.#": ["12", "13"]}}, "files: repo/runs/events.#"),
        ({"seen": {"rank-0": SEEN["rank-0"] | {"weights": "z"}}}, "weights"),
        ({"seen": {"rank-0": SEEN["rank-0"] | {"random numbers": "z"}}}, "random numbers"),
        ({"seen": {}}, "steps"),
        ({"left": ["python worker.py"]}, "left running: python worker.py"),
    ],
)
def test_anything_else_is_a_difference(change: dict[str, Any], told: str) -> None:
    found = differences(replace(BARE, **change), [BARE, AGAIN])
    assert any(difference.startswith(told) for difference in found)


def test_weights_that_bare_runs_do_not_agree_on_are_not_compared() -> None:
    other = replace(AGAIN, seen={"rank-0": SEEN["rank-0"] | {"weights": "z"}})
    assert differences(replace(BARE, seen={"rank-0": SEEN["rank-0"] | {"weights": "y"}}), [BARE, other]) == []


def test_other_random_numbers_may_change_what_is_learned_and_nothing_else() -> None:
    """GIVEN a run that said it draws others, THEN its weights and losses may differ, its steps and its end may not."""
    learned = replace(BARE, seen={"rank-0": SEEN["rank-0"] | {"weights": "z"}}, lines=["step 1 loss 0.75"])
    assert differences(learned, [BARE, AGAIN], reseeded=True) == []
    ended = replace(learned, exit=1, seen={"rank-0": SEEN["rank-0"] | {"steps": 2}})
    assert differences(ended, [BARE, AGAIN], reseeded=True) == ["exit code 1", "steps"]


def test_times_are_hidden_and_losses_are_not() -> None:
    """GIVEN a line with a time of day, durations and a loss, THEN only the loss is left to be compared."""
    (line,) = lines_of(EXAMPLE, "12:30:05 epoch 1 took 3.2 s, 14 ms a step, loss 0.125")
    assert line == "<time> epoch 1 took <time> s, <time> ms a step, loss 0.125"


def test_of_outputs_of_unequal_length_what_they_share_is_compared() -> None:
    bare = [replace(BARE, lines=["loss 0.5", "waiting"]), replace(BARE, lines=["loss 0.5", "waiting", "waiting"])]
    assert differences(replace(BARE, lines=["waiting", "loss 0.5"]), bare) == []
    assert differences(replace(BARE, lines=["waiting", "loss 0.6"]), bare) == ["output: without loss 0.5"]


def test_where_several_processes_write_the_words_count_in_any_order() -> None:
    """GIVEN ranks whose lines run into each other, THEN only a word that is not there is a difference."""
    ranks = Example(kind="DDP", name="two", repo=EXAMPLE.repo, path="train.py", unordered=True)
    bare = [
        replace(BARE, unordered=True, lines=lines_of(ranks, text))
        for text in ("rank 0 loss 0.5\nrank 1 loss 0.25\n", "rank 1 loss 0.25rank 0 loss 0.5\n\n")
    ]
    assert differences(replace(bare[0], lines=lines_of(ranks, "rank 0 rank 1loss 0.25\nloss 0.5")), bare) == []
    assert differences(replace(bare[0], lines=lines_of(ranks, "rank 0 rank 1loss 0.25\nloss 0.6")), bare) == [
        "output: without 0.5"
    ]
