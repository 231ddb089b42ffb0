"""Turns what the training thread does into Steps whose spans add up to the wall time.

    timing ──push/pop/fetched/stepped──► Recorder ──Step──► emit

`push` and `pop` cut the time line, and each piece belongs to the innermost phase. In steps that are
looked at closely, every cut drops an event into the GPU's queue. In the others (`light`) what is
computed is one piece, and the commonest events only go on a tape: between two steps the processor
forgets our code, which then costs ten times what it costs in a loop. Nothing here imports torch,
waits for the GPU, or does I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from flatout.model.records import SPANS_A_STEP
from flatout.trace import Span, Step
from flatout.trace.downsample import Event, LightSteps

if TYPE_CHECKING:
    from flatout.inside.timing import CudaClock, LossReader

DATA, START, COPY, FORWARD, LOSS, BACKWARD = "data", "loader start", "copy", "forward", "loss", "backward"
OPTIMIZER, SYNC, EVALUATION, CHECKPOINT, LOGGING = "optimizer", "sync", "evaluation", "checkpoint", "logging"
GC, HELD, OWN, REST, UNSPLIT = "gc", "held", "flatout", "rest", "unsplit"

# In these nothing is launched, and the GPU's time between their two events is idle time.
QUIET = frozenset({DATA, START, SYNC, CHECKPOINT, LOGGING, GC, HELD, OWN})
# With one of these training, or an evaluation, begins.
_BEGINS = frozenset({START, DATA, FORWARD, BACKWARD})

# What is called evaluation while one goes on; a checkpoint or a log line in it keeps its own name.
_PART_OF_EVALUATION = frozenset({DATA, START, COPY, FORWARD, LOSS, SYNC, REST, UNSPLIT})

_SLIVER_S = 20e-6  # less than this before a phase is counted with it
_STEPS_IN_FLIGHT = 64
_KNOWN_AFTER = 200  # close looks; what a phase takes is known by then
_ON_TAPE = 512  # events
_ON_TAPE_S = 1.0


class Sampling(NamedTuple):
    """Which steps are looked at closely: the first ones, then as many as cost a small share of the time."""

    at_first: int = 16  # steps
    seldom: int = 256  # one in so many, at least
    share: float = 0.001  # of the time that close looks may take
    later_share: float = 0.0002  # after _KNOWN_AFTER of them


@dataclass(slots=True, repr=False, eq=False)
class _Piece:
    name: str
    where: str | None
    start_s: float
    end_s: float
    mark: int | None  # index of the event at its end
    quiet: bool  # nothing was launched in it, whatever it will be called
    loader: int | None  # whose batch it waited for

    def goes_on_as(self, name: str, where: str | None, start_s: float, loader: int | None, mark: int | None) -> bool:
        """Whether what begins then is more of the same. Else a collection or a signal handler came
        between."""
        same = self.name == name and self.end_s == start_s and self.where == where and self.loader == loader
        return same and self.mark is None and mark is None


@dataclass(slots=True, repr=False, eq=False)
class _OpenStep:
    start_s: float
    end_s: float = 0.0
    index: int = 0
    kind: str = "train"
    closely: bool = True  # looked at closely from its beginning
    pieces: list[_Piece] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    crowd_s: dict[str, float] = field(default_factory=dict)  # phases beyond SPANS_A_STEP, by name
    samples: int | None = None
    loss: Any = None  # a ticket for it
    micro_steps: int = 0


class Recorder:
    """Records one training thread. `emit` gets every finished Step, in order."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        emit: Callable[[Step | LightSteps], None],
        gpu: CudaClock | None = None,
        losses: LossReader | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self._sampling = sampling or Sampling()
        self.clock = clock
        self._emit = emit
        self._gpu = gpu
        self._losses = losses
        self._stack: list[tuple[str, str | None, int | None]] = []
        self._between = REST
        self._cut_s = clock()
        self._open = _OpenStep(self._cut_s, kind="setup")
        self._waiting: deque[_OpenStep | LightSteps] = deque()
        self.thread = get_ident()
        self._optimizers = _Cycle()
        self.evaluation = _Evaluation()
        self.train_loaders = self.evaluation.train_loaders
        self.light = False  # this step is not looked at closely, and nothing but training has been seen in it
        self.tape: list[Event] = []  # of light steps; the wrappers write on it
        self.waiting = False  # for a batch, in a light step
        self._whole = 0  # events on the tape up to the end of a step
        self._closed = 0  # steps that ended, without those on the tape
        self.marking = False  # the open step carries marks in the GPU's queue
        self._closely_every = 1
        self._closely_at = 0
        self._close_looks = 0
        self._closely_s = 1.0  # what a close look takes at best: the first ones take far longer
        self.steps = 0  # that ended
        self.measured = 0  # of kind train
        self.own_s = 0.0  # what recording took
        self._own_before_s = 0.0

    def move_here(self) -> None:
        """Training happens in this thread: follow it from now on."""
        self._play()
        self.thread = get_ident()
        self._stack.clear()

    @property
    def busy(self) -> bool:
        """Whether the thread is in a named phase, or in a wait that goes on the tape."""
        return self.waiting or bool(self._stack)

    @property
    def phase(self) -> str:
        """What the thread is doing, to be read from another thread; in a step of another kind, that kind.

        The first step may hold much of the set-up (a batch looked at before the model is built), and
        counts with it.
        """
        if self._open.kind != "train":
            return "setup" if self._open.kind == "warmup" else self._open.kind
        return self.doing

    @property
    def doing(self) -> str:
        """What the thread is doing, in a step of whatever kind."""
        phase = UNSPLIT if self.light else self._between
        if self._stack:
            phase = self._stack[-1][0]
        if self.waiting:
            phase = DATA
        evaluates = self.evaluation.on or self.evaluation.is_sure
        return EVALUATION if evaluates and phase in _PART_OF_EVALUATION else phase

    @property
    def still_s(self) -> float:
        """How long the thread has been doing that, to be read from another thread; 0 where it is not
        known."""
        return 0.0 if self.light else self.clock() - self._cut_s

    def push(self, name: str, where: str | None = None, loader: int | None = None) -> None:
        """The thread enters a phase; the first that belongs to training ends the set-up."""
        if self.tape:
            self._play()
        now_s = self.clock()
        if self._open.kind == "setup" and name in _BEGINS:
            self._begin_training()
        if now_s - self._cut_s > _SLIVER_S:  # less than this between two phases may be our own work
            self._cut(now_s)
        self._stack.append((name, where, loader))
        self.own_s += self.clock() - now_s

    def as_own(self, action: Callable[[], object]) -> None:
        """Do something of ours, whose time is on our own account."""
        self.push(OWN)
        try:
            action()
        finally:
            self.pop()

    def leave(self, depth: int) -> None:
        """The thread leaves the phase at this depth, and those above it that an exception has left open."""
        while len(self._stack) >= depth:
            self.pop()
        self._between = REST

    def pop(self) -> None:
        """The thread leaves the phase it entered last."""
        now_s = self.clock()
        self._cut(now_s)
        name = self._stack.pop()[0] if self._stack else REST
        if not self._stack:
            self._between = REST
            if name == FORWARD and not self.evaluation.suspected:
                self._between = LOSS
        self.own_s += self.clock() - now_s

    # -- what is training, and what is evaluation

    def fetching(self, loader: int, learns: bool = True) -> None:
        """A batch is being asked of `loader`, with gradients switched on or off."""
        self.push(DATA, None, loader)
        if self.evaluation.shown_by_fetch(loader, learns=learns):
            self._call_it_evaluation()
        self.evaluation.asked(loader, learns=learns)

    def fetched(self, samples: int | None) -> None:
        """The batch has come, or the loader is at its end (None)."""
        loader = self._stack[-1][2] if self._stack else None
        self.pop()
        if samples is not None and loader is not None:
            self.evaluation.took(loader, samples)

    def look_closely(self) -> None:
        """Something other than plain training begins: split the rest of this step."""
        self._play()
        self._cut(self.clock())
        self.light = False
        self._between = REST

    def _play(self) -> None:
        """Take up what is on the tape."""
        now_s = self.clock()
        tape, whole = self.tape, self._whole
        self.tape, self._whole = [], 0
        begun = 0  # events of a step that has pieces already
        if whole and (self._open.pieces or self._open.micro_steps or not self.evaluation.undisturbed):
            begun = next(place for place, event in enumerate(tape, 1) if type(event) is float)
        self._play_one_by_one(tape[:begun])
        if begun < whole:
            self._hand_on(tape[begun:whole])
        self._play_one_by_one(tape[whole:])
        self.own_s += self.clock() - now_s

    def _play_one_by_one(self, events: list[Event]) -> None:
        for event in events:
            if event is None:
                self._open.micro_steps += 1
            elif type(event) is float:
                self._settle()
                self._cut(max(event, self._cut_s))
                self._close()
            else:
                loader, start_s, end_s, samples = event  # type: ignore[misc]
                if start_s - self._cut_s > _SLIVER_S:
                    self._cut(start_s)
                self._stack.append((DATA, None, loader))
                self._cut(max(end_s, self._cut_s))  # a collection may have come in between
                self._stack.pop()
                if samples is not None:
                    self.evaluation.took(loader, samples)

    def _hand_on(self, events: list[Event]) -> None:
        """Whole steps in which nothing else happened need no pieces."""
        first, start_s = self._closed, self._open.start_s
        steps = LightSteps(first_index=first, start_s=start_s, events=events, waiting=DATA, computing=UNSPLIT)
        self._waiting.append(steps)
        self._closed += sum(type(event) is float for event in events)
        self._cut_s = events[-1]  # type: ignore[assignment]
        self._open = _OpenStep(self._cut_s, closely=False)
        self.evaluation.since = 0

    def forward(self, *, learns: bool, training: bool, trained: bool = True) -> None:
        """A root module is called; `learns`: with gradients, `trained`: by an optimizer."""
        alone = not self._stack
        self._between = REST
        self.push(FORWARD)
        if learns and training:
            self._settle()
        elif alone:
            self.evaluation.suspect(surely=trained and not training and not learns)

    def backward(self, tensors: Any = None) -> None:
        """A backward pass begins, from a loss or several tensors."""
        loss = None
        if self._losses is not None:
            loss = self._losses.take(tensors, from_gpu=self.marking)
        self.push(BACKWARD)
        self._settle()
        self._open.micro_steps += 1
        if loss is not None:
            self._open.loss = loss

    def _settle(self) -> None:
        """What has been going on is training: its batches count."""
        if self.evaluation.is_sure:
            self._call_it_evaluation()
        samples = self.evaluation.settle(len(self._open.pieces))
        if samples:
            self._open.samples = (self._open.samples or 0) + samples

    def _call_it_evaluation(self) -> None:
        """What came since training's last phase was evaluation, from the first batch or forward pass on."""
        pieces, since = self._open.pieces, self.evaluation.since
        begun = False
        for piece in pieces[since:]:
            is_trainings = self.evaluation.is_trainings_batch(piece.loader)
            begun = begun or (piece.name in _BEGINS and not is_trainings)
            if begun and not is_trainings and piece.name in _PART_OF_EVALUATION:
                piece.name, piece.where, piece.loader = EVALUATION, None, None
        joined = pieces[:since]
        for piece in pieces[since:]:
            if joined and joined[-1].goes_on_as(piece.name, piece.where, piece.start_s, piece.loader, piece.mark):
                joined[-1].end_s = piece.end_s
            else:
                joined.append(piece)
        pieces[:] = joined
        self.evaluation.called(len(pieces))

    # -- steps

    def optimizer_begins(self) -> int:
        """An optimizer's step begins; its depth among the phases, for `leave`."""
        self.push(OPTIMIZER)
        self._settle()
        return len(self._stack)

    def optimizer_ended(self, optimizer: int) -> bool:
        """An optimizer's step is over (or was skipped); True when that ended a training step."""
        closes = optimizer == self._optimizers.only or self._optimizers.closes(optimizer)
        if self.light and closes:
            now_s = self.clock()
            self.tape.append(now_s)
            self._whole = len(self.tape)
            self.steps += 1
            self.measured += 1
            if self.steps >= self._closely_at or self._whole >= _ON_TAPE or now_s - self._open.start_s >= _ON_TAPE_S:
                self._play()
                now_s = self.clock()
                self._begin_step()
                self.own_s += self.clock() - now_s
        elif closes:
            self._end_step()
        elif not self.light:
            self.evaluation.since = len(self._open.pieces)
        return closes

    def _end_step(self) -> None:
        now_s = self.clock()
        self._cut(now_s)
        if self._open.kind == "train" and not self._optimizers.settled:
            self._open.kind = "warmup"
        self.measured += self._open.kind == "train"
        self._close()
        self.steps += 1
        self._begin_step()
        self.own_s += self.clock() - now_s

    def _begin_step(self) -> None:
        self.light = self.steps < self._closely_at and self.evaluation.undisturbed
        self._open.closely = not self.light
        self.marking = self._gpu is not None and not self.light
        if not self.light and self.steps >= self._sampling.at_first:
            # Not every n-th step: waits that come round with the workers would always be met, or never.
            self._closely_at = self.steps + 1 + self.steps * 7919 % (2 * self._closely_every - 1)
        if self.marking:
            self._mark()
        self._send()

    def set_kind(self, kind: str) -> None:
        """Say what the open step is, where it is not plain training: xray, replay …"""
        if self.light:
            self.look_closely()
        self._open.kind = kind

    def finish(self) -> None:
        """The recording ends: what came after the last step becomes a step of kind `tail`."""
        self._play()
        self.marking = self.light = False
        self._cut(self.clock())
        if self.evaluation.suspected:  # and no training followed
            self._call_it_evaluation()
        self._open.kind = "tail"
        self._close()
        self._send(all_of_them=True)

    def _cut(self, now_s: float) -> None:
        start_s, self._cut_s = self._cut_s, now_s
        if self._stack:
            name, where, loader = self._stack[-1]
        else:
            name, where, loader = self._between, None, None
            if self.light:
                name = UNSPLIT
        quiet = name in QUIET
        evaluation, pieces = self.evaluation, self._open.pieces
        if evaluation.on and name in _PART_OF_EVALUATION:
            name, where, loader = EVALUATION, None, None
        mark = self._mark() if self.marking else None
        if len(pieces) > evaluation.since and pieces[-1].goes_on_as(name, where, start_s, loader, mark):
            pieces[-1].end_s = now_s
            return
        if len(pieces) < SPANS_A_STEP:
            pieces.append(_Piece(name, where, start_s, now_s, mark, quiet, loader))
        else:
            self._open.crowd_s[name] = self._open.crowd_s.get(name, 0.0) + now_s - start_s

    def _mark(self) -> int | None:
        """Drop an event; its index, or None where there are enough of them or none can be had now."""
        marks, mark = self._open.marks, None
        if self._gpu is not None and len(marks) < SPANS_A_STEP:
            mark = self._gpu.mark(begins=not marks)
        if mark is None:
            self.marking = False
            return None
        marks.append(mark)
        return len(marks) - 1

    def _begin_training(self) -> None:
        """What came before is the set-up. The first step, where much happens only once, is the warm-up."""
        self._cut(self.clock())
        self._closed = -1
        self._close()
        self._open.kind = "warmup"

    def _close(self) -> None:
        step = self._open
        self._open = _OpenStep(self._cut_s, closely=not self.light)
        self.evaluation.since = 0
        step.index, step.end_s = self._closed, self._cut_s
        self._waiting.append(step)
        self._closed += 1
        wall_s, own_s = self._cut_s - step.start_s, self.own_s - self._own_before_s
        self._own_before_s = self.own_s
        if step.kind == "train" and step.closely and wall_s > 0:
            self._closely_s = min(self._closely_s, own_s)
            self._close_looks += 1
            sampling = self._sampling
            share = sampling.share if self._close_looks <= _KNOWN_AFTER else sampling.later_share
            every = round(self._closely_s / (share * wall_s))
            self._closely_every = max(1, min(sampling.seldom, every))

    def _send(self, all_of_them: bool = False) -> None:
        while self._waiting:
            step = self._waiting[0]
            if isinstance(step, LightSteps):
                self._emit(step)
                self._waiting.popleft()
                continue
            times: list[float] | None = []
            if self._gpu is not None and len(step.marks) > 1:
                times = self._gpu.between(step.marks)
            if times is None and not all_of_them and len(self._waiting) < _STEPS_IN_FLIGHT:
                return
            self._waiting.popleft()
            loss = None
            if self._losses is not None and step.loss is not None:
                loss = self._losses.read(step.loss)
            self._emit(_as_step(step, times or [], loss))


class _Evaluation:
    """Tells evaluation from training by what follows a forward pass without gradients, which is
    suspected: with a training forward or a backward pass it was part of training (a teacher), with
    the next batch of the same loader, or of training's, it was evaluation."""

    def __init__(self) -> None:
        self.on = False
        self.since = 0  # pieces of the open step before this one are settled
        self.suspected = False
        self.train_loaders: set[int] = set()
        self.side_by_side = 1  # of them, that training reads from at the same time
        self._in_hand: dict[int, int] = {}  # samples not yet known to be for training, by loader
        self._last: int | None = None
        self._fed_by: int | None = None  # the loader behind the suspected forward pass
        self.is_sure = False  # if training goes on, what is suspected was evaluation all the same
        self._evaluated: int | None = None  # the loader of the evaluation that is going on

    @property
    def undisturbed(self) -> bool:
        """Whether nothing has come or happened since training was last seen."""
        return not (self._in_hand or self.on or self.suspected)

    def took(self, loader: int, samples: int) -> None:
        """A batch has come."""
        self._last = loader
        if not self.on:
            self._in_hand[loader] = self._in_hand.get(loader, 0) + samples

    def suspect(self, *, surely: bool) -> None:
        """A forward pass that may be evaluation; `surely` where only a batch at hand can make it training."""
        self.suspected = True
        self.is_sure = self.is_sure or (surely and not self._in_hand)
        self._fed_by = self._last if self._in_hand else None

    def shown_by_fetch(self, loader: int, *, learns: bool) -> bool:
        """Whether asking `loader` for a batch shows that what came before, or begins here, is evaluation."""
        if self.suspected:
            return self._fed_by is None or self._fed_by == loader or self._fed_by not in self.train_loaders
        return not self.on and not learns and loader not in self.train_loaders

    def is_trainings_batch(self, loader: int | None) -> bool:
        """Whether a batch that came in between was training's all the same."""
        return loader is not None and loader != self._fed_by and loader in self.train_loaders

    def called(self, pieces: int) -> None:
        """What came before was evaluation, which goes on until training shows itself."""
        self._in_hand = {k: n for k, n in self._in_hand.items() if k in self.train_loaders and k != self._fed_by}
        self._begin_anew(pieces, evaluated=self._fed_by)
        self.on = True

    def asked(self, loader: int, *, learns: bool) -> None:
        """`loader` is asked for a batch. If it is training's, or not known yet, training may go on."""
        if learns and (loader in self.train_loaders or self._evaluated not in (None, loader)):
            self.on = False
        elif self.on:
            self._evaluated = loader

    def settle(self, pieces: int) -> int:
        """This is training; how many samples have come for it."""
        samples = sum(self._in_hand.values())
        self.side_by_side = max(self.side_by_side, len(self._in_hand))
        self.train_loaders.update(self._in_hand)
        if self.on and self._last is not None:
            self.train_loaders.add(self._last)
        self._in_hand.clear()
        self._begin_anew(pieces)
        return samples

    def _begin_anew(self, pieces: int, evaluated: int | None = None) -> None:
        self.since, self._evaluated, self._fed_by = pieces, evaluated, None
        self.on = self.suspected = self.is_sure = False


class _Cycle:
    """Which of several optimizers ends a step: the last one before the first is called again."""

    def __init__(self) -> None:
        self._closer: int | None = None
        self._others: list[int] = []  # that have stepped since it did
        self.only: int | None = None  # where there is one, and it is known to end a step

    @property
    def settled(self) -> bool:
        """Whether the turns are known. Until then a step may be only part of one."""
        return self._closer is not None

    def closes(self, optimizer: int) -> bool:
        self.only = None
        if optimizer == self._closer:
            if not self._others:
                self.only = optimizer
            self._others.clear()
            return True
        if optimizer not in self._others:
            self._others.append(optimizer)
            return self._closer is None
        if self._closer is None:
            self._closer = self._others[-1]
            self._others.clear()
            return optimizer == self._closer
        self._closer = None  # the one that used to end a step has not come: it is gone
        self._others = [optimizer]
        return True


def _as_step(step: _OpenStep, gpu_ms: list[float], loss: float | None) -> Step:
    spans: list[Span] = []
    for piece in step.pieces:
        elapsed = None
        if piece.mark is not None and 0 < piece.mark <= len(gpu_ms):
            elapsed = gpu_ms[piece.mark - 1]
        spans.append(
            Span(
                name=piece.name,
                start_ms=(piece.start_s - step.start_s) * 1e3,
                host_ms=(piece.end_s - piece.start_s) * 1e3,
                gpu_idle_ms=elapsed if piece.quiet else None,
                gpu_busy_ms=elapsed if not piece.quiet else None,
                where=piece.where,
            )
        )
    crowd_ms = (step.pieces[-1].end_s - step.start_s) * 1e3 if step.pieces else 0.0
    for name, s in step.crowd_s.items():  # in the order in which they first came
        spans.append(Span(name=name, start_ms=crowd_ms, host_ms=s * 1e3))
        crowd_ms += s * 1e3
    return Step(
        index=step.index,
        start_s=step.start_s,
        wall_ms=(step.end_s - step.start_s) * 1e3,
        spans=tuple(spans),
        samples=step.samples,
        loss=loss,
        micro_steps=max(1, step.micro_steps),
        kind=step.kind,
    )
