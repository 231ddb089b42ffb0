"""What a check says: one Line a subject, all of them a Checklist. Plain data; flatout.report shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, WARN, FAIL, NOT_APPLICABLE = "ok", "warn", "fail", "n/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One subject: its status, why, and what to write instead. `code` is the cause that a run would report."""

    subject: str = ""  # a check leaves it to `look_over`
    status: str
    reason: str
    fix: str | None = None
    where: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checklist:
    """All lines, in the order data, computing, the loop, the machine."""

    looked_at: tuple[str, ...]
    lines: tuple[Line, ...]

    def with_status(self, status: str) -> list[Line]:
        """The lines of one status."""
        return [line for line in self.lines if line.status == status]

    def passed(self, *, strict: bool) -> bool:
        """Whether nothing failed; with `strict`, whether there is no warning either."""
        return not self.with_status(FAIL) and not (strict and self.with_status(WARN))

    def to_json(self) -> dict[str, Any]:
        """As `--json` writes it."""
        return {
            "record": "checklist",
            "schema": 1,
            "looked_at": list(self.looked_at),
            "counts": {status: len(self.with_status(status)) for status in (OK, WARN, FAIL, NOT_APPLICABLE)},
            "lines": [asdict(line) for line in self.lines],
        }


def ok(reason: str, where: str | None = None) -> Line:
    """As it should be."""
    return Line(status=OK, reason=reason, where=where)


def warn(reason: str, where: str | None = None, *, fix: str, code: str) -> Line:
    """Costs time, or may."""
    return Line(status=WARN, reason=reason, fix=fix, where=where, code=code)


def fail(reason: str, where: str | None = None, *, fix: str, code: str | None = None) -> Line:
    """Certainly wrong: it has no effect, breaks the run, or spoils what is learned."""
    return Line(status=FAIL, reason=reason, fix=fix, where=where, code=code)
