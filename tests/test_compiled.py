"""What torch.compile makes of models, without generating code: how many graphs, and where they end.

In a process of their own: the suite's checks of types would be traced too.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
from tiny import ROOT, environment

from spt.config.plugins import listing

WHOLE = ("transformer", "dlr_attention", "linformer", "tcn", "time_mixer", "bag_of_steps")  # docs/models.md names them
OTHERS = tuple(sorted({item.name for item in listing("models")} - {*WHOLE, "hf"}))
SWITCH = {"feed_forward": "switch", "n_experts": 3, "d_ff": 16}

PROGRAM = """
import functools, json, sys
import torch
from torch._dynamo.utils import counters
from spt.checks.model_contract import sequence, tiny
from spt.config.plugins import find_plugin
from spt.models.base import Context
from spt.runtime import distributed
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings

graphs, answers = [], []

def count(graph, inputs):
    graphs.append(graph)
    return graph.forward

distributed.compiler_problem = lambda device: None
torch.compile = functools.partial(torch.compile, backend=count)
context = Context(torch.arange(13) < torch.tensor([[13], [9]]), padded=True)
for name, options in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    graphs.clear()
    model = tiny(find_plugin("models", name), options.pop("causal", False), **options).train()
    x = sequence(2, 13).to(next(model.parameters()).dtype)
    expected = model(x, context)[context.valid]
    Runtime(Settings(quiet=True, cpu=True)).compile(model)
    torch._dynamo.config.suppress_errors = False
    y = model(x, context)[context.valid]
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad), name
    breaks = list(counters["graph_break"])
    nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    answers.append((len(graphs), breaks, [node for node in nodes if "complex" in node]))
print(json.dumps(answers))
"""


def compiled(models: list[tuple[str, dict[str, Any]]]) -> list[tuple[int, list[str], list[str]]]:
    """Of a training step of each, compiled as runs are, whose numbers stay: how many graphs, why they ended, and what
    complex operations they have."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(models)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[tuple[int, list[str], list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def undeclared(breaks: list[str]) -> list[str]:
    """All but those at what a model says must not be traced."""
    return [reason for reason in breaks if "torch.compiler.disable" not in reason]


def test_a_transformer_is_one_graph_and_others_end_where_they_say_so() -> None:
    """With padding; full and local attention, shared keys, experts, batch norm; a long convolution."""
    local = {"window": 4, "n_kv_heads": 1, "causal": True, "positions": ["rotary", "learned"]}
    banded = {"window": 4, "exact_window": True, "norm": "batch", **SWITCH}
    *whole, (count, breaks, _) = compiled(
        [("transformer", {}), ("transformer", local), ("transformer", banded), ("dlr", {})]
    )
    assert whole == [[1, [], []]] * 3
    assert count == 6 and breaks and not undeclared(breaks), breaks


@pytest.mark.slow
def test_models_that_are_one_graph() -> None:
    for name, answer in zip(WHOLE, compiled([(name, {}) for name in WHOLE]), strict=True):
        assert answer == [1, [], []], name


@pytest.mark.slow
def test_graphs_end_where_a_model_says_so() -> None:
    """At sums along the sequence, which are our own kernels or loops: nowhere else."""
    for name, (count, breaks, _) in zip(OTHERS, compiled([(name, {}) for name in OTHERS]), strict=True):
        assert count > 1 and breaks and not undeclared(breaks), (name, breaks)
