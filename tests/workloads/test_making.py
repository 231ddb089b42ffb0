"""The makers, through gray's: a folder is a whole data set or visibly none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from running import ENVIRONMENT, ROOT, files, make

from workloads import making
from workloads.gray import make as gray
from workloads.making import MANIFEST, UNFINISHED, Refused, require


def test_a_data_set_is_its_files_and_a_manifest(gray_data: Path) -> None:
    recipe = gray.RECIPES["tiny"]
    expected = {path for index in range(recipe.items) for path in gray.paths(recipe, index)}
    assert set(files(gray_data)) == expected | {MANIFEST}
    manifest = require(gray_data, "gray")
    assert manifest["size"] == "tiny"
    assert manifest["seed"] == 0
    assert manifest["train"] + manifest["val"] == manifest["items"] == recipe.items


def test_the_seed_decides_every_byte_and_the_number_of_workers_none(gray_data: Path, tmp_path: Path) -> None:
    assert make("gray", tmp_path / "same", "--size", "tiny", "--workers", "1").returncode == 0
    assert files(tmp_path / "same") == files(gray_data)
    assert make("gray", tmp_path / "other", "--size", "tiny", "--seed", "1").returncode == 0
    other, first = files(tmp_path / "other"), files(gray_data)
    assert other.keys() == first.keys()
    assert all(other[path] != first[path] for path in first)


def test_says_what_it_needs_before_it_starts(tmp_path: Path) -> None:
    said = make("gray", tmp_path / "gray", "--size", "tiny").stderr.splitlines()
    recipe = gray.RECIPES["tiny"]
    assert "256 of 256 items to make" in said[0]
    assert f"about {recipe.items * recipe.bytes_each / 1e6:.1f} MB" in said[0]
    assert said[-1] == "256 of 256"
    used = sum(len(content) for content in files(tmp_path / "gray").values())
    assert used <= recipe.items * recipe.bytes_each <= 2 * used


def half_made(folder: Path, ending: signal.Signals) -> tuple[int, str]:
    """Start making the small set, end the maker with a signal once it is under way; its exit code and last words.

    The workers hold the same pipe: that it comes to its end shows that none of them is left.
    """
    command = [sys.executable, "-m", "workloads.gray.make", "--size", "small", "--out", str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as maker:
        assert maker.stderr is not None
        while " of 2800\n" not in maker.stderr.readline():
            pass
        if ending == signal.SIGINT:
            os.killpg(maker.pid, ending)  # as Ctrl-C on a terminal: the workers get it too
        else:
            maker.send_signal(ending)
        last_words = maker.stderr.read()
    return maker.returncode, last_words


def test_a_killed_maker_leaves_no_data_set_and_the_next_goes_on(tmp_path: Path) -> None:
    # GIVEN a maker killed in the middle of its work, with no chance to tidy up
    folder = tmp_path / "gray"
    code, _ = half_made(folder, signal.SIGKILL)
    assert code == -signal.SIGKILL
    with pytest.raises(Refused, match=r"half made: finish it with  python -m workloads.gray.make --size small"):
        require(folder, "gray")
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*.png")}
    assert 0 < len(made) < 2800

    # WHEN the same command runs again
    resumed = make("gray", folder, "--size", "small")

    # THEN it makes what was missing and only that, and the result is what one run would have made
    assert f"{2800 - len(made)} of 2800 items to make" in resumed.stderr
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert require(folder, "gray")["size"] == "small"
    assert not list(folder.rglob("*.part"))
    recipe = gray.RECIPES["small"]
    for index in range(0, 2800, 100):
        (path,), (content,) = gray.paths(recipe, index), gray.make(recipe, np.random.default_rng([0, index]), index)
        assert (folder / path).read_bytes() == content


def test_a_file_that_was_not_written_to_its_end_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a disk that is full after two bytes
    write_bytes = Path.write_bytes

    def fills_up(path: Path, content: bytes) -> None:
        write_bytes(path, content[:2])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", fills_up)
    with pytest.raises(OSError, match="No space left"):
        making.write(tmp_path / "000000.png", b"a whole picture")
    assert not (tmp_path / "000000.png").exists()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_maker_says_how_to_go_on(tmp_path: Path, ending: signal.Signals) -> None:
    code, last_words = half_made(tmp_path / "gray", ending)
    assert code == 130
    assert "the same command goes on from there" in last_words
    assert "Traceback" not in last_words
    assert not (tmp_path / "gray" / MANIFEST).exists()
    made = len(list((tmp_path / "gray").rglob("*.png")))
    assert 0 < made < 2800
    assert made % making.ITEMS_A_TASK == 0  # what was in hand was finished
    assert not list((tmp_path / "gray").rglob("*.png.part"))


def test_makes_again_what_was_deleted(gray_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gray"
    shutil.copytree(gray_data, folder)
    next(folder.rglob("*.png")).unlink()
    assert "1 of 256 items to make" in make("gray", folder, "--size", "tiny").stderr
    assert files(folder) == files(gray_data)


@pytest.mark.parametrize("flags", [("--size", "small"), ("--size", "tiny", "--seed", "1")])
def test_a_folder_of_another_recipe_is_refused(gray_data: Path, flags: tuple[str, ...]) -> None:
    refused = make("gray", gray_data, *flags)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"{gray_data} was made from another recipe (name gray size tiny seed 0 version 1): "
        "choose another folder or delete that one\n"
    )


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    refused = make("gray", tmp_path, "--size", "tiny")
    assert refused.returncode == 2
    assert refused.stderr == f"{tmp_path} exists and is not a data set: choose an empty or a new folder\n"


def test_too_little_disk_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    monkeypatch.setattr(sys, "argv", ["make", "--size", "full", "--out", str(tmp_path / "gray")])
    with pytest.raises(SystemExit) as ended:
        making.main("gray", gray.RECIPES, gray.paths, gray.make)
    assert ended.value.code == 2
    recipe = gray.RECIPES["full"]
    needed = f"about {recipe.items * recipe.bytes_each / 1e6:.1f} MB needed and only 1.0 MB free"
    assert needed in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.png"))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    refused = make("gray", Path("/dev/null/gray"), "--size", "tiny")
    assert refused.returncode == 2
    assert refused.stderr == "cannot make /dev/null/gray: Not a directory\n"


def test_require_names_the_command_that_makes_the_data(tmp_path: Path, gray_data: Path) -> None:
    with pytest.raises(Refused, match=r"no gray data at .*python -m workloads.gray.make --size small --out .*/none"):
        require(tmp_path / "none", "gray")
    with pytest.raises(Refused, match=r"holds the data of gray, not of stock: .* workloads.stock.make"):
        require(gray_data, "stock")
    (tmp_path / MANIFEST).write_text('{"name": "gr')
    with pytest.raises(Refused, match="is damaged: delete"):
        require(tmp_path, "gray")
    (tmp_path / MANIFEST).unlink()
    (tmp_path / UNFINISHED).write_text(json.dumps({"name": "gray", "size": "full", "seed": 3}))
    with pytest.raises(Refused, match=r"half made: .* --size full --seed 3"):
        require(tmp_path, "gray")
