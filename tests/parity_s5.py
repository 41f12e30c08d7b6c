"""S5 and LRU against arrays of the published code: what ours gives for every result of a case, by the array's name."""

from collections.abc import Mapping
from typing import Any

import torch
from golden import Case, Found, gradients
from reference_weights import import_reference
from torch import Tensor, nn
from torch.func import functional_call

from spt.models import lru as lru_file
from spt.models import s5 as s5_file
from spt.models.base import Context
from spt.models.ops import hippo
from spt.models.ops.scan import discretise_steps


class Methods(nn.Module):
    """Calls a layer's methods with other parameters than its own."""

    def __init__(self, layer: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layer, self.given = layer, {f"layer.{name}": tensor for name, tensor in parameters.items()}

    def forward(self, method: str, *arguments: Any) -> Any:
        return getattr(self.layer, method)(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        return functional_call(self, self.given, (method, *arguments))


def s5_config(config: Mapping[str, Any], **options: Any) -> s5_file.Config:
    """Of a case of s5.npz, s5_variable_step.npz or s5_layer.npz."""
    names = {"C_init": "c_init", "dt_min": "dt_min", "dt_max": "dt_max", "disc": "disc", "clip": "clip_eigs"}
    given = {ours: config[theirs] for theirs, ours in names.items() if theirs in config}
    return s5_file.Config(
        d_model=config["H"],
        d_state=config["P"],
        blocks=config["J"],
        conj_sym=config.get("conj", True),
        causal=not config.get("bidir", False),
        step_rescale=config.get("step_rescale", 1.0),
        **given,
        **options,
    )


def s5(case: Case) -> dict[str, Found]:
    if "param.B" not in case:
        return hippo_n(case)
    layer = s5_file.S5(s5_config(case.config)).to(case.dtype)
    raw, u = case.raw(), case.array("u").requires_grad_()
    methods = Methods(layer, import_reference(layer, raw))
    gaps = None
    if "integration_timesteps" in case:
        steps = torch.cat([torch.full((1,), 7.0, dtype=case.dtype), case.array("integration_timesteps")])[None]
        gaps = s5_file.gaps_around(Context(torch.ones_like(steps, dtype=torch.bool), padded=False, steps=steps))
    y = methods.call("mix_sequence", u[None], gaps)[0]
    found: dict[str, Found] = {"y": y, **gradients((y * case.array("g")).sum(), {**raw, "u": u})}
    with torch.no_grad():
        found["states"] = torch.cat([x[0] for x in methods.call("states", u[None], gaps)], 1)
        system = methods.call("system")
        if layer.recurrent:
            found["states"] = recurrent_states(methods, u, None if gaps is None else gaps[0])
        found["Lambda_bar"], found["B_bar"] = system.a.to(system.enter.dtype), system.enter
        if gaps is not None:
            Lambda = methods.call("__getattribute__", "Lambda")
            Delta = methods.call("__getattribute__", "Delta")
            v = torch.zeros(1, len(u), len(Lambda), dtype=system.enter.dtype)
            rule = layer.config.disc
            found["Lambda_bar_per_step"] = discretise_steps(Lambda, Delta, gaps[0], v, rule)[0][0]
    Lambda, V, inverse = s5_file.initial_eigenbasis(
        "hippo_n", case.config["P"], case.config["J"], case.config.get("conj", True)
    )
    theirs = case.array("init.V").to(V.dtype)
    phase = aligned(V, theirs)
    complex_type = system.enter.dtype
    found["init.Lambda"] = Lambda.to(complex_type)
    found["init.V"] = (V * phase).to(complex_type)
    found["init.Vinv"] = (phase.conj()[:, None] * inverse).to(complex_type)
    return found


def aligned(V: Tensor, theirs: Tensor) -> Tensor:
    """The unit numbers that turn our eigenvectors (columns) into theirs, which are free to that extent."""
    overlap = (V.conj() * theirs).sum(0)
    return overlap / overlap.abs()


def hippo_n(case: Case) -> dict[str, Found]:
    """HiPPO-N, its eigenvalues and eigenvectors up to a phase."""
    N = case.config["N"]
    A, B = hippo.legs(N)
    P = hippo.legs_rank_correction(N)
    Lambda, V = hippo.normal_part(N)
    V = V * aligned(V, case.array("V").to(V.dtype))
    found = {"A": A, "P": P, "B": B, "Lambda": Lambda, "V": V, "VinvB": V.mH @ B.to(V.dtype)}
    return {name: tensor.to(case.array(name).dtype) for name, tensor in found.items()}


def s5_layer(case: Case) -> dict[str, Found]:
    """The residual sub-layer with its norm: a stack of one."""
    config = case.config
    momentum = {"norm_momentum": 1 - config["bn_momentum"]} if config["batchnorm"] else {}
    backbone = s5_file.build(
        s5_config(
            config,
            n_layers=1,
            activation=config["activation"],
            prenorm=config["prenorm"],
            norm="batch" if config["batchnorm"] else "layer",
            **momentum,
        )
    ).to(case.dtype)
    backbone.train(config["training"])
    raw, u = case.raw(), case.array("u").requires_grad_()
    (layer,) = backbone.mixers
    given = {f"mixers.0.{name}": tensor for name, tensor in import_reference(layer, raw).items()}
    given |= {"norms.0.weight": raw["norm.scale"], "norms.0.bias": raw["norm.bias"]}
    buffers = {}
    if "stats.mean" in case:
        buffers = {"norms.0.running_mean": case.array("stats.mean"), "norms.0.running_var": case.array("stats.var")}
    context = Context(torch.ones(u.shape[:2], dtype=torch.bool), padded=False)
    y = functional_call(backbone, {**given, **buffers}, (u, context))
    found: dict[str, Found] = {"y_layer": y}
    found |= gradients((y * case.array("g")).sum(), {**raw, "u": u}, "grad_layer.")
    if buffers:
        found |= {
            "stats_after.mean": buffers["norms.0.running_mean"],
            "stats_after.var": buffers["norms.0.running_var"],
        }
    return found


def lru(case: Case) -> dict[str, Found]:
    config = case.config
    ring = {name: config[name] for name in ("r_min", "r_max", "max_phase") if name in config}
    layer = lru_file.LRU(lru_file.Config(d_model=config["H"], d_state=config["N"], causal=True, **ring)).to(case.dtype)
    raw, u = case.raw(), case.array("u").requires_grad_()
    methods = Methods(layer, import_reference(layer, raw))
    y = methods.call("mix_sequence", u[None])[0]
    found: dict[str, Found] = {"y": y, **gradients((y * case.array("g")).sum(), {**raw, "u": u})}
    with torch.no_grad():
        return {**found, "states": recurrent_states(methods, u)}


def recurrent_states(methods: Methods, u: Tensor, gaps: Tensor | None = None) -> Tensor:
    """The states (L, P) of the recurrent form over one sequence."""
    state, states = methods.call("initial_state", 1), []
    for t in range(len(u)):
        gap = () if gaps is None else (gaps[:, t],)
        state = methods.call("step", u[t : t + 1], state, *gap)[1]
        states.append(state.hidden[0])
    return torch.stack(states)
