"""The Python API: what the commands do, as functions. `import spt` offers these names and loads each on first use.

Errors are subclasses of `spt.SptError`, whose message is one sentence. Data sets are read from the folder that
SPT_DATA_DIR names.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from spt.config.job import Job
from spt.config.load import load
from spt.config.overrides import parse_overrides
from spt.config.recipe import ResolvedRecipe
from spt.errors import SptError, UsageError
from spt.report import collect
from spt.report.collect import Report
from spt.report.stats import corrected_interval
from spt.runs.plan import ARMS, Smoke
from spt.runs.result import Result
from spt.runtime import launch
from spt.runtime.settings import Settings
from spt.studies.schema import StudySource, from_mapping, read, recipe_overrides, validate

if TYPE_CHECKING:
    from spt.estimators.estimator import SequenceClassifier, SequenceRegressor
    from spt.execution.estimate import MeasuredCosts
    from spt.execution.run_study import ExecutionTarget
    from spt.execution.work import WorkDone
    from spt.inference.trained_model import TrainedModel
    from spt.runtime.distributed import Runtime
    from spt.studies.grid import StudyGrid
    from spt.training.load_run import FinishedRun

__all__ = [
    "FinishedStudy",
    "Report",
    "SequenceClassifier",
    "SequenceRegressor",
    "Settings",
    "SptError",
    "TrainedRun",
    "compare",
    "corrected_interval",
    "finetune",
    "load_model",
    "load_recipe",
    "load_run",
    "pretrain",
    "read_report",
    "run_study",
]

logger = logging.getLogger(__name__)

RUNS = Path("runs")  # where runs are kept when nothing else is said


class TrainedRun(NamedTuple):
    """A finished run of `pretrain` or `finetune`. `spt.load_run(run.path)` opens it."""

    path: Path
    result: Result  # scores, costs, parameters: what result.json holds


class FinishedStudy(NamedTuple):
    """A study that was run, with its report, which is also written to the study's folder."""

    path: Path
    report: Report
    failed: int  # number of runs; the report lists them with their reasons


def load_recipe(
    source: str | Path, overrides: Sequence[str] | Mapping[str, Any] = (), *, smoke: Smoke = False
) -> ResolvedRecipe:
    """Load and check a packaged recipe or a YAML file, fill in every default, and prepare its data if needed.

    Overrides are `["model.d_model=64"]`, as on the command line, or `{"model.d_model": 64}`. A smoke recipe takes the
    same code path in seconds: a few training steps of a small network on short sequences (smoke=True), or of a network
    of the recipe's own sizes (smoke="full").

        recipe = spt.load_recipe("quickstart", {"model.n_heads": 2})
        print(recipe.to_yaml())

    Raises UsageError if the source is not a recipe, RecipeError with everything that is wrong with it, and DataError
    if its data are missing or wrong.
    """
    from spt.data.dataset import identify_data

    changes = recipe_overrides(overrides) if isinstance(overrides, Mapping) else overrides
    return identify_data(load(str(source), changes, smoke=smoke))


def pretrain(
    recipe: str | Path | ResolvedRecipe,
    *,
    seed: int = 0,
    out: str | Path | None = None,
    settings: Settings | None = None,
) -> TrainedRun:
    """Self-pretrain: run the recipe's first stage, reusing a finished run and continuing an interrupted one.

    `out` is the folder that holds the run folders, by default SPT_RUNS_DIR or `runs`.

        run = spt.pretrain("quickstart", seed=0)
        print(run.path, run.result.val)

    Raises what `load_recipe` raises, DivergedError if the loss stops being finite, and CheckpointError or OutputError
    if a run folder cannot be used.
    """
    return _train(Job(_resolve(recipe), "pretrain", seed), out, settings)


def finetune(
    recipe: str | Path | ResolvedRecipe,
    *,
    seed: int = 0,
    scratch: bool = False,
    from_run: str | Path | None = None,
    out: str | Path | None = None,
    settings: Settings | None = None,
) -> TrainedRun:
    """Train on the task itself: after the recipe's own pretraining, which is run if missing; after the pretraining run
    in the folder `from_run`; or from random weights (`scratch`, the baseline).

        spt.finetune("quickstart").result.test["accuracy"]
        spt.finetune("quickstart", scratch=True).result.test["accuracy"]

    Raises what `pretrain` raises, and DataError if `from_run` was pretrained on this task's test rows.
    """
    if scratch and from_run is not None:
        raise UsageError("scratch and a run to start from contradict each other: one means random weights, one a run's")
    resolved = _resolve(recipe)
    if scratch:
        return _train(Job(resolved, "finetune", seed), out, settings)
    if from_run is None:
        return _train(Job(resolved, "finetune", seed, Job(resolved, "pretrain", seed)), out, settings)
    from spt.training.stage import open_weights

    return _train(Job(resolved, "finetune", seed, open_weights(Path(from_run))), out, settings)


def compare(
    recipes: str | Path | Sequence[str | Path],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    arms: Sequence[str] = ARMS,
    baselines: str | Sequence[str] = (),
    seeds: int | Sequence[int] = 5,
    splits: int | Mapping[str, int] | None = None,
    smoke: Smoke = False,
    out: str | Path | None = None,
    jobs: int | Literal["auto"] = 1,
    settings: Settings | None = None,
) -> FinishedStudy:
    """Train both arms of every recipe, scratch and SPT, over seeds, and report the paired differences.

    More `arms` add controls to the report: `frozen`, `encoder` (or `parts=A+B`), `shuffled`, `other=RECIPE`,
    `joint=WEIGHT`. `baselines` compares both arms with non-neural baselines: "auto", or names such as `tfidf` and
    `boosting`. `splits` runs every seed on several splits of your own data: 5 (folds), `{"folds": 5, "repeats": 2}`, or
    `{"random": 10}`.

        study = spt.compare("quickstart", seeds=3, jobs=2)
        for row in study.report.rows:
            print(row.label, row.delta, row.low, row.high)

    Raises what `run_study` raises.
    """
    sources = [recipes] if isinstance(recipes, str | Path) else recipes
    changes = overrides if isinstance(overrides, Mapping) else parse_overrides(overrides)
    study: dict[str, Any] = {"kind": "compare", "recipes": [str(source) for source in sources], "set": dict(changes)}
    study |= {"arms": arms, "baselines": baselines, "splits": splits}
    return run_study(study, seeds=seeds, smoke=smoke, out=out, jobs=jobs, settings=settings)


def run_study(
    study: str | Path | Mapping[str, Any] | StudySource,
    *,
    seeds: int | Sequence[int] | None = None,
    smoke: Smoke = False,
    out: str | Path | None = None,
    jobs: int | Literal["auto"] = 1,
    slurm: Sequence[str] = (),
    shard: tuple[int, int] | None = None,
    arm: str | None = None,
    settings: Settings | None = None,
) -> FinishedStudy:
    """Run or continue a study and report it; `study` is a packaged study's name, a file, a study's folder, or its keys.

    `seeds` (how many, or which) override the study's own. `jobs` is the number of runs at once on this machine
    (`"auto"`: on a CPU one per core, if one thread is enough for each); `slurm` makes them on Slurm, with options such
    as `["partition=gpu", "time=600"]`. `shard=(i, n)` makes only the i-th of n parts, `arm="scratch"` only the runs of
    that arm.

        spt.run_study({"kind": "data", "recipes": ["quickstart"], "fractions": [0.1, 0.3]}, seeds=3)

    A run that fails or diverges raises nothing: it is counted, and the report lists it. Raises UsageError or
    RecipeError for what cannot be run, DataError, OutputError, and Stopped on SIGTERM; the same call then continues.
    """
    return plan_study(
        study, seeds=seeds, smoke=smoke, out=out, jobs=jobs, slurm=slurm, shard=shard, arm=arm, settings=settings
    ).run()


def load_run(path: str | Path) -> "FinishedRun":
    """Load a finished run of either stage: its `network` with the selected weights, `data`, `result` and `job`.

        run = spt.load_run("runs/finetune-0123456789ab")
        print(run.network.parameter_counts(), len(run.data.test), run.result.test)

    Raises UsageError if there is no such folder, CheckpointError if it is not a finished run or its weights cannot be
    used, and DataError if its data are missing or have changed since.
    """
    from spt.training.load_run import load_run

    return load_run(Path(path))


def load_model(path: str | Path, *, trust_code: bool = False) -> "TrainedModel":
    """Load a trained model that answers new rows, from a finished run's folder or one that `spt export` has written.

        model = spt.load_model("exported")
        labels = model.predict(rows)

    Your own network in an exported folder is code, which runs only with `trust_code`. Raises UsageError if there is no
    such folder or its code is not trusted, CheckpointError if it is damaged or of another version, and DataError if a
    run's data are missing.
    """
    from spt.inference.trained_model import TrainedModel

    return TrainedModel.open(path, trust_code=trust_code)


def read_report(*paths: str | Path) -> Report:
    """Read the report on studies, run folders and folders of them, from their files alone; trains and writes nothing.

        report = spt.read_report("runs")
        report.records()  # the rows as dicts
        report.to_pandas()  # the rows as a data frame

    Raises UsageError if a folder does not exist, DataError if it has no finished runs.
    """
    if not paths:
        raise UsageError("no folder is named; name a study, a run, or the folder that holds them")
    return collect.read_report([Path(path) for path in paths])


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:  # the estimators, which import scikit-learn
        if name not in ("SequenceClassifier", "SequenceRegressor"):
            raise AttributeError(f"module 'spt.api' has no attribute {name!r}")
        from spt.estimators import estimator

        return getattr(estimator, name)


# ------------------------------------------------------------------------------------------- shared with the commands


@dataclass(frozen=True)
class PlannedStudy:
    """A study laid out as runs, before any of them is made."""

    grid: "StudyGrid"
    folder: Path
    costs: "MeasuredCosts"
    target: "ExecutionTarget"
    runtime: "Runtime"

    def run(self) -> FinishedStudy:
        """Make every missing run; process 0 reads and writes the report."""
        from spt.execution.run_study import run_study as execute

        folder, failed = execute(self.grid, self.folder.parent, self.target, self.runtime)

        def report() -> Report:
            from spt.report.write import write_report

            built = read_report(folder)
            write_report(built, folder)
            return built

        return FinishedStudy(folder, self.runtime.on_main(report), failed)

    def work(self, most: int | None = None, wait: bool = True) -> "WorkDone":
        """Make missing runs, at most so many, beside other processes that do the same; `wait` for those of others."""
        from spt.execution.work import WorkLimits, work_on_study

        return work_on_study(self.grid, self.folder.parent, WorkLimits(most, wait), self.runtime)


def plan_study(
    study: str | Path | Mapping[str, Any] | StudySource,
    *,
    seeds: int | Sequence[int] | None = None,
    smoke: Smoke = False,
    out: str | Path | None = None,
    jobs: int | Literal["auto"] = 1,
    slurm: Sequence[str] = (),
    shard: tuple[int, int] | None = None,
    arm: str | None = None,
    settings: Settings | None = None,
) -> PlannedStudy:
    """A study's runs and where they will be made. Arguments and errors are those of `run_study`; trains nothing, but
    measures this machine if a budget is one of time."""
    source = _study_source(study, seeds)
    if jobs not in (1, "auto") and launch.world_size() > 1:
        raise UsageError("jobs and several processes contradict each other: runs at once have one process each")
    from spt.execution.estimate import MeasuredCosts
    from spt.execution.run_study import ExecutionTarget, study_folder
    from spt.execution.slurm import Slurm
    from spt.runs.plan import read_plan
    from spt.studies.grid import expand

    root = _root(out)
    if source.folder is not None:  # goes on where it lies, as it was run
        if out not in (None, RUNS) and root.resolve() != source.folder.parent:
            logger.info(f"note: the study goes on where it lies, in {source.folder.parent}, not in {root}")
        root, smoke = source.folder.parent, smoke or read_plan(source.folder).smoke
    target = ExecutionTarget(jobs, Slurm.parse(slurm) if slurm else None, shard, arm)
    runtime = start_runtime(replace(settings or Settings(), wait=True))
    costs = MeasuredCosts(root, runtime)
    grid = expand(source.study, smoke, costs)
    for note in grid.notes:
        logger.info(note)
    folder = study_folder(grid, root)
    if source.folder not in (None, folder.resolve()):
        logger.info(
            f"note: its recipes or options are not those of {source.folder.name}, so this is a study of its own: "
            f"{folder.name}"
        )
    return PlannedStudy(grid, folder, costs, target, runtime)


def start_runtime(settings: Settings) -> "Runtime":
    """The processes and the device of this program, with notes on idle devices and on what the launcher set."""
    from spt.runtime.distributed import Runtime

    runtime = Runtime(settings)
    if launch.world_size() > 1:
        logger.info(runtime.formation())
        if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
            logger.info("note: the launcher's mixed precision is not used; precision is the recipe's")
        if runtime.steps_in_backward:
            logger.info("note: spt has not been run with DeepSpeed yet; hold this run against one without it")
    elif (idle := runtime.idle_devices()) > 0:
        logger.info(
            f"note: one of {idle + 1} devices is used; --num-processes {idle + 1} uses all, with the same results"
        )
    return runtime


def _study_source(
    study: str | Path | Mapping[str, Any] | StudySource, seeds: int | Sequence[int] | None
) -> StudySource:
    if isinstance(study, Mapping):
        study = from_mapping(study, "the study")
    source = study if isinstance(study, StudySource) else read(str(study))
    if seeds is None:
        return source
    keys = {**source.study.model_dump(mode="json"), "seeds": seeds if isinstance(seeds, int) else list(seeds)}
    return replace(source, study=validate(keys, source.name))


def _train(job: Job, out: str | Path | None, settings: Settings | None) -> TrainedRun:
    from spt.training.stage import run_stage

    root = _root(out)
    return TrainedRun(root / job.name, run_stage(job, root, start_runtime(settings or Settings())))


def _resolve(recipe: str | Path | ResolvedRecipe) -> ResolvedRecipe:
    if not isinstance(recipe, ResolvedRecipe):
        return load_recipe(recipe)
    if recipe.data is not None:
        return recipe
    from spt.data.dataset import identify_data

    return identify_data(recipe)


def _root(out: str | Path | None) -> Path:
    return Path(os.environ.get("SPT_RUNS_DIR") or RUNS) if out is None else Path(out)
