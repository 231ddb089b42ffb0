"""Settings of the clip classifier: VideoMAE-S in shape, long clips. Flags of the same names override these."""

DATA = "data/video"
OUT = "runs/video"
DEVICE = None  # None: cuda when there is one
SEED = 0

# what a sample is
CLIP_FRAMES = 128
CROP = 160
CHUNK_FRAMES = 32  # attention stays within a chunk of this many frames

# model
DIM = 384
DEPTH = 12
HEADS = 6

# training
EPOCHS = 30
BATCH_SIZE = 4
LR = 3e-4
WEIGHT_DECAY = 0.05
AMP = True  # bf16

# data loading
NUM_WORKERS = 8
DECODE_THREADS = 12
PREFETCH_FACTOR = 2
PERSISTENT_WORKERS = False
PIN_MEMORY = True
CACHE_DIR = None  # where decoded videos are kept as .npy; None: decode every time
JITTER = 0.3  # brightness, contrast and saturation, either way
JITTER_ON = "cpu"  # "cpu" or "gpu"

EVAL_EVERY = 5
LOG_EVERY = 10
MAX_STEPS = None  # None: no limit
