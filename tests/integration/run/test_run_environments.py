"""The script runs in another environment than flatout, or flatout has to be brought into its Python in another way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from observing import FLATOUT

from flatout.launch.protocol import VARIABLE, Options

REPOSITORY = Path(__file__).parents[3]
OF_TORCH = "torch torchgen functorch typing_extensions.py sympy mpmath networkx jinja2 markupsafe fsspec filelock"
TRAIN = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Waves(Dataset):
    def __len__(self): return 256
    def __getitem__(self, i):
        time.sleep(2e-3)
        return torch.full((256,), i / 256).sin(), i % 10

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(256, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(int(sys.argv[1])):
    for x, y in DataLoader(Waves(), batch_size=16, num_workers=int(sys.argv[2])):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
print("trained", sorted({"numpy", "psutil", "pydantic", "yaml"} & set(sys.modules)))
"""


def environment(folder: Path, *links: str) -> Path:
    """The Python of a new virtual environment without pip, with these packages of the tests' own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in links:
        (site / name).symlink_to(Path(torch.__file__).parents[1] / name)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with PyTorch and what that requires, and nothing else."""
    return environment(tmp_path_factory.mktemp("environments") / "torch-alone", *OF_TORCH.split())


def flatout(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `flatout WORDS` in this folder."""
    env = {**os.environ, "PYTHONWARNINGS": "ignore", **variables}
    return subprocess.run([*FLATOUT, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)


# --- an environment that has torch alone ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--auto",)], ids=["run", "run --auto"])
def test_an_environment_with_torch_alone_is_measured(tmp_path: Path, torch_alone: Path, options: tuple[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = flatout(tmp_path, "run", *options, "--", str(torch_alone), "train.py", "3", "1")
    assert (done.returncode, done.stdout) == (0, "trained []\n"), done.stderr
    assert re.search(r"^steps +47 ", done.stderr, re.MULTILINE), done.stderr
    assert ("loader=elastic" in done.stderr) == bool(options)


def test_an_environment_with_torch_alone_is_fixed(tmp_path: Path, torch_alone: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ("--budget", "60s", "--steps", "20", "--only", "loader", "--json", "fix.json")
    done = flatout(tmp_path, "fix", *words, "--", str(torch_alone), "train.py", "100", "0")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "fix.json").read_text())
    assert "elastic loader" in [trial["what"] for trial in result["trials"]], result
    assert "not applied" not in done.stderr


def test_the_tool_starts_without_torch_and_what_only_other_verbs_need(tmp_path: Path) -> None:
    names = "numpy numpy.libs pynvml.py rich typer yaml _yaml markdown_it mdurl pygments shellingham annotated_doc"
    names += " pydantic pydantic_core annotated_types typing_inspection typing_extensions.py click"  # for typer
    there = [name for name in names.split() if (Path(torch.__file__).parents[1] / name).exists()]
    python = environment(tmp_path / "tool", *there)
    (tmp_path / "train.yaml").write_text("model: {}\n")
    codes = {}
    for words in ("--help", "doctor", "top --once", "check nothing.py", "train train.yaml", "hook status"):
        done = subprocess.run(
            [python, "-m", "flatout", *words.split()],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        codes[words] = done.returncode
        if words.startswith("train"):
            assert (
                done.stderr == "flatout: this needs torch, which is not installed here: pip install 'flatout[train]'\n"
            )
        assert "Traceback" not in done.stderr, done.stderr
    assert codes == {
        "--help": 0,
        "doctor": 0,
        "top --once": 0,
        "check nothing.py": 2,
        "train train.yaml": 2,
        "hook status": 0,
    }


# --- Pythons that PYTHONPATH does not reach ---------------------------------------------------------------------------

TELL = "import sys; print(sys.argv[1], sys.executable, sys.prefix, 'flatout.inside.start' in sys.modules)"


def test_scripts_that_replace_pythonpath_are_followed_and_notice_nothing(tmp_path: Path, torch_alone: Path) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    (tmp_path / "Makefile").write_text("all:\n\tPYTHONPATH=. python tell.py make\n")
    (tmp_path / "all.sh").write_text(
        textwrap.dedent(f"""
        PYTHONPATH=. python tell.py script
        PYTHONPATH= env python3 tell.py env
        PYTHONPATH=. nice python -u -m tell module
        make -s
        . {torch_alone.parent}/activate
        python tell.py activated
        PYTHONPATH=. python tell.py lost
        """)
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    bare = subprocess.run(["bash", "all.sh"], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True)
    followed = flatout(tmp_path, "run", "--", "bash", "all.sh", PATH=path).stdout.splitlines()
    assert [line.rsplit(" ", 1)[0] for line in followed] == [
        line.rsplit(" ", 1)[0] for line in bare.stdout.decode().splitlines()
    ]
    where = {line.split()[0]: line.rsplit(" ", 1)[1] for line in followed}
    lost = where.pop("lost")
    assert where == dict.fromkeys(("script", "env", "module", "make", "activated"), "True")
    assert lost == "False"


def test_a_launcher_that_is_a_python_script_is_followed_too(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text(f"#!{sys.executable}\n{TELL}\n")
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    (tmp_path / "all.sh").write_text("PYTHONPATH=. torchrun run\npython $(which torchrun) which\n")
    done = flatout(tmp_path, "run", "--", "bash", "all.sh", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert [(line.split()[0], line.split()[-1]) for line in done.stdout.splitlines()] == [
        ("run", "True"),
        ("which", "True"),
    ]


LIKE_TORCH = """
import mmap, pathlib, sys
library = pathlib.Path(sys.argv[1]) / "site-packages/torch/lib/libtorch.so"
library.parent.mkdir(parents=True, exist_ok=True)
library.write_bytes(bytes(4096))
with library.open("r+b") as file:
    kept = mmap.mmap(file.fileno(), 0)
print("loaded", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("words", "why"),
    [
        pytest.param([sys.executable], "Python 3.8 is older than 3.10", id="Python 3.8"),
        pytest.param([sys.executable, "-I"], "was started with -I and ignores PYTHONPATH", id="-I"),
        pytest.param([sys.executable, "-uE"], "was started with -E and ignores PYTHONPATH", id="-uE"),
        pytest.param(["env", "PYTHONPATH=.", sys.executable], "PYTHONPATH was replaced for it", id="PYTHONPATH"),
        pytest.param(["env", "-u", VARIABLE, sys.executable], f"pass on {VARIABLE}", id="environment"),
    ],
)
def test_a_training_that_is_lost_is_named_with_the_cure(tmp_path: Path, words: list[str], why: str) -> None:
    version = "3.8" if "3.8" in why else "3.11"
    command = [*FLATOUT, "run", "--", *words, "-c", LIKE_TORCH, str(tmp_path / "lib" / f"python{version}")]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdin is not None
        assert run.stderr is not None
        line = run.stderr.readline()
        run.stdin.close()
        rest = run.stderr.read()
    assert "uses PyTorch and is not measured" in line
    assert why in line
    assert ("flatout hook install --python" in line) == ("PYTHONPATH" in why)
    assert rest == ""  # and no word of optimizer steps


def test_the_hook_starts_flatout_where_pythonpath_does_not_count(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv")
    options = Options(folder=tmp_path, name="train").to_environment()
    look = [str(python), "-I", "-c", "import sys; print('flatout.inside.start' in sys.modules)"]

    def started(**variables: str) -> str:
        return subprocess.run(look, env=variables, capture_output=True, text=True, check=True).stdout.strip()

    def hook(action: str) -> str:
        done = flatout(tmp_path, "hook", action, "--python", str(python))
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert hook("status").startswith("no hook in")
    assert started(FLATOUT_RUN=options) == "False"
    assert hook("install").startswith("installed in")
    assert hook("status").startswith("installed in")
    assert started(FLATOUT_RUN=options) == "True"
    assert started(FLATOUT_RUN=options, FLATOUT="off") == "False"
    assert started() == "False"
    assert hook("remove").startswith("removed from")
    assert started(FLATOUT_RUN=options) == "False"
    assert list((tmp_path / "venv").glob("lib/python*/site-packages/flatout*")) == []


@pytest.mark.parametrize("python", ["/nowhere/python", "/bin/true"])
def test_the_hook_of_what_is_no_python_is_refused(tmp_path: Path, python: str) -> None:
    done = flatout(tmp_path, "hook", "install", "--python", python)
    assert (done.returncode, done.stderr) == (2, f"flatout: {python} is not a Python that runs\n")


@pytest.mark.filterwarnings("ignore")
def test_the_wheel_has_no_start_up_line_and_the_programs_in_it_can_be_executed(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        programs = [one for one in archive.infolist() if one.filename.startswith("flatout/inside/bin/")]
    assert not [name for name in names if name.endswith((".pth", ".start"))]
    assert {"flatout/TROUBLESHOOTING.md", "flatout/SKILL.md"} <= set(names)  # what `explain` and `skill` print
    assert len(programs) == 10
    assert all(one.external_attr >> 16 & 0o111 for one in programs)
