"""benchmarks/workloads.py, end to end on gray at its smallest."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from running import ROOT, run

from benchmarks import timed, workloads
from benchmarks.mended import MENDED, Edit
from flatout.trace import GpuSample, HostSample, Sample


def test_measures_every_variant_and_leaves_no_process_behind(gray_data: Path, tmp_path: Path) -> None:
    # GIVEN the data where the benchmark looks for it, and a file with the figures of another workload
    (tmp_path / "gray-tiny").symlink_to(gray_data)
    out = tmp_path / "results.json"
    out.write_text(json.dumps({"machine": workloads.machine(), "workloads": {"stock": {"kept": True}}}))

    # WHEN gray is measured over short windows
    flags = ("--data", tmp_path, "--size", "tiny", "--out", out, "--seconds", "0.6", "--device", "cpu")
    ended = run(
        "python", ROOT / "benchmarks" / "workloads.py", "gray", *flags, "--", "--width", "4", "--batch-size", "16"
    )

    # THEN each variant has its figures, and they hang together
    assert ended.returncode == 0, ended.stderr
    results = json.loads(out.read_text())
    assert results["workloads"]["stock"] == {"kept": True}
    gray = results["workloads"]["gray"]
    variants = gray["variants"]
    assert list(variants) == ["before", "mended", "before ceiling", "mended ceiling", "supply"]
    for figures in variants.values():
        assert figures["samples_per_s"] == pytest.approx(figures["samples"] / figures["window_s"])
        if "steps" in figures:
            assert figures["samples"] == 16 * figures["steps"]
    assert variants["before"]["epochs_begun"] >= 1  # so its evaluation was in the window …
    assert variants["before"]["pause_share"] > 0  # … and seen
    assert variants["before"]["data_wait_share"] > 0
    assert variants["before ceiling"]["data_wait_share"] == 0
    speed = {name: figures["samples_per_s"] for name, figures in variants.items()}
    assert gray["ratios"]["before / mended"] == pytest.approx(speed["before"] / speed["mended"])
    assert "before / mended" in ended.stdout
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def test_in_turns_a_run_is_compared_with_itself_fed_from_the_device(gray_data: Path, tmp_path: Path) -> None:
    (tmp_path / "gray-tiny").symlink_to(gray_data)
    out = tmp_path / "results.json"
    flags = ("--data", tmp_path, "--size", "tiny", "--out", out, "--seconds", "1.2", "--device", "cpu", "--no-script")
    wishes = ("--in-turns", "--auto", "--stock", "--num-workers 1")
    words = ("gray", *flags, *wishes, "--", "--width", "4", "--batch-size", "16")
    ended = run("python", ROOT / "benchmarks" / "workloads.py", *words)
    assert ended.returncode == 0, ended.stderr
    gray = json.loads(out.read_text())["workloads"]["gray"]
    assert list(gray["variants"]) == ["auto", "auto ceiling", "auto supply", "stock's loader", "auto in turns"]
    speeds = {name: figures["samples_per_s"] for name, figures in gray["variants"].items()}
    assert gray["ratios"]["auto / stock's loader"] == speeds["auto"] / speeds["stock's loader"]
    figures = gray["variants"]["auto in turns"]
    fed, beside, resident = (figures["turns"][turn] for turn in ("fed", "beside", "resident"))
    assert figures["shares"] == [one / other for one, other in zip(fed, resident, strict=True)] != []
    assert figures["shares_beside"] == [one / other for one, other in zip(fed, beside, strict=True)]
    assert gray["ratios"]["auto / its ceiling, in turns"] > 0
    assert len(figures["made_beside"]) == len(beside)
    assert all(0 < made < 2 * max(fed) for made in figures["made_beside"])
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def test_a_variant_that_fails_is_told_with_its_own_words(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    flags = ("--data", tmp_path, "--size", "tiny", "--out", out, "--device", "cpu")
    ended = run("python", ROOT / "benchmarks" / "workloads.py", "gray", *flags, "--", "--batch-size", "1000")
    assert ended.returncode == 1
    assert "--batch-size 1000 x 1 is more than the 192 training images" in ended.stderr
    assert not out.exists()


def test_figures_of_two_machines_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    out.write_text(json.dumps({"machine": {"gpu": "another"}, "workloads": {}}))
    with pytest.raises(SystemExit, match="figures of another machine"):
        workloads.load(out)


def test_an_edit_lands_in_a_copy_only() -> None:
    train = Path("workloads", "gray", "train.py")
    original = (ROOT / train).read_text()
    edit = Edit("", "train.py", "F.cross_entropy(model(images), labels)", "model(images).sum()")
    with workloads.copied([("gray", edit)]) as root:
        assert "model(images).sum()" in (root / train).read_text()
    assert (ROOT / train).read_text() == original


def test_an_edit_that_no_longer_fits_is_an_error() -> None:
    edits = workloads.copied([("gray", Edit("", "train.py", "no such text", ""))])
    with pytest.raises(workloads.Failed, match=r"train.py holds 'no such text' 0 times"), edits:
        pass


@pytest.mark.parametrize("name", MENDED)
def test_every_edit_of_the_table_fits_its_workload(name: str) -> None:
    with workloads.copied([(name, mend) for mend in MENDED[name] if isinstance(mend, Edit)]):
        pass


def test_what_was_importable_from_here_stays_importable_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "src:.")
    assert workloads.environment(ROOT)["PYTHONPATH"] == f"{ROOT}:{tmp_path}/src:{tmp_path}"


def test_hardware_counts_only_inside_the_window() -> None:
    def sample(time_s: float, power_w: float | None) -> Sample:
        gpu = GpuSample(index=0, uuid="", name="", power_w=power_w)
        return Sample(time_s=time_s, interval_s=0.5, host=HostSample(cpu_pct=50.0), gpus=(gpu,))

    samples = [sample(0.9, 100), sample(1.2, 200), sample(1.5, 300), sample(2.0, 500), sample(2.1, 900)]
    figures = {"start_s": 1.0, "end_s": 2.0, "samples": 8, "step_ms": [10.0, 20.0, 30.0]}
    summed = workloads.summary(figures, samples)
    assert summed["power_w"] == 400  # 1.2 looks back to before the window opened
    assert summed["sm_active_pct"] is None
    assert summed["step_ms_median"] == 20


def test_samples_are_counted_in_any_kind_of_batch() -> None:
    images = torch.zeros(3, 2)
    assert timed.samples_in(images) == 3
    assert timed.samples_in([images, "names"]) == 3
    assert timed.samples_in({"image": (images, 1)}) == 3
