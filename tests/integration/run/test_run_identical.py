"""What is learned, and every random number, is bit for bit what it is without us; and the package brings us in."""

from __future__ import annotations

import sys
from pathlib import Path

from observing import flatout_run, write

REPOSITORY = Path(__file__).parents[3]

SCRIPT = """
    import hashlib, random, sys
    import numpy as np, torch
    from torch.utils.data import DataLoader, Dataset

    class Noisy(Dataset):
        def __len__(self):
            return 24
        def __getitem__(self, index):
            return torch.randn(4) + random.random() + np.random.rand(), torch.tensor(index % 2)

    def main(workers, start, epochs):
        torch.manual_seed(0); np.random.seed(0); random.seed(0)
        context = start if workers else None
        loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=context)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters())
        digest = hashlib.sha256()
        for epoch in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                digest.update(x.numpy().tobytes() + loss.detach().numpy().tobytes())
        digest.update(torch.get_rng_state().numpy().tobytes())
        digest.update(np.random.get_state()[1].tobytes())
        digest.update(repr(random.getstate()).encode())
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        print(workers, start, digest.hexdigest())

    if __name__ == "__main__":
        torch.set_num_threads(1)
        main(0, "fork", 2)
        main(2, "fork", 2)
        main(1, "spawn", 1)
"""


def test_losses_weights_and_random_numbers_are_the_same(tmp_path: Path) -> None:
    write(tmp_path, train=SCRIPT)
    observed = flatout_run(tmp_path, sys.executable, "train.py")
    bare = flatout_run(tmp_path, sys.executable, "train.py", env={"FLATOUT": "off"})
    assert observed.code == bare.code == 0, observed.err
    assert len(observed.out.splitlines()) == 3
    assert observed.out == bare.out
    reports = observed.observed.rank.workers
    assert sum(report.samples for report in reports) == (2 + 2 + 1) * 24
    assert {report.random_used for report in reports} == {("numpy", "random", "torch")}
    settings = observed.observed.rank.facts.loaders
    assert [(one.num_workers, one.start_method) for one in settings][1:] == [(2, "fork"), (1, "spawn")]


READS = """
    import torch
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        loss = model(torch.ones(2, 4)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_now = float(loss)  # PyTorch warns of this
"""


def test_a_warning_of_pytorchs_names_the_line_of_the_script(tmp_path: Path) -> None:
    write(tmp_path, train=READS)
    observed = flatout_run(tmp_path, sys.executable, "train.py")
    bare = flatout_run(tmp_path, sys.executable, "train.py", env={"FLATOUT": "off"})
    assert "train.py:11: UserWarning" in bare.err
    assert observed.err.startswith(bare.err)
