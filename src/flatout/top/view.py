"""The live view. It only draws: another thread takes the samples, and `panels` builds what is shown.

The only module that imports Textual, which is an extra: `pip install 'flatout[top]'`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import Footer, Static

from flatout.model.formatting import duration
from flatout.top.figures import FigureBuilder
from flatout.top.panels import Drawing, Scene, cpu_panel, gpu_panel, process_panel, storage_panel
from flatout.top.sample_source import SampleSource, Stop
from flatout.top.summary import STYLES, Verdict, sum_up, tone
from flatout.trace import Sample

KEPT_SAMPLES = 600
VERDICT_OVER_S = 60.0
VERDICT_EVERY_S = 1.0


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
        Binding("q", "leave", "Quit"),
        Binding("ctrl+c", "leave", "Quit", show=False, priority=True),
        Binding("p,space", "hold", "Pause", key_display="p"),
        Binding("t", "light_or_dark", "Light/dark"),
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

    def action_leave(self) -> None:
        """End the view."""
        self._stop.asked = True
        self.exit()

    def action_hold(self) -> None:
        """Hold the picture, and a recording; measuring goes on."""
        self._stop.held = not self._stop.held
        self._draw()

    def action_next_gpu(self, step: int) -> None:
        """Look at another GPU."""
        self.gpu = (self.gpu + step) % self._gpus
        self._draw()

    def action_light_or_dark(self) -> None:
        """Change the colors."""
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"

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
        """The verdict on the last minute."""
        now_s = self.samples[-1].time_s
        if self._verdict is None or now_s - self._verdict_s >= VERDICT_EVERY_S:
            recent = (sample for sample in self.samples if now_s - sample.time_s < VERDICT_OVER_S)
            self._verdict = sum_up(FigureBuilder(recent, cores_allowed=self._source.cores_allowed)).verdict
            self._verdict_s = now_s
        verdict = self._verdict
        return Text.assemble((verdict.word, STYLES[tone(verdict.word)]), (f"  {verdict.reason}", "dim"))


class _Panel(Static):
    """A framed part of the screen, drawn for each scene in the size it has."""

    def __init__(self, draw: Callable[[Scene, int, int], Drawing], *, id: str) -> None:
        super().__init__(id=id, classes="panel")
        self._draw_scene = draw

    def show(self, scene: Scene) -> None:
        """Draw this scene."""
        drawing = self._draw_scene(scene, *self.content_size)
        self.border_title, self.border_subtitle = drawing.title, drawing.subtitle
        self.update(drawing.body)
