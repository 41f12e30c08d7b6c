"""A causal model made two-sided: two copies of it, one of them over the reversed sequence.

y = f(x) + R(g(R(x))), where f and g are the copies and R reverses the valid steps of each sequence, so that padding
stays at its end and neither copy sees any (as in Schuster, Paliwal 1997, and Graves, Schmidhuber 2005, who join the
directions by a map instead). Both see the present step. A sum, because a map of both would begin at random above
pretrained weights, and because a model then has exactly twice the parameters and operations of one copy.

Letters: B sequences, L steps, D width.
"""

from jaxtyping import Float
from torch import Tensor

from spt.models.base import Backbone, Context, Counts
from spt.models.hf.backbone import HuggingFace
from spt.models.hf.config import Config
from spt.models.mixer import turn


class Bidirectional(Backbone):
    """Copies with weights of their own: drawn one after the other, or both those of the checkpoint."""

    def __init__(self, config: Config, forwards: HuggingFace, backwards: HuggingFace) -> None:
        # Without blocks of ours, as the copies.
        super().__init__(config.model_copy(update={"initialisation": "structured", "last_norm": False}), lambda: [])
        self.forwards, self.backwards = forwards, backwards

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        self.forwards.recompute = self.backwards.recompute = self.recompute
        backwards = turn(self.backwards(turn(x, context), context), context)
        return self.forwards(x, context) + backwards

    def rescale(self, rate: float) -> None:
        self.forwards.rescale(rate)

    def flops(self, length: int) -> Counts:
        return 2 * self.forwards.flops(length)
