"""What a check says: one Line a subject, all of them a Checklist. Plain data; report/checklist.py shows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from flatout.model.causes import CODES

SCHEMA = 1
OK, WARN, FAIL, NOT_APPLICABLE = "ok", "warn", "fail", "n/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One subject: how it stands, why, and what to write instead. `code` is the cause it would have in a run."""

    subject: str = ""  # the checks leave it to `inspect`, which knows them by it
    status: str
    reason: str
    fix: str | None = None
    where: str | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        assert self.code is None or self.code in CODES, self.code


@dataclass(frozen=True, slots=True, kw_only=True)
class Checklist:
    """All lines, in the order of a person's own list: data, computing, the loop, the machine."""

    looked_at: tuple[str, ...]
    lines: tuple[Line, ...]

    def of(self, status: str) -> Iterator[Line]:
        """The lines that stand so."""
        return (line for line in self.lines if line.status == status)

    def passed(self, *, strict: bool) -> bool:
        """Whether nothing failed; strictly, whether nothing was warned of either."""
        refused = (FAIL, WARN) if strict else (FAIL,)
        return not any(line.status in refused for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        """As `--json` writes it."""
        return {
            "record": "checklist",
            "schema": SCHEMA,
            "looked_at": list(self.looked_at),
            "counts": {status: sum(1 for _ in self.of(status)) for status in (OK, WARN, FAIL, NOT_APPLICABLE)},
            "lines": [asdict(line) for line in self.lines],
        }


def ok(reason: str, where: str | None = None) -> Line:
    """As it should be."""
    return Line(status=OK, reason=reason, where=where)


def unknown(reason: str, where: str | None = None, *, fix: str | None = None) -> Line:
    """Does not apply, or cannot be judged without running; perhaps with something to try."""
    return Line(status=NOT_APPLICABLE, reason=reason, fix=fix, where=where)


def warn(reason: str, where: str | None = None, *, fix: str, code: str) -> Line:
    """Costs time, or may."""
    return Line(status=WARN, reason=reason, fix=fix, where=where, code=code)


def fail(reason: str, where: str | None = None, *, fix: str, code: str | None = None) -> Line:
    """Wrong for certain: it has no effect, breaks the run, or spoils what is learned."""
    return Line(status=FAIL, reason=reason, fix=fix, where=where, code=code)
