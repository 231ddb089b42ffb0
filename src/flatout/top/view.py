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
from textual.events import Resize
from textual.theme import Theme
from textual.widgets import Footer, Static

from flatout.model.formatting import duration
from flatout.top.figures import FigureBuilder
from flatout.top.panels import (
    DARK,
    LIGHT,
    Drawing,
    Palette,
    Scene,
    cpu_panel,
    gpu_panel,
    process_panel,
    storage_panel,
)
from flatout.top.sample_source import SampleSource, Stop
from flatout.top.summary import Verdict, sum_up, tone
from flatout.trace import Sample

KEPT_SAMPLES = 600
VERDICT_OVER_S = 60.0
VERDICT_EVERY_S = 1.0
USUAL_LINES = 24
TALL_LINES = 36


class TopView(App[None]):
    """`flatout top` in a terminal."""

    CSS = """
    Screen { background: $background; color: $foreground; overflow: hidden; }
    #title, #verdict { height: 1; padding: 0 1; }
    .panel {
        border: round $primary 50%; border-title-color: $foreground; border-title-style: bold;
        border-subtitle-color: $foreground 70%; padding: 0 1;
    }
    #gpus { height: 10; }
    #middle { height: 5; }
    #cpu, #storage { width: 1fr; height: 100%; }
    #processes { height: 1fr; }
    .short #gpus { height: 8; }
    .tall #gpus { height: 1fr; }
    .tall #middle { height: 9; }
    .tall #processes { height: auto; }
    .hostonly #gpus { height: 3; }
    .hostonly #middle { height: 1fr; }
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
        self._palette = LIGHT if _terminal_is_light() else DARK
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
        """Set the colors, start measuring."""
        for palette in (DARK, LIGHT):
            self.register_theme(_theme(palette))
        self.theme = self._palette.name
        self._thread.start()

    def on_unmount(self) -> None:
        """End the measuring, however the view came to its end."""
        self._stop.asked = True
        if self._thread.ident is not None:
            self._thread.join()

    def on_resize(self, event: Resize) -> None:
        """Give the panels more room where there is more."""
        self.screen.set_class(event.size.height < USUAL_LINES, "short")
        self.screen.set_class(event.size.height >= TALL_LINES, "tall")
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
        self._palette = LIGHT if self._palette is DARK else DARK
        self.theme = self._palette.name
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
        now = self.samples[-1]
        self.gpu = min(self.gpu, max(0, len(now.gpus) - 1))
        scene = Scene(
            samples=self.samples,
            gpu=self.gpu,
            palette=self._palette,
            cores_allowed=self._source.cores_allowed,
            notes=self._source.notes,
        )
        self.screen.set_class(not now.gpus, "hostonly")
        self.query_one("#title", Static).update(self._title())
        self.query_one("#verdict", Static).update(self._verdict_line())
        for panel in self.query(_Panel):
            panel.show(scene)
        if self.screen.has_class("tall"):
            needed = max(1, len(now.processes)) + 3  # a header, and the frame
            self.query_one("#processes").styles.height = min(needed, self.size.height * 2 // 5)
        if len(now.gpus) != self._gpus:
            self._gpus = len(now.gpus)
            self.refresh_bindings()

    def _title(self) -> Text:
        palette, source, now = self._palette, self._source, self.samples[-1]
        elapsed = duration(1e3 * (now.time_s - source.info.started_s))
        state = ""
        if self._ended:
            state = "  END OF THE RECORDING"
        elif self._stop.held:
            state = "  PAUSED"
        clock = time.strftime("%H:%M:%S", time.localtime(source.unix_s(now)))
        text = Text.assemble(
            ("flatout top", f"bold {palette.work}"),
            (f"  {source.info.host}", f"bold {palette.bold}"),
            (state, f"bold {palette.warm}"),
            (f"  every {self.samples[0].interval_s:.2g} s, {elapsed} so far", palette.dim),
        )
        text.append(f"  {clock}".rjust(max(0, self.size.width - 2 - text.cell_len)), palette.dim)
        return _cut(text, self.size.width - 2)

    def _verdict_line(self) -> Text:
        """The verdict on the last minute."""
        now_s = self.samples[-1].time_s
        if self._verdict is None or now_s - self._verdict_s >= VERDICT_EVERY_S:
            recent = (sample for sample in self.samples if now_s - sample.time_s < VERDICT_OVER_S)
            self._verdict = sum_up(FigureBuilder(recent, cores_allowed=self._source.cores_allowed)).verdict
            self._verdict_s = now_s
        palette, verdict = self._palette, self._verdict
        color = {"good": palette.work, "bad": palette.warm, "none": palette.dim}[tone(verdict.word)]
        text = Text.assemble((verdict.word, f"bold {color}"), (f"  {verdict.reason}", palette.dim))
        return _cut(text, self.size.width - 2)


class _Panel(Static):
    """A framed part of the screen, drawn again for each scene in the size it has."""

    def __init__(self, draw: Callable[[Scene, int, int], Drawing], *, id: str) -> None:
        super().__init__(id=id, classes="panel")
        self._draw_scene = draw
        self._scene: Scene | None = None

    def on_resize(self) -> None:
        """Draw the same again in the new size."""
        if self._scene is not None:
            self.show(self._scene)

    def show(self, scene: Scene) -> None:
        """Draw this scene."""
        self._scene = scene
        width, height = self.content_size
        drawing = self._draw_scene(scene, width, height)
        self.border_title, self.border_subtitle = drawing.title, drawing.subtitle
        self.update(Text("\n").join(_cut(line, width) for line in drawing.lines[:height]))


def _theme(palette: Palette) -> Theme:
    return Theme(
        name=palette.name,
        primary=palette.cool,
        accent=palette.work,
        foreground=palette.text,
        background=palette.ground,
        surface=palette.ground,
        panel=palette.panel,
        dark=palette is DARK,
    )


def _cut(line: Text, width: int) -> Text:
    line.no_wrap = True
    line.truncate(width, overflow="ellipsis")
    return line


def _terminal_is_light() -> bool:
    """Some terminals say so: COLORFGBG is `foreground;background`, and 7 and 15 are the light ones."""
    return os.environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
