"""`flatout hook`."""

from __future__ import annotations

import sys

from flatout.cli.entry import argument, option, require_linux, verb
from flatout.model.errors import UsageError


@verb()
def hook(
    action: str = argument("install|remove|status", "What to do.", default=...),
    python: str = option("PYTHON", "The interpreter that the training runs in.", default=sys.executable),
) -> None:
    """Let flatout into a Python that ignores PYTHONPATH, or whose PYTHONPATH a script replaces.

    `flatout run` says when this is needed, and for which Python. `install` puts three small files beside that Python's
    packages. They start flatout under `flatout run`, and do nothing at any other time; `remove` deletes them.
    """
    require_linux("hook")
    if action not in ("install", "remove", "status"):
        raise UsageError(f"flatout hook {action}: one of install, remove, status is expected")
    from flatout.launch.hook import hook_of

    target = hook_of(python)
    if action == "install":
        target.install()
        print(f"installed in {target.site}; flatout hook remove --python {python} removes it")
    elif action == "remove":
        removed = target.remove()
        print(f"removed from {target.site}" if removed else f"there is no hook in {target.site}")
    else:
        package = target.package()
        if package is None:
            print(f"no hook in {target.site}")
        elif package.exists():
            print(f"installed in {target.site}, for {package}")
        else:
            print(f"installed in {target.site}, for a flatout that is gone ({package}): install it again")
