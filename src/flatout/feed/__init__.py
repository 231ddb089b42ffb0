"""The data path: batches made by worker processes and handed to the training loop, or straight to its GPU.

    sampler ─► table of tasks ─► workers (interchangeable, from a nursery) ─► slots of shared memory ─► your loop
                   ▲                 │ killed, hung, too few, too many                   │
                   └── redone ───────┘                                       to_device ──┴─► your loop, on the GPU

`loader` is the face (and decides when stock has to do), `iterator` stands where stock's would, `feed` owns the table
and hands out tasks, `faults` sees to deaths. `controller` (fed by `tuning`) says how many workers; `numbered` is for
those whose number has a meaning. `nursery`, `crew`, `wire` and `messages` are the processes and how they talk;
`worker` and `rows` are what they do, and `here` does it where no worker is of use. `packing` and `slots` are how a
batch travels; `randomness` and `fingerprint` keep it the batch it would have been; `account` is what became of it all;
`device` takes it to the GPU.
"""

from flatout.feed.account import BadSample, BadSampleError
from flatout.feed.device import to_device
from flatout.feed.loader import DataLoader, Options, feed_of, iterator_for

__all__ = ["BadSample", "BadSampleError", "DataLoader", "Options", "feed_of", "iterator_for", "to_device"]
