"""How long a step would take without one of its causes, worked out span by span.

The GPU reaches the end of span i when it has done all work before it and the host has launched the span:

    gpu[i+1] = max(gpu[i] + work[i], host[i+1])

Work is the GPU's time between the span's two events, less the gaps that an X-ray has measured between its kernels. This
tells an `.item()` that leaves the GPU without work from one that waits for useful work.
"""

from __future__ import annotations

from collections.abc import Mapping

from flatout.trace import Step

_ROUNDS, _STEADY = 24, 12  # a step is replayed so often, and counts the last times


def replayed_ms(step: Step, without: str | None = None, at_work: Mapping[str, float] | None = None) -> float | None:
    """The long-run length of a step, or of one in which a phase takes the host no time; None without events.

    `at_work` is the share of its time in a phase that the GPU works; all of it in one that is not named.
    """
    if not has_events(step):
        return None
    track = []  # of each span: how long it holds the host, whether that is by waiting for the GPU, the GPU's work
    for span in step.spans:
        takes_ms = span.host_ms
        waits_for_gpu = span.name == "sync" and without != "sync"
        if waits_for_gpu:
            takes_ms = span.gpu_idle_ms or 0.0
        elif span.name in ("held", without):  # a hold only keeps the host from running far ahead
            takes_ms = 0.0
        work_ms = (span.gpu_busy_ms or 0.0) * (at_work or {}).get(span.name, 1.0)
        track.append((takes_ms, waits_for_gpu, work_ms))
    host = gpu = 0.0
    ends = []
    for _ in range(_ROUNDS):
        for takes_ms, waits_for_gpu, work_ms in track:
            if waits_for_gpu:  # the host goes on only when the GPU has come here
                host = max(host, gpu)
            host += takes_ms
            gpu = max(gpu + work_ms, host)
        ends.append(gpu)
    return (ends[-1] - ends[-1 - _STEADY]) / _STEADY


def saved_in_step(step: Step, phase: str, at_work: Mapping[str, float] | None = None) -> float | None:
    """The share of a step's time that would be saved if a phase took the host no time: 0 to 1, an estimate."""
    now = replayed_ms(step, at_work=at_work)
    then = replayed_ms(step, phase, at_work)
    return max(0.0, 1 - then / now) if now and then is not None else None


def has_events(step: Step) -> bool:
    """Whether CUDA events timed the GPU in a step."""
    return any(span.gpu_idle_ms is not None or span.gpu_busy_ms is not None for span in step.spans)
