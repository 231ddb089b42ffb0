"""PyTorch's compiler in our hands: loaded only when it is used, and rounding as the eager kernels do.

The first step of every optimizer imports `torch._dynamo`, if only to say that it must not be
compiled: seconds, in each of a dozen trials. There a placeholder answers just this.

The compiler leaves out the rounding between fused operations in half precision. With torch 2.11 the
gradients of a compiled soft-argmax were twice as far off as those of eager bf16 (docs/BENCHMARKS.md,
`captcha`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_ASKED_BY_IMPORTS = ("__path__", "__all__")
_ROUNDING = "TORCHINDUCTOR_EMULATE_PRECISION_CASTS"


def load_when_used() -> None:
    """Put the placeholder in place, unless the compiler is loaded already."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = torch._dynamo = _Placeholder()


def round_as_eager() -> None:
    """Round as the eager kernels from now on, unless the person has set it, or this torch cannot."""
    import torch._inductor.config as config

    if _ROUNDING not in os.environ and hasattr(config, "emulate_precision_casts"):
        config.emulate_precision_casts = True


@contextmanager
def draw_as_eager() -> Iterator[None]:
    """Around an eager call of a model: if it draws random numbers, compiled ones draw the same from then on.

    A compiler has a stream of its own, and two runs could not be compared step by step.
    """
    import torch._inductor.config as config

    before = _random_states()
    yield
    if not all(map(torch.equal, before, _random_states())):
        config.fallback_random = True


def _random_states() -> list[Any]:
    gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [generator.get_state() for generator in (torch.default_generator, *gpus)]


class _Placeholder(ModuleType):
    """Is replaced by the real module at the first attribute it does not have."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__spec__ = importlib.util.find_spec(_NAME)
        self.__file__ = self.__spec__.origin if self.__spec__ is not None else None
        self._spared: list[FunctionType] = []

    def graph_break(self) -> None:
        """Nothing is being compiled."""

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """The function as it is; once there is a compiler, it will be asked again."""
        if not isinstance(function, FunctionType) or not recursive:
            return self.__getattr__("disable")(function, recursive, **options)
        self._spared.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _ASKED_BY_IMPORTS:
            # `inspect` looks at every module there is, perhaps while torch imports what the compiler needs.
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
            if vars(torch).get("_dynamo") is self:
                del torch._dynamo
            for function in self._spared:  # torch keeps the answer of `disable` there
                vars(function).pop("__dynamo_disable", None)
        return getattr(importlib.import_module(_NAME), name)
