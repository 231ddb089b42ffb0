"""A rule about the loop's own Python: metrics, pictures, averages of weights, a simulator; while it runs, the GPU
waits."""

from __future__ import annotations

from flatout.diagnose.breakdown import REST
from flatout.diagnose.gains import gain_if_removed, rounded
from flatout.diagnose.hot_lines import HotFunction, in_training
from flatout.diagnose.rank_metrics import RankMetrics
from flatout.model.finding import Finding

_MIN_SHARE = 0.05  # of the time: a loop's ordinary bookkeeping takes less
_MIN_SHARE_WITHOUT_LINES = 0.25  # where nothing says which code that is
_MOST_LINES = 8


def own_code(metrics: RankMetrics) -> Finding | None:
    """The script's own code between the phases takes the time."""
    share = metrics.share(REST)
    saved = metrics.saved_without(REST)
    if saved is not None:
        share = min(share, saved)  # while the GPU is at work, it costs nothing
    functions = in_training(metrics.rank)
    if share < (_MIN_SHARE if functions else _MIN_SHARE_WITHOUT_LINES):
        return None
    title = f"the script's own code outside forward, backward and optimizer takes {share:.0%} of the time"
    where = None
    if functions:
        hottest = functions[0]
        title += f", most of it {hottest.name}{_calls(hottest)}"
        where = hottest.hottest.where
    return Finding(
        code="host.python",
        title=title,
        share=share,
        **gain_if_removed(share / 2, share),
        confidence=0.85 if functions else 0.6,
        evidence={"share": rounded(share), "lines": as_evidence(functions)},
        advice="do it less often, on the GPU, in another process, or in code that is vectorized",
        where=where,
    )


def as_evidence(functions: tuple[HotFunction, ...]) -> list[dict[str, object]]:
    """The hottest lines, for people and for JSON."""
    lines = sorted((line for function in functions for line in function.lines), key=lambda line: -line.share)
    return [{"where": str(line), "share": rounded(line.share)} for line in lines[:_MOST_LINES]]


def _calls(function: HotFunction) -> str:
    called = function.hottest.called
    if called is None:
        return f" ({function.share:.0%} of that)"
    return f", which calls {called} ({function.share:.0%} of that)"
