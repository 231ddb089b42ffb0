"""The same five trainings in `flatout train`: each trains on its own data, with the script's own model and samples."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import ROOT, make

from benchmarks.quality import judged
from flatout.engine.assemble import assemble
from flatout.engine.config import load
from flatout.engine.ranks import Ranks

SMALL = {
    "gray": ["model.args.width=4", "train.batch_size=16"],
    "stock": ["model.args.root={data}", "model.args.hidden=8", "train.batch_size=64"],
    "segment": ["model.args.width=2"],
    "captcha": ["model.args.width=4", "train.batch_size=16"],
    "video": [
        "data.args.clip_frames=16", "data.args.crop=48", "model.args.crop=48", "model.args.chunk_frames=16",
        "model.args.dim=16", "model.args.depth=1", "model.args.heads=2",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "tiny"
        assert make(name, folder, "--size", "tiny").returncode == 0
        return folder

    return made


@pytest.mark.parametrize("name", SMALL)
def test_each_trains_and_validates(name: str, data: Callable[[str], Path], tmp_path: Path) -> None:
    root = data(name)
    overrides = [
        f"data.args.root={root}",
        f"out={tmp_path}",
        "train.device=cpu",
        "train.max_steps=3",
        "train.lr_rule=none",
    ]
    overrides += ["log.quiet=true", "data.workers=1", *(word.format(data=root) for word in SMALL[name])]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        config = load(ROOT / "workloads" / "after" / f"{name}.yaml", overrides)
        trainer = assemble(config, Ranks("cpu"))
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        results = trainer.fit()
    finally:
        torch.set_num_threads(threads)
    assert trainer.at.step == 3
    assert config.checkpoint.best in results
    assert all(value == value for value in results.values())
    changed = zip(before, trainer.model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in changed)


def test_a_window_of_stock_is_the_scripts_own(data: Callable[[str], Path]) -> None:
    from workloads.after import stock
    from workloads.stock.train import Windows

    after = stock.data(data("stock"), train=True)
    for index in (0, 7, len(after) - 1):
        for ours, theirs in zip(after[index], Windows.__getitem__(after, index), strict=True):
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


@pytest.mark.parametrize("name", SMALL)
def test_each_takes_the_scripts_own_settings(name: str) -> None:
    """Learning rate and batch are the script's; where the batch differs, the rate follows by the rule that is said."""
    config = load(ROOT / "workloads" / "after" / f"{name}.yaml")
    folder = ROOT / "workloads" / name
    text = "".join(path.read_text() for path in (folder / "train.py", *folder.glob("config.*"), *folder.glob("*.sh")))
    rate = config.optimizer.args["lr"]
    written = re.findall(r"(?:lr: |LR = |\"--lr\", type=float, default=)([\d.e-]+)", text)
    assert [float(number) for number in written] == [rate]
    batch = config.train.lr_batch or config.train.batch_size
    assert re.search(
        rf"(batch_size: |BATCH_SIZE = |--batch-size {batch}|\"--batch-size\", type=int, default={batch})", text
    )


def test_the_scripts_know_nothing_of_it() -> None:
    for path in (ROOT / "workloads").rglob("*.py"):
        if path.parent.name != "after" and path.name != "__init__.py":
            assert not re.search(r"^\s*(import|from) flatout", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "engine", "mark", "told"),
    [
        ("gray", (0.50, 0.62, 0.59), "✓", "apart +0.0200, spread 0.1200: equal"),
        ("gray", (0.72, 0.73, 0.74), "✓", "apart +0.1800, spread 0.1000: better"),
        ("captcha", (0.72, 0.73, 0.74), "✗", "apart +0.1800, spread 0.1000: worse"),  # an error
        ("gray", (0.42, 0.33, 0.34), "✗", "apart -0.1867, spread 0.1000: worse"),
        ("gray", (0.50, "failed: no such file", 0.59), "✗", "a training failed"),
    ],
)
def test_quality_is_the_same_within_the_spread_of_seeds(
    name: str, engine: tuple[float | str, ...], mark: str, told: str
) -> None:
    of = {"script": {0: 0.5, 1: 0.55, 2: 0.6}, "engine": dict(enumerate(engine))}
    line = judged(name, of)
    assert line.startswith(f"{mark} {name}: ")
    assert told in line
    assert (of["engine_is"] in ("worse", None)) is (mark == "✗")
