"""An Account as text for a terminal: at most 80 columns, no colour when piped."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from flatout.diagnose.breakdown import Breakdown, Part
from flatout.diagnose.rank_metrics import DISTURBED
from flatout.report.account import Account, Workers
from flatout.report.chart_data import words
from flatout.trace import Xray

WIDTH = 80
_LABEL = 9
_NAME, _SHORT_NAME = 36, 26
_BAR = 12
_SMALL = 0.002
_EIGHTHS = " ▏▎▍▌▋▊▉"


def show(account: Account, console: Console) -> None:
    """Print the account."""
    width = min(WIDTH, console.width)
    headline = wrapped("; ".join(_headline(account)), width, _LABEL)
    console.print(Text.assemble(("flatout  ", "bold"), headline), soft_wrap=True)
    print_unpadded(_table(account.breakdown, WIDTH - width), console)
    for label, text in _remarks(account):
        console.print(Text.assemble((f"{label:<{_LABEL}}", "dim"), wrapped(text, width, _LABEL)), soft_wrap=True)


def print_unpadded(thing: RenderableType, console: Console) -> None:
    """Print it without the spaces that rich leaves at the ends of lines: a pipe or a file has no use for them."""
    for segments in console.render_lines(thing, pad=False):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        console.print(line, soft_wrap=True)


def print_table(console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]], *, figures: bool = True) -> None:
    """Print rows under their heads; all columns but the first are figures, set to the right, unless told otherwise."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if figures and place else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    print_unpadded(table, console)


def wrapped(text: str, width: int = WIDTH, indent: int = 0) -> str:
    """Text in lines that leave room for an indent, and have it from the second on; a path or a flag stays whole."""
    lines = textwrap.wrap(text, width - indent, break_on_hyphens=False, break_long_words=False)
    return f"\n{'':<{indent}}".join(lines)


def _headline(account: Account) -> list[str]:
    b = account.breakdown
    median, p95 = b.step_ms.quantile(0.5), b.step_ms.quantile(0.95)
    words = [f"{b.steps:,} steps in {duration(b.training_ms)} (of {duration(b.wall_ms)})"]
    if median is not None and p95 is not None:
        words.append(f"median step {ms(median)}, p95 {ms(p95)}")
    if b.samples_per_s is not None:
        words.append(f"{b.samples_per_s:,.0f} samples/s")
    if account.ranks > 1:
        words.append(f"rank 0 of {account.ranks}")
        each = [rank.samples_per_s for rank in account.by_rank]
        if None not in each:
            words.append(f"all of them {sum(filter(None, each)):,.0f} samples/s")
    return words


def _table(b: Breakdown, missing: int) -> Table:
    """The phases; of the columns that are missing in a narrow terminal, the names give way first, then the bars."""
    name_width = max(_SHORT_NAME, _NAME - missing)
    bar_width = max(0, _BAR - max(0, missing - (_NAME - _SHORT_NAME)))
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_edge=False, header_style="dim")
    on_gpu = any(part.gpu_idle_ms is not None for part in b.training)
    table.add_column("where training's time went", width=name_width, no_wrap=True)
    table.add_column("", width=bar_width)
    table.add_column("share", justify="right")
    table.add_column("a step", justify="right")
    if on_gpu:
        table.add_column("GPU idle", justify="right")
    shown = [p for p in b.training if p.share >= _SMALL]
    for part in shown:
        cells: list[Text | str] = [_name(part, name_width), _bar(part.share, bar_width)]
        cells += [f"{part.share:6.1%}", ms(part.ms / max(1, b.steps))]
        if on_gpu:
            cells.append(ms(part.gpu_idle_ms / max(1, b.steps)) if part.gpu_idle_ms is not None else "")
        table.add_row(*cells)
    small = sum(p.ms for p in b.training if p.share < _SMALL)
    if small:
        table.add_row("smaller parts", "", f"{small / b.training_ms:6.1%}", ms(small / max(1, b.steps)))
    return table


def _name(part: Part, width: int) -> str:
    """A part in words, with the end of its file:line as far as there is room."""
    name = words(part.name)
    if not part.where:
        return name
    room = width - len(name) - 2
    if room < 2:
        return name
    return f"{name}  {part.where if len(part.where) <= room else '…' + part.where[1 - room :]}"


def _bar(share: float, width: int) -> Text:
    """In eighths of a cell: in a narrow terminal it has few."""
    eighths = round(8 * share * width)
    return Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip() if eighths else "▏"[:width], style="cyan")


def _remarks(account: Account) -> list[tuple[str, str]]:
    b = account.breakdown
    remarks = []
    if most := ceiling(b):
        remarks.append(("ceiling", most))
    if account.gpu.get("sm_active_pct") is not None:
        active, util, power = (account.gpu.get(n, 0.0) for n in ("sm_active_pct", "gpu_util_pct", "power_w"))
        remarks.append(("GPU", f"SM active {active:.0f}%, GPU-Util {util:.0f}%, {power:.0f} W: means over the run"))
    if account.xray is not None:
        remarks.append(("X-ray", _xray(account.xray)))
    remarks += [("loading", _worker_line(workers)) for workers in account.workers]
    if account.own_share is not None:
        of_it = f"{account.own_share:.2%}" if account.own_share >= 5e-5 else "below 0.01%"
        remarks.append(("cost", f"measuring took about {account.own_us_per_step:.0f} µs a step ({of_it})"))
    remarks += [("note", note.text) for note in account.notes]
    remarks.append(("trace", account.folder))
    return remarks


def ceiling(b: Breakdown) -> str | None:
    """How fast the same steps would be, as measured or else as worked out; None where others had the cores then."""
    for most, how in ((b.ceiling_samples_per_s, "with the data there"), (b.replay_samples_per_s, "without the loader")):
        if most and b.samples_per_s and most > DISTURBED * b.samples_per_s:
            faster = most / b.samples_per_s
            return f"{most:,.0f} samples/s {how} ({faster:.1f}×)" if faster > 1 else f"no faster {how}"
    return None


def _xray(xray: Xray) -> str:
    words = [f"GPU busy {xray.busy_ms / xray.wall_ms:.0%} in {xray.steps} steps"]
    median = xray.kernel_us.quantile(0.5)
    words.append(f"{xray.kernels / max(1, xray.steps):,.0f} kernels a step, half below {median or 0:.0f} µs")
    if xray.matrix_ms:
        words.append(f"tensor cores in {xray.tensor_core_ms / xray.matrix_ms:.0%} of matrix time")
    if "HtoD Pageable" in xray.copies_ms:
        words.append("copies from pageable memory")
    if xray.recovered is False:
        words.append("the step time did not recover afterwards")
    return "; ".join(words)


def _worker_line(w: Workers) -> str:
    median, worst = w.sample_ms.quantile(0.5) or 0.0, w.sample_ms.quantile(1.0) or 0.0
    words = [f"{w.who} on {w}: {ms(median)} a sample (worst {ms(worst)})"]
    if w.workers:
        words.append(f"busy {w.busy_share:.0%}")
    words.append(f"on a core {min(1.0, w.cpu_share):.0%} of that")
    if w.transforms_ms:
        name, spent = max(w.transforms_ms.items(), key=lambda item: item[1])
        words.append(f"{name} takes {ms(spent)}")
    return ", ".join(words)


def ms(value: float) -> str:
    """Milliseconds with as many digits as mean something."""
    if value < 0.0995:
        return f"{value * 1e3:.0f} µs"
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 1000 else f"{value / 1e3:.2f} s"


def duration(value_ms: float) -> str:
    """A length of time in words."""
    seconds = value_ms / 1e3
    if seconds < 0.05:
        return ms(value_ms)
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
