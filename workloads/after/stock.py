"""Data and model of `stock`, and how it is judged."""

from pathlib import Path

import torch

from workloads.making import require
from workloads.stock.train import WINDOW, Forecast, Windows, rank_correlation, read_stock


class Slices(Windows):
    """The same windows, each taken in one go instead of day by day."""

    def __getitem__(self, index):
        stock, day = self.windows[index]
        window = self.features[stock][day - WINDOW + 1 : day + 1]
        return torch.from_numpy((window - self.means[stock]) / self.stds[stock]), stock, self.returns[stock][day]


def data(root, train):
    facts = require(root, "stock")
    stocks = [read_stock(path) for path in sorted(Path(root).glob("*.parquet"))]
    history = facts["days"] - facts["val_days"]
    return Slices(stocks, 0, history, history) if train else Slices(stocks, history, facts["days"], history)


def forecast(root, **arguments):
    facts = require(root, "stock")
    return Forecast(facts["stocks"], facts["features"], **arguments)


class RankCorrelation:
    def reset(self):
        self.forecasts, self.truths = [], []

    def update(self, output, target):
        self.forecasts.append(output)
        self.truths.append(target)

    def compute(self):
        return rank_correlation(torch.cat(self.forecasts).cpu(), torch.cat(self.truths).cpu())
