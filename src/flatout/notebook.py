"""Notebooks: `%load_ext flatout`, then `%%flatout` above the code of the cell that trains, or
`%%flatout fix`.

    %%flatout ────────► attach ─► the cell's code, in the kernel ─► a summary, and the report as a page
    %%flatout fix ────► the notebook as a script ─► `flatout fix`, beside the kernel ─► what it has kept
    flatout.attach() ─► the same summary after a `with` block; outside notebooks as text

IPython is imported only where it runs already.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from html import escape
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from flatout.files import write_whole
from flatout.inside import start
from flatout.launch.launch_ranks import end_with_parent
from flatout.launch.protocol import Options, in_kernel
from flatout.model.errors import FlatoutError, UsageError
from flatout.model.formatting import count_of, exit_in_words, printable
from flatout.model.inputs import MOST_NOTEBOOK_BYTES, Cells, as_script, code_cells, load_json, text_of
from flatout.redact import redact_text

if TYPE_CHECKING:
    from flatout.report.account import Price

_HELP = """Find out where the training in this cell spends its time, or make it faster.

%%flatout [--max-steps N] [--trace DIR] [--no-xray] [--price MONEY/h]
    Runs the cell, records its training, and shows where every second went.

%%flatout fix [--budget 10m] [--allow NAME,…] [--unprotected] …
    Tries what makes that training faster, beside the kernel; with the options of `flatout fix`.
"""
_WHOLE_PAGE = '<iframe sandbox="allow-scripts" width="100%" height="600" srcdoc="{}"></iframe>'
# What a notebook has and a script lacks: modules in the current folder, and `display`.
_FIRST_LINE = "import sys; sys.path[0] = ''; display = print"
_FUTURE = r"(?m)^from __future__ import [\w, ]*\w"


def load_ipython_extension(shell: Any) -> None:
    """Make `%%flatout` known: IPython calls this for `%load_ext flatout`."""

    def flatout(line: str, cell: str) -> None:
        with _mistakes_in_one_line():
            words = _words(line)
            if words[:1] == ["fix"]:
                _fix(shell, words[1:], cell)
                return
            options = _options(words)
        _run(shell, options, line, cell)

    flatout.__doc__ = _HELP
    shell.register_magic_function(flatout, "cell")


@contextmanager
def _mistakes_in_one_line() -> Iterator[None]:
    from IPython.core.error import UsageError as MagicError

    try:
        yield
    except FlatoutError as problem:
        raise MagicError(printable(redact_text(str(problem)))) from None


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as problem:
        raise UsageError(f"%%flatout {line}: {problem}") from None


# --- %%flatout, and attach --------------------------------------------------------------------------------------


def _options(words: list[str]) -> argparse.Namespace:
    from IPython.core.magic_arguments import MagicArgumentParser

    from flatout.cli.entry import read_price

    parser = MagicArgumentParser(prog="%%flatout")
    parser.add_argument("--max-steps", type=int, metavar="N")
    parser.add_argument("--trace", metavar="DIR")
    parser.add_argument("--no-xray", dest="xray", action="store_false")
    parser.add_argument("--price", type=read_price, default=os.environ.get("FLATOUT_PRICE"))
    options: argparse.Namespace = parser.parse_args(words)
    if options.max_steps is not None and options.max_steps < 1:
        raise UsageError(f"--max-steps {options.max_steps}: expected a number from 1 on")
    return options


def _run(shell: Any, options: argparse.Namespace, line: str, cell: str) -> None:
    """Run the cell's code in the kernel, recorded; under `flatout run` it is already."""
    codes = _compiled(shell, line, cell)
    recording = start.Attachment(None, None)
    if Options.from_environment(os.environ) is None:
        show_it = partial(show, price=options.price)
        limits = {"xray": options.xray, "max_steps": options.max_steps}
        recording = start.attach(options.trace, name=_name(), show=show_it, **limits)
    with recording:
        try:
            for code in codes:
                exec(code, shell.user_global_ns, shell.user_ns)
        except BaseException as raised:
            if isinstance(raised, SystemExit) and recording.ended:  # after --max-steps
                return
            _show_from_the_cell_on(shell, raised)
            raise


def _compiled(shell: Any, line: str, cell: str) -> list[CodeType]:
    """The cell's code. An expression at its end is compiled so that its value is displayed, as always."""
    source = cell if cell.startswith("%%") else f"# %%flatout {line}\n{cell}"  # lines keep their numbers
    text = shell.transform_cell(source)
    name = shell.compile.cache(text, _number_of_cell(shell), raw_code=source)
    body = shell.transform_ast(shell.compile.ast_parse(text, filename=name)).body
    at_the_end = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
    codes = [shell.compile(ast.Module(body, []), name, "exec")]
    return codes + [shell.compile(ast.Interactive([one]), name, "single") for one in at_the_end]


def _number_of_cell(shell: Any) -> int:
    """The number in In[…] of the cell that runs; the count is that of the next one in newer versions
    of IPython."""
    history = shell.history_manager.input_hist_raw
    return min(int(shell.execution_count), len(history) - 1) if len(history) > 1 else int(shell.execution_count)


def _show_from_the_cell_on(shell: Any, raised: BaseException) -> None:
    """Have IPython show an exception as without us: its traceback begins in the cell."""
    outermost = raised.__traceback__
    trace = outermost.tb_next if outermost is not None else None
    lines = shell.InteractiveTB.structured_traceback(type(raised), raised, trace, tb_offset=0)
    with suppress(AttributeError):  # it takes no attributes
        raised._render_traceback_ = lambda: lines  # type: ignore[attr-defined]


def attach(trace: str | Path | None = None, *, xray: bool = True) -> start.Attachment:
    """Record this process from now on, into `trace` (default: a new folder in flatout-runs).

    As a `with` block it ends with a summary. Under `flatout run` the recording that is going on is
    given back; with FLATOUT=off nothing is recorded.
    """
    return start.attach(trace, xray=xray, name=_name(), show=show)


def show(folder: Path, price: Price | None = None) -> None:
    """Say what a recording has found: in a notebook below its cell, elsewhere as text on stderr."""
    from flatout.cli.output import say
    from flatout.cli.report import summarize_run

    try:
        if folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())
        if not any(folder.glob("rank-*.jsonl")):
            say("nothing has trained: no call of torch.optim.Optimizer.step was seen")
        elif in_kernel():
            _display_report(folder, price)
        else:
            summarize_run(folder, quiet=False, price=price)
    except Exception as problem:  # a mistake of ours, and the training must not suffer from it
        say(f"no summary ({type(problem).__name__}: {problem}); the recording is in {folder}")


def _display_report(folder: Path, price: Price | None) -> None:
    from rich.console import Console

    from flatout.report import read_run
    from flatout.report.page import page
    from flatout.report.terminal import WIDTH, show

    report = read_run([folder], price)
    text, file, summary = page(report), folder / "report.html", StringIO()
    write_whole(file, text)
    show(report, Console(file=summary, width=WIDTH, highlight=False, force_jupyter=False))
    link = f'<a href="{escape(str(file))}" target="_blank">{escape(str(file))}</a>'
    _display(f"<pre>{escape(summary.getvalue())}</pre><p>The report: {link}</p>", text)


def _display(summary: str, page: str) -> None:
    """Show HTML below the cell, and a page folded up: it is in the notebook then, wherever that is opened."""
    from IPython.display import HTML, display

    whole = f"<details><summary>The whole report</summary>{_WHOLE_PAGE.format(escape(page))}</details>"
    display(HTML(f"<div>{summary}{whole}</div>"))


# --- %%flatout fix ----------------------------------------------------------------------------------------------


def _fix(shell: Any, words: list[str], cell: str) -> None:
    """Run `flatout fix` on the notebook as a script; what it says comes as it comes."""
    if any(word.partition("=")[0] in ("--html", "--json", "--resume") for word in words):
        raise UsageError("%%flatout fix takes no --html, --json and --resume: what it finds is shown here")
    place, sources = _cells_up_to(shell, cell)
    print(f"flatout: the script is made of {count_of(len(sources), 'cell')}, up to this one")
    with tempfile.TemporaryDirectory(prefix="flatout-notebook-") as folder:
        script, page = Path(folder, f"{_name() or 'notebook'}.py"), Path(folder, "fix.html")
        text, begins = as_script(sources)
        # Python wants these first.
        ahead = [*re.findall(_FUTURE, text), _FIRST_LINE]
        write_whole(script, "; ".join(ahead) + "\n" + re.sub(_FUTURE, "pass", text) + "\n")
        in_cells = partial(_in_cells, script=script, place=place, begins=begins)
        flatout_fix = [sys.executable, "-m", "flatout", "fix", "--html", str(page), *words]
        code = _run_beside([*flatout_fix, "--", sys.executable, str(script)], in_cells)
        if page.exists():
            _display("", in_cells(page.read_text(encoding="utf-8")))
    if code:
        raise UsageError(f"flatout fix ended with {exit_in_words(code)}")


def _in_cells(text: str, *, script: Path, place: str, begins: Cells) -> str:
    """A text with cells in place of lines of the script, which nobody else knows: cell 3:12."""

    def cell(match: re.Match[str]) -> str:
        line = int(match[1]) - 1  # the first one is ours
        before, number = next((one for one in reversed(begins) if one[0] < line), (line, 0))
        return f"{place.format(number)}:{line - before}"

    text = re.sub(rf"[^\s(>\"']*{re.escape(script.name)}:(\d+)", cell, text)
    return text.replace(str(script), script.name)


def _run_beside(command: list[str], in_cells: Callable[[str], str]) -> int:
    """Run a command and print what it says; its exit code. An interrupt is passed on, the second one
    ends it."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"MPLBACKEND": "Agg"},  # not that of the kernel
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Jupyter interrupts the whole group
        preexec_fn=end_with_parent,
    )
    interrupted = False
    with process:
        while True:
            try:
                for line in process.stdout or ():
                    if "flatout fix --resume" not in line:  # the script is gone then
                        print(in_cells(line), end="")
                break
            except KeyboardInterrupt:
                process.send_signal(signal.SIGKILL if interrupted else signal.SIGINT)
                interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    return process.returncode


def _cells_up_to(shell: Any, cell: str) -> tuple[str, list[tuple[int, str]]]:
    """How to call a cell, and the cells up to this one by their numbers: as the notebook was saved,
    if this one is in it; else as they were run, each once."""
    saved = _saved_cells()
    for count, (_, source) in enumerate(saved, 1):
        if source.lstrip().startswith("%%flatout") and _body(source) == cell.strip():
            return "cell {}", saved[:count]
    run: dict[str, tuple[int, str]] = {}
    for number, source in enumerate(shell.history_manager.input_hist_raw):
        run.pop(_body(source), None)
        run[_body(source)] = number, source
    return "In[{}]", [one for body, one in run.items() if body]


def _body(source: str) -> str:
    """A cell without `%%flatout`, to know it again."""
    first, _, rest = source.lstrip().partition("\n")
    return (rest if first.startswith("%%flatout") else source).strip()


# --- the notebook itself ----------------------------------------------------------------------------------------


def _name() -> str:
    """What to call a recording in a notebook; outside, that is known by the script."""
    return (_file().stem or "notebook") if in_kernel() else ""


def _file() -> Path:
    """The notebook's file, or its name alone: Colab, VS Code and Jupyter each tell it in another way."""
    colab = _in_colab().get("metadata", {}).get("colab", {}).get("name")
    vs_code = vars(sys.modules["__main__"]).get("__vsc_ipynb_file__")
    return Path(colab or vs_code or os.environ.get("JPY_SESSION_NAME", ""))


def _saved_cells() -> list[tuple[int, str]]:
    """The code cells of the notebook by number; none where they cannot be read."""
    try:
        return code_cells(_in_colab() or load_json(text_of(_file(), MOST_NOTEBOOK_BYTES), ""), "")
    except UsageError:
        return []


def _in_colab() -> dict[str, Any]:
    """The notebook as Google Colab has it, whose files are elsewhere; empty outside, or where no
    answer comes."""
    answer: dict[str, Any] = {}
    if "google.colab" in sys.modules:
        with suppress(Exception):
            answer = import_module("google.colab._message").blocking_request("get_ipynb", timeout_sec=5)["ipynb"]
    return answer
