"""Outside the training process: starts the user's command with flatout in it, watches it, and ends
its process tree.

launcher       the command, its hardware, its signals, its exit code
exact_lines    py-spy beside each rank, for --lines exact
protocol       what the launcher and the processes inside tell each other
hook           a file in another Python that starts flatout there
sandbox        what keeps a trial from writing anything of the user's
snapshot       the user's files before and after a trial, compared
launch_ranks   the ranks of `flatout train --gpus N`
"""
