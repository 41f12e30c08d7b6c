"""What processes exchange in a training step: no more than they have to."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from tiny import RECIPE, ROOT, TASK, changed, environment

from spt.models.ops.norms import BatchNorm

NORM = """
import json, sys
import torch
from torch.profiler import profile
from spt.models.ops.norms import BatchNorm
rank, folder = int(sys.argv[1]), sys.argv[2]
store = torch.distributed.FileStore(f"{folder}/store", 2)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
given = torch.load(f"{folder}/given.pt")
answers, exchanges = [], []
for included in (given["included"], None):
    norm, x = BatchNorm(5).double(), given["x"].clone().requires_grad_()
    mine = slice(0, 2) if rank == 0 else slice(2, None)  # two sequences here, one there
    with profile() as recorded:
        y = norm(x[mine], None if included is None else included[mine])
        grads = torch.autograd.grad((y * given["g"][mine]).sum(), [x, norm.weight, norm.bias])
    answers.append([y, *grads, norm.running_mean, norm.running_var])
    exchanges.append([event.name for event in recorded.events() if event.name.startswith("gloo:")])
torch.save((answers, exchanges), f"{folder}/found{rank}.pt")
torch.distributed.destroy_process_group()
"""


def test_batch_norm_exchanges_once_in_each_pass(tmp_path: Path) -> None:
    """Two processes with unequal parts: what one process gives for the whole batch, far from zero too."""
    torch.manual_seed(0)
    x = 1000 + torch.randn(3, 7, 5, dtype=torch.float64)
    included = torch.arange(7) < torch.tensor([[7], [0], [3]])
    given = {"x": x, "g": torch.randn_like(x), "included": included}
    torch.save(given, tmp_path / "given.pt")
    command = [sys.executable, "-c", NORM]
    children = [subprocess.Popen([*command, str(rank), tmp_path], cwd=ROOT, env=environment()) for rank in range(2)]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    found = [torch.load(tmp_path / f"found{rank}.pt") for rank in range(2)]
    for number, mask in enumerate((included, None)):
        norm, whole = BatchNorm(5).double(), x.clone().requires_grad_()
        y = norm(whole, mask)
        grads = torch.autograd.grad((y * given["g"]).sum(), [whole, norm.weight, norm.bias])
        first, second = (answers[number] for answers, _ in found)
        torch.testing.assert_close(torch.cat([first[0], second[0]]), y)
        for a, b, together in zip(first[1:4], second[1:4], grads, strict=True):
            torch.testing.assert_close(a + b, together)
        for a in (first, second):
            torch.testing.assert_close(a[4:], [norm.running_mean, norm.running_var])
        for _, exchanges in found:
            assert len(exchanges[number]) == 2, exchanges[number]


STEP = """
import json
import torch
from torch.profiler import profile
import spt_cli
from spt.training.step import Learner
original = Learner._step
def counted(self, *given):
    with profile() as recorded:
        result = original(self, *given)
    if torch.distributed.get_rank() == 0:
        with open("exchanges.jsonl", "a") as file:
            names = [event.name for event in recorded.events() if event.name.startswith("gloo:")]
            print(json.dumps(names), file=file)
    return result
Learner._step = counted
spt_cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "joint", "expected"), [("layer", False, 3), ("batch", False, 7), ("layer", True, 3)])
def test_exchanges_of_a_step(tmp_path: Path, norm: str, joint: bool, expected: int) -> None:
    """The weights of all answers, the gradients of a small network, the losses; batch norms (two here), once in each
    pass. A second question of a joint loss adds nothing."""
    model = {"name": "s4", "d_model": 16, "d_state": 8, "n_layers": 2, "norm": norm, "prenorm": False}
    recipe = changed(RECIPE, task={"name": "./toy.py"}, model=model)
    recipe["finetune"] = {"train": {"steps": 4, "batch_size": 6, "learning_rate": 0.01}, "joint": 0.5 if joint else 0.0}
    (tmp_path / "toy.py").write_text(TASK)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "run.py").write_text(STEP)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "run.py"]
    command = [*launcher, "finetune", "small.yaml", "--scratch"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "exchanges.jsonl").read_text().splitlines()][-4:]
    assert [len(step) for step in steps[2:]] == [expected] * 2, Counter(steps[-1])  # before, gradients are arranged
