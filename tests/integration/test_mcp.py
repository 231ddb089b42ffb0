"""`flatout mcp` as an agent meets it: a client of the SDK, the server in a process of its own, real trainings."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from flatout.mcp_server import MOST_BYTES

TRAIN = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.005)  # what a slow disk takes
        return torch.full((8,), index / 400)

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for batch in DataLoader(Slow(), batch_size=8):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
"""
HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pids.part", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.part", "pids")
time.sleep(600)
"""
FASTER = """\
--- a/train.py
+++ b/train.py
@@ -10,3 +10,2 @@
     def __getitem__(self, index):
-        time.sleep(0.005)  # what a slow disk takes
         return torch.full((8,), index / 400)
"""
Call = Callable[..., Awaitable[dict[str, Any]]]


def as_agent(folder: Path, scenario: Callable[[Call, ClientSession], Awaitable[None]]) -> None:
    """Run a scenario against a server; `call` calls a tool in the folder and gives its result as data."""

    async def main() -> None:
        server = StdioServerParameters(command=sys.executable, args=["-m", "flatout", "mcp"])
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()

            async def call(tool: str, **arguments: Any) -> dict[str, Any]:
                result = await session.call_tool(tool, arguments)
                (text,) = result.content
                assert len(text.text) < MOST_BYTES + 1_000
                assert not result.is_error, text.text
                return json.loads(text.text)

            await scenario(call, session)

    (folder / "train.py").write_text(TRAIN)
    (folder / "hangs.py").write_text(HANGS)
    (folder / "crashes.py").write_text("token = 'ghp_0123456789abcdefghijABCDEFGHIJ012345'\nraise ValueError(token)\n")
    anyio.run(main)


async def pids_in(folder: Path) -> list[int]:
    """The processes of a script that hangs, when it has written them."""
    with anyio.fail_after(60):
        while not (folder / "pids").exists():
            await anyio.sleep(0.05)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


async def until_gone(pids: list[int]) -> None:
    with anyio.fail_after(60):
        while any(map(psutil.pid_exists, pids)):
            await anyio.sleep(0.05)


def test_an_agent_goes_from_a_slow_training_to_the_line_and_its_explanation(tmp_path: Path) -> None:
    async def scenario(call: Call, session: ClientSession) -> None:
        tools = {tool.name for tool in (await session.list_tools()).tools}
        assert tools == {"run", "report", "hot_lines", "explain", "try_patch", "fix", "compare"}
        seen = await call("run", folder=str(tmp_path), command=f"{sys.executable} train.py", max_steps=60)
        assert seen["verdict"] == "data.main-thread"
        assert "hot_lines" in seen["next"]
        trace = seen["trace"]
        lines = await call("hot_lines", folder=str(tmp_path), trace=trace)
        assert lines["lines"][0]["where"] == "train.py:10"
        assert "train.py:10" in lines["next"]
        assert "num_workers" in (await call("explain", code=seen["verdict"]))["text"]
        same = await call("compare", folder=str(tmp_path), before=trace, after=trace)
        assert same["verdict"] == "no difference shown"
        assert same["next"] == "No gain was shown: claim none."

    as_agent(tmp_path, scenario)


def test_what_goes_wrong_is_a_result(tmp_path: Path) -> None:
    async def scenario(call: Call, session: ClientSession) -> None:
        crashed = await call("run", folder=str(tmp_path), command=[sys.executable, "crashes.py"])
        assert "ended with exit code 1 before its first step" in crashed["error"]
        assert "ValueError: ***" in crashed["printed"]
        assert "ghp_" not in str(crashed)
        nowhere = await call("run", folder=str(tmp_path / "nowhere"), command="true")
        assert nowhere["error"] == f"there is no folder {tmp_path / 'nowhere'}"
        quoted = await call("run", folder=str(tmp_path), command="python 'train.py")
        assert quoted["error"] == "python 'train.py: No closing quotation"
        missing = await call("report", folder=str(tmp_path), trace="runs/one")
        assert missing["error"] == "no trace at runs/one: there is no such folder"
        assert "did you mean data.cpu-bound?" in (await call("explain", code="data.cpu_bound"))["error"]
        wrong = await call("try_patch", folder=str(tmp_path), command=f"{sys.executable} train.py", patch_text="+x")
        assert wrong["error"]
        assert "try_patch" in wrong["next"]

    as_agent(tmp_path, scenario)


@pytest.mark.timing
def test_an_agent_tries_a_patch(tmp_path: Path) -> None:
    async def scenario(call: Call, session: ClientSession) -> None:
        command = f"{sys.executable} train.py"
        tried = await call("try_patch", folder=str(tmp_path), command=command, patch_text=FASTER, budget_s=100)
        assert tried["passed"], tried
        assert tried["next"].startswith("Apply the patch.")
        assert (tmp_path / "train.py").read_text() == TRAIN

    as_agent(tmp_path, scenario)


def test_a_call_that_is_cancelled_or_too_long_leaves_no_process(tmp_path: Path) -> None:
    async def scenario(call: Call, session: ClientSession) -> None:
        command = [sys.executable, "hangs.py"]
        long = await call("run", folder=str(tmp_path), command=command, limit_s=10)
        assert "limit of 10.0 s" in long["ended_early"]
        await until_gone(await pids_in(tmp_path))
        (tmp_path / "pids").unlink()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: call("run", folder=str(tmp_path), command=command))
            pids = await pids_in(tmp_path)
            group.cancel_scope.cancel()
        await until_gone(pids)
        assert "text" in await call("explain")  # the server is still there

    as_agent(tmp_path, scenario)
