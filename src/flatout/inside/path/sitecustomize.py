"""Found first on PYTHONPATH by every Python the launched command starts: starts flatout, then the user's own one."""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _load(name, spec):
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _start_flatout():
    if importlib.util.find_spec("flatout") is None:  # another environment than flatout's own: bring the package along
        package = os.path.dirname(os.path.dirname(_here))
        init = os.path.join(package, "__init__.py")
        _load("flatout", importlib.util.spec_from_file_location("flatout", init, submodule_search_locations=[package]))
    from flatout.inside import start

    start.start()


def _run_next_sitecustomize():
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        _load("sitecustomize", spec)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
if os.environ.get("FLATOUT_RUN") and os.environ.get("FLATOUT") != "off":
    try:
        _start_flatout()
    except Exception as problem:
        print(f"flatout: not measuring this process ({type(problem).__name__}: {problem})", file=sys.stderr)
_run_next_sitecustomize()
