"""The page in a real browser: opened from disk, without a network, it draws, zooms and complains about nothing.

Where there is no Chromium, the part that needs one is skipped; the page is then only taken apart (tests/unit/report).
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# A tiny training with a loader, an evaluation, a checkpoint and losses that are read.
SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

class Noise(Dataset):
    def __len__(self): return 320
    def __getitem__(self, index): return torch.rand(32), torch.rand(1)

model = torch.nn.Linear(32, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    model.train()
    for x, y in DataLoader(Noise(), batch_size=8):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(Noise(), batch_size=64):
            model(x)
    torch.save(model.state_dict(), "model.pt")
"""
# Opens the page in a frame, uses it as a person would, and writes down what it looks like then.
VISIT = """<!doctype html><iframe src="{page}" width="1000" height="3000"></iframe><pre id="seen"></pre><script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  const page = frame.contentDocument, window = frame.contentWindow;
  const plot = page.querySelector(".plot"), lines = plot.querySelector(".lines");
  const output = plot.closest("figure").querySelector("output");
  const press = (key, shiftKey) =>
    plot.dispatchEvent(new window.KeyboardEvent("keydown", {{ key, shiftKey, bubbles: true }}));
  const move = (type, share) => {{
    const box = lines.getBoundingClientRect();
    const place = {{ clientX: box.left + share * box.width, clientY: box.top + 5, bubbles: true, button: 0 }};
    plot.dispatchEvent(new window.PointerEvent(type, {{ ...place, pointerType: "mouse", pointerId: 1 }}));
  }};
  plot.setPointerCapture = () => {{}};  // there is no real pointer to capture
  const view = () => lines.getAttribute("viewBox").split(" ").map(Number);
  const ticks = () => [...plot.parentElement.querySelector(".axis").children].map((tick) => tick.textContent);
  const seen = {{ whole: view(), ticks: ticks() }};
  plot.focus();
  seen.focused = page.activeElement === plot;
  press("ArrowRight"); seen.value = output.textContent;
  press("+"); seen.closer = view(); seen.ticksCloser = ticks();
  press("ArrowRight", true); seen.moved = view();
  press("0"); seen.back = view();
  move("pointermove", 0.5); seen.hovered = output.textContent;
  move("pointerdown", 0.25); move("pointermove", 0.5); move("pointerup", 0.5); seen.dragged = view();
  const inner = page.querySelector(".inner");
  if (inner) {{
    const step = inner.closest(".frame");
    step.dispatchEvent(new window.KeyboardEvent("keydown", {{ key: "+", bubbles: true }}));
    seen.step = inner.getAttribute("width");
  }}
  seen.lines = [...page.querySelectorAll(".line, .dots")]
    .map((line) => line.points.length);
  page.querySelectorAll("details").forEach((each) => {{ each.open = true; }});
  const isBroken = (text, word) => {{
    const range = page.createRange();
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1;
  }};
  seen.broken = [];
  for (const width of [390, 1440]) {{
    frame.width = width;
    for (const cell of page.querySelectorAll("th, td")) {{
      const text = cell.firstChild;
      const words = text ? [...text.textContent.matchAll(/[\\p{{L}}\\p{{N}}_]+/gu)] : [];
      seen.broken.push(...words.filter((word) => isBroken(text, word)).map(String));
    }}
  }}
  frame.width = 1000;
  seen.wider = page.documentElement.scrollWidth - page.documentElement.clientWidth;
  document.getElementById("seen").textContent = JSON.stringify(seen);
}};
</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The report of a run, as `flatout run --html` writes it, and the run compared with itself."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "train.py").write_text(SCRIPT)
    flatout = [sys.executable, "-m", "flatout"]
    run = ["run", "--quiet", "--trace", "run", "--html", "run.html", "--", sys.executable, "train.py"]
    subprocess.run([*flatout, *run], cwd=folder, check=True, timeout=120)
    compare = ["compare", "run", "run", "--html", "compare.html"]
    subprocess.run([*flatout, *compare], cwd=folder, check=True, timeout=60, capture_output=True)
    return folder / "run.html", folder / "compare.html"


def test_run_writes_a_page_of_its_own(pages: tuple[Path, Path]) -> None:
    """Without a browser: it is there, has the sections a CPU run can have, and is small."""
    text = pages[0].read_text(encoding="utf-8")

    for section in ("time", "steps", "run", "loading", "facts"):
        assert f'<section id="{section}"' in text
    for words in ("Step time", "evaluation", "checkpoint"):
        assert words in text
    assert len(text.encode()) < 150_000


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: the page is taken apart, but not opened")
@pytest.mark.parametrize(("which", "scheme"), [(0, "light"), (0, "dark"), (1, "light")])
def test_the_page_draws_its_plots_zooms_and_reads_values(
    pages: tuple[Path, Path], visit: Callable[..., tuple[dict[str, Any], str]], which: int, scheme: str
) -> None:
    seen, console = visit(pages[which], scheme)

    assert console == ""  # no script failed, and the page's own policy refused nothing
    assert max(seen["lines"]) >= 20
    assert seen["wider"] <= 0  # nothing sticks out
    assert seen["broken"] == []  # no word of a table
    assert seen["focused"]
    unit = (" s", "")[which]  # the axis of a comparison counts steps
    assert re.search(rf"^[\d.,]+{unit}: .*\d", seen["value"])
    whole, closer, moved = seen["whole"], seen["closer"], seen["moved"]
    assert closer[2] == pytest.approx(whole[2] / 2)
    assert seen["ticksCloser"] != seen["ticks"]
    assert moved[0] > closer[0]
    assert seen["back"] == whole
    assert seen["hovered"] != ""
    assert seen["dragged"][0] == pytest.approx(whole[2] / 4, rel=0.02)
    assert seen["dragged"][2] == pytest.approx(whole[2] / 4, rel=0.02)
    if which == 0:
        assert seen["step"] == "200%"


@pytest.fixture
def visit(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """Uses a page in Chromium; gives back what was seen, and what the console said."""

    def visited(page: Path, scheme: str) -> tuple[dict[str, Any], str]:
        assert CHROMIUM is not None
        visitor = tmp_path / "visit.html"
        visitor.write_text(VISIT.format(page=page.as_uri()))
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
            "--allow-file-access-from-files",  # the visitor looks into the page
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            "--virtual-time-budget=10000",
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
        ]
        command = [CHROMIUM, *options, visitor.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line or "Uncaught" in line]
        seen = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
        assert seen is not None
        return json.loads(html.unescape(seen[1])), "\n".join(said)

    return visited
