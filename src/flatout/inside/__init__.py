"""INSIDE: how flatout gets into a training process by the environment alone, and what it does there.

    launch sets FLATOUT_RUN ──► path/sitecustomize.py (PYTHONPATH) or flatout.pth (installed beside flatout)
                                   └─► start.start()   waits for `import torch`; inert without it
                                          ├─► changes           the changes of a plan
                                          └─► session.Session   what is recorded, in the training process
    hooks.Hooks ──► recorder.Recorder ──► Steps     root_modules: which modules to time; clock: the GPU's side of it
    loader_workers ──► WorkerReports     xray ──► Xray     facts, settings: what is in force, what was read

A hook that fails takes all of them off, is said once, and training goes on.
"""
