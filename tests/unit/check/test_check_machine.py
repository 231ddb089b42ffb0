"""flatout check on machines: shared memory, ranks, GPUs, a disk; and as a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from check_cases import SCRIPTS, check_script, line_of, make_budget, make_gpu
from rich.console import Console

from flatout.check import FAIL, NOT_APPLICABLE, OK, WARN, visible_gpus
from flatout.diagnose.rank_metrics import metrics_of
from flatout.model.records import Facts
from flatout.report.terminal import show_checklist
from flatout.sample import budget
from flatout.trace import RankTrace, RunInfo, Trace

HEALTHY = SCRIPTS / "healthy.py"
FOUR = tuple(make_gpu(index) for index in range(4))
ONE_GPU = "for epoch in range(3):\n    for x in loader:\n        model(x.cuda()).backward()\n        o.step()\n"


def test_the_64_mib_of_a_container_are_too_little_shared_memory() -> None:
    small = make_budget(shm_bytes=64 << 20, shm_free_bytes=64 << 20)
    line = line_of(check_script(HEALTHY, budget=small), "shared memory")
    assert (line.status, line.code) == (WARN, "memory.host")
    assert "--shm-size" in (line.fix or "")
    assert "16 batches may wait in /dev/shm: each may be up to 4.0 MiB" in line.reason


def test_ranks_share_the_cores() -> None:
    shared = make_budget(cores=2, cores_allowed=4.0, ranks_on_node=4)
    line = line_of(check_script(HEALTHY, budget=shared), "workers")
    assert line.reason == "num_workers=8, but this process may use 4 cores (a rank's share of 4): 2 for loading"
    line = line_of(check_script(HEALTHY, budget=make_budget(cores=1, cores_allowed=1.0)), "workers")
    assert line.reason == "num_workers=8, but this process may use 1 core: 1 for loading"


@pytest.mark.parametrize("allowed", [1, 2, 4, 16, 192])
def test_check_run_and_doctor_count_the_same_cores_for_loading(tmp_path: Path, allowed: int) -> None:
    cpuinfo = tmp_path / "proc/cpuinfo"
    cpuinfo.parent.mkdir()
    cpuinfo.write_text("".join(f"processor\t: {number}\n" for number in range(allowed)))
    measured = budget.measure(tmp_path, {}, affinity=allowed)
    rank = RankTrace(info=RunInfo(name="train", host="node"), facts=Facts(cores_allowed=float(allowed)))
    trace = Trace(ranks=(rank,), samples={})
    assert metrics_of(trace)[0].machine.spare_cores == measured.cores
    too_many = check_script(HEALTHY, "--num-workers", "1000", budget=measured)
    assert line_of(too_many, "workers").fix == f"--num-workers {measured.cores}"


def test_gpus_that_a_script_does_not_use(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ONE_GPU)
    line = line_of(check_script(script, gpus=FOUR[:2]), "GPUs")
    assert (line.status, line.code) == (WARN, "hardware.idle-gpus")
    assert f"torchrun --nproc-per-node 2 {script}" in (line.fix or "")
    assert line_of(check_script(script), "GPUs").status == OK
    assert line_of(check_script(HEALTHY, gpus=FOUR), "GPUs").status == NOT_APPLICABLE  # it has DistributedDataParallel
    script.write_text(ONE_GPU.replace(".cuda()", ""))
    line = line_of(check_script(script), "GPUs")
    assert (line.status, line.where) == (WARN, f"{script}:2")


def test_only_visible_gpus_count() -> None:
    assert visible_gpus(FOUR, {}) == FOUR
    assert visible_gpus(FOUR, {"CUDA_VISIBLE_DEVICES": "2"}) == (FOUR[2],)
    assert visible_gpus(FOUR, {"CUDA_VISIBLE_DEVICES": "GPU-3"}) == (FOUR[3],)
    assert line_of(check_script(HEALTHY, gpus=visible_gpus(FOUR, {"CUDA_VISIBLE_DEVICES": ""})), "GPUs").status == FAIL


# ---------------------------------------------------------------- the command


def test_exit_codes_and_json(flatout_says: Callable[..., Any], tmp_path: Path) -> None:
    warned = tmp_path / "train.py"
    warned.write_text(ONE_GPU)
    failed = ("--config", SCRIPTS / "asked.yaml", SCRIPTS / "asked.py")
    assert flatout_says("check", warned)[0] == 0
    assert flatout_says("check", warned, "--strict")[0] == 1
    code, out, _ = flatout_says("check", *failed, "--json", "-")
    data = json.loads(out)
    assert (code, data["schema"], data["counts"]["fail"]) == (1, 1, 3)
    assert {"subject", "status", "reason", "fix", "where", "code"} == set(data["lines"][0])


def test_the_scripts_flags_go_behind_two_dashes(flatout_says: Callable[..., Any]) -> None:
    _, out, _ = flatout_says("check", HEALTHY, "--json", "-", "--", "--num-workers", "4096")
    lines = {line["subject"]: line for line in json.loads(out)["lines"]}
    assert "num_workers=4096, but" in lines["workers"]["reason"]
    assert lines["workers"]["where"] == "the command line"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nowhere.py",), "no such file: nowhere.py"),
        ((".",), "is no Python script"),
        (("train.sh",), "the script's flags after --"),
        (("--config", "nowhere.yaml"), "no such file: nowhere.yaml"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    flatout_says: Callable[..., Any], arguments: tuple[str, ...], complaint: str
) -> None:
    code, out, err = flatout_says("check", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert complaint in err


@pytest.mark.parametrize("all_lines", [False, True])
def test_the_terminal_shows_what_to_fix_first_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, all_lines: bool
) -> None:
    monkeypatch.chdir(SCRIPTS)  # no line is as short as the path of a checkout may be long
    checklist = check_script(Path("asked.py"), config=Path("asked.yaml"))
    show_checklist(checklist, Console(width=80, highlight=False), all_lines=all_lines)
    out = capsys.readouterr().out
    statuses = [row[:4].strip() for row in out.splitlines() if row[:4].strip() in (FAIL, WARN, OK, NOT_APPLICABLE)]
    assert statuses == sorted(statuses, key=[FAIL, WARN, OK, NOT_APPLICABLE].index)
    assert (NOT_APPLICABLE in statuses) is all_lines
    assert "→ train.amp: bf16" in out
    assert out.rstrip().splitlines()[-1].startswith("3 failed, ")
    assert ("--all" in out) is not all_lines
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines() if str(SCRIPTS) not in line) <= 80  # a path is as long as it is
