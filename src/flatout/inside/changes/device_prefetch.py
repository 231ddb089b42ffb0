"""Copies ahead of time: the next batch is on its way to the GPU before the script asks for it.

    batch ─ forward ─ backward ─ step ─┬─ next batch: it is there
                                       └─ the one after it is fetched if it is ready (else when it is asked for), and
                                          its copy begins while the GPU is still at work on this step

In the script's own thread: another one, during `backward`, made the steps of a small model a tenth
longer (H200). Beginning a copy takes that thread's time: steps of 8 to 11 ms became up to 8% longer
(H200, five runs). So a script that copies small page-locked batches itself, without waiting, goes on
doing that; they are still fetched early.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.data.dataloader as torch_loader
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import _DatasetKind
from torch.utils.weak import WeakIdKeyDictionary

from flatout.feed.iterator import NOT_YET, FeedIterator
from flatout.inside.changes.ledger import Ledger, LiveChange
from flatout.inside.patches import Subscriber, original
from flatout.inside.timing import tensors_in

SMALL_BYTES = 16 << 20  # about 0.3 ms on the bus
SURE_AFTER = 8  # batches in a row
_LEFT = "batches are fetched early, and copied by the script: these are small, and it does not wait for them"


class SideStream:
    """A stream of ours on one GPU, for copies beside the script's work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _stream(device)

    def copy(self, hosts: list[Any]) -> tuple[list[Any], Any]:
        """Begin to copy tensors to the GPU; the copies, and an event that says when they are over."""
        try:
            with torch.cuda.stream(self._stream):
                # The original: copies ahead of time are neither timed nor changed again.
                copies = [original(torch.Tensor.to)(host, self.device, non_blocking=True) for host in hosts]
                return copies, self._stream.record_event()
        except BaseException:
            self._stream.synchronize()  # what was begun reads the script's memory
            raise

    def hand_over(self, copy: Any, done: Any) -> None:
        """Have the script's stream wait for a copy, and keep its memory for as long as it is used there."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        copy.record_stream(current)

    def script_has_another(self) -> bool:
        """Whether the script copies on a stream of its own."""
        return bool(torch.cuda.current_stream(self.device) != torch.cuda.default_stream(self.device))

    def is_capturing(self) -> bool:
        """Whether the script is capturing a graph."""
        return bool(torch.cuda.is_current_stream_capturing())


@functools.cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


class _Copy(NamedTuple):
    """A copy that was begun, of a host tensor as it was in that version."""

    version: int
    tensor: Any
    done: Any
    side: SideStream
    begun_by: weakref.ref[DevicePrefetcher]  # its workers have to end when the script gives it up


class DevicePrefetch(LiveChange):
    """The change: where the script asks for that very tensor of its batch on that very device,
    unchanged, the answer is the copy that was begun, once. Switched off, a batch that was fetched is
    still handed out in its turn."""

    name = "device_prefetch"

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.copies: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the host tensor
        self.kept: deque[tuple[Any, Any]] = deque()  # what has to stay until a copy is over, and its event
        self._lock = threading.Lock()
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

    def ahead_of(self, iterator: Any, side: SideStream, where: str | None) -> DevicePrefetcher:
        """An iterator over the same batches, which fetches and copies ahead; `where` its loader was made."""
        self.made(f"batches are copied to {side.device} one step ahead", where)
        return DevicePrefetcher(iterator, side, self)

    def _to(self, call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self.copies and not tensor.is_cuda:
            tensor = self._taken(tensor, args, kwargs)
        return call(tensor, *args, **kwargs)

    def _cuda(self, call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self.copies and not tensor.is_cuda:
            named = dict(zip(("device", "non_blocking"), args, strict=False))
            tensor = self._taken(tensor, (), {"device": "cuda", **named, **kwargs})
        return call(tensor, *args, **kwargs)

    def _show(self, call: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The script sees the memory of a tensor, and may write to it unseen."""
        if self.copies:
            self._drop(tensor)
        return call(tensor, *args, **kwargs)

    def _taken(self, host: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The copy of `host` that `.to(*args, **kwargs)` asks for; else `host`."""
        copy: _Copy | None = self.copies.get(host)
        if copy is None or copy.version != host._version:
            return host
        try:
            device, _, without_waiting, _ = torch._C._nn._parse_to(*args, **kwargs)
        except Exception:  # `copy=True`, or a mistake of the script's
            return host
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        if device != copy.tensor.device:
            return host
        del self.copies[host]
        if (prefetcher := copy.begun_by()) is not None:
            prefetcher.copy_asked_for(without_waiting=without_waiting)
        copy.side.hand_over(copy.tensor, copy.done)
        return copy.tensor

    def _drop(self, host: Any) -> None:
        copy: _Copy | None = self.copies.pop(host, None)
        if copy is not None:
            self.kept.append((copy.tensor, copy.done))  # it may still be going on

    def begin(self, hosts: list[Any], prefetcher: DevicePrefetcher) -> None:
        """Begin the copies of a batch."""
        copies, done = prefetcher.side.copy(hosts)
        for host, copy in zip(hosts, copies, strict=True):
            self._drop(host)  # it came twice, or again
            self.copies[host] = _Copy(host._version, copy, done, prefetcher.side, weakref.ref(prefetcher))
        self.kept.append((hosts, done))

    def release(self) -> None:
        """Let go of what has been copied."""
        with self._lock:  # another thread of the script's may have a loader too
            while self.kept and self.kept[0][1].query():
                self.kept.popleft()

    def handed_out_by(self, prefetcher: DevicePrefetcher) -> None:
        """A batch is handed out: the next step is likely to be its."""
        self._latest = weakref.ref(prefetcher)
        if not self._follows_steps and self._changes is not None:
            # After the recorder's hook: fetching is no part of the optimizer's time.
            self._follows_steps = True
            self._changes.on_leaving(register_optimizer_step_post_hook(self.step_ended).remove)

    def step_ended(self, *_: Any) -> None:
        """An optimizer has stepped, and the GPU is still at work: fetch the next batch now."""
        if torch.compiler.is_compiling() or self._latest is None:
            return
        prefetcher = self._latest()
        if prefetcher is not None and prefetcher.asked_by == _this_thread() and not prefetcher.side.is_capturing():
            prefetcher.look_ahead()


def fetch_without_a_span(changes: Subscriber) -> None:
    """Have iterators of ours announce their batches only where a profiler runs: that takes 40 µs a batch."""
    changes.around("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", _fetch_next)


def _fetch_next(call: Any, iterator: Any) -> Any:
    ours = isinstance(iterator, (DevicePrefetcher, FeedIterator)) and iterator._dataset_kind == _DatasetKind.Map
    if not ours or torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return call(iterator)
    batch = iterator._next_data()
    iterator._num_yielded += 1
    return batch


class DevicePrefetcher(torch_loader._BaseDataLoaderIter):
    """A loader's iterator that fetches one batch ahead and starts its copy to the GPU: at the end of
    a step, where every batch has one and it is ready (a loop that reads its loss leaves the GPU idle
    then), else when asked."""

    def __init__(self, inner: Any, side: SideStream, change: DevicePrefetch) -> None:
        # PyTorch's __init__ would draw random numbers.
        self._inner = inner
        self._feeds = isinstance(inner, FeedIterator)  # PyTorch's cannot tell whether a batch is ready
        self._dataset_kind: Any = getattr(inner, "_dataset_kind", None)
        self.side = side
        self._change = change
        self._num_yielded = 0
        self._next: Any = NOT_YET
        self._since_step = 0  # batches
        self._one_a_step = False
        self.asked_by = (0, 0)  # process and thread
        self._copies = True  # False: the script copies better itself, or we cannot
        self._well_in_a_row = 0  # batches that the script would have copied well itself
        self._asked_well: bool | None = None  # the latest; None until the script asks for it

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
            batch = self._fetch_and_copy(self._fetch)
        elif self._feeds and not isinstance(batch, Exception):
            batch = self._inner.in_its_turn(batch)
        if isinstance(batch, Exception):
            try:
                raise batch
            finally:
                del batch  # it knows this frame by now, and would keep the workers
        if self._change.is_on and not fetch_after_step and not (self._feeds and self._inner.made_when_asked):
            self._next = self._fetch_and_copy(self._fetch)
        return batch

    def _fetch(self) -> Any:
        return _fetch_next(original(torch_loader._BaseDataLoaderIter.__next__), self._inner)

    def look_ahead(self) -> None:
        """A step is over: fetch the next batch, unless it has to be waited for."""
        if not self._feeds:
            return
        if self._since_step:
            self._one_a_step, self._since_step = self._since_step == 1, 0
        if self._next is NOT_YET and self._change.is_on:
            self._next = self._fetch_and_copy(self._inner.ahead)

    def _fetch_and_copy(self, fetch: Callable[[], Any]) -> Any:
        """The next batch, its copy begun; or the exception that comes instead, to be raised in its turn."""
        self._change.release()
        try:
            batch = fetch()
        except StopIteration:
            return StopIteration()  # a new one: the other knows this frame, and would keep the workers
        except Exception as problem:  # the script's own
            return problem
        if batch is not NOT_YET and self._copies and self._change.is_on:
            try:
                self._copy(_hosts_in(batch))
            except Exception as problem:  # out of memory, for example
                self._copies = False
                self._change.ledger.failed(self._change.name, problem)
        return batch

    def _copy(self, hosts: list[Any]) -> None:
        self._well_in_a_row = self._well_in_a_row + 1 if self._asked_well else 0
        self._asked_well = None
        if self._well_in_a_row >= SURE_AFTER and _is_small(hosts):
            self._copies = False
            self._change.ledger.made_otherwise(self._change.name, _LEFT)
        else:
            self._change.begin(hosts, self)

    def copy_asked_for(self, *, without_waiting: bool) -> None:
        """The script copies a tensor of the latest batch. On a stream of its own it does so for a reason."""
        well = without_waiting and not self.side.script_has_another()
        self._asked_well = well and self._asked_well is not False


def _this_thread() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def _hosts_in(batch: Any) -> list[Any]:
    """The tensors to copy: none of inference mode, which do not say that they were written to, or of
    other layouts."""
    return [tensor for tensor in tensors_in(batch) if tensor.device.type == "cpu" and _can_be_copied(tensor)]


def _can_be_copied(tensor: Any) -> bool:
    if type(tensor) is not torch.Tensor:
        return True
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and not tensor.is_inference()


def _is_small(hosts: list[Any]) -> bool:
    if any(type(host) is not torch.Tensor for host in hosts) or sum(host.nbytes for host in hosts) >= SMALL_BYTES:
        return False
    return all(host.is_pinned() for host in hosts)
