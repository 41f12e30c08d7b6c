"""`spt pretrain`, `finetune`, `evaluate`: one run at a time."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spt.cli.guard import command
from spt.cli.options import (
    RUNS,
    RUNTIME,
    JsonOption,
    OutOption,
    RecipeArgument,
    ResumeOption,
    RuntimeOptions,
    SeedOption,
    SmokeFullOption,
    SmokeOption,
    one_recipe,
    one_seed,
    settings,
    smoke_size,
)
from spt.cli.output import notify, print_json, show

if TYPE_CHECKING:
    from spt.api import TrainedRun
    from spt.runs.result import Result

app = typer.Typer()


@command(app)
def pretrain(
    arguments: RecipeArgument,
    seed: SeedOption = "0",
    out: OutOption = RUNS,
    resume: ResumeOption = "auto",
    smoke: SmokeOption = False,
    smoke_full: SmokeFullOption = False,
    as_json: JsonOption = False,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Self-pretrain on the training split's inputs, without labels: the recipe's first stage."""
    recipe, number = one_recipe(arguments, smoke_size(smoke, smoke_full)), one_seed(seed)
    from spt.api import pretrain

    _show(pretrain(recipe, seed=number, out=out, settings=settings(resume, runtime)), as_json)


@command(app)
def finetune(
    arguments: RecipeArgument,
    scratch: Annotated[bool, typer.Option("--scratch", help="Start from random weights: the baseline.")] = False,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="Start from this finished pretraining run's folder.")
    ] = None,
    seed: SeedOption = "0",
    out: OutOption = RUNS,
    resume: ResumeOption = "auto",
    smoke: SmokeOption = False,
    smoke_full: SmokeFullOption = False,
    as_json: JsonOption = False,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Train on the task itself; without --scratch or --from, after the recipe's own pretraining, which is run if
    missing.
    """
    recipe, number = one_recipe(arguments, smoke_size(smoke, smoke_full)), one_seed(seed)
    from spt.api import finetune

    run = finetune(recipe, seed=number, scratch=scratch, from_run=source, out=out, settings=settings(resume, runtime))
    _show(run, as_json)


@command(app)
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished finetuning run.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[task.a=c …]", help="Changes to its task: other data, same weights.")
    ] = None,
    split: Annotated[
        Literal["test", "val", "train"], typer.Option("--split", help="The split that is scored.")
    ] = "test",
    as_json: JsonOption = False,
    runtime: RuntimeOptions = RUNTIME,
) -> None:
    """Score a finished run's weights once more, on its task or on a changed one, without training.

    If the changed task's steps lie further apart in time (speech at half the sampling rate), continuous-time models
    rescale their step size.
    """
    from spt.analysis.reevaluate import reevaluate
    from spt.api import start_runtime

    scored = reevaluate(run, changes or [], split, start_runtime(settings("auto", runtime)))
    if as_json:
        print_json(scored)
        return
    scores = ", ".join(f"{name} {value:.6g}" for name, value in scored["scores"].items())
    show(f"{run.name}: {scores} on {scored['rows']:,} {split} rows")
    if scored["rate"] != 1:
        notify(
            f"note: steps are {scored['rate']:g} times as far apart as in training; the model's step size was rescaled"
        )
    for note in scored["notes"]:
        notify(f"note: {note}")


def _show(run: "TrainedRun", as_json: bool) -> None:
    if as_json:
        print_json({"run": str(run.path), **run.result.model_dump(mode="json")})
    else:
        show(_summary(run.path, run.result))


def _summary(folder: Path, result: "Result") -> str:
    scores = result.test if result.test is not None else result.val
    split = "test" if result.test is not None else "validation"
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
    cost = result.total
    return (
        f"{result.stage} {result.recipe} seed {result.seed}: {split} {numbers} (step {result.best_step:,})\n"
        f"cost {cost.steps:,} steps, {cost.examples:,} examples, {cost.flops:.3g} FLOPs, {cost.seconds:,.0f} s\n"
        f"run  {folder}"
    )
