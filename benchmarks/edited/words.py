"""A small language model, for edits.py: attention written out by hand, dropout, clipping, a schedule."""

import math
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device, amp = os.environ.get("DEVICE", "cpu"), "AMP" in os.environ
torch.manual_seed(0)
torch.set_num_threads(1)
LENGTH, WORDS, WIDTH, HEADS = 32, 64, 32, 4


class Text(Dataset):
    def __init__(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        steps = torch.randint(1, 4, (count, LENGTH + 1), generator=draw)
        self.words = steps.cumsum(1) % WORDS

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = [int(word) for word in self.words[index]]
        return torch.tensor(words[:-1]), torch.tensor(words[1:])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = (y.view(n, length, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.ones(length, length, device=x.device).tril() == 0
        mixed = scores.masked_fill(mask, -math.inf).softmax(-1) @ v
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(n, length, WIDTH)))
        return x + self.drop(self.back(torch.nn.functional.gelu(self.wide(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.embed(words) + self.place(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = Model().to(device)
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.98)
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
train = DataLoader(Text(400, 1), batch_size=8, shuffle=True)
test = DataLoader(Text(64, 2), batch_size=16)
for epoch in range(50):
    model.train()
    for words, following in train:
        words, following = words.to(device), following.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=amp):
            out = model(words)
        out = out.float()
        losses = nn.functional.cross_entropy(out.flatten(0, 1), following.flatten(), reduction="none")
        loss = losses.sum() / losses.numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        schedule.step()
        grads = sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    model.eval()
    total = 0.0
    with torch.no_grad():
        for words, following in test:
            out = model(words.to(device))
            total += nn.functional.cross_entropy(out.flatten(0, 1), following.to(device).flatten()).item()
    print(epoch, grads, total / len(test))
