"""What a run costs: time, the GPUs' energy, money where an hour has a price; and tokens a second."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.diagnose.rank_metrics import RankMetrics, is_gpu_of
from flatout.model.formatting import duration, in_full
from flatout.trace import Sketch


@dataclass(frozen=True, slots=True)
class Price:
    """What an hour costs: 2.5/h, $2.5/h, 2.5EUR/h."""

    an_hour: float
    sign: str = ""
    sign_first: bool = False

    @classmethod
    def of(cls, text: str) -> Price:
        """As a person writes it; ValueError where that is no price."""
        sign = r"([A-Za-z]{1,4}|[$€£¥₹₩])?"
        match = re.fullmatch(rf"{sign}\s*(\d+(?:\.\d+)?)\s*{sign}\s*(?:/\s*h)?", text.strip())
        if match is None or (match[1] and match[3]):
            raise ValueError(f"{text} is no price an hour")
        return cls(float(match[2]), match[1] or match[3] or "", bool(match[1]))

    def text(self, amount: float) -> str:
        """An amount of money, with its sign."""
        if self.sign_first:
            return f"{self.sign}{in_full(amount)}"
        return f"{in_full(amount)} {self.sign or 'in the currency of --price'}"

    def of_time(self, seconds: float) -> float:
        """What so much time costs."""
        return seconds / 3600 * self.an_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """What one run has cost so far, and what an epoch of it does; None where that is not known."""

    seconds: float
    epoch_s: float | None = None
    power_w: float | None = None  # of all its GPUs, on the mean of the run
    tokens_per_s: float | None = None  # of rank 0, as samples a second
    padding: float | None = None  # share of them
    price: Price | None = None

    def figures(self) -> list[tuple[str, str, str]]:
        """Name, value and remark of each that is known."""
        rows = []
        if self.tokens_per_s is not None:
            remark = f"{self.padding:.0%} of them padding" if self.padding is not None else ""
            rows.append(("tokens a second", in_full(self.tokens_per_s), remark))
        if self.power_w is not None:
            rows.append(("energy", _energy(self._wh(self.seconds)), self._of_epoch(_energy, self._wh)))
        if self.price is not None:
            costs = self.price.text(self.price.of_time(self.seconds))
            rows.append(("cost", costs, self._of_epoch(self.price.text, self.price.of_time)))
        return rows

    def to_json(self) -> dict[str, Any]:
        """The documented JSON."""
        data: dict[str, Any] = {"seconds": self.seconds, "epoch_s": self.epoch_s, "tokens_per_s": self.tokens_per_s}
        if self.power_w is not None:
            data |= _both("energy_wh", self._wh, self.seconds, self.epoch_s)
        if self.price is not None:
            data |= _both("money", self.price.of_time, self.seconds, self.epoch_s)
            data["currency"] = self.price.sign or None
        return data

    def _wh(self, seconds: float) -> float:
        return seconds / 3600 * (self.power_w or 0.0)

    def _of_epoch(self, text: Callable[[float], str], amount: Callable[[float], float]) -> str:
        if self.epoch_s is None:
            return f"of {duration(1e3 * self.seconds)}"
        return f"{text(amount(self.epoch_s))} an epoch of {duration(1e3 * self.epoch_s)}"


def costs_of(metrics: Sequence[RankMetrics], ranks: int, price: Price | None = None) -> RunCosts:
    """The costs of a run with so many ranks, of which some were read. An epoch counts its pauses."""
    first = metrics[0]
    seen, steps_an_epoch, tokens = first.breakdown, first.steps_an_epoch, first.loader.tokens
    powers = [power for one in metrics if (power := _power_w(one)) is not None]
    epoch_s = None
    if steps_an_epoch and seen.steps:
        epoch_s = steps_an_epoch * seen.training_ms / seen.steps / 1e3
    return RunCosts(
        seconds=seen.wall_ms / 1e3,
        epoch_s=epoch_s,
        power_w=sum(powers) / len(powers) * ranks if powers else None,
        tokens_per_s=seen.samples_per_s * tokens.a_sample if tokens is not None and seen.samples_per_s else None,
        padding=tokens.padding if tokens is not None else None,
        price=price,
    )


def _power_w(metrics: RankMetrics) -> float | None:
    """The mean power of a rank's GPU over the whole run."""
    samples = metrics.trace.samples.get(metrics.rank.info.host, ())
    return Sketch.of(gpu.power_w for s in samples for gpu in s.gpus if is_gpu_of(metrics.rank, gpu)).mean


def _energy(wh: float) -> str:
    return f"{in_full(wh)} Wh" if wh < 1000 else f"{in_full(wh / 1000)} kWh"


def _both(name: str, amount: Callable[[float], float], run_s: float, epoch_s: float | None) -> dict[str, float | None]:
    """An amount of the run, and of an epoch where its time is known."""
    return {name: amount(run_s), f"epoch_{name}": amount(epoch_s) if epoch_s is not None else None}
