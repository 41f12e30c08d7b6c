"""Our answers to the cases of S4D, DSS, DLR and SGConv, from a case's configuration and arrays alone."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from golden import Case, Found, gradients
from reference_weights import import_reference
from torch import Tensor, nn
from torch.func import functional_call

from spt.models import dlr as dlr_model
from spt.models import dss as dss_model
from spt.models import s4d as s4d_model
from spt.models import sgconv as sgconv_model
from spt.models.longconv import Kernel, LongConvolution
from spt.models.ops.vandermonde import complex_vandermonde

Compute = Callable[[LongConvolution], Mapping[str, Tensor]]
Import = Callable[[LongConvolution, Mapping[str, Tensor]], dict[str, Tensor]]


class Within(nn.Module):
    """Runs something on a layer; `functional_call` of this gives the layer other parameters meanwhile."""

    def __init__(self, layer: LongConvolution, compute: Compute) -> None:
        super().__init__()
        self.layer, self.compute = layer, compute

    def forward(self) -> Mapping[str, Tensor]:
        return self.compute(self.layer)


def with_parameters(layer: LongConvolution, parameters: Mapping[str, Tensor], compute: Compute) -> Mapping[str, Tensor]:
    names = set(layer.state_dict())
    assert names == set(parameters), f"not imported: {names ^ set(parameters)}"
    return functional_call(Within(layer, compute), {f"layer.{name}": t for name, t in parameters.items()}, ())


def outputs(layer: LongConvolution, u: Tensor) -> dict[str, Tensor]:
    """u (B, H, L), as the reference lays it out, and so the answers."""
    ctx = layer.mix_sequence(u.mT)
    return {
        "y_ctx": ctx.mT,
        "y_conv_noD": (ctx - layer.D * u.mT).mT,
        "y_layer": layer.output(ctx).mT,
    }


def recurrent(layer: LongConvolution, u: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The kernel's steps over u (B, H, L): answers without D u, and the last state."""
    kernel = layer.kernel
    system, answers = kernel.system(), []
    state = kernel.initial_state(len(u), system) if state is None else state
    for value in u.unbind(-1):
        y, state = kernel.step(value, state, system)
        answers.append(y)
    return torch.stack(answers, dim=-1), state


def whole_case(
    case: Case, layer: LongConvolution, more: Compute | None = None, import_weights: Import = import_reference
) -> dict[str, Found]:
    """What nearly every case holds: kernel, outputs, and their gradients with respect to the published tensors."""
    leaves = case.raw()
    # A kernel's case may come without a layer around it.
    extra = {} if "D" in leaves or "layer.D" in leaves else {"D": layer.D.detach()}
    if "u" in case:
        leaves |= {"u": case.array("u").requires_grad_()}

    def compute(layer: LongConvolution) -> dict[str, Tensor]:
        found = {"kernel": layer.kernel(case.config["L"])}
        if "u" in leaves:
            found |= outputs(layer, leaves["u"])
        return found | dict(more(layer) if more else {})

    raw = {name: leaf for name, leaf in leaves.items() if name != "u"}
    imported = {**dict(layer.named_parameters()), **import_weights(layer, {**raw, **extra})}
    found: dict[str, Found] = dict(with_parameters(layer, imported, compute))
    if "g" in case:
        for prefix, answer in (("grad.", "y_ctx"), ("grad_layer.", "y_layer")):
            found |= gradients((found[answer] * case.array("g")).sum(), leaves, prefix)
    if "g_kernel" in case:
        found |= gradients((found["kernel"] * case.array("g_kernel")).sum(), leaves, "gradk.")
    return found


def layer_for(case: Case, config: Any, kernel: Callable[[Any], Kernel]) -> LongConvolution:
    return LongConvolution(config, kernel(config), output=config.output).to(case.dtype)


def chosen(case: Case, **names: str) -> dict[str, Any]:
    """Options of ours from a case's, where it has them."""
    return {ours: case.config[theirs] for theirs, ours in names.items() if theirs in case.config}


def s4d(case: Case) -> dict[str, Found]:
    published, minimal = case.config, "param.kernel.log_A_real" in case
    real = published.get("is_real", False)
    config = s4d_model.Config(
        d_model=published["H"],
        d_state=published["N"],
        max_length=published["L"],
        max_kernel_length=published.get("l_max"),
        causal=not published.get("bidirectional", False),
        A_init="real" if real else "lin",
        **chosen(
            case,
            is_real="is_real",
            disc="disc",
            n_ssm="n_ssm",
            dt_tie="dt_tie",
            bandlimit="bandlimit",
            dt_transform="dt_transform",
            real_transform="real_transform",
        ),
    )
    layer = layer_for(case, config, s4d_model.S4DKernel)

    def more(layer: LongConvolution) -> dict[str, Tensor]:
        found, kernel = {}, layer.kernel
        if "y_step" in case or "dense.dA" in case:
            found = dict(zip(("dense.dA", "dense.dB", "dense.dC"), kernel.system(), strict=True))
            found["dense.dC"] = found["dense.dC"][None] / 2  # theirs is doubled where it is read
            u = case.array("u")
            y, found["state_final"] = recurrent(layer, u)
            found["y_step"] = y + layer.D[:, None] * u
        if "state0" in case:
            u, state = case.array("u"), case.array("state0")
            y, found["state_next"] = recurrent(layer, u, state)
            found["y_state"] = y + layer.D[:, None] * u
            half = u[..., : u.shape[-1] // 2]
            layer.rescale(2.0)
            found["kernel_rate2"] = kernel(half.shape[-1])
            layer.rescale(1.0)
            conv = torch.stack([convolved(half[b], found["kernel_rate2"][0]) for b in range(len(half))])
            found["y_rate2"] = conv + layer.D[:, None] * half
        return found

    found = whole_case(case, layer, more)
    return found | {"kernel": found["kernel"][0]} if minimal else found


def convolved(u: Tensor, kernel: Tensor) -> Tensor:
    """Causally, (H, L) and (H, L), by the sum itself."""
    length = u.shape[-1]
    back = F.pad(u, (length - 1, 0)).unfold(-1, length, 1).flip(-1)  # [h, t, j] = u[h, t - j]
    return (back * kernel[:, None]).sum(-1)


def dss(case: Case) -> dict[str, Found]:
    published = case.config
    config = dss_model.Config(
        d_model=published["H"],
        d_state=published["N"],
        max_length=published["L"],
        causal=not published.get("bidirectional", False),
        output=published.get("postact") or "linear",
        **chosen(case, version="version", max_kernel_length="max_kernel_length"),
    )
    return whole_case(case, layer_for(case, config, dss_model.DSSKernel))


VERSIONS = {
    "": "complex",
    "Lambda_imag": "imag",
    "Lambda_imag_W_real": "imag_W_real",
    "Lambda_real_W_real": "real_W_real",
}


def dlr(case: Case) -> dict[str, Found]:
    published = case.config
    config = dlr_model.Config(
        d_model=published["H"],
        d_state=published["N"],
        max_length=published["L"],
        causal=not published.get("bidirectional", False),
        output=published.get("postact") or "linear",
        version=VERSIONS[published.get("version") or ""],
        **chosen(case, kernel_to_real="cast", max_kernel_length="max_kernel_length"),
    )

    def more(layer: LongConvolution) -> dict[str, Tensor]:
        kernel, found = layer.kernel, {}
        W = kernel.W if kernel.W.dim() == 4 else torch.stack([kernel.W, torch.zeros_like(kernel.W)], dim=-1)
        length = min(published["L"], kernel.limit or published["L"])
        found["kernel_complex"] = torch.complex(*complex_vandermonde(W, *kernel._log_lambda(), length))
        if "y_recurrence_noD" in case:
            found["y_recurrence_noD"], found["state_final"] = recurrent(layer, case.array("u"))
        return found

    return whole_case(case, layer_for(case, config, dlr_model.DLRKernel), more)


def sgconv(case: Case) -> dict[str, Found]:
    published = case.config
    trained = "param.alpha" in case
    length = published["L"]
    config = sgconv_model.Config(
        d_model=published["H"],
        max_length=length,
        causal=not published.get("bidirectional", False),
        variant="dlr" if trained else "gconv",
        kernel_dim=published["N"] if trained else published["kernel_dim"],
        **({} if trained else factors(published.get("decay", "2"))),
    )
    layer = layer_for(case, config, sgconv_model.SGConvKernel)

    def more(layer: LongConvolution) -> dict[str, Tensor]:
        found = {"k_norm": layer.kernel.norm, "kernel_norm": layer.kernel.norm}
        if not trained:
            taps = layer.kernel(length)
            found["multiplier"] = layer.kernel.factor[None]
            found["kernel_as_convolved"] = F.pad(taps[:1], (0, length * len(taps) - taps.shape[-1]))
            if len(taps) > 1:
                found["kernel_as_convolved"] = found["kernel_as_convolved"] + F.pad(
                    taps[1:].flip(-1), (2 * length - taps.shape[-1], 0)
                )
        return found

    return whole_case(case, layer, more, import_bare)


def import_bare(layer: LongConvolution, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The published kernels stand alone or directly in a layer, under no `kernel.`; here names are as they come."""
    return {
        **{f"kernel.{name}": tensor for name, tensor in import_reference(layer.kernel, raw).items()},
        **({"D": raw["D"].reshape(-1)}),
        **{name.replace("output_linear", "output.linear"): t for name, t in raw.items() if "output_linear" in name},
    }


def factors(decay: str) -> dict[str, float]:
    """One number, or two ends: "2" or "1-4"."""
    ends = [float(end) for end in str(decay).split("-")]
    return {"factor_min": ends[0], "factor_max": ends[-1]}
