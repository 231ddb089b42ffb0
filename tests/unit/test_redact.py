"""What is hidden, and what is not, in whatever form it comes."""

from __future__ import annotations

import enum
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from planted import HARMLESS_NAMES, HARMLESS_SHAPES, NAMES, SHAPES, Planted, found, look_alikes, secrets

from flatout.redact import HIDDEN, redact_code, redact_command, redact_setting, redact_text

SECRETS = secrets(len(NAMES) + len(SHAPES))
LOOK_ALIKES = look_alikes(len(HARMLESS_NAMES) + len(HARMLESS_SHAPES))


def in_command(*words: str) -> str:
    return "\n".join(redact_command(words))


def in_setting(values: Any) -> str:
    return json.dumps(redact_setting("", values), ensure_ascii=False)


# Every way in which a name and a value come together.
PLACES: dict[str, Callable[[Planted], str]] = {
    "option and value": lambda one: in_command("train.py", f"--{one.name}", one.value, "--lr", "0.1"),
    "option=value": lambda one: in_command("train.py", f"--{one.name}={one.value}"),
    "NAME=value command": lambda one: in_command("env", f"{one.name}={one.value}", "python", "train.py"),
    "override": lambda one: in_command("train.py", f"+data.{one.name}={one.value}"),
    "shell": lambda one: in_command("bash", "-c", f"cd /x && {one.name}={shlex.quote(one.value)} python train.py"),
    "option in a shell": lambda one: in_command("bash", "-c", f"python t.py --{one.name} {shlex.quote(one.value)}"),
    "JSON argument": lambda one: in_command("--config", json.dumps({one.name: one.value})),
    "header": lambda one: in_command("curl", "-H", f"{one.name}: {one.value}"),
    "setting": lambda one: in_setting({"lr": 0.1, one.name: one.value}),
    "nested": lambda one: in_setting({"a": [{"b": ({one.name: one.value},)}]}),
    "pair": lambda one: in_setting({"env": [{"name": one.name, "value": one.value}]}),
    "list of arguments": lambda one: in_setting(["--lr", "0.1", f"--{one.name}", one.value]),
    "list of NAME=value": lambda one: in_setting({"variables": [f"{one.name}={one.value}"]}),
    "first of two": lambda one: in_setting({"variables": [f"{one.name}={one.value}", "A=1"]}),
    "first of two words": lambda one: in_command(f"--{one.name}={one.value}", "a"),
    "first of two headers": lambda one: in_setting({"headers": [f"{one.name}: {one.value}", "A: 1"]}),
    "command in a setting": lambda one: in_setting({"run": f"python t.py --{one.name} {shlex.quote(one.value)}"}),
    "path": lambda one: in_setting({one.name: Path(one.value)}),
    "exception": lambda one: redact_text(f"ValueError: cannot log in with {one.name}={one.value}"),
    "repr": lambda one: redact_text(repr({one.name: one.value, "lr": 0.1})),
    "repr of arguments": lambda one: redact_text(f"Command {['t.py', f'--{one.name}', one.value]} failed"),
    "JSON text": lambda one: redact_text(json.dumps({"lr": 0.1, one.name: one.value}, separators=(",", ":"))),
    "JSON pair": lambda one: redact_text(json.dumps([{"name": one.name, "value": one.value}])),
    "YAML text": lambda one: redact_text(yaml.safe_dump({one.name: one.value}, default_style="|")),
    "assignment": lambda one: redact_text(f"os.environ['{one.name}'] = {one.value!r}"),
}


@pytest.mark.parametrize("place", PLACES)
def test_no_secret_comes_out_of(place: str) -> None:
    shown = [PLACES[place](one) for one in SECRETS]
    assert not found("\n".join(shown), SECRETS)
    assert all(HIDDEN in text for text in shown)  # hidden, and not lost with all else


@pytest.mark.parametrize("place", PLACES)
def test_no_look_alike_is_lost_in(place: str) -> None:
    shown = "\n".join(PLACES[place](one) for one in LOOK_ALIKES)
    assert {one.name for one in LOOK_ALIKES if one.marker not in shown} == set()


def test_there_are_200_look_alikes_and_60_spellings() -> None:
    assert len({one.name for one in LOOK_ALIKES}) == len(LOOK_ALIKES) >= 200
    assert len(set(NAMES)) + len(set(SHAPES)) == len(SECRETS) >= 60


def test_what_stands_beside_a_secret_comes_out() -> None:
    command = ("python", "-u", "train.py", "--api-key", "abc", "--lr", "0.1", "--user", "me:abc", "--out=runs")
    hidden = ("python", "-u", "train.py", "--api-key", HIDDEN, "--lr", "0.1", "--user", f"me:{HIDDEN}", "--out=runs")
    assert redact_command(command) == hidden
    url = "postgres://me:abc@db:5432/runs"
    assert redact_setting("", {"db": {"url": url, "pool": 5}}) == {
        "db": {"url": f"postgres://{HIDDEN}@db:5432/runs", "pool": 5}
    }
    assert redact_text("https://host/x?sig=abc&part=2") == f"https://host/x?sig={HIDDEN}&part=2"
    assert redact_text("Namespace(token='a b', lr=0.1)") == f"Namespace(token={HIDDEN}, lr=0.1)"
    assert redact_text("the password is hunter2, says me") == f"the password is {HIDDEN}, says me"


@pytest.mark.parametrize(
    "text",
    [
        "Incorrect API key provided: LEAK12345",
        "invalid api_key provided: LEAK",
        "login failed with password 'LEAK x'",
        "wandb login 0123456789abcdefLEAK && python train.py",
        "{'headers': [('X-Api-Key', 'LEAK')]}",
        "auth=('me', 'LEAK')",
        "password -> LEAK",
        "Cookie: a=LEAK; b=LEAK",
        "Server=db;User Id=me;Password=LEAK;",
        "https://h/?access_token=LEAK#x",
        "mongodb+srv://me:p@LEAK@h.net/db",
        'the command {"name": "HF_TOKEN", "value": "LEAK"} failed',
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nLEAK\n-----END PGP PRIVATE KEY BLOCK-----",
    ],
)
def test_the_ways_in_which_programs_tell_a_secret(text: str) -> None:
    assert HIDDEN in redact_text(text)
    assert "LEAK" not in redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        'File "secret.py", line 12, in get_token',
        "auth.py:12: error, and credentials.json:3 too",
        "KeyError: 'eos_token'",
        "Missing key: layer1.0.weight",
        "unknown special tokens ['eos_token', 'pad_token']",
        "epoch 3  step 40  loss 0.25  tokens/s: 4096  12:30:05",
        "forward pass: 3.2 ms, backward pass: 5.1 ms",
        "kubectl run image:v1@sha256:0f0f0f",
        "password file is missing",
        "self.average[key] = self.total[key] / self.counts[key]",
    ],
)
def test_what_programs_say_otherwise_is_left_alone(text: str) -> None:
    assert redact_text(text) == text


WITH_A_PASSWORD = (
    "sshpass -p LEAKx7Q ssh -p 22 host",
    "sshpass -v -pLEAKx7Q rsync a b",
    "sudo /usr/bin/sshpass -p LEAKx7Q ssh host",
    "mysql -uroot -pLEAKx7Q db",
    "mysqldump --opt -h host -pLEAKx7Q db",
    "curl -sS -ume:LEAKx7Q https://x",
    "curl -u me:LEAKx7Q https://x",
    "wandb login --relogin LEAKx7Q0123456789abcdef0123456789abcdef",
)


@pytest.mark.parametrize("line", WITH_A_PASSWORD)
def test_passwords_that_only_their_program_knows(line: str) -> None:
    words = line.split()
    assert in_command(*words).count("LEAK") == 0
    assert in_command("bash", "-c", f"cd /x && {line}; python train.py").count("LEAK") == 0
    assert redact_text(str(subprocess.CalledProcessError(1, words))).count("LEAK") == 0
    assert len(redact_command(words)) == len(words)
    assert words[-1] in redact_text(line) or "wandb" in line


@pytest.mark.parametrize(
    "line",
    ["mysql -p db", "mysql -P 3306 db", "sshpass -e ssh -p 22 host", "curl -u me https://x", "wandb login --relogin",
     "docker run -p 8080:80 mysql", "mkdir -p out/mysql; python t.py -p0.5", "mysql db; srun -pgpu python t.py"],
)  # fmt: skip
def test_options_of_these_names_that_hold_no_password(line: str) -> None:
    assert in_command(*line.split()) == "\n".join(line.split())
    assert redact_text(line) == line


@pytest.mark.parametrize(
    "line",
    [
        "for pair in sorted(pairs, key=lambda pair: -pair[1]):",
        "out = attention(query, key=key, value=value)",
        "token = tokens[i]",
    ],
)
def test_code_that_writes_nothing_out_is_shown(line: str) -> None:
    assert redact_code(line) == line


CODE_WITH_SECRETS = ["api_key = 'x81hd'", "login(token=881723)", "pw: hunter2", "log(x)  # password hunter2"]


@pytest.mark.parametrize("line", CODE_WITH_SECRETS)
def test_what_code_writes_out_is_hidden_by_its_name(line: str) -> None:
    assert HIDDEN in redact_code(line)


def test_a_folder_called_secrets_is_no_secret() -> None:
    for command in (["/me/secrets/bin/python3", "train.py"], ["ls", "/me/secrets/day=3/part"], ["/me/auth/run", "x"]):
        assert redact_command(command) == tuple(command)


def test_lists_of_names_are_left_alone() -> None:
    values = {"columns": ["token", "pos"], "roles": ["key", "value", "query"], "names": ["image_key", "label_key"]}
    assert redact_setting("", values) == values
    assert redact_setting("", [["password", "abc"], ["user", "me"]]) == [["password", HIDDEN], ["user", "me"]]


def test_a_line_of_shell_keeps_its_command() -> None:
    shown = redact_command(["bash", "-c", "HF_TOKEN=abc python train.py --lr 0.1"])
    assert shown == ("bash", "-c", f"HF_TOKEN={HIDDEN} python train.py --lr 0.1")
    assert redact_command(["t", "--password=my pass phrase"]) == ("t", f"--password={HIDDEN}")


def test_an_option_without_a_value_hides_no_other_option() -> None:
    assert redact_command(["t", "--use-auth", "--lr", "0.1"]) == ("t", "--use-auth", "--lr", "0.1")
    assert redact_command(["t", "--password", "-secret-"]) == ("t", "--password", HIDDEN)


def test_whether_there_is_a_secret_is_none() -> None:
    values = {"use_auth_token": True, "password": None, "api_key": "", "private": False}
    assert redact_setting("", values) == values
    assert redact_text("Namespace(token=None, auth=False)") == "Namespace(token=None, auth=False)"


def test_numbers_are_hidden_by_name_and_kept_otherwise() -> None:
    assert redact_setting("", {"password": 12345, "max_tokens": 5, "lr": 0.1}) == {
        "password": HIDDEN,
        "max_tokens": 5,
        "lr": 0.1,
    }


def test_of_an_object_only_its_type_is_told() -> None:
    class Client:
        def __repr__(self) -> str:
            return "LEAK"

    Kind = enum.Enum("Kind", "A B")
    assert redact_setting("client", [Client(), Kind.A]) == ["Client", "Kind.A"]


def test_the_tail_of_a_key_is_hidden_too() -> None:
    """Output is kept from its end: the line that says that a key begins may be cut off."""
    assert redact_text("MIIEpAIBAAKC\nLEAK\n-----END RSA PRIVATE KEY-----\ntrained") == f"{HIDDEN}\ntrained"
    assert redact_text("-----BEGIN PRIVATE KEY-----\nLEAK\nLE") == HIDDEN


@pytest.mark.parametrize("secret", SECRETS, ids=lambda one: one.name)
def test_what_is_hidden_stays_as_it_is_when_hidden_again(secret: Planted) -> None:
    once = redact_command(["t.py", f"--{secret.name}={secret.value}", f"--{secret.name}", secret.value, secret.value])
    assert redact_command(once) == once


def test_a_long_text_of_any_kind_is_gone_through_once() -> None:
    """A pattern that goes back over what it has seen would take hours over one of these."""
    pieces = (
        "a",
        "a=",
        "password=",
        "sk-",
        "://a:",
        "eyJabcdef",
        "'\"",
        "--a ",
        "?a=",
        "me:",
        "\\",
        'key="',
        ") ",
        "x.",
        "mysql ",
        "curl a ",
        "sshpass -v ",
        "wandb login a ",
    )
    for piece in pieces:
        text = piece * (60_000 // len(piece))
        assert redact_text(text).startswith(piece[0])


def test_it_is_cheap_to_import() -> None:
    script = "import sys, flatout.redact; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "yaml", "json", "asyncio"} & set(modules)
