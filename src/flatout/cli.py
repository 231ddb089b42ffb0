"""The command line: one function a verb. A verb imports what it needs inside, so that --help is quick.

Whatever goes wrong by the person's mistake is one line on stderr and exit code 2; a gate that said no, exit code 1.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from flatout import __version__
from flatout.files import write_whole
from flatout.model.errors import (
    FlatoutError,
    GateFailed,
    NotSavedError,
    PlanError,
    RealWriteError,
    TraceError,
    UsageError,
)
from flatout.model.inputs import is_file, is_folder
from flatout.redact import redact_text

if TYPE_CHECKING:
    from rich.console import Console

    from flatout.model.plan import Plan
    from flatout.report.fixed import Price

INTERRUPTED = 130
READER_LEFT = 141
NOT_SAVED = 74  # from the trainer to the command around it, which has the last word and ends with 1

# The base of all complaints about arguments: click's, until typer took it over; the family tree stayed the same.
_ArgumentError: type[Exception] = cast("type[Exception]", typer.BadParameter.__mro__[2])


def _without_values(options: list[Any]) -> list[Any]:
    """A flag takes no value: typer would show `<bool>` behind each, its own --help among them."""
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    return options


class _Verbs(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))


class _Verb(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_values(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes = {name for option in self.params if not getattr(option, "is_flag", True) for name in option.opts}
        words = iter(args)
        for word in words:
            if word == "--" or not word.startswith("-"):  # from here on it is the command's
                break
            if word in takes and next(words, "") == "--":  # else a file of that name would be written
                raise UsageError(f"{word} needs a value before the --")
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Verbs,
    name="flatout",
    invoke_without_command=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Finds out why a GPU sits idle during PyTorch training, fixes it, and proves it.",
    epilog="Exit codes: 0 done, 1 a gate such as --fail-below said no, 2 a mistake in the command.",
)
_verb = partial(app.command, cls=_Verb)


def main() -> None:
    """The `flatout` command."""
    _fill_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that knows no × shows ? instead of a traceback
    try:
        code = app(prog_name="flatout", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as ended:
        # `flatout top | head` is no accident. typer and rich make 1 of it, which is a gate's word.
        if not isinstance(ended, BrokenPipeError) and not isinstance(ended.__context__, BrokenPipeError):
            raise
        _write_to_nowhere(1)
        sys.exit(READER_LEFT)
    except FlatoutError as problem:
        if problem.__cause__ is not None:  # it came out of the person's own code: where there, they want to know
            print(redact_text("".join(traceback.format_exception(problem.__cause__))), end="", file=sys.stderr)
        _complain(str(problem), problem.exit_code)
    except _ArgumentError as problem:
        _complain(getattr(problem, "format_message", problem.__str__)(), 2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fill_what_is_closed() -> None:
    """Of stdin, stdout and stderr, what whoever started us has closed: else files of ours would get their numbers.

    What we start finds them closed as we did, for Python hands on none of these.
    """
    for handle in range(3):
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    nowhere = partial(open, os.devnull, "w", encoding="utf-8")
    sys.stdout, sys.stderr = sys.stdout or nowhere(), sys.stderr or nowhere()


def _write_to_nowhere(*handles: int) -> None:
    """Whoever read what we write has left: Python would complain once more when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for handle in handles:
        os.dup2(nowhere, handle)
    os.close(nowhere)


@contextlib.contextmanager
def _keeping_the_exit_code() -> Iterator[None]:
    """The command has ended: whatever becomes of our words after it, its exit code is ours. rich makes SystemExit of a
    reader that has left."""
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, SystemExit, KeyboardInterrupt):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        _write_to_nowhere(1, 2)


def _complain(text: str, code: int) -> None:
    print(f"flatout: {' '.join(redact_text(text).split())}", file=sys.stderr)
    sys.exit(code)


# --- what options are made of -----------------------------------------------------------------------------------------

# Options of flatout's come first; from the command's first word on, all is the command's.
_TAKES_A_COMMAND = {"allow_extra_args": True, "allow_interspersed_args": False}


def _option(metavar: str, help: str, *, default: Any = None, **more: Any) -> Any:
    return typer.Option(default, metavar=metavar, help=help, **more)


def _argument(metavar: str, help: str, *, default: Any = None) -> Any:
    return typer.Argument(default, metavar=metavar, help=help)


def _flag(name: str, help: str, *, default: bool = False) -> Any:
    return typer.Option(default, name, help=help)


def _file_of(what: str) -> Any:
    return _option("FILE", f"Write {what}; - is stdout.")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"flatout {__version__}")
        raise typer.Exit


# --- the verbs --------------------------------------------------------------------------------------------------------


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@_verb()
def top(
    interval: float | None = _option("SECONDS", "Time between samples, 0.05 to 60. Default: 1."),
    duration: float | None = _option("SECONDS", "Measure so long without the live view, then sum up."),
    once: bool = _flag("--once", "Take one reading and exit."),
    gpu: list[int] | None = _option("INDEX", "Watch this card only (may be given again). Default: all."),
    pid: list[int] | None = _option(
        "PID",
        "Follow this training and its loader workers (may be given again). Default: whoever uses the cards.",
    ),
    target: str | None = _option(
        "NAME=BOUND,…",
        "Targets for the summary: sm, util, power (at least); fluctuation, temperature, cpu (at most); "
        "memory (a range). Example: sm=85,memory=70-90",
    ),
    fail_below: float | None = _option("PCT", "Exit with 1 when a card's mean SM active is below this."),
    json: str | None = _file_of("the summary (or the one reading) as JSON"),
    csv: str | None = _file_of("a row a sample"),
    record: Path | None = _option("DIR", "Record every sample into this new folder."),
    replay: Path | None = _option("DIR", "Show a recording instead of this machine."),
    speed: float | None = _option("TIMES", "How fast to play a recording in the live view. Default: 1."),
) -> None:
    """See what the GPU really does: live, or over a while with a verdict.

    GPU-Util says only that some kernel was there. Here you see what share of the card really worked (SM active), how
    it swings, and whether the CPU, the disk or the loader's workers hold it up.

    In a terminal this is a live view; q ends it with a summary. Piped or with --duration it prints a line a sample.
    """
    from flatout.top.session import TopOptions, run

    options = TopOptions(
        interval_s=interval,
        duration_s=duration,
        once=once,
        gpus=tuple(gpu) if gpu else None,
        pids=tuple(pid or ()),
        json_to=json,
        csv_to=csv,
        record_to=record,
        replay_from=replay,
        speed=speed,
        target=target,
        fail_below_pct=fail_below,
    )
    with _damage_in_a_line(replay) if replay is not None else contextlib.nullcontext():
        run(options)


@_verb()
def doctor(json: str | None = _file_of("what was found as JSON")) -> None:
    """See what flatout finds on this machine, what is missing, and what that costs.

    GPUs and their counters, driver, torch, the cores and memory a training may really use here, optional packages.
    """
    from flatout.doctor import examine, report_lines

    found = examine()
    if _write(json, found.to_json):
        print("\n".join(report_lines(found, _console().width)))


@_verb()
def check(
    script: Path | None = _argument("SCRIPT", "The training script, or the .sh that starts it."),
    flags: list[str] | None = _argument("-- FLAGS", "What you would give the script."),
    config: Path | None = _option("FILE", "Its config: YAML, JSON, or a Python file of constants."),
    data: Path | None = _option("DIR", "Measure how fast this folder can be read (two seconds)."),
    strict: bool = _flag("--strict", "Exit with 1 on a warning too."),
    json: str | None = _file_of("the list as JSON"),
) -> None:
    """Go through the list before training starts: script, config and machine. Runs nothing of yours.

    `flatout check train.py`, with its config: `flatout check train.py --config train.yaml`, with its flags:
    `flatout check train.py -- --num-workers 40`. Exit code 1 when a line failed.
    """
    _linux_only("check")
    from flatout.check import check as look_over
    from flatout.report.checklist import show
    from flatout.sample.hardware import Sampler

    with Sampler() as sampler:
        gpus = sampler.read().gpus
    found = look_over(script, flags=tuple(flags or ()), config=config, data=data, gpus=gpus or None)
    if _write(json, found.to_json):
        show(found, _console())
    if not found.passed(strict=strict):
        raise typer.Exit(1)


@_verb(options_metavar="[OPTIONS] -- COMMAND…", context_settings=_TAKES_A_COMMAND)
def run(
    context: typer.Context,
    trace: Path | None = _option("DIR", "Record into this new folder. Default: flatout-runs/TIME-NAME."),
    max_steps: int | None = _option(
        "N", "Stop after N training steps, then measure the ceiling. For trying out.", min=1
    ),
    xray: bool = _flag("--xray/--no-xray", "Take a few steps under the kernel profiler.", default=True),
    plan: Path | None = _option("FILE", "Make these changes to the run: what flatout fix has kept."),
    auto: bool = _flag("--auto", "Without any trial: flatout's loader, page-locked batches, copies ahead."),
    strict: bool = _flag("--strict", "With --auto: only what leaves every batch bit for bit as it was."),
    quiet: bool = _flag("--quiet", "No summary at the end."),
    json: str | None = _file_of("the account as JSON"),
    html: str | None = _file_of("the report as one HTML file"),
) -> None:
    """Run a training command and say where every second of GPU time went. The script stays as it is.

    `flatout run -- python train.py --epochs 3`, or your own launcher, word for word: torchrun, accelerate launch,
    bash train.sh, make train. `flatout run train.py` is short for `-- python train.py`.

    `--plan FILE` trains with what `flatout fix` has kept; `--auto` with the changes that are safe without any trial.

    Output, signals and exit code are the command's own; the summary comes after it. FLATOUT=off switches it all off.
    """
    _linux_only("run")
    from flatout.launch import launcher

    changes = _changes(plan, auto=auto, strict=strict)
    command = _command(context)
    _can_be_told(json, html)
    folder = trace or launcher.default_folder(command or ["run"])
    code = launcher.run(command, folder=folder, max_steps=max_steps, xray=xray, plan=changes)
    if os.environ.get("FLATOUT") != "off":
        with _keeping_the_exit_code():
            for recording in launcher.recordings(folder):
                if changes is not None:
                    _say_what_was_changed(recording)
                if _never_stepped(recording):
                    _say_that_it_never_stepped(recording, code, keep=trace is not None)
                else:
                    _account_for(recording, quiet=quiet, json_to=json, html_to=html)
            if trace is None:
                _leave_no_empty(folder.parent)
    raise typer.Exit(code)


def _say_that_it_never_stepped(recording: Path, code: int, *, keep: bool) -> None:
    """One that failed has said why: what it lacks is no question then."""
    from flatout.model.formatting import exit_in_words
    from flatout.report.account import WHAT_IS_COUNTED

    why = f"no optimizer step was seen: nothing to account for. {WHAT_IS_COUNTED}"
    if code:
        why = f"the command ended with {exit_in_words(code)} before its first step"
    print(f"flatout: {why}", file=sys.stderr)
    if not keep:
        shutil.rmtree(recording, ignore_errors=True)


def _never_stepped(recording: Path) -> bool:
    return not any(recording.glob("rank-*.jsonl"))


def _leave_no_empty(runs: Path) -> None:
    try:
        runs.rmdir()
    except OSError:  # it holds recordings, or was never made
        pass


def _changes(path: Path | None, *, auto: bool, strict: bool) -> Plan | None:
    """What to change in a run, from --plan or --auto."""
    from flatout.model import changes
    from flatout.model.plan import Plan

    if strict and not auto:
        raise UsageError("--strict goes with --auto")
    if path is not None and auto:
        raise UsageError("--plan and --auto: give one of them")
    if auto:
        return changes.auto(strict=strict)
    if path is None:
        return None
    plan = Plan.load(path)
    changes.check(plan, str(path))
    if not plan.changes:
        print(f"flatout: there is no change in {path}: the command runs as it is", file=sys.stderr)
    return plan


def _command(context: typer.Context) -> list[str]:
    """What comes after the options; a bare script is run with Python."""
    command = list(context.args)
    if command[:1] == ["--"]:
        command = command[1:]
    if command and command[0].endswith(".py"):
        command = ["python" if shutil.which("python") else sys.executable, *command]
    return command


@_verb(options_metavar="[OPTIONS] -- COMMAND…", context_settings=_TAKES_A_COMMAND)
def fix(
    context: typer.Context,
    budget: str = _option("TIME", "How long to try: 90s, 10m, 1h.", default="10m"),
    allow: str = _option(
        "NAME,…", "Try what changes learning too: batch-size, eval-interval, checkpoint-interval; all.", default=""
    ),
    only: str = _option("NAME,…", "Try these changes or classes only.", default=""),
    skip: str = _option("NAME,…", "Leave these changes or classes alone.", default=""),
    steps: int | None = _option("N", "Training steps a trial. Default: found by itself.", min=20),
    out: Path = _option("PLAN", "Where the plan goes.", default=Path("flatout-plan.yaml")),
    price: str | None = _option(
        "MONEY/h", "What an hour costs, such as 2.5/h, $2.5/h or 2.5EUR/h: says what an epoch costs."
    ),
    json: str | None = _file_of("the result as JSON"),
    html: str | None = _file_of("before and after as one HTML file"),
    unprotected: bool = _flag("--unprotected", "Go on where trials cannot be kept from all your files (docs/FIX.md)."),
) -> None:
    """Make a training faster: try the remedies on your command, keep those that pay, prove that training is the same.

    `flatout fix -- python train.py --epochs 90`. The command is run again and again for a few seconds, each time with
    one change more; nothing of yours is written or edited. What was kept is in flatout-plan.yaml: train with it by
    `flatout run --plan flatout-plan.yaml -- python train.py --epochs 90`. Ctrl-C leaves the plan so far.
    """
    _linux_only("fix")
    from flatout.fix.fix import fix as search
    from flatout.fix.offers import Wishes
    from flatout.launch import launcher
    from flatout.report import fix_views
    from flatout.report.fixed import report as report_of

    command = _command(context)
    if not command:
        raise UsageError("no command given: flatout fix -- python train.py …")
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: command not found")
    wishes, budget_s = Wishes.of(allow, only, skip), _seconds(budget)
    an_hour = _price(price) if price is not None else None
    runs = out.parent / launcher.default_folder([*command[:1], "fix.py"])  # the folder we are in may be read-only
    _can_be_told(json, html)
    for target in (out, runs.parent):
        _can_be_written(target, folder=target == runs.parent)
    with fix_views.Progress(_console(stderr=True), budget_s) as story:
        found = search(
            command, wishes, budget_s=budget_s, steps=steps, story=story, keep_in=runs, unprotected=unprotected
        )
    unsaved = _kept_plan(found.plan, out, worth_it=bool(found.kept))
    fixed = report_of(found, command, str(out), an_hour)
    if _write(json, fixed.to_json, html, lambda: fix_views.page(fixed)):
        fix_views.show(fixed, _console())
    if found.written:
        raise RealWriteError(found.written)
    if unsaved is not None:
        raise unsaved
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _kept_plan(plan: Plan, out: Path, *, worth_it: bool) -> PlanError | None:
    """Save what a fix has found, unless an earlier one found more; what is wrong with that waits for the report."""
    if not worth_it and _holds_changes(out):
        print(f"flatout: {out} is the plan of an earlier fix, and stays as it is", file=sys.stderr)
        return None
    try:
        _save_beside_older(plan, out)
    except PlanError as problem:
        print(plan.text(), file=sys.stderr)  # an hour of trials is not lost with a full disk
        return problem
    return None


def _holds_changes(out: Path) -> bool:
    """Whether a plan is there that is worth more than one without any change."""
    from flatout.model.plan import Plan

    try:
        return out.exists() and bool(Plan.load(out).changes)
    except PlanError:
        return True  # somebody is at work on it


def _save_beside_older(plan: Plan, out: Path) -> None:
    """Save a plan; one that was there with changes in it, which may have been edited, stays under another name."""
    before = out.read_bytes() if _holds_changes(out) else b""
    names = (out.with_name(f"{out.stem}-{number}{out.suffix}") for number in itertools.count(1))
    older = next(name for name in names if not name.exists()) if before not in (b"", plan.text().encode()) else None
    try:
        if older is not None:
            write_whole(older, before)
        plan.save(out)
    except (OSError, PlanError) as problem:
        if older is not None:
            older.unlink(missing_ok=True)
        why = problem if isinstance(problem, PlanError) else f"cannot write {older}: {problem.strerror}"
        raise PlanError(f"the plan is not saved, and what was there stays: {why}") from None
    if not plan.changes:
        print(f"flatout: there is no change in {out}: with it the command runs as it is", file=sys.stderr)
    if older is not None:
        print(f"flatout: the plan that was in {out} is in {older} now", file=sys.stderr)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"--budget {text}: a time such as 90s, 10m or 1h is wanted")
    return float(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, None: 1}[match[2]]


def _price(text: str) -> Price:
    from flatout.report.fixed import Price

    try:
        return Price.of(text)
    except ValueError:
        raise UsageError(f"--price {text}: give a price an hour, such as 2.5/h, $2.5/h or 2.5EUR/h") from None


@_verb()
def train(
    config: Path = _argument("CONFIG", "The YAML file that describes the training.", default=...),
    overrides: list[str] | None = _argument("KEY=VALUE", "Settings that go before the file's."),
    preset: str | None = _option("NAME", "fastest, small-memory or debug; goes before the file."),
    resume: bool = _flag("--resume", "Go on from the last run's newest whole checkpoint."),
    explain: bool = _flag("--explain", "Make the parts, print what would be in force, and why; no training."),
    gpus: int = _option("N", "Train on so many GPUs of this machine.", min=1, default=1),
    quiet: bool = _flag("--quiet", "Only what matters, for logs; no summary at the end."),
    here: bool = typer.Option(False, "--here", hidden=True),
) -> None:
    """Train what a YAML file describes, with every switch right: fast by default, or an error that says why not.

    `flatout train config.yaml train.batch_size=256 train.precision=bf16`; on several GPUs `--gpus 2`, or your own
    `torchrun --nproc-per-node 2 -m flatout train config.yaml`. It is recorded as by `flatout run`, with the same end.
    """
    _linux_only("train")
    words = [*(overrides or ()), *(["log.quiet=true"] if quiet else [])]
    if here or "RANK" in os.environ or (explain and gpus == 1):
        from flatout.engine.assemble import main as train_here

        record = not (explain or here)  # under torchrun each rank records itself; `here` somebody else does
        try:
            recorded = train_here(
                config, words, preset=preset, resume=resume, explain=explain, record=record, gpus=gpus
            )
        except NotSavedError as problem:
            problem.exit_code = NOT_SAVED if here else problem.exit_code
            raise
        if recorded is not None and os.environ.get("RANK") == "0":
            _account_for(recorded, quiet=quiet)
        return
    from flatout.launch import launcher
    from flatout.sample import budget

    if not is_file(config):  # a mistake that need not wait for torch
        why = "it is a folder" if is_folder(config) else "there is no such file"
        raise UsageError(f"cannot read {config}: {why}")
    options = [*(["--preset", preset] if preset is not None else []), *(["--resume"] if resume else [])]
    options += [*(["--explain"] if explain else []), "--gpus", str(gpus)]
    command = [sys.executable, "-m", "flatout", "train", "--here", *options, "--", str(config), *words]
    if gpus > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(budget.measure().cores_allowed / gpus))))
        command = [sys.executable, "-m", "flatout.launch.launch_ranks", str(gpus), *command]
    folder = launcher.default_folder([f"{config.stem}.py"])
    code = launcher.run(command, folder=folder, ends_with_us=True)
    if os.environ.get("FLATOUT") != "off":
        with _keeping_the_exit_code():
            for recording in launcher.recordings(folder):
                if _never_stepped(recording):  # and has said why
                    shutil.rmtree(recording, ignore_errors=True)
                else:
                    _account_for(recording, quiet=quiet)
            _leave_no_empty(folder.parent)
    if code == NOT_SAVED:
        raise NotSavedError("the final weights are not saved, for the reason given at the end of the training")
    raise typer.Exit(code)


@_verb()
def report(
    trace: list[Path] = _argument("TRACE", "A run's folder; of several machines, all.", default=...),
    json: str | None = _file_of("the report as JSON"),
    html: str | None = _file_of("the report as one HTML file"),
) -> None:
    """Say what a recorded run shows: the verdict, what to change, and where every second went.

    The HTML file needs nothing beside it and no network. Folders recorded on several machines become one report.
    """
    with _damage_in_a_line(*trace):
        _report(trace, None if "-" in (json, html) else _console(), json_to=json, html_to=html)


@contextlib.contextmanager
def _damage_in_a_line(*folders: Path) -> Iterator[None]:
    """The last net under what shows traces. Values are checked as they are read; that they fit together is not."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as problem:
        place = traceback.extract_tb(problem.__traceback__)[-1]
        why = f"{type(problem).__name__}: {problem}, at {Path(place.filename).name}:{place.lineno}"
        which = " or ".join(map(str, folders))
        raise TraceError(f"{which} cannot be shown: this trace is damaged ({why})") from None


def _report(folders: list[Path], console: Console | None, *, json_to: str | None, html_to: str | None) -> None:
    from flatout.diagnose.rules import diagnose
    from flatout.report import findings, terminal
    from flatout.report.account import account
    from flatout.report.gather import gather
    from flatout.report.html import page

    recorded, by_rank = gather(folders)
    result = account(recorded, ", ".join(str(folder) for folder in folders), by_rank)
    found = diagnose(recorded)
    _write(json_to, lambda: findings.to_json(result, found), html_to, lambda: page(recorded, result, found))
    if console is not None:
        findings.show(result, found, console)
        terminal.show(result, console)


def _say_what_was_changed(folder: Path) -> None:
    """A paragraph on stderr; where there is no trace to read, the account says so."""
    from flatout import trace
    from flatout.report.applied_changes import paragraph

    with contextlib.suppress(FlatoutError):
        if text := paragraph(trace.read(folder)):
            print(f"flatout: {text}", file=sys.stderr)


def _account_for(folder: Path, *, quiet: bool, json_to: str | None = None, html_to: str | None = None) -> None:
    """The summary after a run, on stderr; what is wrong with it never changes the run's exit code."""
    try:
        _report([folder], None if quiet else _console(stderr=True), json_to=json_to, html_to=html_to)
    except FlatoutError as problem:
        print(f"flatout: {redact_text(str(problem))}", file=sys.stderr)
    except Exception as problem:  # ours, and the training is not to suffer from it
        reason = redact_text(f"{type(problem).__name__}: {problem}")
        print(f"flatout: no summary ({reason}); the recording is in {folder}", file=sys.stderr)


@_verb()
def compare(
    a: Path = _argument("A", "The run before.", default=...),
    b: Path = _argument("B", "The run after.", default=...),
    json: str | None = _file_of("the comparison as JSON"),
    html: str | None = _file_of("the comparison as one HTML file"),
    fail_if_slower: float | None = _option(
        "PCT", "Exit with 1 when B is shown to be slower by more than this.", min=0.0
    ),
) -> None:
    """Compare two recorded runs: is B faster than A, beyond the noise of both?

    "No difference shown" is an answer. Runs that cannot be compared are shown side by side, with the reason.
    """
    from flatout import trace
    from flatout.report import compare_views
    from flatout.report.compare import compare as compare_runs

    with _damage_in_a_line(a, b):
        first, second = trace.read(a), trace.read(b)
        result = compare_runs(first, second, (str(a), str(b)))
        if _write(json, result.to_json, html, lambda: compare_views.page(result, first, second)):
            compare_views.show(result, _console())
    if fail_if_slower is not None:
        if result.typical is None:
            raise UsageError(f"cannot tell whether {b} is slower than {a}: {'; '.join(result.reasons)}")
        if result.slower_than(fail_if_slower):
            raise GateFailed(f"{b} is shown to be more than {fail_if_slower:g}% slower than {a}")


# --- where results go -------------------------------------------------------------------------------------------------


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _write(
    json_to: str | None, data: Callable[[], Any], html_to: str | None = None, page: Callable[[], str] = str
) -> bool:
    """Write a result where it was asked for; whether stdout is still free for words."""
    import json

    if json_to is not None:
        _write_text(json_to, json.dumps(data(), indent=2, default=str) + "\n")
    if html_to is not None:
        _write_text(html_to, page())
    return "-" not in (json_to, html_to)


def _can_be_told(json_to: str | None, html_to: str | None) -> None:
    """Complain while nothing is lost: hours of training later would be late to say so."""
    if json_to == html_to == "-":
        raise UsageError("--json - and --html - would both go to stdout: name a file for one of them")
    for name in filter(None, (json_to, html_to)):
        if name != "-":
            _can_be_written(Path(name))
    if html_to is not None and importlib.util.find_spec("plotly") is None:
        raise UsageError("--html needs plotly, which is not installed here: pip install plotly")


def _can_be_written(target: Path, *, folder: bool = False) -> None:
    above = target.absolute().parent
    if not is_folder(above):
        raise UsageError(f"cannot write {target}: there is no folder {above}")
    if is_folder(target) and not folder:
        raise UsageError(f"cannot write {target}: it is a folder")
    try:
        there = target.exists()
    except OSError as problem:
        raise UsageError(f"cannot write {target}: {problem.strerror}") from None
    if not os.access(target if there else above, os.W_OK):
        raise UsageError(f"cannot write {target}: no permission, or a read-only disk")


def _write_text(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        write_whole(Path(target), text)
    except OSError as problem:
        raise UsageError(f"cannot write {target}: {problem.strerror}") from None


def _linux_only(verb: str) -> None:
    if sys.platform != "linux":
        raise UsageError(f"flatout {verb} is Linux only; flatout top, doctor, report and compare work here")
