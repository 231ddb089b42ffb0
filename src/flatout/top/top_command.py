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
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from flatout.files import write_whole
from flatout.model.errors import GateFailed, UsageError
from flatout.model.formatting import printable
from flatout.model.inputs import check_writable
from flatout.model.records import SCHEMA, to_json
from flatout.sample import budget
from flatout.sample.hardware import Sampler
from flatout.top.figures import Figures
from flatout.top.sample_source import SampleSource, Stop, live, replay
from flatout.top.summary import CsvTable, TopSummary, line_of, reading_lines, style_of, sum_up, summary_lines
from flatout.trace import Note, Sample, TraceWriter

if TYPE_CHECKING:
    from flatout.top.view import TopView

DEFAULT_INTERVAL_S = 1.0
ONCE_INTERVAL_S = 0.5
MIN_COLUMNS, MIN_LINES = 60, 20


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
    fail_below_pct: float | None = None

    @property
    def stdout_is_data(self) -> bool:
        """Whether a machine reads our stdout: then no words go there."""
        return "-" in (self.json_to, self.csv_to)


def terminal_here() -> os.terminal_size | None:
    """The size of the terminal one could draw in and read keys from; None where there is none."""
    is_one = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return shutil.get_terminal_size() if is_one else None


def run(
    options: TopOptions,
    *,
    find_terminal: Callable[[], os.terminal_size | None] = terminal_here,
    make_sampler: Callable[..., Sampler] = Sampler,
    stop: Stop | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TopSummary:
    """Watch, and sum up. Raises GateFailed when a GPU did less than it should have.

    Tests replace the terminal, the sampler, the stop and the clock.
    """
    for mistake in _mistakes(options):
        raise UsageError(mistake)
    make_view = _view_class() if _wants_view(options, find_terminal()) else None  # before any file is made
    stop = stop or Stop()
    with ExitStack() as stack:
        if options.replay_from is not None:
            pace = (options.speed or 1.0) if make_view is not None else math.inf
            source = replay(options.replay_from, gpus=options.gpus, speed=pace)
        else:
            sampler = stack.enter_context(closing(make_sampler(gpus=options.gpus, pids=options.pids)))
            source = _this_machine(options, sampler, clock)
        watch = _Watch(options, source, stack)
        with _ends_on_signal(stop):
            if make_view is not None:
                view = make_view(source=source, stop=stop, take=watch.take)
                view.run()
                view.raise_problem()
            else:
                silent = options.stdout_is_data or options.once or options.replay_from is not None
                for sample in source.samples(stop):
                    watch.take(sample)
                    if not silent:
                        print(line_of(sample, source.unix_s(sample), source.cores_allowed), flush=True)
        stack.close()
        return watch.finish()


def _this_machine(options: TopOptions, sampler: Sampler, clock: Callable[[], float]) -> SampleSource:
    interval_s, duration_s = options.interval_s or DEFAULT_INTERVAL_S, options.duration_s or math.inf
    if options.once:
        interval_s = duration_s = options.interval_s or ONCE_INTERVAL_S
    cores_allowed = budget.measure().cores_allowed
    return live(sampler, interval_s=interval_s, duration_s=duration_s, cores_allowed=cores_allowed, clock=clock)


class _Watch:
    def __init__(self, options: TopOptions, source: SampleSource, stack: ExitStack) -> None:
        self._options = options
        self._source = source
        self._figures = Figures(cores_allowed=source.cores_allowed)
        self._notes_written = 0
        self._last: Sample | None = None
        self._writer: TraceWriter | None = None
        self._table: CsvTable | None = None
        for name in (options.json_to, options.csv_to):
            if name is not None and name != "-":
                check_writable(Path(name))
        if options.record_to is not None:
            self._writer = stack.enter_context(TraceWriter(options.record_to, source.info))
        if options.csv_to is not None:
            self._table = CsvTable(self._csv_file(options.csv_to, stack), cores_allowed=source.cores_allowed)

    def _csv_file(self, name: str, stack: ExitStack) -> IO[str]:
        if name == "-":
            return sys.stdout

        def close() -> None:
            with _writing(name):  # closing writes what a full disk has refused before
                file.close()

        with _writing(name):
            file = Path(name).open("w", encoding="utf-8", newline="")  # noqa: SIM115 - closed by the stack
        stack.callback(close)
        return file

    def take(self, sample: Sample) -> None:
        """Count one sample in, and write it where it belongs."""
        self._last = sample
        self._figures.add(sample)
        if self._writer is not None:
            self._writer.write(sample)
            for text in self._source.notes[self._notes_written :]:
                self._writer.write(Note(time_s=sample.time_s, text=text))
            self._notes_written = len(self._source.notes)
        if self._table is not None:
            with _writing(self._options.csv_to or "-"):
                self._table.write(sample, self._source.unix_s(sample))

    def finish(self) -> TopSummary:
        """Print the summary, ask the gate."""
        options, source, notes = self._options, self._source, list(self._source.notes)
        if self._writer is not None and self._writer.error is not None:
            notes.append(self._writer.error)
        summary = sum_up(self._figures, hostname=source.info.host, notes=notes)
        data, lines = summary.to_json(), summary_lines(summary)
        if options.once and self._last is not None:
            data, lines = self._reading(self._last, notes), reading_lines(self._last, source.cores_allowed)
        if options.json_to is not None:
            text = printable(json.dumps(data, indent=2, ensure_ascii=False)) + "\n"
            with _writing(options.json_to):
                if options.json_to == "-":
                    sys.stdout.write(text)
                else:
                    write_whole(Path(options.json_to), text)
        if not options.stdout_is_data:
            console = Console(highlight=False)
            for line in lines:
                console.print(Text(printable(line), style=style_of(line)), soft_wrap=True)
        if options.fail_below_pct is not None:
            _ask_gate(summary, options.fail_below_pct)
        return summary

    def _reading(self, sample: Sample, notes: list[str]) -> dict[str, Any]:
        opening = {"record": "top-reading", "schema": SCHEMA, "hostname": self._source.info.host, "notes": notes}
        return {**opening, **to_json(sample), "time_unix_s": to_json(self._source.unix_s(sample))}


def _mistakes(options: TopOptions) -> Iterator[str]:
    interval_s, duration_s, speed = options.interval_s, options.duration_s, options.speed
    least_s = interval_s or DEFAULT_INTERVAL_S
    if duration_s is not None and not least_s <= duration_s < math.inf:
        yield f"--duration must be at least one interval, {least_s:g} s (got {duration_s:g})"
    if speed is not None and not 0 < speed < math.inf:
        yield f"--speed must be above 0 (got {speed:g})"
    if options.json_to is not None and options.json_to == options.csv_to:
        yield f"--json and --csv cannot both write to {options.csv_to}"
    if speed is not None and options.replay_from is None:
        yield "--speed goes with --replay only"
    if options.once and duration_s is not None:
        yield "--once and --duration cannot go together"
    if options.replay_from is not None:
        live: dict[str, object] = {"--duration": duration_s, "--interval": interval_s, "--record": options.record_to}
        live |= {"--once": options.once or None, "--pid": options.pids or None}
        yield from (f"--replay and {name} cannot go together" for name, value in live.items() if value is not None)


def _wants_view(options: TopOptions, terminal: os.terminal_size | None) -> bool:
    if options.once or options.duration_s is not None or options.stdout_is_data or terminal is None:
        return False
    if terminal.columns < MIN_COLUMNS or terminal.lines < MIN_LINES:
        raise UsageError(
            f"the live view needs at least {MIN_COLUMNS} columns and {MIN_LINES} lines "
            f"(this terminal has {terminal.columns} and {terminal.lines}): use --duration, or pipe the output"
        )
    return True


def _view_class() -> type[TopView]:
    try:
        from flatout.top.view import TopView
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "textual":
            raise
        raise UsageError(
            "the live view needs Textual: pip install 'flatout[top]'. Without it: flatout top --duration 60"
        ) from None
    return TopView


@contextmanager
def _writing(name: str) -> Iterator[None]:
    """Say in one line why a file cannot be written. A reader of stdout that has left is no mistake."""
    try:
        yield
    except OSError as problem:
        if name == "-":
            raise
        raise UsageError(f"cannot write {name}: {problem.strerror}") from None


def _ask_gate(summary: TopSummary, least_pct: float) -> None:
    if not summary.gpus:
        raise GateFailed(f"--fail-below {least_pct:g}: no GPU was measured")
    for gpu, _ in summary.gpus:
        work_pct, name = gpu.work_pct, f"GPU {gpu.last.index}"
        if work_pct is None:
            raise GateFailed(f"--fail-below {least_pct:g}: what {name} did could not be measured")
        if work_pct < least_pct:
            what = "SM active" if gpu.has_gpm else "power share (standing in for SM active)"
            raise GateFailed(f"{name}: mean {what} is {work_pct:.1f}%, below the {least_pct:g}% asked for")


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
