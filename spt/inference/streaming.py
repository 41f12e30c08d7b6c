"""A recurrent model run one step at a time, in memory that does not grow: after each step, its answer so far.

B streams side by side, C channels, D width, K numbers of an answer.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from spt.errors import DataError, UsageError
from spt.inference.rows import static_features, steps_of
from spt.models.base import Context
from spt.tasks.base import Reals, Tokens
from spt.training.losses import answers

if TYPE_CHECKING:
    from spt.inference.trained_model import TrainedModel


class Stream:
    """Sequences that arrive step by step: one, or `batch` of them side by side.

    After the last step, the answer is that of `predict` for the whole sequence, up to rounding. The model's weights
    must not change meanwhile.
    """

    def __init__(self, model: "TrainedModel", batch: int | None = None, static: Any = None) -> None:
        _check(model)
        if batch is not None and batch < 1:
            raise UsageError(f"batch is {batch}; a stream is of one sequence or more")
        self.model, self.batch = model, batch
        beside = static_features(static, model, batch or 1)
        self._static = None if beside is None else torch.from_numpy(beside)
        self.pool = model.network.head.pool
        self.device = next(model.network.parameters()).device
        self.restart()

    def restart(self) -> None:
        """Start over with new sequences."""
        with torch.no_grad():
            self._state = self.model.network.backbone.initial_state(self.batch or 1)
        self.steps = 0
        self._pooled: Tensor | None = None  # what is kept of the steps so far: their sum, their maximum, or the last

    def __call__(self, step: Any) -> NDArray[np.float32]:
        """(K,) The answer after this step, a token or C values; for a batch, (B, K) after B of them: numbers in the
        target's units, the logits of classes or labels. Of a model of windows, the steps are those of one window.

        If the model answers every step, it is the answer to this one; else, that to the steps so far. Raises DataError
        for a step that the model cannot take.
        """
        if self.batch is None:
            values = steps_of([step], self.model, "the step")
        else:
            values = steps_of(step, self.model, "the step")
            if len(values) != self.batch:
                raise DataError(f"the step is one of {len(values)} sequences, but the stream has {self.batch}")
        with torch.no_grad():
            self._advance(self._shown(values))
            found = self.model.network.head.answer(self._vector())
            return self._one(answers(self.model.output, found) if isinstance(self.model.target, Reals) else found)

    @property
    def features(self) -> NDArray[np.float32]:
        """(D,) or (B, D) What the head was given last: the vector of this step, or of the steps so far."""
        if self._pooled is None:
            raise UsageError("the stream has no step yet")
        return self._one(self._vector())

    def _one(self, values: Tensor) -> NDArray[np.float32]:
        found: NDArray[np.float32] = values.float().cpu().numpy()
        return found[0] if self.batch is None else found

    def _shown(self, values: NDArray[Any]) -> Float[Tensor, "B D"]:
        """The step as the backbone is shown it."""
        input = self.model.input
        if isinstance(input, Tokens):
            x = torch.from_numpy(input.ids(values))
        else:
            mean, std = np.array(input.mean, np.float32), np.array(input.std, np.float32)
            x = torch.from_numpy((values.astype(np.float32) - mean) / std)
        valid = torch.ones(len(x), 1, dtype=torch.bool, device=self.device)
        static = None if self._static is None else self._static.to(self.device)
        return self.model.network.encoder(x.to(self.device)[:, None], None, Context(valid, padded=False), static)[:, 0]

    def _advance(self, x: Float[Tensor, "B D"]) -> None:
        x, self._state = self.model.network.backbone.step(x, self._state)
        self.steps += 1
        if self._pooled is None or self.pool in (None, "last"):
            self._pooled = x.double() if self.pool == "mean" else x
        elif self.pool == "mean":
            self._pooled = self._pooled + x
        else:
            self._pooled = torch.maximum(self._pooled, x)

    def _vector(self) -> Float[Tensor, "B D"]:
        assert self._pooled is not None
        return self._pooled.float() / (self.steps if self.pool == "mean" else 1)


def _check(model: "TrainedModel") -> None:
    """Raise UsageError where a model cannot go step by step."""
    name, backbone = model.architecture.model.name, model.network.backbone
    joined = [
        option for option in ("resample", "patch", "spectrogram") if getattr(model.transforms, option) is not None
    ]
    if joined:
        raise UsageError(
            f"this model was trained with {joined[0]}, which needs several steps at once, so that it cannot go step by "
            "step; `predict` answers whole sequences"
        )
    what = f"model {name} cannot go step by step"
    if not backbone.causal:
        raise UsageError(f"{what}: it is two-sided, so that an answer depends on later steps; train it causal")
    if not backbone.recurrent:
        raise UsageError(
            f"{what}: it has no recurrent form, as it has attention, or kernels of limited length, or knows places; "
            "`predict` answers whole sequences"
        )
    if model.sequences == 2:
        raise UsageError(f"{what} here: it was trained on pairs of sequences, which have one answer together")
    if model.timed:
        raise UsageError(f"{what} here: it was trained with the times between steps, which a recurrent form lacks")
    if model.network.encoder.circle is not None:
        raise UsageError(f"{what} here: encoder.positions: circle depends on how long the whole sequence is")
    if model.network.head.only_last:
        raise UsageError(f"{what} here: every step is answered from the last one")
