"""`flatout try`."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import typer

from flatout.cli.entry import (
    INTERRUPTED,
    TAKES_A_COMMAND,
    command_of,
    flag,
    option,
    output_file,
    require_linux,
    seconds_of,
    verb,
)
from flatout.cli.output import check_outputs, console, write_report
from flatout.model.errors import UsageError
from flatout.redact import redact_command


@verb("try", options_metavar="[OPTIONS] -- COMMAND…", context_settings=TAKES_A_COMMAND)
def try_(
    context: typer.Context,
    patch: list[Path] = option("FILE", "Try this patch (diff -u, git diff). May be given several times.", default=()),
    with_: Path | None = option("DIR", "Try an edited copy of the current folder.", name="--with"),
    against: str | None = option("COMMAND", "Try the command behind the -- against this older one."),
    env: list[str] = option("NAME=VALUE", "Try an environment variable. May be given several times.", default=()),
    budget: str = option("TIME", "How long to try: 90s, 4m, 1h.", default="4m"),
    steps: int | None = option("N", "Training steps of each run. Default: as many as there is time for.", min=20),
    json: str | None = output_file("the result as JSON"),
    unprotected: bool = flag("--unprotected", "With --against or --env: go on where no overlay can be mounted."),
) -> None:
    """Try an edit: is training faster with it, and is it the same training?

    `flatout try --patch faster.diff -- python train.py`. The command is run with the edit and without
    it, in turns; the edit is only in the runs' own view, and none of your files is written. Exit code
    0: faster, and the same training; 1: not so, with the reason; 2: a mistake in the command.
    """
    require_linux("try")
    from flatout.fix.try_edit import try_edits
    from flatout.report import TrySummary
    from flatout.report.terminal import FixProgress

    command, older = command_of(context), _words_of(against or "")
    if not command:
        raise UsageError("no command given: flatout try --patch FILE -- python train.py …")
    if sum(map(bool, (patch, with_, older, env))) != 1:
        raise UsageError("what is to be tried? Give one of --patch FILE, --with DIR, --against COMMAND, --env NAME=…")
    for word in [command[0], *older[:1]]:
        if shutil.which(word) is None:
            raise UsageError(f"{word}: command not found")
    for variable in env:
        if not variable.partition("=")[0].isidentifier() or "=" not in variable:
            raise UsageError(f"--env {variable}: expected NAME=VALUE")
    check_outputs(json, None)
    with FixProgress(console(stderr=True)) as progress:
        result = try_edits(
            command,
            patches=list(dict.fromkeys(patch)),
            copy=with_,
            against=older,
            variables=env,
            budget_s=seconds_of(budget),
            steps=steps,
            progress=progress,
            unprotected=unprotected,
        )
    write_report(TrySummary(command=redact_command(command), result=result), json, None, console())
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not result.passed:
        raise typer.Exit(1)


def _words_of(against: str) -> list[str]:
    try:
        return shlex.split(against)
    except ValueError as problem:
        raise UsageError(f"--against {against}: {problem}") from None
