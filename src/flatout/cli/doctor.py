"""`flatout doctor`."""

from __future__ import annotations

from flatout.cli.entry import flag, output_file, verb
from flatout.cli.output import console, write_results


@verb()
def doctor(
    json: str | None = output_file("the list as JSON"),
    patches: bool = flag("--patches", "List what flatout replaces inside a training process, and why; nothing else."),
) -> None:
    """See what flatout finds on this machine, what is missing, and what that costs.

    GPUs and their counters, driver, torch, the cores and memory a training may really use here, optional packages.
    """
    if patches:
        from flatout.inside.patches import rows

        for replaced, when, why in rows():
            print(f"{replaced}\n    in {when}: {why}")
        return
    from flatout.doctor import examine, report_lines

    result = examine()
    if write_results(json, result.to_json):
        print("\n".join(report_lines(result, console().width)))
