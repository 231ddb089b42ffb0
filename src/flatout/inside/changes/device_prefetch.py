"""Copies ahead of time: the next batch is on its way to the GPU before the script asks for it.

    batch ─ forward ─ backward ─ step ─┬─ next batch: it is here
                                       └─ the one after is fetched if it is there (else when it is asked for), and its
                                          copy begins, while the card is still at work on this step

All of it in the script's own thread. One of ours that did it during `backward` made the steps of a small model a tenth
longer (H200, two turns); why was not found out, presumably over the interpreter's lock.

Memory for a copy is taken from the script's own stream, when the batch before it is handed out: the copy has to wait
for nothing but what was queued by then, and the allocator need not be told of a second stream. Of memory that it is
told of, it asks the driver whether it is free by now whenever it allocates. What that costs was not told from noise.

To begin a copy takes time of the script's own thread: it made steps of 8 to 11 ms up to 8% longer (H200, `gray` and
`stock`, five runs; in one of them nothing showed). So a script that copies small page-locked batches by itself, and
does not wait for it, is left to that: see `Habit`. Its batches are still fetched early.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.utils.data.dataloader as torch_loader
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import _DatasetKind

from flatout.feed.iterator import NOT_YET, FeedIterator
from flatout.inside.calls import tensors_in
from flatout.inside.patches import Subscriber, original

SMALL_BYTES = 16 << 20  # about 0.3 ms on the bus
_SURE = 8  # batches in a row
_EVERY = 64  # batches


class CopyPattern:
    """How a script copies a loader's batches by itself. `is_good` is called once we could do no better."""

    def __init__(self, is_good: Callable[[], None] = lambda: None) -> None:
        self._is_good = is_good
        self._in_a_row = 0
        self._copied = self._well = False  # of the latest batch, as far as is known
        self.good = False

    def sees(self, hosts: list[Any]) -> None:
        """The next batch."""
        self._in_a_row = self._in_a_row + 1 if self._copied and self._well else 0
        self._copied, self._well = False, _is_small(hosts)
        if self._in_a_row >= _SURE and self._well:
            self.good = True
            self._is_good()

    def copies(self, *, well: bool) -> None:
        """The script asks for a copy: without waiting for it, and where we can tell when it is over?"""
        self._copied, self._well = True, self._well and well

    def looks_again(self, hosts: list[Any]) -> None:
        """At a batch that was left to the script."""
        if not _is_small(hosts):
            self.good, self._in_a_row = False, 0


def _is_small(hosts: list[Any]) -> bool:
    """Whether a script's own copies of these take little of anybody's time."""
    if not all(map(_is_plain, hosts)) or sum(host.nbytes for host in hosts) >= SMALL_BYTES:
        return False
    return all(host.is_pinned() for host in hosts)


class DevicePrefetch:
    """Whether batches are fetched and copied ahead of time. It may be switched between two steps."""

    name = "device_prefetch"

    def __init__(self) -> None:
        self.is_on = True

    def on(self) -> None:
        """Fetch and copy ahead from the next step on."""
        self.is_on = True

    def off(self) -> None:
        """Leave that to the script; a batch that has been fetched already is still handed out in its turn."""
        self.is_on = False


class _Copy(NamedTuple):
    """A copy under way, in memory `of` this stream, of a host tensor as it was in that version."""

    host: weakref.ref[Any]
    version: int
    itself: Any
    done: Any
    of: Any
    habit: CopyPattern


class _Copies:
    """Device copies on their way, by the host tensor the script holds. Each is given out once.

    The script keeps its host batch, so whatever it does with it on the CPU goes on working; when it asks for that very
    tensor on that very device, unchanged, the copy made meanwhile is the answer.
    """

    def __init__(self) -> None:
        self._made: dict[int, _Copy] = {}

    def put(self, host: Any, copy: Any, done: Any, of: Any, habit: CopyPattern) -> None:
        """A copy is under way, in memory `of` this stream."""
        key = id(host)
        self._drop(key)  # it came twice, or again
        there = weakref.ref(host, lambda _: self._made.pop(key, None))
        self._made[key] = _Copy(there, host._version, copy, done, of, habit)

    def forget(self, host: Any) -> None:
        """It may be written to from now on where no version is counted."""
        made = self._made.get(id(host))
        if made is not None and made.host() is host:
            self._drop(id(host))

    def _drop(self, key: int) -> None:
        made = self._made.pop(key, None)
        if made is not None:
            _copying.append((made.itself, made.done))  # it may still be under way

    def take(self, host: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The copy of `host` where it is asked for, and the current stream waits for it; else `host` itself."""
        made: Any = self._made.get(id(host))
        if made is None or made.host() is not host:
            return host
        if made.version != host._version or _target(args, kwargs) != made.itself.device:
            return host
        del self._made[id(host)]
        current = torch.cuda.current_stream(made.itself.device)
        current.wait_event(made.done)
        if current != made.of:
            made.itself.record_stream(current)
        made.habit.copies(well=current == made.of and not _waits(args, kwargs))
        return made.itself

    def __bool__(self) -> bool:
        return bool(self._made)


_copies = _Copies()
_copying: deque[tuple[Any, Any]] = deque()  # what has to stay until a copy is over, and the event that says so


def _let_go() -> None:
    """Of what has been copied. Another thread may be at it: each is taken out first, and put back."""
    while _copying:
        try:
            one = _copying.popleft()
        except IndexError:
            return
        if not one[1].query():
            _copying.appendleft(one)
            return


def answer_with_copies(changes: Subscriber) -> None:
    """Have `.to` and `.cuda` give the copy that is there already."""
    changes.around("torch.Tensor.to", _move_copied)
    changes.around("torch.Tensor.cuda", _cuda_copied)
    for name in ("numpy", "__array__", "__dlpack__"):
        changes.around(f"torch.Tensor.{name}", _show)


def _move_copied(call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if _copies and not tensor.is_cuda:
        tensor = _copies.take(tensor, args, kwargs)
    return call(tensor, *args, **kwargs)


def _cuda_copied(call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if _copies and not tensor.is_cuda:
        tensor = _copies.take(tensor, args or ("cuda",), kwargs)
    return call(tensor, *args, **kwargs)


def _show(call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """The script sees the memory of a tensor, and may write to it unseen."""
    if _copies:
        _copies.forget(tensor)
    return call(tensor, *args, **kwargs)


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that `.to(*args, **kwargs)` names."""
    target: Any = kwargs.get("device", args[0] if args else None)
    if isinstance(target, torch.Tensor):
        return target.device
    if not isinstance(target, str | int | torch.device):
        return None
    named: Any = torch.device("cuda", target) if isinstance(target, int) else torch.device(target)
    return torch.device("cuda", torch.cuda.current_device()) if named == torch.device("cuda") else named


def _waits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `.to(*args, **kwargs)` waits until the copy is made."""
    return not kwargs.get("non_blocking", next((one for one in args[1:] if isinstance(one, bool)), False))


# --- when to fetch ----------------------------------------------------------------------------------------------------


_latest: weakref.ref[DevicePrefetcher] | None = None  # whoever handed out the last batch


@functools.cache
def _look_ahead_after_steps() -> None:
    """Once, and late: whoever times steps is there already, and what is fetched is none of the optimizer's time."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(*_: Any) -> None:
    """An optimizer has stepped: the card is still at work, and fetching the next batch now costs it nothing."""
    if torch.compiler.is_compiling():
        return
    ahead = _latest() if _latest is not None else None
    if ahead is not None and ahead.asked_by == _here() and not torch.cuda.is_current_stream_capturing():
        ahead.look()


def fetch_without_a_span(changes: Subscriber) -> None:
    """Have iterators of ours tell of every batch only where a profiler runs (an `ExecutionTraceObserver` is none)."""
    changes.around("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", _following)


def _following(call: Any, iterator: Any) -> Any:
    """The next batch. What PyTorch does around fetching it takes 40 µs in the middle of a training on a CPU."""
    ours = isinstance(iterator, (DevicePrefetcher, FeedIterator)) and iterator._dataset_kind == _DatasetKind.Map
    if not ours or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return call(iterator)
    batch = iterator._next_data()
    iterator._num_yielded += 1
    return batch


def _here() -> tuple[int, int]:
    return os.getpid(), get_ident()


class DevicePrefetcher(torch_loader._BaseDataLoaderIter):
    """A loader's iterator that fetches one batch ahead and starts its copy to the GPU on a stream of its own.

    A loop that reads its loss in every step leaves the card idle until the next one begins, and what fetching takes
    would be part of that. So where every batch has its step, the batch after it is fetched at the end of that step, if
    it is there; else when it is asked for.
    """

    def __init__(
        self,
        inner: Any,
        device: torch.device,
        fail: Callable[[Exception], None],
        habit: CopyPattern | None = None,
        change: DevicePrefetch | None = None,
    ) -> None:
        # Not stock's own: that would draw random numbers.
        self._inner = inner
        self._dataset_kind: Any = getattr(inner, "_dataset_kind", None)
        self._to = device
        self._fail = fail
        self._side = _side_stream(device)
        self._num_yielded = 0
        self._next: Any = NOT_YET
        self._since_step = 0  # batches
        self._one_a_step = False
        self.asked_by = (0, 0)  # process and thread
        self._habit = CopyPattern() if habit is None else habit
        self._change = DevicePrefetch() if change is None else change
        self._failed = False
        self._room: _ReservedBuffers | None = None  # for the next batch
        self._may_make_room: bool | None = None
        _look_ahead_after_steps()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __len__(self) -> int:
        return len(self._inner)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._next = NOT_YET
        self._num_yielded = 0
        self._inner._reset(loader, first_iter)

    def _next_data(self) -> Any:
        global _latest
        _latest, self.asked_by = weakref.ref(self), _here()
        later = self._one_a_step and not self._since_step and self._next is not NOT_YET
        self._since_step += 1
        batch, self._next = self._next, NOT_YET
        if batch is NOT_YET:
            batch = self._fetched(
                functools.partial(_following, original(torch_loader._BaseDataLoaderIter.__next__), self._inner)
            )
        elif isinstance(self._inner, FeedIterator) and not isinstance(batch, Exception):
            batch = self._inner.in_its_turn(batch)
        if isinstance(batch, Exception):
            try:
                raise batch
            finally:
                del batch  # which knows this frame by now, and would keep the workers until all of it is collected
        if not self._change.is_on:
            self._room = None
        elif later:
            self._make_room(batch)
        elif not (isinstance(self._inner, FeedIterator) and self._inner.made_when_asked):
            self._next = self._fetched(
                functools.partial(_following, original(torch_loader._BaseDataLoaderIter.__next__), self._inner)
            )
        return batch

    def _next_inner(self) -> Any:
        return _following(original(torch_loader._BaseDataLoaderIter.__next__), self._inner)

    def _make_room(self, batch: Any) -> None:
        """For the next batch, which will be like this one, before this one is learned from."""
        if self._failed or self._habit.good:
            return
        try:
            hosts = _hosts_in(batch)
            if self._may_make_room is None:
                self._may_make_room = _there_is_room(hosts, self._to)
            if self._may_make_room:
                self._room = _ReservedBuffers(hosts, self._to)
        except Exception as problem:
            self._no_more(problem)

    def look(self) -> None:
        """A step is over: fetch the next batch unless it is there, or would have to be waited for."""
        if not isinstance(self._inner, FeedIterator):  # stock's cannot tell whether a batch is there
            return
        if self._since_step:
            self._one_a_step, self._since_step = self._since_step == 1, 0
        if self._next is NOT_YET and self._change.is_on:
            self._next = self._fetched(self._inner.ahead)

    def _fetched(self, fetch: Callable[[], Any]) -> Any:
        """The next batch, its copy begun; or the exception that comes instead, for its turn."""
        try:
            batch = fetch()
        except StopIteration:
            self._room = None
            _let_go()
            return StopIteration()  # one that does not know this frame, and so keep us and the workers
        except Exception as problem:  # the script's own: raised when it is its turn
            return problem
        if batch is not NOT_YET and not self._failed and self._change.is_on:
            try:
                if self._habit.good:
                    self._leave(batch)
                else:
                    self._copy(batch)
            except Exception as problem:
                self._no_more(problem)
        return batch

    def _no_more(self, problem: Exception) -> None:
        """Out of memory, say: from now on the script copies for itself."""
        self._failed = True
        self._fail(problem)

    def _leave(self, batch: Any) -> None:
        """To the script."""
        self._room = None
        if _copying:
            _let_go()
        if self._num_yielded % _EVERY == 0:
            self._habit.looks_again(_hosts_in(batch))

    def _copy(self, batch: Any) -> None:
        _let_go()
        hosts = _hosts_in(batch)
        self._habit.sees(hosts)
        room, self._room = self._room, None
        if room is None or not room.fits(hosts):
            room = _ReservedBuffers(hosts, self._to)
        done = torch.cuda.Event()
        try:
            with torch.cuda.stream(self._side):
                copies = room.filled(hosts)
                done.record(self._side)
            for host, copy, own in zip(hosts, copies, room.copies, strict=True):
                _copies.put(host, copy, done, self._side if own is None else room.stream, self._habit)
            _copying.append((hosts, done))
        except BaseException:
            self._side.synchronize()  # what has been begun ends in memory that is about to be given back
            raise


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _hosts_in(batch: Any) -> list[Any]:
    """What there is to copy; of a tensor made in inference mode nobody could tell whether it was written to since."""
    hosts = [tensor for tensor in tensors_in(batch) if tensor.device.type == "cpu"]
    return [host for host in hosts if type(host) is not torch.Tensor or not host.is_inference()]


def _there_is_room(hosts: list[Any], device: torch.device) -> bool:
    """Whether a step can do with a batch less of the card's memory, by what steps took so far."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return bool(free + unused > 4 * sum(host.nbytes for host in hosts if _is_plain(host)))


class _ReservedBuffers:
    """Memory on the card for the copies of a batch like this one, from the current stream."""

    def __init__(self, hosts: list[Any], device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.current_stream(device)
        # None: what is no plain tensor is made on the card by its copying.
        self.copies = [torch.empty_like(host, device=device) if _is_plain(host) else None for host in hosts]
        self._free = torch.cuda.Event()
        self._free.record(self.stream)

    def fits(self, hosts: list[Any]) -> bool:
        return len(hosts) == len(self.copies) and all(map(_alike, hosts, self.copies))

    def filled(self, hosts: list[Any]) -> list[Any]:
        """The copies, on the current stream."""
        torch.cuda.current_stream(self._device).wait_event(self._free)
        return [
            _move(host, self._device) if copy is None else _fill(copy, host)
            for host, copy in zip(hosts, self.copies, strict=True)
        ]


def _is_plain(host: Any) -> bool:
    return type(host) is torch.Tensor and host.layout == torch.strided and not host.is_quantized and not host.is_nested


def _alike(host: Any, copy: Any) -> bool:
    if copy is None or not _is_plain(host):
        return copy is None and not _is_plain(host)
    return bool(host.dtype == copy.dtype and host.shape == copy.shape and host.stride() == copy.stride())


# What is done ahead of time is not timed, and not changed again.


def _move(host: Any, device: torch.device) -> Any:
    return original(torch.Tensor.to)(host, device, non_blocking=True)


def _fill(copy: Any, host: Any) -> Any:
    return original(torch.Tensor.copy_)(copy, host, non_blocking=True)
