"""The public vocabulary: every cause has an entry in the guide that the reports point to."""

from __future__ import annotations

import re

from flatout.model.finding import CODES
from flatout.report.findings import GUIDE


def test_every_cause_has_an_entry_in_the_guide() -> None:
    text = GUIDE.read_text()
    entries = re.findall(r"^### (\S+)\n([^#]+)", text, re.MULTILINE)
    assert [code for code, _ in entries] == list(CODES)
    assert all(len(said) > 80 for _, said in entries)


def test_the_guide_has_the_symptoms_people_come_with() -> None:
    text = GUIDE.read_text()
    symptoms = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert {"It got slower", "Out of memory", "CPU at 100%", "Compile fails", "No gain"} <= set(symptoms)
