"""Which values are known without running: literals, settings by their name, and names followed one step."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_cases import check_script, line_of

from flatout.check import NOT_APPLICABLE, WARN

LOADER = "from torch.utils.data import DataLoader\nloader = DataLoader(train_set, 32, num_workers={})\n"
ARGPARSE = """
import argparse
from torch.utils.data import DataLoader
parser = argparse.ArgumentParser()
parser.add_argument("-j", "--workers", type=int, default=40)
args = parser.parse_args()
loader = DataLoader(train_set, 32, num_workers=args.workers)
"""


def workers_in(folder: Path, text: str, *flags: str, config: str | None = None) -> str | None:
    """What the check says of the workers in a script; None where it cannot tell."""
    script, path = folder / "train.py", folder / "settings.yaml"
    script.write_text(text)
    if config is not None:
        path.write_text(config)
    line = line_of(check_script(script, *flags, config=path if config is not None else None), "workers")
    return line.reason if line.status != NOT_APPLICABLE else None


KNOWN = {
    "a literal": LOADER.format("40"),
    "a name": "workers = 40\n" + LOADER.format("workers"),
    "a name in a function": "def main():\n    workers = 40\n    " + LOADER.format("workers").replace("\n", "\n    "),
    "the cores of the machine": "import os\nworkers = os.cpu_count()\n" + LOADER.format("workers if many else None"),
    "a dict of options": (
        "from torch.utils.data import DataLoader\noptions = {'num_workers': 40}\n"
        "loader = DataLoader(train_set, 32, **options)\n"
    ),
    "an argument's default": ARGPARSE,
    "a name for an argument": ARGPARSE.replace("=args.workers", "=count") + "count = args.workers\n",
}


@pytest.mark.parametrize("text", KNOWN.values(), ids=KNOWN.keys())
def test_a_value_is_known(tmp_path: Path, text: str) -> None:
    reason = workers_in(tmp_path, text)
    assert reason in ("num_workers=40, but this process may use 16 cores: 14 for loading", "num_workers=16 on 16 cores")


UNKNOWN = {
    "what an object without settings has": ARGPARSE.replace("args.workers)", "pool.workers)"),
    "a setting the script changes": ARGPARSE.replace("loader =", "args.workers = 2\nloader ="),
    "an argument without a default": ARGPARSE.replace(", default=40", ""),
    "what a function returns": LOADER.format("pick()"),
    "one of two values": "workers = 40\nif fast():\n    workers = 4\n" + LOADER.format("workers"),
    "a parameter": "def build(workers):\n    pass\nworkers = 40\n" + LOADER.format("workers"),
    "the environment": "import os\n" + LOADER.format("int(os.environ['WORKERS'])"),
    "counted up": "workers = 40\nworkers -= busy\n" + LOADER.format("workers"),
    "a name that defines itself": "workers = workers\n" + LOADER.format("workers"),
    "two steps away": "first = 40\nworkers = first\n" + LOADER.format("workers"),
}


@pytest.mark.parametrize("text", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_value_that_only_a_run_can_tell_is_not_guessed(tmp_path: Path, text: str) -> None:
    assert workers_in(tmp_path, text) is None


SPELLINGS = [
    "cfg.loader.workers",
    "self.cfg.loader.workers",
    "cfg['loader']['workers']",
    "config.get('loader')['workers']",
    "getattr(cfg.loader, 'workers', 2)",
    "opts.workers",
    "cfg.workers and on_gpu",
]


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_setting_is_found_however_the_script_writes_it(tmp_path: Path, name: str) -> None:
    reason = workers_in(tmp_path, LOADER.format(name), config="loader:\n  workers: 40\n")
    assert (reason or "").startswith("num_workers=40, but")


def test_a_path_tells_settings_of_one_name_apart(tmp_path: Path) -> None:
    config = "train:\n  workers: 40\nval:\n  workers: 2\n"
    assert "num_workers=40, but" in (workers_in(tmp_path, LOADER.format("cfg.train.workers"), config=config) or "")
    assert workers_in(tmp_path, LOADER.format("cfg.workers"), config=config) is None


@pytest.mark.parametrize("flags", [("--workers", "4"), ("--workers=4",), ("-j", "4"), ("--work", "4")])
def test_flags_override_defaults_and_config(tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert workers_in(tmp_path, ARGPARSE, *flags) == "num_workers=4 on 16 cores"
    assert workers_in(tmp_path, ARGPARSE, *flags, config="workers: 40\n") == "num_workers=4 on 16 cores"


def test_a_config_overrides_the_defaults_of_arguments(tmp_path: Path) -> None:
    assert workers_in(tmp_path, ARGPARSE, config="workers: 3\n") == "num_workers=3 on 16 cores"


def test_a_module_of_the_script_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(ARGPARSE)
    reason = workers_in(tmp_path, "import data\nimport torch\n")
    assert (reason or "").startswith("num_workers=40, but")


def test_a_config_alone_is_judged_by_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data:\n  num_workers: 40\n  pin_memory: false\n")
    fixes = {line.subject: line.fix for line in check_script(None, config=path).with_status(WARN)}
    assert fixes == {"workers": "data.num_workers: 14", "pin_memory": "data.pin_memory: true"}


def test_a_json_config_with_tabs(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n\t"num_workers":\t40\n}')
    line = line_of(check_script(None, config=path), "workers")
    assert "num_workers=40" in line.reason
    assert (line.where or "").endswith("a.json:2")
