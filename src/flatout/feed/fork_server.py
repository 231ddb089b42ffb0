"""Where workers come from.

    training process ──fork──► fork server (one thread, no CUDA) ──fork──► worker, worker, …   start method fork
    training process ──the context's own Process──► worker                                     spawn, forkserver

The fork server is forked at the beginning of a pass, in the training thread: it has the dataset as it is
then. It ends with the training process (it watches its pidfd), and its workers end with it
(`PR_SET_PDEATHSIG`): nothing survives a SIGKILL of any of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
from typing import Any

import torch
from torch import multiprocessing

from flatout.feed import channel, randomness, worker
from flatout.feed.channel import Recipe

_GRACE_S = 0.2  # for workers to end normally: what measures them writes its last report then
PROCESS_NAME = "flatout-forksrv"  # the kernel keeps 15 characters
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NOT_PICKLABLE = (
    "Got pickle error when attempting to start a worker process: the start method {!r} sends it the dataset, "
    "collate_fn and worker_init_fn, which have to be picklable (no lambda, no function within a function). "
    "multiprocessing_context='fork' does without."
)
_fork_lock = threading.Lock()  # a fork while a channel is created would keep its far end open


class Starter:
    """A way to start workers."""

    _processes: dict[int, Any]  # to wait for at the end

    def start(self, number: int) -> socket.socket:
        """Start a worker; the near end of its channel."""
        with _fork_lock:
            near, far = channel.pair()
            try:
                self._start_with(number, far)
            except BaseException:
                near.close()
                raise
            finally:
                far.close()
            channel.close_in_children(near.fileno())
        return near

    def _start_with(self, number: int, far: socket.socket) -> None:
        raise NotImplementedError

    def exits(self) -> dict[int, int | str]:
        """The workers that have ended so far: number and exit status (negative: a signal), or why
        there was none."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """Have workers end that have not yet, without waiting for that."""

    def reap(self, patience_s: float) -> bool:
        """After `hang_up`: wait for the end of all processes, for so long each; whether they have ended."""
        return all(_reap(process, patience_s) for process in self._processes.values())


def starter_for(recipe: Recipe, context: Any) -> Starter:
    """The way to start workers under a multiprocessing context (None: the process-wide one)."""
    method = multiprocessing.get_start_method() if context is None else context.get_start_method()
    if method == "fork":
        _thread_switches(len(sys.modules))
        randomness.load_numpy_random()
        return ForkServer(recipe)
    return ContextStarter(recipe, multiprocessing.get_context(method) if context is None else context)


class ForkServer(Starter):
    """A small process that forks workers on demand; this is the training process's handle of it."""

    def __init__(self, recipe: Recipe) -> None:
        with _fork_lock, _without_fork_warning():
            self._channel, far = channel.pair()
            self._channel.setblocking(False)
            channel.close_in_children(self._channel.fileno())
            process = multiprocessing.get_context("fork").Process(
                target=_server_main, args=(recipe, far, os.getpid()), daemon=True, name=PROCESS_NAME
            )
            try:
                process.start()
            except BaseException:
                self.hang_up()
                raise
            finally:
                far.close()
        self._processes = {0: process}
        self._exits: dict[int, int | str] = {}

    def _start_with(self, number: int, far: socket.socket) -> None:
        channel.send(self._channel, number, [far.fileno()])  # `OSError` where the fork server is gone

    def exits(self) -> dict[int, int | str]:
        try:
            while True:
                (number, status), _ = channel.receive(self._channel, wait=False)
                self._exits[number] = status
        except (BlockingIOError, EOFError):
            return self._exits

    def hang_up(self) -> None:
        channel.close_in_children(self._channel.fileno(), False)
        self._channel.close()


class ContextStarter(Starter):
    """Workers started one by one through a context's own `Process`, as PyTorch starts them."""

    def __init__(self, recipe: Recipe, context: Any) -> None:
        self._recipe, self._context = recipe, context
        self._processes = {}

    def _start_with(self, number: int, far: socket.socket) -> None:
        process = self._context.Process(target=_spawned_main, args=(self._recipe, far, os.getpid()), daemon=True)
        try:
            process.start()
        except (TypeError, AttributeError, PicklingError):
            warnings.warn(_NOT_PICKLABLE.format(self._context.get_start_method()), stacklevel=3)
            raise
        self._processes[number] = process

    def exits(self) -> dict[int, int | str]:
        statuses = {number: process.exitcode for number, process in self._processes.items()}
        return {number: status for number, status in statuses.items() if status is not None}


def _reap(process: Any, patience_s: float) -> bool:
    """Wait for a process that is about to end, and kill it in the end. Other code may have reaped it."""
    process.join(patience_s)
    if process.is_alive() and patience_s:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join(patience_s)
    return not process.is_alive() or bool(patience_s)


# --- inside the fork server ---------------------------------------------------------------------


def _server_main(recipe: Recipe, far: socket.socket, parent: int) -> None:
    channel.close_inherited(but=far.fileno())
    _leave_process_group()
    _set_signals_and_name(PROCESS_NAME)
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
            with contextlib.suppress(OSError):  # the training process is gone: the next round sees that
                channel.send(far, (number, process.exitcode))
            process.close()
        if far.fileno() in ready:
            try:
                number, fds = channel.receive(far)
            except EOFError:
                break
            end = socket.socket(fileno=fds[0])
            process = context.Process(target=_forked_main, args=(recipe, end, far, os.getpid()), daemon=True)
            try:
                process.start()
            except OSError as problem:  # a limit on processes, or no memory
                channel.send(far, (number, f"could not be started ({problem.strerror})"))
                continue
            finally:
                end.close()
            assert process.pid is not None
            pidfd = os.pidfd_open(process.pid)
            children[pidfd] = (number, process)
            poll.register(pidfd, select.POLLIN)
    until = time.monotonic() + _GRACE_S
    for _, process in children.values():
        process.join(max(0.0, until - time.monotonic()))
        process.kill()
    os._exit(0)


def _forked_main(recipe: Recipe, end: socket.socket, server_channel: socket.socket, server: int) -> None:
    server_channel.close()
    _libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != server:
        os._exit(0)
    _work(recipe, end)


def _spawned_main(recipe: Recipe, end: socket.socket, parent: int) -> None:
    _leave_process_group()
    limit_threads()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _work(recipe, end)


def _work(recipe: Recipe, end: socket.socket) -> None:
    _set_signals_and_name("flatout-worker")
    with contextlib.suppress(OSError):  # else a worker that gets a task runs at once, on the training process's core
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    _keep_freed_memory()
    worker.main(recipe, end)


def _leave_process_group() -> None:
    """A Jupyter kernel that shuts down ends the children in its process group and waits for them, zombies
    too, until it is killed itself. A signal to the group reaches the training process, and us through its
    end."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # samples may still print to the terminal


def _end_with(parent: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(parent)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _keep_freed_memory() -> None:
    """A batch's samples are freed together: glibc would give their pages back and ask for them again,
    one by one.

    With 256 pictures of 147 KiB that takes a tenth of the time it takes to decode them.
    """
    if hasattr(_libc(), "mallopt"):
        _libc().mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most it takes
        _libc().mallopt(_M_TRIM_THRESHOLD, 128 << 20)


def _set_signals_and_name(name: str) -> None:
    """Leave Ctrl-C to the training process, and drop the script's own signal handlers."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    _libc().prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def limit_threads(number: int = 1) -> None:
    """Keep BLAS, OpenMP and OpenCV from starting a thread a core in every worker."""
    torch.set_num_threads(number)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"):
        os.environ[name] = str(number)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(number)
    for switch in _thread_switches(len(sys.modules)):
        switch(number)


@functools.lru_cache(maxsize=1)
def _thread_switches(modules: int) -> list[Any]:
    """The functions of loaded libraries that set their number of threads; looked for again when
    `modules` are more.

    The training process looks for them before it forks: that takes 5 ms, which the workers of each pass then
    need not.
    """
    switches = []
    maps = Path("/proc/self/maps").read_text()
    for path in {line.split(maxsplit=5)[5] for line in maps.splitlines() if ".so" in line}:
        if Path(path).name.startswith(_THREADED):
            with contextlib.suppress(OSError):
                library = ctypes.CDLL(path)
                switches += [getattr(library, name) for name in _THREAD_FUNCTIONS if hasattr(library, name)][:1]
    return switches


_THREADED = ("libscipy_openblas", "libopenblas", "libmkl_rt", "libgomp", "libiomp5", "libomp")
_THREAD_FUNCTIONS = (
    "scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads",
    "openblas_set_num_threads64_", "MKL_Set_Num_Threads", "omp_set_num_threads",
)  # fmt: skip


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _disable_gc() -> None:
    global _gc_was_enabled
    _gc_was_enabled = gc.isenabled()
    gc.disable()


def _enable_gc() -> None:
    if _gc_was_enabled:
        gc.enable()


def _freeze_inherited() -> None:
    gc.freeze()
    _enable_gc()


# Garbage of the training process may hold GPU memory that is in use on several streams. To free that
# calls CUDA, which aborts in a forked child: children leave it alone.
_gc_was_enabled = False
os.register_at_fork(before=_disable_gc, after_in_parent=_enable_gc, after_in_child=_freeze_inherited)


@contextlib.contextmanager
def _without_fork_warning() -> Iterator[None]:
    """Python 3.12 warns of forking beside threads; the fork server never touches what they hold. Older ones
    do not warn, and a change of filters makes Python show the script's own warnings a second time."""
    if sys.version_info >= (3, 12):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
            yield
    else:
        yield
