"""Five stalled trainings, as people really write them, and the makers of their data.

Their stories are in README.md beside this file. Nothing here but `after` knows about flatout.
"""
