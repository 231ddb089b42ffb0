"""What stands in each panel of the live view: a Scene and the room there is in, a Drawing out.

Nothing depends on color alone: what is full is drawn with █, what is only claimed with ░, so that NO_COLOR and
color-blind eyes see the same picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flatout.model.formatting import count_of, printable
from flatout.model.readings import GPU_READINGS, Reading, shown_in
from flatout.model.records import share_pct
from flatout.top.figures import cpu_budget_pct, work_pct
from flatout.top.text import amount, percent, size
from flatout.trace import GpuSample, ProcessSample, Sample

WIDE_COLUMNS = 120
CHART_LINES = 4  # what is left to the chart at least
PROCESS = "{:>8}  {:<10}{:>6}{:>8}{:>10}{:>12}  {}"
EIGHTHS = " ▁▂▃▄▅▆▇█"
COLORS = {"work": "green", "claim": "yellow", "cool": "cyan"}  # as the theme of the view has them
ONLY_WITH_GPM = ("tensor_active_pct", "dram_active_pct")

Gauge = tuple[str, float | None, str, str]  # a label, the length of its bar in per cent, a color, the value in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What there is to draw: the last samples, and which GPU the person looks at."""

    samples: Sequence[Sample]
    gpu: int  # its place among those of the newest sample
    cores_allowed: float | None
    notes: Sequence[str]

    @property
    def now(self) -> Sample:
        """The newest sample."""
        return self.samples[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A panel's title, what stands in its lower border, and what is in it."""

    title: str
    subtitle: str = ""
    body: RenderableType


def gpu_panel(scene: Scene, width: int, height: int) -> Drawing:
    """Each of several GPUs in a line; then the chosen one: its levels, and SM against GPU-Util."""
    gpus, parts = scene.now.gpus, []
    if not gpus:
        return Drawing(title="GPU", body=(*scene.notes, "no GPU in these samples")[0])
    gpu = gpus[scene.gpu]
    history = [past for sample in scene.samples for past in sample.gpus if past.uuid == gpu.uuid]
    has_sm = any(past.sm_active_pct is not None for past in history)
    if len(gpus) > 1:
        room = max(1, height - CHART_LINES)
        first = min(max(0, scene.gpu - room // 2), max(0, len(gpus) - room))
        parts.append(_gpu_lines(gpus[first : first + room], gpu))
        height -= min(room, len(gpus))
    columns = 4 if width >= WIDE_COLUMNS else 2
    gauges = _gauges(gpu, has_sm=has_sm)
    lines = -(-len(gauges) // columns)
    if len(gpus) == 1 or height >= lines + CHART_LINES:
        parts.append(grid(gauges, columns))
        height -= lines
    work, claim = map(work_pct, history), (past.gpu_util_pct for past in history)
    name = "SM active" if has_sm else "power share, as there are no SM counters"
    return Drawing(
        title=f"GPU {gpu.index} {gpu.name}",
        subtitle=f"█ {name}  ░ GPU-Util",
        body=Group(*parts, *chart(list(zip(work, claim, strict=True)), width, height)),
    )


def _gpu_lines(gpus: Sequence[GpuSample], chosen: GpuSample) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for gpu in gpus:
        mark = "▸" if gpu is chosen else " "
        work = work_pct(gpu)
        levels = (f"util {percent(gpu.gpu_util_pct)}", f"mem {percent(gpu.memory_pct)}")
        others = (amount(gpu.power_w, "W"), amount(gpu.temperature_c, "°C"))
        bar = Bar(100, 0, work or 0.0, width=12, color="green")
        style = "bold" if gpu is chosen else ""
        table.add_row(f"{mark}{gpu.index:>2}", bar, f"{percent(work):>4}", *levels, *others, style=style)
    return table


def _gauges(gpu: GpuSample, *, has_sm: bool) -> list[Gauge]:
    readings = sorted(shown_in("gauge", GPU_READINGS), key=lambda reading: reading.name != "sm_active_pct")
    gauges = []
    for reading in readings:
        label, value = reading.short_label, getattr(gpu, reading.name)
        if reading.name == "sm_active_pct" and not has_sm:
            label, value = "power (SM)", work_pct(gpu)
        if value is not None or reading.name not in ONLY_WITH_GPM:
            gauges.append(_gauge(label, value, reading, getattr(gpu, reading.limit or "_", None)))
    return gauges


def _gauge(label: str, value: float | None, reading: Reading, most: float | None) -> Gauge:
    pct = value if reading.unit in ("%", "°C") else share_pct(value, most)
    text = amount(value, reading.unit, most) if reading.limit else reading.text(value)
    return label, pct, COLORS.get(reading.color, heat(pct)), text


def grid(gauges: Sequence[Gauge], columns: int = 1) -> Table:
    """Labels, bars and values, so many beside each other."""
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in range(columns):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
    cells: list[RenderableType] = []
    for label, pct, color, text in gauges:
        cells += (label, "" if pct is None else Bar(100, 0, _clip(pct), color=color), text)
    for at in range(0, len(cells), 3 * columns):
        table.add_row(*cells[at : at + 3 * columns])
    return table


def cpu_panel(scene: Scene, width: int, height: int) -> Drawing:
    """Every core."""
    host, allowed = scene.now.host, scene.cores_allowed
    cores = host.cores_pct or ()
    of, facts, marks = f"{len(cores)}", [], Text()
    if allowed is not None and allowed < len(cores):
        of = f"{allowed:g} of {len(cores)}"
    spaced = 2 if 2 * len(cores) <= width * height else 1
    for pct in cores:  # an idle core is seen on the floor
        marks.append(EIGHTHS[max(1, round(_clip(pct) / 100 * 8))].ljust(spaced), style=heat(pct))
    if host.iowait_pct is not None:
        facts.append(f"iowait {percent(host.iowait_pct)}")
    if host.run_queue is not None:
        facts.append(f"queue {host.run_queue}")
    if host.throttled_pct:
        facts.append(f"held back by quota {percent(host.throttled_pct)}")
    title = f"CPU {percent(cpu_budget_pct(scene.now, allowed))} of {of} cores"
    return Drawing(title=title, subtitle=", ".join(facts), body=marks)


def storage_panel(scene: Scene, width: int, height: int) -> Drawing:
    """Memory, disks, /dev/shm, and what waiting for them costs."""
    host = scene.now.host
    busiest = sorted(host.disks or (), key=lambda disk: -(disk.busy_pct or 0.0))
    rows = [("memory", share_pct(host.memory_used_bytes, host.memory_total_bytes), size(host.memory_used_bytes))]
    for disk in busiest[: max(1, height - 2)]:
        rows.append((disk.name[:9], disk.busy_pct, f"↓{size(disk.read_bytes_s, '/s')}"))
    rows.append(("/dev/shm", share_pct(host.shm_used_bytes, host.shm_total_bytes), size(host.shm_used_bytes)))
    waits = (("storage", host.pressure_io_pct), ("memory", host.pressure_memory_pct))
    stalls = ", ".join(f"{name} {percent(pct)}" for name, pct in waits if pct is not None)
    gauges = [(label, pct, heat(pct), text) for label, pct, text in rows]
    return Drawing(title="Memory and disk", subtitle=stalls and f"stalls: {stalls}", body=grid(gauges))


def process_panel(scene: Scene, width: int, height: int) -> Drawing:
    """The training process and its loader workers, the busiest first; those that do not fit are summed up."""
    sample = scene.now
    found = sorted(sample.processes, key=lambda process: -(process.cpu_pct or 0.0))
    if not found:
        return Drawing(title="Training", body="none seen: no process holds memory on a GPU or has loader workers")
    fits = len(found)
    if fits >= height:
        fits = max(0, height - 2)
    lines = [PROCESS.format("PID", "role", "CPU", "queued", "RSS", "reads", "name")]
    lines += map(_process_line, found[:fits])
    if rest := found[fits:]:
        cpu_pct, rss_bytes = (sum(getattr(one, name) or 0 for one in rest) for name in ("cpu_pct", "rss_bytes"))
        more = (f"{len(rest)} more", percent(cpu_pct), "", size(rss_bytes), "", "")
        lines.append(PROCESS.format("…", *more).rstrip())
    title = f"Training: {len(found)} process{'es' * (len(found) > 1)}"
    workers = sum(process.role == "worker" for process in found)
    if workers:
        title += f", {count_of(workers, 'loader worker')}"
    return Drawing(title=title, body=Text("\n".join(lines)))


def _process_line(process: ProcessSample) -> str:
    shares = percent(process.cpu_pct), percent(process.run_delay_pct)
    sizes = size(process.rss_bytes), size(process.read_bytes_s, "/s")
    return PROCESS.format(process.pid, process.role, *shares, *sizes, printable(process.name))


def chart(pairs: Sequence[tuple[float | None, float | None]], width: int, height: int) -> list[Text]:
    """Work as a solid area; above it, hatched, what GPU-Util claims beyond it. The newest at the right."""
    columns = max(1, width - 5)
    pairs = pairs[-columns:]
    axis = {height - 1: "0%", 0: "100%"}
    lines = []
    for row in range(height):
        line = Text(f"{axis.get(row, ''):>4} ", style="dim").append(" " * (columns - len(pairs)))
        floor_pct, step_pct = 100 * (height - 1 - row) / height, 100 / height
        for worked, claimed in pairs:
            eighths = round((_clip(worked) - floor_pct) / step_pct * 8)
            if eighths > 0:
                line.append(EIGHTHS[min(8, eighths)], style="not dim green")
            elif _clip(claimed) >= floor_pct + step_pct / 2:
                line.append("░", style="not dim yellow")
            else:
                line.append(" ")
        lines.append(line)
    return lines


def heat(pct: float | None) -> str:
    """Cool, warm from 75, hot from 90."""
    if _clip(pct) >= 90:
        return "red"
    return "yellow" if _clip(pct) >= 75 else "cyan"


def _clip(pct: float | None) -> float:
    return min(100.0, max(0.0, pct or 0.0))
