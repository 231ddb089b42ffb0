"""Train an LSTM to foretell the next day's return of a stock from the last 60 days.

bash workloads/stock/train.sh --data data/stock
torchrun --nproc-per-node 2 -m workloads.stock.train --data data/stock
"""

import argparse
import itertools
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

sys.path.append(str(Path(__file__).resolve().parents[2]))
from workloads.making import Refused, clear_errors, require

WINDOW = 60  # days


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/stock")
    parser.add_argument("--out", default="runs/stock")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--max-steps", type=int, default=None)
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--embedding", type=int, default=64, help="numbers that stand for a stock")
    parser.add_argument("--amp", choices=["off", "bf16"], default="off", help="on a GPU")
    parser.add_argument("--num-workers", type=int, default=4)
    parser.add_argument("--prefetch", type=int, default=2, help="batches each worker loads ahead")
    parser.add_argument("--persistent-workers", action="store_true")
    parser.add_argument("--pin-memory", action="store_true")
    parser.add_argument("--log-every", type=int, default=100, help="steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resident", action="store_true", help="train on a few batches kept on the device")
    return parser.parse_args()


def read_stock(path):
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise Refused(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    features = [table[name].to_numpy() for name in table.column_names if name.startswith("f")]
    return np.stack(features, axis=1), table["next_return"].to_numpy()


class Windows(Dataset):
    """The last 60 days of a stock, the stock's number, the return of the day after."""

    def __init__(self, stocks, first_day, last_day, history):
        self.features, self.returns, self.means, self.stds = [], [], [], []
        self.windows = []
        for stock, (features, returns) in enumerate(stocks):
            self.features.append(features)
            self.returns.append(returns)
            self.means.append(features[:history].mean(axis=0))
            self.stds.append(features[:history].std(axis=0))
            for day in range(max(first_day, WINDOW - 1), last_day):
                self.windows.append((stock, day))

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        stock, day = self.windows[index]
        rows = []
        for past in range(day - WINDOW + 1, day + 1):
            rows.append(self.features[stock][past] - self.means[stock])
        return torch.from_numpy(np.stack(rows) / self.stds[stock]), stock, self.returns[stock][day]


class Forecast(nn.Module):
    def __init__(self, stocks, features, hidden, layers, embedding):
        super().__init__()
        self.embedding = nn.Embedding(stocks, embedding)
        self.lstm = nn.LSTM(features + embedding, hidden, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(hidden, 1)

    def forward(self, windows, stocks):
        which = self.embedding(stocks).unsqueeze(1).expand(-1, windows.shape[1], -1)
        outputs, _ = self.lstm(torch.cat([windows, which], dim=2))
        return self.head(outputs[:, -1]).squeeze(1)


def rank_correlation(a, b):
    ranks = torch.stack([a.argsort().argsort(), b.argsort().argsort()]).double()
    return torch.corrcoef(ranks)[0, 1].item()


@torch.no_grad()
def evaluate(model, loader, device, amp):
    model.eval()
    forecasts, truths = [], []
    for windows, stocks, returns in loader:
        windows, stocks = windows.to(device, non_blocking=True), stocks.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            forecasts.append(model(windows, stocks).float())
        truths.append(returns)
    model.train()
    forecasts, truths = torch.cat(forecasts).cpu(), torch.cat(truths)
    right = ((forecasts > 0) == (truths > 0)).float().mean().item()
    return rank_correlation(forecasts, truths), right


def main():
    args = parse_args()
    manifest = require(args.data, "stock")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise Refused("--device cuda: no GPU here that torch can use")

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device)
    if world > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    amp = args.amp == "bf16" and device.type == "cuda"
    torch.manual_seed(args.seed)

    stocks = [read_stock(path) for path in sorted(Path(args.data).glob("*.parquet"))]
    history = manifest["days"] - manifest["val_days"]
    train_set = Windows(stocks, 0, history, history)
    val_set = Windows(stocks, history, manifest["days"], history)
    if args.batch_size * world > len(train_set):
        raise Refused(f"--batch-size {args.batch_size} x {world} is more than the {len(train_set)} training windows")
    sampler = DistributedSampler(train_set, seed=args.seed) if world > 1 else None
    options = {
        "batch_size": args.batch_size,
        "num_workers": args.num_workers,
        "pin_memory": args.pin_memory and device.type == "cuda",
        "persistent_workers": args.persistent_workers and args.num_workers > 0,
        "prefetch_factor": args.prefetch if args.num_workers > 0 else None,
    }
    train_loader = DataLoader(train_set, shuffle=sampler is None, sampler=sampler, drop_last=True, **options)
    val_loader = DataLoader(val_set, **options)

    net = Forecast(len(stocks), manifest["features"], args.hidden, args.layers, args.embedding).to(device)
    model = net
    if world > 1:
        model = nn.parallel.DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)

    def to_device(batch):
        return [tensor.to(device, non_blocking=True) for tensor in batch]

    if args.resident:
        resident = [to_device(batch) for batch in itertools.islice(train_loader, 4)]

    step, last = 0, min(args.max_steps or math.inf, args.epochs * len(train_loader))
    logged_step, logged_at = 0, time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        if sampler is not None:
            sampler.set_epoch(epoch)
        batches = itertools.islice(itertools.cycle(resident), len(train_loader)) if args.resident else train_loader
        for batch in batches:
            windows, which, returns = to_device(batch)
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                forecast = model(windows, which)
            loss = F.mse_loss(forecast.float(), returns)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % args.log_every == 0 and rank == 0:
                loss, now = loss.item(), time.perf_counter()
                speed = (step - logged_step) * args.batch_size * world / (now - logged_at)
                logged_step, logged_at = step, now
                print(f"epoch {epoch}  step {step}  loss {loss:.4f}  {speed:.0f} samples/s", flush=True)
            if step == last:
                break
        if not args.resident and rank == 0:
            correlation, right = evaluate(net, val_loader, device, amp)
            print(f"epoch {epoch}  val rank correlation {correlation:.4f}  direction {right:.4f}", flush=True)
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, out / "last.pt")
        if world > 1:
            dist.barrier()
        if step == last:
            break
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    with clear_errors():
        main()
