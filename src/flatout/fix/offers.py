"""Trace → Offers: which changes to try next: what promises much before the rest, and of each the harmless ones first.

Diagnosis says what is wrong; here it becomes changes, by the script's own knob where it has one. Changes that belong
together and rarely do harm make one Offer, which is tried as a whole and taken apart only if it fails:

    data path   elastic loader, page-locking, device prefetch, gc freeze, fewer decoder threads; transforms left to the
                card, where the cores are the limit, or where training still waits for data with all of that
    compute     precision, channels_last, fused optimizer, cuDNN benchmark; with them a data path that promises little
                by itself: what a loader costs beside a slow step may matter beside a fast one
    compile     alone: it takes long, and one wants to know what it brings; of one rank as CUDA graphs first
    batch size  with the learning rate, if allowed: twice or four times as large, again while that pays; a data path
                that promises little goes along here too
    pauses      evaluation and checkpoints less often, if allowed
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from flatout.diagnose.compute_rules import FUSABLE
from flatout.diagnose.gains import spare_cores
from flatout.diagnose.knobs import Knob, knobs
from flatout.diagnose.rank_metrics import LATE_LAUNCHES, RankMetrics, metrics_of
from flatout.diagnose.rules import diagnose
from flatout.model.causes import cured_by
from flatout.model.changes import CHANGES, TO_MAKE, named, safety_of
from flatout.model.errors import UsageError
from flatout.model.facts import NO_LOADER, SettingsRead
from flatout.model.finding import Finding
from flatout.model.plan import Change, Safety
from flatout.trace import Trace

PAUSES = named(family="pauses")
LOADED_BY_HAND = {spec.name for spec in CHANGES if not spec.with_elastic_loader}
EVALUATE_LESS = 5
_MUCH = 1.1  # times as fast: what is hoped for is worth its turn, and one of a bundle may hide what another brings
_SHOWS = 0.05  # of the step: what one run more can show, where runs differ by 2%
_TWICE = 1.2  # times what was asked for: it was raised once more
_STARVED = 0.15  # of the step is a wait for data: what else is mended waits for that too
_HALF_A_GPU_IDLE = 0.3  # of its memory in use: there is room for a larger batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Changes to try as one. `promise`: the factor of speed that the diagnosis hopes for."""

    changes: tuple[Change, ...]
    why: str
    promise: float
    pauses: bool = False  # judged with evaluation and checkpoints in the time
    apart: bool = True  # whether what changes learning can be taken apart; a batch makes no sense without its rate

    @property
    def name(self) -> str:
        """What is tried, in words."""
        return all_in_words(self.changes)

    @property
    def computes_alike(self) -> bool:
        """Whether the card is given the same work: its X-ray and its ceiling are known already."""
        return self.pauses or _only_loading(self.changes)

    @property
    def splits(self) -> bool:
        """Whether it can be tried part by part."""
        return len(self.parts) > 1

    @property
    def parts(self) -> list[Offer]:
        """Each change by itself, what goes together as one: what to try where the whole failed."""
        together = () if self.apart else tuple(change for change in self.changes if change.safety == "semantic")
        alone = [replace(self, changes=(change,)) for change in self.changes if change not in together]
        return [*alone, *([replace(self, changes=together)] if together else [])]

    @property
    def worth_splitting(self) -> bool:
        """Whether so much was hoped for that one of them may hide what another brings."""
        return self.splits and self.promise >= _MUCH


def in_words(change: Change) -> str:
    """A change as one would say it."""
    name = change.name.removeprefix("setting:")
    if change.value is True:
        return name
    return f"{name} {change.value}" if name != "loader" else f"{change.value} loader"


def all_in_words(changes: Iterable[Change]) -> str:
    """Several, as one would say them."""
    return " + ".join(in_words(change) for change in changes)


def with_changes(kept: Sequence[Change], changes: Sequence[Change]) -> tuple[Change, ...]:
    """What was kept and these, each name once, and no number of workers beside a loader that finds its own."""
    names = {change.name for change in changes}
    if "loader" in names:
        names |= LOADED_BY_HAND
    return (*(change for change in kept if change.name not in names), *changes)


def _only_loading(changes: Iterable[Change]) -> bool:
    """Whether the GPU is given the same work with these changes."""
    return all(change.name in named(family="data path") for change in changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the person allows: names of changes (`batch_size`), classes (`semantic`), or `all`."""

    allow: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    skip: frozenset[str] = frozenset()

    @classmethod
    def of(cls, allow: str = "", only: str = "", skip: str = "") -> Wishes:
        """From the command line; a word that is no change and no class is the person's mistake."""
        wishes = cls(allow=_words("--allow", allow), only=_words("--only", only), skip=_words("--skip", skip))
        both = wishes.skip & (wishes.only | wishes.allow)
        if both:
            raise UsageError(f"--skip {min(both).replace('_', '-')}: it is asked for as well")
        return wishes

    def permits(self, change: Change) -> bool:
        """Whether this change may be tried."""
        said = {change.name, change.name.partition(":")[0], change.safety}
        if change.name == "learning_rate":
            said.add("batch_size")  # it comes with the batch
        if self.skip & said or (self.only and not self.only & said):
            return False
        return (
            change.safety != "semantic"
            or bool(self.allow & (said | {"all"}))
            or bool(self.only & (said - {"semantic"}))
        )


def not_offered(wishes: Wishes, known: Iterable[str], *, on_gpu: bool) -> list[str]:
    """What a person has asked for by its name and nothing came of, and why."""
    asked = ((wishes.allow | wishes.only) & set(TO_MAKE)) - set(known) - {"learning_rate"}
    why = dict.fromkeys(asked, "nothing that was found asks for it")
    if not on_gpu and "batch_size" in why:
        why["batch_size"] = "there is no GPU that it would keep busier"
    return [f"{name} was not tried: {reason}" for name, reason in sorted(why.items())]


def _words(option: str, text: str) -> frozenset[str]:
    known = [*TO_MAKE, "setting", *get_args(Safety), "all"]
    given = [word.strip().replace("-", "_") for word in text.split(",") if word.strip()]
    for word in given:
        if word not in known and not word.startswith("setting:"):
            near = [name for name in known if name.startswith(word)]
            near = near or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0].replace('_', '-')}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"{option}: there is no change or class called {word.replace('_', '-')} ({hint})")
    return frozenset(given)


@dataclass(frozen=True)
class View:
    """What the offers are made from: the last trace, the first one, what was kept and how many times as fast that has
    made it (the last of each name), and what was tried."""

    trace: Trace
    first: Trace
    kept: Sequence[Change] = ()
    gained: Mapping[str, float] = field(default_factory=dict)
    tried: Mapping[tuple[str, str], str] = field(default_factory=dict)  # (name, value as text) → verdict

    @cached_property
    def case(self) -> RankMetrics:
        return metrics_of(self.trace)[0]

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        return diagnose(self.trace)

    @cached_property
    def settings(self) -> tuple[SettingsRead, ...]:
        """What the script read, before any knob was turned."""
        return metrics_of(self.first)[0].facts.settings

    def found(self, *codes: str) -> list[Finding]:
        """Findings whose code begins like one of these, or that an ignored setting is the reason of."""
        return [f for f in self.findings if f.code.startswith(codes) or f.evidence.get("cause", "").startswith(codes)]

    def ignored(self, *words: str) -> Finding | None:
        """A setting the script read and does not act on, by a word of what is missing."""
        return next((f for f in self.found("config.ignored") if any(word in f.title for word in words)), None)

    def verdict(self, name: str, value: Any) -> str | None:
        return self.tried.get((name, str(value)))

    def failed(self, name: str, value: Any) -> bool:
        return self.verdict(name, value) not in (None, "kept")

    def holds(self, name: str) -> bool:
        return any(change.name == name for change in self.kept)


def offers(view: View, wishes: Wishes) -> tuple[list[Offer], list[Offer]]:
    """What to try, in this order; and what would be tried if it were allowed."""
    if not wishes.permits(_elastic(view, "")):  # workers by hand, then
        view = replace(view, tried={**view.tried, ("loader", "elastic"): "not applicable"})
    made = [*_fed_and_computed(view), _augment_elsewhere(view), _transforms(view), _compile(view), _batch(view)]
    made.append(_pauses(view))
    wanted: list[Offer] = []
    withheld: list[Offer] = []
    for offer in made:
        if offer is None:
            continue
        fresh = [change for change in offer.changes if _is_new(change, view)]
        may = tuple(change for change in fresh if wishes.permits(change))
        may_not = tuple(change for change in fresh if not wishes.permits(change) and change.safety == "semantic")
        if may and may[0].name != "learning_rate" and may not in [there.changes for there in wanted]:
            wanted.append(replace(offer, changes=may))
        elif may_not:
            withheld.append(replace(offer, changes=may_not))
    wanted = _with_riders(wanted)
    wanted.sort(key=lambda offer: _turn(offer, compiled=view.holds("compile")))
    return wanted, withheld


def _with_riders(wanted: list[Offer]) -> list[Offer]:
    """A data path that promises little goes along with a larger batch that promises much: the batch needs its samples
    as fast, and workers that disturb nobody now may do so then."""
    rider = next((o for o in wanted if o.promise < _MUCH and _only_loading(o.changes)), None)
    larger = next((o for o in wanted if o.promise >= _MUCH and o.changes[0].name == "batch_size"), None)
    if rider is None or larger is None:
        return wanted
    both = replace(larger, changes=(*rider.changes, *larger.changes))
    return [both, *(offer for offer in wanted if offer not in (rider, larger))]


def _turn(offer: Offer, *, compiled: bool) -> tuple[bool, bool, bool, float]:
    """Of what promises much, and then of the rest, what leaves learning alone comes first: a few percent are no reason
    to let a multiple wait. Compiling comes last, since every later run pays for it at its start; once it is kept they
    all do, and how it is done is a change like any other."""
    compiles = not compiled and all(change.name == "compile" for change in offer.changes)
    learns_otherwise = any(change.safety == "semantic" for change in offer.changes)
    return compiles, offer.promise < _MUCH, learns_otherwise, -offer.promise


def _is_new(change: Change, view: View) -> bool:
    same = any(kept.name == change.name and kept.value == change.value for kept in view.kept)
    return not same and view.verdict(change.name, change.value) is None


def _change(name: str, value: Any, why: str, *, safety: Safety | None = None, knob: str = "") -> Change:
    return Change(name=name, value=value, safety=safety or safety_of(name), note=why, knob=knob)


def _offer(changes: Iterable[Change], findings: Sequence[Finding], **more: Any) -> Offer | None:
    made = tuple(changes)
    if not made:
        return None
    best = max(findings, key=lambda f: f.gain_high, default=None)
    why = best.title if best is not None else made[0].note
    return Offer(changes=made, why=why, promise=best.gain_high if best is not None else 1.05, **more)


# The data path


def _data_path(view: View) -> Offer | None:
    behind, frozen = view.found("data.", "copy."), view.found("pause.gc")
    case = view.case
    changes: list[Change] = []
    if behind and case.loader is not NO_LOADER:
        why = behind[0].title
        changes += _loading(view, behind, why)
        if case.on_gpu and not case.loader.pin_memory:
            changes.append(_change("pin_memory", True, why))
        if case.on_gpu:
            changes.append(_change("device_prefetch", True, why))
        elastic = any(change.name == "loader" for change in changes)
        changes += _fewer_threads(view, why, elastic=elastic or case.elastic)
        if elastic and view.found("data.cpu-bound") and _transforms_here(view):
            changes.append(_change("gpu_transforms", True, view.found("data.cpu-bound")[0].title))
    if frozen:
        changes.append(_change("gc_freeze", True, frozen[0].title))
    return _offer(changes, [*behind, *frozen])


def _loading(view: View, behind: Sequence[Finding], why: str) -> list[Change]:
    """The elastic loader; where that cannot be had, the number of workers and what goes with them.

    Where it can be had and does not pay, or may not ask the sampler early enough, that number is still worth a trial if
    it is what the diagnosis asks for. No worker of any kind where the loop makes the batches itself and writes to its
    dataset, or samples fill that.
    """
    if view.case.loader.written or view.case.loader.fills:
        return []
    elastic = _elastic(view, why)
    verdict = view.verdict("loader", "elastic")
    asked = any(f.change == "num_workers" for f in behind)
    looked_at = verdict == "undone" or (verdict == "kept" and view.case.elastic)
    if verdict not in ("not applicable", "unsafe") and not (looked_at and asked):
        return [elastic]
    loader = view.case.loader
    wanted = next((f.value for f in behind if f.change == "num_workers" and f.value), spare_cores(view.case))
    changes = []
    if wanted != loader.num_workers and not loader.iterable:  # there they decide what is in the data
        knob = _knob(view, "num_workers", loader.num_workers)
        changes.append(_change("num_workers", int(wanted), why, safety=elastic.safety, knob=knob))
    if verdict == "kept":
        return changes
    if loader.num_workers and (loader.prefetch_factor or 2) < 4:
        changes.append(_change("prefetch_factor", 4, why))
    if view.found("data.worker-start") and not loader.persistent_workers:
        changes.append(_change("persistent_workers", True, why, knob=_knob(view, "persistent_workers", False)))
    return changes


def _elastic(view: View, why: str) -> Change:
    draws = any(report.random_used for report in view.case.reports) or not view.case.reports
    return _change("loader", "elastic", why, safety="reseeded" if draws else "identical")


def _fewer_threads(view: View, why: str, *, elastic: bool) -> list[Change]:
    """One thread a worker, where workers and threads together outnumber the cores: by the script's own setting for
    them, else by limiting the libraries. The elastic loader's workers have one thread of these anyway."""
    workers, cores = view.case.workers, view.case.cores or math.inf
    many = [k for k in knobs(view.settings, "threads", _is_count) if k.value > 1 and workers * k.value > cores]
    if many:
        return [_change(f"setting:{_key(many[0])}", 1, why, safety="identical", knob=many[0].text)]
    named_by_finding = any(finding.change == "worker_threads" for finding in view.found("data."))
    if named_by_finding and not elastic:
        return [_change("worker_threads", 1, why)]
    return []


def _augment_elsewhere(view: View) -> Offer | None:
    """Augmentation that the script itself can do on the card."""
    behind, there = view.found("data."), _augment_knobs(view)
    if not behind or not there or not view.case.on_gpu:
        return None
    return _offer([_change(f"setting:{_key(there[0])}", "gpu", behind[0].title, knob=there[0].text)], behind)


def _transforms(view: View) -> Offer | None:
    """What samples do to their pictures, left to the card: once the loader is ours and is still what training waits
    for."""
    behind = view.found("data.")
    if not behind or not view.holds("loader") or not _transforms_here(view):
        return None
    return _offer([_change("gpu_transforms", True, behind[0].title)], behind)


def _transforms_here(view: View) -> bool:
    """Whether samples may do work to pictures that the card could do, with no switch of the script's own for it."""
    case = view.case
    seen = case.on_gpu and case.facts.pillow and case.loader.collate == "default_collate"
    return bool(seen) and not _augment_knobs(view)


def _augment_knobs(view: View) -> list[Knob]:
    return knobs(view.settings, "augment_on", lambda value: str(value).lower() == "cpu")


# Compute


def _fed_and_computed(view: View) -> list[Offer | None]:
    fed, compute = _data_path(view), _compute(view)
    if fed is not None and compute is not None and fed.promise < _MUCH <= compute.promise:
        return [replace(compute, changes=(*fed.changes, *compute.changes))]
    return [fed, compute]


def _compute(view: View) -> Offer | None:
    case = view.case
    if not case.on_gpu:
        return None
    found = view.found("compute.precision", "compute.layout", "compute.optimizer")
    convolves, facts = case.facts.channels_last is not None, case.facts
    changes = _precision(view)
    asked = view.ignored("channels_last")
    if facts.channels_last is False and (changes or asked or view.found("compute.layout")):
        why = _why(view, "compute.layout", asked)
        changes.append(_change("channels_last", True, why, knob=_switch(view, "channels_last")))
    asked = view.ignored("benchmark")
    if convolves and facts.cudnn_benchmark is False and not facts.deterministic and (changes or asked):
        changes.append(_change("cudnn_benchmark", True, _why(view, "compute.precision", asked)))
    asked = view.ignored("fused")
    fusable = facts.optimizer in FUSABLE and not facts.optimizer_fused
    if fusable and (asked or changes or view.found("compute.optimizer", "launch.bound")):
        changes.append(_change("fused_optimizer", True, _why(view, "compute.optimizer", asked)))
    return _offer(changes, found)


def _precision(view: View) -> list[Change]:
    """bf16 by the script's own switch, else around the forward pass; fp16 where the card has none; else TF32."""
    asked = view.ignored("autocast", "TF32")
    if not asked and not view.found("compute.precision"):
        return []
    why = _why(view, "compute.precision", asked)
    switch = _switch(view, "precision")
    if switch and not view.failed("precision", True):
        return [_change("precision", True, why, knob=switch)]
    half = "fp16" if view.verdict("precision", "bf16") == "not applicable" else "bf16"
    value = "tf32" if view.failed("precision", half) else half
    return [_change("precision", value, why)]


def _why(view: View, code: str, asked: Finding | None) -> str:
    found = view.found(code)
    return asked.title if asked is not None else found[0].title if found else "goes with the change of precision"


def _compile(view: View) -> Offer | None:
    """As graphs of kernels, which are one launch then, or as it is by default."""
    case, held, late = view.case, view.holds("compile"), _late(view)
    found, asked = view.found("compute.eager", "launch.bound"), view.ignored("compiled")
    by_the_script = case.facts.compiled and not held
    if not case.on_gpu or by_the_script or not (found or asked or held or late > LATE_LAUNCHES):
        return None
    mode = next((mode for mode in _modes(view) if view.verdict("compile", mode) is None), None)
    if mode is None:
        return None
    waits = f"the card waits for launches {late:.0%} of the step" if late > _SHOWS else "compiling has paid already"
    why = asked.title if asked is not None else found[0].title if found else waits
    offer = _offer([_change("compile", mode, why)], found)
    if offer is not None and mode == "reduce-overhead":
        offer = replace(offer, promise=max(offer.promise, 1 / (1 - late)))
    return offer


def _late(view: View) -> float:
    """The share of the step in which the card waits for launches that a graph would spare."""
    return view.case.waits_for_launches("forward", "backward")


def _modes(view: View) -> list[str]:
    """How to compile, one after the other. Tuned kernels are graphs too, and take minutes to find."""
    late = _late(view)
    if any(step.micro_steps > 1 for step in view.case.steps):
        return ["default"]  # gradients that are added up would lie in the graphs' memory, and be written over
    if view.holds("compile"):
        graphs = ["reduce-overhead"] if late > _SHOWS else []
        return [*graphs, "max-autotune"] if view.verdict("compile", "reduce-overhead") != "unsafe" else []
    if view.case.rank.info.world_size == 1:
        return ["reduce-overhead", "default"]  # launches that were in time are late once kernels are quicker
    # Collectives in a graph are another matter: with several ranks it is seen first whether compiling works at all.
    graphs = ["reduce-overhead"] if late > LATE_LAUNCHES or view.found("launch.bound") else []
    return ["default", *graphs]


# What changes learning


def _batch(view: View) -> Offer | None:
    case, found = view.case, view.found("launch.bound", "memory.underused")
    now = case.loader.batch_size
    then = metrics_of(view.first)[0].loader.batch_size
    there = knobs(view.settings, "batch_size", lambda value: value == then)
    if not there or not isinstance(now, int) or not isinstance(then, int):
        return None
    if case.headroom > 1.25 and not view.found("launch.bound"):  # it waits for something that grows with the batch
        return None
    if view.holds("loader") and case.share("data") > _STARVED:  # which has all workers that help
        return None
    reserved, total = case.facts.memory_reserved_bytes, case.gpu("memory_total_bytes").high
    share = reserved / total if reserved and math.isfinite(total) else None
    if share is None or share > _HALF_A_GPU_IDLE:
        return None
    factor = 4 if share < _HALF_A_GPU_IDLE / 4 and found else 2
    length = case.loader.length
    while factor > 1 and length and now * factor * 8 > length:
        factor //= 2
    if factor < 2 or view.failed("batch_size", now * factor):
        factor = 2
    wanted = now * factor
    if length and wanted * 8 > length:
        return None
    why = f"a batch of {now} uses {share:.0%} of the card's memory"
    changes = [_change("batch_size", wanted, why, knob=there[0].text), *_learning_rate(view, wanted / then)]
    offer, earlier = _offer(changes, found, apart=False), view.gained.get("batch_size")
    if offer is None or earlier is None:
        return offer
    return replace(offer, promise=min(offer.promise, 1 + (earlier - 1) / 2))  # each time it brings less


def _learning_rate(view: View, times: float) -> list[Change]:
    """Adam and its kin: by the square root of the batch; SGD: in proportion."""
    facts = metrics_of(view.first)[0].facts
    there = knobs(view.settings, "learning_rate", lambda value: isinstance(value, float) and value > 0)
    in_force = facts.learning_rate
    equal = [knob for knob in there if in_force and math.isclose(knob.value, in_force, rel_tol=1e-6)]
    if not there:
        return []
    knob = (equal or there)[0]
    linear = "sgd" in str(facts.optimizer).lower()
    value = float(f"{knob.value * (times if linear else math.sqrt(times)):.4g}")
    rule = "in proportion to the batch" if linear else "with the square root of the batch"
    why = f"the learning rate grows {rule} (×{times:g}): {knob.value:g} → {value:g}"
    return [_change("learning_rate", value, why, knob=knob.text)]


def scaled_twice(change: Change, before: RankMetrics, now: RankMetrics) -> str | None:
    """Why a learning rate that was raised with the batch is left alone: the script raises it too."""
    if change.name != "learning_rate":
        return None
    there = knobs(before.facts.settings, "learning_rate", lambda value: isinstance(value, float))
    given = next((knob.value for knob in there if knob.text == change.knob), None)
    old, new = (case.facts.learning_rate for case in (before, now))
    if not given or not old or not new or new / old < _TWICE * change.value / given:
        return None
    return f"the script itself raises it with the batch: ×{new / old:.3g} where ×{change.value / given:.3g} was set"


def _pauses(view: View) -> Offer | None:
    changes, found = [], []
    for name in PAUSES:
        stands = view.found(*(cause.code for cause in cured_by(name)))
        there = knobs(view.settings, name, _is_count)
        if stands and there and not view.holds(name):
            value, left = _less_often(there[0], knobs(view.settings, "epochs", _is_count))
            if value > there[0].value:
                found += stands
                changes.append(_change(name, value, f"{stands[0].title}{left}", knob=there[0].text))
    return _offer(changes, found, pauses=True)


def _less_often(interval: Knob, epochs: Sequence[Knob]) -> tuple[int, str]:
    """A fifth as often, but once at least where epochs are counted and it is known how many there are; and how often
    it is left then."""
    value = int(interval.value) * EVALUATE_LESS
    if not epochs or re.search("step|iter|batch", interval.key):
        return value, ""
    value = min(value, int(epochs[0].value))
    return value, f"; then about {-(-epochs[0].value // value)} of {epochs[0].value} epochs end with it"


def pause_knobs(view: View) -> bool:
    """Whether the script could evaluate or save less often, if that is found to cost much."""
    return any(knobs(view.settings, name, _is_count) for name in PAUSES)


# Knobs


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _key(knob: Knob) -> str:
    return knob.key.rpartition(".")[2]


def _knob(view: View, name: str, in_force: Any) -> str:
    return next((knob.text for knob in knobs(view.settings, name, lambda value: value == in_force)), "")


def _switch(view: View, name: str) -> str:
    """A switch that is off: False, or a word for it."""
    there = knobs(view.settings, name, lambda value: value is False)
    return there[0].text if there else ""
