"""A model of transformers in the place of the residual stack.

Letters: B sequences, L steps, P steps with padding, D width.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.integrations import hub_kernels
from transformers.utils import logging

from spt.models.base import Backbone, Context, Counts, ParamGroup, Unsupported
from spt.models.hf import changes, costs, sizes
from spt.models.hf.config import Config
from spt.models.hf.sizes import Settings, round_up
from spt.models.hf.weights import load
from spt.models.ops import backends
from spt.models.ops.precision import autocast_type, has_values, without_autocast

logging.set_verbosity_error()  # its errors are reported by us; its warnings are dealt with here
logging.disable_progress_bar()


class Capabilities(NamedTuple):
    """What running a model on a few steps has shown."""

    fixed_length: bool  # must all sequences have the same length for padding to be ignored?
    ignores_padding: bool
    single_precision: bool  # does half precision break it?
    removable: tuple[str, ...]  # modules and parameters that outputs do not depend on
    frozen: tuple[str, ...]  # other unused parameters, which its code needs


class HuggingFace(Backbone):
    """A model of transformers between our encoder and our head.

    Two-sided models get zeros and a mask on padding; causal ones never see it. Sequences are padded here to a multiple
    of `pad_to_multiple_of` steps, or with `fixed_length` to `length` steps.
    """

    single_precision = False

    def __init__(self, config: Config) -> None:
        # Without blocks of ours: transformers has the residual stack.
        super().__init__(config.model_copy(update={"initialisation": "structured", "last_norm": False}), lambda: [])
        assert config.max_length is not None, "filled in from the task"
        self.model: Any
        self.model, self.missing = load(config)
        self.config = self.model.config
        self.cache_key = f"{config.model_dump_json()} {self.config.to_json_string()}"  # everything but the weights
        self.model_type: str = self.config.model_type
        self.default_attention: str = self.config._attn_implementation  # sdpa, if its class has that
        self.width = config.d_model
        self.inputs = frozenset(inspect.signature(self.model.forward).parameters)
        self.pad_to_multiple_of = sizes.length_multiple(self.config)
        self.fixed_length = sizes.structure_depends_on_length(self.config)
        axial = sizes.length_of_axial_positions(self.config)
        self.length = axial or round_up(config.max_length, self.pad_to_multiple_of)
        if self.length < config.max_length:
            raise ValueError(
                f"{config.label} is made for {self.length:,} steps, but max_length is {config.max_length:,}"
            )
        self._checkpointing = False
        changes.correct(self.model, random_weights=not config.pretrained)
        changes.make_constants_buffers(self.model)
        changes.register_shared_parameters_once(self.model)
        self.param_groups = _param_groups(self)

    def configure(self, capabilities: Capabilities) -> None:
        """Adapt to what a trial has shown."""
        self.fixed_length, self.ignores_padding, self.single_precision, removable, frozen = capabilities
        changes.remove(self.model, removable)
        for name in frozen:
            self.model.get_parameter(name).requires_grad_(False)
        needed = self.model.state_dict().keys() - set(frozen)
        if missing := [name for name in self.missing if name in needed]:
            raise ValueError(f"the checkpoint lacks weights of this model, among them {missing[0]}")
        self.param_groups = _param_groups(self)

    def train(self, mode: bool = True) -> "HuggingFace":
        super().train(mode)
        for module in self._modules_of_type("BigBirdBlockSparseAttention"):
            module.training = True  # in evaluation it would attend to its first block instead of random ones
        return self

    def forward(self, x: Float[Tensor, "B L D"], context: Context) -> Float[Tensor, "B L D"]:
        self._set_checkpointing(self.recompute)
        self._set_attention(x)
        length = x.shape[1]
        padding = self.padded_length(length) - length
        options: Settings = {}
        masked = (context.padded or padding > 0) and (self.fixed_length or not self.causal)
        if masked:
            x = x.masked_fill(~context.valid[..., None], 0.0)
        if "attention_mask" in self.inputs and (masked or self.model_type == "nystromformer"):
            options["attention_mask"] = self._attention_mask(F.pad(context.valid, (0, padding)))
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        if "use_cache" in self.inputs:
            options["use_cache"] = False
        autocast = without_autocast(x) if self.single_precision else contextlib.nullcontext()
        with self._reproducible(x), autocast:
            y: Tensor = self.model(inputs_embeds=x, **options)[0]
        if y.shape[-1] == 2 * self.width:  # the two streams of a reversible stack
            y = y.unflatten(-1, (2, self.width)).mean(-2)
        return y[:, :length]

    def _attention_mask(self, valid: Bool[Tensor, "B P"]) -> Tensor:
        if self.model_type != "nystromformer":
            return valid.long()
        # It would make a mask of steps by steps from any other mask, which does not fit its landmarks; this is added.
        return torch.zeros(valid.shape, device=valid.device).masked_fill(~valid, -1e9)[:, None, None]

    def padded_length(self, length: int) -> int:
        return self.length if self.fixed_length else round_up(length, self.pad_to_multiple_of)

    def rescale(self, rate: float) -> None:
        raise Unsupported("models of transformers do not know the time between steps, only their number")

    def flops(self, length: int) -> Counts:
        with _without_fused_kernels():
            return costs.flops(self, length)

    def _modules_of_type(self, name: str) -> list[Any]:
        return [module for module in self.model.modules() if type(module).__name__ == name]

    def _modules_with(self, attribute: str) -> list[Any]:
        return [module for module in self.model.modules() if hasattr(module, attribute)]

    def _set_checkpointing(self, enable: bool) -> None:
        """Gradient checkpointing by the model's own layers, if it supports that."""
        if enable == self._checkpointing or not self.model.supports_gradient_checkpointing:
            return
        self._checkpointing = enable
        if enable:
            self.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.model.activation_checkpointing_disable()

    def _set_attention(self, x: Tensor) -> None:
        """Use the attention backend of this process, if the model supports it."""
        backend, supports_flash = backends.current("attention"), self.model._supports_flash_attn
        if backend == "flash" and supports_flash and autocast_type(x) is None:
            raise backends.Unavailable(
                "the attention backend flash computes in half precision; set train.precision=bf16, or choose sdpa"
            )
        flash = "flash_attention_2" if supports_flash else self.default_attention
        name = {"flash": flash, "math": "eager"}.get(backend, self.default_attention)
        if self.config._attn_implementation != name:
            self.model.set_attn_implementation(name)

    @contextlib.contextmanager
    def _reproducible(self, x: Tensor) -> Iterator[None]:
        """Random draws inside a model: new ones in every training step, always the same in evaluation. The state of
        numpy's and torch's generators survives where the model would reset it."""
        if not has_values(x):
            with costs.WithoutValues():
                yield
            return
        hashing = self._modules_with("hash_seed")
        with contextlib.ExitStack() as stack:
            if self._modules_of_type("BigBirdBlockSparseAttention"):
                stack.callback(np.random.set_state, np.random.get_state())
            for module in hashing:
                module.hash_seed = None if self.training else 0
            if hashing and not self.training:
                stack.enter_context(torch.random.fork_rng([x.device] if x.is_cuda else []))
            yield
            for module in self._modules_with("recurrent_states"):  # which would keep the graph of this pass alive
                module.recurrent_states = None


@contextlib.contextmanager
def _without_fused_kernels() -> Iterator[None]:
    """Those of other packages take no tensors without values. transformers leaves them out of exported programs."""
    module: Any = hub_kernels
    exporting, module.is_torchdynamo_exporting = module.is_torchdynamo_exporting, lambda: True
    try:
        yield
    finally:
        module.is_torchdynamo_exporting = exporting


def _param_groups(backbone: nn.Module) -> dict[str, ParamGroup]:
    """No weight decay on embedding tables, on vectors with several axes, on state matrices."""
    tables = {f"{name}.weight" for name, module in backbone.named_modules() if isinstance(module, nn.Embedding)}
    return {
        name: ParamGroup()
        for name, p in backbone.named_parameters()
        if p.ndim >= 2 and (name in tables or p.numel() == max(p.shape) or name.endswith("A_log"))
    }


def outputs(
    backbone: Backbone, x: Float[Tensor, "B L D"], valid: Bool[Tensor, "B L"] | None = None
) -> Float[Tensor, "B L D"]:
    """A backbone's outputs for sequences by themselves; without `valid` they have no padding."""
    everything = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return backbone(x, Context(everything if valid is None else valid, padded=valid is not None))
