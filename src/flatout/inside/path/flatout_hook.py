"""Starts flatout in a Python under `flatout run`, and does nothing in any other."""

import os
import sys

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def start():
    if not os.environ.get("FLATOUT_RUN") or os.environ.get("FLATOUT") == "off":
        return
    if sys.version_info < (3, 10) or not os.path.isdir(PACKAGE):
        return
    try:
        _start()
    except Exception as problem:
        what = type(problem).__name__ + ": " + str(problem)
        sys.stderr.write("flatout: not measuring this process (" + what + ")\n")


def _start():
    if "flatout" not in sys.modules:  # the package of the `flatout` that was called, whatever is installed here
        import importlib.util

        init = os.path.join(PACKAGE, "__init__.py")
        spec = importlib.util.spec_from_file_location("flatout", init, submodule_search_locations=[PACKAGE])
        module = importlib.util.module_from_spec(spec)
        sys.modules["flatout"] = module
        spec.loader.exec_module(module)
    from flatout.inside import start

    start.start()
