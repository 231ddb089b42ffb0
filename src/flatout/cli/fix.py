"""`flatout fix`."""

from __future__ import annotations

import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from flatout.cli.entry import (
    INTERRUPTED,
    TAKES_A_COMMAND,
    command_of,
    flag,
    option,
    output_file,
    price_of_an_hour,
    read_price,
    require_linux,
    seconds_of,
    verb,
)
from flatout.cli.output import check_outputs, console, save_plan, say, write_report
from flatout.files import write_whole
from flatout.model.changes import names
from flatout.model.errors import RealWriteError, UsageError
from flatout.model.inputs import check_writable
from flatout.model.plan import Safety
from flatout.redact import redact_command

if TYPE_CHECKING:
    from flatout.fix.patch import FilePatch


@verb(options_metavar="[OPTIONS] -- COMMAND…", context_settings=TAKES_A_COMMAND)
def fix(
    context: typer.Context,
    budget: str = option("TIME", "How long to try: 90s, 10m, 1h.", default="10m"),
    allow: str = option(
        "NAME,…",
        f"Also try changes that affect learning: {names(safety='semantic')}; all.",
        default="",
    ),
    only: str = option(
        "NAME,…", f"Try only these changes ({names()}) or classes ({', '.join(get_args(Safety))}).", default=""
    ),
    skip: str = option("NAME,…", "Do not try these changes or classes.", default=""),
    steps: int | None = option("N", "Training steps a trial. Default: chosen for the training.", min=20),
    out: Path = option("PLAN", "Where to write the plan.", default=Path("flatout-plan.yaml")),
    price: str | None = price_of_an_hour("shows what an epoch costs"),
    json: str | None = output_file("the result as JSON"),
    html: str | None = output_file("before and after as one HTML file"),
    unprotected: bool = flag("--unprotected", "Go on where trials cannot be kept from all your files (docs/FIX.md)."),
    diff: Path | None = option("FILE", "Write what was kept as a patch of your own files, too."),
    apply: bool = flag("--apply", "Edit your files as that patch does, if git has them as they are."),
    force: bool = flag("--force", "With --apply: edit them even if git has not, or the patch has failed."),
    resume: bool = flag(
        "--resume",
        "Go on with a fix of this command that did not come to its end: the last one, or that in FOLDER "
        "(--resume FOLDER -- COMMAND).",
    ),
) -> None:
    """Make a training faster: try changes on your command, keep those that pay, prove that training
    stays the same.

    `flatout fix -- python train.py --epochs 90`. The command is run again and again for a few
    seconds, each time with one more change; no run writes any of your files. The plan of what was
    kept is flatout-plan.yaml: train with it by `flatout run --plan flatout-plan.yaml -- python
    train.py --epochs 90`. Ctrl-C leaves the plan so far; go on with `flatout fix --resume -- python
    train.py --epochs 90`, after a crash or a spent budget too.
    """
    require_linux("fix")
    from flatout.fix.fix_command import fix as search
    from flatout.fix.journal import can_resume, to_resume, unfinished
    from flatout.fix.offers import Wishes
    from flatout.fix.source_edits import patch_of
    from flatout.fix.try_patch import SHARE, try_patch
    from flatout.launch import launcher
    from flatout.report import summarize
    from flatout.report.terminal import FixProgress

    folder = _folder_to_resume(context) if resume else None
    command = command_of(context)
    if not command:
        raise UsageError("no command given: flatout fix -- python train.py …")
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: command not found")
    options: dict[str, Any] = {"allow": allow, "only": only, "skip": skip, "steps": steps, "unprotected": unprotected}
    runs = out.parent / launcher.default_folder([*command[:1], "fix.py"])  # the current folder may be read-only
    budget_s, hourly_price = seconds_of(budget), read_price(price)
    if resume:
        earlier = to_resume(command, runs.parent, folder)
        runs = earlier.folder
        options |= earlier.options | {name: value for name, value in options.items() if value}
    wishes = Wishes.of(options["allow"], options["only"], options["skip"])
    diff = diff or (out.with_suffix(".diff") if apply else None)
    _check_patch(diff, apply=apply, force=force)
    check_outputs(json, html)
    check_writable(out)
    check_writable(runs.parent, folder=True)
    if resume:
        say(f"goes on with {runs}")
    elif unfinished(command, runs.parent):
        say("an earlier fix of this command did not come to its end: flatout fix --resume would go on with it")
    began_s = time.monotonic()
    with FixProgress(console(stderr=True)) as progress:
        result = search(
            command,
            wishes,
            budget_s=(1 - SHARE) * budget_s if diff else budget_s,
            steps=options["steps"],
            progress=progress,
            keep_in=runs,
            options=options,
            unprotected=options["unprotected"],
        )
    not_saved = save_plan(result.plan, out, has_gains=bool(result.kept))
    patch = patch_of(result, command, out, diff) if diff and result.kept else None
    if patch is not None and not_saved is None:
        with FixProgress(console(stderr=True)) as progress:
            patch = try_patch(
                patch,
                command,
                result,
                budget_s=budget_s,
                spent_s=time.monotonic() - began_s,
                steps=options["steps"],
                progress=progress,
            )
    summary = replace(summarize(result, command, str(out), hourly_price), patch=patch)
    write_report(summary, json, html, console())
    if result.written:
        raise RealWriteError(result.written)
    if not_saved is not None:
        raise not_saved
    if patch is not None:
        _write_patch(patch, apply=apply and not result.interrupted, force=force)
    if can_resume(runs):
        say(f"to go on: flatout fix --resume {runs} -- {shlex.join(redact_command(command))}")
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def _folder_to_resume(context: typer.Context) -> Path | None:
    """The word between --resume and the -- in front of the command, taken from its words."""
    if context.args[1:2] != ["--"]:
        return None
    return Path(context.args.pop(0))


def _check_patch(diff: Path | None, *, apply: bool, force: bool) -> None:
    """Complain before anything is tried."""
    from flatout.fix.patch import why_not_in_git

    if force and not apply:
        raise UsageError("--force goes with --apply")
    why_not = why_not_in_git() if apply and not force else ""
    if why_not:
        raise UsageError(f"--apply: {why_not}, and could not undo the edits; --force makes them all the same")
    if diff is not None:
        check_writable(diff)


def _write_patch(patch: FilePatch, *, apply: bool, force: bool) -> None:
    """Write the patch, and edit the files if that is asked for."""
    from flatout.fix.patch import why_not_in_git

    if not patch.files:
        return
    try:
        write_whole(patch.file, patch.diff())
    except OSError as problem:
        raise UsageError(f"cannot write {patch.file}: {problem.strerror}") from None
    if apply and not force and patch.outcome == "failed":
        raise UsageError(f"--apply edited nothing: the patch has failed ({patch.tried}); --force edits all the same")
    why_not = why_not_in_git(patch.files) if apply and not force else ""
    if why_not:
        raise UsageError(f"--apply edited nothing: {why_not}, then git apply {patch.file}")
    for path, backup in zip(patch.files, patch.write() if apply else (), strict=False):
        say(f"{path} is edited; as it was, it is in {backup}")
