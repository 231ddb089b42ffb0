"""`flatout try` as a person runs it: real patches to a real training, on the CPU."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from flatout.launch import sandbox

pytestmark = pytest.mark.timeout(420)

ROOT = Path(__file__).parents[2]
TRAIN = """
    import os, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from photos import Photos

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head, aux = nn.Linear(8, 4), nn.Linear(8, 1)
    weights = [*model.parameters(), *head.parameters(), *aux.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1)
    pause_s = float(os.environ.get("PAUSE_S", "0.04"))
    for epoch in range(100):
        model.train()
        for photos, labels in DataLoader(Photos(240, 0), batch_size=8, shuffle=True):
            time.sleep(pause_s)
            seen = model(photos)
            loss = nn.functional.cross_entropy(head(seen), labels)
            loss = loss + ((aux(seen).squeeze(1) - labels) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for photos, labels in DataLoader(Photos(24, 1), batch_size=8):
                head(model(photos))
        open("epochs.txt", "a").write(f"{epoch}\\n")
"""
PHOTOS = """
    import time
    import torch
    from torch.utils.data import Dataset

    class Photos(Dataset):
        def __init__(self, count, seed):
            draw = torch.Generator().manual_seed(seed)
            self.photos, self.labels = torch.randn(count, 3, 12, 12, generator=draw), torch.arange(count) % 4

        def __len__(self):
            return len(self.labels)

        def __getitem__(self, index):
            time.sleep(0.004)
            photo = self.photos[index] / 3
            return photo, self.labels[index]
"""
SLEEP, PAUSE = "        time.sleep(0.004)\n", "        time.sleep(pause_s)\n"
# What is wrong: the file, the edit, and how the reason begins.
WRONG = {
    "half": ("photos.py", "return len(self.labels)", "return len(self.labels) // 2", "batch 1: samples "),
    "small": (
        "photos.py",
        "[index] / 3",
        "[index, :, :10, :10] / 3",
        "step 1: in training the model is given float32[8, 3,",
    ),
    "decay": ("train.py", ", weight_decay=0.1", "", "the optimizer's weight_decay is 0.01 instead of 0.1"),
    "detached": ("train.py", "(aux(seen)", "(aux(seen.detach())", "from the same weights, 0."),
    "mode": (
        "train.py",
        "    model.train()\n",
        "",
        "step 31: the model is given 2 tensors in training, not 3 (is it in",
    ),
    "tested": ("train.py", "Photos(24, 1)", "Photos(24, 0)", "step 31: in evaluation other numbers reach the model"),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    with_overlay = not sandbox.why_no_overlay([sys.executable], tmp_path)
    if not with_overlay:
        pytest.skip("no overlay can be mounted here")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(TRAIN).lstrip())
    (folder / "photos.py").write_text(textwrap.dedent(PHOTOS).lstrip())
    return folder


def patch(folder: Path, name: str, *edits: tuple[str, str, str]) -> str:
    """A patch in the folder, of edits of files: what was there, and what is to be there."""
    lines: list[str] = []
    for file, old, new in edits:
        before = (folder / file).read_text()
        assert before.count(old) == 1
        after = before.replace(old, new).splitlines(keepends=True)
        lines += difflib.unified_diff(before.splitlines(keepends=True), after, f"a/{file}", f"b/{file}")
    (folder / name).write_text("".join(lines))
    return name


def tried(folder: Path, *words: str, steps: int = 40) -> tuple[int, dict[str, Any], str]:
    """The exit code of a try, its JSON, and what it said."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "flatout", "try", "--budget", "5m", "--json", "try.json"]
    if steps:
        command += ["--steps", str(steps)]
    words = words if "--" in words else (*words, "--", sys.executable, "train.py")
    done = subprocess.run(
        [*command, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    file = folder / "try.json"
    return done.returncode, json.loads(file.read_text()) if file.exists() else {}, done.stdout + done.stderr


@pytest.mark.timing
def test_right_patches_pass_each_alone_and_together_and_nothing_is_written(project: Path) -> None:
    names = [
        patch(project, "sleep.diff", ("photos.py", SLEEP, "")),
        patch(project, "pause.diff", ("train.py", PAUSE, "")),
    ]
    before = {path: path.read_bytes() for path in project.iterdir()}

    code, result, said = tried(project, "--patch", names[0], "--patch", names[1])

    assert code == 0, said
    assert [(edit["name"], edit["verdict"]) for edit in result["edits"]] == [
        ("sleep.diff", "faster and the same"),
        ("pause.diff", "faster and the same"),
        ("sleep.diff + pause.diff", "faster and the same"),
    ]
    alone, _, both = (edit["gain"] for edit in result["edits"])
    assert alone["low"] > 1
    assert both["value"] > alone["value"]
    assert "3 batches of evaluation" in result["edits"][0]["proof"]["text"]
    (project / "try.json").unlink()
    caches = [path for path in project.iterdir() if path not in before]
    assert {path.name for path in caches} <= {"__pycache__"}
    assert {path: path.read_bytes() for path in before} == before


def test_wrong_patches_fail_and_say_what_differs_first(project: Path) -> None:
    words = []
    for name, (file, old, new, _) in WRONG.items():
        # All are faster: each leaves out the sleep too.
        edits = [(file, old, new), ("photos.py", SLEEP, "")]
        if file == "photos.py":
            text = (project / file).read_text()
            edits = [(file, text, text.replace(old, new).replace(SLEEP, ""))]
        words += ["--patch", patch(project, f"{name}.diff", *edits)]
    words += ["--patch", patch(project, "crash.diff", ("train.py", "loss.backward()", "loss.backwards()"))]

    code, result, said = tried(project, *words)

    assert code == 1, said
    *edits, crash = result["edits"]
    for (name, (*_, reason)), edit in zip(WRONG.items(), edits, strict=True):
        assert edit["name"] == f"{name}.diff"
        assert edit["verdict"] in ("faster, but not the same training", "not the same training")
        assert edit["proof"]["text"].startswith(reason)
    assert crash["verdict"] == "does not run"
    assert "AttributeError: 'Tensor' object has no attribute 'backwards'" in crash["error"]
    assert "train.py:" in crash["error"]


def test_a_patch_that_does_not_apply_is_one_line(project: Path) -> None:
    name = patch(project, "old.diff", ("photos.py", SLEEP, ""))
    file = project / "photos.py"
    file.write_text(file.read_text().replace("0.004", "0.002"))
    code, _, said = tried(project, "--patch", name)
    assert (code, said) == (2, "flatout: old.diff does not apply: photos.py is not as the hunk at line 11 expects it\n")


@pytest.mark.timing
def test_an_edited_copy_another_command_and_a_variable(project: Path) -> None:
    copy = project.parent / "copy"
    copy.mkdir()
    (copy / "train.py").write_text((project / "train.py").read_text().replace(PAUSE, ""))
    python = sys.executable
    for words in (
        ("--with", str(copy)),
        ("--env", "PAUSE_S=0"),
        ("--against", f"{python} train.py", "--", python, str(copy / "train.py")),
    ):
        if words[0] == "--against":
            (copy / "photos.py").write_text((project / "photos.py").read_text())
        code, result, said = tried(project, *words)
        assert code == 0, said
        (edit,) = result["edits"]
        assert edit["verdict"] == "faster and the same"
