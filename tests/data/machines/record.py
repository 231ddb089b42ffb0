"""Records the files in /proc, /sys and cgroup that flatout reads, at two moments, while a small training runs.

    python tests/data/machines/record.py NAME

writes NAME-before.txt and NAME-after.txt beside this script, a second or two apart, in the format of README.md. Only
the training, its two loader workers and their parent are kept of all processes; folders of this machine are cut out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.loads import running  # noqa: E402

OF_MACHINE = ("stat", "meminfo", "diskstats", "pressure/cpu", "pressure/io", "pressure/memory")
OF_PROCESS = ("stat", "comm", "cmdline", "schedstat", "io")
OF_CGROUP = (
    *("cpu.max", "cpu.stat", "memory.max", "memory.current", "memory.stat", "cpuset.cpus.effective"),
    *(
        "cpu.cfs_quota_us",
        "cpu.cfs_period_us",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "cpuset.effective_cpus",
    ),
)
FEW_INTERRUPTS = 20


def main() -> None:
    name = sys.argv[1]
    with running("train", "--workers", "2") as load:
        for moment in ("before", "after"):
            now_s = time.monotonic()
            text = f"trainer {load['pid']}, affinity {len(os.sched_getaffinity(0))}, time {now_s:.3f}\n"
            text += "".join(section(path) for path in paths(load["pid"]))
            (Path(__file__).parent / f"{name}-{moment}.txt").write_text(text, encoding="utf-8")
            time.sleep(1.5)


def paths(trainer: int) -> Iterator[Path]:
    proc = Path("/proc")
    yield from (proc / name for name in (*OF_MACHINE, "self/cgroup", "self/mountinfo"))
    family = psutil.Process(trainer)
    for process in (*family.parents()[:1], family, *family.children(recursive=True)):
        yield from (proc / str(process.pid) / name for name in OF_PROCESS)
    yield from (disk / "slaves" for disk in sorted(Path("/sys/block").iterdir()))
    for folder in dict.fromkeys(group_folders()):
        yield from (folder / name for name in OF_CGROUP)


def group_folders() -> Iterator[Path]:
    """This process's groups up to the mount, where the limits are."""
    base = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for mount in (base, base / controllers, base / "unified"):
            folder = mount / path.lstrip("/")
            while folder.is_dir() and folder.is_relative_to(mount):
                yield folder
                folder = folder.parent


def section(path: Path) -> str:
    if path.is_dir():
        return f"==> {path}/ <==\n"
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""  # not readable here: not readable in the recording either
    if path == Path("/proc/self/mountinfo"):
        text = "".join(line for line in text.splitlines(keepends=True) if " - cgroup" in line)
    if path == Path("/proc/stat"):  # a machine has thousands of interrupts, and we read none of them
        lines = (line.split(" ") for line in text.splitlines())
        text = "".join(" ".join(words[:FEW_INTERRUPTS]) + "\n" for words in lines)
    for folder in (f"{sys.prefix}/bin/", f"{ROOT}/"):
        text = text.replace(folder, "")
    text = text.replace("\0", "\\0")
    return f"==> {path} <==\n{text}" + ("" if text.endswith("\n") else "\n")


if __name__ == "__main__":
    main()
