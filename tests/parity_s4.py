"""Our answers to the cases of HiPPO and S4, from a case's configuration and arrays alone."""

import re

import torch
from golden import Case, Found, gradients
from parity_diagonal import chosen, convolved, layer_for, outputs, recurrent, with_parameters
from reference_weights import export_reference, import_reference
from torch import Tensor

from spt.models import s4 as s4_model
from spt.models.longconv import LongConvolution
from spt.models.ops import hippo as ours
from spt.models.ops.discretise import parameter_for, positive


def hippo(case: Case) -> dict[str, Found]:
    """Eigenvectors are defined up to a phase; theirs is put on ours, and on what was turned into their basis."""
    N, real, kind = case.config["N"], case.dtype, case.dtype.to_complex()
    A, B = ours.legs(N)
    found: dict[str, Found] = {"A": A.to(real), "B": B.to(real), "P": ours.legs_rank_correction(N).to(real)}
    w, _ = ours.normal_part(N)
    half = ours.nplr(N, clip=None)
    theirs = {name: case.array(f"nplr.{name}").to(torch.complex128) for name in ("V", "P", "B_noclip")}
    phase = (half.V.conj() * theirs["V"]).sum(0)
    found |= {
        "normal_part_eigs_sorted_imag": w.imag.to(real),
        "nplr.W": half.w.to(kind),
        "nplr_f32.W": half.w.to(kind),
        "nplr.V": (half.V * phase).to(kind),
        "nplr.P": (half.P * phase.conj()).to(kind),
        "nplr.B_noclip": (half.B * phase.conj()).to(kind),
    }
    for name in case.results:
        if match := re.fullmatch(r"diag\.(\w+)\.([AB])", name):
            found[name] = ours.diagonal(match[1], N)[match[2] == "B"].to(kind)
    return found


def s4(case: Case) -> dict[str, Found]:
    published = case.config
    tuned = int(case.array("l_kernel")) if "l_kernel" in case else published["l_max"]
    lengths = {name: int(name.removeprefix("kernel_")) for name in case.names if re.fullmatch(r"kernel_\d+", name)}
    config = s4_model.Config(
        d_model=published["H"],
        d_state=published["N"],
        n_ssm=published.get("n_ssm") or published["H"],
        causal=not published.get("bidirectional", False),
        max_kernel_length=None if lengths else published.get("l_max"),
        **chosen(case, dt_transform="dt_transform"),
    )
    layer = layer_for(case, config, s4_model.S4Kernel)
    leaves = case.raw()
    raw = dict(leaves)
    if "u" in case:
        leaves["u"] = case.array("u").requires_grad_()

    def compute(layer: LongConvolution) -> dict[str, Tensor]:
        kernel = layer.kernel
        found = {name: kernel(length) for name, length in lengths.items()}
        if "l_kernel_after" in case:
            after = tuned
            while after < max(lengths.values()):
                after *= 2
            exported = export_reference(kernel, length=after)
            found |= {"l_kernel_after": exported["l_kernel"], "C_tilde_after": exported["C"]}
        if "u" in leaves:
            u = leaves["u"]
            found |= {"kernel": kernel(u.shape[-1])} | outputs(layer, u)
            found["kernel_rate1"] = found["kernel"]
        if "y_step" in case:
            y, state = recurrent(layer, u)
            found |= {"y_step": y + layer.D[:, None] * u, "state_final": torch.cat([state, state.conj()], -1)}
        if "state0" in case:
            y, found["state_next"] = recurrent(layer, u, case.array("state0"))
            found["y_state"] = y + layer.D[:, None] * u
        return found | matrices(layer)

    imported = import_reference(layer, raw, length=tuned)
    found: dict[str, Found] = dict(with_parameters(layer, imported, compute))
    for prefix, answer in (("grad.", "y_ctx"), ("grad_layer.", "y_layer")):
        if "g" in case:
            found |= gradients((found[answer] * case.array("g")).sum(), leaves, prefix)
    if "kernel_rate2" in case:
        found |= resampled(case, layer, raw, tuned)
    return found


def resampled(case: Case, layer: LongConvolution, raw: dict[str, Tensor], tuned: int) -> dict[str, Tensor]:
    """At twice the step the published code keeps C~, so that its C is another one: that of twice the step."""
    u, name = case.array("u"), "layer.kernel.inv_dt"
    transform = layer.kernel.dt_transform
    coarser = parameter_for(2 * positive(raw[name], transform), transform)
    twice = import_reference(layer, raw | {name: coarser}, length=tuned // 2)
    imported = import_reference(layer, raw, length=tuned) | {"kernel.C": twice["kernel.C"]}
    half = u[..., : u.shape[-1] // 2]
    layer.rescale(2.0)
    kernel = with_parameters(layer, imported, lambda layer: {"": layer.kernel(half.shape[-1])})[""]
    conv = torch.stack([convolved(row, kernel[0]) for row in half])
    return {"kernel_rate2": kernel, "y_rate2": conv + imported["D"][:, None] * half}


def matrices(layer: LongConvolution) -> dict[str, Tensor]:
    """The recurrent form as the reference's modes `dense` and `linear` write it."""
    kernel = layer.kernel
    system, dt = kernel.system(), kernel.state_space().dt.to(layer.D.dtype)[:, None]
    P, B = (torch.view_as_complex(x).repeat(len(dt) // len(x), 1) for x in (kernel.P, kernel.B))
    d = (system.F + 1) / 2
    full, g, r = (torch.cat([x, x.conj()], -1) for x in (system.F, system.g, system.r))
    return {
        "dense.dA": torch.diag_embed(full) - g[..., :, None] * r[..., None, :],
        "dense.dB": torch.cat([system.B, system.B.conj()], -1),
        "dense.dC": torch.cat([system.C, system.C.conj()], -1),
        "linear.dC": 2 * system.C,
        "linear.D": d * dt / 2,
        "linear.E": system.F / (d * dt / 2),
        "linear.R": (system.g / (d * P) * system.r / 2)[None],
        "linear.P": P[None],
        "linear.Q": P.conj()[None],
        "linear.B": B[None],
    }
