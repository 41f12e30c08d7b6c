"""DLR: a diagonal linear recurrent network, DSS without its step and scale.

Gupta, Mehta, Berant 2022, "Simplifying and understanding state space models with diagonal linear RNNs". With N complex
modes shared by all features and both directions (eqs. 2 and 4),

    x_t = lambda x_{t-1} + u_t,  y_t = cast <w, x_t>,      kappa[l] = sum_n W_n lambda_n^l,  K = cast kappa
    lambda_n = exp(-log_Lambda_re_n² + i log_Lambda_im_n)

where the cast is Re, Im, Re + Im, or Re Im (DLR-prod, whose kernel is that of a DLR with up to 4 N² modes, and which
has no recurrent form here). `real-prod` is Re for the first half of the features and Re Im for the others. There is no
factor of two.

The initial angles are evenly spaced on the circle, so that with little decay the modes are a Fourier basis and can
express any kernel of length N; |lambda| = exp(-decay / 2) with a log-uniform decay. The published code calls its range
dt_min to dt_max, 1e-4 to 0.1; the paper states 5e-4 to 0.5.

Letters: H features, K directions, N modes, B sequences.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, Counts, ParamGroup, new_parameter
from spt.models.longconv import DiagonalSystem, Kernel, LongConvolution
from spt.models.ops.discretise import log_uniform
from spt.models.ops.output import Kind
from spt.models.ops.vandermonde import complex_vandermonde, times_minus_i, vandermonde, vandermonde_flops
from spt.models.options import LongConvolutionConfig

Cast = Literal["real", "imag", "sum", "prod", "real-prod"]

PAPER = "Gupta, Mehta, Berant 2022"
COST = "L D (N + log L + D)"
PARAMETERS = 2_239_232


class Config(LongConvolutionConfig):
    d_state: int = Field(1024, ge=1, description="modes N; 4096 in the paper's synthetic tasks")
    cast: Cast = Field("real", description="how the complex kernel becomes a real one; prod is DLR-prod")
    version: Literal["complex", "imag", "imag_W_real", "real_W_real"] = Field(
        "complex", description="imag: |lambda| = 1; W_real: real weights; real_W_real is the paper's DLR-R"
    )
    decay_min: float = Field(1e-4, ge=0, description="smallest initial decay per step; drawn log-uniformly")
    decay_max: float = Field(
        0.1, ge=0, description="largest initial decay per step; not a step size, though published as dt_max"
    )
    angle_init: Literal["omega", "randn"] = Field("omega", description="initial angles: evenly spaced, or from N(0, 1)")
    W_scale: float | None = Field(
        None, gt=0, description="initial standard deviation of the weights' real and imaginary parts; default: 1/N"
    )
    output: Kind = Field(
        "glu",
        description="what follows the convolution and its GELU; in the paper: linear in synthetic tasks, identity "
        "(without the GELU too) in language models",
    )
    ssm_lr: float | None = Field(1e-4, gt=0, description="learning rate of lambda and W; null: the recipe's")
    decay_uses_ssm_lr: bool = Field(
        True, description="false: train log_Lambda_re at the recipe's learning rate, as in the published code"
    )

    mask_padding: bool = Field(
        True, description="false: layers see the stream's values on padding instead of zeros, as in the published code"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.decay_min > self.decay_max:
            raise ValueError(f"decay_min {self.decay_min} is larger than decay_max {self.decay_max}")
        if self.decay_min == 0 and not self.version.startswith("imag"):
            raise ValueError("a decay of 0 cannot be trained, but decay_min is 0; use version imag, or 1e-5")
        if self.version == "real_W_real" and self.cast != "real":
            raise ValueError(f"version real_W_real has no imaginary part, but cast is {self.cast}; set cast: real")
        return self


class DLRKernel(Kernel):
    """Parameters: W (K, H, N, 2), or (K, H, N) if real; log_Lambda_re, the square root of half the decay, and
    log_Lambda_im, both (N,), unless the version fixes that part."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        H, K, N = config.d_model, 1 if config.causal else 2, config.d_state
        self.cast, self.limit = config.cast, config.max_kernel_length
        self.recurrent = config.cast in ("real", "imag", "sum")
        pair = () if config.version.endswith("W_real") else (2,)
        self.W = nn.Parameter(torch.randn(K, H, N, *pair) * (config.W_scale or 1 / N))
        self.register_parameter("log_Lambda_re", None)
        self.register_parameter("log_Lambda_im", None)
        if not config.version.startswith("imag"):
            decay = log_uniform(max(config.decay_min, 1e-300), max(config.decay_max, 1e-300), N)
            self.log_Lambda_re = new_parameter(torch.sqrt(decay / 2))
        if config.version != "real_W_real":
            omega = torch.arange(N, dtype=torch.float64) * (2 * math.pi / N)
            angle = omega if config.angle_init == "omega" else torch.randn(N, dtype=torch.float64) % (2 * math.pi)
            self.log_Lambda_im = new_parameter(angle)
        names = [name for name, _ in self.named_parameters()]
        self.param_groups = dict.fromkeys(names, ParamGroup(lr=config.ssm_lr, weight_decay=False))
        if "log_Lambda_re" in names and not config.decay_uses_ssm_lr:
            self.param_groups["log_Lambda_re"] = ParamGroup(weight_decay=False)

    def forward(self, length: int) -> Float[Tensor, "K H M"]:
        length = min(length, self.limit or length)
        if self.recurrent:
            return vandermonde(self._weights(), *self._log_lambda(), length)
        real, imag = complex_vandermonde(self._weights(), *self._log_lambda(), length)
        first = 0 if self.cast == "prod" else real.shape[1] // 2  # the first feature that is a product
        return torch.cat([real[:, :first], (real * imag)[:, first:]], dim=1)

    def _weights(self) -> Float[Tensor, "K H N 2"]:
        """As pairs, times the number that makes the cast Re; for casts that are not linear, those of kappa."""
        W = self.W if self.W.dim() == 4 else torch.stack([self.W, torch.zeros_like(self.W)], dim=-1)
        if self.cast == "imag":
            return times_minus_i(W)
        return W + times_minus_i(W) if self.cast == "sum" else W

    def _log_lambda(self) -> tuple[Float[Tensor, "*G N"], Float[Tensor, "*G N"]]:
        """Real and imaginary part, in float64."""
        root: Tensor | None = self.log_Lambda_re
        angle: Tensor | None = self.log_Lambda_im
        known = next((values for values in (root, angle) if values is not None), self.W[0, 0])
        zero = torch.zeros_like(known, dtype=torch.float64)
        return (zero if root is None else -(root.double() ** 2)), (zero if angle is None else angle.double())

    def joined(self, kernels: Sequence[Kernel]) -> dict[str, Tensor] | None:
        if not self.recurrent:
            return None  # their features are paired up
        return {
            name: (torch.cat if name == "W" else torch.stack)([kernel.get_parameter(name) for kernel in kernels], dim)
            for name, dim in ((name, int(name == "W")) for name, _ in self.named_parameters())
        }

    def flops(self, length: int) -> Counts:
        K, H, N = self.W.shape[:3]
        rows = 2 * H if self.cast in ("prod", "real-prod") else H
        return vandermonde_flops((K, rows, N), min(length, self.limit or length), shared=True)

    def system(self) -> DiagonalSystem:
        A = torch.exp(torch.complex(*self._log_lambda())).to(self.W.dtype.to_complex())
        return DiagonalSystem(A, torch.ones_like(A), torch.view_as_complex(self._weights()[0].contiguous()))


def build(config: Config) -> Backbone:
    return Backbone(
        config,
        lambda: [LongConvolution(config, DLRKernel(config), output=config.output)],
        mask_padding=config.mask_padding,
        decay_all=True,
    )
