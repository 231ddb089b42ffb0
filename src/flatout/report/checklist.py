"""A Checklist as text for a terminal: what to fix first. At most 80 columns; no colour in a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from flatout.check import FAIL, NOT_APPLICABLE, OK, WARN, Checklist, Line
from flatout.report.terminal import WIDTH, wrapped

_NARROWEST, _INDENT = 50, 27
_ORDER = {FAIL: "red", WARN: "yellow", OK: "green", NOT_APPLICABLE: "dim"}
_IN_WORDS = {FAIL: "failed", WARN: "to look at", OK: "ok", NOT_APPLICABLE: "not judged"}


def show(checklist: Checklist, console: Console, *, all_lines: bool = False) -> None:
    """Print the list; lines that do not apply only with `all_lines`."""
    width = max(_NARROWEST, min(WIDTH, console.width))
    seen = ", ".join(checklist.looked_at) or "the machine alone: no script was given, as in flatout check train.py"
    console.print(Text(wrapped(f"looked at {seen}", width), style="dim"), soft_wrap=True)
    counts = []
    for status, style in _ORDER.items():
        lines = checklist.with_status(status)
        if lines:
            counts.append(f"{len(lines)} {_IN_WORDS[status]}")
        for line in lines if all_lines or status != NOT_APPLICABLE else ():
            console.print(_line(line, style, width), soft_wrap=True)
    hidden = bool(checklist.with_status(NOT_APPLICABLE)) and not all_lines
    more = " (--all shows them)" if hidden else ""
    console.print(Text(wrapped(", ".join(counts) + more, width), style="bold"), soft_wrap=True)


def _line(line: Line, style: str, width: int) -> Text:
    place = f" ({line.where})" if line.where and line.where not in line.reason else ""
    text = Text.assemble(
        (f"{line.status:<5}", style), f"{line.subject:<{_INDENT - 5}}", wrapped(line.reason + place, width, _INDENT)
    )
    if line.fix:
        text.append(f"\n{'':<{_INDENT}}").append(
            wrapped(f"→ {line.fix}", width, _INDENT), style="bold" if line.status != NOT_APPLICABLE else ""
        )
    return text
