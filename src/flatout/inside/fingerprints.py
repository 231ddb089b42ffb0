"""What reached the model, step by step, in the run of a proof (which is not timed).

    loaders ── the indices of each training batch     root modules ── a checksum of each input
    backward ── the loss                              weights ── how they moved, beside another run's
    closely: evaluation too, a few numbers for each input (see `contents`), and what is trained (see
    `learned`)
                                                      ──► proof-<rank>.jsonl, a line a step, when the run ends

What a model made itself (a critic's input, a recurrent net's last state) is not data, and on a GPU
never the same twice. A checksum is a sum over all 8-byte words, each times an odd number that depends
on its place, modulo 2^64: the same on any device and in any order of adding, but not when two words
change places.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils.data.dataloader as torch_loader
from torch.multiprocessing.reductions import StorageWeakRef

from flatout.files import write_whole_by
from flatout.inside.patches import Subscriber
from flatout.inside.root_modules import WeakIdMap
from flatout.inside.timing import tensors_in
from flatout.inside.weights import Moved, named_buffers

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_MASK = (1 << 64) - 1
_PARTS = {
    torch.jagged: ("offsets", "values"),
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}
_MADE_BY_MODEL = 0  # stands for the checksum of what is not data
_DIRECTIONS, _ROW, _STRIDE, _PART = 4, 4096, 1637, 1 << 22
# How a step is made, not what it is; and what a scheduler has noted.
_NO_SETTINGS = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"}


class FingerprintLog:
    """Collects what goes into each step; nothing is read from the device before the end.

    `closely`: also what it takes to judge an edit of the person's own, of which nothing is known.
    """

    def __init__(self, *, closely: bool = False) -> None:
        self.closely = closely
        self._projections = Projections()
        self._learned: list[Any] = []  # as it was written last
        self._steps: list[dict[str, Any]] = []
        self._open = self._new_step()
        self._outputs: list[StorageWeakRef] = []  # of root modules
        self.roots = WeakIdMap()  # the modules whose inputs are noted

    def install(self, subscriber: Subscriber) -> None:
        """Note what loaders give and what the losses are; `inputs` is called around root modules."""
        subscriber.around("torch.utils.data.dataloader.DataLoader._index_sampler", self._index_sampler)
        subscriber.after("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", self._fetched)
        subscriber.before("torch.autograd.backward", self._loss)

    def _index_sampler(self, call: Any, loader: Any) -> Any:
        return _NotingSampler(call(loader))

    def _fetched(self, iterator: Any) -> None:
        asked = iterator._index_sampler
        learns = torch.is_grad_enabled()
        if not isinstance(asked, _NotingSampler) or not asked.taken or not (learns or self.closely):
            return
        begins, asked.begins = asked.begins, None
        indices = asked.taken.popleft()
        if indices is None:
            return
        if begins and isinstance(iterator, torch_loader._SingleProcessDataLoaderIter):
            begins = "here"
        into = self._into(learns=learns)
        into["indices"].append(indices)
        into["begins"].append(begins)

    def _loss(self, tensors: Any, *_: Any, **__: Any) -> None:
        loss = tensors[0] if isinstance(tensors, list | tuple) and tensors else tensors
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._open["losses"].append(loss.detach().double().clone())

    def _new_step(self) -> dict[str, Any]:
        return _step() | ({"evaluation": _step(), "learned": []} if self.closely else {})

    def _into(self, *, learns: bool) -> dict[str, Any]:
        step: dict[str, Any] = self._open if learns else self._open["evaluation"]
        return step

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, learns: bool = True) -> None:
        """These reach a root module, which learns from them or not."""
        into = self._into(learns=learns)
        for tensor in _strided([args, kwargs]):
            made_by_model = _memory(tensor) in self._outputs
            into["inputs"].append(_MADE_BY_MODEL if made_by_model else checksum(tensor))
            if self.closely:
                into["contents"].append((_kind(tensor), None if made_by_model else self._projections.of(tensor)))

    def outputs(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A root module has returned this; what it only hands through stays data."""
        given = [_memory(tensor) for tensor in _strided([args, kwargs])]
        returned = [_memory(tensor) for tensor in _strided([result])]
        self._outputs = [memory for memory in self._outputs if not memory.expired()]
        self._outputs += [memory for memory in returned if memory not in given]

    def step_ended(self, moved: Moved | None, optimizers: Iterable[Any] = ()) -> None:
        """A training step is over."""
        if self.closely:
            self._open["learned"] = [*map(_group, _groups(optimizers)), _buffers(self.roots)]
        self._steps.append({**self._open, "moved": moved})
        self._open = self._new_step()

    def write(self, path: Path) -> None:
        """Copy it all to the host and write it to a file."""
        lines = (self._line(number, step) for number, step in enumerate(self._steps))
        write_whole_by(path, lambda file: file.writelines(line.encode() for line in lines))

    def _line(self, number: int, step: dict[str, Any]) -> str:
        losses = [float(loss) for loss in step["losses"]]
        line = {
            "step": number,
            "inputs": _plain_inputs(step["inputs"]),
            "indices": step["indices"],
            "begins": step["begins"],
            "loss": sum(losses) / len(losses) if losses else None,
            "losses": losses,
            "moved": step["moved"],
        }
        if self.closely:
            learned = _plain_groups(step["learned"])
            line["learned"], self._learned = learned if learned != self._learned else [], learned
            line["contents"] = _plain_contents(step["contents"])
            seen = step["evaluation"]
            if seen["inputs"] or seen["indices"]:
                inputs, contents = _plain_inputs(seen["inputs"]), _plain_contents(seen["contents"])
                line["evaluation"] = {"indices": seen["indices"], "inputs": inputs, "contents": contents}
        return json.dumps(line, default=str) + "\n"


def _strided(things: Any) -> list[Any]:
    """The tensors in these; of those without memory of their own (sparse, ragged) their parts."""
    return [part for tensor in tensors_in(things) for part in _parts_of(tensor)]


def _parts_of(tensor: Any) -> list[Any]:
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout in _PARTS:
        return [getattr(tensor, part)() for part in _PARTS[tensor.layout]]
    return [tensor.to_dense()]  # such as mkldnn


def _memory(tensor: Any) -> StorageWeakRef:
    """The memory of a tensor, which its views share."""
    return StorageWeakRef(tensor.untyped_storage())


def checksum(tensor: Any) -> Any:
    """A tensor's checksum, as a number on its own device. Layout does not count; shape and type do."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    missing = -data.numel() % 8
    if missing:
        data = torch.cat([data, data.new_zeros(missing)])
    words = data.view(torch.int64)
    places = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device)
    kind = sum((at + 2) * size for at, size in enumerate(tensor.shape)) * 31 + tensor.element_size()
    return (words * (places * _ODD | 1)).sum() + kind


def _step() -> dict[str, Any]:
    return {"inputs": [], "indices": [], "begins": [], "losses": [], "contents": []}


class Projections:
    """A tensor's length, and its projections on a few directions drawn by chance, the same ones in every run.

    They stay on the device. In double precision, and in parts, so that a large tensor takes little
    memory beside it.
    """

    def __init__(self) -> None:
        self._drawn: dict[Any, Any] = {}  # by device

    @torch.no_grad()
    def of(self, tensor: Any) -> Any:
        """These numbers, as a small tensor on its own device."""
        flat = tensor.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        drawn = self._directions(flat.device)
        squares, sums = drawn.new_zeros(1), drawn.new_zeros(_DIRECTIONS)
        for number, part in enumerate(flat.split(_PART)):
            rows = torch.nn.functional.pad(part.to(drawn.dtype), (0, -part.numel() % _ROW)).reshape(-1, _ROW)
            squares += rows.square().sum()
            # The rows are weighted, too: else it would be all the same in which row a number stands.
            weights = drawn[(torch.arange(len(rows), device=rows.device) + number * len(rows)) * _STRIDE % _ROW]
            sums += (rows @ drawn * weights).sum(0)
        return torch.cat([squares.sqrt(), sums])

    def _directions(self, device: torch.device) -> Any:
        if device not in self._drawn:
            drawn = torch.randn(_ROW, _DIRECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            if device.type == "mps":  # which has no float64
                drawn = drawn.float()
            self._drawn[device] = drawn.to(device)
        return self._drawn[device]


def _kind(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _groups(optimizers: Iterable[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((type(optimizer).__name__, group) for optimizer in optimizers for group in optimizer.param_groups)


def _group(named: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any], list[str]]:
    """A group of an optimizer's weights: its class, its settings as they are now, and the shapes of
    the weights."""
    kind, group = named
    settings = {key: value for key, value in group.items() if key not in _NO_SETTINGS and _is_plain(value)}
    settings = {key: value.detach().clone() if _is_number(value) else value for key, value in settings.items()}
    return kind, settings, [str(list(weight.shape)) for weight in group["params"]]


def _buffers(roots: Iterable[Any]) -> tuple[str, dict[str, Any], list[str]]:
    return "buffers", {}, sorted(f"{name} {list(buffer.shape)}" for name, buffer in named_buffers(roots))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _plain_groups(groups: list[Any]) -> list[Any]:
    return [(kind, {key: _plain_value(known[key]) for key in known}, shapes) for kind, known, shapes in groups]


def _plain_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(map(_plain_value, value))
    return value.item() if _is_number(value) else value


def _plain_inputs(inputs: list[Any]) -> list[str]:
    return [f"{int(value) & _MASK:016x}" for value in inputs]


def _plain_contents(contents: list[Any]) -> list[Any]:
    return [(kind, numbers.tolist() if numbers is not None else []) for kind, numbers in contents]


class _NotingSampler:
    """A sampler that remembers what it was asked for in the present pass."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.taken: deque[Any] = deque()
        self.begins: str | None = None  # of the first batch of a pass: by which process it is made

    def __iter__(self) -> Iterator[Any]:
        taken = self.taken = deque()
        self.begins = "elsewhere"
        for indices in self._sampler:
            taken.append(_samples(indices))
            yield indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)


def _samples(indices: Any) -> list[Any] | None:
    """The samples of a batch as JSON can hold them; None where they have no numbers, as those of a stream."""
    try:
        plain = _plain(indices)
    except Exception:  # a sampler's own kind of thing
        return None
    if not isinstance(plain, list):
        plain = [plain]
    return None if all(number is None for number in plain) else plain


def _plain(index: Any) -> Any:
    if hasattr(index, "tolist"):  # a tensor, numpy's
        index = index.tolist()
    if isinstance(index, list | tuple):
        return [_plain(part) for part in index]
    return int(index) if hasattr(index, "__index__") else index
