"""Data and model of `video`."""

from pathlib import Path
from types import SimpleNamespace

from workloads.making import require
from workloads.video.train import ClipDataset, ClipTransformer, jitter_colours


def data(root, train, **settings):
    facts = require(root, "video")
    files = sorted((Path(root) / "videos").glob("*.mp4"))
    files = files[: -facts["val"]] if train else files[-facts["val"] :]
    cfg = SimpleNamespace(cache_dir=None, decode_threads=1, jitter_on="gpu", **settings)
    return ClipDataset(files, facts["classes"], cfg, train=train)


class JitteredClips(ClipTransformer):
    """Takes clips as bytes, and jitters the colours of a whole batch at once."""

    def __init__(self, classes, **settings):
        super().__init__(classes, SimpleNamespace(**settings))

    def forward(self, clips, jitter):
        return super().forward(jitter_colours(clips, jitter))
