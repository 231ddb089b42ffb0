"""Edits of Python, YAML and JSON: the source before and after, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatout.fix.edit_python import PythonText, is_loader, is_optimizer
from flatout.fix.edit_text import SettingsText, Splice
from flatout.model.errors import UsageError

Edit = Callable[[Any], list[Splice] | None]
IMPORTS = "import torch\nfrom torch.utils.data import DataLoader\n"


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., str | None]:
    """`edited(source, edit)`: the source with that edit; None where it is refused."""

    def make(source: str, edit: Edit, name: str = "train.py") -> str | None:
        path = tmp_path / name
        path.write_bytes(source.encode())
        text = PythonText(path) if name.endswith(".py") else SettingsText(path)
        splices = edit(text)
        return text.after.decode() if splices is not None and text.put(splices) else None

    return make


def line_of(source: str, part: str) -> int:
    return source[: source.index(part)].count("\n") + 1


def workers(source: str, value: int = 8) -> Edit:
    line = line_of(source, "DataLoader(")
    return lambda text: text.set_argument(line, is_loader, "num_workers", str(value))


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("DataLoader(s)", "DataLoader(s, num_workers=8)"),
        ("DataLoader(s,)", "DataLoader(s, num_workers=8,)"),
        ("DataLoader((s))", "DataLoader((s), num_workers=8)"),
        ("DataLoader(s, num_workers=args.workers)", "DataLoader(s, num_workers=8)"),
        ("DataLoader(s, 4, True, None, None, 2, c)", "DataLoader(s, 4, True, None, None, 8, c)"),
        ("DataLoader(s, **more, num_workers=2)", "DataLoader(s, **more, num_workers=8)"),
        ("DataLoader(s,  # all (of) it\n)", "DataLoader(s, num_workers=8,  # all (of) it\n)"),
        ("DataLoader(s,\n    shuffle=True,\n)", "DataLoader(s,\n    shuffle=True,\n    num_workers=8,\n)"),
        ("DataLoader(s,\n\tshuffle=True\n)", "DataLoader(s,\n\tshuffle=True,\n\tnum_workers=8\n)"),
        (
            "DataLoader(s,\n    shuffle=True,  # why\n)",
            "DataLoader(s,\n    shuffle=True, num_workers=8,  # why\n)",
        ),
        ("DataLoader(s, **more)", None),
        ("DataLoader(*s)", None),
        ("[DataLoader(s), DataLoader(s)]", None),  # which one is meant?
    ],
)
def test_an_argument_of_a_call(edited: Callable[..., str | None], call: str, after: str | None) -> None:
    head = f"{IMPORTS}# größer\nx = "
    source = f"{head}{call}  # the loader\n".replace("(*s", "(s, *s")
    expected = f"{head}{after}  # the loader\n" if after else None
    assert edited(source, workers(source)) == expected


def test_of_several_calls_the_one_at_the_line_is_meant(edited: Callable[..., str | None]) -> None:
    source = f"{IMPORTS}train = DataLoader(\n    s,\n)\nval = DataLoader(v)\n"
    assert edited(source, workers(source)) == source.replace("    s,", "    s,\n    num_workers=8,")


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("import torch", "torch.utils.data.DataLoader"),
        ("import torch.utils.data as data", "data.DataLoader"),
        ("from torch.utils import data", "data.DataLoader"),
        ("from torch.utils.data import DataLoader as Loader", "Loader"),
        ("from torch.utils.data.dataloader import DataLoader", "DataLoader"),
    ],
)
def test_a_loader_is_known_however_it_was_imported(edited: Callable[..., str | None], imports: str, call: str) -> None:
    source = f'"""Trains."""\n{imports}\nx = {call}(s, num_workers=4)\n'
    after = f'"""Trains."""\n{imports}\nimport flatout\nx = flatout.DataLoader(s, num_workers="auto")\n'
    assert edited(source, lambda text: text.use_flatout_loader(3)) == after


@pytest.mark.parametrize(
    "above",
    [
        "from mine import DataLoader",
        "from torch.utils.data import *",
        "from torch.utils.data import DataLoader\ndef DataLoader(s): return s",
        "from torch.utils.data import DataLoader\nif fast:\n    from mine import DataLoader",
        "from torch.utils.data import DataLoader\nflatout = 1",
    ],
)
def test_a_name_that_may_be_something_else_is_left_alone(edited: Callable[..., str | None], above: str) -> None:
    source = f"{above}\nx = DataLoader(s)\n"
    assert edited(source, lambda text: text.use_flatout_loader(line_of(source, "x = "))) is None


def test_windows_line_ends_a_mark_and_a_missing_last_one_stay(edited: Callable[..., str | None]) -> None:
    source = "\ufefffrom torch.utils.data import DataLoader\r\nx = DataLoader(\r\n\ts,\r\n)"
    after = source.replace("\r\nx = Data", "\r\nimport flatout\r\nx = flatout.Data").replace(
        "\ts,", '\ts,\r\n\tnum_workers="auto",'
    )
    assert edited(source, lambda text: text.use_flatout_loader(2)) == after


def test_a_fused_optimizer(edited: Callable[..., str | None]) -> None:
    source = "import torch\nopt = torch.optim.AdamW(m.parameters(), lr=1e-3)  # the usual\n"
    after = source.replace("1e-3)", "1e-3, fused=True)")
    assert edited(source, lambda text: text.set_argument(2, is_optimizer, "fused", "True")) == after


@pytest.mark.parametrize(
    ("source", "keys", "after"),
    [
        ("BATCH = 8  # small\nLR = 1\n", ["BATCH"], "BATCH = 64  # small\nLR = 1\n"),
        ("CFG = {'a': 1, 'b': (2)}\n", ["CFG", "b"], "CFG = {'a': 1, 'b': (64)}\n"),
        ("class C:\n    batch: int = 8\n", ["C", "batch"], "class C:\n    batch: int = 64\n"),
        ("class C:\n  n: int = field(default=8)\n", ["C", "n"], "class C:\n  n: int = field(default=64)\n"),
        ("BATCH = 8\n", ["SIZE"], None),
    ],
)
def test_a_setting_in_python(
    edited: Callable[..., str | None], source: str, keys: list[str], after: str | None
) -> None:
    assert edited(source, lambda text: text.set_setting(keys, 64)) == after


@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("p.add_argument('-b', '--batch', type=int, default=8)", "default=64)"),
        ("p.add_argument('--batch', default=16)", None),  # not the value in force
        ("p.add_argument('--batch', default=os.cpu_count())", None),
        ("p.add_argument('--batch', action='store_true', default=8)", None),
        ("p.add_argument('--other', default=8)", None),
    ],
)
def test_the_default_of_an_option(edited: Callable[..., str | None], call: str, after: str | None) -> None:
    expected = call.replace("default=8)", after) if after else None
    assert edited(call, lambda text: text.set_default("--batch", 8, 64)) == expected


@pytest.mark.parametrize(
    ("source", "after"),
    [
        (
            "import torch\nimport os\n\nx = 1\n",
            "import torch\nimport os\ntorch.backends.cudnn.benchmark = True\n\nx = 1\n",
        ),
        (
            "import torch\ntorch.backends.cudnn.benchmark = False  # why\n",
            "import torch\ntorch.backends.cudnn.benchmark = True  # why\n",
        ),
        ("import torch\nif fast:\n    torch.backends.cudnn.benchmark = False\n", None),
        ("import torch\nfrom torch.backends import cudnn\ncudnn.benchmark = False\n", None),
        ("import torch as t\nx = 1\n", None),
    ],
)
def test_a_switch_of_torch(edited: Callable[..., str | None], source: str, after: str | None) -> None:
    assert edited(source, lambda text: text.set_switches("torch.backends.cudnn.benchmark = True")) == after


AUTOCAST = 'with torch.autocast("cuda", dtype=torch.bfloat16):\n'


@pytest.mark.parametrize(
    ("loop", "after"),
    [
        ("\tloss = f(m(x), y)\n\tloss.backward()\n", f"\t{AUTOCAST}\t\tloss = f(m(x), y)\n\tloss.backward()\n"),
        (
            "    out = m(x)\n\n    # the loss\n    loss = f(out, y)\n    scaler.scale(loss).backward()\n",
            f"    {AUTOCAST}        out = m(x)\n\n        # the loss\n        loss = f(out, y)\n"
            "    scaler.scale(loss).backward()\n",
        ),
        ("    out = m(x)\n    show(out)\n    loss = f(out, y)\n    loss.backward()\n", None),
        ("    a, b = m(x)\n    loss = f(a, y)\n    loss.backward()\n", None),
        ("    return m(x)\n", None),
    ],
)
def test_autocast_goes_around_the_forward_pass_and_the_loss(
    edited: Callable[..., str | None], loop: str, after: str | None
) -> None:
    head = "import torch\ndef train():\n"
    expected = f"{head}{after}" if after else None
    assert edited(head + loop, lambda text: text.autocast(3, "cuda")) == expected


def test_a_plan_is_applied_before_anything_else(edited: Callable[..., str | None]) -> None:
    head = '#!/usr/bin/env python\n"""Trains."""\nfrom __future__ import annotations\n\n# first of all\n'
    lines = 'import flatout\nflatout.apply("plan.yaml")\n'
    source = head + "import torch\n"
    assert edited(source, lambda text: text.apply_plan("plan.yaml")) == head + lines + "import torch\n"


YAML = """\
# all settings
train: {amp: yes, lr: 1e-3}   # for now
base: &base
  workers: 4   # too few
val:
  <<: *base
  sizes: [16, 32]
  lr: &lr 0.1
test: {lr: *lr}
text: |
  several lines
"""


@pytest.mark.parametrize(
    ("keys", "value", "before", "after"),
    [
        ("train.amp", False, "yes", "false"),
        ("train.lr", 6e-05, "1e-3", "6.0e-05"),  # without the point PyYAML would read text
        ("val.sizes.1", 64, "32", "64"),
    ],
)
def test_a_value_in_yaml(edited: Callable[..., str | None], keys: str, value: Any, before: str, after: str) -> None:
    text = edited(YAML, lambda text: text.set_value(keys.split("."), value), "c.yaml")
    assert text == YAML.replace(before, after, 1)
    held = yaml.safe_load(text or "")
    for key in keys.split("."):
        held = held[int(key) if key.isdigit() else key]
    assert held == value
    assert type(held) is type(value)


@pytest.mark.parametrize("keys", ["base.workers", "val.workers", "val.lr", "test.lr", "text", "no.such", "train"])
def test_what_an_alias_repeats_or_is_no_plain_value_stays(edited: Callable[..., str | None], keys: str) -> None:
    assert edited(YAML, lambda text: text.set_value(keys.split("."), 8), "c.yaml") is None


def test_a_value_in_json(edited: Callable[..., str | None]) -> None:
    source = '{\t"train": {"amp": false,\t"lr": 1e-3}}\n'
    after = edited(source, lambda text: text.set_value(["train", "amp"], True), "c.json")
    assert after == source.replace("false", "true")


def test_an_edit_over_another_is_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("x = 1\n")
    text = PythonText(path)
    assert text.put([Splice(4, 5, "2")])
    assert text.put([Splice(4, 5, "2")])  # the same once more
    assert not text.put([Splice(0, 0, "y = 1\n"), Splice(4, 5, "3")])
    assert not text.put([Splice(5, 5, " +")])  # no longer Python
    assert text.after == b"x = 2\n"


def test_what_is_no_text_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(b"x = '\xff'\n")
    with pytest.raises(UsageError, match="not text in UTF-8"):
        PythonText(path)
