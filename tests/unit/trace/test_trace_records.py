"""Records become JSON and come back as they were."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.model.records import AppliedChange, LoaderFacts, SettingsRead, encode, to_json
from flatout.trace import (
    Facts,
    FactsRecord,
    GpuSample,
    HostSample,
    Note,
    RunInfo,
    Sample,
    Sketch,
    Span,
    Step,
    Summary,
    Window,
    WorkerReport,
    Xray,
)
from flatout.trace.reader import KINDS, from_json


def rounded(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers that mean no more than we keep of them."""
    return st.integers(int(low * 1000), int(high * 1000)).map(lambda n: n / 1000)


text = st.text(max_size=20)
span = st.builds(
    Span,
    name=text,
    start_ms=rounded(0, 1e6),
    host_ms=rounded(0, 1e6),
    gpu_idle_ms=st.none() | rounded(0, 1e6),
    where=st.none() | text,
)
step = st.builds(
    Step,
    index=st.integers(0, 10**9),
    start_s=rounded(0, 1e7),
    wall_ms=rounded(0, 1e6),
    spans=st.lists(span, max_size=3).map(tuple),
    samples=st.none() | st.integers(0, 10**6),
    loss=st.none() | rounded(-100, 100),
)
gpu = st.builds(
    GpuSample,
    index=st.integers(0, 15),
    uuid=text,
    name=text,
    sm_active_pct=st.none() | rounded(0, 100),
    throttle=st.none() | st.lists(text, max_size=2).map(tuple),
    pulses=st.lists(rounded(0, 100), max_size=8).map(tuple),
)
host = st.builds(
    HostSample,
    cpu_pct=st.none() | rounded(0, 100),
    cores_pct=st.none() | st.lists(rounded(0, 100), max_size=4).map(tuple),
)
sample = st.builds(
    Sample, time_s=rounded(0, 1e7), interval_s=rounded(0, 60), host=host, gpus=st.lists(gpu, max_size=2).map(tuple)
)
sketch = st.lists(rounded(0, 1e4), max_size=10).map(Sketch.of)
window = st.builds(
    Window,
    first_index=st.integers(0, 10**6),
    last_index=st.integers(0, 10**6),
    start_s=rounded(0, 1e7),
    wall_ms=sketch,
    spans_ms=st.dictionaries(text, sketch, max_size=3),
    gpu_idle_ms=st.dictionaries(text, rounded(0, 1e4), max_size=3),
)
info = st.builds(RunInfo, name=text, command=st.lists(text, max_size=3).map(tuple), rank=st.none() | st.integers(0, 99))
note = st.builds(Note, time_s=rounded(0, 1e7), text=text)
summary = st.builds(Summary, info=info, wall_ms=sketch, ended=st.booleans())
loader = st.builds(LoaderFacts, dataset=text, length=st.none() | st.integers(0, 10**18), written=st.none() | text)
changed = st.builds(AppliedChange, name=text, value=text, applied=st.booleans(), how=text)
settings = st.builds(SettingsRead, source=text, values=st.dictionaries(text, text | st.none()))
values = st.builds(
    Facts,
    gpu=st.none() | text,
    loaders=st.lists(loader, max_size=2).map(tuple),
    changes=st.lists(changed, max_size=2).map(tuple),
    settings=st.lists(settings, max_size=2).map(tuple),
)
facts = st.builds(FactsRecord, time_s=rounded(0, 1e7), values=values)
xray = st.builds(Xray, steps=st.integers(1, 9), wall_ms=rounded(0, 1e4), busy_ms=rounded(0, 1e4), kernel_us=sketch)
pairs = st.lists(st.tuples(rounded(0, 1e4), rounded(0, 1e4)), max_size=3).map(tuple)
clock = rounded(0, 1e7)
worker = st.builds(WorkerReport, time_s=clock, born_s=clock, pid=st.integers(1, 2**22), sample_ms=sketch, slowest=pairs)


@given(step | sample | window | info | note | summary | facts | xray | worker)
def test_a_record_comes_back_as_it_was(record: Any) -> None:
    line = json.loads(json.dumps(encode(record), allow_nan=False))
    assert from_json(KINDS[line["record"]], line) == record


def test_unknown_keys_are_ignored() -> None:
    data = to_json(Step(index=3, start_s=1.0, wall_ms=2.0)) | {"colour": "blue"}
    assert from_json(Step, data) == Step(index=3, start_s=1.0, wall_ms=2.0)


def test_nothing_measured_differs_from_measured_nothing() -> None:
    for throttle in (None, ()):
        gpu = GpuSample(index=0, uuid="u", name="n", throttle=throttle)
        assert from_json(GpuSample, to_json(gpu)).throttle == throttle


def test_a_loss_that_is_not_a_number_counts_as_not_measured() -> None:
    for loss in (math.nan, math.inf):
        assert "loss" not in to_json(Step(index=0, start_s=0.0, wall_ms=1.0, loss=loss))


@pytest.mark.parametrize("loss", [1.23456e-7, -3.2e-9, 0.0, 0.125])
def test_a_small_loss_is_not_rounded_away(loss: float) -> None:
    assert to_json(Step(index=0, start_s=0.0, wall_ms=1.0, loss=loss))["loss"] == loss


def test_facts_of_any_type_can_be_written() -> None:
    facts = {"path": Path("a/b"), "rate": np.float32(0.5), "batch": np.int64(8), "set": {1}, 3: None}
    data = json.loads(json.dumps(to_json(facts)))
    assert data == {"path": "a/b", "rate": 0.5, "batch": 8, "set": "{1}", "3": None}
