"""How values are written for people, wherever they are shown."""

from __future__ import annotations

import re
import signal

# Escape sequences of terminals (colors, titles, links); then what is left of control characters, but for tabs and line
# ends; then what reverses the order of letters.
_UNPRINTABLE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -~])?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    """Text without what a terminal would obey instead of showing it."""
    return text if text.isprintable() else _UNPRINTABLE.sub("", text)


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


def ms(value: float) -> str:
    """Milliseconds with as many digits as mean something: 20 µs, 9.31 ms, 1.20 s."""
    if value < 0.0995:
        return f"{value * 1e3:.0f} µs"
    if value < 10:
        return f"{value:.2f} ms"
    if value < 1000:
        return f"{value:.1f} ms"
    return f"{value / 1e3:.2f} s"


def ms_a_step(total_ms: float | None, steps: int) -> str:
    """A total as milliseconds a step; empty where it is not known."""
    return "" if total_ms is None else ms(total_ms / max(1, steps))


def duration(value_ms: float) -> str:
    """A length of time: 42.0 s, 3 min 20 s, 2 h 5 min."""
    seconds = value_ms / 1e3
    if seconds < 0.05:
        return ms(value_ms)
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s"
