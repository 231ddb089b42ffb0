"""What a try found → TrySummary: a verdict on each edit, why, and the JSON."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any

from flatout.fix.try_edit import EditResult, TryResult
from flatout.model.formatting import count_of, duration, in_full
from flatout.report.views import Item, ReportSection, ReportView

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrySummary:
    """Everything a renderer may show of a try."""

    command: tuple[str, ...]
    result: TryResult

    def sentence(self) -> str:
        """The answer."""
        edits = self.result.edits
        if self.result.interrupted:
            return "Interrupted: what is below is what was known by then."
        if len(edits) == 1:
            return f"{edits[0].name}: {edits[0].verdict}."
        passed = [edit.name for edit in edits if edit.passed]
        return f"{len(passed)} of {count_of(len(edits), 'edit')} faster and the same: {', '.join(passed) or 'none'}."

    def view(self, *, brief: bool) -> ReportView:
        """What a try says."""
        result = self.result
        runs = f"{count_of(len(result.runs.trials), 'run')} in {duration(1e3 * result.seconds)}."
        return ReportView(
            about=("flatout try", shlex.join(self.command)),
            headlines=[self.sentence()],
            notes=result.remarks,
            figures=[],
            sections=[
                ReportSection("edits", "A: the command as it is. B: with", list(map(_item, result.edits))),
                ReportSection("runs", "Runs", [runs]),
            ],
        )

    def to_json(self) -> dict[str, Any]:
        """The documented JSON of `flatout try --json`."""
        result = self.result
        return {
            "schema": SCHEMA,
            "command": list(self.command),
            "sentence": self.sentence(),
            "passed": result.passed,
            "edits": [_to_json(edit) for edit in result.edits],
            "trials": [{"what": trial.what, "seconds": trial.seconds} for trial in result.runs.trials],
            "remarks": result.remarks,
            "interrupted": result.interrupted,
            "seconds": result.seconds,
        }


def _item(edit: EditResult) -> Item:
    return Item(title=f"{edit.name}: {edit.verdict}", lines=[_speed(edit), _proof(edit), edit.crash, _needs(edit)])


def _speed(edit: EditResult) -> str:
    if edit.gain is None or edit.speeds is None:
        return ""
    before, after = (in_full(speed.value) for speed in edit.speeds)
    return f"speed: {edit.gain}, {before}\u00a0→\u00a0{after} {edit.speeds[0].unit}"


def _proof(edit: EditResult) -> str:
    if edit.proof is None:
        return ""
    standing = {"failed": "not the same", "equivalent": "the same but for rounding"}
    return f"training: {standing.get(edit.proof.standing, edit.proof.standing)}: {edit.proof.text}"


def _needs(edit: EditResult) -> str:
    if not edit.needs or (edit.proof is not None and edit.needs == edit.proof.text):
        return ""
    return f"what would decide it: {edit.needs}"


def _to_json(edit: EditResult) -> dict[str, Any]:
    gain = edit.gain and dataclasses.asdict(edit.gain)
    proof = edit.proof and dataclasses.asdict(edit.proof)
    before, after = (speed.value for speed in edit.speeds) if edit.speeds else (None, None)
    return {
        "name": edit.name,
        "verdict": edit.verdict,
        "gain": gain,
        "samples_per_s": [before, after],
        "proof": proof,
        "error": edit.crash or None,
        "needs": edit.needs or None,
    }
