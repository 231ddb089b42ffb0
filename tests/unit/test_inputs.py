"""What people write for flatout to read is read, or refused in one line: none of it holds up or ends the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.engine import load as load_config
from flatout.model.errors import UsageError
from flatout.model.inputs import MOST_NODES, UNREAD, load_json, load_yaml, read_settings, text_of
from flatout.model.plan import Plan

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
LONG_TEXTS = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]\n"
STAIRS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200))
BAD = {
    "a bomb of aliases": (BOMB, f"line 6: it holds more than {MOST_NODES:,} values"),
    "a long text repeated": (LONG_TEXTS, f"line 2: it holds more than {MOST_NODES:,} values"),
    "stairs of aliases": (STAIRS, "with its aliases it is nested deeper than 100 levels"),
    "itself": ("a: {b: &b [*b]}\n", "line 1: *b contains itself"),
    "brackets": ("a: " + "[" * 5000, "line 1: it is nested deeper than 100 levels"),
    "braces": ("\na: " + "{b: " * 5000, "line 2: it is nested deeper than 100 levels"),
    "a long number": (f"a: {'9' * 5000}\n", "line 1: '99999"),
    "a long number to another base": (f"a: 0x{'f' * 5000}\n", "line 1: '0xfff"),
    "a long key": (f"? {'k' * 5000}\n: 1\n", "line 1: a key of 5000 letters"),
    "a date that is none": ("a: 1\nb: 2001-99-99\n", "line 2: '2001-99-99' is not a valid timestamp"),
    "a tag on what it is not for": ("a: !!timestamp soon\n", "line 1: 'soon' is not a valid timestamp"),
    "a tag with nothing": ("a: !!int ''\n", "line 1: '' is not a valid int"),
    "a call": ("a: !!python/object/apply:os.system [ls]\n", "line 1: this is not YAML: could not determine"),
    "NUL": ("a: \0\n", "this is not YAML: unacceptable character"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_text_that_would_hold_up_or_end_the_process_is_one_line(name: str) -> None:
    text, complaint = BAD[name]
    with pytest.raises(UsageError) as raised:
        load_yaml(text, "file.yaml")
    assert str(raised.value).startswith("file.yaml")
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("read", [Plan.load, load_config])
def test_plans_and_training_configs_are_read_that_way(tmp_path: Path, read: Callable[[Path], Any], name: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(BAD[name][0])
    with pytest.raises(UsageError) as raised:
        read(path)
    assert BAD[name][1] in str(raised.value)


@pytest.mark.parametrize("name", ["a bomb of aliases", "itself", "brackets"])
def test_configs_that_are_checked_are_read_that_way(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(BAD[name][0])
    with pytest.raises(UsageError, match="line"):
        read_settings(path)


def test_what_only_another_program_can_read_is_unread(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    text = f"lr: 1\nlr: 2\nwhen: 2001-99-99\nwhat: !mine {{a: 1}}\nmodel: !!timestamp soon\nmany: 0x{'f' * 5000}\n"
    path.write_text(text)
    settings = {".".join(name): value for name, (value, _) in read_settings(path).items()}
    assert settings["lr"] == 2
    assert settings["when"] is settings["model"] is settings["many"] is UNREAD


def test_settings_know_their_lines_and_what_is_merged_into_them(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &base\n  lr: 0.1\n  deep: !mine 3\ntrain:\n  <<: *base\n  epochs: 10\n")
    settings = read_settings(path)
    assert settings["train", "lr"][0] == 0.1
    assert settings["train", "epochs"] == (10, 6)
    assert settings["train", "deep"][0] is UNREAD


def test_what_is_usual_is_read() -> None:
    text = "base: &base {lr: 0.1, steps: 1_000}\nrun:\n  <<: *base\n  lr: 0.2\n  when: 2001-09-09\n"
    assert load_yaml(text, "file.yaml")["run"] | {"when": None} == {"lr": 0.2, "steps": 1000, "when": None}


def test_one_anchor_merged_in_two_places_is_no_key_twice() -> None:
    """The one below has a key of the one it merges; a deeper one has been merged before it is read itself."""
    text = "z: &z {b: 1}\nx: {y: {w: &a {<<: *z, b: 2}}}\nc: {<<: *a}\n"
    assert load_yaml(text, "file.yaml")["c"] == {"b": 2}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * 100_000, "nested too deeply"),
        (f'{{"a": {"9" * 5000}}}', "a number in it cannot be read"),
        ('{\n"a": }', "line 2: this is not JSON"),
    ],
)
def test_json_is_one_line_too(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        load_json(text, "file.json")


def test_a_file_that_is_no_such_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        text_of(tmp_path / "none")
    with pytest.raises(UsageError, match="Is a directory"):
        text_of(tmp_path)
    with pytest.raises(UsageError, match="cannot read"):
        text_of(Path("a\0b"))
    with pytest.raises(UsageError, match="larger than 1 MB"):
        text_of(Path("/dev/zero"))
    (tmp_path / "windows.yaml").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert text_of(tmp_path / "windows.yaml") == "a: 1\nb: 2\n"
