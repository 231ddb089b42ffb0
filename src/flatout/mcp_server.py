"""flatout mcp: the command line as tools for coding agents, by the Model Context Protocol over stdio.

agent ─► a tool ─► flatout VERB --json, in a process of its own ─► its JSON, shortened, and the next sensible call

So a training that crashes or hangs ends that process, not the server. What goes wrong is a result
with `error` and `next`: of an exception an agent may not see the text.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any

import anyio
from anyio.abc import Process
from mcp.server.mcpserver import MCPServer
from pydantic import Field

from flatout.files import write_whole
from flatout.launch.launcher import signals_as_ctrl_c
from flatout.model import guide
from flatout.model.errors import UsageError
from flatout.model.formatting import duration, exit_in_words, printable
from flatout.model.inputs import is_folder
from flatout.redact import redact_text

MOST_BYTES = 20_000  # of a result: an agent reads all of it
MOST_PRINTED = 3_000  # letters of what a command has printed
_END_WITHIN_S = 15.0
_TOOLS = {"try": "try_patch"}  # a tool is called as its verb, but for these
_SPOKEN = "flatout: "  # in front of what flatout itself says
_LETTERS_AN_ENTRY = 40  # a text counts as so many entries of a list

Data = dict[str, Any]
Folder = Annotated[str, Field(description="The folder that the training command is run in.")]
Command = Annotated[
    list[str] | str,
    Field(description="The training command, as words or as one line: python train.py --epochs 3. No shell reads it."),
]
Limit = Annotated[float, Field(gt=0, description="Seconds after which the command is ended, as by Ctrl-C.")]
Patch = Annotated[str, Field(description="A unified diff as git diff writes it, of files in the folder.")]
Trace = Annotated[str, Field(description="The folder of a recorded run: `trace` of the result of run.")]

server = MCPServer(
    "flatout",
    instructions="Makes PyTorch trainings faster, and proves that they stay the same. Measure with run, read "
    "hot_lines, explain the verdict, write a patch, then try_patch it: keep what is faster and the same. fix tries "
    "the usual changes without a patch. Never claim a gain that was not measured.",
)


def serve() -> None:
    """Answer an agent until it closes stdin."""
    with signals_as_ctrl_c():
        server.run("stdio")


# The tools. An agent reads their docstrings.


@server.tool()
async def run(folder: Folder, command: Command, max_steps: int = 200, limit_s: Limit = 600) -> Data:
    """Measure a PyTorch training as it is, and say where its time goes and why. The script is not edited.

    It ends after max_steps training steps, and then measures how fast a step is with its data already there.
    """
    options = ["--quiet", "--max-steps", str(max_steps)]
    return await _flatout("run", folder, options, command, after=_after_run, limit_s=limit_s)


@server.tool()
async def report(folder: Folder, trace: Trace) -> Data:
    """Show a recorded run again: its verdict, its findings, and where every second went."""
    return await _flatout("report", folder, [], [trace], after=_after_run)


@server.tool()
async def hot_lines(folder: Folder, trace: Trace) -> Data:
    """List the lines of a recorded run that took the time, with their source and share, and its time
    by cause."""
    return await _flatout("report", folder, [], [trace], after=_after_hot_lines, keys=("lines", "account"))


@server.tool()
async def explain(code: str = "") -> Data:
    """Explain a cause, a symptom or a change: what it is, how to make sure, what to do. Without a
    code: a list."""
    try:
        text = guide.explain(code) if code else guide.overview()
    except UsageError as problem:
        return {"error": str(problem), "next": "Call explain without a code for a list of all."}
    return {"text": text, "next": "Call hot_lines to see where that is in the code, or fix to try the usual changes."}


@server.tool()
async def try_patch(
    folder: Folder, command: Command, patch_text: Patch, budget_s: int = 240, limit_s: Limit = 900
) -> Data:
    """Try an edit of a training's code: is it faster, and is it the same training? Your files stay as
    they are."""
    with tempfile.TemporaryDirectory(prefix="flatout-mcp-") as scratch:
        patch = Path(scratch) / "edit.diff"
        write_whole(patch, patch_text)
        options = ["--patch", str(patch), "--budget", f"{budget_s}s"]
        return await _flatout("try", folder, options, command, after=_after_try, limit_s=limit_s)


@server.tool()
async def fix(folder: Folder, command: Command, budget_s: int = 240, allow: str = "", limit_s: Limit = 900) -> Data:
    """Try the usual changes on a training, keep those that are faster and proven to leave it the same.

    No file of yours is edited; what was kept is in a plan. With `allow`, such as batch-size, changes
    to learning are tried too.
    """
    options = ["--budget", f"{budget_s}s", "--allow", allow]
    return await _flatout("fix", folder, options, command, after=_after_fix, limit_s=limit_s)


@server.tool()
async def compare(folder: Folder, before: Trace, after: Trace) -> Data:
    """Compare two recorded runs: is the second one faster, beyond the noise of both?"""
    return await _flatout("compare", folder, [], [before, after], after=_after_compare)


# What to do next, by what was found


def _after_run(data: Data) -> str:
    if data["verdict"] is None:
        return "Too little was seen to judge by: call run again with a larger max_steps."
    return f"Call explain with {data['verdict']}, and hot_lines with the trace {data['trace']}."


def _after_hot_lines(data: Data) -> str:
    if not data["lines"]:
        return "No line of the script stands out: call fix, which tries changes that need no edit."
    return f"Write a patch for {data['lines'][0]['where']}, the line that takes most, and call try_patch with it."


def _after_try(data: Data) -> str:
    if data["passed"]:
        return "Apply the patch. The gain is `gain`, with its interval: claim no more than that."
    return "Do not apply it: `error`, `proof` or `needs` says why. Correct the patch and try it again, or drop it."


def _after_fix(data: Data) -> str:
    if not data["kept"]:
        return "Nothing was kept. `left` is what only an edit can change: call explain with a code in it."
    return f"Train with flatout run --plan {data['plan']} -- COMMAND. `left` is what only an edit can change."


def _after_compare(data: Data) -> str:
    if data["verdict"] == "faster":
        return "The gain is `typical`, with its interval: claim no more than that."
    return "No gain was shown: claim none."


# One command


async def _flatout(
    verb: str,
    folder: str,
    options: Sequence[str],
    arguments: list[str] | str,
    *,
    after: Callable[[Data], str],
    limit_s: float = 120,
    keys: Sequence[str] = (),
) -> Data:
    """The JSON of a verb, of all its keys or of these; where there is none, `error` and what was
    printed last."""
    tool = _TOOLS.get(verb, verb)
    try:
        with tempfile.TemporaryDirectory(prefix="flatout-mcp-") as scratch, tempfile.TemporaryFile() as output:
            out = Path(scratch) / "result.json"
            words = [sys.executable, "-m", "flatout", verb, *options, "--json", str(out), "--", *_words(arguments)]
            code, in_time = await _run(words, _folder(folder), output, limit_s)
            data = json.loads(out.read_bytes()) if out.exists() else None
            printed = _last_of(output)
    except (UsageError, OSError) as problem:
        return {"error": redact_text(str(problem)), "next": f"Correct that, then call {tool} again."}
    early = {} if in_time else {"ended_early": f"its limit of {duration(1e3 * limit_s)} was over"}
    if data is None:
        said = [line.removeprefix(_SPOKEN) for line in printed.splitlines() if line.startswith(_SPOKEN)]
        error = said[-1] if said else f"flatout {verb} ended with {exit_in_words(code)}"
        again = f"Correct that, then call {tool} again; `printed` is the end of what the command has printed."
        return {"error": error, **early, "next": again, "printed": printed}
    return {"next": after(data), **early, **fitted({key: data[key] for key in keys or data})}


def _folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if not is_folder(folder):
        raise UsageError(f"there is no folder {name}")
    return folder


def _words(command: list[str] | str) -> list[str]:
    """A command as words; one line is split as a shell would, and nothing else that a shell does is done."""
    try:
        return shlex.split(command) if isinstance(command, str) else command
    except ValueError as problem:
        raise UsageError(f"{command}: {problem}") from None


async def _run(words: Sequence[str], folder: Path, output: IO[bytes], limit_s: float) -> tuple[int, bool]:
    """The exit code of a command, and whether it ended in time. When the call is cancelled, it ends too."""
    process = await anyio.open_process(
        words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, start_new_session=True
    )
    try:
        with anyio.move_on_after(limit_s) as limit:
            await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
    code = process.returncode or 0
    return 128 - code if code < 0 else code, not limit.cancelled_caught  # as a shell counts signals


async def _end(process: Process) -> None:
    """End a command that still runs with all that it has started: as Ctrl-C would, and then by force."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with anyio.move_on_after(_END_WITHIN_S):
                await process.wait()


def _last_of(output: IO[bytes]) -> str:
    """The end of what a command has printed, without secrets."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - MOST_PRINTED))
    return redact_text(printable(output.read().decode(errors="replace")))


# What fits an agent


def fitted(data: Data, most_bytes: int = MOST_BYTES) -> Data:
    """The same, its longest lists, mappings and texts cut from the end until it fits; `left_out` says
    how much."""
    left_out: dict[str, int] = {}
    data = json.loads(json.dumps(data))
    while len(json.dumps(data, indent=2)) > most_bytes:
        path, parent, key = max(_parts(data), key=lambda part: _length(part[1][part[2]]))
        half = len(parent[key]) // 2
        left_out[path] = left_out.get(path, 0) + len(parent[key]) - half
        parent[key] = dict(list(parent[key].items())[:half]) if isinstance(parent[key], dict) else parent[key][:half]
    return data | ({"left_out": left_out} if left_out else {})


def _parts(data: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Everything in it that can be cut: its path, what holds it, and its key there."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, dict | list | str):
            name = f"{path}.{key}" if path else str(key)
            yield name, data, key
            if not isinstance(value, str):
                yield from _parts(value, name)


def _length(value: Any) -> float:
    return len(value) / _LETTERS_AN_ENTRY if isinstance(value, str) else len(value)
