"""What this process may really use: cores, memory and /dev/shm.

`os.cpu_count()` counts the machine. A container's quota, an affinity mask and the other ranks on the
node leave less.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Where launchers say how many ranks share the node; the first that is set counts.
_RANKS_ON_NODE = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
)
_V2 = ""  # stands for all controllers, as in /proc/self/cgroup
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one rank may use. `cores` is for loading data: what training itself and the system leave.

    `memory_bytes` and `shm_bytes` are the node's; `memory_available_bytes` is the rank's share.
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
    """The budget of this process. Tests give a recorded machine as `root`."""
    cgroup, ranks = CgroupFiles(root), _ranks_on_node(environ)
    reasons: list[str] = []
    machine = len(re.findall(r"^cpu\d+ ", text_of(root / "proc/stat"), re.MULTILINE)) or os.cpu_count() or 1
    if affinity is None:
        affinity = machine
        if hasattr(os, "sched_getaffinity"):
            affinity = len(os.sched_getaffinity(0))
    if affinity < machine:
        reasons.append(f"the affinity mask allows {affinity} of {machine} cores")
    quota = cgroup.cpu_quota()
    if quota is not None and quota < affinity:
        reasons.append(f"the cgroup's CPU quota is {quota:g} cores")
    # A mask that all ranks share is that of their cgroup; one that is tighter was set for each rank.
    # A quota is shared.
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

    memory_bytes, available_bytes = _memory(root)
    limit = cgroup.memory()
    if limit is not None and limit[0] < memory_bytes:
        memory_bytes, available_bytes = limit[0], min(available_bytes, max(0, limit[0] - limit[1]))
        reasons.append(f"the cgroup's memory limit is {memory_bytes / 2**30:.1f} GiB")
    shm_bytes, shm_free_bytes = size_of_shm(root) or (None, None)
    return Budget(
        cores=for_loading,
        cores_allowed=share,
        cores_of_machine=machine,
        ranks_on_node=ranks,
        memory_bytes=memory_bytes,
        memory_available_bytes=available_bytes // ranks,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        reasons=tuple(reasons),
    )


def size_of_shm(root: Path) -> tuple[int, int] | None:
    """How large /dev/shm is, and how much of it is free, in bytes."""
    try:
        status = os.statvfs(root / "dev/shm")
    except (OSError, AttributeError):  # Windows has neither
        return None
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail


class CgroupFiles:
    """The limits of this process's control groups, version 1 or 2. A limit set on a parent counts too."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._folders = _cgroup_folders(root)

    @property
    def version(self) -> str | None:
        """The version that holds the limits: v1, v2, or None without control groups."""
        if self._folders.keys() - {_V2}:
            return "v1"
        return "v2" if self._folders else None

    def cpu_quota(self) -> float | None:
        """How many cores this group may use on average, or None without a quota."""
        quotas = []
        for folder in self._of("cpu"):
            v1 = f"{text_of(folder / 'cpu.cfs_quota_us')} {text_of(folder / 'cpu.cfs_period_us')}"
            quota, _, period = (text_of(folder / "cpu.max") or v1).partition(" ")
            if quota.isdigit() and period.isdigit():  # "max", or -1, is no quota
                quotas.append(int(quota) / int(period))
        return min(quotas, default=None)

    def cpuset_cores(self) -> int | None:
        """How many cores the group is pinned to, or None where that is not said."""
        for folder in self._of("cpuset"):
            listed = text_of(folder / "cpuset.cpus.effective") or text_of(folder / "cpuset.effective_cpus")
            if listed:
                ends = (part.partition("-") for part in listed.split(","))  # such as "0-3,8"
                return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
        return None

    def quota_periods(self) -> tuple[int, int] | None:
        """(periods in which the quota held the group back, all periods it ran in), so far; of the
        group held most."""
        stats = (table_of(folder / "cpu.stat") for folder in self._of("cpu"))
        return max(
            ((stat.get("nr_throttled", 0), stat["nr_periods"]) for stat in stats if stat.get("nr_periods")),
            default=None,
        )

    def memory(self) -> tuple[int, int] | None:
        """(limit, in use) of the tightest group, without the page cache it can give back; None
        without a limit."""
        limits = []
        for folder in self._of("memory"):
            limit = text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes")
            used = text_of(folder / "memory.current") or text_of(folder / "memory.usage_in_bytes")
            if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT_BYTES:
                stat = table_of(folder / "memory.stat")
                cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                limits.append((int(limit), max(0, int(used) - cache)))
        return min(limits, default=None)

    def _of(self, controller: str) -> list[Path]:
        return [*self._folders.get(_V2, ()), *self._folders.get(controller, ())]


def _ranks_on_node(environ: Mapping[str, str]) -> int:
    for name in _RANKS_ON_NODE:
        digits = re.match(r"\d+", environ.get(name, ""))  # Slurm may write "4(x2)"
        if digits and int(digits[0]) > 0:
            return int(digits[0])
    return 1


def _memory(root: Path) -> tuple[int, int]:
    """The machine's memory, all of it and what is available."""
    info = table_of(root / "proc/meminfo")
    if "MemTotal:" in info and "MemAvailable:" in info:
        return info["MemTotal:"] * 1024, info["MemAvailable:"] * 1024
    if sys.platform != "linux":
        import psutil  # installed only there

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    page_bytes = os.sysconf("SC_PAGE_SIZE")  # /proc is hidden
    return os.sysconf("SC_PHYS_PAGES") * page_bytes, os.sysconf("SC_AVPHYS_PAGES") * page_bytes


def _cgroup_folders(root: Path) -> dict[str, list[Path]]:
    """The folders of this process's groups by controller, innermost first. Version 2 has one for all
    of them."""
    paths = {_V2: "/"}
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    folders: dict[str, list[Path]] = {}
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        mounted, _, file_system = line.partition(" - ")
        words = file_system.split(" ")
        if words[0] not in ("cgroup", "cgroup2"):
            continue
        named = [_V2] if words[0] == "cgroup2" else words[-1].split(",")
        mounted_part, mount_point = mounted.split(" ")[3:5]
        for controller in paths.keys() & set(named):
            folders[controller] = _up_from(root / mount_point.lstrip("/"), paths[controller], mounted_part)
    return folders


def _up_from(mount: Path, path: str, mounted_part: str) -> list[Path]:
    """The group's folder and its parents up to the mount; in a container only the mount itself may be
    visible."""
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
