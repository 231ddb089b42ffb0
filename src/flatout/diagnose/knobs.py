"""What the script read as settings: where a change can be given to it, and settings that have no effect.

A knob is a place where a value is read: an option, a line of a YAML file, a name in a config. It
counts where its name fits, where its value is the one in force, and where its file is the run's
configuration, not one of many data files. The value read last comes first: scripts read a file, then
let the command line have the last word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.causes import CAUSES, Finding
from flatout.model.changes import CHANGES, SETTING, SETTING_NAMES, is_on, pattern_of
from flatout.model.records import Facts, SettingsRead

_MANY_ALIKE = 3  # files of one kind in one folder: more of them are data


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One value that the script read. `text` is how a Change names the place; empty where it cannot
    be set there."""

    key: str  # with those that it lies in: train.amp
    value: Any
    source: str
    file: str | None
    text: str

    @property
    def name(self) -> str:
        """The last part of its key."""
        return self.key.rpartition(".")[2]

    def is_called(self, *subjects: str) -> bool:
        """Whether this is what people call one of these."""
        return pattern_of(*subjects).fullmatch(self.name.replace("-", "_")) is not None


def knobs(settings: Iterable[SettingsRead], name: str, fits: Callable[[Any], bool] = lambda value: True) -> list[Knob]:
    """The places for a change, the likeliest first, each once."""
    found = [knob for knob in every_knob(settings) if knob.text and knob.is_called(name) and fits(knob.value)]
    return list({knob.text: knob for knob in reversed(found)}.values())


def knob_for(facts: Facts, change: str, value: Any) -> str | None:
    """Where to give a change such a value: by a knob of that very name, or of one that means the same."""
    name = change.removeprefix("setting:")
    candidates = [k for k in reversed(every_knob(facts.settings)) if k.text and name in (k.key, k.name)]
    if name in SETTING_NAMES:
        candidates += knobs(facts.settings, name)
    in_force = getattr(facts.training_loader, name, None)
    for knob in candidates:
        if isinstance(knob.value, bool) == isinstance(value, bool) and in_force in (None, knob.value):
            return knob.text
    return None


def every_knob(settings: Iterable[SettingsRead]) -> list[Knob]:
    """Every plain value that was read as a setting, in that order."""
    settings = tuple(settings)
    files = {Path(read.file) for read in settings if read.file and read.source in ("yaml", "json")}
    alike = Counter((file.parent, file.suffix) for file in files)
    every: list[Knob] = []
    for read in settings:
        file = Path(read.file or "")
        if alike[file.parent, file.suffix] > _MANY_ALIKE:
            continue
        for key, value in _leaves(read.values):
            text = ""
            if read.source == "argparse":
                text = str(read.options.get(key, ""))
            elif read.file or read.source in ("yaml", "json"):  # text without a file is named by its kind
                text = f"{read.file or read.source}:{key}"
            every.append(Knob(key=key, value=value, source=read.source, file=read.file, text=text))
    return every


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Settings without effect. Only a flat contradiction counts.


def ignored_settings(metrics: RankMetrics, others: Iterable[Finding]) -> list[Finding]:
    """A finding for each setting that was read and has no effect. It promises what fixing its cause
    would give."""
    costs = {finding.code: finding for finding in others}
    read = every_knob(metrics.facts.settings)
    read = [knob for place, knob in enumerate(read) if not _overruled(knob, read[place:])]
    found = []
    for names, cause, is_off, off in _CONTRADICTIONS:
        asked = next((knob for knob in read if knob.is_called(*names) and is_on(knob.value)), None)
        if asked is not None and is_off(metrics.facts):
            found.append(_ignored(asked, off, costs.pop(cause, None)))
    return found


def _overruled(knob: Knob, later: Iterable[Knob]) -> bool:
    """Whether the command line has switched off what a file has on."""
    last_words = (other for other in later if other.source == "argparse" and other.name == knob.name)
    return any(not is_on(other.value) for other in last_words)


def _ignored(read: Knob, off: str, cost: Finding | None) -> Finding:
    name, place = read.name.lower(), read.file or read.source
    if place == "argparse":
        place = "the command line"
    title = f"{name}={read.value!r} was read from {place}, but {off}"
    evidence: dict[str, Any] = {"setting": name, "value": read.value, "source": read.source, "file": read.file}
    promise: dict[str, Any] = {"share": 0.0, "derived": "seen in force"}
    if cost is not None:
        title += f"; {cost.title}"
        evidence |= {"cause": cost.code, **cost.evidence}
        promise = {key: getattr(cost, key) for key in ("share", "gain_low", "gain_high", "derived")}
    return Finding(
        code="config.ignored",
        title=title,
        **promise,
        confidence=0.9,
        evidence=evidence,
        change=f"{SETTING}{name}",
        value=read.value,
        advice=f"find where the script uses {name}: another spelling or type of the value, or a missing call",
        where=read.file,
    )


def _contradictions() -> Iterator[tuple[tuple[str, ...], str, Callable[[Facts], bool], str]]:
    """Names of a setting, the cause it would cure, whether facts show that it is off, and how to say so."""
    for spec in CHANGES:
        if spec.is_off is not None:
            names = (spec.name, "fp16") if spec.name == "precision" else (spec.name,)
            cured = next((cause.code for cause in CAUSES if cause.changes[:1] == names[:1]), "")
            yield names, cured, spec.is_off, spec.off
    yield (
        ("tf32",),
        "compute.precision",
        lambda facts: facts.on_gpu and facts.tf32_matmul is False,
        "matrix products do not use TF32",
    )


_CONTRADICTIONS = tuple(_contradictions())
