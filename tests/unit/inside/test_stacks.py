"""Stacks of a thread: which lines are named, for how long, and that nothing of the script's is kept."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.diagnose.breakdown import HotFunction, hot_functions
from flatout.inside import stacks
from flatout.inside.stacks import StackSampler, in_words
from flatout.model.records import WRAPPED_CALL


@contextmanager
def sampling(phase: Callable[[], str | None], dense_s: float = 0.0) -> Iterator[StackSampler]:
    """A sampler of the thread that the test runs in."""
    thread = threading.get_ident()
    sampler = StackSampler(lambda: thread, phase, dense_s=dense_s)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def functions(sampler: StackSampler, *phases: str) -> tuple[HotFunction, ...]:
    return hot_functions([sampler.record()], phases)


@pytest.fixture(autouse=True)
def looks_come_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "SPARSE_EVERY_S", 0.002)


def wait_for_looks(sampler: StackSampler, looks: int) -> None:
    """Until the sampler has looked so many times more."""
    end = sampler.looks + looks
    while sampler.looks < end:
        time.sleep(0.001)


def short_metric(sampler: StackSampler) -> None:
    wait_for_looks(sampler, 10)  # the line of the short one


def long_metric(sampler: StackSampler) -> None:
    wait_for_looks(sampler, 60)  # the line of the long one


def test_time_goes_to_the_function_and_line_that_called() -> None:
    with sampling(lambda: "rest") as sampler:
        short_metric(sampler)
        long_metric(sampler)
    (waited,) = (one for one in functions(sampler, "rest") if one.name == "wait_for_looks")
    assert waited.share > 0.9
    callers = [
        (one.frames, one.looks)
        for record in [sampler.record()]
        for one in record.stacks
        if any(record.frames[number].function == "long_metric" for number in one.frames)
    ]
    assert sum(looks for _, looks in callers) >= 55


def test_a_line_has_its_source_and_what_it_called_in_a_library() -> None:
    event = threading.Event()

    def ask_a_library(sampler: StackSampler) -> None:
        threading.Thread(target=lambda: (wait_for_looks(sampler, 40), event.set())).start()
        event.wait()  # token = "sk-abcdefghijklmnopqrstuvwx"

    with sampling(lambda: "rest") as sampler:
        ask_a_library(sampler)
    hottest = functions(sampler, "rest")[0].hottest
    assert hottest.called == "threading.wait"
    assert hottest.where.startswith("tests/unit/inside/test_stacks.py:")
    assert hottest.source is not None
    assert hottest.source.startswith("event.wait()")
    assert "abcdefghijkl" not in hottest.source


def test_what_a_library_of_torch_calls_is_told_from_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a framework's loop (here, what is in tests/unit) that computes with torch
    THEN the call into torch is known, and the decorators around it are no calls."""
    monkeypatch.setattr(stacks, "is_own", lambda file: file == "train.py")
    names = ["train.py", "/lib/frame/trainer.py", f"{stacks._TORCH}nn/modules/module.py", "/lib/frame/model.py"]
    inner = [f"{stacks._TORCH}_compile.py", *reversed(names)]
    codes = [compile("pass", name, "exec") for name in inner]
    codes.insert(-1, codes[-1].replace(co_name=WRAPPED_CALL))  # as we call .item() for a line of the user's
    kept = stacks.shown((code, number) for number, code in enumerate(codes))
    assert [code.co_filename for code, _ in kept] == names


def test_looks_count_for_the_phase_they_fall_into_and_for_none_where_there_is_none() -> None:
    phase: list[str | None] = ["data"]
    with sampling(lambda: phase[0]) as sampler:
        wait_for_looks(sampler, 20)
        phase[0] = None
        wait_for_looks(sampler, 40)
    assert sum(one.looks for one in sampler.record().stacks) <= 25
    assert {one.phase for one in sampler.record().stacks} == {"data"}


def test_looks_count_once_the_step_that_they_fall_into_has_ended() -> None:
    """GIVEN a script that goes on after its last step THEN what it does there is no line of training."""
    thread, steps = threading.get_ident(), [0]
    sampler = StackSampler(lambda: thread, lambda: "rest", steps=lambda: steps[0], dense_s=0.0)
    sampler.start()
    short_metric(sampler)
    steps[0] += 1
    long_metric(sampler)
    sampler.stop()
    seen = {frame.function for frame in sampler.record().frames}
    assert "short_metric" in seen
    assert "long_metric" not in seen


def test_what_torch_does_is_told_from_what_the_script_does() -> None:
    inputs, layer = torch.randn(512, 512), torch.nn.Linear(512, 512)
    with sampling(lambda: "unsplit") as sampler:
        end = sampler.looks + 60
        while sampler.looks < end:
            torch.nn.functional.mse_loss(layer(inputs), inputs).backward()
    assert {one.phase for one in sampler.record().stacks} >= {"forward", "backward"}


class Kept:
    """What a script holds in a local variable."""


def test_no_object_of_the_script_is_kept() -> None:
    seen: list[weakref.ref[Any]] = []

    def step(sampler: StackSampler) -> None:
        held = Kept()
        seen.append(weakref.ref(held))
        wait_for_looks(sampler, 3)

    with sampling(lambda: "rest") as sampler:
        gc.disable()
        try:
            for _ in range(20):
                step(sampler)
                assert seen[-1]() is None
        finally:
            gc.enable()


def test_seldom_looks_do_not_come_when_the_thread_lets_go_of_the_interpreters_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that has just let go of it would be seen at that line alone: it is made to, wherever it is."""
    before, seen = sys.getswitchinterval(), []
    monkeypatch.setattr(stacks, "lines_of", lambda _: seen.append(sys.getswitchinterval()) or [])
    with sampling(lambda: "rest") as sampler:
        wait_for_looks(sampler, 3)
    assert len(seen) >= 3
    assert max(seen) < before
    assert sys.getswitchinterval() == before


def test_the_switch_interval_is_the_users_again_after_the_dense_looks() -> None:
    before = sys.getswitchinterval()
    with sampling(lambda: "rest", dense_s=0.1) as sampler:
        wait_for_looks(sampler, 3)
        assert sys.getswitchinterval() < before
        while sys.getswitchinterval() < before:
            wait_for_looks(sampler, 1)
    assert sys.getswitchinterval() == before


def test_a_switch_interval_that_the_script_has_set_stays() -> None:
    before = sys.getswitchinterval()
    try:
        with sampling(lambda: "rest", dense_s=60.0) as sampler:
            wait_for_looks(sampler, 3)
            sys.setswitchinterval(0.02)
        assert sys.getswitchinterval() == pytest.approx(0.02)
    finally:
        sys.setswitchinterval(before)


def test_more_stacks_than_a_record_holds_keep_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_MOST_STACKS", 1)
    with sampling(lambda: "rest") as sampler:
        short_metric(sampler)
        long_metric(sampler)
        at_least = sampler.looks - 2
    record = sampler.record()
    assert len(record.stacks) == 2  # the largest, and all others together
    assert sum(one.looks for one in record.stacks) >= at_least


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return self.decode(index)

    def decode(self, index: int) -> int:
        time.sleep(0.005)
        return index


def test_lines_of_a_worker_begin_where_the_worker_began() -> None:

    class Looks(Slow):
        def decode(self, index: int) -> Any:
            return [line[0].co_name for line in stacks.shown(stacks.lines_of(threading.get_ident()))]

    batches = list(DataLoader(Looks(), batch_size=None, num_workers=1))
    assert batches[0] == ["__getitem__", "decode"]


def test_where_a_thread_is_in_words() -> None:
    assert in_words(threading.get_ident()).startswith("tests/unit/inside/test_stacks.py:")
    names: list[str] = []
    code = compile("note()", "/usr/lib/torch/distributed/run.py", "exec")
    exec(code, {"note": lambda: names.append(in_words(threading.get_ident()))})
    assert names == [""], "torchrun's agent trains nothing"


def test_a_secret_in_the_name_of_a_file_does_not_come_out() -> None:
    text = "def here(): return caller()\ndef look(): return here()"
    code = compile(text, "runs/api_key=abc/hf_abcdefghijklmnopqrst.py", "exec")
    names: dict[str, Any] = {"caller": stacks.caller}
    exec(code, names)
    assert names["look"]() == "runs/api_key=***:2"


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions make no frames when they are asked for")
def test_no_garbage_collection_begins_while_frames_are_made() -> None:
    """Its finalizers would let the other thread go on, and frames vanish while they are made: that crashes Python."""
    code = """
import gc, sys, threading
from flatout.inside.stacks import lines_of
was_on = []
sys.addaudithook(lambda event, _: event == "sys._current_frames" and was_on.append(gc.isenabled()))
assert [code.co_name for code, _ in lines_of(threading.get_ident())][-1] == "<module>"
assert lines_of(1) == [] and gc.isenabled()
gc.disable()
lines_of(threading.get_ident())
print(was_on, gc.isenabled())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("[False, False, False] False\n", "")
