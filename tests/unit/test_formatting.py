"""How values are written for people."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flatout
from flatout.model.formatting import as_typed, count_of, duration, exit_in_words, in_full, ms, printable


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 samples"), (1, "1 sample"), (2, "2 samples"), (1200, "1,200 samples")],
)
def test_one_thing_has_no_plural(number: int, text: str) -> None:
    assert count_of(number, "sample") == text


def test_no_count_of_samples_is_printed_with_a_plural_of_its_own() -> None:
    """`1 samples` is what an f-string says that does not ask `count_of`; a rate, and a number from a table, may."""
    counts = re.compile(r"\{(?![A-Z_]+\})[^{}]*(?<!f)\} samples\b(?!/s)")
    found = {}
    for path in Path(flatout.__file__).parent.rglob("*.py"):
        found[path.name] = counts.findall(path.read_text(encoding="utf-8"))
    assert not {name: plurals for name, plurals in found.items() if plurals}


@pytest.mark.parametrize(
    ("value", "text"), [(14134.6, "14,130"), (0.371249, "0.3712"), (1_413_000, "1,413,000"), (9.5, "9.5"), (0, "0")]
)
def test_numbers_are_written_to_four_digits_without_exponents(value: float, text: str) -> None:
    assert in_full(value) == text


@pytest.mark.parametrize(("value", "text"), [(True, "true"), (False, "false"), (8, "8"), ("bf16", "bf16")])
def test_settings_are_written_as_one_types_them(value: object, text: str) -> None:
    assert as_typed(value) == text


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exit code 3"), (139, "SIGSEGV"), (137, "SIGKILL"), (255, "exit code 255")]
)
def test_an_exit_code_of_a_signal_is_named_by_the_signal(code: int, text: str) -> None:
    assert exit_in_words(code) == text


def test_times_have_the_digits_that_mean_something() -> None:
    assert [ms(v) for v in (0.002, 0.5, 12.34, 4321.0)] == ["2 µs", "0.50 ms", "12.3 ms", "4.32 s"]
    assert [duration(v) for v in (40.0, 1500.0, 95_000.0, 7_260_000.0)] == [
        "40.0 ms",
        "1.5 s",
        "1 min 35 s",
        "2 h 1 min",
    ]


def test_text_loses_what_a_terminal_would_obey_and_nothing_else() -> None:
    assert printable("größe\t1×\n") == "größe\t1×\n"
    assert printable("\x1b[1;31mred\x1b[0m\x1b]0;title\x07\x9b2J\b\r\u202ereversed") == "red2Jreversed"
