"""The public scripts of harmless.py: where each comes from, how it is started and shortened, and its made-up data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.diagnosis import Edit, Script, instead, prepare_words
from benchmarks.fixed_scripts import COMMITS as FIXED_COMMITS
from benchmarks.fixed_scripts import characters, electricity, mnist

COMMITS = FIXED_COMMITS | {
    "huggingface/accelerate": "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    "huggingface/pytorch-image-models": "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "huggingface/transformers": "d56c55bf564ddb176759eb6ec199442682564916",
    "karpathy/llama2.c": "350e04fe35433e6d2941dce5a1f53308f87058eb",
    "pytorch/ignite": "de08e799cfb55a6cf4aa778575d6bad725385453",
    "tkipf/pygcn": "1600b5b748b3976413d1e307540ccc62605b4d6d",
    "udacity/deep-learning-v2-pytorch": "c9404fc86181fc3f0906b368697268257f348535",
    "vwxyzjn/cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
}
WITNESS = str(Path(__file__).with_name("witness.py"))
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True, kw_only=True)
class Example(Script):
    """A public script, the `kind` of training it is, and how it is started."""

    kind: str
    launcher: tuple[str, ...] = ("python",)
    loader: bool = True  # has it a DataLoader, for --auto to work on?
    unordered: bool = False  # do several processes write to the same output?
    times: str = r"(?!)"  # what else in its output is a time

    def command(self) -> list[str]:
        """What a person types, with the witness before the script."""
        name = Path(self.path).name
        if name.endswith(".ipynb"):
            how = ["--to", "markdown", "--stdout", "--ExecutePreprocessor.kernel_name=witness"]
            return ["python", "-m", "nbconvert", "--execute", *how, name]
        return [*self.launcher, WITNESS, name, *self.flags]


# --- data -------------------------------------------------------------------------------------------------------------


def digits(where: str, train: int = 3_000, test: int = 500) -> Callable[[Path], None]:
    """A small MNIST."""
    return mnist(where, train=train, test=test)


def fashion(where: str) -> Callable[[Path], None]:
    """The same digits under FashionMNIST's name."""

    def make(folder: Path) -> None:
        digits(where)(folder)
        (folder / where / "MNIST").rename(folder / where / "FashionMNIST")

    return make


def text(*names: str, words: int = 20_000, heading: str = "") -> Callable[[Path], None]:
    """Files of made-up sentences, ten words each of 300 different ones."""

    def make(folder: Path) -> None:
        random = np.random.default_rng(0)
        for number, name in enumerate(names):
            count = words if number == 0 else words // 10
            found = [f"word{n:x}" for n in random.integers(0, 300, count)]
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(heading + "\n".join(" ".join(found[i : i + 10]) for i in range(0, count, 10)) + "\n")

    return make


def citations(where: str, papers: int = 1_800, words: int = 40) -> Callable[[Path], None]:
    """Papers, the words in them, and who cites whom, as Cora has them."""

    def make(folder: Path) -> None:
        random, place = np.random.default_rng(0), folder / where
        place.mkdir(parents=True, exist_ok=True)
        with (place / "cora.content").open("w") as file:
            for paper in range(papers):
                held = " ".join(map(str, random.integers(0, 2, words)))
                file.write(f"{1000 + paper}\t{held}\tclass{paper % 7}\n".replace(" ", "\t"))
        cites = random.integers(1000, 1000 + papers, (3 * papers, 2))
        (place / "cora.cites").write_text("".join(f"{a}\t{b}\n" for a, b in np.unique(cites, axis=0)))

    return make


def pictures(where: str, name: str, *, count: int, side: int) -> Callable[[Path], None]:
    """JPEG files under a name in which {n} is their number and {c} their class."""

    def make(folder: Path) -> None:
        from PIL import Image

        random = np.random.default_rng(0)
        for number in range(count):
            small = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            path = folder / where / name.format(n=number, c=number % 5)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(small).resize((side, side)).save(path)

    return make


def all_of(*makers: Callable[[Path], None]) -> Callable[[Path], None]:
    """One after the other."""

    def make(folder: Path) -> None:
        for maker in makers:
            maker(folder)

    return make


def edited(name: str, edit: Edit) -> Callable[[Path], None]:
    """Another file of the repository, where what is installed here is too new for it."""

    def make(folder: Path) -> None:
        (folder / name).write_text(edit((folder / name).read_text()))

    return make


def tokens(where: str) -> Callable[[Path], None]:
    """Three shards of tokens, as llama2.c keeps TinyStories."""

    def make(folder: Path) -> None:
        (folder / where).mkdir(parents=True)
        for number in range(3):
            noise = np.random.default_rng(number).integers(0, 32_000, 100_000, dtype=np.uint16)
            noise.tofile(folder / where / f"data{number:02d}.bin")

    return make


def sines(folder: Path) -> None:
    """By the example's own generator."""
    subprocess.run([sys.executable, "generate_sine_wave.py"], cwd=folder, check=True)


def short_template(folder: Path) -> None:
    """Two epochs instead of a hundred."""
    digits("data")(folder)
    config = json.loads((folder / "config.json").read_text())
    config["trainer"]["epochs"] = 2
    (folder / "config.json").write_text(json.dumps(config))


def tiny(kind: str, where: str, *, weights: bool = False) -> Callable[[Path], None]:
    """A folder with a small model of Hugging Face's and a tokenizer of words."""

    def make(folder: Path) -> None:
        import torch
        import transformers
        from tokenizers import Tokenizer, models, pre_tokenizers

        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        vocabulary = {word: n for n, word in enumerate([*special, *(f"word{n:x}" for n in range(300))])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names).save_pretrained(
            folder / where
        )
        size = {"vocab_size": len(vocabulary), "pad_token_id": 0}
        if kind == "gpt2":
            config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=2,
                                             eos_token_id=3, **size)  # fmt: skip
        else:
            config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                             intermediate_size=64, max_position_embeddings=128, **size)  # fmt: skip
        config.save_pretrained(folder / where)
        if weights:
            torch.manual_seed(0)
            transformers.BertForSequenceClassification(config).save_pretrained(folder / where)

    return make


def paraphrases(folder: Path) -> None:
    """GLUE's MRPC as files where datasets and evaluate look for it, and a small model under BERT's name."""
    random, place = np.random.default_rng(0), folder / "nyu-mll/glue"
    place.mkdir(parents=True)
    for split, count in (("train", 400), ("validation", 80), ("test", 80)):
        with (place / f"{split}.jsonl").open("w") as file:
            for number in range(count):
                one, other = (" ".join(f"word{n:x}" for n in random.integers(0, 300, 12)) for _ in range(2))
                row = {"sentence1": one, "sentence2": other, "label": number % 2, "idx": number}
                file.write(json.dumps(row) + "\n")
    files = "\n".join(f"  - split: {s}\n    path: {s}.jsonl" for s in ("train", "validation", "test"))
    (place / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}\n---\n")
    (folder / "glue").mkdir()
    (folder / "glue/glue.py").write_text(METRIC)
    tiny("bert", "bert-base-cased", weights=True)(folder)


METRIC = """
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        held = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=held)

    def _compute(self, predictions, references):
        return {"accuracy": sum(int(a == b) for a, b in zip(predictions, references)) / len(references)}
"""

# --- scripts ----------------------------------------------------------------------------------------------------------

_EXAMPLES = {"repo": "pytorch/examples"}
_TUTORIAL = {"repo": "yunjey/pytorch-tutorial", "prepare": digits("../../data")}
_GAN = {"repo": "eriklindernoren/PyTorch-GAN", "prepare": digits("../../data/mnist"), "kind": "GAN"}
_FABRIC = {"repo": "Lightning-AI/pytorch-lightning", "kind": "Lightning Fabric", "prepare": digits("../../../Datasets")}
_LIGHTNING = {"repo": "Lightning-AI/pytorch-lightning", "kind": "Lightning"}
_TRANSFORMERS = {"repo": "huggingface/transformers"}
_ACCELERATE = {"repo": "huggingface/accelerate", "kind": "Accelerate", "prepare": paraphrases}
_INTRO = {"repo": "udacity/deep-learning-v2-pytorch", "kind": "notebook"}
_FEW_EPOCHS = (instead(r"num_epochs = \d+", "num_epochs = 1"),)
_LM = (
    "--config_name", "tiny", "--tokenizer_name", "tiny", "--train_file", "train.txt", "--output_dir", "out",
)  # fmt: skip
_TRAINER = (
    *_LM, "--do_train", "--max_steps", "40", "--per_device_train_batch_size", "4", "--use_cpu", "--report_to", "none",
    "--save_steps", "20", "--logging_steps", "10",
)  # fmt: skip
_FEW_BATCHES = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=60", "--trainer.limit_val_batches=10",
                "--trainer.limit_test_batches=10", "--trainer.limit_predict_batches=2",
                "--trainer.accelerator=cpu")  # fmt: skip
_BIG = all_of(digits("../../Datasets", train=60_000), digits("data"))  # Lightning looks into both
_GPT = all_of(tiny("gpt2", "tiny"), text("train.txt"))
_TIMM = ("--data-dir", "imagenet", "--model", "mobilenetv3_small_050", "--num-classes", "5", "--img-size", "64",
         "--epochs", "1", "-b", "8", "-j", "2", "--device", "cpu", "--warmup-epochs", "0",
         "--cooldown-epochs", "0")  # fmt: skip
_IMAGENET = all_of(
    pictures("imagenet/train", "n{c}/{n}.jpg", count=240, side=96), pictures("imagenet/val", "n{c}/{n}.jpg",
             count=40, side=96), pictures("imagenet/validation", "n{c}/{n}.jpg", count=40, side=96),
)  # fmt: skip

EXAMPLES = (
    Example(**_EXAMPLES, kind="plain loop", name="mnist", path="mnist/main.py", prepare=digits("../data"),
            flags=("--epochs", "2", "--save-model")),
    Example(**_EXAMPLES, kind="plain loop", name="mnist_rnn", path="mnist_rnn/main.py", prepare=digits("../data"),
            flags=("--epochs", "1", "--save-model")),
    Example(**_EXAMPLES, kind="plain loop", name="forward-forward", path="mnist_forward_forward/main.py",
            prepare=digits("data"), flags=("--epochs", "30", "--train_size", "500", "--test_size", "200",
                                           "--save-model")),
    Example(**_EXAMPLES, kind="spawned process", name="hogwild", path="mnist_hogwild/main.py",
            prepare=digits("../data"), flags=("--num-processes", "1", "--epochs", "1", "--save_model"),
            times=r"^\d+(?=\tTrain)"),
    Example(**_EXAMPLES, kind="plain loop", name="vae", path="vae/main.py", prepare=digits("../data"),
            flags=("--epochs", "3")),
    Example(**_EXAMPLES, kind="GAN", name="dcgan", path="dcgan/main.py",
            flags=("--dataset", "fake", "--imageSize", "64", "--batchSize", "16", "--ngf", "8", "--ndf", "8", "--niter",
                   "1")),
    Example(**_EXAMPLES, kind="GNN", name="gat", path="gat/main.py", loader=False,
            prepare=citations("cora", papers=1_620), flags=("--epochs", "15", "--val-every", "5", "--hidden-dim", "8",
                                                            "--num-heads", "2")),
    Example(**_EXAMPLES, kind="plain loop", name="siamese", path="siamese_network/main.py",
            prepare=digits("../data", train=300, test=100), flags=("--epochs", "1", "--save-model"),),
    Example(**_EXAMPLES, kind="plain loop", name="word language model", path="word_language_model/main.py",
            loader=False, prepare=text(*(f"data/wikitext-2/{part}.txt" for part in ("train", "valid", "test"))),
            flags=("--epochs", "2", "--emsize", "32", "--nhid", "32", "--use-optimizer")),
    Example(**_EXAMPLES, kind="plain loop", name="time sequence (LBFGS)", path="time_sequence_prediction/train.py",
            loader=False, prepare=sines, flags=("--steps", "1"), environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
            edits=(instead(r"lr=0\.8", "lr=0.8, max_iter=3"),)),
    Example(**_EXAMPLES, kind="RL", name="reinforce", path="reinforcement_learning/reinforce.py", loader=False,
            edits=(instead(r"env\.spec\.reward_threshold", "60"),)),
    Example(**_EXAMPLES, kind="RL", name="actor-critic", path="reinforcement_learning/actor_critic.py", loader=False,
            edits=(instead(r"env\.spec\.reward_threshold", "60"),)),
    Example(**_EXAMPLES, kind="plain loop", name="super resolution", path="super_resolution/main.py",
            prepare=all_of(pictures("dataset/BSDS300/images/train", "{n}.jpg", count=24, side=260),
                           pictures("dataset/BSDS300/images/test", "{n}.jpg", count=8, side=260)),
            flags=("--upscale_factor", "4", "--nEpochs", "1", "--batchSize", "4", "--threads", "2")),
    Example(**_EXAMPLES, kind="plain loop", name="imagenet", path="imagenet/main.py", prepare=_IMAGENET,
            flags=("imagenet", "-a", "shufflenet_v2_x0_5", "-b", "16", "--no-accel", "-j", "2", "--epochs", "1")),
    Example(repo="karpathy/nanoGPT", kind="plain loop", name="nanoGPT", path="train.py", loader=False,
            prepare=characters, times=r"mfu -?[\d.]+%",
            flags=("config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=2",
                   "--eval_interval=30", "--log_interval=10", "--block_size=16", "--batch_size=4", "--n_layer=2",
                   "--n_head=2", "--n_embd=16", "--max_iters=60", "--lr_decay_iters=60", "--warmup_iters=10")),
    Example(repo="karpathy/makemore", kind="plain loop", name="makemore", path="makemore.py", prepare=prepare_words,
            flags=("--max-steps", "250", "--num-workers", "1", "--n-embd", "16", "--n-embd2", "16")),
    Example(repo="karpathy/minGPT", kind="plain loop", name="minGPT adder", path="projects/adder/adder.py",
            flags=("--trainer.max_iters=150", "--trainer.num_workers=1")),
    Example(repo="karpathy/minGPT", kind="plain loop", name="minGPT chargpt", path="projects/chargpt/chargpt.py",
            prepare=text("input.txt", heading="O God, O God!"),
            flags=("--trainer.max_iters=30", "--model.model_type=gpt-nano", "--trainer.batch_size=8",
                   "--trainer.num_workers=2")),
    Example(**_TUTORIAL, kind="plain loop", name="tutorial: linear", loader=False,
            path="tutorials/01-basics/linear_regression/main.py"),
    Example(**_TUTORIAL, kind="plain loop", name="tutorial: feedforward",
            path="tutorials/01-basics/feedforward_neural_network/main.py"),
    Example(**_TUTORIAL, kind="plain loop", name="tutorial: convolutional",
            path="tutorials/02-intermediate/convolutional_neural_network/main.py", edits=_FEW_EPOCHS),
    Example(**_TUTORIAL, kind="GAN", name="tutorial: gan", edits=(instead("num_epochs = 200", "num_epochs = 3"),),
            path="tutorials/03-advanced/generative_adversarial_network/main.py"),
    Example(**_GAN, name="gan", path="implementations/gan/gan.py",
            flags=("--n_epochs", "2", "--sample_interval", "20")),
    Example(**_GAN, name="wgan-gp", path="implementations/wgan_gp/wgan_gp.py",
            flags=("--n_epochs", "1", "--sample_interval", "20")),
    Example(**_GAN, name="acgan", path="implementations/acgan/acgan.py",
            flags=("--n_epochs", "1", "--sample_interval", "20", "--batch_size", "16")),
    Example(repo="victoresque/pytorch-template", kind="plain loop", name="template", path="train.py",
            prepare=all_of(short_template, edited("utils/util.py", instead(r"\.values\[:\] = 0", " = 0.0"))),
            flags=("-c", "config.json")),
    Example(repo="cure-lab/LTSF-Linear", kind="plain loop", name="DLinear", path="run_longExp.py",
            prepare=all_of(electricity, edited("utils/tools.py", instead(r"np\.Inf", "np.inf"))),
            flags=("--is_training", "1", "--model_id", "etth1", "--model", "DLinear", "--data", "ETTh1", "--root_path",
                   "./dataset/", "--train_epochs", "1", "--itr", "1", "--num_workers", "2", "--batch_size", "64")),
    Example(repo="tkipf/pygcn", kind="GNN", name="pygcn", path="pygcn/train.py", loader=False,
            prepare=citations("../data/cora"), flags=("--epochs", "100")),
    Example(repo="vwxyzjn/cleanrl", kind="RL", name="ppo", path="cleanrl/ppo.py", loader=False,
            flags=("--total-timesteps", "4096")),
    Example(repo="vwxyzjn/cleanrl", kind="RL", name="dqn", path="cleanrl/dqn.py", loader=False,
            flags=("--total-timesteps", "3000", "--learning-starts", "500")),
    Example(repo="pytorch/ignite", kind="Ignite", name="ignite mnist", path="examples/mnist/mnist.py",
            prepare=digits("."), flags=("--epochs", "1")),
    Example(**_LIGHTNING, name="lightning: autoencoder", path="examples/pytorch/basics/autoencoder.py",
            prepare=_BIG, flags=_FEW_BATCHES),
    Example(**_LIGHTNING, name="lightning: backbone", path="examples/pytorch/basics/backbone_image_classifier.py",
            prepare=_BIG, flags=_FEW_BATCHES),
    Example(**_LIGHTNING, name="lightning: bug report", path="examples/pytorch/bug_report/bug_report_model.py"),
    Example(**_LIGHTNING, name="lightning: backbone, ddp", unordered=True,
            path="examples/pytorch/basics/backbone_image_classifier.py",
            prepare=_BIG,
            flags=(*_FEW_BATCHES, "--trainer.devices=2", "--trainer.strategy=ddp")),
    Example(**_FABRIC, name="fabric: image classifier", path="examples/fabric/image_classifier/train_fabric.py",
            flags=("--epochs", "1")),
    Example(**_FABRIC, name="fabric: k-fold", path="examples/fabric/kfold_cv/train_fabric.py",
            flags=("--epochs", "1", "--folds", "2")),
    Example(**_TRANSFORMERS, kind="Trainer", name="run_clm", prepare=_GPT,
            path="examples/pytorch/language-modeling/run_clm.py",
            flags=(*_TRAINER, "--block_size", "64", "--dataloader_num_workers", "2")),
    Example(**_TRANSFORMERS, kind="Trainer", name="run_mlm", prepare=all_of(tiny("bert", "tiny"), text("train.txt")),
            path="examples/pytorch/language-modeling/run_mlm.py", flags=(*_TRAINER, "--max_seq_length", "64")),
    Example(**_TRANSFORMERS, kind="stream (Trainer)", name="run_clm --streaming", prepare=_GPT,
            path="examples/pytorch/language-modeling/run_clm.py",
            flags=(*_TRAINER, "--block_size", "64", "--streaming", "--max_train_samples", "500")),
    Example(**_TRANSFORMERS, kind="Accelerate", name="run_clm_no_trainer", prepare=_GPT,
            path="examples/pytorch/language-modeling/run_clm_no_trainer.py",
            edits=(instead(r"DistributedType\.TPU", "DistributedType.XLA"),),  # as Accelerate calls it now
            flags=(*_LM, "--max_train_steps", "40", "--per_device_train_batch_size", "4", "--block_size", "64")),
    Example(**_TRANSFORMERS, kind="DDP (Trainer)", name="run_clm, 2 ranks", prepare=_GPT, launcher=TORCHRUN,
            path="examples/pytorch/language-modeling/run_clm.py", unordered=True,
            flags=(*_TRAINER, "--block_size", "64", "--ddp_backend", "gloo")),
    Example(**_ACCELERATE, name="accelerate: nlp", path="examples/nlp_example.py", flags=("--cpu",)),
    Example(**_ACCELERATE, name="accelerate: accumulation", path="examples/by_feature/gradient_accumulation.py",
            flags=("--cpu", "--gradient_accumulation_steps", "2")),
    Example(**_ACCELERATE, name="accelerate: checkpointing", path="examples/by_feature/checkpointing.py",
            flags=("--cpu", "--checkpointing_steps", "epoch", "--output_dir", "out")),
    Example(repo="huggingface/pytorch-image-models", kind="timm", name="timm train", path="train.py",
            prepare=_IMAGENET, flags=_TIMM),
    Example(**_EXAMPLES, kind="DDP", name="ddp tutorial, 2 ranks", launcher=TORCHRUN, unordered=True,
            path="distributed/ddp-tutorial-series/multigpu_torchrun.py", flags=("20", "5"),
            edits=(instead(r'torch\.cuda\.set_device.*', "pass"), instead('backend="nccl"', 'backend="gloo"'),
                   instead(r"\.to\(self\.gpu_id\)", '.to("cpu")'), instead(r"device_ids=\[self\.gpu_id\]", ""))),
    Example(repo="karpathy/llama2.c", kind="stream", name="llama2.c", path="train.py",
            prepare=tokens("data/TinyStories_all_data"), times=r"mfu -?[\d.]+%",
            flags=("--device=cpu", "--compile=False", "--dtype=float32", "--batch_size=8", "--max_iters=60",
                   "--eval_iters=5", "--eval_interval=30", "--dim=32", "--n_layers=2", "--n_heads=2", "--n_kv_heads=2",
                   "--max_seq_len=32", "--gradient_accumulation_steps=2")),
    Example(repo="karpathy/minGPT", kind="notebook", name="notebook: minGPT", path="demo.ipynb",
            edits=(instead("max_iters = 2000", "max_iters = 200"),)),
    Example(**_INTRO, name="notebook: training", prepare=digits("../../home/.pytorch/MNIST_data"),
            path="intro-to-pytorch/Part 3 - Training Neural Networks (Solution).ipynb"),
    Example(**_INTRO, name="notebook: time series", loader=False,
            path="recurrent-neural-networks/time-series/Simple_RNN.ipynb"),
)  # fmt: skip
