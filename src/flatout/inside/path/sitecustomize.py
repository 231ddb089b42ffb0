"""Found first on PYTHONPATH by every Python of the launched command: starts flatout, then runs the
user's own one."""

import os
import sys

import flatout_hook

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _here]
os.environ.pop("FLATOUT_TRIED", None)  # see ../bin/python
flatout_hook.start()

if sys.version_info >= (3, 5):  # any Python that the command starts comes by
    import importlib.machinery
    import importlib.util

    _spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if _spec is not None and _spec.loader is not None:
        _module = importlib.util.module_from_spec(_spec)
        sys.modules["sitecustomize"] = _module
        _spec.loader.exec_module(_module)
