"""What stands in each panel of the live view. Pure: a Scene and a size in, a Drawing out.

Nothing depends on color alone: what is full is drawn with █, what is only claimed with ░, so that NO_COLOR and
color-blind eyes see the same picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from flatout.model.formatting import printable
from flatout.model.readings import GPU_READINGS, Reading, shown_in
from flatout.top.figures import cpu_budget_pct, work_pct
from flatout.top.text import amount, percent, size
from flatout.trace import GpuSample, ProcessSample, Sample

WIDE_COLUMNS = 120
CHART_LINES = 4  # what the GPUs' lines leave to the chart
HISTORIES_FROM_LINES = 16  # from this height on, a panel has room for a line of history under each bar
PROCESS = "{:>8}  {:<10}{:>6}{:>8}{:>10}{:>12}{:>10}  {:<8}"
STATES = {"R": "running", "S": "sleeping", "D": "on disk", "T": "stopped", "I": "idle"}
EIGHTHS = " ▁▂▃▄▅▆▇█"
PARTS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """Colors by what they mean."""

    name: str
    ground: str
    panel: str
    text: str
    bold: str
    dim: str
    track: str
    work: str
    claim: str
    cool: str
    warm: str
    hot: str


DARK = Palette(
    name="flatout-dark", ground="#0d1117", panel="#161b22", text="#c9d1d9", bold="#e6edf3", dim="#8b949e",
    track="#30363d", work="#4ade80", claim="#b7791f", cool="#60a5fa", warm="#fbbf24", hot="#f87171",
)  # fmt: skip
LIGHT = Palette(
    name="flatout-light", ground="#ffffff", panel="#eaeef2", text="#1f2328", bold="#1f2328", dim="#57606a",
    track="#d0d7de", work="#15803d", claim="#b45309", cool="#1d4ed8", warm="#b45309", hot="#b91c1c",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What there is to draw: the last samples, and which GPU the person looks at."""

    samples: Sequence[Sample]
    gpu: int  # its place among those of the newest sample
    palette: Palette
    cores_allowed: float | None
    notes: Sequence[str]

    @property
    def now(self) -> Sample:
        """The newest sample."""
        return self.samples[-1]

    def history(self, gpu: GpuSample) -> list[GpuSample | None]:
        """One GPU in every sample; None where it was not there."""
        return [next((past for past in s.gpus if past.uuid == gpu.uuid), None) for s in self.samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A panel's title, what stands in its lower border, and its lines."""

    title: str
    subtitle: str = ""
    lines: list[Text]


@dataclass(frozen=True, slots=True)
class _Gauge:
    """A value of a GPU as a bar, as long as its share of the most it can be, and in words."""

    reading: Reading
    label: str
    value: Callable[[GpuSample], float | None]

    @classmethod
    def of(cls, reading: Reading) -> _Gauge:
        return cls(reading, reading.short_label, lambda gpu: getattr(gpu, reading.name))

    def pct(self, gpu: GpuSample) -> float | None:
        """How long the bar is; None where nobody knows the most it can be."""
        value = self.value(gpu)
        if value is None or self.reading.unit in ("%", "°C"):
            return value
        most = getattr(gpu, self.reading.limit or "_", None)
        return 100 * value / most if most else None

    def text(self, gpu: GpuSample) -> str:
        if self.reading.limit:
            return amount(self.value(gpu), self.reading.unit, getattr(gpu, self.reading.limit))
        return self.reading.text(self.value(gpu))

    def style(self, pct: float | None, palette: Palette) -> str:
        if self.reading.color == "heat":
            return heat(pct, palette)
        return str(getattr(palette, self.reading.color))


_GAUGES = {reading.name: _Gauge.of(reading) for reading in shown_in("gauge", GPU_READINGS)}
_WIDE_GAUGES = [_Gauge.of(reading) for reading in shown_in("wide gauge", GPU_READINGS)]
_UTIL = _GAUGES.pop("gpu_util_pct")
_WORK = _GAUGES.pop("sm_active_pct")
_STAND_IN = _Gauge(_WORK.reading, "power (SM)", work_pct)
_ONLY_WITH_GPM = ("tensor_active_pct", "dram_active_pct")


def _gauges(gpu: GpuSample, *, has_sm: bool, wide: bool) -> list[_Gauge]:
    known = [gauge for name, gauge in _GAUGES.items() if name not in _ONLY_WITH_GPM or gauge.value(gpu) is not None]
    if not has_sm:
        return [_STAND_IN, _UTIL, *known]
    if wide:
        known += _WIDE_GAUGES
    return [_WORK, _UTIL, *known]


# The panels


def gpu_panel(scene: Scene, width: int, height: int) -> Drawing:
    """Each GPU in a line, where there are several; then the chosen one: its levels, and SM against GPU-Util."""
    gpus = scene.now.gpus
    if not gpus:
        return Drawing(title="GPU", lines=[Text((*scene.notes, "no GPU in these samples")[0])])
    gpu = gpus[scene.gpu]
    history, lines = scene.history(gpu), []
    has_sm = any(past is not None and past.sm_active_pct is not None for past in history)
    if len(gpus) > 1:
        lines = _gpu_lines(scene, width, height)
    roomy = height - len(lines) >= HISTORIES_FROM_LINES
    if len(gpus) == 1 or roomy:
        gauges = _gauges(gpu, has_sm=has_sm, wide=width >= WIDE_COLUMNS)
        lines += _gauge_lines(gauges, history, width, scene.palette, with_history=roomy)
    work, claim = _values(history, work_pct), _values(history, _UTIL.value)
    lines += chart(work, claim, width, max(0, height - len(lines)), scene.palette)
    name = "SM active" if has_sm else "power share, as there are no SM counters"
    return Drawing(title=f"GPU {gpu.index} {gpu.name}", subtitle=f"█ {name}  ░ GPU-Util", lines=lines)


def _gpu_lines(scene: Scene, width: int, height: int) -> list[Text]:
    """A line a GPU, as many as leave the chosen one some room; the chosen one among them."""
    gpus, palette = scene.now.gpus, scene.palette
    room = max(1, height - CHART_LINES)
    first = min(max(0, scene.gpu - room // 2), max(0, len(gpus) - room))
    lines = []
    for place, gpu in enumerate(gpus[first : first + room], start=first):
        line = Text(f" {gpu.index:>2} ", style=palette.dim)
        if place == scene.gpu:
            line = Text(f"▸{gpu.index:>2} ", style=f"bold {palette.bold}")
        line.append_text(bar(work_pct(gpu), 12, palette.work, palette))
        line.append(
            f"{percent(work_pct(gpu)):>5}  util {percent(gpu.gpu_util_pct):>4}  mem {percent(gpu.memory_pct):>4}"
        )
        line.append(f"  {amount(gpu.power_w, 'W'):>5}  {amount(gpu.temperature_c, '°C'):>5}  ")
        line.append_text(sparkline(_values(scene.history(gpu), work_pct), width - line.cell_len, palette.work))
        lines.append(line)
    return lines


def _gauge_lines(
    gauges: list[_Gauge], history: list[GpuSample | None], width: int, palette: Palette, *, with_history: bool
) -> list[Text]:
    columns = 4 if width >= WIDE_COLUMNS else 2
    cell = (width - 3 * (columns - 1)) // columns
    style, lines = f"bold {palette.bold}", []
    for at in range(0, len(gauges), columns):
        bars, pasts = [], []
        for gauge in gauges[at : at + columns]:
            past = _values(history, gauge.pct)
            bars.append(_gauge_bar(gauge, history[-1], cell, palette, style))
            pasts.append(sparkline(past, cell, gauge.style(past[-1], palette)))
        lines.append(Text("   ").join(bars))
        if with_history:
            lines += [Text("   ").join(pasts), Text()]
        style = ""
    return lines


def _gauge_bar(gauge: _Gauge, gpu: GpuSample | None, width: int, palette: Palette, style: str) -> Text:
    line = Text(f"{gauge.label:<11}", style=palette.dim)
    if gpu is None:
        return line
    pct = gauge.pct(gpu)
    if pct is not None:
        line.append_text(bar(pct, width - 26, gauge.style(pct, palette), palette))
    return line.append(gauge.text(gpu).rjust(width - line.cell_len), style=style)


def _values(history: list[GpuSample | None], read: Callable[[GpuSample], float | None]) -> list[float | None]:
    return [read(past) if past is not None else None for past in history]


def cpu_panel(scene: Scene, width: int, height: int) -> Drawing:
    """Every core."""
    host, allowed = scene.now.host, scene.cores_allowed
    count = len(host.cores_pct or ())
    of, lines, facts = f"{count}", [], []
    if allowed is not None and allowed < count:
        of = f"{allowed:g} of {count}"
    if count:
        lines = cores(host.cores_pct or (), width, height, scene.palette)
    if host.iowait_pct is not None:
        facts.append(f"iowait {percent(host.iowait_pct)}")
    if host.run_queue is not None:
        facts.append(f"queue {host.run_queue}")
    if host.throttled_pct:
        facts.append(f"held back by quota {percent(host.throttled_pct)}")
    title = f"CPU {percent(cpu_budget_pct(scene.now, allowed))} of {of} cores"
    return Drawing(title=title, subtitle=", ".join(facts), lines=lines)


def storage_panel(scene: Scene, width: int, height: int) -> Drawing:
    """Memory, disks, /dev/shm, and what waiting for them costs."""
    host, palette = scene.now.host, scene.palette
    busiest = sorted(host.disks or (), key=lambda disk: -(disk.busy_pct or 0.0))
    reads = [process.read_bytes_s for process in scene.now.processes if process.read_bytes_s is not None]
    rows: list[tuple[str, float | None, str]] = []
    rows.append(("memory", *_part(host.memory_used_bytes, host.memory_total_bytes)))
    for disk in busiest[: max(1, height - 5)]:
        rates = f"↓{size(disk.read_bytes_s, '/s')} ↑{size(disk.write_bytes_s, '/s')}"
        rows.append((disk.name, disk.busy_pct, rates))
    rows.append(("/dev/shm", *_part(host.shm_used_bytes, host.shm_total_bytes)))
    if reads:
        rows.append(("training", None, f"reads {size(sum(reads), '/s')}"))
    rows += [("cache", None, size(host.page_cache_bytes)), ("swap", None, size(host.swap_used_bytes))]
    lines = []
    for label, pct, figure in rows:
        line = Text(f"{label[:9]:<10}", style=palette.dim)
        if pct is not None:
            line.append_text(bar(pct, max(4, width - 33), heat(pct, palette), palette))
        lines.append(line.append(figure.rjust(width - line.cell_len)))
    waits = (("storage", host.pressure_io_pct), ("memory", host.pressure_memory_pct))
    stalls = ", ".join(f"{name} {percent(pct)}" for name, pct in waits if pct is not None)
    return Drawing(title="Memory and disk", subtitle=stalls and f"stalls: {stalls}", lines=lines)


def _part(used: int | None, total: int | None) -> tuple[float | None, str]:
    if used is None or not total:
        return None, "–"
    return 100 * used / total, f"{size(used)} of {size(total)}"


def process_panel(scene: Scene, width: int, height: int) -> Drawing:
    """The training process and its loader workers, the busiest first; where not all fit, only the busiest."""
    sample, palette = scene.now, scene.palette
    found = sorted(sample.processes, key=_by_role)
    if not found:
        text = "none seen: no process holds memory on a GPU or has loader workers"
        return Drawing(title="Training", lines=[Text(text, style=palette.dim)])
    on_gpus: dict[int, int] = {}
    for holder in (holder for gpu in sample.gpus for holder in gpu.processes or ()):
        on_gpus[holder.pid] = on_gpus.get(holder.pid, 0) + (holder.used_bytes or 0)
    workers = sum(process.role == "worker" for process in found)
    header = PROCESS.format("PID", "role", "CPU", "queued", "RSS", "reads", "on GPU", "state")
    lines = [Text(f"{header} name", style=palette.dim)]
    fits = len(found)
    if fits >= height:
        fits = max(0, height - 2)
    first, *others = found
    busiest = [first, *sorted(others, key=lambda p: (-(p.cpu_pct or 0.0), _by_role(p)))]
    for process in sorted(busiest[:fits], key=_by_role):
        lines.append(_process_line(process, on_gpus.get(process.pid, 0), palette))
    if rest := busiest[fits:]:
        cpu_pct = sum(process.cpu_pct or 0.0 for process in rest)
        memory = size(sum(process.rss_bytes or 0 for process in rest))
        reads = size(sum(process.read_bytes_s or 0.0 for process in rest), "/s")
        line = PROCESS.format("…", f"{len(rest)} more", percent(cpu_pct), "", memory, reads, "", "")
        lines.append(Text(line.rstrip(), style=palette.dim))
    title = f"Training: {len(found)} process{'es' * (len(found) > 1)}"
    if workers:
        title += f", {workers} loader workers"
    return Drawing(title=title, lines=lines)


def _by_role(process: ProcessSample) -> tuple[int, float, int]:
    return {"trainer": 0, "worker": 1}.get(process.role, 2), -(process.cpu_pct or 0.0), process.pid


def _process_line(process: ProcessSample, gpu_bytes: int, palette: Palette) -> Text:
    role, held = process.role, size(gpu_bytes or None).replace("–", "")
    if role == "worker":
        role = f"└ {role}"
    cpu, queued, reads = percent(process.cpu_pct), percent(process.run_delay_pct), size(process.read_bytes_s, "/s")
    state, rss = STATES.get(process.state or "", "–"), size(process.rss_bytes)
    words = PROCESS.format(process.pid, role, cpu, queued, rss, reads, held, state)
    line = Text(f"{words} {printable(process.name)}", style=palette.dim)
    if role == "trainer":
        line.stylize(f"bold {palette.bold}", 10, 20)
    line.stylize(heat(process.cpu_pct, palette), 20, 26)
    return line


# Bars and charts


def bar(pct: float | None, width: int, color: str, palette: Palette) -> Text:
    """A horizontal bar, exact to an eighth of a character."""
    full, part = divmod(round(_clip(pct) / 100 * max(0, width) * 8), 8)
    text = Text("█" * full + PARTS[part].strip(), style=color)
    return text.append("·" * (width - full - bool(part)), style=palette.track)


def sparkline(values: Sequence[float | None], width: int, color: str) -> Text:
    """The last values in one line, the newest at the right."""
    marks = [" " if value is None else EIGHTHS[max(1, round(_clip(value) / 100 * 8))] for value in values]
    return Text("".join(marks[max(0, len(marks) - width) :]).rjust(width), style=color)


def chart(
    work: Sequence[float | None], claim: Sequence[float | None], width: int, height: int, palette: Palette
) -> list[Text]:
    """Work as a solid area; above it, hatched, what GPU-Util claims beyond it. The newest at the right."""
    columns = max(1, width - 5)
    padding = columns - min(columns, len(work))
    pairs = list(zip(work, claim, strict=True))[-columns:]
    lines = []
    for row in range(height):
        line = Text(f"{_axis(row, height):>4} ", style=palette.dim)
        line.append(" " * padding)
        floor_pct, step_pct = 100 * (height - 1 - row) / height, 100 / height
        for worked, claimed in pairs:
            line.append(*_cell(worked, claimed, floor_pct, step_pct, palette))
        lines.append(line)
    return lines


def cores(pcts: Sequence[float], width: int, height: int, palette: Palette) -> list[Text]:
    """Every core: bars with numbers where they fit, else one column of characters a core."""
    grid = _core_grid(pcts, width, height, palette)
    if grid is not None:
        return grid
    spaced = 2 if len(pcts) * 2 <= width else 1
    a_line = max(1, width // spaced)
    rows = [pcts[at : at + a_line] for at in range(0, len(pcts), a_line)]
    tall = max(1, height // len(rows))
    lines: list[Text] = []
    for row in rows[:height]:
        for level in range(tall):
            line = Text()
            for pct in row:
                eighths = round(_clip(pct) / 100 * tall * 8) - 8 * (tall - 1 - level)
                mark = EIGHTHS[min(8, max(level == tall - 1, eighths))]  # an idle core is seen on the floor
                line.append(mark.ljust(spaced), style=heat(pct, palette) if eighths > 0 else palette.track)
            lines.append(line)
    return lines


def heat(pct: float | None, palette: Palette) -> str:
    """Cool, warm from 75, hot from 90."""
    if _clip(pct) >= 90:
        return palette.hot
    return palette.warm if _clip(pct) >= 75 else palette.cool


def _core_grid(pcts: Sequence[float], width: int, height: int, palette: Palette) -> list[Text] | None:
    columns = max(1, width // 20)
    rows = -(-len(pcts) // columns)
    if rows > height:
        return None
    columns = -(-len(pcts) // rows)
    cell = width // columns
    lines = []
    for row in range(rows):
        line = Text()
        for index in range(row, len(pcts), rows):
            line.append(f"{index:>3} ", style=palette.dim)
            line.append_text(bar(pcts[index], cell - 10, heat(pcts[index], palette), palette))
            line.append(f"{pcts[index]:>4.0f}% ")
        lines.append(line)
    return lines


def _cell(
    work: float | None, claim: float | None, floor_pct: float, step_pct: float, palette: Palette
) -> tuple[str, str]:
    eighths = round((_clip(work) - floor_pct) / step_pct * 8)
    if eighths > 0:
        return EIGHTHS[min(8, eighths)], palette.work
    if _clip(claim) >= floor_pct + step_pct / 2:
        return "░", palette.claim
    return " ", ""


def _axis(row: int, height: int) -> str:
    if row == 0:
        return "100%"
    if row == height - 1:
        return "0%"
    return "50%" if height >= 5 and row == height // 2 else ""


def _clip(pct: float | None) -> float:
    return min(100.0, max(0.0, pct or 0.0))
