"""`flatout mcp`."""

from __future__ import annotations

import sys

from flatout.cli.entry import require_linux, verb
from flatout.cli.output import say


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
