"""Transforms that a worker only records and the GPU computes later: the script's own, with the script's random numbers.

    worker    dataset[i] ─► lazy image, array, tensor ─► bytes of the decoded image, the operations, their numbers
    parent    DeferredBatch: a host tensor to the loop ─ .to("cuda") ─► the operations, for the whole batch at once

A dataset decodes, draws random numbers, rotates, brightens and normalizes as before. But what it gets back is lazy: a
rotated picture is a `LazyImage`, its pixels a `LazyArray`, these as a tensor a `LazyTensor` (`lazy`). Each operation on
them becomes an `Expression` (`expression`). An operation that cannot be recorded computes the real thing at once, with
the library that was called: only the saving is lost. What is still lazy at the end of a sample travels as bytes, with
its operations and their numbers (`batch`). `samples` checks: some samples are made both ways and compared.

Only `batch` is needed outside of workers; the rest needs Pillow.
"""
