"""The residual block of the S4 repository around an S4D layer: s4_block.npz."""

from collections.abc import Mapping

import torch
from golden import Case, Found, gradients
from torch import Tensor

from spt.models.base import Backbone, Context
from spt.models.s4d import Config, build


def s4_block(case: Case) -> Mapping[str, Found]:
    """Output, gradients and running statistics of one block, by our residual stack with the same options."""
    config, raw = case.config, case.raw()
    transposed = config["transposed"]  # (B, H, L), and a layer norm with two numbers
    u = case.array("u").requires_grad_()
    stack = _stack(case).train(config["training"])
    ours = {f"mixers.0.{name}": tensor for name, tensor in stack.mixers[0].import_reference(_layer(raw)).items()}
    norm = {name.rpartition(".")[2]: tensor for name, tensor in raw.items() if name.startswith("norm.")}
    ours |= {f"norms.0.{name}": tensor for name, tensor in norm.items()}
    buffers = {f"norms.0.{n.rpartition('.')[2]}": case.array(n) for n in case.names if n.startswith("buffer.")}
    x = u.mT if transposed else u
    context = Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)
    y = torch.func.functional_call(stack, {**ours, **buffers}, (x, context))
    y = y.mT if transposed else y
    found: dict[str, Found] = {"y_block": y, **gradients((y * case.array("g")).sum(), {"u": u, **raw})}
    after = {f"buffer_after.norm.norm.{name.rpartition('.')[2]}": buffer for name, buffer in buffers.items()}
    return found | {name: tensor for name, tensor in after.items() if name in case}


def _layer(raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("layer."): tensor for name, tensor in raw.items() if name.startswith("layer.")}


def _stack(case: Case) -> Backbone:
    config = case.config
    kinds = {("layer", True): "scalar", ("layer", False): "layer"}
    options = Config(
        d_model=config["H"],
        n_layers=1,
        causal=not config["bidirectional"],
        d_state=config["N"],
        A_init=config["init"].removeprefix("diag-"),
        norm=kinds.get((config["norm"], config["transposed"]), config["norm"]),
        prenorm=config["prenorm"],
        last_norm=False,
        output=config["final_act"],
        max_length=config["L"],
    )
    return build(options).to(case.dtype)
