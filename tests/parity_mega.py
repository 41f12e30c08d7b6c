"""Mega against arrays of its repository: the moving average, the gated layer with its norm, the biases; mega.npz."""

from collections.abc import Mapping

import torch
from golden import Case, Found, gradients
from parity_s5 import Methods
from reference_weights import export_reference, import_reference
from torch import Tensor, nn
from torch.func import functional_call

from spt.models.base import Backbone, Context
from spt.models.mega import EMA, Config, GatedAttention, RotaryBias, SimpleBias, build, exponentials
from spt.models.ops.convolution import convolve


def mega(case: Case) -> Mapping[str, Found]:
    kinds = {"ema": moving_average, "mega": layer, "relbias": bias, "nffn": feed_forward}
    return kinds[case.name.partition("_")[0]](case)


def moving_average(case: Case) -> dict[str, Found]:
    config = case.config
    ema = EMA(
        Config(
            d_model=config["embed_dim"],
            d_state=config["ndim"],
            causal=not config["bidirectional"],
            max_kernel_length=config["truncation"],
        )
    ).to(case.dtype)
    raw, u = case.raw(), case.array("u").requires_grad_()  # (L, B, D)
    plain = {f"kernel.{name}": tensor for name, tensor in raw.items() if name != "omega"} | {"D": raw["omega"]}
    methods = Methods(ema, import_reference(ema, plain))
    y = methods.call("forward", u.transpose(0, 1), every(u.transpose(0, 1))).transpose(0, 1)
    found: dict[str, Found] = {"y": y, **gradients((y * case.array("g")).sum(), {**raw, "u": u})}
    with torch.no_grad():
        p = torch.sigmoid(raw["delta"])
        kernel = Methods(ema.kernel, import_reference(ema.kernel, raw))
        W, log_q = kernel.call("weights")
        lags = case.array("kernel").shape[-1]
        found |= {"p": p, "q": log_q.exp().to(case.dtype).view(p.shape)}
        found["kernel"] = exponentials(W, log_q, lags).flatten(0, 1)
        transformed, n = ema.spectrum(kernel.call("forward", len(u)), len(u))
        found["y_conv"] = convolve(u.transpose(0, 1).contiguous(), transformed, n).transpose(0, 1)
        if ema.recurrent:
            state, answers = methods.call("initial_state", u.shape[1]), []
            for x in u:
                answer, state = methods.call("step", x, state)
                answers.append(answer)
            found |= {"y_step": torch.stack(answers), "state_final": state.hidden}
    return found


class RecordingAttention(GatedAttention):
    """Keeps its attention weights: what it makes of values that are the unit vectors."""

    weights: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        B, L, _ = q.shape
        C = min(self.chunk or L, L)
        unit = torch.eye(C, dtype=v.dtype).repeat(L // C, 1).expand(B, L, C)
        self.weights = super().attend(q, k, unit, context).view(B, L // C, C, C)
        return super().attend(q, k, v, context)


def layer(case: Case) -> dict[str, Found]:
    """The residual sub-layer with its norm: a stack of one."""
    config = case.config
    norms = {"layernorm": "layer", "scalenorm": "scale"}
    options = Config(
        d_model=config["embed_dim"],
        d_attention=config["zdim"],
        d_hidden=config["hdim"],
        d_state=config["ndim"],
        attention=config["attention_activation"],
        relative_bias=config.get("rel_pos_bias", "simple"),
        chunk=config.get("chunk_size"),
        causal=not config.get("bidirectional", False),
        norm=norms[config.get("norm_type", "layernorm")],
        prenorm=config.get("prenorm", True),
        last_norm=False,
        feed_forward="none",
        n_layers=1,
        max_length=config["max_positions"],
    )
    attention = RecordingAttention(options)
    stack = Backbone(options, lambda: [attention]).to(case.dtype)
    raw, u = case.raw(), case.array("u").requires_grad_()
    given = {f"mixers.0.{name}": tensor for name, tensor in import_reference(attention, raw).items()}
    given |= norm_of(raw)
    x = u.transpose(0, 1)
    y = functional_call(stack, given, (x, every(x))).transpose(0, 1)
    found: dict[str, Found] = {"y_layer": y, "attn_weights": attention.weights}
    found["attn_mask_is_causal"] = torch.tensor([float(options.causal)], dtype=case.dtype)
    return found | gradients((y * case.array("g")).sum(), {**raw, "u": u}, "grad_layer.")


def bias(case: Case) -> dict[str, Found]:
    """The matrix, of which ours is the values by distance; and the parameters, there and back."""
    config = case.config
    ours = SimpleBias(config["max_positions"]) if "param" in case else RotaryBias(config["dim"])
    ours.to(case.dtype)
    names = {"rel_pos_bias": "param"} if "param" in case else {"alpha": "alpha", "beta": "beta"}
    ours.load_state_dict(import_reference(ours, {theirs: case.array(name) for theirs, name in names.items()}))
    back = export_reference(ours)
    length = config["seq_len"]
    matrix = ours.by_distance(length).unfold(0, length, 1).flip(0)
    return {"bias": matrix, **{name: back[theirs] for theirs, name in names.items()}}


def feed_forward(case: Case) -> dict[str, Found]:
    raw, x = case.raw(), case.array("u").transpose(0, 1)
    options = Config(d_model=x.shape[-1], d_ff=len(raw["fc1.weight"]), n_layers=1, last_norm=False, max_length=16)
    stack = build(options).to(case.dtype)
    stack.mixers, stack.norms = nn.ModuleList([stack.mixers[1]]), nn.ModuleList([stack.norms[1]])
    places = {"fc1": "mixers.0.up", "fc2": "mixers.0.down"}
    given = norm_of(raw)
    for name, tensor in raw.items():
        place, _, part = name.partition(".")
        given |= {f"{places[place]}.{part}": tensor} if place in places else {}
    return {"y_layer": functional_call(stack, given, (x, every(x))).transpose(0, 1)}


def norm_of(raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ours = {"weight": "weight", "bias": "bias", "scalar": "g"}
    prefix = "norm.norm."
    return {f"norms.0.{ours[n.removeprefix(prefix)]}": t for n, t in raw.items() if n.startswith(prefix)}


def every(x: Tensor) -> Context:
    return Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)
