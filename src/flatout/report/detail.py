"""The lower half of a report: what one looks up rather than reads. A section with nothing to say is None."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatout.model.records import to_json
from flatout.report import chart_html
from flatout.report.account import Account, cards_of
from flatout.report.chart_data import WORKING, Lane, lanes, words
from flatout.report.gather import RankFigures
from flatout.report.markup import Html, figures, folded, join, shown, spoken, table, tag
from flatout.report.terminal import duration, ms
from flatout.trace import GpuSample, RankTrace, Sketch, Trace

MOST_LANES = 64
MOST_RANKS = 32
MOST_SETTINGS = 200


def loading(account: Account, first: RankTrace) -> Html | None:
    drawn = lanes(first.workers)
    if not drawn:
        return None
    parts: list[Html | None] = []
    for workers in account.workers:
        median, worst = workers.sample_ms.quantile(0.5) or 0.0, workers.sample_ms.high
        said = f"{workers}, by {workers.who}: {workers.samples:,} loaded, {ms(median)} each (worst {ms(worst)})."
        random = f" It draws random numbers from {', '.join(workers.random_used)}." if workers.random_used else ""
        parts.append(tag("p", said + random))
        if workers.transforms_ms:
            spent = sorted(workers.transforms_ms.items(), key=lambda item: -item[1])
            parts.append(table("Transforms", ("transform", "a sample"), [(name, ms(each)) for name, each in spent]))
        if workers.slowest:
            rows = [
                (f"{index:,}", ms(took), f"{took / median:,.1f}×" if median else "") for took, index in workers.slowest
            ]
            slow = table(f"The slowest samples of {workers}", ("index", "took", "of the median"), rows)
            parts.append(slow)
    shown = drawn[:MOST_LANES]
    legend = chart_html.legend((kind, name) for name, kind in WORKING.items())
    parts += [tag("h3", "Each worker's life"), *(_lane(lane) for lane in shown), legend]
    if len(drawn) > len(shown):
        parts.append(tag("p", f"{len(drawn) - len(shown):,} more workers did the like.", class_="meta"))
    parts.append(folded("The figures", _lane_table(shown)))
    return join(parts)


def _lane_name(lane: Lane) -> str:
    return f"worker {lane.worker.worker}" if lane.worker.worker is not None else "trainer"


def _lane(lane: Lane) -> Html:
    label = f"{_lane_name(lane)}: " + ", ".join(f"{bar.label} {bar.width:.0%}" for bar in lane.bars)
    return chart_html.lane(_lane_name(lane), (chart_html.block(bar) for bar in lane.bars), label, class_="lane thin")


def _lane_table(drawn: Sequence[Lane]) -> Html:
    heads = ("worker", "dataset", "samples", "alive", *WORKING)
    rows = [
        (
            _lane_name(x),
            x.worker.dataset,
            f"{x.worker.samples:,}",
            duration(x.alive_s * 1e3),
            *(f"{bar.width:.1%}" for bar in x.bars),
        )
        for x in drawn
    ]
    return table("What each worker did with its life", heads, rows, numbers_from=2)


# Synchronizing calls, X-ray


def sync(account: Account, first: RankTrace) -> Html | None:
    times: dict[str, int] = {}
    for window in first.windows:
        for key, sketch in window.spans_ms.items():
            times[key] = times.get(key, 0) + sketch.count
    b = account.breakdown
    calls = [part for part in b.training if part.name == "sync"]
    if not calls:
        return None
    rows = []
    for part in calls:
        count = times.get(f"sync@{part.where}" if part.where else "sync", 0)
        idle = ms(part.gpu_idle_ms / max(1, b.steps)) if part.gpu_idle_ms is not None else ""
        each = ms(part.ms / count) if count else ""
        rows.append((tag("code", part.where or "(unknown line)"), f"{count:,}", each, f"{part.share:.2%}", idle))
    lead = "Here the host waits until the GPU has caught up: .item(), .cpu(), print() of a GPU tensor, and the like."
    heads = ("where", "steps", "in such a step", "of training", "GPU idle a step")
    return join([tag("p", lead), table("Synchronizing calls by line", heads, rows)])


def xray(account: Account) -> Html | None:
    x = account.xray
    if x is None or not x.wall_ms:
        return None
    steps, median = max(1, x.steps), x.kernel_us.quantile(0.5) or 0.0
    facts = [
        ("GPU busy", f"{x.busy_ms / x.wall_ms:.0%}", f"{ms(x.busy_ms / steps)} of {ms(x.wall_ms / steps)} a step"),
        ("kernels a step", f"{x.kernels / steps:,.0f}", f"half of them below {median:.0f} µs"),
    ]
    if x.matrix_ms:
        facts.append(("tensor cores", f"{x.tensor_core_ms / x.matrix_ms:.0%}", "of the time in matrix kernels"))
    if x.collective_ms:
        facts.append(("collectives", ms(x.collective_ms / steps), "a step"))
    facts.append(("launch gaps", f"{x.launched_late_ms / x.wall_ms:.0%}", "of the time the GPU had nothing queued"))
    phases = {
        name: (x.busy_by_phase_ms.get(name, 0.0), x.idle_by_phase_ms.get(name, 0.0))
        for name in (*x.busy_by_phase_ms, *x.idle_by_phase_ms)
    }
    by_phase = [
        (words(name), ms(busy / steps), ms(idle / steps))
        for name, (busy, idle) in sorted(phases.items(), key=lambda item: -sum(item[1]))
    ]
    largest = _largest(x.top_ms) if x.busy_ms else ()
    top = [(_kernel(name), ms(spent / steps), f"{spent / x.busy_ms:.1%}") for name, spent in largest]
    copies = [(name, ms(spent / steps)) for name, spent in _largest(x.copies_ms)]
    return join(
        [
            figures(facts),
            tag("p", "The step time did not recover after the X-ray.", class_="warning")
            if x.recovered is False
            else None,
            table("Kernels that take the most time", ("kernel", "a step", "of busy"), top) if top else None,
            table("Busy by who launched it, idle by what the host did meanwhile", ("phase", "busy", "idle"), by_phase),
            table("Copies", ("kind", "a step"), copies) if copies else None,
        ]
    )


def _largest(spent: dict[str, float], most: int = 12) -> list[tuple[str, float]]:
    return sorted(spent.items(), key=lambda item: -item[1])[:most]


def _kernel(name: str) -> Html:
    return tag("code", name if len(name) <= 96 else name[:95] + "…", title=name)


# Cards, ranks, facts


_OF_A_CARD: dict[str, tuple[str, str, Callable[[float], str]]] = {  # by head: what, its mean or highest, as written
    "SM active": ("sm_active_pct", "mean", "{:.0f}%".format),
    "GPU-Util": ("gpu_util_pct", "mean", "{:.0f}%".format),
    "tensor cores": ("tensor_active_pct", "mean", "{:.0f}%".format),
    "memory bus": ("dram_active_pct", "mean", "{:.0f}%".format),
    "power": ("power_w", "mean", "{:.0f} W".format),
    "memory, most": ("memory_used_bytes", "high", lambda used: f"{used / 2**30:.1f} GiB"),
    "hottest": ("temperature_c", "high", "{:.0f} °C".format),
}


def cards(trace: Trace) -> Html | None:
    rows = [_card(host, taken) for host, samples in trace.samples.items() for taken in cards_of(samples).values()]
    heads = ("card", *_OF_A_CARD, "throttled by")
    return table("Means over the run, set-up and pauses included", heads, rows) if rows else None


def _card(host: str, taken: Sequence[GpuSample]) -> tuple[str, ...]:
    cells = []
    for name, which, written in _OF_A_CARD.values():
        seen = Sketch.of(getattr(gpu, name) for gpu in taken)
        cells.append(written(getattr(seen, which)) if seen.count else "")
    reasons = sorted({reason for gpu in taken for reason in gpu.throttle or () if reason != "idle"})
    return f"{host} GPU {taken[-1].index}: {taken[-1].name}", *cells, ", ".join(reasons) or "–"


def ranks(every: Sequence[RankFigures]) -> Html | None:
    """Every rank in a line; of very many, those at both ends."""
    if len(every) < 2:
        return None
    ranked = sorted(every, key=lambda figures: -(figures.step_ms.quantile(0.5) or 0.0))
    half = MOST_RANKS // 2
    listed = ranked if len(ranked) <= MOST_RANKS else [*ranked[:half], *ranked[-half:]]
    rows = [
        (
            f"rank {one.rank} on {one.host or '?'}",
            f"{one.steps:,}",
            *(ms(one.step_ms.quantile(q) or 0.0) for q in (0.5, 0.95)),
            f"{one.samples_per_s:,.0f}" if one.samples_per_s else "",
            *(f"{one.shares.get(name, 0.0):.1%}" for name in ("data", "backward", "sync")),
        )
        for one in listed
    ]
    lead = "The slowest first. Ranks wait for each other in backward: one that holds the others up waits least there."
    if len(listed) < len(ranked):
        lead += f" Of {len(ranked):,} ranks, the {half} slowest and the {half} fastest."
    heads = ("rank", "steps", "median step", "p95", "samples/s", "data", "backward", "sync")
    return join([tag("p", lead), table("Ranks", heads, rows)])


def facts(account: Account) -> Html | None:
    every = to_json(account.facts)
    loaders, facts = every.pop("loaders", []), {key: value for key, value in every.items() if key != "settings"}
    parts: list[Html] = []
    if loaders:
        keys = list(dict.fromkeys(key for loader in loaders for key in loader))
        rows = [(spoken(key), *(shown(loader.get(key)) for loader in loaders)) for key in keys]
        parts.append(table("Data loaders", ("setting", *(f"loader {n}" for n in range(1, len(loaders) + 1))), rows))
    if facts:
        parts.append(
            table(
                "In force at the end of the run", ("what", "value"), [(spoken(k), shown(v)) for k, v in facts.items()]
            )
        )
    for read in account.facts.settings:
        values = read.values
        name = f"{read.source} {read.file or ''}".rstrip()
        rows = [(key, shown(value)) for key, value in list(values.items())[:MOST_SETTINGS]]
        parts.append(folded(f"Settings read: {name} ({len(values):,})", table(name, ("setting", "value"), rows)))
    return join(parts) if parts else None


def cost(account: Account) -> Html | None:
    rows = []
    if account.own_share is not None:
        each = f"{account.own_us_per_step:.0f} µs a step"
        rows.append(("hooks and clocks, as timed by themselves", each, f"{account.own_share:.2%}"))
    for part in account.breakdown.parts:
        if part.name in ("flatout", "X-ray", "ceiling"):
            rows.append((f"{words(part.name)}, in the account above", ms(part.ms), f"{part.share:.2%}"))
    return table("flatout's own cost", ("what", "time", "share"), rows) if rows else None


def notes(account: Account) -> Html | None:
    return tag("ul", *(tag("li", note.text) for note in account.notes)) if account.notes else None
