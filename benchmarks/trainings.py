"""Small honest trainings of many kinds, each with flags that do it harm: what a proof has to tell apart (proofs.py).

    python benchmarks/trainings.py NAME [--seed N] [--device cpu] [--lr TIMES] [--louder TIMES] [--no-decay] [--frozen]
                                        [--stale]

--lr       the learning rate, times so much
--louder   the loss, times so much; what is learned stays the same
--frozen   the first weights of the net are not stepped
--stale    every eighth step is taken back
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, STALE_EVERY = 4096, 8
Loss = Callable[..., Tensor]


def classes(*shape: int, kinds: int = 8, noise: float = 1.5) -> tuple[Tensor, Tensor]:
    """Samples around a centre for each class."""
    labels = torch.arange(SAMPLES) % kinds
    return torch.randn(kinds, *shape)[labels] + noise * torch.randn(SAMPLES, *shape), labels


def words(length: int, kinds: int = 32) -> Tensor:
    """Sequences in which each word makes a few others likely."""
    likely, rows = torch.randint(kinds, (kinds, 3)), [torch.randint(kinds, (SAMPLES,))]
    for _ in range(length):
        rows.append(likely[rows[-1], torch.randint(3, (SAMPLES,))])
    return torch.stack(rows, dim=1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(32, 48), nn.LSTM(48, 96, batch_first=True), nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.cell(self.words(x))[0]
        return self.head(hidden)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, 64), nn.Parameter(0.02 * torch.randn(24, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.body(self.words(x) + self.places[: x.shape[1]], mask=mask, is_causal=True))


class Guessing(nn.Module):
    """A variational autoencoder: it draws random numbers of its own in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).float().chunk(2, dim=1)
        made = self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp()).float()
        far = 0.5 * (spread.exp() + mean.square() - 1 - spread).sum(dim=1)
        return F.mse_loss(made, x, reduction="none").sum(dim=1) + far


class Factors(nn.Module):
    """Ratings from two tables, of whose rows a batch touches few."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(500, 16), nn.Embedding(300, 16)

    def forward(self, pair: Tensor) -> Tensor:
        return (self.left(pair[:, 0]) * self.right(pair[:, 1])).sum(dim=1)


def convolutions(norm: Callable[[int], nn.Module]) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), norm(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8))


def deep() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.ReLU(), nn.Linear(32, 32))]
    return nn.Sequential(nn.Linear(8, 32), *layers, nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))


def next_word(out: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(out[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())


def adamw(lr: float) -> Callable[..., Any]:
    return lambda weights, times, decay: torch.optim.AdamW(weights, lr=lr * times, weight_decay=0.1 * decay)


def sgd(lr: float) -> Callable[..., Any]:
    return lambda weights, times, decay: torch.optim.SGD(
        weights, lr=lr * times, momentum=0.9, weight_decay=5e-3 * decay
    )


def ratings() -> tuple[Tensor, Tensor]:
    pairs = torch.stack([torch.randint(500, (SAMPLES,)), torch.randint(300, (SAMPLES,))], dim=1)
    return pairs, (torch.randn(500, 4)[pairs[:, 0]] * torch.randn(300, 4)[pairs[:, 1]]).sum(dim=1)


def a_sum() -> tuple[Tensor, Tensor]:
    return (x := torch.randn(SAMPLES, 8)), x.sum(dim=1)


# name: data, net, loss of what comes out and the batch, optimizer, batches a step
TRAININGS: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module], Loss, Callable[..., Any], int]] = {
    "mlp": (
        lambda: classes(32),
        lambda: nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)),
        lambda out, _, y: F.cross_entropy(out.float(), y),
        adamw(1e-3),
        1,
    ),
    "cnn, batch norm, SGD": (
        lambda: classes(3, 16, 16, noise=4.0),
        lambda: convolutions(nn.BatchNorm2d),
        lambda out, _, y: F.cross_entropy(out.float(), y),
        sgd(0.05),
        1,
    ),
    "cnn, group norm, four batches a step": (
        lambda: classes(3, 16, 16, noise=4.0),
        lambda: convolutions(lambda channels: nn.GroupNorm(4, channels)),
        lambda out, _, y: F.cross_entropy(out.float(), y),
        adamw(2e-3),
        4,
    ),
    "deep regression": (a_sum, deep, lambda out, _, y: (out.float() - y).square().mean(), adamw(5e-3), 1),
    "LSTM": (lambda: (words(24),), Recurrent, next_word, adamw(3e-3), 1),
    "transformer, dropout": (lambda: (words(20),), Attentive, next_word, adamw(1e-3), 1),
    "autoencoder, draws": (lambda: classes(64)[:1], Guessing, lambda out, _: out.mean(), adamw(1e-3), 1),
    "factors": (ratings, Factors, lambda out, _, y: (out.float() - y).square().mean(), adamw(0.02), 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(TRAININGS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--louder", type=float, default=1.0)
    parser.add_argument("--no-decay", action="store_true")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--stale", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    data, net, loss_of, optimizer_of, parts = TRAININGS[options.name]
    loader = DataLoader(TensorDataset(*data()), batch_size=32, shuffle=True)
    model = net().to(options.device)
    optimizer = optimizer_of(model.parameters(), options.lr, 0.0 if options.no_decay else 1.0)
    endless: Iterator[list[Tensor]] = (batch for _ in itertools.count() for batch in loader)
    for step in itertools.count():
        optimizer.zero_grad()
        for _ in range(parts):
            batch = [tensor.to(options.device) for tensor in next(endless)]
            loss = loss_of(model(batch[0]), *batch) / parts
            (loss + (options.louder - 1) * loss.detach()).backward()
        kept = [weight.detach().clone() for weight in model.parameters()]
        if options.frozen:
            next(model.parameters()).grad = None
        optimizer.step()
        if options.stale and step % STALE_EVERY == 0:
            for weight, old in zip(model.parameters(), kept, strict=True):
                weight.data.copy_(old)


if __name__ == "__main__":
    main()
