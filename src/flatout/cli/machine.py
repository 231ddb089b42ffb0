"""What is looked at without a recording, before and during a training: `check`, `doctor`, `hook` and
`top`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import typer

from flatout.cli.entry import argument, flag, option, output_file, require_linux, verb
from flatout.cli.output import console, damage_in_one_line, write_results
from flatout.model.errors import UsageError


@verb()
def check(
    script: Path | None = argument("SCRIPT", "The training script, or a notebook."),
    flags: list[str] | None = argument("-- FLAGS", "The script's own flags."),
    config: Path | None = option("FILE", "Its config file: YAML or JSON."),
    strict: bool = flag("--strict", "Exit with 1 on a warning too."),
    all_lines: bool = flag("--all", "Show the lines that do not apply, or cannot be judged, too."),
    json: str | None = output_file("the list as JSON"),
) -> None:
    """Look over script, config and machine before a training starts. Runs none of your code.

    `flatout check train.py`, with its config: `flatout check train.py --config train.yaml`, with its flags:
    `flatout check train.py -- --num-workers 40`. Exit code 1 when a line failed.
    """
    require_linux("check")
    from flatout.check import check as check_script
    from flatout.report.terminal import show_checklist
    from flatout.sample.hardware import Sampler

    with Sampler() as sampler:
        gpus = sampler.read().gpus
    result = check_script(script, flags=tuple(flags or ()), config=config, gpus=gpus or None)
    if write_results(json, result.to_json):
        show_checklist(result, console(), all_lines=all_lines)
    if not result.passed(strict=strict):
        raise typer.Exit(1)


@verb()
def doctor(
    json: str | None = output_file("the list as JSON"),
    patches: bool = flag("--patches", "List what flatout replaces inside a training process, and why; nothing else."),
) -> None:
    """See what flatout finds on this machine, what is missing, and what that costs.

    GPUs and their counters, driver, torch, the cores and memory a training may really use here,
    optional packages.
    """
    if patches:
        from flatout.inside.patches import rows

        for replaced, when, why in rows():
            print(f"{replaced}\n    in {when}: {why}")
        return
    from flatout.doctor import examine, report_lines

    result = examine()
    if write_results(json, result.to_json):
        print("\n".join(report_lines(result, console().width)))


@verb()
def hook(
    action: str = argument("install|remove|status", "What to do.", default=...),
    python: str = option("PYTHON", "The interpreter that the training runs in.", default=sys.executable),
) -> None:
    """Let flatout into a Python that ignores PYTHONPATH, or whose PYTHONPATH a script replaces.

    `flatout run` says when this is needed, and for which Python. `install` puts three small files
    beside that Python's packages. They start flatout under `flatout run`, and do nothing at any other
    time; `remove` deletes them.
    """
    require_linux("hook")
    if action not in ("install", "remove", "status"):
        raise UsageError(f"flatout hook {action}: one of install, remove, status is expected")
    from flatout.launch.hook import hook_of

    target = hook_of(python)
    if action == "install":
        target.install()
        print(f"installed in {target.site}; flatout hook remove --python {python} removes it")
    elif action == "remove":
        removed = target.remove()
        print(f"removed from {target.site}" if removed else f"there is no hook in {target.site}")
    else:
        package = target.package()
        if package is None:
            print(f"no hook in {target.site}")
        elif package.exists():
            print(f"installed in {target.site}, for {package}")
        else:
            print(f"installed in {target.site}, for a flatout that is gone ({package}): install it again")


@verb()
def top(
    interval: float | None = option("SECONDS", "Time between samples. Default: 1.", min=0.25, max=60),
    duration: float | None = option("SECONDS", "Measure this long without the live view, then print a summary."),
    once: bool = flag("--once", "Take one reading and exit."),
    gpu: list[int] | None = option("INDEX", "Watch this GPU only (may be given again). Default: all."),
    pid: list[int] | None = option(
        "PID",
        "Follow this training and its loader workers (may be given again). Default: the processes that use the GPUs.",
    ),
    fail_below: float | None = option("PCT", "Exit with 1 when a GPU's mean SM active is below this.", min=0, max=100),
    json: str | None = output_file("the summary (or the one reading) as JSON"),
    csv: str | None = output_file("a row a sample"),
    record: Path | None = option("DIR", "Record every sample into this new folder."),
    replay: Path | None = option("DIR", "Show a recording instead of this machine."),
    speed: float | None = option("TIMES", "How fast to play a recording in the live view. Default: 1."),
) -> None:
    """See what the GPU really does: live, or over a while with a verdict.

    GPU-Util says only that some kernel was running. `top` shows what share of the GPU really worked
    (SM active), how it varies, and whether the CPU, the disk or the loader's workers hold it up.

    In a terminal this is a live view; q ends it with a summary. Piped or with --duration it prints a
    line a sample.
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
