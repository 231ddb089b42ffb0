"""`flatout run`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flatout.cli.entry import (
    TAKES_A_COMMAND,
    command_of,
    flag,
    option,
    output_file,
    price_of_an_hour,
    read_price,
    recordings_kept,
    require_linux,
    verb,
)
from flatout.cli.output import check_outputs, keep_exit_code, save_plan, say
from flatout.cli.report import summarize_runs
from flatout.model.errors import UsageError
from flatout.redact import redact_command

if TYPE_CHECKING:
    from flatout.model.plan import Plan


class Lines(str, Enum):
    """How the lines are found that take the time."""

    sampled = "sampled"
    exact = "exact"


@verb(options_metavar="[OPTIONS] -- COMMAND…", context_settings=TAKES_A_COMMAND)
def run(
    context: typer.Context,
    trace: Path | None = option("DIR", "Record into this new folder. Default: flatout-runs/TIME-NAME."),
    max_steps: int | None = option(
        "N", "Stop after N training steps, then measure the ceiling. For trying out.", min=1
    ),
    xray: bool = flag("--xray/--no-xray", "Record the kernels of a few steps with PyTorch's profiler.", default=True),
    lines: Lines = option(
        "sampled|exact", "How to find the lines that take the time; exact needs py-spy.", default=Lines.sampled
    ),
    plan: Path | None = option("FILE", "Apply the changes in this plan, as kept by flatout fix."),
    auto: bool = flag("--auto", "Apply the safe changes without a trial: flatout's loader, page-locked batches, …"),
    tune: bool = flag(
        "--tune", "Let the training tune itself while it runs: its loader, copies to the GPU, garbage collections."
    ),
    strict: bool = flag("--strict", "With --auto: only changes that leave every batch bit for bit as it was."),
    quiet: bool = flag("--quiet", "No summary at the end."),
    price: str | None = price_of_an_hour("shows what the run and an epoch cost"),
    keep: int = recordings_kept(),
    json: str | None = output_file("the report as JSON"),
    html: str | None = output_file("the report as one HTML file"),
) -> None:
    """Run a training command and say where every second of GPU time went. Your script is not edited.

    `flatout run -- python train.py --epochs 3`, or your own launcher, word for word: torchrun,
    accelerate launch, bash train.sh, make train. `flatout run train.py` is short for `-- python
    train.py`; `flatout run train.ipynb` runs the cells of a notebook.

    `--plan FILE` trains with what `flatout fix` has kept; `--auto` with the changes that are safe
    without any trial. `--tune` measures those while your training runs, keeps what pays, and leaves
    flatout-plan.yaml.

    `--lines exact` has py-spy look at the lines from outside: `pip install 'flatout[exact]'`.

    Output, signals and exit code are the command's own; the summary comes after it. FLATOUT=off
    switches it all off.
    """
    require_linux("run")
    from flatout.launch import launcher

    if tune and (plan is not None or auto or max_steps is not None):
        raise UsageError("--tune goes without --plan, --auto and --max-steps: it decides itself, while you train")
    changes = _plan_to_apply(plan, auto=auto, strict=strict, tune=tune)
    command = _notebook_as_command(command_of(context))
    check_outputs(json, html)
    hourly_price = read_price(price)
    folder = trace or launcher.default_folder(command or ["run"])
    code = launcher.run(
        command,
        folder=folder,
        max_steps=max_steps,
        xray=xray,
        plan=changes,
        tune=tune,
        exact_lines=lines is Lines.exact,
    )
    summarize_runs(
        folder,
        keep=trace is not None,
        most=keep,
        quiet=quiet,
        why_empty=_why_no_step(code),
        changed=changes is not None and not tune,
        price=hourly_price,
        json_to=json,
        html_to=html,
    )
    if tune:
        with keep_exit_code():
            _save_what_was_tuned(folder, command)
    raise typer.Exit(code)


def _notebook_as_command(command: list[str]) -> list[str]:
    """What runs a notebook, if the command is one."""
    if not command or not command[0].endswith(".ipynb"):
        return command
    from flatout.model.inputs import read_notebook

    read_notebook(Path(command[0]))
    if command[1:]:
        raise UsageError(f"a notebook takes no arguments: flatout run {command[0]}")
    import nbclient  # noqa: F401  where it is not installed, one line says so

    return [sys.executable, "-m", "flatout.launch.run_notebook", command[0]]


def _save_what_was_tuned(folder: Path, command: Sequence[str]) -> None:
    """Save what the last training of this command has decided, if it came to that."""
    from flatout.launch.launcher import recordings
    from flatout.launch.protocol import TUNED
    from flatout.model.plan import Plan

    trained = [recording for recording in recordings(folder) if any(recording.glob("rank-*.jsonl"))]
    decided = [recording / TUNED for recording in trained if (recording / TUNED).exists()]
    if trained and not decided:
        say("no plan is written: the training ended before anything was decided")
    if not decided:
        return
    out = Path("flatout-plan.yaml")
    try:
        plan = Plan.load(decided[-1])
        problem = save_plan(plan, out, has_gains=bool(plan.changes))
    except UsageError as unreadable:
        problem = unreadable
    if problem is not None:
        say(str(problem))
    elif plan.changes:
        say(f"what was kept is in {out}: flatout run --plan {out} -- {shlex.join(redact_command(command))}")


def _plan_to_apply(path: Path | None, *, auto: bool, strict: bool, tune: bool) -> Plan | None:
    """The changes asked for with --plan or --auto, or those that --tune decides on."""
    from flatout.model import changes
    from flatout.model.plan import Plan

    if strict and not auto:
        raise UsageError("--strict goes with --auto")
    if path is not None and auto:
        raise UsageError("--plan and --auto: give one of them")
    if auto:
        return changes.auto(strict=strict)
    if tune:
        return changes.to_tune()
    if path is None:
        return None
    plan = Plan.load(path)
    changes.check(plan, str(path))
    if not plan.changes:
        say(f"there is no change in {path}: the command runs as it is")
    return plan


def _why_no_step(code: int) -> str:
    from flatout.model.formatting import exit_in_words
    from flatout.report.account import WHAT_IS_COUNTED

    if code:
        return f"the command ended with {exit_in_words(code)} before its first step"
    return f"no optimizer step was seen: nothing to account for. {WHAT_IS_COUNTED}"
