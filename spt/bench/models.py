"""`spt bench model`: time and memory of a model's training step, and which parts take the time."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from itertools import product
from typing import Any, get_args

import torch

from spt.bench.launches import launches
from spt.bench.parts import shares
from spt.bench.peaks import KilledError, peaks_in_subprocess
from spt.bench.timing import (
    Precision,
    alternate,
    check_backends,
    check_graphs,
    conditions,
    memory_growth,
    parse_choices,
    parse_counts,
)
from spt.bench.training_step import Step, Variant
from spt.config.load import complete_part
from spt.config.overrides import apply_overrides, parse_overrides, split_arguments
from spt.config.plugins import find_plugin
from spt.config.recipe import Part
from spt.errors import BackendError, RecipeError, SptError, UsageError, one_line
from spt.models.ops import backends
from spt.runtime.distributed import Runtime
from spt.runtime.environment import compiler_problem
from spt.runtime.memory import out_of_memory
from spt.runtime.settings import Settings
from spt.studies.equal_size import TOLERANCE, nearest_scales

logger = logging.getLogger(__name__)


def peak_of_step(step: Step) -> int:
    def twice() -> None:  # the second step has AdamW's state besides the activations
        step()
        step()

    if step.variant.compiled:
        step(optimise=False)
    else:
        step(length=16, batch=1, optimise=False)  # loads libraries, starts threads
    return memory_growth(step.clock.device, twice)


def parse_models(
    arguments: Iterable[str],
    *,
    length: str | None = None,
    batch: str | None = None,
    layers: int | None = None,
    width: int | None = None,
    precision: str = "fp32",
    backend: str = "auto",
    attention: str = "auto",
    compile: bool = False,
    cuda_graphs: bool = False,
    recompute: bool = False,
    cpu: bool = False,
    quick: bool = False,
    match_parameters: bool = False,
) -> list[Variant]:
    """The rows of a command line: every model at every length, batch, precision, kernel back end and attention.

    `key=value` before the first model applies to all of them, after a model to that one.
    """
    shared: list[str] = []
    models: list[tuple[str, list[str]]] = []
    for argument in arguments:
        names, changes = split_arguments([argument])
        models += [(name, []) for name in names]
        (models[-1][1] if models else shared).extend(changes)
    if not models:
        raise UsageError("no model is named; spt list models shows ours (the name of your own file ends in .py)")
    sizes = {"n_layers": layers or (1 if quick else None), "d_model": width or (16 if quick else None)}
    base = {key: value for key, value in sizes.items() if value is not None} | parse_overrides(shared)
    rows = []
    for name, changes in models:
        part = _part(name, {}, base | parse_overrides(changes))
        rows += [
            Variant(
                *(part.name, part.options, steps, size, kind, library, how),
                *(compiled, recorded, recompute, cpu, " ".join(changes)),
            )
            for steps, size, kind, library, how, compiled, recorded in product(
                parse_counts(("32" if quick else "1024") if length is None else length, "--length"),
                parse_counts(("2" if quick else "8") if batch is None else batch, "--batch"),
                parse_choices(precision, get_args(Precision), "--precision"),
                parse_choices(backend, backends.NAMES["kernels"], "--backend"),
                parse_choices(attention, backends.NAMES["attention"], "--attention"),
                (False, True) if compile else (False,),
                (False, True) if cuda_graphs else (False,),
            )
        ]
    return with_equal_parameters(rows) if match_parameters else rows


def _part(name: str, options: Mapping[str, Any], changes: Mapping[str, Any]) -> Part:
    """A model with these options, changed as a command line says it: an option within another as `options.heads`."""
    raw = deepcopy({"name": name, **options})
    apply_overrides(raw, deepcopy(dict(changes)))
    return complete_part("models", name, raw)


def with_equal_parameters(variants: Sequence[Variant]) -> list[Variant]:
    """Every model at the width where it has as many parameters as the first, within 5 %; raises UsageError where
    there is none. Inner widths that were given keep their ratio to it."""
    targets: dict[int, int] = {}
    scaled: dict[str, Variant] = {}  # precision and back end change no size
    for variant in variants:
        target = targets.setdefault(variant.length, _parameters(variant))
        key = repr((variant.model, variant.options, variant.length))
        if key not in scaled:
            scaled[key] = _with_parameters(variant, target)
    found = [scaled[repr((variant.model, variant.options, variant.length))] for variant in variants]
    pairs = zip(variants, found, strict=True)
    return [replace(variant, options=each.options, given=each.given) for variant, each in pairs]


def _with_parameters(variant: Variant, target: int) -> Variant:
    config = find_plugin("models", variant.model).configure(variant.options)
    given = int(variant.options["d_model"])

    def at(width: int) -> Variant:
        changes = {} if width == given else config.at_scale("d_model", width)
        part = _part(variant.model, variant.options, changes)
        options = " ".join([*filter(None, [variant.given]), *(f"{name}={value}" for name, value in changes.items())])
        return replace(variant, options=part.options, given=options)

    def accepts(width: int) -> bool:
        try:
            at(width)
        except RecipeError:
            return False
        return True

    def count(width: int) -> float | None:
        try:
            return float(_parameters(at(width)))
        except UsageError:
            return None

    best = nearest_scales(count, given, float(target), accepts=accepts).best
    if abs(best.cost / target - 1) > TOLERANCE:
        raise UsageError(
            f"{label(variant)}: no width gives it {target:,} parameters within 5 %; the nearest is {best.cost:,.0f} at "
            f"d_model={best.value}; change another of its options, or leave it out"
        )
    return at(best.value)


def _parameters(variant: Variant) -> int:
    from spt.training.build import build_backbone

    with torch.device("meta"), reported(variant):
        model = build_backbone(Part(name=variant.model, **variant.options), variant.length)
    return sum(p.numel() for p in model.parameters())


def bench_models(variants: Sequence[Variant], rounds: int, separate_peaks: bool = True) -> dict[str, Any]:
    """What `spt bench model` prints, as plain data.

    On CPUs, peaks are measured by one process each or, without `separate_peaks`, which is faster, by one for all.
    """
    device = Runtime(Settings(quiet=True, cpu=variants[0].cpu)).device
    check_backends({variant.backend for variant in variants}, "kernels", device)
    check_backends({variant.attention for variant in variants}, "attention", device)
    check_graphs(any(variant.cuda_graphs for variant in variants), device)
    if any(variant.compiled for variant in variants) and (problem := compiler_problem(device.type)) is not None:
        logger.info(f"--compile: torch.compile does not work here ({problem}); continuing without it")
        variants = [variant for variant in variants if not variant.compiled]
    steps: dict[int, Step] = {}
    peaks: dict[int, int | None] = {}
    failed: dict[int, str] = {}
    in_subprocess = device.type == "cpu"
    shared_peaks: list[int | None] | None = None
    if in_subprocess and not separate_peaks:
        with contextlib.suppress(KilledError):  # then one by one, to see which one it is
            shared_peaks = peaks_in_subprocess([asdict(variant) for variant in variants])
    for i, variant in enumerate(variants):
        try:
            with reported(variant):
                step = Step(variant)
                if shared_peaks is not None:
                    peaks[i] = shared_peaks[i]
                else:
                    peaks[i] = peaks_in_subprocess([asdict(variant)])[0] if in_subprocess else peak_of_step(step)
                step()
                steps[i] = step
        except KilledError:
            failed[i] = "killed, probably for lack of memory"
        except Exception as error:
            if not out_of_memory(error):
                raise
            failed[i] = "out of memory"
        if i in failed:
            logger.info(f"{label(variant)}: {failed[i]}")
    if not steps:
        raise BackendError(f"{label(variants[0])}: {failed[0]}; use a smaller batch or shorter sequences")
    timings = dict(zip(steps, alternate(list(steps.values()), rounds), strict=True))
    first = next(iter(steps))
    rows = []
    for i, variant in enumerate(variants):
        row: dict[str, Any] = {**asdict(variant), "failed": failed.get(i)}
        if i in steps:
            step, seconds, peak, base = steps[i], timings[i].seconds(), peaks[i], peaks[first]
            row |= {
                "parameters": sum(p.numel() for p in step.model.parameters()),
                "seconds": seconds,
                "step_quartiles": timings[i].quartiles(),
                "steps": sum(map(len, timings[i].rounds)),
                "ratio": timings[i].ratios(timings[first]),
                "positions_per_second": variant.batch * variant.length / seconds["step"],
                "flops_per_second": step.operations() / seconds["step"],
                "peak_bytes": peak,
                "peak_ratio": peak / base if peak is not None and base else None,
                "shares": shares(step, seconds["step"]),
                "launches": launches(variant),
            }
        rows.append(row)
    return {"kind": "model", **conditions(device, rounds), "rows": rows}


@contextlib.contextmanager
def reported(variant: Variant) -> Iterator[None]:
    """Within, errors of a model become sentences; what memory lacks is passed on."""
    try:
        yield
    except (SptError, KilledError):
        raise
    except backends.Unavailable as error:
        raise BackendError(f"{label(variant)}: {error}") from error
    except Exception as error:
        if out_of_memory(error):
            raise
        raise UsageError(
            f"model {variant.model} fails on a batch: {one_line(error)}; spt check model {variant.model} tells more"
        ) from error


def label(variant: Variant) -> str:
    return f"{variant.model} at length {variant.length:,}, batch {variant.batch:,}, {variant.precision}"
