"""CLI: the command line, one file a verb.

entry   how verbs and options are declared, and how an error becomes one line on stderr and an exit code
output  where results go: the terminal, --json, --html

A verb imports what it needs inside its function, so that --help is quick. That function's docstring is its help.
"""

from flatout.cli import check, compare, doctor, explain, fix, hook, mcp, report, run, runs, skill, top, train
from flatout.cli.entry import app, main

__all__ = [
    "app",
    "check",
    "compare",
    "doctor",
    "explain",
    "fix",
    "hook",
    "main",
    "mcp",
    "report",
    "run",
    "runs",
    "skill",
    "top",
    "train",
]
