"""Hyena: long convolutions with implicit filters between gates that the input sets (Poli et al. 2023).

    (x^0, ..., x^{N-1}, v) = shortconv(W x + b)                                                          (algorithm 1)
    v <- h^n * (x^{N-1-n} v) + D^n x^{N-1-n} v,   n = 0, ..., N - 2,   y = W_o (x^0 v) + b_o   (definition 3.1)
    h_t = window(t) MLP(z_t),   window(t) = exp(-decay t / (L - 1))                                      (section 3.3)

* is a convolution over the sequence; products are element-wise. The first convolution of definition 3.1 is left out;
the order of products and the skip weights D^n are those of the authors' code (standalone_hyena.py). N is the order as
that code counts it: order 2 has one long convolution between two gates. The filters' features are in the code's order
too, so that with N > 2 the first convolution has the slowest windows. z_t is initially t / (L - 1) and waves of `bands`
frequencies, and is trained; the MLP's activations are sin(frequency x), with the frequency trained too. Layers are
initialised as in the authors' stand-alone layer, not as in their language models, except the short convolution, which
is normal with the same variance, and its bias zero. In the language models, a feed-forward layer follows (here
`feed_forward: mlp`), and everything is causal. The two-sided form is ours: the MLP outputs a second filter, which runs
backwards from the next step, and the short convolution is centred.

Letters: B sequences, L longest sequence, D width (D^n: skip weights), N order, K directions, M kernel length.
"""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from spt.models.base import Backbone, Context, Counts, Mixer, ParamGroup, linear_flops, new_parameter
from spt.models.gated import ShortConvolution
from spt.models.longconv import Kernel, LongConvolution
from spt.models.ops.convolution import convolve
from spt.models.ops.precision import without_autocast
from spt.models.ops.product import Linear, linear
from spt.models.options import FeedForwardKind, LocalConfig

PAPER = "Poli et al. 2023"
COST = "L D (log L + D)"
PARAMETERS = 1_042_944
SLOWEST, FASTEST, TARGET = 1.5, 0.3, 0.01  # windows fall to 1% at these times, in longest sequences


class Config(LocalConfig):
    feed_forward: FeedForwardKind = Field("mlp", description="second sub-layer of every block: mlp, switch or none")
    order: int = Field(2, ge=2, description="number of gates N, one more than there are long convolutions")
    convolution: int = Field(3, ge=1, description="length of the short convolution, in steps")
    d_filter: int = Field(64, ge=1, description="width of the MLP that produces the filters")
    filter_layers: int = Field(4, ge=2, description="number of linear maps in that MLP")
    bands: int = Field(16, ge=1, description="number of frequencies in its positional features")
    frequency: float = Field(14.0, gt=0, description="initial frequency of its sine activations")

    def _nearby(self) -> int:
        """How far the short convolution sees."""
        return self.convolution - 1 if self.causal else self.convolution // 2

    def seen(self) -> int | None:
        return None if self.reach is None else self.n_layers * ((self.order - 1) * self.reach + self._nearby())

    @model_validator(mode="after")
    def _short_is_within_reach(self) -> "Config":
        if self.reach is not None and self.reach < self._nearby():
            raise ValueError(f"reach {self.reach}: the short convolution alone sees {self._nearby()} steps")
        return self


class HyenaFilter(Kernel):
    """Parameters: z (L, 1 + 2 bands); the maps of the MLP, the last without bias; frequency (d_filter,), of all sines.
    The second direction has its own outputs, and the same windows."""

    t: Tensor
    decay: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.max_length is not None, "filled in from the task"
        L, width, self.directions = config.max_length, config.d_filter, 1 if config.causal else 2
        features = (config.order - 1) * config.d_model
        self.limit = L
        t = torch.linspace(0, 1, L, dtype=torch.float64)[:, None]
        turns = torch.arange(L, dtype=torch.float64)[:, None] / L
        angle = 2 * math.pi * turns * torch.linspace(1e-4, config.bands - 1, config.bands, dtype=torch.float64)
        self.z = new_parameter(torch.cat([t, torch.cos(angle), -torch.sin(angle)], 1))
        widths = [1 + 2 * config.bands, *[width] * (config.filter_layers - 2)]
        self.maps = nn.ModuleList(nn.Linear(n, width) for n in widths)
        self.last = nn.Linear(width, self.directions * features, bias=False)
        self.frequency = nn.Parameter(torch.full((width,), config.frequency))
        decay = torch.linspace(-math.log(TARGET) / SLOWEST, -math.log(TARGET) / FASTEST, features, dtype=torch.float64)
        self.register_buffer("t", t.to(self.z.dtype), persistent=False)
        self.register_buffer("decay", decay.to(self.z.dtype), persistent=False)
        self.param_groups = {name: ParamGroup(weight_decay=False) for name, _ in self.named_parameters()}

    def forward(self, length: int) -> Float[Tensor, "K H M"]:
        x = self.z[:length]
        for layer in self.maps:
            assert isinstance(layer, nn.Linear)
            x = torch.sin(self.frequency * linear(x, layer.weight, layer.bias))
        h = linear(x, self.last.weight).unflatten(1, (self.directions, -1))
        return (h * torch.exp(-self.t[:length] * self.decay)[:, None]).permute(1, 2, 0)

    def flops(self, length: int) -> Counts:
        weights = sum(layer.weight.numel() for layer in (*self.maps, self.last))
        return Counts.of("kernel", 2.0 * min(length, len(self.z)) * weights)


class Hyena(Mixer):
    """Parameters: the maps D -> (N + 1) D and D -> D, the short convolution, the filters and their skip weights."""

    uncompiled = ("mix_sequence",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        D, N, self.centred = config.d_model, config.order, not config.causal
        self.enter, self.leave = Linear(D, (N + 1) * D), Linear(D, D)
        self.short = ShortConvolution((N + 1) * D, config.convolution, std=1 / math.sqrt(3 * config.convolution))
        filters = config.model_copy(update={"d_model": (N - 1) * D})
        self.filters = LongConvolution(filters, HyenaFilter(config), output="identity")

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        u = self.enter(x)
        padding = ~context.valid[..., None]
        if context.padded:  # where the map's bias stands
            u = u.masked_fill(padding, 0.0)
        u = self.mix_locally(u)
        if context.padded:  # where it stands again, with what the convolution took from the last steps
            u = u.masked_fill(padding, 0.0)
        return self.leave(self.mix_sequence(*u.split(x.shape[-1], dim=-1)))

    def mix_locally(self, u: Float[Tensor, "B L E"]) -> Float[Tensor, "B L E"]:
        """Causal, or as many steps ahead as behind."""
        ahead = (self.short.width - 1) // 2 if self.centred else 0
        return self.short(F.pad(u, (0, 0, 0, ahead)))[:, ahead:]

    def mix_sequence(self, outer: Float[Tensor, "B L D"], *inner: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """From x^0; x^1, ..., x^{N-1} and v."""
        *gates, v = inner
        with without_autocast(v):
            spectrum, n = self.filters.transformed(v.shape[1])
            for gate, part in zip(reversed(gates), spectrum.split(v.shape[-1]), strict=True):
                v = convolve(gate * v, part, n)
        return outer * v

    def convolution_kernel(self, length: int) -> Iterable[Float[Tensor, "K C M"]]:
        return self.filters.convolution_kernel(length)

    def flops(self, length: int) -> Counts:
        maps = linear_flops(self.enter, length) + linear_flops(self.leave, length)
        return maps + self.short.flops(length) + self.filters.flops(length)

    def shared_flops(self, length: int) -> Counts:
        return self.filters.shared_flops(length)


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [Hyena(config)])
