"""Which modules hold a user's settings."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from flatout.sense.settings import Settings


def test_a_config_module_of_the_users_is_read_and_pythons_own_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_config.py").write_text("num_workers = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    __import__("my_config")
    sysconfig.get_config_vars()  # brings a module that is called _sysconfigdata…
    settings = Settings()
    settings.note_config_modules()
    monkeypatch.delitem(sys.modules, "my_config")
    read = {Path(entry["file"]).name: entry["values"] for entry in settings.read}
    assert read["my_config.py"] == {"num_workers": 3}
    assert not any(name.startswith("_sysconfigdata") or "flatout" in name for name in read)
