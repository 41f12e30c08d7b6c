"""What a model can do, found by running it on a few random steps: direction, padding, precision, unused parameters.

Letters: B sequences, L steps, D width.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from spt.models.base import Context, Unsupported
from spt.models.hf import sizes
from spt.models.hf.backbone import Capabilities, HuggingFace, remove
from spt.models.hf.config import Config, last_line, setting_names

SAME = 1e-4  # outputs with a smaller relative difference count as the same
UNAFFECTED = 1e-5  # a step whose output changes by less does not depend on what was changed
STEPS = 24  # of a trial
SHORT_WINDOW = 8  # of the model in a trial
LONGEST = 1024  # steps of a trial where the model's structure depends on the longest sequence

_CACHE: dict[str, Capabilities] = {}  # of models with random weights, by `HuggingFace.cache_key`


def capabilities(backbone: HuggingFace, config: Config) -> Capabilities:
    """Raises `Unsupported` if the model cannot do what the recipe asks for."""
    if backbone.cache_key not in _CACHE:
        with _separate_rng():
            try:
                _check_position_tables(backbone, config)
                result = _Trial(_small_copy(backbone, config), config).run()
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:  # in transformers' code
                raise ValueError(f"{config.label} cannot be run by transformers here: {last_line(error)}") from error
        if config.pretrained:  # its weights may decide what half precision does to it
            return result
        _CACHE[backbone.cache_key] = result
    return _CACHE[backbone.cache_key]


@contextlib.contextmanager
def _separate_rng() -> Iterator[None]:
    """Draws inside the context do not change torch's generator, nor depend on it."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


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
        rng = torch.Generator().manual_seed(0)
        self.x, self.other = (torch.randn(2, length, config.d_model, generator=rng) for _ in range(2))

    def run(self) -> Capabilities:
        backbone, x = self.backbone, self.x
        max_length, backbone.length = backbone.length, x.shape[1]
        unused = self._unused_parameters()
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
            removable, frozen = self._removable(unused)
        backbone.train()
        if self.dropout and torch.equal(outputs(backbone, x), outputs(backbone, x)):
            raise ValueError(f"dropout has no effect on {self.name}; set model.dropout=0")
        backbone.length = max_length
        return Capabilities(fixed_length, ignores_padding, single_precision, removable, frozen)

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
            raise Unsupported(f"{self.name} has layers that only look back; set model.causal=true")
        if not self.causal and later <= UNAFFECTED:
            raise Unsupported(f"{self.name} only looks back; set model.causal=true")

    def _padding(self) -> tuple[bool, bool]:
        """Must sequences have a fixed length, and are outputs then independent of padding?"""
        backbone, x, length = self.backbone, self.x, self.x.shape[1]
        if backbone.causal and not backbone.fixed_length:
            return False, True
        part = (length + 1) // 2
        if part == length:
            return backbone.fixed_length, True
        valid = torch.arange(length).expand(len(x), -1) < part
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
        valid = torch.ones(self.x.shape[:2], dtype=torch.bool)
        valid[:, self.x.shape[1] // 2 + 1 :] = False
        try:
            with torch.autocast("cpu", torch.bfloat16):
                rounded = outputs(self.backbone, self.x).float()
                padded = outputs(self.backbone, self.x, valid)[valid]
        except RuntimeError:  # two types in one operation, or a number that is too large
            return False
        finite = bool(padded.isfinite().all())
        return self.backbone.model_type != "yoso" and _difference(rounded, self.y) < 0.2 and finite

    def _unused_parameters(self) -> set[str]:
        """Parameters without a gradient. Experts do not count, since so few steps do not reach all of them."""
        self.backbone.train()
        weight = torch.randn(self.x.shape, generator=torch.Generator().manual_seed(1))
        with torch.enable_grad():
            (outputs(self.backbone, self.x) * weight).sum().backward()
        parameters = self.backbone.model.named_parameters()
        unused = {name for name, parameter in parameters if parameter.grad is None and "expert" not in name}
        self.backbone.zero_grad(set_to_none=True)
        return unused

    def _removable(self, unused: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Modules of unused parameters only, and single unused parameters: those that can be removed, and the
        parameters of the others."""
        model: Any = self.backbone.model
        candidates: list[str] = []
        for name, module in model.named_modules():
            own = {f"{name}.{key}" for key, _ in module.named_parameters()} if name else set()
            if own and own <= unused and not _inside(name, candidates):
                candidates.append(name)
        candidates += [name for name in sorted(unused) if not _inside(name, candidates)]

        def works_without(names: list[str]) -> bool:
            restore = remove(model, names)
            try:
                return torch.equal(outputs(self.backbone, self.x), self.y)
            except Exception:  # models raise anything for want of a part
                return False
            finally:
                restore()

        if not works_without(candidates):
            candidates = [name for name in candidates if works_without([name])]
        return tuple(candidates), tuple(name for name in sorted(unused) if not _inside(name, candidates))


def outputs(
    backbone: HuggingFace, x: Float[Tensor, "B L D"], valid: Bool[Tensor, "B L"] | None = None
) -> Float[Tensor, "B L D"]:
    everything = torch.ones(x.shape[:2], dtype=torch.bool)
    return backbone(x, Context(everything if valid is None else valid, padded=valid is not None))


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry; infinite if anything is not finite."""
    difference = float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))
    return difference if math.isfinite(difference) else math.inf


def _inside(name: str, modules: Iterable[str]) -> bool:
    """Is this the name of a module or parameter among, or inside, these?"""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


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
            outputs(backbone, torch.zeros(1, steps, config.d_model))
    for hook in hooks:
        hook.remove()
    for rows, last in lookups:
        _check_positions(rows - (last - (steps - 1)), backbone, config)


def _check_positions(steps: int, backbone: HuggingFace, config: Config) -> None:
    if steps < backbone.length:
        raise ValueError(f"{config.label} has positions for {steps:,} steps, but max_length is {config.max_length:,}")
