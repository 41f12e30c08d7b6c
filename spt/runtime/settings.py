"""What a user may choose about how a job runs; it changes what is computed by rounding, dropout and, with batch norm,
micro-batches alone."""

from dataclasses import dataclass
from typing import Literal

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True)
class Settings:
    """What a user may choose about how a job runs."""

    resume: Literal["auto", "must", "never"] = "auto"
    micro_batch_size: int | None = None  # sequences in memory at once, per process; None: the whole share
    recompute: bool = False  # gradient checkpointing: activations are computed again in the backward pass
    compile: bool = False  # torch.compile, where there is a compiler
    backend: str = "auto"  # what computes the kernels of state-space models: auto, torch, triton or keops
    cuda_graphs: bool = False  # kernels of state-space models recorded once as CUDA graphs
    attention: str = "auto"  # what computes softmax attention: auto, sdpa, varlen, flash or math
    save_every: float = 60.0  # seconds between resumable checkpoints
    cpu: bool = False  # even where there is a GPU
    threads: int | None = None  # of a process; None: on a CPU as many as the size of the work calls for
    tracker: str | None = None  # one of TRACKERS, through Accelerate
    quiet: bool = False  # no progress
    wait: bool = False  # for a run that another process is making, instead of refusing
    lease: float = 60.0  # seconds without a sign of life after which others may take over a run of this process
    debug: bool = False  # let bugs through with their traceback
