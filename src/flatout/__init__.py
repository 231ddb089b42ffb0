"""flatout finds out why a GPU sits idle during PyTorch training, fixes it, and proves it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.inject.attach import attach

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "attach"]

_LAZY = {"attach": "flatout.inject.attach"}  # what needs torch is imported when it is asked for


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
