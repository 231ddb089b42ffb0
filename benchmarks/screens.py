"""Draws the live view of a recording, at 80×24 and at 200×60, as docs/screens/top-*.svg.

    flatout top --record RUN --duration 120       (while a training runs)
    python -m benchmarks.screens RUN              → docs/screens/top-80x24.svg, docs/screens/top-200x60.svg

Each picture is drawn by the view itself, from all samples of the recording (or the first --samples of them).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from flatout.top.sample_source import SampleSource, Stop, replay
from flatout.top.view import TopView
from flatout.trace import Sample

SIZES = ((80, 24), (200, 60))
FONT_FROM_THE_NETWORK = re.compile(r"@font-face\s*\{.*?\}\s*", re.DOTALL)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/screens"))
    parser.add_argument("--samples", type=int, default=None, help="stop after so many samples")
    parser.add_argument("--light", action="store_true", help="in light colours")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for columns, lines in SIZES:
        path = arguments.out / f"top-{columns}x{lines}{'-light' if arguments.light else ''}.svg"
        svg = asyncio.run(draw(arguments.recording, columns, lines, arguments.samples, light=arguments.light))
        path.write_text(svg, encoding="utf-8")
        print(path)


async def draw(recording: Path, columns: int, lines: int, samples: int | None, *, light: bool) -> str:
    """The view after the recording was played so far, as SVG that needs nothing from the network."""
    source, played = _beginning(recording, samples)
    view = TopView(source=source, stop=Stop(), take=lambda _: None)
    async with view.run_test(size=(columns, lines)) as pilot:
        while not played.is_set():
            await pilot.pause(0.05)
        if light:
            await pilot.press("t")
        await pilot.pause()
        svg = FONT_FROM_THE_NETWORK.sub("", view.export_screenshot(title="flatout top"))
        await pilot.press("q")
    return svg


def _beginning(recording: Path, count: int | None) -> tuple[SampleSource, threading.Event]:
    """The first samples of a recording, all at once; then it stands still until the view is left."""
    source, played = replay(recording), threading.Event()

    def samples(stop: Stop) -> Iterator[Sample]:
        yield from itertools.islice(source.samples(stop), count)
        played.set()
        while not stop.wait(1.0):
            pass

    return dataclasses.replace(source, samples=samples), played


if __name__ == "__main__":
    main()
