"""What an agent gets of a result: no more than it can read, and what is missing."""

from __future__ import annotations

import json

import pytest

from flatout.mcp_server import MOST_BYTES, fitted


def test_a_small_result_is_whole() -> None:
    data = {"verdict": "data.cpu-bound", "lines": list(range(50))}
    assert fitted(data) == data


def test_of_a_large_result_the_ends_of_the_longest_parts_are_left_out() -> None:
    """GIVEN ranked lines and many settings, WHEN they do not fit, THEN the first lines and all else are there."""
    lines = [{"where": f"train.py:{number}", "source": "x" * 40} for number in range(1000)]
    settings = [{"values": {f"option_{number}": number for number in range(2000)}}]
    data = {"verdict": "host.python", "facts": {"steps": 3, "settings": settings}, "lines": lines}
    small = fitted(data)
    assert len(json.dumps(small, indent=2)) < MOST_BYTES + 500
    assert (small["verdict"], small["facts"]["steps"]) == ("host.python", 3)
    kept = len(small["lines"])
    assert small["lines"] == lines[:kept]
    assert kept > 20
    assert small["left_out"]["lines"] == 1000 - kept
    assert small["left_out"]["facts.settings.0.values"] > 1000
    assert len(data["lines"]) == 1000  # what was given is as it was


@pytest.mark.parametrize("data", [{"note": "é" * 100_000}, {"deep": [[["x" * 30_000]]]}, {"one": {"a" * 30_000: 1}}])
def test_whatever_is_large_is_cut(data: dict[str, object]) -> None:
    assert len(json.dumps(fitted(data), indent=2)) < MOST_BYTES + 500
