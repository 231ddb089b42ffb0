"""Every exception flatout raises on purpose.

FlatoutError                  the command line prints it as one line and exits with `exit_code`
├── UsageError                the person's mistake: a wrong index, path, number or spelling   (exit 2)
│   ├── OverlayError          a trial cannot be kept from writing, by overlays at least
│   └── TraceError            a folder that is not a trace, or one we cannot read
├── GateFailed                a gate such as --fail-below said no                              (exit 1)
│   └── RealWriteError        a trial has written to the person's files
├── NotSavedError             the last checkpoint of a training could not be written           (exit 1)
└── feed.BadSampleError       a sample that kills every worker that touches it (lives with the loader)
"""

from __future__ import annotations

from collections.abc import Sequence


class FlatoutError(Exception):
    """Base of all; its text is a whole sentence that says what happened, where, and what to do."""

    exit_code = 1


class UsageError(FlatoutError):
    """The person asked for something that cannot be."""

    exit_code = 2


class OverlayError(UsageError):
    """Why a command cannot be run on overlays."""


class TraceError(UsageError):
    """A trace that is missing, broken or from another version of the format."""


class GateFailed(FlatoutError):
    """A threshold the person set was not met."""


class RealWriteError(GateFailed):
    """Files of the person's were changed, made or removed by a trial: all their names are in `files`."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = tuple(files)
        super().__init__(f"a trial has written to your files, and the fix was ended: {', '.join(files)}")


class NotSavedError(FlatoutError):
    """What a training has come to is not on the disk."""
