"""The edits of edits.py, right and wrong: in which training, what they replace, and by what.

A number in braces is drawn between the two bounds, whole if they are; so no two of them are quite the same edit.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import NamedTuple

TRAININGS = Path(__file__).parent / "edited"
_DRAWN = re.compile(r"\{(-?[\d.e-]+)\.\.(-?[\d.e-]+)\}")
_LOADER = "DataLoader(Photos(640, 1, True), batch_size=16, shuffle=True"
_WORDS, _ROWS = "DataLoader(Text(400, 1), batch_size=8, shuffle=True", "DataLoader(rows, batch_size=16, sampler=sampler"


class Case(NamedTuple):
    """An edit: `old` becomes `new` in a training."""

    training: str
    name: str
    old: str
    new: str

    def drawn(self, seed: int) -> str:
        """The edited script."""
        text, draw = (TRAININGS / f"{self.training}.py").read_text(), random.Random(seed)
        assert text.count(self.old) == 1, self

        new = self.new
        while bounds := _DRAWN.search(new):  # the same bounds are the same number
            number = f"{draw.uniform(float(bounds[1]), float(bounds[2])):.6g}"
            if bounds[1].lstrip("-").isdigit():
                number = str(draw.randint(int(bounds[1]), int(bounds[2])))
            new = new.replace(bounds[0], number)
        return text.replace(self.old, new)


_MEAN = "        mean = torch.tensor([sum(photo[c].flatten().tolist()) / 256 for c in range(3)])\n"
_ATTENTION = """        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mask = torch.ones(length, length, device=x.device).tril() == 0
        mixed = scores.masked_fill(mask, -math.inf).softmax(-1) @ v
"""
_FUSED = "        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
_SCALED = """        row = [value / scale for scale, value in enumerate(self.values[index].tolist(), 1)]
        return torch.tensor(row), self.targets[index]
"""
_SUM = "loss = losses.sum() / losses.numel()"
_SGD = "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)"
_ADAM = "torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-2)"
_CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), 0.25)\n"
_GRADS = "        grads = sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)\n"

RIGHT = (
    Case("photos", "a mean that is not used", _MEAN, "        mean = torch.zeros({1..3})\n"),
    Case("photos", "a mean by torch", _MEAN, "        mean = photo.float().mean((1, 2))\n"),
    Case(
        "photos", "a product for a quotient", "(photo.float() - 118.0) / 24.0", "(photo.float() - 118.0) * (1 / 24.0)"
    ),
    Case("photos", "workers", _LOADER, _LOADER + ", num_workers={1..2}"),
    Case("photos", "the fused optimizer", _SGD, _SGD[:-1] + ", fused=True)"),
    Case("photos", "one optimizer step a tensor", _SGD, _SGD[:-1] + ", foreach=False)"),
    Case("photos", "the sum of losses stays a tensor", "seen += loss.item()", "seen += loss.detach()"),
    Case("photos", "relu in place", "torch.relu(self.norm1(self.conv1(x)))", "self.norm1(self.conv1(x)).relu_()"),
    Case("photos", "channels last", "Net().to(device)", "Net().to(device).to(memory_format=torch.channels_last)"),
    Case(
        "photos",
        "less is printed",
        "    print(epoch, seen, right)\n",
        "    if epoch % {2..9} == 0:\n        print(epoch)\n",
    ),
    Case("photos", "inference mode", "torch.no_grad()", "torch.inference_mode()"),
    Case("photos", "a mean by pooling", "x.mean((2, 3))", "nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)"),
    Case("words", "attention by torch", _ATTENTION, _FUSED),
    Case("words", "no list of words", "[int(word) for word in self.words[index]]", "self.words[index].clone()"),
    Case("words", "gradients are not read", _GRADS, "        grads = {0..9}\n"),
    Case("words", "the mean by torch", _SUM, "loss = losses.mean()"),
    Case("words", "one kernel for the loss", ', reduction="none")\n        ' + _SUM, ")\n        loss = losses"),
    Case("words", "workers", _WORDS, _WORDS + ", num_workers={1..2}"),
    Case(
        "words", "the mask once", "length, length, device=x.device).tril()", "LENGTH, LENGTH, device=x.device).tril()"
    ),
    Case(
        "words", "scaled before", "q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])", "(q * q.shape[-1] ** -0.5) @ k.mT"
    ),
    Case("words", "the fused optimizer", "betas=(0.9, 0.98)\n", "betas=(0.9, 0.98), fused=True\n"),
    Case("words", "clipping tensor by tensor", "model.parameters(), 0.25)", "model.parameters(), 0.25, foreach=False)"),
    Case(
        "table",
        "scaled by torch",
        _SCALED,
        "        return self.values[index] / torch.arange(1, 21), self.targets[index]\n",
    ),
    Case("table", "scaled once", _SCALED, "        return self.scaled[index], self.targets[index]\n"),
    Case("table", "workers", _ROWS, _ROWS + ", num_workers={1..2}"),
    Case("table", "gradients become zeros", "zero_grad()", "zero_grad(set_to_none=False)"),
    Case("table", "the fused optimizer", _ADAM, _ADAM[:-1] + ", fused=True)"),
    Case("table", "halved later", "(loss / 2).backward()", "loss.mul(0.5).backward()"),
)

WRONG = (
    Case(
        "photos", "samples are dropped", "        return len(self.labels)", "        return len(self.labels) - {1..100}"
    ),
    Case(
        "photos",
        "a sample is repeated",
        "        photo = self.photos[index]",
        "        index = max(index, {1..40})\n        photo = self.photos[index]",
    ),
    Case(
        "photos",
        "smaller pictures",
        "(photo.float() - 118.0) / 24.0",
        "((photo.float() - 118.0) / 24.0)[:, : {8..15}, : {8..15}]",
    ),
    Case(
        "photos",
        "fewer classes",
        "self.labels = torch.arange(count) % 5",
        "self.labels = (torch.arange(count) % 5).clamp(max={1..3})",
    ),
    Case("photos", "not shuffled", "batch_size=16, shuffle=True", "batch_size=16, shuffle=False"),
    Case(
        "photos", "shuffled by other numbers", _LOADER, _LOADER + ", generator=torch.Generator().manual_seed({0..99})"
    ),
    Case("photos", "no augmentation", "if self.augments and", "if False and"),
    Case(
        "photos",
        "less augmentation",
        "random.Random(index).random() < 0.5",
        "random.Random(index).random() < {0.3..0.48}",
    ),
    Case("photos", "another scale", "/ 24.0", "/ {24.01..26.0}"),
    Case(
        "photos",
        "half the bits in the data",
        "return photo + 0.0",
        "photo = photo.bfloat16().float()\n        return photo + 0.0",
    ),
    Case("photos", "lost weight decay", ", weight_decay=5e-4", ""),
    Case("photos", "less weight decay", "weight_decay=5e-4", "weight_decay={1e-4..4.9e-4}"),
    Case("photos", "another learning rate", "lr=0.05", "lr={0.051..0.08}"),
    Case("photos", "a lost schedule", "        schedule.step()\n", ""),
    Case("photos", "a detached loss", "(aux.squeeze(1) -", "(aux.squeeze(1).detach() -"),
    Case("photos", "a detached tower", "self.aux(x)", "self.aux(x.detach())"),
    Case(
        "photos",
        "stale statistics",
        "self.norm1 = nn.BatchNorm2d(16)",
        "self.norm1 = nn.BatchNorm2d(16, momentum={0.0..0.09})",
    ),
    Case(
        "photos",
        "statistics of the batch alone",
        "self.norm2 = nn.BatchNorm2d(16)",
        "self.norm2 = nn.BatchNorm2d(16, track_running_stats=False)",
    ),
    Case("photos", "trained in evaluation mode", "    model.train()\n", "    model.eval()\n"),
    Case("photos", "evaluated on training data", "Photos(160, 2, False)", "Photos(160, 1, False)"),
    Case("photos", "evaluated on fewer samples", "Photos(160, 2, False)", "Photos({32..159}, 2, False)"),
    Case("photos", "evaluated in training mode", "    model.eval()\n", ""),
    Case("photos", "half the channels", "x = x.mean((2, 3))", "x = x[:, :, ::2, ::2].mean((2, 3))"),
    Case(
        "photos",
        "a frozen layer",
        "model = Net().to(device)",
        "model = Net().to(device)\nmodel.conv1.requires_grad_(False)",
    ),
    Case(
        "photos",
        "gradients add up",
        "        optimizer.zero_grad()\n",
        "        if seen == 0.0 or int(seen) % {2..5}:\n            optimizer.zero_grad()\n",
    ),
    Case(
        "photos",
        "a step left out",
        "        optimizer.step()\n",
        "        if int(1e4 * loss.item()) % {5..20}:\n            optimizer.step()\n",
    ),
    Case(
        "photos",
        "bf16",
        "out, aux = model(photos)",
        "with torch.autocast(device, torch.bfloat16):\n                out, aux = model(photos)",
    ),
    Case(
        "words",
        "precision lost in a sum",
        "losses.sum() / losses.numel()",
        "losses.bfloat16().sum().float() / losses.numel()",
    ),
    Case(
        "words",
        "summed in half precision",
        "losses.sum() / losses.numel()",
        "(losses / 512).half().sum().float() * 512 / losses.numel()",
    ),
    Case(
        "words",
        "shorter clips",
        "torch.tensor(words[:-1]), torch.tensor(words[1:])",
        "torch.tensor(words[:-1][:{16..31}]), torch.tensor(words[1:][:{16..31}])",
    ),
    Case("words", "no dropout", "nn.Dropout(0.1)", "nn.Dropout(0.0)"),
    Case("words", "less dropout", "nn.Dropout(0.1)", "nn.Dropout({0.05..0.099})"),
    Case("words", "clipping is lost", _CLIP, ""),
    Case("words", "clipped at another norm", "model.parameters(), 0.25)", "model.parameters(), {0.26..0.5})"),
    Case("words", "decay for all or none", '"weight_decay": 0.1', '"weight_decay": 0.0'),
    Case("words", "another second moment", "betas=(0.9, 0.98)", "betas=(0.9, {0.985..0.999})"),
    Case("words", "a shorter warm-up", "(step + 1) / 20", "(step + 1) / {10..19}"),
    Case("words", "the mask is lost", "scores.masked_fill(mask, -math.inf).softmax(-1)", "scores.softmax(-1)"),
    Case("words", "no scale of attention", " / math.sqrt(q.shape[-1])", " / {2.7..2.82}"),
    Case("words", "label smoothing", ', reduction="none")', ', reduction="none", label_smoothing={0.001..0.1})'),
    Case("words", "a loss of fewer words", _SUM, "loss = losses[: -{1..60}].mean()"),
    Case(
        "words",
        "an approximate activation",
        "gelu(self.wide(self.norm2(x)))",
        'gelu(self.wide(self.norm2(x)), approximate="tanh")',
    ),
    Case("words", "fewer blocks", "for block in self.blocks:", "for block in self.blocks[:1]:"),
    Case(
        "words",
        "fewer evaluated",
        "    for words, following in test:",
        "    for words, following in list(test)[:{1..3}]:",
    ),
    Case(
        "words",
        "a fixed place",
        "self.place(torch.arange(words.shape[1], device=words.device))",
        "self.place.weight.detach()[: words.shape[1]]",
    ),
    Case(
        "table",
        "no weights of samples",
        "weights = torch.where(rows.targets > 0, 2.0, 1.0)",
        "weights = torch.where(rows.targets > 0, {1.0..1.9}, 1.0)",
    ),
    Case("table", "not halved", "(loss / 2).backward()", "loss.backward()"),
    Case("table", "gradients of one batch", "number % 2 == 0", "number % 1 == 0"),
    Case("table", "gradients of more batches", "number % 2 == 0", "number % {3..4} == 0"),
    Case(
        "table",
        "only every second batch",
        "        (loss / 2).backward()\n",
        "        if number % 2 == 0:\n            loss.backward()\n",
    ),
    Case("table", "decay apart from the gradient", "torch.optim.Adam(", "torch.optim.AdamW("),
    Case("table", "larger batches", "batch_size=16, sampler=sampler", "batch_size=32, sampler=sampler"),
    Case(
        "table",
        "a column is lost",
        _SCALED,
        "        row = self.values[index] / torch.arange(1, 21)\n"
        "        return row * (torch.arange(20) != {0..19}), self.targets[index]\n",
    ),
    Case(
        "table",
        "an old copy of the data",
        _SCALED,
        "        return self.scaled[index], self.targets[(index + {1..9}) % len(self.targets)]\n",
    ),
    Case(
        "table",
        "dropout at another place",
        "nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), ",
        "nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), ",
    ),
    Case(
        "table",
        "rounded data",
        "return torch.tensor(row), self",
        "return torch.tensor([round(value, {2..4}) for value in row]), self",
    ),
)
