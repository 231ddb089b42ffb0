"""`DataLoader`: PyTorch's, with the workers taken care of. `iterator_for`: the same for any loader of
PyTorch's."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import multiprocessing
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, _DatasetKind, default_collate
from torch.utils.data.dataloader import DataLoader as TorchLoader

from flatout.feed import randomness
from flatout.feed.channel import Recipe
from flatout.feed.dataset_check import DatasetCheck, functions_of, names_in, with_wrapped
from flatout.feed.iterator import FeedIterator, PassPosition, generators_of
from flatout.feed.scheduler import Auto, BatchScheduler, LoaderOptions
from flatout.model.frameworks import SEEDING_MODULES
from flatout.sample import budget

log = logging.getLogger("flatout.feed")
_MIN_PILLOW = 11
T_co = TypeVar("T_co", covariant=True)


class DataLoader(TorchLoader[T_co]):
    """`torch.utils.data.DataLoader`, with workers that are replaced when they die, and that tune themselves
    if asked.

    Takes the same arguments, which mean the same. With `num_workers="auto"` we choose their number.
    `on_bad_sample="skip"` leaves samples out that raise or kill. A worker that stands still for
    `hang_timeout` seconds is replaced.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        on_bad_sample: Literal["raise", "skip"] = "raise",
        hang_timeout: float = 600.0,
        **torch_options: Any,
    ) -> None:
        if on_bad_sample not in ("raise", "skip"):
            raise ValueError(f"on_bad_sample must be one of raise, skip (got {on_bad_sample!r})")
        if isinstance(num_workers, str) and num_workers != "auto":
            raise ValueError(f'num_workers must be a number or "auto" (got {num_workers!r})')
        # By the names of the arguments, as PyTorch keeps its own: Lightning looks there when it makes
        # another loader.
        self.on_bad_sample: Literal["raise", "skip"] = on_bad_sample
        self.hang_timeout = hang_timeout
        self._page_locked = False
        self._position: PassPosition | None = None
        self._reason_shown = ""
        self._resume: dict[str, Any] | None = None
        workers = Auto(_workers_to_start_with(dataset)) if num_workers == "auto" else num_workers
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, workers, collate_fn, pin_memory, drop_last, timeout,
            worker_init_fn, multiprocessing_context, generator, **torch_options,
        )  # fmt: skip

    def _get_iterator(self) -> Any:
        resume, self._resume = self._resume, None
        random_state = randomness.capture() if resume else None
        options = LoaderOptions(
            workers="auto" if isinstance(self.num_workers, Auto) else None,
            on_bad_sample=self.on_bad_sample,
            hang_timeout=self.hang_timeout,
            page_locked=self._page_locked,
        )
        iterator, reason = iterator_for(self, options, resume)
        if iterator is not None:
            if random_state is not None:
                randomness.restore(random_state)
            return iterator
        if reason != self._reason_shown:
            log.info("PyTorch's loader: %s", reason)
        self._reason_shown = reason
        if resume is not None:
            raise RuntimeError(f"this loader cannot resume in mid-epoch: {reason}")
        return super()._get_iterator()

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        self._position = getattr(iterator, "position", None)
        return iterator

    def state_dict(self, *, behind: int = 0) -> dict[str, Any]:
        """Where the present pass is; `behind` batches were fetched but not used yet."""
        position = self._position
        if position is None and self._reason_shown:
            log.warning("this loader cannot resume in mid-epoch, only at the start of one: %s", self._reason_shown)
        if position is None or (position.finished and not behind):
            return self._state_between_passes(position)
        return {
            "version": 1,
            "yielded": max(0, position.yielded - behind),
            "base_seed": position.base_seed,
            "epoch": position.epoch,
            "random": position.random,
            "generators": position.generators,
        }

    def _state_between_passes(self, position: PassPosition | None) -> dict[str, Any]:
        """The next pass draws from the loader's own generators, which go along."""
        state = {"version": 1, "yielded": 0, "generators": [one.get_state() for one in generators_of(self)]}
        if position is not None and self.persistent_workers and state["generators"]:
            # A persistent iterator draws its base seed once: the next one is not to draw another.
            state |= {"base_seed": position.base_seed, "epoch": position.epoch + 1, "random": randomness.capture()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next `iter()` go on from there; the number of workers may be another."""
        if state.get("version") != 1:
            raise ValueError(f"not a state of this DataLoader (version {state.get('version')!r}, expected 1)")
        self._resume = state if "base_seed" in state else None
        for generator, its_state in zip(generators_of(self), state.get("generators", ()), strict=False):
            generator.set_state(its_state)
        self._iterator = None  # or persistent workers would just begin the next pass

    def page_lock(self) -> None:
        """Make batches in page-locked memory from the next pass on, whatever `pin_memory` says."""
        self._page_locked = True

    @property
    def feed(self) -> BatchScheduler | None:
        """The workers behind this loader, once it was iterated: how many, why, and what happened to them."""
        return feed_of(self)


# --- our iterator for any loader ----------------------------------------------------------------


_schedulers: weakref.WeakKeyDictionary[TorchLoader[Any], BatchScheduler] = weakref.WeakKeyDictionary()
_one_thread = threading.RLock()  # begins a pass at a time; then each has a scheduler of its own


def _new_lock() -> None:
    global _one_thread
    _one_thread = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)  # the thread that held it may not be there


def iterator_for(
    loader: TorchLoader[Any],
    options: LoaderOptions | None = None,
    resume: dict[str, Any] | None = None,
    *,
    give_back: Callable[[str], None] | None = None,
) -> tuple[FeedIterator | None, str]:
    """Our iterator for any loader, or None and the reason why PyTorch's has to do.

    `give_back` is called with the reason when a loader without workers of its own turns out to do better
    without ours: they would not see what is written to its dataset.
    """
    options = options or LoaderOptions()
    with _one_thread:
        reason = why_not(loader, options)
        if reason:
            return None, reason
        before = _schedulers.get(loader)
        if before is not None and before.pid != os.getpid():  # a forked process has workers of its own
            before = None
        if before is not None and before.given_back:
            return None, before.given_back
        # Scripts that write to their dataset do so from the start; later passes are spared the looking.
        check = None
        if loader.num_workers == 0 and (before is None or not before.checked):
            check = functools.partial(DatasetCheck, loader.dataset, loader.collate_fn)
        recipe = Recipe(
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            auto_collation=loader._auto_collation,
            drop_last=loader.drop_last,
            declared=int(loader.num_workers) or _workers_to_start_with(loader.dataset),
            skip_bad=options.on_bad_sample == "skip",
            defer=options.defer and not why_not_deferred(loader),
        )
        scheduler = _scheduler_for(loader, recipe, options, before)
        try:
            scheduler.start_workers(recipe)  # before anything is drawn that PyTorch would draw again
        except OSError as problem:
            return None, f"no worker could be started ({problem})"
        iterator = FeedIterator(loader, scheduler, resume, check=check, give_back=give_back)
        scheduler.iterator = weakref.ref(iterator)
        return iterator, ""


def _scheduler_for(
    loader: TorchLoader[Any], recipe: Recipe, options: LoaderOptions, before: BatchScheduler | None
) -> BatchScheduler:
    """The loader's scheduler `before`, where that may be used again."""
    page_locked = bool(loader.pin_memory or options.page_locked) and torch.cuda.is_available()
    latest = before.iterator() if before is not None else None
    # Two passes at once, as in zip(loader, loader), have workers of their own each.
    in_use = latest is not None and not latest.position.finished
    if before is not None and not (in_use or before.closed or before.slots.page_locked != page_locked):
        return before
    scheduler = BatchScheduler(recipe, loader, options, page_locked=page_locked)
    if not in_use:
        _schedulers[loader] = scheduler
        if before is not None:
            before.close()
    return scheduler


def feed_of(loader: TorchLoader[Any]) -> BatchScheduler | None:
    """The scheduler a loader has, if it was iterated through ours."""
    return _schedulers.get(loader)


def _workers_to_start_with(dataset: Any) -> int:
    """All cores we may use; one where every worker would give all of the data."""
    return 1 if isinstance(dataset, IterableDataset) else budget.measure().cores


# --- when PyTorch's iterator has to do ----------------------------------------------------------


def why_not(loader: TorchLoader[Any], options: LoaderOptions) -> str:
    """Why this loader has to use PyTorch's own iterator; "" where it may use ours."""
    if not _kernel_has_what_workers_need():
        return "this system has no memfd or pidfd"
    if loader.num_workers == 0 and options.workers is None:
        return "num_workers=0"
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "DataPipes share random seeds in a way of their own"
    if loader._dataset_kind == _DatasetKind.Iterable:
        return "an IterableDataset: which data a worker gives depends on its number"
    # Batches go to any idle worker here: user code that minds its worker's number has to have
    # PyTorch's workers.
    if loader.worker_init_fn is not None and _module_of(loader.worker_init_fn) not in SEEDING_MODULES:
        name = getattr(_unwrapped(loader.worker_init_fn), "__qualname__", type(loader.worker_init_fn).__name__)
        name = f"{_module_of(loader.worker_init_fn)}.{name}"
        return f"its worker_init_fn, {name}, may make workers differ by their number"
    asking = _asks_for_its_worker(loader)
    if asking:
        return f"{asking} calls get_worker_info(): its samples may depend on the number of their worker"
    if multiprocessing.current_process().daemon:
        return "a daemonic process may have no workers"
    if loader.pin_memory and hasattr(torch, "accelerator"):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type != "cuda":
            return f"page-locked memory for {accelerator.type} is PyTorch's business"
    return ""


def why_not_deferred(loader: TorchLoader[Any]) -> str:
    """Why what samples do to their pictures cannot be left to the GPU; "" where it may be."""
    try:
        pillow = importlib.metadata.version("pillow")
    except importlib.metadata.PackageNotFoundError:
        return "Pillow is not installed: there are no pictures of its own"
    if int(pillow.partition(".")[0]) < _MIN_PILLOW:
        return f"Pillow {pillow} cannot make pixels later: {_MIN_PILLOW} can"
    if loader.collate_fn is not default_collate:
        return "the collate function is the script's own: it may look into samples"
    return ""


@functools.cache
def _kernel_has_what_workers_need() -> bool:
    """Asked of the kernel: Python may have the functions, and an old or sandboxed kernel lack them."""
    try:
        for handle in (os.memfd_create("flatout"), os.pidfd_open(os.getpid())):
            os.close(handle)
    except (AttributeError, OSError):
        return False
    return True


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _module_of(function: Any) -> str:
    return getattr(_unwrapped(function), "__module__", "") or ""


def _asks_for_its_worker(loader: TorchLoader[Any]) -> str:
    """The name of a function of the dataset or collate_fn that asks which worker it is in."""
    collate = _unwrapped(loader.collate_fn)
    functions = [collate] if isinstance(collate, types.FunctionType) else [*functions_of(type(collate))]
    for dataset in with_wrapped(loader.dataset):
        functions += functions_of(type(dataset))
    for function in functions:
        if "get_worker_info" in names_in(function.__code__) and not function.__module__.startswith("torch."):
            return function.__qualname__
    return ""
