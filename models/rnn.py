"""GRU and LSTM in the residual stack: recurrent networks whose gates see the state, computed one step after the other
(Cho et al. 2014; Hochreiter and Schmidhuber 1997).

    GRU:   r_t, z_t = sigmoid(W x_t + U h_{t-1} + b),   n_t = tanh(W_n x_t + b_n + r_t (U_n h_{t-1} + c_n)),
           h_t = (1 - z_t) n_t + z_t h_{t-1}
    LSTM:  i_t, f_t, o_t = sigmoid(W x_t + U h_{t-1} + b),   g_t = tanh(W_g x_t + U_g h_{t-1} + b_g),
           c_t = f_t c_{t-1} + i_t g_t,   h_t = o_t tanh(c_t)

If two-sided, a second network runs backwards; the output map reads both. The kernels are torch's own, and so are the
initial values, U(-1/sqrt(P), 1/sqrt(P)). Letters: B sequences, L steps, D width, P states (`expansion` D), K
directions.
"""

from typing import Any, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from spt.models.base import Backbone, BackboneConfig, Context, Counts, Mixer, linear_flops
from spt.models.ops.counts import linear
from spt.models.ops.precision import at_least_float32, without_autocast
from spt.models.ops.product import Linear

PAPER = "Cho et al. 2014; Hochreiter, Schmidhuber 1997"
COST = "L P (D + P)"
PARAMETERS = 925_440


class Config(BackboneConfig):
    cell: Literal["gru", "lstm"] = Field("gru", description="gated recurrent unit, or long short-term memory")
    expansion: int = Field(1, ge=1, description="states per direction, as a multiple of d_model")


class RNN(Mixer):
    """Parameters: those of torch's GRU or LSTM, and a map K P -> D."""

    uncompiled = ("run",)  # a loop over the steps

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recurrent = config.causal
        D, P, K = config.d_model, config.expansion * config.d_model, 1 if config.causal else 2
        kind = nn.GRU if config.cell == "gru" else nn.LSTM
        self.cell = kind(D, P, batch_first=True, bidirectional=K == 2)
        self.gates = 3 if config.cell == "gru" else 4
        self.leave = Linear(K * P, D)

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        return self.leave(self.run(x, context))

    def run(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L S"]:
        """The states of both directions, in float32; the backward one begins at each sequence's last valid step."""
        with without_autocast(x):
            x = at_least_float32(x)
            if not context.padded:
                return self.cell(x)[0]
            lengths = context.valid.sum(1).clamp_min(1).cpu()
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            states, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True, total_length=x.shape[1])
            return states

    def flops(self, length: int) -> Counts:
        """Every gate reads the input and the state."""
        P = self.cell.hidden_size
        reads = linear(length, self.cell.input_size + P, self.gates * P)
        return (2 if self.cell.bidirectional else 1) * reads + linear_flops(self.leave, length)

    def initial_state(self, batch: int) -> Any:
        return None

    def step(self, x: Float[Tensor, "B D"], state: Any) -> tuple[Float[Tensor, "B D"], Any]:
        h, state = self.cell(at_least_float32(x[:, None]), state)
        return self.leave(h[:, 0]), state


def build(config: Config) -> Backbone:
    return Backbone(config, lambda: [RNN(config)])
