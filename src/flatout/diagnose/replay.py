"""How long a step would take without one of its causes: a simulation of the host and the GPU, span by span.

The GPU reaches the end of span i when it has done all work before it and the host has launched the span:

    gpu[i+1] = max(gpu[i] + work[i], host[i+1])

A span in which nothing is launched has no work. Elsewhere the work is the GPU's time between the span's two
events, less the gaps between its kernels if an X-ray has measured them. Removing a cause shortens its host
time, and what the step gains in the long run shows when it is repeated. This tells a `.item()` that leaves
the GPU without work from one that merely waits for useful work; how long the wait takes says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flatout.trace import Span, Step

_ROUNDS = 24
_STEADY = 12  # of them, the last


def step_ms(
    step: Step, host_ms: Callable[[Span], float] = lambda span: span.host_ms, at_work: Mapping[str, float] | None = None
) -> float | None:
    """The long-run length of `step` when each span takes the host `host_ms(span)`; None for a step without
    events.

    `at_work` is the share of its time in a phase that the GPU works; all of it in one that is not named.
    """
    if not step.spans or all(s.gpu_idle_ms is None and s.gpu_busy_ms is None for s in step.spans):
        return None
    track = []  # of each span: how long it holds the host, whether that is by waiting for the GPU, the GPU's work
    for span in step.spans:
        takes_ms = host_ms(span)
        waits_for_gpu = span.name == "sync" and takes_ms >= span.host_ms
        if waits_for_gpu:
            takes_ms = span.gpu_idle_ms or 0.0
        elif span.name == "held":  # which only keeps the host from running far ahead
            takes_ms = 0.0
        track.append((takes_ms, waits_for_gpu, (span.gpu_busy_ms or 0.0) * (at_work or {}).get(span.name, 1.0)))
    host = gpu = 0.0
    ends = []
    for _ in range(_ROUNDS):
        for takes_ms, waits_for_gpu, work_ms in track:
            if waits_for_gpu and gpu > host:  # the host goes on only when the GPU has come here
                host = gpu
            host += takes_ms
            gpu += work_ms
            if host > gpu:
                gpu = host
        ends.append(gpu)
    return (ends[-1] - ends[-1 - _STEADY]) / _STEADY


def gain_without(step: Step, *names: str, at_work: Mapping[str, float] | None = None) -> float | None:
    """The share of a step's time that would be saved if these phases took the host no time: 0 to 1, an estimate."""
    now = step_ms(step, at_work=at_work)
    then = step_ms(step, lambda span: 0.0 if span.name in names else span.host_ms, at_work)
    return max(0.0, 1 - then / now) if now and then is not None else None
