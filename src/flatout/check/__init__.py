"""CHECK: a training looked over before it starts. Runs nothing of the user's, never imports torch.

script ──source──► Program ──evaluate──► Values ──┐      (tree: what one can ask of a node of the script)
command, config ──settings, arguments──► Settings ┼──► Study ──loading, computing, looping, surroundings──► Checklist
machine: Budget, cards, a data folder ────────────┘

What cannot be told without running is said to be unknown; a check that guessed would be read once.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from flatout.check import computing, loading, looping, surroundings
from flatout.check.checklist import WARN, Checklist, Line, unknown
from flatout.check.settings import Command, read_command, shown
from flatout.check.study import Machine, Study, open_study
from flatout.check.surroundings import DataFolder, read_folder
from flatout.model.errors import UsageError
from flatout.model.inputs import is_folder
from flatout.redact import redact_text
from flatout.sample import budget
from flatout.trace import GpuSample

__all__ = ["Checklist", "DataFolder", "Line", "Machine", "check", "inspect", "read_folder"]

# In the order of a person's own list.
_CHECKS = {
    "workers": loading.check_workers,
    "decode threads": loading.check_decode_threads,
    "shared memory": loading.check_shared_memory,
    "host memory": loading.check_host_memory,
    "pin_memory": loading.check_pin_memory,
    "persistent_workers": loading.check_persistent_workers,
    "mixed precision": computing.check_mixed_precision,
    "batch size": computing.check_batch_size,
    "prefetch_factor": loading.check_prefetch_factor,
}
_CHECKS_OF_THE_SCRIPT = {  # which say nothing of a config alone
    "drop_last": loading.check_drop_last,
    "loader in the loop": loading.check_loader_in_loop,
    "set_epoch": loading.check_set_epoch,
    "TF32": computing.check_tf32,
    "cuDNN benchmark": computing.check_cudnn_benchmark,
    "compile": computing.check_compile,
    "fused optimizer": computing.check_fused_optimizer,
    "channels_last": computing.check_channels_last,
    "zero_grad": computing.check_zero_grad,
    "host waits": looping.check_host_waits,
    "evaluation": looping.check_evaluation,
    "checkpoints": looping.check_checkpoints,
}
_CHECKS_OF_THE_MACHINE = {
    "GPUs": surroundings.check_gpus,
    "shared card": surroundings.check_sharing,
    "temperature": surroundings.check_temperature,
}


def check(
    script: Path | None,
    *,
    flags: tuple[str, ...],
    config: Path | None,
    data: Path | None,
    gpus: tuple[GpuSample, ...] | None,
) -> Checklist:
    """Look over a training on this machine. `script` may be the shell script that starts it; `flags` are its own."""
    command = _command(script, flags)
    ranks = {} if command is None or command.ranks is None else {"LOCAL_WORLD_SIZE": str(command.ranks)}
    machine = Machine(budget=budget.measure(environ={**os.environ, **ranks}), gpus=gpus, environ=os.environ)
    try:
        return inspect(open_study(machine, command, config), read_folder(data) if data is not None else None)
    except RecursionError:
        named = " or ".join(str(path) for path in (script, config) if path is not None)
        raise UsageError(f"{named} cannot be looked over: it is nested too deeply") from None


def inspect(study: Study, folder: DataFolder | None = None) -> Checklist:
    """All checks on a study."""
    files = [module.name for module in study.program.modules]
    if study.settings.config is not None:
        files.append(shown(study.settings.config))
    lines = {} if study.command is None or study.trains() else {"training": _no_training(study)}
    lines |= {subject: look(study) for subject, look in _CHECKS.items()}
    for subject, look in _CHECKS_OF_THE_SCRIPT.items():
        lines[subject] = look(study) if study.command is not None else unknown("needs the script")
    lines |= {subject: look(study) for subject, look in _CHECKS_OF_THE_MACHINE.items()}
    if study.on_cpu():
        lines = {subject: _on_cpu(line) for subject, line in lines.items()}
    lines["disk"] = surroundings.check_disk(study, folder)
    return Checklist(looked_at=tuple(files), lines=tuple(_told(subject, line) for subject, line in lines.items()))


def _told(subject: str, line: Line) -> Line:
    """A line with its subject; it may quote the script or its settings."""
    fix = redact_text(line.fix) if line.fix is not None else None
    return dataclasses.replace(line, subject=subject, reason=redact_text(line.reason), fix=fix)


def _no_training(study: Study) -> Line:
    unseen = f"; not looked at: {', '.join(study.program.missing[:3])}" if study.program.missing else ""
    reason = f"no PyTorch training was found in {study.program.modules[0].name}{unseen}"
    return Line(status=WARN, reason=reason, fix="name the script that holds the training loop")


def _on_cpu(line: Line) -> Line:
    """What costs a GPU time costs none where no GPU is used."""
    of_a_gpu = str(line.code).startswith(("compute", "sync", "copy", "pause"))
    return unknown("nothing here uses a GPU") if line.status == WARN and of_a_gpu else line


def _command(script: Path | None, flags: tuple[str, ...]) -> Command | None:
    if script is None:
        if flags:
            raise UsageError("flags of a script were given, but no script")
        return None
    if is_folder(script):
        raise UsageError(f"{script} is a folder; name the training script")
    if script.suffix in (".json", ".yaml", ".yml"):
        raise UsageError(f"{script} is no training script; a config goes with --config")
    if script.suffix in (".sh", ".bash"):
        command = read_command(script)
        return dataclasses.replace(command, flags=(*flags, *command.flags))
    return Command(script=script, flags=flags, where="the command line" if flags else None)
