"""Checks of the machine: its disk, its cards, and who else uses them."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flatout.diagnose.preflight.checklist import Line, fail, ok, unknown, warn
from flatout.diagnose.preflight.loading import batch_size
from flatout.diagnose.preflight.study import Study
from flatout.errors import UsageError

_WITHIN_S = 2.0
_READERS = 8
_AT_MOST_FILES = 4000
_CHUNK = 1 << 20
_HOT_C, _TOO_HOT_C = 80, 87
_HELD_BYTES = 1 << 30
_FEW_BATCHES_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFolder:
    """How fast a folder could be read: by `readers` at once, in `seconds`, past the page cache where `direct`."""

    path: str
    files: int
    read_bytes: int
    seconds: float
    readers: int
    direct: bool

    @property
    def bytes_s(self) -> float:
        """Bytes a second."""
        return self.read_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def files_s(self) -> float:
        """Files a second."""
        return self.files / self.seconds if self.seconds > 0 else 0.0


def read_folder(
    folder: Path, *, within_s: float = _WITHIN_S, clock: Callable[[], float] = time.monotonic
) -> DataFolder:
    """Read files of a folder, chosen at random, for at most two seconds, and not out of the page cache if possible."""
    if not folder.is_dir():
        raise UsageError(f"--data {folder} is not a folder")
    paths = _some_files(folder)
    if not paths:
        raise UsageError(f"--data {folder} holds no files that can be read")
    random.Random(0).shuffle(paths)
    started = clock()
    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(lambda path: _read(path, started + within_s, clock), paths))
    done = [(size, direct) for size, direct in found if size is not None]
    return DataFolder(
        path=str(folder),
        files=len(done),
        read_bytes=sum(size for size, _ in done),
        seconds=max(clock() - started, 1e-6),
        readers=_READERS,
        direct=bool(done) and all(direct for _, direct in done),
    )


def _some_files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for where, folders, names in os.walk(folder):
        folders.sort()
        found += [path for name in sorted(names) if not (path := Path(where, name)).is_symlink() and path.is_file()]
        if len(found) >= _AT_MOST_FILES:
            break
    return found[:_AT_MOST_FILES]


def _read(path: Path, until: float, clock: Callable[[], float]) -> tuple[int | None, bool]:
    """Bytes read of a file, or None where it was not begun in time; and whether the page cache was left out."""
    if clock() >= until:
        return None, False
    direct = getattr(os, "O_DIRECT", 0)
    for flags in (os.O_RDONLY | direct, os.O_RDONLY) if direct else (os.O_RDONLY,):
        try:
            handle = os.open(path, flags)
        except OSError:
            continue  # tmpfs and some network file systems have no direct reads
        try:
            if not flags & direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            return _read_handle(handle, until, clock), bool(flags & direct)
        except OSError:
            continue
        finally:
            os.close(handle)
    return None, False


def _read_handle(handle: int, until: float, clock: Callable[[], float]) -> int:
    total = 0
    with mmap.mmap(-1, _CHUNK) as aligned:  # direct reads want memory that begins on a page
        while clock() < until:
            count = os.readv(handle, [aligned])
            total += count
            if count < _CHUNK:
                break
    return total


def check_disk(study: Study, folder: DataFolder | None) -> Line:
    """The read rate of the data folder, in batches."""
    if folder is None:
        return unknown("disk", "give the folder to have its read rate measured: --data DIR")
    how = "past the page cache" if folder.direct else "perhaps out of the page cache"
    rate = f"{folder.bytes_s / 1e6:,.0f} MB/s and {folder.files_s:,.0f} files/s, {folder.readers} readers, {how}"
    size = batch_size(study)
    if size is None or not size.is_number():
        return unknown("disk", f"{rate}; the batch size is not known", where=folder.path)
    batches = folder.files_s / size.what
    reason = f"{rate}: with a file a sample, up to {batches:,.1f} batches of {size.what} a second"
    if batches < _FEW_BATCHES_S:
        return warn(
            "disk",
            reason,
            fix="copy the data to a local disk, or pack it into larger files",
            code="data.disk-bound",
            where=folder.path,
        )
    return ok("disk", reason, folder.path)


def check_gpus(study: Study) -> Line:
    """Cards that are visible, against those the training will use."""
    subject, cards = "GPUs", study.machine.visible()
    if study.machine.gpus is None:
        return unknown(subject, "no NVIDIA driver answers here")
    if not cards:
        return fail(
            subject,
            "CUDA_VISIBLE_DEVICES hides every card",
            fix="unset CUDA_VISIBLE_DEVICES",
            code="hardware.idle-gpus",
        )
    if study.on_cpu():
        region = study.regions[0]
        return warn(
            subject,
            "the script trains on the CPU: nothing is ever moved to a card",
            fix='model.to("cuda"), and every batch likewise',
            code="hardware.idle-gpus",
            where=region.module.where(region.node),
        )
    many = len(cards)
    names = ", ".join(dict.fromkeys(card.name for card in cards))
    if many == 1:
        return ok(subject, f"one card: {names}")
    if study.program is None or study.command is None:
        return unknown(subject, f"{many} cards; no script to look at")
    script, command = study.command.script.name, study.command
    start = f"torchrun --nproc-per-node {many} {script}"
    distributed = any(study.called(".DistributedDataParallel", "DistributedDataParallel", ".FullyShardedDataParallel",
                                   ".fully_shard", ".DDP", ".FSDP"))  # fmt: skip
    if command.ranks is not None and command.launcher:
        if command.ranks >= many:
            return ok(subject, f"{command.ranks} ranks on {many} cards", command.where)
        return _idle(
            f"{many} cards are visible, {command.ranks} ranks are started", start, many - command.ranks, command.where
        )
    if distributed or command.launcher:
        if command.known and not command.launcher:
            return _idle(f"{many} cards are visible, but one process is started", start, many - 1, command.where)
        return unknown(subject, f"{many} cards; the script can use them all", fix=start)
    for module, call in study.called(".DataParallel", "DataParallel"):
        return warn(
            subject,
            "DataParallel drives all cards from one process, which copies the model every step",
            fix=f"DistributedDataParallel, and {start}",
            code="hardware.idle-gpus",
            where=module.where(call),
        )
    framework = study.framework()
    if framework or study.program.missing or not study.regions:
        return unknown(subject, f"{many} cards; {framework or 'what was not looked at'} may use them")
    return _idle(
        f"{many} cards are visible, and the script uses one", f"DistributedDataParallel, and {start}", many - 1, None
    )


def _idle(reason: str, fix: str, idle: int, where: str | None) -> Line:
    return warn(
        "GPUs",
        f"{reason}: {idle} stand{'s' if idle == 1 else ''} idle",
        fix=fix,
        code="hardware.idle-gpus",
        where=where,
    )


def check_sharing(study: Study) -> Line:
    """Other processes on the cards."""
    subject, cards = "shared card", study.machine.visible()
    if not cards:
        return unknown(subject, "no card")
    for card in cards:
        others = card.processes or ()
        used = card.memory_used_bytes or 0
        if others:
            who = ", ".join(f"{p.name or 'process'} ({p.pid})" for p in others[:3])
            held = f", {used / 2**30:.1f} GiB in use" if used else ""
            return warn(
                subject,
                f"GPU {card.index} is in use by {who}{held}",
                fix="wait for it, or CUDA_VISIBLE_DEVICES with another card",
                code="hardware.shared",
            )
        if used > _HELD_BYTES:
            return warn(
                subject,
                f"GPU {card.index} has {used / 2**30:.1f} GiB in use by something that cannot be seen from here",
                fix="ask who else uses this machine, or CUDA_VISIBLE_DEVICES with another card",
                code="hardware.shared",
            )
    return ok(subject, "nobody else uses the cards")


def check_temperature(study: Study) -> Line:
    """How hot the cards are before they have begun to work."""
    subject, cards = "temperature", study.machine.visible()
    known = [(card.temperature_c, card) for card in cards if card.temperature_c is not None]
    if not known:
        return unknown(subject, "no card, or it does not say")
    degrees, card = max(known, key=lambda pair: pair[0])
    held = [reason for reason in card.throttle or () if reason.startswith(("heat", "hardware slowdown"))]
    reason = f"GPU {card.index} has {degrees:.0f} °C" + (f" and its clocks are held down: {held[0]}" if held else "")
    if held or degrees >= _TOO_HOT_C:
        return fail(subject, reason, fix="look after fans, air and dust before a long run", code="hardware.throttled")
    if degrees >= _HOT_C:
        return warn(
            subject, reason, fix="look after fans and air; clocks drop from about 85 °C", code="hardware.throttled"
        )
    return ok(subject, reason)
