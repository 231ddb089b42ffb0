"""What the launcher tells the processes inside, by one environment variable."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "FLATOUT_RUN"
RANK = "FLATOUT_RANK"  # what a training process tells its loader workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where to record, and how far to go."""

    folder: Path
    name: str
    command: tuple[str, ...] = ()
    max_steps: int | None = None
    xray: bool = True

    def to_environment(self) -> str:
        """The value of the variable."""
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Options | None:
        """The options, or None where flatout is not wanted."""
        text = environ.get(VARIABLE)
        if not text or environ.get("FLATOUT") == "off":
            return None
        data = json.loads(text)
        return cls(**{**data, "folder": Path(data["folder"]), "command": tuple(data["command"])})


def new_folder(name: str) -> Path:
    """flatout-runs/<time>-<name>, not taken yet."""
    base = Path("flatout-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    candidates = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 1000))]
    return next(path for path in candidates if not path.exists())
