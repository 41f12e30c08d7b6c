"""The feed-forward layer: two linear maps with an activation between them, or a mixture of several such experts.

With the option `feed_forward`, every block of a stack ends with one. Letters: B sequences, L steps, D width, F inner
width (`d_ff`), X experts, N steps of all sequences, K steps of a sequence that an expert takes.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from spt.models.mixer import Context, PointwiseMixer, linear_flops
from spt.models.ops.counts import Counts, linear
from spt.models.ops.precision import has_values, without_autocast
from spt.models.ops.product import Linear
from spt.models.options import Activation, Routing

ACTIVATIONS: dict[Activation, Callable[..., Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


class FeedForward(PointwiseMixer):
    """W2 drop(act(W1 x + b1)) + b2 (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, d_model: int, d_ff: int, activation: Activation = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.up, self.down = Linear(d_model, d_ff), Linear(d_ff, d_model)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        return self.down(F.dropout(ACTIVATIONS[self.activation](self.up(x)), self.dropout, self.training))

    def flops(self, length: int) -> Counts:
        return linear_flops(self.up, length) + linear_flops(self.down, length)


class SwitchFeedForward(PointwiseMixer):
    """X feed-forward layers, the experts; each step passes through one or a few. With p = softmax(R x) in float32:

        token   y_t = p_e(x_t) expert_e(x_t) with the likeliest e (Fedus, Zoph, Shazeer 2022, eqs. 1 and 2, but
                without a capacity limit, so that no step is dropped)
        expert  every expert takes the 1/X of a sequence's steps where it is likeliest, in evaluation 2/X; y_t is the
                sum of p_e(x_t) expert_e(x_t) over the experts that took t, possibly none (DLR paper, details of Table
                5; chosen per sequence here, so that examples stay independent; of equal steps the earlier is taken)

    No loss balances the experts. Parameters: up (X, D, F), down (X, F, D); biases of all experts in one vector.
    """

    uncompiled = ("_by_token",)  # how many steps an expert gets depends on the data

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        n_experts: int,
        *,
        routing: Routing = "token",
        activation: Activation = "gelu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.n_experts, self.routing, self.activation, self.dropout = n_experts, routing, activation, dropout
        self.recurrent = routing == "token"
        self.router = nn.Linear(d_model, n_experts, bias=False)
        # Initialised like nn.Linear. Biases have one axis, so that weight decay treats them as biases.
        self.up, self.up_bias = _uniform(d_model, n_experts, d_model, d_ff), _uniform(d_model, n_experts * d_ff)
        self.down, self.down_bias = _uniform(d_ff, n_experts, d_ff, d_model), _uniform(d_ff, n_experts * d_model)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        p = self.probabilities(x)
        if self.routing == "expert":
            return self._by_expert(x, p, context.valid)
        valid = context.valid.flatten() if context.padded else None
        return self._by_token(x.flatten(0, 1), p.flatten(0, 1), valid).view(x.shape)

    def probabilities(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B X"]:
        """Of every expert at every step, in the precision of the parameters under autocast too."""
        weight = self.router.weight
        with without_autocast(x):
            return F.linear(x.to(weight.dtype), weight).softmax(-1)

    def _by_token(
        self, x: Float[Tensor, "N D"], p: Float[Tensor, "N X"], valid: Bool[Tensor, " N"] | None
    ) -> Float[Tensor, "N D"]:
        """Sort the steps by expert, run each expert on its share, and undo the sorting; zeros on padding."""
        gate, choice = p.max(-1)
        if valid is not None:
            choice = choice.masked_fill(~valid, self.n_experts)  # sorts padding to the end
        order = choice.argsort(stable=True)
        sizes = self._sizes(choice)
        n_valid = sum(sizes)
        outputs = self._experts(x.index_select(0, order[:n_valid]), sizes)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        y = F.pad(outputs, (0, 0, 0, len(order) - n_valid)).index_select(0, inverse)
        return y * gate[:, None].type_as(y)

    def _sizes(self, choice: Tensor) -> list[int]:
        """How many steps each expert gets; equally many for tensors without values."""
        if not has_values(choice):
            return [(len(choice) + expert) // self.n_experts for expert in range(self.n_experts)]
        experts = torch.arange(self.n_experts, device=choice.device)
        sizes: list[int] = (choice[:, None] == experts).sum(0).tolist()
        return sizes

    def _experts(self, x: Float[Tensor, "N D"], sizes: Sequence[int]) -> Float[Tensor, "N D"]:
        """The first `sizes[0]` rows through the first expert, and so on."""
        # unbind, not indexing, whose backward pass makes a gradient of the whole stack's size for every expert
        ups = zip(self.up_bias.chunk(self.n_experts), self.up.unbind(), strict=True)
        downs = zip(self.down_bias.chunk(self.n_experts), self.down.unbind(), strict=True)
        outputs = []
        for rows, (up_bias, up), (down_bias, down) in zip(x.split(list(sizes)), ups, downs, strict=True):
            inner = torch.addmm(up_bias, rows, up)
            outputs.append(torch.addmm(down_bias, self._activate(inner), down))
        return torch.cat(outputs)

    def _by_expert(
        self, x: Float[Tensor, "B L D"], p: Float[Tensor, "B L X"], valid: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "B L D"]:
        """All experts in two batched products of fixed shape; steps beyond an expert's share get the gate 0."""
        batch, length, _ = x.shape
        capacity = 1 if self.training else 2
        K = min(length, -(-capacity * length // self.n_experts))
        shares = (capacity * valid.sum(1) + self.n_experts - 1) // self.n_experts  # of each sequence
        scores = p.detach().masked_fill(~valid[..., None], -1.0)
        step = scores.argsort(dim=1, descending=True, stable=True)[:, :K]  # (B, K, X)
        within_share = (torch.arange(K, device=x.device) < shares[:, None])[..., None]
        gate = torch.where(within_share, p.gather(1, step), 0.0).permute(2, 0, 1).reshape(self.n_experts, -1, 1)
        first = torch.arange(0, batch * length, length, device=x.device)[:, None, None]
        row = (step + first).permute(2, 0, 1).flatten()  # by expert, then by sequence
        inputs = x.flatten(0, 1).index_select(0, row).view(self.n_experts, -1, x.shape[-1])
        inner = torch.baddbmm(self.up_bias.view(self.n_experts, 1, -1), inputs, self.up)
        y = torch.baddbmm(self.down_bias.view(self.n_experts, 1, -1), self._activate(inner), self.down)
        y = (y * gate.type_as(y)).flatten(0, 1)
        return y.new_zeros(batch * length, x.shape[-1]).index_add(0, row, y).view(x.shape)

    def _activate(self, inner: Tensor) -> Tensor:
        return F.dropout(ACTIVATIONS[self.activation](inner), self.dropout, self.training)

    def flops(self, length: int) -> Counts:
        """In training; in evaluation, routing by experts takes twice as many steps."""
        steps = length if self.routing == "token" else self.n_experts * -(-length // self.n_experts)
        return linear_flops(self.router, length) + linear(2 * steps, *self.up[0].shape)


def _uniform(fan_in: int, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape).uniform_(-(fan_in**-0.5), fan_in**-0.5))
