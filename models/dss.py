"""DSS: diagonal state spaces without conjugate pairs, input vectors or an explicit discretisation of B.

Gupta, Gu, Berant 2022, "Diagonal state spaces are as effective as structured state spaces". N modes Lambda, shared by
all features and both directions, a step size Delta_h per feature and weights W:

    exp           K[l] = Re sum_n W_n (e^z - 1) / Lambda_n e^(l z),  z = Delta_h Lambda_n        (DSS-EXP)
    exp-re-im     the same, with Im Lambda an exponential and so positive
    exp-no-scale  K[l] = Re sum_n W_n e^(l z)
    softmax       exp, divided by the sum of e^(l z) over a whole length                         (DSS-SOFTMAX)

There is no factor of two. A softmax kernel depends on the length it is normalised over: here `softmax_length`, by
default the longest sequence, so that padding never changes an output; positions beyond it have weight zero. The modes
of a softmax kernel may also grow, and it has no recurrent form here.

Letters: H features, K directions, N modes.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Complex128, Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, Counts, ParamGroup
from spt.models.longconv import DiagonalSystem, Kernel, LongConvolution
from spt.models.ops.discretise import as_complex, expm1, softmax_scale
from spt.models.ops.hippo import normal_part
from spt.models.ops.output import Kind
from spt.models.ops.vandermonde import softmax_vandermonde, vandermonde, vandermonde_flops
from spt.models.options import LongConvolutionConfig

PAPER = "Gupta, Gu, Berant 2022"
COST = "L D (N + log L + D)"
PARAMETERS = 199_936


class Config(LongConvolutionConfig):
    d_state: int = Field(64, ge=1, description="modes N")
    version: Literal["exp", "exp-re-im", "exp-no-scale", "softmax"] = Field("exp", description="form of the kernel")
    Lambda_init: Literal["hippo", "lin", "randn"] = Field(
        "hippo",
        description="initial Lambda, -1/2 + i w: w are the positive frequencies of HiPPO-LegS of size 2N (hippo), pi n "
        "(lin), or from N(0, 1) (randn)",
    )
    dt_min: float = Field(1e-3, gt=0, description="smallest initial step size Delta; drawn log-uniformly")
    dt_max: float = Field(0.1, gt=0, description="largest initial step size Delta")
    softmax_length: int | None = Field(
        None, ge=1, description="length the softmax is taken over; default: the longest kernel"
    )
    output: Kind = Field(
        "linear", description="what follows the convolution and its GELU; glu in larger published runs"
    )
    ssm_lr: float | None = Field(1e-3, gt=0, description="learning rate of Delta, Lambda and W; null: the recipe's")

    Lambda_lr: float | None = Field(
        None, gt=0, description="learning rate of Lambda alone; null: ssm_lr (1e-4 for the DLR paper's longest images)"
    )

    def own_reach(self) -> int | None:
        """A kernel ends where its softmax does."""
        ends = [length for length in (self.max_kernel_length, self.softmax_length) if length is not None]
        return min(ends) - self.causal if ends else None

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min {self.dt_min} is larger than dt_max {self.dt_max}")
        if self.version == "exp-re-im" and self.Lambda_init == "randn":
            raise ValueError("version exp-re-im needs positive frequencies, but Lambda_init randn draws negative ones")
        if self.version == "exp-re-im" and self.Lambda_init == "lin":
            raise ValueError("version exp-re-im needs positive frequencies, but Lambda_init lin begins at zero")
        if self.version != "softmax" and self.softmax_length is not None:
            raise ValueError(f"softmax_length is for version softmax, not {self.version}")
        return self


class DSSKernel(Kernel):
    """Parameters, named as in the DLR repository's `DSSKernel`: log_dt (H,), W (K, H, N, 2), and Lambda_log_neg_re, the
    logarithm of -Re Lambda, with Lambda_im or Lambda_log_im, all (N,); for softmax Lambda (N, 2)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.max_length is not None, "filled in from the task"
        H, K, N = config.d_model, 1 if config.causal else 2, config.d_state
        self.version = config.version
        self.limit = config.max_kernel_length
        longest = min(config.max_length, self.limit or config.max_length)
        self.normalised = config.softmax_length or longest
        if config.version == "softmax":
            self.limit = min(self.normalised, self.limit or self.normalised)
        self.recurrent = config.version != "softmax"
        self.continuous = config.version in ("exp", "exp-re-im")  # weights that carry a step size
        self.log_dt = nn.Parameter(torch.empty(H).uniform_(math.log(config.dt_min), math.log(config.dt_max)))
        imag = _frequencies(config.Lambda_init, N).to(self.log_dt.dtype)
        real = torch.full_like(imag, -0.5)
        self.W = nn.Parameter(torch.randn(K, H, N, 2))
        if config.version == "softmax":
            self.Lambda = nn.Parameter(torch.stack([real, imag], dim=-1))
        else:
            self.Lambda_log_neg_re = nn.Parameter(torch.log(-real))
            if config.version == "exp-re-im":
                self.Lambda_log_im = nn.Parameter(imag.log())
            else:
                self.Lambda_im = nn.Parameter(imag)
        rates = {name: config.Lambda_lr if name.startswith("Lambda") else None for name, _ in self.named_parameters()}
        self.param_groups = {
            name: ParamGroup(lr=rate or config.ssm_lr, weight_decay=False) for name, rate in rates.items()
        }

    def for_longer(self, trained: Kernel) -> None:
        assert isinstance(trained, DSSKernel)
        if self.version == "softmax":
            self.normalised, self.limit = trained.normalised, trained.limit

    def forward(self, length: int) -> Float[Tensor, "K H M"]:
        length = self.resampled_length(length)
        W, z = self._discrete()
        if self.version == "softmax":
            return softmax_vandermonde(W, z, self.normalised, length, self.W.dtype)
        return vandermonde(torch.view_as_real(W).to(self.W.dtype), z.real, z.imag, length)

    def _discrete(self) -> tuple[Complex128[Tensor, "K H N"], Complex128[Tensor, "H N"]]:
        """The weights with their scale, and z."""
        if self.version == "softmax":
            Lambda = as_complex(self.Lambda)
        else:
            log_imag = self.version == "exp-re-im"
            imag = self.Lambda_log_im.double().exp() if log_imag else self.Lambda_im.double()
            Lambda = torch.complex(-self.Lambda_log_neg_re.double().exp(), imag)
        W, z = as_complex(self.W), self.rate * self.log_dt.double().exp()[:, None] * Lambda
        if self.version == "softmax":
            W = W * softmax_scale(Lambda, z, self.normalised)
        elif self.version != "exp-no-scale":
            size = (Lambda.real**2 + Lambda.imag**2).clamp_min(1e-7)
            W = W * expm1(z) * (Lambda.conj() / size)
        return W, z

    def joined(self, kernels: Sequence[Kernel]) -> dict[str, Tensor]:
        features = self.W.shape[1]

        def of_features(name: str, values: Tensor) -> Tensor:
            return values.expand(features, *values.shape) if name.startswith("Lambda") else values

        return {
            name: torch.cat([of_features(name, kernel.get_parameter(name)) for kernel in kernels], int(name == "W"))
            for name, _ in self.named_parameters()
        }

    def flops(self, length: int) -> Counts:
        K, H, N, _ = self.W.shape
        return vandermonde_flops((K, H, N), self.resampled_length(length), shared=False)

    def system(self) -> DiagonalSystem:
        W, z = self._discrete()
        A, C = (x.to(self.W.dtype.to_complex()) for x in (z.exp(), W[0]))
        return DiagonalSystem(A, torch.ones_like(A), C)


def _frequencies(init: str, N: int) -> Tensor:
    if init == "hippo":
        return -normal_part(2 * N)[0].imag[:N]
    n = torch.arange(N, dtype=torch.float64)
    return math.pi * n if init == "lin" else torch.randn(N, dtype=torch.float64)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [LongConvolution(config, DSSKernel(config), output=config.output)], decay_all=True)
