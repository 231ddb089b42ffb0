"""What every test gets: a watch for leaks, samples to feed, and a skip for what needs a GPU.

A test that leaves a thread, a child process, a shared-memory segment or an environment variable behind fails.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import psutil
import pytest

from flatout.trace import GpuProcess, GpuSample, HostSample, ProcessSample, Sample

LEAVE_S = 5.0  # how long what is ending anyway may take to end
SHM = Path("/dev/shm")
LIBRARY_SEARCH = ("ldconfig", "gcc", "ld", "uname")  # what ctypes and platform start to look something up
not_quick: list[str] = []  # why the test that runs now is none for `make quick`
TORCHS = re.compile(r"torch_(?P<pid>\d+)_\w+")

# Set once for the whole process by pytest, by torch's compiler and by libraries when first imported.
NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "TRITON_", "KMP_", "QT_", "CUDA_MODULE_LOADING", "TF2_BEHAVIOR")

# The networks of tests are tiny: sharing them out among threads costs many times what it saves.
THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", "1"))

# No test depends on being fast, on a busy machine either.
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which hands it on to every child
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Fails a test whose threads outlive it."""
    before = set(threading.enumerate())
    yield
    started = {t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}  # not a library's own
    for thread in started - before:
        thread.join(LEAVE_S)
        assert not thread.is_alive(), f"the test left a thread behind: {thread.name}"


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fails a test whose child processes outlive it, and ends them."""
    before = _children()
    yield
    left = _children() - before
    _, alive = psutil.wait_procs(left, timeout=LEAVE_S) if left else ((), ())
    names = [_command(process) for process in alive]
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=LEAVE_S)
    assert not names, f"the test left processes behind: {names}"


@pytest.fixture(autouse=True)
def no_shared_memory_left_behind() -> Iterator[None]:
    """Fails a test after which /dev/shm holds something new, unless another program has it open.

    What a worker of torch's own loader leaves that ends between naming a segment and taking the name away is torch's.
    """
    before = _segments()
    yield
    for name in _segments() - before:
        if (of := TORCHS.fullmatch(name)) and not psutil.pid_exists(int(of["pid"])):
            (SHM / name).unlink(missing_ok=True)
    end_s = time.monotonic() + LEAVE_S
    while (left := _not_held_by_others(_segments() - before)) and time.monotonic() < end_s:
        time.sleep(0.05)  # a process that ended a moment ago may still be cleaned up after
    assert not left, f"the test left shared memory behind: {sorted(left)}"


@pytest.fixture(autouse=True)
def no_number_of_threads_left_behind() -> Iterator[None]:
    """Puts torch's number of threads back, which engine and workloads set for themselves."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def no_environment_left_behind() -> Iterator[None]:
    """Fails a test that changes the environment for the next one, and puts it right again."""
    before = dict(os.environ)
    yield
    names = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    changed = sorted(name for name in names if not name.lstrip("_").startswith(NOT_OURS))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test changed the environment: {changed}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--quick`: skip every test that starts a process or compiles (make quick)."""
    parser.addoption("--quick", action="store_true", help="skip every test that starts a process or compiles")


def pytest_configure(config: pytest.Config) -> None:
    """With --quick, a test is skipped at the moment it starts a process: no list of such tests to keep."""
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not config.getoption("--quick") or starts_workers:
        return
    config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")  # a skipped test leaves things half built
    config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")
    import multiprocessing.util

    import torch

    start_process = subprocess.Popen.__init__

    def start_or_skip(self: Any, args: Any, *more: Any, **options: Any) -> None:
        if Path(os.fspath(args if isinstance(args, str | os.PathLike) else args[0])).name not in LIBRARY_SEARCH:
            _skip_process()
        start_process(self, args, *more, **options)

    subprocess.Popen.__init__ = start_or_skip  # type: ignore[method-assign]
    os.fork = os.posix_spawn = multiprocessing.util.spawnv_passfds = _skip_process  # type: ignore[assignment]
    torch.compile = _skip_compile


def _skip_process(*_: object, **__: object) -> NoReturn:
    not_quick.append("starts a process")
    pytest.skip(not_quick[0])


def _skip_compile(*_: object, **__: object) -> NoReturn:
    not_quick.append("compiles")
    pytest.skip(not_quick[0])


def pytest_runtest_logstart() -> None:
    not_quick.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test that was skipped on another thread, or left something half built, did not fail."""
    report: Any = yield
    if not_quick and report.failed:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {not_quick[0]}")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `timing` are repeated, and only those. Everything in tests/gpu is skipped without a GPU."""
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=2))
        if Path(__file__).parent / "gpu" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    needy = [item for item in items if item.get_closest_marker("gpu")]
    missing = _why_no_gpu() if needy else None
    if missing:
        for item in needy:
            item.add_marker(pytest.mark.skip(reason=missing))


def pytest_collection_finish() -> None:
    """What is imported by now stays, and each collection of garbage would look through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Libraries complain when what they made is still there at the end."""
    gc.unfreeze()


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    """Builds a Sample of one GPU: `make_sample(3.0, sm=80, util=95, cpu=40)`."""
    return build_sample


def build_sample(
    time_s: float = 1.0,
    *,
    interval_s: float = 1.0,
    sm: float | None = None,
    util: float | None = None,
    pulses: tuple[float, ...] = (),
    cpu: float | None = 10.0,
    workers: int = 0,
    trainer_cpu: float | None = None,
    gpu: dict[str, Any] | None = None,
    host: dict[str, Any] | None = None,
    gpus: int = 1,
) -> Sample:
    """One second of a machine with a GPU half full of memory; `gpu` and `host` set any other field."""
    gpu_fields: dict[str, Any] = {
        "name": "NVIDIA H200",
        "sm_active_pct": sm,
        "gpu_util_pct": util,
        "pulses": pulses,
        "memory_used_bytes": 70 << 30,
        "memory_total_bytes": 140 << 30,
        "power_w": 350.0,
        "power_limit_w": 700.0,
        "temperature_c": 60.0,
        "sm_clock_mhz": 1980.0,
        "sm_clock_max_mhz": 1980.0,
        "throttle": (),
        "processes": (GpuProcess(pid=100, used_bytes=60 << 30),),
    }
    machine: dict[str, Any] = {
        "cpu_pct": cpu,
        "cores_pct": (cpu,) * 16 if cpu is not None else None,
        "iowait_pct": 0.0,
        "memory_used_bytes": 32 << 30,
        "memory_total_bytes": 128 << 30,
    }
    processes = []
    if trainer_cpu is not None:
        processes.append(ProcessSample(pid=100, role="trainer", name="python", cpu_pct=trainer_cpu, rss_bytes=1 << 30))
    for place in range(workers):
        processes.append(ProcessSample(pid=101 + place, role="worker", name="pt_data_worker", cpu_pct=50.0))
    return Sample(
        time_s=time_s,
        interval_s=interval_s,
        host=HostSample(**(machine | (host or {}))),
        gpus=tuple(GpuSample(index=i, uuid=f"GPU-{i}", **(gpu_fields | (gpu or {}))) for i in range(gpus)),
        processes=tuple(processes),
    )


def _children() -> set[psutil.Process]:
    """Children of this process; multiprocessing's own book-keeper lives on by design."""
    return {child for child in psutil.Process().children() if "multiprocessing.resource_tracker" not in _command(child)}


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid}"


def _segments() -> set[str]:
    """What is in /dev/shm, but for semaphores: those that a process was killed over may be of any test."""
    names = {path.name for path in SHM.iterdir()} if SHM.is_dir() else set()
    return {name for name in names if not name.startswith("sem.mp-")}


def _not_held_by_others(names: set[str]) -> set[str]:
    """Those that no process outside this test has open or mapped: other programs use /dev/shm too."""
    if not names:
        return names
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    held: set[str] = set()
    for process in psutil.process_iter():
        if process.pid in family:
            continue
        try:
            paths = {file.path for file in process.open_files()} | {entry.path for entry in process.memory_maps()}
        except (psutil.Error, OSError):
            continue
        held |= {name for name in names if f"{SHM}/{name}" in paths}
    return names - held


@functools.cache
def _why_no_gpu() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except Exception as problem:  # no driver, no library: whatever it is, it is the reason
        return f"no NVIDIA driver answers: {problem}"
    if count == 0:
        return "there is no NVIDIA GPU"
    import torch

    return None if torch.cuda.is_available() else "this torch has no CUDA"
