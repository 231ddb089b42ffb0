"""flatout finds out why a GPU sits idle during PyTorch training, fixes it, and proves it."""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
