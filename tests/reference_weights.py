"""Parameters as the published code stores them, into our layers and back.

`import_reference(layer, raw)` gives our parameters by name, from tensors by their published names; gradients pass
through. `export_reference(layer)` goes the other way. One pair of functions for each kind of layer, kernel or bias.
"""

from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import Any

import torch
from jaxtyping import Complex128, Float
from torch import Tensor, nn

from spt.models.attention import Attention
from spt.models.dlr import DLRKernel
from spt.models.dlr_attention import DLRAttention
from spt.models.longconv import Kernel, LongConvolution
from spt.models.lru import LRU
from spt.models.mega import EMAKernel, GatedAttention, RotaryBias, SimpleBias
from spt.models.ops import dplr
from spt.models.ops.output import Output
from spt.models.s4 import S4Kernel
from spt.models.s4d import S4DKernel
from spt.models.s5 import S5
from spt.models.sgconv import SGConvKernel


class ReferenceTensors(dict[str, Tensor]):
    """Tensors by their names in a published code; looking up a missing one says which there are."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"the published tensors have no {name}, only {', '.join(sorted(self)) or 'nothing'}")


@singledispatch
def import_reference(layer: nn.Module, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    raise NotImplementedError(f"no published code has a {type(layer).__name__}")


@singledispatch
def export_reference(layer: nn.Module) -> dict[str, Tensor]:
    raise NotImplementedError(f"no published code has a {type(layer).__name__}")


# ---------------------------------------------------------------------------------------------- long convolutions


@import_reference.register
def _(layer: LongConvolution, raw: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """From a whole layer: `layer.D` or `D`, `layer.kernel.*` or `kernel.*`, `output_linear.*`, with or without axes of
    size one. `options` go to the kernel."""
    theirs = ReferenceTensors({name.removeprefix("layer."): tensor for name, tensor in raw.items()})
    kernel = {name.removeprefix("kernel."): tensor for name, tensor in theirs.items() if name.startswith("kernel")}
    ours = import_reference(layer.kernel, ReferenceTensors(kernel), **options)
    state = {f"kernel.{name}": tensor for name, tensor in ours.items()} | {"D": theirs["D"].reshape(-1)}
    for name, tensor in theirs.items():
        if name.startswith("output_linear") and layer.output.linear is not None:
            part = name.rpartition(".")[2]
            state[f"output.linear.{part}"] = tensor.reshape(getattr(layer.output.linear, part).shape)
    return state


@export_reference.register
def _(layer: LongConvolution, **options: Any) -> dict[str, Tensor]:
    """`D` (1, H), `kernel.*` and `output_linear.weight`, `output_linear.bias`."""
    state = {f"kernel.{name}": tensor for name, tensor in export_reference(layer.kernel, **options).items()}
    if layer.output.linear is not None:
        state |= {f"output_linear.{name}": tensor for name, tensor in layer.output.linear.named_parameters()}
    return {"D": layer.D[None], **state}


@import_reference.register
def _(kernel: Kernel, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """DSS has the names of the DLR repository's `DSSKernel`."""
    return dict(raw)


@export_reference.register
def _(kernel: Kernel) -> dict[str, Tensor]:
    return dict(kernel.named_parameters())


@import_reference.register
def _(kernel: S4Kernel, raw: Mapping[str, Tensor], *, length: int | None = None) -> dict[str, Tensor]:
    """From the S4 repository's `SSMKernelDPLR`. Its C is C~ of `length`, by default `raw["l_kernel"]`; 0 means that it
    is C itself, as before the first forward pass. Converted in float64; gradients pass through the solve."""
    if length is None:
        if "l_kernel" not in raw:
            raise ValueError("S4's published C belongs to a kernel length: give l_kernel, or length=")
        length = int(raw["l_kernel"])
    ours = {name: raw[name].reshape(parameter.shape) for name, parameter in kernel.named_parameters()}
    return {**ours, "C": _convert(kernel, ours, length, untruncated)}


@export_reference.register
def _(kernel: S4Kernel, *, length: int = 0) -> dict[str, Tensor]:
    """With C~ of `length`; by default with C, from which the published code makes C~ in its first forward pass."""
    ours = dict(kernel.named_parameters())
    C = _convert(kernel, ours, length, dplr.truncated)
    return {**ours, "P": kernel.P[None], "B": kernel.B[None], "C": C, "l_kernel": torch.tensor(length)}


def _convert(
    kernel: S4Kernel,
    parameters: Mapping[str, Tensor],
    length: int,
    convert: Callable[[dplr.System, int], Complex128[Tensor, "K H M"]],
) -> Float[Tensor, "K H M 2"]:
    C = parameters["C"]
    if length == 0:
        return C
    system = dplr.discretise(dplr.state_space(parameters, kernel.dt_transform))
    return torch.view_as_real(convert(system, length)).to(C.dtype)


def untruncated(system: dplr.System, length: int) -> Complex128[Tensor, "K H M"]:
    """C, where the system holds C~ instead: C~ (1 - Abar^length)^-1."""
    rows, matrix = dplr._complement(system, length)
    return dplr._from_rows(torch.linalg.solve(matrix, rows, left=False))


@import_reference.register
def _(kernel: S4DKernel, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From the S4 repository's `SSMKernelDiag`, or its minimal S4D (log_dt, log_A_real, A_imag, C), which writes A with
    + i A_imag and has no B; its C is the conjugate of ours."""
    if "log_dt" not in raw:
        return {**raw, "B": raw["B"].reshape(kernel.B.shape)}
    C = raw["C"][None] if raw["C"].dim() == 3 else raw["C"]
    return {
        "inv_dt": raw["log_dt"][:, None],
        "A_real": raw["log_A_real"],
        "A_imag": raw["A_imag"],
        "B": torch.stack([torch.ones_like(raw["A_imag"]), torch.zeros_like(raw["A_imag"])], dim=-1),
        "C": torch.stack([C[..., 0], -C[..., 1]], dim=-1),
    }


@export_reference.register
def _(kernel: S4DKernel) -> dict[str, Tensor]:
    return {**dict(kernel.named_parameters()), "B": kernel.B[None]}


DLR_NAMES = {"log_Lambda_re": "Lambda_log_neg_re", "log_Lambda_im": "Lambda_im"}


@import_reference.register
def _(kernel: DLRKernel, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From the DLR repository's `DLRKernel`, whose Lambda_log_neg_re is a square root, despite its name."""
    ours = {theirs: name for name, theirs in DLR_NAMES.items()}
    return {ours.get(name, name): tensor for name, tensor in raw.items()}


@export_reference.register
def _(kernel: DLRKernel) -> dict[str, Tensor]:
    return {DLR_NAMES.get(name, name): parameter for name, parameter in kernel.named_parameters()}


@import_reference.register
def _(kernel: SGConvKernel, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From the authors' `GConv` (kernel_list.0, ..., kernel_norm) or the DLR repository's `SGConvKernel` (ws.0, ...,
    alpha), which does not save its norm: without one, it is that of the given weights."""
    pieces = {name: tensor for name, tensor in raw.items() if name.rpartition(".")[0] in ("kernel_list", "ws")}
    if len(pieces) != len(kernel.pieces):
        raise ValueError(
            f"the published tensors have {len(pieces)} pieces of a kernel, this model {len(kernel.pieces)}"
        )
    ours = {"pieces": torch.stack([pieces[n] for n in sorted(pieces, key=lambda n: int(n.rpartition(".")[2]))])}
    if kernel.alpha is not None:
        ours["alpha"] = raw["alpha"]
    with torch.no_grad():
        measured = kernel._stretched(ours["pieces"], ours.get("alpha")).norm(dim=-1, keepdim=True)
    return ours | {"norm": raw.get("kernel_norm", measured)}


@export_reference.register
def _(kernel: SGConvKernel) -> dict[str, Tensor]:
    name = "kernel_list" if kernel.alpha is None else "ws"
    pieces = {f"{name}.{i}": piece for i, piece in enumerate(kernel.pieces)}
    return {**pieces, **({"kernel_norm": kernel.norm} if kernel.alpha is None else {"alpha": kernel.alpha})}


# ----------------------------------------------------------------------------------------------------- recurrences


@import_reference.register
def _(layer: S5, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From the S5 repository's: those of the state space, alone or as `seq.*` beside `out1.*`, `out2.*` and `norm.*`,
    which belongs to the stack and is ignored. C is one tensor, or C1 and C2, or both in one."""
    theirs = ReferenceTensors({name.removeprefix("seq."): tensor for name, tensor in raw.items()})
    ours = {name: theirs[name] for name in ("Lambda_re", "Lambda_im", "B", "D")}
    if layer.log_step is not None:
        ours["log_step"] = theirs["log_step"].reshape(-1)
    K, _, states, _ = layer.C.shape
    C = [theirs["C1"], theirs["C2"]] if "C1" in theirs else list(theirs["C"].split(states, dim=1))
    if len(C) != K:
        raise ValueError(f"these parameters are for {len(C)} directions, the model for {K}")
    ours["C"] = torch.stack(C)
    return ours | _import_dense(layer.output, theirs)


@export_reference.register
def _(layer: S5) -> dict[str, Tensor]:
    """`seq.*`, `out1.*` and `out2.*`."""
    theirs = {f"seq.{name}": getattr(layer, name) for name in ("Lambda_re", "Lambda_im", "B", "D")}
    if layer.log_step is not None:
        theirs["seq.log_step"] = layer.log_step[:, None]
    if len(layer.C) == 1 or layer.config.c_init == "complex_normal":
        theirs["seq.C"] = torch.cat(tuple(layer.C), dim=1)
    else:
        theirs |= {"seq.C1": layer.C[0], "seq.C2": layer.C[1]}
    return theirs | _export_dense(layer.output)


@import_reference.register
def _(layer: LRU, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From nu_log, theta_log, gamma_log, B_re, B_im, C_re, C_im and D, alone or as `seq.*` beside `out1.*` and
    `out2.*`; a second direction, which the published code does not have, from C2_re and C2_im."""
    raw = ReferenceTensors({name.removeprefix("seq."): tensor for name, tensor in raw.items()})
    ours = {name: raw[f"{name}_log"] for name in ("nu", "theta", "gamma")}
    ours["B"] = torch.stack([raw["B_re"], raw["B_im"]], -1)
    names = ("C", "C2")[: len(layer.C)]
    ours["C"] = torch.stack([torch.stack([raw[f"{name}_re"], raw[f"{name}_im"]], -1) for name in names])
    return ours | {"D": raw["D"]} | _import_dense(layer.output, raw)


@export_reference.register
def _(layer: LRU) -> dict[str, Tensor]:
    """`seq.*`, `out1.*` and `out2.*`, as in the unofficial repository minimal-LRU."""
    theirs = {f"{name}_log": getattr(layer, name) for name in ("nu", "theta", "gamma")} | {"D": layer.D}
    for name, tensor in (("B", layer.B), *zip(("C", "C2"), layer.C, strict=False)):
        theirs |= {f"{name}_re": tensor[..., 0], f"{name}_im": tensor[..., 1]}
    return {f"seq.{name}": tensor for name, tensor in theirs.items()} | _export_dense(layer.output)


def _import_dense(output: Output, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our output map from flax's dense layers: out1 is gated by out2, or out2 alone."""
    names = ["out1", "out2"] if output.kind == "glu" else ["out2"]
    if output.linear is None or f"{names[0]}.kernel" not in raw:
        return {}
    weight = torch.cat([raw[f"{name}.kernel"].T for name in names])
    bias = torch.cat([raw[f"{name}.bias"] for name in names])
    return {"output.linear.weight": weight, "output.linear.bias": bias}


def _export_dense(output: Output) -> dict[str, Tensor]:
    if output.linear is None:
        return {}
    names = ["out1", "out2"] if output.kind == "glu" else ["out2"]
    width = output.linear.in_features
    weights = zip(names, output.linear.weight.split(width), strict=True)
    biases = zip(names, output.linear.bias.split(width), strict=True)
    return {f"{n}.kernel": weight.T for n, weight in weights} | {f"{n}.bias": bias for n, bias in biases}


# ------------------------------------------------------------------------------------------------------- attention


@import_reference.register
def _(layer: Attention, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From `linears.0` to `linears.3` of the SPT repository; with a temperature, from Q, K, V, O and scale of the DLR
    repository."""
    theirs, names = ReferenceTensors(raw), _attention_names(layer)
    ours = {
        f"{own}.{part}": torch.cat([theirs[f"{name}.{part}"] for name in others])
        for own, others in (("qkv", names[:3]), ("out", names[3:]))
        for part in ("weight", "bias")
    }
    return ours if layer.temperature is None else {**ours, "temperature": theirs["scale"]}


@export_reference.register
def _(layer: Attention) -> dict[str, Tensor]:
    names, sizes = _attention_names(layer), [size * layer.d_head for size in layer.sizes]
    maps = {
        f"{name}.{part}": tensor
        for part in ("weight", "bias")
        for name, tensor in zip(names, [*getattr(layer.qkv, part).split(sizes), getattr(layer.out, part)], strict=True)
    }
    return maps if layer.temperature is None else {**maps, "scale": layer.temperature}


def _attention_names(layer: Attention) -> tuple[str, str, str, str]:
    if layer.shared_qk:
        raise ValueError("no published layer has one map for queries and keys")
    if layer.temperature is not None:
        return "Q", "K", "V", "O"
    return "linears.0", "linears.1", "linears.2", "linears.3"


@import_reference.register
def _(layer: DLRAttention, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From the DLR repository's `DSS` layer with kernel_type attn: `attn.Q.weight`, `attn.scale`,
    `output_linear.weight` and so on."""
    theirs = ReferenceTensors(raw)
    attention = {name.removeprefix("attn."): tensor for name, tensor in raw.items() if name.startswith("attn.")}
    ours = {f"attention.{name}": tensor for name, tensor in import_reference(layer.attention, attention).items()}
    for own, other in _dlr_attention_names(layer).items():
        ours[own] = theirs[other].reshape(layer.get_parameter(own).shape)
    return ours


@export_reference.register
def _(layer: DLRAttention) -> dict[str, Tensor]:
    """The bias of the output map has two axes there."""
    names = _dlr_attention_names(layer)
    theirs = {f"attn.{name}": tensor for name, tensor in export_reference(layer.attention).items()}
    theirs |= {other: layer.get_parameter(own) for own, other in names.items()}
    return {**theirs, names["map.bias"]: layer.map.bias[:, None]}


def _dlr_attention_names(layer: DLRAttention) -> dict[str, str]:
    """Theirs by ours, without the attention's."""
    output = "output_linear.0" if layer.gated else "output_linear"
    names = {f"map.{part}": f"{output}.{part}" for part in ("weight", "bias")}
    for name, _ in layer.extra.named_parameters():
        index, _, rest = name.partition(".")
        names[f"extra.{name}"] = f"attn.{('ff', 'ff2')[int(index)]}.{rest}"
    return names


# ------------------------------------------------------------------------------------------------------------ Mega


MEGA_MAPS = {"value": "v_proj", "base": "mx_proj", "out": "h_proj"}


@import_reference.register
def _(layer: GatedAttention, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From the Mega repository's MovingAverageGatedAttention; its `norm.*` belongs to the stack and is ignored."""
    theirs = ReferenceTensors(raw)
    ema = {f"kernel.{name}": theirs[f"move.{name}"] for name in ("delta", "alpha", "beta", "gamma")}
    ema = import_reference(layer.ema, {**ema, "D": theirs["move.omega"]})
    ours = {f"ema.{name}": tensor for name, tensor in ema.items()}
    for own, other in MEGA_MAPS.items():
        ours |= {f"{own}.{part}": theirs[f"{other}.{part}"] for part in ("weight", "bias")}
    bias = ReferenceTensors({name.removeprefix("rel_pos_bias."): tensor for name, tensor in raw.items()})
    ours |= {f"bias.{name}": tensor for name, tensor in import_reference(layer.bias, bias).items()}
    return ours | {name: theirs[name] for name in ("gamma", "beta")}


@export_reference.register
def _(layer: GatedAttention) -> dict[str, Tensor]:
    theirs = {f"move.{name}": tensor for name, tensor in export_reference(layer.ema.kernel).items()}
    theirs["move.omega"] = layer.ema.D
    for own, other in MEGA_MAPS.items():
        theirs |= {f"{other}.{part}": getattr(getattr(layer, own), part) for part in ("weight", "bias")}
    theirs |= {f"rel_pos_bias.{name}": tensor for name, tensor in export_reference(layer.bias).items()}
    return theirs | {"gamma": layer.gamma, "beta": layer.beta}


@import_reference.register
def _(kernel: EMAKernel, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """From (K D, N, 1), gamma (K D, N), whose first axis holds one direction after the other."""
    return {name: raw[name].reshape(parameter.shape) for name, parameter in kernel.named_parameters()}


@export_reference.register
def _(kernel: EMAKernel) -> dict[str, Tensor]:
    flat = {name: parameter.flatten(0, 1) for name, parameter in kernel.named_parameters()}
    return {name: tensor if name == "gamma" else tensor[..., None] for name, tensor in flat.items()}


@import_reference.register
def _(bias: SimpleBias, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"weight": raw["rel_pos_bias"]}


@export_reference.register
def _(bias: SimpleBias) -> dict[str, Tensor]:
    return {"rel_pos_bias": bias.weight}


@import_reference.register
def _(bias: RotaryBias, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: raw[name].reshape(-1) for name in ("alpha", "beta")}


@export_reference.register
def _(bias: RotaryBias) -> dict[str, Tensor]:
    return {"alpha": bias.alpha[None], "beta": bias.beta[None]}
