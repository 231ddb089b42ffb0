"""The same five trainings in `flatout train`: a YAML file each, and what it names beside the script's own parts.

Models and samples are those of the scripts. What differs is where the work is done: pictures of `segment` and clips of
`video` leave the workers as bytes and are augmented on the device, and a window of `stock` is one slice.
"""
