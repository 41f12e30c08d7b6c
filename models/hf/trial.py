"""What a model can do, found by running it on a few random steps: direction, padding, precision, unused parameters.

On the device that it will run on: fused kernels of Mamba, where installed, take no tensors of a CPU. No GPU has run it.
"""

import contextlib
import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from spt.models.base import Unsupported
from spt.models.hf import sizes
from spt.models.hf.backbone import Capabilities, HuggingFace, outputs
from spt.models.hf.config import Config, last_line, setting_names
from spt.models.hf.unused import removable, unused_parameters
from spt.models.ops.device import planned_device

SAME = 1e-4  # outputs with a smaller relative difference count as the same
UNAFFECTED = 1e-5  # a step whose output changes by less does not depend on what was changed
STEPS = 24  # of a trial
SHORT_WINDOW = 8  # of the model in a trial
LONGEST = 1024  # steps of a trial where the model's structure depends on the longest sequence

_CACHE: dict[str, Capabilities] = {}  # of models with random weights, by device and `HuggingFace.cache_key`
_ONE_SIDED: set[str] = set()  # of these, those that only look back, by the same key

BOTH_WAYS = "set model.causal=true, or model.bidirectional=true for a second copy that runs backwards"


def capabilities(backbone: HuggingFace, config: Config) -> Capabilities:
    """Raises `Unsupported` if the model cannot do what the recipe asks for."""
    device = planned_device()
    key = f"{device.type} {backbone.cache_key}"
    if key not in _CACHE:
        with _separate_rng():
            try:
                tried = _on_device(backbone, device)
                _check_position_tables(tried, config)
                result = _Trial(_on_device(_small_copy(tried, config), device), config).run()
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:  # in transformers' code
                raise ValueError(f"{config.label} cannot be run by transformers here: {last_line(error)}") from error
        if config.pretrained:  # its weights may decide what half precision does to it
            return result
        _CACHE[key] = result
    return _CACHE[key]


def check_one_sided(backbone: HuggingFace, config: Config) -> None:
    """Raises `Unsupported` if this causal model is two-sided where it may be, and needs no reversed copy for that."""
    if backbone.cache_key in _ONE_SIDED:
        return
    length = min(backbone.length, LONGEST)
    changes = {"bidirectional": False, "causal": False, "pretrained": False, "max_length": length}
    two_sided = config.model_copy(update=changes)
    try:
        with _separate_rng():
            model = HuggingFace(two_sided)
        capabilities(model, two_sided)
    except ValueError:  # it only looks back; whatever else is wrong, the trial of the causal model finds too
        _ONE_SIDED.add(backbone.cache_key)
        return
    raise Unsupported(f"{config.label} is two-sided by itself; leave out model.bidirectional")


@contextlib.contextmanager
def _separate_rng() -> Iterator[None]:
    """Draws inside the context do not change torch's generators, nor depend on them."""
    device = planned_device()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(0)
        if device.type == "cuda":
            torch.cuda.manual_seed(0)
        yield


def _on_device(backbone: HuggingFace, device: torch.device) -> HuggingFace:
    """The model itself where it is there, else a copy."""
    here = all(tensor.device.type == device.type for tensor in backbone.state_dict().values())
    return backbone if here else copy.deepcopy(backbone).to(device)


def _small_copy(backbone: HuggingFace, config: Config) -> HuggingFace:
    """The model itself, or one of the same structure whose windows and length are short enough for a trial."""
    names = {*backbone.config.attribute_map, *setting_names(type(backbone.config))}
    windows = {name: getattr(backbone.config, name) for name in sizes.WINDOWS if name in names}
    long = [name for name, size in windows.items() if isinstance(size, int) and size > SHORT_WINDOW]
    axial = sizes.length_of_axial_positions(backbone.config)
    too_long = backbone.fixed_length and backbone.length > LONGEST and axial is None
    if not (long or too_long):
        return backbone
    options = {**config.options, **dict.fromkeys(long, SHORT_WINDOW)}
    length = min(config.max_length or LONGEST, LONGEST)
    return HuggingFace(config.model_copy(update={"options": options, "max_length": length, "pretrained": False}))


class _Trial:
    """Runs a model on two random sequences x, and variations of them."""

    def __init__(self, backbone: HuggingFace, config: Config) -> None:
        self.backbone, self.causal, self.name, self.dropout = backbone, config.causal, config.label, config.dropout
        length = backbone.length
        if not backbone.fixed_length:
            length = min(length, backbone.pad_to_multiple_of + STEPS)
        rng, device = torch.Generator().manual_seed(0), next(backbone.parameters()).device
        self.x, self.other = (torch.randn(2, length, config.d_model, generator=rng).to(device) for _ in range(2))

    def run(self) -> Capabilities:
        backbone, x = self.backbone, self.x
        max_length, backbone.length = backbone.length, x.shape[1]
        unused = unused_parameters(backbone, x)
        backbone.eval()
        with torch.no_grad():
            self.y = outputs(backbone, x)
            if self.y.shape != x.shape:
                raise ValueError(f"{self.name} returns {tuple(self.y.shape)} for an input of {tuple(x.shape)}")
            if _difference(outputs(backbone, x), self.y) > SAME:
                raise Unsupported(f"{self.name} is not deterministic in evaluation")
            if _difference(outputs(backbone, x[:1]), self.y[:1]) > SAME:
                raise Unsupported(f"{self.name} mixes the examples of a batch")
            self._check_direction()
            fixed_length, ignores_padding = self._padding()
            single_precision = not self._survives_half_precision()
            removed, frozen = removable(backbone, unused, x, self.y)
        backbone.train()
        if self.dropout and torch.equal(outputs(backbone, x), outputs(backbone, x)):
            raise ValueError(f"dropout has no effect on {self.name}; set model.dropout=0")
        backbone.length = max_length
        return Capabilities(fixed_length, ignores_padding, single_precision, removed, frozen)

    def _check_direction(self) -> None:
        """Does a step see later ones, and earlier ones?"""
        x, other, y, length = self.x, self.other, self.y, self.x.shape[1]
        cuts = {cut for cut in (1, length // 3, length // 2, 3 * length // 4) if 0 < cut < length}
        if not cuts:  # a single step
            return
        later = earlier = 0.0
        for cut in cuts:
            changed_after = outputs(self.backbone, torch.cat([x[:, :cut], other[:, cut:]], dim=1))
            changed_before = outputs(self.backbone, torch.cat([other[:, :cut], x[:, cut:]], dim=1))
            later = max(later, _difference(changed_after[:, :cut], y[:, :cut]))
            earlier = max(earlier, _difference(changed_before[:, cut:], y[:, cut:]))
        if earlier <= UNAFFECTED:
            raise Unsupported(f"{self.name} is not a sequence model: its steps do not depend on each other")
        config = self.backbone.config
        if self.causal and later > UNAFFECTED:
            raise Unsupported(f"{self.name} looks ahead; set model.causal=false")
        if self.causal and "lsh" in getattr(config, "attn_layers", ()):  # a few steps are all in one chunk
            raise Unsupported(
                f"{self.name} looks ahead: the hashes of later steps decide what a step sees; set model.causal=false"
            )
        layers = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
        if not self.causal and any(re.search("mamba|recurrent|conv|linear|hybrid", kind) for kind in layers):
            raise Unsupported(f"{self.name} has layers that only look back; {BOTH_WAYS}")
        if not self.causal and later <= UNAFFECTED:
            raise Unsupported(f"{self.name} only looks back; {BOTH_WAYS}")

    def _padding(self) -> tuple[bool, bool]:
        """Must sequences have a fixed length, and are outputs then independent of padding?"""
        backbone, x, length = self.backbone, self.x, self.x.shape[1]
        if backbone.causal and not backbone.fixed_length:
            return False, True
        part = (length + 1) // 2
        if part == length:
            return backbone.fixed_length, True
        valid = torch.arange(length, device=x.device).expand(len(x), -1) < part
        padded = torch.cat([x[:, :part], 100 * self.other[:, part:]], dim=1)
        structure = backbone.fixed_length
        for backbone.fixed_length in (structure,) if structure else (False, True):
            unpadded = outputs(backbone, x[:, :part])
            if _difference(outputs(backbone, padded, valid)[:, :part], unpadded) <= SAME:
                return backbone.fixed_length, True
        backbone.fixed_length = structure
        return structure, False

    def _survives_half_precision(self) -> bool:
        """Without padding and with it; not every input shows YOSO's error (the angle of a cosine above 1)."""
        valid = torch.ones(self.x.shape[:2], dtype=torch.bool, device=self.x.device)
        valid[:, self.x.shape[1] // 2 + 1 :] = False
        try:
            with torch.autocast(self.x.device.type, torch.bfloat16):
                rounded = outputs(self.backbone, self.x).float()
                padded = outputs(self.backbone, self.x, valid)[valid]
        except RuntimeError:  # two types in one operation, or a number that is too large
            return False
        finite = bool(padded.isfinite().all())
        return self.backbone.model_type != "yoso" and _difference(rounded, self.y) < 0.2 and finite


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry; infinite if anything is not finite."""
    difference = float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))
    return difference if math.isfinite(difference) else math.inf


def _check_position_tables(backbone: HuggingFace, config: Config) -> None:
    """A table of positions must have a row for every step. (With a fixed length, fewer steps cannot even be run.)"""
    if backbone.fixed_length and sizes.length_of_axial_positions(backbone.config) is None:
        _check_positions(backbone.config.max_position_embeddings, backbone, config)
    steps = backbone.length if backbone.fixed_length else min(backbone.length, backbone.pad_to_multiple_of)
    lookups: list[tuple[int, int]] = []  # rows of a table, and the last one that was used

    def record(module: Any, args: Any) -> None:
        last = int(args[0].max()) if args and isinstance(args[0], Tensor) else steps - 1
        lookups.append((module.num_embeddings, last))

    hooks = [
        module.register_forward_pre_hook(record)
        for name, module in backbone.model.named_modules()
        if isinstance(module, nn.Embedding) and re.search("pos|wpe", name)
    ]
    if hooks:
        with torch.no_grad():
            outputs(backbone, torch.zeros(1, steps, config.d_model, device=next(backbone.parameters()).device))
    for hook in hooks:
        hook.remove()
    for rows, last in lookups:
        _check_positions(rows - (last - (steps - 1)), backbone, config)


def _check_positions(steps: int, backbone: HuggingFace, config: Config) -> None:
    if steps < backbone.length:
        raise ValueError(f"{config.label} has positions for {steps:,} steps, but max_length is {config.max_length:,}")
