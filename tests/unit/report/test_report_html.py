"""The page: whole, self-contained, safe, and with nothing to show where nothing was measured."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import tarfile
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from report_runs import facts, rank_of, report_of, step, steps_of, trace_of, whole_run

from flatout.model.causes import Finding
from flatout.model.records import Facts
from flatout.report import read_run
from flatout.report.page import SIZE, page
from flatout.report.views import sentence
from flatout.trace import Note, Trace
from flatout.trace.downsample import window_of

TRACES = Path(__file__).parents[2] / "traces"
VOID = {"meta", "br"}
FINDING = Finding(
    code="data.main-thread",
    title="samples are loaded in the training process: 60% of the time it does nothing else",
    share=0.6,
    gain_low=2.0,
    gain_high=2.4,
    derived="measured ceiling",
    confidence=0.9,
    evidence={"cores": 16},
    change="num_workers",
    value=6,
    advice="load in worker processes",
)


class Page(HTMLParser):
    """A page taken apart; complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def plots(self) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if attributes.get("class") == "frame plot"]

    @property
    def lines(self) -> dict[str, list[float]]:
        """The values of each line, read back from its points, by the line's name."""
        lines: dict[str, list[float]] = {}
        low = high = 0.0
        for _, attributes in self.elements:
            if attributes.get("class") == "lines":
                low, high = float(attributes["data-low"] or 0), float(attributes["data-high"] or 0)
            if "data-name" in attributes:
                heights = re.findall(r",(-?\d+)", str(attributes["points"]))
                lines[str(attributes["data-name"])] = [low + (1 - int(y) / SIZE) * (high - low) for y in heights]
        return lines

    @property
    def sections(self) -> list[str | None]:
        return [attributes.get("id") for tag, attributes in self.elements if tag == "section"]


def page_of(run: Trace, *findings: Finding) -> Page:
    return Page(page(report_of(run, *findings)))


def test_a_run_that_has_everything_shows_everything() -> None:
    shown = page_of(whole_run(), FINDING)

    sections = "findings causes time lines-samples steps run loading samples xray gpus facts notes trace"
    assert shown.sections == sections.split()
    titles = ("Step time", "Waiting for data", "Loss", "GPU", "Power", "CPU", "Disk")
    for plot, title in zip(shown.plots, titles, strict=True):
        assert str(plot["aria-label"]).startswith(title)
    assert shown.text.count("im = <b>open</b>(f)") == 1  # the code frame; as text, not as markup
    for figure in ("train.py:42", "4,711", "void gemm<float>(int)", "took about 50 µs a step"):
        assert figure in shown.text


def test_the_verdict_comes_first_and_its_change_is_ready_to_copy() -> None:
    shown = page_of(whole_run(), FINDING)

    assert f"You could train 2.0 to 2.4× faster. {sentence(FINDING.title)}." in shown.text
    copies = [attributes["data-copy"] for _, attributes in shown.elements if "data-copy" in attributes]
    assert copies == ["--workers 6"]


def test_element_ids_are_unique() -> None:
    names = [attributes["id"] for _, attributes in page_of(whole_run(), FINDING).elements if "id" in attributes]
    assert len(names) == len(set(names))


def test_nothing_is_fetched_from_anywhere() -> None:
    shown = page_of(whole_run(), FINDING)

    policy = next(a["content"] for _, a in shown.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for tag, attributes in shown.elements:
        assert "src" not in attributes
        assert tag not in ("link", "iframe", "object", "img")
        if tag == "a":
            assert str(attributes["href"]).startswith("#")


def test_no_script_and_no_style_counts_but_ours() -> None:
    text = page(report_of(whole_run(), FINDING))
    policy = next(a["content"] for _, a in Page(text).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    for name in ("script", "style"):
        (own,) = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        (allowed,) = [part.split() for part in policy.split(";") if f"{name}-src" in part]
        assert allowed == [f"{name}-src", f"'sha256-{digest}'"]
    assert " style=" not in text
    assert not re.search(r"<[^>]* on\w+=", text)


def test_what_a_trace_holds_never_becomes_markup() -> None:
    hostile = "</script><script>alert(1)</script>"
    settings = [{"source": hostile, "values": {hostile: hostile}}]
    rank = rank_of(steps_of([100.0] * 5), facts=facts(optimizer=hostile, settings=settings))
    rank = dataclasses.replace(rank, info=dataclasses.replace(rank.info, name=hostile, command=(hostile,)))
    finding = dataclasses.replace(FINDING, title=hostile, where=hostile, evidence={hostile: hostile})

    shown = page_of(trace_of(rank), finding)

    assert hostile in shown.text
    assert sum(tag == "script" for tag, _ in shown.elements) == 1


def test_a_trace_of_an_older_flatout_gives_no_secret_away() -> None:
    settings = [{"source": "yaml", "values": {"password": "LEAK", "eos_token": "FINE"}}]
    rank = rank_of(steps_of([100.0] * 5), facts=facts(settings=settings))
    info = dataclasses.replace(rank.info, command=("train.py", "--hf-token=LEAK", "--name=FINE"))
    rank = dataclasses.replace(rank, info=info, notes=(Note(time_s=1.0, text="api_key=LEAK is not FINE"),))

    shown = page_of(trace_of(rank)).text

    assert "LEAK" not in shown
    assert shown.count("FINE") == 4


BLIND = trace_of(rank_of(steps_of([100.0] * 40, gpu=False), facts=Facts()))
ONE_STEP = trace_of(rank_of(steps_of([100.0])))
ONLY_SETUP = trace_of(rank_of((step(-1, 500.0, kind="setup", spans=()),)))


@pytest.mark.parametrize(
    ("run", "missing"),
    [
        pytest.param(BLIND, {"xray", "gpus", "loading"}, id="no GPU"),
        pytest.param(ONE_STEP, {"xray", "gpus", "loading"}, id="one step"),
        pytest.param(ONLY_SETUP, {"steps", "run"}, id="no training step"),
    ],
)
def test_sections_without_content_are_left_out(run: Trace, missing: set[str]) -> None:
    shown = page_of(run)
    assert not missing & set(shown.sections)
    assert "time" in shown.sections


def test_too_few_steps_are_no_verdict() -> None:
    assert "Not enough training steps to judge: 1 in 0.1 s (20, or 3 in 10 s, would do)." in page_of(ONE_STEP).text


def test_ranks_are_listed_the_slowest_first_and_of_many_only_the_ends() -> None:
    few = trace_of(*(rank_of(steps_of([100.0 + n] * 5), rank=n) for n in range(4)))
    shown = page_of(few)
    assert "ranks" in shown.sections
    assert shown.text.index("rank 3 on box") < shown.text.index("rank 0 on box")

    many = trace_of(*(rank_of(steps_of([100.0 + n] * 2), rank=n) for n in range(100)))
    text = page_of(many).text
    assert "rank 99 on box" in text
    assert "rank 0 on box" in text
    assert "rank 50 on box" not in text


def test_charts_have_labels_for_those_who_do_not_see_them() -> None:
    shown = page_of(whole_run())

    plots = shown.plots
    assert all(plot["role"] == "img" and plot["aria-label"] and plot["tabindex"] == "0" for plot in plots)
    tracks = [a for _, a in shown.elements if (a.get("class") or "").startswith("track") and a.get("role") == "img"]
    assert all(attributes.get("aria-label") for attributes in tracks)
    assert all("median" in str(plot["aria-label"]) for plot in plots)


def test_a_day_long_run_stays_below_half_a_megabyte() -> None:
    steps = steps_of([100.0] * 2_000, loss=1.0)
    window = window_of(list(steps[:50]))
    windows = tuple(dataclasses.replace(window, start_s=n * 17.28) for n in range(5_000))
    run = whole_run()
    samples = tuple(dataclasses.replace(run.samples["box"][0], time_s=float(n * 10)) for n in range(8_640))
    workers = run.ranks[0].workers * 16
    whole = trace_of(dataclasses.replace(rank_of(steps, windows=windows), workers=workers), samples=samples)

    assert len(page(report_of(whole, *[FINDING] * 20)).encode()) < 500_000


@pytest.mark.parametrize(
    "recording", ["cpu-data.worker-start", "h200-launch.bound-stock", "h200-data.main-thread-gray"]
)
def test_the_page_of_a_recorded_run_stays_below_150_kilobytes(recording: str, tmp_path: Path) -> None:
    with tarfile.open(TRACES / f"{recording}.tgz") as archive:
        archive.extractall(tmp_path, filter="data")
    text = page(read_run([tmp_path]))
    assert len(text.encode()) < 150_000
    assert Page(text).plots


def test_a_line_can_be_read_back_from_its_points() -> None:
    """GIVEN steps of 100 to 106 ms THEN what the page's script reads at each of them is right to 0.1%."""
    values = page_of(whole_run()).lines["each step"][1:61]  # the first point is there twice
    assert values == pytest.approx([100.0 + index % 7 for index in range(60)], rel=1e-3)


def luminance(colour: str) -> float:
    """By WCAG 2."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_the_contrast_of_wcag_aa() -> None:
    """GIVEN the colours of light, dark and paper THEN codes on the page, and words on blocks, have AA's 4.5 to 1."""
    style = (files("flatout.report") / "page.html").read_text(encoding="utf-8")
    schemes = [
        dict(re.findall(r"--(\w+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(schemes) == 3
    for scheme in schemes:
        colours = {
            name: value if len(value) == 7 else "#" + "".join(c * 2 for c in value[1:])
            for name, value in scheme.items()
        }
        for family in ("compute", "data", "copy", "sync", "pause", "other", "ink", "muted"):
            for under in ("paper", "panel" if family in ("ink", "muted") else "on"):
                one, other = sorted((luminance(colours[family]), luminance(colours[under])))
                assert (other + 0.05) / (one + 0.05) >= 4.5, f"{family} on {under}: {colours}"
