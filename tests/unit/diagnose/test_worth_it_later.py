"""Costs that are small while the GPU has much to do: named beside what makes it less, and never else."""

from __future__ import annotations

from pathlib import Path

from diagnose_cases import HEALTHY, hardware, trace, xray
from test_recorded import TRACES, unpacked

from flatout.diagnose.rules import diagnose
from flatout.model.finding import Finding

# In each step 0.5 ms for an optimizer that is not fused, and 1 ms of gaps in which the GPU waits for launches.
GAPS = xray(
    busy_by_phase_ms={"forward": 48.0, "backward": 100.0, "optimizer": 2.0},
    idle_by_phase_ms={"forward": 2.0, "backward": 4.0, "optimizer": 2.0},
)
ROOM = {"optimizer_fused": None, "memory_reserved_bytes": 20 << 30}
IN_FP32 = {"autocast": ["None"], **ROOM}


def codes(found: tuple[Finding, ...]) -> list[str]:
    return [finding.code for finding in found]


def test_small_costs_are_reported_beside_findings_that_shorten_the_gpus_work() -> None:
    found = {f.code: f for f in diagnose(trace(*HEALTHY, facts=IN_FP32, samples=hardware(), xray=GAPS))}
    assert list(found) == ["compute.precision", "memory.underused", "compute.optimizer"]
    batch, fused = found["memory.underused"], found["compute.optimizer"]
    assert (batch.change, batch.value, batch.gain_low, round(batch.gain_high, 2)) == ("batch_size", 128, 1.0, 1.05)
    assert (fused.change, fused.gain_low, round(fused.gain_high, 2)) == ("fused_optimizer", 1.0, 1.03)


def test_a_healthy_training_gets_neither() -> None:
    """Though each is above what is worth a word beside others."""
    larger = xray(
        busy_by_phase_ms={"forward": 48.0, "backward": 100.0, "optimizer": 4.0},
        idle_by_phase_ms={"forward": 2.0, "backward": 6.0, "optimizer": 3.0},
    )
    assert codes(diagnose(trace(*HEALTHY, facts=ROOM, samples=hardware(), xray=larger))) == ["compute.saturated"]


def test_less_waiting_for_data_does_not_shorten_the_gpu_s_work() -> None:
    starved = (("data", 20.0, 20.0, None), *HEALTHY[1:])
    found = codes(diagnose(trace(*starved, facts=ROOM, samples=hardware(), xray=GAPS)))
    assert found
    assert not {"memory.underused", "compute.optimizer"} & set(found)


def test_they_are_never_the_verdict() -> None:
    """Where the loader holds half precision back, a larger batch may seem to give more: the verdict stays."""
    slight = xray(
        busy_by_phase_ms={"forward": 48.0, "backward": 88.0, "optimizer": 6.0},
        idle_by_phase_ms={"forward": 8.0, "backward": 10.0},
        matrix_ms=20.0,
        tensor_core_ms=20.0,
        top_ms={"void cudnn::nchwToNhwcKernel": 6.0},
    )
    facts = {"channels_last": False, **ROOM}
    found = diagnose(trace(*HEALTHY, facts=facts, samples=hardware(), xray=slight))
    assert codes(found) == ["compute.saturated", "compute.layout", "memory.underused", "compute.optimizer"]
    assert found[2].gain_high > found[1].gain_high


def test_no_larger_batch_is_proposed_where_memory_is_full() -> None:
    full = {**IN_FP32, "memory_reserved_bytes": 100 << 30}
    found = codes(diagnose(trace(*HEALTHY, facts=full, samples=hardware(), xray=GAPS)))
    assert found == ["compute.precision", "compute.optimizer"]


def test_every_mistake_of_captcha_is_named(tmp_path: Path) -> None:
    found = diagnose(unpacked(TRACES / "h200-config.ignored-captcha.tgz", tmp_path))
    assert {f.change for f in found} >= {
        *("setting:amp", "setting:cudnn_benchmark", "setting:compile_model", "setting:tf32"),
        *("num_workers", "batch_size", "fused_optimizer"),
    }
    measured = {"batch_size": 1.03, "fused_optimizer": 1.008}  # benchmarks/results/gains.json, each fixed alone
    for finding in found:
        gain = measured.get(finding.change or "", finding.gain_low)
        assert finding.gain_low <= gain <= finding.gain_high, finding
