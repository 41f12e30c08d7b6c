"""The residual block of the S4 repository around an S4 or S4D layer: s4_block.npz."""

from collections.abc import Mapping
from typing import Any

import torch
from golden import Case, Found, gradients
from parity_diagonal import chosen
from reference_weights import import_reference

from spt.models import s4, s4d
from spt.models.base import Backbone, Context


def s4_block(case: Case) -> Mapping[str, Found]:
    """Output, gradients and running statistics of one block, by our residual stack with the same options."""
    config, raw = case.config, case.raw()
    transposed = config["transposed"]  # (B, H, L), and a layer norm with two numbers
    u = case.array("u").requires_grad_()
    stack = _stack(case).train(config["training"])
    layer = {name.removeprefix("layer."): tensor for name, tensor in raw.items() if name.startswith("layer.")}
    length = {"length": _tilde_length(case)} if config["mode"] == "dplr" else {}
    ours = {f"mixers.0.{n}": tensor for n, tensor in import_reference(stack.mixers[0], layer, **length).items()}
    ours |= {f"norms.0.{name.rpartition('.')[2]}": tensor for name, tensor in raw.items() if name.startswith("norm.")}
    buffers = {f"norms.0.{n.rpartition('.')[2]}": case.array(n) for n in case.names if n.startswith("buffer.norm.")}
    x = u.mT if transposed else u
    context = Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)
    y = torch.func.functional_call(stack, {**ours, **buffers}, (x, context))
    y = y.mT if transposed else y
    results: dict[str, Found] = {"y_block": y, **gradients((y * case.array("g")).sum(), {"u": u, **raw})}
    after = {f"buffer_after.norm.norm.{name.rpartition('.')[2]}": buffer for name, buffer in buffers.items()}
    return results | {name: tensor for name, tensor in after.items() if name in case}


def _tilde_length(case: Case) -> int:
    """The length to which S4's published C~ belongs: the stored one, or that of the case's sequences."""
    stored = [name for name in case.names if name.endswith("l_kernel")]
    return int(case.array(stored[0])) if stored else case.config["L"]


def _stack(case: Case) -> Backbone:
    """What `mode` says: S4 (dplr) or S4D (diag)."""
    config = case.config
    norms = {("layer", True): "scalar", ("layer", False): "layer"}
    options: dict[str, Any] = {
        "d_model": config["H"],
        "n_layers": 1,
        "causal": not config["bidirectional"],
        "d_state": config["N"],
        "norm": norms.get((config["norm"], config["transposed"]), config["norm"]),
        "prenorm": config["prenorm"],
        "last_norm": False,
        "output": config["final_act"],
        "max_length": config["L"],
        "n_ssm": len(case.array("param.layer.layer.kernel.A_real")),
        **chosen(case, dt_transform="dt_transform"),
    }
    if config["mode"] == "dplr":
        return s4.build(s4.Config(**options)).to(case.dtype)
    disc = chosen(case, disc="disc")
    return s4d.build(s4d.Config(A_init=config["init"].removeprefix("diag-"), **options, **disc)).to(case.dtype)
