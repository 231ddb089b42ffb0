"""CHECK: a training looked over before it starts. Runs nothing of the user's, never imports torch.

script ────────► Script ─────────┐
config, flags ─► KnownSettings ──┼─► Training ──checks──► Checklist
machine: cores, memory, GPUs ────┘

What cannot be told without running is called unknown; no check guesses.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from flatout.check.checks import CHECKS, FAIL, NOT_APPLICABLE, OK, WARN, Checklist, Line
from flatout.check.training import Gpus, Training
from flatout.model.errors import UsageError
from flatout.model.frameworks import RUN_LOOPS
from flatout.model.inputs import is_folder
from flatout.redact import redact_text
from flatout.sample import budget

__all__ = ["FAIL", "NOT_APPLICABLE", "OK", "WARN", "Checklist", "Line", "Training", "check", "look_over"]


def check(script: Path | None, *, flags: tuple[str, ...], config: Path | None, gpus: Gpus) -> Checklist:
    """Look over a training on this machine; `flags` are the script's own."""
    if script is not None and (is_folder(script) or script.suffix in (".sh", ".json", ".yaml", ".yml")):
        raise UsageError(f"{script} is no Python script; a config goes with --config, the script's flags after --")
    try:
        return look_over(Training(budget.measure(), visible_gpus(gpus, os.environ), script, flags, config))
    except RecursionError:
        raise UsageError(f"{script or config} cannot be read: it is nested too deeply") from None


def visible_gpus(gpus: Gpus, environ: Mapping[str, str]) -> Gpus:
    """The GPUs that a training started here would see; None where no driver answers."""
    if gpus is None or "CUDA_VISIBLE_DEVICES" not in environ:
        return gpus
    names = tuple(name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip())
    return tuple(gpu for gpu in gpus if str(gpu.index) in names or gpu.uuid.startswith(names))


def look_over(training: Training) -> Checklist:
    """All checks on a training."""
    lines = {subject: look(training) for subject, look in CHECKS.items()}
    files = [str(file.path) for file in training.script.files]
    if files and not training.loops and not training.script.packages & {"torch", "torchvision", "flatout", *RUN_LOOPS}:
        reason = f"no PyTorch training was found in {', '.join(files + training.script.not_read)}"
        lines["training"] = Line(status=WARN, reason=reason, fix="name the script that holds the training loop")
    looked_at = tuple(map(str, filter(None, [*files, training.config])))
    return Checklist(looked_at=looked_at, lines=tuple(_finished(*one) for one in lines.items()))


def _finished(subject: str, line: Line | None) -> Line:
    """A line with its subject, and without secrets that it quotes from the script."""
    if line is None:
        reason = "does not apply, or cannot tell without running: flatout run --max-steps 50 measures it"
        return Line(subject=subject, status=NOT_APPLICABLE, reason=reason)
    fix = redact_text(line.fix or "") or None
    return dataclasses.replace(line, subject=subject, reason=redact_text(line.reason), fix=fix)
