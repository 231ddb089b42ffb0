"""MODEL: the vocabulary of flatout: plain data that every other package speaks. Never imports torch.

records     what a trace is made of (hardware_samples: what no training process writes)
plan        changes to make in a run, and what came of those tried
causes      why a GPU loses time, and findings  changes  the changes there are
stats       is it faster, and how sure is that  turns    the same, decided while training runs
formatting  how numbers are written for people  inputs   what people write, read with limits
frameworks  what is known of those that train   errors   every exception
"""
