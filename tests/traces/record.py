"""Records the traces that the diagnosis is tested on: one real training a malady, and healthy ones.

    python tests/traces/record.py [NAME…] [--to FOLDER]     all that this machine is there for: without a GPU what
                                                            needs none, in ten minutes; with one the others, in three

A file is named MACHINE-CODE[-VARIANT].tgz, and CODE is the verdict it must get; one that got another ends in -unlike.
Each function below is a training with one fault, told in its docstring. A recording is kept only if what else ran on
the machine did not get in its way; as root it goes first.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import gzip
import io
import itertools
import json
import logging
import mmap
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch import nn
from torch.nn.functional import cross_entropy, ctc_loss, log_softmax, mse_loss
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

ROOT = Path(__file__).resolve().parents[2]
CLASSES = 10
SIDE = 16
STEPS = 160
OTHERS_CORES, DELAY = 0.2, 0.04  # so much beside a recording, or so much waiting for a core, spoils nothing
TRIES = 20
HEALTHY = "compute.saturated"
CARD = "cuda"
ROWS, WIDTH = 16384, 4096  # samples and features: in bf16 one product of these takes an H200 a millisecond
CLOSE_STEPS, PLAIN_STEPS = 60, 80  # so many raw steps of a training on a GPU stay in its recording

TRAININGS: dict[str, Callable[[], None]] = {}
HOW: dict[str, dict[str, Any]] = {}


def training(name: str, **how: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a training under the verdict it deserves.

    `how`: ranks, what runs beside it, its flags, its memory; how many `steps` to take of one that runs on a GPU.
    """

    def register(function: Callable[[], None]) -> Callable[[], None]:
        TRAININGS[name], HOW[name] = function, how
        return function

    return register


# -- parts -------------------------------------------------------------------------------------------------------------


class Packed(Dataset[Any]):
    """Pictures that have to be unpacked: a few milliseconds of CPU each, as a decoder takes."""

    def __init__(self, samples: int, kilobytes: int = 1200) -> None:
        self.samples = samples
        self.blob = zlib.compress(os.urandom(1 << 10) * kilobytes)

    def __len__(self) -> int:
        return self.samples

    def unpacked(self, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            pixels = zlib.decompress(self.blob)
        return torch.frombuffer(bytearray(pixels[: SIDE * SIDE]), dtype=torch.uint8).float() / 255

    def __getitem__(self, index: int) -> Any:
        return self.unpacked(), index % CLASSES


def ready(samples: int, features: int = SIDE * SIDE) -> TensorDataset:
    """Samples that are there already."""
    return TensorDataset(torch.rand(samples, features), torch.randint(0, CLASSES, (samples,)))


def quick() -> nn.Module:
    """A model that takes next to no time."""
    return nn.Linear(SIDE * SIDE, CLASSES)


def thorough(width: int = 2048) -> nn.Module:
    """A model whose step takes some 30 ms on one core."""
    return nn.Sequential(
        nn.Linear(SIDE * SIDE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def train(
    model: nn.Module,
    loader: Any,
    steps: int = STEPS,
    *,
    after_step: Callable[[int, nn.Module], None] = lambda step, model: None,
    after_epoch: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    """A plain loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while step < steps:
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            after_step(step, model)
            if step == steps:
                break
        after_epoch(model)


# -- data --------------------------------------------------------------------------------------------------------------


@training("data.main-thread")
def loads_in_the_training_process() -> None:
    """num_workers=0, and pictures to unpack."""
    train(thorough(1024), DataLoader(Packed(4000), batch_size=32, shuffle=True))


@training("data.too-few-workers")
def fetches_one_by_one() -> None:
    """One worker asks a server for each sample, and the server takes 4 ms to answer: nobody is busy."""
    with _server(delay_s=0.004) as address:
        train(quick(), DataLoader(Fetched(4000, address), batch_size=16, num_workers=1))


class Fetched(Packed):
    def __init__(self, samples: int, address: str) -> None:
        super().__init__(samples, kilobytes=4)
        self.address = address

    def __getitem__(self, index: int) -> Any:
        with urllib.request.urlopen(f"{self.address}/{index}") as answer:
            answer.read()
        return self.unpacked(), index % CLASSES


@contextlib.contextmanager
def _server(delay_s: float) -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(delay_s)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 100)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        serving = multiprocessing.Process(target=server.serve_forever, daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        serving.terminate()
        serving.join()


@training("data.too-many-workers")
def crowds_the_cores() -> None:
    """Eight workers a core."""
    workers = 8 * len(os.sched_getaffinity(0))
    train(quick(), DataLoader(Packed(100_000), batch_size=16, num_workers=workers), 240)


@training("data.cpu-bound")
def unpacks_on_every_core() -> None:
    """As many workers as cores, each busy unpacking."""
    workers = len(os.sched_getaffinity(0))
    train(quick(), DataLoader(Packed(100_000), batch_size=32, num_workers=workers))


@training("data.disk-bound")
def reads_what_is_not_in_memory() -> None:
    """Four workers read records of 4 MiB at random places of a large file, past the page cache."""
    with tempfile.NamedTemporaryFile(dir=Path.cwd()) as file:
        for _ in range(OnDisk.RECORDS):
            file.write(os.urandom(OnDisk.BYTES))
        file.flush()
        os.fsync(file.fileno())
        train(quick(), DataLoader(OnDisk(Path(file.name)), batch_size=16, num_workers=4))


class OnDisk(Packed):
    RECORDS, BYTES = 512, 4 << 20

    def __init__(self, path: Path) -> None:
        super().__init__(100_000, kilobytes=4)
        self.file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.buffer = mmap.mmap(-1, self.BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __getitem__(self, index: int) -> Any:
        os.preadv(self.file, [self.buffer], index * 7919 % self.RECORDS * self.BYTES)
        return self.unpacked(), index % CLASSES


@training("data.slow-samples")
def holds_a_few_giants() -> None:
    """One sample in a hundred is sixty times as large as the others."""
    train(quick(), DataLoader(Giants(40_000, kilobytes=400), batch_size=64, num_workers=1, shuffle=True), 240)


class Giants(Packed):
    def __getitem__(self, index: int) -> Any:
        return self.unpacked(60 if index % 100 == 0 else 1), index % CLASSES


@training("data.collate-bound")
def pads_in_python() -> None:
    """Samples come at once; a collate function of the user's own fills the batch number by number."""
    train(quick(), DataLoader(ready(20_000), batch_size=32, num_workers=1, collate_fn=padded))


def padded(samples: list[Any]) -> Any:
    batch = torch.zeros(len(samples), SIDE * SIDE)
    for row, (x, _) in enumerate(samples):
        for column in range(0, SIDE * SIDE, 2):
            batch[row, column] = x[column]
    return batch, torch.stack([y for _, y in samples])


@training("data.worker-start")
def starts_again_and_again() -> None:
    """Two workers are started for each short epoch."""
    train(thorough(1024), DataLoader(ready(640), batch_size=64, num_workers=2), 300)


@training("data.few-shards")
def reads_one_shard() -> None:
    """Four workers, and a stream with one shard: three of them have nothing to do."""
    train(quick(), DataLoader(Shards(20_000, shards=1), batch_size=16, num_workers=4))


class Shards(IterableDataset[Any]):
    """Each worker reads every n-th shard; a sample comes after 2 ms."""

    def __init__(self, samples: int, shards: int) -> None:
        self.samples = samples
        self.shards = shards

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        for _ in range(worker.id, self.shards, worker.num_workers):
            for index in range(self.samples):
                time.sleep(0.002)
                yield torch.rand(SIDE * SIDE), index % CLASSES


# -- the script's own code ---------------------------------------------------------------------------------------------


@training("host.python")
def counts_in_python() -> None:
    """After each step a confusion matrix is filled number by number."""

    def confusion(step: int, model: nn.Module) -> None:
        table = [[0] * CLASSES for _ in range(CLASSES)]
        for place in range(60_000):
            table[place % CLASSES][place // CLASSES % CLASSES] += 1

    train(thorough(1024), DataLoader(ready(4000), batch_size=64), after_step=confusion)


@training("drift.slower")
def adds_up_all_losses() -> None:
    """A list of all there was so far is sorted after each step."""
    everything: list[float] = []

    def add_up(step: int, model: nn.Module) -> None:
        everything.extend(torch.rand(3000).tolist())
        sorted(everything, key=lambda value: -value)

    train(thorough(1024), DataLoader(ready(4000), batch_size=64), 240, after_step=add_up)


# -- pauses ------------------------------------------------------------------------------------------------------------


@training("pause.eval")
def evaluates_all_the_time() -> None:
    """A look at a large validation set after each short epoch."""
    validation = DataLoader(ready(4000), batch_size=64)

    def evaluate(model: nn.Module) -> None:
        model.eval()
        with torch.no_grad():
            for x, y in validation:
                cross_entropy(model(x), y)

    train(thorough(), DataLoader(ready(2000), batch_size=64), 300, after_epoch=evaluate)


@training("pause.checkpoint")
def saves_all_the_time() -> None:
    """The model is saved every few steps."""

    def save(step: int, model: nn.Module) -> None:
        if step % 4 == 0:
            torch.save(model.state_dict(), "model.pt")

    train(thorough(), DataLoader(ready(4000), batch_size=64), 300, after_step=save)


@training("pause.logging")
def logs_all_the_time() -> None:
    """Each step writes a thousand lines into a log file."""
    logger = logging.getLogger("train")
    logger.addHandler(logging.FileHandler("train.log"))
    logger.setLevel(logging.INFO)

    def log(step: int, model: nn.Module) -> None:
        for row in range(1000):
            logger.info("step %d row %d", step, row)

    train(thorough(), DataLoader(ready(4000), batch_size=64), 80, after_step=log)


@training("pause.gc")
def collects_each_step() -> None:
    """gc.collect() after each step, beside a large table of Python objects."""
    table = [{"index": index} for index in range(200_000)]
    train(thorough(), DataLoader(ready(4000), batch_size=64), 200, after_step=lambda step, model: gc.collect() and None)
    assert table


# -- the machine, ranks, settings --------------------------------------------------------------------------------------


@training("hardware.shared", beside=2)
def has_company() -> None:
    """Nothing is wrong with it, but two other programs compute on the same cores."""
    train(thorough(), DataLoader(ready(4000), batch_size=64), 300)


@training("memory.host", memory_bytes=1 << 30)
def fills_the_memory() -> None:
    """The dataset keeps more and more in memory, until the container's limit is near."""
    from flatout.sample.budget import CgroupFiles

    hoard: list[bytearray] = []
    group = CgroupFiles()

    def keep(step: int, model: nn.Module) -> None:
        limit, used = group.memory() or (0, 0)
        if used < 0.97 * limit:
            hoard.append(bytearray(os.urandom(16 << 20)))

    train(thorough(), DataLoader(ready(4000), batch_size=64), 300, after_step=keep)


@training("dist.straggler", ranks=2)
def waits_for_one_rank() -> None:
    """Two ranks; the second has samples that take five times as long to unpack."""
    torch.distributed.init_process_group("gloo")
    times = 5 if torch.distributed.get_rank() == 1 else 1
    model = nn.parallel.DistributedDataParallel(thorough(1024))
    train(model, DataLoader(Uneven(8000, times), batch_size=16))
    torch.distributed.destroy_process_group()


@training("dist.comm", ranks=2)
def exchanges_more_than_it_computes() -> None:
    """Two ranks; a large table of weights, few samples a step: its gradients take longer to send than to compute."""
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(thorough(4096))
    train(model, DataLoader(ready(4000), batch_size=2), 100)
    torch.distributed.destroy_process_group()


class Uneven(Packed):
    def __init__(self, samples: int, times: int) -> None:
        super().__init__(samples, kilobytes=400)
        self.times = times

    def __getitem__(self, index: int) -> Any:
        return self.unpacked(self.times), index % CLASSES


@training("config.ignored", flags=("--compile",))
def asks_for_what_never_happens() -> None:
    """--compile is read, and nothing is compiled."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.parse_args(sys.argv[3:])
    train(thorough(), DataLoader(ready(4000), batch_size=64), 300)


# -- healthy -----------------------------------------------------------------------------------------------------------


@training("compute.saturated-plain")
def computes() -> None:
    """A plain loop over data that is there, in the training process."""
    train(thorough(), DataLoader(ready(4000), batch_size=64, shuffle=True), 300)


@training("compute.saturated-fed")
def is_fed() -> None:
    """One worker unpacks faster than the model learns; an evaluation and a checkpoint at the end."""
    model = thorough(5000)
    train(model, DataLoader(Packed(40_000, kilobytes=100), batch_size=64, num_workers=1), 60)
    torch.save(model.state_dict(), "model.pt")


@training("compute.saturated-convolutions")
def convolves() -> None:
    """Convolutions, batch norm, a loss printed now and then."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)), nn.Conv2d(1, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip
    data = DataLoader(ready(8000), batch_size=128, shuffle=True)
    train(model, data, 120, after_step=lambda step, model: print(step) if step % 50 == 0 else None)


@training("compute.saturated-accumulation")
def accumulates() -> None:
    """A recurrent net, four micro-steps to a step, gradients clipped."""
    recurrent, head = nn.LSTM(SIDE, 512, batch_first=True), nn.Linear(512, CLASSES)
    parameters = [*recurrent.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for number, (x, y) in enumerate(DataLoader(ready(10_000), batch_size=32)):
        hidden, _ = recurrent(x.unflatten(1, (SIDE, SIDE)))
        (cross_entropy(head(hidden[:, -1]), y) / 4).backward()
        if number % 4 == 3:
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()


@training("compute.saturated-two-models")
def plays_against_itself() -> None:
    """A GAN: two models, two optimizers, no loader."""
    maker = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, SIDE * SIDE))
    judge = nn.Sequential(nn.Linear(SIDE * SIDE, 1024), nn.ReLU(), nn.Linear(1024, 1))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-4) for model in (judge, maker)]
    for _ in range(300):
        real, made = torch.rand(128, SIDE * SIDE), maker(torch.randn(128, 32))
        optimizers[0].zero_grad()
        (mse_loss(judge(real), torch.ones(128, 1)) + mse_loss(judge(made.detach()), torch.zeros(128, 1))).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        mse_loss(judge(made), torch.ones(128, 1)).backward()
        optimizers[1].step()


# -- on a GPU: parts --------------------------------------------------------------------------------------------------


class Batches(Dataset[Any]):
    """Batches that lie ready in memory, given out in turn."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        return self.batches[index % len(self.batches)]


def handed_out(batches: list[Any]) -> DataLoader[Any]:
    """A loader that has nothing to do."""
    return DataLoader(Batches(batches), batch_size=None, collate_fn=lambda batch: batch)


def loaded(data: Dataset[Any], batch_size: int) -> DataLoader[Any]:
    """A loader as it should be."""
    sampler = RandomSampler(data, replacement=True, num_samples=1_000_000)  # type: ignore[arg-type]
    return DataLoader(data, batch_size, sampler=sampler, num_workers=4, pin_memory=True, persistent_workers=True)


def on_the_gpu(rows: int = ROWS, features: int = WIDTH, dtype: torch.dtype = torch.bfloat16) -> Any:
    """One batch that is on the GPU already, again and again."""
    x = torch.rand(rows, features, device=CARD, dtype=dtype)
    return itertools.repeat((x, torch.randint(0, CLASSES, (rows,), device=CARD)))


def products(depth: int, features: int = WIDTH, width: int = WIDTH, active: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Large matrix products in bf16, and little else."""
    sizes = [features, *[width] * depth]
    with torch.device(CARD):
        layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b, bias=False), active())]
        return nn.Sequential(*layers, nn.Linear(width, CLASSES, bias=False)).bfloat16()


def convolutions(depth: int = 6, channels: int = 256) -> nn.Module:
    """Convolutions in bf16, and little else."""
    layers = [
        layer
        for number in range(depth)
        for layer in (nn.Conv2d(channels if number else 3, channels, 3, padding=1, bias=False), nn.ReLU(inplace=True))
    ]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
    return nn.Sequential(*layers, *tail).to(CARD, torch.bfloat16)


def learn(model: nn.Module, batches: Iterable[Any], optimizer: torch.optim.Optimizer | None = None) -> None:
    """A plain loop with a fused optimizer. `flatout run --max-steps` ends it."""
    optimizer = optimizer or fused(model)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


# -- on a GPU: copies, and waiting for it -----------------------------------------------------------------------------


@training("copy.pageable", steps=200)
def copies_from_ordinary_memory() -> None:
    """Batches of 64 MB go to the GPU from memory that is not page-locked."""
    batches = [(torch.rand(ROWS, WIDTH // 4), torch.randint(0, CLASSES, (ROWS,))) for _ in range(4)]
    learn(
        products(3, features=WIDTH // 4),
        ((x.to(CARD).bfloat16(), y.to(CARD)) for x, y in handed_out(batches)),
    )


@training("copy.blocking", steps=350)
def waits_for_each_copy() -> None:
    """Page-locked batches of 128 MB, but each copy is waited for, and the GPU computes nothing meanwhile."""
    x, y = torch.rand(ROWS, WIDTH // 2).pin_memory(), torch.randint(0, CLASSES, (ROWS,)).pin_memory()
    learn(
        products(2, features=WIDTH // 2),
        ((x.to(CARD).bfloat16(), y.to(CARD)) for x, y in handed_out([(x, y)])),
    )


@training("copy.fragmented", steps=500)
def copies_column_by_column() -> None:
    """A table of 600 columns, page-locked, and each column goes to the GPU by itself."""
    batches = [
        (list(torch.rand(600, ROWS).pin_memory()), torch.randint(0, CLASSES, (ROWS,)).pin_memory()) for _ in range(4)
    ]

    def joined(columns: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([column.to(CARD, non_blocking=True) for column in columns]).T.bfloat16()

    learn(
        products(3, features=600, width=WIDTH // 2),
        ((joined(columns), y.to(CARD, non_blocking=True)) for columns, y in handed_out(batches)),
    )


@training("sync.item", steps=450)
def reads_each_error_back() -> None:
    """Before backward, the error of each output is read back for a running median: meanwhile the GPU stands still."""
    model, past = products(3), [[float(n * 7919 % 1000) for n in range(1000)] for _ in range(CLASSES)]
    optimizer = fused(model)
    for x, _ in on_the_gpu(rows=ROWS // 2):
        optimizer.zero_grad()
        errors = (model(x) - 1).square().mean(0)
        for error, seen in zip(errors, past, strict=True):
            seen[:] = [*seen[1:], error.item()]
            statistics.median(seen)
        errors.mean().backward()
        optimizer.step()


# -- on a GPU: computing ----------------------------------------------------------------------------------------------


@training("compute.precision", steps=90)
def multiplies_in_full_precision() -> None:
    """Large products in fp32, and TF32 is off, as it is unless one asks for it."""
    learn(products(4).float(), on_the_gpu(rows=ROWS // 4, dtype=torch.float32))


@training("compute.layout", steps=250)
def convolves_channels_first() -> None:
    """Convolutions in NCHW: the tensor cores want NHWC, so that each turns its data around and back."""
    pictures = torch.rand(256, 3, 28, 28, device=CARD, dtype=torch.bfloat16)
    learn(convolutions(), itertools.repeat((pictures, torch.randint(0, CLASSES, (256,), device=CARD))))


@training("compute.optimizer", steps=150)
def updates_one_by_one() -> None:
    """400 million parameters, a small batch, and AdamW goes through them tensor by tensor, operation by operation."""
    model = products(24).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    for x, y in on_the_gpu(rows=ROWS // 16):
        optimizer.zero_grad()
        with torch.autocast(CARD, torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@training("compute.eager", steps=300)
def activates_in_nine_kernels() -> None:
    """An activation written out: each of its operations reads and writes all of the data."""
    learn(products(2, active=WrittenOut), on_the_gpu())


class WrittenOut(nn.Module):
    """GELU, as its paper approximates it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


# -- on a GPU: its memory ---------------------------------------------------------------------------------------------


@training("memory.underused", steps=600)
def takes_small_batches() -> None:
    """Speech: the loss goes through each recording step by step, so that 16 at a time keep a few processors busy."""
    length, features, letters, words = 1500, 20, 32, 100
    data = TensorDataset(torch.rand(1000, length, features), torch.randint(1, letters, (1000, words)))
    model = nn.Sequential(nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, letters))
    optimizer = fused(model.to(CARD))
    for x, y in loaded(data, 16):
        optimizer.zero_grad()
        with torch.autocast(CARD, torch.bfloat16):
            said = model(x.to(CARD, non_blocking=True))
        likely = log_softmax(said.float(), -1).transpose(0, 1)
        lengths = torch.full((len(x),), length), torch.full((len(x),), words)
        ctc_loss(likely, y.to(CARD, non_blocking=True), *lengths).backward()
        optimizer.step()


@training("memory.pressure", steps=120)
def fills_the_gpu() -> None:
    """Batches sorted by length, each a little longer than the last, on a GPU with room for a quarter more than the
    longest takes: what was freed never fits what comes next, and is given back to make room."""
    narrow, wide = WIDTH // 2, 2 * WIDTH
    with torch.device(CARD):
        layers = [
            layer
            for _ in range(4)
            for layer in (nn.Linear(narrow, wide, bias=False), nn.GELU(), nn.Linear(wide, narrow, bias=False))
        ]
        model = nn.Sequential(*layers, nn.Linear(narrow, CLASSES)).bfloat16()
    optimizer, longest = fused(model), ROWS // 2
    x, y = next(on_the_gpu(longest, narrow))
    learn(model, [(x, y)] * 2, optimizer)
    room_bytes = 1.25 * torch.cuda.max_memory_allocated()
    torch.cuda.set_per_process_memory_fraction(room_bytes / torch.cuda.get_device_properties(CARD).total_memory)

    def by_length() -> Iterator[Any]:
        while True:
            torch.cuda.empty_cache()
            yield from ((x[:rows], y[:rows]) for rows in range(longest // 2, longest + 1, longest // 64))

    learn(model, by_length(), optimizer)


# -- on a GPU: healthy ------------------------------------------------------------------------------------------------


@training("compute.saturated-products", steps=200)
def multiplies() -> None:
    """Large products of data that is on the GPU: as much as its power allows."""
    learn(products(4), on_the_gpu())


@training("compute.saturated-pictures", steps=300)
def convolves_channels_last() -> None:
    """Convolutions in NHWC, fed with bytes by four workers."""
    data = TensorDataset(
        torch.randint(0, 256, (4000, 3, 28, 28), dtype=torch.uint8), torch.randint(0, CLASSES, (4000,))
    )

    def pictures(x: torch.Tensor) -> torch.Tensor:
        x = x.to(CARD, non_blocking=True)
        return x.to(torch.bfloat16, memory_format=torch.channels_last) / 255

    learn(
        convolutions().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        ((pictures(x), y.to(CARD, non_blocking=True)) for x, y in loaded(data, 256)),
    )


@training("compute.saturated-tokens", steps=90)
def attends() -> None:
    """A transformer in bf16, fed with 16 texts of 1,024 tokens by four workers."""
    features, vocabulary = WIDTH // 2, 2 * WIDTH
    with torch.device(CARD):
        layer = nn.TransformerEncoderLayer(
            features, 16, 4 * features, dropout=0.0, activation="gelu", batch_first=True, norm_first=True, bias=False
        )
        model = nn.Sequential(
            nn.Embedding(vocabulary, features),
            nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
            nn.Linear(features, vocabulary, bias=False),
            nn.Flatten(0, 1),
        ).bfloat16()
    texts = TensorDataset(torch.randint(0, vocabulary, (2000, 1024)))
    batches = (x.to(CARD, non_blocking=True) for (x,) in loaded(texts, 16))
    learn(model, ((x, x.flatten()) for x in batches))


# -- recording ---------------------------------------------------------------------------------------------------------


def main() -> None:
    gpu = gpu_here()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [name for name in TRAININGS if needs_gpu(name) == (gpu is not None)]
    parser.add_argument("names", nargs="*", metavar="NAME", default=here)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, metavar="FOLDER")
    options = parser.parse_args()
    options.to.mkdir(exist_ok=True)
    for name in options.names:
        if needs_gpu(name) and gpu is None:
            print(f"{name}: skipped, it needs a GPU")
        elif not any(recorded(name, gpu or "cpu", options.to) for _ in range(1 if needs_gpu(name) else TRIES)):
            print(f"{name}: not recorded", flush=True)


def needs_gpu(name: str) -> bool:
    return "steps" in HOW[name]


def gpu_here() -> str | None:
    """This machine's GPU in a word. The driver is asked: torch would stay on the GPU, as company."""
    try:
        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:
        return None
    return str(name).lower().split()[-1].partition("-")[0]


def recorded(name: str, machine: str, to: Path) -> bool:
    """Record one training; False if it failed, or something else got in its way."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        folder = Path(scratch, "trace")
        try:
            record(name, Path(scratch))
        except subprocess.CalledProcessError as problem:
            print(f"{name}: ended with exit code {problem.returncode}", flush=True)
            return False
        if needs_gpu(name):
            thin(folder)
        others, delay, found = look_at(folder)
        codes = [code for code, _, _ in found]
        like = codes == [HEALTHY] if name.startswith(HEALTHY) else codes[:1] == [name]
        kept = others < OTHERS_CORES or delay < DELAY or "beside" in HOW[name] or needs_gpu(name)
        said = ", ".join(f"{code} {share:.0%} up to {gain:.2f}x" for code, share, gain in found[:3]) or "nothing"
        beside = f"others {others:.2f} cores, {delay=:.3f}, {kept=}"
        unlike = "" if like else "UNLIKE "
        print(f"{name}: {unlike}{said}; {time.monotonic() - began_s:.1f} s, {beside}", flush=True)
        if kept:
            pack(folder, to / f"{machine}-{name}{'-unlike' if unlike else ''}.tgz")
    return kept


def record(name: str, folder: Path) -> None:
    """Run one training under `flatout run`."""
    how = HOW[name]
    script = [str(Path(__file__).resolve()), "--train", name, *how.get("flags", ())]
    launcher = [sys.executable]
    if "ranks" in how:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(how["ranks"])]
    flatout = [sys.executable, "-m", "flatout", "run", "--quiet", "--trace", "trace"]
    flatout += ["--max-steps", str(how["steps"])] if needs_gpu(name) else []
    command = [*flatout, "--", *launcher, *script]
    path = [ROOT / "src", *(Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(":") if entry)]
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, path)), "OMP_NUM_THREADS": "1"}
    with company(how.get("beside", 0)), limited(how.get("memory_bytes")) as group:
        enter = functools.partial(enter_group, group)
        subprocess.run(
            command,
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
            preexec_fn=enter,
            start_new_session=True,
        )


def enter_group(group: Path | None) -> None:
    """Between fork and exec."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def go_first() -> None:
    """Go before what else runs on this machine: the processes of this session, the kernel's way (Linux, as root)."""
    if os.geteuid() == 0:
        Path("/proc/self/autogroup").write_text("-15")


@contextlib.contextmanager
def company(count: int) -> Iterator[None]:
    """Other programs that compute meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in busy:
            program.kill()
            program.wait()


@contextlib.contextmanager
def limited(most_bytes: int | None) -> Iterator[Path | None]:
    """A control group with this much memory (as root, cgroup v1)."""
    if most_bytes is None:
        yield None
        return
    group = Path(f"/sys/fs/cgroup/memory/flatout-record-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(most_bytes))
        yield group
    finally:
        group.rmdir()


def look_at(folder: Path) -> tuple[float, float, list[tuple[str, float, float]]]:
    """How many cores were busy with something else, how much the training waited for one, and what is found in it."""
    sys.path.insert(0, str(ROOT / "src"))
    from flatout import trace
    from flatout.diagnose.rank_metrics import metrics_of
    from flatout.diagnose.rules import diagnose

    recorded = trace.read(folder)
    found = [(finding.code, finding.share, finding.gain_high) for finding in diagnose(recorded)]
    machine = metrics_of(recorded)[0].machine
    return machine.cores_others or 0.0, machine.trainer_delay or 0.0, found


def thin(folder: Path) -> None:
    """Leave a few raw steps of plain training, with events and without; the windows over all of them stay. Of what each
    worker reports the last counts."""
    for path in folder.glob("rank-*.jsonl"):
        close, plain = 0, 0
        lines = []
        for line in path.read_text().splitlines(keepends=True):
            record = json.loads(line)
            if record["record"] == "step" and record.get("kind", "train") == "train":
                is_close = any("gpu_busy_ms" in span for span in record["spans"])
                close, plain = close + is_close, plain + (not is_close)
                if (close > CLOSE_STEPS) if is_close else (plain > PLAIN_STEPS):
                    continue
            lines.append(line)
        path.write_text("".join(lines))
    for path in folder.glob("workers-*.jsonl"):
        last = {json.loads(line).get("pid"): line for line in path.read_text().splitlines(keepends=True)}
        path.write_text("".join(last.values()))


def pack(folder: Path, target: Path) -> None:
    """The records alone, without what they say of this machine's name and paths; the same bytes each time."""
    hidden = {str(folder.parent): "run", str(ROOT): "flatout", sys.prefix: "venv", socket.gethostname(): "machine"}
    words = {re.compile(rf"(?<!\w){re.escape(word)}(?!\w)"): instead for word, instead in hidden.items()}
    with gzip.GzipFile(target, "wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for path in sorted(folder.glob("*.jsonl")):
            text, name = path.read_text(), path.name
            for word, instead in words.items():
                text, name = word.sub(instead, text), word.sub(instead, name)
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if "beside" not in HOW[sys.argv[2]] and not needs_gpu(sys.argv[2]):
            go_first()
        TRAININGS[sys.argv[2]]()
    else:
        main()
