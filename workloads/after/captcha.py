"""The data of `captcha`, and how it is judged."""

from workloads.captcha.train import SliderDataset
from workloads.making import require


def data(root, train):
    facts = require(root, "captcha")
    train_sheets = facts["items"] - facts["val"]
    return SliderDataset(root, range(train_sheets) if train else range(train_sheets, facts["items"]))


def slide_error(output, target):
    """How far off, in pixels, the piece would be dropped."""
    return (output - target).diff(dim=1).abs().squeeze(1)
