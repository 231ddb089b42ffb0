"""flatout check on machines: memory, cards, heat, neighbours, a disk; and as a command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from preflight_cases import GIB, SCRIPTS, budget, card, line, look_over, machine
from rich.console import Console

from flatout import cli
from flatout.check import Checklist, DataFolder, inspect, read_folder
from flatout.check.checklist import FAIL, NOT_APPLICABLE, OK, WARN
from flatout.check.settings import Command
from flatout.check.study import open_study
from flatout.model.errors import UsageError
from flatout.report.checklist import show
from flatout.trace import GpuProcess

HEALTHY = SCRIPTS / "healthy.py"
CROPPED = """
from torch.utils.data import DataLoader
from torchvision import transforms
crop = transforms.RandomResizedCrop(224)
loader = DataLoader(train_set, 256, num_workers=8)
"""


def on(**changes: Any) -> Checklist:
    """The healthy script on a changed machine."""
    return look_over(HEALTHY, on=machine(**changes))


@pytest.mark.parametrize(("free_gib", "status"), [(8, OK), (2.5, WARN), (1, FAIL)])
def test_batches_that_wait_are_held_against_shared_memory(tmp_path: Path, free_gib: float, status: str) -> None:
    """8 workers × 2 batches × 256 × 3 × 224 × 224 × 4 bytes are 2.3 GiB."""
    script = tmp_path / "train.py"
    script.write_text(CROPPED)
    small = machine(budget=budget(shm_bytes=int(free_gib * GIB), shm_free_bytes=int(free_gib * GIB)))
    assert line(look_over(script, on=small), "shared memory").status == status


def test_a_containers_64_mib_are_warned_of_whatever_the_batch() -> None:
    found = line(on(budget=budget(shm_bytes=64 << 20, shm_free_bytes=64 << 20)), "shared memory")
    assert found.status == WARN
    assert "--shm-size" in (found.fix or "")


def test_too_little_memory_for_the_workers() -> None:
    found = line(on(budget=budget(memory_available_bytes=GIB)), "host memory")
    assert (found.status, found.code, found.fix) == (WARN, "memory.host", "num_workers=2")


def test_ranks_share_the_cores() -> None:
    found = line(on(budget=budget(cores=2, cores_allowed=4.0, ranks_on_node=4)), "workers")
    assert found.reason == "num_workers=8, but this process may use 4 cores (a rank's share of 4): 2 for loading"
    found = line(on(budget=budget(cores=1, cores_allowed=1.0)), "workers")
    assert found.reason == "num_workers=8, but this process may use 1 core: 1 for loading"


@pytest.mark.parametrize(
    ("command", "status", "fix"),
    [
        ({}, NOT_APPLICABLE, "torchrun --nproc-per-node 4 healthy.py"),
        ({"known": True}, WARN, "torchrun --nproc-per-node 4 healthy.py"),
        ({"known": True, "launcher": "torchrun", "ranks": 2}, WARN, "torchrun --nproc-per-node 4 healthy.py"),
        ({"known": True, "launcher": "torchrun", "ranks": 4}, OK, None),
    ],
)
def test_cards_against_ranks(command: dict[str, Any], status: str, fix: str | None) -> None:
    four = machine(gpus=tuple(card(index) for index in range(4)))
    found = line(look_over(HEALTHY, on=four, **command), "GPUs")
    assert (found.status, found.fix) == (status, fix)


def test_a_script_that_knows_one_card_leaves_the_others_idle(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "for epoch in range(3):\n    for x in loader:\n        model(x.cuda()).backward()\n        o.step()\n"
    )
    found = line(look_over(script, on=machine(gpus=(card(0), card(1)))), "GPUs")
    assert (found.status, found.code) == (WARN, "hardware.idle-gpus")
    assert "1 stands idle" in found.reason


def test_only_visible_cards_count() -> None:
    four = tuple(card(index) for index in range(4))
    assert line(on(gpus=four, environ={"CUDA_VISIBLE_DEVICES": "2"}), "GPUs").status == OK
    assert line(on(gpus=four, environ={"CUDA_VISIBLE_DEVICES": "GPU-3"}), "GPUs").status == OK
    assert line(on(gpus=four, environ={"CUDA_VISIBLE_DEVICES": ""}), "GPUs").status == FAIL


def test_a_neighbour_on_the_card() -> None:
    busy = card(processes=(GpuProcess(pid=77, name="python"),), memory_used_bytes=30 * GIB)
    found = line(on(gpus=(busy,)), "shared card")
    assert found.status == WARN
    assert "python (77), 30.0 GiB" in found.reason
    assert line(on(gpus=(card(memory_used_bytes=30 * GIB),)), "shared card").status == WARN
    assert line(on(gpus=(card(memory_used_bytes=GIB // 2),)), "shared card").status == OK


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"temperature_c": 45.0}, OK),
        ({"temperature_c": 82.0}, WARN),
        ({"temperature_c": 90.0}, FAIL),
        ({"temperature_c": 60.0, "throttle": ("heat (hardware slowdown)",)}, FAIL),
        ({"temperature_c": 60.0, "throttle": ("power cap",)}, OK),
        ({"temperature_c": None}, NOT_APPLICABLE),
    ],
)
def test_heat(changes: dict[str, Any], status: str) -> None:
    assert line(on(gpus=(card(**changes),)), "temperature").status == status


def test_an_old_card_is_not_told_to_use_bf16(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("for x in loader:\n    model(x.cuda()).backward()\n    o.step()\n")
    old = machine(gpus=(card(name="Tesla V100-SXM2-32GB"),))
    assert "GradScaler" in (line(look_over(script, on=old), "mixed precision").fix or "")


# ---------------------------------------------------------------- the disk


def folder(files_s: float) -> DataFolder:
    """A folder that was read so fast, in files of 100 kB."""
    return DataFolder(path="data", files=int(files_s * 2), read_bytes=int(files_s * 2e5), seconds=2.0, direct=True)


@pytest.mark.parametrize(("files_s", "status"), [(20_000, OK), (100, WARN)])
def test_a_disk_is_judged_in_batches(files_s: float, status: str) -> None:
    study = open_study(machine(), Command(script=HEALTHY), None)
    found = line(inspect(study, folder(files_s)), "disk")
    assert found.status == status
    assert f"{files_s / 128:.1f} batches of 128 a second" in found.reason


def test_reading_a_folder_counts_what_was_read(tmp_path: Path) -> None:
    for index in range(5):
        (tmp_path / f"{index}.bin").write_bytes(b"x" * (1000 + index))
    (tmp_path / "loop").symlink_to(tmp_path)
    found = read_folder(tmp_path)
    assert (found.files, found.read_bytes) == (5, 5010)


def test_reading_stops_when_the_time_is_over(tmp_path: Path) -> None:
    for index in range(50):
        (tmp_path / f"{index}.bin").write_bytes(b"x")
    ticks = iter(float(tick) for tick in range(100_000))
    found = read_folder(tmp_path, within_s=20.0, clock=lambda: next(ticks))
    assert 0 < found.files < 20


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="holds no files"):
        read_folder(tmp_path)


# ---------------------------------------------------------------- the command


def flatout_check(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the verb here; its exit code."""
    monkeypatch.setattr(sys, "argv", ["flatout", "check", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_exit_codes_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    warned = tmp_path / "train.py"
    warned.write_text("optimizer.zero_grad(set_to_none=False)\nmodel.cuda()\n")
    failed = ("--config", str(SCRIPTS / "asked.yaml"), str(SCRIPTS / "asked.py"))
    assert flatout_check(monkeypatch, str(warned)) == 0
    assert flatout_check(monkeypatch, str(warned), "--strict") == 1
    capsys.readouterr()
    assert flatout_check(monkeypatch, *failed, "--json", "-") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == 1
    assert data["counts"]["fail"] == 3
    assert {"subject", "status", "reason", "fix", "where", "code"} == set(data["lines"][0])


def test_flags_of_the_script_go_behind_two_dashes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flatout_check(monkeypatch, str(HEALTHY), "--json", "-", "--", "--num-workers", "4096")
    lines = {line["subject"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert "num_workers=4096, but" in lines["workers"]["reason"]


def test_a_shell_scripts_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start = tmp_path / "start.sh"
    start.write_text(f"torchrun --nproc_per_node=4096 {HEALTHY} --num-workers 4096\n")
    flatout_check(monkeypatch, str(start), "--json", "-")
    lines = {line["subject"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert "a rank's share of 4096" in lines["workers"]["reason"]
    assert lines["workers"]["where"].endswith("start.sh:1")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nowhere.py",), "no such file: nowhere.py"),
        ((".",), "is a folder"),
        (("--config", "nowhere.yaml"), "no such file: nowhere.yaml"),
        (("--data", "nowhere"), "is not a folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    assert flatout_check(monkeypatch, *arguments) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_the_terminal_shows_what_to_mend_first_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show(look_over(SCRIPTS / "asked.py", config=SCRIPTS / "asked.yaml"), Console(width=80, highlight=False))
    out = capsys.readouterr().out
    statuses = [row[:4].strip() for row in out.splitlines() if row[:4].strip() in (FAIL, WARN, OK, NOT_APPLICABLE)]
    assert statuses == sorted(statuses, key=[FAIL, WARN, OK, NOT_APPLICABLE].index)
    assert "→ train.amp: bf16" in out
    assert out.rstrip().splitlines()[-1].startswith("3 failed, 2 to look at")
    assert "\x1b" not in out
