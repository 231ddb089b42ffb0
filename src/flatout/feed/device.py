"""placeholder"""


def to_device(loader, device):
    return loader
