"""What a fix has measured, on the disk until it comes to its end: an interrupted one goes on from there.

    FIX/unfinished/journal.json   whose fix it is, and for each run what was asked for and how it ended
                   01, 02 …       their recordings

A search decides by its runs alone. So it is begun again from the start, with a `Journal` in place of
the runner, which answers from the disk what was measured before. A proof that was under way is made
again as a whole, since its runs go on from each other's weights, which may take gigabytes; the last
comparison is, since the machine may have changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.files import PRIVATE, make_recording_folder, remove_if_empty, write_whole
from flatout.fix.runs import ProofRun, Run, Runner, end_of, recorded
from flatout.launch.launcher import OUTPUT, TIMED_OUT
from flatout.launch.protocol import Trial
from flatout.model.errors import UsageError
from flatout.model.formatting import count_of
from flatout.model.inputs import is_file, load_json, text_of
from flatout.model.plan import Change
from flatout.redact import redact_command
from flatout.sample import budget
from flatout.sample.gpu import Gpus

UNFINISHED, JOURNAL = "unfinished", "journal.json"
MOST_BYTES = 512 << 20  # of recordings; later runs are not kept
MOST_OUTPUT = 2 << 20
_VERSION = 1
_IN_USE = "in-use"
_OURS_ALONE = 0o700
_MOST_FILES = 1_000  # whose size and time are noted
_BASIS = {"command": list, "folder": str, "files": dict}


# Whose fix it is


def basis_of(command: Sequence[str]) -> dict[str, Any]:
    """What a run depends on, as far as it shows from outside: a fix goes on only where all of it is
    the same."""
    gpus = Gpus(None, lambda _: None)
    try:
        names = [gpu.name for gpu in gpus.read(time.monotonic())]
    finally:
        gpus.close()
    return {
        "command": list(redact_command(command)),
        "folder": str(Path.cwd()),
        "flatout": _version("flatout"),
        "torch": _version("torch"),  # of this Python; the command's own is compared when it has run
        "GPUs": ", ".join(names) or "none",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
        "cores": round(budget.measure().cores_allowed, 2),
        "files": {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in _sources(command)},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sources(command: Sequence[str]) -> list[Path]:
    """The files that a command names, and the Python files beside its scripts."""
    modules = [Path(*after.split(".")) for word, after in pairwise(command) if word == "-m"]
    named = [Path(word.partition("=")[2] or word) for word in command]
    named += [path for module in modules for path in (module.with_suffix(".py"), module / "__main__.py")]
    with contextlib.suppress(OSError):  # a folder that cannot be read
        scripts = [path.absolute() for path in named if path.suffix == ".py" and is_file(path)]
        named += [path for folder in {path.parent for path in scripts} for path in sorted(folder.glob("*.py"))]
    return sorted({path.absolute() for path in named if is_file(path)})[:_MOST_FILES]


def _difference(then: dict[str, Any], now: dict[str, Any]) -> str:
    """The first thing that is not as it was; empty if all is."""
    if then["command"] != now["command"]:
        return f"it is of another command: {shlex.join(map(str, then['command']))}"
    if then["folder"] != now["folder"]:
        return f"it was made in the folder {then['folder']}"
    for path in sorted({*then["files"], *now["files"]}):
        if then["files"].get(path) != now["files"].get(path):
            return f"{path} has changed since"
    for name in ("flatout", "torch", "GPUs", "CUDA_VISIBLE_DEVICES", "cores"):
        if then.get(name) != now[name]:
            return f"{name} was {then.get(name)}, and is {now[name]} now"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A fix that did not come to its end. `options`: what the person wished, as text."""

    folder: Path
    basis: dict[str, Any]
    options: dict[str, Any]


def unfinished(command: Sequence[str], runs: Path) -> list[Unfinished]:
    """Those of a command among the folders in `runs`, the latest first."""
    words = list(redact_command(command))
    return [one for one in _all_unfinished(runs) if one.basis["command"] == words]


def to_resume(command: Sequence[str], runs: Path, folder: Path | None = None) -> Unfinished:
    """The fix to go on with: that in `folder`, or the latest of this command. Raises UsageError where
    there is none."""
    if folder is not None:
        if not can_resume(folder):
            raise UsageError(f"--resume {folder}: there is no unfinished fix (one that came to its end leaves none)")
        found = [_load(folder)]
    else:
        found = unfinished(command, runs)
        others = [] if found else _all_unfinished(runs)
        if others:
            of = f"{others[0].folder} is of another command: {shlex.join(map(str, others[0].basis['command']))}"
            raise UsageError(f"--resume: no fix of this command is unfinished; {of}")
        if not found:
            raise UsageError(f"--resume: there is nothing to go on with: no unfinished fix in {runs}")
    different = _difference(found[0].basis, basis_of(command))
    if different:
        raise UsageError(f"--resume: {found[0].folder} cannot be resumed: {different}")
    return found[0]


def can_resume(folder: Path) -> bool:
    """Whether there is an unfinished fix in a folder."""
    return is_file(folder / UNFINISHED / JOURNAL)


def _all_unfinished(runs: Path) -> list[Unfinished]:
    journals = sorted(runs.glob(f"*/{UNFINISHED}/{JOURNAL}"), key=lambda path: -path.stat().st_mtime)
    found = []
    for journal in journals:
        with contextlib.suppress(UsageError):  # damaged, or of another version
            found.append(_load(journal.parents[1]))
    return found


def _load(folder: Path) -> Unfinished:
    data = _read(folder / UNFINISHED)
    basis, options = data.get("of"), data.get("options")
    if not isinstance(basis, dict) or not isinstance(options, dict) or not _BASIS.keys() <= basis.keys():
        raise _damaged(folder / UNFINISHED)
    if any(type(basis[name]) is not kind for name, kind in _BASIS.items()):
        raise _damaged(folder / UNFINISHED)
    return Unfinished(folder=folder, basis=basis, options=options)


def _read(folder: Path) -> dict[str, Any]:
    journal = folder / JOURNAL
    data = load_json(text_of(journal), str(journal))
    if not isinstance(data, dict) or data.get("journal") != _VERSION:
        raise UsageError(f"{journal} was written by another version of flatout")
    return data


def _damaged(place: Path) -> UsageError:
    return UsageError(f"{place / JOURNAL} is damaged: flatout fix without --resume starts from the beginning")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """The place of a journal in a fix's folder, which no other fix can use meanwhile. An empty one goes."""
    place = folder / UNFINISHED
    with contextlib.ExitStack() as stack:
        # Without it, as on a full disk, the fix goes on, and cannot be resumed.
        with contextlib.suppress(OSError):
            make_recording_folder(folder)
            place.mkdir(mode=_OURS_ALONE, exist_ok=True)
            owner = stack.enter_context((place / _IN_USE).open("wb"))
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"--resume: the fix in {folder} is still running") from None
        try:
            yield place
        finally:
            if not (place / JOURNAL).exists():
                forget(folder)


def forget(folder: Path) -> None:
    """Remove the journal of a fix, and its folder if nothing else is in it."""
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
    remove_if_empty(folder.parent)


def forget_earlier(command: Sequence[str], folder: Path) -> None:
    """Remove the journals of earlier fixes of a command beside this one, but of those that are running."""
    for one in unfinished(command, folder.parent):
        if one.folder.resolve() != folder.resolve():
            with contextlib.suppress(UsageError), held(one.folder):
                (one.folder / UNFINISHED / JOURNAL).unlink(missing_ok=True)


# Its runs


@dataclass(slots=True, kw_only=True)
class _Kept:
    """One answer of the runner: a run, or those of a proof that were made together."""

    asked: str  # what was asked for, as JSON
    after: str = ""  # of a proof: everything that had been asked for before, as a checksum
    seconds: float
    timeout_s: float
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def hung(self) -> bool:
        return any(run["code"] == TIMED_OUT for run in self.runs)


class Journal:
    """A Runner that answers what was measured before from the disk, and notes what it has another one
    measure.

    `place`: the folder of the journal. `way`: how files are protected, which is part of what was measured.
    """

    def __init__(
        self,
        runner: Runner,
        place: Path,
        basis: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        way: str = "",
        say: Callable[[str], None] = lambda _: None,
        read: Callable[..., Run] = recorded,
    ) -> None:
        self._runner, self._place, self._way, self._say, self._read = runner, place, way, say, read
        self._about = {"journal": _VERSION, "of": dict(basis), "options": dict(options)}
        self._left = _load_runs(place)  # not asked for again yet
        self._kept: list[_Kept] = []  # in the order of this search
        self._proofs: list[tuple[str, str, float, float, list[Run]]] = []  # of a proof that may not be over
        self._asked = hashlib.sha256()
        self._measured = False  # something was measured since this search began
        self._at_the_end = False
        self._broken = False
        self._versions: tuple[str | None, str | None] | None = None
        self.answered, self.answered_s = 0, 0.0

    def run(self, changes: Sequence[Change], steps: int, trial: Trial) -> Run:
        if self._at_the_end:
            return self._runner.run(changes, steps, trial)
        self._keep_proofs()
        asked = self._as_asked(_words(changes), steps, asdict(trial) | {"timeout_s": None})
        timeout_s = trial.timeout_s or math.inf
        kept = self._find(asked, timeout_s)
        if kept is not None:
            (run,) = self._answer(kept, [tuple(changes)], [steps])
        else:
            began_s = time.monotonic()
            self._begin_to_measure()
            run = self._runner.run(changes, steps, trial)
            self._keep(asked, "", time.monotonic() - began_s, timeout_s, [run])
        self._compare_versions(run)
        self._asked.update(asked.encode())
        return run

    def prove(self, requests: Sequence[ProofRun], *, timeout_s: float, at_once: int = 1) -> list[Run]:
        asked = self._as_asked([[_words(one.changes), one.steps, one.leads, one.follows] for one in requests])
        after = self._asked.hexdigest()
        kept = self._find(asked, timeout_s, after)
        if kept is not None:
            runs = self._answer(kept, [one.changes for one in requests], [one.steps for one in requests])
        else:
            began_s = time.monotonic()
            self._begin_to_measure()
            runs = self._runner.prove(requests, timeout_s=timeout_s, at_once=at_once)
            self._proofs.append((asked, after, time.monotonic() - began_s, timeout_s, runs))
        self._asked.update(asked.encode())
        return runs

    def measure_afresh(self) -> None:
        """What comes now is compared with one another: nothing that was measured before will do."""
        self._keep_proofs()
        self._at_the_end = True
        self._runner.measure_afresh()

    def _as_asked(self, *what: Any) -> str:
        return json.dumps([self._way, *what], default=str, sort_keys=True)

    def _find(self, asked: str, timeout_s: float, after: str = "") -> _Kept | None:
        for kept in self._left:
            # A trial that had less time than now may come to its end; and the runs of a proof belong
            # together.
            had_time = bool(after) or not kept.hung or kept.timeout_s > timeout_s - 1
            if kept.asked == asked and kept.after == after and had_time and not (after and self._measured):
                return kept
        return None

    def _answer(self, kept: _Kept, changes: Sequence[tuple[Change, ...]], steps: Sequence[int]) -> list[Run]:
        self._left.remove(kept)
        self._kept.append(kept)
        self.answered += len(kept.runs)
        self.answered_s += kept.seconds
        return [
            self._read(some, run["code"], run["seconds"], self._place / run["name"], asked=asked)
            for some, asked, run in zip(changes, steps, kept.runs, strict=True)
        ]

    def _begin_to_measure(self) -> None:
        """The search may go another way from here on: earlier proofs are of no use."""
        self._measured = True
        for kept in [kept for kept in self._left if kept.after]:
            self._left.remove(kept)
            for run in kept.runs:
                shutil.rmtree(self._place / run["name"], ignore_errors=True)

    def _compare_versions(self, run: Run) -> None:
        """Refuse to go on where the command runs with another torch, or on another GPU, than it did."""
        if run.trace is None:
            return
        facts = run.trace.ranks[0].facts
        versions = (facts.versions or {}).get("torch"), facts.gpu
        then = self._versions = self._versions or versions
        if versions != then:
            before, now = (f"torch {torch} on {gpu or 'the CPU'}" for torch, gpu in (then, versions))
            raise UsageError(
                f"{self._place.parent} cannot be resumed: the command trained with {before}, and does with {now} now"
            )

    # -- on the disk --

    def _keep_proofs(self) -> None:
        """A proof is over when anything else begins."""
        for proof in self._proofs:
            self._keep(*proof)
        self._proofs.clear()

    def _keep(self, asked: str, after: str, seconds: float, timeout_s: float, runs: Sequence[Run]) -> None:
        """Note runs whole, or not at all: what cannot be kept is measured again."""
        if self._broken:
            return
        entry = _Kept(asked=asked, after=after, seconds=seconds, timeout_s=timeout_s)
        problems: list[str] = []
        for run in runs:
            name = f"{self._next_number() + len(entry.runs):02d}"
            if run.folder is None or not run.folder.is_dir():
                problems.append("a run has left no folder")
            elif size_of(self._place) + size_of(run.folder) > MOST_BYTES:
                problems.append(f"recordings take more than {MOST_BYTES >> 20} MB")
            else:
                problems += copy_recording(run.folder, self._place / name)
            entry.runs.append({"name": name, "code": run.code, "seconds": run.seconds})
        if not problems:
            self._kept.append(entry)
            problems = self._write()
        if problems:
            self._broken = True
            self._say(f"what is measured from now on cannot be resumed: {problems[0]}")

    def _next_number(self) -> int:
        return 1 + max((int(run["name"]) for kept in (*self._kept, *self._left) for run in kept.runs), default=0)

    def _write(self) -> list[str]:
        try:
            entries = [asdict(kept) for kept in (*self._kept, *self._left)]
            write_whole(self._place / JOURNAL, json.dumps(self._about | {"runs": entries}, indent=1), mode=PRIVATE)
        except OSError as problem:
            return [str(problem.strerror)]
        return []

    @property
    def remark(self) -> str:
        """What to say of a fix that was gone on with."""
        if not self.answered:
            return ""
        return f"the figures of {count_of(self.answered, 'run')} are from before this fix was resumed"


def _words(changes: Sequence[Change]) -> list[list[Any]]:
    return [[change.name, change.value, change.knob] for change in changes]


def _load_runs(place: Path) -> list[_Kept]:
    """The answers whose recordings are there; none where there is no journal."""
    if not is_file(place / JOURNAL):
        return []
    try:
        found = [_Kept(**entry) for entry in _read(place)["runs"]]
        names = [run["name"] for kept in found for run in kept.runs]
        if not all(re.fullmatch(r"\d{2,4}", name) for name in names):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise _damaged(place) from None
    return [kept for kept in found if all((place / run["name"]).is_dir() for run in kept.runs)]


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copy_recording(folder: Path, to: Path) -> list[str]:
    """Copy a recording, whole or not at all; returns a remark where that fails."""
    part = to.with_name(f"{to.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of one that was killed
    try:
        shutil.copytree(folder, part, ignore=shutil.ignore_patterns(OUTPUT))
        if (folder / OUTPUT).is_file():
            write_whole(part / OUTPUT, end_of(folder / OUTPUT, MOST_OUTPUT), mode=PRIVATE)  # without secrets
        _force_to_disk(part)
        shutil.rmtree(to, ignore_errors=True)  # that of a fix that was interrupted
        part.rename(to)
    except OSError as problem:  # the plan and the report matter more
        shutil.rmtree(part, ignore_errors=True)
        first = problem.args[0][0][2] if isinstance(problem, shutil.Error) else str(problem)
        why, _, _ = first.partition(": '")  # without the names of the files
        return [f"the recording {to} is not kept: {why}"]
    return []


def _force_to_disk(folder: Path) -> None:
    """Without this a power cut would leave files of the right name with nothing in them."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
