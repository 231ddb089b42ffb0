"""CHECK: a training looked over before it starts. Runs nothing of the user's, never imports torch.

script ────────► Script ─────────┐
config, flags ─► KnownSettings ──┼─► Training ──loader, compute, machine checks──► Checklist
machine: cores, memory, GPUs ────┘

What cannot be told without running is called unknown; no check guesses.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from flatout.check import compute_checks, loader_checks, machine_checks
from flatout.check.compute_checks import switch_check
from flatout.check.lines import FAIL, NOT_APPLICABLE, OK, WARN, Checklist, Line
from flatout.check.machine_checks import visible_gpus
from flatout.check.training import Gpus, Training
from flatout.model.errors import UsageError
from flatout.model.frameworks import RUN_LOOPS
from flatout.model.inputs import is_folder
from flatout.redact import redact_text
from flatout.sample import budget

__all__ = ["FAIL", "NOT_APPLICABLE", "OK", "WARN", "Checklist", "Line", "Training", "check", "look_over"]

_CHECKS: dict[str, Callable[[Training], Line | None]] = {
    "workers": loader_checks.check_workers,
    "shared memory": loader_checks.check_shared_memory,
    "pin_memory": loader_checks.check_pin_memory,
    "persistent_workers": loader_checks.check_persistent_workers,
    "loader in the loop": loader_checks.check_loader_in_loop,
    "set_epoch": loader_checks.check_set_epoch,
    "mixed precision": compute_checks.check_mixed_precision,
    "TF32": switch_check("tf32", 'torch.set_float32_matmul_precision("high")', "allow_tf32"),
    "cuDNN benchmark": switch_check("cudnn_benchmark", "torch.backends.cudnn.benchmark = True"),
    "compile": switch_check("compile", "torch.compile(model)"),
    "channels_last": switch_check("channels_last", "torch.channels_last for model and inputs"),
    "host waits": compute_checks.check_host_waits,
    "GPUs": machine_checks.check_gpus,
}


def check(
    script: Path | None, *, flags: tuple[str, ...], config: Path | None, data: Path | None, gpus: Gpus
) -> Checklist:
    """Look over a training on this machine; `flags` are the script's own."""
    if script is not None and (is_folder(script) or script.suffix in (".sh", ".json", ".yaml", ".yml")):
        raise UsageError(f"{script} is no Python script; a config goes with --config, the script's flags after --")
    try:
        return look_over(Training(budget.measure(), visible_gpus(gpus, os.environ), script, flags, config), data)
    except RecursionError:
        raise UsageError(f"{script or config} cannot be read: it is nested too deeply") from None


def look_over(training: Training, data: Path | None = None) -> Checklist:
    """All checks on a training."""
    lines = {subject: look(training) for subject, look in _CHECKS.items()}
    lines["disk"] = machine_checks.check_disk(training, data)
    files = [str(file.path) for file in training.script.files]
    if files and not training.loops and not training.script.packages & {"torch", "torchvision", "flatout", *RUN_LOOPS}:
        reason = f"no PyTorch training was found in {', '.join(files + training.script.not_read)}"
        lines["training"] = Line(status=WARN, reason=reason, fix="name the script that holds the training loop")
    if training.config is not None:
        files.append(str(training.config))
    return Checklist(looked_at=tuple(files), lines=tuple(_finished(*one) for one in lines.items()))


def _finished(subject: str, line: Line | None) -> Line:
    """A line with its subject, and without secrets that it quotes from the script."""
    if line is None:
        reason = "does not apply, or cannot tell without running: flatout run --max-steps 50 measures it"
        return Line(subject=subject, status=NOT_APPLICABLE, reason=reason)
    fix = redact_text(line.fix or "") or None
    return dataclasses.replace(line, subject=subject, reason=redact_text(line.reason), fix=fix)
