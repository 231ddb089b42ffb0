"""Checkpoints that survive: processes killed at any moment, files cut short, folders with all of that in them."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import signal
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_toy import Ready

from flatout.engine.config import CheckpointConfig
from flatout.engine.run_folder import Checkpoints, newest
from flatout.model.errors import UsageError


def state(step: int) -> dict[str, Any]:
    """A state that can be seen to belong together."""
    return {"at": {"step": step}, "model": {"weight": torch.full((40_000,), float(step))}, "ranks": []}


def write_for_ever(folder: Path, step: int, begun: int) -> None:
    """What a training does around its checkpoints, without the rest of it; tells of each that has begun."""
    checkpoints = Checkpoints(folder, CheckpointConfig(keep=2), print)
    while True:
        step += 1
        checkpoints.write(step, state(step), best=step % 3 == 0)
        os.write(begun, b".")


def test_whenever_it_is_killed_a_whole_checkpoint_is_found(tmp_path: Path) -> None:
    """GIVEN a process that writes one checkpoint after the other, WHEN it is killed with -9 at 100 random moments and
    begun again each time from what is found, THEN something whole is always found, and it never goes back."""
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    folder, step, progress = tmp_path / "checkpoints", 0, 0
    for _ in range(100):
        told, begun = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(folder, step, begun)
            finally:
                os._exit(1)
        for _ in range(moments.choice((1, 2, 3)) + (step == 0)):  # before the first kill one must be there
            os.read(told, 1)
        time.sleep(moments.uniform(0, 0.004))  # about as long as one takes to write
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        os.close(begun)
        said: list[str] = []
        found = newest(folder, said.append)
        assert found is not None, seed
        assert not said, (seed, said)
        assert bool((found["model"]["weight"] == found["at"]["step"]).all()), seed
        assert found["at"]["step"] >= step, seed
        progress += found["at"]["step"] > step
        step = found["at"]["step"]
        if (folder / "best.pt").exists():
            assert torch.load(folder / "best.pt", weights_only=True)["at"]["step"] % 3 == 0, seed
    assert progress > 10  # there were some that came to their end


@pytest.mark.parametrize("harm", ["cut", "emptied", "zeroed", "not a checkpoint"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(
    ready: Ready, tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    ready("checkpoint.every=2 steps", "train.max_steps=9").fit()
    folder = tmp_path / "run" / "checkpoints"
    last = folder / "step-000000009.pt"
    whole = last.read_bytes()
    half = len(whole) // 2
    last.write_bytes(
        {
            "cut": whole[:-100],
            "emptied": b"",
            "zeroed": whole[: half - 2000] + bytes(4000) + whole[half + 2000 :],
            "not a checkpoint": b"hello",
        }[harm]
    )
    trainer = ready()
    assert trainer.resume()
    assert trainer.at.step == 8
    assert f"{last} is damaged (" in capsys.readouterr().out


def test_what_a_killed_writer_left_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, CheckpointConfig(), print)
    checkpoints.write(1, state(1))
    checkpoints.wait()
    (folder / "step-000000002.pt.part").write_bytes((folder / "step-000000001.pt").read_bytes())
    found = newest(folder, print)
    assert found is not None
    assert found["at"]["step"] == 1
    assert newest(tmp_path / "nowhere", print) is None


def zipped(parts: dict[str, bytes]) -> bytes:
    """A checkpoint of these parts, with right checksums."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return file.getvalue()


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, bytes]:
    """The newer of two checkpoints, and what is in it."""
    small = {
        "at": {"step": 1},
        "model": {"weight": torch.arange(40.0), "bias": torch.zeros(2)},
        "ranks": [],
        "best": 0.5,
    }
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), print)
    for step in (1, 2):
        checkpoints.write(step, {**small, "at": {"step": step}})
    checkpoints.wait()
    last = tmp_path / "step-000000002.pt"
    return last, last.read_bytes()


def test_whichever_bit_is_flipped_the_checkpoint_is_used_as_it_was_or_the_one_before_it(
    two: tuple[Path, bytes],
) -> None:
    """Half of the flips are in the zip's directory, which no checksum covers."""
    last, whole = two
    seed = random.randrange(2**32)
    moments, directory = random.Random(seed), whole.index(b"PK\x01\x02")
    told = 0
    for number in range(500):
        damaged = bytearray(whole)
        damaged[moments.randrange(directory if number % 2 else 0, len(whole))] ^= 1 << moments.randrange(8)
        last.write_bytes(damaged)
        said: list[str] = []
        found = newest(last.parent, said.append)
        assert found is not None, seed
        assert torch.equal(found["model"]["weight"], torch.arange(40.0)), seed
        assert found["at"]["step"] == 2 - len(said), seed
        assert all(re.fullmatch(r".*step-000000002.pt is damaged \(.{3,250}\): .*", text) for text in said), (
            seed,
            said,
        )
        told += len(said)
    assert 200 < told < 500


def test_a_name_in_its_directory_that_is_no_text_is_one_line(two: tuple[Path, bytes]) -> None:
    last, whole = two
    damaged = bytearray(whole)
    damaged[damaged.rfind(b"data.pkl")] ^= 0x80
    last.write_bytes(damaged)
    said: list[str] = []
    found = newest(last.parent, said.append)
    assert found is not None
    assert found["at"]["step"] == 1
    assert len(said) == 1
    assert said[0].startswith(f"{last} is damaged (UnicodeDecodeError: ")


def test_a_pickle_that_was_altered_with_its_checksum_is_no_traceback_either(two: tuple[Path, bytes]) -> None:
    last, whole = two
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name in parts if name.endswith("data.pkl"))
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    told = 0
    for _ in range(300):
        altered = bytearray(parts[name])
        altered[moments.randrange(len(altered))] = moments.randrange(256)
        last.write_bytes(zipped({**parts, name: bytes(altered)}))
        said: list[str] = []
        with contextlib.suppress(UsageError):  # its version may be another
            assert newest(last.parent, said.append) is not None, seed
        assert all("\n" not in text and len(text) < 500 for text in said), (seed, said)
        told += len(said)
    assert told > 50


def test_a_checkpoint_that_holds_code_is_refused_without_advice_to_run_it(two: tuple[Path, bytes]) -> None:
    last, _ = two
    torch.save({"version": 1, "call": os.system}, last)
    said: list[str] = []
    found = newest(last.parent, said.append)
    assert found is not None
    assert found["at"]["step"] == 1
    assert said == [f"{last} is damaged (it holds something else than plain data): taking the one before it"]


@pytest.mark.parametrize("lost", ["at", "model", "optimizer", "scaler", "ranks", "accumulate"])
def test_a_checkpoint_without_one_of_its_parts_is_one_line(ready: Ready, tmp_path: Path, lost: str) -> None:
    ready("train.max_steps=2").fit()
    (last,) = (tmp_path / "run" / "checkpoints").glob("step-*.pt")
    held = torch.load(last, weights_only=True)
    del held[lost]
    torch.save(held, last)
    with pytest.raises(UsageError, match="its checkpoint does not fit this config"):
        ready().resume()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a slow disk, WHEN the weights change after `write`, THEN what is written is what they were."""
    import threading

    from flatout.engine import run_folder

    gate, save = threading.Event(), run_folder._save

    def slow(data: Any, path: Path) -> None:
        gate.wait(30)
        save(data, path)

    monkeypatch.setattr(run_folder, "_save", slow)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), print)
    weights = state(1)
    checkpoints.write(1, weights)
    weights["model"]["weight"].fill_(7.0)
    assert not list(tmp_path.iterdir())
    gate.set()
    checkpoints.wait()
    found = newest(tmp_path, print)
    assert found is not None
    assert bool((found["model"]["weight"] == 1).all())
