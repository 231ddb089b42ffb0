"""`flatout explain`."""

from __future__ import annotations

from flatout.cli.entry import argument, verb
from flatout.cli.output import console


@verb()
def explain(
    code: list[str] | None = argument("CODE", "A cause, a symptom or a change. Default: a list of all."),
) -> None:
    """Explain what a report names: what it is, how to make sure, what to do.

    A cause: `flatout explain data.cpu-bound`. A symptom: `flatout explain out of memory`. A change: `flatout explain
    pin_memory`.
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
