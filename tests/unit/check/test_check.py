"""flatout check on whole scripts: nothing in a healthy one, each planted fault found and no other line disturbed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from check_cases import SCRIPTS, check_script, line_of, make_budget

from flatout.check import FAIL, NOT_APPLICABLE, OK, WARN, Checklist
from flatout.model.causes import CODES
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


def written(folder: Path, text: str) -> Path:
    """A script of this text."""
    script = folder / "train.py"
    script.write_text(text)
    return script


def test_nothing_is_found_in_a_healthy_script() -> None:
    checklist = check_script(SCRIPTS / "healthy.py")
    assert complaints(checklist) == {}
    judged = {line.subject for line in checklist.lines if line.status == OK}
    assert {"workers", "pin_memory", "set_epoch", "mixed precision", "TF32", "compile", "host waits"} <= judged


FAULTS = [
    ("workers", WARN, '"--num-workers", type=int, default=8', '"--num-workers", type=int, default=28', "16 cores: 14"),
    ("workers", WARN, '"num_workers": args.num_workers', '"num_workers": 64', "num_workers=64"),
    ("pin_memory", WARN, '"pin_memory": True', '"pin_memory": False', "non_blocking=True has no effect"),
    ("pin_memory", WARN,
     "images = images.to(device, non_blocking=True)\n            labels = labels.to(device, non_blocking=True)",
     "images, labels = images.to(device), labels.to(device)", "the host waits for each"),
    ("persistent_workers", WARN, "persistent_workers=True", "persistent_workers=False", "8 workers must start again"),
    ("set_epoch", FAIL, "        sampler.set_epoch(epoch)\n", "", "the same order"),
    ("mixed precision", WARN, 'with torch.autocast("cuda", torch.bfloat16):', "if True:", "no autocast"),
    ("mixed precision", WARN, "torch.bfloat16):", "torch.bfloat16, enabled=False):", "switched off"),
    ("mixed precision", WARN,
     'torch.autocast("cuda", torch.bfloat16):', "torch.cuda.amp.autocast(False):", "switched off"),
    ("mixed precision", FAIL, "torch.bfloat16):", "torch.bfloat16, enabled='bf16'):", "takes true or false"),
    ("host waits", WARN, "total += loss.detach()", "total += loss.item()", "loss.item()"),
    ("host waits", WARN, "total += loss.detach()", "seen.append(loss.detach().cpu())", "loss.detach().cpu()"),
    ("host waits", WARN, "total += loss.detach()", "print(step, loss)", "print(step, loss)"),
    ("host waits", WARN, "total += loss.detach()", "torch.cuda.synchronize()", "synchronize()"),
    ("kept graphs", WARN, "total += loss.detach()", "losses.append(loss)", "losses.append(loss)"),
    ("kept graphs", WARN, "total += loss.detach()", "total += 0.5 * loss", "total += 0.5 * loss"),
]  # fmt: skip


@pytest.mark.parametrize(("subject", "status", "before", "after", "words"), FAULTS)
def test_a_planted_fault_is_found_and_no_other_line_complains(
    tmp_path: Path, subject: str, status: str, before: str, after: str, words: str
) -> None:
    script = with_fault(tmp_path, before, after)
    checklist = check_script(script)
    assert complaints(checklist) == {subject: status}
    line = line_of(checklist, subject)
    assert words in line.reason
    assert line.fix
    assert line.code is None or line.code in CODES
    assert (line.where or "").partition(":")[0] == str(script)


def test_a_loader_that_is_built_every_epoch_is_found(tmp_path: Path) -> None:
    text = (SCRIPTS / "healthy.py").read_text()
    build = next(line for line in text.splitlines() if line.strip().startswith("loader = DataLoader"))
    script = with_fault(
        tmp_path, "        sampler.set_epoch(epoch)\n", f"        sampler.set_epoch(epoch)\n    {build}\n"
    )
    script.write_text(script.read_text().replace(f"{build}\n    val_loader", "    val_loader"))
    line = line_of(check_script(script), "loader in the loop")
    assert (line.status, line.code) == (WARN, "data.worker-start")


FOLDS = """
from torch.utils.data import DataLoader
for fold in range(5):
    loader = DataLoader(train_set(fold), batch_size=8, num_workers=2)
    for epoch in range(10):
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
"""


def test_a_loader_for_every_fold_is_not_one_for_every_epoch(tmp_path: Path) -> None:
    assert line_of(check_script(written(tmp_path, FOLDS)), "loader in the loop").status == OK


STEP = """
def train_step(engine, batch):
    loss = model(batch.to("cuda")).mean()
    loss.backward()
    optimizer.step()
    return loss.item()
Engine(train_step).run(loader, max_epochs=3)
"""


def test_a_function_that_trains_on_one_batch_is_a_loop_too(tmp_path: Path) -> None:
    script = written(tmp_path, STEP)
    line = line_of(check_script(script), "host waits")
    assert (line.status, line.where) == (WARN, f"{script}:6")


# ---------------------------------------------------------------- settings without effect


def test_a_config_that_asks_for_what_never_happens_fails() -> None:
    checklist = check_script(SCRIPTS / "asked.py", config=SCRIPTS / "asked.yaml")
    assert {line.subject for line in checklist.with_status(FAIL)} == {"mixed precision", "TF32", "compile"}
    precision = line_of(checklist, "mixed precision")
    assert precision.fix == "train.amp: bf16"
    assert (precision.where or "").endswith("asked.yaml:8")
    assert precision.code == line_of(checklist, "compile").code == "config.ignored"


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
    assert line_of(check_script(SCRIPTS / "asked.py", config=config), subject).status != FAIL


def test_a_setting_that_is_handed_on_is_not_called_ignored(tmp_path: Path) -> None:
    """The function that gets it may act on it."""
    shutil.copy(SCRIPTS / "images.py", tmp_path)
    text = (SCRIPTS / "asked.py").read_text()
    script = written(tmp_path, text.replace("use_amp =", "speed_up(model, cfg.train.compile)\nuse_amp ="))
    assert line_of(check_script(script, config=SCRIPTS / "asked.yaml"), "compile").status == NOT_APPLICABLE


COMPARED = """
import torch, yaml
cfg = yaml.safe_load(open("config.yaml"))
scaler = torch.amp.GradScaler("cuda", enabled=cfg["amp"] == "fp16")
for epoch in range(3):
    for batch in loader:
        with torch.autocast("cuda", enabled=cfg["amp"] == "fp16"):
            loss = model(batch.cuda(non_blocking=True))
        scaler.scale(loss).backward()
"""


def test_amp_true_and_a_script_that_asks_for_a_word(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("amp: true\n")
    line = line_of(check_script(written(tmp_path, COMPARED), config=config), "mixed precision")
    assert (line.status, line.fix, line.where) == (FAIL, "amp: fp16", f"{config}:1")


# ---------------------------------------------------------------- the script's flags

FLAGS = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("-j", "--num-workers", type=int, default=4)
parser.add_argument("--pin", action=argparse.BooleanOptionalAction)
args = parser.parse_args()
"""


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (("--num-wrkers", "0"), "--num-workers"),
        (("--num_workers=0",), "--num-workers"),
        (("--num-workers", "0", "-j4", "--no-pin"), None),
        (("--num-w", "0"), None),  # argparse completes it
        (("--deepspeed_config", "a.json"), None),  # another package may declare it
    ],
)
def test_a_flag_that_is_misspelt_is_found(tmp_path: Path, flags: tuple[str, ...], fix: str | None) -> None:
    line = line_of(check_script(written(tmp_path, FLAGS), *flags), "flags")
    assert (line.status, line.fix) == ((FAIL, fix) if fix else (NOT_APPLICABLE, None))


def test_flags_that_the_script_passes_on_are_not_called_misspelt(tmp_path: Path) -> None:
    script = written(tmp_path, FLAGS.replace("parse_args", "parse_known_args"))
    assert line_of(check_script(script, "--num-wrkers", "0"), "flags").status == NOT_APPLICABLE


# ---------------------------------------------------------------- the five workloads, on sixteen cores


@pytest.mark.parametrize(
    ("workload", "mistakes"),
    [
        ("gray", {"workers", "pin_memory", "mixed precision"}),
        ("stock", {"pin_memory", "persistent_workers", "mixed precision"}),
        ("segment", {"mixed precision"}),
        ("captcha", {"mixed precision", "TF32", "cuDNN benchmark", "compile", "workers", "host waits"}),
    ],
)
def test_the_workloads_mistakes_are_found_and_no_others(workload: str, mistakes: set[str]) -> None:
    config = WORKLOADS / workload / "config.yaml"
    checklist = check_script(WORKLOADS / workload / "train.py", config=config if config.exists() else None)
    assert set(complaints(checklist)) == mistakes


def test_the_fix_is_a_value_for_this_machine() -> None:
    captcha = WORKLOADS / "captcha"
    small = make_budget(cores=12, cores_allowed=14.0)
    line = line_of(check_script(captcha / "train.py", config=captcha / "config.yaml", budget=small), "workers")
    assert line.reason == "num_workers=28, but this process may use 14 cores: 12 for loading"
    assert line.fix == "num_workers: 12"


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
    "options that are changed later": """
from torch.utils.data import DataLoader
options = {"num_workers": 64, "batch_size": 8}
options["num_workers"] = pick()
loader = DataLoader(train_set, **options)
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
    "losses that are kept for one batch, or without their graphs": """
import torch
for epoch in range(3):
    for batch in loader:
        parts = []
        with torch.autocast("cuda"):
            for part in batch.cuda(non_blocking=True):
                loss = model(part)
                parts.append(loss)
                seen.append(loss.detach())
                with torch.no_grad():
                    total += loss
        loss = loss + penalty
        loss.backward()
        optimizer.step()
""",
    "a sampler in other hands": """
import lightning
from torch.utils.data import DataLoader, DistributedSampler
sampler = DistributedSampler(train_set)
""",
    "nothing but an import": "import torch",
}


@pytest.mark.parametrize("text", QUIET.values(), ids=QUIET.keys())
def test_there_is_no_warning_where_the_check_cannot_tell(tmp_path: Path, text: str) -> None:
    assert complaints(check_script(written(tmp_path, text), gpus=None)) == {}


# ---------------------------------------------------------------- frameworks


CONDITIONAL = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--use_amp", action="store_true", default=False)
args = parser.parse_args()
compile = False
for batch in loader:
    if args.use_amp:
        with torch.cuda.amp.autocast():
            loss = model(batch)
            losses.append(loss.item())
    else:
        loss = model(batch)
        losses.append(loss.item())
    if compile:
        torch.compile(model)
    loss.backward()
"""


def test_what_stands_under_a_switch_that_is_off_is_not_in_force(tmp_path: Path) -> None:
    """GIVEN autocast under a flag that is not given, and `.item()` on both sides of it
    THEN autocast is off, torch.compile is under a variable that a flag turns off, and nothing is said of `.item()`."""
    script = tmp_path / "train.py"
    script.write_text(CONDITIONAL)
    found = check_script(script, "--compile=False")
    precision = line_of(found, "mixed precision")
    assert (precision.status, precision.fix) == (WARN, "--use_amp")
    assert "switched off" in precision.reason
    assert line_of(found, "compile").status == line_of(found, "host waits").status == NOT_APPLICABLE
    assert line_of(check_script(script, "--use_amp"), "mixed precision").status == OK


def test_the_trainers_arguments_and_defaults_are_known(tmp_path: Path) -> None:
    checklist = check_script(
        written(
            tmp_path,
            """
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(bf16=True, dataloader_num_workers=0, per_device_train_batch_size=16)
Trainer(model, arguments, train_dataset=train_set).train()
""",
        )
    )
    assert line_of(checklist, "workers").fix == "dataloader_num_workers=8 to begin with, at most 14"
    assert line_of(checklist, "mixed precision").status == OK
    assert line_of(checklist, "pin_memory").status == OK


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import lightning\nlightning.Trainer(precision='bf16-mixed')", OK),
        ("import lightning\nlightning.Trainer(precision='32-true')", WARN),
        ("from accelerate import Accelerator\nAccelerator(mixed_precision='no')", WARN),
        ("from accelerate import Accelerator\nAccelerator()", NOT_APPLICABLE),
        ("import lightning\nlightning.Trainer(max_epochs=2)", WARN),
        ("import lightning\nlightning.Trainer(plugins=[mixed])", NOT_APPLICABLE),
        ("import lightning\nlightning.Trainer(**options())", NOT_APPLICABLE),
        ("from transformers import Trainer, TrainingArguments\nTrainer(model, TrainingArguments('out'))", WARN),
        ("from transformers import TrainingArguments\nTrainingArguments('out', bf16=False)", WARN),
        ("from transformers import TrainingArguments\nTrainingArguments('out', fp16=True)", OK),
        ("from transformers import TrainingArguments\nTrainingArguments('out', bf16=pick())", NOT_APPLICABLE),
        ("from mine import TrainingArguments\nTrainingArguments('out')", NOT_APPLICABLE),
        (
            "from transformers import TrainingArguments\nTrainingArguments('out')\n"
            "AutoModel.from_pretrained(name, torch_dtype='bfloat16')",
            NOT_APPLICABLE,
        ),
    ],
)
def test_frameworks_are_asked_for_their_precision(tmp_path: Path, text: str, status: str) -> None:
    assert line_of(check_script(written(tmp_path, text)), "mixed precision").status == status


MODULE = """
import lightning
class Net(lightning.LightningModule):
    def training_step(self, batch, index):
        images, labels = batch
        loss = self.criterion(self.net(images), labels)
        self.history.append(loss.item())
        return loss
"""


def test_a_lightning_module_is_looked_into(tmp_path: Path) -> None:
    assert line_of(check_script(written(tmp_path, MODULE)), "host waits").status == WARN


# ---------------------------------------------------------------- mistakes of the person


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("train.py", "def f(:\n", "train.py:1: not Python"),
        ("train.py", None, "no such file"),
        ("train.yaml", "a: [1\nb: {\n", "not YAML"),
        ("train.yaml", "- 1\n- 2\n", "holds no settings"),
        ("train.json", '{"a": }', "not JSON"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    script, config = (path, None) if path.suffix == ".py" else (None, path)
    with pytest.raises(UsageError, match=complaint) as raised:
        check_script(script, config=config)
    assert "\n" not in str(raised.value)
