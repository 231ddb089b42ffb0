"""Which changes are offered, by which knob, and what the person's wishes leave of them."""

from __future__ import annotations

import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_world import Machine, World, flag, with_loader

from flatout.diagnose.knobs import knobs
from flatout.fix.offers import View, Wishes, not_offered, offers, scaled_twice
from flatout.launch.protocol import Trial
from flatout.model.errors import UsageError
from flatout.model.plan import Change
from flatout.model.records import SettingsRead
from flatout.trace import Facts, ProcessSample, Sketch
from flatout.trace.reader import read as read_trace

LAUNCHES = {"idle_by_phase_ms": {"forward": 60.0}, "kernel_us": Sketch.of([3.0] * 100)}


def view(world: World, **more: Any) -> View:
    trace = world.run((), 48, Trial(timeout_s=60)).trace
    assert trace is not None
    return View(trace=trace, first=trace, **more)


def offered(world: World, wishes: Wishes | None = None, **more: Any) -> dict[str, Change]:
    wanted, _ = offers(view(world, **more), wishes or Wishes())
    return {change.name: change for offer in wanted for change in offer.changes}


def read(source: str, file: str | None, **values: Any) -> SettingsRead:
    return SettingsRead(source=source, file=file, values=values)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([flag("batch_size", 64)], "--batch-size"),
        ([read("yaml", "conf/a.yaml", train={"batch": 64})], "conf/a.yaml:train.batch"),
        ([read("yaml", None, train={"batch": 64})], "yaml:train.batch"),
        ([read("python", "/me/config.py", BATCH_SIZE=64)], "/me/config.py:BATCH_SIZE"),
        ([read("json", "a.json", per_device_train_batch_size=64)], "a.json:per_device_train_batch_size"),
        # A file first, then the command line with the file's values for defaults: the last one read wins.
        ([read("yaml", "a.yaml", batch_size=64), flag("batch_size", 64)], "--batch-size"),
        # A value that is not in force is another setting of a like name.
        ([flag("batch_size", 64), read("json", "eval.json", batch_size=512)], "--batch-size"),
    ],
)
def test_the_knob_is_where_the_value_in_force_was_read(settings: list[SettingsRead], expected: str) -> None:
    assert knobs(settings, "batch_size", lambda value: value == 64)[0].text == expected


def test_names_that_only_look_alike_are_no_knobs() -> None:
    settings = [flag("batch_norm", 64, val_batch_size=64, num_workers_eval=64)]
    assert knobs(settings, "batch_size", lambda value: value == 64) == []
    assert knobs(settings, "num_workers", lambda value: value == 64) == []


def test_a_change_asked_for_by_name_and_not_offered_is_reported() -> None:
    wishes = Wishes.of(allow="batch-size,eval-interval,semantic", only="loader")
    assert not_offered(wishes, {"loader"}) == [
        "batch_size was not tried: nothing that was found asks for it",
        "eval_interval was not tried: nothing that was found asks for it",
    ]
    assert not_offered(Wishes.of(allow="all"), ()) == []


@pytest.mark.parametrize("option", ["only", "allow"])
def test_a_change_cannot_be_both_asked_for_and_skipped(option: str) -> None:
    with pytest.raises(UsageError, match="--skip batch-size: it is asked for as well"):
        Wishes.of(**{option: "batch-size", "skip": "loader,batch-size"})


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"eval_every": 1}, 5),
        ({"eval_every": 1, "epochs": 90}, 5),
        ({"eval_every": 1, "epochs": 4}, 4),
        ({"eval_every": 2, "epochs": 2}, None),
        ({"eval_steps": 100, "epochs": 4}, 500),
    ],
)
def test_at_least_one_evaluation_is_left(settings: dict[str, int], value: int | None) -> None:
    (name, every), *others = settings.items()
    world = World(machine=Machine(eval_s=2.0), length=19_200, settings=[flag(name, every, **dict(others))])
    seen = View(trace=(made := world.run((), 330, Trial(timeout_s=60)).trace), first=made)
    changes = [change for offer in offers(seen, Wishes.of(allow="all"))[0] for change in offer.changes]
    assert [change.value for change in changes if change.name == "eval_interval"] == ([value] if value else [])


def test_threads_of_workers_are_limited_where_the_loader_is_not_replaced() -> None:
    # GIVEN workers that have 18 threads each on 16 cores, and a script without a setting for them
    crowded = view(World(machine=Machine(data_ms=80.0)))
    worker = ProcessSample(pid=7, role="worker", name="python", cpu_pct=50.0, threads=18)
    samples = {
        host: tuple(replace(s, processes=(worker,)) for s in seen) for host, seen in crowded.trace.samples.items()
    }
    crowded = replace(crowded, trace=replace(crowded.trace, samples=samples))
    assert "worker_threads" in [finding.change for finding in crowded.findings]
    # THEN they are limited if the person wants that alone; the elastic loader limits them itself
    names = {
        only: [change.name for offer in offers(crowded, Wishes.of(only=only))[0] for change in offer.changes]
        for only in ("worker-threads", "", "loader,worker-threads")
    }
    assert names["worker-threads"] == ["worker_threads"]
    assert "loader" in names[""]
    assert "worker_threads" not in names[""] + names["loader,worker-threads"]


def test_workers_are_kept_over_epochs_beside_the_elastic_loader_if_that_is_allowed() -> None:
    # GIVEN a training that starts its workers again and again
    world = view(World(machine=Machine(data_ms=80.0)))
    rank = with_loader(world.trace, persistent_workers=False).ranks[0]
    window = replace(rank.windows[0], spans_ms={**rank.windows[0].spans_ms, "loader start": Sketch.of([40.0] * 48)})
    trace = replace(world.trace, ranks=(replace(rank, windows=(window,)),))
    starting = View(trace=trace, first=trace)
    assert "data.worker-start" in [finding.code for finding in starting.findings]
    for allow, expected in (("", False), ("persistent-workers", True)):
        names = [change.name for offer in offers(starting, Wishes.of(allow=allow))[0] for change in offer.changes]
        assert "loader" in names
        assert ("persistent_workers" in names) == expected


def test_no_worker_is_offered_where_the_loop_writes_to_its_dataset() -> None:
    starved = view(World(machine=Machine(data_ms=80.0), workers=0))
    rank = starved.trace.ranks[0]
    loader = replace(rank.facts.loaders[0], written="Pictures, size")
    writes = replace(starved.trace, ranks=(replace(rank, facts=replace(rank.facts, loaders=(loader,))),))
    names = {change.name for offer in offers(replace(starved, trace=writes), Wishes())[0] for change in offer.changes}
    assert not names & {"loader", "num_workers", "prefetch_factor"}


def test_a_starved_training_is_offered_the_data_path_as_one() -> None:
    wanted, withheld = offers(view(World(machine=Machine(data_ms=80.0), workers=0)), Wishes())
    assert [change.name for change in wanted[0].changes] == ["loader", "device_prefetch"]
    assert wanted[0].promise > 2
    assert withheld == []


PICTURES = {"pillow": True}


def test_gpu_transforms_are_offered_where_the_elastic_loader_is_still_behind() -> None:
    world = World(machine=Machine(data_ms=80.0), facts=PICTURES)
    ours = [Change(name="loader", value="elastic", safety="reseeded")]
    change = offered(world, kept=ours)["gpu_transforms"]
    assert (change.value, change.safety) == (True, "equivalent")
    assert "gpu_transforms" not in offered(world), "first it is seen what the loader brings"
    assert "gpu_transforms" not in offered(World(machine=Machine(data_ms=0.0), facts=PICTURES), kept=ours)
    assert "gpu_transforms" not in offered(World(machine=Machine(data_ms=80.0)), kept=ours), "no pictures were seen"
    by_itself = World(machine=Machine(data_ms=80.0), facts=PICTURES, settings=[flag("augment_on", "cpu")])
    assert "gpu_transforms" not in offered(by_itself, kept=ours), "the script has a switch of its own"


def test_gpu_transforms_go_with_the_loader_where_every_core_is_busy() -> None:
    folder = Path(__file__).parents[2] / "traces"
    with tempfile.TemporaryDirectory() as to:
        with tarfile.open(folder / "h200-data.cpu-bound-segment.tgz") as recorded:
            recorded.extractall(to, filter="data")
        trace = read_trace(Path(to))
    rank = trace.ranks[0]
    trace = replace(trace, ranks=(replace(rank, facts=replace(rank.facts, **PICTURES)),))
    seen = View(trace=trace, first=trace)
    wanted, _ = offers(seen, Wishes())
    assert [change.name for change in wanted[0].changes] == ["loader", "device_prefetch", "gpu_transforms"]


def test_where_the_elastic_loader_does_not_pay_the_number_of_workers_that_is_asked_for_is_tried() -> None:
    tried = {("loader", "elastic"): "undone"}
    assert offered(World(machine=Machine(data_ms=80.0), workers=0), tried=tried)["num_workers"].value > 0
    assert "num_workers" not in offered(World(machine=Machine(data_ms=0.0), workers=8), tried=tried)


def test_decoder_threads_that_outnumber_the_cores_go_with_the_data_path() -> None:
    world = World(machine=Machine(data_ms=80.0), workers=8, settings=[flag("decode_threads", 12)])
    change = offered(world)["setting:decode_threads"]
    assert (change.value, change.knob, change.safety) == (1, "--decode-threads", "identical")


def test_augmentation_that_the_script_can_do_on_the_gpu_is_offered_if_allowed() -> None:
    world = World(machine=Machine(data_ms=80.0), settings=[flag("jitter_on", "cpu", device="cpu")])
    assert "setting:jitter_on" not in offered(world)
    change = offered(world, Wishes.of(allow="all"))["setting:jitter_on"]
    assert (change.value, change.knob, change.safety) == ("gpu", "--jitter-on", "semantic")


def test_a_large_promise_comes_before_a_small_one() -> None:
    """GIVEN a starved training THEN its augmentation's turn, though semantic, is before that of a fused optimizer."""
    world = World(
        machine=Machine(data_ms=80.0),
        settings=[flag("jitter_on", "cpu")],
        facts={"optimizer_fused": None},
        xray={"idle_by_phase_ms": {"optimizer": 50.0}},
    )
    wanted, _ = offers(view(world), Wishes.of(allow="all"))
    firsts = [(offer.changes[0].name, offer.promise > 1.1) for offer in wanted]
    assert firsts == [("loader", True), ("setting:jitter_on", True), ("fused_optimizer", False)]


def test_a_setting_without_effect_is_offered_as_a_change() -> None:
    world = World(
        settings=[flag("amp", True, compile_model=True, cudnn_benchmark=True)],
        facts={"autocast": ["None"], "compiled": False, "channels_last": True, "cudnn_benchmark": False},
    )
    changes = offered(world)
    assert changes["precision"].value == "bf16"
    assert changes["precision"].knob == ""  # its knob is on already, and did nothing
    assert changes["compile"].value == "reduce-overhead"
    assert changes["cudnn_benchmark"].value is True


@pytest.mark.parametrize("workers", [8, 64])
@pytest.mark.parametrize("asked", [True, False])
def test_a_data_path_that_promises_little_goes_with_compute_and_compiling_alone(asked: bool, workers: int) -> None:
    world = World(
        workers=workers,
        settings=[flag("amp", True, compile_model=asked)],
        facts={"autocast": ["None"], "compiled": False, "channels_last": True, "cudnn_benchmark": False},
        xray={"top_ms": {"elementwise_kernel": 100.0}, "tensor_core_ms": 0.0},
    )
    wanted, _ = offers(view(world), Wishes())
    names = [[change.name for change in offer.changes] for offer in wanted if offer.promise >= 1.02]
    fed = ["loader", "device_prefetch"] if workers == 64 else []  # too many: no offer of its own, but it goes along
    assert names == [[*fed, "precision", "cudnn_benchmark"], ["compile"]]


def test_a_data_path_that_promises_little_goes_with_a_larger_batch_where_that_is_allowed() -> None:
    settings, facts = [flag("batch_size", 64), flag("lr", 0.1)], {"memory_reserved_bytes": 1, "compiled": True}
    world = World(workers=64, settings=settings, facts=facts, xray=LAUNCHES)
    wanted, withheld = offers(view(world), Wishes.of(allow="all"))
    names = ["loader", "device_prefetch", "batch_size", "learning_rate"]
    assert [[change.name for change in offer.changes] for offer in wanted] == [names]
    assert [[change.name for change in part.changes] for part in wanted[0].parts] == [names[:1], names[1:2], names[2:]]
    assert not withheld
    wanted, withheld = offers(view(world), Wishes())
    assert [[change.name for change in offer.changes] for offer in wanted] == [names[:2]]
    assert [[change.name for change in offer.changes] for offer in withheld] == [names[2:]]


ELASTIC = Change(name="loader", value="elastic", safety="identical")
DEFAULT = Change(name="compile", value="default", safety="equivalent")
LATE = {"idle_by_phase_ms": {"forward": 10.0, "backward": 10.0}}  # of 160 ms, among kernels that are not small


@pytest.mark.parametrize(
    ("xray", "next_mode"), [(LAUNCHES, "reduce-overhead"), (LATE, "reduce-overhead"), ({}, "max-autotune")]
)
def test_once_compiled_the_next_mode_is_tried(xray: dict[str, Any], next_mode: str) -> None:
    world = World(facts={"compiled": True}, xray=xray)
    assert offered(world, kept=[DEFAULT], tried={("compile", "default"): "kept"})["compile"].value == next_mode
    assert "compile" not in offered(world)  # by the script itself


def test_once_compiled_graphs_come_before_what_changes_learning() -> None:
    world = World(
        settings=[flag("batch_size", 64)], facts={"memory_reserved_bytes": 4 << 30, "compiled": True}, xray=LAUNCHES
    )
    wanted, _ = offers(view(world, kept=[DEFAULT], tried={("compile", "default"): "kept"}), Wishes.of(allow="all"))
    assert [offer.changes[0].name for offer in wanted] == ["compile", "batch_size"]


def test_where_the_gpu_waits_for_launches_graphs_are_the_first_way_to_compile() -> None:
    """Though its kernels are not small: what keeps the host from launching them may be the workers on its cores."""
    late = {"idle_by_phase_ms": {"forward": 20.0, "backward": 20.0}}
    world = World(facts={"compiled": False}, xray=late)
    wanted, _ = offers(view(world), Wishes())
    assert [(offer.name, round(offer.promise, 2)) for offer in wanted] == [("compile reduce-overhead", 1.33)]
    unsafe = {("compile", "reduce-overhead"): "unsafe"}
    assert offered(world, tried=unsafe)["compile"].value == "default"
    world = World(facts={"compiled": True}, xray=late)
    assert "compile" not in offered(world, kept=[DEFAULT], tried=unsafe | {("compile", "default"): "kept"})


def test_launches_that_no_graph_would_spare_are_no_reason_to_compile() -> None:
    assert "compile" not in offered(World(facts={"compiled": False}, xray={"idle_by_phase_ms": {"copy": 60.0}}))


def test_several_ranks_are_compiled_before_they_are_captured() -> None:
    made = view(World(facts={"compiled": False}, xray=LAUNCHES))
    rank = made.trace.ranks[0]
    several = replace(made.trace, ranks=(replace(rank, info=replace(rank.info, world_size=2)),))
    wanted, _ = offers(View(trace=several, first=several), Wishes())
    assert [offer.name for offer in wanted] == ["compile default"]


def test_a_training_that_adds_up_gradients_is_compiled_and_never_captured() -> None:
    """What graphs return is written over by the next pass, gradients too."""
    made = view(World(facts={"compiled": False}, xray=LAUNCHES))
    rank = made.trace.ranks[0]
    steps = tuple(replace(step, micro_steps=2) for step in rank.steps)
    adding = replace(made.trace, ranks=(replace(rank, steps=steps),))
    wanted, _ = offers(View(trace=adding, first=adding), Wishes())
    assert [offer.name for offer in wanted] == ["compile default"]
    wanted, _ = offers(
        View(trace=adding, first=adding, kept=[DEFAULT], tried={("compile", "default"): "kept"}), Wishes()
    )
    assert wanted == []


@pytest.mark.parametrize(("in_force", "said"), [(0.4, None), (1.6, "×16 where ×4 was set"), (None, None)])
def test_a_learning_rate_that_the_script_raises_with_the_batch_is_not_raised_twice(
    in_force: float | None, said: str | None
) -> None:
    """lr = args.lr * batch_size / 256: four times the batch, and four times args.lr."""
    change = Change(name="learning_rate", value=0.8, safety="semantic", knob="--lr")
    facts = Facts(settings=(flag("lr", 0.2),), learning_rate=0.1)
    before, now = SimpleNamespace(facts=facts), SimpleNamespace(facts=replace(facts, learning_rate=in_force))
    why = scaled_twice(change, before, now)  # type: ignore[arg-type]
    assert why is None if said is None else str(why).endswith(said)


def test_sgd_scales_its_learning_rate_in_proportion() -> None:
    world = World(
        settings=[flag("batch_size", 64, lr=0.1)],
        facts={"optimizer": "SGD", "learning_rate": 0.1, "memory_reserved_bytes": 20 << 30},
        xray=LAUNCHES,
    )
    changes = offered(world, Wishes.of(allow="batch-size"))
    assert changes["batch_size"].value == 128
    assert changes["learning_rate"].value == pytest.approx(0.2)
    assert "in proportion to the batch" in changes["learning_rate"].note


def test_a_step_that_waits_for_launches_gets_a_larger_batch_before_half_precision() -> None:
    world = World(
        settings=[flag("batch_size", 64)],
        facts={"autocast": ["None"], "memory_reserved_bytes": 1 << 30},
        xray=LAUNCHES | {"busy_by_phase_ms": {"forward": 100.0}, "tensor_core_ms": 0.0},
    )
    wanted, _ = offers(view(world), Wishes.of(allow="all"))
    promised = {change.name: offer.promise for offer in wanted for change in offer.changes}
    assert promised["batch_size"] > 1.2
    assert promised["precision"] == 1.0


def test_a_larger_batch_is_not_offered_where_the_elastic_loader_brings_no_more_samples() -> None:
    """GIVEN a GPU that waits for launches and for data WHEN all that can be done for its data is done."""
    settings, facts = [flag("batch_size", 64)], {"memory_reserved_bytes": 1 << 30}
    for data_ms, kept, is_offered in ((80.0, [], True), (80.0, [ELASTIC], False), (2.0, [ELASTIC], True)):
        world = World(machine=Machine(data_ms=data_ms), settings=settings, facts=facts, xray=LAUNCHES)
        names = offered(world, Wishes.of(allow="all"), kept=kept)
        assert ("batch_size" in names) is is_offered, (data_ms, kept)


def test_a_batch_is_never_made_so_large_that_an_epoch_has_few_steps() -> None:
    world = World(
        settings=[flag("batch_size", 64)], facts={"memory_reserved_bytes": 1 << 30}, xray=LAUNCHES, length=64 * 9
    )
    assert "batch_size" not in offered(world, Wishes.of(allow="all"))


@pytest.mark.parametrize(
    ("wishes", "names"),
    [
        (Wishes.of(skip="loader"), {"num_workers", "device_prefetch", "precision"}),
        (Wishes.of(only="num-workers"), {"num_workers"}),
        (Wishes.of(only="identical"), {"device_prefetch"}),
        (Wishes.of(only="loader,precision"), {"loader", "precision"}),
        (Wishes.of(only="batch-size"), set()),
    ],
)
def test_wishes_are_kept(wishes: Wishes, names: set[str]) -> None:
    world = World(machine=Machine(data_ms=80.0), workers=0, facts={"autocast": ["None"]}, xray={"tensor_core_ms": 0.0})
    assert set(offered(world, wishes)) == names


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"allow": "batchsize"}, "--allow: there is no change or class called batchsize (did you mean batch-size?)"),
        ({"skip": "qqq"}, "--skip: there is no change or class called qqq (there are loader, "),
    ],
)
def test_a_misspelt_name_is_reported_with_the_nearest_one(given: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Wishes.of(**given)
    assert str(caught.value).startswith(complaint)
