"""`spt baselines`: answers to a task without a network, by themselves."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from spt.cli.guard import command
from spt.cli.options import (
    RUNS,
    DataOption,
    DebugOption,
    JsonOption,
    OutOption,
    RecipeArgument,
    SmokeOption,
    WorkersOption,
    one_recipe,
    seeds,
)
from spt.cli.output import console, notify, print_json
from spt.errors import FailedRuns, UsageError

if TYPE_CHECKING:
    from spt.runs.baseline import BaselineResult

app = typer.Typer()


@command(app)
def baselines(
    arguments: RecipeArgument,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="NAME,…",
            help="Only these: majority, linear_probe, logistic, tfidf, catch22, boosting.",
            show_default="all that fit",
        ),
    ] = None,
    seed_text: Annotated[
        str, typer.Option("--seeds", help="For baselines that depend on a seed: how many (5: 0 to 4), or which.")
    ] = "1",
    smoke: SmokeOption = False,
    out: OutOption = RUNS,
    data_dir: DataOption = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Score non-neural baselines on a recipe's task. Finished ones are reused.

    spt compare --baselines makes the same scores and compares networks with them.
    """
    from spt.baselines.job import baseline_jobs
    from spt.baselines.registry import BASELINES, compared_metric
    from spt.data.dataset import open_task
    from spt.errors import did_you_mean
    from spt.execution.baselines import make_baselines
    from spt.runs.baseline import BaselineResult, baseline_outcome

    names = None if only is None else [name.strip() for name in only.split(",") if name.strip()]
    if names == [] or (unknown := [name for name in names or () if name not in BASELINES]):
        raise UsageError(
            f"--only {only}: "
            + (f"{unknown[0]} is no baseline{did_you_mean(unknown[0], BASELINES)}" if names else "empty")
        )
    recipe = one_recipe(arguments, smoke)
    data = open_task(recipe.recipe.task)
    metric = compared_metric(recipe, data)
    jobs, refused = baseline_jobs(names, recipe, data, metric, seeds(seed_text))
    for name, reason in refused.items():
        notify(f"no baseline {name}: {reason}")
    if not jobs:
        raise UsageError(f"{recipe.name}: none of these baselines fits its task")
    failed = make_baselines(jobs, out)
    outcomes = [baseline_outcome(out, job.folder) for job in jobs]
    results = [outcome for outcome in outcomes if isinstance(outcome, BaselineResult)]
    if as_json:
        print_json(
            {
                "recipe": recipe.name,
                "metric": metric.name,
                "baselines": [result.model_dump(mode="json") for result in results],
                "failed": failed,
                "refused": refused,
            }
        )
    else:
        _show(results, metric.name)
    if failed:
        raise FailedRuns(f"{len(failed)} of the baselines failed; the same command tries them again")


def _show(results: "list[BaselineResult]", metric: str) -> None:
    from spt.report.format import metric_text, score_text, time_text
    from spt.studies.status import plain_table

    def line(result: "BaselineResult") -> tuple[Any, ...]:
        scores = (score_text(result.val[metric], metric), score_text(result.test[metric], metric))
        seed = "-" if result.seed is None else str(result.seed)
        return (result.title, seed, *scores, time_text(result.seconds))

    best_first = sorted(results, key=lambda result: (-1 if result.higher_is_better else 1) * result.test[metric])
    console().print(metric_text(metric))
    console().print(plain_table(("baseline", "seed", "validation", "test", "time"), map(line, best_first)))
