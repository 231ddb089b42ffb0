"""INSIDE: how flatout gets into a training process by the environment alone, and what it does there.

launch sets FLATOUT_RUN ──► path/sitecustomize.py (PYTHONPATH) or flatout.pth (installed beside flatout)
                               └─► startup.start()   waits for `import torch`; inert where that never comes
                                      └─► apply             the plan's changes, from the script's settings to its model
                                      └─► session.Session   Recorder + Hooks + TraceWriter, in the training process
                                      └─► worker meters     in DataLoader workers
"""
