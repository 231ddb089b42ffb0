"""The commit a command ran at, from repositories as git leaves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.launch.launcher import commit_here

ONE, OTHER = "1" * 40, "a" * 64


def put(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)


BRANCH = {".git/HEAD": "ref: refs/heads/a/b\n"}
PACKED = {".git/packed-refs": f"# pack-refs with: peeled\n{OTHER} refs/heads/x/a/b\n{ONE} refs/heads/a/b\n^{OTHER}\n"}


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({}, None),
        ({".git/HEAD": f"{OTHER}\n"}, OTHER),
        ({**BRANCH, **PACKED, ".git/refs/heads/a/b": f"{OTHER}\n"}, OTHER),
        ({**BRANCH, **PACKED}, ONE),
        (BRANCH, None),  # no commit yet
        ({".git/HEAD": "ref: ../../secret\n", "secret": "LEAK"}, None),
        ({".git": "gitdir: main/.git/worktrees/w\n", "main/.git/worktrees/w/HEAD": "ref: refs/heads/w\n",
          "main/.git/worktrees/w/commondir": "../..\n", "main/.git/refs/heads/w": ONE}, ONE),
    ],
)  # fmt: skip
def test_the_commit_is_that_of_the_repository_around_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], commit: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    put(files)
    Path("src/pkg").mkdir(parents=True)
    assert commit_here() == commit
    monkeypatch.chdir(tmp_path / "src" / "pkg")
    assert commit_here() == commit
