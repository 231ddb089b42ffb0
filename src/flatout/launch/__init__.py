"""OUTSIDE: starts the user's command with flatout in it, watches it, and ends its process tree.

launcher       the command, its signals, its exit code
watch          its hardware, and what is worth a line while it runs
hook           a file in another Python that starts flatout there
protocol       what the launcher and the processes inside tell each other
sandbox        what keeps a trial from writing anything of the user's
snapshot       the user's files before and after a trial, compared
launch_ranks   the ranks of `flatout train --gpus N`
"""
