"""What a network gives for rows that nobody asks it to be scored on: answers, or features, batch by batch as in an
evaluation."""

import contextlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from spt.data.batching import collate
from spt.errors import BackendError, CheckpointError, DataError
from spt.models.base import Context
from spt.models.longconv import cached_kernels
from spt.runtime.distributed import Runtime
from spt.runtime.memory import free_memory, out_of_memory
from spt.tasks.base import Classes, Split, Tokens, Values
from spt.training.build import StageSetup
from spt.training.evaluate import EVALUATION_POSITIONS, PaddedRows, batches, shared_padding
from spt.training.network import SequenceModel
from spt.training.objectives import Inputs
from spt.training.threads import computing_threads, needs_one_thread


class Computation(BaseModel):
    """How a stage's evaluation computes, as far as the last digits depend on it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    precision: Literal["fp32", "tf32", "bf16"]
    together: int | None  # rows that share a batch and so its padding; None: any may
    one_thread: bool  # on a CPU

    @classmethod
    def of_stage(cls, setup: StageSetup) -> "Computation":
        train = setup.train
        return cls(precision=train.precision, together=shared_padding(setup), one_thread=needs_one_thread(setup))

    @contextlib.contextmanager
    def applied(self, runtime: Runtime) -> Iterator[None]:
        def threads() -> int:
            return runtime.settings.threads or (1 if self.one_thread else torch.get_num_threads())

        with (
            computing_threads(runtime, threads),
            runtime.kernels(),
            runtime.products(self.precision),
            torch.no_grad(),
        ):
            yield


class BatchOutputs(NamedTuple):
    """Of some rows: b of them, B sequences (of pairs 2 b, first all first ones), L steps; on the CPU, in float32."""

    rows: NDArray[np.int64]  # (b,) their places in the split
    context: Context  # which steps are padding, and the times between them
    values: Float[Tensor, "_ *L K"]  # (b, K) or (b, L, K) answers, or (B, L, D) features


def network_outputs(
    network: SequenceModel,
    rows: Split,
    input: Tokens | Values,
    computation: Computation,
    runtime: Runtime,
    *,
    features: bool = False,
) -> Iterator[BatchOutputs]:
    """The network's answers to all rows of a split, or the features that its head is given; the longest rows first,
    unless batches are those of the split's order. Where memory runs out, batches become smaller.

    Raises CheckpointError and DataError where what the network gives is no finite number.
    """
    if not len(rows):
        return
    rows, network = rows.unlabelled(), network.to(runtime.device).eval()
    waiting = batches(rows, EVALUATION_POSITIONS, 1, computation.together)
    with contextlib.ExitStack() as caches:
        with computation.applied(runtime):
            caches.enter_context(cached_kernels(network, int(rows.extents.max())))
        while waiting:
            group = waiting.pop(0)
            try:
                with computation.applied(runtime):
                    outputs = _outputs(network, rows, group, input, computation, runtime, features)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                if len(group.rows) == 1:
                    steps = max(group.length, int(rows.extents[group.rows].max()))
                    raise BackendError(
                        f"there is no memory for one sequence of {steps:,} steps; give shorter ones, or use another "
                        "machine"
                    ) from error
                waiting[:0] = [group._replace(rows=part) for part in np.array_split(group.rows, 2)]
                free_memory()
                continue
            _check_finite(network, rows, outputs)
            yield outputs


def _check_finite(network: SequenceModel, rows: Split, outputs: BatchOutputs) -> None:
    bad = ~outputs.values.isfinite().all(-1)
    if bad.ndim == 2:
        bad = (bad & outputs.context.valid).any(-1)
    if not bad.any():
        return
    for name, tensor in network.state_dict().items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"the weights {name} hold numbers that are not finite; train the run again")
    first = rows.ids[outputs.rows[int(bad.nonzero()[0]) % len(outputs.rows)]]
    raise DataError(f"the network gives no finite numbers for row {first}: its values, or the weights, are too large")


def _outputs(
    network: SequenceModel,
    rows: Split,
    group: PaddedRows,
    input: Tokens | Values,
    computation: Computation,
    runtime: Runtime,
    features: bool,
) -> BatchOutputs:
    batch = collate(rows, group.rows, input, Classes(2), group.length)  # there are no targets
    inputs = runtime.send(Inputs(batch.x, None, batch.context, batch.static))
    with runtime.autocast(computation.precision):
        values = network.features(inputs) if features else network(inputs)
    return BatchOutputs(group.rows, batch.context, values.float().cpu())
