"""What people call a setting, in flags and config files."""

from __future__ import annotations

import re

from flatout.model.changes import CHANGES

# Those that a change is about are named in its definition.
NAMES = {spec.name: spec.settings for spec in CHANGES if spec.settings} | {
    "epochs": r"(num_?|n_?|max_?|total_?)?(train_?)?epochs",
    "fp16": r"(use_?)?fp16",
    "trainer_precision": r"precision",  # Lightning's; elsewhere it may be about digits
    "tf32": r"(allow_?|use_?|enable_?)?tf32",
    "threads": r"(decode|decoder|reader|read|io|video|cv|opencv|transform|aug\w*)_?(num_?)?threads|threads_per_worker",
    "augment_on": r"(aug\w*|jitter|transforms?|preprocess\w*)_?(on|device|where|backend)",
}

_OFF = frozenset({"", "0", "false", "no", "none", "off", "null", "fp32", "float32", "32", "32-true", "highest"})


def is_on(value: object) -> bool:
    """Whether a setting asks for what it is named after; of a precision, for a lower one."""
    return str(value).strip().lower() not in _OFF


def pattern_of(*subjects: str) -> re.Pattern[str]:
    """What fits any name people give one of these."""
    return re.compile("|".join(NAMES[subject] for subject in subjects), re.IGNORECASE)
