"""Trainings that tests start load torch's compiler when they need it: an optimizer's first step would, for seconds."""

import sys

if any("train" in word for word in sys.orig_argv):
    import torch

    from flatout.inside import lazy_dynamo

    lazy_dynamo.install(torch)
