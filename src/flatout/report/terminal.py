"""A Report as text, at most 80 columns wide. Also a check, and a fix as it goes on."""

from __future__ import annotations

import itertools
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from rich import table as rich_table
from rich.bar import Bar
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from flatout.check import FAIL, NOT_APPLICABLE, OK, WARN, Checklist, Line
from flatout.fix.result import ProgressListener
from flatout.model.formatting import count_of, duration
from flatout.report import Report, view_of
from flatout.report.views import CodeFrame, Item, Part, Table

WIDTH = 80
MIN_WIDTH, SUBJECT = 50, 27  # of a checklist, and of its first columns
STATUSES = {  # in words, and their style
    FAIL: ("failed", "red"),
    WARN: ("to look at", "yellow"),
    OK: ("ok", "green"),
    NOT_APPLICABLE: ("not judged", "dim"),
}
# Control characters, but for tabs and line ends; and what reverses the order of letters. `printable` would be
# too late: rich has taken the ends of escape sequences already.
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
MAX_ROWS = 20
BAR = 12


def show(report: Report, console: Console) -> None:
    """Print the report."""
    view = view_of(report, brief=True)
    for line in view.headlines:
        _say(console, line, hang=2, style="bold")
    for note in view.notes:
        _say(console, f"Note: {note}.", hang=2)
    console.print()
    _print_table(Table("", ("", "", ""), view.figures, numbers_from=3), console)
    in_paragraphs = False  # one after the other stand close together
    for section in view.sections:
        parts = [part for part in section.parts if part]
        if not parts:
            continue
        if not (in_paragraphs and isinstance(parts[0], str)):
            console.print()
        in_paragraphs = all(isinstance(part, str) for part in parts)
        _show_section(section.title, parts, console)
    if view.train_with:
        _print(console, Text(f"\nTrain with it:  {view.train_with}"))


def _show_section(title: str, parts: Sequence[Part], console: Console) -> None:
    """Print a section. A table says in its head what it is about, a paragraph begins with the title."""
    if isinstance(parts[0], Item | CodeFrame):
        _print(console, Text(title, style="bold"))
    for part in parts:
        if isinstance(part, Item):
            _show_item(part, console)
        elif isinstance(part, Table):
            _print_table(part, console)
        elif isinstance(part, CodeFrame):
            _print_code(part, console)
        elif isinstance(part, str):
            lead = f"{title}: " * isinstance(parts[0], str)
            _say(console, lead + part, hang=2, style="dim")
    codes = [part.code for part in parts if isinstance(part, Item) and part.code and part.brief]
    if codes:
        _say(console, f"how to make sure, and what to do: flatout explain {codes[0]}", indent=2, style="dim")


def _print_code(frame: CodeFrame, console: Console) -> None:
    _print(console, Text(f"  {frame.title}", style="bold"))
    room = min(WIDTH, console.width) - 17
    for number, source, called, share in frame.lines:
        line = Text.assemble((f"{share:>6.0%}", "cyan"), (f" {number:>5} │ ", "dim"), source[:room])
        if called and len(source) + len(called) + 3 <= room:
            line.append(f"  → {called}", style="dim")
        _print(console, line)


def _show_item(item: Item, console: Console) -> None:
    beside = "; ".join(filter(None, (item.brief, ", ".join(filter(None, (item.code, item.where))))))
    _say(console, f"{item.title} ({beside})" if item.brief else item.title, indent=2, hang=2)
    for line in filter(None, (*item.lines, *(f"{item.copy_as}{text}" for text in item.to_copy))):
        _say(console, line, indent=4, hang=2)


def wrapped(text: str, width: int = WIDTH, indent: int = 0) -> str:
    """Text in lines, with an indent from the second on; a path or a flag stays whole."""
    lines = textwrap.wrap(text, width - indent, break_on_hyphens=False, break_long_words=False)
    return f"\n{'':<{indent}}".join(lines)


def _say(console: Console, text: str, *, indent: int = 0, hang: int = 0, style: str = "") -> None:
    """Print a paragraph; lines after the first stand further in by `hang`."""
    lines = wrapped(text, min(WIDTH, console.width), indent + hang)
    _print(console, Text(" " * indent + lines, style=style))


def _print(console: Console, text: Text) -> None:
    """Print lines as they are. All text of a trace or a script comes by here; a terminal must not obey it."""
    text.plain = OBEYED.sub("", text.plain)
    console.print(text, soft_wrap=True)


def _print_table(table: Table, console: Console) -> None:
    """Print rows under their heads, without the spaces that rich leaves at the ends of lines."""
    drawn = rich_table.Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_header=any(table.heads)
    )
    for place, head in enumerate(table.heads):
        if place == 1 and table.bars:
            drawn.add_column(width=BAR)
        if place >= table.numbers_from:
            drawn.add_column(head, justify="right", no_wrap=True)
        else:
            drawn.add_column(head, overflow="fold")
    for place, row in enumerate(table.rows[:MAX_ROWS]):
        cells: list[RenderableType] = [Text(cell) for cell in row]
        if table.bars:
            cells.insert(1, Bar(1.0, 0.0, table.bars[place].share, width=BAR, color="cyan"))
        drawn.add_row(*cells)
    for segments in console.render_lines(drawn, console.options.update_width(min(WIDTH, console.width)), pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        _print(console, line)
    if len(table.rows) > MAX_ROWS:
        _say(console, f"and {len(table.rows) - MAX_ROWS} more: see --html or --json", style="dim")


# A list of runs


def show_runs(runs: Sequence[tuple[Sequence[str], Sequence[str]]], heads: Sequence[str], console: Console) -> None:
    """Print runs, each a command and its cells, below their commands; a column without a cell is left out."""
    cells = [heads, *(row for _, row in runs)]
    widths = [max(map(len, column)) * any(column[1:]) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str], style: str = "") -> Text:
        shown = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        return Text("  ".join(shown).rstrip(), style=style)

    _print(console, line(heads, "dim"))
    for command, group in itertools.groupby(runs, key=lambda run: run[0]):
        _print(console, Text(shlex.join(command), style="bold"))
        for _, row in group:
            _print(console, line(row))


# A check


def show_checklist(checklist: Checklist, console: Console, *, all_lines: bool = False) -> None:
    """Print the list; lines that do not apply only with `all_lines`."""
    width = max(MIN_WIDTH, min(WIDTH, console.width))
    seen = ", ".join(checklist.looked_at) or "the machine alone: no script was given, as in flatout check train.py"
    _print(console, Text(wrapped(f"looked at {seen}", width), style="dim"))
    counts = []
    for status, (words, style) in STATUSES.items():
        lines = checklist.with_status(status)
        if lines:
            counts.append(f"{len(lines)} {words}")
        if lines and status == NOT_APPLICABLE:  # all of them have the same reason
            subjects = ", ".join(line.subject for line in lines)
            lines = [replace(lines[0], subject=count_of(len(lines), "line"), reason=f"{subjects}: {lines[0].reason}")]
        if all_lines or status != NOT_APPLICABLE:
            for line in lines:
                _print(console, _checklist_line(line, style, width))
    hidden = bool(checklist.with_status(NOT_APPLICABLE)) and not all_lines
    more = " (--all shows them)" * hidden
    _print(console, Text(wrapped(", ".join(counts) + more, width), style="bold"))


def _checklist_line(line: Line, style: str, width: int) -> Text:
    place = f" ({line.where})" if line.where and line.where not in line.reason else ""
    text = Text.assemble(
        (f"{line.status:<5}", style), f"{line.subject:<{SUBJECT - 5}}", wrapped(line.reason + place, width, SUBJECT)
    )
    if line.fix:
        text.append(f"\n{'':<{SUBJECT}}").append(
            wrapped(f"→ {line.fix}", width, SUBJECT), style="bold" if line.status != NOT_APPLICABLE else ""
        )
    return text


# A fix


class FixProgress(ProgressListener):
    """A fix as it goes on, in lines. On a terminal, and as a context, its last line is a bar for the runs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None

    def __enter__(self) -> FixProgress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            room = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            self._bar = Progress(
                TextColumn("{task.description}", markup=False, table_column=room),
                BarColumn(BAR),
                _TimeLeft(table_column=Column(no_wrap=True)),
                console=self._console,
                refresh_per_second=2,
                transient=True,
                expand=True,
            )
            self._bar.start()
            self._console.show_cursor(True)  # else it would stay hidden after a kill -9
        return self

    def __exit__(self, *problem: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def run_begins(self, what: str, left_s: float, number: int, about: int, times: float | None = None) -> None:
        of = f" of about {about}" if about else ""
        so_far = f"{times:.2g}× so far" if times is not None else ""
        if self._bar is None:
            ends = ", ".join(filter(None, (f"{duration(1e3 * max(0.0, left_s))} left", so_far)))
            _print(self._console, Text(f"… run {number}{of}: {what} ({ends})", style="dim"))
            return
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(
            OBEYED.sub("", f"run {number}{of}: {what}"),
            total=about or None,
            completed=number - 1,
            left_s=left_s,
            so_far=so_far,
        )

    def say(self, line: str) -> None:
        _say(self._console, line, hang=2)


class _TimeLeft(ProgressColumn):
    """What is left of the time budget, and the gain so far."""

    def render(self, task: Task) -> Text:
        left_s = max(0, round(task.fields["left_s"] - (task.elapsed or 0.0)))
        minutes, seconds = divmod(left_s, 60)
        left = f"{minutes}:{seconds:02d} left"
        return Text(", ".join(filter(None, (left, task.fields["so_far"]))), style="dim")
