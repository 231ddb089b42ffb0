"""Edits made ready for a run: what is laid over the person's files, of which none is written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flatout.fix.edits import Edit, copied, patched
from flatout.launch import sandbox
from flatout.model.errors import UsageError

COMMAND = ("python", "train.py")
TRAIN = "import net\n\nlr = 0.1\nfor batch in range(3):\n    net.learn(batch, lr)\n"
FASTER = """\
--- a/train.py
+++ b/train.py
@@ -3,3 +3,3 @@
 lr = 0.1
-for batch in range(3):
+for batch in range(2):
     net.learn(batch, lr)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    (folder / "models").mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "models" / "net.py").write_text("def learn(batch, lr):\n    print(batch)\n")
    monkeypatch.chdir(folder)
    return folder


def laid(edit: Edit) -> dict[str, str]:
    """The files of an edit by their paths."""
    assert edit.layer is not None
    files = edit.layer / sandbox.FILES
    return {f"/{path.relative_to(files)}": path.read_text() for path in files.rglob("*") if path.is_file()}


def removed(edit: Edit) -> list[str]:
    assert edit.layer is not None
    return [path for path in (edit.layer / sandbox.REMOVED).read_text().split("\0") if path]


def patch(text: str, name: str = "edit.diff") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_a_patch_is_applied_to_a_copy(project: Path, tmp_path: Path) -> None:
    edit = patched([patch(FASTER)], COMMAND, tmp_path / "layer")
    assert laid(edit) == {str(project / "train.py"): TRAIN.replace("3", "2")}
    assert removed(edit) == []
    assert (edit.name, edit.command) == ("edit.diff", COMMAND)
    assert (project / "train.py").read_text() == TRAIN


def test_names_may_begin_at_the_folder_itself(project: Path, tmp_path: Path) -> None:
    """As `diff -u train.py.orig train.py` has them."""
    text = FASTER.replace("a/train.py", "train.py.orig").replace("b/train.py", "train.py")
    assert list(laid(patched([patch(text)], COMMAND, tmp_path / "layer"))) == [str(project / "train.py")]


def test_names_may_begin_at_the_repository(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", "."], cwd=project, check=True)
    net = project / "models" / "net.py"
    hunk = "@@ -1,2 +1,2 @@\n def learn(batch, lr):\n-    print(batch)\n+    pass\n"
    text = f"--- a/models/net.py\n+++ b/models/net.py\n{hunk}"
    change = patch(text).absolute()
    monkeypatch.chdir(project / "models")
    assert laid(patched([change], COMMAND, tmp_path / "layer")) == {str(net): "def learn(batch, lr):\n    pass\n"}


def test_files_come_go_and_move(project: Path, tmp_path: Path) -> None:
    text = (
        "diff --git a/new.py b/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+x = 1\n"
        "diff --git a/models/net.py b/net.py\nsimilarity index 100%\nrename from models/net.py\nrename to net.py\n"
        "diff --git a/train.py b/train.py\ndeleted file mode 100644\n--- a/train.py\n+++ /dev/null\n@@ -1,5 +0,0 @@\n"
        + "".join(f"-{line}" for line in TRAIN.splitlines(keepends=True))
    )
    edit = patched([patch(text)], COMMAND, tmp_path / "layer")
    net = (project / "models" / "net.py").read_text()
    assert laid(edit) == {str(project / "new.py"): "x = 1\n", str(project / "net.py"): net}
    assert sorted(removed(edit)) == [str(project / "models" / "net.py"), str(project / "train.py")]


def test_patches_are_applied_one_after_the_other(project: Path, tmp_path: Path) -> None:
    further = FASTER.replace("range(2)", "range(1)").replace("range(3)", "range(2)")
    first, second = patch(FASTER), patch(further, "second.diff")
    edit = patched([first, second], COMMAND, tmp_path / "layer")
    assert laid(edit) == {str(project / "train.py"): TRAIN.replace("3", "1")}
    assert edit.name == "edit.diff + second.diff"
    with pytest.raises(UsageError, match=r"second\.diff does not apply: train\.py"):
        patched([second], COMMAND, tmp_path / "alone")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FASTER.replace("lr = 0.1", "lr = 0.3"), "does not apply: train.py is not as the hunk at line 3 expects it"),
        (FASTER.replace("train.py", "other.py"), "does not apply: other.py: No such file or directory"),
        ("for batch in range(2):\n", "is no patch that git can read: No valid patches in input"),
        (FASTER.replace("+3,3", "+3,9"), "is no patch that git can read: corrupt patch at line"),
        (
            FASTER.replace("a/train.py", "a/../../x.py").replace("b/train.py", "b/../../x.py"),
            "names a file outside the current folder",
        ),
    ],
)
def test_a_patch_that_does_not_apply_says_why_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as problem:
        patched([patch(text)], COMMAND, tmp_path / "layer")
    assert words in str(problem.value)
    assert "\n" not in str(problem.value)


def test_without_a_file_or_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"missing\.diff.* No such file"):
        patched([Path("missing.diff")], COMMAND, tmp_path / "layer")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="applied by git, which is not installed"):
        patched([patch(FASTER)], COMMAND, tmp_path / "other")


def test_a_copy_gives_the_files_that_differ(project: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / ".git").mkdir(parents=True)
    (copy / ".git" / "config").write_text("")
    (copy / "train.py").write_text(TRAIN)
    with pytest.raises(UsageError, match="no file in it differs"):
        copied(copy, COMMAND, tmp_path / "none")
    (copy / "models").mkdir()
    (copy / "models" / "net.py").write_text("def learn(batch, lr):\n    pass\n")
    edit = copied(copy, COMMAND, tmp_path / "layer")
    assert laid(edit) == {str(project / "models" / "net.py"): "def learn(batch, lr):\n    pass\n"}
    for folder in (project, tmp_path / "nowhere"):
        with pytest.raises(UsageError):
            copied(folder, COMMAND, tmp_path / "layer")
