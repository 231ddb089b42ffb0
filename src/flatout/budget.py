"""What this process may really use: cores, memory and /dev/shm.

`os.cpu_count()` counts the machine. A container's quota, an affinity mask and the other ranks on the node leave less,
and advice that overlooks them ("48 workers" on 2 cores) is worse than none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Budget", "CgroupFiles", "measure"]

# Launchers that say how many ranks share the node, in the order in which they are believed.
_RANKS_ON_NODE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one rank may use. `cores` is for loading data: what is left beside training itself and the system."""

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
    machine = os.cpu_count() or 1
    reasons: list[str] = []
    cores = float(machine)
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    if affinity < cores:
        cores = float(affinity)
        reasons.append(f"the affinity mask allows {affinity} of {machine} cores")
    cgroup = CgroupFiles(root)
    quota = cgroup.cpu_quota()
    if quota is not None and quota < cores:
        cores = quota
        reasons.append(f"the cgroup's CPU quota is {quota:g} cores")

    ranks = _ranks_on_node(environ)
    share = cores
    if ranks > 1:
        if affinity * ranks <= machine:
            reasons.append(f"each of the {ranks} ranks on this node has cores of its own")
        else:
            share = cores / ranks
            reasons.append(f"{ranks} ranks share the node's cores")

    total, available = _memory(cgroup, reasons)
    shm = _shm(root)
    return Budget(
        cores=max(1, int(share - 1 - share / 16)),
        cores_allowed=share,
        cores_of_machine=machine,
        ranks_on_node=ranks,
        memory_bytes=total,
        memory_available_bytes=available // ranks,
        shm_bytes=shm[0] if shm else None,
        shm_free_bytes=shm[1] if shm else None,
        reasons=tuple(reasons),
    )


class CgroupFiles:
    """The limits of the control groups this process is in, version 1 or 2. A limit set on a parent counts too."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._v2, self._v1 = _cgroup_folders(root)

    def cpu_quota(self) -> float | None:
        """Cores this group may use on average, or None without a quota."""
        quotas: list[float] = []
        for folder in self._v2:
            quota, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
            if quota != "max":
                quotas.append(int(quota) / int(period or 100_000))
        for folder in self._v1.get("cpu", []):
            quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
            if quota_us is not None and period_us and quota_us > 0:
                quotas.append(quota_us / period_us)
        return min(quotas, default=None)

    def throttled_us(self) -> int | None:
        """Microseconds for which the quota has held this group back, so far."""
        for folder, key, scale in [
            *((f, "throttled_usec", 1) for f in self._v2[:1]),
            *((f, "throttled_time", 1000) for f in self._v1.get("cpu", [])[:1]),
        ]:
            value = _table(folder / "cpu.stat").get(key)
            if value is not None:
                return value // scale
        return None

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
                    cache = _table(folder / "memory.stat").get(cache_key, 0)
                    found.append((limit, max(0, used - cache)))
        return min(found, default=None)


def _ranks_on_node(environ: Mapping[str, str]) -> int:
    for name in _RANKS_ON_NODE:
        digits = environ.get(name, "").partition("(")[0]  # Slurm may write "4(x2)"
        if digits.isdigit() and int(digits) > 0:
            return int(digits)
    return 1


def _memory(cgroup: CgroupFiles, reasons: list[str]) -> tuple[int, int]:
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    limited = cgroup.memory()
    if limited is not None and limited[0] < total:
        total = limited[0]
        available = min(available, max(0, limited[0] - limited[1]))
        reasons.append(f"the cgroup's memory limit is {total / 2**30:.1f} GiB")
    return total, available


def _shm(root: Path) -> tuple[int, int] | None:
    try:
        status = os.statvfs(root / "dev/shm")
    except (OSError, AttributeError):
        return None
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail


def _cgroup_folders(root: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """The folders of this process's groups, innermost first: version 2, and version 1 by controller."""
    membership: dict[str, str] = {}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            membership[controller] = path
    v2: list[Path] = []
    v1: dict[str, list[Path]] = {}
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
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
    inside = path[len(mounted_part) :] if mounted_part != "/" and path.startswith(mounted_part) else path
    folder = mount / inside.lstrip("/")
    if not folder.is_dir():
        folder = mount
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """A file of "name number" lines."""
    pairs = (line.split() for line in (_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
