"""`DataLoader`: stock's, with the workers taken care of."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import multiprocessing
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, _DatasetKind, default_collate
from torch.utils.data.dataloader import DataLoader as StockLoader

from flatout.feed import randomness
from flatout.feed.fingerprint import Known, fingerprint
from flatout.feed.iterator import FeedIterator, Position, generators_of
from flatout.feed.messages import Recipe
from flatout.feed.scheduler import BatchScheduler
from flatout.feed.variables import Globals
from flatout.model.frameworks import SEEDING_MODULES
from flatout.sample import budget

log = logging.getLogger("flatout.feed")
_LEAST_PILLOW = 11
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What our loader can do that stock's arguments do not say."""

    workers: Literal["auto"] | None = None  # None: as many as the loader declares
    rng: Literal["position", "stock"] = "position"
    on_bad_sample: Literal["raise", "skip"] = "raise"
    hang_timeout: float = 600.0
    page_locked: bool | None = None  # None: as the loader's pin_memory says
    defer: bool = False  # leave to the card what samples do to their pictures


class Auto(int):
    """`num_workers="auto"` as it stands in a loader: a number of workers to begin with, which may change.

    Who makes another loader from this one's attributes, as Lightning does, hands it on.
    """

    __slots__ = ()


class DataLoader(StockLoader[T_co]):
    """`torch.utils.data.DataLoader`, with workers that are replaced when they die, and that tune themselves if asked.

    Takes the same arguments, which mean the same. `num_workers="auto"` leaves their number to us. `rng="stock"` keeps
    PyTorch's random stream of a worker. `on_bad_sample="skip"` leaves samples out that raise or kill. A worker that
    stands still for `hang_timeout` seconds is replaced.
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
        rng: Literal["position", "stock"] = "position",
        on_bad_sample: Literal["raise", "skip"] = "raise",
        hang_timeout: float = 600.0,
        **stock: Any,
    ) -> None:
        for name, value, known in (
            ("rng", rng, ("position", "stock")), ("on_bad_sample", on_bad_sample, ("raise", "skip")),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)} (got {value!r})")
        if isinstance(num_workers, str) and num_workers != "auto":
            raise ValueError(f'num_workers must be a number or "auto" (got {num_workers!r})')
        # By their names, as PyTorch keeps its own: that is where Lightning looks when it makes another such loader.
        self.rng: Literal["position", "stock"] = rng
        self.on_bad_sample: Literal["raise", "skip"] = on_bad_sample
        self.hang_timeout = hang_timeout
        self._page_locked: bool | None = None
        self._position: Position | None = None
        self._said = ""
        self._resume: dict[str, Any] | None = None
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler,
            Auto(_workers_to_start_with(dataset)) if num_workers == "auto" else num_workers,
            collate_fn, pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator, **stock,
        )  # fmt: skip

    @property
    def _options(self) -> Options:
        return Options(
            workers="auto" if isinstance(self.num_workers, Auto) else None,
            rng=self.rng,
            on_bad_sample=self.on_bad_sample,
            hang_timeout=self.hang_timeout,
            page_locked=self._page_locked,
        )

    def _get_iterator(self) -> Any:
        resume, self._resume = self._resume, None
        users_random = randomness.capture() if resume else None
        iterator, reason = iterator_for(self, self._options, resume)
        if iterator is None:
            if reason != self._said:
                log.info("PyTorch's loader: %s", reason)
            self._said = reason
            iterator = self._stock_iterator(reason, resume)
        if users_random is not None:
            randomness.restore(users_random)
        return iterator

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        self._position = getattr(iterator, "position", None)
        return iterator

    def _stock_iterator(self, reason: str, resume: dict[str, Any] | None) -> Any:
        if resume is not None:
            raise RuntimeError(f"this loader cannot resume in mid-epoch: {reason}")
        return super()._get_iterator()

    def state_dict(self, *, behind: int = 0) -> dict[str, Any]:
        """Where the present pass is; `behind` batches were fetched but not used yet."""
        position = self._position
        if position is None and self._said:
            log.warning("this loader cannot resume in mid-epoch, only at the start of one: %s", self._said)
        if position is None or (position.finished and not behind):
            return self._state_between_passes(position)
        yielded = max(0, position.yielded - behind)
        states = reversed(position.workers)
        turn, workers = next(((turn, births) for at, turn, births in states if at <= yielded), (0, None))
        return {
            "version": 1,
            "yielded": yielded,
            "base_seed": position.base_seed,
            "epoch": position.epoch,
            "random": position.random,
            "generators": position.generators,
            "turn": turn,
            "workers": workers and [birth and birth._asdict() for birth in workers],
        }

    def _state_between_passes(self, position: Position | None) -> dict[str, Any]:
        """The next pass draws from the loader's own generators, which go along."""
        state = {"version": 1, "yielded": 0, "generators": [one.get_state() for one in generators_of(self)]}
        if position is not None and self.persistent_workers and state["generators"]:
            # An iterator that stays draws its base seed once: the next one is not to draw another.
            seeds = {"base_seed": position.base_seed, "epoch": position.epoch + 1, "random": randomness.capture()}
            state |= seeds | {"turn": 0, "workers": None}
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


# --- building a feed from any stock loader ----------------------------------------------------------------------------

_kept: weakref.WeakKeyDictionary[StockLoader[Any], _Kept] = weakref.WeakKeyDictionary()
_one_thread = threading.RLock()  # begins a pass at a time; then each has a feed of its own


def _new_lock() -> None:
    global _one_thread
    _one_thread = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)  # the thread that held it may not be there


@dataclass(slots=True)
class _Kept:
    """A loader's feed from epoch to epoch, and what it was built from."""

    feed: BatchScheduler
    shipped: int | None = None  # fingerprint of the dataset, and of what goes with it, that the workers have
    known: Known = field(default_factory=dict)
    user: weakref.ref[FeedIterator] | None = None


def iterator_for(
    loader: StockLoader[Any],
    options: Options | None = None,
    resume: dict[str, Any] | None = None,
    *,
    given_back: Callable[[str], None] | None = None,
) -> tuple[FeedIterator | None, str]:
    """Our iterator for any loader, or None and the reason why stock's has to do.

    `given_back`: who is told why a loop without workers of its own goes on without ours: what is written to its dataset
    they would not see.
    """
    with _one_thread:
        return _iterator_for(loader, options or Options(), resume, given_back)


def _iterator_for(
    loader: StockLoader[Any],
    options: Options,
    resume: dict[str, Any] | None,
    given_back: Callable[[str], None] | None,
) -> tuple[FeedIterator | None, str]:
    reason = _why_not(loader, options)
    if reason:
        return None, reason
    kept = _kept.get(loader)
    if kept is not None and kept.feed.pid != os.getpid():  # a forked process has workers of its own
        kept = None
    declared = int(loader.num_workers)
    if not declared:
        declared = kept.feed.recipe.declared if kept else _workers_to_start_with(loader.dataset)
    recipe = Recipe(
        dataset=loader.dataset,
        collate_fn=loader.collate_fn,
        iterable=loader._dataset_kind == _DatasetKind.Iterable,
        auto_collation=loader._auto_collation,
        drop_last=loader.drop_last,
        worker_init_fn=_init_fn(loader),
        batch_size=loader.batch_size or _whole_number(getattr(loader.batch_sampler, "batch_size", None)),
        declared=declared,
        numbered=_numbered(loader, options),
        streams=_streams(loader, options),
        skip_bad=options.on_bad_sample == "skip",
        defer=options.defer and not why_not_deferred(loader),
    )
    page_locked = _page_locked(loader, options)
    lone = kept is not None and kept.user is not None and _in_use(kept.user())
    if lone or kept is None or kept.feed.closed or not kept.feed.serves(recipe, page_locked=page_locked):
        feed = BatchScheduler(
            recipe,
            loader.multiprocessing_context,
            budget.measure(),
            workers=declared,
            may_do_without=_may_do_without(loader),
            page_locked=page_locked,
            hang_timeout=options.hang_timeout,
        )
        if kept is not None and not lone:
            kept.feed.close()
        kept = _Kept(feed)
        if not lone:
            _kept[loader] = kept
    if not loader.persistent_workers:  # those keep the dataset they have, as in stock
        wanted = kept.feed.workers > 0  # else whoever is called in mid-pass gets it as it is then
        goes_along = loader.dataset, loader.collate_fn, recipe.worker_init_fn
        now = fingerprint(*goes_along, known=kept.known) if wanted else None
        if now is not None:  # what of the variables cannot be looked into is taken to be as it was
            now = hash((now, *map(fingerprint, Globals(*goes_along).now().values())))
        if now is None or now != kept.shipped:
            kept.feed.ship_again()
        kept.shipped = now
    if kept.feed.workers:
        try:
            kept.feed.crew.ready()  # before anything is drawn that stock would draw again
        except OSError as problem:
            return None, f"no worker could be started ({problem})"
    iterator = FeedIterator(loader, kept.feed, resume, given_back=given_back)
    kept.user = weakref.ref(iterator)
    return iterator, ""


def why_not_deferred(loader: StockLoader[Any]) -> str:
    """Why what samples do to their pictures cannot be left to the card; "" where it may be."""
    try:
        pillow = importlib.metadata.version("pillow")
    except importlib.metadata.PackageNotFoundError:
        return "Pillow is not here: there are no pictures of its own"
    if int(pillow.partition(".")[0]) < _LEAST_PILLOW:
        return f"Pillow {pillow} has no way to make pixels later: {_LEAST_PILLOW} has"
    if loader.collate_fn is not default_collate:
        return "the collate function is the script's own: it may look into samples"
    return "samples are not asked for by their index" if loader._dataset_kind == _DatasetKind.Iterable else ""


def _whole_number(value: Any) -> int | None:
    return value if type(value) is int else None


def _workers_to_start_with(dataset: Any) -> int:
    """All cores we may use; one where every worker would give all of the data."""
    return 1 if isinstance(dataset, IterableDataset) else budget.measure().cores


def feed_of(loader: StockLoader[Any]) -> BatchScheduler | None:
    """The feed a loader has, if it was iterated through ours."""
    kept = _kept.get(loader)
    return kept.feed if kept is not None else None


def _why_not(loader: StockLoader[Any], options: Options) -> str:
    if not _has_what_workers_need():
        return "this system has no memfd or pidfd"
    if loader.num_workers == 0 and options.workers is None:
        return "num_workers=0"
    if loader.num_workers == 0 and _streams(loader, options):
        meant = (
            f"its worker_init_fn, {_named(loader.worker_init_fn)}, may make workers what they have to be"
            if _init_fn(loader) is not None
            else "other workers draw otherwise"
        )
        stream = "every worker would give all of the stream"
        return f"num_workers=0: {stream if loader._dataset_kind == _DatasetKind.Iterable else meant}"
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "DataPipes share random seeds in a way of their own"
    if multiprocessing.current_process().daemon:
        return "a daemonic process may have no workers"
    if loader.pin_memory and hasattr(torch, "accelerator"):
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type != "cuda":
            return f"page-locked memory for {accelerator.type} is stock's business"
    return ""


@functools.cache
def _has_what_workers_need() -> bool:
    """Asked of the kernel itself: Python may have the functions, and an old or a sandboxed kernel not know them."""
    try:
        for handle in (os.memfd_create("flatout"), os.pidfd_open(os.getpid())):
            os.close(handle)
    except (AttributeError, OSError):
        return False
    return True


def _numbered(loader: StockLoader[Any], options: Options) -> bool:
    """Whether there are as many workers as declared, and batches go round them: not only where it is left to us."""
    return options.workers is None or _streams(loader, options)


def _streams(loader: StockLoader[Any], options: Options) -> bool:
    """Whether user code can tell workers apart: each has a random stream, or one of data."""
    return options.rng == "stock" or _init_fn(loader) is not None or loader._dataset_kind == _DatasetKind.Iterable


def _init_fn(loader: StockLoader[Any]) -> Callable[[int], None] | None:
    """Its worker_init_fn; none where that only seeds, and stock, without workers, would never call it."""
    seeds = getattr(_function(loader.worker_init_fn), "__module__", None) in SEEDING_MODULES
    return loader.worker_init_fn if loader.num_workers or not seeds else None


def _named(function: Any) -> str:
    inner = _function(function)
    return f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__name__)}"


def _function(one: Any) -> Any:
    return _function(one.func) if isinstance(one, functools.partial) else one


def _page_locked(loader: StockLoader[Any], options: Options) -> bool:
    wanted = loader.pin_memory if options.page_locked is None else options.page_locked
    return bool(wanted) and torch.cuda.is_available()


def _in_use(iterator: FeedIterator | None) -> bool:
    return iterator is not None and not iterator.position.finished


def _may_do_without(loader: StockLoader[Any]) -> bool:
    """Whether the training process may touch the dataset: the script has asked for no number of workers, they stay as
    they are, and later ones can be started."""
    if loader.num_workers and not isinstance(loader.num_workers, Auto):
        return False
    context = loader.multiprocessing_context or multiprocessing
    return not loader.persistent_workers and context.get_start_method() == "fork"
