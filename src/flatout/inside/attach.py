"""`flatout.attach()`: recording begun from inside, in a notebook or a script."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from flatout.inside import start
from flatout.inside.recording import Recording, process
from flatout.launch.protocol import Options, new_folder


class Attachment:
    """A recording in progress. It ends with the process, with `close`, or with the `with` block."""

    def __init__(self, folder: Path | None, recording: Recording | None) -> None:
        self.folder = folder
        self._recording = recording

    def close(self) -> None:
        """Close the books: the trace in `folder` is whole (show it with `flatout report`)."""
        if self._recording is not None:
            self._recording.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(trace: str | Path | None = None, *, xray: bool = True) -> Attachment:
    """Record this process from now on, into `trace` (default: a new folder in flatout-runs).

    Under `flatout run` the recording that is going on is given back; with FLATOUT=off nothing is recorded.
    """
    launched = Options.from_environment(os.environ)
    if os.environ.get("FLATOUT") == "off":
        return Attachment(None, None)
    if launched is not None:
        return Attachment(launched.folder, process.recording)
    start.require_torch(torch)
    name = Path(sys.argv[0] or "notebook").stem or "notebook"
    options = Options(folder=Path(trace or new_folder(name)).absolute(), name=name, xray=xray)
    start.watch_settings()
    process.roots.note_living()
    return Attachment(options.folder, process.begin(options, start.settings))
