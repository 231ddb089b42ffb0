"""What the scripts of truth.py use of torchvision, with pictures that are ready or have to be decoded from PNG."""

import io
import os
import sys
import types

import torch
from PIL import Image

SIDE = int(os.environ.get("STANDIN_SIDE", "28"))
LENGTH = int(os.environ.get("STANDIN_LENGTH", "60000"))
READY = bool(os.environ.get("STANDIN_READY"))


class Pictures(torch.utils.data.Dataset):
    def __init__(self, root=None, train=True, transform=None, target_transform=None, download=False, side=28, mode="L"):
        self.transform, self.side, self.mode = transform, side, mode
        self.length = LENGTH if train else LENGTH // 20
        noise = os.urandom(SIDE * SIDE * (3 if mode == "RGB" else 1))
        stored = io.BytesIO()
        Image.frombytes(mode, (SIDE, SIDE), noise).save(stored, "PNG")
        self.stored = stored.getvalue()
        self.ready = transform(self._decoded()) if READY else None
        self.data = torch.randint(0, 256, (1000, side, side), dtype=torch.uint8)
        self.targets = torch.arange(1000) % 10

    def _decoded(self):
        picture = Image.open(io.BytesIO(self.stored)).convert(self.mode)
        return picture.resize((self.side, self.side)) if picture.size[0] != self.side else picture

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.ready is not None:
            return self.ready, int(index) % 10
        picture = self._decoded()
        return self.transform(picture) if self.transform else picture, int(index) % 10


class MNIST(Pictures):
    pass


class CIFAR10(Pictures):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, side=32, mode="RGB", **kwargs)


class FakeData(Pictures):
    def __init__(self, size=1000, image_size=(3, 224, 224), num_classes=10, transform=None):
        super().__init__(transform=transform, side=image_size[1], mode="RGB")
        self.length = size


class Compose:
    def __init__(self, transforms):
        self.transforms = list(transforms)

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


class ToTensor:
    def __call__(self, picture):
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        return pixels.view(picture.size[1], picture.size[0], -1).permute(2, 0, 1).float() / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(v).view(-1, 1, 1) for v in (mean, std))

    def __call__(self, x):
        return (x - self.mean) / self.std


class RandomHorizontalFlip:
    def __call__(self, picture):
        return picture.transpose(0) if torch.rand(1) < 0.5 else picture


class Pad:
    def __init__(self, width):
        self.width = width

    def __call__(self, picture):
        wide, high = picture.size
        return picture.crop((-self.width, -self.width, wide + self.width, high + self.width))


class RandomCrop:
    def __init__(self, size, padding=0):
        self.size, self.padding = size, padding

    def __call__(self, picture):
        room = max(picture.size[0] + 2 * self.padding - self.size, 0)
        left, upper = (torch.randint(0, room + 1, (2,)) - self.padding).tolist()
        return picture.crop((left, upper, left + self.size, upper + self.size))


class CenterCrop:
    def __init__(self, size):
        self.size = size

    def __call__(self, picture):
        left, upper = ((length - self.size) // 2 for length in picture.size)
        return picture.crop((left, upper, left + self.size, upper + self.size))


class Resize:
    def __init__(self, size):
        self.size = size if isinstance(size, tuple | list) else (size, size)

    def __call__(self, picture):
        return picture.resize(self.size)


def make_grid(tensor, nrow=8, padding=2, normalize=False, **_):
    pictures = torch.as_tensor(tensor).detach().cpu().float()
    if normalize:
        pictures = (pictures - pictures.min()) / (pictures.max() - pictures.min() + 1e-5)
    if pictures.shape[1] == 1:
        pictures = pictures.expand(-1, 3, -1, -1)
    count, channels, high, wide = pictures.shape
    rows = -(-count // nrow)
    grid = torch.zeros(channels, rows * (high + padding), nrow * (wide + padding))
    for number, picture in enumerate(pictures):
        y, x = number // nrow * (high + padding), number % nrow * (wide + padding)
        grid[:, y : y + high, x : x + wide] = picture
    return grid


def save_image(tensor, path, nrow=8, padding=2, normalize=False, **_):
    grid = make_grid(tensor, nrow, padding, normalize).clamp(0, 1)
    Image.fromarray((grid * 255).byte().permute(1, 2, 0).contiguous().numpy()).save(path)


datasets, transforms, utils = (types.ModuleType(f"torchvision.{n}") for n in ("datasets", "transforms", "utils"))
for _module in (datasets, transforms, utils):
    sys.modules[_module.__name__] = _module
for _thing in (MNIST, CIFAR10, FakeData):
    setattr(datasets, _thing.__name__, _thing)
for _thing in (Compose, ToTensor, Normalize, RandomHorizontalFlip, Pad, RandomCrop, CenterCrop, Resize):
    setattr(transforms, _thing.__name__, _thing)
utils.make_grid, utils.save_image = make_grid, save_image
