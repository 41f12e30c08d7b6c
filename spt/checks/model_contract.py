"""The contract of a model, as checks that run it: our models in the tests, a user's by `spt check model`.

Sizes are awkward on purpose (1, 7, 63 steps). B sequences, L steps, D width.
"""

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spt.config.plugins import Component
from spt.config.recipe import Part, Train
from spt.errors import UsageError, one_line
from spt.models.base import Backbone, Context, Unsupported
from spt.models.ops.counts import as_counts
from spt.models.ops.product import flop_formulas
from spt.training.build import build_backbone
from spt.training.optimizer import optimizer_groups
from spt.training.seeding import seeded

LENGTHS = (1, 7, 63)
PADDING = 9
WIDTH = 16
TOLERANCE = 1e-4


class CheckResult(NamedTuple):
    """Whether one promise is kept."""

    name: str
    ok: bool
    detail: str = ""
    exit_code: int = 2


def check_contract(component: Component) -> list[CheckResult]:
    """Check every promise, causal and two-sided. A model may declare one of the two, or a feature, unsupported."""
    results: list[CheckResult] = []
    refused = 0
    for causal in (False, True):
        direction = "causal" if causal else "two-sided"
        try:
            tiny(component, causal)
        except Exception as error:
            if not (isinstance(error, UsageError) and isinstance(error.__cause__, Unsupported)):
                return [*results, CheckResult("can be built", False, one_line(error))]
            refused += 1
            results.append(
                CheckResult(f"can be built ({direction})", refused < 2, f"declared unsupported: {error.__cause__}")
            )
            continue
        for promise in PROMISES:
            name = f"{promise.__name__.replace('_', ' ')} ({direction})"
            try:
                problem = promise(component, causal)
                results.append(CheckResult(name, problem is None, problem or ""))
            except Exception as error:
                results.append(CheckResult(name, False, one_line(error)))
    return results


def tiny(component: Component, causal: bool, **options: Any) -> Backbone:
    """A small model with fixed weights, in evaluation mode."""
    settings = {"d_model": WIDTH, "n_layers": 2, "causal": causal, **options}
    config = component.module.Config.model_validate_json(json.dumps(settings))
    part = Part(name=component.name, **config.model_dump(mode="json"))

    def build(longest: int) -> Backbone:
        with seeded(0, "contract"):
            return build_backbone(part, longest).eval()

    model = build(max(LENGTHS) + PADDING)
    longest = valid_length(model, max(LENGTHS)) + valid_length(model, PADDING)
    return model if model.length_multiple == 1 else build(longest)


def valid_length(model: Backbone, length: int) -> int:
    """This length, rounded up to one that the model accepts."""
    return -(-length // model.length_multiple) * model.length_multiple


def sequence(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def all_valid(x: Tensor) -> Context:
    return Context(torch.ones(x.shape[:2], dtype=torch.bool, device=x.device), padded=False)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))


def _if_different(a: Tensor, b: Tensor, problem: str) -> str | None:
    """The problem, with its size, if the tensors differ by more than rounding."""
    size = difference(a, b)
    return None if size <= TOLERANCE else f"{problem} (by {size:.1g})"  # NaN, too, is a difference


@torch.no_grad()
def keeps_the_shape(component: Component, causal: bool) -> str | None:
    model = tiny(component, causal)
    for length in LENGTHS:
        x = sequence(2, valid_length(model, length))
        y = model(x, all_valid(x))
        if y.shape != x.shape or y.dtype != x.dtype:
            return f"{tuple(x.shape)} {x.dtype} became {tuple(y.shape)} {y.dtype}"
        if not y.isfinite().all():
            return f"not finite at length {length}"
    return None


@torch.no_grad()
def is_the_same_every_time(component: Component, causal: bool) -> str | None:
    """Built twice from one seed: equal weights, and nothing random in evaluation."""
    first, second = (tiny(component, causal, dropout=0.5) for _ in range(2))
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        if not torch.equal(a, b):
            return f"{name} differs between two models built from one seed; draw weights from torch's generator"
    x = sequence(2, valid_length(first, 7))
    if not torch.equal(first(x, all_valid(x)), first(x, all_valid(x))):
        return "two evaluations of the same input differ; dropout must be off in evaluation"
    return None


@torch.no_grad()
def keeps_examples_apart(component: Component, causal: bool) -> str | None:
    model = tiny(component, causal)
    x = sequence(3, valid_length(model, 7))
    alone = torch.cat([model(row[None], all_valid(row[None])) for row in x])
    return _if_different(model(x, all_valid(x)), alone, "an example's output depends on the rest of its batch")


@torch.no_grad()
def never_sees_padding(component: Component, causal: bool) -> str | None:
    model = tiny(component, causal)
    if not model.ignores_padding:  # declared, so tasks that would pad are refused
        return None
    more = valid_length(model, PADDING)
    for length in (valid_length(model, length) for length in LENGTHS):
        x = sequence(2, length)
        padded = torch.cat([x, 100 * sequence(2, more, seed=1)], dim=1)
        valid = torch.arange(length + more).expand(2, -1) < length
        y = model(padded, Context(valid, padded=True))[:, :length]
        if problem := _if_different(y, model(x, all_valid(x)), f"padding changes the output at length {length}"):
            return problem
    return None


@torch.no_grad()
def never_looks_ahead(component: Component, causal: bool) -> str | None:
    if not causal:
        return None
    model = tiny(component, causal)
    x = sequence(2, valid_length(model, 63))
    before = model(x, all_valid(x))
    for step in (0, 30, 61):
        changed = torch.cat([x[:, : step + 1], sequence(2, x.shape[1] - step - 1, seed=1)], dim=1)
        after = model(changed, all_valid(x))
        if problem := _if_different(
            after[:, : step + 1], before[:, : step + 1], f"steps after {step} change the output there"
        ):
            return problem
    return None


def outputs_by_step(model: Backbone, x: Tensor) -> Tensor:
    """(B, L, D) What a recurrent model gives for each step in turn."""
    state, outputs = model.initial_state(len(x)), []
    for t in range(x.shape[1]):
        output, state = model.step(x[:, t], state)
        outputs.append(output)
    return torch.stack(outputs, dim=1)


@torch.no_grad()
def goes_step_by_step(component: Component, causal: bool) -> str | None:
    """A causal model that declares itself recurrent gives the same output step by step as all at once."""
    model = tiny(component, causal)
    x = sequence(2, valid_length(model, 63))
    if not model.recurrent:
        return None
    return _if_different(outputs_by_step(model, x), model(x, all_valid(x)), "step by step the output differs")


def reaches_every_parameter(component: Component, causal: bool) -> str | None:
    model = tiny(component, causal).train()
    length = valid_length(model, 7)
    x = sequence(2, length)
    weight = sequence(2, length, seed=2)  # a plain sum would have no gradient behind the last norm
    (model(x, all_valid(x)) * weight).sum().backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    without_gradient = [name for name, p in trained if p.grad is None or not p.grad.abs().sum() > 0]
    not_real = [name for name, p in model.named_parameters() if not p.is_floating_point()]
    if not_real:
        return f"{', '.join(not_real)} is not real; keep real and imaginary parts in a trailing axis of size 2"
    not_finite = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if not_finite:
        return f"gradients of {', '.join(not_finite)} are not finite"
    return f"no gradient reaches {', '.join(without_gradient)}" if without_gradient else None


@torch.no_grad()
def survives_bfloat16(component: Component, causal: bool) -> str | None:
    model = tiny(component, causal)
    x = sequence(2, valid_length(model, 63))
    exact = model(x, all_valid(x))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(x, all_valid(x))
    if not rounded.isfinite().all():
        return "not finite under bfloat16 autocast"
    worst = difference(rounded.float(), exact)
    problem = f"bfloat16 autocast changes the output by {worst:.2g}; keep kernels and scans in float32"
    return problem if worst > 0.2 else None


def states_its_operations(component: Component, causal: bool) -> str | None:
    """At least as many as torch's counter sees. It misses FFTs and fused kernels, so a model may state more."""
    model = tiny(component, causal)
    length = valid_length(model, 63)
    counts = as_counts(model.flops(length)) + as_counts(model.shared_flops(length))
    stated = counts.forward
    optimizer_groups(model, Train(steps=1, batch_size=1, learning_rate=1.0))  # raises if a rate has no parameter
    if not (math.isfinite(stated) and stated > 0):
        return f"flops({length}) is {stated}"
    if not (math.isfinite(counts.backward) and counts.backward > 0):
        return f"flops({length}) states {counts.backward} for the backward pass"
    counted = counted_flops(model, length)
    return f"flops({length}) is {stated:,.0f}, but torch counts {counted:,.0f}" if stated < 0.99 * counted else None


@torch.no_grad()
def counted_flops(model: Backbone, length: int) -> float:
    """Forward operations on one sequence as torch counts them, with attention unfused."""
    x, training = sequence(1, length), model.training
    model.train()  # runs count the operations of training
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counter:
        model(x, all_valid(x))
    model.train(training)
    return float(counter.get_total_flops())


PROMISES: tuple[Callable[[Component, bool], str | None], ...] = (
    keeps_the_shape,
    is_the_same_every_time,
    keeps_examples_apart,
    never_sees_padding,
    never_looks_ahead,
    goes_step_by_step,
    reaches_every_parameter,
    survives_bfloat16,
    states_its_operations,
)
