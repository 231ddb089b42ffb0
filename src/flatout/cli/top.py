"""`flatout top`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from flatout.cli.entry import flag, option, output_file, verb
from flatout.cli.output import damage_in_one_line


@verb()
def top(
    interval: float | None = option("SECONDS", "Time between samples, 0.25 to 60. Default: 1."),
    duration: float | None = option("SECONDS", "Measure this long without the live view, then print a summary."),
    once: bool = flag("--once", "Take one reading and exit."),
    gpu: list[int] | None = option("INDEX", "Watch this GPU only (may be given again). Default: all."),
    pid: list[int] | None = option(
        "PID",
        "Follow this training and its loader workers (may be given again). Default: the processes that use the GPUs.",
    ),
    fail_below: float | None = option("PCT", "Exit with 1 when a GPU's mean SM active is below this."),
    json: str | None = output_file("the summary (or the one reading) as JSON"),
    csv: str | None = output_file("a row a sample"),
    record: Path | None = option("DIR", "Record every sample into this new folder."),
    replay: Path | None = option("DIR", "Show a recording instead of this machine."),
    speed: float | None = option("TIMES", "How fast to play a recording in the live view. Default: 1."),
) -> None:
    """See what the GPU really does: live, or over a while with a verdict.

    GPU-Util says only that some kernel was running. `top` shows what share of the GPU really worked (SM active), how
    it varies, and whether the CPU, the disk or the loader's workers hold it up.

    In a terminal this is a live view; q ends it with a summary. Piped or with --duration it prints a line a sample.
    """
    from flatout.top.top_command import TopOptions, run

    options = TopOptions(
        interval_s=interval,
        duration_s=duration,
        once=once,
        gpus=tuple(gpu) if gpu else None,
        pids=tuple(pid or ()),
        json_to=json,
        csv_to=csv,
        record_to=record,
        replay_from=replay,
        speed=speed,
        fail_below_pct=fail_below,
    )
    with damage_in_one_line(replay) if replay is not None else contextlib.nullcontext():
        run(options)
