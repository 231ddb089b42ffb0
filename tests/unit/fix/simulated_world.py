"""A training that is not there: what its steps take, and what each change does to them, is written down here.

`World` stands in for the launcher, with a clock of its own, so that a whole fix takes milliseconds and its right
answer is known.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flatout.fix.runs import CEILING, ProofRun, ProofStep, Run
from flatout.fix.speed import measure
from flatout.launch import launcher
from flatout.launch.protocol import Trial
from flatout.model.plan import Change
from flatout.model.records import AppliedChange, SettingsRead
from flatout.model.stats import Gain
from flatout.model.turns import PAYS, TurnsResult
from flatout.trace import (
    Facts,
    GpuSample,
    HostSample,
    RankTrace,
    RunInfo,
    Sample,
    Sketch,
    Span,
    Step,
    Trace,
    WorkerReport,
    Xray,
)
from flatout.trace.downsample import window_of
from flatout.trace.reader import from_json

START_S = 10.0


@dataclass
class Machine:
    """One run's figures, before the changes have their effect."""

    batch: int = 64
    data_ms: float = 0.0
    compute_ms: float = 20.0
    busy: float = 0.95  # of the compute time, the GPU's part
    late: float = 0.0  # of the compute time, what the GPU waits for launches
    eval_s: float = 0.0
    eval_every: int = 1  # epochs
    eval_first: bool = False  # after the first of them in any case
    eval_knob: bool = True  # does what it says
    extra_start_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def _elastic(m: Machine) -> Machine:
    return replace(m, data_ms=0.02 * m.data_ms)


def _batch(m: Machine, value: int) -> Machine:
    """Launches are the cost: a larger batch takes hardly longer."""
    times = value / m.batch
    return replace(m, batch=value, compute_ms=m.compute_ms * (1 + 0.1 * (times - 1)), data_ms=m.data_ms * times)


EFFECTS: dict[str, Callable[[Machine, Any], Machine]] = {
    "loader": lambda m, _: _elastic(m),
    "num_workers": lambda m, _: replace(m, data_ms=0.1 * m.data_ms),
    "precision": lambda m, _: replace(m, compute_ms=m.compute_ms / 2),
    "compile": lambda m, _: replace(m, compute_ms=m.compute_ms / 1.25, extra_start_s=25.0),
    "batch_size": _batch,
    "eval_interval": lambda m, value: replace(m, eval_every=value if m.eval_knob else 1),
}


@dataclass
class World:
    """Runs a plan: `effects` of changes, and those that `crash`, `hang` or are `refused`."""

    machine: Machine = field(default_factory=Machine)
    length: int = 100_000
    workers: int = 8
    settings: list[SettingsRead] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    xray: dict[str, Any] = field(default_factory=dict)
    effects: dict[str, Callable[[Machine, Any], Machine]] = field(default_factory=lambda: dict(EFFECTS))
    crash: dict[str, str] = field(default_factory=dict)
    hang: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    step_noise: float = 0.01
    run_noise: float = 0.003
    cpu_pct: float = 40.0
    host_gib: int = 2  # of memory that a run takes
    seed: int = 0
    drift_a_run: float = 0.0
    teaches: Callable[[Sequence[Change], np.ndarray], np.ndarray] = lambda changes, losses: losses
    interrupt_at: int | None = None
    clock_s: float = 0.0
    started: list[tuple[str, ...]] = field(default_factory=list)
    compiled: set[int] = field(default_factory=set)  # for these batches: later runs find most of it in a cache

    def clock(self) -> float:
        return self.clock_s

    def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
        return self._run(changes, steps, trial)

    def _run(self, changes: Sequence[Change], steps: int, trial: Trial, *, fingerprints: bool = False) -> Run:
        if self.interrupt_at == len(self.started):
            raise KeyboardInterrupt
        names = tuple(change.name for change in changes)
        self.started.append(names)
        self._random = np.random.default_rng(len(self.started) + 1000 * self.seed)
        hung = self.hang & set(names)
        crashed = next((text for name, text in self.crash.items() if name in names), None)
        m = self.machine
        for change in changes:
            if change.name in self.effects and change.name not in (*self.refused, *trial.turns):
                m = self.effects[change.name](m, change.value)
        m, turns = self._in_turns(m, {change.name: change for change in changes}, trial.turns)
        if hung or crashed:
            self.clock_s += (trial.timeout_s or 0.0) if hung else START_S
            code, seconds = launcher.TIMED_OUT if hung else 1, trial.timeout_s or 0.0
            return Run(changes=tuple(changes), code=code, seconds=seconds, output=crashed or "", turns=turns)
        look_below_s = trial.look_below_s
        slow = math.ceil(trial.enough_s * 1e3 / (m.data_ms + m.compute_ms)) if trial.enough_s < math.inf else steps
        steps = min(steps, max(slow, 3))
        trace = self._trace(m, steps)
        while sum(step.wall_ms for step in trace.ranks[0].steps if step.kind == "train") < trial.at_least_s * 1e3:
            steps *= 2
            trace = self._trace(m, steps)
        if look_below_s is not None and m.data_ms + m.compute_ms >= 1e3 * look_below_s:
            trace = _without_a_look(trace)
        extra_s = m.extra_start_s / (3 if m.batch in self.compiled else 1)
        if "compile" in names:
            self.compiled.add(m.batch)
        seconds = START_S + extra_s + sum(step.wall_ms for step in trace.ranks[0].steps) / 1e3
        seconds += sum(result.seconds for result in turns)
        self.clock_s += seconds
        return Run(
            changes=tuple(changes),
            code=0,
            seconds=seconds,
            asked=steps,
            trace=trace,
            speed=measure(trace),
            applied={
                name: AppliedChange(name=name, applied=True, how=f"{name} was made")
                for name in names
                if name not in self.refused
            },
            refused={name: why for name, why in self.refused.items() if name in names},
            proof=(self._proof(changes, steps),) if fingerprints else (),
            turns=turns,
        )

    def _in_turns(
        self, m: Machine, changes: dict[str, Change], names: tuple[str, ...]
    ) -> tuple[Machine, tuple[TurnsResult, ...]]:
        """What turns show of each of these, and the machine with what has passed. A crash or a hang ends them."""
        results = [TurnsResult(name=name) for name in names]
        for number, name in enumerate(names):
            if name in self.crash or name in self.hang:
                results[number] = TurnsResult(name=name, state="under way")
                break
            if name in self.refused:
                results[number] = TurnsResult(name=name, state="decided", note=self.refused[name])
                continue
            changed = self.effects[name](m, changes[name].value) if name in self.effects else m
            value = (m.data_ms + m.compute_ms) / (changed.data_ms + changed.compute_ms)
            pays = value > PAYS
            results[number] = TurnsResult(
                name=name,
                state="decided",
                decision="faster" if pays else "no gain",
                gain=Gain(value=value, low=0.99 * value, high=1.01 * value),
                rounds=8,
                steps=64,
                seconds=64 * (m.data_ms + m.compute_ms) / 1e3,
            )
            m = changed if pays else m
        return m, tuple(results)

    def prove(self, wanted: Sequence[ProofRun], *, timeout_s: float, at_once: int = 1) -> list[Run]:
        """Several get in each other's way a little; so many at once, the next when one has ended."""
        start_s = self.clock_s
        runs = [self._run(one.changes, one.steps, Trial(timeout_s=timeout_s), fingerprints=True) for one in wanted]
        ends_s = [0.0] * at_once
        for run in runs:
            heapq.heapreplace(ends_s, ends_s[0] + (1.4 if len(runs) > 1 else 1.0) * run.seconds)
        self.clock_s = start_s + max(ends_s)
        return runs

    def measure_afresh(self) -> None:
        """It never does anything else."""

    def _trace(self, m: Machine, steps: int) -> Trace:
        pace = self._random.normal(1, self.run_noise) * (1 + self.drift_a_run) ** len(self.started)
        epoch = max(1, self.length // m.batch)
        made, at_s = [], 100.0
        for index in range(steps):
            spans = [
                ("data", m.data_ms, 0.95 * m.data_ms, None),
                ("forward", 0.4 * m.compute_ms, None, 0.4 * m.compute_ms * m.busy),
                ("backward", 0.6 * m.compute_ms, None, 0.6 * m.compute_ms * m.busy),
            ]
            ended = (index + 1) // epoch - m.eval_first if (index + 1) % epoch == 0 else -1
            if m.eval_s and ended >= 0 and ended % m.eval_every == 0:
                spans.append(("evaluation", 1e3 * m.eval_s, None, None))
            scale = pace * self._random.lognormal(0, self.step_noise)
            wall, parts = 0.0, []
            for name, host, idle, busy in spans:
                parts.append(Span(name=name, start_ms=wall, host_ms=host * scale, gpu_idle_ms=idle, gpu_busy_ms=busy))
                wall += host * scale
            made.append(Step(index=index, start_s=at_s, wall_ms=wall, spans=tuple(parts), samples=m.batch))
            at_s += wall / 1e3
        ceiling = [
            Step(index=steps + n, start_s=at_s, wall_ms=m.compute_ms * pace, samples=m.batch, kind="resident")
            for n in range(12)
        ]
        loader = {
            "dataset": "train.Photos",
            "length": self.length,
            "batch_size": m.batch,
            "num_workers": self.workers,
            "pin_memory": True,
            "collate": "default_collate",
            "persistent_workers": True,
        }
        rank = RankTrace(
            info=RunInfo(name="train", host="node", rank=0),
            steps=(*made, *ceiling),
            windows=(window_of(made),),
            facts=replace(
                from_json(Facts, {**FACTS, **self.facts, **m.facts, "loaders": [loader]}),
                settings=tuple(self.settings),
            ),
            xray=self._xray(m),
            workers=(self._worker(m),),
        )
        gpu = GpuSample(
            index=0, uuid="GPU-0", name="NVIDIA H200", sm_active_pct=85.0, memory_total_bytes=140 << 30, power_w=300.0
        )
        samples = []
        for time_s, used in ((100.0, 8), (100.1, 8 + self.host_gib)):
            host = HostSample(
                cpu_pct=self.cpu_pct,
                cores_pct=(self.cpu_pct,) * 16,
                memory_used_bytes=used << 30,
                memory_total_bytes=128 << 30,
            )
            samples.append(Sample(time_s=time_s, interval_s=0.1, host=host, gpus=(gpu,)))
        return Trace(ranks=(rank,), samples={"node": tuple(samples)})

    def _xray(self, m: Machine) -> Xray:
        late = {"backward": 8 * m.compute_ms * m.late} if m.late else {}
        late = self.xray.get("idle_by_phase_ms", late)
        busy = min(8 * m.compute_ms * m.busy, 8 * m.compute_ms - sum(late.values()))
        known: dict[str, Any] = {
            "steps": 8,
            "wall_ms": 8 * (m.compute_ms + m.data_ms),
            "busy_ms": busy,
            "busy_by_phase_ms": {"forward": 0.4 * busy, "backward": 0.6 * busy},
            "idle_by_phase_ms": late,
            "kernels": 1600,
            "kernel_us": Sketch.of([90.0] * 100),
            "matrix_ms": 0.6 * busy,
            "tensor_core_ms": 0.6 * busy,
            "top_ms": {"nvjet_hsh_128x128": 0.6 * busy},
        }
        return Xray(**known | self.xray)

    def _worker(self, m: Machine) -> WorkerReport:
        """One that loads 200 samples a second where training waits for them, else far more than it eats."""
        worked_s = 9.0 if m.data_ms else 0.3
        return WorkerReport(
            time_s=110.0,
            born_s=100.0,
            pid=1,
            dataset="Photos",
            length=self.length,
            worker=0 if self.workers else None,
            batches=30,
            samples=2000,
            sample_wall_s=worked_s,
            sample_cpu_s=worked_s,
            waiting_s=10.0 - worked_s,
            sample_ms=Sketch.of([5.0] * 2000),
            random_used=("random",),
        )

    def _proof(self, changes: Sequence[Change], steps: int) -> tuple[ProofStep, ...]:
        losses = 2.0 * np.exp(-np.arange(steps) / 200) + 0.05 * np.random.default_rng(7).normal(size=steps)
        losses = self.teaches(changes, losses)
        reseeded = any(change.name in ("loader", "num_workers") for change in changes)
        return tuple(
            ProofStep(
                inputs=(f"{step}{'r' if reseeded else ''}",),
                indices=((2 * step, 2 * step + 1),),
                begins=(None,),
                loss=float(loss),
                losses=(float(loss),),
            )
            for step, loss in enumerate(losses)
        )


def _without_a_look(trace: Trace) -> Trace:
    rank = trace.ranks[0]
    steps = tuple(step for step in rank.steps if step.kind not in CEILING)
    return replace(trace, ranks=(replace(rank, xray=None, steps=steps),))


FACTS: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "gpu_index": 0,
    "gpus_visible": 1,
    "devices": ["cuda:0"],
    "optimizer": "AdamW",
    "optimizer_fused": True,
    "learning_rate": 1e-3,
    "parameter_dtypes": ["float32"],
    "autocast": ["bfloat16"],
    "channels_last": None,
    "compiled": True,
    "cudnn_benchmark": True,
    "memory_reserved_bytes": 100 << 30,
}


def with_loader(trace: Trace, **changes: Any) -> Trace:
    """The trace, with other facts of its loader."""
    rank = trace.ranks[0]
    loader = replace(rank.facts.loaders[0], **changes)
    return replace(trace, ranks=(replace(rank, facts=replace(rank.facts, loaders=(loader,))),))


def flag(key: str, value: Any, **more: Any) -> SettingsRead:
    """What argparse has read: `flag("batch_size", 64)` is --batch-size 64."""
    values = {key: value, **more}
    options = {name: f"--{name.replace('_', '-')}" for name in values}
    return SettingsRead(source="argparse", values=values, options=options)
