"""`flatout train`: a small trainer in which every setting either takes effect or is an error.

    config.yaml ─► Config ─► assemble (parts by import path) ─► Trainer.fit ─► checkpoints, metrics, best.pt

`config` has all settings, and reads and checks them; `assemble` builds what they name; `trainer` has the
loop and the validation; `step` the ranks, the model in the form that trains fastest, and one step of it.
`datasets` makes loaders and batches, `run_folder` writes what comes of it.
"""

from flatout.engine.config import Config, TrainerConfig, load
from flatout.engine.trainer import Trainer

__all__ = ["Config", "Trainer", "TrainerConfig", "load"]
