"""`flatout run`."""

from __future__ import annotations

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
    require_linux,
    verb,
)
from flatout.cli.output import check_outputs, say
from flatout.cli.report import summarize_runs
from flatout.model.errors import UsageError

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
    strict: bool = flag("--strict", "With --auto: only changes that leave every batch bit for bit as it was."),
    quiet: bool = flag("--quiet", "No summary at the end."),
    price: str | None = price_of_an_hour("shows what the run and an epoch cost"),
    json: str | None = output_file("the report as JSON"),
    html: str | None = output_file("the report as one HTML file"),
) -> None:
    """Run a training command and say where every second of GPU time went. Your script is not edited.

    `flatout run -- python train.py --epochs 3`, or your own launcher, word for word: torchrun, accelerate launch,
    bash train.sh, make train. `flatout run train.py` is short for `-- python train.py`.

    `--plan FILE` trains with what `flatout fix` has kept; `--auto` with the changes that are safe without any trial.

    `--lines exact` has py-spy look at the lines from outside: `pip install 'flatout[exact]'`.

    Output, signals and exit code are the command's own; the summary comes after it. FLATOUT=off switches it all off.
    """
    require_linux("run")
    from flatout.launch import launcher

    changes = _plan_to_apply(plan, auto=auto, strict=strict)
    command = command_of(context)
    check_outputs(json, html)
    hourly_price = read_price(price)
    folder = trace or launcher.default_folder(command or ["run"])
    code = launcher.run(
        command, folder=folder, max_steps=max_steps, xray=xray, plan=changes, exact_lines=lines is Lines.exact
    )
    summarize_runs(
        folder,
        keep=trace is not None,
        quiet=quiet,
        why_empty=_why_no_step(code),
        changed=changes is not None,
        price=hourly_price,
        json_to=json,
        html_to=html,
    )
    raise typer.Exit(code)


def _plan_to_apply(path: Path | None, *, auto: bool, strict: bool) -> Plan | None:
    """The changes asked for with --plan or --auto."""
    from flatout.model import changes
    from flatout.model.plan import Plan

    if strict and not auto:
        raise UsageError("--strict goes with --auto")
    if path is not None and auto:
        raise UsageError("--plan and --auto: give one of them")
    if auto:
        return changes.auto(strict=strict)
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
