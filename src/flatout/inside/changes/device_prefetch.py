"""Copies ahead of time: the next batch is on its way to the GPU before the script asks for it.

    batch ─ forward ─ backward ─ step ─┬─ next batch: it is there
                                       └─ the one after it is fetched if it is ready (else when it is asked for), and
                                          its copy begins while the GPU is still at work on this step

All of it happens in the script's own thread. A thread of ours that did it during `backward` made the steps
of a small model a tenth longer (H200, two turns), presumably because of the interpreter's lock.

Memory for a copy is taken from the script's own stream when the batch before it is handed out. So the copy
has to wait only for what was queued by then, and the allocator need not know of a second stream: it would
ask the driver whether such memory is free whenever it allocates.

Beginning a copy takes time of the script's own thread: steps of 8 to 11 ms became up to 8% longer (H200,
`gray` and `stock`, five runs; in one of them nothing showed). So a script that copies small page-locked
batches itself, and does not wait for them, is left to that: see `CopyPattern`. Its batches are still
fetched early.
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
SURE_AFTER = 8  # batches in a row
CHECK_EVERY = 64  # batches


class DevicePrefetch:
    """The change: `.to` and `.cuda` give copies that were begun before. It may be switched between two
    steps."""

    name = "device_prefetch"

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        self.fail = fail
        self.is_on = True
        self.copies = DeviceCopies()
        self._changes: Subscriber | None = None
        self._follows_steps = False
        self._latest: weakref.ref[DevicePrefetcher] | None = None  # handed out the last batch

    def install(self, changes: Subscriber) -> None:
        """Answer with copies from now on."""
        self._changes = changes
        changes.around("torch.Tensor.to", self._to)
        changes.around("torch.Tensor.cuda", self._cuda)
        for name in ("numpy", "__array__", "__dlpack__"):
            changes.around(f"torch.Tensor.{name}", self._show)

    def on(self) -> None:
        """Fetch and copy ahead from the next step on."""
        self.is_on = True

    def off(self) -> None:
        """Leave that to the script; a batch that has been fetched already is still handed out in its turn."""
        self.is_on = False

    def _to(self, call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self.copies and not tensor.is_cuda:
            tensor = self.copies.take(tensor, args, kwargs)
        return call(tensor, *args, **kwargs)

    def _cuda(self, call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self.copies and not tensor.is_cuda:
            tensor = self.copies.take(tensor, args or ("cuda",), kwargs)
        return call(tensor, *args, **kwargs)

    def _show(self, call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The script sees the memory of a tensor, and may write to it without being noticed."""
        if self.copies:
            self.copies.forget(tensor)
        return call(tensor, *args, **kwargs)

    def handed_out_by(self, prefetcher: DevicePrefetcher) -> None:
        """A batch is handed out: the next step is likely to be its."""
        self._latest = weakref.ref(prefetcher)
        if not self._follows_steps and self._changes is not None:
            # Late, so that the recorder's hook runs first: fetching is no part of the optimizer's time.
            self._follows_steps = True
            self._changes.on_leaving(register_optimizer_step_post_hook(self.step_ended).remove)

    def step_ended(self, *_: Any) -> None:
        """An optimizer has stepped: the GPU is still at work, and fetching the next batch now costs it
        nothing."""
        if torch.compiler.is_compiling() or self._latest is None:
            return
        prefetcher = self._latest()
        if prefetcher is not None and prefetcher.asked_by == _this_thread() and not prefetcher.stream.is_capturing():
            prefetcher.look_ahead()


class CopyPattern:
    """How a script copies a loader's batches itself. `leave` is called when we could do no better."""

    def __init__(self, leave: Callable[[], None] = lambda: None) -> None:
        self._leave = leave
        self._in_a_row = 0
        self._copied = self._copied_well = False  # the latest batch, as far as is known
        self.is_left_to_script = False

    def next_batch(self, hosts: list[Any]) -> None:
        """The tensors of the next batch."""
        self._in_a_row = self._in_a_row + 1 if self._copied and self._copied_well else 0
        self._copied, self._copied_well = False, _is_small(hosts)
        if self._in_a_row >= SURE_AFTER and self._copied_well:
            self.is_left_to_script = True
            self._leave()

    def copied(self, *, well: bool) -> None:
        """The script asks for a copy; `well` if it does not wait, and we can tell when the copy is over."""
        self._copied, self._copied_well = True, self._copied_well and well

    def check(self, hosts: list[Any]) -> None:
        """Look at a batch that was left to the script: it may have become large."""
        if not _is_small(hosts):
            self.is_left_to_script, self._in_a_row = False, 0


class CopyStream:
    """A stream of its own on one GPU, and what copying ahead asks of that GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = _side_stream(device)

    def current(self) -> Any:
        """The stream the script uses now."""
        return torch.cuda.current_stream(self.device)

    def event(self) -> Any:
        """A new event."""
        return torch.cuda.Event()

    def entered(self) -> Any:
        """A context in which the side stream is the current one."""
        return torch.cuda.stream(self.side)

    def share(self, tensor: Any, stream: Any) -> None:
        """Tell the allocator that another stream uses this memory, too."""
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """Whether the script is capturing a graph."""
        return bool(torch.cuda.is_current_stream_capturing())

    def unused_bytes(self) -> int:
        """How much memory no step has used so far."""
        free, _ = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.max_memory_allocated(self.device)
        return int(free + unused)

    # The originals: what is done ahead of time is not timed, and not changed again.

    def move(self, host: Any) -> Any:
        """A copy of a tensor on the GPU."""
        return original(torch.Tensor.to)(host, self.device, non_blocking=True)

    def fill(self, copy: Any, host: Any) -> Any:
        """Copy a tensor into memory on the GPU."""
        return original(torch.Tensor.copy_)(copy, host, non_blocking=True)


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


class _Copy(NamedTuple):
    """A copy that was begun, of a host tensor as it was in that version."""

    host: weakref.ref[Any]
    version: int
    tensor: Any
    done: Any
    memory_of: Any  # a stream
    stream: CopyStream
    pattern: CopyPattern


class DeviceCopies:
    """Copies that were begun, by the host tensor the script holds. Each is given out once.

    The script keeps its host batch, so whatever it does with it on the CPU goes on working. When it asks
    for that very tensor on that very device, unchanged, the copy is the answer.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}
        # What has to stay until a copy is over, and the event that says so.
        self._kept: deque[tuple[Any, Any]] = deque()

    def put(self, host: Any, tensor: Any, done: Any, memory_of: Any, stream: CopyStream, pattern: CopyPattern) -> None:
        """A copy was begun, in memory of this stream."""
        key = id(host)
        self._drop(key)  # it came twice, or again
        there = weakref.ref(host, lambda _: self._copies.pop(key, None))
        self._copies[key] = _Copy(there, host._version, tensor, done, memory_of, stream, pattern)

    def keep(self, things: Any, done: Any) -> None:
        """Keep things until this event."""
        self._kept.append((things, done))

    def release(self) -> None:
        """Let go of what has been copied. Another thread may do the same: each is taken out first, and put
        back."""
        while self._kept:
            try:
                kept = self._kept.popleft()
            except IndexError:
                return
            if not kept[1].query():
                self._kept.appendleft(kept)
                return

    def forget(self, host: Any) -> None:
        """It may be written to from now on where no version is counted."""
        copy = self._copies.get(id(host))
        if copy is not None and copy.host() is host:
            self._drop(id(host))

    def _drop(self, key: int) -> None:
        copy = self._copies.pop(key, None)
        if copy is not None:
            self.keep(copy.tensor, copy.done)  # it may still be going on

    def take(self, host: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The copy of `host` that `.to(*args, **kwargs)` asks for, awaited by the current stream; else
        `host`."""
        copy: Any = self._copies.get(id(host))
        if copy is None or copy.host() is not host:
            return host
        if copy.version != host._version or _target(args, kwargs) != copy.tensor.device:
            return host
        del self._copies[id(host)]
        current = copy.stream.current()
        current.wait_event(copy.done)
        if current != copy.memory_of:
            copy.stream.share(copy.tensor, current)
        copy.pattern.copied(well=current == copy.memory_of and not _waits(args, kwargs))
        return copy.tensor

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def kept(self) -> int:
        """How many things are kept until a copy is over."""
        return len(self._kept)


def fetch_without_a_span(changes: Subscriber) -> None:
    """Have iterators of ours announce every batch only where a profiler runs (an `ExecutionTraceObserver`
    is none)."""
    changes.around("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", _fetch_next)


def _fetch_next(call: Any, iterator: Any) -> Any:
    """The next batch. What PyTorch does around fetching it takes 40 µs in the middle of a training on a
    CPU."""
    ours = isinstance(iterator, (DevicePrefetcher, FeedIterator)) and iterator._dataset_kind == _DatasetKind.Map
    if not ours or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return call(iterator)
    batch = iterator._next_data()
    iterator._num_yielded += 1
    return batch


class DevicePrefetcher(torch_loader._BaseDataLoaderIter):
    """A loader's iterator that fetches one batch ahead and starts its copy to the GPU on a stream of its
    own.

    A loop that reads its loss in every step leaves the GPU idle until the next step begins, and fetching
    would add to that. So where every batch has its step, the batch after it is fetched at the end of that
    step, if it is ready; else when it is asked for.
    """

    def __init__(self, inner: Any, stream: CopyStream, change: DevicePrefetch, pattern: CopyPattern) -> None:
        # PyTorch's own __init__ is not called: it would draw random numbers.
        self._inner = inner
        self._feeds = isinstance(inner, FeedIterator)  # PyTorch's cannot tell whether a batch is ready
        self._dataset_kind: Any = getattr(inner, "_dataset_kind", None)
        self.stream = stream
        self._change = change
        self._pattern = pattern
        self._num_yielded = 0
        self._next: Any = NOT_YET
        self._since_step = 0  # batches
        self._one_a_step = False
        self.asked_by = (0, 0)  # process and thread
        self._failed = False
        self._buffers: _ReservedBuffers | None = None  # for the next batch
        self._may_reserve: bool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __len__(self) -> int:
        return len(self._inner)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._next = NOT_YET
        self._num_yielded = 0
        self._inner._reset(loader, first_iter)

    def _next_data(self) -> Any:
        self.asked_by = _this_thread()
        self._change.handed_out_by(self)
        fetch_after_step = self._one_a_step and not self._since_step and self._next is not NOT_YET
        self._since_step += 1
        batch, self._next = self._next, NOT_YET
        if batch is NOT_YET:
            batch = self._begin_copy(self._fetch)
        elif self._feeds and not isinstance(batch, Exception):
            batch = self._inner.in_its_turn(batch)
        if isinstance(batch, Exception):
            try:
                raise batch
            finally:
                del batch  # it knows this frame by now, and would keep the workers until all of it is collected
        if not self._change.is_on:
            self._buffers = None
        elif fetch_after_step:
            self._reserve(batch)
        elif not (self._feeds and self._inner.made_when_asked):
            self._next = self._begin_copy(self._fetch)
        return batch

    def _fetch(self) -> Any:
        return _fetch_next(original(torch_loader._BaseDataLoaderIter.__next__), self._inner)

    def look_ahead(self) -> None:
        """A step is over: fetch the next batch unless it is there, or would have to be waited for."""
        if not self._feeds:
            return
        if self._since_step:
            self._one_a_step, self._since_step = self._since_step == 1, 0
        if self._next is NOT_YET and self._change.is_on:
            self._next = self._begin_copy(self._inner.ahead)

    def _begin_copy(self, fetch: Callable[[], Any]) -> Any:
        """The next batch, its copy begun; or the exception that comes instead, to be raised in its turn."""
        try:
            batch = fetch()
        except StopIteration:
            self._buffers = None
            self._change.copies.release()
            return StopIteration()  # a new one: the other knows this frame, and would keep the workers
        except Exception as problem:  # the script's own
            return problem
        if batch is not NOT_YET and not self._failed and self._change.is_on:
            try:
                if self._pattern.is_left_to_script:
                    self._leave(batch)
                else:
                    self._copy(batch)
            except Exception as problem:
                self._fail(problem)
        return batch

    def _fail(self, problem: Exception) -> None:
        """Out of memory, for example: from now on the script copies for itself."""
        self._failed = True
        self._change.fail(problem)

    def _leave(self, batch: Any) -> None:
        """Leave the copy to the script."""
        self._buffers = None
        self._change.copies.release()
        if self._num_yielded % CHECK_EVERY == 0:
            self._pattern.check(_hosts_in(batch))

    def _reserve(self, batch: Any) -> None:
        """Reserve memory for the next batch, likely to be like this one, before the step on this one
        begins."""
        if self._failed or self._pattern.is_left_to_script:
            return
        try:
            hosts = _hosts_in(batch)
            if self._may_reserve is None:
                needed = sum(host.nbytes for host in hosts if _is_plain(host))
                self._may_reserve = self.stream.unused_bytes() > 4 * needed
            if self._may_reserve:
                self._buffers = _ReservedBuffers(hosts, self.stream)
        except Exception as problem:
            self._fail(problem)

    def _copy(self, batch: Any) -> None:
        copies, stream = self._change.copies, self.stream
        copies.release()
        hosts = _hosts_in(batch)
        self._pattern.next_batch(hosts)
        buffers, self._buffers = self._buffers, None
        if buffers is None or not buffers.fit(hosts):
            buffers = _ReservedBuffers(hosts, stream)
        done = stream.event()
        try:
            with stream.entered():
                tensors = buffers.fill(hosts)
                done.record(stream.side)
            for host, tensor, own in zip(hosts, tensors, buffers.tensors, strict=True):
                memory_of = stream.side if own is None else buffers.memory_of
                copies.put(host, tensor, done, memory_of, stream, self._pattern)
            copies.keep(hosts, done)
        except BaseException:
            stream.side.synchronize()  # what was begun ends in memory that is about to be given back
            raise


class _ReservedBuffers:
    """Memory on the GPU for the copies of a batch like this one, from the script's stream."""

    def __init__(self, hosts: list[Any], stream: CopyStream) -> None:
        self._stream = stream
        self.memory_of = stream.current()
        # None: what is no plain tensor is made on the GPU by its copying.
        self.tensors = [torch.empty_like(host, device=stream.device) if _is_plain(host) else None for host in hosts]
        self._free = stream.event()
        self._free.record(self.memory_of)

    def fit(self, hosts: list[Any]) -> bool:
        """Whether they are right for these tensors."""
        return len(hosts) == len(self.tensors) and all(map(_is_alike, hosts, self.tensors))

    def fill(self, hosts: list[Any]) -> list[Any]:
        """The copies, on the current stream."""
        self._stream.current().wait_event(self._free)
        return [
            self._stream.move(host) if tensor is None else self._stream.fill(tensor, host)
            for host, tensor in zip(hosts, self.tensors, strict=True)
        ]


def _this_thread() -> tuple[int, int]:
    return os.getpid(), get_ident()


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that `.to(*args, **kwargs)` names."""
    target: Any = kwargs.get("device", args[0] if args else None)
    if isinstance(target, torch.Tensor):
        return target.device
    if isinstance(target, int):
        return torch.device("cuda", target)
    if not isinstance(target, str | torch.device):
        return None
    device = torch.device(target)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _waits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `.to(*args, **kwargs)` waits until the copy is over."""
    return not kwargs.get("non_blocking", next((one for one in args[1:] if isinstance(one, bool)), False))


def _hosts_in(batch: Any) -> list[Any]:
    """The tensors to copy. With one made in inference mode nobody could tell whether it was written to
    since."""
    hosts = [tensor for tensor in tensors_in(batch) if tensor.device.type == "cpu"]
    return [host for host in hosts if type(host) is not torch.Tensor or not host.is_inference()]


def _is_small(hosts: list[Any]) -> bool:
    """Whether the script's own copies of these take little time."""
    if not all(map(_is_plain, hosts)) or sum(host.nbytes for host in hosts) >= SMALL_BYTES:
        return False
    return all(host.is_pinned() for host in hosts)


def _is_plain(host: Any) -> bool:
    return type(host) is torch.Tensor and host.layout == torch.strided and not host.is_quantized and not host.is_nested


def _is_alike(host: Any, tensor: Any) -> bool:
    if tensor is None or not _is_plain(host):
        return tensor is None and not _is_plain(host)
    return bool(host.dtype == tensor.dtype and host.shape == tensor.shape and host.stride() == tensor.stride())
