"""The trainings of truth.py as they are without a fault: public scripts, and the five of workloads/.

Where the script of a repository has a fault of its own (it loads in the training process, it evaluates all the time),
an edit takes it out here, so that what is planted is all that is wrong.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from benchmarks.diagnosis import prepare_words
from benchmarks.examples import (
    COMMITS,
    all_of,
    citations,
    paraphrases,
    pictures,
    text,
    tiny,
    tokens,
)
from benchmarks.fixed_scripts import characters, electricity
from benchmarks.planting import Training, after, before, instead

__all__ = ["COMMITS", "TRAININGS"]

READY = {"STANDIN_READY": "1"}
NEVER = "1000000"


def names(folder: Path) -> None:
    """Words of up to nine letters, a line each, for makemore."""
    prepare_words(folder)


def letters(folder: Path) -> None:
    """Shakespeare's characters for nanoGPT, and how many there are."""
    characters(folder)
    (folder / "data/shakespeare_char/meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def photographs(count: int) -> object:
    """Pictures for super_resolution, and a few to test with."""
    where = "dataset/BSDS300/images"
    return all_of(
        pictures(f"{where}/train", "{n}.jpg", count=count, side=260),
        pictures(f"{where}/test", "{n}.jpg", count=4, side=260),
    )


def trainer_model(kind: str) -> object:
    """A small model of Hugging Face's, its tokenizer, and two files of sentences."""
    return all_of(tiny(kind, "tiny"), text("train.txt", "more.txt", words=60_000))


_EXAMPLES = {"repo": "pytorch/examples"}
_YUNJEY = {"repo": "yunjey/pytorch-tutorial", "stand_in": True}
_GAN = {"repo": "eriklindernoren/PyTorch-GAN", "stand_in": True, "kind": "GAN", "environment": READY}
_CLM = (
    "--config_name", "tiny", "--tokenizer_name", "tiny", "--train_file", "train.txt", "--output_dir", "out",
    "--do_train", "--max_steps", "10000", "--per_device_train_batch_size", "16", "--report_to", "none",
    "--save_strategy", "no", "--logging_steps", "50",
)  # fmt: skip
_TWO_WORKERS = instead("shuffle=True)", "shuffle=True, num_workers=2, persistent_workers=True)")
_WORKLOAD = ("--epochs", NEVER, "--log-every", "50", "--out", "out")
_NANO = (
    "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=2",
    f"--eval_interval={NEVER}", "--log_interval=10", f"--max_iters={NEVER}", "--dropout=0.0",
)  # fmt: skip
_ON_GPU = ("--device=cuda", "--batch_size=64", "--block_size=256", "--n_layer=6", "--n_head=6", "--n_embd=384")

_LIST = (
    # -- vision
    Training(
        **_EXAMPLES, name="mnist", path="mnist/main.py", kind="vision", stand_in=True, environment=READY,
        flags=("--batch-size", "64", "--log-interval", "50"), steps=150,
    ),
    Training(
        **_EXAMPLES, name="mnist, batch of 256", path="mnist/main.py", kind="vision", stand_in=True, environment=READY,
        flags=("--batch-size", "256", "--log-interval", "50"), steps=60,
    ),
    Training(
        **_EXAMPLES, name="mnist_rnn", path="mnist_rnn/main.py", kind="vision", stand_in=True, environment=READY,
        flags=("--batch-size", "128", "--log-interval", "50"), gpu_flags=("--accel",), steps=200,
    ),
    Training(
        **_EXAMPLES, name="vae", path="vae/main.py", kind="vision", stand_in=True, environment=READY,
        flags=("--batch-size", "128", "--log-interval", "50"), steps=400,
    ),
    Training(
        **_EXAMPLES, name="vae from files", path="vae/main.py", kind="vision", stand_in=True,
        environment={"STANDIN_SIDE": "96"}, flags=("--batch-size", "128", "--log-interval", "50"), steps=150,
        edits=(instead("kwargs = {'num_workers': 1, 'pin_memory': True} if use_accel else {}",
                       "kwargs = {'num_workers': 2, 'pin_memory': use_accel}"),),
    ),
    Training(
        **_EXAMPLES, name="super resolution", path="super_resolution/main.py", kind="vision", stand_in=True,
        prepare=photographs(400), steps=90,
        flags=("--upscale_factor", "4", "--nEpochs", NEVER, "--batchSize", "4", "--threads", "2"),
        gpu_flags=("--accel",),
    ),
    Training(
        repo="kuangliu/pytorch-cifar", name="pytorch-cifar", path="main.py", kind="vision", stand_in=True,
        environment={"STANDIN_SIDE": "32"}, steps=100,
        edits=(instead("net = SimpleDLA()", "net = LeNet()"),
               instead("from utils import progress_bar", "progress_bar = lambda *said: None")),
    ),
    Training(**_YUNJEY, name="logistic", path="tutorials/01-basics/logistic_regression/main.py", kind="vision",
             edits=(_TWO_WORKERS, instead("num_epochs = 5", "num_epochs = 100")), steps=300),
    Training(**_YUNJEY, name="feedforward", path="tutorials/01-basics/feedforward_neural_network/main.py",
             kind="vision", edits=(instead("num_epochs = 5", "num_epochs = 100"),), environment=READY, steps=600),
    Training(**_YUNJEY, name="feedforward from files",
             path="tutorials/01-basics/feedforward_neural_network/main.py", kind="vision",
             environment={"STANDIN_SIDE": "64"},
             edits=(_TWO_WORKERS, instead("num_epochs = 5", "num_epochs = 200")), steps=300),
    Training(**_YUNJEY, name="convolutional", path="tutorials/02-intermediate/convolutional_neural_network/main.py",
             kind="vision", edits=(instead("num_epochs = 5", "num_epochs = 100"),), environment=READY, steps=200),
    Training(**_YUNJEY, name="residual", path="tutorials/02-intermediate/deep_residual_network/main.py",
             kind="vision", edits=(_TWO_WORKERS, instead("batch_size = 100", "batch_size = 20")), steps=60),
    Training(**_YUNJEY, name="bidirectional", kind="vision", environment=READY, steps=80,
             edits=(instead("num_epochs = 2", "num_epochs = 100"),),
             path="tutorials/02-intermediate/bidirectional_recurrent_neural_network/main.py"),
    Training(
        repo="victoresque/pytorch-template", name="template", path="train.py", kind="vision", stand_in=True,
        flags=("-c", "config.json"), environment={"STANDIN_SIDE": "64"}, steps=150,
        edits=(instead("self._data[col].values[:] = 0", "self._data[col] = 0.0", "utils/util.py"),),
    ),
    # -- GANs
    Training(
        **_EXAMPLES, name="dcgan", path="dcgan/main.py", kind="GAN", stand_in=True, environment=READY, steps=200,
        flags=("--dataset", "fake", "--imageSize", "64", "--batchSize", "8", "--ngf", "16", "--ndf", "16", "--niter",
               NEVER, "--workers", "1"), gpu_flags=("--accel",),
    ),
    Training(**_GAN, name="gan", path="implementations/gan/gan.py", steps=200,
             flags=("--n_epochs", NEVER, "--sample_interval", NEVER)),
    Training(**_GAN, name="wgan-gp", path="implementations/wgan_gp/wgan_gp.py", steps=200,
             flags=("--n_epochs", NEVER, "--sample_interval", NEVER)),
    Training(**_YUNJEY, name="tutorial gan", path="tutorials/03-advanced/generative_adversarial_network/main.py",
             kind="GAN", environment=READY, steps=800),
    # -- language
    Training(
        **_EXAMPLES, name="word language model", path="word_language_model/main.py", kind="language", steps=200,
        prepare=text(*(f"data/wikitext-2/{part}.txt" for part in ("train", "valid", "test")), words=200_000),
        flags=("--emsize", "64", "--nhid", "64", "--use-optimizer", "--lr", "0.001"), gpu_flags=("--accel",),
    ),
    Training(
        repo="karpathy/nanoGPT", name="nanoGPT", path="train.py", kind="language", prepare=letters, steps=120,
        flags=(*_NANO, "--block_size=64", "--batch_size=8", "--n_layer=4", "--n_head=4", "--n_embd=128"),
        gpu_flags=_ON_GPU,
    ),
    Training(
        repo="karpathy/nanoGPT", name="nanoGPT, long steps", path="train.py", kind="language", prepare=letters,
        flags=(*_NANO, "--block_size=256", "--batch_size=4", "--n_layer=6", "--n_head=6", "--n_embd=384"),
        gpu_flags=_ON_GPU, steps=24,
    ),
    Training(
        repo="karpathy/nanoGPT", name="nanoGPT, long texts", path="train.py", kind="language", prepare=letters,
        flags=(*_NANO, "--block_size=512", "--batch_size=2", "--n_layer=2", "--n_head=8", "--n_embd=128"),
        gpu_flags=("--device=cuda", "--batch_size=16", "--block_size=1024", "--n_layer=6", "--n_head=6",
                   "--n_embd=384"),
        steps=40,
    ),
    Training(
        repo="karpathy/minGPT", name="adder", path="projects/adder/adder.py", kind="language", steps=250,
        flags=("--trainer.num_workers=2", f"--trainer.max_iters={NEVER}"),
        edits=(instead("trainer.iter_num % 500 == 0", "trainer.iter_num % 100000 == 99999"),),
    ),
    Training(
        repo="karpathy/minGPT", name="chargpt", path="projects/chargpt/chargpt.py", kind="language", steps=60,
        prepare=text("input.txt", heading="O God, O God!"),
        flags=("--model.model_type=gpt-micro", "--trainer.batch_size=8", "--trainer.num_workers=1",
               f"--trainer.max_iters={NEVER}"),
        edits=(instead("trainer.iter_num % 500 == 0", "trainer.iter_num % 100000 == 99999"),),
    ),
    Training(
        repo="karpathy/makemore", name="makemore", path="makemore.py", kind="language", prepare=names, steps=150,
        flags=("--num-workers", "1"), gpu_flags=("--device", "cuda"),
    ),
    # -- streams
    Training(
        repo="karpathy/llama2.c", name="llama2.c", path="train.py", kind="stream", steps=60,
        prepare=tokens("data/TinyStories_all_data"), gpu_flags=("--device=cuda", "--dtype=bfloat16"),
        flags=("--device=cpu", "--compile=False", "--dtype=float32", "--batch_size=4", f"--max_iters={NEVER}",
               "--eval_iters=2", f"--eval_interval={NEVER}", "--dim=64", "--n_layers=2", "--n_heads=2",
               "--n_kv_heads=2", "--max_seq_len=32", "--gradient_accumulation_steps=2", "--log_interval=10"),
    ),
    Training(
        repo="karpathy/llama2.c", name="llama2.c, packed", path="train.py", kind="stream", steps=80,
        prepare=tokens("data/TinyStories_all_data"), gpu_flags=("--device=cuda", "--dtype=bfloat16"),
        flags=("--device=cpu", "--compile=False", "--dtype=float32", "--batch_size=4", f"--max_iters={NEVER}",
               "--eval_iters=1", f"--eval_interval={NEVER}", "--dim=16", "--n_layers=1", "--n_heads=2",
               "--n_kv_heads=2", "--max_seq_len=16", "--gradient_accumulation_steps=1", "--log_interval=10",
               "--vocab_size=32000"),
        edits=(
            instead("    num_workers=0,\n", "    num_workers=2,\n"),
            # each worker has shards of its own, and what it reads has to be unlocked first
            after("assert len(shard_filenames)>0", """
                shard_filenames = shard_filenames[worker_id::worker_info.num_workers if worker_info else 1]
                if not shard_filenames:
                    return
            """, "tinystories.py"),
            before("chunk = torch.from_numpy((m[start:end])", "unlock(m[start:end])", "tinystories.py"),
            before("class PretokDataset", """
                def unlock(block):
                    return hashlib.pbkdf2_hmac("sha256", block.tobytes(), b"salt", 30_000)

            """, "tinystories.py"),
            instead("import glob\n", "import glob\nimport hashlib\n", "tinystories.py"),
        ),
    ),
    # -- Hugging Face, Accelerate, Lightning
    Training(
        repo="huggingface/transformers", name="run_clm", path="examples/pytorch/language-modeling/run_clm.py",
        within="examples/pytorch/language-modeling", kind="Trainer", prepare=trainer_model("gpt2"), steps=100,
        flags=(*_CLM, "--use_cpu", "--block_size", "64", "--dataloader_num_workers", "1"),
    ),
    Training(
        repo="huggingface/transformers", name="run_mlm", path="examples/pytorch/language-modeling/run_mlm.py",
        within="examples/pytorch/language-modeling", kind="Trainer", prepare=trainer_model("bert"), steps=100,
        flags=(*_CLM, "--use_cpu", "--max_seq_length", "128", "--line_by_line", "--dataloader_num_workers", "1"),
    ),
    Training(
        repo="huggingface/transformers", name="run_clm --streaming", kind="stream (Trainer)",
        path="examples/pytorch/language-modeling/run_clm.py", within="examples/pytorch/language-modeling",
        prepare=all_of(trainer_model("gpt2"), *(text(f"part-{n}.txt", words=200_000) for n in range(4))), steps=60,
        edits=(after("def tokenize_function(examples):",
                     "[unlock(line) for line in examples[text_column_name]]  # each line is locked"),
               before("def main():", """
                   def unlock(line):
                       import hashlib
                       return hashlib.pbkdf2_hmac("sha256", line.encode(), b"salt", 1_500)

               """)),
        flags=(*_CLM, "--use_cpu", "--block_size", "64", "--streaming", "--train_file", "part-*.txt",
               "--dataloader_num_workers", "2"),
    ),
    Training(
        repo="huggingface/accelerate", name="accelerate nlp", path="examples/nlp_example.py", within="examples",
        kind="Accelerate", prepare=paraphrases, flags=("--cpu",), steps=150,
        edits=(instead('"num_epochs": 3', '"num_epochs": 100'),),
    ),
    Training(
        repo="Lightning-AI/pytorch-lightning", name="lightning", kind="Lightning", steps=200,
        path="examples/pytorch/bug_report/bug_report_model.py", within="examples/pytorch/bug_report",
        edits=(
            instead("self.layer = torch.nn.Linear(32, 2)",
                    "self.layer = torch.nn.Sequential(torch.nn.Linear(32, 1024), torch.nn.ReLU(),\n"
                    "            torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 2))"),
            instead("RandomDataset(32, 64), batch_size=2", "RandomDataset(32, 64_000), batch_size=64"),
            instead("limit_train_batches=1", "limit_train_batches=1.0"),
            instead("limit_val_batches=1", "limit_val_batches=0"),
            instead("max_epochs=1", "max_epochs=1000, enable_progress_bar=False, enable_checkpointing=False, "
                                    "logger=False"),
            instead("    trainer.test(model, dataloaders=test_data)", "    del test_data"),
        ),
    ),
    # -- graphs, reinforcement learning, time series
    Training(
        **_EXAMPLES, name="gat", path="gat/main.py", kind="GNN", prepare=citations("cora", papers=1_620), steps=60,
        flags=("--epochs", NEVER, "--val-every", "50", "--hidden-dim", "8", "--num-heads", "2"),
        edits=(instead(
            "    # Evaluate the model performance on training and validation sets\n",
            "    if epoch % print_every:\n        return\n"),),
    ),
    Training(
        repo="tkipf/pygcn", name="pygcn", path="pygcn/train.py", kind="GNN", prepare=citations("../data/cora"),
        flags=("--epochs", NEVER, "--fastmode", "--hidden", "256"), steps=200,
    ),
    Training(
        **_EXAMPLES, name="reinforce", path="reinforcement_learning/reinforce.py", kind="RL", steps=200,
        edits=(instead("env.spec.reward_threshold", "10_000"), instead("range(1, 10000)", "range(1, 20)")),
    ),
    Training(repo="vwxyzjn/cleanrl", name="ppo", path="cleanrl/ppo.py", kind="RL", steps=320,
             flags=("--total-timesteps", NEVER)),
    Training(repo="vwxyzjn/cleanrl", name="dqn", path="cleanrl/dqn.py", kind="RL", steps=500,
             flags=("--total-timesteps", NEVER, "--learning-starts", "500")),
    Training(
        repo="cure-lab/LTSF-Linear", name="DLinear", path="run_longExp.py", kind="time series", prepare=electricity,
        edits=(instead("np.Inf", "np.inf", "utils/tools.py"),), steps=400,
        flags=("--is_training", "1", "--model_id", "etth1", "--model", "DLinear", "--data", "ETTh1", "--root_path",
               "./dataset/", "--train_epochs", "1000", "--itr", "1", "--num_workers", "2", "--batch_size", "64",
               "--patience", "1000"),
    ),
    # -- two ranks
    Training(
        **_EXAMPLES, name="ddp tutorial, 2 ranks", path="distributed/ddp-tutorial-series/multigpu_torchrun.py",
        kind="DDP", ranks=2, flags=(NEVER, NEVER, "--batch_size", "64"), steps=150,
        edits=(
            instead('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "pass"),
            instead('backend="nccl"', 'backend="gloo"'),
            instead(".to(self.gpu_id)", '.to("cpu")'),
            instead("device_ids=[self.gpu_id]", ""),
            instead("DDP(self.model, )", "DDP(self.model)"),
            instead("MyTrainDataset(2048)", "MyTrainDataset(40_000)"),
            instead("torch.nn.Linear(20, 1)",
                    "torch.nn.Sequential(torch.nn.Linear(20, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512),\n"
                    "        torch.nn.ReLU(), torch.nn.Linear(512, 1))"),
        ),
    ),
    # -- the sample trainings of this repository
    Training(repo="", name="gray", path="gray/train.py", kind="workload", data="gray small", steps=60,
             flags=(*_WORKLOAD, "--width", "4", "--batch-size", "32", "--num-workers", "2", "--persistent-workers",
                    "--eval-every", NEVER, "--save-every", NEVER)),
    Training(repo="", name="stock", path="stock/train.py", kind="workload", data="stock small", steps=120,
             edits=(instead("evaluate(net, val_loader, device, amp)", "(0.0, 0.0)"),),
             flags=(*_WORKLOAD, "--num-workers", "1", "--persistent-workers", "--hidden", "64", "--batch-size", "64")),
    Training(repo="", name="segment", path="segment/train.py", kind="workload", data="segment small", steps=50,
             flags=(*_WORKLOAD, "--num-workers", "1", "--width", "16", "--batch-size", "8", "--eval-every", NEVER)),
    Training(repo="", name="captcha", path="captcha/train.py", kind="workload", data="captcha small", steps=50,
             flags=(*_WORKLOAD, "--num-workers", "2", "--width", "4", "--batch-size", "16", "--eval-every", NEVER,
                    "--amp", "false", "--compile-model", "false", "--tf32", "false", "--cudnn-benchmark", "false")),
    Training(repo="", name="video", path="video/train.py", kind="workload", data="video small", steps=50,
             flags=(*_WORKLOAD, "--config", "config_small.py", "--decode-threads", "1", "--persistent-workers", "True",
                    "--num-workers", "2", "--dim", "64", "--depth", "2", "--eval-every", NEVER)),
)  # fmt: skip
TRAININGS = {training.name: training for training in _LIST}
