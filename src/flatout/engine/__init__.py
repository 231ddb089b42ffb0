"""`flatout train`: a small trainer in which every setting either takes effect or is an error.

    config.yaml ─► Config ─► assemble (parts by import path) ─► Trainer.fit ─► checkpoints, metrics, best.pt

`config` reads and checks; each section of it stands beside what it configures. `assemble` builds the parts, `trainer`
has the loop, `step` one optimizer step, `losses` what came of it; `model` and `precision` are what is done for speed,
`data` makes the loaders, `batch_size` finds the fastest, `evaluation`, `checkpoint` and `progress` do what they are
called, `ranks` holds the processes together; `section` is what all sections are made of.
"""

from flatout.engine.config import Config, Settings, load
from flatout.engine.trainer import Trainer

__all__ = ["Config", "Settings", "Trainer", "load"]
