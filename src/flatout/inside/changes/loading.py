"""Changes to the script's DataLoaders: their arguments at construction, and what feeds them when a
pass begins.

    DataLoader.__init__ ── num_workers, prefetch_factor, pin_memory, persistent_workers
    DataLoader._get_iterator ── loader: flatout's iterator ── device_prefetch: one batch ahead, its copy under way
                                gpu_transforms: samples record what the GPU is to do to them
    a worker's main loop ── worker_threads

All of it sits on the classes, so that earlier imports, subclasses and isinstance keep working.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data.dataloader as torch_loader

from flatout.feed import DataLoader as OurLoader
from flatout.feed import LoaderOptions, iterator_for, randomness
from flatout.feed.deferred.batch import CompiledPrograms, call_on_first_use, run_on_device_with
from flatout.feed.fork_server import limit_threads
from flatout.feed.iterator import is_pure
from flatout.feed.loader import why_not_deferred
from flatout.inside.changes.device_prefetch import DevicePrefetch, SideStream, fetch_without_a_span
from flatout.inside.changes.ledger import Ledger, LiveChange
from flatout.inside.patches import Subscriber
from flatout.inside.root_modules import WeakIdMap
from flatout.inside.stacks import caller
from flatout.model.changes import named
from flatout.model.frameworks import BUILD_LOADERS

_Loader: Any = torch_loader.DataLoader
_FRAMEWORKS = tuple(f"{package}/" for package in BUILD_LOADERS)  # a change is not located in their lines
_KNOWN_SAMPLERS = ("torch", "builtins", *BUILD_LOADERS)
_ARGUMENTS = named(moment="DataLoader()")


class Loading:
    """The plan's changes to loaders. `device` says where the model is trained (None: not known yet).

    `tuned`: our iterator has as many workers as the script declares, none included, until they are changed.
    """

    def __init__(
        self, ledger: Ledger, changes: Subscriber, device: Callable[[], torch.device | None], *, tuned: bool = False
    ) -> None:
        self._ledger = ledger
        self._changes = changes
        self._device = device
        self._tuned = tuned
        self.no_workers_for = ""  # why loaders without workers stay PyTorch's
        self._signature = inspect.signature(_Loader.__init__)
        self._built = WeakIdMap()  # the loaders and their datasets, and where each loader was made
        self._prefetch = DevicePrefetch(ledger)
        self._kernels = CompiledPrograms()

    def install(self) -> dict[str, LiveChange]:
        """Put the patches in place that the plan needs; the changes that can be switched, by name."""
        wanted, live = self._ledger.wanted, dict[str, LiveChange]()
        at_passes = wanted("loader") or wanted("device_prefetch")
        if at_passes or any(wanted(name) for name in _ARGUMENTS):
            self._changes.around("torch.utils.data.dataloader.DataLoader.__init__", self._build)
        if at_passes:
            self._changes.around("torch.utils.data.dataloader.DataLoader._get_iterator", self._get_iterator)
            fetch_without_a_span(self._changes)
        if wanted("device_prefetch"):
            self._prefetch.install(self._changes)
            live[self._prefetch.name] = self._prefetch
        if wanted("gpu_transforms") and not wanted("loader"):
            self._ledger.refused("gpu_transforms", "needs the elastic loader in the same plan")
        if wanted("gpu_transforms") and wanted("compile"):
            run_on_device_with(self._kernels)
        if threads := wanted("worker_threads"):
            loop = functools.partial(self._worker_loop, threads.value)
            self._changes.around("torch.utils.data._utils.worker._worker_loop", loop)
            how = f"{threads.value} threads for BLAS, OpenMP and OpenCV in each worker"
            self._ledger.made("worker_threads", how)
        return live

    @property
    def compile_s(self) -> float:
        """What compiling the samples' transforms took."""
        return self._kernels.compile_s

    # -- at construction

    def _build(self, init: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        called, where = caller(), caller(beyond=_FRAMEWORKS)
        try:
            bound = self._signature.bind(loader, *args, **kwargs)
        except TypeError:
            init(loader, *args, **kwargs)  # raises: a mistake of the script's
            return
        dataset = bound.arguments["dataset"]
        if called != where:  # a framework that makes another loader for a dataset of the script's
            where = self._built.get(dataset) or where
        self._built.put(loader, where)
        with contextlib.suppress(TypeError):  # a list cannot be referred to weakly
            self._built.put(dataset, where)
        changed = {} if isinstance(loader, OurLoader) else self._changed(bound)
        if changed:
            given = {name: value for name, value in bound.arguments.items() if name != "self"}
            try:
                init(loader, **{**given, **changed})
            except Exception as problem:  # PyTorch refuses these arguments
                for name in changed:
                    self._ledger.refused(name, str(problem))
            else:
                for name in filter(self._ledger.wanted, changed):
                    self._ledger.made(name, f"DataLoader(…, {name}={changed[name]!r})", where)
                return
        init(loader, *args, **kwargs)

    def _changed(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        without = {"num_workers": 0, "prefetch_factor": None, "pin_memory": False, "persistent_workers": False}
        given: dict[str, Any] = {**without, **bound.arguments}
        changed: dict[str, Any] = {}
        for name in _ARGUMENTS:
            change = self._ledger.wanted(name)
            if change is None:
                continue
            why_not = _why_not(name, given["dataset"], changed.get("num_workers", given["num_workers"]))
            if why_not or given[name] == change.value:
                self._ledger.refused(name, why_not or f"it is {change.value!r} already")
            else:
                changed[name] = change.value
        if changed.get("num_workers") == 0:
            changed |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
        return changed

    # -- when a pass begins

    def _get_iterator(self, build: Any, loader: Any) -> Any:
        device = None
        if self._ledger.wanted("device_prefetch"):
            device = self._ledger.attempt("device_prefetch", self._prefetch_to, loader)
        iterator = self._ours(loader, page_locked=device is not None) if self._ledger.wanted("loader") else None
        if iterator is None:
            loader.pin_memory = loader.pin_memory or device is not None
            iterator = build(loader)
        if device is None:
            return iterator
        if isinstance(iterator, torch_loader._SingleProcessDataLoaderIter):
            # Asking for the next batch early would draw its random numbers early.
            self._prefetch.refused("samples are loaded in the training process itself")
            return iterator
        side, where = SideStream(device), self._built.get(loader)
        ahead = self._ledger.attempt("device_prefetch", self._prefetch.ahead_of, iterator, side, where)
        return iterator if ahead is None else ahead

    def _ours(self, loader: Any, *, page_locked: bool) -> Any:
        """Our iterator, or None. What was drawn from random generators in vain is put back."""
        before = randomness.capture()
        try:
            iterator, why_not = self._elastic(loader, page_locked=page_locked)
        except Exception as problem:
            randomness.restore(before)
            self._ledger.failed("loader", problem)
            return None
        if iterator is None:
            self._ledger.refused("loader", why_not)
            return None
        how = "batches come from flatout's own workers; samples that draw random numbers draw others"
        if not loader.num_workers:
            how += ", and so do later shuffles"
        self._ledger.made("loader", how, self._built.get(loader))
        return iterator

    def _elastic(self, loader: Any, *, page_locked: bool) -> tuple[Any, str]:
        if loader.num_workers == 0:
            if self.no_workers_for:
                return None, self.no_workers_for
            if _holds_gpu_memory(loader.dataset):
                return None, "the dataset holds tensors on the GPU, which no worker may touch"
            sampler = _own_sampler(loader)
            if sampler:
                why = f"num_workers=0, and the sampler is the script's own, {sampler}: it may go by what was learned"
                return None, why
        options = LoaderOptions(
            workers="tuned" if self._tuned else "auto",
            page_locked=page_locked,
            defer=bool(self._ledger.wanted("gpu_transforms")) and self._may_defer(loader),
        )
        return iterator_for(loader, options, give_back=functools.partial(self._ledger.withdraw, "loader"))

    def _may_defer(self, loader: Any) -> bool:
        """Whether this loader's samples may leave their transforms to the GPU; its first batch says
        if they do."""
        device = self._device()
        why_not = why_not_deferred(loader)
        if device is None or device.type != "cuda":
            why_not = "the model is not trained on a GPU"
        if not why_not:
            how = f"{device} makes what samples do to pictures"
            call_on_first_use(functools.partial(self._ledger.made, "gpu_transforms", how, self._built.get(loader)))
        self._ledger.refused("gpu_transforms", why_not or "samples do nothing to pictures that a GPU could do")
        return not why_not

    def _prefetch_to(self, loader: Any) -> torch.device | None:
        """The device to copy this pass's batches to ahead of time; None where that may not be done."""
        device = self._device()
        if device is None or device.type != "cuda":
            self._prefetch.refused("the model is not trained on a GPU")
        elif not torch.is_grad_enabled():
            self._prefetch.refused("no training loader was seen")
        elif not is_pure(loader):
            self._prefetch.refused("the sampler is the script's own: asking it early could be noticed")
        else:
            return device
        return None

    def _worker_loop(self, threads: int, main: Any, *args: Any, **kwargs: Any) -> Any:
        self._ledger.attempt("worker_threads", limit_threads, threads)
        return main(*args, **kwargs)


def _why_not(name: str, dataset: Any, workers: int) -> str:
    if isinstance(dataset, torch.utils.data.IterableDataset) and name == "num_workers":
        return "the dataset is an IterableDataset: the number of workers decides what is in the data"
    if name in ("prefetch_factor", "persistent_workers") and workers == 0:
        return "num_workers=0: there are no workers"
    if name == "pin_memory" and not torch.cuda.is_available():
        return "there is no GPU to copy to"
    return ""


def _own_sampler(loader: Any) -> str:
    """The name of the script's own sampler, if it has one: it may say only when it is asked what
    comes next."""
    for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", loader.sampler)):
        kind = type(sampler)
        if kind.__module__.partition(".")[0] not in _KNOWN_SAMPLERS:
            return kind.__name__
    return ""


def _holds_gpu_memory(thing: Any, depth: int = 3) -> bool:
    """Whether a dataset keeps tensors on a GPU, as far as its attributes show."""
    if isinstance(thing, torch.Tensor):
        return thing.is_cuda
    if depth == 0:
        return False
    values = thing
    if not isinstance(thing, list | tuple):
        values = (thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})).values()
    return any(_holds_gpu_memory(value, depth - 1) for value in list(values)[:64])
