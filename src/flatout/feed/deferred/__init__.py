"""Transforms that a sample only notes, and the card makes: the script's own, with the script's own random numbers.

    worker    dataset[i] ─► pictures, arrays, tensors that note what is done to them ─► pixels, steps, numbers
    parent    Deferred: a host tensor as far as the loop can tell ─ .to("cuda") ─► the steps, for the whole batch

A dataset decodes, draws its random numbers, turns, lights and normalizes as ever; but of a turned picture it holds a
`LaterImage` (`pictures`), of its pixels a `LaterArray` (`arrays`), of these as a tensor a `LaterTensor` (`tensors`).
What is done to them becomes a `value`. Whatever cannot be noted is done here and now, with the library that was asked,
and from then on the memory that was given out is the truth: nothing is lost but the saving. What is still only noted
when a sample is done travels as bytes, with the steps (`program`) and the numbers in them (`batch`). `sample` keeps
watch: some are made both ways.

Only `batch` and `program` are needed where nothing is noted; the rest is for workers, and needs Pillow.
"""
