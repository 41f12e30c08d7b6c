"""The options of a Hugging Face model, and the configuration of transformers that they describe."""

import difflib
import inspect
import re
from pathlib import Path
from typing import Any, Literal

import transformers
from pydantic import Field, model_validator
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from spt.models.base import BackboneConfig
from spt.models.hf import sizes
from spt.models.hf.sizes import INNER_WIDTHS, REFUSED, RESERVED, TRAINING, Settings, round_up
from spt.models.options import rescaled

HUB_NAME = re.compile(r"([\w.-]+/)?[\w.-]+")
PROVISIONAL_LENGTH = 1024  # stands for the longest sequence while a recipe is read
NOT_OF_EMBEDDINGS = "does not take one sequence of embeddings; choose a model of text"

# Of the options of all models, those that mean something here.
SUPPORTED = {"d_model", "n_layers", "causal", "dropout", "initialisation", "max_length"}


class Config(BackboneConfig):
    architecture: str | None = Field(
        None, description="type of a transformers model with random weights: llama (default), bert, mamba2, …"
    )
    checkpoint: str | Path | None = Field(
        None,
        description="instead: a model on the Hugging Face hub (owner/name), or a folder (starting with ./, / or ~)",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a model on the hub; default: main")
    pretrained: bool = Field(
        False,
        description="use the checkpoint's weights (default with a checkpoint); false: its sizes, but random weights",
    )
    bidirectional: bool = Field(
        False,
        description="make a model that only looks back two-sided: a second copy, with its own parameters, runs over "
        "the reversed sequence, and the outputs are added",
    )
    options: dict[str, Any] = Field(
        {}, description="the architecture's own settings, as in its config.json, e.g. {num_attention_heads: 8}"
    )

    def smoke_sizes(self) -> dict[str, int]:
        """A checkpoint's sizes are fixed. Four layers, since architectures alternate up to four kinds of them."""
        return {"d_model": 64, "n_layers": 4} if self.checkpoint is None else {}

    def at_scale(self, option: Literal["d_model", "n_layers"], value: int) -> dict[str, int]:
        if self.checkpoint is not None:
            raise ValueError(f"{self.label} has one size")
        given = self.options.items() if option == "d_model" else ()
        inner = {f"options.{name}": width for name, width in given if name in INNER_WIDTHS and type(width) is int}
        return {option: value, **{place: rescaled(width, value / self.d_model) for place, width in inner.items()}}

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
            raise ValueError("the model is either an architecture or a checkpoint; give one of them")
        unsupported = sorted(BackboneConfig.model_fields.keys() - SUPPORTED)
        self.refuse_changed(unsupported, "on a model of transformers; put its settings under options")
        if self.initialisation == "random_ssm":
            raise ValueError("initialisation random_ssm is not for models of transformers; use random")
        if self.initialisation == "random" and self.pretrained:
            raise ValueError("initialisation random would overwrite the pretrained weights; set pretrained: false")
        if self.checkpoint is None and (self.pretrained or self.revision is not None):
            raise ValueError(f"{'pretrained' if self.pretrained else 'revision'} has no effect without a checkpoint")
        if self.revision is not None and self.is_folder:
            raise ValueError("revision has no effect on a folder; it is for models on the hub")
        if not (self.checkpoint is None or self.is_folder or HUB_NAME.fullmatch(str(self.checkpoint))):
            raise ValueError(
                f"{self.checkpoint} is neither a model on the hub (owner/name) nor a folder (begins with ./, / or ~)"
            )
        if self.bidirectional and self.causal:
            raise ValueError("bidirectional makes a causal model two-sided; leave it out or set causal: false")
        if self.architecture is not None:
            # For its error messages: wrong options are reported while a recipe is read.
            transformers_config(self.one_way, self.architecture, self.max_length or PROVISIONAL_LENGTH)
        return self

    @property
    def one_way(self) -> "Config":
        """The options of a single model: with `bidirectional`, those of each of the two copies."""
        return self.model_copy(update={"causal": True, "bidirectional": False}) if self.bidirectional else self

    @property
    def label(self) -> str:
        """The model, in messages."""
        return f"architecture {self.architecture}" if self.checkpoint is None else f"the checkpoint {self.checkpoint}"

    @property
    def is_folder(self) -> bool:
        return str(self.checkpoint).startswith((".", "/", "~"))


def transformers_config(config: Config, model_type: str, length: int, stored: Settings | None = None) -> Any:
    """The configuration of transformers, from our options or from a checkpoint's config.json. Raises ValueError."""
    if model_type not in CONFIG_MAPPING or model_type not in MODEL_MAPPING_NAMES:
        version = f" {transformers.__version__} (code from the hub is not run)"
        hint = _did_you_mean(model_type, MODEL_MAPPING_NAMES) or version
        raise ValueError(f"{model_type!r} is no architecture of transformers{hint}")
    if model_type in REFUSED:
        raise ValueError(f"{config.label} cannot be used: {REFUSED[model_type]}")
    config_class: Any = CONFIG_MAPPING[model_type]
    names, aliases = setting_names(config_class), config_class.attribute_map
    standard = {own: common for common, own in aliases.items() if common in RESERVED}
    for key in config.options:
        reserved = standard.get(key, key)
        if reserved in RESERVED:
            raise ValueError(f"options.{key} is not set here: {RESERVED[reserved]}")
        if key not in names and key not in aliases:
            raise ValueError(f"options: {model_type} has no {key}{_did_you_mean(key, names)}")

    settings = {} if stored else sizes.small_sizes(model_type, config.d_model, config.n_layers, config.options)
    if not config.pretrained:
        settings |= {"vocab_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name in names:
        if re.search(r"dropout|pdrop$|layerdrop$", name) and not name.startswith(("classifier", "summary", "pooler")):
            settings[name] = 0.0 if name.endswith("layerdrop") else config.dropout  # not of output heads
    settings |= {"use_cache": False, "is_decoder": config.causal, **TRAINING.get(model_type, {}), **config.options}
    settings = {aliases.get(key, key): value for key, value in settings.items() if aliases.get(key, key) in names}
    try:
        made = config_class.from_dict({**(stored or {}), **settings, "is_causal": config.causal})
        _set_lengths(made, config, length, stored is not None)
    except Exception as error:  # its own validation raises many types
        raise ValueError(f"{config.label}: {last_line(error)}") from error
    if made.is_encoder_decoder:
        raise ValueError(f"{config.label} is an encoder-decoder model; choose an encoder or a decoder")
    if getattr(made, "quantization_config", None):
        raise ValueError(f"{config.label} has quantised weights, which cannot be trained")
    width, depth = getattr(made, "hidden_size", None), getattr(made, "num_hidden_layers", None)
    if width is None or depth is None:
        raise ValueError(f"{config.label} {NOT_OF_EMBEDDINGS}")
    if (width, depth) != (config.d_model, config.n_layers):
        raise ValueError(f"{config.label} has another size; set model.d_model={width} and model.n_layers={depth}")
    return made


def _set_lengths(made: Any, config: Config, length: int, stored: bool) -> None:
    """Set, in place, what depends on the longest sequence."""
    if made.model_type == "longformer" and not stored and "attention_window" not in config.options:
        made.attention_window = min(512, round_up(length, 2))
    elif made.model_type == "nystromformer":
        made.segment_means_seq_len = round_up(length, made.num_landmarks)
    elif made.model_type == "xlstm":
        made.max_inference_chunksize = round_up(length, made.chunk_size)
    elif made.model_type == "big_bird" and made.attention_type == "block_sparse":
        least = (5 + 2 * made.num_random_blocks) * made.block_size
        if config.causal or round_up(length, made.block_size) <= least:
            if config.options.get("attention_type"):
                why = "is two-sided" if config.causal else f"needs more than {least:,} steps (see block_size)"
                raise ValueError(f"attention_type block_sparse {why}; use original_full")
            made.attention_type = "original_full"
    if not config.pretrained:
        rows = round_up(length, sizes.length_multiple(made)) + (made.model_type in sizes.POSITIONS_AFTER_PADDING)
        for name in {"max_position_embeddings", "max_seq_len"} & {*setting_names(type(made)), *made.attribute_map}:
            setattr(made, name, rows)


def check_size(backbone: Any, config: Config) -> None:
    """Raises ValueError for an architecture whose own sizes do not follow from the recipe's, so that it has far more
    parameters, tables of embeddings aside, than anything of that width and depth. A checkpoint is as large as it is."""
    if config.checkpoint is not None:
        return
    d, n = config.d_model, config.n_layers
    tables = {id(module.weight) for module in backbone.modules() if isinstance(module, nn.Embedding)}
    count = sum(parameter.numel() for parameter in backbone.parameters() if id(parameter) not in tables)
    times = count / sizes.plain_parameters(d, n, config.options)
    if times > sizes.IMPLAUSIBLE:
        names = setting_names(type(backbone.config)) - config.options.keys()
        large = sizes.large_settings(backbone.config, d, names)[:4]
        such_as = f", such as {', '.join(large)}" if large else ""
        raise ValueError(
            f"{config.label} would have {count:,} parameters with d_model {d} and {n} layers, {times:,.0f} times as "
            f"many as a plain model; give its own sizes under model.options{such_as}"
        )


def setting_names(config_class: Any) -> frozenset[str]:
    """The settings of an architecture, by its own names."""
    return frozenset(inspect.signature(config_class).parameters) - {"kwargs", "args", "self"}


def _did_you_mean(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, sorted(names), 1)
    return f"; did you mean {close[0]}?" if close else ""


def last_line(error: BaseException) -> str:
    """The last line of an error's message, which says what is wrong; transformers puts the place above it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"^(Value|Type)Error: |\.$", "", lines[-1] if lines else type(error).__name__)
    return text if len(text) < 300 else f"{text[:300]} …"
