"""Transforms that a worker only records and the GPU computes later: the script's own, with the
script's random numbers.

    worker    dataset[i] ─► lazy image, array, tensor ─► bytes of the decoded image, the operations, their numbers
    parent    DeferredBatch: a host tensor to the loop ─ .to("cuda") ─► the operations, for the whole batch at once

A dataset decodes, draws random numbers, rotates, brightens and normalizes as before. But what it gets back is
lazy (`lazy`), and each operation on it becomes an `Expression` (`expression`). One that cannot be recorded
computes the real thing at once, with the library that was called. What is still lazy at the end of a sample
travels as bytes, with its operations and their numbers (`batch`). `samples` makes some samples both ways and
compares. Only `batch` is needed outside of workers; the rest needs Pillow.
"""
