"""Makes the data of `stock`: one parquet file a stock, a row a day, 32 features and the next day's return.

A hidden trend, slow to change, drives the next return. Some features show it through heavy noise, some only follow
the price, some are of no use; each stock has its own scales. A model does well by looking back over many days.
"""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from workloads.making import Recipe, main

FEATURES = 32
HINTS = 6  # features that show the trend
SPANS = (2, 3, 5, 8, 12, 20, 30, 45)  # days of the moving averages
MEMORY = 0.96  # how much of the trend is left after a day


def recipe(stocks: int, days: int, val_days: int) -> Recipe:
    facts = {"stocks": stocks, "days": days, "val_days": val_days, "features": FEATURES}
    return Recipe(items=stocks, bytes_each=200 * days + 10_000, facts=facts)


RECIPES = {"tiny": recipe(8, 150, 30), "small": recipe(24, 420, 60), "full": recipe(480, 1_600, 150)}


def paths(recipe: Recipe, index: int) -> list[str]:
    return [f"{index:04d}.parquet"]


def make(recipe: Recipe, rng: np.random.Generator, index: int) -> list[bytes]:
    """The history of one stock."""
    days = recipe.facts["days"]
    trend = decaying(rng.normal(0, np.sqrt(1 - MEMORY**2), days), MEMORY)
    strength = rng.uniform(0.5, 0.8)
    returns = strength * trend + np.sqrt(1 - strength**2) * rng.normal(size=days)  # of the day after
    past = np.concatenate([[0.0], returns[:-1]])
    hints = [trend + rng.normal(0, 1.5, days) for _ in range(HINTS)]
    averages = [decaying(values / span, 1 - 1 / span) for values in (past, np.abs(past)) for span in SPANS]
    noise = [rng.normal(size=days) for _ in range(FEATURES - HINTS - len(averages))]

    columns = {"day": pa.array(np.arange(days, dtype=np.int32))}
    for number, values in enumerate([*hints, *averages, *noise]):
        scaled = 10 ** rng.uniform(-2, 2) * (values + rng.normal())
        columns[f"f{number:02d}"] = pa.array(scaled.astype(np.float32))
    columns["next_return"] = pa.array(returns.astype(np.float32))
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return [file.getvalue()]


def decaying(values: np.ndarray, keep: float) -> np.ndarray:
    """Each day what came, and `keep` of the day before."""
    out = np.empty_like(values)
    held = 0.0
    for day, value in enumerate(values):
        held = keep * held + value
        out[day] = held
    return out


if __name__ == "__main__":
    main("stock", RECIPES, paths, make)
