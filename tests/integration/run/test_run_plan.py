"""A plan's changes take effect in unmodified scripts, say how and where, and leave training what it was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from observing import Run, flatout_run, write

from flatout.model.plan import Change, Plan, Safety
from flatout.model.records import AppliedChange

TRAIN = """
    import argparse, random, torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    from flatout.inside import compiler
    compiler.load_when_used()  # an optimizer's first step would load the compiler, for seconds

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--random", action="store_true")
    args = parser.parse_args()

    class Pictures(Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, index):
            picture = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
            return picture * (random.random() if args.random else 1), index % 3

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.head = nn.Linear(8, 3)

        def forward(self, pictures):
            seen.add((torch.is_autocast_enabled("cpu"), pictures.is_contiguous(memory_format=torch.channels_last)))
            return self.head(torch.dropout(self.conv(pictures).relu(), 0.2, self.training).mean((2, 3)))

    seen = set()
    torch.manual_seed(0)
    random.seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(Pictures(), batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    for epoch in range(2):
        for pictures, labels in loader:
            out = net(pictures)
            assert not torch.is_autocast_enabled("cpu") and out.dtype == torch.float32
            loss = nn.functional.cross_entropy(out, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", loss.item().hex())
    print("keys", *net.state_dict())
    print("seen", *sorted(seen))
"""


def change(name: str, value: Any, knob: str = "", safety: Safety = "equivalent") -> Change:
    return Change(name=name, value=value, safety=safety, knob=knob)


def run_with(
    folder: Path, *changes: Change, flags: tuple[str, ...] = (), command: tuple[str, ...] = (), **env: str
) -> Run:
    Plan(changes=changes).save(folder / "plan.yaml")
    options = ("--plan", "plan.yaml", "--no-xray", "--quiet")
    return flatout_run(folder, *(command or (sys.executable, "train.py", *flags)), options=options, env=env)


def entries(run: Run) -> dict[str, AppliedChange]:
    return {entry.name: entry for entry in run.observed.rank.facts.changes}


def losses(run: Run) -> list[str]:
    return [line for line in run.out.splitlines() if line.startswith("loss")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[str]]:
    """The losses of the script by itself, by its flags."""
    found = {}
    for flags in ((), ("--workers", "2", "--random")):
        folder = tmp_path_factory.mktemp("plain")
        write(folder, train=TRAIN)
        found[flags] = losses(flatout_run(folder, sys.executable, "train.py", *flags, env={"FLATOUT": "off"}))
        assert len(found[flags]) == 24
    return found


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        (
            (),
            (
                change("loader", "elastic"),
                change("num_workers", 2),
                change("prefetch_factor", 4),
                change("worker_threads", 1),
                change("gc_freeze", True),
            ),
        ),
        (("--workers", "2", "--random"), (change("prefetch_factor", 5), change("worker_threads", 1))),
    ],
    ids=["a dataset that draws nothing", "random samples"],
)
def test_identical_changes_leave_every_loss_bit_for_bit(
    tmp_path: Path, plain: dict[tuple[str, ...], list[str]], flags: tuple[str, ...], changes: tuple[Change, ...]
) -> None:
    write(tmp_path, train=TRAIN)
    run = run_with(tmp_path, *changes, flags=flags)
    assert run.code == 0, run.err
    assert losses(run) == plain[flags]
    assert {name: entry.applied for name, entry in entries(run).items()} == {c.name: True for c in changes}


THREADS = """
    import os, torch
    from torch.utils.data import DataLoader

    class Threads(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.tensor([float(os.environ.get("OPENBLAS_NUM_THREADS", 0))])

    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for batch in DataLoader(Threads(), num_workers=1):
        layer(batch).sum().backward()
        optimizer.step()
        print("threads", int(batch))
"""


def test_workers_have_the_threads_of_the_plan(tmp_path: Path) -> None:
    write(tmp_path, train=THREADS)
    run = run_with(tmp_path, change("worker_threads", 3), OPENBLAS_NUM_THREADS="7")
    assert run.out.split() == ["threads", "3"] * 2


def test_changes_to_what_is_computed_show_in_the_facts(tmp_path: Path, plain: dict[tuple[str, ...], list[str]]) -> None:
    write(tmp_path, train=TRAIN)
    wanted = (
        change("precision", "bf16"),
        change("channels_last", True),
        change("fused_optimizer", True),
        change("pin_memory", True),
        change("device_prefetch", True),
        change("cudnn_benchmark", True),
        change("gpu_transforms", True),
    )
    run = run_with(tmp_path, *wanted)
    assert run.code == 0, run.err
    facts, made = run.observed.rank.facts, entries(run)
    assert (facts.autocast, facts.channels_last, facts.optimizer_fused) == (("bfloat16",), True, True)
    assert "seen (True, True)" in run.out.splitlines(), "every call of the model is inside autocast and channels_last"
    assert "keys conv.weight conv.bias head.weight head.bias" in run.out
    assert made["fused_optimizer"].where == "train.py:36"
    assert made["precision"].where == "train.py:40"
    assert made["pin_memory"].how == "there is no GPU to copy to"
    assert made["device_prefetch"].how == "the model is not trained on a GPU"
    assert not made["cudnn_benchmark"].applied
    assert made["gpu_transforms"].how == "needs the elastic loader in the same plan"
    assert "changed in this run: precision=bf16 (each call of the model under torch.autocast" in run.err
    assert "Not changed: pin_memory (there is no GPU to copy to)" in run.err
    near = [abs(float.fromhex(a[5:]) - float.fromhex(b[5:])) for a, b in zip(losses(run), plain[()], strict=True)]
    assert 0 < max(near) < 0.05, "rounding, and no more"


def test_transforms_stay_where_they_are_without_a_card_to_make_them(
    tmp_path: Path, plain: dict[tuple[str, ...], list[str]]
) -> None:
    write(tmp_path, train=TRAIN)
    run = run_with(tmp_path, change("loader", "elastic"), change("gpu_transforms", True))
    assert run.code == 0, run.err
    assert losses(run) == plain[()]
    assert entries(run)["gpu_transforms"].how == "the model is not trained on a GPU"


def test_a_compiled_model_keeps_its_names(tmp_path: Path, plain: dict[tuple[str, ...], list[str]]) -> None:
    write(
        tmp_path, train=TRAIN.replace("seen.add((", "(lambda found: None)((").replace("0.2, self.training", "0.0, True")
    )
    run = run_with(tmp_path, change("compile", "default"))
    assert run.code == 0, run.err
    assert run.observed.rank.facts.compiled is True
    assert run.observed.rank.facts.compile_s > 0
    assert entries(run)["compile"].applied
    assert "keys conv.weight conv.bias head.weight head.bias" in run.out


@pytest.mark.parametrize(("adds_up", "compiles"), [(False, True), (True, True), (True, False)])
def test_a_training_that_would_add_up_gradients_of_graphs_is_ended(
    tmp_path: Path, adds_up: bool, compiles: bool
) -> None:
    """The next pass would write over them: that is an error, of which a trial is told. Without graphs it is none."""
    write(
        tmp_path,
        train=f"""
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.unused, self.used = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)

            def forward(self, points):
                return self.used(points).sigmoid() * 2

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            output = model(torch.ones(2, 3))
            if not {adds_up} or number % 2 == 0:
                optimizer.zero_grad()  # after the forward pass, as many do
            output.sum().backward()
            optimizer.step()
        """,
    )
    broken = {"CXX": str(tmp_path / "no-such-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    run = run_with(tmp_path, change("compile", "reduce-overhead"), **({} if compiles else broken))
    ends = adds_up and compiles
    assert (run.code != 0) == ends, run.err
    assert ("gradients of several passes are added up" in run.err) == ends
    assert entries(run)["compile"].applied == compiles


def test_a_compiler_that_fails_is_switched_off_and_training_goes_on(
    tmp_path: Path, plain: dict[tuple[str, ...], list[str]]
) -> None:
    write(tmp_path, train=TRAIN)
    broken = {"CXX": str(tmp_path / "no-such-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    run = run_with(tmp_path, change("compile", "default"), **broken)
    assert run.code == 0, run.err
    assert losses(run) == plain[()]
    assert not entries(run)["compile"].applied
    assert run.err.count("compile is switched off") == 1


def test_what_the_script_does_itself_is_left_alone(tmp_path: Path) -> None:
    """GIVEN a script with its own compile, sampler and optimizer WHEN a plan wants others THEN it says why not."""
    write(
        tmp_path,
        train="""
        import torch
        from torch.utils.data import DataLoader, IterableDataset

        class Stream(IterableDataset):
            def __iter__(self):
                return iter(torch.ones(12, 3))

        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.Rprop(model.parameters())
        model = torch.compile(model, fullgraph=True, backend="eager")
        for batch in DataLoader(Stream(), batch_size=2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        print("dtype", model(batch).dtype)
        """,
    )
    wanted = ("num_workers", 2), ("fused_optimizer", True), ("compile", "default"), ("precision", "bf16")
    run = run_with(tmp_path, *(change(*want) for want in wanted))
    assert run.code == 0, run.err
    made = entries(run)
    assert "IterableDataset" in made["num_workers"].how
    assert made["fused_optimizer"].how == "Rprop has no fused form in torch"
    assert made["compile"].how == "the script compiles the model itself"
    assert made["precision"].applied, "a model compiled in full takes autocast from the outside"


CONFIGURED = """
    import argparse, json, os, sys, yaml
    from pathlib import Path
    import torch
    import config
    from flatout.inside import compiler
    compiler.load_when_used()
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    with open("train.yaml") as file:
        settings = yaml.safe_load(file)
    text = yaml.safe_load(Path("other.yaml").read_text())
    with open("model.json") as file:
        model = json.load(fp=file)
    if int(os.environ.get("RANK", 0)) == 0:
        print(args.lr, settings["train"]["batch"], text["amp"], model["layers"][1]["width"], config.STEPS, config.NET)
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=args.lr)
    for _ in range(6):
        weight.sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("launcher", ["bash", "torchrun"])
def test_values_are_changed_as_the_script_reads_them(tmp_path: Path, launcher: str) -> None:
    write(tmp_path, train=CONFIGURED, config="BATCH: int = 8\nSTEPS = 800 // BATCH\nNET = {'width': 3}\n")
    (tmp_path / "train.yaml").write_text("train: {batch: 8}\n")
    (tmp_path / "other.yaml").write_text("amp: true\n")
    (tmp_path / "model.json").write_text('{"layers": [{"width": 1}, {"width": 2}]}')
    (tmp_path / "train.sh").write_text(f"{sys.executable} train.py --lr 0.5\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "--lr", "0.5")
    run = run_with(
        tmp_path,
        change("learning_rate", 0.25, "--lr"),
        change("batch_size", 64, "train.yaml:train.batch"),
        change("setting:amp", "bf16", "yaml:amp"),
        change("setting:width", 7, "model.json:layers.1.width"),
        change("setting:BATCH", 16, "config.py:BATCH"),
        change("setting:NET.width", 5, "config.py:NET.width"),
        change("eval_interval", 5, "--eval-every"),
        command=("bash", "train.sh") if launcher == "bash" else torchrun,
    )
    assert run.code == 0, run.err
    assert run.out.strip() == "0.25 64 bf16 7 50 {'width': 5}"
    made = entries(run)
    assert made["learning_rate"].how == "--lr read as 0.25 instead of 0.5"
    assert made["setting:BATCH"].how == "config.py:BATCH set to 16 instead of 8"
    assert made["eval_interval"].how == "the script did not read --eval-every"
    assert run.observed.rank.facts.learning_rate == 0.25
    assert {name: (tmp_path / name).read_bytes() for name in before} == before, "nothing of the user's is rewritten"


def test_every_place_is_told_where_a_change_was_made(tmp_path: Path) -> None:
    evaluate = """
    with torch.no_grad():
        for pictures, _ in DataLoader(Pictures(), batch_size=4, num_workers=1):
            net(pictures)
    """
    write(tmp_path, train=TRAIN + evaluate)
    run = run_with(tmp_path, change("loader", "elastic"), flags=("--workers", "1"))
    assert run.code == 0, run.err
    first, last = (entries(run)["loader"].where, *entries(run)["loader"].also)
    assert (first, last) == ("train.py:37", "train.py:51")
    assert f", {first}, {last})" in run.err


HEARD = """
    import torch
    from flatout.inside.recording import Recording

    heard, step_ended = [], Recording.step_ended
    Recording.step_ended = lambda recording, optimizer: heard.append(1) or step_ended(recording, optimizer)
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(160):
        weight.sum().backward()
        optimizer.step()
    print("heard", len(heard))
"""


@pytest.mark.parametrize("wanted", [("loader", "elastic"), ("gc_freeze", True)])
def test_of_a_plan_only_the_first_steps_hear(tmp_path: Path, wanted: tuple[str, Any]) -> None:
    write(tmp_path, train=HEARD)
    Plan(changes=(change(*wanted),)).save(tmp_path / "plan.yaml")
    run = flatout_run(tmp_path, sys.executable, "train.py", options=("--plan", "plan.yaml", "--no-xray", "--quiet"))
    assert run.code == 0, run.err
    assert 1 <= int(run.out.split("heard")[1]) <= 20


def test_auto_puts_in_what_is_safe_and_says_which(tmp_path: Path, plain: dict[tuple[str, ...], list[str]]) -> None:
    write(tmp_path, train=TRAIN)
    flags = ("--workers", "2", "--random")
    run = flatout_run(tmp_path, sys.executable, "train.py", *flags, options=("--auto", "--strict", "--quiet"))
    assert run.code == 0, run.err
    assert "loader" not in run.err
    assert losses(run) == plain[flags]


def test_auto_says_that_random_samples_draw_others_with_workers_too(
    tmp_path: Path, plain: dict[tuple[str, ...], list[str]]
) -> None:
    """GIVEN two workers and samples that draw random numbers, THEN --auto says what --strict would have kept."""
    write(tmp_path, train=TRAIN)
    flags = ("--workers", "2", "--random")
    run = flatout_run(tmp_path, sys.executable, "train.py", *flags, options=("--auto", "--no-xray", "--quiet"))
    assert run.code == 0, run.err
    assert "(batches come from flatout's own workers; samples that draw random numbers draw others, t" in run.err
    assert losses(run) != plain[flags]


WRITES = """
    import random, sys, torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, Sampler
    from flatout.inside import compiler
    compiler.load_when_used()

    added = 0

    class Pictures(Dataset):
        size = 4

        def __len__(self):
            return 96

        def __getitem__(self, index):
            return torch.full((self.size,), float(index)).mean() + random.random(), index, self.size + added

    class Hardest(Sampler):
        losses = torch.zeros(96)

        def __len__(self):
            return 96

        def __iter__(self):
            for _ in range(96):
                yield int((self.losses + torch.arange(96) % 7).argmax())

    torch.manual_seed(0)
    random.seed(0)
    data, hardest = Pictures(), Hardest()
    sampler = hardest if "sampler" in sys.argv else None
    loader = DataLoader(data, batch_size=4, shuffle=sampler is None, sampler=sampler)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for epoch in range(2):
        for step, (x, index, sizes) in enumerate(loader):
            loss = model(x[:, None]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hardest.losses[index] = -loss.item()
            if step % 5 == 4 and "size" in sys.argv:
                data.size += 1
            if step % 5 == 4 and "added" in sys.argv:
                added += 1
            print("step", epoch, step, index.tolist(), sizes.tolist(), loss.item())
"""


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("size", "the loop writes to what it reads (Pictures, size), which no worker would see"),
        ("added", "the loop writes to what it reads (Pictures, global variable added), which no worker would see"),
        ("sampler", "num_workers=0, and the sampler is the script's own, Hardest: it may go by what was learned"),
    ],
)
def test_what_a_loop_without_workers_tells_its_data_is_not_lost(tmp_path: Path, what: str, why: str) -> None:
    """GIVEN pictures whose size the loop changes every five batches, there or in a global variable, or a sampler that
    goes by the last losses WHEN the loader is to be ours THEN it is PyTorch's, from the first write on: the same
    samples in the same order and size."""
    said = []
    for plan in ((), (change("loader", "elastic"),)):
        folder = tmp_path / f"with-{len(plan)}-changes"
        folder.mkdir()
        write(folder, train=WRITES)
        run = run_with(folder, *plan, command=(sys.executable, "train.py", what))
        assert run.code == 0, run.err
        said.append([line.split() for line in run.out.splitlines() if line.startswith("step")])
    assert not entries(run)["loader"].applied
    assert entries(run)["loader"].how == why
    pytorch, ours = said
    assert len(pytorch) == 48
    if what == "sampler":
        assert ours == pytorch
    else:
        first_epoch = slice(24)  # later shuffles follow what samples drew
        assert [line[:-1] for line in ours[first_epoch]] == [line[:-1] for line in pytorch[first_epoch]]
        assert ours[0][-1] != pytorch[0][-1], "ours to begin with"


RAISES = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    from flatout.inside import compiler
    compiler.load_when_used()

    class Broken(Exception):
        def __init__(self, path, code):
            super().__init__(f"{path}: {code}")
            self.code = code

    class Pictures(Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, index):
            if index == 21:
                raise Broken("21.png", 7)
            return torch.full((1,), float(index)), index

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches = iter(DataLoader(Pictures(), batch_size=4))
    while True:
        try:
            x, index = next(batches)
        except StopIteration:
            break
        except Broken as problem:
            print("step broken", problem, problem.code)
            continue
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        print("step", index.tolist())
"""


def test_what_a_sample_raises_without_workers_is_raised_as_it_is(tmp_path: Path) -> None:
    said = []
    for plan in ((), (change("loader", "elastic"),)):
        folder = tmp_path / f"with-{len(plan)}-changes"
        folder.mkdir()
        write(folder, train=RAISES)
        run = run_with(folder, *plan)
        assert run.code == 0, run.err
        said.append([line for line in run.out.splitlines() if line.startswith("step")])
    assert said[0] == said[1]
    assert "step broken 21.png: 7 7" in said[0]
    assert len(said[0]) == 12
    assert entries(run)["loader"].applied


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_frameworks_get_their_batches_from_the_elastic_loader(tmp_path: Path, framework: str) -> None:
    """GIVEN a script for the Hugging Face Trainer, without workers as it comes, or for Lightning with one WHEN the
    loader is ours THEN losses are those of PyTorch's loader."""
    said = []
    for plan in ((change("loader", "elastic"),), ()):
        folder = tmp_path / f"with-{len(plan)}-changes"
        folder.mkdir()
        write(folder, train=TRAINER if framework == "transformers" else LIGHTNING)
        run = run_with(folder, *plan, CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
        assert run.code == 0, run.err
        said.append([line for line in run.out.splitlines() if line.startswith("losses")])
        assert not plan or entries(run)["loader"].applied
        assert not plan or entries(run)["loader"].where.startswith("train.py:")
        frameworks = [loader.framework for loader in run.observed.rank.facts.loaders]
        assert frameworks == [framework]
    assert said[0] == said[1] != []


TRAINER = """
    import torch
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import TrainerCallback

    class Rows(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, index):
            return {"x": torch.full((4,), float(index)), "labels": torch.tensor(float(index % 2))}

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def forward(self, x, labels):
            out = self.layer(x).squeeze(-1)
            return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}

    class Losses(TrainerCallback):
        seen = []
        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append(logs.get("loss"))

    torch.manual_seed(3)
    arguments = TrainingArguments(
        output_dir="out", num_train_epochs=2, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, seed=3, disable_tqdm=True, learning_rate=1e-3,
    )
    Trainer(model=Net(), args=arguments, train_dataset=Rows(), callbacks=[Losses()]).train()
    print("losses", *Losses.seen)
"""

LIGHTNING = """
    import lightning, torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, index):
            return torch.full((4,), float(index)), torch.tensor(float(index % 2))

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.seen = []
        def training_step(self, batch, _):
            loss = torch.nn.functional.mse_loss(self.layer(batch[0]).squeeze(-1), batch[1])
            self.seen.append(loss.item().hex())
            return loss
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    lightning.seed_everything(3, verbose=False)
    net = Net()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )
    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=1)
    trainer.fit(net, datamodule=Data())
    print("losses", *net.seen)
"""
