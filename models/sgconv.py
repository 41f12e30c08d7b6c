"""SGConv: long convolutions with an explicit kernel, finely resolved near the present, coarse and weak far from it.

Li, Cai, Zhang, Chen, Dey 2022, "What makes convolutional models great on long sequence modeling?" A kernel is the
concatenation of S pieces of d weights, the i-th stretched to d 2^max(0, i-1) positions by linear interpolation and
multiplied by a factor. It is divided by its norm at initialisation, Z:

    y = k * u + D u,   k = [a_0 w_0, a_1 stretched(w_1), …, a_{S-1} stretched(w_{S-1})] / Z

    gconv  the authors' variant: weights from N(0, 1), a_i = m^(S-1-i) with a fixed m per feature
    dlr    the DLR repository's: weights from N(0, 1/d²), a_i = alpha^i with a trained alpha per feature and direction

The norm is a buffer that is saved with the weights. Letters: H features, K directions, S pieces, d weights of a piece.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, Counts, ParamGroup
from spt.models.longconv import Kernel, LongConvolution
from spt.models.ops.output import Kind
from spt.models.options import LocalConfig

PAPER = "Li et al. 2022"
COST = "L D (log L + D)"
PARAMETERS = 395_520


class Config(LocalConfig):
    variant: Literal["gconv", "dlr"] = Field(
        "gconv", description="the authors' kernel (gconv), or the DLR repository's (dlr)"
    )
    kernel_dim: int = Field(64, ge=1, description="number of weights d per piece")
    factor_min: float = Field(
        2.0, gt=0, description="gconv: factor by which each piece is smaller than the one before, for the first feature"
    )
    factor_max: float = Field(2.0, gt=0, description="gconv: the same factor for the last feature; linear in between")
    alpha_min: float = Field(1.0, ge=0, description="dlr: smallest initial alpha; drawn uniformly (published: 1)")
    alpha_max: float = Field(1.0, ge=0, description="dlr: largest initial alpha")
    output: Kind = Field("linear", description="what follows the convolution and its GELU")
    ssm_lr: float | None = Field(1e-3, gt=0, description="learning rate of the kernel's weights; null: the recipe's")

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.alpha_min > self.alpha_max:
            raise ValueError(f"alpha_min {self.alpha_min} is larger than alpha_max {self.alpha_max}")
        if self.variant == "gconv":
            self.refuse_changed(("alpha_min", "alpha_max"), "with variant gconv; choose dlr")
        else:
            self.refuse_changed(("factor_min", "factor_max"), "with variant dlr; choose gconv")
        return self


class SGConvKernel(Kernel):
    """Parameters: pieces (S, K, H, d), and alpha (K, H) for dlr; buffer norm (K, H, 1)."""

    alpha: nn.Parameter | None
    norm: Tensor
    factor: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.max_length is not None, "filled in from the task"
        H, K, d = config.d_model, 1 if config.causal else 2, config.kernel_dim
        self.longest = config.max_length
        trained = config.variant == "dlr"
        # As long as the input (DLR, A.6); that repository's own formula has one piece less for L / d in (2^k, 2^k + 1].
        S = 1 + max(0, math.ceil(math.log2(self.longest / d)))
        self.limit = min(self.longest, d * 2 ** (S - 1))
        self.pieces = nn.Parameter(torch.randn(S, K, H, d) / (d if trained else 1))
        self.param_groups = {"pieces": ParamGroup(lr=config.ssm_lr, weight_decay=True)}
        self.register_parameter("alpha", None)
        if trained:
            self.alpha = nn.Parameter(torch.empty(K, H).uniform_(config.alpha_min, config.alpha_max))
            self.param_groups["alpha"] = ParamGroup(lr=config.ssm_lr, weight_decay=False)
        else:
            factor = torch.linspace(config.factor_min, config.factor_max, H, dtype=torch.float64)
            self.register_buffer("factor", factor[:, None].to(self.pieces.dtype), persistent=False)
        self.register_buffer("norm", torch.ones(K, H, 1))
        self.after_initialisation()

    @torch.no_grad()
    def after_initialisation(self) -> None:
        """Measure the norm of the initial kernel; training does not change it."""
        self.norm.copy_(self._stretched(self.pieces, self.alpha).norm(dim=-1, keepdim=True))

    def for_longer(self, trained: Kernel) -> None:
        assert isinstance(trained, SGConvKernel)
        self.longest, self.limit = trained.longest, trained.limit  # what lies beyond was never trained

    def forward(self, length: int) -> Float[Tensor, "K H M"]:
        return self._stretched(self.pieces, self.alpha)[..., : min(length, self.longest)] / self.norm

    def _stretched(
        self, pieces: Float[Tensor, "S K H d"], alpha: Float[Tensor, "K H"] | None
    ) -> Float[Tensor, "K H M"]:
        """All pieces, d 2^(S-1) positions, which may be more than the longest sequence has."""
        last = len(pieces) - 1
        parts = []
        for i, piece in enumerate(pieces):
            stretched = F.interpolate(piece, scale_factor=float(2 ** max(0, i - 1)), mode="linear")
            factor = self.factor ** (last - i) if alpha is None else alpha[..., None] ** i
            parts.append(stretched * factor)
        return torch.cat(parts, dim=-1)

    def flops(self, length: int) -> Counts:
        """Interpolation (3), factor and norm: five per position. Backward: norm, factor, two multiply-adds for the
        neighbours, and one for a trained factor."""
        S, K, H, d = self.pieces.shape
        positions = K * H * d * 2 ** (S - 1)
        return Counts.of("kernel", 5.0 * positions, (6.0 if self.alpha is None else 8.0) * positions)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [LongConvolution(config, SGConvKernel(config), output=config.output)])
