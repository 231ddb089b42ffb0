"""The `flatout` command: how verbs and options are declared, and how an error becomes a line and an
exit code.

0: done. 1: a gate such as --fail-below said no. 2: a mistake in the command. `flatout run` and
`flatout train` end with the exit code of what they ran.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from flatout import __version__
from flatout.cli.output import say, send_to_devnull
from flatout.model.errors import FlatoutError, UsageError
from flatout.model.formatting import printable
from flatout.redact import redact_text

if TYPE_CHECKING:
    from flatout.report.account import Price

INTERRUPTED = 130
BROKEN_PIPE = 141
SECONDS_IN = {"s": 1, "m": 60, "min": 60, "h": 3600, None: 1}
# In the order of --help.
VERBS = (
    "run",
    "fix",
    "try",
    "report",
    "compare",
    "runs",
    "check",
    "explain",
    "top",
    "train",
    "doctor",
    "hook",
    "mcp",
    "skill",
)

_SECONDS_IN = {"s": 1, "m": 60, "min": 60, "h": 3600, None: 1}
# What few verbs need. The server is in mcp from version 2 on.
_EXTRAS = {"textual": "top", "pydantic": "train", "torch": "train", "mcp": "mcp", "mcp.server.mcpserver": "mcp"}
_EXTRAS |= {"nbclient": "notebook"}

# What typer raises for a mistake in the arguments. typer keeps its base class private, under changing names.
_ArgumentError: type[Exception] = cast("type[Exception]", typer.BadParameter.__mro__[2])


class _Verb(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))


class _Verbs(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)


def _without_values(options: list[Any]) -> list[Any]:
    """A flag takes no value; typer would show `<bool>` behind each."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return options


app = typer.Typer(
    cls=_Verbs,
    name="flatout",
    invoke_without_command=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Finds out why a GPU sits idle during PyTorch training, fixes it, and proves it.",
    epilog="Exit codes: 0 done, 1 a gate such as --fail-below said no, 2 a mistake in the command.",
)
verb = partial(app.command, cls=_Verb)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"flatout {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


# What verbs declare

# flatout's own options come first; from the command's first word on, everything belongs to the command.
TAKES_A_COMMAND = {"allow_extra_args": True, "allow_interspersed_args": False}


def option(metavar: str, help: str, *, default: Any = None, name: str | None = None, **more: Any) -> Any:
    """An option that takes a value; its name is that of the argument, unless another is given."""
    names = [name] if name is not None else []
    return typer.Option(default, *names, metavar=metavar, help=help, callback=_with_value, **more)


def _with_value(parameter: typer.CallbackParam, value: Any) -> Any:
    """Refuse the -- in front of a command as a value."""
    if str(value) == "--":
        raise UsageError(f"{parameter.opts[0]} needs a value before the --")
    return value


def argument(metavar: str, help: str, *, default: Any = None) -> Any:
    """A positional argument; with `default=...` it is required."""
    return typer.Argument(default, metavar=metavar, help=help)


def flag(name: str, help: str, *, default: bool = False) -> Any:
    """An option that takes no value."""
    return typer.Option(default, name, help=help)


def price_of_an_hour(what_for: str) -> Any:
    """The option --price, or FLATOUT_PRICE."""
    text = f"What an hour costs, such as 2.5/h, $2.5/h or 2.5EUR/h: {what_for}."
    return option("MONEY/h", text, envvar="FLATOUT_PRICE")


def read_price(text: str | None) -> Price | None:
    """What a person gave as --price."""
    from flatout.report.account import Price

    try:
        return Price.of(text) if text is not None else None
    except ValueError:
        raise UsageError(f"--price {text}: expected a price an hour, such as 2.5/h, $2.5/h or 2.5EUR/h") from None


def seconds_of(text: str) -> float:
    """What a person gave as --budget."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--budget {text}: expected a time such as 90s, 10m or 1h")
    return float(match[1]) * SECONDS_IN[match[2]]


def recordings_kept() -> Any:
    """The option --keep, or FLATOUT_KEEP."""
    text = "How many recordings flatout-runs keeps, without those that you have named; 0: all."
    return option("N", text, default=50, min=0, envvar="FLATOUT_KEEP")


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
        raise UsageError(f"flatout {verb} is Linux only; flatout top, doctor, report, compare and runs work here")


# Running it


def main() -> None:
    """The `flatout` command."""
    _open_closed_streams()
    try:
        code = app(prog_name="flatout", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as ended:
        # `flatout top | head` is no error. typer and rich would exit with 1, which means that a gate said no.
        if not isinstance(ended, BrokenPipeError) and not isinstance(ended.__context__, BrokenPipeError):
            raise
        send_to_devnull(1)
        sys.exit(BROKEN_PIPE)
    except FlatoutError as problem:
        if problem.__cause__ is not None:  # raised by the user's own code: show where
            where = "".join(traceback.format_exception(problem.__cause__))
            print(printable(redact_text(where)), end="", file=sys.stderr)
        _exit_with_message(str(problem), problem.exit_code)
    except ModuleNotFoundError as problem:
        extra = _EXTRAS.get(problem.name or "")
        if extra is None:
            raise
        cure = f"pip install 'flatout[{extra}]'"
        _exit_with_message(f"this needs {problem.name}, which is not installed here: {cure}", 2)
    except _ArgumentError as problem:
        _exit_with_message(getattr(problem, "format_message", problem.__str__)() + _whose_flag(problem), 2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _whose_flag(problem: Exception) -> str:
    """For `flatout check train.py --epochs 3`: flags of the script stand elsewhere."""
    name = getattr(problem, "option_name", None)
    if name is None or getattr(getattr(problem, "ctx", None), "info_name", "") != "check":
        return ""
    return f"; the script's own flags stand behind a --: flatout check train.py -- {name} …"


def _open_closed_streams() -> None:
    """Open what is closed of stdin, stdout and stderr on /dev/null; else files we open would get
    their numbers."""
    for handle in range(3):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    open_devnull = partial(open, os.devnull, "w", encoding="utf-8")
    sys.stdout = sys.stdout or open_devnull()
    sys.stderr = sys.stderr or open_devnull()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that knows no × shows ? instead of a traceback


def _exit_with_message(text: str, code: int) -> None:
    say(text)
    sys.exit(code)
