"""`config.ignored`: what the user asked for in settings, and what is in force. Only a flat contradiction counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from flatout.diagnose.compute import with_benchmark, with_tf32
from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.finding import Finding
from flatout.model.setting_aliases import is_on, pattern_of


def ignored_settings(case: RankMetrics, others: Iterable[Finding]) -> list[Finding]:
    """A finding for each setting that was read and has no effect; it promises what mending that cause would give."""
    costs = {finding.code: finding for finding in others}
    found: dict[str, Finding] = {}
    for source, file, key, value in case.settings:
        for pattern, contradicted, what, worth in _RULES:
            if pattern.fullmatch(key) and is_on(value) and contradicted(case) and what not in found:
                cost = costs.pop(worth, None) if isinstance(worth, str) else None
                gain = _gain_of(cost) if isinstance(worth, str) else worth(case)
                found[what] = _finding(source, file, key, value, what, gain, cost)
    return list(found.values())


def _gain_of(cost: Finding | None) -> dict[str, Any]:
    if cost is None:
        return {"derived": "seen in force"}
    return {of: getattr(cost, of) for of in ("gain_low", "gain_high", "derived")}


def _finding(
    source: str, file: str | None, key: str, value: Any, what: str, gain: dict[str, Any], cost: Finding | None
) -> Finding:
    place = file or {"argparse": "the command line"}.get(source, source)
    return Finding(
        code="config.ignored",
        title=f"{key}={value!r} was read from {place}, but {what}" + (f"; {cost.title}" if cost is not None else ""),
        share=cost.share if cost is not None else 0.0,
        **gain,
        confidence=0.9,
        evidence={"setting": key, "value": value, "source": source, "file": file}
        | ({"cause": cost.code, **cost.evidence} if cost is not None else {}),
        change=f"setting:{key}",
        value=value,
        advice=f"find where the script uses {key}: a value of another spelling or type, or a call that is missing",
        where=file,
    )


def _no_autocast(case: RankMetrics) -> bool:
    return set(case.facts.autocast) == {"None"} and case.facts.parameter_dtypes == ("float32",) and case.on_gpu


# The setting, when it has no effect, how one says so, and what it would be worth: what mending a cause is, or a gain.
_Rule = tuple[re.Pattern[str], Callable[[RankMetrics], bool], str, str | Callable[[RankMetrics], dict[str, Any]]]
_RULES: tuple[_Rule, ...] = (
    (
        pattern_of("precision", "fp16"),
        _no_autocast,
        "every forward pass ran in fp32 without autocast",
        "compute.precision",
    ),
    (
        pattern_of("compile"),
        lambda case: case.facts.compiled is False,
        "nothing was compiled",
        "compute.eager",
    ),
    (
        pattern_of("tf32"),
        lambda case: case.on_gpu and case.facts.tf32_matmul is False,
        "matrix products do not use TF32",
        with_tf32,
    ),
    (
        pattern_of("cudnn_benchmark"),
        lambda case: case.on_gpu and case.facts.cudnn_benchmark is False,
        "cuDNN's benchmark mode is off",
        with_benchmark,
    ),
    (
        pattern_of("channels_last"),
        lambda case: case.facts.channels_last is False,
        "the convolutions' weights are not in channels_last",
        "compute.layout",
    ),
    (
        pattern_of("persistent_workers"),
        lambda case: case.loader.num_workers == 0,
        "there are no workers to keep",
        "",
    ),
    (
        pattern_of("pin_memory"),
        lambda case: case.on_gpu and case.loader.pin_memory is False,
        "the loader does not page-lock its batches",
        "copy.pageable",
    ),
    (
        pattern_of("fused_optimizer"),
        lambda case: case.on_gpu and not case.facts.optimizer_fused,
        "the optimizer is not fused",
        "compute.optimizer",
    ),
)
