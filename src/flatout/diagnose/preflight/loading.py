"""Checks of the data path: workers, shared memory, pinning, prefetching, loaders built over and over."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import libcst as cst

from flatout.diagnose.preflight.checklist import FAIL, NOT_APPLICABLE, OK, WARN, Line, fail, ok, unknown, warn
from flatout.diagnose.preflight.source import Module, arguments
from flatout.diagnose.preflight.study import Study
from flatout.diagnose.preflight.training import every_time, is_epoch_loop
from flatout.diagnose.preflight.values import Value

_LOADERS = (
    "torch.utils.data.DataLoader",
    "torch.utils.data.dataloader.DataLoader",
    "torchdata.stateful_dataloader.StatefulDataLoader",
)
_POSITIONS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
              "drop_last")  # fmt: skip
_DEFAULTS = {"batch_size": 1, "shuffle": False, "num_workers": 0, "pin_memory": False, "drop_last": False,
             "prefetch_factor": None, "persistent_workers": False, "sampler": None, "batch_sampler": None}  # fmt: skip
# How transformers' TrainingArguments call the same, and what they are when not given.
_HUGGING_FACE = {"num_workers": ("dataloader_num_workers", 0), "pin_memory": ("dataloader_pin_memory", True),
                 "persistent_workers": ("dataloader_persistent_workers", False),
                 "prefetch_factor": ("dataloader_prefetch_factor", None), "drop_last": ("dataloader_drop_last", False),
                 "batch_size": ("per_device_train_batch_size", 8)}  # fmt: skip
_EVALUATION = re.compile(r"val|test|eval|dev(?!ice)|infer|predict", re.IGNORECASE)
_MIB = 1 << 20
_SMALL_SHM = 128 * _MIB  # containers are given 64 MiB unless someone asks for more
_WORKER_GROWS_BYTES = 256 * _MIB
_ENOUGH_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Loader:
    """One place that builds a loader for training."""

    study: Study
    module: Module
    call: cst.Call
    hugging_face: bool = False

    @property
    def where(self) -> str:
        """file:line of the call."""
        return self.module.where(self.call)

    def get(self, name: str) -> Value:
        """An option as given, or torch's default."""
        if self.hugging_face:
            spelled, default = _HUGGING_FACE.get(name, (name, None))
            given = self.study.argument(self.module, self.call, spelled)
        else:
            default = _DEFAULTS[name]
            position = _POSITIONS.index(name) if name in _POSITIONS else None
            given = self.study.argument(self.module, self.call, name, position)
        return given if given is not None else Value(default, self.where)

    def given(self, name: str) -> bool:
        """Whether an option is given at all."""
        return self.study.argument(self.module, self.call, name, _POSITIONS.index(name)) is not None

    def option(self, name: str) -> str:
        """How the option is spelled here."""
        return _HUGGING_FACE[name][0] if self.hugging_face else name


def training_loaders(study: Study) -> list[Loader]:
    """The loaders that feed the training, and not its evaluation."""
    every = [(m, c) for m, c in study.called(*_LOADERS)]
    found = [Loader(study, m, c) for m, c in every if not _for_evaluation(study, m, c, only=len(every) == 1)]
    found += [
        Loader(study, m, c, hugging_face=True)
        for m, c in study.called("transformers.TrainingArguments", "transformers.Seq2SeqTrainingArguments")
    ]
    return found


def evaluation_loaders(study: Study) -> list[Loader]:
    """The others."""
    every = [(m, c) for m, c in study.called(*_LOADERS)]
    return [Loader(study, m, c) for m, c in every if _for_evaluation(study, m, c, only=len(every) == 1)]


def _for_evaluation(study: Study, module: Module, call: cst.Call, *, only: bool) -> bool:
    """By the name it gets, the dataset it is given, the function it stands in; else by whether it shuffles."""
    given = arguments(call)
    dataset = given.get("dataset", 0)
    function = module.function_of(call)
    statement = next((n for n in module.around(call) if isinstance(n, cst.Assign | cst.AnnAssign)), None)
    targets = [module.text(t.target) for t in statement.targets] if isinstance(statement, cst.Assign) else []
    for words in (" ".join(targets), module.text(dataset) if dataset else "", function.name.value if function else ""):
        if "train" in words.lower():
            return False
        if _EVALUATION.search(words):
            return True
    if only or any(f"{name}" in targets for r in study.regions if (name := _iterated(r.module, r.iterates()))):
        return False
    shuffles = study.argument(module, call, "shuffle", 2)
    samples = study.argument(module, call, "sampler", 3) or study.argument(module, call, "batch_sampler", 4)
    return samples is None and (shuffles is None or shuffles.what is False)


def _iterated(module: Module, node: cst.BaseExpression | None) -> str | None:
    """The name of what a loop goes over, inside enumerate, tqdm and the like."""
    while isinstance(node, cst.Call) and node.args:
        node = node.args[0].value
    return module.text(node) if node is not None else None


def _worst(study: Study, judge: Callable[[Loader], Line]) -> Line | None:
    """The line of the loader that stands worst."""
    lines = [judge(loader) for loader in training_loaders(study)]
    order = (FAIL, WARN, OK)
    return min(lines, key=lambda line: order.index(line.status) if line.status in order else len(order), default=None)


_NO_LOADER = "no DataLoader is built in what was looked at"
_UNTOLD = "not told by the source alone"


# ---------------------------------------------------------------- the checks


def check_workers(study: Study) -> Line:
    """num_workers against the cores a rank may use for loading."""
    found = _worst(study, lambda loader: _workers(study, loader.get("num_workers"), loader))
    if found is None or found.status == NOT_APPLICABLE:
        setting = study.setting("num_workers")
        if setting.is_number() and setting.what > 0:
            return _workers(study, setting, None)
    return found or unknown("workers", _NO_LOADER)


def _workers(study: Study, workers: Value, loader: Loader | None) -> Line:
    name = loader.option("num_workers") if loader else "num_workers"
    budget = study.machine.budget
    where = workers.where or (loader.where if loader else None)
    share = f" (a rank's share of {budget.ranks_on_node})" if budget.ranks_on_node > 1 else ""
    if not workers.is_number():
        return unknown("workers", f"{name}: {_UNTOLD}", where=where)
    said = f"{name}={workers.what}"
    if workers.what == 0:
        if loader is not None and _in_memory(loader):
            return ok("workers", f"{said}: the dataset lies in memory", where)
        to = min(budget.cores, _ENOUGH_WORKERS)
        return warn(
            "workers",
            f"{said}: the training process loads every batch itself, in turns with the GPU; "
            f"{budget.cores} cores{share} are free for it",
            fix=f"{workers.turned_to(name, to)} to begin with",
            code="data.main-thread",
            where=where,
        )
    if workers.what > budget.cores_allowed:
        return warn(
            "workers",
            f"{said}, but this process may use {budget.cores_allowed:g} cores{share}: {budget.cores} for loading",
            fix=workers.turned_to(name, budget.cores),
            code="data.too-many-workers",
            where=where,
        )
    return ok("workers", f"{said} on {budget.cores_allowed:g} cores{share}", where)


def _in_memory(loader: Loader) -> bool:
    dataset = arguments(loader.call).get("dataset", 0)
    if dataset is None:
        return False
    for kind in loader.study.kinds(loader.module, dataset):
        if kind.endswith("TensorDataset"):
            return True
        found = loader.study.program.find_class(kind) if loader.study.program is not None else None
        if found is not None and _only_indexes(*found):
            return True
    return False


def _only_indexes(module: Module, owner: cst.ClassDef) -> bool:
    """Whether __getitem__ takes what is there and calls nothing."""
    getters = [f for f in module.functions.get("__getitem__", []) if module.class_of(f) is owner]
    return bool(getters) and not any(getters[0] in module.around(call) for call in module.calls)


def check_decode_threads(study: Study) -> Line:
    """Threads a worker starts for decoding, times the workers, against the cores."""
    threads, workers = study.setting("decode_threads"), _number_of_workers(study)
    for _, _, set_to in study.assigned("stream.codec_context.thread_count", "codec_context.thread_count"):
        threads = threads if threads.is_number() else set_to
    if not threads.is_number() or not workers:
        return unknown("decode threads", "no setting for threads inside a worker was found")
    budget, all_of_them = study.machine.budget, int(threads.what) * workers
    if all_of_them <= 2 * budget.cores_allowed or threads.what <= 1:
        return ok(
            "decode threads",
            f"{workers} workers × {threads.what} threads on {budget.cores_allowed:g} cores",
            threads.where,
        )
    to = max(1, int(budget.cores // workers))
    return warn(
        "decode threads",
        f"{workers} workers × {threads.what} threads are {all_of_them}, on {budget.cores_allowed:g} cores: "
        "handing work round costs more than it brings",
        fix=threads.turned_to("decode_threads", to),
        code="data.too-many-workers",
        where=threads.where,
    )


def _number_of_workers(study: Study) -> int:
    loaders = [loader.get("num_workers") for loader in training_loaders(study)]
    known = [value for value in (*loaders, study.setting("num_workers")) if value.is_number()]
    return int(known[0].what) if known else 0


def check_shared_memory(study: Study) -> Line:
    """/dev/shm against the batches that wait in it: workers × prefetch_factor × bytes of a batch."""
    subject, budget, workers = "shared memory", study.machine.budget, _number_of_workers(study)
    if budget.shm_free_bytes is None or budget.shm_bytes is None:
        return unknown(subject, "there is no /dev/shm here")
    if not workers:
        return unknown(subject, "no workers, or their number is not known")
    waiting = workers * _prefetch(study) * budget.ranks_on_node
    free, total = budget.shm_free_bytes, budget.shm_bytes
    batch = _batch_bytes(study)
    if batch is None:
        room = f"up to {_size(free / waiting)} a batch fit"
        if total < _SMALL_SHM:
            return warn(
                subject,
                f"/dev/shm has {_size(total)}, and {waiting} batches may wait in it: {room}, "
                "or else workers die of a bus error",
                fix="docker run --shm-size=16g (or --ipc=host)",
                code="memory.host",
            )
        return unknown(subject, f"how large a batch is, is not known; {waiting} may wait in /dev/shm: {room}")
    need = waiting * batch
    reason = f"{waiting} batches of about {_size(batch)} may wait in /dev/shm: {_size(need)} of {_size(free)} free"
    if need <= 0.8 * free:
        return ok(subject, reason)
    fewer = max(1, int(workers * 0.8 * free / need))
    fix = f"--shm-size={-(-need * 2 // (1 << 30))}g for the container, or num_workers={fewer}"
    if need > total:
        return fail(subject, f"{reason}; workers will die of a bus error", fix=fix, code="memory.host")
    return warn(subject, reason, fix=fix, code="memory.host")


def _prefetch(study: Study) -> int:
    for loader in training_loaders(study):
        found = loader.get("prefetch_factor")
        if found.is_number():
            return int(found.what)
    setting = study.setting("prefetch_factor")
    return int(setting.what) if setting.is_number() else 2


def _batch_bytes(study: Study) -> int | None:
    """Bytes of a batch of float pictures, where a crop in the source says how large they are."""
    batch = batch_size(study)
    sides = set()
    for module, call in study.called(
        "torchvision.transforms.RandomResizedCrop", "torchvision.transforms.v2.RandomResizedCrop",
        "torchvision.transforms.transforms.RandomResizedCrop", "torchvision.transforms.RandomCrop",
        "torchvision.transforms.v2.RandomCrop",
    ):  # fmt: skip
        size = study.argument(module, call, "size", 0)
        if size is not None and size.is_number():
            sides.add(int(size.what))
    if len(sides) != 1 or batch is None or not batch.is_number():
        return None
    side = sides.pop()
    return int(batch.what) * 3 * side * side * 4


def batch_size(study: Study) -> Value | None:
    """The batch size of the training loader, or of the settings."""
    for loader in training_loaders(study):
        found = loader.get("batch_size")
        if not loader.hugging_face and loader.given("batch_sampler"):
            return None
        if found.is_number():
            return found
    setting = study.setting("batch_size")
    return setting if setting.is_number() else None


def check_host_memory(study: Study) -> Line:
    """Memory against what each worker comes to hold of its own."""
    workers, budget = _number_of_workers(study), study.machine.budget
    if not workers:
        return unknown("host memory", "no workers, or their number is not known")
    each = budget.memory_available_bytes / workers
    reason = f"{_size(budget.memory_available_bytes)} available: {_size(each)} for each of {workers} workers"
    if each < _WORKER_GROWS_BYTES:
        return warn(
            "host memory",
            f"{reason}; a worker comes to hold some hundred MiB of its own",
            fix=f"num_workers={max(1, budget.memory_available_bytes // (2 * _WORKER_GROWS_BYTES))}",
            code="memory.host",
        )
    return ok("host memory", reason)


def check_pin_memory(study: Study) -> Line:
    """pin_memory, and whether copies then make use of it."""
    return _worst(study, lambda loader: _pin_memory(study, loader)) or _switch(study, "pin_memory")


def _pin_memory(study: Study, loader: Loader) -> Line:
    pinned, name = loader.get("pin_memory"), loader.option("pin_memory")
    where = pinned.where or loader.where
    if not pinned.known:
        return unknown("pin_memory", f"{name}: {_UNTOLD}", where=where)
    copies = _copies(study)
    if not pinned.what:
        if not copies and not study.framework():
            return unknown("pin_memory", f"{name} is off; no copy to a GPU was seen", where=where)
        vain = any(asked for asked, _ in copies)
        return warn(
            "pin_memory",
            f"{name} is off: every copy to the GPU goes through pageable memory"
            + (", where non_blocking=True has no effect" if vain else ""),
            fix=pinned.turned_to(name, True),
            code="copy.pageable",
            where=where,
        )
    blocking = [place for asked, place in copies if not asked]
    if blocking and not any(asked for asked, _ in copies):
        return warn(
            "pin_memory",
            "memory is pinned, but batches are copied without non_blocking=True: the host waits for each",
            fix=".to(device, non_blocking=True)",
            code="copy.blocking",
            where=blocking[0],
        )
    return ok("pin_memory", f"{name} is on", where)


def _copies(study: Study) -> list[tuple[bool, str]]:
    """Copies of what the loader gives, in the training loop: (with non_blocking, where)."""
    found = []
    for region in study.regions:
        if not isinstance(region.node, cst.For):
            continue
        given = set(re.findall(r"\w+", region.module.text(region.node.target)))
        for call in region.calls():
            if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in ("to", "cuda"):
                continue
            root = re.match(r"\w+", region.module.text(call.func.value))
            to_device = call.func.attr.value == "cuda" or _is_device(study, region.module, call)
            if root and root[0] in given and to_device:
                asked = study.argument(region.module, call, "non_blocking")
                found.append((asked is not None and asked.what is not False, region.module.where(call)))
    for module, call in study.called(".to", ".cuda"):  # in a function of its own, such as to_device(batch)
        asked = study.argument(module, call, "non_blocking")
        if asked is not None and asked.what is not False:
            found.append((True, module.where(call)))
    return found


def _is_device(study: Study, module: Module, call: cst.Call) -> bool:
    target = arguments(call).get("device", 0)
    if target is None:
        return False
    return "device" in module.text(target).lower() or study.value(module, target).what == "cuda"


def _switch(study: Study, name: str) -> Line:
    """A switch of the loader that only a config tells of."""
    setting = study.setting(name)
    if setting.what is True:
        return ok(name, "on", setting.where)
    if setting.what is False and study.program is None:
        code = {"pin_memory": "copy.pageable", "persistent_workers": "data.worker-start"}[name]
        what = {"pin_memory": "copies to the GPU go through pageable memory",
                "persistent_workers": "workers are started again every epoch"}[name]  # fmt: skip
        return warn(name, f"off: {what}", fix=setting.turned_to(name, True), code=code, where=setting.where)
    return unknown(name, _NO_LOADER)


def check_persistent_workers(study: Study) -> Line:
    """persistent_workers, where there are workers and epochs."""
    return _worst(study, lambda loader: _persistent(study, loader)) or _switch(study, "persistent_workers")


def _persistent(study: Study, loader: Loader) -> Line:
    subject, name = "persistent_workers", loader.option("persistent_workers")
    kept, workers = loader.get("persistent_workers"), loader.get("num_workers")
    where = kept.where or loader.where
    if not kept.known or not workers.is_number():
        return unknown(subject, f"{name}: {_UNTOLD}", where=where)
    if workers.what == 0:
        if kept.what:
            return fail(
                subject, f"{name}=True with num_workers=0: torch refuses that", fix="num_workers above 0", where=where
            )
        return unknown(subject, "no workers to keep", where=where)
    if kept.what:
        return ok(subject, "workers are kept from epoch to epoch", where)
    epochs = study.setting("epochs")
    if epochs.what == 1:
        return unknown(subject, "one epoch only", where=epochs.where)
    if not any(region.epochs for region in study.regions) and not loader.hugging_face:
        return unknown(subject, "no loop over epochs was seen", where=where)
    return warn(
        subject,
        f"{workers.what} worker{'s are' if workers.what > 1 else ' is'} started again every epoch",
        fix=kept.turned_to(name, True),
        code="data.worker-start",
        where=where,
    )


def check_prefetch_factor(study: Study) -> Line:
    """prefetch_factor: at least 2, and only with workers."""
    return _worst(study, _prefetch_factor) or unknown("prefetch_factor", _NO_LOADER)


def _prefetch_factor(loader: Loader) -> Line:
    subject, name = "prefetch_factor", loader.option("prefetch_factor")
    depth, workers = loader.get("prefetch_factor"), loader.get("num_workers")
    where = depth.where or loader.where
    if not depth.known or not workers.is_number():
        return unknown(subject, f"{name}: {_UNTOLD}", where=where)
    if workers.what == 0:
        if depth.what is not None:
            return fail(
                subject,
                f"{name}={depth.what} with num_workers=0: torch refuses that",
                fix="num_workers above 0",
                where=where,
            )
        return unknown(subject, "no workers to load ahead", where=where)
    if depth.what == 1:
        return warn(
            subject,
            f"{name}=1: one slow batch is enough to stop the GPU",
            fix=depth.turned_to(name, 2),
            code="data.too-few-workers",
            where=where,
        )
    return ok(subject, f"{depth.what or 2} batches a worker ahead", where)


def check_drop_last(study: Study) -> Line:
    """A smaller last batch, where it makes the compiler start over."""
    return _worst(study, lambda loader: _drop_last(study, loader)) or unknown("drop_last", _NO_LOADER)


def _drop_last(study: Study, loader: Loader) -> Line:
    dropped = loader.get("drop_last")
    where = dropped.where or loader.where
    if not dropped.known:
        return unknown("drop_last", _UNTOLD, where=where)
    if dropped.what:
        return ok("drop_last", "every batch has the same size", where)
    if study.compiled() is None:
        return unknown("drop_last", "off, and nothing here minds a smaller last batch", where=where)
    return warn(
        "drop_last",
        "off: torch.compile compiles once more for the smaller last batch, and then for sizes it does not know",
        fix=dropped.turned_to("drop_last", True),
        code="compute.eager",
        where=where,
    )


def check_loader_in_loop(study: Study) -> Line:
    """A training loader that is built again every epoch."""
    subject, loaders = "loader in the loop", [loader for loader in training_loaders(study) if not loader.hugging_face]
    if not loaders or study.evaluator is None:
        return unknown(subject, _NO_LOADER)
    epoch_loops = [region.epochs for region in study.regions if region.epochs is not None]
    for loader in loaders:
        module, call = loader.module, loader.call
        inside = module.loops(call)
        again = bool(inside) and is_epoch_loop(module, inside[0]) and any(loop is inside[0] for _, loop in epoch_loops)
        if again and every_time(study.evaluator, module, call, inside[0]):
            return warn(
                subject,
                "the DataLoader is built again every epoch, and its workers with it",
                fix=f"build it once, above the loop at line {module.line(inside[0])}",
                code="data.worker-start",
                where=loader.where,
            )
    return ok(subject, "built once", loaders[0].where)


def check_set_epoch(study: Study) -> Line:
    """DistributedSampler.set_epoch, without which every epoch has the same order."""
    subject = "set_epoch"
    samplers = [
        (module, call)
        for module, call, name in study.calls()
        if name.rsplit(".", 1)[-1] == "DistributedSampler" and _shuffles(study, module, call)
    ]
    if not samplers:
        return unknown(subject, "no DistributedSampler that shuffles")
    module, call = samplers[0]
    if any(study.called(".set_epoch")):
        return ok(subject, "called", module.where(call))
    who = study.program.uses("lightning", "pytorch_lightning", "accelerate", "ignite") if study.program else None
    if who:
        return unknown(subject, f"{who} may call it", where=module.where(call))
    if not any(region.epochs for region in study.regions):
        return unknown(subject, "no loop over epochs was seen", where=module.where(call))
    return fail(
        subject,
        "DistributedSampler.set_epoch is never called: every epoch sees the same order",
        fix="sampler.set_epoch(epoch) at the start of every epoch",
        where=module.where(call),
    )


def _shuffles(study: Study, module: Module, call: cst.Call) -> bool:
    shuffle = study.argument(module, call, "shuffle", 3)
    dataset = arguments(call).get("dataset", 0)
    words = module.text(dataset) if dataset is not None else ""
    return (shuffle is None or shuffle.what is True) and not (
        _EVALUATION.search(words) and "train" not in words.lower()
    )


def _size(count: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
