"""How values are written for people, wherever they are shown."""

from __future__ import annotations

import signal


def in_full(value: float) -> str:
    """A number to four digits as people write it: 14,130 and 0.3712, never 1.413e+04."""
    whole = len(f"{abs(value):.0f}")
    return f"{float(f'{value:.4g}'):,.0f}" if whole >= 4 else f"{value:,.4g}"


def as_typed(value: object) -> str:
    """A setting as one would type it on a command line or in YAML: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def exit_in_words(code: int) -> str:
    """What a command ended with, by the exit code that a shell would give: exit code 3, or SIGSEGV."""
    try:
        return signal.Signals(code - 128).name if code > 128 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def count_of(number: int, thing: str) -> str:
    """So many of a thing: 1 sample, 1,200 samples."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
