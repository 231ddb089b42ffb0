"""`flatout run`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flatout.cli.entry import TAKES_A_COMMAND, command_of, flag, option, output_file, require_linux, verb
from flatout.cli.output import check_outputs, keep_exit_code
from flatout.cli.report import summarize_run
from flatout.model.errors import UsageError

if TYPE_CHECKING:
    from flatout.model.plan import Plan


@verb(options_metavar="[OPTIONS] -- COMMAND…", context_settings=TAKES_A_COMMAND)
def run(
    context: typer.Context,
    trace: Path | None = option("DIR", "Record into this new folder. Default: flatout-runs/TIME-NAME."),
    max_steps: int | None = option(
        "N", "Stop after N training steps, then measure the ceiling. For trying out.", min=1
    ),
    xray: bool = flag("--xray/--no-xray", "Record the kernels of a few steps with PyTorch's profiler.", default=True),
    plan: Path | None = option("FILE", "Apply the changes in this plan, as kept by flatout fix."),
    auto: bool = flag("--auto", "Apply the safe changes without a trial: flatout's loader, page-locked batches, …"),
    strict: bool = flag("--strict", "With --auto: only changes that leave every batch bit for bit as it was."),
    quiet: bool = flag("--quiet", "No summary at the end."),
    json: str | None = output_file("the report as JSON"),
    html: str | None = output_file("the report as one HTML file"),
) -> None:
    """Run a training command and say where every second of GPU time went. Your script is not edited.

    `flatout run -- python train.py --epochs 3`, or your own launcher, word for word: torchrun, accelerate launch,
    bash train.sh, make train. `flatout run train.py` is short for `-- python train.py`.

    `--plan FILE` trains with what `flatout fix` has kept; `--auto` with the changes that are safe without any trial.

    Output, signals and exit code are the command's own; the summary comes after it. FLATOUT=off switches it all off.
    """
    require_linux("run")
    from flatout.launch import launcher
    from flatout.launch.protocol import reasons_not_measured

    changes = _plan_to_apply(plan, auto=auto, strict=strict)
    command = command_of(context)
    check_outputs(json, html)
    folder = trace or launcher.default_folder(command or ["run"])
    code = launcher.run(command, folder=folder, max_steps=max_steps, xray=xray, plan=changes)
    if os.environ.get("FLATOUT") != "off":
        with keep_exit_code():
            for recording in launcher.recordings(folder):
                if has_steps(recording):
                    changed = changes is not None
                    summarize_run(recording, quiet=quiet, changed=changed, json_to=json, html_to=html)
                    continue
                if not reasons_not_measured(recording):  # what is there has been said
                    _explain_missing_steps(code)
                if trace is None:
                    shutil.rmtree(recording, ignore_errors=True)
            if trace is None:
                remove_if_empty(folder.parent)
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
        print(f"flatout: there is no change in {path}: the command runs as it is", file=sys.stderr)
    return plan


def _explain_missing_steps(code: int) -> None:
    from flatout.model.formatting import exit_in_words
    from flatout.report.account import WHAT_IS_COUNTED

    why = f"no optimizer step was seen: nothing to account for. {WHAT_IS_COUNTED}"
    if code:
        why = f"the command ended with {exit_in_words(code)} before its first step"
    print(f"flatout: {why}", file=sys.stderr)


def has_steps(recording: Path) -> bool:
    """Whether training steps were recorded."""
    return any(recording.glob("rank-*.jsonl"))


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of recordings if the last recording in it was removed."""
    try:
        folder.rmdir()
    except OSError:  # not empty, or never created
        pass
