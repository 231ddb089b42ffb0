"""Trace → Offers: which changes to try next, those that promise much first, and of these the harmless ones first.

A finding asks for changes, which are made by the script's own knob where it has one. Changes that
belong together and rarely do harm make one Offer, which is tried as a whole and taken apart only if
it fails. docs/FIX.md lists the offers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

from flatout.diagnose.compute_rules import FUSABLE
from flatout.diagnose.knobs import Knob, knobs
from flatout.diagnose.rank_metrics import LATE_LAUNCHES, RankMetrics, metrics_of
from flatout.diagnose.rules import diagnose
from flatout.model.causes import Finding, cured_by
from flatout.model.changes import BY_NAME, SETTING, TO_MAKE, named, safety_of
from flatout.model.errors import UsageError
from flatout.model.inputs import did_you_mean
from flatout.model.plan import Change, Safety
from flatout.model.records import NO_LOADER
from flatout.trace import Trace

PAUSES = named(family="pauses")
COMPUTE = named(family="compute")
_DATA_PATH, _BATCH = named(family="data path"), named(family="batch size")
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

    @property
    def name(self) -> str:
        """What is tried, in words."""
        return all_in_words(self.changes)

    @property
    def pauses(self) -> bool:
        """Whether it is about evaluation and checkpoints."""
        return all(change.name in PAUSES for change in self.changes)

    @property
    def only_loads(self) -> bool:
        """Whether the GPU is given the same work, so that its X-ray and its ceiling are known already."""
        return all(change.name in _DATA_PATH for change in self.changes)

    @property
    def parts(self) -> list[Offer]:
        """What to try where the whole failed: each change alone, but a batch with its learning rate."""
        batch = tuple(change for change in self.changes if change.name in _BATCH)
        parts = [replace(self, changes=(change,)) for change in self.changes if change not in batch]
        return [*parts, replace(self, changes=batch)] if batch else parts

    @property
    def worth_splitting(self) -> bool:
        """Whether so much was hoped for that one change may hide what another brings."""
        return len(self.parts) > 1 and self.promise >= _MIN_PROMISE


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
    """What was kept and these, each name once; the elastic loader decides some of the others itself."""
    names = {change.name for change in changes}
    if "loader" in names:
        names |= LOADED_BY_HAND
    return (*(change for change in kept if change.name not in names), *changes)


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


def not_offered(wishes: Wishes, offered: Iterable[str]) -> list[str]:
    """What a person has asked for by name and was not offered, and why."""
    asked = ((wishes.allow | wishes.only) & set(TO_MAKE)) - set(offered) - {"learning_rate"}
    return [f"{name} was not tried: nothing that was found asks for it" for name in sorted(asked)]


def _words(option: str, text: str) -> frozenset[str]:
    known = [*TO_MAKE, "setting", *get_args(Safety), "all"]
    given = [word.strip().replace("-", "_") for word in text.split(",") if word.strip()]
    for word in given:
        if word not in known and not word.startswith(SETTING):
            hint = did_you_mean(word, known).replace("_", "-")
            raise UsageError(f"{option}: there is no change or class called {word.replace('_', '-')} ({hint})")
    return frozenset(given)


# The offers


@dataclass(frozen=True)
class View:
    """What offers are made from: the last trace, the first one, what was kept and what was tried."""

    trace: Trace
    first: Trace
    kept: Sequence[Change] = ()
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

    def found(self, *codes: str) -> list[Finding]:
        """Findings whose code begins like one of these."""
        return [finding for finding in self.findings if finding.code.startswith(codes)]

    def asking_for(self, name: str) -> list[Finding]:
        """Findings that a change would cure: a setting that asks for it in vain, and its causes."""
        off, codes = BY_NAME[name].off, [cause.code for cause in cured_by(name)]
        ignored = [finding for finding in self.found("config.ignored") if off and off in finding.title]
        return [*ignored, *(finding for finding in self.findings if finding.code in codes)]

    def verdict(self, name: str, value: Any) -> str | None:
        return self.tried.get((name, str(value)))

    def failed(self, name: str, value: Any) -> bool:
        return self.verdict(name, value) not in (None, "kept")

    def holds(self, name: str) -> bool:
        return any(change.name == name for change in self.kept)

    def is_new(self, change: Change) -> bool:
        """Whether it was neither tried nor kept."""
        same = any(kept.name == change.name and kept.value == change.value for kept in self.kept)
        return not same and self.verdict(change.name, change.value) is None

    def knobs(self, name: str, fits: Callable[[Any], bool]) -> list[Knob]:
        """Where the script reads a value, before any knob was turned."""
        return knobs(self.before.facts.settings, name, fits)

    def knob(self, name: str, in_force: Any) -> str:
        """The place of such a value; empty if there is none."""
        same = self.knobs(name, lambda value: type(value) is type(in_force) and value == in_force)
        return same[0].text if same else ""


def offers(view: View, wishes: Wishes) -> tuple[list[Offer], list[Offer]]:
    """What to try, in this order; and what would be tried if it were allowed."""
    if not wishes.permits(_elastic(view, "")):  # then by the number of workers
        view = replace(view, tried={**view.tried, ("loader", "elastic"): "not applicable"})
    permitted: list[Offer] = []
    withheld: list[Offer] = []
    for family in (_data_path, _compute, _augment_on_gpu, _compile, _larger_batch, _rarer_pauses):
        offer = family(view)
        if offer is None:
            continue
        fresh = [change for change in offer.changes if view.is_new(change)]
        may = tuple(change for change in fresh if wishes.permits(change))
        may_not = tuple(change for change in fresh if change not in may and change.safety == "semantic")
        if may and may[0].name != "learning_rate":
            permitted.append(replace(offer, changes=may))
        elif may_not:
            withheld.append(replace(offer, changes=may_not))
    permitted = _with_data_path(permitted)
    permitted.sort(key=lambda offer: _order(offer, compiled=view.holds("compile")))
    return permitted, withheld


def _with_data_path(permitted: list[Offer]) -> list[Offer]:
    """A data path that promises little goes along with what promises much: workers that disturb
    nobody beside a slow step may do so beside a fast one, and a larger batch needs its samples as
    fast."""
    loading = next((o for o in permitted if o.promise < _MIN_PROMISE and o.only_loads), None)
    hosts = (*COMPUTE, "batch_size")
    host = next((o for o in permitted if o.promise >= _MIN_PROMISE and o.changes[0].name in hosts), None)
    if loading is None or host is None:
        return permitted
    both = replace(host, changes=(*loading.changes, *host.changes))
    return [both, *(offer for offer in permitted if offer not in (loading, host))]


def _order(offer: Offer, *, compiled: bool) -> tuple[bool, bool, bool, float]:
    """What promises much comes first, and of that what leaves learning alone; then the rest in the same way.

    Compiling comes last, since every later run pays for it at its start; once kept, another mode is
    like any change.
    """
    compiles = not compiled and all(change.name == "compile" for change in offer.changes)
    changes_learning = any(change.safety == "semantic" for change in offer.changes)
    return compiles, offer.promise < _MIN_PROMISE, changes_learning, -offer.promise


def _change(name: str, value: Any, why: str, *, safety: Safety | None = None, knob: str = "") -> Change:
    return Change(name=name, value=value, safety=safety or safety_of(name), note=why, knob=knob)


def _offer(changes: Sequence[Change], findings: Sequence[Finding]) -> Offer | None:
    """Changes that these findings ask for."""
    if not changes:
        return None
    promise = max((finding.gain_high for finding in findings), default=_UNKNOWN_PROMISE)
    return Offer(changes=tuple(changes), why=changes[0].note, promise=promise)


# The data path


def _data_path(view: View) -> Offer | None:
    found, frozen, metrics = view.found("data.", "copy."), view.found("pause.gc"), view.metrics
    changes: list[Change] = []
    # More workers than cores may matter to a faster step.
    crowded = metrics.workers > (metrics.machine.cores or math.inf) and not metrics.elastic
    if (found or crowded) and metrics.loader is not NO_LOADER:
        why = found[0].title if found else f"{metrics.workers} workers on {metrics.machine.cores:g} cores"
        changes += _workers(view, found, why)
        if metrics.on_gpu and not metrics.loader.pin_memory:
            changes.append(_change("pin_memory", True, why))
        if metrics.on_gpu:
            changes.append(_change("device_prefetch", True, why))
        elastic = metrics.elastic or view.holds("loader") or any(change.name == "loader" for change in changes)
        changes += _fewer_threads(view, why, elastic=elastic)
        # Where every core is busy, or training still waits for data though the loader is ours.
        late = view.found("data.") if view.holds("loader") else view.found("data.cpu-bound")
        if elastic and late and _may_transform_on_gpu(view):
            changes.append(_change("gpu_transforms", True, late[0].title))
    if frozen:
        changes.append(_change("gc_freeze", True, frozen[0].title))
    return _offer(changes, [*found, *frozen])


def _workers(view: View, found: Sequence[Finding], why: str) -> list[Change]:
    """The elastic loader; where that cannot be had or does not pay, a number of workers.

    None of either where the loop makes the batches itself and writes to its dataset, or samples fill it.
    """
    loader, changes = view.metrics.loader, []
    if loader.written or loader.fills:
        return []
    if view.verdict("loader", "elastic") in (None, "kept"):
        changes.append(_elastic(view, why))
    elif not loader.iterable:  # the workers of a stream decide what is in the data
        asked = [finding.value for finding in found if finding.change == "num_workers" and finding.value]
        wanted = int([*asked, view.metrics.machine.spare_cores][0])
        if wanted != loader.num_workers:
            knob = view.knob("num_workers", loader.num_workers)
            changes.append(_change("num_workers", wanted, why, safety=_elastic(view, why).safety, knob=knob))
        if loader.num_workers and (loader.prefetch_factor or 2) < 4:
            changes.append(_change("prefetch_factor", 4, why))
    if view.found("data.worker-start") and not loader.persistent_workers:
        changes.append(_change("persistent_workers", True, why, knob=view.knob("persistent_workers", False)))
    return changes


def _elastic(view: View, why: str) -> Change:
    draws = any(report.random_used for report in view.metrics.work.reports) or not view.metrics.work.reports
    return _change("loader", "elastic", why, safety="reseeded" if draws else "identical")


def _fewer_threads(view: View, why: str, *, elastic: bool) -> list[Change]:
    """One thread a worker, where threads outnumber the cores: by the script's own setting, else by
    limiting the libraries, as the elastic loader does anyway."""
    workers, cores = view.metrics.workers, view.metrics.machine.cores or math.inf
    many = [knob for knob in view.knobs("threads", _is_count) if knob.value > 1 and workers * knob.value > cores]
    if many:
        return [_change(f"{SETTING}{many[0].name}", 1, why, safety="identical", knob=many[0].text)]
    if not elastic and any(finding.change == "worker_threads" for finding in view.found("data.")):
        return [_change("worker_threads", 1, why)]
    return []


def _augment_on_gpu(view: View) -> Offer | None:
    """Augmentation that the script itself can do on the GPU."""
    found, there = view.found("data."), _augment_knobs(view)
    if not found or not there or not view.metrics.on_gpu:
        return None
    return _offer([_change(f"{SETTING}{there[0].name}", "gpu", found[0].title, knob=there[0].text)], found)


def _may_transform_on_gpu(view: View) -> bool:
    """Whether samples may do work to pictures that the GPU could do, without a switch of the script's own."""
    metrics = view.metrics
    pictures = metrics.on_gpu and metrics.facts.pillow and metrics.loader.collate == "default_collate"
    return bool(pictures) and not _augment_knobs(view)


def _augment_knobs(view: View) -> list[Knob]:
    return view.knobs("augment_on", lambda value: str(value).lower() == "cpu")


# Compute


def _compute(view: View) -> Offer | None:
    """What a finding asks for, and with it all others that are off, since one proof does for all."""
    facts = view.metrics.facts
    if not view.metrics.on_gpu:
        return None
    can = {
        "channels_last": facts.channels_last is False,
        "cudnn_benchmark": facts.channels_last is not None and not facts.deterministic,
        "fused_optimizer": facts.optimizer in FUSABLE,
    }
    changes = _precision(view)
    found = view.asking_for("precision") if changes else []
    for name, possible in can.items():
        spec, asking = BY_NAME[name], view.asking_for(name)
        if possible and spec.is_off is not None and spec.is_off(facts) and (asking or changes):
            reasons = [*(finding.title for finding in asking), "goes with the others"]
            changes.append(_change(name, True, reasons[0], knob=view.knob(name, False)))
            found += asking
    return _offer(changes, found)


def _precision(view: View) -> list[Change]:
    """The script's own switch, else bf16 around the forward pass (fp16 where the GPU has none), else TF32."""
    in_vain = [finding for finding in view.found("config.ignored") if "TF32" in finding.title]
    asking, switch = [*view.asking_for("precision"), *in_vain], view.knob("precision", False)
    if not asking:
        return []
    if switch and not view.failed("precision", True):
        return [_change("precision", True, asking[0].title, knob=switch)]
    values = ["bf16", "tf32"]
    if view.verdict("precision", "bf16") == "not applicable":
        values = ["fp16", "tf32"]
    value = next((value for value in values if not view.failed("precision", value)), "tf32")
    return [_change("precision", value, asking[0].title)]


def _compile(view: View) -> Offer | None:
    """As CUDA graphs, which launch many kernels at once, or as it is by default."""
    kept, late = view.holds("compile"), view.metrics.waits_for_launches("forward", "backward")
    # Graphs spare launches: few late ones are no reason.
    found = [one for one in view.asking_for("compile") if one.code != "launch.bound" or late > _MIN_LATE]
    by_the_script = view.metrics.facts.compiled and not kept
    if not view.metrics.on_gpu or by_the_script or not (found or kept or late > LATE_LAUNCHES):
        return None
    mode = next((mode for mode in _compile_modes(view, late) if view.verdict("compile", mode) is None), None)
    if mode is None:
        return None
    reasons = [*(finding.title for finding in found), f"the GPU waits for launches {late:.0%} of the step"]
    offer = _offer([_change("compile", mode, reasons[0])], found)
    if offer is not None and mode == "reduce-overhead":
        return replace(offer, promise=max(offer.promise, 1 / (1 - late)))
    return offer


def _compile_modes(view: View, late: float) -> list[str]:
    """How to compile, one after the other. Tuned kernels are graphs too, and take minutes to find."""
    if any(step.micro_steps > 1 for step in view.metrics.steps):
        return ["default"]  # accumulated gradients would lie in the graphs' memory, and be written over
    if view.verdict("compile", "reduce-overhead") == "unsafe":
        return ["default"]
    graphs = ["reduce-overhead"] if late > _MIN_LATE else []
    if view.holds("compile"):
        return [*graphs, "max-autotune"]
    if view.metrics.rank.info.world_size == 1:
        return ["reduce-overhead", "default"]  # launches that were in time are late once kernels are quicker
    # Collectives in a graph are another matter: with several ranks, see first whether compiling works at all.
    return ["default", *graphs]


# What changes learning


def _larger_batch(view: View) -> Offer | None:
    metrics, found = view.metrics, view.found("launch.bound", "memory.underused")
    batch, first = metrics.loader.batch_size, view.before.loader.batch_size
    if not batch or not first or not view.knob("batch_size", first):
        return None
    # It waits for what grows with the batch.
    if metrics.headroom > _NEAR_CEILING and not view.found("launch.bound"):
        return None
    if view.holds("loader") and metrics.share("data") > _STARVED:  # which has all workers that help
        return None
    reserved, total = metrics.facts.memory_reserved_bytes, metrics.machine.gpu("memory_total_bytes").high
    if not reserved or not math.isfinite(total) or reserved / total > _ROOM_IN_MEMORY:
        return None
    share, most = reserved / total, (metrics.loader.length or math.inf) / _MIN_BATCHES
    wanted = 2 * batch
    if found and share < _ROOM_IN_MEMORY / 4 and 4 * batch <= most and not view.failed("batch_size", 4 * batch):
        wanted = 4 * batch
    if wanted > most:
        return None
    why = f"a batch of {batch} uses {share:.0%} of the GPU's memory"
    larger = _change("batch_size", wanted, why, knob=view.knob("batch_size", first))
    return _offer([larger, *_learning_rate(view, wanted / first)], found)


def _learning_rate(view: View, times: float) -> list[Change]:
    """Adam and its kin: by the square root of the batch; SGD: in proportion."""
    facts = view.before.facts
    places = view.knobs("learning_rate", lambda value: isinstance(value, float) and value > 0)
    if not places:
        return []
    in_force = facts.learning_rate or 0.0
    knob = next((knob for knob in places if math.isclose(knob.value, in_force, rel_tol=1e-6)), places[0])
    rule, factor = "with the square root of the batch", math.sqrt(times)
    if "sgd" in str(facts.optimizer).lower():
        rule, factor = "in proportion to the batch", times
    value = float(f"{knob.value * factor:.4g}")
    why = f"the learning rate grows {rule} (×{times:g}): {knob.value:g} → {value:g}"
    return [_change("learning_rate", value, why, knob=knob.text)]


def scaled_twice(change: Change, before: RankMetrics, now: RankMetrics) -> str | None:
    """Why a learning rate that was raised with the batch is left alone: the script raises it too."""
    places = knobs(before.facts.settings, "learning_rate", lambda value: isinstance(value, float))
    given = next((knob.value for knob in places if knob.text == change.knob), None)
    old, new = before.facts.learning_rate, now.facts.learning_rate
    if change.name != "learning_rate" or not given or not old or not new:
        return None
    if new / old < _SCALED_AGAIN * change.value / given:
        return None
    return f"the script itself raises it with the batch: ×{new / old:.3g} where ×{change.value / given:.3g} was set"


def _rarer_pauses(view: View) -> Offer | None:
    """A fifth as often; but at least once, where epochs are counted and their number is known."""
    changes: list[Change] = []
    found: list[Finding] = []
    epochs = view.knobs("epochs", _is_count)
    for name in PAUSES:
        pauses, places = view.asking_for(name), view.knobs(name, _is_count)
        if not pauses or not places or view.holds(name):
            continue
        value = places[0].value * _PAUSE_LESS_OFTEN
        if epochs and not re.search("step|iter|batch", places[0].key):
            value = min(value, epochs[0].value)
        if value > places[0].value:
            found += pauses
            changes.append(_change(name, value, pauses[0].title, knob=places[0].text))
    return _offer(changes, found)


def pause_knobs(view: View) -> bool:
    """Whether the script could evaluate or save less often, if that is found to cost much."""
    return any(view.knobs(name, _is_count) for name in PAUSES)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
