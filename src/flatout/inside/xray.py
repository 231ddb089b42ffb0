"""The X-ray: a few steps under the kernel profiler, once in a run.

Gaps between kernels are compared with the training thread's phases: what the host did while the GPU was idle.
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

from torch.autograd import profiler

from flatout.inside.recorder import Recorder
from flatout.model.stats import enough
from flatout.trace import Sketch, Step, Xray
from flatout.trace.downsample import LightSteps

_MATRIX = re.compile(r"gemm|conv|xmma|cutlass|cudnn|wgrad|dgrad|fprop|flash|fmha|nvjet|attention|wgmma|matmul", re.I)
# Kernels of cuDNN that multiply nothing.
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
        """When the host launched it; when it ran where that is not known."""
        return self.launched_ns if self.launched_ns is not None else self.start_ns


class Profiler:
    """The kernel profiler, on for a few steps and then torn down; for the training thread only."""

    def __init__(self) -> None:
        self._profile: Any = None
        self.results: Any = None  # of torch's profiler, once stopped
        self._shift_ns = 0
        self._put_back: Callable[[], None] = lambda: None

    @property
    def running(self) -> bool:
        """Whether it is on. It stops when the script starts a profiler: there can be only one."""
        return self._profile is not None

    def available(self) -> bool:
        """Whether nobody else is profiling."""
        return not profiler._is_profiler_enabled

    def start(self) -> None:
        """Switch it on. `TEARDOWN_CUPTI` makes the driver remove its hooks afterwards; CUDA graphs do
        not survive that.

        `torch.profiler` would load torch's compiler, which takes seconds.
        """
        graphs = "torch._inductor.cudagraph_trees" in sys.modules  # loaded when the compiler makes its first one
        set_by_user = "TEARDOWN_CUPTI" in os.environ
        os.environ.setdefault("TEARDOWN_CUPTI", str(int(not graphs)))
        self._shift_ns = time.monotonic_ns() - time.time_ns()
        ours: Any = profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True, acc_events=True)
        ours.__enter__()
        kind: Any = profiler.profile
        prepare = kind._prepare_trace

        def stop_and_prepare(profile: Any) -> Any:
            self.stop()
            return prepare(profile)

        def put_back() -> None:
            kind._prepare_trace = prepare
            if not set_by_user:
                os.environ.pop("TEARDOWN_CUPTI", None)

        kind._prepare_trace = stop_and_prepare
        self._put_back = put_back
        self._profile = ours

    def stop(self) -> None:
        """Switch it off; `kernels` reads the results."""
        if self._profile is not None:
            ours, self._profile = self._profile, None
            ours.__exit__(None, None, None)
            self._put_back()
            self.results = ours.kineto_results

    def kernels(self) -> list[Kernel]:
        """What ran on the GPU, in the order of starts, in nanoseconds of CLOCK_MONOTONIC."""
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
    """When the X-ray is taken: once the run is warm, with fewer steps where they are slow; or
    `at_the_end` of a trial, where all ranks have to take as many."""

    def __init__(
        self, recorder: Recorder, write: Callable[[Xray], None], note: Callable[[str], None], *, at_the_end: bool
    ) -> None:
        self._recorder = recorder
        self._write = write
        self._note = note
        self._at_the_end = at_the_end
        self.done = self.running = False
        self._began_s: float | None = None
        self._profiler = Profiler()
        self._taken = 0
        self._started_s = 0.0
        self._steps: list[Step] = []

    def step_ended(self, most: int = _STEPS) -> None:
        """Begin, go on or end, at the end of a step; `most` steps in all."""
        self._try(self._step_ended, min(most, _STEPS))

    def finish(self) -> None:
        """The run ends: read what there is."""
        if not self.done:
            self._try(self._profiler.stop)
            self._try(self._read)

    def _try(self, action: Callable[..., None], *args: Any) -> None:
        """An exception ends the X-ray, and nothing else."""
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
            recorder.as_own(self._read)  # another thread would take training's time unseen

    def _is_warm(self, now_s: float) -> bool:
        self._began_s = self._began_s or now_s
        warm_s = now_s - self._began_s
        return warm_s >= _AFTER_S and enough(self._recorder.measured, warm_s, _AFTER_STEPS)

    def emitted(self, step: Step | LightSteps) -> None:
        """Keep the steps under the X-ray: they hold the host's phases."""
        if isinstance(step, Step) and step.kind == "xray":
            self._steps.append(step)

    def _read(self) -> None:
        self.done = True
        if self._profiler.results is not None:
            xray = read_kernels(self._profiler.kernels(), self._steps[1:])
            if xray is not None:
                self._write(xray)


def read_kernels(kernels: Sequence[Kernel], steps: Sequence[Step]) -> Xray | None:
    """The figures of these steps' kernels; None when nothing ran on a GPU."""
    host = _HostPhases(steps)
    if not host.names or not kernels:
        return None
    first_ns, last_ns = host.starts_ns[0], host.end_ns
    inside = [k for k in kernels if first_ns <= k.called_ns < last_ns]
    if not inside:
        return None
    # The host runs ahead: the GPU begins with work from before these steps, and ends theirs after them.
    first_ns = max([first_ns, *(k.end_ns for k in kernels if k.called_ns < first_ns)])
    last_ns = max([last_ns, *(k.end_ns for k in inside)])
    idle_by_phase: defaultdict[str, float] = defaultdict(float)
    late_ms = 0.0
    for start_ns, end_ns, following in _gaps(inside, first_ns, last_ns):
        for phase, ns in host.over(start_ns, end_ns):
            idle_by_phase[phase] += ns / 1e6
        if following is not None and following.launched_ns is not None and following.launched_ns > start_ns:
            late_ms += (end_ns - start_ns) / 1e6
    window_ms = (last_ns - first_ns) / 1e6
    compute = [k for k in inside if not k.name.startswith(("Memcpy", "Memset"))]
    by_name_ms = _added(inside, lambda kernel: kernel.name[:120])
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
        top_ms=dict(sorted(by_name_ms.items(), key=lambda item: -item[1])[:_TOP]),
    )


class _HostPhases:
    """The training thread's phases on a time line."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.names: list[str] = []
        self.starts_ns: list[int] = []
        self.end_ns = 0
        for step in steps:
            for span in step.spans:
                start_s = step.start_s + span.start_ms / 1e3
                self.names.append(span.name)
                self.starts_ns.append(round(start_s * 1e9))
                self.end_ns = round((start_s + span.host_ms / 1e3) * 1e9)

    def at(self, ns: int) -> str:
        return self.names[max(0, bisect_right(self.starts_ns, ns) - 1)]

    def over(self, start_ns: int, end_ns: int) -> Iterable[tuple[str, int]]:
        """The phases in a stretch of time, and the nanoseconds of each."""
        at = max(0, bisect_right(self.starts_ns, start_ns) - 1)
        while start_ns < end_ns:
            until = self.starts_ns[at + 1] if at + 1 < len(self.starts_ns) else end_ns
            until = min(max(until, start_ns), end_ns)
            yield self.names[at], until - start_ns
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
    """The direction of a copy and the memory it comes from, such as "HtoD Pageable"."""
    match = _COPY.match(kernel.name)
    return f"{match['way']} {match['source']}" if match else None


def _added(kernels: Iterable[Kernel], key: Callable[[Kernel], str | None]) -> dict[str, float]:
    """Milliseconds of the kernels by a key; those whose key is None are left out."""
    total_ms: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        name = key(kernel)
        if name is not None:
            total_ms[name] += (kernel.end_ns - kernel.start_ns) / 1e6
    return dict(total_ms)


def _total_ms(kernels: Iterable[Kernel]) -> float:
    return sum(k.end_ns - k.start_ns for k in kernels) / 1e6
