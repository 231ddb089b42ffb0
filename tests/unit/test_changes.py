"""A plan that could not be carried out is refused before anything runs, in one line that says what to do."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from flatout.model import changes
from flatout.model.changes import CHANGES, ChangeSpec
from flatout.model.errors import UsageError
from flatout.model.frameworks import BUILD_LOADERS
from flatout.model.plan import Change, Plan, Safety

ROOT = Path(__file__).parents[2]


def plan(name: str, value: Any, knob: str = "") -> Plan:
    return Plan(changes=(Change(name=name, value=value, safety="equivalent", knob=knob),))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (plan("complie", "default"), "change 1 (complie): flatout knows no such change (did you mean compile?)"),
        (plan("zzz", 1), "flatout knows no such change (there are loader, num_workers"),
        (plan("precision", "bf-16"), "change 1 (precision): value must be tf32 or bf16 or fp16 (got 'bf-16')"),
        (plan("num_workers", True), "value must be a whole number from 0 (got True)"),
        (plan("num_workers", -1), "value must be a whole number from 0 (got -1)"),
        (plan("prefetch_factor", 0), "value must be a whole number from 1 (got 0)"),
        (plan("pin_memory", 1), "value must be true or false (got 1)"),
        (plan("compile", True), "value must be default or reduce-overhead or max-autotune (got True)"),
        (plan("fused_optimizer", False), "value must be true (got False)"),
        (plan("batch_size", 64), "needs a knob, such as --batch-size: nothing else can set it"),
        (plan("learning_rate", 0.1), "needs a knob, such as --learning-rate"),
        (plan("setting:amp", "bf16"), "needs a knob, such as --amp or train.yaml:amp"),
    ],
)
def test_a_wrong_change_is_named(wrong: Plan, complaint: str) -> None:
    with pytest.raises(UsageError) as raised:
        changes.check(wrong, "plan.yaml")
    assert complaint in str(raised.value)
    assert str(raised.value).startswith("plan.yaml: change 1")


def value_of(spec: ChangeSpec) -> Any:
    """A value the change takes."""
    return next(value for value in (True, "elastic", "tf32", "default", 4) if spec.takes.fit(value))


@pytest.mark.parametrize("spec", CHANGES, ids=lambda spec: spec.name)
def test_a_change_takes_the_values_it_says_and_no_others(spec: ChangeSpec) -> None:
    value = value_of(spec)
    with pytest.raises(UsageError) if spec.advice_only else contextlib.nullcontext():
        changes.check(plan(spec.name, value, knob="--knob" if spec.knob_only else ""), "plan.yaml")
    assert not any(spec.takes.fit(wrong) for wrong in ("nonsense", -1, None))
    assert str(value).lower() in spec.takes.words or spec.takes.words.startswith("a ")


@pytest.mark.parametrize("spec", CHANGES, ids=lambda spec: spec.name)
def test_a_definition_is_complete(spec: ChangeSpec) -> None:
    assert spec.does.endswith(".")
    assert spec.safety in get_args(Safety)
    assert spec.as_code(value_of(spec))
    assert "{" not in spec.as_code(value_of(spec))
    for key in spec.code_for:
        framework, _, value = key.rpartition(":")
        assert framework in ("", *BUILD_LOADERS)
        assert spec.takes.fit(value) or value in BUILD_LOADERS
    assert all(map(spec.takes.fit, spec.behind_imports))
    if spec.settings:
        re.compile(spec.settings)


def test_a_live_change_has_on_and_off() -> None:
    files = (ROOT / "src/flatout/inside/changes").glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    bodies = [set(map(ast.unparse, node.body)) for node in nodes if isinstance(node, ast.ClassDef)]
    switchable = {spec.name for spec in CHANGES if any(f"name = '{spec.name}'" in body for body in bodies)}
    live = {spec.name for spec in CHANGES if spec.live}
    assert not live - switchable, "there is no LiveChange of this name in inside/changes"
    assert not switchable - live, "its ChangeSpec does not say live=True"


def test_what_a_change_cannot_do_is_in_the_guide() -> None:
    headings = re.findall(r"^### (.+)$", (ROOT / "docs/CHANGES.md").read_text(), re.MULTILINE)
    there = {name for heading in headings for name in heading.split(", ")}
    assert not set(changes.TO_MAKE) - there, 'without an entry under "What each cannot do" in docs/CHANGES.md'


def test_a_change_has_one_definition() -> None:
    names = [spec.name for spec in CHANGES]
    assert len(names) == len(set(names))


def test_a_knob_decides_which_values_it_takes() -> None:
    changes.check(plan("num_workers", "as the script likes it", knob="--workers"), "plan.yaml")


def test_auto_is_a_plan_that_is_carried_out() -> None:
    for strict in (False, True):
        changes.check(changes.auto(strict=strict), "--auto")
    assert {change.safety for change in changes.auto(strict=True).changes} == {"identical"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ("--plan", "plan.yaml"),
            "plan.yaml: change 1 (complie): flatout knows no such change (did you mean compile?)",
        ),
        (("--plan", "missing.yaml"), "no such file: missing.yaml"),
        (("--strict",), "--strict goes with --auto"),
        (("--auto", "--plan", "plan.yaml"), "--plan and --auto: give one of them"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, options: tuple[str, ...], complaint: str) -> None:
    plan("complie", "default").save(tmp_path / "plan.yaml")
    command = [sys.executable, "-m", "flatout", "run", *options, "--", sys.executable, "-c", "print('it ran')"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"flatout: {complaint}\n")
