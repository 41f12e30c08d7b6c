"""Options that models share, as pydantic models. Nothing here or imported from here needs torch."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Initialisation = Literal["structured", "random", "random_ssm"]
NormKind = Literal["layer", "rms", "batch", "batch_padded", "scalar", "scale", "none"]
FeedForwardKind = Literal["none", "mlp", "switch"]
Activation = Literal["gelu", "silu", "relu"]
Routing = Literal["token", "expert"]

MOST_LAYERS = 2048  # a thousand have been trained; a slip of the keyboard is refused before it takes hours to build
SWITCH_OPTIONS = {"n_experts", "routing", "noncausal_routing"}
SMOKE_SIZES = {  # in this order: what divides d_model comes before it
    **{"n_ssm": 4, "d_head": 8, "d_model": 32, "n_layers": 2, "d_ff": 64, "n_experts": 4, "d_state": 16},
    **{"kernel_dim": 8, "d_attention": 16, "d_hidden": 64, "window": 16, "chunk": 16, "max_kernel_length": 32},
}
BATCH_NORMS = ("batch", "batch_padded")
BATCH_NORM_OPTIONS = ("norm_momentum", "norm_unbiased")
FEED_FORWARD_OPTIONS = {"feed_forward", "d_ff", "ff_activation", "ff_dropout", *SWITCH_OPTIONS}


def rescaled(width: int, ratio: float) -> int:
    """A width times a ratio, as a whole number; an even one stays even."""
    unit = 1 if width % 2 else 2
    return max(unit, unit * round(width * ratio / unit))


class BackboneConfig(BaseModel):
    """Options that every model has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    inner_widths: ClassVar[tuple[str, ...]] = ("d_ff",)  # options that grow with d_model where models are made equal

    d_model: int = Field(128, ge=1, description="width D of the residual stream")
    n_layers: int = Field(4, ge=1, le=MOST_LAYERS, description="number of blocks; the model decides what a block holds")
    causal: bool = Field(False, description="step t sees only steps up to t, in both stages")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate on the output of every sub-layer")
    tie_dropout: bool = Field(False, description="one dropout mask for all steps of a sequence")
    norm: NormKind = Field(
        "layer",
        description="normalisation: layer, rms, batch (over the valid steps of all processes), batch_padded (over "
        "padding too, as in the published code of S4 and S5), scalar (layer norm with two trained numbers, as in the "
        "published DLR and DSS runs), scale (root-mean-square norm with one trained number), none",
    )
    norm_eps: float | None = Field(
        None, gt=0, description="epsilon added to the variance; default: the norm's usual value"
    )
    norm_momentum: float = Field(
        0.1, gt=0, le=1, description="batch norm: weight of the new batch in the running statistics"
    )
    norm_unbiased: bool = Field(
        True, description="batch norm: divide the running variance by n - 1 (torch), not n (flax)"
    )
    prenorm: bool = Field(True, description="x + layer(norm(x)); false: norm(x + layer(x))")
    last_norm: bool | None = Field(None, description="a norm after the last block; default: only with prenorm")
    feed_forward: FeedForwardKind = Field(
        "none", description="last sub-layer of every block: none, mlp, or switch (a mixture of mlps)"
    )
    d_ff: int | None = Field(None, ge=1, description="inner width of the feed-forward layer; default: 4 d_model")
    ff_activation: Activation = Field("gelu", description="activation of the feed-forward layer")
    ff_dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout rate inside the feed-forward layer, after its activation"
    )
    n_experts: int = Field(16, ge=1, description="switch: number of experts, each an mlp")
    routing: Routing = Field(
        "token",
        description="switch: each step goes to its best expert (token), or each expert takes its best steps of a "
        "sequence (expert; as in the DLR paper, not causal)",
    )
    noncausal_routing: bool = Field(
        False,
        description="allow routing: expert in a causal model, as in the DLR paper's language models; which steps an "
        "expert takes then depends on later steps, so the next-step loss is computed with knowledge of the future",
    )
    initialisation: Initialisation = Field(
        "structured",
        description="structured: as in the model's paper; random: every parameter of the network, including encoder "
        "and head, from N(0, 0.1²); random_ssm: only those of the state-space layers",
    )
    max_length: int | None = Field(None, ge=1, description="longest sequence, in steps; default: the task's")

    def smoke_sizes(self) -> dict[str, int]:
        """The sizes of a smoke run: each option's small value or, where other options forbid it, the next one that
        they allow. Options that are smaller already are kept, and so are those that your own model adds to ours."""
        ours = [base for base in type(self).__mro__ if base.__module__.startswith("spt.models.")]
        known = {name for base in ours if issubclass(base, BackboneConfig) for name in base.model_fields}
        return {name: size for name, size in SMOKE_SIZES.items() if name in known and getattr(self, name) is not None}

    def at_scale(self, option: Literal["d_model", "n_layers"], value: int) -> dict[str, int]:
        """The options that change with this one: with the width, the inner widths too, which keep their ratio to it.
        Even ones stay even, since half a head may be rotated. Raises ValueError if the model has only one size."""
        if option == "n_layers":
            return {option: value}
        inner = {name: width for name in self.inner_widths if (width := getattr(self, name)) is not None}
        return {option: value, **{name: rescaled(width, value / self.d_model) for name, width in inner.items()}}

    def refuse_changed(self, names: Iterable[str], why: str) -> None:
        """Refuse values of these options other than their defaults, since they would have no effect."""
        fields = type(self).model_fields
        for name in names:
            if getattr(self, name) != fields[name].default:
                raise ValueError(f"{name} has no effect {why}")

    @model_validator(mode="after")
    def _norm_options_have_effect(self) -> "BackboneConfig":
        if self.norm not in BATCH_NORMS:
            self.refuse_changed(BATCH_NORM_OPTIONS, f"with norm: {self.norm}; choose batch")
        if self.norm == "none":
            self.refuse_changed(("norm_eps",), "with norm: none; leave it out")
        return self

    @model_validator(mode="after")
    def _feed_forward_options_have_effect(self) -> "BackboneConfig":
        if self.feed_forward == "none":
            others = sorted(FEED_FORWARD_OPTIONS - {"feed_forward"})
            self.refuse_changed(others, "without a feed-forward layer; add feed_forward: mlp or switch")
        if self.feed_forward == "mlp":
            self.refuse_changed(sorted(SWITCH_OPTIONS), "with feed_forward: mlp; choose switch")
        if self.feed_forward == "switch" and self.n_experts == 1:
            raise ValueError("n_experts 1 leaves a router nothing to choose or learn; use feed_forward: mlp")
        if self.noncausal_routing and not (self.causal and self.routing == "expert"):
            raise ValueError("noncausal_routing has no effect unless the model is causal and routing is expert")
        return self


class LocalConfig(BackboneConfig):
    """Options of models whose layers can be limited to nearby steps."""

    mixings: ClassVar[int] = 1  # parts of a layer, one behind the other, that look across steps

    reach: int | None = Field(
        None,
        ge=1,
        description="largest distance in steps that any kernel or attention sees, to each side (only back, if causal); "
        "default: no limit",
    )

    def own_reach(self) -> int | None:
        """How far a layer can see without this option; None: over the whole sequence."""
        return None

    def seen(self) -> int | None:
        """How many steps to each side all layers together see at most; None: no limit is set."""
        return None if self.reach is None else self.n_layers * self.mixings * self.reach

    @model_validator(mode="after")
    def _reach_is_a_cut(self) -> "LocalConfig":
        own = self.own_reach()
        if self.reach is not None and own is not None and self.reach >= own:
            raise ValueError(f"reach {self.reach} cuts nothing, since a layer sees {own} steps as it is; leave it out")
        if self.reach is not None and self.feed_forward == "switch" and self.routing == "expert":
            raise ValueError("routing: expert chooses among all steps, whatever the reach; use routing: token")
        return self


class LongConvolutionConfig(LocalConfig):
    """Options of long convolutions whose kernels can be cut off."""

    max_kernel_length: int | None = Field(
        None, ge=1, description="longest kernel, in steps; default: as long as the sequence"
    )

    def own_reach(self) -> int | None:
        """The reverse kernel begins at the next step."""
        return None if self.max_kernel_length is None else self.max_kernel_length - self.causal


class ConjugatePairConfig(LongConvolutionConfig):
    """Options of continuous-time state spaces whose modes come in conjugate pairs: S4, S4D and the S4 in SPADE."""

    d_state: int = Field(64, ge=2, description="state size N; N/2 modes are stored, one of each conjugate pair")
    dt_min: float = Field(1e-3, gt=0, description="smallest initial step size dt; drawn log-uniformly")
    dt_max: float = Field(0.1, gt=0, description="largest initial step size dt")
    ssm_lr: float | None = Field(1e-3, gt=0, description="learning rate of dt, A, B and, in S4, P; null: the recipe's")
    dt_uses_ssm_lr: bool = Field(
        True, description="false: train dt at the recipe's learning rate, without weight decay"
    )
    c_lr: float | None = Field(
        None,
        gt=0,
        description="learning rate of C, which has weight decay; null: the recipe's (the S4 repository, given a single "
        "learning rate, uses it for C too)",
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> "ConjugatePairConfig":
        copies = getattr(self, "n_ssm", None)  # None: one for every feature
        if self.d_state % 2:
            raise ValueError(f"d_state {self.d_state} is odd, but modes come in conjugate pairs")
        if copies is not None and self.d_model % copies:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_ssm {copies}")
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min {self.dt_min} is larger than dt_max {self.dt_max}")
        return self


class S4Config(ConjugatePairConfig):
    """Options of the state space of S4, which SPADE shares."""

    n_ssm: int = Field(1, ge=1, description="number of independent copies of (A, P, B); must divide d_model")
    dt_transform: Literal["exp", "softplus"] = Field("exp", description="maps the trained number to dt")
