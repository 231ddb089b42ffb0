"""A trial loads torch's compiler only when something asks for it.

The first step of every optimizer imports `torch._dynamo`, if only to say that it must not be compiled: seconds, in each
of a dozen trials. So a placeholder stands there that knows to say just this; any other question loads the real one.
"""

from __future__ import annotations

import importlib.util
import sys
from types import FunctionType, ModuleType
from typing import Any

_NAME = "torch._dynamo"
_ASKED_BY_IMPORTS = ("__path__", "__all__")


def install(torch: Any) -> None:
    """Put the placeholder in place, unless the compiler is here already."""
    if _NAME not in sys.modules:
        placeholder = _Placeholder(torch)
        sys.modules[_NAME] = torch._dynamo = placeholder


class _Placeholder(ModuleType):
    """Is replaced by the real module at the first attribute it does not have."""

    def __init__(self, torch: Any) -> None:
        super().__init__(_NAME)
        self.__spec__ = importlib.util.find_spec(_NAME)
        self.__file__ = self.__spec__.origin if self.__spec__ is not None else None
        self._torch = torch
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
            if vars(self._torch).get("_dynamo") is self:
                del self._torch._dynamo
            for function in self._spared:  # torch keeps the answer of `disable` there
                vars(function).pop("__dynamo_disable", None)
        return getattr(importlib.import_module(_NAME), name)
