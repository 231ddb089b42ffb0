"""stock, end to end on a CPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from running import ROOT, files, losses, make, run

from workloads.stock import make as maker
from workloads.stock import train as stock

SMALL = ("--hidden", "16", "--embedding", "4", "--device", "cpu")


def test_the_seed_decides_every_byte(stock_data: Path, tmp_path: Path) -> None:
    assert make("stock", tmp_path / "same", "--size", "tiny", "--workers", "1").returncode == 0
    assert files(tmp_path / "same") == files(stock_data)


def test_a_window_ends_on_the_day_before_the_return_it_foretells(stock_data: Path) -> None:
    features, returns = stock.read_stock(stock_data / "0003.parquet")
    stocks = [stock.read_stock(path) for path in sorted(stock_data.glob("*.parquet"))]
    windows = stock.Windows(stocks, 120, 150, history=120)
    window, which, target = windows[3 * 30 + 5]
    assert (which, target) == (3, returns[125])
    mean, std = features[:120].mean(axis=0), features[:120].std(axis=0)
    np.testing.assert_allclose(window.numpy(), (features[66:126] - mean) / std, rtol=1e-6)
    assert window.shape == (stock.WINDOW, maker.FEATURES)


def test_the_shell_script_learns_and_saves_what_it_learned(stock_data: Path, tmp_path: Path) -> None:
    # GIVEN the nightly script, with flags after its own that win
    flags = ("--data", stock_data, "--out", "run", "--epochs", "6", "--batch-size", "32", "--num-workers", "1")
    more = ("--lr", "5e-3", "--log-every", "1", *SMALL)
    ended = run("bash", ROOT / "workloads" / "stock" / "train.sh", *flags, *more, cwd=tmp_path)

    # THEN the loss falls, the forecast is clearly better than none, and the checkpoint holds the network
    assert ended.returncode == 0, ended.stderr
    seen = losses(ended.stdout)
    assert sum(seen[-15:]) < 0.85 * sum(seen[:15])
    correlations = [float(number) for number in re.findall(r"val rank correlation (\S+)", ended.stdout)]
    assert len(correlations) == 6
    assert max(correlations) > 0.2
    saved = torch.load(tmp_path / "run" / "last.pt")
    stock.Forecast(8, maker.FEATURES, hidden=16, layers=3, embedding=4).load_state_dict(saved["model"])


def test_resident_training_loads_a_few_batches_and_no_more(
    stock_data: Path, tmp_path: Path, train: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    original = stock.Windows.__getitem__
    monkeypatch.setattr(stock.Windows, "__getitem__", lambda self, i: (loaded.append(i), original(self, i))[1])
    flags = ("--data", stock_data, *SMALL, "--num-workers", "0", "--batch-size", "8", "--max-steps", "10")
    log = train(stock, *flags, "--resident", "--log-every", "10")
    assert len(loaded) == 4 * 8
    assert len(losses(log)) == 1
    assert not (tmp_path / "run" / "last.pt").exists()


def test_rank_correlation_looks_at_the_order_only() -> None:
    values = torch.tensor([0.1, 3.0, 2.0, -5.0])
    assert stock.rank_correlation(values, values.exp()) == pytest.approx(1)
    assert stock.rank_correlation(values, -values) == pytest.approx(-1)


def test_refuses_what_cannot_work(
    gray_data: Path, stock_data: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    assert "python -m workloads.stock.make" in refusal(stock, "--data", tmp_path / "none")
    assert "holds the data of gray" in refusal(stock, "--data", gray_data)
    too_many = refusal(stock, "--data", stock_data, *SMALL, "--batch-size", "489")
    assert too_many == "--batch-size 489 x 1 is more than the 488 training windows"
    shutil.copytree(stock_data, tmp_path / "cut")
    victim = tmp_path / "cut" / "0005.parquet"
    victim.write_bytes(victim.read_bytes()[:9000])
    assert refusal(stock, "--data", tmp_path / "cut", *SMALL).startswith(f"{victim} cannot be read: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_refuses_a_gpu_that_is_not_there(stock_data: Path, refusal: Callable[..., str]) -> None:
    assert "no GPU" in refusal(stock, "--data", stock_data, "--device", "cuda")
