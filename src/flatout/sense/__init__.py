"""SENSE: what the machine does, read from outside.

    hardware.Sampler ── gpu.Cards      NVML and GPM: each card
                     ├─ host.Host      /proc, cgroup: the machine
                     └─ process.Tree   /proc/PID: the training, its loader workers told apart

A reader never raises for something that is not there: the field is None, and a note says so once.
"""
