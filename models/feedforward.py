"""The layer that treats every step alike: two linear maps with an activation between them, or several such experts.

A stack has one behind each block's other sub-layers if its `feed_forward` says so. Letters: B sequences, L steps, D
width, F inner width (`d_ff`), X experts, N steps of all sequences, K steps that an expert takes of one.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from spt.models.mixer import Context, PointwiseMixer, linear_flops
from spt.models.ops.counts import Counts, linear

FeedForwardKind = Literal["none", "mlp", "switch"]
Activation = Literal["gelu", "silu", "relu"]
Routing = Literal["token", "expert"]
ACTIVATIONS: dict[Activation, Callable[..., Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


class FeedForward(PointwiseMixer):
    """W2 drop(act(W1 x + b1)) + b2 (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, d_model: int, d_ff: int, activation: Activation = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        return self.down(F.dropout(ACTIVATIONS[self.activation](self.up(x)), self.dropout, self.training))

    def flops(self, length: int) -> Counts:
        return linear_flops(self.up, length) + linear_flops(self.down, length)


class SwitchFeedForward(PointwiseMixer):
    """X feed-forward layers, the experts, of which a step passes through one or a few: p = softmax(R x) in float32,

        token   y_t = p_e(x_t) expert_e(x_t) with e the likeliest (Fedus, Zoph, Shazeer 2022, eqs. 1 and 2, but
                without a limit to what an expert takes, so that no step is left out)
        expert  every expert takes the 1/X of a sequence's steps where it is likeliest, in evaluation 2/X; y_t is the
                sum of p_e(x_t) expert_e(x_t) over those that took t, maybe none (DLR paper, details of Table 5, where
                the choice is made per sequence here, so that examples stay apart; of equals the earlier step is taken)

    No loss balances the experts. Parameters: up (X, D, F), down (X, F, D), their biases one expert behind another.
    """

    uncompiled = ("_by_token",)  # how many steps an expert gets is known only when it runs

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        n_experts: int,
        routing: Routing = "token",
        activation: Activation = "gelu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.n_experts, self.routing, self.activation, self.dropout = n_experts, routing, activation, dropout
        self.recurrent = routing == "token"
        self.router = nn.Linear(d_model, n_experts, bias=False)
        # As nn.Linear starts. The biases have one axis, by which weight decay knows them.
        self.up, self.up_bias = _uniform(d_model, n_experts, d_model, d_ff), _uniform(d_model, n_experts * d_ff)
        self.down, self.down_bias = _uniform(d_ff, n_experts, d_ff, d_model), _uniform(d_ff, n_experts * d_model)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        p = self.probabilities(x)
        if self.routing == "expert":
            return self._by_expert(x, p, context.valid)
        rows, likely = x.flatten(0, 1), p.flatten(0, 1)
        return self._by_token(rows, likely, context.valid.flatten() if context.padded else None).view(x.shape)

    def probabilities(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B X"]:
        """Of every expert at every step, also under autocast in the parameters' precision."""
        weight = self.router.weight
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(weight.dtype), weight).softmax(-1)

    def _by_token(
        self, x: Float[Tensor, "N D"], p: Float[Tensor, "N X"], valid: Bool[Tensor, " N"] | None
    ) -> Float[Tensor, "N D"]:
        """Steps sorted by expert, a piece of them through each expert, and back to their places; zeros on padding."""
        gate, choice = p.max(-1)
        if valid is not None:
            choice = choice.masked_fill(~valid, self.n_experts)  # behind all experts' pieces
        order = choice.argsort(stable=True)
        sizes = self._sizes(choice)
        taken = sum(sizes)
        answers = self._experts(x.index_select(0, order[:taken]), sizes)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        y = F.pad(answers, (0, 0, 0, len(order) - taken)).index_select(0, place)
        return y * gate[:, None].type_as(y)

    def _sizes(self, choice: Tensor) -> list[int]:
        """How many steps go to each expert; where there are shapes alone, equally many."""
        if isinstance(choice, FakeTensor):
            return [(len(choice) + expert) // self.n_experts for expert in range(self.n_experts)]
        every = torch.arange(self.n_experts, device=choice.device)
        found: list[int] = (choice[:, None] == every).sum(0).tolist()
        return found

    def _experts(self, x: Float[Tensor, "N D"], sizes: Sequence[int]) -> Float[Tensor, "N D"]:
        """The first of `sizes` rows through the first expert, and so on."""
        # Unbound at once: selected one by one, each expert's weights would get a gradient of the whole stack's size.
        ups = zip(self.up_bias.chunk(self.n_experts), self.up.unbind(), strict=True)
        downs = zip(self.down_bias.chunk(self.n_experts), self.down.unbind(), strict=True)
        answers = []
        for piece, up, down in zip(x.split(list(sizes)), ups, downs, strict=True):
            inner = torch.addmm(up[0], piece, up[1])
            answers.append(torch.addmm(down[0], self._activated(inner), down[1]))
        return torch.cat(answers)

    def _by_expert(
        self, x: Float[Tensor, "B L D"], p: Float[Tensor, "B L X"], valid: Bool[Tensor, "B L"]
    ) -> Float[Tensor, "B L D"]:
        """All experts in two batched products of fixed shape; what an expert takes beyond its share counts nothing."""
        batch, length, _ = x.shape
        share = 1 if self.training else 2
        most = min(length, -(-share * length // self.n_experts))
        shares = (share * valid.sum(1) + self.n_experts - 1) // self.n_experts  # of each sequence
        likely = p.detach().masked_fill(~valid[..., None], -1.0)
        step = likely.argsort(dim=1, descending=True, stable=True)[:, :most]  # (B, K, X)
        rank = torch.arange(most, device=x.device)
        taken = (rank < shares[:, None])[..., None]
        gate = torch.where(taken, p.gather(1, step), 0.0).permute(2, 0, 1).reshape(self.n_experts, -1, 1)
        first = torch.arange(0, batch * length, length, device=x.device)[:, None, None]
        row = (step + first).permute(2, 0, 1).flatten()  # by expert, then by sequence
        chosen = x.flatten(0, 1).index_select(0, row).view(self.n_experts, -1, x.shape[-1])
        inner = torch.baddbmm(self.up_bias.view(self.n_experts, 1, -1), chosen, self.up)
        y = torch.baddbmm(self.down_bias.view(self.n_experts, 1, -1), self._activated(inner), self.down)
        y = (y * gate.type_as(y)).flatten(0, 1)
        return y.new_zeros(batch * length, x.shape[-1]).index_add(0, row, y).view(x.shape)

    def _activated(self, inner: Tensor) -> Tensor:
        return F.dropout(ACTIVATIONS[self.activation](inner), self.dropout, self.training)

    def flops(self, length: int) -> Counts:
        """In training; an evaluation by experts takes twice as many steps."""
        steps = length if self.routing == "token" else self.n_experts * -(-length // self.n_experts)
        return linear_flops(self.router, length) + linear(2 * steps, *self.up[0].shape)


def _uniform(inputs: int, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape).uniform_(-(inputs**-0.5), inputs**-0.5))
