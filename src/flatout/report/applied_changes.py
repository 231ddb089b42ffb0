"""What a plan came to in a run: a paragraph that says which changes were made, where, and which were not, and why."""

from __future__ import annotations

from flatout.model.facts import AppliedChange
from flatout.model.formatting import as_typed
from flatout.trace import Trace


def paragraph(trace: Trace) -> str:
    """The changes of the first rank in words; empty where there was no plan."""
    entries = trace.ranks[0].facts.changes if trace.ranks else ()
    made = [_made(entry) for entry in entries if entry.applied]
    not_made = [f"{entry.name} ({entry.how})" for entry in entries if not entry.applied]
    words = (
        [f"changed in this run: {'; '.join(made)}." if made else "nothing was changed in this run."] if entries else []
    )
    if not_made:
        words.append(f"Not changed: {'; '.join(not_made)}.")
    return " ".join(words)


def _made(entry: AppliedChange) -> str:
    places = [entry.where, *entry.also] if entry.where else []
    return f"{entry.name}={as_typed(entry.value)} ({', '.join([entry.how, *places])})"
