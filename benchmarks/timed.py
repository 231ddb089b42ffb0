"""Runs a training script unchanged and times its steps: `python timed.py --out FILE --seconds 20 -- train.py ARGS`.

    DataLoader.__iter__, the iterator's __next__   how long the training process stands and waits for data
    Tensor.backward                                another batch has been learned from
    the global optimizer-step hook                 a step has ended: the host clock, and an event in the GPU's queue

Nothing waits for the GPU except once when the measured window opens and once when it closes. The window opens after a
warm-up; when it closes the figures are written and the process ends on the spot, in the middle of the script.
With `--supply` the script's first training loader is drained instead, and not one step is taken. With `--resident` the
first batches that flatout's engine has brought to the device are given to it over and over. With `--in-turns` it is fed
by its loader, from the device, and from the device while other processes make as many samples and hand them to nobody,
in turns of a second: a machine whose pace drifts is the same to all.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import mmap
import os
import random
import resource
import runpy
import signal
import statistics
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

WARM_UP_STEPS = 10
SETTLED_S, TURN_S = 0.4, 0.6  # of a turn: until batches that lay ready are used up; and what is measured
WARM_UP_S = 9.0  # after the first step, or as long as the window: batches that lay ready used up, loaders settled


class Window:
    """The stretch of a run that is measured."""

    def __init__(self, out: Path, seconds: float, epochs: int) -> None:
        self.out, self.seconds, self.epochs = out, seconds, epochs
        self.warm_up_s = min(WARM_UP_S, seconds)
        self.cuda = False  # known once the script has taken its first steps
        self.batch = 0  # samples in the batch fetched last
        self.steps_before = 0
        self.first_step_s: float | None = None
        self.last_step_s: float | None = None
        self.start_s: float | None = None
        self.start_cpu_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self.wait_s = self.pause_s = 0.0
        self.samples = self.epochs_begun = 0
        self.step_ends: list[Any] = []

    def install(self) -> None:
        """Hook torch's classes, so that loaders, tensors and optimizers made at any time are seen."""
        begin, fetch, backward = DataLoader.__iter__, _BaseDataLoaderIter.__next__, torch.Tensor.backward

        def timed_begin(loader: Any) -> Any:
            if torch.is_grad_enabled():
                self.epochs_begun += 1
                self.pause_s += time.monotonic() - (self.last_step_s or time.monotonic())
            return self._waited(begin, loader)

        def timed_fetch(iterator: Any) -> Any:
            batch = self._waited(fetch, iterator)
            if torch.is_grad_enabled():
                self.batch = samples_in(batch)
            return batch

        def counted_backward(tensor: Any, *args: Any, **kwargs: Any) -> None:
            self.samples += self.batch
            backward(tensor, *args, **kwargs)

        DataLoader.__iter__ = timed_begin
        _BaseDataLoaderIter.__next__ = timed_fetch
        torch.Tensor.backward = counted_backward
        register_optimizer_step_post_hook(self._step_ended)

    def _waited(self, call: Any, argument: Any) -> Any:
        """What `call` returns; its time is a wait for data while training, and part of a pause in an evaluation."""
        start = time.monotonic()
        try:
            return call(argument)
        finally:
            if torch.is_grad_enabled():
                self.wait_s += time.monotonic() - start

    def _step_ended(self, *_: Any) -> None:
        now = self.last_step_s = time.monotonic()
        if self.start_s is None:
            self.steps_before += 1
            self.first_step_s = self.first_step_s or now
            if self.steps_before >= WARM_UP_STEPS and now - self.first_step_s >= self.warm_up_s:
                self._open()
            return
        self.step_ends.append(self._mark())
        if now - self.start_s >= self.seconds and self.epochs_begun >= self.epochs:
            self.close()

    def _open(self) -> None:
        self._clear()
        self.cuda = torch.cuda.is_initialized()
        if self.cuda:
            torch.cuda.synchronize()
        self.start_s, self.start_cpu_s = time.monotonic(), time.process_time()
        self.step_ends.append(self._mark())

    def _mark(self) -> Any:
        if not self.cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def close(self) -> NoReturn:
        """Write the figures and end the process, whatever the script was about to do."""
        if self.start_s is None or len(self.step_ends) < 2:
            sys.exit(f"only {self.steps_before} steps: too few to measure")
        if self.cuda:
            torch.cuda.synchronize()
        end_s, own_cpu_s = time.monotonic(), time.process_time() - self.start_cpu_s
        ends = self.step_ends
        step_ms = [a.elapsed_time(b) if self.cuda else 1000 * (b - a) for a, b in itertools.pairwise(ends)]
        figures = {
            "start_s": self.start_s,
            "end_s": end_s,
            "samples": self.samples,
            "samples_per_s": self.samples / (end_s - self.start_s),
            "batch_size": self.batch,
            "step_ms": step_ms,
            "data_wait_share": self.wait_s / (end_s - self.start_s),
            "pause_share": self.pause_s / (end_s - self.start_s),  # between epochs: evaluation, checkpoint
            "epochs_begun": self.epochs_begun,
            "own_cores": own_cpu_s / (end_s - self.start_s),  # of the training process, its workers not counted
        }
        finish(self.out, figures)


class Turns:
    """Turns in one run: its loader's batches, and a few that are on the device already, over and over; those also while
    as many samples are made `beside` it, which is what any loader takes of the machine."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.seconds = out, seconds
        self.warm_up_s = min(WARM_UP_S, seconds)
        self.rates: dict[str, list[float]] = {"fed": [], "beside": [], "resident": []}
        self.turn = "fed"
        self.kept: list[Any] = []
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self.trained: Any = None  # the loader
        self.beside: Beside | None = None
        self.made_before = 0  # samples, beside it, before this turn was measured
        self.made_beside: list[float] = []  # a second, in each turn
        self.samples = self.steps = 0
        self.pause_s = 0.0  # between epochs: evaluation, checkpoint
        self.pauses_s: list[float] = []  # in each turn that was fed: only there do epochs end
        self.first_step_s: float | None = None
        self.last_step_s = self.turn_s = 0.0
        self.measured_s: float | None = None

    def install(self) -> None:
        """Hook torch's classes, as a `Window` does."""
        begin, fetch = DataLoader.__iter__, _BaseDataLoaderIter.__next__

        def begin_a_pass(loader: Any) -> Any:
            self.loaders.add(loader)
            if torch.is_grad_enabled():
                self.trained = loader
                self.pause_s += time.monotonic() - self.last_step_s
            return begin(loader)

        def fetch_or_give_a_kept_one(iterator: Any) -> Any:
            if not torch.is_grad_enabled():
                return fetch(iterator)
            if self.turn == "fed":
                batch = fetch(iterator)
                if len(self.kept) < 4:
                    self.kept.append(tree_map_only(torch.Tensor, _on_device, batch))
            else:
                batch = self.kept[self.steps % len(self.kept)]
            self.samples += samples_in(batch)
            return batch

        DataLoader.__iter__ = begin_a_pass
        _BaseDataLoaderIter.__next__ = fetch_or_give_a_kept_one
        register_optimizer_step_post_hook(self._step_ended)

    def _begin_turn(self) -> None:
        self.turn_s, self.measured_s = time.monotonic(), None

    def _step_ended(self, *_: Any) -> None:
        now = self.last_step_s = time.monotonic()
        self.steps += 1
        self.first_step_s = self.first_step_s or now
        measured_after_s = self.first_step_s + self.warm_up_s
        if now < measured_after_s:
            self._begin_turn()
        elif self.beside is None:
            self.beside = Beside(self.trained, self._hold_workers())
            self._begin_turn()
        elif self.measured_s is None and now - self.turn_s >= SETTLED_S:
            self._hold_workers()
            self.made_before = self.beside.made()
            self.measured_s, self.samples, self.pause_s = _all_done(), 0, 0.0
        elif self.measured_s is not None and now - self.measured_s >= TURN_S:
            seconds = _all_done() - self.measured_s
            self.rates[self.turn].append(self.samples / (seconds - self.pause_s))
            if self.turn == "fed":
                self.pauses_s.append(self.pause_s)
            elif self.turn == "beside":
                self.made_beside.append((self.beside.made() - self.made_before) / seconds)
            if self.turn == "resident" and now - measured_after_s >= self.seconds:
                self._finish(measured_after_s)
            self.turn = {"fed": "beside", "beside": "resident", "resident": "fed"}[self.turn]
            self.beside.make(statistics.median(self.rates["fed"]) if self.turn == "beside" else 0.0)
            self._begin_turn()

    def _hold_workers(self) -> int:
        """How many the training's loader has; all of flatout's keep theirs from now on: to them, turns look like a
        consumer of a third of the speed."""
        from flatout.feed.loader import feed_of

        for feed in filter(None, map(feed_of, self.loaders)):
            feed.resize(feed.workers, hold=True)
        trained = feed_of(self.trained)
        return trained.workers if trained is not None else self.trained.num_workers

    def _finish(self, start_s: float) -> NoReturn:
        fed, beside, resident = self.rates.values()
        figures = {
            "start_s": start_s,
            "end_s": time.monotonic(),
            "turns": self.rates,
            "pauses_s": self.pauses_s,
            "made_beside": self.made_beside,
            "shares": [one / other for one, other in zip(fed, resident, strict=True)],
            "shares_beside": [one / other for one, other in zip(fed, beside, strict=True)],
        }
        finish(self.out, figures | {"samples_per_s": statistics.median(fed)})


class Beside:
    """Processes that make samples of a loader's and hand them to nobody."""

    def __init__(self, loader: Any, processes: int) -> None:
        self._wanted = memoryview(mmap.mmap(-1, 8)).cast("d")  # samples a second of each
        self._made = memoryview(mmap.mmap(-1, 8 * max(1, processes))).cast("q")  # samples of each
        self._children = []
        for number in range(processes):
            child = os.fork()
            if child == 0:
                try:
                    self._make_for_ever(loader, number)
                finally:
                    os._exit(1)
            self._children.append(child)

    def make(self, samples_per_s: float) -> None:
        """So many, all together, from now on."""
        self._wanted[0] = samples_per_s / max(1, len(self._children))

    def made(self) -> int:
        """How many samples so far; none of the processes may have ended."""
        for child in self._children:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                raise RuntimeError("a process that was to make samples has ended")
        return sum(self._made)

    def _make_for_ever(self, loader: Any, number: int) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: with the training
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # as the feed's workers
        torch.set_num_threads(1)
        draw = random.Random(number)
        dataset, size = loader.dataset, loader.batch_size or loader.batch_sampler.batch_size
        due_s = time.monotonic()
        while True:
            if not self._wanted[0]:
                time.sleep(0.002)
                due_s = time.monotonic()
                continue
            loader.collate_fn([dataset[draw.randrange(len(dataset))] for _ in range(size)])
            self._made[number] += size
            due_s += size / self._wanted[0] if self._wanted[0] else 0.0
            time.sleep(max(0.0, due_s - time.monotonic()))


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cuda() if torch.cuda.is_initialized() else tensor


def _all_done() -> float:
    """When the GPU has done all that was queued: now."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.monotonic()


def drain(out: Path, seconds: float) -> None:
    """Make the first loader that a training iterates yield all it can, to nobody."""
    begin = DataLoader.__iter__

    def endless(loader: Any) -> Iterator[Any]:
        while True:
            yield from begin(loader)

    def drained(loader: Any) -> Any:
        if not torch.is_grad_enabled():
            return begin(loader)
        batches = endless(loader)
        next(batches)
        first_s = time.monotonic()
        while time.monotonic() - first_s < min(WARM_UP_S, seconds):
            next(batches)
        start_s, samples = time.monotonic(), 0
        while time.monotonic() - start_s < seconds:
            samples += samples_in(next(batches))
        end_s = time.monotonic()
        figures = {"start_s": start_s, "end_s": end_s, "samples": samples}
        return finish(out, figures | {"samples_per_s": samples / (end_s - start_s), "num_workers": loader.num_workers})

    DataLoader.__iter__ = drained


def keep_resident() -> None:
    """Give the engine batches that are on the device already."""
    from flatout.feed.device import OnDevice

    begin = OnDevice.__iter__

    def resident(batches: Any) -> Iterator[Any]:
        if not torch.is_grad_enabled():
            return begin(batches)
        return itertools.cycle(list(itertools.islice(begin(batches), 4)))

    OnDevice.__iter__ = resident  # type: ignore[method-assign]


def samples_in(batch: Any) -> int:
    """The length of the first tensor in a batch."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch)


def finish(out: Path, figures: dict[str, Any]) -> NoReturn:
    figures["peak_gpu_bytes"] = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    figures["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    part = out.with_name(out.name + ".part")
    part.write_text(json.dumps(figures))
    part.replace(out)
    for thing in gc.get_objects():  # a worker that is killed while it hands over a batch leaves that in /dev/shm
        if isinstance(thing, _MultiProcessingDataLoaderIter):
            thing._shutdown_workers()  # type: ignore[no-untyped-call]
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--epochs", type=int, default=0, help="keep the window open until so many epochs have begun")
    parser.add_argument("--supply", action="store_true")
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--in-turns", action="store_true")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    sys.argv = options.script[1:] if options.script[0] == "--" else options.script
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    window = Window(options.out, options.seconds, options.epochs)
    if options.supply:
        drain(options.out, options.seconds)
    elif options.in_turns:
        Turns(options.out, options.seconds).install()
    else:
        window.install()
    if options.resident:
        keep_resident()
    runpy.run_path(sys.argv[0], run_name="__main__")
    window.close()


if __name__ == "__main__":
    main()
