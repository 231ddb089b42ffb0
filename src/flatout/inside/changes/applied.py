"""All that is changed in one training process: the families of changes, the imposed seed, the record for a proof."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from flatout.files import write_whole
from flatout.inside.changes.computing import Computing
from flatout.inside.changes.ledger import Ledger
from flatout.inside.changes.loading import Loading
from flatout.inside.changes.seed import impose_seed
from flatout.inside.fingerprints import FingerprintLog
from flatout.inside.weights import Weights
from flatout.launch.protocol import Options
from flatout.redact import redact_text


class Applied:
    """The plan's changes in this process, the imposed seed, and the record for a proof."""

    def __init__(self, options: Options, ledger: Ledger, ranks: Callable[[], tuple[int, int]]) -> None:
        self.ledger = ledger
        trial = options.trial
        self._proof = FingerprintLog() if trial is not None and trial.fingerprints else None
        self._weights = Weights(trial, ranks) if trial is not None else None
        self._computing = Computing(ledger, self._proof)
        self._loading = Loading(ledger, self._computing.device)
        try:
            if trial is not None and trial.seed is not None:
                impose_seed(trial.seed + ranks()[0])
            if ledger.changes or self._proof is not None:
                self._computing.install()
                self._loading.install()
            if self._proof is not None:
                self._proof.install()
        except Exception as problem:
            reason = redact_text(f"{type(problem).__name__}: {problem}")
            print(f"flatout: the plan is not applied ({reason})", file=sys.stderr)

    @property
    def wants_every_step(self) -> bool:
        """Whether `step_ended` is to be called after each of them; else now and then will do."""
        return self._proof is not None or self._computing.wants_a_step

    def step_ended(self, *, first: bool) -> None:
        """A training step is over, of the first training of this command or a later one."""
        self._computing.step_ended()
        if self._proof is not None and self._weights is not None:
            met = self._weights.step_ended(self._computing.optimizers, self._proof.roots) if first else None
            self._proof.step_ended(met)

    @property
    def compile_s(self) -> float | None:
        """How long compiling took, where something was compiled."""
        return self._computing.compile_s + self._loading.compile_s or None

    def finish(self, path: Path) -> None:
        """The run is over: say what was not made, and write the proof."""
        self._computing.finish()
        if self._proof is not None:
            self._proof.write(path)
        if self._weights is not None and (drifts := self._weights.drifts()):
            drifted = path.with_name(path.name.replace("proof-", "drifts-")).with_suffix(".json")
            write_whole(drifted, json.dumps(drifts))
