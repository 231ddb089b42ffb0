"""What stands in each panel of the live view. Pure: a Scene and a size in, a Drawing out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from flatout.top.draw import Palette, bar, chart, cores, heat, sparkline
from flatout.top.figures import cpu_budget_pct, work_pct
from flatout.top.text import bytes_text
from flatout.trace import DiskSample, GpuSample, ProcessSample, Sample

__all__ = ["Drawing", "Scene", "cards", "cpu", "process_count", "processes", "storage"]

WIDE_COLUMNS = 120
CHART_LINES = 4  # what the cards' lines leave to the chart
HISTORIES_FROM_LINES = 16  # from this height on, a panel has room for a line of history under each bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What there is to draw: the last samples, and which card the person looks at."""

    samples: Sequence[Sample]
    card: int
    palette: Palette
    cores_allowed: float | None
    notes: Sequence[str]

    @property
    def now(self) -> Sample:
        """The newest sample."""
        return self.samples[-1]

    def history(self, gpu: GpuSample) -> list[GpuSample | None]:
        """One card in every sample; None where it was not there."""
        return [next((past for past in s.gpus if past.uuid == gpu.uuid), None) for s in self.samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A panel's title, what stands in its lower border, and its lines."""

    title: str
    subtitle: str = ""
    lines: list[Text]


def cards(scene: Scene, width: int, height: int) -> Drawing:
    """The cards in a line each where there are several; then the chosen one: its levels, and SM against GPU-Util."""
    gpus, palette = scene.now.gpus, scene.palette
    if not gpus:
        return Drawing(title="GPU", lines=[Text(scene.notes[0] if scene.notes else "no GPU in these samples")])
    gpu = gpus[scene.card]
    history = scene.history(gpu)
    has_sm = any(past is not None and past.sm_active_pct is not None for past in history)
    lines = _card_lines(scene, width, height) if len(gpus) > 1 else []
    room = height - len(lines)
    if len(gpus) == 1 or room >= HISTORIES_FROM_LINES:
        lines += _metric_lines(_metrics(gpu, has_sm, width), gpu, history, width, room, palette)
    work = [work_pct(past) if past is not None else None for past in history]
    claim = [past.gpu_util_pct if past is not None else None for past in history]
    lines += chart(work, claim, width, max(0, height - len(lines)), palette)
    name = "SM active" if has_sm else "power share, for want of SM counters"
    return Drawing(title=f"GPU {gpu.index} {gpu.name}", subtitle=f"█ {name}  ░ GPU-Util", lines=lines)


def _card_lines(scene: Scene, width: int, height: int) -> list[Text]:
    """A line a card, as many as leave the chosen one some room; the chosen one among them."""
    gpus, palette = scene.now.gpus, scene.palette
    room = max(1, height - CHART_LINES)
    first = min(max(0, scene.card - room // 2), max(0, len(gpus) - room))
    lines = []
    for place, gpu in enumerate(gpus[first : first + room], start=first):
        chosen = place == scene.card
        line = Text(f"{'▸' if chosen else ' '}{gpu.index:>2} ", style=f"bold {palette.bold}" if chosen else palette.dim)
        line.append_text(bar(work_pct(gpu), 12, palette.work, palette))
        line.append(f"{_pct(work_pct(gpu)):>5}  util {_pct(gpu.gpu_util_pct):>4}  mem {_pct(gpu.memory_pct):>4}")
        line.append(f"  {_figure(gpu.power_w, 'W'):>5}  {_figure(gpu.temperature_c, '°C'):>5}  ")
        past = [work_pct(then) if then is not None else None for then in scene.history(gpu)]
        line.append_text(sparkline(past, width - line.cell_len, palette.work))
        lines.append(line)
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metric:
    label: str
    pct: Callable[[GpuSample], float | None]
    figure: Callable[[GpuSample], str] = lambda _: ""
    colour: Callable[[float | None, Palette], str] = lambda _, palette: palette.cool


def _share(label: str, pct: Callable[[GpuSample], float | None], colour: str = "work") -> _Metric:
    return _Metric(label=label, pct=pct, figure=lambda g: _pct(pct(g)), colour=lambda _, p: str(getattr(p, colour)))


_TENSOR = _share("tensor", lambda g: g.tensor_active_pct)
_DRAM = _share("DRAM", lambda g: g.dram_active_pct)
_MORE = (
    _share("occupancy", lambda g: g.sm_occupancy_pct),
    _Metric(label="PCIe in", pct=lambda _: None, figure=lambda g: _rate(g.pcie_rx_bytes_s)),
    _Metric(label="PCIe out", pct=lambda _: None, figure=lambda g: _rate(g.pcie_tx_bytes_s)),
    _share("decoder", lambda g: g.decoder_util_pct),
)
_LEVELS = (
    _Metric(
        label="memory",
        pct=lambda g: g.memory_pct,
        figure=lambda g: _of(g.memory_used_bytes, g.memory_total_bytes, "GiB", 2.0**-30, 1),
        colour=heat,
    ),
    _Metric(label="power", pct=lambda g: g.power_share_pct, figure=lambda g: _of(g.power_w, g.power_limit_w, "W")),
    _Metric(label="heat", pct=lambda g: g.temperature_c, figure=lambda g: _figure(g.temperature_c, "°C"), colour=heat),
    _Metric(
        label="SM clock",
        pct=lambda g: 100 * g.sm_clock_mhz / g.sm_clock_max_mhz if g.sm_clock_mhz and g.sm_clock_max_mhz else None,
        figure=lambda g: _of(g.sm_clock_mhz, g.sm_clock_max_mhz, "MHz"),
    ),
)


def _metrics(gpu: GpuSample, has_sm: bool, width: int) -> list[_Metric]:
    """What to show of a card, the most telling first."""
    found = [
        _share("SM active" if has_sm else "power (SM)", work_pct),
        _share("GPU-Util", lambda g: g.gpu_util_pct, "claim"),
    ]
    found += [metric for metric in (_TENSOR, _DRAM) if metric.pct(gpu) is not None]
    return [*found, *_LEVELS, *(_MORE if has_sm and width >= WIDE_COLUMNS else ())]


def _metric_lines(
    metrics: list[_Metric],
    gpu: GpuSample,
    history: list[GpuSample | None],
    width: int,
    height: int,
    palette: Palette,
) -> list[Text]:
    columns = 4 if width >= WIDE_COLUMNS else 2
    cell = (width - 3 * (columns - 1)) // columns
    lines = []
    for at in range(0, len(metrics), columns):
        row = metrics[at : at + columns]
        lines.append(_side_by_side([_metric_bar(metric, gpu, cell, palette, bold=at == 0) for metric in row]))
        if height >= HISTORIES_FROM_LINES:
            lines.append(_side_by_side([_metric_history(metric, history, cell, palette) for metric in row]))
            lines.append(Text())
    return lines


def _metric_bar(metric: _Metric, gpu: GpuSample, width: int, palette: Palette, *, bold: bool) -> Text:
    pct = metric.pct(gpu)
    line = Text(f"{metric.label:<11}", style=palette.dim)
    room = width - 26
    line.append_text(bar(pct, room, metric.colour(pct, palette), palette) if pct is not None else Text(" " * room))
    line.append(f"{metric.figure(gpu):>15}", style=f"bold {palette.bold}" if bold else "")
    return line


def _metric_history(metric: _Metric, history: list[GpuSample | None], width: int, palette: Palette) -> Text:
    values = [metric.pct(past) if past is not None else None for past in history]
    return sparkline(values, width, metric.colour(values[-1], palette))


def cpu(scene: Scene, width: int, height: int) -> Drawing:
    """Every core."""
    host, allowed = scene.now.host, scene.cores_allowed
    count = len(host.cores_pct or ())
    share = f"{allowed:g} of " if allowed is not None and allowed < count else ""
    facts = [f"iowait {_pct(host.iowait_pct)}"] if host.iowait_pct is not None else []
    facts += [f"queue {host.run_queue}"] if host.run_queue is not None else []
    facts += [f"held back by quota {_pct(host.throttled_pct)}"] if host.throttled_pct else []
    return Drawing(
        title=f"CPU {_pct(cpu_budget_pct(scene.now, allowed))} of {share}{count} cores",
        subtitle=", ".join(facts),
        lines=cores(host.cores_pct or (), width, height, scene.palette) if count else [],
    )


def storage(scene: Scene, width: int, height: int) -> Drawing:
    """Memory, disks, /dev/shm, and what waiting for them costs."""
    host, palette = scene.now.host, scene.palette
    busiest = sorted(host.disks or (), key=lambda disk: -(disk.busy_pct or 0.0))
    rows: list[tuple[str, float | None, str]] = [
        ("memory", *_part(host.memory_used_bytes, host.memory_total_bytes)),
        *(_disk_row(disk) for disk in busiest[: max(1, height - 5)]),
        ("/dev/shm", *_part(host.shm_used_bytes, host.shm_total_bytes)),
    ]
    reads = [process.read_bytes_s for process in scene.now.processes if process.read_bytes_s is not None]
    if reads:
        rows.append(("training", None, f"reads {bytes_text(sum(reads))}/s"))
    rows += [("cache", None, bytes_text(host.page_cache_bytes)), ("swap", None, bytes_text(host.swap_used_bytes))]
    lines = []
    for label, pct, figure in rows:
        line = Text(f"{label[:9]:<10}", style=palette.dim)
        if pct is not None:
            line.append_text(bar(pct, max(4, width - 33), heat(pct, palette), palette))
        line.append(figure.rjust(width - line.cell_len))
        lines.append(line)
    waits = (("storage", host.pressure_io_pct), ("memory", host.pressure_memory_pct))
    known = [f"{name} {_pct(pct)}" for name, pct in waits if pct is not None]
    return Drawing(title="Memory and disk", subtitle=f"stalls: {', '.join(known)}" if known else "", lines=lines)


def processes(scene: Scene, width: int, height: int) -> Drawing:
    """The training process and its loader workers, the busiest first."""
    sample, palette = scene.now, scene.palette
    order = {"trainer": 0, "worker": 1}
    found = sorted(sample.processes, key=lambda p: (order.get(p.role, 2), -(p.cpu_pct or 0.0), p.pid))
    if not found:
        text = "none seen: nobody holds memory on a card or has loader workers"
        return Drawing(title="Training", lines=[Text(text, style=palette.dim)])
    on_cards: dict[int, int] = {}
    for gpu in sample.gpus:
        for holder in gpu.processes or ():
            on_cards[holder.pid] = on_cards.get(holder.pid, 0) + (holder.used_bytes or 0)
    header = f"{'PID':>8}  {'role':<10}{'CPU':>6}{'queued':>8}{'RSS':>10}{'reads':>12}{'on GPU':>10}  {'state':<8}"
    lines = [Text(header + (" name" if width >= WIDE_COLUMNS else ""), style=palette.dim)]
    fits = len(found) if len(found) < height else max(0, height - 2)
    workers = [process for process in found if process.role == "worker"]
    for process in found[:fits]:
        is_last = bool(workers) and process is workers[-1]
        lines.append(_process_line(process, on_cards.get(process.pid), is_last, width, palette))
    if fits < len(found):
        lines.append(_rest_line(found[fits:], palette))
    title = f"Training: {len(found)} process{'es' if len(found) > 1 else ''}"
    return Drawing(title=title + (f", {len(workers)} loader workers" if workers else ""), lines=lines)


def process_count(sample: Sample) -> int:
    """How many lines `processes` could use."""
    return 1 + max(1, len(sample.processes))


def _process_line(process: ProcessSample, on_cards: int | None, is_last: bool, width: int, palette: Palette) -> Text:
    branch = ("└ " if is_last else "├ ") if process.role == "worker" else ""
    line = Text(f"{process.pid:>8}  ", style=palette.dim)
    line.append(f"{branch + process.role:<10}", style=f"bold {palette.bold}" if process.role == "trainer" else "")
    line.append(f"{_pct(process.cpu_pct):>6}", style=heat(process.cpu_pct, palette))
    line.append(f"{_pct(process.run_delay_pct):>8}{bytes_text(process.rss_bytes):>10}{_rate(process.read_bytes_s):>12}")
    line.append(f"{bytes_text(on_cards) if on_cards else '':>10}  {_STATES.get(process.state or '', '–'):<8}")
    line.append(f" {process.name}" if width >= WIDE_COLUMNS else "", style=palette.dim)
    return line


def _rest_line(rest: Sequence[ProcessSample], palette: Palette) -> Text:
    cpu_pct = sum(process.cpu_pct or 0.0 for process in rest)
    memory = sum(process.rss_bytes or 0 for process in rest)
    reads = sum(process.read_bytes_s or 0.0 for process in rest)
    text = (
        f"{'…':>8}  {f'{len(rest)} more':<10}{cpu_pct:>5.0f}%{'':>8}{bytes_text(memory):>10}{bytes_text(reads):>10}/s"
    )
    return Text(text, style=palette.dim)


_STATES = {"R": "running", "S": "sleeping", "D": "on disk", "T": "stopped", "I": "idle"}


def _disk_row(disk: DiskSample) -> tuple[str, float | None, str]:
    return disk.name, disk.busy_pct, f"↓{_rate(disk.read_bytes_s)} ↑{_rate(disk.write_bytes_s)}"


def _part(used: int | None, total: int | None) -> tuple[float | None, str]:
    if used is None or not total:
        return None, "–"
    return 100 * used / total, f"{bytes_text(used)} of {bytes_text(total)}"


def _of(value: float | None, most: float | None, unit: str, scale: float = 1.0, digits: int = 0) -> str:
    if value is None:
        return "–"
    limit = f"/{most * scale:.{digits}f}" if most else ""
    return f"{value * scale:.{digits}f}{limit} {unit}"


def _rate(bytes_s: float | None) -> str:
    return f"{bytes_text(bytes_s)}/s" if bytes_s is not None else "–"


def _figure(value: float | None, unit: str) -> str:
    return f"{value:.0f} {unit}" if value is not None else "–"


def _pct(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}%"


def _side_by_side(cells: Sequence[Text]) -> Text:
    return Text("   ").join(cells)
