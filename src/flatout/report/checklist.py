"""A Checklist as text for a terminal: what to mend first, then what is well. At most 80 columns; piped, no colour."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.text import Text

from flatout.check.checklist import FAIL, NOT_APPLICABLE, OK, WARN, Checklist, Line
from flatout.report.terminal import WIDTH, wrapped

_NARROWEST, _INDENT = 50, 27
_ORDER = {FAIL: "red", WARN: "yellow", OK: "green", NOT_APPLICABLE: "dim"}
_IN_WORDS = {FAIL: "failed", WARN: "to look at", OK: "ok", NOT_APPLICABLE: "not applicable"}


def show(checklist: Checklist, console: Console) -> None:
    """Print the list."""
    width = max(_NARROWEST, min(WIDTH, console.width))
    seen = ", ".join(checklist.looked_at) or "the machine alone: no script was given, as in flatout check train.py"
    console.print(Text(wrapped(f"looked at {seen}", width), style="dim"), soft_wrap=True)
    for status, style in _ORDER.items():
        for line in _joined(list(checklist.of(status))):
            console.print(_line(line, style, width), soft_wrap=True)
    counts = [(sum(1 for _ in checklist.of(status)), _IN_WORDS[status]) for status in _ORDER]
    console.print(Text(", ".join(f"{count} {words}" for count, words in counts if count), style="bold"), soft_wrap=True)


def _joined(lines: list[Line]) -> list[Line]:
    """Lines that only say why they do not apply, one a reason."""
    alike: dict[str, list[Line]] = {}
    for line in lines:
        key = line.reason if line.status == NOT_APPLICABLE and not line.where else line.subject
        alike.setdefault(key, []).append(line)
    return [same[0] if len(same) == 1 else _as_one(same) for same in alike.values()]


def _as_one(lines: list[Line]) -> Line:
    subjects = ", ".join(line.subject for line in lines)
    return replace(lines[0], subject=f"{len(lines)} more", reason=f"{lines[0].reason}: {subjects}")


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
