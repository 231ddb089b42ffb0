"""How a batch travels: its tensors and arrays as bytes in shared memory, the rest as a small pickle around them.

    worker                                         parent
    samples ─ collate ─► arena (a slot's memory)     slot's memory ─┐
                └─ pack ─► skeleton + spans ───────► unpack ────────┴─► the batch, over the very same bytes

Stacking is done straight into the arena where collation ends in torch's own; what a custom `collate_fn` made
elsewhere is copied there once. What does not fit goes into a memory file of its own: nothing depends on the fit.
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data._utils import collate as stock

from flatout.feed import wire
from flatout.feed.deferred.batch import DeferredBatch, PlaceholderTensor, join_batches

Bytes = memoryview
Span = tuple[int, int]  # offset, length

_ALIGN = 64
_STOCK_TYPES = frozenset(stock.default_collate_fn_map)
_stock_tensor = stock.default_collate_fn_map[torch.Tensor]
_numpy: Any = sys.modules.get("numpy")  # PyTorch has imported it, where it is installed


@dataclass(slots=True, kw_only=True)
class Packed:
    """A batch ready to travel. `file` holds the bytes when the arena could not; `needs` is what a slot should hold."""

    skeleton: Any  # bytes; of several batches a list, of bytes for each
    spans: list[Span]
    file: int | None
    needs: int
    regions: list[tuple[int, int]] | None  # (offset, bytes a row) when further batches may be built in parts


@dataclass(slots=True)
class Arena:
    """Memory in which one worker builds one batch, or the rows from `first_row` on of one that others build too."""

    memory: Bytes | None
    regions: Sequence[tuple[int, int]] | None = None
    first_row: int = 0
    used: int = 0
    placed: list[Span] = field(default_factory=list)
    misfit: bool = False
    base: int = 0

    def __post_init__(self) -> None:
        if self.memory is not None:
            self.base = address(self.memory)

    def stack(self, batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        """What torch's collation does with tensors, with the result in this arena."""
        first = batch[0]
        if isinstance(first, PlaceholderTensor):
            later = first.stack_lazily(batch, self.stack, self.place)
            if later is not None:
                return later  # type: ignore[no-any-return]
        if first.is_nested or first.layout != torch.strided:
            return _stock_tensor(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]  # its error
        out = None
        if first.device.type == "cpu":
            out = self._reserve(len(batch), first)
            if out is None:
                out = first.new_empty((len(batch), *first.shape))
        return torch.stack(tuple(batch), 0, out=out)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a collated tensor (labels, scalars) in this arena."""
        out = self._reserve(len(tensor), tensor[0]) if tensor.dim() and len(tensor) else None
        return tensor if out is None else out.copy_(tensor)

    def _reserve(self, rows: int, row: torch.Tensor) -> torch.Tensor | None:
        row_bytes = row.numel() * row.element_size()
        if self.memory is None or row_bytes == 0 or rows == 0:
            self.misfit = True
            return None
        if self.regions is None:
            offset = self.used
            self.used = _aligned(offset + rows * row_bytes)
        else:
            turn = len(self.placed)
            if turn >= len(self.regions) or self.regions[turn][1] != row_bytes:
                self.misfit = True
                return None
            offset = self.regions[turn][0] + self.first_row * row_bytes
        if offset + rows * row_bytes > len(self.memory):
            self.misfit = True
            return None
        self.placed.append((offset, rows * row_bytes))
        flat = torch.frombuffer(self.memory[offset : offset + rows * row_bytes], dtype=row.dtype)
        return flat.view(rows, *row.shape)

    def holds(self, data: Bytes) -> int | None:
        """The offset of bytes that lie in this arena already."""
        if self.memory is None or data.readonly or not len(data):
            return None
        offset = address(data) - self.base
        return offset if 0 <= offset <= len(self.memory) - len(data) else None


# --- collation ------------------------------------------------------------------------------------------------------


class Strings(tuple[Any, ...]):
    """The strings of one part of a batch, kept apart from ordinary sequences until the parts are joined."""

    __slots__ = ()


def splits() -> bool:
    """Whether torch's collation is as it came, so that a batch built in parts can be joined again."""
    return frozenset(stock.default_collate_fn_map) == _STOCK_TYPES


def _map_into(arena: Arena) -> dict[Any, Callable[..., Any]]:
    def placing(function: Callable[..., Any]) -> Callable[..., Any]:
        def collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
            made = function(batch, collate_fn_map=collate_fn_map)
            return arena.place(made) if type(made) is torch.Tensor else made

        return collate

    functions = dict(stock.default_collate_fn_map)
    for kind, function in functions.items():
        if kind is torch.Tensor:
            functions[kind] = arena.stack if function is _stock_tensor else function
        elif _numpy is None or kind is not _numpy.ndarray:  # arrays come back here as tensors
            functions[kind] = placing(function)
    return functions


def collate_whole(samples: Sequence[Any], arena: Arena) -> Any:
    """`default_collate`, into the arena."""
    return stock.collate(samples, collate_fn_map=_map_into(arena))


def collate_parts(samples: Sequence[Any], arena: Arena) -> Any:
    """`default_collate` of some rows of a batch, to be joined with the others by `join`."""
    functions = _map_into(arena)
    for kind in (str, bytes):
        functions[kind] = lambda batch, *, collate_fn_map=None: Strings((type(batch), *batch))
    return stock.collate(samples, collate_fn_map=functions)


def join(parts: Sequence[Any], memory: Bytes) -> Any:
    """One batch from its parts; rows that lie one behind the other in `memory` are not copied."""

    def rows(pieces: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        behind_each_other = functools.partial(_behind_each_other, memory)
        if any(isinstance(piece, PlaceholderTensor) for piece in pieces):
            return join_batches(pieces, behind_each_other)
        return behind_each_other(pieces)

    def strings(pieces: Sequence[Strings], *, collate_fn_map: Any = None) -> Any:
        return pieces[0][0](text for piece in pieces for text in piece[1:])

    return stock.collate(list(parts), collate_fn_map={Strings: strings, torch.Tensor: rows})


def _behind_each_other(memory: Bytes, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    base = address(memory)
    start = end = pieces[0].data_ptr()
    for piece in pieces:
        if piece.data_ptr() != end or piece.shape[1:] != pieces[0].shape[1:] or not piece.is_contiguous():
            return _copied(pieces)
        end += piece.numel() * piece.element_size()
    if not base <= start <= end <= base + len(memory):
        return _copied(pieces)
    whole = torch.frombuffer(memory[start - base : end - base], dtype=pieces[0].dtype)
    return whole.view(-1, *pieces[0].shape[1:])


def _copied(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind the other, by this thread alone: torch would wake one for each core, and workers need those."""
    first = pieces[0]
    if any(piece.dtype != first.dtype or piece.shape[1:] != first.shape[1:] for piece in pieces):
        return torch.cat(tuple(pieces))
    whole = torch.empty((sum(map(len, pieces)), *first.shape[1:]), dtype=first.dtype)
    memory, start = _bytes_of(whole), 0
    for piece in pieces:
        plain = piece.contiguous()
        end = start + plain.numel() * plain.element_size()
        memory[start:end] = _bytes_of(plain)
        start = end
    return whole


_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a tensor whose elements fill it; the caller keeps the tensor alive."""
    memory: Bytes = _memory_at(tensor.data_ptr(), tensor.numel() * tensor.element_size(), _WRITABLE)
    return memory


# --- packing --------------------------------------------------------------------------------------------------------


def pack(batch: Any, arena: Arena) -> Packed:
    """Take a batch apart; its bytes end up in the arena, or together in one file."""
    skeleton, buffers, _kept = _take_apart(batch)
    regions = _regions(buffers, arena)
    sizes = [len(buffer) for buffer in buffers]
    needs = max(sum(map(_aligned, sizes)), arena.used)
    spans = _place(buffers, arena)
    file = None
    if spans is None:
        spans, file = _spill(buffers)
        arena.misfit = True
    return Packed(skeleton=skeleton, spans=spans, file=file, needs=needs, regions=regions)


def pack_together(batches: Iterable[Any], arena: Arena) -> Packed:
    """Take several batches apart, each before the next is made: they share nothing. All have to fit into the arena."""
    skeletons: list[bytes] = []
    spans: list[Span] = []
    known: dict[bytes, bytes] = {}  # most are the same, and travel once
    for batch in batches:
        skeleton, buffers, _kept = _take_apart(batch)
        placed = _place(buffers, arena)
        if placed is None:
            raise ValueError("these batches do not fit into the slot together")
        skeletons.append(known.setdefault(skeleton, skeleton))
        spans += placed
    return Packed(skeleton=skeletons, spans=spans, file=None, needs=arena.used, regions=None)


def _take_apart(batch: Any) -> tuple[bytes, list[Bytes], list[Any]]:
    """A pickle without its large parts, the bytes of those, and what has to live as long as they are used."""
    buffers: list[Bytes] = []

    def keep(buffer: pickle.PickleBuffer) -> None:
        buffers.append(buffer.raw())

    body = io.BytesIO()
    packer = _Packer(body, protocol=5, buffer_callback=keep)
    packer.dump(batch)
    return body.getvalue(), buffers, packer.kept


def unpack(skeleton: bytes, spans: Sequence[Span], memory: Bytes) -> Any:
    """The batch, its tensors and arrays lying over `memory` (and keeping it alive)."""
    return pickle.loads(skeleton, buffers=[memory[start : start + size] for start, size in spans])


def unpack_together(skeletons: Sequence[bytes], spans: Sequence[Span], memory: Bytes) -> list[Any]:
    """The batches: each takes as many of the spans as it has tensors and arrays."""
    buffers = iter([memory[start : start + size] for start, size in spans])
    return [pickle.loads(skeleton, buffers=buffers) for skeleton in skeletons]


def address(data: Bytes) -> int:
    """Where bytes lie in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def empty() -> Bytes:
    """No bytes at all."""
    return memoryview(b"")


def map_file(fd: int, *, populate: bool = False) -> Bytes:
    """The bytes of a memory file; the mapping lives as long as anything that lies over it. Closes `fd`.

    With `populate` its pages are brought in at once: 3 ms for 50 MB, against twice that in faults later.
    """
    try:
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        return memoryview(mmap.mmap(fd, 0, flags=flags))
    finally:
        os.close(fd)


class _Packer(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is DeferredBatch and obj.materialized() is None:
            return DeferredBatch.of, obj.parts()
        if _numpy is not None and isinstance(obj, _numpy.ndarray) and not obj.flags.writeable:
            # PyTorch's workers hand over one that is writable.
            return obj.copy(order="K").__reduce_ex__(5)
        if type(obj) is not torch.Tensor or obj.requires_grad or obj.device.type != "cpu":
            return NotImplemented
        if obj.layout != torch.strided or obj.is_quantized or obj.is_nested or obj.is_conj() or obj.is_neg():
            return NotImplemented
        stride = None if obj.is_contiguous() else _dense_stride(obj)
        flat = obj.contiguous().view(-1) if stride is None else obj.as_strided((obj.numel(),), (1,))
        self.kept.append(flat)
        return _rebuild, (pickle.PickleBuffer(_bytes_of(flat)), obj.dtype, tuple(obj.shape), stride)


def _rebuild(data: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: Any) -> torch.Tensor:
    if len(data) == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype)
    return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor whose elements fill their memory in some other order (channels_last); else None."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return None
        expected *= size
    return tuple(tensor.stride())


def _regions(buffers: Sequence[Bytes], arena: Arena) -> list[tuple[int, int]] | None:
    """Where each row of each tensor lies, if collation put every one of them into the arena itself."""
    spans = [(arena.holds(buffer), len(buffer)) for buffer in buffers]
    return list(arena.placed) if arena.placed and spans == arena.placed else None


def _place(buffers: Sequence[Bytes], arena: Arena) -> list[Span] | None:
    spans: list[Span] = []
    for buffer in buffers:
        offset = arena.holds(buffer) if len(buffer) else 0
        if offset is None:
            offset = arena.used
            if arena.memory is None or arena.regions is not None or offset + len(buffer) > len(arena.memory):
                return None
            arena.memory[offset : offset + len(buffer)] = buffer
            arena.used = _aligned(offset + len(buffer))
        elif arena.regions is None:
            arena.used = max(arena.used, _aligned(offset + len(buffer)))
        spans.append((offset, len(buffer)))
    return spans if arena.memory is not None or not any(len(buffer) for buffer in buffers) else None


def _spill(buffers: Sequence[Bytes]) -> tuple[list[Span], int]:
    spans: list[Span] = []
    end = 0
    for buffer in buffers:
        spans.append((end, len(buffer)))
        end = _aligned(end + len(buffer))
    fd = wire.memory_file(max(end, 1))
    with mmap.mmap(fd, 0) as file:
        for buffer, (start, size) in zip(buffers, spans, strict=True):
            file[start : start + size] = buffer
    return spans, fd


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
