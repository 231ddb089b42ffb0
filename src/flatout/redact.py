"""Hides secrets: commands, settings and texts pass through here on their way to a trace, a report or
a terminal.

A secret is known by the words of its name (`openaiKey`, `--hf-token`, `DB_PASS`) or by the shape of its value
(`Bearer …`, `ghp_…`, a password in a URL). In doubt it is hidden. What has neither such a name nor such a
shape comes out, so a file that keeps a whole config or a program's output is `files.PRIVATE`.

Standard library only: it is at work in the user's process before torch is imported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import pairwise
from pathlib import PurePath
from typing import Any

__all__ = ["HIDDEN", "redact_code", "redact_command", "redact_setting", "redact_text"]

HIDDEN = "***"


def redact_command(words: Sequence[str]) -> tuple[str, ...]:
    """A command without secrets: `--opt value`, `--opt=value`, `NAME=value`, also in a `bash -c "…"`."""
    return tuple(_redacted_list("", _without_programs_secrets(words)))


def redact_setting(name: str, value: Any) -> Any:
    """A setting as plain data without secrets, also in lists and mappings; of an object its type alone."""
    if _is_blank(value):
        return value
    if _is_secret(name):
        return HIDDEN
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return _redacted_mapping(value)
    if isinstance(value, list | tuple):
        return _redacted_list(name, value)
    return _redacted_word(name, str(value)) if isinstance(value, str | PurePath | Enum) else type(value).__name__


def redact_text(text: str) -> str:
    """Any text without secrets: an exception's, what a program has printed, a line of shell."""
    end = _KEY_BLOCK_ENDS.search(text)
    # This is the end of a longer text, which was cut inside a key.
    if end is not None and "-----BEGIN" not in text[: end.start()]:
        text = HIDDEN + text[end.end() :]
    text = _BY_PROGRAM.sub(rf"\1{HIDDEN}", text)
    text = _SHAPES.sub(HIDDEN, text)
    text = _AFTER_SCHEME.sub(rf"\1\2{HIDDEN}", text)
    text = _LOGIN_IN_URL.sub(rf"\1{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    return _SPOKEN.sub(rf"\1\2{HIDDEN}", _without_values(text))


def redact_code(line: str) -> str:
    """A line of Python without secrets: where nothing but names and small numbers is written out,
    there is none."""
    import ast  # seldom needed

    for code in (line, f"{line} pass"):  # the second is for the head of a loop
        with suppress(SyntaxError, ValueError):
            if "#" not in line and not any(map(_may_hold_a_secret, ast.walk(ast.parse(code)))):
                return _SHAPES.sub(HIDDEN, line)
    return redact_text(line)


def _may_hold_a_secret(part: Any) -> bool:
    """Whether a part of a syntax tree is written-out text or a long number; `pw: hunter2` may be a
    line of a text."""
    value = getattr(part, "value", None)
    is_text = isinstance(value, str | bytes) or type(part).__name__ == "AnnAssign"
    return is_text or (isinstance(value, int) and value > 999)


# --- settings -----------------------------------------------------------------------------------------------

_OPTION_WORD = re.compile(r"--?[A-Za-z][\w.-]*")
# This is another option, not the value of the one before.
_NO_VALUE = re.compile(r"--[A-Za-z][\w.-]*|-[A-Za-z]")
_SHELL = re.compile(r"-[a-z]{0,3}c")  # what follows is a line of shell: bash -lc "…"
_PAIR = re.compile(r"([\w.@/+~-]+)=(.*)", re.S)
_BARE_NAME = re.compile(r"[\w.@/+~-]+")
_LOGIN = re.compile(r"([^\s:@/]+):(?!//)(?!\d+$)\S+")
_LOGINS = {"u", "user", "username", "login", "userpwd"}
# As in {"name": "password", "value": "x"}.
_NAMED_BY = {"name", "key", "var", "variable", "env", "field", "header", "option"}
_VALUED_BY = {"value", "val", "values", "default", "content", "data", "text"}
_BLANK = {"", "true", "false", "yes", "no", "none", "null", "value", HIDDEN}


def _is_blank(value: Any) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, str) and value.lower() in _BLANK)


def _redacted_word(name: str, text: str) -> str:
    if _is_secret(name):
        return HIDDEN
    login = _LOGIN.fullmatch(text) if _is_login(name) else None
    if login is not None:
        return f"{login[1]}:{HIDDEN}"
    pair = _PAIR.fullmatch(text) if not _SHELL.fullmatch(name) else None
    return f"{pair[1]}={redact_setting(pair[1], pair[2])}" if pair is not None else redact_text(text)


def _redacted_list(name: str, items: Sequence[Any]) -> list[Any]:
    """The items of a list of this name; they may be a command, or a name and its value."""
    if len(items) == 2 and isinstance(items[0], str) and _is_bare_name(items[0]) and _is_surely_secret(items[0]):
        return [items[0], redact_setting(items[0], items[1])]
    shown, option = [], ""
    for item in items:
        word = item if isinstance(item, str) else ""
        shown.append(redact_setting(name if _NO_VALUE.fullmatch(word) else option or name, item))
        option = word if _OPTION_WORD.fullmatch(word) else ""
    return shown


def _without_programs_secrets(words: Sequence[str]) -> list[str]:
    """A command without what this program's arguments are known to hide."""
    hidden = _BY_PROGRAM.sub(rf"\1{HIDDEN}", "\0".join(words)).split("\0")
    return hidden if len(hidden) == len(words) else list(words)  # else there are such letters in the words


def _is_bare_name(text: str) -> bool:
    """Whether this is a name alone: not `HF_TOKEN=x`, no header with its value, no `github_pat_…`."""
    return _BARE_NAME.fullmatch(text) is not None and redact_text(text) == text


def _redacted_mapping(values: Mapping[Any, Any]) -> dict[str, Any]:
    names = (value for key, value in values.items() if str(key).lower() in _NAMED_BY)
    named = next((value for value in names if isinstance(value, str) and _is_secret(value)), "")
    return {
        redact_text(str(key)): redact_setting(named if str(key).lower() in _VALUED_BY and named else str(key), value)
        for key, value in values.items()
    }


# --- names --------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Anywhere in a name, however it is put together.
_ALWAYS = re.compile(
    r"pass_?(?:wd|wor[dt]|phrase|code|key)|secret(?!ar[iy])|credential|api_?key|access_?key|auth_?token"
)
_ALWAYS_WORDS = _set_of(
    """
    auth authorization bearer cookie cookies cred creds csrf dsn jwt oauth otp psw pw pwd totp webhook
    webhooks xsrf
    """
)
# What a name may end with, unless the word before says whose it is.
_AT_THE_END = {"key", "token", "pass", "sig", "signature", "private"}
_ALONE = _AT_THE_END | {"tokens"}
# Words that make a secret of a name together with one of _OWNERS.
_OWNED = {"key", "keys", "token", "tokens", "pass", "pat"}
_OWNERS = _set_of(
    """
    access account admin anthropic api app auth aws azure bot client comet csrf db decryption deploy
    discord encryption ftp gcp gh github gitlab google hf hub huggingface jwt kaggle license mail master
    mysql neptune npm oauth openai personal private proxy pypi refresh root sas secret service session
    shared signing slack smtp ssh storage telegram user wandb
    """
)
# As in DBPASS and hftoken.
_JOINED = re.compile(rf"(?:{'|'.join(sorted(_OWNERS))}|pg|my)(?:key|token|pass|pw|pwd)")
# `eos_token`, `sort_key`, `forward_pass`, `input_signature`: words of models, data and programs.
_HARMLESS_BEFORE = _set_of(
    """
    action answer array attention audio backward band batch bbox begin bos bound box by cache caption cell
    chunk class cls col column concat coord data dataloader dataset decoder depth dict dim doc document
    double dry duplicate each edge element empty encoder end eod eol eom eop eos eot epoch every extra
    feature features fewer field file fill filter fim final first following foreign forward frame full
    graph group head high ignore image img index infix input instruction item join label lang language
    last latent layer left list loader lookup loss low map mask max merge method metric min missing model
    monitor motion multi newline next no null num one output over pad padding pair partition patch per
    pixel point pool pos position prefix prev previous primary prompt public query rank rare reverse right
    row sample scene search segment sentence sep separator seq sequence shard single skip sort source
    special speech split start state step stop subject suffix symbol table tag target task tensor text
    time train two type unexpected unique unk unknown value video view vision visual vocab vq word zero
    """
)
# `password_file`, `auth_type`, `secret_length`: about the secret, not the secret.
_ABOUT = _set_of(
    """
    bits count dim dir enabled expires file filename folder len length limit method mode num path policy
    provider rate required size timeout ttl type
    """
)
_FILES = _set_of("cfg csv ini json md pem py sh toml txt yaml yml")  # `secret.py:12`


def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD.findall(name[:200]))


def _is_login(name: str) -> bool:
    """Whether the value of this name may be `me:password`."""
    return bool(words := _words(name)) and words[-1] in _LOGINS


@functools.lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    """Whether the value of this name is a secret, by the last part of `db.password` or by one above it."""
    parts = [words for words in map(_words, name.rpartition("/")[2].split(".")) if words]
    if not parts or parts[-1][-1] in _ABOUT or (len(parts) > 1 and parts[-1][0] in _FILES):
        return False
    return any(map(_make_a_secret, parts))


def _is_surely_secret(name: str) -> bool:
    """The same where nothing but the name speaks for it: a list may well hold the words `key` and `token`."""
    return _is_secret(name) and not (len(words := _words(name)) == 1 and words[0] in _ALONE)


def _make_a_secret(words: tuple[str, ...]) -> bool:
    if _ALWAYS.search("_".join(words)):
        return True
    if any(word in _ALWAYS_WORDS or _JOINED.fullmatch(word) for word in words):
        return True
    for one, other in pairwise(words):
        if (one in _OWNERS and other in _OWNED) or (one in _OWNED and other in _OWNERS):
            return True
    if len(words) == 1:
        return words[0] in _ALONE
    return words[-1] in _AT_THE_END and words[-2] not in _HARMLESS_BEFORE


# --- texts --------------------------------------------------------------------------------------------------
# Bounded where a pattern may fail after a long look: time grows with the length of a text, no faster.

_KEY_BLOCK_ENDS = re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY[A-Z ]{0,10}-----")
_SHAPES = re.compile(
    r"""-----BEGIN\ [A-Z\d ]{0,30}PRIVATE\ KEY(?s:.*?)(?:-----END[A-Z\d ]{0,50}-----|\Z)
    | \b(?: github_pat_\w{10,} | gh[oprsu]_\w{10,} | gl(?:pat|ptt|dt|rt|cbt|oas)-[\w.-]{10,}
      | hf_[A-Za-z\d]{16,} | r8_\w{16,} | nvapi-[\w-]{16,} | lsv2_\w{16,} | npm_\w{20,} | pypi-[\w-]{16,}
      | sk-(?=[\w-]{0,100}\d)[\w-]{16,} | [rs]k_(?:live|test)_\w{10,} | whsec_[\w+/=]{16,}
      | A(?:KIA|SIA|IDA|ROA)[A-Z\d]{12,} | AIza[\w-]{20,} | ya29\.[\w-]{10,} | GOCSPX-[\w-]{10,}
      | xox[a-z]-[\w-]{10,} | xapp-[\w-]{10,} | SG\.[\w-]{10,}\.[\w-]{10,} | dckr_pat_[\w-]{10,} | dop_v1_\w{16,}
      | shp(?:at|ss)_\w{16,} | AGE-SECRET-KEY-\w{10,} | eyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]*)? | \d{8,10}:[\w-]{35}\b )
    | (?<=hooks\.slack\.com/)[^\s"']+ | (?<=/api/webhooks/)[^\s"']+""",
    re.X,
)
# Programs in whose arguments nothing else shows a secret: as words apart (with \0), in a line of
# shell, or as Python prints a list of words.
_GAP = r"(?:[ \t\0]|\\\n|[\"'],[ ][\"'])+"
_FEW = rf"(?:{_GAP}[^\s\0;|&\"']+){{0,12}}?"
_BY_PROGRAM = re.compile(
    rf"""(?<![\w.-])((?:
        sshpass(?:{_GAP}-[^p\s\0"'][^\s\0"']*){{0,5}}{_GAP}-p(?:{_GAP})?
      | (?:mysql|mysqldump|mysqladmin|mysqlimport|mariadb|mariadb-dump){_FEW}{_GAP}-p
      | curl{_FEW}{_GAP}-u[^\s\0:"']{{1,100}}:
      | wandb{_GAP}login{_FEW}{_GAP}(?=[\w-]{{20}}) ))
      (?:(?<=\0)[^\0]+ | "[^"\0\n]+" | '[^'\0\n]+' | [^\s\0;|&"']+)""",
    re.X,
)
_AFTER_SCHEME = re.compile(
    r"\b((?i:bearer)\s+[\"']?)[\w.~+/=-]+|\b([Bb]asic\s+)(?=[A-Za-z\d+/]{0,100}(?:\d|=|[a-z][A-Z]))[A-Za-z\d+/]{12,}=*"
)
_LOGIN_IN_URL = re.compile(  # one slash is what a Path leaves of two
    r"""(:/{1,2})(?:[^\s/@:"']{0,200}:(?!\d{1,5}(?:[/?\#\s]|\Z))[^\s"'<>]{0,300}@
      | (?:(?<=//)|(?<=[ps]:/))(?!git@)[^\s/@:"']{1,300}@)
    | (?<![\w./])(?!mailto:|file:)[\w.+-]{1,64}:[^\s@/:"']{1,100}@(?!sha256:)(?=[\w-])""",
    re.X,
)
_BLOCK = r"[|>][+-]?\n(?:[ \t]+[^\n]*\n?)+"  # of YAML
_HEADER = re.compile(
    rf"((?:authorization|cookie)2?\\*[\"']?\s{{0,3}}[:=]\s{{0,3}}\\*[\"']?)(?:{_BLOCK}|[^\"'\\\r\n]+)", re.I
)
# Names before a value: `?sig=`, `--password `, `password: `, `"password": "`, `api key: `,
# `os.environ["PW"] = `.
_NAMED = re.compile(
    r"""(?<=[?&])(?P<query>[\w.%-]{1,80}=)
    | (?<![\w-])(?P<option>--?[A-Za-z][\w.-]{0,80})(?:\s+|\\*["']\s?,\s?)
      (?!\\*["']?(?:--[A-Za-z]|-[A-Za-z](?:["'\s]|\Z)))
    | (?<![\w.?&-])(?P<before>[\w-]{1,40}\ )?(?P<name>[\w.@+~-]{1,200})
      [\\"'\])]{0,4}\s{0,3}(?P<gap>[=-]>|:=|==?|:|,(?=\s?(?:"[^"\n]{0,300}"|'[^'\n]{0,300}')[)\]]))\s{0,3}""",
    re.X,
)
_IN_QUERY = re.compile(r"[^&\s\"'#]+")
_VALUE = re.compile(
    rf"""{_BLOCK} | [(\[{{][^)\]}}\n]{{0,300}}[)\]}}]
    | (?:(?i:bearer|basic|token|digest)\s+)?
    (?:[bfru]{{0,2}}\\*"(?:[^"\\\n]|\\.)*"? | [bfru]{{0,2}}\\*'(?:[^'\\\n]|\\.)*'?
      | \S+?(?=[]),;}}"'`]{{0,5}}(?:\s|\Z)))""",
    re.X,
)
# "the password is hunter2", "with token abc123": a letter and a digit, as words seldom have, or quotes.
_SPOKEN = re.compile(
    r"""(\b(?i:(?:password|passwd|passphrase|passcode|api[ ]?key|secret|token|login|\w{0,40}(?:secret|access)_?key)
      (?:\s(?:is|was|provided|given))?:?\s["'`]?))(?=\S{0,60}\d)(?=\S{0,60}[A-Za-z])[^\s"'`,;)]{6,}
    | (\b(?i:password|passwd|passphrase|passcode|api[ ]?key)(?:\ is|\ was)?\ )(?:"[^"\n]{1,200}"|'[^'\n]{1,200}')""",
    re.X,
)


def _without_values(text: str) -> str:
    """The text with the values of what is called like a secret hidden."""
    shown, at, known = [], 0, ""
    while named := _NAMED.search(text, at):
        shown.append(text[at : named.end()])
        at = named.end()
        name = named["query"] or named["option"] or named["name"]
        if named["before"] and named["gap"] == ":":  # "Missing key: conv1"
            name = named["before"] + name
        if known and name.lower() in _VALUED_BY:
            name = known
        indexed = named["name"] is not None and f"[{name}]" == text[named.start("name") - 1 : named.end("name") + 1]
        if (named["gap"] == "," or indexed) and not _is_surely_secret(name):  # indexed: `total[key] = 0`
            continue
        if not (_is_secret(name) or _is_login(name) or name.lower() in _NAMED_BY):
            continue
        found = (_IN_QUERY if named["query"] else _VALUE).match(text, at)
        value = found[0] if found is not None else ""
        if name.lower() in _NAMED_BY:  # {"name": "password", "value": "x"}
            known = value if _is_secret(value) else ""
        if found is not None and (_is_secret(name) or _LOGIN.fullmatch(value)):
            shown.append(value if _is_blank(value.strip("\"'")) else _redacted_word(name, value))
            at = found.end()
    return "".join(shown) + text[at:]
