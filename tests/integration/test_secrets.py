"""200 secrets in every place of every verb: none comes out, and 200 harmless look-alikes do.

They are planted in arguments, YAML, JSON, a config module, the environment, printed output, the text of an exception
and the name of a process. What a verb writes, and what flatout says on the terminal, is then searched.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from planted import Planted, found, look_alikes, secrets

from flatout import trace
from flatout.redact import HIDDEN

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
FLATOUT = (sys.executable, "-m", "flatout")

ARGUMENTS, YAML, JSON, MODULE = secrets(75), secrets(40, 75), secrets(35, 115), secrets(15, 150)
ENVIRONMENT, PRINTED, RAISED = secrets(15, 165), secrets(11, 180), secrets(8, 191)
PROCESS = Planted("pw", "LEAK199x", "LEAK199")
ALL = [*ARGUMENTS, *YAML, *JSON, *MODULE, *ENVIRONMENT, *PRINTED, *RAISED, PROCESS]
FINE_ARGUMENTS, FINE_YAML, FINE_JSON = look_alikes(70), look_alikes(70, 70), look_alikes(60, 140)
ALL_FINE = [*FINE_ARGUMENTS, *FINE_YAML, *FINE_JSON]

TRAIN = """
import argparse, json, os, sys
import my_config, torch, yaml
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
for name in dict.fromkeys(word.split("=")[0] for word in sys.argv[1:] if word.startswith("--")):
    parser.add_argument(name)
args = parser.parse_args()
with open("config.yaml") as file:
    yaml.safe_load(file)
with open("config.json") as file:
    said = json.load(file)
if os.environ.get("SAY"):
    print(os.environ["SAY"])
    print(os.environ["SAY"], file=sys.stderr)
if os.environ.get("RAISE"):
    raise ValueError(os.environ["RAISE"])
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    for x, y in DataLoader(TensorDataset(torch.rand(400, 8), torch.rand(400, 1)), batch_size=4):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
ENGINE = {
    "model": {"factory": "torch.nn:Linear", "args": {"in_features": 4, "out_features": 2}},
    "data": {"train": "engine_parts:Points", "workers": 0},
    "criterion": "torch.nn:CrossEntropyLoss",
    "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.1}},
    "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
}
PARTS = """
import torch
class Points(torch.utils.data.TensorDataset):
    def __init__(self, **given):
        super().__init__(torch.rand(16, 4), torch.zeros(16, dtype=torch.long))
"""


def nested(planted: list[Planted]) -> dict[str, Any]:
    """Some by their names, some as pairs, arguments, and NAME=value."""
    quarter = len(planted) // 4
    return {
        "lr": 0.1,
        "service": {one.name: one.value for one in planted[: 2 * quarter]},
        "env": {
            f"v{n}": {"name": one.name, "value": one.value} for n, one in enumerate(planted[2 * quarter : -quarter])
        },
        "lists": {f"v{n}": [f"--{one.name}", one.value] for n, one in enumerate(planted[-quarter : -quarter // 2])},
        "words": {f"v{n}": [f"{one.name}={one.value}"] for n, one in enumerate(planted[-quarter // 2 :])},
    }


def as_words(planted: list[Planted]) -> list[str]:
    """Every other one as `--name=value`."""
    words = []
    for place, one in enumerate(planted):
        joined = place % 2 or one.value.startswith("-")
        words += [f"--{one.name}={one.value}"] if joined else [f"--{one.name}", one.value]
    return words


def as_text(planted: list[Planted]) -> str:
    return "\n".join(f"{one.name}={one.value}" for one in planted)


COMMAND = (sys.executable, "train.py", *as_words(ARGUMENTS), *as_words(FINE_ARGUMENTS))


class Place:
    """A folder to work in, and what flatout has said there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""
        points = {"factory": "engine_parts:Points", "args": {one.name: one.value for one in YAML}}
        inputs = {
            "train.py": TRAIN,
            "engine_parts.py": PARTS,
            "config.yaml": yaml.safe_dump(nested(YAML) | {"fine": {one.name: one.value for one in FINE_YAML}}),
            "config.json": json.dumps(nested(JSON) | {"fine": {one.name: one.value for one in FINE_JSON}}),
            "my_config.py": f"SERVICE = { {one.name: one.value for one in MODULE} }\n",
            "engine.yaml": yaml.safe_dump(ENGINE | {"data": {"train": points, "workers": 0}}),
        }
        for name, text in inputs.items():
            (folder / name).write_text(text)
        shutil.copy("/bin/sleep", folder / f"{PROCESS.name}={PROCESS.value}")
        self._inputs = {path.name for path in folder.iterdir()}

    def flatout(self, *words: str, env: dict[str, str] | None = None, code: int = 0) -> None:
        """Run a verb to its end."""
        planted = {one.name: one.value for one in ENVIRONMENT}
        environment = {**os.environ, **planted, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", **(env or {})}
        ended = subprocess.run(
            [*FLATOUT, *words],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        self.said += ended.stdout + ended.stderr

    def written(self, suffix: str = "") -> dict[str, str]:
        """Every file that was written there."""
        files = (path for path in self.folder.rglob(f"*{suffix}") if path.is_file() and path.name not in self._inputs)
        found = {str(path.relative_to(self.folder)): path for path in files if path.suffix != ".pyc"}
        return {name: path.read_text(errors="replace") for name, path in found.items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where every verb has been run."""
    place = Place(tmp_path_factory.mktemp("place"))
    place.flatout("run", "--trace", "run", "--json", "run.json", "--html", "run.html", "--", *COMMAND)
    trials = ("--budget", "40s", "--steps", "20", "--only", "channels-last", "--json", "fix.json", "--html", "fix.html")
    place.flatout("fix", *trials, "--", *COMMAND, env={"SAY": as_text(PRINTED)})
    place.flatout("fix", "--budget", "20s", "--", *COMMAND, env={"RAISE": as_text(RAISED)}, code=2)
    place.flatout("report", "run", "--json", "report.json", "--html", "report.html")
    (before,) = place.folder.glob("flatout-runs/*/before")
    place.flatout("compare", "run", str(before), "--json", "compare.json", "--html", "compare.html")
    for to in ((), ("--json", "check.json")):
        place.flatout("check", "train.py", "--config", "config.yaml", *to, "--", *COMMAND[2:])
    place.flatout(
        "train", "engine.yaml", "--explain", *(f"data.train.args.{one.name}={one.value}" for one in JSON[:20])
    )
    with subprocess.Popen([f"./{PROCESS.name}={PROCESS.value}", "60"], cwd=place.folder) as sleeping:
        place.flatout("top", "--record", "top", "--duration", "1", "--interval", "0.25", "--pid", str(sleeping.pid))
        sleeping.terminate()
    place.flatout("top", "--replay", "top", "--json", "top.json")
    return place


def test_there_are_200_of_each() -> None:
    assert len({one.marker for one in ALL}) == len({one.marker for one in ALL_FINE}) == 200


def test_no_secret_comes_out_of_any_verb(place: Place) -> None:
    written = place.written()

    assert {"run.html", "fix.json", "compare.html", "check.json", "flatout-plan.yaml"} <= written.keys()
    assert any(name.endswith("before/output.txt") for name in written)
    leaks = {name: markers for name, text in written.items() if (markers := found(text, ALL))}
    assert leaks == {}
    assert found(place.said, ALL) == set()


def test_every_look_alike_comes_out(place: Place) -> None:
    written = place.written()

    for name in ("run.json", "report.json"):
        assert {one.name for one in ALL_FINE if one.marker not in written[name]} == set()
    recorded = trace.read(place.folder / "run")
    commands = [info.command for info in (recorded.ranks[0].info, *recorded.machines)]
    commands.append(json.loads(written["fix.json"])["command"])
    for command in commands:
        assert found(" ".join(command), FINE_ARGUMENTS) == {one.marker for one in FINE_ARGUMENTS}


def test_what_a_command_has_printed_is_for_its_owner_alone(place: Place) -> None:
    (kept,) = place.folder.glob("flatout-runs/*/before/output.txt")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert HIDDEN in kept.read_text()
