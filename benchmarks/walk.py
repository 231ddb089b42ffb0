"""How many of our files a person's command passes through: those whose functions run, in all its processes.

    python benchmarks/walk.py [--out FILE]

run    `flatout run` of a plain script: a small network, a DataLoader with two workers
fix    `flatout fix` of the same script, until its time is over
batch  fifty batches of the elastic loader, once it has settled: training process and workers

Each Python that is started notes which files of src/flatout run a function. What runs while a module is imported does
not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "flatout"

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 32), torch.randint(0, 4, (4096,)))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(int(sys.argv[1])):
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

BATCHES = """
import itertools, mmap, os
import torch
from torch.utils.data import TensorDataset
from flatout import DataLoader

data = TensorDataset(torch.randn(65536, 32))
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2)
with open(os.environ["WALK_SWITCH"], "r+b") as file:
    switch = mmap.mmap(file.fileno(), 1)
batches = iter(loader)
for _ in itertools.islice(batches, 400):
    pass
switch[0] = 1
for _ in itertools.islice(batches, 50):
    pass
switch[0] = 0
for _ in batches:
    pass
"""

# Put first on PYTHONPATH as sitecustomize.py. A file is sent at once, since a process may end in any way; to a socket,
# since what a trial writes into a file is kept apart.
NOTES = """
import mmap, os, socket, sys, threading

with open(os.environ["WALK_SWITCH"], "rb") as file:
    switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
address = "\\0" + os.environ["WALK_SOCKET"]
package, seen = os.environ["WALK_PACKAGE"], set()
FUNCTION = 1  # CO_OPTIMIZED: the code of a function, not of a module or a class

def note(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_flags & FUNCTION or not switch[0]:
        return
    name = code.co_filename
    if name.startswith(package) and name.endswith(".py") and name not in seen and not importing(frame):
        seen.add(name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(name.encode(), address)

def importing(frame):
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "<module>" and module.startswith("flatout."):
            return True
        frame = frame.f_back
    return False

threading.setprofile(note)
sys.setprofile(note)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    flatout = [sys.executable, "-m", "flatout"]
    script = [sys.executable, "train.py"]
    walks = {
        "run": walk([*flatout, "run", "--", *script, "3"]),
        "fix": walk([*flatout, "fix", "--budget", "90s", "--steps", "40", "--", *script, "300"]),
        "batch": walk([sys.executable, "batches.py"], noting=False),
    }
    for name, files in walks.items():
        print(f"{name}: {len(files)} files")
        print("  " + "  ".join(files))
    if options.out is not None:
        options.out.write_text(json.dumps(walks, indent=2) + "\n", encoding="utf-8")


def walk(command: list[str], *, noting: bool = True) -> list[str]:
    """The files of the package whose functions ran in this command, sorted."""
    with tempfile.TemporaryDirectory(prefix="flatout-walk-") as name, receiver(Path(name).name) as received:
        folder = Path(name)
        for file, text in (("train.py", SCRIPT), ("batches.py", BATCHES), ("site/sitecustomize.py", NOTES)):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text, encoding="utf-8")
        (folder / "switch").write_bytes(bytes([noting]))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT / 'src'}",
            "WALK_SWITCH": str(folder / "switch"),
            "WALK_SOCKET": folder.name,
            "WALK_PACKAGE": f"{PACKAGE}{os.sep}",
            "OMP_NUM_THREADS": "1",
        }
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(ended.stdout + ended.stderr)
    return sorted(str(Path(file).relative_to(PACKAGE)) for file in received)


@contextlib.contextmanager
def receiver(name: str) -> Iterator[set[str]]:
    """A set that fills with what is sent to the abstract socket of this name."""
    received: set[str] = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")

        def receive() -> None:
            while message := listener.recv(4096):
                received.add(message.decode())

        thread = threading.Thread(target=receive)
        thread.start()
        try:
            yield received
        finally:
            listener.sendto(b"", f"\0{name}")  # the end
            thread.join()


if __name__ == "__main__":
    main()
