"""`flatout runs`."""

from __future__ import annotations

from pathlib import Path

from flatout.cli.entry import argument, output_file, verb
from flatout.cli.output import console, damage_in_one_line, say, write_results
from flatout.files import RUNS
from flatout.model.errors import TraceError


@verb()
def runs(
    folder: Path = argument("DIR", "The folder of the recordings.", default=Path(RUNS)),
    json: str | None = output_file("the list as JSON"),
) -> None:
    """List recorded runs, the newest first: verdict, speed, how busy the GPU was, cost, git commit, exit code.

    `flatout report flatout-runs/NAME` shows one of them, `flatout compare` two.
    """
    from flatout.report import history
    from flatout.report.terminal import show_runs

    history.last(1, folder)  # an error where there is none
    listed = []
    for recording in history.recordings_in(folder):
        try:
            with damage_in_one_line(recording):
                listed.append(history.past_run(recording))
        except TraceError as problem:
            say(str(problem))
    if write_results(json, lambda: history.to_json(listed)):
        show_runs([(past.command or (past.name,), past.row(folder)) for past in listed], history.HEADS, console())
