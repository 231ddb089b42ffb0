"""Copies ahead of time: the next batch is fetched, and on its way to the GPU, while this one is learned from.

    the script's thread   batch ─ forward ─ backward ───────────────────────────────── step ─ next batch: it is here
    our thread                              └─ fetch the next one, begin its copy ─┘   └─ or now, if it was not there

Fetching takes the training process a millisecond of Python, which a small model's step would be longer by. In
`backward` the script's thread waits for autograd's and holds no interpreter lock: ours works then, and never else.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread, get_ident
from typing import Any, TypeAlias

import torch
import torch.utils.data.dataloader as stock
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.feed.iterator import NOT_YET, FeedIterator
from flatout.inject.ceiling import tensors_in


class _Copies:
    """Device copies on their way, by the host tensor the script holds. Each is given out once.

    The script keeps its host batch, so whatever it does with it on the CPU goes on working; when it asks for that very
    tensor on that very device, unchanged, the copy made meanwhile is the answer.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Any], int, Any, Any]] = {}

    def put(self, host: Any, copy: Any, done: Any) -> None:
        """A copy is under way."""
        key = id(host)
        self._made[key] = (weakref.ref(host, lambda _: self._made.pop(key, None)), host._version, copy, done)

    def forget(self, host: Any) -> None:
        """It may be written to from now on where no version is counted."""
        entry = self._made.get(id(host))
        if entry is not None and entry[0]() is host:
            del self._made[id(host)]

    def take(self, host: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The copy of `host` where it is asked for, and the current stream waits for it; else `host` itself."""
        entry: Any = self._made.get(id(host))
        if entry is None or entry[0]() is not host:
            return host
        version, copy, done = entry[1:]
        if version != host._version or _target(args, kwargs) != copy.device:
            return host
        del self._made[id(host)]
        current = torch.cuda.current_stream(copy.device)
        current.wait_event(done)
        copy.record_stream(current)
        return copy

    def __bool__(self) -> bool:
        return bool(self._made)


_copies = _Copies()


def answer_with_copies() -> None:
    """Have `.to` and `.cuda` give the copy that is there already."""
    for name in ("to", "cuda"):
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def move(tensor: Any, *args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and _copies and not tensor.is_cuda:
                asked = args if _name == "to" else (*args, "cuda")[:1]
                tensor = _copies.take(tensor, asked, kwargs)
            return _original(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, move)
    for name in ("numpy", "__array__", "__dlpack__"):
        shown = getattr(torch.Tensor, name)

        @functools.wraps(shown)
        def show(tensor: Any, *args: Any, _original: Any = shown, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and _copies:
                _copies.forget(tensor)
            return _original(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, show)


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that `.to(*args, **kwargs)` names."""
    target: Any = kwargs.get("device", args[0] if args else None)
    if isinstance(target, torch.Tensor):
        return target.device
    if not isinstance(target, str | int | torch.device):
        return None
    named: Any = torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
    return torch.device("cuda", torch.cuda.current_device()) if named == torch.device("cuda") else named


# --- when to fetch ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Job:
    """What is known of it to who waits; what it does, and so the loader, our thread lets go of at its end."""

    waited_for_by: tuple[int, int]  # process and thread
    over: SimpleQueue[None] = field(default_factory=SimpleQueue)
    finished: bool = False


_Jobs: TypeAlias = "SimpleQueue[tuple[Callable[[], None], _Job] | None]"


class _Meanwhile:
    """A thread of ours: one job at a time, begun and waited for by the script's."""

    def __init__(self) -> None:
        self._pid = 0  # whose thread it is: a forked child has none
        self._jobs: _Jobs | None = None
        self._job: _Job | None = None

    @property
    def busy(self) -> bool:
        return self._job is not None and not self._job.finished

    def begin(self, run: Callable[[], None]) -> bool:
        """Whether that could be done."""
        if self._pid != os.getpid():
            jobs: _Jobs = SimpleQueue()
            try:
                Thread(target=_work, args=(jobs,), name="flatout-ahead", daemon=True).start()
                self._jobs = jobs
            except RuntimeError:  # there may be no more threads
                self._jobs = None
            self._pid = os.getpid()
        if self._jobs is None:
            return False
        job = _Job(_here())
        self._jobs.put((run, job))
        self._job = job  # after that: a Ctrl-C between them may leave a job that nobody waits for, but none to wait for
        return True

    def end(self) -> None:
        """Wait until it is done, where this thread has begun it."""
        job = self._job
        if job is not None and not job.finished and job.waited_for_by == _here():
            job.over.get()


def _here() -> tuple[int, int]:
    return os.getpid(), get_ident()


def _work(jobs: _Jobs) -> None:
    while (given := jobs.get()) is not None:
        run, job = given
        try:
            run()
        except BaseException:  # whoever was to tell of it could not: training goes on without
            pass
        del run, given
        job.finished = True  # before the word of it, which a Ctrl-C may lose
        job.over.put(None)


_meanwhile = _Meanwhile()
_latest: weakref.ref[Ahead] | None = None  # whoever handed out the last batch


@functools.cache
def _look_ahead() -> None:
    """Once, and late: whoever times steps is there already, and what is fetched is none of the optimizer's time."""
    _fetch_in_backward()
    register_optimizer_step_post_hook(_stepped)


def _fetch_in_backward() -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def backward_and_fetch(*args: Any, **kwargs: Any) -> Any:
        ahead = _training()
        if ahead is None or not ahead.begin_meanwhile():
            return backward(*args, **kwargs)
        try:
            return backward(*args, **kwargs)
        finally:
            _meanwhile.end()

    torch.autograd.backward = backward_and_fetch


def _stepped(*_: Any) -> None:
    """An optimizer has stepped: the card is still at work, and fetching the next batch now costs it nothing."""
    ahead = _training()
    if ahead is not None:
        ahead.look(here=True)


def _training() -> Ahead | None:
    """Who feeds the training of this thread, where there is no graph in the making that could take our copies in."""
    if torch.compiler.is_compiling() or _meanwhile.busy:
        return None
    ahead = _latest() if _latest is not None else None
    ours = ahead is not None and ahead.asked_by == _here()
    return ahead if ours and not torch.cuda.is_current_stream_capturing() else None


class Ahead(stock._BaseDataLoaderIter):
    """A loader's iterator that fetches one batch ahead and starts its copy to the GPU on a stream of its own.

    A loop that reads its loss in every step leaves the card idle until the next one begins, and what fetching takes
    would be part of that. So where every batch is learned from, the batch after it is fetched meanwhile, if it is
    there; else when it is asked for.
    """

    def __init__(self, inner: Any, device: torch.device, fail: Callable[[Exception], None]) -> None:
        # Not stock's own: that would draw random numbers.
        self._inner = inner
        self._to = device
        self._fail = fail
        self._side = torch.cuda.Stream(device)
        self._num_yielded = 0
        self._next: Any = NOT_YET
        self._since_look = 0  # batches
        self._one_a_look = False
        self.asked_by = (0, 0)  # process and thread
        self._copying: deque[tuple[Any, Any]] = deque()  # host batches that must stay until their copy is over
        self._fetching = Lock()
        _look_ahead()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __len__(self) -> int:
        return len(self._inner)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        with self._fetching:
            self._next = NOT_YET
            self._num_yielded = 0
            self._inner._reset(loader, first_iter)

    def _next_data(self) -> Any:
        with self._fetching:  # our thread is done long since, but for a Ctrl-C in `backward`
            return self._in_turn()

    def _in_turn(self) -> Any:
        global _latest
        _latest, self.asked_by = weakref.ref(self), _here()
        later = self._one_a_look and not self._since_look and self._next is not NOT_YET
        self._since_look += 1
        batch, self._next = self._next, NOT_YET
        if batch is NOT_YET:
            batch = self._fetched(functools.partial(_stock_next, self._inner))
        elif isinstance(self._inner, FeedIterator) and not isinstance(batch, Exception):
            batch = self._inner.in_its_turn(batch)
        if isinstance(batch, Exception):
            try:
                raise batch
            finally:
                del batch  # which knows this frame by now, and would keep the workers until all of it is collected
        if not later and not (isinstance(self._inner, FeedIterator) and self._inner.made_when_asked):
            self._next = self._fetched(functools.partial(_stock_next, self._inner))
        return batch

    def begin_meanwhile(self) -> bool:
        """Have our thread fetch the next batch, if that is still to be done and any thread may."""
        # What a default device is has to be asked in the script's own thread: the sampler draws where it ends.
        if not self._is_due() or not self._inner.ready_made or torch._C._len_torch_function_stack():
            return False
        return _meanwhile.begin(functools.partial(self._look_within, torch.cuda.current_stream(self._to)))

    def _look_within(self, stream: Any) -> None:
        try:
            torch.cuda.set_device(stream.device)  # before any stream of another device is made the current one
            with torch.cuda.stream(stream):  # as in the script's thread: a slot's memory is marked there
                self.look(here=False)
        except Exception as problem:
            self._fail(problem)

    def look(self, *, here: bool) -> None:
        """Fetch the next batch, unless it is there, or would have to be waited for, or somebody is at it."""
        if self._fetching.acquire(blocking=False):
            try:
                if self._is_due():
                    self._next = self._fetched(functools.partial(self._inner.ahead, here=here))
            finally:
                self._fetching.release()

    def _is_due(self) -> bool:
        """Whether a batch is being learned from and the next one is still to be fetched."""
        if not isinstance(self._inner, FeedIterator):  # stock's cannot tell whether a batch is there
            return False
        if self._since_look:
            self._one_a_look, self._since_look = self._since_look == 1, 0
        return self._next is NOT_YET

    def _fetched(self, fetch: Callable[[], Any]) -> Any:
        """The next batch, its copy begun; or the exception that comes instead, for its turn."""
        try:
            batch = fetch()
        except StopIteration:
            return StopIteration()  # one that does not know this frame, and so keep us and the workers
        except Exception as problem:  # the script's own: raised when it is its turn
            return problem
        if batch is not NOT_YET:
            try:
                self._copy(batch)
            except Exception as problem:  # out of memory, say: then the script copies for itself
                self._fail(problem)
        return batch

    def _copy(self, batch: Any) -> None:
        while self._copying and self._copying[0][1].query():
            self._copying.popleft()
        done = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            hosts = [tensor for tensor in tensors_in(batch) if tensor.device.type == "cpu"]
            copies = [host.to(self._to, non_blocking=True) for host in hosts]
            done.record(self._side)
        for host, copy in zip(hosts, copies, strict=True):
            _copies.put(host, copy, done)
        self._copying.append((batch, done))


_stock_next = stock._BaseDataLoaderIter.__next__  # before anything times it: the fetch is timed from the outside
