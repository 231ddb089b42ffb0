"""What can be told of a value without running: through names, dicts, parameters, branches; settings by their name."""

from __future__ import annotations

from pathlib import Path

import pytest
from preflight_cases import SCRIPTS, line, look_over

from flatout.check.checklist import WARN
from flatout.check.settings import read_command, read_data

LOADER = "from torch.utils.data import DataLoader\nloader = DataLoader(train_set, 32, num_workers=workers)\n"


def workers_of(folder: Path, text: str, *flags: str, config: str | None = None) -> str:
    """What the check says of the workers in a script."""
    script = folder / "train.py"
    script.write_text(text)
    written = folder / "settings.yaml"
    if config is not None:
        written.write_text(config)
    return line(look_over(script, *flags, config=written if config is not None else None), "workers").reason


ARGPARSE = """
import argparse
from torch.utils.data import DataLoader
def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("-j", "--workers", dest="threads", type=int, default=40)
    return parser.parse_args()
def build(options):
    return DataLoader(train_set, 32, num_workers=options.threads)
args = parse()
loader = build(args)
"""

WAYS = {
    "a literal": "workers = 40\n" + LOADER,
    "arithmetic": "workers = 2 * (16 + 4)\n" + LOADER,
    "the cores of the machine": "import os\nworkers = os.cpu_count() * 2 + 8\n" + LOADER,
    "a branch not taken": "debug = False\nworkers = 40\nif debug:\n    workers = 0\n" + LOADER,
    "both branches alike": "workers = 40 if fast() else 40\n" + LOADER,
    "a GPU is there": "import torch\nworkers = 40 if torch.cuda.is_available() else 0\n" + LOADER,
    "two names at once": "size, workers = 32, 40\n" + LOADER,
    "two names at once, where another function has the same": (
        "def other():\n    size, workers = 8, 2\n"
        "def main():\n    size, workers = 32, 40\n    " + LOADER.replace("\n", "\n    ").rstrip() + "\n"
    ),
    "a dict": "options = {'workers': 40}\nworkers = options['workers']\n" + LOADER,
    "a class of settings": "class CFG:\n    workers = 40\nworkers = CFG.workers\n" + LOADER,
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    workers: int = 40\n"
        "cfg = Config()\nworkers = cfg.workers\n" + LOADER
    ),
    "get with a default": "options = dict(size=3)\nworkers = options.get('workers', 40)\n" + LOADER,
    "an argument's default, through functions": ARGPARSE,
    "a default of a parameter": (
        "from torch.utils.data import DataLoader\ndef build(data, workers=40):\n"
        "    return DataLoader(data, 32, num_workers=workers)\nloader = build(train_set)\n"
    ),
    "an attribute of self": (
        "from torch.utils.data import DataLoader\nclass Trainer:\n    def __init__(self, workers):\n"
        "        self.workers = workers\n    def load(self):\n"
        "        return DataLoader(train_set, 32, num_workers=self.workers)\nTrainer(40).load()\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", WAYS.values(), ids=WAYS.keys())
def test_a_value_is_followed_to_where_it_is_said(tmp_path: Path, text: str) -> None:
    assert workers_of(tmp_path, text).startswith("num_workers=40, but")


CFG = "from torch.utils.data import DataLoader\nloader = DataLoader(train_set, 32, num_workers={})\n"


CARRIED = [
    "cfg.loader.workers",
    "self.cfg.loader.workers",
    "cfg['loader']['workers']",
    "config.get('loader')['workers']",
    "getattr(cfg.loader, 'workers', 2)",
    "opts.workers",
]


@pytest.mark.parametrize("name", CARRIED)
def test_a_setting_is_known_by_its_name_however_it_is_carried(tmp_path: Path, name: str) -> None:
    config = "loader:\n  workers: 40\n"
    assert workers_of(tmp_path, CFG.format(name), config=config).startswith("num_workers=40, but")


def test_a_path_tells_settings_of_one_name_apart(tmp_path: Path) -> None:
    config = "train:\n  workers: 40\nval:\n  workers: 2\n"
    assert "num_workers=40, but" in workers_of(tmp_path, CFG.format("cfg.train.workers"), config=config)
    assert "not told" in workers_of(tmp_path, CFG.format("cfg.workers"), config=config)


UNTOLD = {
    "an object that carries no settings": (
        "import argparse\nargparse.ArgumentParser().add_argument('--workers', type=int, default=40)\n"
        "workers = pool.workers\n" + LOADER
    ),
    "a class of settings that something else fills": (
        "class Config:\n    workers: int = 40\ncfg = Config(**read())\nworkers = cfg.workers\n" + LOADER
    ),
    "a setting the script changes": "class CFG:\n    workers = 40\nCFG.workers = 2\nworkers = CFG.workers\n" + LOADER,
    "what a function returns": "def pick():\n    return 40\nworkers = pick()\n" + LOADER,
    "both branches possible": "workers = 40\nif fast():\n    workers = 4\n" + LOADER,
    "two callers": (
        "from torch.utils.data import DataLoader\n"
        "def build(workers):\n    return DataLoader(train_set, 32, num_workers=workers)\n"
        "build(40)\nbuild(4)\n"
    ),
    "the environment": "import os\nworkers = int(os.environ['WORKERS'])\n" + LOADER,
    "counted up": "workers = 40\nworkers -= busy\n" + LOADER,
    "a name that defines itself": "workers = workers + 1\n" + LOADER,
    "a method of what cannot be seen": (
        "from torch.utils.data import DataLoader\nclass Data:\n    def load(self):\n"
        "        return DataLoader(train_set, 32, num_workers=self.count())\nData().load()\n"
    ),
    "self": (
        "from torch.utils.data import DataLoader\nclass Data:\n    def load(self):\n"
        "        return DataLoader(train_set, 32, num_workers=len(self) and self)\nData().load()\n"
    ),
    "division by nothing": "workers = 40 // 0\n" + LOADER,
}  # fmt: skip


@pytest.mark.parametrize("text", UNTOLD.values(), ids=UNTOLD.keys())
def test_a_value_that_cannot_be_told_is_not_guessed(tmp_path: Path, text: str) -> None:
    assert workers_of(tmp_path, text) == "num_workers: not told by the source alone"


def test_flags_override_defaults(tmp_path: Path) -> None:
    assert "num_workers=4 on" in workers_of(tmp_path, ARGPARSE, "--workers", "4")
    assert "num_workers=4 on" in workers_of(tmp_path, ARGPARSE, "--workers=4")
    assert "num_workers=4 on" in workers_of(tmp_path, ARGPARSE, "-j", "4")


def test_a_config_whose_keys_become_arguments(tmp_path: Path) -> None:
    text = """
import argparse, yaml
from torch.utils.data import DataLoader
parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=2)
parser.set_defaults(**yaml.safe_load(open("settings.yaml")))
args = parser.parse_args()
loader = DataLoader(train_set, 32, num_workers=args.workers)
"""
    assert "num_workers=40, but" in workers_of(tmp_path, text, config="workers: 40\n")
    assert "num_workers=3 on" in workers_of(tmp_path, text, "--workers", "3", config="workers: 40\n")


def test_a_config_that_is_found_by_the_default_of_its_flag(tmp_path: Path) -> None:
    (tmp_path / "fast.yaml").write_text("loader:\n  workers: 40\n")
    text = """
import argparse, yaml
from pathlib import Path
from torch.utils.data import DataLoader
parser = argparse.ArgumentParser()
parser.add_argument("--config", type=Path, default=Path(__file__).parent / "fast.yaml")
args = parser.parse_args()
cfg = yaml.safe_load(args.config.read_text())
loader = DataLoader(train_set, 32, num_workers=cfg["loader"]["workers"])
"""
    assert "num_workers=40, but" in workers_of(tmp_path, text)


def test_constants_of_an_imported_config_module(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("WORKERS = 40\n")
    for start, name in (("import settings", "settings.WORKERS"), ("from settings import WORKERS as w", "w"),
                        ("from settings import *", "WORKERS")):  # fmt: skip
        assert "num_workers=40, but" in workers_of(tmp_path, f"{start}\nworkers = {name}\n{LOADER}")


def test_yaml_knows_its_lines_merges_and_strange_tags(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base: &base\n  lr: 0.1\n  deep: !mine 3\ntrain:\n  <<: *base\n  epochs: 10\n")
    found = dict(read_data(path))
    assert found["train", "lr"].what == 0.1
    assert (found["train", "epochs"].where or "").endswith("a.yaml:6")
    assert not found["train", "deep"].known


def test_a_config_alone_is_judged_by_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("trainer:\n  precision: 32\ndata:\n  num_workers: 40\n  pin_memory: false\n")
    found = {line.subject: line.fix for line in look_over(None, config=path).of(WARN)}
    assert found == {
        "mixed precision": "trainer.precision: bf16",
        "workers": "data.num_workers: 14",
        "pin_memory": "data.pin_memory: true",
    }


def test_json_with_tabs(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n\t"num_workers":\t40\n}')
    found = line(look_over(None, config=path), "workers")
    assert "num_workers=40" in found.reason
    assert found.where is not None
    assert found.where.endswith("a.json:2")


def test_a_shell_script_tells_script_flags_and_ranks() -> None:
    command = read_command(SCRIPTS / "launch.sh")
    assert command.script == SCRIPTS / "healthy.py"
    assert (command.launcher, command.ranks) == ("torchrun", 4)
    assert command.flag("--num-workers") == "12"
    assert command.flag("--epochs") == "$EPOCHS"
    assert command.where is not None
    assert command.where.endswith("launch.sh:4")
