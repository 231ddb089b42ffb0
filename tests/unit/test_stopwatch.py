"""How long a trial has trained: what ends it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flatout.inject import session


def test_only_measured_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An X-ray's steps do not, nor what is done between two steps, however long it takes."""
    now_s = 100.0
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now_s))
    watch = session._Stopwatch()
    measured = 0
    watch.step_ended(measured)
    for counts, step_s, after_s in ((True, 0.5, 0.0), (True, 0.5, 4.0), (False, 3.0, 2.0), (True, 0.25, 0.0)):
        watch.step_begins()
        now_s += step_s
        measured += counts
        watch.step_ended(measured)
        now_s += after_s
    assert watch.trained_s == pytest.approx(1.25)
