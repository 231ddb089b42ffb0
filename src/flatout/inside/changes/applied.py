"""A plan applied in one training process: its changes, the seed of a trial, and what a proof has to know."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.files import write_whole
from flatout.inside.changes.computing import Computing
from flatout.inside.changes.ledger import Ledger, LiveChange
from flatout.inside.fingerprints import FingerprintLog
from flatout.inside.patches import Patches, Stage, Subscriber
from flatout.inside.root_modules import RootModules
from flatout.inside.weights import Weights
from flatout.launch.protocol import Options
from flatout.model.errors import UsageError
from flatout.redact import redact_text

if TYPE_CHECKING:
    from flatout.inside.changes.loading import Loading


class Applied:
    """What a plan and a trial change in this process."""

    def __init__(
        self,
        options: Options,
        ledger: Ledger,
        ranks: Callable[[], tuple[int, int]],
        patches: Patches,
        roots: RootModules,
    ) -> None:
        self.ledger = ledger
        trial = options.trial
        self._proof: FingerprintLog | None = None
        if trial is not None and trial.fingerprints:
            self._proof = FingerprintLog(closely=trial.closely)
        self._weights = Weights(trial, ranks) if trial is not None else None
        changes = patches.subscriber(Stage.CHANGE, self._fail)
        proof = patches.subscriber(Stage.OBSERVE, functools.partial(_say, "what reaches the model is no longer noted"))
        self._subscribers = changes, proof
        self._computing = Computing(ledger, changes, roots, self._proof)
        self._loading: Loading | None = None
        self._live: dict[str, LiveChange] = dict(self._computing.live)
        try:
            if trial is not None and trial.seed is not None:
                impose_seed(trial.seed + ranks()[0], changes)
            if ledger.changes or self._proof is not None:
                from flatout.inside.changes.loading import Loading  # brings all of feed

                self._loading = Loading(ledger, changes, self._computing.device, tuned=options.tune)
                self._computing.install()
                self._live |= self._loading.install()
            if self._proof is not None:
                self._proof.install(proof)
        except Exception as problem:
            _say("the plan is not applied", problem)

    def _fail(self, problem: Exception) -> None:
        for name in self.ledger.changes:
            self.ledger.failed(name, problem)

    @property
    def wants_every_step(self) -> bool:
        """Whether `step_ended` is to be called after each of them; else now and then will do."""
        return self._proof is not None

    def step_ended(self, *, first: bool) -> None:
        """A training step is over, of the first training of this command or a later one."""
        self._computing.step_ended()
        if self._proof is not None and self._weights is not None:
            met = self._weights.step_ended(self._computing.optimizers, self._proof.roots) if first else None
            self._proof.step_ended(met, self._computing.optimizers)

    @property
    def compile_s(self) -> float | None:
        """How long compiling took, where something was compiled."""
        in_loading_s = self._loading.compile_s if self._loading is not None else 0.0
        return self._computing.compile_s + in_loading_s or None

    def why_not_made(self, name: str) -> str:
        """Why a change that is on has no effect; empty where it has one."""
        entry = self.ledger.entry(self.ledger.changes[name])
        return "" if entry.applied else str(entry.how)

    def hand_back_loaders(self, why: str) -> None:
        """From the next pass on, have PyTorch make the batches of loaders without workers; "": no longer."""
        if self._loading is not None:
            self._loading.no_workers_for = why

    def try_out(self, name: str) -> None:
        """Switch a change on that may fail: a forward that raises with it is repeated without."""
        self._computing.on_trial = name
        self.switch(name, on=True)

    def switch(self, name: str, *, on: bool) -> None:
        """Switch a change of the plan on or off from the next step on.

        Raises UsageError where a change cannot be switched while training runs.
        """
        change = self._live.get(name)
        if change is None:
            raise UsageError(
                f"{name} cannot be switched while training runs: it gets in earlier, or is not in the plan"
            )
        self.ledger.attempt(name, change.on if on else change.off)

    def finish(self, path: Path) -> None:
        """The run is over: say what was not made, write the proof, and take the patches off."""
        self._computing.finish()
        for subscriber in self._subscribers:
            subscriber.leave()
        if self._proof is not None:
            self._proof.write(path)
        if self._weights is not None and (drifts := self._weights.drifts()):
            drifted = path.with_name(path.name.replace("proof-", "drifts-")).with_suffix(".json")
            write_whole(drifted, json.dumps(drifts))


def _say(what: str, problem: Exception) -> None:
    print(f"flatout: {what} ({redact_text(f'{type(problem).__name__}: {problem}')})", file=sys.stderr)


def impose_seed(imposed: int, changes: Subscriber) -> None:
    """Seed torch, numpy and `random` before the script's first line; a script that seeds later has
    the last word."""
    torch.manual_seed(imposed)
    random.seed(imposed)
    changes.patches.when_imported("numpy", functools.partial(_seed_numpy, imposed, changes))


def _seed_numpy(imposed: int, changes: Subscriber, numpy: Any) -> None:
    numpy.random.seed(imposed % (1 << 32))
    number = count()

    def default_rng(call: Any, seed: Any = None) -> Any:
        return call(seed if seed is not None else [imposed, next(number)])

    changes.around("numpy.random.default_rng", default_rng)
