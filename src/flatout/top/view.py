"""The live view. It only draws: another thread takes the samples, and a function a panel builds what
is shown.

The only module that imports Textual, which is an extra: `pip install 'flatout[top]'`. Nothing depends
on color alone: what is full is drawn with █, what is only claimed with ░, so that NO_COLOR and
color-blind eyes see the same.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import Footer, Static

from flatout.model.formatting import GPU_READINGS, Reading, amount, count_of, duration, printable, shown_in
from flatout.model.hardware_samples import share_pct
from flatout.top.figures import Figures, cpu_budget_pct, work_pct
from flatout.top.sample_source import SampleSource, Stop
from flatout.top.summary import STYLES, Verdict, percent, size, sum_up, tone
from flatout.trace import GpuSample, ProcessSample, Sample

KEPT_SAMPLES = 600
VERDICT_OVER_S = 60.0
VERDICT_EVERY_S = 1.0

WIDE_COLUMNS = 120
CHART_LINES = 4  # what is left to the chart at least
PROCESS = "{:>8}  {:<10}{:>6}{:>8}{:>10}{:>12}  {}"
EIGHTHS = " ▁▂▃▄▅▆▇█"
COLORS = {"work": "green", "claim": "yellow", "cool": "cyan"}  # as the theme of the view has them


class TopView(App[None]):
    """`flatout top` in a terminal."""

    CSS = """
    Screen { overflow: hidden; }
    #title, #verdict { height: 1; padding: 0 1; }
    #title, #verdict, #processes { text-wrap: nowrap; text-overflow: ellipsis; }
    .panel { border: round $primary 50%; border-title-style: bold; padding: 0 1; }
    .panel { border-title-color: $foreground; border-subtitle-color: $foreground; }
    #gpus { height: 2fr; }
    #middle { height: 5; }
    #cpu, #storage { width: 1fr; height: 100%; }
    #processes { height: 1fr; }
    .hostonly #gpus { height: 3; }
    .hostonly #middle { height: 9; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("p,space", "hold", "Pause", key_display="p"),
        Binding("t", "toggle_dark", "Light/dark"),
        Binding("right,tab", "next_gpu(1)", "Next GPU", key_display="→"),
        Binding("left,shift+tab", "next_gpu(-1)", "GPU before", key_display="←", show=False),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, *, source: SampleSource, stop: Stop, take: Callable[[Sample], None]) -> None:
        # Textual answers NO_COLOR with shades of grey; with the terminal's own colors it uses none at all.
        super().__init__(ansi_color=True if os.environ.get("NO_COLOR") else None)
        self.samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self.gpu = 0
        self._source = source
        self._stop = stop
        self._take = take
        self._ended = False
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._measure, name="flatout-top", daemon=True)
        self._gpus = 0
        self._verdict: Verdict | None = None
        self._verdict_s = 0.0

    def raise_problem(self) -> None:
        """Raise what went wrong in the measuring, now that the terminal is a terminal again."""
        if self._problem is not None:
            raise self._problem

    def compose(self) -> ComposeResult:
        """The panels, from top to bottom."""
        yield Static(id="title")
        yield Static("waiting for the first sample …", id="verdict")
        yield _Panel(gpu_panel, id="gpus")
        with Horizontal(id="middle"):
            yield _Panel(cpu_panel, id="cpu")
            yield _Panel(storage_panel, id="storage")
        yield _Panel(process_panel, id="processes")
        yield Footer()

    def on_mount(self) -> None:
        """Start measuring."""
        self._thread.start()

    def on_unmount(self) -> None:
        """End the measuring, however the view came to its end."""
        self._stop.asked = True
        if self._thread.ident is not None:
            self._thread.join()

    def on_resize(self) -> None:
        """Draw the same in the new size."""
        self.call_after_refresh(self._draw)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """There is a next GPU only where there are several."""
        return action != "next_gpu" or self._gpus > 1

    def action_hold(self) -> None:
        """Hold the picture, and a recording; measuring goes on."""
        self._stop.held = not self._stop.held
        self._draw()

    def action_next_gpu(self, step: int) -> None:
        """Look at another GPU."""
        self.gpu = (self.gpu + step) % self._gpus
        self._draw()

    def _measure(self) -> None:
        """Runs on another thread; what it gives to the view goes through the view's queue."""
        try:
            for sample in self._source.samples(self._stop):
                self._take(sample)
                self.call_later(self._show_new, sample)
        except BaseException as problem:  # raised again by `raise_problem`
            self._problem = problem
        finally:
            self.call_later(self._end)

    def _show_new(self, sample: Sample) -> None:
        self.samples.append(sample)
        if not self._stop.held:
            self._draw()

    def _end(self) -> None:
        """A recording stays on the screen at its end; anything else is over."""
        self._ended = True
        if self._stop.asked or self._problem is not None:
            self.exit()
        if not self._stop.held:
            self._draw()

    def _draw(self) -> None:
        if not self.samples:
            return
        now, source = self.samples[-1], self._source
        self.gpu = min(self.gpu, max(0, len(now.gpus) - 1))
        scene = Scene(samples=self.samples, gpu=self.gpu, cores_allowed=source.cores_allowed, notes=source.notes)
        self.screen.set_class(not now.gpus, "hostonly")
        self.query_one("#title", Static).update(self._title())
        self.query_one("#verdict", Static).update(self._verdict_line())
        for panel in self.query(_Panel):
            panel.show(scene)
        if len(now.gpus) != self._gpus:
            self._gpus = len(now.gpus)
            self.refresh_bindings()

    def _title(self) -> Text:
        source, now, state = self._source, self.samples[-1], ""
        if self._ended:
            state = "  END OF THE RECORDING"
        elif self._stop.held:
            state = "  PAUSED"
        elapsed = duration(1e3 * (now.time_s - source.info.started_s))
        clock = time.strftime("%H:%M:%S", time.localtime(source.unix_s(now)))
        return Text.assemble(
            ("flatout top", "bold green"),
            (f"  {source.info.host}", "bold"),
            (state, "bold yellow"),
            (f"  every {self.samples[0].interval_s:.2g} s, {elapsed} so far  {clock}", "dim"),
        )

    def _verdict_line(self) -> Text:
        now_s = self.samples[-1].time_s
        if self._verdict is None or now_s - self._verdict_s >= VERDICT_EVERY_S:
            recent = (sample for sample in self.samples if now_s - sample.time_s < VERDICT_OVER_S)
            self._verdict = sum_up(Figures(recent, cores_allowed=self._source.cores_allowed)).verdict
            self._verdict_s = now_s
        verdict = self._verdict
        return Text.assemble((verdict.word, STYLES[tone(verdict.word)]), (f"  {verdict.reason}", "dim"))


class _Panel(Static):
    """A framed part of the screen, drawn for each scene in the size it has."""

    def __init__(self, draw: Callable[[Scene, int, int], Drawing], *, id: str) -> None:
        super().__init__(id=id, classes="panel", markup=False)
        self._draw_scene = draw

    def show(self, scene: Scene) -> None:
        """Draw this scene."""
        drawing = self._draw_scene(scene, *self.content_size)
        self.border_title, self.border_subtitle = Text(drawing.title), Text(drawing.subtitle)
        self.update(drawing.body)


# What stands in each panel

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
        return Drawing(title="GPU", body=printable((*scene.notes, "no GPU in these samples")[0]))
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
        label, value = reading.short or reading.label, getattr(gpu, reading.name)
        if reading.name == "sm_active_pct" and not has_sm:
            label, value = "power (SM)", work_pct(gpu)
        if value is not None:
            gauges.append(_gauge(label, value, reading, getattr(gpu, reading.limit or "_", None)))
    return gauges


def _gauge(label: str, value: float | None, reading: Reading, most: float | None) -> Gauge:
    pct = value if reading.unit in ("%", "°C") else share_pct(value, most)
    return label, pct, COLORS.get(reading.color, heat(pct)), amount(value, reading.unit, most)


def grid(gauges: Sequence[Gauge], columns: int = 1) -> Table:
    """Labels, bars and values, so many beside each other."""
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in range(columns):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
    cells: list[RenderableType] = []
    for label, pct, color, text in gauges:
        cells += (Text(label), "" if pct is None else Bar(100, 0, _clip(pct), color=color), text)
    for at in range(0, len(cells), 3 * columns):
        table.add_row(*cells[at : at + 3 * columns])
    return table


def cpu_panel(scene: Scene, width: int, height: int) -> Drawing:
    """Every core."""
    host, allowed = scene.now.host, scene.cores_allowed
    cores = host.cores_pct or ()
    of, facts, marks = count_of(len(cores), "core"), [], Text()
    if allowed is not None and allowed < len(cores):
        of = f"{allowed:g} of {of}"
    spaced = 2 if 2 * len(cores) <= width * height else 1
    for pct in cores:  # an idle core is seen on the floor
        marks.append(EIGHTHS[max(1, round(_clip(pct) / 100 * 8))].ljust(spaced), style=heat(pct))
    if host.iowait_pct is not None:
        facts.append(f"iowait {percent(host.iowait_pct)}")
    if host.run_queue is not None:
        facts.append(f"queue {host.run_queue}")
    if host.throttled_pct:
        facts.append(f"held back by quota {percent(host.throttled_pct)}")
    title = f"CPU {percent(cpu_budget_pct(scene.now, allowed))} of {of}"
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
