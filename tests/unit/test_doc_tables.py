"""The tables in the guides are those that the definitions give."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doc_tables", DOCS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_in_the_guides_are_up_to_date(tables: ModuleType) -> None:
    stale = [path.name for path in DOCS.glob("*.md") if tables.filled(path.read_text()) != path.read_text()]
    assert not stale, "run python docs/tables.py"


def test_every_table_stands_in_a_guide(tables: ModuleType) -> None:
    guides = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert all(f"<!-- table: {name} -->" in guides for name in tables.TABLES)


def test_a_table_is_replaced_and_the_text_around_it_is_kept(tables: ModuleType) -> None:
    text = "before\n<!-- table: causes -->\n| OUTDATED |\n<!-- end of table -->\nafter\n"
    new = tables.filled(text)
    assert new.startswith("before\n<!-- table: causes -->\n| cause |")
    assert new.endswith("\n<!-- end of table -->\nafter\n")
    assert "OUTDATED" not in new
