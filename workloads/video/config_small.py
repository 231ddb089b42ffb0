"""The same training scaled down for the small and tiny data sets, so that a CPU can do it."""

from workloads.video.config import *  # noqa: F403

CLIP_FRAMES = CHUNK_FRAMES = 16
CROP = 48
DIM = 128
DEPTH = 3
HEADS = 4
BATCH_SIZE = 8
LR = 1e-3
AMP = False
NUM_WORKERS = 2
