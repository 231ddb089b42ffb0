"""`flatout compare`."""

from __future__ import annotations

from pathlib import Path

from flatout.cli.entry import argument, option, output_file, verb
from flatout.cli.output import console, damage_in_one_line, write_report
from flatout.model.errors import GateFailed, UsageError


@verb()
def compare(
    a: Path | None = argument("A", "The run before."),
    b: Path | None = argument("B", "The run after. Without both: the last two in flatout-runs."),
    json: str | None = output_file("the comparison as JSON"),
    html: str | None = output_file("the comparison as one HTML file"),
    fail_if_slower: float | None = option(
        "PCT", "Exit with 1 when B is shown to be slower by more than this.", min=0.0
    ),
) -> None:
    """Compare two recorded runs: is B faster than A, beyond the noise of both?

    "No difference shown" is an answer. Runs that cannot be compared are shown side by side, with the reason.
    """
    from flatout import report
    from flatout.report.history import last

    if a is None:
        a, b = last(2)
    if b is None:
        raise UsageError(f"with which run is {a} to be compared? flatout compare A B, or without both the last two")
    with damage_in_one_line(a, b):
        result = report.compare(report.read_run([a]), report.read_run([b]))
        write_report(result, json, html, console())
    if fail_if_slower is not None:
        if result.typical is None:
            raise UsageError(f"cannot tell whether {b} is slower than {a}: {'; '.join(result.reasons)}")
        if result.slower_than(fail_if_slower):
            raise GateFailed(f"{b} is shown to be more than {fail_if_slower:g}% slower than {a}")
