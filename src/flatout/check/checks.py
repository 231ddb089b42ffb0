"""The checks, one function a line. A check returns None where it does not apply, or only a run can tell.

A setting that asks for something which then never happens is a failure: the person believes that it is on.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from flatout.check.script import Node, calls_in, evaluates, last_name, loops_around, parents, runs_every_time, where
from flatout.check.training import KnownValue, Training, folded, is_setting, setting_path
from flatout.model.changes import is_on
from flatout.model.formatting import count_of
from flatout.model.frameworks import FRAMEWORKS

OK, WARN, FAIL, NOT_APPLICABLE = "ok", "warn", "fail", "n/a"

_SMALL_SHM = 128 << 20  # a container gets 64 MiB unless it is given more
_MANY_WORKERS = 8
_IDLE = "hardware.idle-gpus"
_SHOWS = re.compile(r"^(print|logger|logging|log|wandb|tqdm|console|json|yaml|pprint|str|repr|format|add_argument)$")
_PRECISION = ("precision", "fp16", "trainer_precision")
_HAS_ITS_OWN_CONFIG = "Accelerator"  # `accelerate config` may ask for bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One subject: its status, why, and what to write instead. `code` is the cause that a run would
    report."""

    subject: str = ""  # `look_over` fills it in
    status: str
    reason: str
    fix: str | None = None
    where: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checklist:
    """All lines, in the order data, computing, the loop, the machine."""

    looked_at: tuple[str, ...]
    lines: tuple[Line, ...]

    def with_status(self, status: str) -> list[Line]:
        """The lines of one status."""
        return [line for line in self.lines if line.status == status]

    def passed(self, *, strict: bool) -> bool:
        """Whether nothing failed; with `strict`, whether there is no warning either."""
        return not self.with_status(FAIL) and not (strict and self.with_status(WARN))

    def to_json(self) -> dict[str, Any]:
        """As `--json` writes it."""
        counts = {status: len(self.with_status(status)) for status in (OK, WARN, FAIL, NOT_APPLICABLE)}
        about = {"record": "checklist", "schema": 1, "looked_at": list(self.looked_at)}
        return about | {"counts": counts, "lines": [asdict(line) for line in self.lines]}


def _ok(reason: str, where: str | None = None) -> Line:
    return Line(status=OK, reason=reason, where=where)


def _warn(reason: str, where: str | None = None, *, fix: str, code: str) -> Line:
    """Costs time, or may."""
    return Line(status=WARN, reason=reason, fix=fix, where=where, code=code)


def _fail(reason: str, where: str | None = None, *, fix: str, code: str | None = None) -> Line:
    """Has no effect, breaks the run, or spoils what is learned, for certain."""
    return Line(status=FAIL, reason=reason, fix=fix, where=where, code=code)


# ------------------------------------------------------------ loading


def _misspelt_flags(training: Training) -> Line | None:
    for flag, meant in training.settings.misspelt.items():
        return _fail(f"the script has no flag {flag}, and ends with an error", "the command line", fix=meant)
    return None


def _workers(training: Training) -> Line | None:
    workers, budget = training.option("num_workers"), training.budget
    if not workers.is_number():
        return None
    said = f"{workers.name}={workers.what}"
    if workers.what == 0:
        fix = workers.set_to(min(budget.cores, _MANY_WORKERS))
        if budget.cores > _MANY_WORKERS:
            fix += f" to begin with, at most {budget.cores}"
        reason = f"{said}: the training process loads every batch itself, and the GPU waits meanwhile"
        return _warn(reason, workers.where, fix=fix, code="data.main-thread")
    cores = f"{budget.cores_allowed:g} core{'' if budget.cores_allowed == 1 else 's'}"
    if budget.ranks_on_node > 1:
        cores += f" (a rank's share of {budget.ranks_on_node})"
    if workers.what > budget.cores_allowed:
        reason = f"{said}, but this process may use {cores}: {budget.cores} for loading"
        return _warn(reason, workers.where, fix=workers.set_to(budget.cores), code="data.too-many-workers")
    return _ok(f"{said} on {cores}", workers.where)


def _shared_memory(training: Training) -> Line | None:
    """/dev/shm against the batches that wait in it: workers × prefetch_factor."""
    budget, workers, ahead = training.budget, training.option("num_workers"), training.option("prefetch_factor")
    if not workers.is_number() or workers.what == 0 or budget.shm_bytes is None or budget.shm_free_bytes is None:
        return None
    waiting = int(workers.what * (ahead.what if ahead.is_number() else 2) * budget.ranks_on_node)
    mib = budget.shm_free_bytes / max(waiting, 1) / 2**20
    room = f"{waiting} batches may wait in /dev/shm: each may be up to {mib:,.1f} MiB"
    if budget.shm_bytes >= _SMALL_SHM:
        return _ok(room)
    fix = "docker run --shm-size=16g (or --ipc=host)"
    return _warn(f"{room}, or workers die of a bus error", fix=fix, code="memory.host")


def _pin_memory(training: Training) -> Line | None:
    pinned, copies = training.option("pin_memory"), training.script.calls("to", "cuda")
    overlapped = any(training.argument(call, "non_blocking") is not None for call in copies)
    if not pinned.known or (training.is_complete and not copies):
        return None
    if not pinned.what:
        reason = f"{pinned.name} is off: every copy to the GPU goes through pageable memory"
        if overlapped:
            reason += ", where non_blocking=True has no effect"
        return _warn(reason, pinned.where, fix=pinned.set_to(True), code="copy.pageable")
    if training.is_complete and not overlapped:
        reason = f"{pinned.name} is on, but nothing is copied with non_blocking=True: the host waits for each copy"
        return _warn(reason, pinned.where, fix=".to(device, non_blocking=True)", code="copy.blocking")
    return _ok(f"{pinned.name} is on", pinned.where)


def _persistent_workers(training: Training) -> Line | None:
    kept, workers = training.option("persistent_workers"), training.option("num_workers")
    one_epoch = training.setting("epochs").what == 1 or (training.loader is not None and not training.has_epochs)
    if not kept.known or not workers.is_number() or one_epoch:
        return None
    if workers.what == 0 or kept.what:
        return _ok("no workers are started again every epoch", kept.where)
    reason = f"{count_of(workers.what, 'worker')} must start again every epoch"
    return _warn(reason, kept.where, fix=kept.set_to(True), code="data.worker-start")


def _loader_in_loop(training: Training) -> Line | None:
    loader = training.loader
    if loader is None:
        return None
    for loop in loops_around(loader):
        if loop in training.loops.values() and runs_every_time(loader, loop):
            reason = "the DataLoader is built again every epoch, and its workers are started again"
            return _warn(reason, where(loader), fix=f"build it once, above {where(loop)}", code="data.worker-start")
    return _ok("built once", where(loader))


def _set_epoch(training: Training) -> Line | None:
    samplers = [call for call in training.script.calls("DistributedSampler") if not evaluates(call)]
    shuffling = [call for call in samplers if (training.argument(call, "shuffle", 3) or KnownValue(True)).what is True]
    called = training.script.calls("set_epoch")
    if shuffling and called:
        return _ok("called", where(called[0]))
    if not shuffling or not training.is_complete or not training.has_epochs:
        return None
    reason = "DistributedSampler.set_epoch is never called: every epoch sees the same order"
    return _fail(reason, where(shuffling[0]), fix="sampler.set_epoch(epoch) at the start of every epoch")


# ------------------------------------------------------------ computing


def _mixed_precision(training: Training) -> Line | None:
    line = _misspelled(training) or _autocast(training) or _asked_of_framework(training)
    if line is not None or _has_lower_precision(training) or not training.is_complete:
        return line
    reason = "the model is trained in fp32: no autocast, no lower precision anywhere"
    fix = 'with torch.autocast("cuda", torch.bfloat16): around forward pass and loss (before Ampere: torch.float16)'
    return _warn(reason, where(next(iter(training.loops))), fix=fix, code="compute.precision")


def _has_lower_precision(training: Training) -> bool:
    if training.script.uses("autocast", "amp", "half", "bfloat16", "float16"):
        return True
    return any(isinstance(node, ast.keyword) and node.arg == "torch_dtype" for node in training.script.nodes)


def _misspelled(training: Training) -> Line | None:
    """A setting that asks for mixed precision, compared with words that it is not: `amp: true` with
    'bf16'."""
    for setting in training.settings.about(*_PRECISION):
        reads = _reads(training, setting.name)
        compared = [node.around for node in reads if isinstance(node.around, ast.Compare)]
        constants = [node.value for one in compared for node in ast.walk(one) if isinstance(node, ast.Constant)]
        words = [word for word in constants if isinstance(word, str) and is_on(word) and word != setting.name]
        if not words or not is_on(setting.what) or setting.what in constants or len(compared) < len(reads):
            continue
        if isinstance(setting.what, str) and setting.what.lower() not in map(str.lower, words):
            continue  # another word altogether, which the script may know elsewhere
        reason = (
            f"{setting.name} is {str(setting.what).lower()} ({setting.where}), but the script asks whether it is "
            f"'{words[0]}' ({where(compared[0])}): it stays off, and matrix work runs in fp32"
        )
        return _fail(reason, setting.where, fix=setting.set_to(words[0]), code="config.ignored")
    return None


def _autocast(training: Training) -> Line | None:
    off = [value for value in training.settings.about(*_PRECISION) if not is_on(value.what)]
    calls = training.script.calls("autocast")
    for call in calls:
        place = 0 if "cuda" in ast.unparse(call.func) else None
        enabled = training.switched_off(call) or training.argument(call, "enabled", place) or KnownValue(True)
        if enabled.what is True:
            return _ok("autocast is on", where(call))
        if isinstance(enabled.what, str):
            reason = f"autocast(enabled=…) takes true or false and raises a TypeError for {enabled.what!r}"
            return _fail(reason, enabled.where, fix=enabled.set_to(True), code="config.ignored")
        if enabled.what is False:
            off.append(enabled)
    # A setting that says off also stands for what the script computes from it.
    if not calls or not off:
        return None
    fix = off[0].set_to(True if isinstance(off[0].what, bool) else "bf16")
    reason = "autocast is there, but switched off: matrix work runs in fp32"
    return _warn(reason, off[0].where, fix=fix, code="compute.precision")


def _asked_of_framework(training: Training) -> Line | None:
    """The precision that a framework is asked for; its own default is fp32."""
    line: Line | None = None
    imported = [one for one in FRAMEWORKS if training.script.packages.intersection(one.packages)]
    options_of = {name: options for one in imported for name, options in one.precision.items()}
    for call in training.script.calls(*options_of):
        name = last_name(call.func)
        given = [value for option in options_of[name] if (value := training.argument(call, option)) is not None]
        known = [value for value in given if value.known]
        for value in known:
            if is_on(value.what):
                return _ok(f"{value.name}={value.what}", value.where)
        if known and line is None:
            fix = known[0].set_to(options_of[name][known[0].name])
            line = _warn("fp32 is asked for", known[0].where, fix=fix, code="compute.precision")
        # A default holds where nothing is given, by `plugins` neither.
        left_out = not given and name != _HAS_ITS_OWN_CONFIG and training.argument(call, "plugins") is None
        if left_out and line is None and not _has_lower_precision(training):
            option, lower = next(iter(options_of[name].items()))
            reason, fix = f"{name}(…) without {option}: its default is fp32", f"{option}={lower!r}"
            line = _warn(reason, where(call), fix=fix, code="compute.precision")
    return line


def _reads(training: Training, name: str) -> list[Node]:
    """Where the script reads a setting, but for messages: cfg.name, cfg["name"], getattr(cfg, "name")."""
    reads: list[Node] = []
    for node in training.script.nodes:
        text = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if not isinstance(text, str) or folded(text) != folded(name):
            continue
        reading = node if isinstance(node, ast.Attribute) else node.around
        if setting_path(reading)[:1] == ["torch"]:
            continue  # torch.amp is no setting
        user = next((one for one in (reading, *parents(reading)) if isinstance(one, ast.Call | ast.stmt)), None)
        names = re.findall(r"\w+", ast.unparse(user.func)) if isinstance(user, ast.Call) else []
        if not any(map(_SHOWS.match, names)):
            reads.append(reading)
    return reads


def _is_own_variable(node: Node) -> bool:
    name = getattr(node, "id", None)
    return name is not None and bool(node.file.times_bound[name])


def _switch(subject: str, fix: str, *other_names: str) -> Callable[[Training], Line | None]:
    """A check that what a setting asks for, the name that `fix` begins with, is used anywhere in the
    script."""
    names = (re.split(r"[^\w.]", fix)[0], *other_names)

    def check(training: Training) -> Line | None:
        uses = training.script.uses(*(name.rpartition(".")[2] for name in names))
        uses = [node for node in uses if not is_setting(node) and ast.unparse(node) != "re.compile"]
        uses = [node for node in uses if not _is_own_variable(node)]  # `compile = True`
        if uses:
            made = [node for node in uses if training.switched_off(node) is None]
            return _ok("used", where(made[0])) if made else None
        for setting in training.settings.about(subject):
            if setting.what is True and training.is_complete and not _reads(training, setting.name):
                reason = f"{setting.name}: true ({setting.where}) has no effect: {' or '.join(names)} is never used"
                return _fail(reason, setting.where, fix=fix, code="config.ignored")
        return None

    return check


# ------------------------------------------------------------ the loop

# From these on the value is on the host, or is only about the tensor.
_HOST = ("item", "cpu", "tolist", "numpy", "size", "dim", "numel", "shape", "dtype", "device", "ndim")


def _host_waits(training: Training) -> Line | None:
    """.item(), .cpu(), print() of what the model gave, every batch."""
    for loop in training.loops:
        names = _names_on_gpu(loop)
        every_batch = [call for call in calls_in(loop) if runs_every_time(call, loop)]
        fetches = [call for call in every_batch if _fetches(call, names)]
        if fetches:
            what = ", ".join(f"{ast.unparse(call)} ({where(call)})" for call in fetches[:3])
            reason = f"{what} every batch: the host waits until the GPU has nothing left to do"
            fix = "add up on the GPU (total += loss.detach()), and fetch only when you log"
            return _warn(reason, where(fetches[0]), fix=fix, code="sync.item")
        if any(_fetches(call, names) and not _now_and_then(call, loop) for call in calls_in(loop)):
            return None  # under a condition that may hold in every batch
    return _ok("nothing is fetched from the GPU every batch") if training.loops else None


def _now_and_then(node: Node, loop: Node) -> bool:
    """Whether a condition such as `step % 100 == 0` stands between a node and the loop; behind a
    `continue` it may."""
    conditions = list(itertools.takewhile(lambda above: above is not loop, parents(node)))
    tests = [above.test for above in conditions if isinstance(above, ast.If | ast.IfExp)]
    return not tests or any(isinstance(part, ast.Mod) for test in tests for part in ast.walk(test))


def _fetches(call: ast.Call, names: set[str]) -> bool:
    match call:
        case ast.Call(func=ast.Attribute(value=tensor, attr="item" | "cpu" | "tolist" | "numpy"), args=[]):
            return bool(names & _names(tensor))
        case ast.Call(func=ast.Name(id="print" | "float" | "int" | "bool"), args=given):
            return any(names & _names(one) for one in given)
    return ast.unparse(call.func) == "torch.cuda.synchronize"


def _kept_graphs(training: Training) -> Line | None:
    """`losses.append(loss)` and `total += loss`: each step's graph stays for as long as the list or
    the sum."""
    for loop in training.loops:
        losses = _losses(loop)
        begun = {name for node, stored, _ in _assigned(loop) if isinstance(node, ast.Assign) for name in stored}
        for node in ast.walk(loop):
            match node:
                case (
                    ast.Call(func=ast.Attribute(value=kept, attr="append"), args=[what])
                    | ast.AugAssign(target=kept, op=ast.Add(), value=what)
                ) if not _names(kept) & (begun | losses) and not _without_grad(node):
                    with_graph = losses & _names(what, until=(*_HOST, "detach", "data"))
                    if with_graph:
                        reason = f"{ast.unparse(node)} keeps the graph of every step: memory and step times grow"
                        fix = f"{min(with_graph)}.detach()"
                        return _warn(reason, where(node), fix=fix, code="drift.slower")
    return None


def _without_grad(node: Node) -> bool:
    blocks = [one for one in parents(node) if isinstance(one, ast.With)]
    return any(last_name(call.func) == "no_grad" for one in blocks for item in one.items for call in calls_in(item))


def _assigned(loop: Node) -> Iterator[tuple[Node, set[str], set[str]]]:
    """The assignments in a loop: the names each stores to, and the names that go into its value."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = {name for target in targets for name in _names(target)} - {"self"}
            yield node, stored, _names(node.value)


def _computed(loop: Node) -> set[str]:
    return {name for _, stored, used in _assigned(loop) if used for name in stored}


def _losses(loop: Node) -> set[str]:
    """The names that `backward` is called with, or that speak of a loss."""
    names = _computed(loop)
    losses = {name for call in calls_in(loop) if "backward" in last_name(call.func) for name in _names(call)}
    return (losses or {name for name in names if "loss" in name.lower()}) & names


def _names_on_gpu(loop: Node) -> set[str]:
    """Names that hold what the model gave: the loss, what it is made of, and what is made of that in turn."""
    assigned, names, on_gpu = list(_assigned(loop)), _computed(loop), _losses(loop)
    for _, stored, used in reversed(assigned):
        if stored & on_gpu:
            on_gpu |= used & names
    for _, stored, used in assigned:
        if used & on_gpu:
            on_gpu |= stored
    return on_gpu


def _names(node: Node, *, until: tuple[str, ...] = _HOST) -> set[str]:
    """The names in an expression whose tensors go into its value."""
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr=name)) if name in until:
            return set()
        case ast.Lambda() | ast.Call(func=ast.Name(id="len" | "float" | "int" | "bool" | "isinstance" | "type")):
            return set()
        case ast.Subscript(value=value):
            return _names(value, until=until)  # the index does not go into the value
    return {name for part in ast.iter_child_nodes(node) for name in _names(part, until=until)}


# ------------------------------------------------------------ the machine


def _gpus(training: Training) -> Line | None:
    if training.gpus is None:
        return None
    if not training.gpus:
        return _fail("CUDA_VISIBLE_DEVICES hides every GPU", fix="unset CUDA_VISIBLE_DEVICES", code=_IDLE)
    if training.is_complete and not training.script.uses("cuda", "to", "device"):
        place = where(next(iter(training.loops)))
        fix = 'model.to("cuda"), and every batch likewise'
        return _warn("the script trains on the CPU: nothing is moved to a GPU", place, fix=fix, code=_IDLE)
    if len(training.gpus) == 1:
        return _ok(training.gpus[0].name)
    parallel = ("DistributedDataParallel", "FullyShardedDataParallel", "fully_shard", "DDP", "FSDP")
    if training.script.uses(*parallel) or not training.is_complete:
        return None
    start = f"torchrun --nproc-per-node {len(training.gpus)} {training.path}"
    reason = f"{len(training.gpus)} GPUs are visible, and the script uses one"
    return _warn(reason, fix=f"DistributedDataParallel, and {start}", code=_IDLE)


CHECKS: dict[str, Callable[[Training], Line | None]] = {
    "flags": _misspelt_flags,
    "workers": _workers,
    "shared memory": _shared_memory,
    "pin_memory": _pin_memory,
    "persistent_workers": _persistent_workers,
    "loader in the loop": _loader_in_loop,
    "set_epoch": _set_epoch,
    "mixed precision": _mixed_precision,
    "TF32": _switch("tf32", 'torch.set_float32_matmul_precision("high")', "allow_tf32"),
    "cuDNN benchmark": _switch("cudnn_benchmark", "torch.backends.cudnn.benchmark = True"),
    "compile": _switch("compile", "torch.compile(model)"),
    "channels_last": _switch("channels_last", "torch.channels_last for model and inputs"),
    "host waits": _host_waits,
    "kept graphs": _kept_graphs,
    "GPUs": _gpus,
}
