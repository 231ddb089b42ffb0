"""What stands in each panel of the live view. Pure: a Scene and a size in, a Drawing out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from flatout.top.draw import Palette, bar, chart, cores, heat, sparkline
from flatout.top.readings import cpu_budget_pct, work_pct
from flatout.top.text import amount, percent, size
from flatout.trace import GpuSample, ProcessSample, Sample

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


@dataclass(frozen=True, slots=True)
class _Gauge:
    """A value of a card as a bar, as long as its share of the most it can be, and in words."""

    label: str
    value: Callable[[GpuSample], float | None]
    colour: str = "work"  # of the palette; "heat" is by the length of the bar
    unit: str = "%"
    most: Callable[[GpuSample], float | None] = lambda _: 100.0

    def pct(self, gpu: GpuSample) -> float | None:
        value, most = self.value(gpu), self.most(gpu)
        return 100 * value / most if value is not None and most else None

    def words(self, gpu: GpuSample) -> str:
        if self.unit in ("%", "B/s"):
            return percent(self.value(gpu)) if self.unit == "%" else size(self.value(gpu), "/s")
        return amount(self.value(gpu), self.unit, self.most(gpu) if self.unit != "°C" else None)

    def style(self, pct: float | None, palette: Palette) -> str:
        return heat(pct, palette) if self.colour == "heat" else str(getattr(palette, self.colour))


_WORK = _Gauge("SM active", work_pct)
_STAND_IN = _Gauge("power (SM)", work_pct)
_UTIL = _Gauge("GPU-Util", lambda g: g.gpu_util_pct, "claim")
_COUNTERS = (_Gauge("tensor", lambda g: g.tensor_active_pct), _Gauge("DRAM", lambda g: g.dram_active_pct))
_LEVELS = (
    _Gauge("memory", lambda g: g.memory_used_bytes, "heat", "GiB", lambda g: g.memory_total_bytes),
    _Gauge("power", lambda g: g.power_w, "cool", "W", lambda g: g.power_limit_w),
    _Gauge("heat", lambda g: g.temperature_c, "heat", "°C"),
    _Gauge("SM clock", lambda g: g.sm_clock_mhz, "cool", "MHz", lambda g: g.sm_clock_max_mhz),
)
_MORE = (
    _Gauge("occupancy", lambda g: g.sm_occupancy_pct),
    _Gauge("PCIe in", lambda g: g.pcie_rx_bytes_s, "cool", "B/s", lambda _: None),
    _Gauge("PCIe out", lambda g: g.pcie_tx_bytes_s, "cool", "B/s", lambda _: None),
    _Gauge("decoder", lambda g: g.decoder_util_pct),
)


def cards(scene: Scene, width: int, height: int) -> Drawing:
    """The cards in a line each where there are several; then the chosen one: its levels, and SM against GPU-Util."""
    gpus = scene.now.gpus
    if not gpus:
        return Drawing(title="GPU", lines=[Text(scene.notes[0] if scene.notes else "no GPU in these samples")])
    gpu = gpus[scene.card]
    history = scene.history(gpu)
    has_sm = any(past is not None and past.sm_active_pct is not None for past in history)
    lines = _card_lines(scene, width, height) if len(gpus) > 1 else []
    room = height - len(lines)
    if len(gpus) == 1 or room >= HISTORIES_FROM_LINES:
        known = [gauge for gauge in _COUNTERS if gauge.value(gpu) is not None]
        more = _MORE if has_sm and width >= WIDE_COLUMNS else ()
        gauges = [_WORK if has_sm else _STAND_IN, _UTIL, *known, *_LEVELS, *more]
        lines += _gauge_lines(gauges, gpu, history if room >= HISTORIES_FROM_LINES else None, width, scene.palette)
    work, claim = _values(history, work_pct), _values(history, _UTIL.value)
    lines += chart(work, claim, width, max(0, height - len(lines)), scene.palette)
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
        line.append(
            f"{percent(work_pct(gpu)):>5}  util {percent(gpu.gpu_util_pct):>4}  mem {percent(gpu.memory_pct):>4}"
        )
        line.append(f"  {amount(gpu.power_w, 'W'):>5}  {amount(gpu.temperature_c, '°C'):>5}  ")
        line.append_text(sparkline(_values(scene.history(gpu), work_pct), width - line.cell_len, palette.work))
        lines.append(line)
    return lines


def _gauge_lines(
    gauges: list[_Gauge], gpu: GpuSample, history: list[GpuSample | None] | None, width: int, palette: Palette
) -> list[Text]:
    columns = 4 if width >= WIDE_COLUMNS else 2
    cell = (width - 3 * (columns - 1)) // columns
    lines = []
    for at in range(0, len(gauges), columns):
        row = gauges[at : at + columns]
        bold = f"bold {palette.bold}" if at == 0 else ""
        lines.append(Text("   ").join(_gauge_bar(gauge, gpu, cell, palette, bold) for gauge in row))
        if history is not None:
            pasts = [(gauge, _values(history, gauge.pct)) for gauge in row]
            past_lines = (sparkline(past, cell, gauge.style(past[-1], palette)) for gauge, past in pasts)
            lines += [Text("   ").join(past_lines), Text()]
    return lines


def _gauge_bar(gauge: _Gauge, gpu: GpuSample, width: int, palette: Palette, style: str) -> Text:
    pct, room = gauge.pct(gpu), width - 26
    line = Text(f"{gauge.label:<11}", style=palette.dim)
    line.append_text(bar(pct, room, gauge.style(pct, palette), palette) if pct is not None else Text(" " * room))
    return line.append(f"{gauge.words(gpu):>15}", style=style)


def _values(history: list[GpuSample | None], read: Callable[[GpuSample], float | None]) -> list[float | None]:
    return [read(past) if past is not None else None for past in history]


def cpu(scene: Scene, width: int, height: int) -> Drawing:
    """Every core."""
    host, allowed = scene.now.host, scene.cores_allowed
    count = len(host.cores_pct or ())
    share = f"{allowed:g} of " if allowed is not None and allowed < count else ""
    facts = [f"iowait {percent(host.iowait_pct)}"] if host.iowait_pct is not None else []
    facts += [f"queue {host.run_queue}"] if host.run_queue is not None else []
    facts += [f"held back by quota {percent(host.throttled_pct)}"] if host.throttled_pct else []
    return Drawing(
        title=f"CPU {percent(cpu_budget_pct(scene.now, allowed))} of {share}{count} cores",
        subtitle=", ".join(facts),
        lines=cores(host.cores_pct or (), width, height, scene.palette) if count else [],
    )


def storage(scene: Scene, width: int, height: int) -> Drawing:
    """Memory, disks, /dev/shm, and what waiting for them costs."""
    host, palette = scene.now.host, scene.palette
    busiest = sorted(host.disks or (), key=lambda disk: -(disk.busy_pct or 0.0))
    reads = [process.read_bytes_s for process in scene.now.processes if process.read_bytes_s is not None]
    rows: list[tuple[str, float | None, str]] = [("memory", *_part(host.memory_used_bytes, host.memory_total_bytes))]
    for disk in busiest[: max(1, height - 5)]:
        rows.append((disk.name, disk.busy_pct, f"↓{size(disk.read_bytes_s, '/s')} ↑{size(disk.write_bytes_s, '/s')}"))
    rows.append(("/dev/shm", *_part(host.shm_used_bytes, host.shm_total_bytes)))
    rows += [("training", None, f"reads {size(sum(reads), '/s')}")] if reads else []
    rows += [("cache", None, size(host.page_cache_bytes)), ("swap", None, size(host.swap_used_bytes))]
    lines = []
    for label, pct, figure in rows:
        line = Text(f"{label[:9]:<10}", style=palette.dim)
        if pct is not None:
            line.append_text(bar(pct, max(4, width - 33), heat(pct, palette), palette))
        lines.append(line.append(figure.rjust(width - line.cell_len)))
    waits = (("storage", host.pressure_io_pct), ("memory", host.pressure_memory_pct))
    known = [f"{name} {percent(pct)}" for name, pct in waits if pct is not None]
    return Drawing(title="Memory and disk", subtitle=f"stalls: {', '.join(known)}" if known else "", lines=lines)


def _part(used: int | None, total: int | None) -> tuple[float | None, str]:
    if used is None or not total:
        return None, "–"
    return 100 * used / total, f"{size(used)} of {size(total)}"


_PROCESS = "{:>8}  {:<10}{:>6}{:>8}{:>10}{:>12}{:>10}  {:<8}"
_STATES = {"R": "running", "S": "sleeping", "D": "on disk", "T": "stopped", "I": "idle"}


def processes(scene: Scene, width: int, height: int) -> Drawing:
    """The training process and its loader workers, the busiest first; where not all fit, the busiest alone."""
    sample, palette, wide = scene.now, scene.palette, width >= WIDE_COLUMNS
    found = sorted(sample.processes, key=_by_role)
    if not found:
        text = "none seen: nobody holds memory on a card or has loader workers"
        return Drawing(title="Training", lines=[Text(text, style=palette.dim)])
    on_cards: dict[int, int] = {}
    for holder in (holder for gpu in sample.gpus for holder in gpu.processes or ()):
        on_cards[holder.pid] = on_cards.get(holder.pid, 0) + (holder.used_bytes or 0)
    workers = [process for process in found if process.role == "worker"]
    header = _PROCESS.format("PID", "role", "CPU", "queued", "RSS", "reads", "on GPU", "state")
    lines = [Text(header + (" name" if wide else ""), style=palette.dim)]
    fits = len(found) if len(found) < height else max(0, height - 2)
    first, *others = found
    busiest = [first, *sorted(others, key=lambda p: (-(p.cpu_pct or 0.0), _by_role(p)))]
    shown = sorted(busiest[:fits], key=_by_role)
    last = max((place for place, process in enumerate(shown) if process.role == "worker"), default=None)
    for place, process in enumerate(shown):
        branch = ("└ " if place == last else "├ ") if process.role == "worker" else ""
        held = size(on_cards[process.pid]) if on_cards.get(process.pid) else ""
        lines.append(_process_line(process, branch, held, palette))
        lines[-1].append(f" {process.name}" if wide else "", style=palette.dim)
    if rest := busiest[fits:]:
        cpu_pct = sum(process.cpu_pct or 0.0 for process in rest)
        memory = size(sum(process.rss_bytes or 0 for process in rest))
        reads = size(sum(process.read_bytes_s or 0.0 for process in rest), "/s")
        line = _PROCESS.format("…", f"{len(rest)} more", percent(cpu_pct), "", memory, reads, "", "")
        lines.append(Text(line.rstrip(), style=palette.dim))
    title = f"Training: {len(found)} process{'es' if len(found) > 1 else ''}"
    return Drawing(title=title + (f", {len(workers)} loader workers" if workers else ""), lines=lines)


def _by_role(process: ProcessSample) -> tuple[int, float, int]:
    return {"trainer": 0, "worker": 1}.get(process.role, 2), -(process.cpu_pct or 0.0), process.pid


def _process_line(process: ProcessSample, branch: str, held: str, palette: Palette) -> Text:
    cpu, queued, reads = percent(process.cpu_pct), percent(process.run_delay_pct), size(process.read_bytes_s, "/s")
    state, rss = _STATES.get(process.state or "", "–"), size(process.rss_bytes)
    words = _PROCESS.format(process.pid, branch + process.role, cpu, queued, rss, reads, held, state)
    line = Text(words, style=palette.dim)
    line.stylize(f"bold {palette.bold}" if process.role == "trainer" else "", 10, 20)
    line.stylize(heat(process.cpu_pct, palette), 20, 26)
    return line
