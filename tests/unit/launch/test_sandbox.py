"""What a trial may write to: which folders are covered, and which caches show through."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flatout.launch import sandbox
from flatout.launch.sandbox import Sandbox

Make = Callable[..., Sandbox]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, a project in it that is the working folder, and a folder for what is temporary."""
    for name in ("home/project", "tmp", "fix/scratch", "far"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home" / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("getpass.getuser", lambda: "vic")
    return tmp_path


@pytest.fixture
def box(world: Path) -> Make:
    return lambda *words: sandbox.sandbox_for(["python", *map(str, words)], world / "fix" / "scratch", ())


def test_compilers_caches_show_through_and_no_others(world: Path, box: Make) -> None:
    caches = [world / "home" / name for name in (".triton", ".nv", ".cache/torch_extensions")]
    for path in (*caches, world / "home" / ".cache" / "huggingface"):
        path.mkdir(parents=True)
    made = box("train.py")
    assert set(made.keep) == {str(path) for path in (*caches, world / "tmp" / "torchinductor_vic")}
    assert made.compiled == str(world / "tmp" / "torchinductor_vic")
    assert Path(made.compiled).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"])
@pytest.mark.parametrize("where", ["home/project", "home", ".", "far", "far/.."])
def test_no_cache_folder_may_be_or_hold_what_is_protected(
    world: Path, box: Make, variable: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(world / where))
    (world / "far").chmod(0o700)
    made = box("train.py", f"--data={world / 'far'}")
    protected = [str(world / name) for name in ("home/project", "home", "far")]
    for kept in made.keep:
        assert not any(path == kept or path.startswith(f"{kept}/") for path in protected)


@pytest.mark.parametrize("how", ["a link", "a link to nowhere", "open to others", "open to a group", "another's"])
def test_a_cache_folder_that_another_may_have_made_is_not_used(
    world: Path, box: Make, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = world / "tmp" / "torchinductor_vic"
    if "link" in how:
        theirs.symlink_to(world / ("nowhere" if "nowhere" in how else "home/project"))
    else:
        theirs.mkdir()
        theirs.chmod({"open to others": 0o777, "open to a group": 0o770}.get(how, 0o700))
    if how == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: theirs.stat().st_uid + 1)
    made = box("train.py")
    ours = world / "fix" / "compiled"
    assert (made.compiled, made.keep) == (str(ours), (str(ours),))
    assert ours.stat().st_mode & 0o777 == 0o700
    assert sandbox.environment(made, redirected=False)["TORCHINDUCTOR_CACHE_DIR"] == str(ours)


def test_covered_is_all_but_the_running_system(box: Make) -> None:
    covered = set(box("train.py").cover)
    tops = {str(path) for path in Path("/").iterdir() if path.is_dir() and not path.is_symlink()}
    assert {"/home", "/opt", "/var", "/tmp"} & tops <= covered
    assert not covered & {"/", "/proc", "/sys", "/dev", "/dev/shm", "/run"}


def test_a_users_folder_deep_in_the_systems_is_covered(box: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a user who can write nowhere near the top of /usr THEN it is covered all the same, and /boot is not."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda *_: False)
    covered = set(box("train.py").cover)
    assert "/usr" in covered
    assert not covered & {"/boot", "/snap", "/lost+found"}


def test_what_the_command_names_and_links_lead_to_is_looked_at_first(world: Path, box: Make) -> None:
    (world / "home" / "project" / "runs").symlink_to(world / "far")
    (world / "home" / "project" / "null").symlink_to("/dev/null")
    (world / "home" / "project" / "loop").symlink_to("loop")
    (world / "named").mkdir()
    made = box("train.py", f"--out={world / 'named' / 'not-there-yet'}", "x" * 5000)
    assert set(made.near) == {str(world / name) for name in ("home/project", "far", "named")}


def test_trying_an_overlay_leaves_nothing_behind(world: Path) -> None:
    sandbox.why_no_overlay(["python", "train.py"], world / "fix" / "scratch")
    assert [path.name for path in (world / "tmp").iterdir()] == ["torchinductor_vic"]
    assert list((world / "fix" / "scratch").iterdir()) == []
    assert list((world / "home" / "project").iterdir()) == []


def test_trackers_are_off(box: Make) -> None:
    set_ = sandbox.environment(box("train.py"), redirected=False)
    off = {"WANDB_MODE": "disabled", "SWANLAB_MODE": "disabled", "DVC_STUDIO_OFFLINE": "true"}
    assert off.items() <= set_.items()
    assert "HF_HUB_OFFLINE" not in set_  # a script may have to download something
