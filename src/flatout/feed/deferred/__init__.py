"""Transforms that a sample only notes, and the card makes: the script's own, with the script's own random numbers.

    worker    dataset[i] ─► pictures, arrays, tensors that note what is done to them ─► pixels, steps, numbers
    parent    Deferred: a host tensor as far as the loop can tell ─ .to("cuda") ─► the steps, for the whole batch

A dataset decodes, draws its random numbers, turns, lights and normalizes as ever; but of a turned picture it holds a
`LaterImage` (`pictures`), of its pixels a `LaterArray` (`arrays`), of these as a tensor a `LaterTensor` (`tensors`),
which note a `value`. Whatever else is asked of one of them is answered by doing here and now, with the library that was
asked, what had been noted: nothing is lost but the saving. What is still only noted when a sample is done travels as
bytes, with the steps (`program`) and the numbers in them (`batch`). `sample` keeps watch: some are made both ways.

Only `batch` and `program` are needed where nothing is noted; the rest is for workers, and needs Pillow.
"""
