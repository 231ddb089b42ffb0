"""Where workers come from.

    training process ──fork──► nursery (one thread, no CUDA) ──fork──► worker, worker, …      start method fork
    training process ──the context's own Process──► worker                                   spawn, forkserver

A replacement in mid-training must not be forked from a process with CUDA and threads in it, so a nursery with the
dataset in its memory stands by. It ends with the training process (it watches its pidfd), and its workers end with it
(`PR_SET_PDEATHSIG`): nothing survives a SIGKILL of any of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from pickle import PicklingError
from typing import Any, NamedTuple

import torch
from torch import multiprocessing

from flatout.feed import wire, worker
from flatout.feed.messages import Recipe

_GRACE_S = 0.2  # for workers to end by themselves: who measures them writes down a last time what was seen
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_CANNOT_TRAVEL = (
    "Got pickle error when attempting to start a worker process: the start method {!r} sends it the dataset, "
    "collate_fn and worker_init_fn, which have to be picklable (no lambda, no function within a function). "
    "multiprocessing_context='fork' does without."
)
_fork_lock = threading.Lock()  # a fork between the making of a wire and its hand-over would keep the wire's far end


class Event(NamedTuple):
    """News of a worker: its pid at birth, its exit status (negative: a signal) at its end."""

    worker: int
    pid: int
    status: int | None


def starter_for(recipe: Recipe, context: Any) -> Starter:
    """The way to start workers under a multiprocessing context (None: the process-wide one)."""
    method = multiprocessing.get_start_method() if context is None else context.get_start_method()
    if method == "fork":
        return ForkServer(recipe)
    return ContextStarter(recipe, multiprocessing.get_context(method) if context is None else context)


class ForkServer:
    """A small process that forks workers on demand; this is the training process's handle of it."""

    def __init__(self, recipe: Recipe) -> None:
        with _fork_lock, _quiet_fork():
            self._wire, far = wire.pair()
            self._wire.setblocking(False)
            wire.keep_from_children(self._wire.fileno())
            self._process = multiprocessing.get_context("fork").Process(
                target=_nursery_main, args=(recipe, far, os.getpid()), daemon=True, name="flatout-nursery"
            )
            try:
                self._process.start()
            finally:
                far.close()
        self.pid = self._process.pid
        self._ended = False
        self._unread: list[Event] = []

    def start(self, number: int) -> socket.socket:
        with _fork_lock:
            near, far = wire.pair()
            try:
                wire.send(self._wire, ("fork", number), [far.fileno()])
            except OSError:
                near.close()
                raise
            finally:
                far.close()
            wire.keep_from_children(near.fileno())
        return near

    def events(self) -> list[Event]:
        found, self._unread = self._unread, []
        try:
            while True:
                message, _ = wire.receive(self._wire, wait=False)
                found.append(message)
        except BlockingIOError:
            pass
        except EOFError:
            self._ended = True
        return found

    def kill(self, number: int) -> None:
        try:
            wire.send(self._wire, ("kill", number))
        except OSError:
            pass  # a dead nursery has taken its workers with it

    def alive(self) -> bool:
        self._unread = self.events()  # by its wire: somebody else may reap our children
        return not self._ended

    def close(self) -> None:
        wire.keep_from_children(self._wire.fileno(), False)
        self._wire.close()
        _end(self._process)


class ContextStarter:
    """Workers started one by one through a context's own `Process`, as stock starts them."""

    def __init__(self, recipe: Recipe, context: Any) -> None:
        self._recipe = recipe
        self._context = context
        self._processes: dict[int, Any] = {}
        self._news: list[Event] = []

    def start(self, number: int) -> socket.socket:
        with _fork_lock:
            near, far = wire.pair()
            process = self._context.Process(target=_spawned_main, args=(self._recipe, far, os.getpid()), daemon=True)
            try:
                process.start()
            except BaseException as problem:
                near.close()
                if isinstance(problem, (TypeError, AttributeError, PicklingError)):
                    warnings.warn(_CANNOT_TRAVEL.format(self._context.get_start_method()), stacklevel=2)
                raise
            finally:
                far.close()
            wire.keep_from_children(near.fileno())
        self._processes[number] = process
        self._news.append(Event(number, process.pid, None))
        return near

    def events(self) -> list[Event]:
        for number, process in list(self._processes.items()):
            if process.exitcode is not None:
                self._news.append(Event(number, process.pid, process.exitcode))
                del self._processes[number]
                process.close()
        news, self._news = self._news, []
        return news

    def kill(self, number: int) -> None:
        if number in self._processes:
            self._processes[number].kill()

    def alive(self) -> bool:
        self._news = self.events()  # those that have ended are let go of
        return True

    def close(self) -> None:
        for process in self._processes.values():
            _end(process)
        self._processes.clear()


Starter = ForkServer | ContextStarter


def _end(process: Any, patience_s: float = 5) -> None:
    """Wait for a process whose wire is closed, for a while; it may have been reaped by somebody else."""
    process.join(patience_s)
    if process.is_alive() and Path(f"/proc/{process.pid}").exists():
        process.kill()
        process.join(patience_s)
    if process.exitcode is not None:
        process.close()


# --- inside the nursery -----------------------------------------------------------------------------------------------


def _nursery_main(recipe: Recipe, far: socket.socket, parent: int) -> None:
    wire.close_inherited(but=[far.fileno()])
    _in_a_group_of_its_own()
    _behave("flatout-nursery")
    limit_threads()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # or no children
    context = multiprocessing.get_context("fork")
    pidfd_of_parent = os.pidfd_open(parent)
    poll = select.poll()
    poll.register(far, select.POLLIN)
    poll.register(pidfd_of_parent, select.POLLIN)
    children: dict[int, tuple[int, Any]] = {}  # pidfd: worker number, process
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if pidfd_of_parent in ready:
            break
        for pidfd in ready & children.keys():
            number, process = children.pop(pidfd)
            poll.unregister(pidfd)
            os.close(pidfd)
            process.join()
            _tell(far, Event(number, process.pid, process.exitcode))
            process.close()
        if far.fileno() in ready:
            try:
                (order, number), fds = wire.receive(far)
            except EOFError:
                break
            if order == "fork":
                end = socket.socket(fileno=fds[0])
                process = context.Process(target=_forked_main, args=(recipe, end, far, os.getpid()), daemon=True)
                process.start()
                end.close()
                assert process.pid is not None
                pidfd = os.pidfd_open(process.pid)
                children[pidfd] = (number, process)
                poll.register(pidfd, select.POLLIN)
                _tell(far, Event(number, process.pid, None))
            else:
                for known, process in children.values():
                    if known == number:
                        process.kill()
    until = time.monotonic() + _GRACE_S
    for _, process in children.values():
        process.join(max(0.0, until - time.monotonic()))
        process.kill()
    os._exit(0)


def _forked_main(recipe: Recipe, end: socket.socket, nursery_wire: socket.socket, nursery: int) -> None:
    nursery_wire.close()
    _libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != nursery:
        os._exit(0)
    _behave("flatout-worker")
    _keep_freed_memory()
    worker.main(recipe, end)


def _spawned_main(recipe: Recipe, end: socket.socket, parent: int) -> None:
    _in_a_group_of_its_own()
    _behave("flatout-worker")
    limit_threads()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _keep_freed_memory()
    worker.main(recipe, end)


def _in_a_group_of_its_own() -> None:
    """A Jupyter kernel that shuts down ends the children in its process group and waits for them, zombies too, until
    it is killed itself. What the group is told reaches the training process, and us through its end."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # samples may still print to the terminal


def _end_with(parent: int) -> None:
    try:
        select.select([os.pidfd_open(parent)], [], [])
    except ProcessLookupError:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def _keep_freed_memory() -> None:
    """A batch's samples are freed together: glibc would give their pages back and ask for them again, one by one.

    With 256 pictures of 147 KiB that takes a tenth of the time it takes to decode them.
    """
    if hasattr(_libc(), "mallopt"):
        _libc().mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most it takes
        _libc().mallopt(_M_TRIM_THRESHOLD, 128 << 20)


def _tell(far: socket.socket, event: Event) -> None:
    try:
        wire.send(far, event)
    except OSError:
        pass  # the training process is gone; the loop finds out by itself


def _behave(name: str) -> None:
    """Leave Ctrl-C to the training process and the user's signal handlers out of its children; let it go first."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a worker given something to do would else run at once, on its giver's core
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    _libc().prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def limit_threads(number: int = 1) -> None:
    """Keep BLAS, OpenMP and OpenCV from starting a thread a core in every worker."""
    torch.set_num_threads(number)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"):
        os.environ[name] = str(number)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(number)
    maps = Path("/proc/self/maps").read_text()
    for path in {line.split(maxsplit=5)[5] for line in maps.splitlines() if ".so" in line}:
        for library, functions in _THREAD_SWITCHES.items():
            if Path(path).name.startswith(library):
                _switch(path, functions, number)


_THREAD_SWITCHES = {
    "libscipy_openblas": ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"),
    "libopenblas": ("openblas_set_num_threads", "openblas_set_num_threads64_"),
    "libmkl_rt": ("MKL_Set_Num_Threads",),
    "libgomp": ("omp_set_num_threads",),
    "libiomp5": ("omp_set_num_threads",),
    "libomp": ("omp_set_num_threads",),
}


def _switch(path: str, functions: tuple[str, ...], number: int) -> None:
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return
    for function in functions:
        if hasattr(library, function):
            getattr(library, function)(number)
            return


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _stop_collecting() -> None:
    global _collecting
    _collecting = gc.isenabled()
    gc.disable()


def _collect_again() -> None:
    if _collecting:
        gc.enable()


def _collect_nothing_inherited() -> None:
    gc.freeze()
    _collect_again()


# Rubbish that the training process has not collected yet may hold GPU memory in use on several streams, as every batch
# that was copied ahead is. To free that calls CUDA, which in a forked child aborts: children leave it alone.
_collecting = False
os.register_at_fork(before=_stop_collecting, after_in_parent=_collect_again, after_in_child=_collect_nothing_inherited)


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Python 3.12 warns of forking with threads about; the nursery never touches what they hold. Older ones do not, and
    are left alone: after a change of filters Python shows the script's own warnings a second time."""
    if sys.version_info >= (3, 12):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            yield
    else:
        yield
