"""Checks of the machine: its disk, its cards, and who else uses them."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flatout.check import tree
from flatout.check.checklist import Line, fail, ok, unknown, warn
from flatout.check.loading import batch_size
from flatout.check.settings import Command
from flatout.check.study import Study
from flatout.model.errors import UsageError

_WITHIN_S = 2.0
_READERS = 8
_AT_MOST_FILES = 4000
_CHUNK = 1 << 20
_HOT_C, _TOO_HOT_C = 80, 87
_HELD_BYTES = 1 << 30
_FEW_BATCHES_S = 2.0
_IDLE = "hardware.idle-gpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFolder:
    """How fast a folder could be read: so much in `seconds`, past the page cache where `direct`."""

    path: str
    files: int
    read_bytes: int
    seconds: float
    direct: bool


def read_folder(
    folder: Path, *, within_s: float = _WITHIN_S, clock: Callable[[], float] = time.monotonic
) -> DataFolder:
    """Read files of a folder, chosen at random, for at most two seconds, and not out of the page cache if possible."""
    if not folder.is_dir():
        raise UsageError(f"--data {folder} is not a folder")
    found = (Path(where, name) for where, _, names in os.walk(folder) for name in names)
    paths = list(itertools.islice((path for path in found if path.is_file() and not path.is_symlink()), _AT_MOST_FILES))
    if not paths:
        raise UsageError(f"--data {folder} holds no files that can be read")
    random.Random(0).shuffle(paths)
    started = clock()
    with ThreadPoolExecutor(_READERS) as pool:
        read = [one for one in pool.map(lambda path: _read(path, started + within_s, clock), paths) if one is not None]
    return DataFolder(
        path=str(folder),
        files=len(read),
        read_bytes=sum(size for size, _ in read),
        seconds=max(clock() - started, 1e-6),
        direct=bool(read) and all(direct for _, direct in read),
    )


def _read(path: Path, until: float, clock: Callable[[], float]) -> tuple[int, bool] | None:
    """Bytes read of a file and whether the page cache was left out; None where it was not begun in time."""
    for direct in (os.O_DIRECT, 0) if clock() < until else ():
        try:
            handle = os.open(path, os.O_RDONLY | direct)
        except OSError:
            continue  # tmpfs and some network file systems have no direct reads
        try:
            if not direct:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            total, count = 0, _CHUNK
            with mmap.mmap(-1, _CHUNK) as aligned:  # direct reads want memory that begins on a page
                while count == _CHUNK and clock() < until:
                    total += (count := os.readv(handle, [aligned]))
            return total, bool(direct)
        except OSError:
            continue
        finally:
            os.close(handle)
    return None


def check_disk(study: Study, folder: DataFolder | None) -> Line:
    """The read rate of the data folder, in batches."""
    if folder is None:
        return unknown("give the folder to have its read rate measured: --data DIR")
    how = "past the page cache" if folder.direct else "perhaps out of the page cache"
    bytes_s, files_s = folder.read_bytes / folder.seconds, folder.files / folder.seconds
    rate = f"{bytes_s / 1e6:,.0f} MB/s and {files_s:,.0f} files/s, {_READERS} readers, {how}"
    size = batch_size(study)
    if size is None:
        return unknown(f"{rate}; the batch size is not known", folder.path)
    batches = files_s / size.what
    reason = f"{rate}: with a file a sample, up to {batches:,.1f} batches of {size.what} a second"
    if batches >= _FEW_BATCHES_S:
        return ok(reason, folder.path)
    fix = "copy the data to a local disk, or pack it into larger files"
    return warn(reason, folder.path, fix=fix, code="data.disk-bound")


def check_gpus(study: Study) -> Line:
    """Cards that are visible, against those the training will use."""
    cards, command = study.machine.visible(), study.command
    if study.machine.gpus is None:
        return unknown("no NVIDIA driver answers here")
    if not cards:
        fix = "unset CUDA_VISIBLE_DEVICES"
        return fail("CUDA_VISIBLE_DEVICES hides every card", fix=fix, code=_IDLE)
    if study.on_cpu():
        reason = "the script trains on the CPU: nothing is ever moved to a card"
        return warn(reason, study.regions[0].where, fix='model.to("cuda"), and every batch likewise', code=_IDLE)
    if len(cards) == 1:
        return ok(f"one card: {cards[0].name}")
    if command is None:
        return unknown(f"{len(cards)} cards; no script to look at")
    return _many_cards(study, command, len(cards))


def _many_cards(study: Study, command: Command, many: int) -> Line:
    start, ranks = f"torchrun --nproc-per-node {many} {command.script.with_suffix('.py').name}", command.ranks
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "DDP", "FSDP")
    can_share = any(study.program.calls(*wrappers)) or command.launcher
    if ranks is not None and command.launcher:
        if ranks >= many:
            return ok(f"{ranks} ranks on {many} cards", command.where)
        used, reason, where = ranks, f", {ranks} ranks are started", command.where
    elif can_share and (command.launcher or not command.known):
        return unknown(f"{many} cards; the script can use them all", fix=start)
    elif can_share:
        used, reason, where = 1, ", but one process is started", command.where
    else:
        start = f"DistributedDataParallel, and {start}"
        for call, _ in study.program.calls("DataParallel"):
            reason = "DataParallel drives all cards from one process, which copies the model every step"
            return warn(reason, tree.where(call), fix=start, code=_IDLE)
        if not study.whole():
            return unknown(f"{many} cards; {study.framework() or 'what was not looked at'} may use them")
        used, reason, where = 1, ", and the script uses one", None
    stand = "1 stands idle" if many - used == 1 else f"{many - used} stand idle"
    return warn(f"{many} cards are visible{reason}: {stand}", where, fix=start, code=_IDLE)


def check_sharing(study: Study) -> Line:
    """Other processes on the cards."""
    cards = study.machine.visible()
    for card in cards:
        others, used = card.processes or (), card.memory_used_bytes or 0
        held = f"{used / 2**30:.1f} GiB in use"
        if others:
            who = ", ".join(f"{process.name or 'process'} ({process.pid})" for process in others[:3])
            reason, first = f"is in use by {who}" + (f", {held}" if used else ""), "wait for it"
        elif used > _HELD_BYTES:
            reason, first = f"has {held} by something that cannot be seen from here", "ask who else uses this machine"
        else:
            continue
        fix = f"{first}, or CUDA_VISIBLE_DEVICES with another card"
        return warn(f"GPU {card.index} {reason}", fix=fix, code="hardware.shared")
    return ok("nobody else uses the cards") if cards else unknown("no card")


def check_temperature(study: Study) -> Line:
    """How hot the cards are before they have begun to work."""
    cards = study.machine.visible()
    known = [(card.temperature_c, card) for card in cards if card.temperature_c is not None]
    if not known:
        return unknown("no card, or it does not say")
    degrees, card = max(known, key=lambda pair: pair[0])
    held = [reason for reason in card.throttle or () if reason.startswith(("heat", "hardware slowdown"))]
    reason = f"GPU {card.index} has {degrees:.0f} °C" + (f" and its clocks are held down: {held[0]}" if held else "")
    if held or degrees >= _TOO_HOT_C:
        return fail(reason, fix="look after fans, air and dust before a long run", code="hardware.throttled")
    if degrees >= _HOT_C:
        return warn(reason, fix="look after fans and air; clocks drop from about 85 °C", code="hardware.throttled")
    return ok(reason)
