"""The page in a real browser: opened from disk, without a network, it draws its plots and complains about nothing.

Where there is no Chromium, the part that needs one is skipped; the page is then only taken apart (tests/unit/report).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
    """Without a browser: it is there, has the sections a CPU run can have, and holds its figures."""
    text = pages[0].read_text(encoding="utf-8")

    for section in ("time", "steps", "run", "loading", "facts"):
        assert f'<section id="{section}"' in text
    assert '"title":"Step time"' in text
    assert "evaluation" in text
    assert "checkpoint" in text
    assert len(text) < 6_000_000


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: the page is taken apart, but not opened")
@pytest.mark.parametrize("which", [0, 1], ids=["report", "compare"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_its_plots_and_no_script_fails(
    pages: tuple[Path, Path], open_page: Callable[..., tuple[str, str]], which: int, scheme: str
) -> None:
    dom, console = open_page(pages[which], scheme)

    assert "Uncaught" not in console
    assert "Refused" not in console  # by the page's own policy
    assert "CONSOLE" not in console, console
    places = re.findall(r'<div class="plot[^"]*" id="plot-(\d+)"', dom)
    assert len(places) == len(set(places)) >= 2
    # Each plot holds an SVG whose lines have points.
    assert len(re.findall(r'class="main-svg"', dom)) >= len(places)
    lines = re.findall(r'<path class="js-line"[^>]* d="(M[^"]+)"', dom)
    assert len(lines) >= len(places)
    assert max(len(re.findall(r"[MLHV]", line)) for line in lines) >= 5  # plotly leaves out points that lie in line


@pytest.fixture
def open_page(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Opens a file in Chromium; gives back the document as it is after its scripts, and what the console said."""

    def opened(page: Path, scheme: str) -> tuple[str, str]:
        assert CHROMIUM is not None
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            "--virtual-time-budget=10000",
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        done = subprocess.run(
            [CHROMIUM, *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=90, check=True
        )
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line or "Uncaught" in line]
        return done.stdout, "\n".join(said)

    return opened
