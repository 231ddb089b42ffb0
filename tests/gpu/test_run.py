"""`flatout run` on a real GPU: idle time, the X-ray, graph capture, the ceiling, and waits by their line."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout import trace
from flatout.diagnose.breakdown import UNSPLIT, Breakdown, breakdown
from flatout.feed import to_device
from flatout.trace import RankTrace

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "run"))


def observe(folder: Path, train: Any, *, xray: bool = False) -> RankTrace:
    with flatout.attach(folder, xray=xray):
        train()
        torch.cuda.synchronize()
    return trace.read(folder).ranks[0]


def heavy(model: Any, optimizer: Any, x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
    optimizer.zero_grad()
    for _ in range(times):
        loss = model(x).square().mean()
        loss.backward()
    optimizer.step()
    return loss


def made(width: int = 1024) -> tuple[Any, Any, torch.Tensor]:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), torch.randn(2048, width, device="cuda")


def part(b: Breakdown, name: str) -> tuple[float, float]:
    """Host and GPU-idle milliseconds of a phase, a step."""
    parts = [p for p in b.training if p.name == name]
    return sum(p.ms for p in parts) / b.steps, sum(p.gpu_idle_ms or 0.0 for p in parts) / b.steps


def test_the_gpu_is_idle_while_the_host_waits_for_data(tmp_path: Path) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.02)
            return super().__getitem__(index)

    model, optimizer, x = made(64)

    def train() -> None:
        for _ in DataLoader(Slow(torch.zeros(60, 1)), batch_size=1):
            heavy(model, optimizer, x[:8, :64])

    b = breakdown(observe(tmp_path, train))
    host, idle = part(b, "data")
    assert host > 15
    assert idle > 0.8 * host, "nothing was queued: all of the wait is idleness"


def test_a_wait_for_data_behind_queued_work_is_not_idleness(tmp_path: Path) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.01)
            return super().__getitem__(index)

    model, optimizer, x = made(2048)

    def train() -> None:
        for _ in DataLoader(Slow(torch.zeros(60, 1)), batch_size=1):
            heavy(model, optimizer, x, times=40)

    b = breakdown(observe(tmp_path, train))
    host, idle = part(b, "data")
    assert host > 8
    assert idle < 0.3 * host


def test_a_wait_is_named_by_its_line(tmp_path: Path) -> None:
    model, optimizer, x = made()

    def train() -> None:
        for _ in range(20):
            heavy(model, optimizer, x).item()  # the line

    rank = observe(tmp_path, train)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(n for n, text in enumerate(lines, start=1) if text.endswith("# the line"))
    places = {span.where for step in rank.steps for span in step.spans if span.name == "sync" and step.kind == "train"}
    assert {str(place).rpartition("/")[2] for place in places} == {f"{Path(__file__).name}:{number}"}


def test_a_wait_for_the_wire_is_a_copy_and_no_wait_of_the_scripts(tmp_path: Path) -> None:
    model, optimizer, _ = made()
    batch = torch.zeros(256 << 20, dtype=torch.uint8).pin_memory()  # 5 ms on the wire, for a step of less

    def train() -> None:
        for arrived in to_device([batch] * 60, "cuda"):
            heavy(model, optimizer, arrived[: 1024 * 1024].view(1024, 1024).float())

    b = breakdown(observe(tmp_path, train))
    assert part(b, "copy")[0] > 2
    assert part(b, "sync")[0] < 0.5


def test_copies_and_losses_are_seen_without_waiting(tmp_path: Path) -> None:
    model, optimizer, x = made()
    host = x.cpu()

    def train() -> None:
        for _ in range(40):
            heavy(model, optimizer, host.to("cuda"))

    rank = observe(tmp_path, train)
    steps = [step for step in rank.steps if step.kind == "train"]
    names = [{span.name for span in step.spans} for step in steps]
    assert all("copy" in here for here in names if UNSPLIT not in here)
    assert sum("copy" in here for here in names) >= 8
    losses = [step.loss for step in steps if step.loss is not None]
    assert losses
    assert all(loss > 0 for loss in losses)
    assert "sync" not in {span.name for step in steps for span in step.spans}


def test_the_x_ray_of_a_busy_gpu_says_busy_and_of_an_idle_one_idle(tmp_path: Path) -> None:
    model, optimizer, x = made(2048)

    def train(pause_s: float, times: int) -> None:
        start = time.monotonic()
        while time.monotonic() - start < 5.0:
            heavy(model, optimizer, x, times=times)
            if pause_s:
                torch.cuda.synchronize()
                time.sleep(pause_s)

    busy = observe(tmp_path / "busy", lambda: train(0.0, 8), xray=True).xray
    idle = observe(tmp_path / "idle", lambda: train(0.02, 1), xray=True).xray
    assert busy is not None
    assert idle is not None
    assert busy.busy_ms / busy.wall_ms > 0.85
    assert idle.busy_ms / idle.wall_ms < 0.5
    assert busy.kernels > 0
    assert sum(busy.idle_by_phase_ms.values()) + busy.busy_ms == pytest.approx(busy.wall_ms)


def test_the_users_own_profiler_comes_first(tmp_path: Path) -> None:
    model, optimizer, x = made()
    seen = []

    def train() -> None:
        start = time.monotonic()
        while time.monotonic() - start < 4.0:
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities, acc_events=True) as profile:
                heavy(model, optimizer, x)
            seen.append(len(profile.events()))

    observe(tmp_path, train, xray=True)
    assert all(seen)


def test_a_graph_capture_is_left_alone(tmp_path: Path) -> None:
    """GIVEN a whole step captured as a CUDA graph WHEN it is captured and replayed THEN the result is the same."""

    def train() -> float:
        torch.manual_seed(0)
        model, optimizer, _ = made(256)
        x = torch.randn(64, 256, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(12):
                heavy(model, optimizer, x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        return loss.item()

    bare = train()
    learned: list[float] = []
    observe(tmp_path, lambda: learned.append(train()))
    assert learned == [bare]


def test_batches_that_a_thread_page_locks_are_counted_once(tmp_path: Path) -> None:
    model, optimizer, _ = made(64)
    loader = DataLoader(TensorDataset(torch.randn(8000, 64)), batch_size=16, num_workers=2, pin_memory=True)

    def train() -> None:
        for (batch,) in loader:
            heavy(model, optimizer, batch.cuda(non_blocking=True))

    rank = observe(tmp_path, train)
    assert {step.samples for step in rank.steps if step.kind == "train"} == {16}
    assert sum(window.samples or 0 for window in rank.windows) == 16 * sum(w.wall_ms.count for w in rank.windows)


TRIAL = """
    import torch, time
    from torch.utils.data import DataLoader, Dataset
    class Slow(Dataset):
        def __len__(self):
            return 10_000
        def __getitem__(self, index):
            time.sleep(0.002)
            return torch.randn(256), torch.tensor(index % 10)
    model = torch.nn.Linear(256, 10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(Slow(), batch_size=8, pin_memory=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.cuda()), y.to("cuda")).backward()
        optimizer.step()
"""


def test_a_trial_finds_the_ceiling(tmp_path: Path) -> None:
    from observing import flatout_run, write

    write(tmp_path, train=TRIAL)
    run = flatout_run(tmp_path, sys.executable, "train.py", options=("--max-steps", "36"))
    assert run.code == 0, run.err
    kinds = [step.kind for step in run.observed.rank.steps]
    assert (kinds.count("train"), kinds.count("replay"), kinds.count("resident")) == (36, 12, 12)
    assert run.account is not None
    facts = run.account["facts"]
    assert facts["ceiling_samples_per_s"] > 3 * facts["samples_per_s"], "16 ms of loading are gone"
    assert run.account["xray"] is not None
    order = list(dict.fromkeys(kinds))
    assert order[-6:] == ["train", "xray", "after xray", "replay", "resident", "tail"]
    starting_s = sum(
        span.host_ms / 1e3
        for step in run.observed.rank.steps
        for span in step.spans
        if step.kind == "xray" and span.name == "flatout"
    )
    assert starting_s < 4.0, "torch's compiler is not loaded for it"


AHEAD = """
    import torch, time
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(4))).cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    batch = torch.rand(16384, 4096, dtype=torch.bfloat16)
    class Ready(torch.utils.data.Dataset):
        def __len__(self):
            return 10_000
        def __getitem__(self, index):
            return copied
    copied = batch.cuda()
    for number, x in enumerate(torch.utils.data.DataLoader(Ready(), batch_size=None)):
        if number in (20, 50):
            torch.cuda.synchronize()
            print("at", time.monotonic(), flush=True)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


def test_a_host_that_runs_ahead_is_not_taken_for_a_fast_gpu(tmp_path: Path) -> None:
    """GIVEN some 20 launches a step, whose queue would hold fifty steps WHEN the steps are measured, replayed and
    X-rayed THEN each takes as long as the GPU does."""
    from observing import flatout_run, write

    write(tmp_path, train=AHEAD)
    run = flatout_run(tmp_path, sys.executable, "train.py", options=("--max-steps", "120"))
    assert run.code == 0, run.err
    begin, end = (float(line.split()[1]) for line in run.out.splitlines() if line.startswith("at "))
    step_ms_on_gpu = (end - begin) / 30 * 1e3
    rank = run.observed.rank

    def median_ms(kind: str) -> float:
        walls = sorted(step.wall_ms for step in rank.steps if step.kind == kind)
        return walls[len(walls) // 2]

    assert median_ms("train") == pytest.approx(step_ms_on_gpu, rel=0.15)
    assert median_ms("replay") == pytest.approx(step_ms_on_gpu, rel=0.15)
    assert rank.xray is not None
    assert rank.xray.busy_ms / rank.xray.steps == pytest.approx(step_ms_on_gpu, rel=0.15)
    assert run.account is not None
    assert run.account["verdict"] == "compute.saturated"


def test_the_operations_of_a_step_are_counted_once_and_training_is_the_same(tmp_path: Path) -> None:
    """GIVEN products of known size, WHEN the run is recorded, THEN they are in its facts and change no weight."""

    def weights(folder: Path | None) -> tuple[torch.Tensor, RankTrace | None]:
        torch.manual_seed(0)
        model, optimizer, x = made()

        def train() -> None:
            for _ in range(6):
                heavy(model, optimizer, x)

        rank = observe(folder, train) if folder is not None else train()
        return model[0].weight.detach().clone(), rank

    bare, _ = weights(None)
    recorded, rank = weights(tmp_path / "run")
    assert torch.equal(bare, recorded)
    assert rank is not None
    assert rank.facts.step_flops == 3 * 4 * 2 * 2048 * 1024 * 1024
