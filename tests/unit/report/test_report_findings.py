"""Findings in words and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from report_runs import printed, rank_of, recorded, report_of, steps_of, trace_of, whole_run
from test_report_html import FINDING

from flatout.diagnose.by_cause import FROM_THE_REST
from flatout.diagnose.gains import LOADER_LIMITS
from flatout.model.causes import Finding
from flatout.model.records import Facts, LoaderFacts, SettingsRead
from flatout.report.account import RecordedRun
from flatout.report.run_view import headline
from flatout.report.terminal import show
from flatout.report.views import change_as_typed, gain
from flatout.trace import Span

RUN = recorded(whole_run())


def replaced(*findings: Finding) -> RecordedRun:
    return dataclasses.replace(RUN, findings=findings)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.0, 1.0, "no gain on its own"),
        (1.0, 1.04, "up to 1.04× faster"),
        (1.2, 1.21, "1.20 to 1.21× faster"),
        (1.19, 2.77, "1.2 to 2.8× faster"),
        (3.01, 3.04, "about 3.0× faster"),
    ],
)
def test_a_gain_has_the_digits_that_mean_something(low: float, high: float, said: str) -> None:
    assert gain(dataclasses.replace(FINDING, gain_low=low, gain_high=high)) == said


def test_a_gain_limited_by_the_loader_says_so() -> None:
    held = dataclasses.replace(FINDING, gain_low=1.01, gain_high=1.06, derived=f"model of the kernels{LOADER_LIMITS}")
    assert gain(held) == "up to 1.06× faster, more once the loader can follow"


def test_a_gain_beyond_its_share_says_why() -> None:
    held = dataclasses.replace(FINDING, share=0.54, gain_low=1.0, gain_high=2.8, derived=f"x{FROM_THE_REST}")
    assert gain(held) == "up to 2.8× faster, as the rest of a step is faster then too"
    assert gain(dataclasses.replace(held, share=0.1, gain_high=1.16)) == "up to 1.16× faster"


def test_without_findings_the_headline_says_what_the_account_knows() -> None:
    assert headline(replaced()) == "52% of training time goes to waiting for data."


def test_time_outside_the_phases_is_named_in_the_headline() -> None:
    simulated = (Span(name="rest", start_ms=0.0, host_ms=56.0), Span(name="forward", start_ms=56.0, host_ms=44.0))
    made = recorded(trace_of(rank_of(steps_of([100.0] * 60, spans=simulated))))
    assert (
        headline(dataclasses.replace(made, findings=()))
        == "56% of training time goes to your code outside these phases."
    )


def test_a_healthy_run_is_called_so_without_a_promise() -> None:
    healthy = dataclasses.replace(
        FINDING,
        code="compute.saturated",
        title="healthy: the GPU has work 97% of the time",
        gain_low=1.0,
        gain_high=1.0,
    )
    assert headline(replaced(healthy)) == "Healthy: the GPU has work 97% of the time."


@pytest.mark.parametrize(
    ("change", "value", "typed"),
    [
        ("num_workers", 6, "--workers 6"),  # the script's own flag
        ("num_workers", False, "DataLoader(..., num_workers=False)"),  # a flag cannot switch itself off
        ("pin_memory", True, "DataLoader(..., pin_memory=True)"),
        ("setting:num_workers", 6, "--workers 6"),
        ("setting:amp", True, None),
        (None, None, None),
    ],
)
def test_a_change_as_one_would_type_it(change: str | None, value: object, typed: str | None) -> None:
    assert change_as_typed(RUN.facts, dataclasses.replace(FINDING, change=change, value=value)) == typed


def test_a_change_may_be_a_line_of_the_scripts_own_file() -> None:
    settings = [SettingsRead(source="yaml", file="train.yaml", values={"loader": {"workers": 0}, "pin_memory": 2})]
    read = dataclasses.replace(RUN.facts, settings=tuple(settings))
    fewer = dataclasses.replace(FINDING, change="num_workers", value=6)
    assert change_as_typed(read, fewer) == "in train.yaml: loader.workers: 6"
    pinned = dataclasses.replace(FINDING, change="pin_memory", value=True)
    assert change_as_typed(read, pinned) == "DataLoader(..., pin_memory=True)"  # what is 2 there is another thing


def test_precision_is_asked_of_the_framework_that_runs_the_loop() -> None:
    lines = {}
    for framework in ("lightning", "accelerate", "transformers"):
        made = Facts(loaders=(LoaderFacts(dataset="D", framework=framework),))
        for value in ("bf16", "tf32"):
            lines[framework, value] = change_as_typed(
                made, dataclasses.replace(FINDING, change="precision", value=value)
            )
    assert lines["lightning", "bf16"] == 'Trainer(..., precision="bf16-mixed")'
    assert lines["accelerate", "bf16"] == 'Accelerator(..., mixed_precision="bf16")'
    assert lines["transformers", "tf32"] == "TrainingArguments(..., tf32=True)"
    assert lines["lightning", "tf32"].startswith("torch.set_float32_matmul_precision"), (
        "Lightning has no argument for it"
    )


def test_what_the_trainer_of_transformers_makes_is_changed_by_its_arguments() -> None:
    made = Facts(loaders=(LoaderFacts(dataset="D", framework="transformers"),))
    typed = [
        change_as_typed(made, dataclasses.replace(FINDING, change=change, value=value))
        for change, value in (("num_workers", 6), ("batch_size", 64), ("cudnn_benchmark", True))
    ]
    assert typed == [
        "TrainingArguments(..., dataloader_num_workers=6)",
        "TrainingArguments(..., per_device_train_batch_size=64)",
        "torch.backends.cudnn.benchmark = True",
    ]


def test_an_ignored_setting_is_not_to_be_typed_again() -> None:
    ignored = dataclasses.replace(FINDING, code="config.ignored", change="setting:num_workers", value=6)
    assert change_as_typed(RUN.facts, ignored) is None


def test_the_json_has_the_verdict_the_findings_and_parts_that_add_up() -> None:
    data = json.loads(json.dumps(report_of(whole_run(), FINDING).to_json()))

    assert data["schema"] == 1
    assert data["verdict"] == "data.main-thread"
    (finding,) = data["findings"]
    assert finding["change"] == {"name": "num_workers", "value": 6}
    assert finding["where"] is None
    assert {"code", "share", "gain_low", "gain_high", "confidence", "evidence"} <= finding.keys()
    parts = data["breakdown"]["parts"]
    assert sum(part["ms"] for part in parts) == pytest.approx(data["breakdown"]["wall_ms"])
    assert sum(part["share"] for part in parts) == pytest.approx(1.0)
    assert data["facts"]["step_ms"]["median"] > 0
    assert data["overhead"]["us_per_step"] == 50.0


def test_without_findings_the_verdict_is_null() -> None:
    data = report_of(trace_of(rank_of(steps_of([100.0])))).to_json()
    assert data["verdict"] is None
    assert data["findings"] == []


def test_the_terminal_gets_80_columns() -> None:
    long = dataclasses.replace(FINDING, advice="do this " * 30, where="workloads/gray/train.py:171")
    lines = printed(lambda console: show(report_of(whole_run(), long, FINDING), console)).splitlines()

    assert lines[0].startswith("You could train 2.0 to 2.4× faster")
    assert "    --workers 6" in lines


def test_the_command_that_is_named_explains_the_finding(flatout_says: Callable[..., Any]) -> None:
    shown = printed(lambda console: show(report_of(whole_run(), FINDING), console), width=400)
    _, *words = shown.partition("what to do:")[2].split()[:3]
    code, out, _ = flatout_says(*words)
    assert code == 0
    assert "num_workers" in out
