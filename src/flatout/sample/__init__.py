"""SAMPLE: what the hardware does, read from outside, without torch.

    hardware.Sampler ── gpu.Gpus       NVML and GPM: each GPU
                     ├─ host.Host      /proc, cgroup: the machine
                     └─ process.Tree   /proc/PID: the training, its loader workers told apart
    budget    the cores, memory and /dev/shm that this process may really use

Nothing is raised for something that is not there: the field is None, and a note says so once.
"""
