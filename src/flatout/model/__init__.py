"""MODEL: the vocabulary of flatout: plain data that every other package speaks. Never imports torch.

records   what a trace is made of     plan     the changes to make in a run, and what came of those that were
tried changes   the changes there are       stats    a mean over time and how well it is known errors    every
exception             formatting   how numbers are written for people inputs    YAML, JSON and text that
people write, read with limits
"""
