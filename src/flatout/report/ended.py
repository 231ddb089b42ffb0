"""How a run that did not end well has ended, in a sentence without its full stop: what, after how many steps, where."""

from __future__ import annotations

from pathlib import Path

from flatout.model.formatting import exit_in_words
from flatout.trace import End, RankTrace, Trace

_NOT_TRAINING = ("setup", "tail", "replay", "resident")


def how_it_ended(trace: Trace) -> str | None:
    """None of a run that ended well, is not over, or was recorded before that was noted."""
    failed = [rank for rank in trace.ranks if rank.end is not None and rank.end.error is not None]
    killed = [rank for rank in trace.ranks if rank.end is None]
    code = trace.end.exit_code if trace.end is not None else None
    if not failed and not code and (code == 0 or not killed or trace.end is None):
        return None
    after = f"after {_steps(trace.ranks[0])}" if trace.ranks else "before its first step"
    if not failed:
        how = f"ended with {exit_in_words(code)}" if code else "was killed, or crashed,"
        return f"{_who(trace, code)} {how} {after}"
    first = min(failed, key=lambda rank: rank.end.time_s if rank.end is not None else 0.0)
    return _by_an_error(trace, first, code, after)


def _by_an_error(trace: Trace, first: RankTrace, code: int | None, after: str) -> str:
    end = first.end or End(time_s=0.0)
    if end.error == "KeyboardInterrupt":
        return f"{_who(trace, code)} was interrupted {after}"
    where = f" at {end.where}" if end.where is not None else ""
    rank = f" (rank {first.info.rank})" if len(trace.ranks) > 1 else ""
    how = f"ended with {exit_in_words(code)}" if code else "ended"
    return f"{_who(trace, code)} {how} {after}: {end.error}{where}{rank}"


def _who(trace: Trace, code: int | None) -> str:
    """The program, if it is what failed."""
    command = next((info.command for info in trace.machines if info.command), ())
    return Path(command[0]).name if command and code else "Training"


def _steps(rank: RankTrace) -> str:
    """How many are known: of a process that was killed the last second was not written any more."""
    indices = [step.index for step in rank.steps if step.kind not in _NOT_TRAINING]
    indices += [window.last_index for window in rank.windows[-1:]]
    count = max(indices, default=-1) + 1
    steps = f"{count:,} step{'s' if count != 1 else ''}"
    return steps if rank.end is not None else f"at least {steps}"
