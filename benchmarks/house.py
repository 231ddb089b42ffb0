"""The figures of the house: how large src/flatout is, and how dense its lines are. Before and after a clean-up.

    python benchmarks/house.py [PART…] [--against REV] [--out FILE]

A PART is a package or file in src/flatout, such as feed or redact.py; without one, all of it is counted. With
--against, the same figures of that commit stand beside those of the working tree.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDE, LONG_FUNCTION, LONG_FILE = 110, 60, 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="packages or files to count alone")
    parser.add_argument("--against", metavar="REV", help="a commit to compare with")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    columns = {"now": figures(only(options.parts, working_tree()))}
    if options.against:
        columns = {options.against: figures(only(options.parts, commit(options.against))), **columns}
    for name in columns["now"]:
        print(f"{name:45}" + "".join(f"{column[name]:>14,}" for column in columns.values()))
    if options.out:
        options.out.write_text(json.dumps(columns, indent=2) + "\n", encoding="utf-8")


def only(parts: Sequence[str], sources: dict[str, str]) -> dict[str, str]:
    """The sources of these packages or files; all of them if none is named."""
    return {path: text for path, text in sources.items() if not parts or set(parts) & {path, path.split("/")[0]}}


def working_tree() -> dict[str, str]:
    """The sources as they lie here, by path."""
    folder = ROOT / "src" / "flatout"
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}


def commit(revision: str) -> dict[str, str]:
    """The sources of a commit, by path."""
    archive = subprocess.run(
        ["git", "archive", revision, "src/flatout"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [member for member in tar if member.isfile() and member.name.endswith(".py")]
        return {m.name.removeprefix("src/flatout/"): _text(tar, m) for m in members}


def _text(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    assert file is not None
    return file.read().decode("utf-8")


def figures(sources: dict[str, str]) -> dict[str, Any]:
    """What is counted, by name."""
    trees = {name: ast.parse(text) for name, text in sources.items()}
    lines = [line for text in sources.values() for line in text.splitlines()]
    lengths = [length for tree in trees.values() for length in function_lengths(tree)]
    thousand = len(lines) / 1000
    modules = Counter(Path(name).stem for name in sources if Path(name).stem != "__init__")
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    nodes = Counter(type(node).__name__ for tree in trees.values() for node in ast.walk(tree))
    return {
        "files": len(sources),
        "kB": round(sum(len(text.encode()) for text in sources.values()) / 1000),
        "lines": len(lines),
        "characters a line": round(statistics.mean(len(line) for line in lines), 1),
        f"lines over {WIDE} columns, %": round(100 * sum(len(line) > WIDE for line in lines) / len(lines), 1),
        "comment lines, %": round(100 * sum(line.lstrip().startswith("#") for line in lines) / len(lines), 1),
        "conditional expressions a thousand lines": round(nodes["IfExp"] / thousand, 1),
        "comprehensions a thousand lines": round(
            sum(nodes[kind] for kind in ("ListComp", "SetComp", "DictComp", "GeneratorExp")) / thousand, 1
        ),
        "functions": len(lengths),
        "median function, lines": round(statistics.median(lengths), 1),
        f"functions over {LONG_FUNCTION} lines": sum(length > LONG_FUNCTION for length in lengths),
        f"files over {LONG_FILE} lines": sum(text.count("\n") > LONG_FILE for text in sources.values()),
        "module names used twice": sum(count > 1 for count in modules.values()),
        "class names used twice": sum(count > 1 for count in classes.values()),
        "modules in an import cycle, lazy imports included": len(in_cycles(trees)),
    }


def function_lengths(tree: ast.AST) -> Iterator[int]:
    """How many lines each function has, its docstring included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def in_cycles(trees: dict[str, ast.Module]) -> set[str]:
    """The modules that import themselves by way of others. What is only for types does not count."""
    names = {_module(path): path for path in trees}
    imports = {name: _imported(trees[path]) & names.keys() - {name} for name, path in names.items()}
    reached: dict[str, set[str]] = {}
    for start in imports:
        seen, ahead = set(), list(imports[start])
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead.extend(imports[name])
        reached[start] = seen
    return {name for name, seen in reached.items() if name in seen}


def _module(path: str) -> str:
    parts = ["flatout", *Path(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    ahead: list[ast.AST] = [tree]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            ahead.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        ahead.extend(ast.iter_child_nodes(node))
    return found


if __name__ == "__main__":
    main()
