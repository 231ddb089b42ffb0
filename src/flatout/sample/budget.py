"""What this process may really use: cores, memory and /dev/shm.

`os.cpu_count()` counts the machine. A container's quota, an affinity mask and the other ranks on the node
leave less, and advice that overlooks them ("48 workers" on 2 cores) is worse than none.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Budget", "CgroupFiles", "measure"]

# Launchers that say how many ranks share the node, in the order in which they are believed.
_RANKS_ON_NODE = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
)
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one rank may use. `cores` is for loading data: what is left beside training itself and the system.

    `memory_bytes` and `shm_bytes` are the node's; of what is available, a rank may have its share.
    """

    cores: int
    cores_allowed: float
    cores_of_machine: int
    ranks_on_node: int
    memory_bytes: int
    memory_available_bytes: int
    shm_bytes: int | None
    shm_free_bytes: int | None
    reasons: tuple[str, ...]


def measure(root: Path = Path("/"), environ: Mapping[str, str] = os.environ, affinity: int | None = None) -> Budget:
    """The budget of this process. `root` holds /proc, /sys and /dev; tests give a recorded one."""
    machine, cgroup, ranks = _cores_of_machine(root), CgroupFiles(root), _ranks_on_node(environ)
    reasons: list[str] = []
    if affinity is None:
        affinity = machine
        if hasattr(os, "sched_getaffinity"):
            affinity = len(os.sched_getaffinity(0))
    if affinity < machine:
        reasons.append(f"the affinity mask allows {affinity} of {machine} cores")
    quota = cgroup.cpu_quota()
    if quota is not None and quota < affinity:
        reasons.append(f"the cgroup's CPU quota is {quota:g} cores")
    # A mask that all ranks share is that of their cgroup; one that is tighter was set for each rank. A quota is shared.
    own_mask = affinity * ranks <= (cgroup.cpuset_cores() or machine)
    share = float(affinity)
    if ranks > 1 and own_mask:
        reasons.append(f"each of the {ranks} ranks on this node has cores of its own")
    elif ranks > 1:
        reasons.append(f"{ranks} ranks share the node's cores")
        share = affinity / ranks
    if quota is not None:
        share = min(share, quota / ranks)

    for_loading = max(1, int(share - 1 - share / 16))
    if share >= 2:
        reasons.append(f"{share - for_loading:g} of {share:g} cores are left to the training process and the system")
    total, available = _memory(root, cgroup, reasons)
    shm_total, shm_free = _shm(root)
    return Budget(
        cores=for_loading,
        cores_allowed=share,
        cores_of_machine=machine,
        ranks_on_node=ranks,
        memory_bytes=total,
        memory_available_bytes=available // ranks,
        shm_bytes=shm_total,
        shm_free_bytes=shm_free,
        reasons=tuple(reasons),
    )


def on_linux() -> bool:
    return sys.platform == "linux"


class CgroupFiles:
    """The limits of the control groups this process is in, version 1 or 2. A limit set on a parent counts too."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._v2, self._v1 = _cgroup_folders(root)

    @property
    def version(self) -> str | None:
        """Which version holds the limits: v1, v2, or None without control groups."""
        if self._v1:
            return "v1"
        return "v2" if self._v2 else None

    def cpu_quota(self) -> float | None:
        """Cores this group may use on average, or None without a quota."""
        settings = [text_of(folder / "cpu.max") for folder in self._v2]
        for folder in self._v1.get("cpu", []):
            settings.append(f"{text_of(folder / 'cpu.cfs_quota_us')} {text_of(folder / 'cpu.cfs_period_us')}")
        pairs = (text.split() for text in settings)  # "max", or -1, is no quota
        return min((int(p[0]) / int(p[1]) for p in pairs if len(p) == 2 and all(map(str.isdigit, p))), default=None)

    def cpuset_cores(self) -> int | None:
        """How many cores the group is pinned to, or None where that is not said."""
        files = [folder / "cpuset.cpus.effective" for folder in self._v2]
        files += [folder / "cpuset.effective_cpus" for folder in self._v1.get("cpuset", [])]
        listed = next(filter(None, map(text_of, files)), None)
        return _count_of(listed) if listed else None

    def quota_periods(self) -> tuple[int, int] | None:
        """(periods in which the quota held the group back, all periods it ran in), so far; of the group held most."""
        found = []
        for folder in (*self._v2, *self._v1.get("cpu", [])):
            stat = table_of(folder / "cpu.stat")
            if stat.get("nr_periods"):
                found.append((stat.get("nr_throttled", 0), stat["nr_periods"]))
        return max(found, default=None)

    def memory(self) -> tuple[int, int] | None:
        """(limit, in use) of the tightest group, without the page cache it can give back; None without a limit."""
        found: list[tuple[int, int]] = []
        for folders, limit_name, used_name, cache_key in (
            (self._v2, "memory.max", "memory.current", "inactive_file"),
            (self._v1.get("memory", []), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            for folder in folders:
                limit, used = _number(folder / limit_name), _number(folder / used_name)
                if limit is not None and used is not None and limit < _NO_LIMIT_BYTES:
                    cache = table_of(folder / "memory.stat").get(cache_key, 0)
                    found.append((limit, max(0, used - cache)))
        return min(found, default=None)


def _cores_of_machine(root: Path) -> int:
    listed = re.findall(r"^cpu\d+ ", text_of(root / "proc/stat"), re.MULTILINE)
    return len(listed) or os.cpu_count() or 1


def _count_of(cpus: str) -> int:
    """How many are in a list such as "0-3,8"."""
    ends = (part.partition("-") for part in cpus.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _ranks_on_node(environ: Mapping[str, str]) -> int:
    for name in _RANKS_ON_NODE:
        digits = re.match(r"\d+", environ.get(name, ""))  # Slurm may write "4(x2)"
        if digits and int(digits[0]) > 0:
            return int(digits[0])
    return 1


def _memory(root: Path, cgroup: CgroupFiles, reasons: list[str]) -> tuple[int, int]:
    info = table_of(root / "proc/meminfo")
    if "MemTotal:" in info and "MemAvailable:" in info:
        total, available = info["MemTotal:"] * 1024, info["MemAvailable:"] * 1024
    elif on_linux():  # /proc is hidden
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        import psutil  # installed only there

        of_machine = psutil.virtual_memory()
        total, available = int(of_machine.total), int(of_machine.available)
    limited = cgroup.memory()
    if limited is not None and limited[0] < total:
        total = limited[0]
        available = min(available, max(0, limited[0] - limited[1]))
        reasons.append(f"the cgroup's memory limit is {total / 2**30:.1f} GiB")
    return total, available


def _shm(root: Path) -> tuple[int | None, int | None]:
    try:
        status = os.statvfs(root / "dev/shm")
    except (OSError, AttributeError):
        return None, None
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail


def _cgroup_folders(root: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """The folders of this process's groups, innermost first: version 2, and version 1 by controller."""
    membership: dict[str, str] = {}
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            membership[controller] = path
    v2: list[Path] = []
    v1: dict[str, list[Path]] = {}
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.partition(" ")
        if kind not in ("cgroup", "cgroup2"):
            continue
        mounted_part, mount_point = left.split(" ")[3:5]
        mount = root / mount_point.lstrip("/")
        if kind == "cgroup2":
            v2 = _up_from(mount, membership.get("", "/"), mounted_part)
        else:
            for controller in options.split(" ")[-1].split(","):
                if controller in membership:
                    v1[controller] = _up_from(mount, membership[controller], mounted_part)
    return v2, v1


def _up_from(mount: Path, path: str, mounted_part: str) -> list[Path]:
    """The group's folder and its parents up to the mount; in a container only the mount itself may be visible."""
    if f"{path}/".startswith(f"{mounted_part}/"):
        path = path.removeprefix(mounted_part)
    folder = mount / path.lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = mount
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]


def text_of(path: Path | str) -> str:
    """What a file says; empty where it cannot be read."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - read hundreds of times a second, and this is the fast way
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


def table_of(path: Path | str) -> dict[str, int]:
    """A file of "name number" lines, perhaps with a unit behind."""
    rows = (line.split(None, 2) for line in text_of(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.lstrip("-").isdigit() else None
