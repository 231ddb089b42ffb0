"""Every exception flatout raises on purpose.

FlatoutError                  the command line prints it as one line and exits with `exit_code`
├── UsageError                the person's mistake: a wrong index, path, number or spelling   (exit 2)
│   ├── TraceError            a folder that is not a trace, or one we cannot read
│   └── PlanError             a plan file we cannot read
├── GateFailed                a gate such as --fail-below said no                              (exit 1)
└── feed.BadSampleError       a sample that kills every worker that touches it (lives with the loader)
"""

from __future__ import annotations

__all__ = ["FlatoutError", "GateFailed", "PlanError", "TraceError", "UsageError"]


class FlatoutError(Exception):
    """Base of all; its text is a whole sentence that says what happened, where, and what to do."""

    exit_code = 1


class UsageError(FlatoutError):
    """The person asked for something that cannot be."""

    exit_code = 2


class TraceError(UsageError):
    """A trace that is missing, broken or from another version of the format."""


class PlanError(UsageError):
    """A plan file that cannot be read."""


class GateFailed(FlatoutError):
    """A threshold the person set was not met."""
