"""The public vocabulary: every cause has an entry in the guide that the reports point to."""

from __future__ import annotations

import ast
import inspect
import re

from flatout.diagnose import compute_rules, host_rules, knobs, loading_rules, machine_rules, rules
from flatout.fix import offers
from flatout.model.causes import CAUSES, CODES
from flatout.model.changes import BY_NAME, CHANGES
from flatout.model.guide import GUIDE


def test_every_cause_has_an_entry_in_the_guide() -> None:
    text = GUIDE.read_text()
    entries = re.findall(r"^### (\S+)\n([^#]+)", text, re.MULTILINE)
    there = [code for code, _ in entries]
    assert not set(CODES) - set(there), "without an entry in docs/TROUBLESHOOTING.md"
    assert there == list(CODES), "the entries come in the order of model/causes.py"
    assert all(len(said) > 80 for _, said in entries)


def test_every_change_that_cures_a_cause_is_defined() -> None:
    assert {change for cause in CAUSES for change in cause.changes} <= BY_NAME.keys()


def test_every_change_that_a_finding_can_name_is_offered_by_fix_or_is_advice_only() -> None:
    words = ast.walk(ast.parse(inspect.getsource(offers)))
    offered = {word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)}
    named = {change for cause in CAUSES for change in cause.changes}
    missing = named - offered - set(offers.PAUSES) - {spec.name for spec in CHANGES if spec.advice_only}
    assert not missing, "no function of fix/offers.py offers it"


def test_a_cause_is_defined_once_and_in_words() -> None:
    assert len(set(CODES)) == len(CODES)
    assert all(cause.because and not cause.because.endswith(".") for cause in CAUSES)


def test_the_guide_has_the_symptoms_people_come_with() -> None:
    text = GUIDE.read_text()
    symptoms = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert {"It got slower", "Out of memory", "CPU at 100%", "Compile fails", "No gain"} <= set(symptoms)


FAMILIES = (compute_rules, host_rules, loading_rules, machine_rules)


def test_every_rule_of_a_family_is_asked() -> None:
    """GIVEN a function of a rules file that says what it finds of a rank, THEN it is in RULES or RANK_RULES."""
    asked = {rule.__qualname__ for rule in (*rules.RULES, *rules.RANK_RULES)}
    for family in FAMILIES:
        for name, function in inspect.getmembers(family, inspect.isfunction):
            finds = inspect.signature(function).return_annotation == "Finding | None"
            if finds and function.__module__ == family.__name__ and not name.startswith("_"):
                assert name in asked, f"{family.__name__}.{name} is in no list of rules.py"


def test_every_cause_is_said_by_some_rule() -> None:
    said = "".join(inspect.getsource(module) for module in (*FAMILIES, rules, knobs))
    assert not [code for code in CODES if f'"{code}"' not in said], "no rule in diagnose/ says it"
