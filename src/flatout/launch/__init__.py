"""OUTSIDE: starts the user's command with flatout in it, watches the hardware beside it, and ends its process
tree.

launcher       the command, its signals, its exit code
protocol       what the launcher tells the inside
signals        which signals the command has had without us
sandbox        what keeps a trial from writing anything of the user's
snapshot       the user's files before and after a trial, compared
launch_ranks   the ranks of `flatout train --gpus N`
"""
