"""The changes of a Plan, made inside the user's process: each family in a file of its own.

    knob_values      values are changed as the script reads them: argparse, YAML, JSON, Python config modules
    loading          DataLoader: its arguments at construction, the elastic loader when a pass begins
    device_prefetch  batches are fetched and copied to the GPU one step ahead
    computing        the optimizer at its construction; precision, layout and compile at a root module's first call
    ledger           whether each change was made, how and where, or why not; goes into the trace's facts
    applied          all of them in one process; `switch` turns one on or off between two steps

A change that raises is reported once and switched off, and the user's call goes through.
"""
