"""How each mistake of a workload is fixed by hand: what `flatout fix` has to reach.

A workload's own settings first (`Flags`, appended to its command line); an `Edit` of a copy of one of its files only
where no flag reaches the mistake. The workload itself is never touched. Beside each mistake stand the findings that
name it, by cause code and change: gains.py compares what they promise with what the fix gives.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags appended to the command. `{spare}` becomes the cores left when the training process has had two."""

    why: str
    flags: str


@dataclass(frozen=True, slots=True)
class Edit:
    """Text replaced in a copy of a file of the workload's folder; `old` must be there exactly once."""

    why: str
    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong, what puts it right, and (cause code, change) of the findings that name it.

    The fixes of one mistake only work together. A mistake that no finding names costs less than 5% alone.
    """

    what: str
    fixes: tuple[Flags | Edit, ...]
    named_by: tuple[tuple[str, str | None], ...] = ()


# Workloads whose evaluation and checkpoint are among the mistakes: *before* is measured over a whole epoch, since a
# window that ends earlier would not see them.
WHOLE_EPOCH = {"gray"}

MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "gray": (
        Mistake(
            "samples are loaded in the training process",
            (
                Flags(
                    "decode in every core but the two the training needs", "--num-workers {spare} --persistent-workers"
                ),
            ),
            (("data.main-thread", "num_workers"),),
        ),
        Mistake(
            "memory is not page-locked",
            (Flags("copy from page-locked memory, so that the copy overlaps the step before", "--pin-memory"),),
            (("copy.pageable", "pin_memory"),),
        ),
        Mistake(
            "a batch of 64",
            (Flags("fewer, fuller steps", "--batch-size 128"),),
            (("launch.bound", "batch_size"), ("memory.underused", "batch_size")),
        ),
        Mistake(
            "evaluation and checkpoint every epoch",
            (Flags("look at the validation data when there is something to see", "--eval-every 5 --save-every 5"),),
            (("pause.eval", "eval_interval"), ("pause.checkpoint", "checkpoint_interval")),
        ),
    ),
    "segment": (
        Mistake(
            "no mixed precision",
            (Flags("half the bytes and twice the arithmetic in the tensor cores", "--amp true"),),
            (("compute.precision", "precision"),),
        ),
        Mistake(
            "no channels_last",
            (Flags("convolutions as the tensor cores want their data", "--channels-last true"),),
            (("compute.layout", "channels_last"),),
        ),
        Mistake(
            "a worker for every core, and none for the training",
            (Flags("a worker for each core the training leaves free", "--num-workers {spare}"),),
        ),
        Mistake(
            "every picture is worked over on the CPU, and floats travel",
            (
                Edit(
                    "hand out bytes as they were decoded: a quarter of what floats take from process to process",
                    "train.py",
                    old="""\
        if self.cfg is not None:
            image, mask = augment(image, mask, self.cfg)
        image = (np.array(image) / 255.0 - MEAN) / STD
        return torch.from_numpy(image).permute(2, 0, 1).float(), torch.from_numpy(np.array(mask))
""",
                    new="""\
        return torch.from_numpy(np.array(image)), torch.from_numpy(np.array(mask))
""",
                ),
                Edit(
                    "turn, flip, light and normalize the whole batch on the device, each picture by numbers of its own",
                    "train.py",
                    old="""\
def to_device(batch, device, cfg):
    images, masks = batch
    images = images.to(device, non_blocking=True)
    masks = masks.to(device, non_blocking=True).long()
""",
                    new="""\
def augment_batch(images, masks, cfg):
    count = len(images)

    def draw(low, high):
        return torch.empty(count, 1, 1, 1, device=images.device).uniform_(low, high)

    angle = torch.deg2rad(draw(-cfg.rotate, cfg.rotate)).flatten()
    mirror = 1 - 2 * (draw(0, 1).flatten() < cfg.flip).float()
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    turn = torch.stack([cos * mirror, -sin * mirror, zero, sin, cos, zero], dim=1).view(count, 2, 3)
    grid = F.affine_grid(turn, images.shape, align_corners=False)
    images = F.grid_sample(images, grid, align_corners=False)
    masks = F.grid_sample(masks.unsqueeze(1).float() - IGNORE, grid, mode="nearest", align_corners=False)
    masks = masks.squeeze(1) + IGNORE
    images = (images * draw(1 - cfg.brightness, 1 + cfg.brightness)).clamp(0, 1)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = (mean + (images - mean) * draw(1 - cfg.contrast, 1 + cfg.contrast)).clamp(0, 1)
    return images, masks


def to_device(batch, device, cfg, augment=False):
    images, masks = batch
    images = images.to(device, non_blocking=True).permute(0, 3, 1, 2).float() / 255
    masks = masks.to(device, non_blocking=True)
    if augment:
        images, masks = augment_batch(images, masks, cfg)
    images, masks = (images - MEAN) / STD, masks.long()
""",
                ),
                Edit(
                    "never on validation data",
                    "train.py",
                    old="images, masks = to_device((images, masks), device, cfg)",
                    new="images, masks = to_device((images, masks), device, cfg, augment=True)",
                ),
            ),
            (("data.cpu-bound", "gpu_transforms"),),
        ),
    ),
    "captcha": (
        Mistake(
            "amp: true, compared with 'bf16'",
            (Flags("the one value that the script compares with", "--amp bf16"),),
            (("config.ignored", "setting:amp"),),
        ),
        Mistake(
            "28 workers on 16 cores",
            (Flags("a worker for each core the training leaves free", "--num-workers {spare} --prefetch-factor 4"),),
        ),
        Mistake(
            "a batch of 256",
            (
                Flags(
                    "fewer, fuller steps; twice the batch wants the learning rate times √2 under Adam",
                    "--batch-size 512 --lr 0.0014",
                ),
            ),
        ),
        Mistake(
            "switches that are only printed",
            (
                Edit(
                    "apply the switches that were only printed",
                    "train.py",
                    old="""\
    use_bf16 = cfg.amp == "bf16"
""",
                    new="""\
    use_bf16 = cfg.amp == "bf16"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = cfg.tf32
    torch.backends.cudnn.benchmark = cfg.cudnn_benchmark
""",
                ),
            ),
            (("config.ignored", "setting:tf32"), ("config.ignored", "setting:cudnn_benchmark")),
        ),
        Mistake(
            "compile_model: true, and no call of the compiler",
            (
                Edit(
                    "call the compiler",
                    "train.py",
                    old="""\
    if world > 1:
        model = DistributedDataParallel(net""",
                    new="""\
    if cfg.compile_model:
        net.compile()
    if world > 1:
        model = DistributedDataParallel(net""",
                ),
            ),
            (("config.ignored", "setting:compile_model"),),
        ),
        Mistake(
            "plain AdamW",
            (
                Edit(
                    "step all parameters in one kernel",
                    "train.py",
                    old="lr=cfg.lr, weight_decay=cfg.weight_decay)",
                    new="lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)",
                ),
            ),
        ),
        Mistake(
            ".item() three times a batch",
            (
                Edit(
                    "leave the three values on the device until they are printed",
                    "train.py",
                    old="""\
            losses.append(loss.item())
            piece_errors.append(piece_error.item())
            notch_errors.append(notch_error.item())
""",
                    new="""\
            losses.append(loss.detach())
            piece_errors.append(piece_error.detach())
            notch_errors.append(notch_error.detach())
""",
                ),
            ),
            (("sync.item", None),),
        ),
    ),
    "video": (
        Mistake(
            "twelve decoder threads in each worker",
            (
                Flags(
                    "the workers are the parallelism: more threads in each only get in each other's way",
                    "--decode-threads 1",
                ),
            ),
            (("data.too-many-workers", "setting:decode_threads"),),
        ),
        Mistake(
            "eight workers",
            (Flags("a worker for each core the training leaves free", "--num-workers {spare}"),),
            (("data.too-few-workers", "num_workers"),),
        ),
        Mistake(
            "colours are changed frame by frame on the CPU",
            (Flags("colours of a whole batch at once, where there is time for it", "--jitter-on gpu"),),
            (("data.cpu-bound", "setting:jitter_on"),),
        ),
        Mistake(
            "workers are started again every epoch",
            (Flags("keep the workers between epochs", "--persistent-workers True"),),
        ),
        Mistake("two batches ahead a worker", (Flags("more clips ready", "--prefetch-factor 4"),)),
    ),
    "stock": (
        Mistake(
            "a batch of 256",
            (Flags("an LSTM step takes nearly as long for 256 windows as for 1024", "--batch-size 1024"),),
            (("launch.bound", "batch_size"), ("memory.underused", "batch_size")),
        ),
        Mistake(
            "forty workers on 16 cores",
            (Flags("as many workers as there are cores to run them", "--num-workers {spare}"),),
        ),
    ),
}
FIXES = {name: tuple(fix for mistake in mistakes for fix in mistake.fixes) for name, mistakes in MISTAKES.items()}
