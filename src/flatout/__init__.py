"""flatout finds out why a GPU sits idle during PyTorch training, fixes it, and proves it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.feed import DataLoader
    from flatout.inside.start import apply
    from flatout.notebook import attach

__version__ = "0.1.0.dev0"

__all__ = ["DataLoader", "__version__", "apply", "attach"]

# What needs torch is imported when it is asked for.
_LAZY = {
    "DataLoader": "flatout.feed",
    "apply": "flatout.inside.start",
    "attach": "flatout.notebook",
    "load_ipython_extension": "flatout.notebook",
}
_ROOMS = ("augment", "feed")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _ROOMS:
        return import_module(f"flatout.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'flatout' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
