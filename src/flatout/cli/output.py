"""Where a verb's results go: the terminal, and the files of --json and --html."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.files import write_whole
from flatout.model.errors import TraceError, UsageError
from flatout.model.formatting import printable
from flatout.model.inputs import check_writable
from flatout.model.plan import Plan
from flatout.redact import redact_text

if TYPE_CHECKING:
    from rich.console import Console

    from flatout.report import Report


def say(text: str) -> None:
    """Print one line on stderr, without secrets, and without what a terminal would obey."""
    print(f"flatout: {printable(' '.join(redact_text(text).split()))}", file=sys.stderr)


def console(*, stderr: bool = False) -> Console:
    """The terminal, for tables and text."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def write_results(json_to: str | None, data: Callable[[], Any]) -> bool:
    """Write a result as JSON, if that is asked for. Returns whether stdout is still free for text."""
    import json

    if json_to is not None:
        _write_text(json_to, json.dumps(data(), indent=2, default=str) + "\n")
    return json_to != "-"


def write_report(report: Report, json_to: str | None, html_to: str | None, terminal: Console | None) -> None:
    """Write a report to the files asked for, and show it, unless stdout is taken by one of them.

    It is shown where a file cannot be written too: what a fix has found must not be lost with a full disk.
    """
    from flatout.report.page import page
    from flatout.report.terminal import show

    try:
        write_results(json_to, report.to_json)
        if html_to is not None:
            _write_text(html_to, page(report))
    finally:
        if terminal is not None and ("-" not in (json_to, html_to) or terminal.stderr):
            show(report, terminal)


def check_outputs(json_to: str | None, html_to: str | None) -> None:
    """Complain of files that cannot be written before the training starts, not after it."""
    if json_to == html_to == "-":
        raise UsageError("--json - and --html - would both go to stdout: name a file for one of them")
    for name in filter(None, (json_to, html_to)):
        if name != "-":
            check_writable(Path(name))


def _write_text(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        write_whole(Path(target), text)
    except OSError as problem:
        raise UsageError(f"cannot write {target}: {problem.strerror}") from None


def save_plan(plan: Plan, out: Path, *, has_gains: bool) -> UsageError | None:
    """Save the plan, unless it has no gains and an earlier one has. An older one is kept under another name.

    Where it cannot be saved, it is printed, and the error is returned: it waits until the report is shown.
    """
    before = _with_changes(out)
    if before and not has_gains:
        say(f"{out} is an earlier plan, and stays as it is")
        return None
    older = None
    try:
        if before not in (b"", plan.text().encode()):
            names = (out.with_name(f"{out.stem}-{number}{out.suffix}") for number in itertools.count(1))
            older = next(name for name in names if not name.exists())
            write_whole(older, before)
        plan.save(out)
    except (OSError, UsageError) as problem:
        if older is not None:
            older.unlink(missing_ok=True)
        print(plan.text(), file=sys.stderr)  # what was found is not lost with a full disk
        why = problem if isinstance(problem, UsageError) else f"cannot write {older}: {problem.strerror}"
        return UsageError(f"the plan is not saved, and what was there stays: {why}")
    if not plan.changes:
        say(f"there is no change in {out}: with it the command runs as it is")
    if older is not None:
        say(f"the plan that was in {out} is in {older} now")
    return None


def _with_changes(path: Path) -> bytes:
    """The plan in a file, if there are changes in it, or if somebody is editing it."""
    try:
        return path.read_bytes() if path.exists() and Plan.load(path).changes else b""
    except UsageError:
        return path.read_bytes()


@contextlib.contextmanager
def damage_in_one_line(*folders: Path) -> Iterator[None]:
    """Turn what a damaged trace makes our code raise into one line.

    A trace's values are checked as they are read; whether they fit together is not.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        why = f"{type(problem).__name__}: {problem}, at {Path(place.filename).name}:{place.lineno}"
        names = " or ".join(map(str, folders))
        raise TraceError(f"{names} cannot be shown: this trace is damaged ({why})") from None


@contextlib.contextmanager
def keep_exit_code() -> Iterator[None]:
    """For what is printed after the user's command: nothing that happens to it may change the exit code.

    rich raises SystemExit when the reader of a pipe has left.
    """
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, SystemExit, KeyboardInterrupt):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        send_to_devnull(1, 2)


def send_to_devnull(*handles: int) -> None:
    """After the reader of a pipe has left: else Python would complain again when it flushes at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for handle in handles:
        os.dup2(devnull, handle)
    os.close(devnull)
