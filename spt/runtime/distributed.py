"""How and where a job runs: device, processes, precision, micro-batches, trackers. None of it decides the outcome.

With accelerate_launch.py, loop.py, step.py and checkpoint.py the only place that knows Accelerate, and the only one
that asks for a device.
"""

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    gather_object,
    send_to_device,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from spt.errors import BackendError, SptError, Stopped, UsageError, did_you_mean, one_line
from spt.models.ops import backends, graphs
from spt.models.ops.device import run_on_gpu
from spt.models.ops.precision import float32_products
from spt.runtime import launch, signals
from spt.runtime.denormals import start_threads
from spt.runtime.environment import compiler_problem
from spt.runtime.memory import keep_freed_memory
from spt.runtime.rendezvous import rendezvous
from spt.runtime.settings import TRACKERS, Settings
from spt.runtime.signals import cleanup
from spt.runtime.trackers import TrackedRun, project, start_options

logger = logging.getLogger(__name__)

TensorTree = TypeVar("TensorTree", bound=tuple[Any, ...])
Value = TypeVar("Value")


@cache
def _freeze_collector() -> None:
    """Libraries stay: the collector, which Accelerate calls after every run, need not go through them each time."""
    gc.freeze()


class Runtime:
    """The processes and the device of this program; one per program."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        if signals.installed():  # a program's own threads are as they were
            start_threads()
        run_on_gpu(not settings.cpu)  # what a model can do is tried when it is built, before it comes here
        _freeze_collector()

    @cached_property
    def accelerator(self) -> Accelerator:
        # Precision is ours (`autocast`): it belongs to a stage, Accelerate's belongs to the process.
        # So is accumulation: a launcher's setting must not divide our losses. Compilation is --compile's.
        with _environment_errors(), rendezvous():
            accelerator = Accelerator(
                cpu=self.settings.cpu or (launch.world_size() > 1 and not _has_distributed_device()),
                mixed_precision="no",
                dynamo_backend="no",
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
                step_scheduler_with_optimizer=False,
                kwargs_handlers=[
                    DistributedDataParallelKwargs(broadcast_buffers=False),  # ours follow from the recipe
                    # Process 0 may wait long for a run that another program is making; dead processes are the
                    # launcher's to notice.
                    InitProcessGroupKwargs(timeout=timedelta(days=1)),
                ],
            )
        # A state is saved under the model's own names, so that another number of processes can go on from it.
        accelerator.register_save_state_pre_hook(_save_unwrapped)
        accelerator.register_load_state_pre_hook(
            lambda models, folder: models.__setitem__(slice(None), [accelerator.unwrap_model(m) for m in models])
        )
        if accelerator.num_processes != launch.world_size():
            raise BackendError(
                f"the launcher announced {launch.world_size()} processes, but {accelerator.num_processes} came together"
            )
        if accelerator.device.type == "cpu":
            keep_freed_memory()
        return accelerator

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def rank(self) -> int:
        return launch.rank()

    @property
    def world(self) -> int:
        """Without a launcher one, and known without taking a device: who only hands out work needs none."""
        return self.accelerator.num_processes if launch.world_size() > 1 else 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def shards(self) -> bool:
        """Are a model's parameters spread over processes (FSDP, DeepSpeed), so that no process has them whole?"""
        return self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)

    def formation(self) -> str:
        """What has come together, for people."""
        backend = torch.distributed.get_backend() if self.world > 1 else "alone"
        kind = self.accelerator.distributed_type.name
        return f"{self.world} processes ({backend}, {kind}) on {self.device.type}"

    def idle_devices(self) -> int:
        """GPUs here that this process, alone, leaves unused."""
        return 0 if self.settings.cpu or self.world > 1 else max(0, torch.cuda.device_count() - 1)

    def on_main(self, function: Callable[[], Value]) -> Value:
        """Run on process 0 alone; every process gets its value, or raises its error."""
        return self.all_ranks(function, only_main=True)[0]

    def all_ranks(self, function: Callable[[], Value], only_main: bool = False) -> list[Value]:
        """Run on every process; each gets the values of all, or raises the error of the first that failed."""
        if self.world == 1:
            return [function()]
        value: Any = None
        error: BaseException | None = None
        if self.main or not only_main:
            try:
                value = function()
            except (Exception, Stopped, KeyboardInterrupt, SystemExit) as raised:
                error = raised
        results: list[tuple[Any, Any]] = gather_object([(value, None if error is None else _transferable(error))])
        for _, remote_error in results:
            if remote_error is not None:
                if error is None:
                    kind, text, state = remote_error
                    error = kind.__new__(kind)
                    error.args, error.__dict__ = (text,), state
                raise mark_shared(error)
        return [theirs for theirs, _ in results]

    def each_rank(self, function: Callable[[], Value]) -> Value:
        """Run on every process, for the process's own value; when one fails, all raise its error."""
        values: list[Value] = []
        self.all_ranks(lambda: values.append(function()))
        return values[0]

    @contextlib.contextmanager
    def entered_on_main(self, make: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
        """A context that process 0 enters for all, e.g. a lock."""
        with contextlib.ExitStack() as stack:

            def enter() -> None:
                stack.enter_context(make())

            self.on_main(enter)
            yield

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> tuple[nn.Module, Any]:
        """Model and optimiser, made ready for the processes there are."""
        state = self.accelerator.state
        deepspeed, fsdp = state.deepspeed_plugin, getattr(state, "fsdp_plugin", None)
        if deepspeed is not None:
            config = deepspeed.deepspeed_config
            if any(config.get(half, {}).get("enabled") not in (None, False) for half in ("fp16", "bf16")):
                raise BackendError(
                    "the DeepSpeed config sets a precision; here it is the recipe's: take fp16 and bf16 out"
                )
            # Its engine clips, must not divide our losses, and wants a batch size that it only prints.
            config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
            config["gradient_clipping"] = clip or 0.0
        if self.shards and fsdp is not None and fsdp.fsdp_version == 1:
            raise BackendError("FSDP version 1 cannot leave single parameters out of training; set fsdp_version: 2")
        with warnings.catch_warnings():  # newer torch calls broadcast_buffers forward_sync_buffers; Accelerate does not
            warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
            prepared, wrapped = self.accelerator.prepare(model, optimizer)
        # Accelerate saves and restores the optimiser itself; its wrapper takes a millisecond a step to do nothing here.
        return prepared, wrapped if self.world > 1 or self.shards else optimizer

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """Within, models compute kernels and attention with the libraries that were asked for."""
        settings, device = self.settings, self.device.type
        try:
            with (
                backends.use(settings.backend, "kernels", device),
                backends.use(settings.attention, "attention", device),
                graphs.use(settings.cuda_graphs, device),
            ):
                yield
        except backends.Unavailable as error:
            raise BackendError(str(error)) from error

    def compile(self, module: nn.Module) -> None:
        """Compile a module in place, under its own name; where that cannot be done, log why and leave it."""
        problem = compiler_problem(self.device.type) or _tf32_problem()
        if problem is not None:
            logger.warning(f"--compile: torch.compile cannot be used here ({problem}); continuing without it")
            return
        torch._dynamo.config.suppress_errors = True  # what it cannot compile runs as it is
        for part in module.modules():
            for name in getattr(part, "uncompiled", ()):
                setattr(part, name, torch.compiler.disable(getattr(part, name)))
        module.compile()

    def weights(self, prepared: nn.Module) -> dict[str, Tensor]:
        """A prepared model's whole state, under its own names, on the CPU; all processes have to ask."""
        alone = self.world == 1 and not self.shards  # Accelerate would import torch's compiler, a second or two
        state = prepared.state_dict() if alone else self.accelerator.get_state_dict(prepared)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    @property
    def steps_in_backward(self) -> bool:
        """DeepSpeed's engine updates the weights within the backward pass of the last micro-batch."""
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def forget_accumulation(self) -> None:
        """The next gradient is the first of its step; without this, Accelerate would not clear those before."""
        self.accelerator.gradient_state._set_sync_gradients(True)

    @contextlib.contextmanager
    def accumulating(self, prepared: nn.Module, last: bool) -> Iterator[None]:
        """Around one micro-batch: gradients are exchanged with the last one only."""
        self.accelerator.gradient_state._set_sync_gradients(last)  # DeepSpeed steps when this is set
        with contextlib.nullcontext() if last else self.accelerator.no_sync(prepared):
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss. Accelerate, which looks at every call for what is installed, is only needed for
        DeepSpeed, since the precision here is ours."""
        if self.steps_in_backward:
            self.accelerator.backward(loss)
        else:
            loss.backward()

    def clip(self, parameters: list[nn.Parameter], norm: float) -> Tensor | None:
        """Scale the gradients down to this norm at most; returns the norm they had, where it is known."""
        if self.shards:
            return self.accelerator.clip_grad_norm_(parameters, norm)
        return nn.utils.clip_grad_norm_(parameters, norm)

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16")

    def products(self, precision: str) -> contextlib.AbstractContextManager[None]:
        """Around all that a stage computes: whether GPUs may round the factors of its float32 products to TF32."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return float32_products("tf32" if precision == "tf32" else "ieee")

    def pinned(self, tensors: TensorTree) -> TensorTree:
        """A batch's tensors in pinned memory, from which a GPU copies without blocking."""
        if self.device.type != "cuda":
            return tensors
        pinned: TensorTree = tree_map_only(Tensor, lambda tensor: tensor.pin_memory(), tensors)
        return pinned

    def send(self, tensors: TensorTree) -> TensorTree:
        """A batch's tensors on this process's device."""
        return send_to_device(tensors, self.device, non_blocking=True)

    @property
    def queues(self) -> bool:
        """Does the device work through a queue, while this process goes on until it waits for a number?"""
        return self.device.type == "cuda"

    def fetch(self, tensors: TensorTree) -> Callable[[], TensorTree]:
        """Begin to copy tensors of the device; the function returned waits until they are on the CPU, but not for what
        the device was given since."""
        if not self.queues:
            on_cpu: TensorTree = tree_map_only(Tensor, Tensor.cpu, tensors)
            return lambda: on_cpu
        copies: TensorTree = tree_map_only(Tensor, lambda tensor: tensor.to("cpu", non_blocking=True), tensors)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> TensorTree:
            copied.synchronize()
            return copies

        return wait

    def total(self, numbers: list[float]) -> list[float]:
        """Sums over all processes, in float64 (float32 on devices without it)."""
        if self.world == 1:
            return numbers
        summed = self.accelerator.reduce(self._numbers(numbers), "sum")
        return [float(number) for number in summed.tolist()]

    def highest(self, numbers: list[float]) -> list[float]:
        """The largest over all processes, place by place."""
        if self.world == 1:
            return numbers
        rows = self.accelerator.gather(self._numbers(numbers)[None])
        return [float(number) for number in rows.amax(0).tolist()]

    def _numbers(self, numbers: list[float]) -> Tensor:
        kind = torch.float32 if self.device.type == "mps" else torch.float64
        return torch.tensor(numbers, dtype=kind, device=self.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Rows of all processes, on every process; all give equally many."""
        return tensor if self.world == 1 else self.accelerator.gather(tensor.to(self.device))

    def check_libraries(self) -> None:
        """Raise BackendError unless the libraries that the user asked for work, and the tracker is known and there."""
        from accelerate.tracking import filter_trackers

        with self.kernels():
            pass
        tracker = self.settings.tracker
        if tracker is None:
            return
        if tracker not in TRACKERS:
            raise BackendError(f"unknown tracker {tracker!r}{did_you_mean(tracker, TRACKERS)}")
        if self.accelerator.device and not filter_trackers([tracker], "."):  # wants Accelerate's state to exist
            raise BackendError(f"the tracker {tracker} is not installed; pip install {tracker}, or leave --tracker out")

    @contextlib.contextmanager
    def tracked(self, run: TrackedRun, folder: Path, config: dict[str, Any]) -> Iterator[None]:
        """Send what is logged to the tracker the user asked for, if any."""
        tracker = self.settings.tracker
        if tracker is None:
            yield
            return
        from accelerate.tracking import filter_trackers

        try:
            # Accelerate fixes its trackers when it is made; ours come and go with the runs.
            self.accelerator.log_with = filter_trackers([tracker], folder)
            self.accelerator.project_configuration.set_directories(str(folder))
            options = {tracker: start_options(tracker, run)}
            self.accelerator.init_trackers(project(tracker), config={**config, **run._asdict()}, init_kwargs=options)
        except SptError:
            raise
        except Exception as error:  # whatever a tracker's own library raises: no login, no network, a wrong setting
            raise BackendError(
                f"the tracker {tracker} cannot be used: {one_line(error)}; or leave --tracker out"
            ) from error

        def finish(_: object = None) -> None:
            for tracker in self.accelerator.trackers:  # Accelerate's end_training would end the group of processes too
                tracker.finish()

        try:
            with cleanup(finish):
                yield
        finally:
            finish()
            self.accelerator.log_with, self.accelerator.trackers = [], []

    def track(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        if self.settings.tracker is not None:
            self.accelerator.log({f"{kind}/{name}": number for name, number in numbers.items()}, step=step)


@contextlib.contextmanager
def _environment_errors() -> Iterator[None]:
    """What Accelerate cannot make of its variables, as a sentence: a value that is none, a plug-in without its library.

    FileNotFoundError is of a DeepSpeed config, RuntimeError of a device; the others are what its own parsing raises.
    """
    try:
        yield
    except torch.distributed.DistError:  # of a group that does not come together
        raise
    except (ImportError, ValueError, KeyError, AssertionError, RuntimeError, FileNotFoundError) as error:
        names = sorted(name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")))
        if not names:
            raise
        kind = BackendError if isinstance(error, ImportError) else UsageError
        raise kind(
            f"Accelerate cannot start as its variables say ({', '.join(names)}): {one_line(error)}; correct them, or "
            "unset them"
        ) from error


def _tf32_problem() -> str | None:
    """Why nothing can be compiled beside the settings for single operations, if so: torch's compiler, up to 2.13, asks
    by the older one."""
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:
        return f"torch {torch.__version__} does not compile under precision tf32"
    return None


def _has_distributed_device() -> bool:
    """Is there a device on which processes can work together? Without one, Accelerate wants the CPU asked for."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device is not None and device.type != "mps"


def _save_unwrapped(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
    weights[:] = [{name.removeprefix("module."): tensor for name, tensor in state.items()} for state in weights]


def mark_shared(error: BaseException) -> BaseException:
    """Mark an error that every process raises, so that all go on from it alike, and the first one tells it."""
    error.__dict__["known_to_all"] = True
    return error


def _transferable(error: BaseException) -> tuple[type[BaseException], str, dict[str, Any]]:
    """An error as it travels to other processes: one of ours whole, others by what they say."""
    if isinstance(error, SptError | Stopped):
        return type(error), str(error), dict(error.__dict__)
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt, str(error), {}
    return RuntimeError, one_line(error), {}


def is_lost_peer(error: BaseException) -> bool:
    """Does a process learn from this error only that another one has gone? gloo, alone, has no type for it."""
    if launch.world_size() == 1 or not torch.distributed.is_initialized():
        return False
    return isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
