"""Trace → Offers: which changes to try next, those that promise much first, and of these the harmless ones
first.

The diagnosis says what is wrong; here it becomes changes, by the script's own knob where it has one. Changes
that belong together and rarely do harm make one Offer, which is tried as a whole and taken apart only if it
fails:

    data path   elastic loader, page-locking, device prefetch, gc freeze, fewer threads; transforms on the GPU where the
                cores are the limit, or where training still waits for data with all of that
    compute     precision, channels_last, fused optimizer, cuDNN benchmark; with them a data path that promises little:
                what a loader costs may matter beside a fast step
    compile     alone, since it takes long; with one rank as CUDA graphs first
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
from flatout.diagnose.find_knobs import Knob, knobs
from flatout.diagnose.gains import spare_cores
from flatout.diagnose.rank_metrics import LATE_LAUNCHES, RankMetrics, metrics_of
from flatout.diagnose.rules import diagnose
from flatout.model.causes import cured_by
from flatout.model.changes import SETTING, TO_MAKE, named, safety_of
from flatout.model.errors import UsageError
from flatout.model.facts import NO_LOADER, SettingsRead
from flatout.model.finding import Finding
from flatout.model.plan import Change, Safety
from flatout.trace import Trace

PAUSES = named(family="pauses")
LOADED_BY_HAND = {"num_workers", "prefetch_factor"}  # what the elastic loader decides itself
_PAUSE_LESS_OFTEN = 5
_MIN_PROMISE = 1.1  # times as fast: what promises less waits, and is not taken apart
_UNKNOWN_PROMISE = 1.05  # of a change that no finding asks for
_MIN_LATE = 0.05  # of the step: what one more run can show, where runs differ by 2%
_SCALED_AGAIN = 1.2  # times the learning rate that was set: the script scaled it too
_STARVED = 0.15  # of the step is a wait for data: a larger batch would wait for that too
_ROOM_IN_MEMORY = 0.3  # of the GPU's memory in use, at the most, for a larger batch
_MIN_BATCHES = 8  # of the larger size in an epoch
_NEAR_CEILING = 1.25


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
        """Whether the GPU is given the same work: its X-ray and its ceiling are known already."""
        return self.pauses or _only_loading(self.changes)

    @property
    def splits(self) -> bool:
        """Whether it can be tried part by part."""
        return len(self.parts) > 1

    @property
    def parts(self) -> list[Offer]:
        """What to try where the whole failed: each change alone, and what goes together as one."""
        together: tuple[Change, ...] = ()
        if not self.apart:
            together = tuple(change for change in self.changes if change.safety == "semantic")
        parts = [replace(self, changes=(change,)) for change in self.changes if change not in together]
        if together:
            parts.append(replace(self, changes=together))
        return parts

    @property
    def worth_splitting(self) -> bool:
        """Whether so much was hoped for that one change may hide what another brings."""
        return self.splits and self.promise >= _MIN_PROMISE


def in_words(change: Change) -> str:
    """A change as one would say it."""
    name = change.name.removeprefix(SETTING)
    if change.value is True:
        return name
    return f"{change.value} loader" if name == "loader" else f"{name} {change.value}"


def all_in_words(changes: Iterable[Change]) -> str:
    """Several, as one would say them."""
    return " + ".join(in_words(change) for change in changes)


def with_changes(kept: Sequence[Change], changes: Sequence[Change]) -> tuple[Change, ...]:
    """What was kept and these, each name once, and nothing beside the elastic loader that it decides itself."""
    names = {change.name for change in changes}
    if "loader" in names:
        names |= LOADED_BY_HAND
    return (*(change for change in kept if change.name not in names), *changes)


def _only_loading(changes: Iterable[Change]) -> bool:
    return all(change.name in named(family="data path") for change in changes)


# What the person wants


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
        words = {change.name, change.name.partition(":")[0], change.safety}
        if change.name == "learning_rate":
            words.add("batch_size")  # it comes with the batch
        if self.skip & words or (self.only and not self.only & words):
            return False
        if change.safety != "semantic" or self.allow & (words | {"all"}):
            return True
        return bool(self.only & (words - {"semantic"}))


def not_offered(wishes: Wishes, offered: Iterable[str], *, on_gpu: bool) -> list[str]:
    """What a person has asked for by name and was not offered, and why."""
    asked = ((wishes.allow | wishes.only) & set(TO_MAKE)) - set(offered) - {"learning_rate"}
    why = dict.fromkeys(asked, "nothing that was found asks for it")
    if not on_gpu and "batch_size" in why:
        why["batch_size"] = "there is no GPU that it would keep busier"
    return [f"{name} was not tried: {reason}" for name, reason in sorted(why.items())]


def _words(option: str, text: str) -> frozenset[str]:
    known = [*TO_MAKE, "setting", *get_args(Safety), "all"]
    given = [word.strip().replace("-", "_") for word in text.split(",") if word.strip()]
    for word in given:
        if word not in known and not word.startswith(SETTING):
            near = [name for name in known if name.startswith(word)]
            near = near or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0].replace('_', '-')}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"{option}: there is no change or class called {word.replace('_', '-')} ({hint})")
    return frozenset(given)


# The offers


@dataclass(frozen=True)
class View:
    """What offers are made from: the last trace, the first one, what was kept and how many times as fast that
    has made it (the last of each name), and what was tried."""

    trace: Trace
    first: Trace
    kept: Sequence[Change] = ()
    gained: Mapping[str, float] = field(default_factory=dict)
    tried: Mapping[tuple[str, str], str] = field(default_factory=dict)  # (name, value as text) → verdict

    @cached_property
    def metrics(self) -> RankMetrics:
        return metrics_of(self.trace)[0]

    @cached_property
    def before(self) -> RankMetrics:
        """The command as it is."""
        return metrics_of(self.first)[0]

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        return diagnose(self.trace)

    @property
    def settings(self) -> tuple[SettingsRead, ...]:
        """What the script read, before any knob was turned."""
        return self.before.facts.settings

    def found(self, *codes: str) -> list[Finding]:
        """Findings whose code begins like one of these, or that explain an ignored setting by one."""
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
    if not wishes.permits(_elastic(view, "")):  # then by the number of workers
        view = replace(view, tried={**view.tried, ("loader", "elastic"): "not applicable"})
    made = [
        *_data_path_and_compute(view),
        _augment_on_gpu(view),
        _transforms(view),
        _compile(view),
        _larger_batch(view),
        _rarer_pauses(view),
    ]
    permitted: list[Offer] = []
    withheld: list[Offer] = []
    for offer in made:
        if offer is None:
            continue
        fresh = [change for change in offer.changes if _is_new(change, view)]
        may = tuple(change for change in fresh if wishes.permits(change))
        may_not = tuple(change for change in fresh if not wishes.permits(change) and change.safety == "semantic")
        if may and may[0].name != "learning_rate" and may not in [other.changes for other in permitted]:
            permitted.append(replace(offer, changes=may))
        elif may_not:
            withheld.append(replace(offer, changes=may_not))
    permitted = _data_path_with_batch(permitted)
    permitted.sort(key=lambda offer: _order(offer, compiled=view.holds("compile")))
    return permitted, withheld


def _data_path_with_batch(permitted: list[Offer]) -> list[Offer]:
    """A data path that promises little goes along with a larger batch that promises much: the batch needs its
    samples as fast, and workers that disturb nobody now may do so then."""
    loading = [o for o in permitted if o.promise < _MIN_PROMISE and _only_loading(o.changes)]
    larger = [o for o in permitted if o.promise >= _MIN_PROMISE and o.changes[0].name == "batch_size"]
    if not loading or not larger:
        return permitted
    both = replace(larger[0], changes=(*loading[0].changes, *larger[0].changes))
    return [both, *(offer for offer in permitted if offer not in (loading[0], larger[0]))]


def _order(offer: Offer, *, compiled: bool) -> tuple[bool, bool, bool, float]:
    """What promises much comes first, and of that what leaves learning alone; then the rest in the same way.

    Compiling comes last, since every later run pays for it at its start. Once it is kept, another mode is a
    change like any other.
    """
    compiles = not compiled and all(change.name == "compile" for change in offer.changes)
    changes_learning = any(change.safety == "semantic" for change in offer.changes)
    return compiles, offer.promise < _MIN_PROMISE, changes_learning, -offer.promise


def _is_new(change: Change, view: View) -> bool:
    same = any(kept.name == change.name and kept.value == change.value for kept in view.kept)
    return not same and view.verdict(change.name, change.value) is None


def _change(name: str, value: Any, why: str, *, safety: Safety | None = None, knob: str = "") -> Change:
    return Change(name=name, value=value, safety=safety or safety_of(name), note=why, knob=knob)


def _offer(changes: Iterable[Change], findings: Sequence[Finding], **more: Any) -> Offer | None:
    """Changes that these findings ask for."""
    changes = tuple(changes)
    if not changes:
        return None
    if not findings:
        return Offer(changes=changes, why=changes[0].note, promise=_UNKNOWN_PROMISE, **more)
    best = max(findings, key=lambda finding: finding.gain_high)
    return Offer(changes=changes, why=best.title, promise=best.gain_high, **more)


# The data path


def _data_path_and_compute(view: View) -> list[Offer | None]:
    loading, compute = _data_path(view), _compute(view)
    if loading is not None and compute is not None and loading.promise < _MIN_PROMISE <= compute.promise:
        return [replace(compute, changes=(*loading.changes, *compute.changes))]
    return [loading, compute]


def _data_path(view: View) -> Offer | None:
    found, frozen, metrics = view.found("data.", "copy."), view.found("pause.gc"), view.metrics
    changes: list[Change] = []
    if found and metrics.loader is not NO_LOADER:
        why = found[0].title
        changes += _loading(view, found, why)
        if metrics.on_gpu and not metrics.loader.pin_memory:
            changes.append(_change("pin_memory", True, why))
        if metrics.on_gpu:
            changes.append(_change("device_prefetch", True, why))
        elastic = any(change.name == "loader" for change in changes)
        changes += _fewer_threads(view, why, elastic=elastic or metrics.elastic)
        cpu_bound = view.found("data.cpu-bound")
        if elastic and cpu_bound and _may_transform_on_gpu(view):
            changes.append(_change("gpu_transforms", True, cpu_bound[0].title))
    if frozen:
        changes.append(_change("gc_freeze", True, frozen[0].title))
    return _offer(changes, [*found, *frozen])


def _loading(view: View, found: Sequence[Finding], why: str) -> list[Change]:
    """The elastic loader; where that cannot be had, the number of workers and what goes with it.

    The number is still worth a trial beside the elastic loader, or where that does not pay, if the diagnosis
    asks for it. No worker of any kind where the loop makes the batches itself and writes to its dataset, or
    samples fill it.
    """
    loader = view.metrics.loader
    if loader.written or loader.fills:
        return []
    verdict = view.verdict("loader", "elastic")
    can_be_had = verdict not in ("not applicable", "unsafe")
    number_asked = any(finding.change == "num_workers" for finding in found)
    settled = verdict == "undone" or (verdict == "kept" and view.metrics.elastic)
    if can_be_had and not (settled and number_asked):
        return [_elastic(view, why), *_keep_workers(view, why)]
    if verdict == "kept":
        return _number_of_workers(view, found, why)
    changes = _number_of_workers(view, found, why)
    if loader.num_workers and (loader.prefetch_factor or 2) < 4:
        changes.append(_change("prefetch_factor", 4, why))
    return [*changes, *_keep_workers(view, why)]


def _elastic(view: View, why: str) -> Change:
    draws = any(report.random_used for report in view.metrics.reports) or not view.metrics.reports
    return _change("loader", "elastic", why, safety="reseeded" if draws else "identical")


def _number_of_workers(view: View, found: Sequence[Finding], why: str) -> list[Change]:
    loader = view.metrics.loader
    values = [finding.value for finding in found if finding.change == "num_workers" and finding.value]
    wanted = int(values[0]) if values else spare_cores(view.metrics)
    if wanted == loader.num_workers or loader.iterable:  # the workers of a stream decide what is in the data
        return []
    knob = _knob(view, "num_workers", loader.num_workers)
    return [_change("num_workers", wanted, why, safety=_elastic(view, why).safety, knob=knob)]


def _keep_workers(view: View, why: str) -> list[Change]:
    """The workers of one epoch for the next, where starting them costs."""
    if not view.found("data.worker-start") or view.metrics.loader.persistent_workers:
        return []
    return [_change("persistent_workers", True, why, knob=_knob(view, "persistent_workers", False))]


def _fewer_threads(view: View, why: str, *, elastic: bool) -> list[Change]:
    """One thread a worker, where workers and threads together outnumber the cores: by the script's own
    setting for them, else by limiting the libraries. The elastic loader's workers have one thread of these
    anyway."""
    workers, cores = view.metrics.workers, view.metrics.cores or math.inf
    many = [k for k in knobs(view.settings, "threads", _is_count) if k.value > 1 and workers * k.value > cores]
    if many:
        return [_change(f"{SETTING}{_key(many[0])}", 1, why, safety="identical", knob=many[0].text)]
    if not elastic and any(finding.change == "worker_threads" for finding in view.found("data.")):
        return [_change("worker_threads", 1, why)]
    return []


def _augment_on_gpu(view: View) -> Offer | None:
    """Augmentation that the script itself can do on the GPU."""
    found, there = view.found("data."), _augment_knobs(view)
    if not found or not there or not view.metrics.on_gpu:
        return None
    return _offer([_change(f"{SETTING}{_key(there[0])}", "gpu", found[0].title, knob=there[0].text)], found)


def _transforms(view: View) -> Offer | None:
    """Transforms on the GPU, once the loader is ours and training still waits for it."""
    found = view.found("data.")
    if not found or not view.holds("loader") or not _may_transform_on_gpu(view):
        return None
    return _offer([_change("gpu_transforms", True, found[0].title)], found)


def _may_transform_on_gpu(view: View) -> bool:
    """Whether samples may do work to pictures that the GPU could do, with no switch of the script's own for it."""
    metrics = view.metrics
    pictures = metrics.on_gpu and metrics.facts.pillow and metrics.loader.collate == "default_collate"
    return bool(pictures) and not _augment_knobs(view)


def _augment_knobs(view: View) -> list[Knob]:
    return knobs(view.settings, "augment_on", lambda value: str(value).lower() == "cpu")


# Compute


def _compute(view: View) -> Offer | None:
    if not view.metrics.on_gpu:
        return None
    facts = view.metrics.facts
    changes = _precision(view)
    precision = bool(changes)
    asked = view.ignored("channels_last")
    if facts.channels_last is False and (precision or asked or view.found("compute.layout")):
        why = _why(view, "compute.layout", asked)
        changes.append(_change("channels_last", True, why, knob=_switch(view, "channels_last")))
    asked = view.ignored("benchmark")
    convolves, free = facts.channels_last is not None, facts.cudnn_benchmark is False and not facts.deterministic
    if convolves and free and (changes or asked):
        changes.append(_change("cudnn_benchmark", True, _why(view, "compute.precision", asked)))
    asked = view.ignored("fused")
    fusable = facts.optimizer in FUSABLE and not facts.optimizer_fused
    if fusable and (asked or changes or view.found("compute.optimizer", "launch.bound")):
        changes.append(_change("fused_optimizer", True, _why(view, "compute.optimizer", asked)))
    return _offer(changes, view.found("compute.precision", "compute.layout", "compute.optimizer"))


def _precision(view: View) -> list[Change]:
    """bf16 by the script's own switch, else around the forward pass; fp16 where the GPU has no bf16; else TF32."""
    asked = view.ignored("autocast", "TF32")
    if not asked and not view.found("compute.precision"):
        return []
    why, switch = _why(view, "compute.precision", asked), _switch(view, "precision")
    if switch and not view.failed("precision", True):
        return [_change("precision", True, why, knob=switch)]
    half = "fp16" if view.verdict("precision", "bf16") == "not applicable" else "bf16"
    return [_change("precision", "tf32" if view.failed("precision", half) else half, why)]


def _why(view: View, code: str, asked: Finding | None) -> str:
    reasons = [finding.title for finding in (asked, *view.found(code)) if finding is not None]
    return reasons[0] if reasons else "goes with the change of precision"


def _compile(view: View) -> Offer | None:
    """As CUDA graphs, which launch many kernels at once, or as it is by default."""
    found, asked = view.found("compute.eager", "launch.bound"), view.ignored("compiled")
    kept, late = view.holds("compile"), _late(view)
    by_the_script = view.metrics.facts.compiled and not kept
    if not view.metrics.on_gpu or by_the_script or not (found or asked or kept or late > LATE_LAUNCHES):
        return None
    mode = next((mode for mode in _compile_modes(view) if view.verdict("compile", mode) is None), None)
    if mode is None:
        return None
    reasons = [finding.title for finding in (asked, *found) if finding is not None]
    if late > _MIN_LATE:
        reasons.append(f"the GPU waits for launches {late:.0%} of the step")
    reasons.append("compiling has paid already")
    offer = _offer([_change("compile", mode, reasons[0])], found)
    if offer is not None and mode == "reduce-overhead":
        return replace(offer, promise=max(offer.promise, 1 / (1 - late)))
    return offer


def _late(view: View) -> float:
    """The share of the step in which the GPU waits for launches that a graph would spare."""
    return view.metrics.waits_for_launches("forward", "backward")


def _compile_modes(view: View) -> list[str]:
    """How to compile, one after the other. Tuned kernels are graphs too, and take minutes to find."""
    late = _late(view)
    if any(step.micro_steps > 1 for step in view.metrics.steps):
        return ["default"]  # gradients that are accumulated would lie in the graphs' memory, and be written over
    if view.holds("compile"):
        if view.verdict("compile", "reduce-overhead") == "unsafe":
            return []
        return ["reduce-overhead", "max-autotune"] if late > _MIN_LATE else ["max-autotune"]
    if view.metrics.rank.info.world_size == 1:
        return ["reduce-overhead", "default"]  # launches that were in time are late once kernels are quicker
    # Collectives in a graph are another matter: with several ranks, see first whether compiling works at all.
    if late > LATE_LAUNCHES or view.found("launch.bound"):
        return ["default", "reduce-overhead"]
    return ["default"]


# What changes learning


def _larger_batch(view: View) -> Offer | None:
    metrics, found = view.metrics, view.found("launch.bound", "memory.underused")
    batch, first = metrics.loader.batch_size, view.before.loader.batch_size
    places = knobs(view.settings, "batch_size", lambda value: value == first)
    if not places or not batch or not first:
        return None
    if metrics.headroom > _NEAR_CEILING and not view.found("launch.bound"):  # it waits for what grows with the batch
        return None
    if view.holds("loader") and metrics.share("data") > _STARVED:  # which has all workers that help
        return None
    reserved, total = metrics.facts.memory_reserved_bytes, metrics.gpu("memory_total_bytes").high
    if not reserved or not math.isfinite(total) or reserved / total > _ROOM_IN_MEMORY:
        return None
    share, length = reserved / total, metrics.loader.length
    fits = math.inf if not length else length / _MIN_BATCHES / batch  # how many times as large
    factor = 2
    if found and share < _ROOM_IN_MEMORY / 4 and fits >= 4 and not view.failed("batch_size", 4 * batch):
        factor = 4
    if factor > fits:
        return None
    why = f"a batch of {batch} uses {share:.0%} of the GPU's memory"
    wanted = batch * factor
    changes = [_change("batch_size", wanted, why, knob=places[0].text), *_learning_rate(view, wanted / first)]
    offer, earlier = _offer(changes, found, apart=False), view.gained.get("batch_size")
    if offer is None or earlier is None:
        return offer
    return replace(offer, promise=min(offer.promise, 1 + (earlier - 1) / 2))  # each time it brings less


def _learning_rate(view: View, times: float) -> list[Change]:
    """Adam and its kin: by the square root of the batch; SGD: in proportion."""
    facts = view.before.facts
    places = knobs(view.settings, "learning_rate", lambda value: isinstance(value, float) and value > 0)
    if not places:
        return []
    in_force = facts.learning_rate
    equal = [knob for knob in places if in_force and math.isclose(knob.value, in_force, rel_tol=1e-6)]
    knob = (equal or places)[0]
    rule, factor = "with the square root of the batch", math.sqrt(times)
    if "sgd" in str(facts.optimizer).lower():
        rule, factor = "in proportion to the batch", times
    value = float(f"{knob.value * factor:.4g}")
    why = f"the learning rate grows {rule} (×{times:g}): {knob.value:g} → {value:g}"
    return [_change("learning_rate", value, why, knob=knob.text)]


def scaled_twice(change: Change, before: RankMetrics, now: RankMetrics) -> str | None:
    """Why a learning rate that was raised with the batch is left alone: the script raises it too."""
    if change.name != "learning_rate":
        return None
    places = knobs(before.facts.settings, "learning_rate", lambda value: isinstance(value, float))
    given = next((knob.value for knob in places if knob.text == change.knob), None)
    old, new = before.facts.learning_rate, now.facts.learning_rate
    if not given or not old or not new or new / old < _SCALED_AGAIN * change.value / given:
        return None
    return f"the script itself raises it with the batch: ×{new / old:.3g} where ×{change.value / given:.3g} was set"


def _rarer_pauses(view: View) -> Offer | None:
    changes: list[Change] = []
    found: list[Finding] = []
    for name in PAUSES:
        pauses, places = view.found(*(cause.code for cause in cured_by(name))), knobs(view.settings, name, _is_count)
        if not pauses or not places or view.holds(name):
            continue
        value, left = _rarer(places[0], knobs(view.settings, "epochs", _is_count))
        if value > places[0].value:
            found += pauses
            changes.append(_change(name, value, f"{pauses[0].title}{left}", knob=places[0].text))
    return _offer(changes, found, pauses=True)


def _rarer(interval: Knob, epochs: Sequence[Knob]) -> tuple[int, str]:
    """A fifth as often, but once at least where epochs are counted and their number is known; and what is left then."""
    value = int(interval.value) * _PAUSE_LESS_OFTEN
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
    """A switch of the script that is off."""
    return next((knob.text for knob in knobs(view.settings, name, lambda value: value is False)), "")
