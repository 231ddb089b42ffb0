"""What a config may say, and what is said of one that is wrong."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from engine_toy import CONFIG
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout import cli
from flatout.engine.assemble import main
from flatout.engine.config import PRESETS, Config, as_yaml, load, without_effect
from flatout.model.errors import FlatoutError, UsageError


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("true", "bf16"), ("on", "bf16"), ("'bf16'", "bf16"), ("false", "off"), ("fp16", "fp16"),
        ("off", "off"), ("'off'", "off"), ("tf32", "tf32"),
    ],
)  # fmt: skip
def test_a_precision_means_what_a_person_means(config: Path, said: str, meant: str) -> None:
    assert load(config, [f"train.precision={said}"]).train.precision == meant


def test_a_file_then_a_preset_then_the_command_line(config: Path) -> None:
    loaded = load(config, ["train.accumulate=2"], preset="small-memory")
    assert (loaded.train.batch_size, loaded.train.accumulate, loaded.data.workers) == (64, 2, 2)
    assert loaded.train.epochs == 3


def test_every_value_of_every_preset_takes_effect(config: Path) -> None:
    for name, values in PRESETS.items():
        loaded = load(config, preset=name)
        for key, value in values.items():
            found: Any = loaded
            for part in key.split("."):
                found = getattr(found, part)
            assert found == value


def test_numbers_as_people_write_them_and_how_often(config: Path) -> None:
    loaded = load(config, ["optimizer.args.lr=3e-4", "evaluate.every=2 epochs", "checkpoint.every=never"])
    assert loaded.optimizer.args["lr"] == 3e-4
    assert loaded.evaluate.every == "2 epochs"
    assert loaded.checkpoint.every is None
    assert load(config, ["evaluate.every=0.5 minutes"]).evaluate.every == "0.5 minutes"


def test_the_effective_config_is_a_config_again(config: Path, tmp_path: Path) -> None:
    first = load(config, ["evaluate.every=10 minutes", "train.compile=max-autotune"])
    again = tmp_path / "again.yaml"
    again.write_text(as_yaml(first, secrets=True))
    assert load(again) == first


WRONG = [
    ("train.batchsize=3", "there is no setting train.batchsize; did you mean train.batch_size?"),
    ("batch_size=3", "there is no setting batch_size; did you mean train.batch_size?"),
    ("modle=a:b", "there is no setting modle; did you mean model?"),
    ("train.precision=bf-16", "train.precision must be one of auto, off, tf32, bf16, fp16; did you mean bf16?"),
    ("train.batch_size=many", "train.batch_size must be a valid integer or 'auto' (got 'many')"),
    ("train.batch_size=-1", "train.batch_size must be greater than or equal to 1 or 'auto' (got -1)"),
    ("train.epochs=true", "train.epochs must be a valid integer (got True)"),
    ("train.compile=fast", "train.compile must be a valid boolean or 'auto', 'reduce-overhead', "),
    ("train.device=tpu", "train.device must be auto, cpu, cuda or cuda:N (got 'tpu')"),
    ("train=fast", "train must be a valid dictionary (got 'fast')"),
    ("model=3", "model must be an import path, or factory and args (got 3)"),
    ("model=torch", "model must be an import path such as package.module:name (got 'torch')"),
    ("evaluate.every=5", 'evaluate.every must be such as "5 epochs", "1000 steps", "10 minutes" or never (got 5)'),
    ("evaluate.every=0.5 epochs", "evaluate.every must be such as"),
    (
        "checkpoint.best=acuracy",
        "checkpoint.best must be one of loss, accuracy (got 'acuracy'); did you mean accuracy?",
    ),
    ("train.lr_rule=sqrt", "train.lr_rule needs train.lr_batch"),
    ("train.accumulate=9", "train.accumulate must be at most train.batch_size (got 9)"),
    ("epochs", "'epochs' is not key=value, such as train.batch_size=256"),
    ("train.=3", "'train.=3' is not key=value"),
    ("train.epochs=[", "expected the node content"),
    # what only building the parts can tell
    ("model=engine_toys:Net", "model.factory: there is no module 'engine_toys'"),
    ("model=engine_toy:Nett", "model.factory: engine_toy has no 'Nett'; did you mean Net?"),
    ("model.args.hiden=3", "model.args: Net got an unexpected keyword argument 'hiden'; did you mean hidden?"),
    ("model=engine_toy:not_a_data_set", "model: expected a torch.nn.Module, int is none"),
    ("model=engine_toy:seen", "cannot be called"),
    ("model=torch.nn:Identity", "model: it has no parameter to train"),
    ("data.train=engine_toy:not_a_data_set", "data.train: expected a data set, int is none"),
    ("data.train=engine_toy:nothing", "data.train: expected a data set, NoneType is none"),
    ("data.val=engine_toy:nothing", "data.val: expected a data set, NoneType is none"),
    ("criterion=engine_toy:a_number", "criterion: expected something that can be called (got 3)"),
    ("log.mlflow=true", "log.mlflow: mlflow is not installed"),
    ("data.collate=engine_toy:colate", "data.collate: engine_toy has no 'colate'"),
    ("optimizer=torch.nn:Identity", "optimizer: expected a torch.optim.Optimizer"),
    ("train.batch_size=65", "train.batch_size: 65 is more than the 64 samples of data.train"),
    ("train.precision=fp16", "train.precision: fp16 needs a GPU"),
    ("train.checkpoint_activations=[layer.*]", "no module is called 'layer.*'; did you mean layers"),
    ("train.batch_size=100000000000000000000", "train.batch_size must be less than or equal to"),
]


Train = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def train(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    """`flatout train` of the toy config in this process, in tmp_path: exit code, stdout and stderr."""

    def run(*words: str) -> tuple[Any, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["flatout", "train", "--here", str(config), *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("override", "complaint"), WRONG)
def test_a_wrong_config_is_one_line_and_exit_code_2(
    train: Train, tmp_path: Path, override: str, complaint: str
) -> None:
    code, out, err = train(override)
    assert (code, out) == (2, "")
    assert complaint in err
    assert err.startswith("flatout: ")
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("override", "complaint", "where"),
    [
        ("model.args.hidden=wide", "model: Net failed: TypeError: ", "engine_toy.py"),
        ("model=engine_toy:gives_up", "model: gives_up failed: SystemExit: 7", "engine_toy.py"),
        ("model=lacking:Net", "model.factory: lacking cannot be imported: ModuleNotFoundError: ", "lacking.py"),
        ("model=raising:Net", "model.factory: raising cannot be imported: ZeroDivisionError: ", "raising.py"),
        ("model=broken:Net", "model.factory: broken cannot be imported: SyntaxError: ", "broken.py"),
    ],
)
def test_a_part_that_fails_is_named_after_the_traceback_of_its_own_code(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, complaint: str, where: str
) -> None:
    for name, text in (("lacking", "import not_there"), ("raising", "1 / 0"), ("broken", "def")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = train(override, "--explain")
    *trace, last = err.splitlines()
    assert code == 2
    assert last.startswith(f"flatout: {complaint}")
    assert where in "".join(trace)


def test_secrets_are_saved_for_their_owner_and_not_shown(
    config: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "private.py").write_text(
        "from engine_toy import Points\n"
        "def points(api_key, **_): return Points(seed=len(api_key))\n"
        "def refused(api_key, **_): raise ValueError(f'no entry with api_key={api_key}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    secret = ("data.train.args.api_key=LEAK", "data.train.args.eos_token=FINE", "log.quiet=false")
    # What is shown has none.
    code, out, err = train("data.train.factory=private:points", *secret, "--explain")
    assert (code, "LEAK" in out + err, "api_key: '***'" in out, "eos_token: FINE" in out) == (0, False, True, True)
    # Nor has a complaint, with the traceback of the person's own code.
    code, out, err = train("data.train.factory=private:refused", *secret)
    assert (code, "LEAK" in out + err, "in refused" in err) == (2, False, True)
    code, out, err = train("train.password=LEAK")
    assert (code, "LEAK" in out + err) == (2, False)
    # Nor does a tracker get one.
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    words = ["data.train.factory=private:points", *secret, f"out={tmp_path / 'run'}", "log.wandb=true"]
    main(config, words, preset=None, resume=False, explain=False, record=False)
    told = wandb.init.call_args.kwargs["config"]["data"]["train"]["args"]
    assert told == {"api_key": "***", "eos_token": "FINE"}
    # The copy that a run can be repeated from is whole, and nobody else's to read.
    kept = tmp_path / "run" / "config.yaml"
    assert yaml.safe_load(kept.read_text())["data"]["train"]["args"]["api_key"] == "LEAK"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert "LEAK" not in capsys.readouterr().out


def test_no_setting_of_flatouts_own_is_taken_for_a_secret(config: Path) -> None:
    assert as_yaml(load(config), secrets=False) == as_yaml(load(config), secrets=True)


def test_settings_without_effect_are_reported_line_by_line(config: Path) -> None:
    idle = ["data.val=null", "metrics={}", "evaluate.every=2 epochs", "train.memory_share=0.5", "train.lr_batch=64"]
    idle += ["train.scheduler_per=epoch", "checkpoint.every=never", "checkpoint.keep=3"]
    told = list(without_effect(load(config, idle)))
    assert [line.partition(" ")[0] for line in told] == [
        "evaluate.every", "train.memory_share", "train.lr_batch", "train.scheduler_per", "checkpoint.keep",
    ]  # fmt: skip
    assert told[0] == "evaluate.every has no effect: there is no data.val"
    assert list(without_effect(load(config))) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected a mapping of settings"),
        ("- 1\n", "expected a mapping of settings"),
        ("train: {epochs: 1}\ntrain: {epochs: 2}\n", "line 2: train is there twice"),
        ("train: [\n", "line 2"),
        ("\t", "line 1"),
        ("a: &a [*a]\n", "line 1: *a contains itself"),
        ("train: {epochs: 1}\n", "model is missing"),
        ("1: 2\n", "expected a mapping of settings"),
        ("? [1, 2]\n: 3\n", "line 1"),
        ("a: 2001-99-99\n", "line 1: '2001-99-99' is not a valid timestamp"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load(path)
    assert str(raised.value).startswith(str(path))
    assert complaint in str(raised.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such file: .*nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not text in UTF-8"):
        load(tmp_path / "bytes.yaml")


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["a:b", "auto"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
KEYS = st.sampled_from(
    [f"{section}.{key}" for section, field in Config.model_fields.items()
     for key in (*getattr(field.annotation, "model_fields", {}), "factory", "args", "new")]
    + list(Config.model_fields)
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=3))
def test_any_value_under_any_key_is_a_config_or_one_clear_line(config: Path, changes: list[tuple[str, Any]]) -> None:
    overrides = [f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**6)}" for key, value in changes]
    _loads_or_complains(config, overrides)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="train:{}[]&*!|>-'\"#%@ \n\t,0.1eE+~?", max_size=40), place=st.integers(0, len(CONFIG)))
def test_any_text_in_a_file_is_a_config_or_one_clear_line(tmp_path: Path, text: str, place: int) -> None:
    path = tmp_path / "fuzzed.yaml"
    path.write_text(CONFIG[:place] + text + CONFIG[place:])
    _loads_or_complains(path, [])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(override=st.text(max_size=20) | st.from_regex(r"[a-z.]{0,12}=[^\n]{0,12}", fullmatch=True))
def test_any_word_on_the_command_line_is_an_override_or_one_clear_line(config: Path, override: str) -> None:
    _loads_or_complains(config, [override])


def _loads_or_complains(path: Path, overrides: list[str]) -> None:
    try:
        found: Config | UsageError = load(path, overrides)
    except UsageError as problem:
        found = problem
    assert isinstance(found, Config) or (found.exit_code == 2 and len(str(found).strip()) > 10)


def test_explain_says_what_is_in_force_and_trains_nothing(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ["train.precision=tf32", "train.channels_last=true", "log.quiet=false"]
    main(config, wanted, preset=None, resume=False, explain=True, record=False)
    out = capsys.readouterr().out
    assert "train.precision: off  (only NVIDIA GPUs have TF32: plain fp32 on cpu)" in out
    assert "train.channels_last: off  (there is no 2-d convolution)" in out
    assert yaml.safe_load(out[out.index("\ntrain:") :])["train"]["batch_size"] == 8
    assert not (tmp_path / "runs").exists()


TOKENS = [
    "[", "]", "{", "}", ":", "\n", "  ", "&a ", "*a", "!!int ", "!!set ", "<<: ", "2001-99-99", "1e999", ".nan", "-1",
    "true", "null", "'", "engine_toy:Stream", "engine_toy:nothing", "engine_toy:a_number", "torch.nn:Linear", "auto",
    "{factory: 3}", "{factory: engine_toy:Net, args: {hidden: {factory: a b}}}", "epochs: 0", "{steps}", "é", "0",
]  # fmt: skip


def test_whatever_is_in_a_config_explain_prints_it_or_one_clear_line(
    config: Path, tmp_path: Path, mutated: Callable[[str, list[str], int], Iterator[str]]
) -> None:
    explained = 0
    for text in mutated(CONFIG, TOKENS, 250):
        config.write_text(text.replace("batch_size: auto", ""))
        try:
            main(config, ["train.device=cpu"], preset=None, resume=False, explain=True, record=False)
            explained += 1
        except FlatoutError as problem:
            refused = problem
            words = " ".join(str(refused).split())
            assert (refused.exit_code, 10 < len(words) < 1500) == (2, True), words[:300]
    assert 10 < explained < 240


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ("{factory: a b}", "model.args.hidden: factory must be an import path such as package.module:name (got 'a b')"),
        ("{factory: 3}", "model.args.hidden: factory must be a valid string (got 3)"),
        ("{factory: 'builtins:int', args: 3}", "model.args.hidden: args must be a valid dictionary (got 3)"),
    ],
)
def test_a_part_among_the_arguments_is_checked_as_any_other(config: Path, part: str, complaint: str) -> None:
    with pytest.raises(UsageError) as raised:
        main(config, [f"model.args.hidden={part}"], preset=None, resume=False, explain=True, record=False)
    assert str(raised.value) == complaint
