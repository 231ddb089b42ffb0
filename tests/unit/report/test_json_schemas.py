"""What programs read is as docs/json says: real results against the schemas."""

from __future__ import annotations

import dataclasses
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

sys.path.insert(0, str(Path(__file__).parents[1] / "check"))
sys.path.insert(0, str(Path(__file__).parents[1] / "fix"))

from check_cases import SCRIPTS, check_script
from simulated_world import Machine, World

from flatout.fix.offers import Wishes
from flatout.fix.runs import EDIT
from flatout.fix.search import Search
from flatout.fix.try_edit import EditResult, TryOut
from flatout.report import RecordedRun, TrySummary, compare, read_run, summarize
from flatout.report.account import Price
from flatout.report.page import page
from flatout.trace import Facts

ROOT = Path(__file__).parents[3]
RECORDINGS = sorted((ROOT / "tests" / "traces").glob("*.tgz"))
SCHEMAS = {path.name: json.loads(path.read_text()) for path in (ROOT / "docs" / "json").glob("*.json")}
REGISTRY: Registry[Any] = Registry().with_resources((name, Resource.from_contents(it)) for name, it in SCHEMAS.items())


def mismatches(data: dict[str, Any], schema: str) -> list[str]:
    validator = Draft202012Validator(SCHEMAS[schema], registry=REGISTRY)
    written = json.loads(json.dumps(data, default=str))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(written)]


def recorded(name: str, folder: Path) -> RecordedRun:
    with tarfile.open(ROOT / "tests" / "traces" / f"{name}.tgz") as archive:
        archive.extractall(folder / name, filter="data")
    return read_run([folder / name], Price.of("$2.5/h"))


def fixed(world: World, **wishes: str) -> dict[str, Any]:
    found = Search(world, Wishes.of(**wishes), budget_s=600, clock=world.clock).run()
    return summarize(found, ("python", "train.py"), "flatout-plan.yaml", Price.of("2/h")).to_json()


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_and_refuses_a_key_that_it_does_not_have(name: str) -> None:
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert any("'undocumented' was unexpected" in found for found in mismatches({"undocumented": 1}, name))


@pytest.mark.parametrize("recording", [path.stem for path in RECORDINGS])
def test_a_report_is_as_documented(recording: str, tmp_path: Path) -> None:
    assert mismatches(recorded(recording, tmp_path).to_json(), "run.json") == []


@pytest.mark.parametrize("recording", [path.stem for path in RECORDINGS])
def test_a_report_can_be_shown(recording: str, tmp_path: Path) -> None:
    assert recording in page(recorded(recording, tmp_path))


def test_all_that_can_be_in_force_is_documented() -> None:
    documented = SCHEMAS["run.json"]["$defs"]["facts"]["properties"]
    assert {known.name for known in dataclasses.fields(Facts)} <= documented.keys()


@pytest.mark.parametrize("other", ["cpu-data.cpu-bound", "cpu-data.main-thread", "h200-sync.item"])
def test_a_comparison_is_as_documented(other: str, tmp_path: Path) -> None:
    one = recorded("cpu-data.main-thread", tmp_path)
    assert mismatches(compare(one, recorded(other, tmp_path)).to_json(), "compare.json") == []


def test_a_checklist_is_as_documented() -> None:
    for script in (None, *sorted(SCRIPTS.glob("*.py"))[:5]):
        assert mismatches(check_script(script).to_json(), "check.json") == []


@pytest.mark.parametrize(
    ("machine", "allow"), [(Machine(data_ms=80.0), ""), (Machine(), ""), (Machine(eval_s=2.0), "all")]
)
def test_a_fix_is_as_documented(machine: Machine, allow: str) -> None:
    assert mismatches(fixed(World(machine=machine, length=19_200), allow=allow), "fix.json") == []


@pytest.mark.parametrize("crash", [{}, {EDIT: "NameError: name 'x' is not defined"}])
def test_a_try_is_as_documented(crash: dict[str, str]) -> None:
    world = World(length=19_200, crash=crash)
    tried = TryOut(world, [EditResult(name="a.diff"), EditResult(name="b.diff")], budget_s=300, clock=world.clock).run()
    assert mismatches(TrySummary(command=("python", "train.py"), result=tried).to_json(), "try.json") == []
