"""The leak fixtures of tests/conftest.py do catch leaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LEAKS = """
import os, subprocess, sys, threading
from pathlib import Path
from multiprocessing import shared_memory

kept = []

def test_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))

def test_shared_memory():
    kept.append(shared_memory.SharedMemory(create=True, size=8))

def test_environment():
    os.environ["FLATOUT_LEAK"] = "1"

def teardown_module():
    kept[-1].close()
    kept[-1].unlink()
    kept[0].unlink()

def test_nothing(monkeypatch):
    monkeypatch.setenv("FLATOUT_LEAK", "1")
    assert subprocess.run([sys.executable, "-c", ""]).returncode == 0
    thread = threading.Thread(target=int)
    thread.start()
    memory = shared_memory.SharedMemory(create=True, size=8)
    memory.close()
    memory.unlink()

def test_what_torch_leaves():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    Path(f"/dev/shm/torch_{ended.pid}_1_0").touch()

def test_what_torch_still_has():
    kept.insert(0, Path(f"/dev/shm/torch_{os.getpid()}_1_0"))
    kept[0].touch()
"""


def test_each_kind_of_leak_is_found(tmp_path: Path) -> None:
    quick = CONFTEST.read_text(encoding="utf-8").replace("LEAVE_S = 5.0", "LEAVE_S = 0.2")
    (tmp_path / "conftest.py").write_text(quick, encoding="utf-8")
    (tmp_path / "test_leaking.py").write_text(LEAKS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120).stdout
    assert "7 passed, 5 errors" in out, out
    for leak in ("left a thread behind", "left processes behind", "left shared memory behind", "['FLATOUT_LEAK']"):
        assert leak in out
