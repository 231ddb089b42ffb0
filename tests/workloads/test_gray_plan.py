"""A plan applied to a workload as it stands: two ranks, values by their flags, loader, model and optimizer changed."""

from __future__ import annotations

from pathlib import Path

from running import run

from flatout import trace
from flatout.model.plan import Change, Plan

CHANGES = (
    Change(name="loader", value="elastic", safety="reseeded"),
    Change(name="precision", value="bf16", safety="equivalent"),
    Change(name="channels_last", value=True, safety="equivalent"),
    Change(name="fused_optimizer", value=True, safety="equivalent"),
    Change(name="gc_freeze", value=True, safety="identical"),
    Change(name="batch_size", value=16, safety="semantic", knob="--batch-size"),
    Change(name="num_workers", value=1, safety="reseeded", knob="--num-workers"),
)


def test_every_change_is_made_in_every_rank_of_gray(gray_data: Path, tmp_path: Path) -> None:
    Plan(changes=CHANGES).save(tmp_path / "plan.yaml")
    flags = ("--data", gray_data, "--out", "run", "--width", "8", "--device", "cpu", "--max-steps", "6")
    ended = run(
        *("python", "-m", "flatout", "run", "--plan", "plan.yaml", "--trace", "trace", "--no-xray", "--quiet", "--"),
        *("torchrun", "--nproc-per-node", "2", "-m", "workloads.gray.train", *flags),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    ranks = trace.read(tmp_path / "trace").ranks
    assert len(ranks) == 2
    for rank in ranks:
        assert {entry.name: entry.applied for entry in rank.facts.changes} == {c.name: True for c in CHANGES}
        assert (rank.facts.autocast, rank.facts.channels_last) == (("bfloat16",), True)
        assert {(loader.batch_size, loader.num_workers) for loader in rank.facts.loaders} == {(16, 1)}
        assert sum(step.samples or 0 for step in rank.steps) == 6 * 16
