"""What a fix kept, as a patch of the person's files: built by hand, and of the five trainings in workloads/."""

from __future__ import annotations

import ast
import py_compile
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.fix.patch import FilePatch, why_not_in_git
from flatout.fix.result import Attempt, FixResult
from flatout.fix.runs import Run
from flatout.fix.source_edits import patch_of, script_of
from flatout.model.changes import safety_of
from flatout.model.errors import UsageError
from flatout.model.plan import Change, Outcome
from flatout.model.records import Facts, LoaderFacts, SettingsRead
from flatout.trace import RankTrace, RunInfo, Trace

WORKLOADS = Path(__file__).parents[3] / "workloads"
TRAIN = """\
import argparse
import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=8)
parser.add_argument("--amp", action="store_true")
args = parser.parse_args()
loader = DataLoader(data, batch_size=args.batch_size)  # all of it
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
OPTIONS = SettingsRead(
    source="argparse",
    values={"batch_size": 8, "amp": False},
    options={"batch_size": "--batch-size", "amp": "--amp"},
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def kept(name: str, value: Any = True, *places: str, knob: str = "") -> Attempt:
    change = Change(name=name, value=value, safety=safety_of(name), knob=knob)
    outcome = Outcome(change=change, verdict="kept")
    return Attempt(outcome=outcome, where=next(iter(places), ""), also=places[1:])


def patched(*attempts: Attempt, command: str = "python train.py", script: str = "train.py", **facts: Any) -> FilePatch:
    info = RunInfo(name="train", command=("python", script), started_unix_s=time.time() + 60)
    facts = {"settings": (OPTIONS,)} | facts
    trace = Trace(ranks=(RankTrace(info=info, facts=Facts(**facts)),), samples={})
    result = FixResult(attempts=list(attempts), kept=tuple(attempt.change for attempt in attempts))
    result.before = Run(changes=(), code=0, seconds=1.0, trace=trace)
    return patch_of(result, command.split(), Path("flatout-plan.yaml"), Path("fix.diff"))


def after(patch: FilePatch, name: str = "train.py") -> str:
    return patch.files[Path(name)][1].decode()


def test_what_is_made_in_the_source_is_written_there(folder: Path) -> None:
    patch = patched(
        kept("loader", "elastic", "train.py:9"),
        kept("pin_memory", True, "train.py:9"),
        kept("fused_optimizer", True, "train.py:10"),
        kept("cudnn_benchmark"),
        kept("num_workers", 8, "train.py:9"),  # which the elastic loader decides
    )
    assert after(patch) == TRAIN.replace(
        "import DataLoader\n", "import DataLoader\nimport flatout\ntorch.backends.cudnn.benchmark = True\n"
    ).replace(
        "DataLoader(data, batch_size=args.batch_size)",
        'flatout.DataLoader(data, batch_size=args.batch_size, num_workers="auto", pin_memory=True)',
    ).replace("lr=0.1", "lr=0.1, fused=True")
    assert (patch.by_plan, patch.unwritten) == ((), ())
    assert patch.command == ("python", "train.py")


def test_the_diff_is_what_difflib_and_git_understand(folder: Path) -> None:
    (folder / "my train.py").write_bytes(TRAIN.replace("\n", "\r\n").rstrip().encode())
    subprocess.run(["git", "init", "-q", folder], check=True)
    patch = patched(kept("fused_optimizer", True, "my train.py:10"))
    (folder / "fix.diff").write_bytes(patch.diff())
    assert b"\\ No newline at end of file\n" in patch.diff()
    subprocess.run(["git", "apply", "fix.diff"], cwd=folder, check=True)
    assert (folder / "my train.py").read_bytes() == patch.files[Path("my train.py")][1]
    assert b"lr=0.1, fused=True)" in (folder / "my train.py").read_bytes()


@pytest.mark.parametrize(
    ("command", "knob", "value", "expected"),
    [
        ("python train.py --batch-size 16", "--batch-size", 64, "python train.py --batch-size 64"),
        ("python train.py --batch-size=16", "--batch-size", 64, "python train.py --batch-size=64"),
        ("python train.py --batch-size 16", "-b", 64, "python train.py --batch-size 64"),  # another name for it
        ("python train.py", "--amp", True, "python train.py --amp"),
        ("python train.py", "--lr", 0.1, "python train.py --lr 0.1"),  # declared where nobody can see it
        ("bash train.sh", "--lr", 0.1, None),  # which may drop what is added
        ("python train.py", "--lr", True, None),
    ],
)
def test_a_flag_goes_on_the_command_line(
    folder: Path, command: str, knob: str, value: Any, expected: str | None
) -> None:
    patch = patched(kept("setting:x", value, knob=knob), command=command)
    assert " ".join(patch.command) == (expected or command)
    assert bool(patch.files) == (expected is None)
    assert [change.name for change in patch.by_plan] == ["setting:x"] * (expected is None)


def test_a_default_that_is_in_force_is_edited(folder: Path) -> None:
    patch = patched(kept("batch_size", 64, knob="--batch-size"))
    assert after(patch) == TRAIN.replace("default=8", "default=64")
    assert patch.command == ("python", "train.py")


def test_settings_are_edited_in_their_files(folder: Path) -> None:
    (folder / "config.yaml").write_text("train:\n  batch_size: 8  # small\n")
    (folder / "config.py").write_text("LR = 1e-3\n")
    patch = patched(
        kept("batch_size", 64, knob="config.yaml:train.batch_size"),
        kept("learning_rate", 0.008, knob=f"{folder}/config.py:LR"),
    )
    assert after(patch, "config.yaml") == "train:\n  batch_size: 64  # small\n"
    assert after(patch, "config.py") == "LR = 0.008\n"


@pytest.mark.parametrize(
    ("attempt", "facts"),
    [
        (kept("channels_last", True, "train.py:9"), {}),
        (kept("gc_freeze"), {}),
        (kept("precision", "fp16", "train.py:9"), {}),
        (kept("pin_memory", True, "train.py:5"), {}),  # no loader is made there
        (kept("pin_memory", True, "train.py:9", "other.py:3"), {}),  # all places or none
        (kept("batch_size", 64, knob="yaml:batch_size"), {}),
        (kept("pin_memory", True, "train.py:9"), {"loaders": (LoaderFacts(dataset="d", framework="transformers"),)}),
    ],
)
def test_what_cannot_be_written_is_left_to_the_plan(folder: Path, attempt: Attempt, facts: dict[str, Any]) -> None:
    patch = patched(attempt, **facts)
    assert after(patch) == f'import flatout\nflatout.apply("flatout-plan.yaml")\n{TRAIN}'
    assert patch.by_plan == (attempt.change,)


def test_copies_ahead_of_time_need_pytorchs_loader_under_them(folder: Path) -> None:
    patch = patched(kept("loader", "elastic", "train.py:9"), kept("device_prefetch"))
    assert [change.name for change in patch.by_plan] == ["loader", "device_prefetch"]
    assert "flatout.DataLoader" not in after(patch)


def test_files_that_are_not_the_persons_or_have_changed_are_left_alone(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "train.py"
    shutil.copy(folder / "train.py", elsewhere)
    patch = patched(kept("pin_memory", True, f"{elsewhere}:9"), script=str(elsewhere))
    assert (patch.files, len(patch.unwritten)) == ({}, 1)


def test_the_files_are_edited_all_or_none(folder: Path) -> None:
    (folder / "config.py").write_text("LR = 1e-3\n")
    patch = patched(kept("gc_freeze"), kept("learning_rate", 0.1, knob="config.py:LR"))
    (folder / "config.py.orig").write_text("an older one")
    assert patch.write() == [Path("config.py.orig-1"), Path("train.py.orig")]
    assert (folder / "config.py").read_text() == "LR = 0.1\n"
    assert (folder / "config.py.orig").read_text() == "an older one"
    assert (folder / "train.py.orig").read_text() == TRAIN
    # GIVEN a second file that has changed meanwhile THEN the first one is as it was
    (folder / "config.py").write_text("LR = 1e-3\n")
    with pytest.raises(UsageError, match=r"nothing was edited: train\.py has changed"):
        patch.write()
    assert (folder / "config.py").read_text() == "LR = 1e-3\n"
    assert not (folder / "config.py.orig-2").exists()


def test_only_what_git_has_can_be_taken_back(folder: Path) -> None:
    def git(*words: str) -> None:
        name = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        subprocess.run(["git", *name, *words], check=True, capture_output=True)

    assert why_not_in_git() == "this folder is in no git repository"
    git("init")
    assert why_not_in_git() == ""
    assert "no copy of train.py" in why_not_in_git([Path("train.py")])
    git("add", "train.py")
    git("commit", "-m", "all")
    assert why_not_in_git([Path("train.py")]) == ""
    (folder / "train.py").write_text("")
    assert "no copy of train.py" in why_not_in_git([Path("train.py")])


def test_the_script_of_a_command(folder: Path) -> None:
    (folder / "pack").mkdir()
    for name in ("run.py", "__main__.py"):
        (folder / "pack" / name).touch()
    assert script_of(["python", "-u", "train.py", "other.py"]) == "train.py"
    assert script_of(["python", "-m", "pack.run"]) == "pack/run.py"
    assert script_of(["python", "-m", "pack"]) == "pack/__main__.py"
    assert script_of(["bash", "train.sh"]) == ""


def place_of(source: Path, call: Callable[[ast.Call], bool]) -> str:
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call) and call(node)]
    return f"{source}:{min(node.lineno for node in calls)}"


@pytest.mark.parametrize("name", ["captcha", "gray", "segment", "stock", "video"])
def test_the_patch_of_a_real_script_applies_and_compiles(folder: Path, name: str) -> None:
    shutil.copytree(WORKLOADS / name, folder / "workloads" / name)
    script = Path("workloads", name, "train.py")
    loader = place_of(script, lambda call: ast.unparse(call.func) == "DataLoader")
    optimizer = place_of(script, lambda call: ast.unparse(call.func) == "torch.optim.AdamW")
    model = place_of(script, lambda call: ast.unparse(call.func) == "model")
    made = [
        *(kept(change, value, loader) for change, value in (("loader", "elastic"), ("pin_memory", True))),
        *(kept(change, True, loader) for change in ("persistent_workers", "device_prefetch")),
        *(kept(change, value, loader) for change, value in (("num_workers", 8), ("prefetch_factor", 4))),
        kept("fused_optimizer", True, optimizer),
        kept("precision", "bf16", model),
        *(kept(change, value, model) for change, value in (("compile", "default"), ("cudnn_benchmark", True))),
        kept("batch_size", 64, knob="--batch-size"),
    ]
    patch = patched(*made, script=str(script), command=f"python {script}")
    (folder / "fix.diff").write_bytes(patch.diff())
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run(["git", "apply", "fix.diff"], check=True)
    py_compile.compile(str(script), cfile=str(folder / "compiled"), doraise=True)
    text = script.read_text()
    assert text.index("import flatout\nflatout.apply(") < text.index("import argparse")
    assert text.count("import flatout\n") == 1
    assert "fused=True" in text
    assert "torch.backends.cudnn.benchmark = True\n" in text
