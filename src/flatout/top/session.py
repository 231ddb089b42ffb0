"""One run of `flatout top`, from the options to the exit code.

Everything the person could have got wrong is checked before the first file is made.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flatout.errors import GateFailed, UsageError
from flatout.top.source import Live, Reader, Replay, Source, Stop
from flatout.top.summary import SummaryBuilder, TopSummary
from flatout.top.table import CsvTable
from flatout.top.targets import DEFAULT_TARGETS, parse_targets
from flatout.top.text import line_of, paint, reading_lines, summary_lines
from flatout.trace import Note, Sample, TraceWriter
from flatout.trace.records import SCHEMA, to_json

__all__ = ["Terminal", "TopOptions", "run"]

FASTEST_S, SLOWEST_S = 0.05, 60.0
USUAL_INTERVAL_S = 1.0
ONCE_INTERVAL_S = 0.5
FEWEST_COLUMNS, FEWEST_LINES = 60, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """What the person asked for. A file named `-` is stdout."""

    interval_s: float | None = None
    duration_s: float | None = None
    once: bool = False
    gpus: tuple[int, ...] | None = None
    pids: tuple[int, ...] = ()
    json_to: str | None = None
    csv_to: str | None = None
    record_to: Path | None = None
    replay_from: Path | None = None
    speed: float | None = None
    target: str | None = None
    fail_below_pct: float | None = None

    @property
    def stdout_is_data(self) -> bool:
        """Whether a machine reads our stdout: then no words go there."""
        return "-" in (self.json_to, self.csv_to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """What stdin and stdout are connected to."""

    interactive: bool
    columns: int = 80
    lines: int = 24

    @classmethod
    def here(cls) -> Terminal:
        """The one of this process."""
        size = shutil.get_terminal_size()
        interactive = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
        return cls(interactive=interactive and os.environ.get("TERM") != "dumb", columns=size.columns, lines=size.lines)


SamplerFactory = Callable[[tuple[int, ...] | None, tuple[int, ...]], Reader]


def run(
    options: TopOptions,
    *,
    terminal: Terminal | None = None,
    make_sampler: SamplerFactory | None = None,
    stop: Stop | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TopSummary:
    """Watch, and sum up. Raises GateFailed when a card did less than it should have.

    Tests bring a terminal, a sampler, a stop and a clock of their own.
    """
    _check(options)
    targets = parse_targets(options.target) if options.target is not None else DEFAULT_TARGETS
    view = _wants_view(options, terminal or Terminal.here())
    stop = stop or Stop()
    with ExitStack() as stack:
        source = _source(options, paced=view, make_sampler=make_sampler or _hardware, clock=clock)
        stack.callback(source.close)
        session = _Session(options, source, SummaryBuilder(targets=targets, **_about(source)), stack)
        with _ends_on_signal(stop):
            if view:
                from flatout.top.view import TopView  # only now: it brings Textual

                TopView(source=source, stop=stop, take=session.take).show()
            else:
                for sample in source.samples(stop):
                    session.take(sample)
                    session.say(sample)
        return session.finish()


class _Session:
    """What happens to each sample, and in the end."""

    def __init__(self, options: TopOptions, source: Source, builder: SummaryBuilder, stack: ExitStack) -> None:
        self._options = options
        self._source = source
        self._builder = builder
        self._stack = stack
        self._cores_allowed = source.info.facts.get("cores_allowed")
        self._notes_written = 0
        self._last: Sample | None = None
        for path in (options.json_to, options.csv_to):
            if path not in (None, "-"):
                _must_be_writable(Path(path))
        self._writer: TraceWriter | None = None
        if options.record_to is not None:
            self._writer = stack.enter_context(TraceWriter(options.record_to, source.info))
        self._table: CsvTable | None = None
        if options.csv_to is not None:
            file = _open(options.csv_to, stack)
            self._table = CsvTable(file, cores_allowed=self._cores_allowed)

    def take(self, sample: Sample) -> None:
        """Count one sample in, and write it where it belongs."""
        self._last = sample
        self._builder.add(sample)
        if self._writer is not None:
            self._writer.write(sample)
            for text in self._source.notes[self._notes_written :]:
                self._writer.write(Note(time_s=sample.time_s, text=text))
            self._notes_written = len(self._source.notes)
        if self._table is not None:
            self._table.write(sample, self._unix_s(sample))

    def say(self, sample: Sample) -> None:
        """One line for a person who watches a log."""
        quiet = self._options.stdout_is_data or self._options.once or self._options.replay_from is not None
        if not quiet:
            print(line_of(sample, self._unix_s(sample), self._cores_allowed), flush=True)

    def finish(self) -> TopSummary:
        """Close the files, print the summary, ask the gate."""
        self._stack.close()
        notes = list(self._source.notes)
        if self._writer is not None and self._writer.error is not None:
            notes.append(self._writer.error)
        summary = self._builder.summary(notes)
        if self._options.json_to is not None:
            data = self._reading(notes) if self._options.once else summary.to_json()
            _write_json(data, self._options.json_to)
        if not self._options.stdout_is_data:
            self._print(summary)
        if self._options.fail_below_pct is not None:
            _ask_gate(summary, self._options.fail_below_pct)
        return summary

    def _print(self, summary: TopSummary) -> None:
        if self._options.once and self._last is not None:
            lines: Iterator[str] = reading_lines(self._last, self._cores_allowed)
        else:
            lines = summary_lines(summary)
        if not sys.stdout.isatty():
            print("\n".join(lines))
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        for line in lines:
            console.print(Text(line, style=paint(line)), soft_wrap=True)

    def _reading(self, notes: list[str]) -> dict[str, Any]:
        sample = self._last
        data = {"record": "top-reading", "schema": SCHEMA, "hostname": self._source.info.host, "notes": notes}
        if sample is not None:
            data |= to_json(sample) | {"time_unix_s": to_json(self._unix_s(sample))}
        return data

    def _unix_s(self, sample: Sample) -> float:
        info = self._source.info
        return info.started_unix_s + sample.time_s - info.started_s


def _check(options: TopOptions) -> None:
    """Refuse what cannot be meant."""
    if options.interval_s is not None and not FASTEST_S <= options.interval_s <= SLOWEST_S:
        raise UsageError(f"--interval must be from {FASTEST_S:g} to {SLOWEST_S:g} seconds (got {options.interval_s:g})")
    if options.duration_s is not None:
        interval_s = options.interval_s or USUAL_INTERVAL_S
        if not (math.isfinite(options.duration_s) and options.duration_s >= interval_s):
            raise UsageError(f"--duration must be at least one interval, {interval_s:g} s (got {options.duration_s:g})")
    if options.fail_below_pct is not None and not 0 <= options.fail_below_pct <= 100:
        raise UsageError(f"--fail-below must be from 0 to 100 per cent (got {options.fail_below_pct:g})")
    if options.speed is not None and not (math.isfinite(options.speed) and options.speed > 0):
        raise UsageError(f"--speed must be above 0 (got {options.speed:g})")
    if options.json_to == options.csv_to == "-":
        raise UsageError("--json and --csv cannot both write to stdout")
    if options.json_to is not None and options.json_to == options.csv_to:
        raise UsageError(f"--json and --csv cannot both write to {options.csv_to}")
    given = {
        "--duration": options.duration_s is not None,
        "--interval": options.interval_s is not None,
        "--once": options.once,
        "--pid": bool(options.pids),
        "--record": options.record_to is not None,
        "--replay": options.replay_from is not None,
    }
    if options.speed is not None and not given["--replay"]:
        raise UsageError("--speed goes with --replay only")
    if options.once and given["--duration"]:
        raise UsageError("--once and --duration cannot go together")
    if given["--replay"]:
        clash = next((name for name, is_there in given.items() if is_there and name != "--replay"), None)
        if clash is not None:
            raise UsageError(f"--replay and {clash} cannot go together")


def _wants_view(options: TopOptions, terminal: Terminal) -> bool:
    if options.once or options.duration_s is not None or options.stdout_is_data or not terminal.interactive:
        return False
    if terminal.columns < FEWEST_COLUMNS or terminal.lines < FEWEST_LINES:
        raise UsageError(
            f"the live view needs at least {FEWEST_COLUMNS} columns and {FEWEST_LINES} lines "
            f"(this terminal has {terminal.columns} and {terminal.lines}): use --duration, or pipe the output"
        )
    return True


def _source(options: TopOptions, *, paced: bool, make_sampler: SamplerFactory, clock: Callable[[], float]) -> Source:
    if options.replay_from is not None:
        return Replay(options.replay_from, gpus=options.gpus, speed=(options.speed or 1.0) if paced else None)
    from flatout import budget

    interval_s = options.interval_s or (ONCE_INTERVAL_S if options.once else USUAL_INTERVAL_S)
    return Live(
        make_sampler(options.gpus, options.pids),
        interval_s=interval_s,
        duration_s=interval_s if options.once else options.duration_s,
        cores_allowed=budget.measure().cores_allowed,
        clock=clock,
    )


def _hardware(gpus: tuple[int, ...] | None, pids: tuple[int, ...]) -> Reader:
    from flatout.sense.hardware import Sampler

    return Sampler(gpus=gpus, pids=pids)


def _about(source: Source) -> dict[str, Any]:
    return {"hostname": source.info.host, "cores_allowed": source.info.facts.get("cores_allowed")}


def _must_be_writable(path: Path) -> None:
    """Find out now, not after an hour of measuring; leave nothing behind."""
    try:
        if path.exists():
            path.open("a", encoding="utf-8").close()
        else:
            path.open("x", encoding="utf-8").close()
            path.unlink()
    except OSError as problem:
        raise UsageError(f"cannot write {path}: {problem.strerror}") from None


def _open(name: str, stack: ExitStack) -> IO[str]:
    if name == "-":
        return sys.stdout
    return stack.enter_context(Path(name).open("w", encoding="utf-8", newline=""))


def _write_json(data: dict[str, Any], name: str) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    if name == "-":
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"cannot write {name}: {problem.strerror}") from None


def _ask_gate(summary: TopSummary, least_pct: float) -> None:
    """Every card that was watched must have done at least so much."""
    if not summary.gpus:
        raise GateFailed(f"--fail-below {least_pct:g}: no GPU was measured")
    for card in summary.gpus:
        gpu = card.figures
        if gpu.work_pct is None:
            raise GateFailed(f"--fail-below {least_pct:g}: what GPU {gpu.index} did could not be measured")
        if gpu.work_pct < least_pct:
            stands_in = "" if gpu.has_gpm else " (standing in for SM active)"
            raise GateFailed(
                f"GPU {gpu.index}: mean {gpu.work_name}{stands_in} is {gpu.work_pct:.1f}%, "
                f"below the {least_pct:g}% asked for"
            )


@contextmanager
def _ends_on_signal(stop: Stop) -> Iterator[None]:
    """Ctrl-C and a polite kill end the measuring, and the summary follows; a second one ends it all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, _frame: object) -> None:
        stop.asked = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
