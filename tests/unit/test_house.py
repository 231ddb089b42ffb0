"""Promises of the house as a whole: its public names, what it imports, where it runs."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout import cli
from flatout.model import errors

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "workloads" / "README.md",
    ROOT / "benchmarks" / "NOTEBOOK.md",
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
READ_SIDE = ("cli", "trace", "model", "top", "doctor", "diagnose", "check", "fix", "report", "launch.launcher")


def test_the_public_names_are_these() -> None:
    assert sorted(flatout.__all__) == ["DataLoader", "__version__", "apply", "attach"]
    assert all(hasattr(flatout, name) for name in flatout.__all__)


def test_the_read_side_never_imports_torch() -> None:
    """Every module of it, all at once, in a process of its own."""
    there = [name for name in READ_SIDE if importlib.util.find_spec(f"flatout.{name}")]
    script = f"""
import importlib, pkgutil, sys
for name in {there!r}:
    package = importlib.import_module(f"flatout.{{name}}")
    for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"flatout.{{name}}."):
        importlib.import_module(module.name)
        assert "torch" not in sys.modules, f"{{module.name}} imports torch"
    assert "torch" not in sys.modules, f"flatout.{{name}} imports torch"
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_what_runs_in_a_training_process_imports_torch_and_the_standard_library_alone() -> None:
    """A script's environment may have neither numpy nor psutil. What is imported inside functions does not count."""
    inside = sorted((ROOT / "src/flatout/inside").rglob("*.py"))
    modules = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in inside]
    waiting, seen, foreign = {name.removesuffix(".__init__") for name in modules}, set(), []
    while waiting:
        name = waiting.pop()
        seen.add(name)
        imported = imports_of(name)
        waiting |= {one for one in imported if one.startswith("flatout.")} - seen
        tops = (
            {one.partition(".")[0] for one in imported} - sys.stdlib_module_names - {"flatout", "flatout_hook", "torch"}
        )
        foreign += [f"{name} imports {top}" for top in sorted(tops)]
    assert "flatout.feed.packing" in seen
    assert foreign == []


def imports_of(name: str) -> set[str]:
    """What a module imports as it is imported itself."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a name in a module
        return set()
    found: set[str] = set()
    for statement in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            found.add(statement.module)
            if statement.module.startswith("flatout"):
                names = [f"{statement.module}.{alias.name}" for alias in statement.names]
                found |= {one for one in names if (ROOT / "src" / one.replace(".", "/")).with_suffix(".py").exists()}
    return found


@pytest.fixture(params=["darwin", "win32"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another system, as far as flatout can tell."""
    sysconfig.get_config_vars()  # Python itself looks this up by the platform's name, once
    monkeypatch.setattr(sys, "platform", request.param)


@pytest.mark.usefixtures("elsewhere")
def test_elsewhere_what_needs_linux_says_so_in_one_line(flatout_says: Callable[..., Any]) -> None:
    verbs = {command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback}
    for verb in sorted(verbs - {"top", "doctor", "report", "compare", "runs", "explain", "skill"}):
        said = f"flatout: flatout {verb} is Linux only; flatout top, doctor, report, compare and runs work here\n"
        arguments = () if verb == "mcp" else ("train.py",)
        assert flatout_says(verb, *arguments) == (2, "", said)


@pytest.mark.usefixtures("elsewhere")
def test_elsewhere_one_can_still_look(flatout_says: Callable[..., Any]) -> None:
    code, out, _ = flatout_says("top", "--once")
    assert code == 0
    assert "CPU" in out


def test_the_tree_of_errors_is_as_drawn() -> None:
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"^[│├└─ ]*(\w+(?:Error|Failed)) ", errors.__doc__, re.MULTILINE))
    assert drawn == {name for name in vars(errors) if name.endswith(("Error", "Failed"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, place = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if place:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            places = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            assert place in places, f"{page.name} links to {link}"


def test_the_chinese_readme_is_equal_to_the_english_one() -> None:
    english, chinese = (_skeleton(ROOT / name) for name in ("README.md", "README.zh-CN.md"))
    assert chinese == english


def _skeleton(readme: Path) -> tuple[list[str], list[str], list[str]]:
    """What does not depend on the language: levels of headings, links, and the commands and output in the examples."""
    text = readme.read_text()
    prose, examples = "".join(text.split("```")[::2]), "".join(text.split("```")[1::2])
    levels = re.findall(r"^#+", prose, re.MULTILINE)
    links = [link for link in LINK.findall(prose) if not link.startswith("README")]
    return levels, links, [re.split(r"\s{2,}", line.strip())[0] for line in examples.splitlines()]


WRITES = re.compile(
    r"\.write_text\(|\.write_bytes\(|\bcopytree\(|\bcopyfile\(|FileIO\(|O_CREAT|\.open\(mode|"
    r"\bopen\([^()]*[\"'][wxa]b?\+?[\"']|(?:torch\.|(?<![\w.])(?<!def ))save\("
)
MAY_WRITE_OTHERWISE = {  # how often at most, and why
    "files.py": (2, "it is how all others write"),
    "trace/writer.py": (2, "a stream: a recording grows while the training runs, and ends with how that ended"),
    "inside/loaders.py": (1, "a stream: each loader worker appends to it"),
    "engine/run_folder.py": (3, "streams: a row each time the losses are read; into the file that files.py has opened"),
    "top/top_command.py": (
        1,
        "a stream: a row a sample; whether it can be written is tried before anything is measured",
    ),
    "launch/launcher.py": (1, "a stream: what the command of a trial prints"),
    "inside/weights.py": (1, "renamed when it is whole; it goes with the proof, and the disk would hold training up"),
    "fix/fix_command.py": (1, "a lock"),
    "fix/journal.py": (2, "a lock; and a folder, copied under another name and then renamed"),
    "inside/redirect.py": (99, "what a script writes in a trial, on its way to elsewhere"),
    "launch/sandbox.py": (99, "the kernel's files of a new user namespace"),
}


def test_every_file_is_written_whole_or_not_at_all() -> None:
    """By files.py, but for streams and for what is nobody's result."""
    source = ROOT / "src" / "flatout"
    found = {
        str(path.relative_to(source)): count
        for path in source.rglob("*.py")
        if (count := len(WRITES.findall(path.read_text(encoding="utf-8"))))
    }
    assert not {name: n for name, n in found.items() if n > MAY_WRITE_OTHERWISE.get(name, (0, ""))[0]}
    assert set(MAY_WRITE_OTHERWISE) <= set(found)  # a reason that is none any more goes


def test_the_tree_of_the_architecture_is_the_tree() -> None:
    """GIVEN the drawing in docs/ARCHITECTURE.md THEN all that it names is there, and all that is there it names."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    drawn = text[text.index("src/flatout/\n") : text.index("workloads/  ")]
    rooms = dict(re.findall(r"^  (\w+)(?:/|\.py) +((?:.*\n)(?: {10,}.*\n)*)", drawn, re.MULTILINE))
    package = ROOT / "src" / "flatout"
    here = {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms.keys() | {"__main__"} == here
    for room in filter(lambda name: (package / name).is_dir(), rooms):
        files = {path.stem for path in (package / room).rglob("*.py")} | {path.name for path in package.rglob("*/")}
        outside = set(re.findall(r"\b([a-z_]+_[a-z_]+)\b", rooms[room])) - files
        assert not outside, f"ARCHITECTURE.md names {outside} in {room}/"


def test_the_recipes_name_files_and_names_that_are_there() -> None:
    """GIVEN `_limits` of `trace/reader.py` in CONTRIBUTING.md THEN there is such a file, and such a name in it."""
    recipes = (ROOT / "CONTRIBUTING.md").read_text().partition("## Recipes")[2].partition("\n## ")[0]
    files = [path for folder in ("src", "docs", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    meant = {name: _called(name, files) for name in re.findall(r"`([\w/]+\.(?:py|md|json))`", recipes)}
    assert not [name for name, there in meant.items() if not there], "no such file"
    for name, file in re.findall(r"`(\w+)`\s+(?:of|in)\s+`([\w/]+\.py)`", recipes):
        assert any(re.search(rf"\b{name}\b", path.read_text()) for path in meant[file]), f"no {name} in {file}"


def _called(name: str, files: list[Path]) -> list[Path]:
    return [path for path in files if f"/{path.as_posix()}".endswith(f"/{name}")]


OLD_WORDS = {  # what flatout was first written in, and the word that a user would type into a search box
    r"(?<![-\w\"])[Cc]ards?\b": "GPU",
    r"\b[Ss]tock's|\bStock\b|\b(?:as|like|in|than|what|with|beside|against|and|from|the) stock\b": "PyTorch's loader",
    r"\b[Mm]end(?:s|ed|ing)?\b": "fix",
    r"\bMind:": "Note:",
    r"\b[Pp]urses?\b": "time budget",
    r"\b[Nn]urser(?:y|ies)\b": "fork server",
    r"\b[Cc]rews?\b": "worker pool",
    r"\b(?:[Hh]ired?|[Hh]ires)\b": "start",
    r"\bfor good:": "to make it permanent:",
    r"\b(?:is|are|was|were) wanted\b": "expected",
    r"\b[Ww]hoever\b": "who, or the process that",
    r"\banew\b": "again",
    r"\bof its own accord\b": "without being asked",
    r"\bideas of (?:its|their) own\b": "what it does",
    r"\b[Tt]old of\b": "notified",
    r"\byour leave\b": "your permission",
    r"\b[Ww]hat is more\b": "also",
    r"\b[Rr]emed(?:y|ies)\b": "fix, change",
}
# Parts that still have some, and how many. A number may only go down.
STILL_THERE: dict[str, int] = {}


def _text_files() -> list[Path]:
    """What a person reads, but for this list and the story of the workload called stock."""
    folders = [ROOT / name for name in ("src", "docs", "tests", "benchmarks", "workloads")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".yaml", ".js")]
    skipped = (Path(__file__), ROOT / "workloads" / "stock", ROOT / "workloads" / "README.md")
    return [path for path in [*files, *PAGES] if not any(path.is_relative_to(skip) for skip in skipped)]


def test_the_old_dialect_does_not_come_back() -> None:
    counts: Counter[str] = Counter()
    places = []
    for path in _text_files():
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for old, better in OLD_WORDS.items():
                if match := re.search(old, line):
                    part = "/".join(name.split("/")[:3])
                    counts[part] += 1
                    places.append(f"{name}:{number}: {match[0]} (write: {better})")
    worse = {part for part, count in counts.items() if count > STILL_THERE.get(part, 0)}
    assert not worse, "\n".join(place for place in places if place.startswith(tuple(worse)))
    gone = {part for part, allowed in STILL_THERE.items() if counts[part] < allowed}
    assert not gone, f"fewer old words than STILL_THERE says: lower its numbers for {sorted(gone)}"


def test_no_module_and_no_class_has_the_name_of_another() -> None:
    """A file of cli/ has the name of its verb, which may be that of the package it calls."""
    modules: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for path in (ROOT / "src" / "flatout").rglob("*.py"):
        name = str(path.relative_to(ROOT / "src" / "flatout"))
        if path.stem not in ("__init__", "__main__") and not name.startswith("cli/"):
            modules.setdefault(path.stem, []).append(name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(name)
    assert not {name: places for name, places in (modules | classes).items() if len(places) > 1}
