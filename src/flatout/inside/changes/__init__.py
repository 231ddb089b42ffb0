"""The changes of a Plan, made inside the user's process: each family in a file of its own.

    knobs       values are changed as the script reads them: argparse, YAML, JSON, Python config modules
    loading     DataLoader: its arguments at construction, the elastic loader and copies ahead when a pass begins
    computing   the optimizer at its construction; precision, layout and compile at a root module's first call
    root_calls  which modules the script calls, known at their first call, and what goes around each call
    ledger      what became of each change: made (how, where), or not (why); goes into the trace's Facts

A change that raises is said once and taken off, and the user's call goes through as if we were not there.
"""
