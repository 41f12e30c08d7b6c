"""The feed-forward layer: two linear maps with an activation between them, or a mixture of several such experts.

With the option `feed_forward`, every block of a stack ends with one. Letters: B sequences, L steps, D width, F inner
width (`d_ff`), X experts, N steps of all sequences, K steps of a sequence that an expert takes.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from spt.models.mixer import Context, PointwiseMixer, linear_flops
from spt.models.ops.counts import Counts, linear
from spt.models.ops.precision import autocast_type, has_values, without_autocast
from spt.models.ops.product import Linear
from spt.models.options import Activation, Routing

ALIGNMENT = 8  # rows and numbers of a row, for grouped products
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

    By token, how many steps an expert gets depends on the data. A CPU reads it and takes the experts one by one, with
    no work on anything else. Elsewhere the host would have to wait for it, so all experts are computed at once on rows
    whose number follows from that of the steps: in a grouped product where torch has one (bfloat16 on Hopper and
    Blackwell), else in blocks of one expert each, half as many rows again. No GPU has run these two.
    """

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
        """Through the likeliest expert; zeros on padding."""
        gate, choice = p.max(-1)
        if valid is not None:
            choice = choice.masked_fill(~valid, self.n_experts)
        compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        if not has_values(x) or (x.device.type == "cpu" and not compiled):
            y = self._one_by_one(x, choice)
        elif self._suits_grouped_product(x):
            y = self._in_groups(x, choice)
        else:
            y = self._in_blocks(x, choice)
        return y * gate[:, None].type_as(y)

    def _one_by_one(self, x: Float[Tensor, "N D"], choice: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """Sort the steps by expert, run each expert on its share, and undo the sorting."""
        order = choice.argsort(stable=True)
        sizes = self._sizes(choice)
        n_valid = sum(sizes)
        outputs = self._experts(x.index_select(0, order[:n_valid]), sizes)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return F.pad(outputs, (0, 0, 0, len(order) - n_valid)).index_select(0, inverse)

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

    def _in_blocks(self, x: Float[Tensor, "N D"], choice: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """In batched products of equal blocks, each of which has an expert's weights to itself."""
        size = _round_up(-(-len(x) // (2 * self.n_experts)), ALIGNMENT)
        rows = _rows_by_expert(choice, self.n_experts, size)
        first = torch.arange(0, rows.total, size, device=x.device)
        expert = torch.searchsorted(rows.ends, first, right=True)
        dtype = autocast_type(x) or x.dtype

        def weights(values: Tensor) -> Tensor:
            return values.to(dtype).view(self.n_experts, -1, values.shape[-1]).index_select(0, expert)

        def biases(values: Tensor) -> Tensor:
            return values.to(dtype).view(self.n_experts, 1, -1).index_select(0, expert)

        inner = torch.baddbmm(biases(self.up_bias), rows.fill(x).view(len(first), size, -1), weights(self.up))
        y = torch.baddbmm(biases(self.down_bias), self._activate(inner), weights(self.down))
        return rows.take(y.flatten(0, 1))

    def _suits_grouped_product(self, x: Tensor) -> bool:
        """On other GPUs torch itself loops over the experts, and waits for their numbers."""
        aligned = self.up.shape[1] % ALIGNMENT == 0 and self.up.shape[2] % ALIGNMENT == 0
        if not (x.is_cuda and aligned and (autocast_type(x) or x.dtype) == torch.bfloat16):
            return False
        return torch.cuda.get_device_capability(x.device)[0] in (9, 10)

    def _in_groups(self, x: Float[Tensor, "N D"], choice: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """In products of which torch computes each expert's rows with its weights."""
        rows = _rows_by_expert(choice, self.n_experts, ALIGNMENT)
        ends, dtype = rows.ends.int(), autocast_type(x) or x.dtype
        expert = torch.searchsorted(rows.ends, torch.arange(rows.total, device=x.device), right=True)
        chosen = (expert[:, None] == torch.arange(self.n_experts, device=x.device)).to(dtype)

        def product(inputs: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
            y: Tensor = F.grouped_mm(inputs.to(dtype), weights.to(dtype), offs=ends)
            return y + chosen @ biases.to(dtype).view(self.n_experts, -1)

        return rows.take(
            product(self._activate(product(rows.fill(x), self.up, self.up_bias)), self.down, self.down_bias)
        )

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


class _Rows(NamedTuple):
    """Steps by expert, each expert's behind those of the one before, with empty rows between and behind them."""

    place: Int[Tensor, " N"]  # the row of a step; of padding, one behind the last
    ends: Int[Tensor, " X"]  # of each expert's rows; the last expert has what is left over
    total: int

    def fill(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "R D"]:
        return x.new_zeros(self.total + 1, x.shape[1]).index_copy(0, self.place, x)[:-1]

    def take(self, y: Float[Tensor, "R D"]) -> Float[Tensor, "N D"]:
        return F.pad(y, (0, 0, 0, 1)).index_select(0, self.place)


def _rows_by_expert(choice: Int[Tensor, " N"], n_experts: int, multiple: int) -> _Rows:
    """With a multiple of so many rows for every expert; `choice` is `n_experts` on padding. Reads no values."""
    chosen = choice[:, None] == torch.arange(n_experts, device=choice.device)
    ordinal = chosen.cumsum(0)
    sizes = (chosen.sum(0) + multiple - 1) // multiple * multiple
    count = _round_up(len(choice), multiple) + n_experts * multiple
    ends = sizes.cumsum(0)
    row = (ordinal - 1 + ends - sizes).gather(1, choice.clamp(max=n_experts - 1)[:, None])[:, 0]
    return _Rows(row.masked_fill(choice == n_experts, count), F.pad(ends[:-1], (0, 1), value=count), count)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _uniform(fan_in: int, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape).uniform_(-(fan_in**-0.5), fan_in**-0.5))
