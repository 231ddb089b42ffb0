"""The account of a run in which most steps were not looked at closely."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.diagnose.breakdown import breakdown, split
from flatout.trace import RankTrace, RunInfo, Step
from flatout.trace.downsample import window_of

_MS = st.floats(0, 1e6)
_NAMES = st.sampled_from(["unsplit", "copy", "forward", "backward", "rest", "data", "sync@train.py:3", "evaluation"])


def test_unsplit_time_is_shared_out_like_the_split_time() -> None:
    seen = {"unsplit": 30.0, "forward": 1.0, "backward": 2.0, "data": 5.0, "sync@train.py:3": 1.0}
    assert split(seen) == pytest.approx({"forward": 11, "backward": 22, "data": 5, "sync@train.py:3": 1})


def test_unsplit_time_is_the_rest_where_nothing_was_split() -> None:
    assert split({"unsplit": 30.0, "data": 5.0}) == {"rest": 30, "data": 5}


@given(st.dictionaries(_NAMES, _MS))
@example({"unsplit": 1.5, "copy": 5e-324})
def test_no_time_is_lost_or_made(spans: dict[str, float]) -> None:
    whole = split(spans)
    assert sum(whole.values()) == pytest.approx(sum(spans.values()))
    assert "unsplit" not in whole
    assert all(whole[name] == spans[name] for name in ("data", "evaluation") if name in spans)


@pytest.mark.parametrize(
    ("steps", "step_ms", "enough"),
    [
        (16, 1_800.0, True),
        (3, 4_000.0, True),
        (2, 30_000.0, False),
        (16, 100.0, False),
        (20, 10.0, False),
        (250, 2.0, True),
    ],
)
def test_slow_steps_are_judged_by_their_time(steps: int, step_ms: float, enough: bool) -> None:
    taken = [Step(index=n, start_s=n * step_ms / 1e3, wall_ms=step_ms) for n in range(steps)]
    rank = RankTrace(info=RunInfo(name="train"), steps=tuple(taken), windows=(window_of(taken),))
    assert breakdown(rank).enough == enough
