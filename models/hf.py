"""Any language model of Hugging Face transformers: llama, bert, mamba2, longformer, …; random or pretrained weights.

Wolf et al. 2020. The model takes the place of the residual stack: it is handed embeddings, (B, L, D), and gives its
last hidden states; encoder and head are ours, its own table of words is dropped. What it can do is found by trying it
on a few steps when it is built: whether it looks ahead, whether it keeps examples and padding apart, which of its
parameters are ever reached. docs/hugging-face.md has what was found.

Nothing is downloaded here but by `fetch`, no code from the hub is run, and weights are read from safetensors alone.

Letters: B sequences, L steps, D width, E inner width and N state size of a scan.
"""

import contextlib
import difflib
import functools
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.utils import logging

from spt.models.base import Backbone, BackboneConfig, Context, Counts, Rate, Unsupported
from spt.models.ops import backends
from spt.models.ops.counts import Number

PAPER = "Wolf et al. 2020"
COST = "L² D + L D²"  # of a Transformer such as the default; others by their kind
PARAMETERS = 1_049_728

logging.set_verbosity_error()  # what it has to say stands in its errors; its warnings are answered here
logging.disable_progress_bar()

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # where there are several files
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
HUB_NAME = re.compile(r"([\w.-]+/)?[\w.-]+")
TOLERANCE = 1e-4  # relative: answers that differ by less are the same answer
ROUNDING = 1e-5  # a step whose answer changes by less does not see what was changed
FEW = 24  # steps that a model is tried on
NEAR = 8  # how far its windows reach then
MOST = 1024  # steps at most, where a model's structure follows from the longest sequence

NOT_OURS = "is no model of one sequence of embeddings; take one of text"

# Of the options of all models, those that mean something here.
OURS = {"d_model", "n_layers", "causal", "dropout", "initialisation", "max_length"}

Settings = dict[str, Any]


class Config(BackboneConfig):
    architecture: str | None = Field(
        None, description="a model of transformers, with random weights, by its type: llama (default), bert, mamba2, …"
    )
    checkpoint: str | Path | None = Field(
        None, description="instead: a model on the Hugging Face hub (owner/name), or a folder (./, / or ~ in front)"
    )
    revision: str | None = Field(None, description="of a model on the hub: a branch, tag or commit; by default main")
    pretrained: bool = Field(
        False, description="with the checkpoint's weights (then the default); false: with its sizes, but random weights"
    )
    options: dict[str, Any] = Field(
        {}, description="the architecture's own settings, as in its config.json, e.g. {num_attention_heads: 8}"
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if "checkpoint" in given:
            return {"pretrained": given["checkpoint"] is not None, **given}
        return {"architecture": "llama", **given}

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if (self.architecture is None) == (self.checkpoint is None):
            raise ValueError("either an architecture or a checkpoint says which model it is; give one of them")
        ours = set(BackboneConfig.model_fields) - OURS
        idle = sorted(name for name in ours if getattr(self, name) != BackboneConfig.model_fields[name].default)
        if idle:
            raise ValueError(f"{idle[0]} has no effect on a model of transformers; its own settings go under options")
        if self.initialisation == "random_ssm":
            raise ValueError("initialisation random_ssm is not for models of transformers; use random")
        if self.initialisation == "random" and self.pretrained:
            raise ValueError("initialisation random would undo the pretrained weights; set pretrained: false")
        if self.checkpoint is None and (self.pretrained or self.revision is not None):
            raise ValueError(f"{'pretrained' if self.pretrained else 'revision'} has no effect without a checkpoint")
        if self.revision is not None and _is_folder(self.checkpoint):
            raise ValueError("revision has no effect on a folder; it is for models on the hub")
        if not (self.checkpoint is None or _is_folder(self.checkpoint) or HUB_NAME.fullmatch(str(self.checkpoint))):
            raise ValueError(f"{self.checkpoint} is no model on the hub (owner/name) and no folder (./, /, ~ in front)")
        if self.architecture is not None:
            _configured(self.architecture, self, self.max_length or MOST)  # complains of options while a recipe is read
        return self

    @property
    def called(self) -> str:
        """The model, in messages."""
        return f"architecture {self.architecture}" if self.checkpoint is None else f"the checkpoint {self.checkpoint}"


def build(config: Config) -> Backbone:
    backbone = HuggingFace(config)
    if any(parameter.is_meta for parameter in backbone.parameters()):
        return backbone  # shapes alone are asked for; nothing can be tried
    backbone.settle(_found(backbone, config))
    backbone.initialise(config.initialisation)
    return backbone


def fetch(config: Config, say: Callable[[str], None]) -> None:
    """Download the configuration and, where they are wanted, the weights of a checkpoint on the hub.

    Raises ValueError, in one sentence, where that cannot be done.
    """
    if config.checkpoint is None or _is_folder(config.checkpoint) or not _missing(config):
        return
    name, weights = str(config.checkpoint), [WEIGHTS, INDEX, "model-*-of-*.safetensors"]
    say(f"fetching {name} from the Hugging Face hub")
    try:
        wanted = ["config.json", *(weights if config.pretrained else [])]
        folder = snapshot_download(name, revision=config.revision, allow_patterns=wanted)
    except GatedRepoError:
        raise ValueError(f"{name} is gated: ask for access on its page, then log in with: hf auth login") from None
    except RevisionNotFoundError:
        raise ValueError(f"{name} has no revision {config.revision}") from None
    except RepositoryNotFoundError:
        raise ValueError(f"the hub has no model {name}, or it is private: then log in with: hf auth login") from None
    except (LocalEntryNotFoundError, ConnectionError):  # the second: HF_HUB_OFFLINE
        raise ValueError(f"{name} cannot be fetched: the Hugging Face hub is out of reach") from None
    except Exception as error:  # whatever else its client raises
        raise ValueError(f"{name} cannot be fetched: {_brief(error)}") from error
    _checkpoint(config, Path(folder))


def identity(config: Config) -> dict[str, Any]:
    """What the weights are: the commit of a copy of the hub's, or the hashes of a folder's files. {} without any."""
    folder = None if config.checkpoint is None else _place(config)
    if folder is None or not (folder / "config.json").is_file():
        return {}
    if not _is_folder(config.checkpoint):
        return {"commit": folder.name}
    try:
        files = [folder / name for name in ("config.json", *(_weights(folder) if config.pretrained else []))]
    except ValueError:  # told when it is built
        return {}
    return {path.name: _hash(path, *_state(path)) for path in files if path.is_file()}


# -------------------------------------------------------------------------------------------------------- the backbone


class Found(NamedTuple):
    """What trying a model has shown."""

    fixed: bool  # does every sequence have to be laid out in as many steps, to leave padding out of account?
    padding: bool  # can padding be left out of account?
    single: bool  # does it have to compute in single precision, since half breaks it?
    dropped: tuple[str, ...]  # modules and parameters that an answer does not depend on
    frozen: tuple[str, ...]  # parameters that it does not depend on either, but that its code cannot do without


class HuggingFace(Backbone):
    """A model of transformers between our encoder and our head.

    Two-sided models are handed zeros and a mask on padding; causal ones never meet it. `grain`: its sequences are a
    multiple of so many steps; `fixed`: all have `length` steps. What lacks is padded here.
    """

    single = False  # is half precision kept out?

    def __init__(self, config: Config) -> None:
        # No block of ours: the residual stack is theirs.
        super().__init__(config.model_copy(update={"initialisation": "structured", "last_norm": False}), lambda: [])
        assert config.max_length is not None, "filled in from the task"
        folder = None if config.checkpoint is None else _checkpoint(config, _place(config))
        with _offline():
            self.model: Any
            self.model, self.missing = _made(config, folder)
        self.config = self.model.config
        self.key = f"{config.model_dump_json()} {self.config.to_json_string()}"  # what it is but for its weights
        self.kind: str = self.config.model_type
        self.usual: str = self.config._attn_implementation  # sdpa where its class has that
        self.width = config.d_model
        self.accepts = frozenset(inspect.signature(self.model.forward).parameters)
        self.grain = max(1, GRAIN.get(self.kind, lambda _: 1)(self.config))
        self.fixed = _structure_is_fixed(self.config)
        self.length = _fixed_length(self.config) or _whole(config.max_length, self.grain)
        if self.length < config.max_length:
            raise ValueError(
                f"{config.called} is made for {self.length:,} steps, but max_length is {config.max_length:,}"
            )
        self._kept_random = [m for m in self.model.modules() if type(m).__name__ == "BigBirdBlockSparseAttention"]
        self._hashing = [m for m in self.model.modules() if hasattr(m, "hash_seed")]
        self._keeping = [m for m in self.model.modules() if hasattr(m, "recurrent_states")]
        self._recomputing = False
        _mend(self.model, random=folder is None or not config.pretrained)
        _freeze(self.model)
        _share(self.model)
        self.rates = _rates(self)

    def settle(self, found: Found) -> None:
        """Be as it was found to be."""
        self.fixed, self.padding, self.single = found.fixed, found.padding, found.single
        _drop(self.model, found.dropped)
        for name in found.frozen:
            self.model.get_parameter(name).requires_grad_(False)
        absent = [name for name in self.missing if name in self.model.state_dict() and name not in found.frozen]
        if absent:
            raise ValueError(f"the checkpoint lacks weights of this model, among them {absent[0]}")
        self.rates = _rates(self)

    def train(self, mode: bool = True) -> "HuggingFace":
        super().train(mode)
        for module in self._kept_random:  # in evaluation it would look at its first block again instead
            module.training = True
        return self

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        if self.recompute != self._recomputing:
            self._recompute(self.recompute)
        self._attend(x)
        length = x.shape[1]
        more = self.whole(length) - length
        given: Settings = {}
        masked = (context.padded or more > 0) and (self.fixed or not self.causal)
        if masked:
            x = x.masked_fill(~context.valid[..., None], 0.0)
        if "attention_mask" in self.accepts and (masked or self.kind == "nystromformer"):
            given["attention_mask"] = self._mask(F.pad(context.valid, (0, more)))
        if more:
            x = F.pad(x, (0, 0, 0, more))
        if "use_cache" in self.accepts:
            given["use_cache"] = False
        with self._steady(x), torch.autocast(x.device.type, enabled=False) if self.single else contextlib.nullcontext():
            y: Tensor = self.model(inputs_embeds=x, **given)[0]
        if y.shape[-1] == 2 * self.width:  # the two streams of a reversible stack
            y = y.unflatten(-1, (2, self.width)).mean(-2)
        return y[:, :length]

    def _mask(self, valid: Bool[Tensor, "B P"]) -> Tensor:
        if self.kind != "nystromformer":
            return valid.long()
        # Of any other, or none, it makes a mask of steps by steps, which does not fit its landmarks; this is added.
        return torch.zeros(valid.shape, device=valid.device).masked_fill(~valid, -1e9)[:, None, None]

    def whole(self, length: int) -> int:
        """Steps that a sequence is laid out in."""
        return self.length if self.fixed else _whole(length, self.grain)

    def flops(self, length: int) -> Counts:
        """As torch counts them, attention written out, and what it does not see of scans and Fourier transforms.

        By kind: products with weights are linear, batched products attention (scan, where the model has one). What a
        model's own code solves element by element, such as the triangular systems of gated delta rules, is left out;
        what its backward pass computes again (reversible stacks) counts. A backward pass that cannot be made without
        values is taken as twice the forward pass.
        A quadratic through three lengths, held against a fourth; a length between two that the model's own chunks
        tell apart costs as much as the longer one.
        """
        if self.key not in _COSTS:
            _COSTS[self.key] = _cost(self)
        cost, whole = _COSTS[self.key], self.whole(length)
        if cost is not None:
            return cost(whole)
        if (self.key, whole) not in _COUNTS:
            _COUNTS[self.key, whole] = _counted(self, whole)
        return _COUNTS[self.key, whole]

    def _recompute(self, on: bool) -> None:
        """Gradient checkpointing by the model's own layers, where it has that."""
        self._recomputing = on
        if self.model.supports_gradient_checkpointing:
            # The same under two names; the older one warns where the newer one exists.
            word = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
            switch = getattr(self.model, f"{word}_checkpointing_{'enable' if on else 'disable'}")
            switch(**({f"{word}_checkpointing_kwargs": {"use_reentrant": False}} if on else {}))

    def _attend(self, x: Tensor) -> None:
        """Take the process's choice of what computes attention, where the model knows it."""
        wanted = backends.current("attention")
        if wanted == "flash" and self.model._supports_flash_attn and not torch.is_autocast_enabled(x.device.type):
            raise backends.Unavailable(
                "the attention backend flash computes in half precision; set train.precision=bf16, or choose sdpa"
            )
        name = {"flash": "flash_attention_2", "math": "eager"}.get(wanted, self.usual)
        if name == "flash_attention_2" and not self.model._supports_flash_attn:
            name = self.usual
        if self.config._attn_implementation != name:
            self.model.set_attn_implementation(name)

    @contextlib.contextmanager
    def _steady(self, x: Tensor) -> Iterator[None]:
        """What a forward pass draws by chance: anew in training, always the same in evaluation; and numpy's, torch's
        generators are left as they were where the model would reset them."""
        if isinstance(x, FakeTensor):
            with _Shapes():
                yield
            return
        with contextlib.ExitStack() as stack:
            if self._kept_random:
                stack.callback(np.random.set_state, np.random.get_state())
            for module in self._hashing:
                module.hash_seed = None if self.training else 0
            if self._hashing and not self.training:
                stack.enter_context(torch.random.fork_rng([x.device] if x.is_cuda else []))
            yield
            for module in self._keeping:  # the last state, with all that led to it
                module.recurrent_states = None


class _Shapes(TorchDispatchMode):
    """For tensors that have shapes but no values: what depends on a value is 0 (no step with global attention), and
    experts' products, each row with one of the matrices, are of half precision no more than they are elsewhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            a, b = args[:2]
            if b.ndim == 3:
                return torch.mm(a, b[0])
            return torch.mm(a, b).expand(len(args[2]), -1, -1)  # gradients of all matrices, each from its own rows
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            return 0


def _whole(length: int, grain: int) -> int:
    return -(-length // grain) * grain


# -------------------------------------------------------------------------------------------------------- its settings


GRAIN: dict[str, Callable[[Any], int]] = {  # of which the length of every sequence is a multiple
    "longformer": lambda c: max(c.attention_window) if isinstance(c.attention_window, list) else c.attention_window,
    "big_bird": lambda c: c.block_size if c.attention_type == "block_sparse" else 1,
    "nystromformer": lambda c: c.num_landmarks,
    "reformer": lambda c: math.lcm(*(getattr(c, f"{kind}_attn_chunk_length") for kind in set(c.attn_layers))),
    "xlstm": lambda c: c.chunk_size,
    "mamba2": lambda c: c.chunk_size,
    "zamba2": lambda c: c.chunk_size,
    "nemotron_h": lambda c: c.chunk_size,
    "bamba": lambda c: c.mamba_chunk_size,
    "falcon_h1": lambda c: c.mamba_chunk_size,
    "granitemoehybrid": lambda c: c.mamba_chunk_size,
    "minimax": lambda c: c.block_size,
}

# Positions begin behind that of the padding token.
AFTER_PADDING = {
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "data2vec-text", "ibert"),
    *("longformer", "luke", "mpnet", "xmod"),
}

# Settings that no recipe sets: what they say is said by the recipe's own options, or has no effect.
TAKEN = {
    "hidden_size": "model.d_model says it",
    "num_hidden_layers": "model.n_layers says it",
    "max_position_embeddings": "model.max_length says it",
    "is_causal": "model.causal says it",
    "is_decoder": "model.causal says it",
    "vocab_size": "the model's own table of words is not used",
    "pad_token_id": "the model's own table of words is not used",
    "use_cache": "nothing is generated here",
    "is_encoder_decoder": "models of an encoder and a decoder are not for sequences of one kind",
}

REFUSED = {"mra": "its kernels are CUDA programs from the hub, which are not run here"}
WINDOWS = ("sliding_window", "local_attention", "attention_window_size", "attention_chunk_size", "window_size")
HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "mamba_n_heads", "n_mamba_heads", "mamba_num_heads")


def _structure_is_fixed(config: Any) -> bool:
    """Does what is computed follow from the longest sequence: landmarks, random blocks, buckets?"""
    kind = config.model_type
    return kind in ("nystromformer", "reformer") or (kind == "big_bird" and config.attention_type == "block_sparse")


def _fixed_length(config: Any) -> int | None:
    """Steps of every sequence, where the model's weights say it: the table of axial positions has two sides."""
    axial = config.model_type == "reformer" and config.axial_pos_embds
    return math.prod(config.axial_pos_shape) if axial else None


def _sizes(kind: str, config: Config) -> Settings:
    """Small settings that follow from d_model, n_layers and the heads, if these are given; an architecture has some."""
    d, n = config.d_model, config.n_layers
    told = next((config.options[name] for name in HEADS if name in config.options), None)
    heads = told if isinstance(told, int) and told > 0 else next(heads for heads in (4, 2, 1) if d % heads == 0)
    general = {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads),
        **dict.fromkeys(("head_dim", "attention_head_size"), d // heads),
        **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), d),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "d_inner", "feed_forward_size", "dff"), 4 * d),
        "type_vocab_size": 1,
    }
    heads_of = {"mamba_n_heads": heads, "mamba_d_state": 64, "mamba_chunk_size": 64}
    special: dict[str, Settings] = {
        "mamba2": {"num_heads": heads, "head_dim": 2 * d // heads, "n_groups": 1, "state_size": 64, "chunk_size": 64},
        "bamba": {**heads_of, "attn_layer_indices": [n // 2]},
        "falcon_h1": {**heads_of, "mamba_d_ssm": 2 * d},
        "granitemoehybrid": {
            **heads_of,
            **{"layer_types": ["attention" if i == n // 2 else "mamba" for i in range(n)], "num_local_experts": 0},
            "shared_intermediate_size": 4 * d,
        },
        "zamba2": {
            "layers_block_type": ["hybrid" if i == n // 2 else "mamba" for i in range(n)],
            **{"n_mamba_heads": heads, "chunk_size": 64, "adapter_rank": max(1, d // 16)},
        },
        "jamba": {"attn_layer_period": max(2, min(8, n)), "attn_layer_offset": min(4, n // 2), "num_experts": 4},
        "xlstm": {"num_heads": heads},
        "recurrent_gemma": {"intermediate_size": 3 * d},
        "reformer": {"attn_layers": ["local", "lsh"] * (n // 2) + ["local"] * (n % 2), "axial_pos_embds": False},
        "gpt_neo": {"attention_types": [[["global", "local"], n // 2]] if n % 2 == 0 else [[["global"], n]]},
        "minimax": {"num_local_experts": 4, "block_size": 64},
        "lfm2": {
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["full_attention" if i % 2 else "conv" for i in range(n)],
        },
        "nemotron_h": {
            "layers_block_type": [("mamba", "attention", "mamba", "moe")[i % 4] for i in range(n)],
            **{"mamba_num_heads": heads, "mamba_head_dim": 2 * d // heads, "n_groups": 1, "ssm_state_size": 64},
            **{"chunk_size": 64, "moe_intermediate_size": d, "moe_shared_expert_intermediate_size": d},
        },
        "qwen3_next": {
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), d // heads),
            "num_experts": 0,
        },
    }
    return {**general, "hidden_size": d, "num_hidden_layers": n, **special.get(kind, {})}


def _lengthen(found: Any, config: Config, length: int, stored: bool) -> None:
    """Settings that follow from the longest sequence, in place."""
    kind, given = found.model_type, config.options
    if kind == "longformer" and not stored and "attention_window" not in given:
        found.attention_window = min(512, _whole(length, 2))
    elif kind == "nystromformer":
        found.segment_means_seq_len = _whole(length, found.num_landmarks)
    elif kind == "xlstm":
        found.max_inference_chunksize = _whole(length, found.chunk_size)
    elif kind == "big_bird" and found.attention_type == "block_sparse":
        least = (5 + 2 * found.num_random_blocks) * found.block_size
        if config.causal or _whole(length, found.block_size) <= least:
            if given.get("attention_type"):
                why = "is two-sided" if config.causal else f"needs more than {least:,} steps (see block_size)"
                raise ValueError(f"attention_type block_sparse {why}; take original_full")
            found.attention_type = "original_full"
    if not config.pretrained:
        rows = _whole(length, GRAIN.get(kind, lambda _: 1)(found)) + (kind in AFTER_PADDING)
        for name in {"max_position_embeddings", "max_seq_len"} & _keys(type(found)):
            setattr(found, name, rows)


ALWAYS: dict[str, Settings] = {  # what a model of this kind needs to be trained here
    "xlstm": {"mode": "train", "return_last_states": True, "autocast_kernel_dtype": "float32"},
    "rwkv": {"rescale_every": 0},  # in evaluation it would divide its own weights, for half precision
}


def _configured(kind: str, config: Config, length: int, stored: Settings | None = None) -> Any:
    """The model's configuration: from our options, or from a checkpoint's config.json. ValueError in words."""
    if kind not in CONFIG_MAPPING or kind not in MODEL_MAPPING_NAMES:
        near = difflib.get_close_matches(kind, sorted(MODEL_MAPPING_NAMES), 1)
        hint = f"; did you mean {near[0]}?" if near else f" {transformers.__version__} (code from the hub is not run)"
        raise ValueError(f"{kind!r} is no architecture of transformers{hint}")
    if kind in REFUSED:
        raise ValueError(f"{config.called} is not for use here: {REFUSED[kind]}")
    made: Any = CONFIG_MAPPING[kind]
    names, alias = _names(made), dict(made.attribute_map)
    for key in config.options:
        standard = next((one for one, other in alias.items() if other == key and one in TAKEN), key)
        if standard in TAKEN:
            raise ValueError(f"options.{key} is not set here: {TAKEN[standard]}")
        if key not in _keys(made):
            close = difflib.get_close_matches(key, sorted(names), 1)
            raise ValueError(f"options: {kind} has no {key}{f'; did you mean {close[0]}?' if close else ''}")

    given: Settings = {} if stored else _sizes(kind, config)
    if not config.pretrained:
        given |= {"vocab_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    given |= {name: 0.0 if name.endswith("layerdrop") else config.dropout for name in _dropouts(names)}
    given |= {"use_cache": False, "is_decoder": config.causal, **ALWAYS.get(kind, {}), **config.options}
    given = {alias.get(key, key): value for key, value in given.items() if alias.get(key, key) in names}
    try:
        found = made.from_dict({**(stored or {}), **given, "is_causal": config.causal})
        _lengthen(found, config, length, stored is not None)
    except Exception as error:  # its own checks raise many kinds
        raise ValueError(f"{config.called}: {_brief(error)}") from error
    if found.is_encoder_decoder:
        raise ValueError(f"{config.called} is an encoder with a decoder; take a model that is one of them")
    if getattr(found, "quantization_config", None):
        raise ValueError(f"{config.called} has quantised weights, which cannot be trained")
    width, depth = getattr(found, "hidden_size", None), getattr(found, "num_hidden_layers", None)
    if (width, depth) != (config.d_model, config.n_layers):
        if width is None or depth is None:
            raise ValueError(f"{config.called} {NOT_OURS}")
        raise ValueError(f"{config.called} has another size; set model.d_model={width} and model.n_layers={depth}")
    return found


@functools.cache
def _names(made: Any) -> frozenset[str]:
    """The settings of an architecture, by its own names."""
    return frozenset(inspect.signature(made).parameters) - {"kwargs", "args", "self"}


def _keys(made: Any) -> set[str]:
    """The same, and by the names that all architectures share."""
    return {*_names(made), *made.attribute_map}


def _dropouts(names: Iterable[str]) -> list[str]:
    """Settings that say how much is dropped within the model; not those of heads that it does not have here."""
    heads = ("classifier", "summary", "pooler")
    return [name for name in names if re.search(r"dropout|pdrop$|layerdrop$", name) and not name.startswith(heads)]


# ------------------------------------------------------------------------------------------------------- its weights


def _made(config: Config, folder: Path | None) -> tuple[Any, list[str]]:
    """The model with its weights, all in float32; and what of them the checkpoint lacks."""
    assert config.max_length is not None
    if folder is None:
        assert config.architecture is not None
        settings = _configured(config.architecture, config, config.max_length)
    else:
        stored = _stored(folder / "config.json")
        settings = _configured(str(stored.pop("model_type", None)), config, config.max_length, stored)
    settings.auto_map = {}  # whatever code it names is not run
    meta = torch.get_default_device().type == "meta"
    try:
        if folder is None or not config.pretrained or meta:
            model = AutoModel.from_config(settings, dtype=torch.float32, trust_remote_code=False)
            missing: list[str] = []
        else:
            model, told = AutoModel.from_pretrained(
                folder,
                config=settings,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            missing = sorted(told["missing_keys"])
    except MemoryError:
        raise
    except Exception as error:
        if re.search("alloc|memory", str(error)):
            raise
        if "ignore_mismatched_sizes" in str(error):
            raise ValueError(
                f"{config.called} has weights of other sizes than its config.json or options say"
            ) from error
        raise ValueError(f"{config.called} cannot be built by transformers: {_brief(error)}") from error
    accepted = inspect.signature(model.forward).parameters
    if "inputs_embeds" not in accepted or {"pixel_values", "input_features", "decoder_input_ids"} & accepted.keys():
        raise ValueError(f"{config.called} {NOT_OURS}")
    return model.train(), missing


def _is_folder(checkpoint: str | Path | None) -> bool:
    return str(checkpoint).startswith((".", "/", "~"))


def _place(config: Config) -> Path | None:
    """The folder of a checkpoint, whether it is there or not; None where the hub's has not been fetched."""
    name = str(config.checkpoint)
    if _is_folder(config.checkpoint):
        return Path(name).expanduser()
    try:
        found = try_to_load_from_cache(name, "config.json", revision=config.revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _missing(config: Config) -> list[str]:
    """Files of a checkpoint that are not here."""
    folder = _place(config)
    if folder is None or not (folder / "config.json").is_file():
        return ["config.json"]
    return [name for name in _weights(folder) if not (folder / name).is_file()] if config.pretrained else []


def _weights(folder: Path) -> list[str]:
    """The files that hold the weights, whether they are there or not."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    parts = _stored(folder / INDEX).get("weight_map")
    return sorted({str(name) for name in parts.values()}) if isinstance(parts, dict) else [WEIGHTS]


def _checkpoint(config: Config, folder: Path | None) -> Path:
    """The folder, sure to be one that can be loaded. Raises ValueError that says what it lacks."""
    name, local = str(config.checkpoint), _is_folder(config.checkpoint)
    if folder is None or (not local and not (folder / "config.json").is_file()):
        raise ValueError(f"the checkpoint {name} is not on this machine; get it with: spt data prepare RECIPE")
    if not folder.is_dir():
        raise ValueError(f"the checkpoint {name} is no folder")
    if not (folder / "config.json").is_file():
        raise ValueError(f"the checkpoint {name} has no config.json; save_pretrained of transformers writes one")
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"the checkpoint {name} is an adapter; merge it into its model and save that")
    if not config.pretrained:
        return folder
    lacking = [name for name in _weights(folder) if not (folder / name).is_file()]
    if lacking == [WEIGHTS] and any(any(folder.glob(pattern)) for pattern in PICKLED):
        raise ValueError(
            f"the checkpoint {name} has its weights in a form that can hold programs, which is never opened; save "
            "them as safetensors"
        )
    if lacking and not local:
        raise ValueError(f"the checkpoint {name} lacks {lacking[0]}; get it with: spt data prepare RECIPE")
    if lacking:
        raise ValueError(f"the checkpoint {name} lacks {lacking[0]}; set pretrained: false for its sizes alone")
    for name in _weights(folder):
        try:
            with safe_open(folder / name, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} cannot be read: {_brief(error)}") from error
    return folder


def _stored(path: Path) -> Settings:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {_brief(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not what transformers writes: it holds no settings")
    return found


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@functools.cache
def _hash(path: Path, changed: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _brief(error: BaseException) -> str:
    """The last line of an error, which says what is wrong; its own checks begin with where they stand."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"^(Value|Type)Error: |\.$", "", lines[-1] if lines else type(error).__name__)
    return text if len(text) < 300 else f"{text[:300]} …"


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Within, the hub is out of reach: some models would fetch programs for a GPU from there."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _own_chance() -> Iterator[None]:
    """Within, chance is a matter of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


# --------------------------------------------------------------------------------------------------- what is put right


def _mend(model: Any, random: bool) -> None:
    """What transformers 5.23 has otherwise than the papers, or than training with a seed can bear."""
    for module in model.modules():
        kind = type(module).__name__
        if kind == "NystromformerSelfAttention":
            module.init_option = "exact"  # the other one divides by a maximum over the whole batch
        elif kind == "ReformerLayer":
            # Its own would draw a seed from the operating system.
            methods = {"_init_attention_seed": _seed_attention, "_init_feed_forward_seed": _seed_feed_forward}
            module.__class__ = type(kind, (type(module),), methods)
        elif random and kind == "xLSTMFeedForward" and hasattr(module, "proj_up_gate"):
            # Taken for one of the gates of the recurrence by its name, and set to zero with them.
            nn.init.normal_(module.proj_up_gate.weight, std=math.sqrt(2 / (5 * model.config.hidden_size)))


def _seed_attention(layer: Any) -> None:
    layer.attention_seed = _next_seed()


def _seed_feed_forward(layer: Any) -> None:
    layer.feed_forward_seed = _next_seed()


def _next_seed() -> int:
    """A seed that follows from the last one; torch goes on from it (a linear congruential generator, Knuth's)."""
    seed = (torch.initial_seed() * 6364136223846793005 + 1442695040888963407) % 2**63
    torch.manual_seed(seed)
    return seed


def _freeze(model: Any) -> None:
    """Tables that the model never trains (sinusoids) are constants here: they follow from its settings."""
    for name, parameter in list(model.named_parameters()):
        if not parameter.requires_grad:
            parent, last = _parent(model, name)
            del parent._parameters[last]
            parent.register_buffer(last, parameter.detach(), persistent=False)


def _rates(backbone: nn.Module) -> dict[str, Rate]:
    """No weight decay on tables of positions and kinds, on vectors of more than one axis, on state matrices."""
    tables = {f"{name}.weight" for name, module in backbone.named_modules() if isinstance(module, nn.Embedding)}
    return {
        name: Rate()
        for name, p in backbone.named_parameters()
        if p.ndim >= 2 and (name in tables or p.numel() == max(p.shape) or name.endswith("A_log"))
    }


def _share(model: Any) -> None:
    """A parameter of several layers is registered, and saved, once; the others know it without torch's seeing it."""
    first: set[int] = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in first:
            parent, last = _parent(model, name)
            del parent._parameters[last]
            parent.__dict__[last] = parameter
        first.add(id(parameter))


def _parent(model: Any, name: str) -> tuple[Any, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _drop(model: Any, names: Iterable[str]) -> Callable[[], None]:
    """Take modules and parameters out; returns what puts them back."""
    taken = []
    for name in names:
        parent, last = _parent(model, name)
        where = parent._modules if last in parent._modules else parent._parameters
        taken.append((where, last, where[last]))
        where[last] = None

    def back() -> None:
        for where, last, value in taken:
            where[last] = value

    return back


# -------------------------------------------------------------------------------------------------------- trying it out


_FOUND: dict[str, Found] = {}  # of models with random weights, by what they are


def _found(backbone: HuggingFace, config: Config) -> Found:
    if backbone.key not in _FOUND:
        with _own_chance():
            try:
                _check_positions(backbone, config)
                found = _tried(_twin(backbone, config), config)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:  # in their code, not ours
                raise ValueError(f"{config.called} cannot be run by transformers here: {_brief(error)}") from error
        if config.pretrained:  # what half precision does to it may depend on its weights
            return found
        _FOUND[backbone.key] = found
    return _FOUND[backbone.key]


def _twin(backbone: HuggingFace, config: Config) -> HuggingFace:
    """The model that is tried: itself; or one of the same structure whose windows end, and whose landmarks lie, within
    a few steps."""
    sizes = {name: getattr(backbone.config, name) for name in WINDOWS if name in _keys(type(backbone.config))}
    far = [name for name, size in sizes.items() if isinstance(size, int) and size > NEAR]
    long = backbone.fixed and backbone.length > MOST and _fixed_length(backbone.config) is None
    if not (far or long):
        return backbone
    options = {**config.options, **dict.fromkeys(far, NEAR)}
    length = min(config.max_length or MOST, MOST)
    return HuggingFace(config.model_copy(update={"options": options, "max_length": length, "pretrained": False}))


def _tried(backbone: HuggingFace, config: Config) -> Found:
    """What the model does with a few random steps. Raises `Unsupported` where that is not what was asked for."""
    name, length = config.called, backbone.length
    whole = backbone.length
    if not backbone.fixed:
        backbone.length = length = min(length, backbone.grain + FEW)
    chance = torch.Generator().manual_seed(0)
    x, other = (torch.randn(2, length, config.d_model, generator=chance) for _ in range(2))
    unused = _unreached(backbone, x)
    backbone.eval()
    with torch.no_grad():
        before = _answers(backbone, x)
        if not before.shape == x.shape:
            raise ValueError(f"{name} answers {tuple(x.shape)} with {tuple(before.shape)}")
        if _apart(_answers(backbone, x), before) > TOLERANCE:
            raise Unsupported(f"{name} gives another answer every time, in evaluation too")
        if _apart(_answers(backbone, x[:1]), before[:1]) > TOLERANCE:
            raise Unsupported(f"{name} mixes the examples of a batch")
        _check_direction(backbone, config, x, other, before)
        fixed, padding = _padding(backbone, x, other)
        single = not _bears_half(backbone, x, before)
        dropped, frozen = _droppable(backbone, x, unused)
    if config.dropout:
        backbone.train()
        if torch.equal(_answers(backbone, x), _answers(backbone, x)):
            raise ValueError(f"dropout has no effect on {name}; set model.dropout=0")
    backbone.train().length = whole
    return Found(fixed, padding, single, dropped, frozen)


def _answers(backbone: HuggingFace, x: Tensor, valid: Bool[Tensor, "B L"] | None = None) -> Tensor:
    every = torch.ones(x.shape[:2], dtype=torch.bool)
    y: Tensor = backbone(x, Context(every if valid is None else valid, padded=valid is not None))
    return y


def _apart(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry; what is not finite is far apart."""
    found = float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))
    return found if math.isfinite(found) else math.inf


def _check_direction(backbone: HuggingFace, config: Config, x: Tensor, other: Tensor, before: Tensor) -> None:
    name, length = config.called, x.shape[1]
    cuts = {cut for cut in (1, length // 3, length // 2, 3 * length // 4) if 0 < cut < length}
    if not cuts:  # of one step no part is earlier
        return
    ahead = behind = 0.0
    for cut in cuts:
        later = _answers(backbone, torch.cat([x[:, :cut], other[:, cut:]], dim=1))
        earlier = _answers(backbone, torch.cat([other[:, :cut], x[:, cut:]], dim=1))
        ahead = max(ahead, _apart(later[:, :cut], before[:, :cut]))
        behind = max(behind, _apart(earlier[:, cut:], before[:, cut:]))
    if behind <= ROUNDING:
        raise Unsupported(f"{name} lets no step see another one")
    if config.causal and ahead > ROUNDING:
        raise Unsupported(f"{name} looks ahead; set model.causal=false")
    if config.causal and "lsh" in getattr(backbone.config, "attn_layers", ()):  # few steps are all in one chunk
        raise Unsupported(
            f"{name} looks ahead: where later steps fall decides what a step sees; set model.causal=false"
        )
    layers = {str(kind) for kind in getattr(backbone.config, "layer_types", None) or ()}
    if not config.causal and any(re.search("mamba|recurrent|conv|linear|hybrid", kind) for kind in layers):
        raise Unsupported(f"{name} has layers that only look back; set model.causal=true")
    if not config.causal and ahead <= ROUNDING:
        raise Unsupported(f"{name} only looks back; set model.causal=true")


def _padding(backbone: HuggingFace, x: Tensor, other: Tensor) -> tuple[bool, bool]:
    """Is the model to have fixed lengths, and does padding then leave its answers alone?"""
    length = x.shape[1]
    part = (length + 1) // 2
    if backbone.causal and not backbone.fixed:
        return False, True
    if part == length:
        return backbone.fixed, True
    valid = torch.arange(length).expand(len(x), -1) < part
    padded = torch.cat([x[:, :part], 100 * other[:, part:]], dim=1)
    structure = backbone.fixed
    for backbone.fixed in (structure,) if structure else (False, True):
        alone = _answers(backbone, x[:, :part])
        if _apart(_answers(backbone, padded, valid)[:, :part], alone) <= TOLERANCE:
            return backbone.fixed, True
    backbone.fixed = structure
    return structure, False


def _unreached(backbone: HuggingFace, x: Tensor) -> set[str]:
    """Parameters that no gradient ever reaches. Of a mixture of experts some are not reached by so few steps."""
    backbone.train()
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    with torch.enable_grad():
        (_answers(backbone, x) * weight).sum().backward()
    named = list(backbone.model.named_parameters())
    found = {name for name, parameter in named if parameter.grad is None and "expert" not in name}
    backbone.zero_grad(set_to_none=True)
    return found


def _bears_half(backbone: HuggingFace, x: Tensor, before: Tensor) -> bool:
    """With padding and without it; angles from a cosine a little above 1 are not met by every input."""
    some = torch.ones(x.shape[:2], dtype=torch.bool)
    some[:, x.shape[1] // 2 + 1 :] = False
    try:
        with torch.autocast("cpu", torch.bfloat16):
            rounded = _answers(backbone, x).float()
            padded = _answers(backbone, x, some)[some]
        return backbone.kind != "yoso" and _apart(rounded, before) < 0.2 and bool(padded.isfinite().all())
    except RuntimeError:  # numbers of two kinds in one operation, or too large for one
        return False


def _droppable(backbone: HuggingFace, x: Tensor, unused: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modules that hold such parameters alone, and single ones: those that the model does without, and the
    parameters of the others."""
    model: Any = backbone.model
    chosen: list[str] = []
    for name, module in model.named_modules():
        own = {f"{name}.{key}" for key, _ in module.named_parameters()} if name else set()
        if own and own <= unused and not any(name.startswith(f"{other}.") for other in chosen):
            chosen.append(name)
    chosen += [name for name in sorted(unused) if not any(name.startswith(f"{module}.") for module in chosen)]
    before = _answers(backbone, x)

    def works(names: list[str]) -> bool:
        back = _drop(model, names)
        try:
            return torch.equal(_answers(backbone, x), before)
        except Exception:  # whatever a model raises for want of a part
            return False
        finally:
            back()

    dropped = tuple(chosen if works(chosen) else [name for name in chosen if works([name])])
    return dropped, tuple(name for name in sorted(unused) if not f"{name}.".startswith(tuple(f"{d}." for d in dropped)))


def _check_positions(backbone: HuggingFace, config: Config) -> None:
    """A table of positions has a row for every step. (What has a fixed length cannot even be run with fewer.)"""
    if backbone.fixed and _fixed_length(backbone.config) is None:
        _check_reach(backbone.config.max_position_embeddings, backbone, config)
    steps = backbone.length if backbone.fixed else min(backbone.length, backbone.grain)
    seen: list[tuple[int, int]] = []

    def note(module: Any, args: Any) -> None:
        last = int(args[0].max()) if args and isinstance(args[0], Tensor) else steps - 1
        seen.append((module.num_embeddings, last))

    tables = [
        module.register_forward_pre_hook(note)
        for name, module in backbone.model.named_modules()
        if isinstance(module, nn.Embedding) and re.search("pos|wpe", name)
    ]
    if tables:
        with torch.no_grad():
            _answers(backbone, torch.zeros(1, steps, config.d_model))
    for handle in tables:
        handle.remove()
    for rows, last in seen:
        _check_reach(rows - (last - (steps - 1)), backbone, config)


def _check_reach(steps: int, backbone: HuggingFace, config: Config) -> None:
    if steps < backbone.length:
        raise ValueError(f"{config.called} has positions for {steps:,} steps, but max_length is {config.max_length:,}")


# ----------------------------------------------------------------------------------------------------- its operations


class Cost(NamedTuple):
    """Operations of a sequence: a + b L + c L² at L, rounded up to a multiple of `grain`."""

    grain: int
    a: Counts
    b: Counts
    c: Counts

    def __call__(self, length: int) -> Counts:
        whole = _whole(length, self.grain)
        return self.a + self.b * whole + self.c * whole**2


_COSTS: dict[str, Cost | None] = {}  # by what a model is
_COUNTS: dict[tuple[str, int], Counts] = {}  # where no such line fits, and for a few short lengths: by length too


def _cost(backbone: HuggingFace) -> Cost | None:
    for grain in () if backbone.fixed else dict.fromkeys(math.lcm(backbone.grain, grain) for grain in (1, 64, 256)):
        unit = grain * max(1, min(16 // grain, backbone.length // (5 * grain)))
        if 5 * unit > backbone.length:
            break
        x, y, z, w = (multiple * unit for multiple in (1, 2, 3, 5))
        at = {length: _counted(backbone, length) for length in (x, y, z, w)}
        first, second = (at[y] - at[x]) / (y - x), (at[z] - at[y]) / (z - y)
        c = (second - first) / (z - x)
        b = first - c * (x + y)
        cost = Cost(grain, at[x] - b * x - c * x**2, b, c)
        there = cost(w)
        if all(
            math.isclose(a, b, rel_tol=1e-6)
            for a, b in ((there.forward, at[w].forward), (there.backward, at[w].backward))
        ):
            return cost
    return None


class _Counter(TorchDispatchMode):
    """Operations by kind, as FlopCounterMode has them, but without its hooks in modules, which fail where a parameter
    is handed to one."""

    def __init__(self, batched: str) -> None:
        super().__init__()
        self.batched = batched  # the kind of products without weights
        self.found: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer, packet = func(*args, **kwargs), func._overloadpacket
        if packet is _ATEN.convolution_backward:
            self._add("convolution", _convolution_backward(*args))
        elif packet in flop_registry:
            self._add(_KINDS.get(packet, self.batched), flop_registry[packet](*args, **kwargs, out_val=answer))
        return answer

    def _add(self, kind: str, count: Number) -> None:
        self.found[kind] = self.found.get(kind, 0.0) + count


_ATEN = torch.ops.aten
_KINDS = {
    **dict.fromkeys((_ATEN.mm, _ATEN.addmm), "linear"),
    **dict.fromkeys((_ATEN.convolution, _ATEN._convolution), "convolution"),
}


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> float:
    """As much as forward for each gradient that is asked for. Torch's formula takes no account of groups, and has a
    depthwise convolution cost as many times too much as it has channels."""
    transposed, mask = rest[4], rest[7]
    each = (x if transposed else grad).numel() * weight[0].numel()
    return 2.0 * each * (mask[0] + mask[1])


def _counted(backbone: HuggingFace, length: int) -> Counts:
    """Operations on one sequence, on a tensor that has a shape and no values."""
    training, device, recompute = backbone.training, next(backbone.parameters()).device, backbone.recompute
    scans = any(hasattr(module, "A_log") for module in backbone.model.modules())
    forward, backward = (_Counter("scan" if scans else "attention") for _ in range(2))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if device.type != "meta":
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.callback(backbone.train, training)
        stack.callback(setattr, backbone, "recompute", recompute)
        backbone.train()  # some read values in evaluation
        backbone.recompute = False  # how a step is made does not change what it is counted as
        x = torch.empty(1, length, backbone.width, device=device, requires_grad=True)
        with forward:
            y = backbone(x, Context(torch.ones(1, length, dtype=torch.bool, device=device), padded=False))
        trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
        try:
            with backward, _Shapes():
                torch.autograd.grad(y, [x, *trained], torch.ones_like(y), allow_unused=True)
        except Exception:  # whatever a model's own backward pass raises for want of values
            backward.found = {kind: 2 * count for kind, count in forward.found.items()}
    return Counts.from_kinds(forward.found, backward.found) + _uncounted(backbone, length)


def _uncounted(backbone: HuggingFace, length: int) -> Counts:
    """Element by element: a selective scan (exp(ΔA), ΔB u and h' = Ā h + B̄ u: 6 E N a step; backward twice as much), a
    Fourier transform, whose backward pass is one more."""
    kept = [module.A_log for module in backbone.model.modules() if getattr(module, "A_log", None) is not None]
    scans = Counts.of("scan", sum((6.0 * length * A.numel() for A in kept if A.ndim == 2), 0.0))
    if backbone.kind != "fnet":
        return scans
    size = length * backbone.width
    transforms = backbone.config.num_hidden_layers * 5.0 * size * math.log2(max(2, size))
    return scans + Counts.of("convolution", transforms, transforms)
