"""INSIDE: how flatout gets into a training process, by the environment alone, and what it does there.

    launch sets FLATOUT_RUN ──► path/sitecustomize.py (PYTHONPATH) or flatout.pth (installed beside flatout)
                                   └─► start.start()   waits for `import torch`; inert without it
                                          └─► recording.process   what there is once in a process

    a call of the script ──► patches (one wrapper for each attribute)
                                ├─ TIME     timing ──► recorder ──► Steps        clock: the GPU's side of it
                                ├─ OBSERVE  fingerprints, loaders, root_modules
                                └─ CHANGE   changes/ (of a plan), trial (its ceiling)

A subscriber that raises is switched off, that is said once, and training goes on.
"""
