"""One socket a worker: small whole messages, with file descriptors along.

`SOCK_SEQPACKET` keeps the borders between messages in the kernel: a process killed while it sends leaves a whole
message or none, and no lock that anybody waits for. What is too long for a message travels in a memory file of its
own, so neither side ever blocks on the size of an index list or a traceback.
"""

from __future__ import annotations

import array
import errno
import mmap
import os
import pickle
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from flatout.files import clear_of_standard

INLINE_BYTES = 16 << 10
MOST_FDS = 8
_INLINE, _IN_FILE = b"\0", b"\1"
_WAIT = int(socket.MSG_CMSG_CLOEXEC)
_DO_NOT_WAIT = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_ANCILLARY_BYTES = socket.CMSG_SPACE(MOST_FDS * array.array("i").itemsize)

# Descriptors that only this process may hold: a forked child that kept one would keep a dead worker's socket open
# and a retired slot's memory in use.
_own: set[int] = set()


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new wire."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if all(end.fileno() > 2 for end in ends):
        return ends
    mine, other = (socket.socket(fileno=clear_of_standard(end.detach())) for end in ends)
    return mine, other


def send(wire: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    """Send one message; `BlockingIOError` when a non-blocking wire is full, `OSError` when the other side is gone."""
    body = pickle.dumps(message, protocol=5)
    if len(body) <= INLINE_BYTES and not fds:
        wire.send(_INLINE + body)
    elif len(body) <= INLINE_BYTES:
        socket.send_fds(wire, [_INLINE, body], fds)
    else:
        carrier = memory_file(len(body))
        try:
            os.pwrite(carrier, body, 0)
            socket.send_fds(wire, [_IN_FILE], [*fds, carrier])
        finally:
            os.close(carrier)


def receive(wire: socket.socket, *, wait: bool = True) -> tuple[Any, list[int]]:
    """The next message and its descriptors; `EOFError` once the other side is gone and everything was read.

    `OSError` (EMFILE) where this process may open no more files: the descriptors are lost.
    """
    try:
        data, ancillary, flags, _ = wire.recvmsg(INLINE_BYTES + 1, _ANCILLARY_BYTES, _WAIT if wait else _DO_NOT_WAIT)
    except ConnectionResetError:  # said once, when the other side died with unread messages; its own may be queued
        return receive(wire, wait=wait)
    if not data:
        raise EOFError
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not ancillary and data[0] == _INLINE[0]:
        return pickle.loads(memoryview(data)[1:]), []
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


def keep_from_children(fd: int, keep: bool = True) -> None:
    """Note that a child forked from here has to close `fd` (or, with `keep=False`, that it is closed already)."""
    if keep:
        _own.add(fd)
    else:
        _own.discard(fd)


def close_inherited(but: Iterable[int] = ()) -> None:
    """In a freshly forked child: close what belongs to the parent alone."""
    for fd in _own.difference(but):
        try:
            os.close(fd)
        except OSError:
            pass
    _own.clear()
