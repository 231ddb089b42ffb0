"""flatout check on whole scripts: nothing in a healthy one, each planted fault found and no other line disturbed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from preflight_cases import SCRIPTS, budget, line, look_over, machine

from flatout.check import Checklist
from flatout.check.checklist import FAIL, NOT_APPLICABLE, OK, WARN
from flatout.check.settings import read_command
from flatout.model.errors import UsageError

WORKLOADS = Path(__file__).parents[3] / "workloads"


def complaints(checklist: Checklist) -> dict[str, str]:
    """Subject and status of every line that is not well."""
    return {line.subject: line.status for line in checklist.lines if line.status in (WARN, FAIL)}


def with_fault(folder: Path, before: str, after: str) -> Path:
    """The healthy script with one thing changed."""
    shutil.copy(SCRIPTS / "images.py", folder)
    text = (SCRIPTS / "healthy.py").read_text()
    assert text.count(before) == 1, before
    script = folder / "train.py"
    script.write_text(text.replace(before, after))
    return script


def test_nothing_is_found_in_a_healthy_script() -> None:
    assert complaints(look_over(SCRIPTS / "healthy.py")) == {}


def test_settings_are_known_by_whatever_name_they_were_parsed_into(tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "images.py", tmp_path)
    text = (SCRIPTS / "healthy.py").read_text()
    (tmp_path / "train.py").write_text(re.sub(r"\bargs\b", "a", text))
    named, told = look_over(tmp_path / "train.py"), look_over(SCRIPTS / "healthy.py")
    assert [(one.subject, one.status) for one in named.lines] == [(one.subject, one.status) for one in told.lines]


FAULTS = [
    ("workers", WARN, '"--num-workers", type=int, default=8', '"--num-workers", type=int, default=28', "16 cores: 14"),
    ("workers", WARN, '"num_workers": args.num_workers', '"num_workers": 4 * 16', "num_workers=64"),
    ("pin_memory", WARN, '"pin_memory": True', '"pin_memory": False', "non_blocking=True has no effect"),
    ("pin_memory", WARN,
     "images = images.to(device, non_blocking=True)\n            labels = labels.to(device, non_blocking=True)",
     "images, labels = images.to(device), labels.to(device)", "the host waits for each"),
    ("persistent_workers", WARN, "persistent_workers=True", "persistent_workers=False", "8 workers are started again"),
    ("prefetch_factor", WARN, "persistent_workers=True", "persistent_workers=True, prefetch_factor=1", "stop the GPU"),
    ("drop_last", WARN, "drop_last=True, ", "", "compiles once more"),
    ("set_epoch", FAIL, "        sampler.set_epoch(epoch)\n", "", "the same order"),
    ("mixed precision", WARN, 'with torch.autocast("cuda", torch.bfloat16):', "if True:", "no autocast"),
    ("mixed precision", WARN, "torch.bfloat16):", "torch.bfloat16, enabled=False):", "switched off"),
    ("mixed precision", WARN,
     'torch.autocast("cuda", torch.bfloat16):', "torch.cuda.amp.autocast(False):", "switched off"),
    ("mixed precision", FAIL, "torch.bfloat16):", "torch.bfloat16, enabled='bf16'):", "takes true or false"),
    ("cuDNN benchmark", WARN, "cudnn.benchmark = True", "cudnn.benchmark = False", "switched off"),
    ("fused optimizer", WARN, ", fused=True", "", "AdamW without fused=True"),
    ("channels_last", WARN, "device, memory_format=torch.channels_last", "device", "NCHW"),
    ("zero_grad", WARN, "zero_grad()", "zero_grad(set_to_none=False)", "zeros"),
    ("host waits", WARN, "total += loss.detach()", "total += loss.item()", ".item() every batch"),
    ("host waits", WARN, "total += loss.detach()",
     "total += loss.item()\n            if step % 10:\n                continue", ".item() every batch"),
    ("host waits", WARN, "total += loss.detach()", "seen.append(loss.detach().cpu())", ".cpu() every batch"),
    ("host waits", WARN, "total += loss.detach()", "print(step, loss)", "print() of a tensor"),
    ("host waits", WARN, "if step % args.log_every == 0:", "if rank == 0:", ".item() every batch"),
    ("host waits", WARN, '"--log-every", type=int, default=50', '"--log-every", type=int, default=1', ".item() every"),
    ("checkpoints", WARN, "total += loss.detach()", 'torch.save(net.state_dict(), "last.pt")', "after every batch"),
    ("evaluation", WARN, "total += loss.detach()", "evaluate(net, val_loader, device)", "after every batch"),
]  # fmt: skip


@pytest.mark.parametrize(("subject", "status", "before", "after", "words"), FAULTS)
def test_a_planted_fault_is_found_and_no_other_line_complains(
    tmp_path: Path, subject: str, status: str, before: str, after: str, words: str
) -> None:
    script = with_fault(tmp_path, before, after)
    checklist = look_over(script)
    assert complaints(checklist) == {subject: status}
    found = line(checklist, subject)
    assert words in found.reason
    assert found.fix
    assert found.where
    assert found.where.partition(":")[0] == str(script)


def test_a_loader_built_every_epoch_is_found(tmp_path: Path) -> None:
    text = (SCRIPTS / "healthy.py").read_text()
    build = next(line for line in text.splitlines() if line.strip().startswith("loader = DataLoader"))
    script = with_fault(
        tmp_path, "        sampler.set_epoch(epoch)\n", f"        sampler.set_epoch(epoch)\n    {build}\n"
    )
    script.write_text(script.read_text().replace(f"{build}\n    val_loader", "    val_loader"))
    found = line(look_over(script), "loader in the loop")
    assert found.status == WARN
    assert found.code == "data.worker-start"


def test_a_loader_built_for_every_fold_is_not_one_built_every_epoch(tmp_path: Path) -> None:
    script = tmp_path / "folds.py"
    script.write_text("""
from torch.utils.data import DataLoader
for fold in range(5):
    loader = DataLoader(train_set(fold), batch_size=8, num_workers=2)
    for epoch in range(10):
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
""")
    assert line(look_over(script), "loader in the loop").status == OK


def test_evaluation_and_checkpoint_every_epoch_are_found_where_there_is_a_knob(tmp_path: Path) -> None:
    script = with_fault(tmp_path, '"--eval-every", type=int, default=5', '"--eval-every", type=int, default=1')
    checklist = look_over(script)
    assert complaints(checklist) == {"evaluation": WARN, "checkpoints": WARN}
    assert line(checklist, "evaluation").fix == "--eval-every 5"


def test_an_evaluation_written_out_in_the_loop_over_epochs_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
from torch.utils.data import DataLoader
loader = DataLoader(train_set, batch_size=8)
dev = "cuda" if torch.cuda.is_available() else "cpu"
for epoch in range(3):
    model.train()
    for images, labels in loader:
        loss = criterion(model(images.to(dev)), labels.to(dev))
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(val_set):
            model(images.to(dev))
""")
    checklist = look_over(script)
    found = line(checklist, "evaluation")
    assert (found.status, found.where) == (OK, f"{script}:11")
    assert "pageable" in line(checklist, "pin_memory").reason


def test_loading_in_the_training_process_costs_a_cpu_its_time_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
from torch.utils.data import DataLoader
loader = DataLoader(train_set, batch_size=8, num_workers=0)
for epoch in range(3):
    for batch in loader:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        print(loss.item())
""")
    checklist = look_over(script)
    assert complaints(checklist)["workers"] == WARN
    assert "in turns with training" in line(checklist, "workers").reason


def test_a_step_that_is_handed_to_an_engine_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
from ignite.engine import Engine
def train_step(engine, batch):
    loss = model(batch.to("cuda")).mean()
    loss.backward()
    optimizer.step()
    return loss.item()
Engine(train_step).run(loader, max_epochs=3)
""")
    found = line(look_over(script), "host waits")
    assert (found.status, found.where) == (WARN, f"{script}:7")


@pytest.mark.parametrize(
    ("interval", "said"), [("500", "every 500 batches"), ("len(loader) // 5", "among the batches, now and then")]
)
def test_an_evaluation_every_so_many_batches_is_seen(tmp_path: Path, interval: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"""
from torch.utils.data import DataLoader
loader = DataLoader(train_set, batch_size=8)
for epoch in range(3):
    for step, (x, y) in enumerate(loader):
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        if step % ({interval}) == 0:
            evaluate(model)
def evaluate(model):
    model.eval()
""")
    found = line(look_over(script), "evaluation")
    assert (found.status, found.where) == (NOT_APPLICABLE, f"{script}:10")
    assert found.reason.startswith(said)


PAIR = """
from torch.utils.data import DataLoader
{names} = DataLoader(one, 8, num_workers=4), DataLoader(two, 8)
def correct(loader):
    return sum((model(x.cuda()).argmax(1) == y.cuda()).sum() for x, y in tqdm(loader))
for epoch in range(3):
    for x, y in {first}:
        loss = criterion(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
    right = {evaluation}
"""


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("train_loader", "val_loader")])
@pytest.mark.parametrize("called", [False, True])
def test_two_loaders_in_one_line_and_an_evaluation_in_a_generator_are_seen(
    tmp_path: Path, first: str, second: str, called: bool
) -> None:
    evaluation = f"correct({second})" if called else f"[model(x.cuda()) for x, y in {second}]"
    script = tmp_path / "train.py"
    script.write_text(PAIR.format(names=f"{first}, {second}", first=first, evaluation=evaluation))
    checklist = look_over(script)
    assert line(checklist, "workers").reason.startswith("num_workers=4 on")
    assert (line(checklist, "evaluation").status, line(checklist, "evaluation").where) == (OK, f"{script}:11")


@pytest.mark.parametrize("option", ["persistent_workers=True", "persistent_workers=False, prefetch_factor=2"])
def test_options_that_torch_refuses_without_workers_fail(tmp_path: Path, option: str) -> None:
    script = with_fault(tmp_path, "persistent_workers=True", option)
    found = look_over(script, "--num-workers", "0")
    assert [line.subject for line in found.of(FAIL)] == [
        option.split("=")[0] if "prefetch" not in option else "prefetch_factor"
    ]


# ---------------------------------------------------------------- what is asked for and not heard


def test_what_a_config_asks_for_and_nothing_heeds_fails() -> None:
    checklist = look_over(SCRIPTS / "asked.py", config=SCRIPTS / "asked.yaml")
    assert {line.subject for line in checklist.of(FAIL)} == {"mixed precision", "TF32", "compile"}
    precision = line(checklist, "mixed precision")
    assert precision.fix == "train.amp: bf16"
    assert precision.where is not None
    assert precision.where.endswith("asked.yaml:8")
    assert precision.code == line(checklist, "compile").code == "config.ignored"


@pytest.mark.parametrize(
    ("said", "status"),
    [("precision: highest", WARN), ("amp: '0'", WARN), ("precision: 32-true", WARN), ("precision: bf16-mixed", OK)],
)
def test_a_config_that_says_off_is_not_taken_for_on(tmp_path: Path, said: str, status: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"{said}\nbatch_size: 32\n")
    assert line(look_over(None, config=config), "mixed precision").status == status


@pytest.mark.parametrize(
    ("before", "after", "subject"),
    [
        ("amp: true", "amp: bf16", "mixed precision"),
        ("compile: true", "compile: false", "compile"),
        ("tf32: true", "tf32: false", "TF32"),
    ],
)
def test_what_is_not_asked_for_or_spelled_right_does_not_fail(
    tmp_path: Path, before: str, after: str, subject: str
) -> None:
    config = tmp_path / "asked.yaml"
    config.write_text((SCRIPTS / "asked.yaml").read_text().replace(before, after))
    assert line(look_over(SCRIPTS / "asked.py", config=config), subject).status != FAIL


def test_a_setting_that_is_handed_on_is_not_called_ignored(tmp_path: Path) -> None:
    """Whoever gets it may act on it: that cannot be told."""
    shutil.copy(SCRIPTS / "images.py", tmp_path)
    script = tmp_path / "asked.py"
    script.write_text(
        (SCRIPTS / "asked.py").read_text().replace("use_amp =", "speed_up(model, cfg.train.compile)\nuse_amp =")
    )
    assert line(look_over(script, config=SCRIPTS / "asked.yaml"), "compile").status == NOT_APPLICABLE


# ---------------------------------------------------------------- the five workloads, on sixteen cores


@pytest.mark.parametrize(
    ("start", "known_mistakes"),
    [
        ("gray/train.py", {"workers", "pin_memory", "evaluation", "checkpoints", "mixed precision", "fused optimizer"}),
        ("stock/train.sh", {"workers", "fused optimizer"}),
        ("segment/train.py", {"mixed precision", "channels_last", "fused optimizer"}),
        ("captcha/train.py", {"mixed precision", "TF32", "cuDNN benchmark", "compile", "workers", "host waits",
                              "fused optimizer"}),
        ("video/train.py", {"decode threads", "persistent_workers", "fused optimizer"}),
    ],
)  # fmt: skip
def test_the_workloads_mistakes_are_found_and_no_others(start: str, known_mistakes: set[str]) -> None:
    path = WORKLOADS / start
    command = read_command(path) if path.suffix == ".sh" else None
    checklist = look_over(command.script, *command.flags) if command else look_over(path)
    assert set(complaints(checklist)) == known_mistakes


def test_the_fix_is_a_value_for_this_machine() -> None:
    small = machine(budget=budget(cores=12, cores_allowed=14.0))
    found = line(look_over(WORKLOADS / "captcha/train.py", on=small), "workers")
    assert found.reason == "num_workers=28, but this process may use 14 cores: 12 for loading"
    assert found.fix == "num_workers: 12"


# ---------------------------------------------------------------- no false alarms


QUIET = {
    "a worker count only a run can tell": """
from torch.utils.data import DataLoader
loader = DataLoader(train_set, 32, num_workers=pick(), pin_memory=choose(), persistent_workers=maybe)
""",
    "options from a mapping that is not seen": """
from torch.utils.data import DataLoader
loader = DataLoader(train_set, **options())
""",
    "an argument that the script changes itself": """
import argparse
from torch.utils.data import DataLoader
args = argparse.ArgumentParser().parse_args()
parser.add_argument("--workers", type=int, default=64)
args.workers = args.workers // ranks
loader = DataLoader(train_set, 32, num_workers=args.workers, pin_memory=True)
""",
    "sizes taken on the host": """
import torch
for epoch in range(3):
    for lengths, batch in loader:
        longest = lengths.max().item()
        print(batch.size(0), len(batch), float(lengths.sum()))
        with torch.autocast("cuda"):
            loss = model(batch.cuda(non_blocking=True), longest)
        loss.backward()
        optimizer.step()
""",
    "fetched only every hundredth batch": """
import torch
for epoch in range(3):
    for step, batch in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(batch.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        step % 100 == 0 and print(loss)
        last = loss.item() if step % 100 == 0 else None
        if step % 100:
            continue
        print(loss.item(), loss.cpu())
""",
    "a training that never uses a GPU": """
import torch
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    for batch in loader:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        print(loss.item())
""",
    "one optimizer of several": """
import torch
def build(name, parameters):
    if name == "adam":
        return torch.optim.Adam(parameters)
    return torch.optim.SGD(parameters)
""",
    "a sampler in other hands": """
import lightning
from torch.utils.data import DataLoader, DistributedSampler
sampler = DistributedSampler(train_set)
""",
    "nothing but an import": "import torch",
}


@pytest.mark.parametrize("text", QUIET.values(), ids=QUIET.keys())
def test_what_cannot_be_told_is_not_complained_of(tmp_path: Path, text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert complaints(look_over(script, on=machine(gpus=None))) == {}


# ---------------------------------------------------------------- frameworks


def test_hugging_faces_arguments_are_read(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(bf16=True, dataloader_num_workers=0, per_device_train_batch_size=16)
Trainer(model, arguments, train_dataset=train_set).train()
""")
    checklist = look_over(script)
    assert line(checklist, "workers").fix == "dataloader_num_workers=8 to begin with"
    assert line(checklist, "mixed precision").status == OK
    assert "16" in line(checklist, "batch size").reason


def test_a_lightning_module_is_looked_into(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import lightning
class Net(lightning.LightningModule):
    def training_step(self, batch, index):
        images, labels = batch
        loss = self.criterion(self.net(images), labels)
        self.history.append(loss.item())
        return loss
lightning.Trainer(precision="bf16-mixed").fit(Net())
""")
    checklist = look_over(script)
    assert line(checklist, "host waits").status == WARN
    assert line(checklist, "mixed precision").reason == "bf16-mixed"


# ---------------------------------------------------------------- mistakes of the person


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("train.py", "def f(:\n", "train.py:1: not Python"),
        ("train.py", None, "no such file"),
        ("train.sh", "echo hello\n", "starts no Python script"),
        ("train.yaml", "a: [1\nb: {\n", "not YAML"),
        ("train.yaml", "- 1\n- 2\n", "holds no settings"),
        ("train.json", '{"a": }', "not JSON"),
        ("config.py", "x ==== 1", "not Python"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    def read(path: Path) -> object:
        if path.suffix == ".sh":
            return read_command(path)
        return look_over(path) if path.name == "train.py" else look_over(None, config=path)

    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=complaint) as raised:
        read(path)
    assert "\n" not in str(raised.value)
