"""The faults of truth.py, as they were written down before any of them was run, and the trainings without one.

They come from what people do, not from what flatout looks for: their author had read the public names of the
causes and none of the rules. Sizes may be changed by what the clock says of a script alone, never by a verdict.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.planting import Fault, after, before, instead, top

CORES = len(os.sched_getaffinity(0))

ONE_WORKER = instead("num_workers=2", "num_workers=1")


def one_shard(folder: Path) -> None:
    """Take away all that a stream is trained on, but for one file."""
    (folder / "data/TinyStories_all_data/data02.bin").unlink()


def a_broken_line(folder: Path) -> None:
    """One word that is a page long, as files from the web have them."""
    path = folder / "names.txt"
    path.write_text(path.read_text() + "\n" + "abcdef0123456789" * 12)


def sentences(lengths: tuple[int, ...]) -> Callable[[Path], None]:
    """GLUE's pairs with first sentences of these lengths, in turn, and second ones of four words."""

    def make(folder: Path) -> None:
        for path in folder.glob("nyu-mll/glue/*.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            for number, row in enumerate(rows):
                words = row["sentence1"].split()
                row["sentence1"] = " ".join((words * 10)[: lengths[number % len(lengths)]])
                row["sentence2"] = " ".join(words[:4])
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return make


# --- the loop's own Python --------------------------------------------------------------------------------------------

_SPARSITY = """
    dead = 0
    for p in model.parameters():
        dead += sum(1 for v in p.grad.flatten().tolist() if v == 0.0)§
"""
_EDIT_DISTANCE = """
def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))§
    return row[-1]

"""
_EMA = """
import numpy as np

class Ema:
    def __init__(self, module, decay=0.999):
        self.decay = decay
        self.shadow = {n: p.detach().cpu().numpy().astype(np.float64) for n, p in module.named_parameters()}

    def update(self, module):
        for name, p in module.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * p.detach().cpu().numpy()§

"""
_SELF_BLEU = """
def overlap(one, other, n=3):
    grams = [tuple(one[i:i + n]) for i in range(len(one) - n + 1)]
    others = [tuple(other[i:i + n]) for i in range(len(other) - n + 1)]
    return sum(others.count(gram) > 0 for gram in grams) / max(len(grams), 1)§

def self_bleu(texts):
    return sum(overlap(a, b) for a in texts for b in texts if a is not b)

"""
_CURVE = """
from PIL import Image as Picture, ImageDraw

drawn = []

def draw_curve(value):
    drawn.append(value)
    picture = Picture.new("RGB", (1600, 1000), "white")
    pen = ImageDraw.Draw(picture)
    for x in range(0, 1600, 2):
        pen.line((x, 0, x, 1000), fill=(240, 240, 240))
    for i in range(len(drawn[-200:]) - 1):
        pen.line((i * 8, 1000 - drawn[i] * 90, i * 8 + 8, 1000 - drawn[i + 1] * 90), fill="red", width=3)
    return picture.resize((400, 250), Picture.LANCZOS)§

"""
_SEARCH = """
def mean_distance(neighbours, starts):
    total = reached = 0
    for start in starts:
        seen, front = {start: 0}, [start]
        while front:
            following = []
            for node in front:
                for other in neighbours[node]:
                    if other not in seen:§
                        seen[other] = seen[node] + 1
                        following.append(other)
            front = following
        total, reached = total + sum(seen.values()), reached + len(seen)
    return total / reached

"""
_TILES = """
def tile_code(state, tilings=32, bins=16):
    features = [0.0] * (tilings * bins)
    for tiling in range(tilings):
        for value in state:
            for edge in range(bins):
                if value * 4 + tiling / tilings > edge - bins / 2:§
                    features[tiling * bins + edge] += 1.0
    return features

"""
_DESKEW = """
def deskewed(pictures):
    import numpy as np
    out = []
    ys, xs = np.mgrid[:28, :28]
    for picture in pictures.reshape(-1, 28, 28).numpy():
        mass = picture.sum() + 1e-6
        cy, cx = (ys * picture).sum() / mass, (xs * picture).sum() / mass
        lean = ((ys - cy) * (xs - cx) * picture).sum() / (((ys - cy) ** 2 * picture).sum() + 1e-6)
        moved = np.clip(np.round(xs + lean * (ys - cy)), 0, 27).astype(int)
        out.append(picture[ys, moved])§
    return torch.from_numpy(np.stack(out))

"""
_REPEATS = """
class Repeats(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        weights = model.get_input_embeddings().weight.detach().cpu().tolist()
        self.pairs = 0
        for a in range(0, len(weights), 2):
            for b in range(a + 1, len(weights), 2):
                if sum(x * y for x, y in zip(weights[a], weights[b])) > 0.5:§
                    self.pairs += 1

"""
_QUANTILES = """
    values = sorted(abs(v) for v in self.layer[2].weight[:128].detach().flatten().tolist())§
    self.q90 = values[int(0.9 * len(values))]
"""

HOST_PYTHON = (
    Fault(
        name="dead gradients", training="mnist", code="host.python", function="train",
        what="counts the zeros of every gradient in a Python loop, each step",
        edits=(after("optimizer.step()", _SPARSITY),),
    ),
    Fault(
        name="edit distance", training="makemore", code="host.python", function="distance",
        what="edit distance in Python from every guess to sixty words of the data, each step",
        edits=(
            before("class InfiniteDataLoader", _EDIT_DISTANCE),
            after("optimizer.step()", """
                for guess in logits.detach().argmax(-1).tolist():
                    nearest = min(distance(guess, train_dataset.encode(w).tolist()) for w in train_dataset.words[:60])
            """),
        ),
    ),
    Fault(
        name="EMA in numpy", training="vae", code="host.python", function="update",
        what="a moving average of the weights in float64 on the host, after every step of 16 pictures",
        flags=("--batch-size", "16"), cure_flags=("--batch-size", "16"),
        edits=(before("# Reconstruction + KL", _EMA), before("def train(epoch):", "ema = Ema(model)"),
               after("optimizer.step()", "ema.update(model)")),
    ),
    Fault(
        name="self-BLEU", training="word language model", code="host.python", function="overlap",
        what="compares the n-grams of all texts of a batch with each other in Python, each step",
        edits=(before("def train():", _SELF_BLEU),
               after("total_loss += loss.item()", "self_bleu(output.argmax(1).view(-1, 20).t().tolist())")),
    ),
    Fault(
        name="loss curve drawn", training="dcgan", code="host.python", also=("pause.logging",), function="draw_curve",
        what="draws the curve of the losses with PIL at every step",
        edits=(before("for epoch in range(opt.niter):", _CURVE),
               after("optimizerG.step()", "draw_curve(errD.item())")),
    ),
    Fault(
        name="graph search", training="gat", code="host.python", function="mean_distance",
        what="measures distances in the graph by a search in Python, every epoch",
        edits=(before("def train_iter", _SEARCH),
               after("    optimizer.step()", """
                   neighbours = {n: set() for n in range(len(target))}
                   for a, b in input[1].nonzero().tolist():
                       neighbours[a].add(b)
                   mean_distance(neighbours, range(60))
               """)),
    ),
    Fault(
        name="graph normalized again", training="pygcn", code="host.python", function="train",
        what="makes the sparse matrix again by scipy, every epoch",
        edits=(
            after("    model.train()", """
                global adj
                adj = sparse_mx_to_torch_sparse_tensor(normalize(sp.coo_matrix(adj.to_dense().numpy())))§
            """),
            instead("import load_data, accuracy",
                    "import load_data, accuracy, normalize, sparse_mx_to_torch_sparse_tensor\n"
                    "import scipy.sparse as sp"),
        ),
    ),
    Fault(
        name="tile coding", training="reinforce", code="host.python", function="tile_code",
        what="features of the state by three Python loops, for every action",
        edits=(before("def select_action", _TILES),
               after("def select_action(state):", "    tile_code(state.tolist())")),
    ),
    Fault(
        name="deskewed in the loop", training="feedforward", code="host.python", function="deskewed",
        what="straightens the digits one by one with numpy in the training loop",
        edits=(before("# Train the model", _DESKEW),
               after("labels = labels.to(device)", "images = deskewed(images.cpu()).reshape(-1, 28*28).to(device)")),
    ),
    Fault(
        name="Trainer callback", training="run_clm", code="host.python", function="on_step_end",
        what="a callback compares the embeddings of all words in Python after every step",
        edits=(before("def main():", _REPEATS),
               instead("data_collator=default_data_collator,",
                       "data_collator=default_data_collator, callbacks=[Repeats()],")),
    ),
    Fault(
        name="quantiles in training_step", training="lightning", code="host.python", function="training_step",
        what="sorts an eighth of a layer's weights as a Python list in training_step",
        edits=(after("    def training_step(self, batch, batch_idx):", _QUANTILES),),
        steps=100,
    ),
    Fault(
        name="checksum on two ranks", training="ddp tutorial, 2 ranks", code="host.python", function="_run_batch",
        what="both ranks add up all weights in Python, to see whether they are the same",
        cpu_only=True, steps=60,
        edits=(after("        self.optimizer.step()",
                     "total = sum(v for p in self.model.parameters() for v in p.detach().flatten().tolist())§"),),
    ),
    Fault(
        name="advantages in Python", training="ppo", code="host.python", function="advantages_of",
        what="advantages by .item() of every number, thirty-two estimates of lambda",
        edits=(
            before("if __name__ == ", """
                def advantages_of(rewards, values, dones, gamma, lam):
                    out = [0.0] * len(rewards)
                    for t in range(len(rewards) - 2, -1, -1):
                        for k in range(len(rewards[0])):
                            alive = 1.0 - dones[t + 1][k].item()
                            later = gamma * values[t + 1][k].item() * alive
                            delta = rewards[t][k].item() + later - values[t][k].item()§
                            out[t] = delta + gamma * lam * alive * out[t + 1]
                    return out

            """),
            before("# flatten the batch", """
                for tried in range(32):
                    advantages_of(rewards, values, dones, args.gamma, tried / 32)
            """),
        ),
    ),
)  # fmt: skip

# --- pauses -----------------------------------------------------------------------------------------------------------

PAUSES = (
    Fault(
        name="histograms", training="makemore", code="pause.logging", function="<module>",
        what="a histogram of every weight into TensorBoard at every step",
        edits=(after("optimizer.step()",
                     "[writer.add_histogram(name, p.detach(), step) for name, p in model.named_parameters()]§"),),
    ),
    Fault(
        name="pictures into TensorBoard", training="template", code="pause.logging", function="_train_epoch",
        what="the batch as a picture into TensorBoard at every step, not every eleventh",
        edits=(instead("self.log_step = int(np.sqrt(data_loader.batch_size))", "self.log_step = 1",
                       "trainer/trainer.py"),
               instead("make_grid(data.cpu(), nrow=8, normalize=True))\n\n            if batch_idx == self",
                       "make_grid(data.cpu(), nrow=8, normalize=True))§\n\n            if batch_idx == self",
                       "trainer/trainer.py")),
    ),
    Fault(
        name="a log line for each row", training="nanoGPT", code="pause.logging", function="log_rows",
        what="writes the norm of every row of every weight to a log file, each step",
        edits=(
            before("# training loop", """
                import logging
                logging.basicConfig(filename='rows.log', level=logging.INFO)

                def log_rows():
                    for name, p in raw_model.named_parameters():
                        for row, norm in enumerate(p.detach().flatten(1).norm(dim=-1).tolist() if p.dim() > 1 else []):
                            logging.info('%s row %d norm %.6f', name, row, norm)§

            """),
            after("scaler.update()", "log_rows()"),
        ),
    ),
    Fault(
        name="a picture each batch", training="gan", code="pause.logging", also=("host.python", "pause.checkpoint"),
        what="--sample_interval 1: the samples are saved as PNG after every batch",
        flags=("--sample_interval", "1", "--batch_size", "16"), cure_flags=("--batch_size", "16"),
    ),
    Fault(
        name="evaluates often", training="mnist", code="pause.eval", function="train", steps=120,
        what="tests on the whole test set after every 15th batch", environment={"STANDIN_LENGTH": "30000"},
        edits=(after("optimizer.step()",
                     "if batch_idx % 15 == 14: test(model, device, args.test_loader); model.train()§"),
               after("test_loader = torch.utils.data.DataLoader", "args.test_loader = test_loader")),
    ),
    Fault(
        name="--eval_interval=10", training="nanoGPT", code="pause.eval",
        what="evaluates twenty batches after every ten steps", flags=("--eval_interval=10", "--eval_iters=10"),
    ),
    Fault(
        name="evaluates a stream", training="llama2.c", code="pause.eval", what="evaluates after every five steps",
        flags=("--eval_interval=5", "--eval_iters=10"),
    ),
    Fault(
        name="tests every epoch", training="gat", code="pause.eval", function="train_iter",
        what="the original: training and validation accuracy of the whole graph after every step",
        edits=(instead("    if epoch % print_every:\n        return\n", ""),
               instead("    loss_train, acc_train = test(model, criterion, input, target, mask_train)",
                       "    loss_train, acc_train = test(model, criterion, input, target, mask_train)§")),
    ),
    Fault(
        name="validates all the time", training="segment", code="pause.eval", function="main", steps=40,
        what="the whole validation set after every tenth step",
        edits=(after("            step += 1", "if step % 10 == 0: validate_and_save(epoch)§"),),
    ),
    Fault(
        name="both nets saved", training="dcgan", code="pause.checkpoint", function="<module>",
        what="both nets and both optimizers are saved after every step",
        edits=(after("optimizerG.step()",
                     "torch.save([netG.state_dict(), netD.state_dict(), optimizerG.state_dict(), "
                     "optimizerD.state_dict()] * 3, 'now.pth')§"),),
    ),
    Fault(
        name="--save_steps 1", training="run_clm", code="pause.checkpoint", what="the Trainer saves after every step",
        flags=("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2"), steps=60,
    ),
    Fault(
        name="saves in the loop", training="gray", code="pause.checkpoint", function="main",
        what="the checkpoint is written five times after every step", steps=40,
        flags=("--width", "16"), cure_flags=("--width", "16"),
        edits=(after("            schedule.step()", "for copy in range(5): save(epoch)§"),),
    ),
    Fault(
        name="ModelCheckpoint", training="lightning", code="pause.checkpoint", steps=100,
        what="a checkpoint of Lightning's after every step, all of them kept",
        edits=(instead("enable_checkpointing=False", "callbacks=[__import__('lightning').pytorch.callbacks."
                       "ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)]"),),
    ),
    Fault(
        name="collector", training="mnist_rnn", code="pause.gc", function="train", what="gc.collect() after every step",
        edits=(after("optimizer.step()", "import gc; gc.collect()§"),),
    ),
    Fault(
        name="collector, Accelerate", training="accelerate nlp", code="pause.gc", function="training_function",
        what="gc.collect() before every step, to save memory",
        edits=(before("outputs = model(**batch)", "import gc; gc.collect()§"),),
    ),
    Fault(
        name="collector, many objects", training="bidirectional", code="pause.gc", function="<module>", steps=60,
        what="gc.collect() after every second step, beside a list of 800,000 lists",
        edits=(top("held = [[number] for number in range(800_000)]"),
               after("optimizer.step()", "if i % 2: __import__('gc').collect()§")),
    ),
)  # fmt: skip

# --- data -------------------------------------------------------------------------------------------------------------

_BY_PIXEL = """
def by_pixel(samples):
    batch = torch.zeros(len(samples), 1, 28, 28)
    for n, (x, _) in enumerate(samples):
        for i in range(28):
            for j in range(28):
                batch[n, 0, i, j] = x[0, i, j]§
    return batch, torch.tensor([y for _, y in samples])

"""
_BY_LIST = """
def by_list(samples):
    pixels = [x.flatten().tolist() for x, _ in samples]
    return torch.tensor([[round(v, 6) for v in row] for row in pixels]), torch.tensor([y for _, y in samples])§

"""
_SLOW_JITTER = """
from PIL import ImageEnhance, ImageFilter

class Jitter:
    def __call__(self, picture):
        picture = picture.resize((256, 256))
        for kind in (ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness, ImageEnhance.Sharpness):
            picture = kind(picture).enhance(0.9)§
        picture = picture.filter(ImageFilter.GaussianBlur(4)).rotate(7, resample=2)§
        return picture.resize((32, 32))

"""
_JSON = """
import json
STORED = json.dumps([{"id": n, "text": str(n) * 3, "digits": list(range(20))} for n in range(400)])

"""

DATA = (
    Fault(
        name="no workers", training="vae from files", code="data.main-thread",
        what="pictures are decoded in the training process",
        edits=(instead("'num_workers': 2", "'num_workers': 0"),),
    ),
    Fault(
        name="--num-workers 0", training="gray", code="data.main-thread",
        what="PNG are decoded in the training process", flags=("--num-workers", "0"),
    ),
    Fault(
        name="--threads 0", training="super resolution", code="data.main-thread",
        what="JPEG are decoded and resized in the training process", flags=("--threads", "0"),
    ),
    Fault(
        name="captcha without workers", training="captcha", code="data.main-thread",
        what="JPEG are decoded in the training process", flags=("--num-workers", "0"),
    ),
    Fault(
        name="slow line in a stream", training="llama2.c", code="data.main-thread", also=("data.disk-bound",),
        function="__iter__", what="every sequence of the stream comes over the network, in the training process",
        edits=(before("yield x, y", "__import__('time').sleep(0.012)§", "tinystories.py"),),
    ),
    Fault(
        name="large pictures", training="pytorch-cifar", code="data.cpu-bound", what="pictures of 300 pixels to decode",
        broken={"STANDIN_SIDE": "300"}, steps=50,
    ),
    Fault(
        name="slow transforms", training="residual", code="data.cpu-bound", function="__call__",
        what="five PIL filters on a picture enlarged to 256 pixels", steps=50,
        edits=(before("# Image preprocessing modules", _SLOW_JITTER), after("    transforms.Pad(4),", "Jitter(),")),
    ),
    Fault(
        name="JSON in __getitem__", training="adder", code="data.cpu-bound", function="__getitem__",
        what="a JSON text is parsed again for every sample",
        edits=(before("class AdditionDataset", _JSON),
               after("def __getitem__(self, idx):", "    record = json.loads(STORED)[idx % 400]§")),
    ),
    Fault(
        name="noise in float64", training="segment", code="data.cpu-bound", function="augment", steps=40,
        what="normal noise for every pixel, in float64, twelve times", flags=("--num-workers", "2", "--width", "4"),
        cure_flags=("--num-workers", "2", "--width", "4"),
        edits=(before("    angle = random.uniform", """
            for _ in range(12):
                noise = np.random.normal(0, 3, (*np.array(image).shape[:2], 3))§
                image = Image.fromarray(np.clip(np.array(image) + noise, 0, 255).astype(np.uint8))
        """),),
    ),
    Fault(
        name="outliers in a loop", training="stock", code="data.cpu-bound", function="__getitem__",
        steps=60,
        flags=("--num-workers", "2", "--hidden", "16", "--layers", "1"),
        cure_flags=("--num-workers", "2", "--hidden", "16", "--layers", "1"),
        what="outliers of every window are cut off by a loop over all of its numbers",
        edits=(before("        return torch.from_numpy(np.stack(rows)", """
            for row in rows:
                for column in range(len(row)):
                    if abs(row[column]) > 10 * self.stds[stock][column]:§
                        row[column] = 0.0
        """),),
    ),
    Fault(
        name="one worker", training="feedforward from files", code="data.too-few-workers", edits=(ONE_WORKER,),
        what="one worker decodes, and the second core has nothing to do", steps=120,
    ),
    Fault(
        name="one worker, far away", training="logistic", code="data.too-few-workers", also=("data.disk-bound",),
        function="__call__", what="every sample comes from a store that takes 4 ms; one worker asks for one at a time",
        steps=120,
        edits=(ONE_WORKER,
               before("# MNIST dataset", """
                   class Fetched:
                       def __call__(self, picture):
                           __import__('time').sleep(0.004)§
                           return transforms.ToTensor()(picture)

               """),
               instead("transform=transforms.ToTensor(),", "transform=Fetched(),")),
        cure_edits=(before("# MNIST dataset", """
                        class Fetched:
                            def __call__(self, picture):
                                __import__('time').sleep(0.004)
                                return transforms.ToTensor()(picture)

                    """),
                    instead("transform=transforms.ToTensor(),", "transform=Fetched(),"),
                    instead("num_workers=2", "num_workers=8")),
    ),
    Fault(
        name="one worker for films", training="video", code="data.too-few-workers", flags=("--num-workers", "1"),
        what="one worker decodes films for a small network",
    ),
    Fault(
        name="slow disk", training="gray", code="data.disk-bound", function="__getitem__", steps=50,
        flags=("--num-workers", "8"), what="eight workers wait 120 ms for every file",
        edits=(before("            with Image.open(path) as file:", "__import__('time').sleep(0.12)§"),),
    ),
    Fault(
        name="slow network in a stream", training="llama2.c, packed", code="data.disk-bound", function="__iter__",
        what="both workers of a stream wait 60 ms for every sequence", also=("data.too-few-workers",), steps=60,
        edits=(before("yield x, y", "__import__('time').sleep(0.06)§", "tinystories.py"),),
    ),
    Fault(
        name="some files are cold", training="captcha", code="data.slow-samples", function="__getitem__",
        what="every fortieth file takes 1.2 s",
        edits=(after("file, piece_x, notch_x = self.rows[index]",
                     "if index % 40 == 0: __import__('time').sleep(1.2)§"),),
    ),
    Fault(
        name="some problems are hard", training="adder", code="data.slow-samples", function="__getitem__",
        what="one sample in a hundred takes 0.1 s of computing",
        edits=(after("def __getitem__(self, idx):", "    sum(range(5_000_000 * (idx % 100 == 0)))§"),),
    ),
    Fault(
        name="collate by pixel", training="bidirectional", code="data.collate-bound", function="by_pixel", steps=40,
        what="the batch is filled pixel by pixel in one worker",
        edits=(before("# Data loader", _BY_PIXEL),
               instead("shuffle=True)", "shuffle=True, num_workers=1, collate_fn=by_pixel)")),
        cure_edits=(instead("shuffle=True)", "shuffle=True, num_workers=1)"),),
    ),
    Fault(
        name="collate by lists", training="logistic", code="data.collate-bound", function="by_list",
        what="the batch goes through lists of Python numbers", environment={"STANDIN_READY": "1"},
        edits=(before("# Data loader", _BY_LIST),
               instead("persistent_workers=True)", "persistent_workers=True, collate_fn=by_list)")),
    ),
    Fault(
        name="samples carry it all", training="DLinear", code="data.collate-bound", function="__getitem__", steps=60,
        what="every sample carries the time marks of the whole series through shared memory",
        edits=(instead("        seq_x_mark = self.data_stamp[s_begin:s_end]",
                       "        seq_x_mark = np.tile(self.data_stamp, (3, 1))§", "data_provider/data_loader.py"),),
    ),
    Fault(
        name="short epochs", training="feedforward from files", code="data.worker-start",
        what="two workers are started for each of many epochs of six steps", environment={"STANDIN_LENGTH": "600"},
        edits=(instead(", persistent_workers=True", ""),), cpu_only=True, steps=150,
    ),
    Fault(
        name="workers for a few pictures", training="captcha", code="data.worker-start", data="captcha tiny",
        what="48 pictures: two workers are started again for every three steps", steps=60,
        flags=("--persistent-workers", "false"),
    ),
    Fault(
        name="a crowd", training="logistic", code="data.too-many-workers", environment={"STANDIN_SIDE": "200"},
        what="sixteen workers for every core", cpu_only=True, steps=300,  # of which the first 64 lie ready at the start
        edits=(instead("num_workers=2", f"num_workers={16 * CORES}"),),
    ),
    Fault(
        name="forty workers", training="stock", code="data.too-many-workers", cpu_only=True,
        what="forty workers on two cores, as train.sh has it", flags=("--num-workers", str(20 * CORES)), steps=300,
    ),
    Fault(
        name="threads in workers", training="video", code="data.too-many-workers", cpu_only=True,
        what="eight workers with twelve decoding threads each",
        flags=("--num-workers", str(4 * CORES), "--decode-threads", "12"),
    ),
    Fault(
        name="one shard", training="llama2.c, packed", code="data.few-shards", prepare=one_shard,
        what="one shard for two workers",
    ),
    Fault(
        name="one text file", training="run_clm --streaming", code="data.few-shards",
        what="the stream is one file, and two workers want a part of it", flags=("--train_file", "part-0.txt"),
    ),
)  # fmt: skip

# --- what is computed -------------------------------------------------------------------------------------------------

_BY_HAND = """att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:,:,:T,:T] == 0, float('-inf'))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v # (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)
"""
_RECOMPUTED = (
    instead("x = block(x)", "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)§", "model.py"),
    top("import torch.utils.checkpoint", "model.py"),
)

COMPUTE = (
    Fault(
        name="a broken line", training="makemore", code="compute.padding", prepare=a_broken_line,
        what="one line of the file is 192 letters long, so all words are padded to it", steps=80,
    ),
    Fault(
        name="one long text a batch", training="accelerate nlp", code="compute.padding",
        prepare=sentences((100, *[4] * 7)),
        cure_prepare=sentences((16,)),
        what="sentences of four words are padded to the longest of their batch; one in eight has a hundred", steps=100,
    ),
    Fault(
        name="--pad_to_max_length", training="run_mlm", code="compute.padding", flags=("--pad_to_max_length",),
        what="lines of ten words are padded to 128", steps=60,
    ),
    Fault(
        name="attention by hand", training="nanoGPT, long texts", code="compute.attention", function="forward",
        what="the flag for fused attention is set to False",
        edits=(instead("self.flash = hasattr(torch.nn.functional, 'scaled_dot_product_attention')",
                       "self.flash = False", "model.py"),
               instead("            att = F.softmax(att, dim=-1)", "            att = F.softmax(att, dim=-1)§",
                       "model.py")),
    ),
    Fault(
        name="the attention of minGPT", training="chargpt", code="compute.attention", function="forward", steps=20,
        what="the original's attention of 512 letters, written out",
        flags=("--data.block_size=512",), cure_flags=("--data.block_size=512",),
        edits=(instead("        att = F.softmax(att, dim=-1)", "        att = F.softmax(att, dim=-1)§",
                       "../../mingpt/model.py"),),
        cure_edits=(instead(_BY_HAND, "y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p="
                                      "self.attn_dropout.p if self.training else 0.0)\n", "../../mingpt/model.py"),),
    ),
    Fault(
        name="checkpointing", training="nanoGPT, long steps", code="memory.checkpointing", function="forward",
        what="the activations of every block are computed again, with memory to spare", edits=_RECOMPUTED, steps=16,
    ),
    Fault(
        name="batch of two", training="word language model", code="memory.underused", also=("launch.bound",),
        what="two texts at a time where twenty take hardly longer", flags=("--batch_size", "2"), work=10.0, gpu=True,
    ),
)  # fmt: skip

# --- what grows, what is ignored, who else is there -------------------------------------------------------------------

GROWING = (
    Fault(
        name="all outputs kept", training="tutorial gan", code="drift.slower", function="<module>",
        what="the outputs of all steps are kept, joined and averaged at every step",
        edits=(before("# Start training", "history = []"),
               after("        g_optimizer.step()", """
                   history.append(fake_images.detach().cpu()[:, :196].clone())
                   average = torch.cat(history).mean(0)§
               """)),
        steps=500,
    ),
    Fault(
        name="a list searched", training="makemore", code="drift.slower", function="<module>",
        what="whether a word was seen is looked up in a list that grows",
        edits=(before("    # training loop", "seen = []"),
               after("optimizer.step()", """
                   for word in X.tolist():
                       if word not in seen:§
                           seen.append(word)
               """)),
        steps=500,
    ),
    Fault(
        name="one hook more each step", training="mnist_rnn", code="drift.slower", function="train", steps=250,
        what="a hook on every layer is registered again at every step",
        edits=(after("    model.train()", "stats = []"), before("        optimizer.zero_grad()", """
            for layer in model.modules():
                layer.register_forward_hook(lambda m, i, o: stats.append(float(o[0].abs().mean())))§
        """),),
    ),
    Fault(
        name="errors of all steps", training="dqn", code="drift.slower", function="<module>",
        what="the median of the errors of all steps, kept in a list, after every one", steps=1200,
        edits=(before("    # TRY NOT TO MODIFY: start the game", "errors = []"),
               after("                optimizer.step()", """
                   errors.extend((td_target - old_val).detach().abs().tolist())
                   median_error = sorted(errors)[len(errors) // 2]§
               """)),
    ),
    Fault(
        name="activations kept", training="lightning", code="drift.slower", function="training_step", steps=250,
        what="the activations of every step are kept, and their spread over all of them is logged at every step",
        edits=(after("    def training_step(self, batch, batch_idx):", """
            self.kept = [*getattr(self, "kept", []), self.layer[0](batch)]
            self.log("spread", torch.stack(self.kept).std(0).mean())§
        """),),
    ),
)  # fmt: skip

ELSEWHERE = (
    Fault(
        name="--compile", training="mnist, batch of 256", code="config.ignored",
        what="--compile is read and never used", flags=("--compile",), cure_flags=("--compile",),
        edits=(after("parser = argparse.ArgumentParser", "parser.add_argument('--compile', action='store_true')"),),
        cure_edits=(after("parser = argparse.ArgumentParser", "parser.add_argument('--compile', action='store_true')"),
                    after("    model = Net().to(device)", "model = torch.compile(model) if args.compile else model")),
    ),
    Fault(
        name="num_workers of the config", training="template", code="config.ignored", also=("data.main-thread",),
        function="__init__", what="config.json asks for two workers; the loader is made without any",
        edits=(instead("            'num_workers': num_workers", "            'num_workers': 0§",
                       "base/base_data_loader.py"),),
    ),
    Fault(
        name="--amp true", training="captcha", code="config.ignored", flags=("--amp", "true"),
        what="amp: true in the config; the script compares it with 'bf16'", cure_flags=("--amp", "bf16"),
    ),
    Fault(
        name="company", training="convolutional", code="hardware.shared", beside=2 * CORES, cpu_only=True,
        what="two other programs for every core",
    ),
    Fault(
        name="company, long steps", training="nanoGPT, long steps", code="hardware.shared", beside=2 * CORES,
        cpu_only=True, what="two other programs for every core, steps of seconds", steps=12,
    ),
    Fault(
        name="an uneven rank", training="ddp tutorial, 2 ranks", code="dist.straggler", function="_run_batch",
        what="the second rank does the work of a step seven times", cpu_only=True,
        edits=(before("        output = self.model(source)", """
            for again in range(6 * self.gpu_id):
                torch.nn.functional.mse_loss(self.model.module(source), targets).backward()§
            self.optimizer.zero_grad()
        """),),
    ),
    Fault(
        name="a rank with a slow disk", training="ddp tutorial, 2 ranks", code="dist.straggler", function="__getitem__",
        what="the files of the second rank take 1 ms each", cpu_only=True,
        edits=(before("        return self.data[index]", "__import__('time').sleep(0.001 * "
                      "int(__import__('os').environ['RANK']))§", "datautils.py"),),
    ),
    Fault(
        name="sums over the ranks", training="ddp tutorial, 2 ranks", code="dist.comm", function="_run_batch",
        what="a histogram of five million bins is added up over the ranks after every step", cpu_only=True, steps=60,
        edits=(after("        self.optimizer.step()",
                     "torch.distributed.all_reduce(self.__dict__.setdefault('bins', torch.zeros(5_000_000)))§"),),
    ),
    Fault(
        name="find_unused_parameters", training="ddp tutorial, 2 ranks", code="dist.unused-parameters", cpu_only=True,
        what="find_unused_parameters=True, and none is unused, in a model of 400 layers",
        edits=(instead("DDP(self.model)", "DDP(self.model, find_unused_parameters=True)§"),
               instead("torch.nn.Sequential(torch.nn.Linear(20, 512)",
                       "torch.nn.Sequential(*[torch.nn.Linear(20, 20) for n in range(400)], torch.nn.Linear(20, 512)")),
        cure_edits=(instead("torch.nn.Sequential(torch.nn.Linear(20, 512)",
                            "torch.nn.Sequential(*[torch.nn.Linear(20, 20) for n in range(400)], "
                            "torch.nn.Linear(20, 512)"),),
        function="__init__",
    ),
)  # fmt: skip

# --- on a GPU ---------------------------------------------------------------------------------------------------------

_GRAY = ("--width", "80", "--batch-size", "256", "--num-workers", "12")
_SEGMENT = ("--width", "24", "--batch-size", "32", "--num-workers", "12")
_CAPTCHA = ("--width", "64", "--batch-size", "256", "--num-workers", "12")

ON_A_GPU = (
    Fault(name="pageable", training="segment", code="copy.pageable", data="segment full", gpu=True,
          what="pin_memory false", flags=(*_SEGMENT, "--resident", "--pin-memory", "false"),
          cure_flags=(*_SEGMENT, "--pin-memory", "true")),
    Fault(name="copies that wait", training="segment", code="copy.blocking", data="segment full", gpu=True,
          flags=_SEGMENT, cure_flags=_SEGMENT, what="non_blocking=False", function="to_device",
          edits=(instead("images.to(device, non_blocking=True)", "images.to(device)§"),
                 instead("masks.to(device, non_blocking=True)", "masks.to(device)"))),
    Fault(name="one copy a picture", training="mnist", code="copy.fragmented", gpu=True, function="train",
          what="the pictures of a batch are copied one by one", flags=("--batch-size", "512"),
          cure_flags=("--batch-size", "512"),
          edits=(before("data, target = data.to(device), target.to(device)",
                        "data = torch.stack([picture.to(device) for picture in data])§"),)),
    Fault(name="norms by item()", training="nanoGPT", code="sync.item", gpu=True, function="<module>",
          what="the norm of every gradient as a number, each step",
          edits=(after("scaler.update()", "norms = [p.grad.norm().item() for p in model.parameters()]§"),)),
    Fault(name="prints a tensor", training="word language model", code="sync.item", gpu=True, function="train",
          what="prints the loss tensor at every step",
          edits=(after("        loss.backward()", "print(loss, torch.isnan(output).any())§"),)),
    Fault(name="if of a tensor", training="makemore", code="sync.item", gpu=True, function="<module>",
          what="asks of every weight whether it is finite",
          edits=(after("optimizer.step()", """
              for p in model.parameters():
                  if not torch.isfinite(p).all():§
                      raise ValueError('not finite')
          """),)),
    Fault(name="tiny steps", training="stock", code="launch.bound", gpu=True, data="stock full",
          what="sixteen windows at a time", flags=("--hidden", "256", "--num-workers", "8", "--batch-size", "16"),
          cure_flags=("--hidden", "256", "--num-workers", "8", "--batch-size", "1024"), work=64.0),
    Fault(name="fp32", training="nanoGPT", code="compute.precision", gpu=True, flags=("--dtype=float32",),
          cure_flags=("--dtype=bfloat16",), what="float32 with TF32 switched off",
          edits=(instead("matmul.allow_tf32 = True", "matmul.allow_tf32 = False"),)),
    Fault(name="amp: false", training="segment", code="compute.precision", gpu=True, data="segment full",
          flags=("--resident", "--width", "64", "--batch-size", "32"), what="amp: false in the config",
          cure_flags=("--resident", "--width", "64", "--batch-size", "32", "--amp", "true")),
    Fault(name="NCHW", training="segment", code="compute.layout", gpu=True, data="segment full",
          flags=("--resident", "--width", "64", "--batch-size", "32", "--amp", "true"),
          cure_flags=("--resident", "--width", "64", "--batch-size", "32", "--amp", "true", "--channels-last", "true"),
          what="channels_last: false in the config"),
    Fault(name="optimizer in a loop", training="nanoGPT", code="compute.optimizer", gpu=True,
          what="AdamW without foreach or fused",
          edits=(instead("use_fused = fused_available and device_type == 'cuda'", "use_fused = False", "model.py"),
                 instead("extra_args = dict(fused=True) if use_fused else dict()", "extra_args = dict(foreach=False)",
                         "model.py"))),
    Fault(name="GELU by hand", training="nanoGPT", code="compute.eager", gpu=True, function="forward",
          what="GELU as a chain of six operations, not compiled",
          edits=(instead("        x = self.gelu(x)",
                         "        x = 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))§",
                         "model.py"),)),
    Fault(name="batch of eight", training="captcha", code="memory.underused", also=("launch.bound",), gpu=True,
          data="captcha full", flags=("--resident", "--batch-size", "8", "--width", "64"), work=32.0,
          cure_flags=("--resident", "--batch-size", "256", "--width", "64"), what="eight pictures on a large GPU"),
    Fault(name="cache emptied", training="nanoGPT", code="memory.pressure", gpu=True, function="<module>",
          what="empty_cache() after every step", edits=(after("scaler.update()", "torch.cuda.empty_cache()§"),)),
    Fault(name="checkpointing on a GPU", training="nanoGPT", code="memory.checkpointing", gpu=True, function="forward",
          what="the activations of every block are computed again", edits=_RECOMPUTED),
    Fault(name="DataParallel", training="pytorch-cifar", code="dist.data-parallel", gpu=True,
          what="nn.DataParallel, as the original has it", edits=(instead("net = LeNet()", "net = ResNet18()"),),
          cure_edits=(instead("net = LeNet()", "net = ResNet18()"),
                      instead("net = torch.nn.DataParallel(net)", "pass"))),
)  # fmt: skip

FAULTS = HOST_PYTHON + PAUSES + DATA + COMPUTE + GROWING + ELSEWHERE + ON_A_GPU
HEALTHY = (
    "mnist", "mnist, batch of 256", "mnist_rnn", "convolutional", "bidirectional", "dcgan", "wgan-gp",
    "word language model", "nanoGPT", "nanoGPT, long steps", "nanoGPT, long texts", "makemore", "llama2.c", "lightning",
    "gat",
)  # fmt: skip
