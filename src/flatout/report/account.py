"""Trace → RecordedRun: what is known of one run, as plain data. Figures are of rank 0, but for those in `by_rank`."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from flatout.diagnose.breakdown import (
    COLLATE,
    OWN_CODE,
    REST,
    SAMPLES,
    Breakdown,
    HotFunction,
    breakdown,
    in_training,
    in_workers,
)
from flatout.diagnose.by_cause import CauseAccount
from flatout.diagnose.machine import LoaderWork, is_gpu_of
from flatout.diagnose.rank_metrics import RankMetrics, metrics_of
from flatout.diagnose.rules import diagnosis
from flatout.model.causes import Finding
from flatout.model.errors import TraceError
from flatout.model.formatting import (
    GPU_READINGS,
    HOST_READINGS,
    Reading,
    as_typed,
    count_of,
    exit_in_words,
    in_full,
    ms,
    shown_in,
)
from flatout.model.gpus import peak
from flatout.model.records import SPANS_A_STEP, Facts, to_json
from flatout.redact import redact_command, redact_setting, redact_text
from flatout.trace import GpuSample, HostSample, RankTrace, RunInfo, Sketch, Summary, Trace, Window, WorkerReport, Xray
from flatout.trace.downsample import window_of
from flatout.trace.reader import from_json

SCHEMA = 1
HANG_MS = 10_000.0  # a run whose last wait was at least as long hung
MIN_PHASE = 0.02  # of training's time: of a phase that takes less, no line is shown
WHAT_IS_COUNTED = (
    "flatout counts calls of torch.optim.Optimizer.step; did the script train, and did it run with the Python it was "
    "started with?"
)
WAITS = {"data": "a batch that did not come", "sync": "the GPU"}
NOT_TRAINING = ("setup", "tail", "replay", "resident")


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour costs: 2.5/h, $2.5/h, 2.5EUR/h."""

    an_hour: float
    sign: str = ""
    sign_first: bool = False

    @classmethod
    def of(cls, text: str) -> Price:
        """As a person writes it; ValueError where that is no price."""
        sign = r"([A-Za-z]{1,4}|[$€£¥₹₩])?"
        match = re.fullmatch(rf"{sign}\s*(\d+(?:\.\d+)?)\s*{sign}\s*(?:/\s*h)?", text.strip())
        if match is None or (match[1] and match[3]):
            raise ValueError(f"{text} is no price an hour")
        return cls(float(match[2]), match[1] or match[3] or "", bool(match[1]))

    def text(self, amount: float) -> str:
        """An amount of money, with its sign."""
        if self.sign_first:
            return f"{self.sign}{in_full(amount)}"
        return f"{in_full(amount)} {self.sign or 'in the currency of --price'}"

    def of_time(self, seconds: float) -> float:
        """What so much time costs."""
        return seconds / 3600 * self.an_hour


class RankFigures(NamedTuple):
    """One rank, and where its time went."""

    info: RunInfo
    breakdown: Breakdown

    @classmethod
    def of_summary(cls, summary: Summary) -> RankFigures:
        """Of a rank whose summary alone was read."""
        whole = Window(
            first_index=0,
            last_index=0,
            start_s=0.0,
            wall_ms=summary.wall_ms,
            spans_ms=summary.spans_ms,
            samples=summary.samples,
        )
        return cls(summary.info, breakdown(RankTrace(info=summary.info, windows=(whole,))))


@dataclass(frozen=True)
class Workers:
    """What loaded the samples of one dataset: its workers all together, or the training process."""

    work: LoaderWork
    item: str = "sample"  # what its dataset hands out

    def __str__(self) -> str:
        """The dataset with its length: training and validation data are often of one class."""
        return dataset_in_words(self.work.reports[0].dataset, self.work.reports[0].length, self.item)

    @cached_property
    def at_once(self) -> int:
        """How many workers there were at one time; they may come and go, and flatout's all have one
        number."""
        lives: dict[int, tuple[float, float]] = {}
        for report in self.work.reports:  # one that gets its dataset again reports on it again
            if report.worker is not None:
                born_s, over_s = lives.get(report.pid, (report.born_s, report.time_s))
                lives[report.pid] = min(born_s, report.born_s), max(over_s, report.time_s)
        changes = sorted(change for born_s, over_s in lives.values() for change in ((born_s, 1), (over_s, -1)))
        return max(itertools.accumulate((by for _, by in changes), initial=0))

    @property
    def random_used(self) -> list[str]:
        """The libraries whose random numbers its samples draw."""
        return sorted({name for report in self.work.reports for name in report.random_used})

    def sentence(self) -> str:
        """Who loaded how much of it, and how fast."""
        work, who = self.work, count_of(self.at_once, "worker") if self.at_once else "the training process"
        median, worst = work.sample_ms.quantile(0.5) or 0.0, work.sample_ms.high
        text = f"{who} load{'s' * (self.at_once < 2)} {self}: {ms(median)} a {self.item} (at worst {ms(worst)})"
        if work.on_core is not None:
            text += f", {min(1.0, work.on_core):.0%} of it on a core"
        if work.transforms_ms:
            name, spent = max(work.transforms_ms.items(), key=lambda item: item[1])
            text += f", {ms(spent)} in {name}"
        if self.at_once and work.busy is not None:
            text += f"; busy {work.busy:.0%} of the time"
        if self.random_used:
            text += f"; samples draw random numbers from {', '.join(self.random_used)}"
        return text

    def to_json(self) -> dict[str, Any]:
        """As documented."""
        work = self.work
        return {
            "dataset": work.reports[0].dataset,
            "length": work.reports[0].length,
            "workers": self.at_once,
            "samples": int(work.total("samples")),
            "sample_ms": _quantiles(work.sample_ms),
            "busy_share": work.busy,
            "cpu_share": work.on_core,
            "run_delay_share": work.delay,
            "collate_share": work.collating,
            "transforms_ms": work.transforms_ms,
            "slowest": work.slowest,
            "random_used": self.random_used,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLines:
    """The functions that took the time of a phase; shares are of that phase, which takes `share` of
    training."""

    phase: str
    title: str
    share: float
    functions: tuple[HotFunction, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Every line, as documented."""
        rows = []
        for line in (line for function in self.functions for line in function.lines):
            shares = {"share_of_phase": line.share, "share": line.share * self.share}
            code = {name: getattr(line, name) for name in ("where", "function", "called", "source", "exact")}
            rows.append({"phase": self.phase, **code, **shares})
        return sorted(rows, key=lambda row: -row["share"])


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """One recorded run: its records, its findings, and what follows from them, each found when it is
    asked for."""

    folder: str
    trace: Trace
    metrics: tuple[RankMetrics, ...]  # of the ranks that were read
    findings: tuple[Finding, ...]
    causes: CauseAccount | None  # its time by cause; None where there is too little to judge by
    by_rank: tuple[RankFigures, ...]  # of every rank
    price: Price | None = None

    @property
    def first(self) -> RankTrace:
        """The records of rank 0."""
        return self.metrics[0].rank

    @property
    def breakdown(self) -> Breakdown:
        """Where its time went."""
        return self.metrics[0].breakdown

    @property
    def ranks(self) -> int:
        """How many there were, those that were not read among them."""
        return len(self.by_rank)

    @cached_property
    def command(self) -> tuple[str, ...]:
        """The command. Secrets were hidden when the trace was written, but perhaps by an older flatout."""
        return redact_command(self.first.info.command)

    @cached_property
    def facts(self) -> Facts:
        """What was in force, without secrets too."""
        known = from_json(Facts, redact_setting("", to_json(self.first.facts)))
        return dataclasses.replace(known, own_cost=None)

    @cached_property
    def notes(self) -> list[str]:
        """What a person should know, without secrets too."""
        notes = (note.text for note in (*self.trace.notes, *self.first.notes))
        return [redact_text(text) for text in (_how_it_hung(self.first), *notes) if text]

    @cached_property
    def ended(self) -> str | None:
        """How, where it did not end well."""
        return how_it_ended(self.trace)

    @cached_property
    def lines(self) -> tuple[PhaseLines, ...]:
        """The lines that took the time of the loop's own code, and of what makes samples and batches."""
        metrics = self.metrics[0]
        dataset, waits = metrics.loader.class_name, metrics.share("data")
        own = in_training(self.first, OWN_CODE)
        samples, collate = (in_workers(self.first, dataset, (phase,)) for phase in (SAMPLES, COLLATE))
        phases = [
            PhaseLines(phase=REST, title="Your own code", share=metrics.share(REST), functions=own),
            PhaseLines(phase=SAMPLES, title=f"Samples of {dataset}", share=waits, functions=samples),
        ]
        if collate != samples:  # without workers they are the same
            phases.append(PhaseLines(phase=COLLATE, title="Joining samples", share=waits, functions=collate))
        return tuple(phase for phase in phases if phase.functions and phase.share >= MIN_PHASE)

    @cached_property
    def workers(self) -> tuple[Workers, ...]:
        """What loaded its data, by dataset."""
        groups: dict[tuple[str, int | None], list[WorkerReport]] = {}
        for report in self.first.workers:
            groups.setdefault((report.dataset, report.length), []).append(report)
        works = ((key, LoaderWork(tuple(reports))) for key, reports in groups.items())
        batches = {(loader.class_name, loader.length) for loader in self.facts.loaders if loader.ready_made}
        items = {key: "batch" if key in batches else "sample" for key in groups}
        return tuple(Workers(work, items[key]) for key, work in works if work.total("samples"))

    @cached_property
    def model_flops(self) -> dict[str, Any] | None:
        """What the model computes, and which share that is of what the GPU's maker states; None where
        not counted."""
        seen, facts = self.breakdown, self.facts
        if facts.step_flops is None or not seen.steps or not seen.training_ms:
            return None
        tflops = facts.step_flops * seen.steps / seen.training_ms / 1e9
        data: dict[str, Any] = {"of_a_step": facts.step_flops, "tflops": tflops}
        known = peak(facts)
        if known is not None:
            data |= {"peak_tflops": known[0], "precision": known[1], "share": tflops / known[0]}
        return data

    @cached_property
    def costs(self) -> dict[str, Any]:
        """What it has cost so far, and what an epoch of it does, its pauses counted: the documented JSON."""
        metrics, seen = self.metrics[0], self.breakdown
        seconds, epoch_s, tokens_per_s = seen.wall_ms / 1e3, None, None
        if metrics.steps_an_epoch and seen.steps:
            epoch_s = metrics.steps_an_epoch * seen.training_ms / seen.steps / 1e3
        if metrics.loader.tokens is not None and seen.samples_per_s:
            tokens_per_s = seen.samples_per_s * metrics.loader.tokens.a_sample
        data: dict[str, Any] = {"seconds": seconds, "epoch_s": epoch_s, "tokens_per_s": tokens_per_s}
        a_second = {}
        means_w = (Sketch.of(gpu.power_w for gpu in _gpu_samples(one)).mean for one in self.metrics)
        power_w = Sketch.of(means_w).mean
        if power_w is not None:  # of all GPUs
            a_second["energy_wh"] = power_w * self.ranks / 3600
        if self.price is not None:
            a_second["money"] = self.price.of_time(1.0)
            data["currency"] = self.price.sign or None
        for name, amount in a_second.items():
            data[name] = amount * seconds
            data[f"epoch_{name}"] = amount * epoch_s if epoch_s is not None else None
        return data

    @cached_property
    def hardware(self) -> dict[str, float]:
        """Means over the run, of the rank's GPU and of the host; of memory the highest."""
        samples = self.trace.samples.get(self.first.info.host, ())
        hosts = [sample.host for sample in samples]
        figures = {reading.name: mean_or_peak(reading, hosts) for reading in shown_in("run", HOST_READINGS)}
        for reading in shown_in("run", GPU_READINGS):
            figures[reading.name] = mean_or_peak(reading, _gpu_samples(self.metrics[0]))
        return {name: value for name, value in figures.items() if value is not None}

    @cached_property
    def stretches(self) -> Sequence[Window]:
        """Step by step, where every step was kept; else window by window."""
        steps = self.first.every_step()
        return self.first.windows if steps is None else [window_of([step]) for step in steps]

    @property
    def overhead(self) -> dict[str, float | None]:
        """What measuring took of a step, and the share of it: the documented JSON."""
        cost, mean_ms = self.first.facts.own_cost, self.breakdown.step_ms.mean
        spent_us, share = cost.us_per_step if cost is not None else None, None
        if spent_us is not None and mean_ms:
            share = spent_us / 1e3 / mean_ms
        return {"us_per_step": spent_us, "share": share}

    @property
    def changes(self) -> str:
        """What a plan has changed in this run, and what it could not change; empty without a plan."""
        applied, not_applied = [], []
        for change in self.facts.changes:
            if change.applied:
                how = ", ".join(filter(None, (change.how, change.where, *change.also)))
                applied.append(f"{change.name}={as_typed(change.value)} ({how})")
            else:
                not_applied.append(f"{change.name} ({change.how})")
        sentence = f"changed in this run: {'; '.join(applied) or 'nothing'}."
        if not_applied:
            sentence += f" Not changed: {'; '.join(not_applied)}."
        return sentence if applied or not_applied else ""

    def settings(self) -> list[tuple[str, Any]]:
        """What was in force and what the script read, by name."""
        facts = to_json(self.facts)
        read, loaders, _ = (facts.pop(name, []) for name in ("settings", "loaders", "changes"))
        changes = [f"{change.name}={change.value}" for change in self.facts.changes if change.applied]
        named = [("command", " ".join(self.command)), ("ranks", self.ranks), ("loaders", len(loaders))]
        for number, loader in enumerate(loaders, 1):
            loader.pop("tokens", None)  # counted, not set
            named.append((f"loader {number}", loader))
        if changes:
            named.append(("changed by flatout", changes))
        named += [*facts.items(), *((one.get("file") or one["source"], one["values"]) for one in read)]
        return [setting for name, value in named for setting in _flat(name, value)]

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of `flatout report`."""
        b = self.breakdown
        speeds = {
            "samples_per_s": b.samples_per_s,
            "step_ms": {"median": b.step_ms.quantile(0.5), "p95": b.step_ms.quantile(0.95)},
            "ceiling_samples_per_s": b.ceiling_samples_per_s,
            "replay_samples_per_s": b.replay_samples_per_s,
        }
        return {
            "schema": SCHEMA,
            "verdict": self.findings[0].code if self.findings else None,
            "findings": [finding_to_json(finding) for finding in self.findings],
            "name": self.first.info.name,
            "trace": self.folder,
            "ranks": self.ranks,
            "ended": self.ended,
            "breakdown": {"wall_ms": b.wall_ms, "parts": to_json(b.parts)},
            "training": {"wall_ms": b.training_ms, "parts": to_json(b.training)},
            "account": to_json(self.causes.charges) if self.causes is not None else [],
            "lines": [line for phase in self.lines for line in phase.to_json()],
            "facts": {"steps": b.steps, **speeds, **to_json(self.facts)},
            "xray": _xray_to_json(self.first.xray) if self.first.xray is not None else None,
            "workers": [workers.to_json() for workers in self.workers],
            "hardware": self.hardware,
            "costs": self.costs,
            "model_flops": self.model_flops,
            "overhead": self.overhead,
            "notes": self.notes,
        }


def run_of(trace: Trace, folder: str, by_rank: Sequence[RankFigures] = (), price: Price | None = None) -> RecordedRun:
    """The run in a trace; `by_rank` where not all of its ranks were read."""
    metrics = tuple(metrics_of(trace))
    if not metrics:
        if trace.machines and not any(info.command for info in trace.machines):
            raise TraceError(f"{folder} was recorded by flatout top: look at it with flatout top --replay {folder}")
        raise TraceError(f"no optimizer step was seen in {folder}: nothing to account for. {WHAT_IS_COUNTED}")
    every = tuple(by_rank or (RankFigures(one.rank.info, one.breakdown) for one in metrics))
    known = diagnosis(metrics)
    return RecordedRun(
        folder=folder,
        trace=trace,
        metrics=metrics,
        findings=known.findings,
        causes=known.account,
        by_rank=every,
        price=price,
    )


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """A finding as documented."""
    data = dataclasses.asdict(finding)
    value = data.pop("value")
    if finding.change is not None:
        data["change"] = {"name": finding.change, "value": value}
    return data


def mean_or_peak(reading: Reading, seen: Sequence[GpuSample | HostSample]) -> float | None:
    """What counts of a reading over a run; None where it was never measured."""
    values = Sketch.of(getattr(one, reading.name) for one in seen)
    return values.high if reading.peak and values.count else values.mean


def _gpu_samples(metrics: RankMetrics) -> list[GpuSample]:
    """Of a rank's GPU over the whole run."""
    samples = metrics.trace.samples.get(metrics.rank.info.host, ())
    return [gpu for sample in samples for gpu in sample.gpus if is_gpu_of(metrics.rank, gpu)]


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{name}: {key}", item)
    else:
        yield name, value


def _quantiles(sketch: Sketch) -> dict[str, float | None]:
    p50, p95, highest = (sketch.quantile(q) for q in (0.5, 0.95, 1.0))
    return {"mean": sketch.mean, "p50": p50, "p95": p95, "max": highest}


def _xray_to_json(xray: Xray) -> dict[str, Any]:
    data = {entry.name: getattr(xray, entry.name) for entry in dataclasses.fields(xray)}
    return {name: _quantiles(item) if isinstance(item, Sketch) else item for name, item in data.items()}


def dataset_in_words(name: str, length: int | None, item: str = "sample") -> str:
    """A dataset, and its length where it is known."""
    return name if length is None else f"{name} of {count_of(length, item)}"


# The end


def how_it_ended(trace: Trace) -> str | None:
    """How a run failed, without a full stop. None if it ended well, goes on, or did not record that."""
    code = trace.end.exit_code if trace.end is not None else None
    ends = [(rank.end, rank.info.rank) for rank in trace.ranks if rank.end is not None]
    failed = [(end, rank) for end, rank in ends if end.error is not None]
    command = next((info.command for info in trace.machines if info.command), ())
    subject = Path(command[0]).name if command and code else "Training"
    after = f"after {_steps(trace.ranks[0])}" if trace.ranks else "before its first step"
    how = f"ended with {exit_in_words(code)} {after}" if code else f"ended {after}"
    if failed:
        end, number = min(failed, key=lambda one: one[0].time_s)
        if end.error == "KeyboardInterrupt":
            return f"{subject} was interrupted {after}"
        rank = f" (rank {number})" * (len(trace.ranks) > 1)
        return f"{subject} {how}: {' at '.join(filter(None, (end.error, end.where)))}{rank}"
    if code:
        return f"{subject} {how}"
    if trace.end is not None and code is None and len(ends) < len(trace.ranks):
        return f"{subject} was killed, or crashed, {after}"
    return None


def _steps(rank: RankTrace) -> str:
    """How many are known. The last second of a process that was killed is not in its trace."""
    indices = [step.index for step in rank.steps if step.kind not in NOT_TRAINING]
    indices += [window.last_index for window in rank.windows[-1:]]
    steps = count_of(max(indices, default=-1) + 1, "step")
    return steps if rank.end is not None else f"at least {steps}"


def _how_it_hung(rank: RankTrace) -> str:
    """Where a run ended in a long wait, which its steps do not show; else empty."""
    spans = next((step.spans for step in rank.steps if step.kind == "tail"), ())
    last = next((span for span in reversed(spans) if span.name != "rest"), None)
    if len(spans) > SPANS_A_STEP or last is None or last.name not in WAITS or last.host_ms < HANG_MS:
        return ""  # more spans than that are summed up
    place = f" ({last.where})" if last.where else ""
    return f"the run ended in a wait of {last.host_ms / 1e3:.1f} s for {WAITS[last.name]}{place}: it hung"
