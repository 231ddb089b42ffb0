"""Checks of the machine: its GPUs, and the disk that the data is on."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from flatout.check.lines import Line, fail, ok, warn
from flatout.check.script import where
from flatout.check.training import Gpus, Training
from flatout.model.errors import UsageError

_READ_S, _READERS, _MAX_FILES, _FEW_BATCHES_S = 2.0, 8, 4000, 2.0
_IDLE = "hardware.idle-gpus"


def visible_gpus(gpus: Gpus, environ: Mapping[str, str]) -> Gpus:
    """The GPUs that a training started here would see; None where no driver answers."""
    if gpus is None or "CUDA_VISIBLE_DEVICES" not in environ:
        return gpus
    names = tuple(name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip())
    return tuple(gpu for gpu in gpus if str(gpu.index) in names or gpu.uuid.startswith(names))


def check_gpus(training: Training) -> Line | None:
    """GPUs that are visible, against those the training will use."""
    if training.gpus is None:
        return None
    if not training.gpus:
        return fail("CUDA_VISIBLE_DEVICES hides every GPU", fix="unset CUDA_VISIBLE_DEVICES", code=_IDLE)
    if training.is_complete and not training.script.uses("cuda", "to", "device"):
        place = where(training.loops[0].node)
        fix = 'model.to("cuda"), and every batch likewise'
        return warn("the script trains on the CPU: nothing is moved to a GPU", place, fix=fix, code=_IDLE)
    if len(training.gpus) == 1:
        return ok(training.gpus[0].name)
    parallel = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "DDP", "FSDP")
    if training.script.uses(*parallel) or not training.is_complete:
        return None
    start = f"torchrun --nproc-per-node {len(training.gpus)} {training.path}"
    reason = f"{len(training.gpus)} GPUs are visible, and the script uses one"
    return warn(reason, fix=f"DistributedDataParallel, and {start}", code=_IDLE)


def check_disk(training: Training, folder: Path | None, *, clock: Callable[[], float] = time.monotonic) -> Line | None:
    """How fast files of the data folder can be read, in random order, for two seconds."""
    if folder is None:
        return None
    if not folder.is_dir():
        raise UsageError(f"--data {folder} is not a folder")
    paths = list(islice((path for path in folder.rglob("*") if path.is_file()), _MAX_FILES))
    if not paths:
        raise UsageError(f"--data {folder} holds no files that can be read")
    random.Random(0).shuffle(paths)
    started = clock()
    with ThreadPoolExecutor(_READERS) as pool:
        sizes = list(pool.map(lambda path: _read(path) if clock() - started < _READ_S else None, paths))
    seconds, read = max(clock() - started, 1e-6), [size for size in sizes if size is not None]
    rate = f"{sum(read) / seconds / 1e6:,.0f} MB/s and {len(read) / seconds:,.0f} files/s with {_READERS} readers"
    batch = training.option("batch_size")
    if not batch.is_number() or batch.what < 1:
        return None
    batches = len(read) / seconds / batch.what
    reason = f"{rate}: with a file a sample, up to {batches:,.1f} batches of {batch.what} a second"
    if batches >= _FEW_BATCHES_S:
        return ok(reason, str(folder))
    fix = "copy the data to a local disk, or pack it into larger files"
    return warn(reason, str(folder), fix=fix, code="data.disk-bound")


def _read(path: Path) -> int | None:
    """The bytes of a file, past the page cache where the file system can do that."""
    try:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return len(file.read())
    except OSError:
        return None
