"""SENSE: what the machine does, read from outside, and what training does, seen from inside.

    hardware.Sampler ── gpu.Cards      NVML and GPM: each card
                     ├─ host.Host      /proc, cgroup: the machine
                     └─ process.Tree   /proc/PID: the training, its loader workers told apart

    hooks.Hooks ──► recorder.Recorder ──► Steps      roots: which modules to time; clock: the GPU's side of it
    worker.Meter ──► WorkerReports    xray.Profiler ──► Xray    facts, settings: what is in force, what was read

Nothing is raised for something that is not there: outside, the field is None, and a note says so once; inside, a hook
that fails takes all of them off, and training goes on.
"""
