"""`config.ignored`: a setting is on, and the run shows that it has no effect. Only a flat contradiction counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flatout.diagnose.compute_rules import gain_of_cudnn_benchmark, gain_of_tf32
from flatout.diagnose.rank_metrics import RankMetrics, Setting
from flatout.model.causes import CAUSES
from flatout.model.changes import CHANGES, SETTING, is_on, pattern_of
from flatout.model.facts import Facts
from flatout.model.finding import Finding

Gain = Callable[[RankMetrics], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contradiction:
    """A setting that is on, and facts that show it is off. What it costs: the finding of a cause, or a gain."""

    names: re.Pattern[str]
    is_off: Callable[[Facts], bool]
    off: str
    cause: str = ""
    gain: Gain | None = None


def ignored_settings(metrics: RankMetrics, others: Iterable[Finding]) -> list[Finding]:
    """A finding for each setting that was read and has no effect. It promises what fixing its cause would give."""
    costs = {finding.code: finding for finding in others}
    found: dict[str, Finding] = {}
    for read in metrics.settings:
        for contradiction in _CONTRADICTIONS:
            asked = contradiction.names.fullmatch(read.key) and is_on(read.value)
            if asked and contradiction.off not in found and contradiction.is_off(metrics.facts):
                cost = costs.pop(contradiction.cause, None)
                gain = contradiction.gain(metrics) if contradiction.gain is not None else _gain_of(cost)
                found[contradiction.off] = _finding(read, contradiction.off, gain, cost)
    return list(found.values())


def _gain_of(cost: Finding | None) -> dict[str, Any]:
    if cost is None:
        return {"derived": "seen in force"}
    return {"gain_low": cost.gain_low, "gain_high": cost.gain_high, "derived": cost.derived}


def _finding(read: Setting, off: str, gain: dict[str, Any], cost: Finding | None) -> Finding:
    place = read.file or ("the command line" if read.source == "argparse" else read.source)
    title = f"{read.key}={read.value!r} was read from {place}, but {off}"
    evidence = {"setting": read.key, "value": read.value, "source": read.source, "file": read.file}
    share = 0.0
    if cost is not None:
        title += f"; {cost.title}"
        evidence |= {"cause": cost.code, **cost.evidence}
        share = cost.share
    return Finding(
        code="config.ignored",
        title=title,
        share=share,
        **gain,
        confidence=0.9,
        evidence=evidence,
        change=f"{SETTING}{read.key}",
        value=read.value,
        advice=f"find where the script uses {read.key}: another spelling or type of the value, or a missing call",
        where=read.file,
    )


def _contradictions() -> list[_Contradiction]:
    gains: dict[str, Gain] = {"cudnn_benchmark": gain_of_cudnn_benchmark}
    more_names = {"precision": ("fp16",)}
    every = []
    for spec in CHANGES:
        if spec.is_off is None:
            continue
        cause = next((cause.code for cause in CAUSES if cause.changes[:1] == (spec.name,)), "")
        names = pattern_of(spec.name, *more_names.get(spec.name, ()))
        gain = gains.get(spec.name)
        every.append(_Contradiction(names=names, is_off=spec.is_off, off=spec.off, cause=cause, gain=gain))
    return [*every, _TF32]


_TF32 = _Contradiction(
    names=pattern_of("tf32"),
    is_off=lambda facts: facts.on_gpu and facts.tf32_matmul is False,
    off="matrix products do not use TF32",
    gain=gain_of_tf32,
)
_CONTRADICTIONS = tuple(_contradictions())
