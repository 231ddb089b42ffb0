"""Reads asked.yaml, and hears little of it. It is read by flatout check, never run."""

from pathlib import Path

import torch
import yaml
from easydict import EasyDict
from images import Pictures
from torch import nn
from torch.utils.data import DataLoader

cfg = yaml.safe_load(Path("asked.yaml").read_text())
cfg = EasyDict(cfg)
print(f"compile {cfg.train.compile}, tf32 {cfg.train.tf32}")
model = nn.LSTM(32, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=cfg.train.lr)
loader = DataLoader(
    Pictures("train"), batch_size=cfg["data"]["batch_size"], num_workers=cfg.data.num_workers, pin_memory=True
)
use_amp = cfg.train.amp == "bf16"
for _epoch in range(cfg.train.epochs):
    for batch in loader:
        with torch.autocast("cuda", torch.bfloat16, enabled=use_amp):
            loss = model(batch.cuda(non_blocking=True))[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
