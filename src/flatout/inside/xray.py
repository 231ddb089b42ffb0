"""A few steps under the kernel profiler, once, then off: what the GPU really did, kernel by kernel.

CUDA activities only: the launches on the host, the kernels and copies on the GPU. Gaps between kernels are
compared with the training thread's phases, which shows what the host was doing while the GPU had nothing to
do.
"""

from __future__ import annotations

import os
import re
import sys
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from flatout.inside.recorder import Recorder
from flatout.model.stats import enough
from flatout.trace import Sketch, Step, Xray
from flatout.trace.downsample import LightSteps

_MATRIX = re.compile(r"gemm|conv|xmma|cutlass|cudnn|wgrad|dgrad|fprop|flash|fmha|nvjet|attention|wgmma|matmul", re.I)
# cuDNN has these too, and they multiply nothing.
_NOT_MATRIX = re.compile(r"batchnorm|bn_[fb]w|nchwTo|nhwcTo|dropout|elementwise|elemwise|pooling|workspace", re.I)
_TENSOR_CORES = re.compile(
    r"tensorop|hmma|wgmma|s16816|s1688|h16816|h1688|bf16|f16f16|tf32|_f16|nvjet|flash|fmha|s884|sm90_xmma_gemm_(?!f32f32_f32f32_f32)",
    re.I,
)
_COPY = re.compile(r"^Memcpy (?P<way>\w+) \((?P<source>\w+) ->")
_TOP = 15
_STEPS = 9  # the first bears the profiler's start and is left out
_AFTER_STEPS = 12
_AFTER_S = 2.0


class Kernel(NamedTuple):
    """One piece of work on the GPU: a kernel, a copy or a fill."""

    name: str
    start_ns: int
    end_ns: int
    launched_ns: int | None

    @property
    def called_ns(self) -> int:
        """When the host launched it, as far as is known."""
        return self.launched_ns if self.launched_ns is not None else self.start_ns


class Profiler:
    """The kernel profiler, on for a few steps and then torn down. Touch it from the training thread only."""

    def __init__(self) -> None:
        self._profile: Any = None
        self.results: Any = None  # raw, once it has been stopped
        self._shift_ns = 0
        self._put_back: Callable[[], None] = lambda: None

    @property
    def running(self) -> bool:
        """Whether it is on. It stops when the user starts a profiler: there can be only one."""
        return self._profile is not None

    def available(self) -> bool:
        """Whether no one else is profiling."""
        profiler: Any = sys.modules["torch.autograd.profiler"]
        return not profiler._is_profiler_enabled

    def start(self) -> None:
        """Switch it on. `TEARDOWN_CUPTI` makes the driver remove its hooks afterwards.

        Not `torch.profiler`: it loads torch's compiler first, which takes seconds, to ask whether it makes
        CUDA graphs (they do not survive a teardown). A compiler that is not loaded makes none.
        """
        profiler: Any = sys.modules["torch.autograd.profiler"]
        graphs = "torch._inductor.cudagraph_trees" in sys.modules  # loaded when the first graph is made
        set_by_user = "TEARDOWN_CUPTI" in os.environ
        os.environ.setdefault("TEARDOWN_CUPTI", str(int(not graphs)))
        self._shift_ns = time.monotonic_ns() - time.time_ns()
        ours: Any = profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True, acc_events=True)
        ours.__enter__()
        prepare = profiler.profile._prepare_trace

        def stop_and_prepare(profile: Any) -> Any:
            self.stop()
            return prepare(profile)

        def put_back() -> None:
            profiler.profile._prepare_trace = prepare
            if not set_by_user:
                os.environ.pop("TEARDOWN_CUPTI", None)

        profiler.profile._prepare_trace = stop_and_prepare
        self._put_back = put_back
        self._profile = ours

    def stop(self) -> None:
        """Switch it off; `kernels` reads what it has seen."""
        if self._profile is not None:
            ours, self._profile = self._profile, None
            ours.__exit__(None, None, None)
            self._put_back()
            self.results = ours.kineto_results

    def kernels(self) -> list[Kernel]:
        """What ran on the GPU, in the order of its start, on CLOCK_MONOTONIC in nanoseconds."""
        events = self.results.events()
        on_gpu = [event for event in events if str(event.device_type()) == "DeviceType.CUDA"]
        launches = {e.correlation_id(): e.start_ns() for e in events if str(e.device_type()) != "DeviceType.CUDA"}
        kernels = []
        for event in sorted(on_gpu, key=lambda event: event.start_ns()):
            start_ns, launched_ns = event.start_ns() + self._shift_ns, launches.get(event.correlation_id())
            if launched_ns is not None:
                launched_ns += self._shift_ns
            kernels.append(Kernel(event.name(), start_ns, start_ns + event.duration_ns(), launched_ns))
        return kernels


class XraySchedule:
    """When the X-ray is taken: once, when the run is warm, or where a trial asks for it at its end.

    Of slow steps a few do; not at the end of a trial, where several ranks have to take as many.
    """

    def __init__(
        self, recorder: Recorder, write: Callable[[Xray], None], note: Callable[[str], None], *, at_the_end: bool
    ) -> None:
        self._recorder = recorder
        self._write = write
        self._note = note
        self._at_the_end = at_the_end
        self.done = False
        self.running = False
        self._began_s: float | None = None
        self._profiler = Profiler()
        self._taken = 0
        self._started_s = 0.0
        self._steps: list[Step] = []

    def step_ended(self, most: int = _STEPS) -> None:
        """Take it when its time has come."""
        self._try(self._step_ended, min(most, _STEPS))

    def finish(self) -> None:
        """The run ends: read what there is, if that has not been done."""
        if not self.done:
            self._try(self._profiler.stop)
            self._try(self._read)

    def _try(self, action: Callable[..., None], *args: Any) -> None:
        """What goes wrong with it costs the X-ray, and nothing else."""
        try:
            action(*args)
        except Exception as problem:
            self.done, self.running = True, False
            self._note(f"no X-ray was taken ({type(problem).__name__}: {problem})")

    def _step_ended(self, most: int) -> None:
        recorder, now_s = self._recorder, time.monotonic()
        if self.running:
            self._taken += 1
            took_s = 0.0 if self._at_the_end else now_s - self._started_s
            if self._profiler.running and not enough(self._taken, took_s, most):
                recorder.set_kind("xray")
                return
            self.running = False
            recorder.as_own(self._profiler.stop)
            recorder.set_kind("after xray")
        elif self._profiler.results is None:
            if (self._at_the_end or self._is_warm(now_s)) and self._profiler.available():
                recorder.as_own(self._profiler.start)
                recorder.set_kind("xray")
                self.running, self._started_s = True, now_s
        elif len(self._steps) >= self._taken:
            recorder.set_kind("after xray")
            recorder.as_own(self._read)  # a thread would take the trainer's time unseen

    def _is_warm(self, now_s: float) -> bool:
        self._began_s = self._began_s or now_s
        warm_s = now_s - self._began_s
        return warm_s >= _AFTER_S and enough(self._recorder.measured, warm_s, _AFTER_STEPS)

    def emitted(self, step: Step | LightSteps) -> None:
        """Steps are done: those under the X-ray are kept, to know the host's phases."""
        if isinstance(step, Step) and step.kind == "xray":
            self._steps.append(step)

    def _read(self) -> None:
        self.done = True
        if self._profiler.results is not None:
            xray = read_kernels(self._profiler.kernels(), self._steps[1:])
            if xray is not None:
                self._write(xray)


def read_kernels(kernels: Sequence[Kernel], steps: Sequence[Step]) -> Xray | None:
    """The figures of these steps' kernels. None when nothing ran on a GPU."""
    phases = [
        (span.name, start_s, start_s + span.host_ms / 1e3)
        for step in steps
        for span in step.spans
        for start_s in [step.start_s + span.start_ms / 1e3]
    ]
    if not phases or not kernels:
        return None
    first_ns, last_ns = round(phases[0][1] * 1e9), round(phases[-1][2] * 1e9)
    inside = [k for k in kernels if first_ns <= k.called_ns < last_ns]
    if not inside:
        return None
    # The host runs ahead: the GPU is still at work on what came before, and at the end on what was launched by then.
    first_ns = max([first_ns, *(k.end_ns for k in kernels if k.called_ns < first_ns)])
    last_ns = max([last_ns, *(k.end_ns for k in inside)])
    host = _HostPhases(phases)
    idle_by_phase: defaultdict[str, float] = defaultdict(float)
    late_ms = 0.0
    for start_ns, end_ns, following in _gaps(inside, first_ns, last_ns):
        for phase, ns in host.over(start_ns, end_ns):
            idle_by_phase[phase] += ns / 1e6
        if following is not None and following.launched_ns is not None and following.launched_ns > start_ns:
            late_ms += (end_ns - start_ns) / 1e6
    window_ms = (last_ns - first_ns) / 1e6
    compute = [k for k in inside if not k.name.startswith(("Memcpy", "Memset"))]
    by_name = _added(inside, lambda kernel: kernel.name[:120])
    matrix = [k for k in compute if _MATRIX.search(k.name) and not _NOT_MATRIX.search(k.name)]
    return Xray(
        steps=len(steps),
        wall_ms=window_ms,
        busy_ms=window_ms - sum(idle_by_phase.values()),
        busy_by_phase_ms=_added(inside, lambda kernel: host.at(kernel.called_ns)),
        idle_by_phase_ms=dict(idle_by_phase),
        launched_late_ms=late_ms,
        kernels=len(compute),
        kernel_us=Sketch.of((k.end_ns - k.start_ns) / 1e3 for k in compute),
        matrix_ms=_total_ms(matrix),
        tensor_core_ms=_total_ms(k for k in matrix if _TENSOR_CORES.search(k.name)),
        collective_ms=_total_ms(k for k in compute if "nccl" in k.name.lower()),
        copies_ms=_added(inside, _copy),
        top_ms=dict(sorted(by_name.items(), key=lambda item: -item[1])[:_TOP]),
    )


class _HostPhases:
    """The training thread's phases on a time line, for looking up."""

    def __init__(self, phases: list[tuple[str, float, float]]) -> None:
        self._names = [name for name, _, _ in phases]
        self._starts = [round(start * 1e9) for _, start, _ in phases]

    def at(self, ns: int) -> str:
        return self._names[max(0, bisect_right(self._starts, ns) - 1)]

    def over(self, start_ns: int, end_ns: int) -> Iterable[tuple[str, int]]:
        """How a stretch of time is divided among the phases."""
        at = max(0, bisect_right(self._starts, start_ns) - 1)
        while start_ns < end_ns:
            until = self._starts[at + 1] if at + 1 < len(self._starts) else end_ns
            until = min(max(until, start_ns), end_ns)
            yield self._names[at], until - start_ns
            start_ns, at = until, at + 1


def _gaps(kernels: Sequence[Kernel], first_ns: int, last_ns: int) -> Iterable[tuple[int, int, Kernel | None]]:
    """The stretches where nothing ran on any stream, and the kernel that ended each."""
    reached = first_ns
    for kernel in kernels:
        if kernel.start_ns > reached:
            yield reached, kernel.start_ns, kernel
        reached = max(reached, kernel.end_ns)
    if reached < last_ns:
        yield reached, last_ns, None


def _copy(kernel: Kernel) -> str | None:
    """The direction of a copy and the memory it comes from, such as "HtoD Pageable"; None for other
    kernels."""
    match = _COPY.match(kernel.name)
    return f"{match['way']} {match['source']}" if match else None


def _added(kernels: Iterable[Kernel], key: Callable[[Kernel], str | None]) -> dict[str, float]:
    """Milliseconds of the kernels by a key; those without one are left out."""
    total_ms: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        name = key(kernel)
        if name is not None:
            total_ms[name] += (kernel.end_ns - kernel.start_ns) / 1e6
    return dict(total_ms)


def _total_ms(kernels: Iterable[Kernel]) -> float:
    return sum(k.end_ns - k.start_ns for k in kernels) / 1e6
