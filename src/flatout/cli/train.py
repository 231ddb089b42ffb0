"""`flatout train`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from flatout.cli.entry import argument, flag, option, recordings_kept, require_linux, verb
from flatout.cli.report import summarize_run, summarize_runs
from flatout.model.errors import NotSavedError, UsageError
from flatout.model.inputs import is_file, is_folder

NOT_SAVED = 74  # from the trainer to the command that started it, which prints the last line and ends with 1


@verb()
def train(
    config: Path = argument("CONFIG", "The YAML file that describes the training.", default=...),
    overrides: list[str] | None = argument("KEY=VALUE", "Settings that override the file's."),
    preset: str | None = option("NAME", "fastest, small-memory or debug; overrides the file."),
    resume: bool = flag("--resume", "Continue from the last run's newest whole checkpoint."),
    explain: bool = flag("--explain", "Build the parts, print the settings in force, and why; no training."),
    gpus: int = option("N", "Train on this many GPUs of this machine.", min=1, default=1),
    quiet: bool = flag("--quiet", "Only what matters, for logs; no summary at the end."),
    keep: int = recordings_kept(),
    here: bool = typer.Option(False, "--here", hidden=True),
) -> None:
    """Train what a YAML file describes: fast by default, or an error that says why not.

    `flatout train config.yaml train.batch_size=256 train.precision=bf16`; on several GPUs `--gpus 2`,
    or your own `torchrun --nproc-per-node 2 -m flatout train config.yaml`. It is recorded as by
    `flatout run`, with the same summary at the end.
    """
    require_linux("train")
    words = list(overrides or ())
    if quiet:
        words.append("log.quiet=true")
    if here or "RANK" in os.environ or (explain and gpus == 1):
        from flatout.engine.assemble import main as train_here

        record = not (explain or here)  # under torchrun each rank records itself; with --here the launcher does
        try:
            recorded = train_here(
                config, words, preset=preset, resume=resume, explain=explain, record=record, gpus=gpus
            )
        except NotSavedError as problem:
            problem.exit_code = NOT_SAVED if here else problem.exit_code
            raise
        if recorded is not None and os.environ.get("RANK") == "0":
            summarize_run(recorded, quiet=quiet)
        return
    if not is_file(config):  # a mistake that need not wait for torch
        why = "it is a folder" if is_folder(config) else "there is no such file"
        raise UsageError(f"cannot read {config}: {why}")
    command = [sys.executable, "-m", "flatout", "train", "--here"]
    if preset is not None:
        command += ["--preset", preset]
    if resume:
        command.append("--resume")
    if explain:
        command.append("--explain")
    _launch([*command, "--gpus", str(gpus), "--", str(config), *words], config.stem, gpus=gpus, quiet=quiet, keep=keep)


def _launch(command: list[str], name: str, *, gpus: int, quiet: bool, keep: int) -> None:
    from flatout.launch import launcher
    from flatout.sample import budget

    if gpus > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(budget.measure().cores_allowed / gpus))))
        command = [sys.executable, "-m", "flatout.launch.launch_ranks", str(gpus), *command]
    folder = launcher.default_folder([f"{name}.py"])
    code = launcher.run(command, folder=folder, ends_with_us=True)
    summarize_runs(folder, keep=False, most=keep, quiet=quiet)
    if code == NOT_SAVED:
        raise NotSavedError("the final weights are not saved, for the reason given at the end of the training")
    raise typer.Exit(code)
