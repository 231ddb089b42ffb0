"""A batch whose transforms are still to be made: a host tensor to the loop, on its way to a card what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.feed.deferred.program import Program, agreed, run
from flatout.feed.deferred.value import Noted

# What a stand-in can say of itself without being made.
_SHAPE = {"shape", "size", "dim", "ndim", "numel", "nelement", "__len__"}
_TYPE = {"dtype", "itemsize", "element_size", "is_floating_point", "is_complex", "is_quantized", "is_conj", "is_neg"}
_PLACE = {"device", "layout", "is_cuda", "is_meta", "is_mkldnn", "is_nested", "is_sparse"}
_OTHER = {"requires_grad", "is_leaf", "grad", "grad_fn", "names", "__hash__"}
_ASKED_OF_ITSELF = _SHAPE | _TYPE | _PLACE | _OTHER


class StandIn(Tensor):
    """A tensor of known shape and type whose values are not there yet. What a subclass cannot note, makes them."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)

    def made(self) -> Tensor:
        """The tensor itself on the host, from now on."""
        raise NotImplementedError

    def itself(self) -> Tensor | None:
        """The tensor that it has become, if it has."""
        raise NotImplementedError

    @staticmethod
    def stacked(samples: Sequence[Any], stack: Callable[..., Tensor], place: Callable[..., Tensor]) -> Any:
        """A batch of samples that are not made yet, or None where they have to be."""
        return None

    @classmethod
    def noted(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call where no values are needed for it; else NotImplemented."""
        return NotImplemented

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        args = tuple(thing.itself() if isinstance(thing, Noted) else thing for thing in args)  # numpy's, to torch real
        name: str = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ASKED_OF_ITSELF and isinstance(args[0], StandIn) and args[0].itself() is None:
                return func(*args, **kwargs)
            found = cls.noted(name, args, kwargs)
            if found is not NotImplemented:
                return found
            return func(*real(args), **real(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*real(args), **real(kwargs or {}))  # torch's own insides

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.made().__reduce_ex__(protocol)


def real(thing: Any) -> Any:
    """The same with everything in it made that is only noted."""
    if isinstance(thing, Noted):
        return thing.itself()
    if isinstance(thing, StandIn):
        return thing.made()
    if type(thing) in (list, tuple):
        return type(thing)(real(part) for part in thing)
    if type(thing) is dict:
        return {key: real(part) for key, part in thing.items()}
    return thing


class Deferred(StandIn):
    """A batch as its workers left it: pixels, a row of numbers a sample, and what is to be done with them."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, program: Program, pixels: Tensor, numbers: Tensor):
        self.program, self.pixels, self.numbers = program, pixels, numbers
        self._made: Tensor | None = None

    @classmethod
    def of(cls, program: Program, pixels: Tensor, numbers: Tensor) -> Any:
        """A batch to be made by this program."""
        return cls((len(pixels), *program.shape), program.dtype, program, pixels, numbers)

    def made(self) -> Tensor:
        """The values on the host, for a loop that looks at them there, and may change them."""
        if self._made is None:
            with torch.inference_mode(False), torch.no_grad():
                self._made = run(self.program, self.pixels, self.numbers)
        return self._made

    @classmethod
    def noted(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = args[0] if args else None
        if not isinstance(batch, cls):
            return NotImplemented
        if name == "_version":  # what was looked at on the host may have been changed there
            return 0 if batch._made is None else 1 + batch._made._version
        if batch._made is not None:
            return NotImplemented
        if name == "is_pinned":
            return batch.pixels.is_pinned()
        if name == "contiguous" and len(args) == 1 and not kwargs:
            return batch
        if name in ("stride", "is_contiguous"):  # as any batch that was stacked
            return getattr(Tensor, name)(*args, **kwargs)
        if name == "pin_memory":
            return cls.of(batch.program, batch.pixels.pin_memory(), batch.numbers.pin_memory())
        device = _device_asked_for(name, args[1:], kwargs)
        if device is None or device.type == "cpu":
            return NotImplemented
        at_once = not any(given is True for given in (*args[1:], kwargs.get("non_blocking")))
        pixels, numbers = (part.to(device, non_blocking=not at_once) for part in (batch.pixels, batch.numbers))
        while _first_told:
            _first_told.pop()()
        there = _on_card(batch.program, pixels, numbers)
        return there.to(*args[1:], **kwargs) if name == "to" else there

    def itself(self) -> Tensor | None:
        """The tensor that a look at it on the host has made."""
        return self._made

    def taken_apart(self) -> tuple[Program, Tensor, Tensor]:
        """What `of` makes it of again."""
        return self.program, self.pixels, self.numbers


_on_card: Callable[[Program, Tensor, Tensor], Tensor] = run


def make_on_card_by(make: Callable[[Program, Tensor, Tensor], Tensor]) -> None:
    """How programs are run there, from now on."""
    global _on_card
    _on_card = make


_first_told: list[Callable[[], None]] = []


def tell_of_first(call: Callable[[], None]) -> None:
    """Call it once, when transforms are made on a card for the first time."""
    _first_told[:] = [call]


def joined(parts: Sequence[Any], rows: Callable[..., Tensor]) -> Any:
    """One batch of its parts, whose tensors `rows` puts behind each other."""
    unmade = all(isinstance(part, Deferred) and part.itself() is None for part in parts)
    alike = unmade and len({part.pixels.shape[1:] for part in parts}) == 1
    program = agreed([part.program for part in parts]) if alike else None
    if program is None:
        return rows(real(list(parts)))
    return Deferred.of(program, rows([part.pixels for part in parts]), rows([part.numbers for part in parts]))


def _device_asked_for(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    if name == "cuda":
        asked = kwargs.get("device", args[0] if args else None)
        return torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked or "cuda")
    if name != "to":
        return None
    asked = kwargs.get("device", kwargs.get("other", args[0] if args else None))
    if isinstance(asked, Tensor):
        return asked.device
    if isinstance(asked, int) and not isinstance(asked, bool):
        return torch.device("cuda", asked)
    return torch.device(asked) if isinstance(asked, str | torch.device) else None
