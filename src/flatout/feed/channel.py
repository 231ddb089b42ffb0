"""How the training process and its workers talk: one socket a worker, whole messages, file descriptors along.

    training process ──► worker   its board, then Tasks                            (end of the socket: go)
    worker ──► training process   for every Task, in order, Done or an exception   (end of the socket: it died)

A worker's board is memory that both share: the row that it is at, and its process id. `SOCK_SEQPACKET` keeps
messages whole: a process killed while it sends leaves all of one or nothing, and no lock. Long ones travel in
a memory file.
"""

from __future__ import annotations

import array
import contextlib
import errno
import mmap
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flatout.feed.randomness import Key
from flatout.files import clear_of_standard

Span = tuple[int, int]  # offset, length

BOARD_BYTES = 16  # two numbers
NO_ROW, IDLE = -1, -2  # on a board: at a batch, but at none of its rows; between two batches
INLINE_BYTES = 16 << 10
MAX_FDS = 8
_INLINE, _IN_FILE = b"\0", b"\1"
_WAIT = int(socket.MSG_CMSG_CLOEXEC)
_DO_NOT_WAIT = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)

# --- what they say -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every worker of a loader knows: how a list of indices becomes a batch."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    auto_collation: bool
    drop_last: bool
    declared: int  # the number of workers that user code is told
    skip_bad: bool
    defer: bool = False  # transforms are noted by samples, and done to whole batches on the GPU


class Task(NamedTuple):
    """Make this batch, in a slot's memory: its descriptor comes along where the worker does not have it yet.

    It travels as an ordinary tuple, whose pickle is made and read three times as fast; so does `Done`.
    """

    key: Key
    batch: int
    indices: Any
    leave_out: frozenset[int] = frozenset()  # rows known to be bad
    slot: int | None = None
    closed: tuple[int, ...] = ()  # slots that the worker has and may let go of


class Done(NamedTuple):
    """A batch: what to unpack it from, what there is to learn from it, and what making it took."""

    skeleton: bytes
    spans: list[Span]
    needs: int  # bytes that a slot should have for it
    bad: list[tuple[int, str]]
    wall_s: float
    cpu_s: float
    run_delay_s: float
    fills: str | None = None  # a container of the dataset that samples were seen to fill


# --- how it travels -----------------------------------------------------------------------------

# Descriptors that only this process may hold: a forked child that kept one would keep a dead worker's
# socket open and a closed slot's memory in use.
_private: set[int] = set()


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new channel."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine, other = (socket.socket(fileno=clear_of_standard(end.detach())) for end in ends)
    return mine, other


def send(channel: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    """Send one message; `BlockingIOError` when the channel is full, `OSError` when the other side is gone."""
    body = pickle.dumps(message, protocol=5)
    if len(body) <= INLINE_BYTES and not fds:
        channel.send(_INLINE + body)
    elif len(body) <= INLINE_BYTES:
        socket.send_fds(channel, [_INLINE, body], fds)
    else:
        carrier = memory_file(len(body))
        try:
            os.pwrite(carrier, body, 0)
            socket.send_fds(channel, [_IN_FILE], [*fds, carrier])
        finally:
            os.close(carrier)


def receive(channel: socket.socket, *, wait: bool = True) -> tuple[Any, list[int]]:
    """The next message and its descriptors; `EOFError` once the other side is gone and everything was read.

    `OSError` (EMFILE) where this process may open no more files: the descriptors are lost.
    """
    flags = _WAIT if wait else _DO_NOT_WAIT
    try:
        data, ancillary, flags, _ = channel.recvmsg(INLINE_BYTES + 1, _ANCILLARY_BYTES, flags)
    except ConnectionResetError:  # once, when the other side died with unread messages; its own may be queued
        return receive(channel, wait=wait)
    if not data:
        raise EOFError
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    fds = array.array("i")
    for _, _, payload in ancillary:
        fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if data[0] == _INLINE[0]:
        return pickle.loads(memoryview(data)[1:]), list(fds)
    carrier = fds.pop()
    try:
        with mmap.mmap(carrier, 0, prot=mmap.PROT_READ) as body:
            return pickle.loads(body), list(fds)
    finally:
        os.close(carrier)


def memory_file(size: int) -> int:
    """A descriptor of anonymous shared memory: not bounded by /dev/shm, gone with its last user."""
    fd = clear_of_standard(os.memfd_create("flatout-feed", os.MFD_CLOEXEC))
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def close_in_children(fd: int, close: bool = True) -> None:
    """Have children that are forked from here close `fd`; with `close=False`, no longer."""
    if close:
        _private.add(fd)
    else:
        _private.discard(fd)


def close_inherited(but: int) -> None:
    """In a forked child: close what belongs to the parent alone."""
    for fd in _private - {but}:
        with contextlib.suppress(OSError):
            os.close(fd)
    _private.clear()
