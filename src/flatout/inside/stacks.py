"""Where a thread spends its time, by line: a thread of ours looks at its Python stack, every 10 ms at
first, later every 125 ms. A look stands for the time since the one before, in the phase that it falls
into.

The interpreter hands over at calls and turns of a loop, so time in operators on plain Python objects
shows at the next call of the same function. Code objects and numbers are kept, never frames: those
would keep the script's tensors alive.
"""

from __future__ import annotations

import functools
import gc
import linecache
import operator
import os
import site
import sys
import sysconfig
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress, islice, repeat, takewhile
from operator import itemgetter
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType, TracebackType
from typing import Any

import torch

from flatout.model.records import DECORATORS, WORKER_BEGINS, WRAPPED_CALL, Frame, Stacks, StackTime, function_name
from flatout.redact import redact_code, redact_text

DENSE_S, DENSE_EVERY_S, SPARSE_EVERY_S = 10.0, 0.01, 0.125
_LOOKS_A_SECOND = 8
# How long a thread keeps the interpreter's lock when another asks: at the usual 5 ms, shorter lines
# are never seen.
_QUICK_SWITCH_S = 1e-4
_DEEPEST = 128  # frames of a stack
_MOST_STACKS, _MOST_KEPT = 300, 4000  # in a record, in memory
_CALL = operator.methodcaller("__call__")
_GOLDEN = 0.6180339887  # its multiples never keep step with the training

Line = tuple[CodeType, int]
Key = tuple[str, tuple[Line, ...]]  # phase, and lines, outermost first

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARY_CODE = (_OURS, _TORCH, "<")
# The phase that a stack shows where the recorder did not look closely: file, function.
_PHASE_OF_CALL = (
    ("torch/nn/functional.py", None, "loss"),
    ("torch/nn/modules/module.py", "_wrapped_call_impl", "forward"),
    ("torch/autograd/__init__.py", "backward", "backward"),
    ("torch/optim/optimizer.py", "wrapper", "optimizer"),
)
# Files that a forward pass may go through, and what its time is called then.
_PASSES = {"torch/utils/checkpoint.py": "checkpoint", "torch/nn/parallel/data_parallel.py": "data parallel"}
# Packages that start a training and are none themselves.
_LAUNCHERS = ("torch", "accelerate", "deepspeed", "lightning", "pytorch_lightning", "ipykernel")
# A process that runs one of these only starts trainings and waits for them.
_STARTS_OTHERS = ("torch/distributed/run.py", "accelerate/commands/launch.py", "deepspeed/launcher/launch.py")


class StackSampler:
    """Looks at the stack of one thread from `start` to `stop`.

    `phase` says what that thread is doing; None: do not look. Dense looks begin when the phase is
    another than `sparse_phase`. Looks count once the number of `steps` is another: what comes after
    the last step is no training. `now_and_then` is called about once a second.
    """

    def __init__(
        self,
        thread: Callable[[], int],
        phase: Callable[[], str | None],
        *,
        sparse_phase: str | None = None,
        steps: Callable[[], int] | None = None,
        dense_s: float = DENSE_S,
        now_and_then: Callable[[], None] = lambda: None,
    ) -> None:
        self._thread, self._phase, self._sparse_phase, self._steps = thread, phase, sparse_phase, steps
        self._dense_left_s = dense_s
        self._now_and_then = now_and_then
        self._dense = False
        self._users_switch_s: float | None = None  # while we have one of our own
        self._seen, self._of_open_step = _Looks(), _Looks()
        self._steps_seen = 0
        self._lock = threading.Lock()
        self._runner: threading.Thread | None = None
        self._stopping = threading.Event()
        self.looks = 0

    @property
    def running(self) -> bool:
        """Whether it looks now."""
        return self._runner is not None

    def start(self) -> None:
        """Begin to look, or go on."""
        self._stopping = threading.Event()
        self._runner = threading.Thread(target=self._run, args=(self._stopping,), name="flatout-stacks", daemon=True)
        self._runner.start()

    def stop(self) -> None:
        """Pause until the next start; safe to call twice."""
        self._stopping.set()
        if self._runner is not None and self._runner.is_alive():
            self._runner.join(1.0)
        self._runner = None

    def _run(self, stopping: threading.Event) -> None:
        before_s = time.monotonic()
        try:
            while not stopping.wait(self._pause_s()):
                if not self._dense and self._phase() not in (None, self._sparse_phase):
                    # We have the lock because the thread let go of it, after up to 5 ms: look a little later.
                    self._switch_quickly(True)
                    stopping.wait(DENSE_EVERY_S * self._jitter())
                now_s = time.monotonic()
                self._look(now_s - before_s)
                self._switch_quickly(self._dense)
                before_s = now_s
                if self.looks % _LOOKS_A_SECOND == 0:
                    self._now_and_then()
        finally:
            self._switch_quickly(False)

    def _pause_s(self) -> float:
        return (DENSE_EVERY_S if self._dense else SPARSE_EVERY_S) * self._jitter()

    def _jitter(self) -> float:
        return 0.5 + self.looks * _GOLDEN % 1.0

    def _switch_quickly(self, quickly: bool) -> None:
        """Have the thread give up the lock at once when we ask for it; else as it was."""
        before_s = self._users_switch_s
        if quickly and before_s is None:
            self._users_switch_s = sys.getswitchinterval()
            sys.setswitchinterval(_QUICK_SWITCH_S)
        elif before_s is not None and not quickly:
            self._users_switch_s = None
            if abs(sys.getswitchinterval() - _QUICK_SWITCH_S) < 1e-6:  # else the script has set its own
                sys.setswitchinterval(before_s)

    def _look(self, seconds: float) -> None:
        self.looks += 1
        phase = self._phase()
        if phase is None:
            return
        if phase != self._sparse_phase:
            self._dense_left_s -= seconds
            self._dense = self._dense_left_s > 0
        stack = lines_of(self._thread())
        if not stack:
            return
        if phase in ("unsplit", "rest"):
            phase = _phase_of(stack) or phase
        with self._lock:
            self._settle()
            self._of_open_step.add((phase, shown(stack)), seconds)
            if phase == "forward":
                for name in _passed(stack):
                    self._of_open_step.passed_s[name] += seconds

    def _settle(self) -> None:
        """Count what was seen of a step that has ended since."""
        steps = self._steps() if self._steps is not None else self._steps_seen + 1
        if steps != self._steps_seen:
            self._steps_seen = steps
            self._seen.join(self._of_open_step)
            self._of_open_step = _Looks()

    def record(self, *, dataset: str | None = None, worker: int | None = None) -> Stacks:
        """What has been seen so far."""
        with self._lock:
            self._settle()
            largest, passed_s = _largest(self._seen.stacks, _MOST_STACKS), dict(self._seen.passed_s)
        numbers: dict[Line, int] = {}
        stacks = []
        for (phase, lines), (seconds, looks) in largest.items():
            frames = tuple(numbers.setdefault(line, len(numbers)) for line in lines)
            stacks.append(StackTime(phase=phase, frames=frames, seconds=seconds, looks=int(looks)))
        return Stacks(
            time_s=time.monotonic(),
            pid=os.getpid(),
            worker=worker,
            dataset=dataset,
            frames=tuple(_frame(code, number) for code, number in numbers),
            stacks=tuple(stacks),
            passed_s=passed_s,
        )


class _Looks:
    """What was seen: seconds and looks by phase and stack, and the seconds of forward passes by what
    they pass."""

    def __init__(self) -> None:
        self.stacks: defaultdict[Key, list[float]] = defaultdict(lambda: [0.0, 0])
        self.passed_s: defaultdict[str, float] = defaultdict(float)

    def add(self, key: Key, seconds: float, looks: float = 1) -> None:
        seen = self.stacks[key]
        seen[0] += seconds
        seen[1] += looks
        if len(self.stacks) > _MOST_KEPT:
            self.stacks = _largest(self.stacks, _MOST_KEPT // 2)

    def join(self, other: _Looks) -> None:
        for key, (seconds, looks) in other.stacks.items():
            self.add(key, seconds, looks)
        for name, seconds in other.passed_s.items():
            self.passed_s[name] += seconds


def _largest(seen: dict[Key, list[float]], most: int) -> defaultdict[Key, list[float]]:
    """At most so many stacks; the time of the others stays under their phase, without lines."""
    kept: defaultdict[Key, list[float]] = defaultdict(lambda: [0.0, 0])
    ranked = sorted(seen.items(), key=lambda item: -item[1][0])
    for place, ((phase, lines), (seconds, looks)) in enumerate(ranked):
        total = kept[phase, lines if place < most else ()]
        total[0] += seconds
        total[1] += looks
    return kept


def in_words(thread: int) -> str:
    """The innermost line of the user's in a thread, and what it called in a library; empty where
    there is none, and in a process that only starts others."""
    stack = lines_of(thread)
    lines = shown(stack)
    own = [line for line in lines if is_own(line[0].co_filename)]
    if not own or any(code.co_filename.endswith(_STARTS_OTHERS) for code, _ in stack):
        return ""
    frame = _frame(*own[-1])
    where = f"{frame.where} {frame.function}".removesuffix(" <module>")
    if len(lines) > len(own):
        code = lines[len(own)][0]
        return f"{where} → {_path(code.co_filename)} {_function(code)}".removesuffix(" <module>")
    return f"{where}: {frame.source}" if frame.source else where


def lines_of(thread: int) -> list[Line]:
    """The stack of a thread, innermost line first; empty if the thread has ended."""
    if sys.version_info[:2] == (3, 11):
        return _lines_at_once(thread)
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return []
    stack = islice(walk_stack(innermost), _DEEPEST)
    return [(frame.f_code, number or _line_before(frame.f_code, frame.f_lasti)) for frame, number in stack]


def _lines_at_once(thread: int) -> list[Line]:
    """The same in one call of C, with the garbage collector off: the interpreter's lock is not given
    up meanwhile.

    Python 3.11 makes a frame's object when somebody asks for it, and that may begin a garbage
    collection, whose finalizers give up the lock. The frame is gone when they are done, and the
    process crashes.
    """
    was_on: list[bool] = []
    frames: list[Any] = []
    codes: list[CodeType | None] = []
    numbers: list[int | None] = []
    instructions: list[int] = []
    innermost = map(dict.get, iter(sys._current_frames, None), repeat(thread))
    beyond = takewhile(
        operator.truth, map(getattr, map(itemgetter(-1), repeat(frames)), repeat("f_back"), repeat(None))
    )
    # Iterators of lists: what is appended until they come to it counts.
    steps: tuple[Callable[[], object], ...] = (
        partial(was_on.extend, islice(iter(gc.isenabled, None), 1)),
        gc.disable,
        partial(frames.extend, islice(innermost, 1)),
        partial(frames.extend, islice(beyond, _DEEPEST - 1)),
        partial(codes.extend, map(getattr, frames, repeat("f_code"), repeat(None))),
        partial(numbers.extend, map(getattr, frames, repeat("f_lineno"), repeat(None))),
        partial(instructions.extend, map(getattr, frames, repeat("f_lasti"), repeat(0))),
        frames.clear,
        partial(deque, map(_CALL, compress((gc.enable,), was_on))),
    )
    deque(map(_CALL, steps), maxlen=0)
    read = zip(codes, numbers, instructions, strict=True)
    return [(code, number or _line_before(code, last)) for code, number, last in read if code is not None]


@functools.lru_cache(maxsize=4096)
def _line_before(code: CodeType, instruction: int) -> int:
    """The line of the last instruction up to this one that has a line: those that close a loop may
    have none."""
    before = (line for start, _, line in code.co_lines() if line and start <= instruction)
    return max(deque(before, maxlen=1), default=code.co_firstlineno)


def shown(stack: Iterable[Line]) -> tuple[Line, ...]:
    """What is kept of a stack, outermost first: the user's own lines, the first call into a library
    from there, the first into torch, and the innermost one."""
    own: list[Line] = []
    library: list[Line] = []  # inside the innermost line of the user's
    for line in stack:
        filename = line[0].co_filename
        if filename.endswith(WORKER_BEGINS):
            break
        if line[0].co_name == WRAPPED_CALL:
            continue
        if is_own(filename):
            own.append(line)
        elif not own and not filename.startswith((_OURS, "<")) and not filename.endswith(DECORATORS):
            library.append(line)
    library.reverse()
    into_torch = [line for line in library if line[0].co_filename.startswith(_TORCH)]
    called = dict.fromkeys((*library[:1], *into_torch[:1], *library[-1:]))
    return (*reversed(own), *called)


@functools.lru_cache(maxsize=4096)
def is_own(filename: str) -> bool:
    """Whether a file is the user's: in no library and not ours. A training that is installed as a package and
    started by its name is the user's."""
    if filename.startswith(("<frozen", "<string>", _OURS)):
        return False
    for folder in _libraries():
        if filename.startswith(folder):
            package = filename[len(folder) :].partition(os.sep)[0]
            main = str(getattr(sys.modules.get("__main__"), "__file__", ""))
            return package not in _LAUNCHERS and main.startswith(folder + package + os.sep)
    return True


@functools.cache
def _libraries() -> tuple[str, ...]:
    """The folders of installed packages and of the standard library, the innermost first."""
    folders = {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    folders |= {str(Path(folder).resolve()) for folder in folders}
    return tuple(sorted((folder + os.sep for folder in folders), key=len, reverse=True))


def _passed(stack: Iterable[Line]) -> set[str]:
    return {name for code, _ in stack for file, name in _PASSES.items() if code.co_filename.endswith(file)}


def _phase_of(stack: Iterable[Line]) -> str | None:
    """The phase that the outermost call of torch shows."""
    found = None
    for code, _ in stack:
        if "torch" in code.co_filename:
            for file, function, phase in _PHASE_OF_CALL:
                if function in (None, code.co_name) and code.co_filename.endswith(file):
                    found = phase
    return found


def _frame(code: CodeType, number: int) -> Frame:
    where, own, source = f"{_path(code.co_filename)}:{number}", is_own(code.co_filename), None
    if own:
        source = redact_code(linecache.getline(code.co_filename, number).strip()[:160]) or None
    return Frame(where=where, function=_function(code), own=own, source=source)


def _function(code: CodeType) -> str:
    return function_name(getattr(code, "co_qualname", code.co_name))


def _path(filename: str) -> str:
    """How a report names a file, or the cell of a notebook."""
    return cell_of(filename) or _file(filename)


def cell_of(file: str) -> str | None:
    """What IPython calls the cell behind the file name that it gives to its code: In[3]."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    name_of = getattr(getattr(get_ipython(), "compile", None), "format_code_name", None)
    name = name_of(file) if name_of is not None else None
    return name[1] if name is not None else None


@functools.lru_cache(maxsize=4096)
def _file(filename: str) -> str:
    for folder in (*_libraries(), f"{Path.cwd()}{os.sep}"):
        if filename.startswith(folder):
            return redact_text(filename[len(folder) :])
    return redact_text(filename)


def caller(beyond: tuple[str, ...] = ()) -> str | None:
    """The file:line of a call: the innermost that is not in torch, in flatout, or in the paths `beyond`."""
    for frame, number in walk_stack(sys._getframe(2)):
        filename = frame.f_code.co_filename
        if not filename.startswith(_LIBRARY_CODE) and not (beyond and _path(filename).startswith(beyond)):
            return f"{_path(filename)}:{number}"
    return None


def called_from(file: str) -> bool:
    """Whether a function of a file whose path ends like this is running in this thread."""
    return any(frame.f_code.co_filename.endswith(file) for frame, _ in walk_stack(sys._getframe(1)))


def raised_at(trace: TracebackType | None) -> str | None:
    """The innermost file:line of the user's own code that an exception went through."""
    lines = [(frame.f_code.co_filename, number) for frame, number in walk_tb(trace)]
    return next((f"{_path(file)}:{number}" for file, number in reversed(lines) if is_own(file)), None)
