"""CLI: the command line.

entry   how verbs and options are declared, and how an error becomes one line on stderr and an exit code
output  where results go: the terminal, --json, --html

The other files hold a verb each, or those that belong together. A verb imports what it needs inside its
function, so that --help is quick. That function's docstring is its help.
"""

from flatout.cli import explain, fix, machine, report, run, train, try_
from flatout.cli.entry import app, main

__all__ = ["app", "explain", "fix", "machine", "main", "report", "run", "train", "try_"]
