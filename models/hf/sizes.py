"""What architectures of transformers need here: sizes that follow from d_model and n_layers, lengths, settings."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

Settings = dict[str, Any]


def _mamba(heads: int) -> Settings:
    return {"mamba_n_heads": heads, "mamba_d_state": 64, "mamba_chunk_size": 64}


def _cycle(n: int, *kinds: str) -> list[str]:
    return [kinds[i % len(kinds)] for i in range(n)]


def _mamba_with_one(n: int, kind: str) -> list[str]:
    return [kind if i == n // 2 else "mamba" for i in range(n)]


SPECIAL_SIZES: dict[str, Callable[[int, int, int], Settings]] = {  # from d_model, n_layers and the number of heads
    "bamba": lambda d, n, h: {**_mamba(h), "attn_layer_indices": [n // 2]},
    "falcon_h1": lambda d, n, h: {**_mamba(h), "mamba_d_ssm": 2 * d},
    "gpt_neo": lambda d, n, h: {"attention_types": [[["global"], n] if n % 2 else [["global", "local"], n // 2]]},
    "granitemoehybrid": lambda d, n, h: {
        **_mamba(h),
        **{"layer_types": _mamba_with_one(n, "attention"), "num_local_experts": 0, "shared_intermediate_size": 4 * d},
    },
    "jamba": lambda d, n, h: {
        **{"attn_layer_period": max(2, min(8, n)), "attn_layer_offset": min(4, n // 2), "num_experts": 4}
    },
    "lfm2": lambda d, n, h: {"block_auto_adjust_ff_dim": False, "layer_types": _cycle(n, "conv", "full_attention")},
    "mamba2": lambda d, n, h: {
        **{"num_heads": h, "head_dim": 2 * d // h, "n_groups": 1, "state_size": 64, "chunk_size": 64}
    },
    "minimax": lambda d, n, h: {"num_local_experts": 4, "block_size": 64},
    "nemotron_h": lambda d, n, h: {
        "layers_block_type": _cycle(n, "mamba", "attention", "mamba", "moe"),
        **{"mamba_num_heads": h, "mamba_head_dim": 2 * d // h, "n_groups": 1, "ssm_state_size": 64},
        **{"chunk_size": 64, "moe_intermediate_size": d, "moe_shared_expert_intermediate_size": d},
    },
    "qwen3_next": lambda d, n, h: {
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), h),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), d // h),
        "num_experts": 0,
    },
    "recurrent_gemma": lambda d, n, h: {"intermediate_size": 3 * d},
    "reformer": lambda d, n, h: {"attn_layers": _cycle(n, "local", "lsh"), "axial_pos_embds": False},
    "xlstm": lambda d, n, h: {"num_heads": h},
    "zamba2": lambda d, n, h: {
        "layers_block_type": _mamba_with_one(n, "hybrid"),
        **{"n_mamba_heads": h, "chunk_size": 64, "adapter_rank": max(1, d // 16)},
    },
}

LENGTH_MULTIPLES: dict[str, Callable[[Any], int]] = {  # of which the length of every sequence is a multiple
    "big_bird": lambda c: c.block_size if c.attention_type == "block_sparse" else 1,
    "longformer": lambda c: max(c.attention_window) if isinstance(c.attention_window, list) else c.attention_window,
    "minimax": lambda c: c.block_size,
    "nystromformer": lambda c: c.num_landmarks,
    "reformer": lambda c: math.lcm(*(getattr(c, f"{kind}_attn_chunk_length") for kind in set(c.attn_layers))),
    **dict.fromkeys(("mamba2", "nemotron_h", "xlstm", "zamba2"), lambda c: c.chunk_size),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), lambda c: c.mamba_chunk_size),
}

# Position embeddings begin after that of the padding token.
POSITIONS_AFTER_PADDING = {
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "data2vec-text", "ibert"),
    *("longformer", "luke", "mpnet", "xmod"),
}

TRAINING: dict[str, Settings] = {  # settings without which an architecture cannot be trained here
    "xlstm": {"mode": "train", "return_last_states": True, "autocast_kernel_dtype": "float32"},
    "rwkv": {"rescale_every": 0},  # in evaluation it would halve its own weights, for float16
}

REFUSED = {"mra": "its kernels are CUDA programs from the hub, which are not run here"}

RESERVED = {  # not to be set under options, because the recipe's own options determine them or they have no effect
    "hidden_size": "model.d_model says it",
    "num_hidden_layers": "model.n_layers says it",
    "max_position_embeddings": "model.max_length says it",
    "is_causal": "model.causal says it",
    "is_decoder": "model.causal says it",
    "vocab_size": "the model's own token embeddings are not used",
    "pad_token_id": "the model's own token embeddings are not used",
    "use_cache": "nothing is generated here",
    "is_encoder_decoder": "encoder-decoder models are not for sequences of one kind",
}

WINDOWS = ("sliding_window", "local_attention", "attention_window_size", "attention_chunk_size", "window_size")
HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "mamba_n_heads", "n_mamba_heads", "mamba_num_heads")

HEAD_WIDTHS = ("head_dim", "attention_head_size")
EMBEDDING_WIDTHS = ("embedding_size", "word_embed_proj_dim")
FEED_FORWARD_WIDTHS = ("intermediate_size", "ffn_dim", "hidden_dim", "d_inner", "feed_forward_size", "dff")
INNER_WIDTHS = (  # settings that grow with d_model where they are given
    *(*HEAD_WIDTHS, *EMBEDDING_WIDTHS, *FEED_FORWARD_WIDTHS, "n_inner", "shared_intermediate_size"),
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "mamba_d_ssm", "mamba_head_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "adapter_rank"),
)


def small_sizes(model_type: str, d: int, n: int, options: Settings) -> Settings:
    """Sizes that follow from d_model, n_layers and the number of heads; every architecture has some of these."""
    heads = next((options[name] for name in HEADS if name in options), None)
    if not (isinstance(heads, int) and heads > 0):
        heads = next(heads for heads in (4, 2, 1) if d % heads == 0)
    return {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads),
        **dict.fromkeys(HEAD_WIDTHS, d // heads),
        **dict.fromkeys(EMBEDDING_WIDTHS, d),
        **dict.fromkeys(FEED_FORWARD_WIDTHS, 4 * d),
        **{"type_vocab_size": 1, "hidden_size": d, "num_hidden_layers": n},
        **SPECIAL_SIZES.get(model_type, lambda *_: {})(d, n, heads),
    }


# Of parameters, over those of as many plain blocks: half as many again as the largest mixtures whose experts follow
# the width (128 experts have 97 times as many).
IMPLAUSIBLE = 128
_SIZE = re.compile("experts$|(_size|_dim|_rank|_heads)$|ffn|d_inner")


def plain_parameters(d: int, n: int, options: Settings) -> int:
    """Of n blocks of attention and a gated feed-forward layer 4 d wide; wider, or with several experts, where the
    options say so."""
    given = {name: value for name, value in options.items() if type(value) is int}
    width = max([4 * d, *(value for name, value in given.items() if name in INNER_WIDTHS)])
    experts = max([1, *(value for name, value in given.items() if name.endswith("experts"))])
    return n * d * (4 * d + 3 * width * experts)


def large_settings(config: Any, d: int, names: Iterable[str]) -> list[str]:
    """Of these settings, sizes that cannot follow from the width d, the largest first."""
    settings = {name: getattr(config, name, None) for name in names if _SIZE.search(name) and name not in RESERVED}
    own = {name: value for name, value in settings.items() if type(value) is int}
    large = [name for name, value in own.items() if value > (16 if name.endswith("experts") else 4 * d)]
    return [f"{name} ({own[name]:,})" for name in sorted(large, key=lambda name: (-own[name], name))]


def length_multiple(config: Any) -> int:
    return max(1, LENGTH_MULTIPLES.get(config.model_type, lambda _: 1)(config))


def structure_depends_on_length(config: Any) -> bool:
    """Does what is computed depend on the longest sequence (landmarks, random blocks, buckets)?"""
    kind = config.model_type
    return kind in ("nystromformer", "reformer") or (kind == "big_bird" and config.attention_type == "block_sparse")


def length_of_axial_positions(config: Any) -> int | None:
    """The length that every sequence must have, if a table of axial positions determines it."""
    axial = config.model_type == "reformer" and config.axial_pos_embds
    return math.prod(config.axial_pos_shape) if axial else None


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
