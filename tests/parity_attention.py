"""Attention against arrays of the published code: what ours gives for every result of a case, by the array's name."""

import torch
import torch.nn.functional as F
from golden import Case, Found, gradients
from reference_weights import import_reference
from torch import Tensor
from torch.func import functional_call

from spt.models import dlr_attention
from spt.models.attention import Attention
from spt.models.base import Context
from spt.models.ops.attention import local_attend, rotary_table, rotate, self_mask, xpos_scale


def attn_dlr(case: Case) -> dict[str, Found]:
    """The DLR repository: a trained temperature, rotary positions, chunks with their neighbours."""
    if "param.scale" in case:
        return layer(case, window=case.config["chunk_size"], temperature=True)
    return wrapped(case) if "y_layer" in case else rope(case)


def attn_nfs(case: Case) -> dict[str, Found]:
    """The SPT repository."""
    if "param.linears.0.weight" not in case:
        return heads(case) if "q" in case else rope(case)
    names = {"window_size": "window", "look_backward": "back", "look_forward": "ahead"}
    return layer(case, **{ours: case.config[theirs] for theirs, ours in names.items() if theirs in case.config})


def layer(case: Case, **options: object) -> dict[str, Found]:
    config = case.config
    attention = Attention(
        config["d_model"],
        config["n_heads"],
        config["L"],
        causal=config["causal"],
        rotary=config.get("rotary", True),
        **options,
    ).to(case.dtype)
    raw, x = case.raw(), case.array("x").requires_grad_()
    y = functional_call(attention, import_reference(attention, raw), (x, everything(x)))
    found = {"y": y, **gradients((y * case.array("g")).sum(), {**raw, "x": x})}
    if not config.get("rotary", True):  # the keys' bias shifts all scores alike: its gradient is rounding
        names = [f"grad.linears.{i}.bias" for i in range(2)]
        found[names[1]] = (torch.cat([found[name] for name in names]), torch.cat([case.array(name) for name in names]))
    if "freqs" in case:
        found["freqs"] = frequencies(config["d_model"] // config["n_heads"], case.dtype)
    return found


def wrapped(case: Case) -> dict[str, Found]:
    """Attention in the place of a DLR: y = W (u + gelu(attention(u))) + b."""
    causal, (D, L) = case.name.endswith("causal"), (case.config["H"], case.config["L"])
    heads, window = case.config["n_heads"], case.config["chunk_size"]
    config = dlr_attention.Config(d_model=D, n_heads=heads, window=window, causal=causal, max_length=L)
    whole = dlr_attention.DLRAttention(config).to(case.dtype)
    raw, u = case.raw(), case.array("u").requires_grad_()
    y = functional_call(whole, import_reference(whole, raw), (u.mT, everything(u.mT))).mT
    return {"y_layer": y, **gradients((y * case.array("g")).sum(), {**raw, "u": u}, "grad_layer.")}


def heads(case: Case) -> dict[str, Found]:
    """Given queries, keys and values, in every way of the general local attention."""
    config = case.config
    given = {name: case.array(name).requires_grad_() for name in "qkv"}
    q, k, v = given.values()
    w, causal, ahead = config["window_size"], config["causal"], int(not config["causal"])
    if config.get("use_rotary_pos_emb"):  # which starts at 0 in every window; only differences of positions matter
        table = rotary_table(config["L"], config["d"], dtype=case.dtype)
        q, k = rotate(q, table, "half"), rotate(k, table, "half")
    if config.get("autopad"):  # to whole windows, with keys of zeros that are looked at
        missing = -config["L"] % w
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
    shared = config.get("shared_qk", False)
    y = local_attend(
        q,
        F.normalize(k, dim=-1) if shared else k,
        v,
        w,
        ahead=ahead,
        causal=causal,
        band=w if config.get("exact_windowsize") else None,
        bias=self_mask(q, w, 1, ahead) if shared else None,
    )[:, :, : config["L"]]
    return {"y": y, **gradients((y * case.array("g")).sum(), given)}


def rope(case: Case) -> dict[str, Found]:
    """Rotated inputs; of each pair's frequencies, published as they are or as all angles, what a turn shows."""
    d, L, x = case.config["d"], case.config["L"], case.array("x")
    table = rotary_table(L, d, dtype=case.dtype)
    if "scale_base" in case.config:
        scale = xpos_scale(L, d, float(case.config["scale_base"]))[..., None].to(case.dtype)
        return {"q_rot": rotate(x, table * scale, "half"), "k_rot": rotate(x, table / scale, "half")}
    if "inv_freq" not in case:
        return {"y": rotate(x, table), "freqs": frequencies(d, case.dtype)}
    angles = case.array("freqs")
    turns = (torch.cat([table, table], dim=1), torch.stack([angles.cos(), angles.sin()], dim=-1))
    return {"y": rotate(x, table, "half"), "inv_freq": frequencies(d, case.dtype), "freqs": turns}


def frequencies(width: int, dtype: torch.dtype) -> Tensor:
    """The angles of step 1, none of which is beyond 1."""
    cos, sin = rotary_table(2, width, dtype=dtype)[1].unbind(-1)
    return torch.atan2(sin, cos)


def everything(x: Tensor) -> Context:
    return Context(torch.ones(x.shape[:2], dtype=torch.bool), padded=False)
