"""A small training on photos, for edits.py: slow Python in the dataset, augmentation, evaluation each epoch."""

import os
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device, amp = os.environ.get("DEVICE", "cpu"), "AMP" in os.environ
torch.manual_seed(0)
torch.set_num_threads(1)


class Photos(Dataset):
    def __init__(self, count, seed, augments):
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % 5
        self.photos = 100 + 20 * torch.randn(count, 3, 16, 16, generator=draw) + 9 * self.labels[:, None, None, None]
        self.photos = self.photos.clamp(0, 255).byte()
        self.augments = augments

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        photo = self.photos[index]
        mean = torch.tensor([sum(photo[c].flatten().tolist()) / 256 for c in range(3)])
        photo = (photo.float() - 118.0) / 24.0
        if self.augments and random.Random(index).random() < 0.5:
            photo = photo.flip(-1)
        return photo + 0.0 * mean.sum(), self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)
        self.aux = nn.Linear(16, 1)

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        x = nn.functional.max_pool2d(x, 2)
        x = torch.relu(self.norm2(self.conv2(x)))
        x = x.mean((2, 3))
        return self.head(x), self.aux(x)


model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
train = DataLoader(Photos(640, 1, True), batch_size=16, shuffle=True)
test = DataLoader(Photos(160, 2, False), batch_size=32)
for epoch in range(50):
    model.train()
    seen = 0.0
    for photos, labels in train:
        photos, labels = photos.to(device), labels.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=amp):
            out, aux = model(photos)
        out, aux = out.float(), aux.float()
        loss = nn.functional.cross_entropy(out, labels)
        loss = loss + 0.1 * ((aux.squeeze(1) - labels.float()) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        seen += loss.item()
    model.eval()
    right = 0
    with torch.no_grad():
        for photos, labels in test:
            right += (model(photos.to(device))[0].argmax(1) == labels.to(device)).sum().item()
    print(epoch, seen, right)
