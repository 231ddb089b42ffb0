"""`config.ignored`: a setting is on, and the run shows that it has no effect. Only a flat contradiction counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flatout.diagnose.compute_rules import gain_of_cudnn_benchmark, gain_of_tf32
from flatout.diagnose.find_knobs import Knob
from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.causes import CAUSES
from flatout.model.changes import CHANGES, SETTING, is_on
from flatout.model.facts import Facts
from flatout.model.finding import Finding

Gain = Callable[[RankMetrics], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contradiction:
    """A setting that is on, and facts that show it is off. What it costs: the finding of a cause, or a gain."""

    names: tuple[str, ...]
    is_off: Callable[[Facts], bool]
    off: str
    cause: str = ""
    gain: Gain | None = None


def ignored_settings(metrics: RankMetrics, others: Iterable[Finding]) -> list[Finding]:
    """A finding for each setting that was read and has no effect. It promises what fixing its cause would give."""
    costs = {finding.code: finding for finding in others}
    found = []
    for one in _CONTRADICTIONS:
        asked = next((read for read in metrics.settings if read.is_called(*one.names) and is_on(read.value)), None)
        if asked is not None and one.is_off(metrics.facts):
            found.append(_finding(metrics, asked, one, costs.pop(one.cause, None)))
    return found


def _finding(metrics: RankMetrics, read: Knob, contradiction: _Contradiction, cost: Finding | None) -> Finding:
    name, place = read.name.lower(), read.file or ("the command line" if read.source == "argparse" else read.source)
    title, share = f"{name}={read.value!r} was read from {place}, but {contradiction.off}", 0.0
    evidence = {"setting": name, "value": read.value, "source": read.source, "file": read.file}
    gain: dict[str, Any] = {"derived": "seen in force"}
    if contradiction.gain is not None:
        gain = contradiction.gain(metrics)
    elif cost is not None:
        gain = {"gain_low": cost.gain_low, "gain_high": cost.gain_high, "derived": cost.derived}
    if cost is not None:
        title, share = f"{title}; {cost.title}", cost.share
        evidence |= {"cause": cost.code, **cost.evidence}
    return Finding(
        code="config.ignored",
        title=title,
        share=share,
        **gain,
        confidence=0.9,
        evidence=evidence,
        change=f"{SETTING}{name}",
        value=read.value,
        advice=f"find where the script uses {name}: another spelling or type of the value, or a missing call",
        where=read.file,
    )


def _contradictions() -> list[_Contradiction]:
    every = [
        _Contradiction(
            names=("tf32",),
            is_off=lambda facts: facts.on_gpu and facts.tf32_matmul is False,
            off="matrix products do not use TF32",
            gain=gain_of_tf32,
        )
    ]
    for spec in CHANGES:
        if spec.is_off is not None:
            names = (spec.name, "fp16") if spec.name == "precision" else (spec.name,)
            cause = next((cause.code for cause in CAUSES if cause.changes[:1] == (spec.name,)), "")
            gain = gain_of_cudnn_benchmark if spec.name == "cudnn_benchmark" else None
            every.append(_Contradiction(names=names, is_off=spec.is_off, off=spec.off, cause=cause, gain=gain))
    return every


_CONTRADICTIONS = tuple(_contradictions())
