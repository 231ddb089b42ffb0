"""How many floating-point operations the model takes in a training step, counted in one of the first.

Forward passes are counted, below autograd, where every operation has its sizes; a backward pass is
taken for twice its forward. Nothing is counted where something is compiled: the compiler would have
to look through the count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_TIMES_FORWARD = 3
_TORCHS_OWN = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "torchvision")
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_RECURRENT = ("rnn", "lstm", "gru")  # one kernel each, and not in torch's table


class FlopCount(TorchDispatchMode):
    """Adds up the matrix products, convolutions and attention of the calls it goes around."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forward = 0
        self._complete = True

    @property
    def of_a_step(self) -> int | None:
        """The operations of forward and backward; None where some could not be counted, or none were seen."""
        return _TIMES_FORWARD * self._forward if self._complete and self._forward else None

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, counted. Where it raises it is made again without the count, from the same random
        numbers."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            on_gpu = torch.cuda.is_initialized()
            if on_gpu and torch.cuda.is_current_stream_capturing():  # the state cannot be asked for then
                self._complete = False
                return call(*args, **kwargs)
            random_on_host = torch.get_rng_state()
            random_on_gpu = torch.cuda.get_rng_state() if on_gpu else None
            try:
                with self:
                    return call(*args, **kwargs)
            except Exception:
                self._complete = False
            torch.set_rng_state(random_on_host)
            if random_on_gpu is not None:
                torch.cuda.set_rng_state(random_on_gpu)
            return call(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        count = flop_registry.get(getattr(operation, "_overloadpacket", None))
        if not _PLAIN.issuperset(types):  # such as a DTensor, whose sizes are not those of this GPU's work
            self._complete = False
        elif count is not None:
            self._forward += int(count(*args, **kwargs, out_val=result))
        elif operation.namespace not in _TORCHS_OWN or any(name in operation.name() for name in _RECURRENT):
            self._complete = False
        return result
