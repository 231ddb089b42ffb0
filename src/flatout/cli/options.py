"""How verbs declare their options and arguments, and how the command behind -- is read."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import typer

from flatout.model.errors import UsageError

# flatout's own options come first; from the command's first word on, everything belongs to the command.
TAKES_A_COMMAND = {"allow_extra_args": True, "allow_interspersed_args": False}


def option(metavar: str, help: str, *, default: Any = None, **more: Any) -> Any:
    """An option that takes a value."""
    return typer.Option(default, metavar=metavar, help=help, **more)


def argument(metavar: str, help: str, *, default: Any = None) -> Any:
    """A positional argument; with `default=...` it is required."""
    return typer.Argument(default, metavar=metavar, help=help)


def flag(name: str, help: str, *, default: bool = False) -> Any:
    """An option that takes no value."""
    return typer.Option(default, name, help=help)


def output_file(content: str) -> Any:
    """An option such as --json FILE, where - is stdout."""
    return option("FILE", f"Write {content}; - is stdout.")


def command_of(context: typer.Context) -> list[str]:
    """The command behind flatout's options; a bare script is run with Python."""
    command = list(context.args)
    if command[:1] == ["--"]:
        command = command[1:]
    if command and command[0].endswith(".py"):
        command = ["python" if shutil.which("python") else sys.executable, *command]
    return command


def require_linux(verb: str) -> None:
    """A one-line error on systems where this verb cannot work."""
    if sys.platform != "linux":
        raise UsageError(f"flatout {verb} is Linux only; flatout top, doctor, report and compare work here")
