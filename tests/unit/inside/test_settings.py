"""Which modules hold a user's settings."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from flatout.inside.start import Settings


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
    read = {Path(entry.file).name: entry.values for entry in settings.read if entry.file}
    assert read["my_config.py"] == {"num_workers": 3}
    assert not any(name.startswith("_sysconfigdata") or "flatout" in name for name in read)


def test_settings_are_cut_and_without_secrets() -> None:
    settings = Settings()
    values = {"lr": 0.1, "hf_token": "abc", "text": "x" * 295 + " ghp_abcdefghijklmnopqrst", "many": list(range(99))}
    settings.loaded("yaml", "config.yaml", values)
    (entry,) = settings.read
    assert entry.values == {"lr": 0.1, "hf_token": "***", "text": "x" * 295 + " ***", "many": list(range(50))}


def test_a_file_a_sample_is_looked_into_a_few_times_only() -> None:
    looked: list[int] = []

    class Watched(dict[str, int]):
        def items(self) -> Any:
            looked.append(1)
            return super().items()

    settings = Settings()
    for number in range(100):
        settings.loaded("json", f"{number}.json", Watched(label=number))
    assert len(settings.read) == len(looked) == 20
