"""Checks of the data path: workers, shared memory, pinning, prefetching, loaders built over and over."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flatout.check import tree
from flatout.check.checklist import FAIL, NOT_APPLICABLE, OK, WARN, Line, fail, ok, unknown, warn
from flatout.check.study import Study
from flatout.check.values import Value

_LOADERS = (
    "torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader",
    "torchdata.stateful_dataloader.StatefulDataLoader",
)  # fmt: skip
# The options of a DataLoader that matter here: torch's place and default, and how transformers' TrainingArguments
# call the same, with theirs.
_OPTIONS: dict[str, tuple[int | None, object, str, object]] = {
    "batch_size": (1, 1, "per_device_train_batch_size", 8),
    "num_workers": (5, 0, "dataloader_num_workers", 0),
    "pin_memory": (7, False, "dataloader_pin_memory", True),
    "drop_last": (8, False, "dataloader_drop_last", False),
    "prefetch_factor": (None, None, "dataloader_prefetch_factor", None),
    "persistent_workers": (None, False, "dataloader_persistent_workers", False),
}
_EVALUATION = re.compile(r"val|test|eval|dev(?!ice)|infer|predict", re.IGNORECASE)
_MIB, _GIB = 1 << 20, 1 << 30
_SMALL_SHM = 128 * _MIB  # containers are given 64 MiB unless someone asks for more
_WORKER_GROWS_BYTES = 256 * _MIB
_ENOUGH_WORKERS = 8
UNTOLD = "not told by the source alone"


@dataclass(frozen=True, slots=True)
class Loader:
    """One place that builds a loader for training. Without a call, all that is known of it is in the settings."""

    study: Study
    call: ast.Call | None = None
    hugging_face: bool = False

    def where(self) -> str | None:
        """file:line of the call."""
        return tree.where(self.call) if self.call is not None else None

    def argument(self, name: str, position: int | None = None) -> Value | None:
        """What the call is given; None where it is not given."""
        place = None if self.hugging_face else position
        return self.study.argument(self.call, name, place) if self.call is not None else None

    def get(self, name: str) -> Value:
        """An option as given, or its default."""
        position, default, _, theirs = _OPTIONS[name]
        if self.call is None:
            return self.study.setting(name)
        given = self.argument(self.spelled(name), position) or Value(theirs if self.hugging_face else default)
        return given if given.where else Value(given.what, self.where(), given.knob)

    def spelled(self, name: str) -> str:
        """What the option is called here."""
        return _OPTIONS[name][2] if self.hugging_face else name


def training_loaders(study: Study) -> list[Loader]:
    """The loaders that feed the training, and not its evaluation."""
    every = list(study.called(*_LOADERS))
    found = [Loader(study, call) for call in every if not _evaluates(study, call, only=len(every) == 1)]
    arguments = study.called("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments")
    found += [Loader(study, call, hugging_face=True) for call in arguments]
    return found or ([Loader(study)] if study.setting("num_workers").known and not every else [])


def _evaluates(study: Study, call: ast.Call, *, only: bool) -> bool:
    """By the name it gets, the dataset it is given, the function it stands in; else by whether it shuffles."""
    dataset, function = tree.argument(call, "dataset", 0), tree.function_of(call)
    names = [ast.unparse(target) for target in _assigned_to(call)]
    for words in (" ".join(names), ast.unparse(dataset) if dataset else "", function.name if function else ""):
        if "train" in words.lower() or _EVALUATION.search(words):
            return "train" not in words.lower()
    loops = [region.node for region in study.regions if isinstance(region.node, ast.For)]
    looped = [ast.unparse(_iterated(loop.iter)) for loop in loops]
    sampled = [study.argument(call, name, at) for name, at in (("sampler", 3), ("batch_sampler", 4))]
    if only or any(name in looped for name in names) or any(sampled):
        return False
    return (study.argument(call, "shuffle", 2) or Value(False)).what is False


def _assigned_to(call: ast.Call) -> Iterator[ast.expr]:
    """What the statement around a call assigns it to; of `a, b = one(), two()` the name at the call's own place."""
    statement = next((node for node in tree.around(call) if isinstance(node, ast.Assign)), None)
    if statement is None:
        return
    for target in statement.targets:
        match target, statement.value:
            case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(names) == len(values):
                places = (place for place, value in enumerate(values) if value is call or tree.inside(call, value))
                yield names[next(places)]
            case _:
                yield target


def goes_over_evaluation_data(study: Study, over: ast.expr, depth: int = 3) -> bool:
    """Whether what a loop goes over is a loader of evaluation data, as far as it can be followed."""
    match _iterated(over):
        case ast.Call(func=func) as call:
            return tree.dotted(func) in _LOADERS and _evaluates(study, call, only=False)
        case ast.Name() | ast.Attribute() as name if depth > 0:
            origins = [origin for origin in study.origins(name) if origin is not None]
            return any(goes_over_evaluation_data(study, origin, depth - 1) for origin in origins)
    return False


def _iterated(node: ast.expr) -> ast.expr:
    """What a loop goes over, inside enumerate, tqdm and the like."""
    while isinstance(node, ast.Call) and node.args and tree.dotted(node.func) not in _LOADERS:
        node = node.args[0]
    return node


def _each_loader(judge: Callable[[Study, Loader], Line]) -> Callable[[Study], Line]:
    """A check of one loader as a check of all: the line of the one that stands worst."""

    def check(study: Study) -> Line:
        lines = [judge(study, loader) for loader in training_loaders(study)]
        order = (FAIL, WARN, OK, NOT_APPLICABLE)
        nothing = unknown("no DataLoader is built in what was looked at")
        return min(lines, key=lambda line: order.index(line.status), default=nothing)

    return check


def number_of(study: Study, name: str) -> Value | None:
    """An option of the training loader that is a number, or a setting of such a name."""
    told = (loader.get(name) for loader in training_loaders(study))
    return next((value for value in (*told, study.setting(name)) if value.is_number()), None)


def batch_size(study: Study) -> Value | None:
    """The batch size, where no batch sampler makes the batches."""
    sampled = any(loader.argument("batch_sampler", 4) for loader in training_loaders(study))
    return None if sampled else number_of(study, "batch_size")


# ---------------------------------------------------------------- workers


def _cores(count: float) -> str:
    return f"{count:g} core" if count == 1 else f"{count:g} cores"


@_each_loader
def check_workers(study: Study, loader: Loader) -> Line:
    """num_workers against the cores a rank may use for loading."""
    workers, name, budget = loader.get("num_workers"), loader.spelled("num_workers"), study.machine.budget
    share = f" (a rank's share of {budget.ranks_on_node})" if budget.ranks_on_node > 1 else ""
    if not workers.is_number():
        return unknown(f"{name}: {UNTOLD}", workers.where)
    said = f"{name}={workers.what}"
    if workers.what == 0 and _in_memory(loader):
        return ok(f"{said}: the dataset lies in memory", workers.where)
    if workers.what == 0:
        reason = f"{said}: the training process loads every batch itself, in turns with training"
        fix = f"{workers.turned_to(name, min(budget.cores, _ENOUGH_WORKERS))} to begin with"
        reason += f"; free for it: {_cores(budget.cores)}{share}"
        return warn(reason, workers.where, fix=fix, code="data.main-thread")
    allowed = f"{_cores(budget.cores_allowed)}{share}"
    if workers.what > budget.cores_allowed:
        reason = f"{said}, but this process may use {allowed}: {budget.cores} for loading"
        fix = workers.turned_to(name, budget.cores)
        return warn(reason, workers.where, fix=fix, code="data.too-many-workers")
    return ok(f"{said} on {allowed}", workers.where)


def _in_memory(loader: Loader) -> bool:
    """Whether the dataset is a TensorDataset, or its __getitem__ takes what is there and calls nothing."""
    dataset = tree.argument(loader.call, "dataset", 0) if loader.call is not None else None
    made = loader.study.origins(dataset) if isinstance(dataset, ast.Name) else [dataset]
    for node in made:
        kind = tree.dotted(node.func) if isinstance(node, ast.Call) else ""
        found = loader.study.program.find_class(kind)
        getters = [part for part in found.body if getattr(part, "name", "") == "__getitem__"] if found else []
        calls = any(isinstance(part, ast.Call) for getter in getters for part in ast.walk(getter))
        if kind.endswith("TensorDataset") or (getters and not calls):
            return True
    return False


def check_decode_threads(study: Study) -> Line:
    """Threads a worker starts for decoding, times the workers, against the cores."""
    threads, workers, budget = study.setting("threads"), number_of(study, "num_workers"), study.machine.budget
    for _, set_to in study.assigned("stream.codec_context.thread_count", "codec_context.thread_count"):
        threads = threads if threads.is_number() else set_to
    if not threads.is_number() or workers is None or workers.what == 0:
        return unknown("no setting for threads inside a worker was found")
    said, cores = f"{workers.what} workers × {threads.what} threads", _cores(budget.cores_allowed)
    if workers.what * threads.what <= 2 * budget.cores_allowed or threads.what <= 1:
        return ok(f"{said} on {cores}", threads.where)
    reason = f"{said} are {workers.what * threads.what}, on {cores}: handing work round costs more than it brings"
    fix = threads.turned_to("decode_threads", max(1, int(budget.cores // workers.what)))
    return warn(reason, threads.where, fix=fix, code="data.too-many-workers")


# ---------------------------------------------------------------- memory


def check_shared_memory(study: Study) -> Line:
    """/dev/shm against the batches that wait in it: workers × prefetch_factor × bytes of a batch."""
    budget, workers, ahead = study.machine.budget, number_of(study, "num_workers"), number_of(study, "prefetch_factor")
    free, total = budget.shm_free_bytes, budget.shm_bytes
    if free is None or total is None:
        return unknown("there is no /dev/shm here")
    if workers is None or workers.what == 0:
        return unknown("no workers, or their number is not known")
    waiting = int(workers.what * (ahead.what if ahead is not None else 2) * budget.ranks_on_node)
    batch = _batch_bytes(study)
    if batch is None:
        room = f"up to {_size(free / max(waiting, 1))} a batch fit"
        if total >= _SMALL_SHM:
            return unknown(f"how large a batch is, is not known; {waiting} may wait in /dev/shm: {room}")
        reason = f"/dev/shm has {_size(total)}, and {waiting} batches may wait in it: {room}"
        fix = "docker run --shm-size=16g (or --ipc=host)"
        return warn(f"{reason}, or else workers die of a bus error", fix=fix, code="memory.host")
    need = waiting * batch
    reason = f"{waiting} batches of about {_size(batch)} may wait in /dev/shm: {_size(need)} of {_size(free)} free"
    if need <= 0.8 * free:
        return ok(reason)
    fewer = max(1, int(workers.what * 0.8 * free / need))
    fix = f"--shm-size={-(-need * 2 // _GIB)}g for the container, or num_workers={fewer}"
    if need > total:
        return fail(f"{reason}; workers will die of a bus error", fix=fix, code="memory.host")
    return warn(reason, fix=fix, code="memory.host")


def _batch_bytes(study: Study) -> int | None:
    """Bytes of a batch of float pictures, where a crop in the source says how large they are."""
    batch, crops = batch_size(study), study.program.calls("RandomResizedCrop", "RandomCrop")
    sizes = [study.argument(call, "size", 0) for call, name in crops if "torchvision" in name]
    sides = {int(size.what) for size in sizes if size is not None and size.is_number()}
    return int(batch.what) * 3 * sides.pop() ** 2 * 4 if batch is not None and len(sides) == 1 else None


def check_host_memory(study: Study) -> Line:
    """Memory against what each worker comes to hold of its own."""
    workers, available = number_of(study, "num_workers"), study.machine.budget.memory_available_bytes
    if workers is None or workers.what == 0:
        return unknown("no workers, or their number is not known")
    each = available / workers.what
    each_of = "its worker" if workers.what == 1 else f"each of {workers.what} workers"
    reason = f"{_size(available)} available: {_size(each)} for {each_of}"
    if each >= _WORKER_GROWS_BYTES:
        return ok(reason)
    fix = f"num_workers={max(1, available // (2 * _WORKER_GROWS_BYTES))}"
    return warn(f"{reason}; a worker comes to hold some hundred MiB of its own", fix=fix, code="memory.host")


def _size(count: float) -> str:
    for unit, factor in (("GiB", _GIB), ("MiB", _MIB)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"


# ---------------------------------------------------------------- options


@_each_loader
def check_pin_memory(study: Study, loader: Loader) -> Line:
    """pin_memory, and whether copies then make use of it."""
    pinned, name = loader.get("pin_memory"), loader.spelled("pin_memory")
    copies = list(_copies(study))
    overlapped = any(asked for asked, _ in copies)
    if not pinned.known:
        return unknown(f"{name}: {UNTOLD}", pinned.where)
    if not pinned.what and study.regions and not copies and not study.framework():
        return unknown(f"{name} is off; no copy to a GPU was seen", pinned.where)
    if not pinned.what:
        reason = f"{name} is off: every copy to the GPU goes through pageable memory"
        reason += ", where non_blocking=True has no effect" if overlapped else ""
        return warn(reason, pinned.where, fix=pinned.turned_to(name, True), code="copy.pageable")
    if copies and not overlapped:
        reason = "memory is pinned, but batches are copied without non_blocking=True: the host waits for each"
        return warn(reason, copies[0][1], fix=".to(device, non_blocking=True)", code="copy.blocking")
    return ok(f"{name} is on", pinned.where)


def _copies(study: Study) -> Iterator[tuple[bool, str]]:
    """Copies of what the loader gives, in the training loop: (with non_blocking, where)."""

    def overlaps(call: ast.Call) -> bool:
        asked = study.argument(call, "non_blocking")
        return asked is not None and asked.what is not False

    for region in study.regions:
        given = set(re.findall(r"\w+", ast.unparse(region.node.target))) if isinstance(region.node, ast.For) else set()
        for call in region.calls():
            if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("to", "cuda"):
                continue
            root = re.match(r"\w+", ast.unparse(call.func.value))
            device = tree.argument(call, "device", 0)
            to_device = call.func.attr == "cuda" or (
                device and re.search(r"\bdev\b|device|cuda", ast.unparse(device), re.I)
            )
            if root and root[0] in given and to_device:
                yield overlaps(call), tree.where(call)
    # in a function of its own, such as to_device(batch)
    yield from ((True, tree.where(call)) for call in study.called(".to", ".cuda") if overlaps(call))


@_each_loader
def check_persistent_workers(study: Study, loader: Loader) -> Line:
    """persistent_workers, where there are workers and epochs."""
    kept, workers, name = (loader.get("persistent_workers"), loader.get("num_workers"),
                           loader.spelled("persistent_workers"))  # fmt: skip
    if not kept.known or not workers.is_number():
        return unknown(f"{name}: {UNTOLD}", kept.where)
    if workers.what == 0:
        return _refused(f"{name}=True", kept) if kept.what else unknown("no workers to keep", kept.where)
    if kept.what:
        return ok("workers are kept from epoch to epoch", kept.where)
    if study.setting("epochs").what == 1:
        return unknown("one epoch only", study.setting("epochs").where)
    if study.command is not None and not any(region.epochs for region in study.regions) and not loader.hugging_face:
        return unknown("no loop over epochs was seen", kept.where)
    reason = f"{workers.what} worker{'s are' if workers.what > 1 else ' is'} started again every epoch"
    return warn(reason, kept.where, fix=kept.turned_to(name, True), code="data.worker-start")


def _refused(said: str, option: Value) -> Line:
    return fail(f"{said} with num_workers=0: torch refuses that", option.where, fix="num_workers above 0")


@_each_loader
def check_prefetch_factor(study: Study, loader: Loader) -> Line:
    """prefetch_factor: at least 2, and only with workers."""
    ahead, workers, name = loader.get("prefetch_factor"), loader.get("num_workers"), loader.spelled("prefetch_factor")
    if not ahead.known or not workers.is_number():
        return unknown(f"{name}: {UNTOLD}", ahead.where)
    if workers.what == 0:
        refused = ahead.what is not None
        return _refused(f"{name}={ahead.what}", ahead) if refused else unknown("no workers to load ahead", ahead.where)
    if ahead.what == 1:
        reason = f"{name}=1: one slow batch is enough to stop the GPU"
        return warn(reason, ahead.where, fix=ahead.turned_to(name, 2), code="data.too-few-workers")
    return ok(f"{ahead.what or 2} batches a worker ahead", ahead.where)


@_each_loader
def check_drop_last(study: Study, loader: Loader) -> Line:
    """A smaller last batch, where it makes the compiler start over."""
    dropped = loader.get("drop_last")
    if not dropped.known:
        return unknown(UNTOLD, dropped.where)
    if dropped.what:
        return ok("every batch has the same size", dropped.where)
    if study.compiled() is None:
        return unknown("off, and nothing here minds a smaller last batch", dropped.where)
    reason = "off: torch.compile compiles once more for the smaller last batch, and then for sizes it does not know"
    return warn(reason, dropped.where, fix=dropped.turned_to("drop_last", True), code="compute.eager")


@_each_loader
def check_loader_in_loop(study: Study, loader: Loader) -> Line:
    """A training loader that is built again every epoch."""
    call = loader.call
    if call is None or loader.hugging_face:
        return unknown("where the DataLoader is built is not seen")
    loop = next(iter(tree.loops(call)), None)
    if loop is None or loop not in [region.epochs for region in study.regions] or not study.always(call, loop):
        return ok("built once", loader.where())
    reason = "the DataLoader is built again every epoch, and its workers with it"
    fix = f"build it once, above the loop at {tree.lines([loop])}"
    return warn(reason, loader.where(), fix=fix, code="data.worker-start")


def check_set_epoch(study: Study) -> Line:
    """DistributedSampler.set_epoch, without which every epoch has the same order."""
    samplers = (call for call, _ in study.program.calls("DistributedSampler") if _shuffles(study, call))
    where = next(map(tree.where, samplers), None)
    who = study.program.uses("lightning", "pytorch_lightning", "accelerate", "ignite")
    if where is None:
        return unknown("no DistributedSampler that shuffles")
    if (called := next(iter(study.called(".set_epoch")), None)) is not None:
        return ok("called", tree.where(called))
    if who or study.program.missing:
        return unknown(f"{who or study.program.missing[0]} may call it", where)
    if not any(region.epochs for region in study.regions):
        return unknown("no loop over epochs was seen", where)
    reason = "DistributedSampler.set_epoch is never called: every epoch sees the same order"
    return fail(reason, where, fix="sampler.set_epoch(epoch) at the start of every epoch")


def _shuffles(study: Study, call: ast.Call) -> bool:
    shuffle, dataset = study.argument(call, "shuffle", 3), tree.argument(call, "dataset", 0)
    words = ast.unparse(dataset) if dataset is not None else ""
    evaluates = _EVALUATION.search(words) and "train" not in words.lower()
    return (shuffle is None or shuffle.what is True) and not evaluates
