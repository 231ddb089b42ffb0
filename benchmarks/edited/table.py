"""A small training on rows of a table, for edits.py: gradients of two batches are added up, samples are weighted."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

device, amp = os.environ.get("DEVICE", "cpu"), "AMP" in os.environ
torch.manual_seed(0)
torch.set_num_threads(1)


class Rows(Dataset):
    def __init__(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        self.values = torch.randn(count, 20, generator=draw) * torch.linspace(1, 30, 20)
        self.targets = (self.values[:, :3].sum(1) + torch.randn(count, generator=draw) > 0).float()
        self.scaled = self.values / torch.arange(1, 21)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        row = [value / scale for scale, value in enumerate(self.values[index].tolist(), 1)]
        return torch.tensor(row), self.targets[index]


rows = Rows(1024, 1)
weights = torch.where(rows.targets > 0, 2.0, 1.0)
sampler = WeightedRandomSampler(weights, len(rows), generator=torch.Generator().manual_seed(5))
train = DataLoader(rows, batch_size=16, sampler=sampler, drop_last=True)
test = DataLoader(Rows(128, 2), batch_size=64)
model = nn.Sequential(
    nn.BatchNorm1d(20), nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)
for epoch in range(50):
    model.train()
    for number, (values, targets) in enumerate(train, 1):
        values, targets = values.to(device), targets.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=amp):
            out = model(values)
        loss = nn.functional.binary_cross_entropy_with_logits(out.float().squeeze(1), targets)
        (loss / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        guesses = [(model(values.to(device)).squeeze(1) > 0).cpu() == (targets > 0) for values, targets in test]
    print(epoch, torch.cat(guesses).float().mean().item())
