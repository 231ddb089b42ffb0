"""The data path: batches made by worker processes and handed to the training loop, or straight to its GPU.

    sampler ─► scheduler ─► workers (interchangeable, from a fork server) ─► slots of shared memory ─► your loop
                   ▲             │ killed, hung, too few, too many                   │
                   └─ made again ┘                                     to_device ────┴─► your loop, on the GPU

`loader` is the public face, and says when PyTorch's own iterator has to do; `iterator` stands where PyTorch's
would; `scheduler` hands out the batches of a pass. `worker_pool` knows the workers and sees to their deaths;
`fork_server` starts them, `channel` is how they are talked to, `worker` what they do. `packing` and `slots`
are how a batch travels. `controller` says how many workers; `randomness` makes a batch's random numbers its
own; `dataset_check` sees a loop that writes to its dataset; `device` takes batches to the GPU; `deferred`
leaves transforms to it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.feed.device import to_device
    from flatout.feed.loader import DataLoader, feed_of, iterator_for
    from flatout.feed.scheduler import LoaderOptions
    from flatout.feed.worker_pool import BadSample, BadSampleError

__all__ = ["BadSample", "BadSampleError", "DataLoader", "LoaderOptions", "feed_of", "iterator_for", "to_device"]

_HOMES = {"to_device": "device", "BadSample": "worker_pool", "BadSampleError": "worker_pool"}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: a plain `flatout run` needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"flatout.feed.{_HOMES.get(name, 'loader')}"), name)
