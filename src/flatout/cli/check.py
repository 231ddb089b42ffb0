"""`flatout check`."""

from __future__ import annotations

from pathlib import Path

import typer

from flatout.cli.entry import argument, flag, option, output_file, require_linux, verb
from flatout.cli.output import console, write_results


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
