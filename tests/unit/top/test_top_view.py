"""The live view: driven by Textual's pilot, and for real in a pseudo-terminal."""

from __future__ import annotations

import asyncio
import dataclasses
import html
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from textual.pilot import Pilot

from flatout.top.sample_source import Stop, live, replay
from flatout.top.view import Drawing, Scene, TopView, chart, cpu_panel, process_panel
from flatout.trace import DiskSample, ProcessSample, Sample

Make = Callable[..., Sample]
DISKS = (DiskSample(name="nvme0n1", read_bytes_s=4e8, write_bytes_s=3e6, busy_pct=37.0),)
GPM = {"tensor_active_pct": 43.0, "dram_active_pct": 21.0, "sm_occupancy_pct": 12.0, "pcie_rx_bytes_s": 2.0**30}


def busy_second(make_sample: Make, t: float, **fields: object) -> Sample:
    settings = {"sm": 71.0, "util": 98.0, "trainer_cpu": 97.0, "workers": 3, "host": {"disks": DISKS}, "gpu": GPM}
    return make_sample(t, **(settings | fields))


def screen_of(view: TopView) -> str:
    """What stands on the screen, taken from the picture it exports: its text, line by line."""
    found: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', view.export_screenshot()):
        found.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    return "\n".join("".join(text for _, text in sorted(parts)) for _, parts in sorted(found.items()))


async def until(pilot: Pilot[None], view: TopView, words: str) -> str:
    """The screen, once these words stand on it (or it is hopeless to wait on)."""
    end_s = time.monotonic() + 60
    while words not in (screen := screen_of(view)) and time.monotonic() < end_s:
        await pilot.pause(0.01)
    assert words in screen, f"{words} never came to the screen:\n{screen}"
    return screen


@pytest.fixture
def view_of(record: Callable[..., Path]) -> Callable[..., TopView]:
    """The view of a recording of these samples."""

    def build(*samples: Sample, take: Callable[[Sample], None] = lambda _: None) -> TopView:
        return TopView(source=replay(record(list(samples))), stop=Stop(), take=take)

    return build


@pytest.fixture
def watch(view_of: Callable[..., TopView]) -> Callable[..., list[str]]:
    """Plays samples in a terminal of some size; then presses keys, each until its words are there."""

    def play(samples: list[Sample], size: tuple[int, int] = (80, 24), keys: dict[str, str] | None = None) -> list[str]:
        view = view_of(*samples)

        async def look() -> list[str]:
            async with view.run_test(size=size) as pilot:
                await until(pilot, view, "END OF THE RECORDING")
                await until(pilot, view, "Training")
                screens = [await until(pilot, view, "q Quit")]
                for key, words in (keys or {}).items():
                    await pilot.press(key)
                    screens.append(await until(pilot, view, words))
                return screens

        return asyncio.run(look())

    return play


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (60, 20)])
def test_everything_is_on_the_screen(watch, make_sample: Make, size: tuple[int, int]) -> None:
    (screen,) = watch([busy_second(make_sample, float(t)) for t in range(5)], size)
    for words in (
        "flatout top  node-1",
        "healthy  SM active averages 71%",
        "GPU 0 NVIDIA H200",
        r"SM active.* 71%",
        r"GPU-Util.* 98%",
        r"tensor.* 43%",
        r"memory.*70.0/140.0 GiB",
        r"power.*350/700 W",
        r"temp\..* 60 °C",
        r"SM clock.*1980/1980 MHz",
        "CPU 1[05]% of 16 cores",
        "nvme0n1 .*↓381 MiB/s",
        "q Quit",
        "p Pause",
    ):
        assert re.search(words, screen), f"{words} is not on the screen:\n{screen}"
    assert "Training: 4 processes, 3 loader workers" in screen
    assert re.search(r"100 +trainer +97%", screen) or size == (60, 20)
    assert all(len(line) <= size[0] for line in screen.splitlines())


def plain(drawing: Drawing) -> list[str]:
    """What a panel shows, line by line."""
    assert isinstance(drawing.body, Text)
    return drawing.body.plain.splitlines()


def test_in_a_small_terminal_the_rest_of_the_processes_is_summed_up(watch, make_sample: Make) -> None:
    (small,) = watch([busy_second(make_sample, float(t), workers=6) for t in range(3)], (80, 24))
    assert re.search(r"… +[45] more +2[05]0%", small)


def test_processes_that_sleep_do_not_hide_those_that_work(make_sample: Make) -> None:
    sample = make_sample(1.0)
    asleep = [ProcessSample(pid=100 + n, role="trainer", name="python", cpu_pct=0.0) for n in range(20)]
    at_work = [ProcessSample(pid=300 + n, role="other", name="python", cpu_pct=90.0 + n) for n in range(3)]
    many = dataclasses.replace(sample, processes=(*asleep, *at_work))
    scene = Scene(samples=[many], gpu=0, cores_allowed=None, notes=())
    lines = [line.split() for line in plain(process_panel(scene, 80, 6))]
    assert [line[:2] for line in lines[1:]] == [
        ["302", "other"], ["301", "other"], ["300", "other"], ["100", "trainer"], ["…", "19"],
    ]  # fmt: skip
    assert lines[-1][3] == "0%"


def test_several_gpus_one_chosen(watch, make_sample: Make) -> None:
    samples = [busy_second(make_sample, float(t), gpus=3) for t in range(3)]
    first, _, second, _ = watch(samples, keys={"x": "→ Next GPU", "right": "▸ 1", "left": "▸ 0"})
    assert re.search(r"▸ 0.*71%.*util 98%.*mem 50%.*350 W.*60 °C", first)
    assert "GPU 1 NVIDIA H200" in second


def test_the_chosen_of_many_gpus_is_always_among_those_shown(watch, make_sample: Make) -> None:
    samples = [busy_second(make_sample, float(t), gpus=8) for t in range(3)]
    assert watch(samples, keys={"x": "→ Next GPU", "left": "▸ 7", "right": "▸ 0"})


def test_it_redraws_when_the_terminal_grows(view_of, make_sample: Make) -> None:
    view = view_of(*(busy_second(make_sample, float(t)) for t in range(3)))

    async def grow() -> tuple[str, str]:
        async with view.run_test(size=(80, 24)) as pilot:
            before = await until(pilot, view, "END OF THE RECORDING")
            await pilot.resize_terminal(200, 60)
            return before, await until(pilot, view, "idle 0% of the time.")

    before, after = asyncio.run(grow())
    assert after.count("\n") > before.count("\n")


def test_a_gpu_without_gpm_says_so(watch, make_sample: Make) -> None:
    (screen,) = watch([make_sample(float(t), util=98.0) for t in range(3)])
    assert "power share, as there are no SM counters" in screen
    assert "SM active  ░" not in screen


def test_a_machine_without_a_gpu(watch, make_sample: Make) -> None:
    (screen,) = watch([make_sample(float(t), gpus=0) for t in range(3)])
    assert "no GPU  no NVIDIA GPU was seen" in screen
    assert "none seen: no process holds memory on a GPU" in screen


def test_what_stands_in_brackets_is_shown_as_it_is(watch, make_sample: Make) -> None:
    """Textual and rich would take it for markup: of a color, of something to click on, or broken."""
    odd = {"host": {"disks": (dataclasses.replace(DISKS[0], name="[/red]"),)}, "gpu": {"name": "GPU [@click=app.quit]"}}
    (screen,) = watch([busy_second(make_sample, float(t), **odd) for t in range(3)])
    assert "[/red]" in screen
    assert "GPU 0 GPU [@click=app.quit]" in screen


def test_one_core_is_not_written_as_a_plural(make_sample: Make) -> None:
    host = dataclasses.replace(make_sample(1.0).host, cores_pct=(50.0,))
    scene = Scene(samples=[dataclasses.replace(make_sample(1.0), host=host)], gpu=0, cores_allowed=0.5, notes=())
    assert cpu_panel(scene, 80, 3).title.endswith("of 0.5 of 1 core")


def test_the_picture_can_be_paused_while_measuring_goes_on(machine) -> None:
    # GIVEN a live machine whose samples come when this test lets time pass
    here = machine(lambda _: 80.0)
    may_go_on = threading.Event()

    def sleep(seconds: float) -> None:
        may_go_on.wait(60)
        here.sleep(seconds)

    taken: list[Sample] = []
    source = live(here, interval_s=1.0, duration_s=20.0, cores_allowed=16.0, clock=here.clock)
    view = TopView(source=source, stop=Stop(sleep=sleep), take=taken.append)

    async def look() -> str:
        async with view.run_test(size=(80, 24)) as pilot:
            await pilot.press("p")
            may_go_on.set()
            while len(taken) < 20:
                await pilot.pause(0.01)
            held = await until(pilot, view, "waiting for the first sample")
            await pilot.press("p")
            await until(pilot, view, "healthy  SM active averages 80%")
            return held

    assert "NVIDIA" not in asyncio.run(look())


def test_light_and_dark_change_the_theme_and_not_the_text(view_of, make_sample: Make) -> None:
    view = view_of(*(busy_second(make_sample, float(t)) for t in range(3)))

    async def look() -> tuple[str, str]:
        async with view.run_test(size=(80, 24)) as pilot:
            await until(pilot, view, "END OF THE RECORDING")
            dark = view.current_theme.name
            await pilot.press("t")
            await until(pilot, view, "GPU 0 NVIDIA H200")
            return dark, view.current_theme.name

    assert asyncio.run(look()) == ("textual-dark", "textual-light")


def test_an_error_while_measuring_is_raised_after_the_view(view_of, make_sample: Make) -> None:
    def fail(_: Sample) -> None:
        raise OSError(28, "No space left on device")

    async def play() -> None:
        view = view_of(make_sample(), take=fail)
        async with view.run_test() as pilot:
            while view.is_running:
                await pilot.pause(0.01)
        view.raise_problem()

    with pytest.raises(OSError, match="No space left"):
        asyncio.run(play())


def test_a_chart_shows_work_solid_and_what_is_only_claimed_hatched() -> None:
    lines = chart([(0.0, 0.0), (25.0, 100.0), (100.0, 100.0), (None, None)], 9, 4)
    assert [line.plain for line in lines] == ["100%  ░█ ", "      ░█ ", "      ░█ ", "  0%  ██ "]


def test_a_chart_keeps_the_newest() -> None:
    (line,) = chart([(100.0, 0.0)] * 5 + [(0.0, 0.0)] * 3, 10, 1)
    assert line.plain == "100% ██   "


def test_every_core_has_a_mark_as_high_as_it_is_full(make_sample: Make) -> None:
    cores = make_sample(host={"cores_pct": (100.0, 50.0, 0.0)})
    scene = Scene(samples=[cores], gpu=0, cores_allowed=None, notes=())
    assert plain(cpu_panel(scene, 40, 1)) == ["█ ▄ ▁ "]


# The real thing: the command in a pseudo-terminal.

pty = pytest.importorskip("pty")


class Screen:
    """A `flatout top` of its own in a pseudo-terminal."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24, **environ: str) -> None:
        import fcntl
        import struct
        import termios

        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flatout", "top", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=_environ() | {"TERM": "xterm-256color"} | environ,
            start_new_session=True,
        )
        os.close(theirs)
        self.output = ""

    def until(self, words: str) -> None:
        """Read until these words have come (or the end, or far too long)."""
        end_s = time.monotonic() + 60
        while words not in self.output and time.monotonic() < end_s and self._read(end_s):
            pass

    def _read(self, end_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], end_s - time.monotonic())
        try:
            data = os.read(self._ours, 65536) if ready else b""
        except OSError:  # Linux says so when the other side is closed
            data = b""
        self.output += data.decode("utf-8", "replace")
        return bool(data)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        self.until("\0 never said")
        return self.process.wait(timeout=60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=60)
        os.close(self._ours)


@pytest.fixture
def open_screen() -> Iterator[Callable[..., Screen]]:
    """Opens pseudo-terminals, and closes them whatever happens."""
    with ExitStack() as stack:

        def start(*arguments: str, **settings: Any) -> Screen:
            screen = Screen(*arguments, **settings)
            stack.callback(screen.close)
            return screen

        yield start


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}


COLOUR = re.compile(r"\x1b\[(?:[\d;:]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[\d;:]*m")


@pytest.mark.parametrize("end", ["\x03", signal.SIGTERM])
def test_in_a_terminal_it_draws_until_told_to_end_then_sums_up(
    open_screen, record, make_sample: Make, end: object
) -> None:
    # GIVEN a recording of which most is still to come
    folder = record([busy_second(make_sample, float(t), interval_s=0.01 if t < 6 else 1e6) for t in range(7)])
    screen = open_screen("--replay", str(folder))
    screen.until("healthy")
    screen.until("NVIDIA H200")
    assert "NVIDIA H200" in screen.output
    assert COLOUR.search(screen.output)
    if isinstance(end, str):
        screen.type(end)
    else:
        screen.process.send_signal(signal.SIGTERM)
    code = screen.end()
    assert "Verdict: healthy" in screen.output
    assert code == 0


def test_no_color_is_respected(open_screen, record, make_sample: Make) -> None:
    folder = record([busy_second(make_sample, float(t)) for t in range(4)])
    screen = open_screen("--replay", str(folder), "--speed", "100", NO_COLOR="1")
    screen.until("END OF THE RECORDING")
    screen.type("q")
    assert screen.end() == 0
    assert "Verdict: healthy" in screen.output
    assert not COLOUR.findall(screen.output)


def test_a_terminal_of_20_columns_is_too_small(open_screen) -> None:
    screen = open_screen(columns=20)
    assert screen.end() == 2
    assert screen.output.replace("\r\n", "").startswith("flatout: the live view needs at least 60 columns")
    assert screen.output.count("\n") == 1


def test_live_on_this_machine(open_screen, tmp_path: Path) -> None:
    screen = open_screen("--interval", "0.25", "--record", str(tmp_path / "run"))
    screen.until("Training")
    screen.until("stalls" if Path("/proc/pressure/io").exists() else "CPU")
    screen.type("q")
    assert screen.end() == 0
    assert "Verdict: " in screen.output
    assert list((tmp_path / "run").glob("hardware-*.jsonl"))
