"""`flatout run` in front of commands as people type them: output, signals and exit code stay the command's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from observing import Run, call, finish, flatout_run, write

from flatout import trace
from flatout.report.account import how_it_ended

PLAIN = """
    import sys, torch
    from flatout.inside import compiler
    compiler.load_when_used()  # an optimizer's first step would load the compiler, for seconds
    torch.set_num_threads(1)
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    def step():
        weight.square().sum().backward()
        optimizer.step()
    if __name__ == "__main__":
        for _ in range(6):
            step()
        print("trained", file=sys.stdout)
"""

ENDINGS = {
    "crash": "raise ValueError('of the user')",
    "exit": "sys.exit(3)",
    "hard": "import os; os._exit(4)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training script, a package, a shell script, a Makefile and scripts with all kinds of endings."""
    folder = tmp_path_factory.mktemp("project")
    write(folder, train=PLAIN)
    for name, ending in ENDINGS.items():
        # A process that is killed has no time to write: let the writer come round once.
        loop = "import sys, time, train\nfor _ in range(6): train.step()\ntime.sleep(0.8)\n"
        write(folder, **{name: loop + ending})
    (folder / "pkg").mkdir()
    write(folder / "pkg", __init__="", train=PLAIN)
    (folder / "train.sh").write_text(f'set -e\n"{sys.executable}" train.py "$@"\n')
    (folder / "Makefile").write_text(f"train:\n\t@{sys.executable} train.py\n")
    return folder


@pytest.fixture
def place(project: Path, tmp_path: Path) -> Path:
    """A copy of the project for one test."""
    for path in project.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = tmp_path / path.relative_to(project)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path


def steps(run: Run) -> int:
    """Optimizer steps seen, the first one too."""
    return sum(step.kind in ("warmup", "train") for step in run.observed.rank.steps)


PYTHON = sys.executable
WAYS = {
    "script": (PYTHON, "train.py"),
    "module": (PYTHON, "-m", "pkg.train"),
    "shell": ("bash", "train.sh"),
    "make": ("make", "-s", "train"),
    "accelerate": (str(Path(PYTHON).with_name("accelerate")), "launch", "--cpu", "--num_processes=1", "train.py"),
}


@pytest.mark.parametrize("way", WAYS)
def test_any_way_of_starting_python_is_measured(place: Path, way: str) -> None:
    run = flatout_run(place, *WAYS[way])
    assert (run.code, run.out) == (0, "trained\n"), run.err
    assert steps(run) == 6
    assert "where training's time went" in run.err
    assert run.observed.rank.info.name == ("make" if way == "make" else "train")
    assert {path.name for path in place.iterdir()} >= {"trace", "account.json"}


def test_short_form_quiet_and_json_to_stdout(place: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(PYTHON).parent}:{os.environ['PATH']}"}
    words = [PYTHON, "-m", "flatout", "run", "--quiet", "--json", "-", "train.py"]
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("trained\n{")
    assert '"schema": 1' in done.stdout
    assert done.stderr == ""
    (folder,) = (place / "flatout-runs").glob("[!.]*")
    assert folder.name.endswith("-train")


@pytest.mark.parametrize(
    ("script", "code", "ended"),
    [
        ("crash", 1, "exit code 1 after 6 steps: ValueError at crash.py:4"),
        ("exit", 3, "exit code 3 after 6 steps"),
        ("hard", 4, "exit code 4 after 6 steps"),
        ("killed", 128 + 9, "SIGKILL after at least 6 steps"),
        ("terminated", 128 + 15, "SIGTERM after at least 6 steps"),
    ],
)
def test_however_the_script_ends_its_trace_can_be_read(place: Path, script: str, code: int, ended: str) -> None:
    run = flatout_run(place, PYTHON, f"{script}.py")
    says = f"{Path(PYTHON).name} ended with {ended}"
    assert f"\n{says}.\n" in f"\n{run.err}"
    assert run.account is not None
    assert run.account["ended"] == says == how_it_ended(trace.read(run.folder))
    assert run.code == code
    assert steps(run) == 6
    ended_in_order = script not in ("killed", "terminated")
    assert (run.folder / "rank-00000.summary.json").exists() == ended_in_order
    assert run.err.startswith("Traceback (most recent call last):\n") == (script == "crash")
    assert script != "crash" or "\nValueError: of the user\n" in run.err


INTERRUPTED = """
    import signal, sys, train
    train.step()
    train.step()
    def stop(number, frame):
        print("stopped by", number, flush=True)
        sys.exit(7)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        print("ready", flush=True)
        while True:
            train.step()
    except KeyboardInterrupt:
        print("interrupted once", flush=True)
        sys.exit(5)
"""


@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGTERM, 7, "stopped by 15"), (signal.SIGINT, 5, "interrupted once")]
)
def test_signals_reach_the_script(place: Path, number: int, code: int, said: str) -> None:
    write(place, loop=INTERRUPTED)
    process = subprocess.Popen(**call(place, PYTHON, "loop.py"), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    run = finish(place, process)
    assert (run.code, run.out.strip()) == (code, said)
    assert run.account is not None


COUNTING = """
    import signal, time, train
    heard = []
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), lambda number, frame: heard.append(number))
    train.step()
    train.step()
    print("ready", flush=True)
    while not heard:
        train.step()
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        train.step()
    print(heard, flush=True)
"""


@pytest.mark.parametrize(
    ("send", "number"), [(os.kill, signal.SIGINT), (os.killpg, signal.SIGINT), (os.killpg, signal.SIGUSR1)]
)
def test_a_signal_is_heard_once_whether_it_was_for_us_or_for_the_whole_group(
    place: Path, send: Callable[[int, int], None], number: int
) -> None:
    write(place, loop=COUNTING)
    process = subprocess.Popen(**call(place, PYTHON, "loop.py"), start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    send(process.pid, number)
    run = finish(place, process)
    assert (run.code, run.out.strip()) == (0, f"[{int(number)}]")


def test_one_interrupt_after_another_from_its_own_group_is_heard_each_time(place: Path) -> None:
    """GIVEN a program that starts flatout in its own process group, and signals it alone."""
    write(place, loop=COUNTING)
    process = subprocess.Popen(**call(place, PYTHON, "loop.py"))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR1):
        process.send_signal(number)
        time.sleep(0.4)
    run = finish(place, process)
    assert (run.code, run.out.strip()) == (0, f"{[int(signal.SIGINT), *[int(signal.SIGUSR1)] * 2]}")


def test_a_batch_script_that_passes_its_signal_on_reaches_the_script(place: Path) -> None:
    write(place, loop=INTERRUPTED)
    process = subprocess.Popen(**call(place, PYTHON, "loop.py"))  # in our own process group
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    run = finish(place, process)
    assert (run.code, run.out.strip()) == (7, "stopped by 15")


def test_switched_off_it_is_as_if_we_were_not_there(place: Path) -> None:
    ours = "[k for k in os.environ if 'FLATOUT' in k], 'flatout' in sys.modules"
    pipes = "sum('pipe' in os.readlink(p) for p in glob.glob('/proc/self/fd/[3-9]*') if os.path.lexists(p))"
    write(place, look=f"import glob, os, sys; print({ours}, {pipes})")
    run = flatout_run(place, PYTHON, "look.py", env={"FLATOUT": "off"})
    assert (run.code, run.out, run.err) == (0, "['FLATOUT'] False 0\n", "")
    assert not run.folder.exists()


def test_an_existing_sitecustomize_is_chained(place: Path) -> None:
    (place / "site").mkdir()
    write(place / "site", sitecustomize="import builtins; builtins.theirs = 41 + 1")
    write(place, use="import train; [train.step() for _ in range(3)]; print(theirs)")
    run = flatout_run(place, PYTHON, "use.py", env={"PYTHONPATH": str(place / "site")})
    assert (run.code, run.out) == (0, "42\n"), run.err
    assert steps(run) == 3


def test_a_script_that_asks_for_torch_before_it_imports_it_is_measured(place: Path) -> None:
    """As transformers and datasets do on their import."""
    write(place, use="import importlib.util as u; u.find_spec('torch'); import train; [train.step() for _ in range(3)]")
    run = flatout_run(place, PYTHON, "use.py")
    assert run.code == 0, run.err
    assert steps(run) == 3


def test_a_command_that_trains_twice_leaves_two_traces(place: Path) -> None:
    (place / "both.sh").write_text(f"{PYTHON} train.py\n{PYTHON} train.py\n")
    run = flatout_run(place, "bash", "both.sh")
    assert run.code == 0
    assert len(trace.read(place / "trace-2").ranks) == 1
    assert run.err.count("where training's time went") == 2


def test_a_process_that_never_trains_leaves_no_file(place: Path) -> None:
    write(place, idle="import torch; print(torch.ones(2).sum().item())")
    run = flatout_run(place, PYTHON, "idle.py")
    assert (run.code, run.out) == (0, "2.0\n")
    assert not list(run.folder.glob("rank-*"))
    assert "no optimizer step was seen" in run.err
    assert "Traceback" not in run.err


def test_a_command_that_fails_before_its_first_step_is_not_asked_whether_it_trains(place: Path) -> None:
    write(place, broken="import time, torch; time.sleep(0.5); raise SystemExit(3)")
    run = flatout_run(place, PYTHON, "broken.py")
    assert (run.code, run.err) == (3, "flatout: the command ended with exit code 3 before its first step\n")


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_without_a_step_leaves_no_folder_but_those_of_other_runs(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = f"import time; time.sleep(0.5); raise SystemExit({code})"
    fails = [sys.executable, "-m", "flatout", "run", "--", sys.executable, "-c", script]
    assert subprocess.run(fails, check=False).returncode == code
    assert not list(tmp_path.iterdir())
    other = tmp_path / "flatout-runs" / "other"
    other.mkdir(parents=True)
    assert subprocess.run(fails, check=False).returncode == code
    assert list(tmp_path.glob("*/*")) == [other]


def test_a_command_that_is_over_at_once_is_no_trouble(place: Path) -> None:
    run = flatout_run(place, "echo", "--html", "done")
    assert (run.code, run.out) == (0, "--html done\n")
    assert len(run.err.splitlines()) == 1
    assert "not watched" not in run.err


# -- mistakes and faults --------------------------------------------------------------------------------------------


def test_mistakes_are_one_clear_line(place: Path) -> None:
    (place / "data.txt").write_text("no program")
    for command, code, said in [
        ((), 2, "no command given"),
        (("no-such-program",), 127, "no-such-program: command not found"),
        (("./data.txt",), 126, "./data.txt cannot be executed"),
    ]:
        run = flatout_run(place, *command)
        assert (run.code, run.out) == (code, "")
        assert said in run.err
        assert len(run.err.splitlines()) == 1


def test_a_folder_with_a_recording_is_refused_before_anything_runs(place: Path) -> None:
    flatout_run(place, PYTHON, "train.py")
    again = flatout_run(place, PYTHON, "train.py")
    assert (again.code, again.out) == (2, "")
    assert "already holds a recording" in again.err


def test_without_a_folder_to_write_the_command_runs_unmeasured(place: Path) -> None:
    (place / "trace").write_text("a file where the folder should be")
    run = flatout_run(place, PYTHON, "train.py")
    assert (run.code, run.out) == (0, "trained\n")
    assert len(run.err.splitlines()) == 1
    assert "running unmeasured" in run.err


def test_a_full_disk_ends_the_recording_and_not_the_training(place: Path) -> None:
    write(
        place,
        limited="""
        import resource, sys, time, train
        for _ in range(3):
            train.step()
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        for _ in range(200):
            train.step()
            time.sleep(0.01)
        print("trained", train.weight.sum().item())
        """,
    )
    run = flatout_run(place, PYTHON, "limited.py")
    assert run.code == 0
    assert run.out.startswith("trained")
    told = [line for line in run.err.splitlines() if "stopped measuring" in line]
    assert len(told) == 1
    assert "File too large" in told[0]


def test_a_torch_too_old_is_said_and_left_alone(place: Path) -> None:
    (place / "torch").mkdir()
    write(place / "torch", __init__="__version__ = '1.13.1'")
    write(place, old="import torch; print(torch.__version__)")
    run = flatout_run(place, PYTHON, "old.py")
    assert (run.code, run.out) == (0, "1.13.1\n")
    assert "torch 1.13.1 is older than 2.6" in run.err


# -- trials ---------------------------------------------------------------------------------------------------------

TRIAL = """
    import sys, torch
    from torch.utils.data import DataLoader, TensorDataset
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, validation = DataLoader(data, batch_size=4), DataLoader(data, batch_size=32)
    for epoch in range(100_000):  # far more than a grace of 5 s
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
            except:
                if "stubborn" not in sys.argv:
                    raise
            with torch.no_grad():
                for v, _ in validation:
                    model(v)
    print("trained to the end")
"""


def test_a_trial_measures_so_many_steps_and_then_the_ceiling(place: Path) -> None:
    write(place, trial=TRIAL)
    run = flatout_run(place, PYTHON, "trial.py", options=("--max-steps", "20"))
    assert (run.code, run.out) == (0, "")
    kinds = [step.kind for step in run.observed.rank.steps]
    assert kinds.count("train") == 20
    assert kinds.count("replay") == 6, "as few again"
    assert run.account is not None
    assert run.account["facts"]["steps"] == 20
    assert run.account["facts"]["replay_samples_per_s"] > 0
    assert run.account["facts"]["ceiling_samples_per_s"] is None
    replayed = [step for step in run.observed.rank.steps if step.kind == "replay"]
    assert {step.samples for step in replayed} == {4}, "only training's batches are replayed"


def test_a_trial_of_a_script_that_swallows_every_exception_still_ends(place: Path) -> None:
    write(place, trial=TRIAL)
    run = flatout_run(place, PYTHON, "trial.py", "stubborn", options=("--max-steps", "5"))
    assert (run.code, run.out) == (0, "")
    assert [step.kind for step in run.observed.rank.steps].count("train") == 5
