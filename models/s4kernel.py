"""S4's kernel: the response of a HiPPO-LegS state space, diagonal plus low rank.

Gu, Goel, Ré 2022, "Efficiently modeling long sequences with structured state spaces". Per feature

    x' = (A - P P*) x + B u,  y = 2 Re(C x) + D u,      K[l] = 2 Re sum_n C_n (Abar^l Bbar)_n

with N/2 stored modes n, one of each conjugate pair, the bilinear rule and a step dt. Both directions of a two-sided
layer share all but C. Letters: H features, M = N/2 modes, K directions, S copies of (A, P, B) that the features take in
turn (feature h the copy h mod S), C~ = C (1 - Abar^L).

We train C. The published code trains C~ of the length L that it has seen first, and knows that length as `l_kernel`;
`import_reference` and `export_reference` convert.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Complex, Complex128, Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import BackboneConfig, Counts, Rate
from spt.models.longconv import Kernel
from spt.models.ops.discretise import as_complex, parameter_for, positive
from spt.models.ops.dplr import System, discretise, dplr_flops, dplr_kernel, dplr_step, truncated, untruncated
from spt.models.ops.hippo import nplr


class PairedOptions(BackboneConfig):
    """Of state spaces in continuous time whose modes come in conjugate pairs: S4 and S4D."""

    d_state: int = Field(64, ge=2, description="state size N; N/2 modes are kept, one of each conjugate pair")
    dt_min: float = Field(1e-3, gt=0, description="steps are drawn from a log-uniform distribution, from here")
    dt_max: float = Field(0.1, gt=0, description="to here")
    max_kernel_length: int | None = Field(None, ge=1, description="longest kernel, in steps; by default the sequence's")
    slow_dt: bool = Field(True, description="false: the steps dt at the recipe's learning rate, without decay")
    c_lr: float | None = Field(
        None,
        gt=0,
        description="learning rate of C, which decays; null: the recipe's (the S4 repository, told one number, gives "
        "it to C too)",
    )

    @model_validator(mode="after")
    def _consistent_state_space(self) -> "PairedOptions":
        copies = getattr(self, "n_ssm", None)  # None: one for every feature
        if self.d_state % 2:
            raise ValueError(f"d_state {self.d_state} is odd, but modes come in conjugate pairs")
        if copies is not None and self.d_model % copies:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_ssm {copies}")
        if self.dt_min > self.dt_max:
            raise ValueError(f"dt_min {self.dt_min} is larger than dt_max {self.dt_max}")
        return self


class S4Options(PairedOptions):
    n_ssm: int = Field(1, ge=1, description="independent (A, P, B); divides d_model")
    dt_transform: Literal["exp", "softplus"] = Field("exp", description="from the trained number to the step")
    ssm_lr: float | None = Field(1e-3, gt=0, description="learning rate of dt, A, P and B; null: the recipe's")


class S4Kernel(Kernel):
    """Parameters: inv_dt (H, 1); A_real, A_imag (S, M); P, B (S, M, 2); C (K, H, M, 2). A = -exp(A_real) - i A_imag.

    All copies start from HiPPO-LegS, the imaginary part of B cut off at 2 as in the S4 repository, and C from CN(0, 1).
    """

    recurrent = True
    continuous = True

    def __init__(self, config: S4Options) -> None:
        super().__init__()
        self.config = config
        self.limit = config.max_kernel_length
        H, K, S = config.d_model, 1 if config.causal else 2, config.n_ssm
        legs = nplr(config.d_state)
        dt = torch.empty(H, 1, dtype=torch.float64)
        dt.uniform_(math.log(config.dt_min), math.log(config.dt_max)).exp_()
        C = torch.randn(K, H, config.d_state // 2, dtype=torch.complex64)  # E|C|² = 1
        self.inv_dt = _parameter(parameter_for(dt, config.dt_transform))
        self.A_real = _parameter((-legs.w.real).log().repeat(S, 1))
        self.A_imag = _parameter((-legs.w.imag).repeat(S, 1))
        self.P = _parameter(torch.view_as_real(legs.P).repeat(S, 1, 1))
        self.B = _parameter(torch.view_as_real(legs.B).repeat(S, 1, 1))
        self.C = _parameter(torch.view_as_real(C))
        slow = Rate(lr=config.ssm_lr, decay=False)
        self.rates = {
            "inv_dt": slow if config.slow_dt else Rate(decay=False),
            "A_real": slow,
            "A_imag": slow,
            "P": slow,
            "B": slow,
            "C": Rate(lr=config.c_lr, decay=True),
        }

    def forward(self, length: int, rate: float = 1.0) -> Float[Tensor, "K H M"]:
        """`rate`: as if the signal were sampled that many times more coarsely, dt times `rate` (S4, section 3.1)."""
        rate *= self.rate
        limit = length if self.limit is None else round(self.limit / rate)
        return dplr_kernel(*self._modes(self._own(), rate), min(length, limit), self.C.dtype)

    def flops(self, length: int) -> Counts:
        K, H, M, _ = self.C.shape
        return dplr_flops(K, H, M, min(length, self.limit or length))

    def system(self) -> System:
        kind = self.C.dtype.to_complex()
        return System(*(x.to(kind) for x in discretise(*self._modes(self._own(), self.rate))))

    def initial_state(self, batch: int) -> Complex[Tensor, "B H M"]:
        _, H, M, _ = self.C.shape
        return torch.zeros(batch, H, M, dtype=self.C.dtype.to_complex(), device=self.C.device)

    def step(
        self, u: Float[Tensor, "B H"], state: Tensor, system: System
    ) -> tuple[Float[Tensor, "B H"], Complex[Tensor, "B H M"]]:
        return dplr_step(system, state, u)

    def import_reference(
        self, raw: Mapping[str, Tensor], *, length: int | None = None, **how: Any
    ) -> dict[str, Tensor]:
        """Of the S4 repository's `SSMKernelDPLR`. Its C is C~ of `length`, or of the raw `l_kernel`; 0: it is C, as
        before a model's first forward pass. Converted in float64, by a solve that gradients pass through.

        Raises `ValueError` where neither length is there.
        """
        if length is None:
            if "l_kernel" not in raw:
                raise ValueError("S4's published C belongs to a kernel length: give l_kernel, or length=")
            length = int(raw["l_kernel"])
        found = {name: raw[name].reshape(own.shape) for name, own in self._own().items()}
        return {**found, "C": self._converted(found, length, untruncated)}

    def export_reference(self, *, length: int = 0, **how: Any) -> dict[str, Tensor]:
        """With the C~ of `length`; by default with C, from which the published code makes C~ on its first call."""
        own = self._own()
        own["C"] = self._converted(own, length, truncated)
        return {**own, "P": own["P"][None], "B": own["B"][None], "l_kernel": torch.tensor(length)}

    def _own(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.rates}

    def _modes(self, own: Mapping[str, Tensor], rate: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """dt (H,), A, P, B (H, M) and C (K, H, M), in double precision."""
        dt = rate * positive(own["inv_dt"][:, 0].double(), self.config.dt_transform)
        A = torch.complex(-own["A_real"].double().exp(), -own["A_imag"].double())
        shared = (A, as_complex(own["P"]), as_complex(own["B"]))
        A, P, B = (x.repeat(len(dt) // len(x), 1) for x in shared)
        return dt, A, P, B, as_complex(own["C"])

    def _converted(
        self, own: Mapping[str, Tensor], length: int, convert: Callable[[System, int], Complex128[Tensor, "K H M"]]
    ) -> Float[Tensor, "K H M 2"]:
        if length == 0:
            return own["C"]
        return torch.view_as_real(convert(discretise(*self._modes(own)), length)).to(own["C"].dtype)


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.to(torch.get_default_dtype()).contiguous())
