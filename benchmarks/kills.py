"""What is left when flatout is killed? kill -9 at random moments, of the command, the training, a worker, or all.

    python benchmarks/kills.py [--only VERB…] [--part 0.1] [--jobs 2] [--resume] [--out FILE]      about an hour

500 kills: of `run`, `run --auto`, `fix`, `train` and `top --record`, on a training of a second or two on the CPU. After
each: is a process left once what the kill did not hit has come to its end, a mount, a name in /dev/shm, anything in
/tmp, a recording that cannot be read? A `train` is killed again and again and resumed each time; in the end its weights
and its optimizer must be, to the last bit, those of a training that was left alone. What a killed `fix` leaves in /tmp
the next one removes, as the documentation says: counted is what that one leaves.

PyTorch's own loaders can leave names in /dev/shm when they are killed, so the same script is killed without flatout
too, and those names are counted apart. As root, all of it runs in a mount namespace with a /dev/shm of its own, so that
other programs of the machine do not count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.machine import describe, headline  # noqa: E402

SHARES = {"run": 110, "run --auto": 110, "fix": 60, "train": 110, "top --record": 110, "bare": 60}  # bare: no flatout
CHAINS = {"fix": 10, "train": 5}  # kills one after the other in the same place
WITHIN = {"train": 0.6}  # of the time it takes to its end alone: it is to be killed five times before that
VICTIMS = {"top --record": ("command",), "bare": ("training", "worker", "all")}
EVERYONE = ("command", "training", "worker", "all")
CACHES = ("torchinductor_",)  # PyTorch's, and meant to stay
PYTORCHS = ("torch_", "pymp-")  # what its loaders and Python's multiprocessing leave: the script killed bare shows it
OWN_SHM = "KILLS_OWN_SHM"
MARK = "KILLS_CASE"
PATIENCE_S = 90
SEED = 33

SCRIPT = """
    import hashlib, sys, torch

    WORKERS, WORK = (int(word) for word in sys.argv[1:])

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 1024
        def __getitem__(self, index):
            x = torch.full((64,), index / 1024.0)
            for _ in range(WORK):
                x = torch.sin(x * 3 + 1)
            return x, index % 10

    if __name__ == "__main__":
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(Samples(), 8, shuffle=True, num_workers=WORKERS)
        for epoch in range(2):
            for x, y in loader:
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""
PARTS = """
    import random, torch

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 512
        def __getitem__(self, index):
            noise = torch.tensor([random.gauss(0, 0.01) for _ in range(16)])
            return torch.full((16,), index / 512.0) + noise, index % 10

    def net():
        return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10))
"""
CONFIG = """
model: parts:net
data: {train: parts:Samples, workers: 2}
criterion: torch.nn:CrossEntropyLoss
optimizer: {factory: torch.optim:AdamW, args: {lr: 1e-3}}
train: {epochs: 45, batch_size: 8, device: cpu}
checkpoint: {every: 24 steps, best: null}
log: {quiet: true}
out: runs/killed
"""


@dataclass(kw_only=True)
class Case:
    """One command that is killed: who, when, and what it left."""

    verb: str
    wanted: str
    after_s: float
    killed: list[str] = field(default_factory=list)
    ended_after_s: float = 0.0  # from the kill until nothing of it ran any more
    exit: int | None = None
    left: dict[str, list[str]] = field(default_factory=dict)
    recording: str = ""
    same_weights: bool | None = None  # None: it did not come to an end that shows them


class Running:
    """A command and all that came of it, found by a variable in the environment."""

    def __init__(self, words: Sequence[str], folder: Path, mark: str) -> None:
        self.mark = mark
        self.seen: set[int] = set()
        environment = os.environ | {
            MARK: mark,
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
        }
        self.output = folder / f"output-{len(list(folder.glob('output-*')))}.txt"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                                            stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip

    def alive(self) -> list[psutil.Process]:
        """Everybody, oldest first."""
        found = [process for process in psutil.process_iter() if self._is_ours(process)]
        self.seen.update(process.pid for process in found)
        return sorted(found, key=lambda process: (_started(process), process.pid))

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Who is what: the command itself, the process that trains, and all below that."""
        alive = self.alive()
        command = [process for process in alive if process.pid == self.process.pid]
        trains = [p for p in alive if p not in command and re.search(r"loop\.py|--here", _words(p))][:1]
        below = {child.pid for process in trains for child in _children(process)}
        return {"command": command, "training": trains or command, "worker": [p for p in alive if p.pid in below],
                "all": alive}  # fmt: skip

    def kill(self, wanted: str, draw: random.Random) -> list[str]:
        """Kill -9; the words of whom it hit."""
        at_hand = self.roles()[wanted]
        victims = at_hand if wanted == "all" else at_hand[:1]
        if wanted == "worker" and at_hand:
            victims = [draw.choice(at_hand)]
        hit = []
        while victims:
            for process in victims:
                words = _words(process)
                try:
                    process.kill()
                    hit.append(words)
                except psutil.Error:
                    continue
            victims = self.alive() if wanted == "all" else []
        return hit

    def wait(self) -> None:
        """Until the command and all that came of it are gone, or patience is."""
        deadline = time.monotonic() + PATIENCE_S
        while (self.process.poll() is None or self.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)


def _started(process: psutil.Process) -> float:
    try:
        return process.create_time()
    except psutil.Error:
        return 0.0


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


# --- one after the other ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Cases that run in one place, one after the other."""

    verb: str
    number: int
    kills: int

    @property
    def name(self) -> str:
        """For the results, and for the processes."""
        return f"{self.verb} {self.number}"


class Bench:
    """The commands, how long they take when nobody kills them, and what they train."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.mounts = _mounts()
        self.seconds: dict[str, float] = {}
        self.expected: dict[str, str] = {}

    def learn(self, verbs: Sequence[str]) -> None:
        """Run each once to its end."""
        for verb in verbs:
            folder = self.folder(f"unkilled {verb}")
            start_s = time.monotonic()
            running = Running(self.command(verb, 0, resume=False), folder, f"unkilled {verb}")
            running.wait()
            self.seconds[verb] = time.monotonic() - start_s
            if running.process.returncode != 0:
                sys.exit(f"{verb} does not run here: {running.output.read_text()[-2000:]}")
            self.expected[verb] = self.trained(verb, folder, running)

    def folder(self, name: str) -> Path:
        """A fresh one with the script, the config, and an empty /tmp."""
        folder = self.place / name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "tmp").mkdir(parents=True)
        for file, text in (("loop.py", SCRIPT), ("parts.py", PARTS), ("train.yaml", CONFIG)):
            (folder / file).write_text(textwrap.dedent(text), encoding="utf-8")
        return folder

    def command(self, verb: str, number: int, *, resume: bool) -> list[str]:
        """The words of a verb."""
        flatout, script = [sys.executable, "-m", "flatout"], [sys.executable, "loop.py", "2", "12"]
        trace = ["--trace", f"trace-{number}"]
        match verb:
            case "run":
                return [*flatout, "run", *trace, "--", *script]
            case "run --auto":
                return [*flatout, "run", "--auto", *trace, "--", *script]
            case "fix":
                return [*flatout, "fix", "--budget", "30s", "--steps", "40", "--", *script[:-2], "0", "300"]
            case "train":
                return [*flatout, "train", "train.yaml", *(["--resume"] if resume else [])]
            case "top --record":
                return [*flatout, "top", "--interval", "0.25", "--duration", "2", "--record", f"trace-{number}"]
        return script

    def trained(self, verb: str, folder: Path, running: Running) -> str:
        """A hash of what was trained; "" where nothing says."""
        if verb == "train":
            return _trained(folder / "runs/killed")
        said = re.search(r"^[0-9a-f]{64}", running.output.read_text(errors="replace"), re.MULTILINE)
        return said[0] if said else ""

    def go(self, chain: Chain) -> dict[str, Any]:
        """Kill, and kill again; then, of those that can go on, see them through."""
        draw = random.Random(f"{SEED} {chain.name}")
        folder = self.folder(chain.name)
        cases = [self.kill_one(chain, number, folder, draw) for number in range(chain.kills)]
        result = {"chain": chain.name, "cases": [vars(case) for case in cases]}
        if chain.verb in CHAINS:
            running = Running(self.command(chain.verb, chain.kills, resume=_goes_on(folder)), folder, chain.name)
            running.wait()
            result["seen_through"] = {
                "exit": running.process.returncode,
                "left": self.left(running, folder, ours_too=True),
                "same_weights": chain.verb != "train"
                or self.trained("train", folder, running) == self.expected["train"],
                "said": running.output.read_text(errors="replace")[-600:] if running.process.returncode else "",
            }
        shutil.rmtree(folder, ignore_errors=True)
        return result

    def kill_one(self, chain: Chain, number: int, folder: Path, draw: random.Random) -> Case:
        """Start, kill at a random moment, and look around. Earlier, where it was over by then."""
        wanted = draw.choice(VICTIMS.get(chain.verb, EVERYONE))
        after_s = draw.uniform(0.1, self.seconds[chain.verb] * WITHIN.get(chain.verb, 1.6))
        for sooner in (1.0, 0.7, 0.5, 0.3):
            case = Case(verb=chain.verb, wanted=wanted, after_s=round(after_s * sooner, 2))
            for old in folder.glob(f"trace-{number}*"):
                shutil.rmtree(old)
            running = Running(self.command(chain.verb, number, resume=_goes_on(folder)), folder, chain.name)
            case.killed = self.killed(running, case, draw)
            killed_s = time.monotonic()
            running.wait()
            case.ended_after_s = round(time.monotonic() - killed_s, 1)
            if case.killed:
                break
        case.exit = running.process.returncode
        case.left = self.left(running, folder, ours_too=chain.verb not in CHAINS)
        if case.wanted == "command" and "Traceback" in running.output.read_text(errors="replace"):
            case.left["noise"] = ["what lived on wrote a traceback"]
        case.recording = _readable(folder / f"trace-{number}", folder / "flatout-plan.yaml")
        trained = self.trained(chain.verb, folder, running) if chain.verb not in CHAINS else ""
        case.same_weights = trained == self.expected[chain.verb] if trained else None
        return case

    def killed(self, running: Running, case: Case, draw: random.Random) -> list[str]:
        """Whom it hit; a little later than was drawn, where the victim is not there yet."""
        start_s = time.monotonic()
        while running.process.poll() is None:
            waited_s = time.monotonic() - start_s
            if waited_s >= case.after_s and (hit := running.kill(case.wanted, draw)):
                return hit
            time.sleep(max(0.02, min(0.2, case.after_s - waited_s)))
        return []

    def left(self, running: Running, folder: Path, *, ours_too: bool) -> dict[str, list[str]]:
        """What should not be there; it is removed."""
        processes = [_words(process)[:200] for process in running.alive()]
        running.kill("all", random.Random(0))
        segments = [
            path.name for path in Path("/dev/shm").iterdir()
            if (found := re.search(r"_(\d+)_", path.name)) and int(found[1]) in running.seen
        ]  # fmt: skip
        for name in segments:
            Path("/dev/shm", name).unlink(missing_ok=True)
        temporary = [path for path in (folder / "tmp").iterdir()
                     if not path.name.startswith(CACHES if ours_too else (*CACHES, "flatout-fix-"))]  # fmt: skip
        names = [path.name for path in temporary]
        for path in temporary:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        found = {
            "processes": processes,
            "mounts": sorted(_mounts() - self.mounts),
            "shm": [name for name in segments if not name.startswith(PYTORCHS)],
            "tmp": [name for name in names if not name.startswith(PYTORCHS)],
            "of PyTorch": [name for name in (*segments, *names) if name.startswith(PYTORCHS)],
        }
        return {kind: things for kind, things in found.items() if things}


def _goes_on(folder: Path) -> bool:
    """Whether a training can be resumed; what was killed before its first checkpoint begins again."""
    if any(folder.glob("runs/killed/checkpoints/step-*.pt")):
        return True
    shutil.rmtree(folder / "runs", ignore_errors=True)
    return False


def _mounts() -> set[str]:
    return set(Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines())


def _trained(run: Path) -> str:
    """The weights and the optimizer's state of the newest checkpoint."""
    import torch
    from torch.utils._pytree import tree_leaves

    newest = max(run.rglob("step-*.pt"), default=None)
    if newest is None:
        return ""
    state = torch.load(newest, weights_only=True)
    held = [leaf for part in ("model", "optimizer") for leaf in tree_leaves(state[part])]
    found = [leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf).encode() for leaf in held]
    return f"{newest.name} {hashlib.sha256(b''.join(found)).hexdigest()}"


def _readable(trace_folder: Path, plan: Path) -> str:
    """How a recording, and a plan, can be read: whole, or one clear line."""
    from flatout import trace
    from flatout.model.errors import FlatoutError
    from flatout.model.plan import Plan

    try:
        if plan.exists():
            Plan.load(plan)
        if not trace_folder.exists():
            return "none"
        trace.read(trace_folder)
    except FlatoutError as problem:
        return f"refused: {str(problem)[:100]}"
    return "read"


# --- all of them ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="VERB", choices=list(SHARES))
    parser.add_argument("--part", type=float, default=1.0, help="of the 500, for a try")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the results as JSON, written after each chain")
    options = parser.parse_args()
    _in_a_namespace()
    machine = describe(("torch", "numpy"))
    print(headline(machine))
    done: list[dict[str, Any]] = []
    if options.resume and options.out is not None and options.out.exists():
        done = json.loads(options.out.read_text(encoding="utf-8"))["chains"]
    known, lock = {result["chain"] for result in done}, threading.Lock()
    verbs = [verb for verb in SHARES if not options.only or verb in options.only]
    to_do = [chain for verb in verbs for chain in chains(verb, options.part) if chain.name not in known]
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        bench = Bench(Path(place))
        bench.learn(sorted({chain.verb for chain in to_do}))
        print(", ".join(f"{verb} takes {seconds:.1f} s" for verb, seconds in bench.seconds.items()), flush=True)

        def go(chain: Chain) -> None:
            result = bench.go(chain)
            with lock:
                done.append(result)
                print("\n".join(lines_of(result)), flush=True)
                if options.out is not None:
                    write(options.out, machine, done)

        with ThreadPoolExecutor(options.jobs) as pool:
            for under_way in [pool.submit(go, chain) for chain in to_do]:
                under_way.result()
        left = sorted(path.name for path in Path("/dev/shm").iterdir()) if OWN_SHM in os.environ else None
    figures = summary(done)
    print(json.dumps(figures | {"shm_at_the_end": left}, indent=1))
    if options.out is not None:
        write(options.out, machine, done, shm_at_the_end=left)


def chains(verb: str, part: float) -> Iterator[Chain]:
    """The cases of a verb."""
    kills, length = round(SHARES[verb] * part), CHAINS.get(verb, 1)
    for number in range(-(-kills // length)):
        yield Chain(verb=verb, number=number, kills=min(length, kills - number * length))


def write(path: Path, machine: dict[str, Any], done: list[dict[str, Any]], **more: Any) -> None:
    """Everything so far."""
    figures = {"benchmark": "kills", "seed": SEED, "machine": machine, "summary": summary(done), **more, "chains": done}
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def summary(done: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts, a row each verb."""
    rows = {}
    for verb in SHARES:
        of_verb = [result for result in done if result["chain"].rpartition(" ")[0] == verb]
        cases = [case for result in of_verb for case in result["cases"]]
        ends = [result["seen_through"] for result in of_verb if "seen_through" in result]
        if not cases:
            continue
        rows[verb] = {
            "kills": sum(bool(case["killed"]) for case in cases),
            "processes_killed": sum(len(case["killed"]) for case in cases),
            "over_before_the_kill": sum(not case["killed"] for case in cases),
            **{f"left_{kind}": sum(kind in one["left"] for one in (*cases, *ends))
               for kind in ("processes", "mounts", "shm", "tmp", "noise", "of PyTorch")},
            "recordings_refused": sum(case["recording"].startswith("refused") for case in cases),
            "came_to_the_end_with_the_same_weights": sum(case["same_weights"] is True for case in cases),
            "with_others": sum(case["same_weights"] is False for case in cases),
            "longest_end_s": max(case["ended_after_s"] for case in cases),
        }  # fmt: skip
        if ends:
            rows[verb] |= {
                "seen_through": len(ends),
                "and_well": sum(e["exit"] == 0 and e["same_weights"] for e in ends),
            }
    return rows


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """What is worth a line: the chain, and what was left."""
    cases = result["cases"]
    bad = [case for case in cases if case["left"].keys() - {"of PyTorch"} or case["same_weights"] is False]
    end = result.get("seen_through")
    well = not bad and (
        end is None or (end["exit"] == 0 and end["same_weights"] and not end["left"].keys() - {"of PyTorch"})
    )
    killed = sum(bool(case["killed"]) for case in cases)
    yield f"{'✓' if well else '✗'} {result['chain']}: {killed} kills"
    for case in bad:
        yield f"   {case['wanted']} after {case['after_s']} s: {case['left'] or 'other weights'}"
    if end is not None and not well:
        yield f"   seen through: {end}"


def _in_a_namespace() -> None:
    """Start again with a /dev/shm of our own, where that is permitted."""
    if OWN_SHM in os.environ or os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    inside = 'mount -t tmpfs none /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside, "sh", sys.executable, *sys.argv]
    os.execvpe(command[0], command, os.environ | {OWN_SHM: "1"})


if __name__ == "__main__":
    main()
