"""Checks of the data path: workers, shared memory, pinning, and loaders that start their workers again.

A check returns None where it does not apply, or only a run can tell.
"""

from __future__ import annotations

from flatout.check.known_settings import KnownValue
from flatout.check.lines import Line, fail, ok, warn
from flatout.check.script import argument, loops_around, where
from flatout.check.training import Training, is_of_evaluation, runs_every_time
from flatout.model.formatting import count_of

_SMALL_SHM = 128 << 20  # a container gets 64 MiB unless it is given more


def check_workers(training: Training) -> Line | None:
    """num_workers against the cores a rank may use for loading."""
    workers, name, budget = training.option("num_workers"), training.spelled("num_workers"), training.budget
    if not workers.is_number():
        return None
    share = f" (a rank's share of {budget.ranks_on_node})" if budget.ranks_on_node > 1 else ""
    cores = f"{budget.cores_allowed:g} core{'' if budget.cores_allowed == 1 else 's'}{share}"
    if workers.what == 0:
        reason = f"{name}=0: the training process loads every batch itself, and the GPU waits meanwhile"
        fix = f"{workers.set_to(name, min(budget.cores, 8))} to begin with"
        return warn(reason, workers.where, fix=fix, code="data.main-thread")
    if workers.what > budget.cores_allowed:
        reason = f"{name}={workers.what}, but this process may use {cores}: {budget.cores} for loading"
        fix = workers.set_to(name, budget.cores)
        return warn(reason, workers.where, fix=fix, code="data.too-many-workers")
    return ok(f"{name}={workers.what} on {cores}", workers.where)


def check_shared_memory(training: Training) -> Line | None:
    """/dev/shm against the batches that wait in it: workers × prefetch_factor."""
    budget, workers, ahead = training.budget, training.option("num_workers"), training.option("prefetch_factor")
    if not workers.is_number() or workers.what == 0 or budget.shm_bytes is None or budget.shm_free_bytes is None:
        return None
    waiting = int(workers.what * (ahead.what if ahead.is_number() else 2) * budget.ranks_on_node)
    mib = budget.shm_free_bytes / max(waiting, 1) / 2**20
    room = f"{waiting} batches may wait in /dev/shm: each may be up to {mib:,.1f} MiB"
    if budget.shm_bytes >= _SMALL_SHM:
        return ok(room)
    fix = "docker run --shm-size=16g (or --ipc=host)"
    return warn(f"{room}, or workers die of a bus error", fix=fix, code="memory.host")


def check_pin_memory(training: Training) -> Line | None:
    """pin_memory, and whether copies then make use of it."""
    pinned, name = training.option("pin_memory"), training.spelled("pin_memory")
    copies = training.script.calls("to", "cuda")
    overlapped = [call for call in copies if argument(call, "non_blocking") is not None]
    if not pinned.known or (training.is_complete and not copies):
        return None
    if not pinned.what:
        reason = f"{name} is off: every copy to the GPU goes through pageable memory"
        effect = ", where non_blocking=True has no effect" if overlapped else ""
        return warn(reason + effect, pinned.where, fix=pinned.set_to(name, True), code="copy.pageable")
    if training.is_complete and not overlapped:
        reason = f"{name} is on, but nothing is copied with non_blocking=True: the host waits for each copy"
        return warn(reason, pinned.where, fix=".to(device, non_blocking=True)", code="copy.blocking")
    return ok(f"{name} is on", pinned.where)


def check_persistent_workers(training: Training) -> Line | None:
    """persistent_workers, where there are workers and epochs."""
    name, kept = training.spelled("persistent_workers"), training.option("persistent_workers")
    workers, epochs = training.option("num_workers"), any(loop.epochs for loop in training.loops)
    one_epoch = training.setting("epochs").what == 1 or (training.loader is not None and not epochs)
    if not kept.known or not workers.is_number() or one_epoch:
        return None
    if workers.what == 0 or kept.what:
        return ok("no workers are started again every epoch", kept.where)
    reason = f"{count_of(workers.what, 'worker')} must start again every epoch"
    return warn(reason, kept.where, fix=kept.set_to(name, True), code="data.worker-start")


def check_loader_in_loop(training: Training) -> Line | None:
    """A training loader that is built again every epoch."""
    loader, epochs = training.loader, [loop.epochs for loop in training.loops if loop.epochs]
    if loader is None:
        return None
    for loop in loops_around(loader):
        if loop in epochs and runs_every_time(loader, loop):
            reason = "the DataLoader is built again every epoch, and its workers are started again"
            return warn(reason, where(loader), fix=f"build it once, above {where(loop)}", code="data.worker-start")
    return ok("built once", where(loader))


def check_set_epoch(training: Training) -> Line | None:
    """DistributedSampler.set_epoch, without which every epoch has the same order."""
    samplers = [call for call in training.script.calls("DistributedSampler") if not is_of_evaluation(call)]
    shuffling = [call for call in samplers if (training.argument(call, "shuffle", 3) or KnownValue(True)).what is True]
    called = training.script.calls("set_epoch")
    if shuffling and called:
        return ok("called", where(called[0]))
    if not shuffling or not training.is_complete or not any(loop.epochs for loop in training.loops):
        return None
    reason = "DistributedSampler.set_epoch is never called: every epoch sees the same order"
    return fail(reason, where(shuffling[0]), fix="sampler.set_epoch(epoch) at the start of every epoch")
