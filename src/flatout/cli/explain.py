"""What explains flatout to a person or to a coding agent: `flatout explain`, `mcp` and `skill`."""

from __future__ import annotations

import sys
from pathlib import Path

from flatout.cli.entry import argument, require_linux, verb
from flatout.cli.output import console, say


@verb()
def explain(
    code: list[str] | None = argument("CODE", "A cause, a symptom or a change. Default: a list of all."),
) -> None:
    """Explain what a report names: what it is, how to make sure, what to do.

    A cause: `flatout explain data.cpu-bound`. A symptom: `flatout explain out of memory`. A change:
    `flatout explain pin_memory`.
    """
    from flatout.model import guide

    text = guide.explain(" ".join(code)) if code else guide.overview()
    terminal = console()
    if not terminal.is_terminal:
        print(text, end="")
        return
    from rich.markdown import Markdown

    from flatout.report.terminal import WIDTH

    terminal.print(Markdown(text), width=min(WIDTH, terminal.width))


@verb()
def mcp() -> None:
    """Give a coding agent flatout's tools, by the Model Context Protocol over stdin and stdout.

    The agent starts it itself, once it is registered (docs/AGENTS.md). It needs `pip install 'flatout[mcp]'`.
    """
    require_linux("mcp")
    from flatout.mcp_server import serve

    if sys.stdin.isatty():
        say("waits for an agent that speaks the Model Context Protocol on stdin; Ctrl-C ends it")
    serve()


@verb()
def skill() -> None:
    """Print a SKILL.md that tells a coding agent how to work with flatout: `flatout skill > SKILL.md`."""
    print((Path(__file__).parents[1] / "SKILL.md").read_text(encoding="utf-8"), end="")
