"""Turns what the training thread does into Steps whose spans tile the wall time.

The thread is in one phase at a time: `push` and `pop` cut the time line, and each piece belongs to the innermost
phase, so that the pieces add up by construction. What lies between phases has a name too: `loss` behind a forward
pass, `rest` elsewhere. On some steps every cut also drops an event into the GPU's queue (`GpuClock`); between two of
them with no launch in between, GPU time is idle time. Nothing here imports torch, waits for the GPU, or does I/O.

    hooks ──push/pop/fetched/stepped──► Recorder ──Step──► emit
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flatout.trace import Span, Step

DATA, START, COPY, FORWARD, LOSS, BACKWARD = "data", "loader start", "copy", "forward", "loss", "backward"
OPTIMIZER, SYNC, EVALUATION, CHECKPOINT, LOGGING = "optimizer", "sync", "evaluation", "checkpoint", "logging"
GC, OWN, REST = "gc", "flatout", "rest"

# In these nothing is launched, so what the GPU spends between their two events is idleness.
QUIET = frozenset({DATA, START, SYNC, CHECKPOINT, LOGGING, GC, OWN})

# What evaluation takes in; a checkpoint or a log line in the midst of it keeps its own name.
_PART_OF_EVALUATION = frozenset({DATA, START, COPY, FORWARD, LOSS, SYNC, REST})

_SPANS_A_STEP = 64
_STEPS_IN_FLIGHT = 64
_EVENT_SHARE = 0.002  # of a step's time may go into its events; shorter steps carry them less often
_FIRST_EVENTS_EVERY = 4


class GpuClock(Protocol):
    """Marks in the GPU's queue, read later without waiting."""

    def mark(self) -> Any:
        """Drop a mark; None where that is not possible now (no GPU in use, a graph being captured)."""

    def between(self, marks: list[Any]) -> list[float] | None:
        """Milliseconds between neighbours, or None while the GPU has not come to the last of them."""


class Losses(Protocol):
    """Loss values on their way to the host."""

    def read(self, ticket: Any) -> float | None:
        """The value, once it has arrived."""


@dataclass(slots=True)
class _Piece:
    name: str
    where: str | None
    start_s: float
    end_s: float
    mark: int | None  # index of the event at its end


@dataclass(slots=True)
class _OpenStep:
    start_s: float
    kind: str = "train"
    pieces: list[_Piece] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    crowd_s: dict[str, float] = field(default_factory=dict)  # phases beyond the first many, by name
    samples: int | None = None
    fetched: int = 0  # samples that came, not yet known to be for training
    loss: Any = None
    micro_steps: int = 0
    train_until: int = 0  # pieces before this one belong to training for certain

    def claim(self) -> None:
        """What was fetched has reached training."""
        if self.fetched:
            self.samples = (self.samples or 0) + self.fetched
            self.fetched = 0


class Recorder:
    """One training thread's account. `emit` gets every finished Step, in order."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        emit: Callable[[Step], None],
        gpu: GpuClock | None = None,
        losses: Losses | None = None,
    ) -> None:
        self._clock = clock
        self._emit = emit
        self._gpu = gpu
        self._losses = losses
        self._stack: list[tuple[str, str | None]] = []
        self._between = REST
        self._cut_s = clock()
        self._open = _OpenStep(self._cut_s, kind="setup")
        self._waiting: deque[tuple[_OpenStep, int, float]] = deque()
        self._thread = threading.get_ident()
        self._optimizers = _Cycle()
        self._train_loaders: set[int] = set()
        self._last_loader: int | None = None
        self._evaluating = False
        self._marking = False
        self._mark_every = _FIRST_EVENTS_EVERY
        self.steps = 0
        self.cuts = 0
        self.marks = 0

    def is_elsewhere(self) -> bool:
        """Whether this is not the thread that trains."""
        return threading.get_ident() != self._thread

    def move_here(self) -> None:
        """Training turns out to happen in this thread: follow it from now on."""
        self._thread = threading.get_ident()
        self._stack.clear()

    @property
    def busy(self) -> bool:
        """Whether the thread is in a named phase."""
        return bool(self._stack)

    @property
    def marking(self) -> bool:
        """Whether the open step carries marks in the GPU's queue."""
        return self._marking

    def push(self, name: str, where: str | None = None) -> None:
        """The thread enters a phase; the first that belongs to training ends the set-up."""
        if self._open.kind == "setup" and name in (START, DATA, FORWARD):
            self._begin_training()
        if self._evaluating and name in (BACKWARD, OPTIMIZER):
            self._evaluating = False
        self._cut()
        if name == BACKWARD:
            self._open.micro_steps += 1
        self._stack.append((name, where))

    def pop(self) -> None:
        """The thread leaves the phase it entered last."""
        self._cut()
        name = self._stack.pop()[0] if self._stack else REST
        if not self._stack:
            self._between = LOSS if name == FORWARD and not self._evaluating else REST

    def fetching(self, loader: int) -> None:
        """A batch is being asked of `loader`; training's own loader ends an evaluation."""
        if self._evaluating and loader in self._train_loaders:
            self._evaluating = False
        self.push(DATA)
        self._last_loader = loader

    def fetched(self, samples: int | None) -> None:
        """The batch has come, or the loader is at its end (None)."""
        self.pop()
        if samples is not None and not self._evaluating:
            self._open.fetched += samples

    def forward(self, *, learns: bool, training: bool) -> None:
        """A root module is called. Without gradients, out of training mode or on another loader, it is evaluation."""
        self._between = REST
        if learns:
            self._evaluating = False
            if self._last_loader is not None:
                self._train_loaders.add(self._last_loader)
            self.push(FORWARD)
            self._open.train_until = len(self._open.pieces)
            self._open.claim()
            return
        other_loader = self._last_loader is not None and self._last_loader not in self._train_loaders
        if not self._evaluating and (not training or other_loader) and not self._stack:
            self._begin_evaluation()
        self.push(FORWARD)

    def backward(self, loss: Any = None) -> None:
        """A backward pass begins; `loss` is a ticket for its value."""
        self.push(BACKWARD)
        if loss is not None:
            self._open.loss = loss

    def optimizer_begins(self) -> None:
        """An optimizer's step begins. One that raised has left its phase open: that is cleared up here."""
        if any(name == OPTIMIZER for name, _ in self._stack):
            self._stack.clear()
        self.push(OPTIMIZER)

    def optimizer_ends(self, optimizer: int) -> bool:
        """An optimizer's step is over; True when that ended a training step."""
        while self._stack and self._stack[-1][0] != OPTIMIZER:
            self._stack.pop()
        self.pop()
        self._open.train_until = len(self._open.pieces)
        if not self._optimizers.closes(optimizer):
            return False
        self.end_step()
        return True

    def end_step(self) -> None:
        """Close the step here (also where a GradScaler skipped its optimizer)."""
        self._cut()
        self._open.claim()
        self._close(self.steps)
        self.steps += 1
        self._evaluating = False
        self._marking = self._gpu is not None and self.steps % self._mark_every == 0
        if self._marking:
            self._mark()
        self._send()

    def set_kind(self, kind: str) -> None:
        """Say what the open step is, when it is not plain training: xray, replay, resident …"""
        self._open.kind = kind

    def finish(self) -> None:
        """Close the books: what came after the last step becomes a step of kind `tail`."""
        self._cut()
        self._open.kind = "tail"
        self._close(self.steps)
        self._send(all_of_them=True)

    def _cut(self) -> None:
        now_s = self._clock()
        start_s, self._cut_s = self._cut_s, now_s
        self.cuts += 1
        name, where = self._stack[-1] if self._stack else (self._between, None)
        if self._evaluating and name in _PART_OF_EVALUATION:
            name, where = EVALUATION, None
        mark = self._mark() if self._marking else None
        pieces = self._open.pieces
        if mark is None and pieces and pieces[-1].name == name and pieces[-1].where == where:
            pieces[-1].end_s = now_s
        elif len(pieces) < _SPANS_A_STEP:
            pieces.append(_Piece(name, where, start_s, now_s, mark))
        else:
            self._open.crowd_s[name] = self._open.crowd_s.get(name, 0.0) + now_s - start_s

    def _mark(self) -> int | None:
        """Drop an event; its index, or None when there are enough of them or none can be had now."""
        marks = self._open.marks
        mark = self._gpu.mark() if self._gpu is not None and len(marks) < _SPANS_A_STEP else None
        if mark is None:
            self._marking = False
            return None
        self.marks += 1
        marks.append(mark)
        return len(marks) - 1

    def _begin_training(self) -> None:
        """What came before is the set-up; the first step, with all that happens in it only once, is the warm-up."""
        self._cut()
        self._close(index=-1)
        self._open.kind = "warmup"

    def _begin_evaluation(self) -> None:
        """It began when training's last phase ended: at the first batch asked of the other loader."""
        self._cut()
        self._evaluating = True
        self._open.fetched = 0
        for piece in self._open.pieces[self._open.train_until :]:
            if piece.name in _PART_OF_EVALUATION:
                piece.name = EVALUATION

    def _close(self, index: int) -> None:
        step = self._open
        self._open = _OpenStep(self._cut_s)
        self._waiting.append((step, index, self._cut_s))
        wall_s = self._cut_s - step.start_s
        if step.marks and wall_s > 0:
            events_s = 4e-6 * len(step.marks)
            self._mark_every = max(1, min(64, round(events_s / (_EVENT_SHARE * wall_s))))

    def _send(self, all_of_them: bool = False) -> None:
        while self._waiting:
            step, index, end_s = self._waiting[0]
            times = self._gpu.between(step.marks) if self._gpu is not None and len(step.marks) > 1 else []
            if times is None and not all_of_them and len(self._waiting) < _STEPS_IN_FLIGHT:
                return
            self._waiting.popleft()
            loss = self._losses.read(step.loss) if self._losses is not None and step.loss is not None else None
            self._emit(_as_step(step, index, end_s, times or [], loss))


class _Cycle:
    """Which optimizer ends a step, where several take turns: the last one before the first comes round again."""

    def __init__(self) -> None:
        self._order: list[int] = []
        self._closer: int | None = None
        self._others = 0

    def closes(self, optimizer: int) -> bool:
        if self._closer is not None:
            self._others = 0 if optimizer == self._closer else self._others + 1
            if self._others <= 8:
                return optimizer == self._closer
            self._order, self._closer, self._others = [], None, 0
        if optimizer in self._order:
            self._closer = self._order[-1]
            return optimizer == self._closer
        self._order.append(optimizer)
        return True


def _as_step(step: _OpenStep, index: int, end_s: float, gpu_ms: list[float], loss: float | None) -> Step:
    spans: list[Span] = []
    for piece in _joined(step.pieces):
        elapsed = None
        if piece.mark is not None and 0 < piece.mark <= len(gpu_ms):
            elapsed = gpu_ms[piece.mark - 1]
        quiet = piece.name in QUIET
        spans.append(
            Span(
                name=piece.name,
                start_ms=(piece.start_s - step.start_s) * 1e3,
                host_ms=(piece.end_s - piece.start_s) * 1e3,
                gpu_idle_ms=elapsed if quiet else None,
                gpu_busy_ms=elapsed if not quiet else None,
                where=piece.where,
            )
        )
    crowd_ms = (step.pieces[-1].end_s - step.start_s) * 1e3 if step.pieces else 0.0
    spans += [Span(name=name, start_ms=crowd_ms, host_ms=s * 1e3) for name, s in step.crowd_s.items()]
    return Step(
        index=index,
        start_s=step.start_s,
        wall_ms=(end_s - step.start_s) * 1e3,
        spans=tuple(spans),
        samples=step.samples,
        loss=loss,
        micro_steps=max(1, step.micro_steps),
        kind=step.kind,
    )


def _joined(pieces: list[_Piece]) -> list[_Piece]:
    """Neighbours of one name as one, where no mark stands between them."""
    joined: list[_Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.mark is piece.mark is None
            and (last.name, last.where) == (piece.name, piece.where)
        ):
            joined[-1] = replace(last, end_s=piece.end_s)
        else:
            joined.append(piece)
    return joined
