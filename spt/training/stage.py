"""Where everything is joined: a job's data, network, objective and directory. `run_stage` is the way in."""

import contextlib
import logging
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spt import __version__
from spt.config.job import Job, PretrainedWeights, digest, without_paths
from spt.config.plugins import find_plugin, line_in
from spt.config.recipe import LOWER_IS_BETTER
from spt.data.dataset import training_fingerprints
from spt.data.fingerprints import overlap, refuse_leak, split_record
from spt.errors import (
    BackendError,
    CheckpointError,
    DivergedError,
    OutputError,
    RunInUse,
    SptError,
    Stopped,
    UsageError,
    hide_secrets,
    one_line,
)
from spt.runs.files import replacing
from spt.runs.folder import RunFolder
from spt.runs.predictions import FILE, mark_run
from spt.runs.result import NOT_SELF_PRETRAINING, Ledger, Result
from spt.runtime import launch
from spt.runtime.distributed import Runtime, is_lost_peer
from spt.runtime.environment import command_line, environment, has_bf16_instructions
from spt.runtime.signals import cleanup
from spt.runtime.trackers import TrackedRun
from spt.tasks.base import Labels, TaskData
from spt.training.build import StageSetup, build_stage
from spt.training.calibration import calibrate
from spt.training.checkpoint import CheckpointMeta, TensorMatch, clean, load_pretrained, publish, read_meta, spec
from spt.training.evaluate import Predictions, evaluate
from spt.training.groups import group_scores
from spt.training.loop import FitResult, fit
from spt.training.metrics import default_metric
from spt.training.objectives import evaluation_draw, of_whole_split
from spt.training.threads import stage_threads
from spt.training.transfer import selected_tensors

logger = logging.getLogger(__name__)

MOST_CONFUSED = 30  # classes whose confusion is kept
SHUFFLED = "pretrained on inputs whose steps were shuffled (pretrain.shuffle_steps)"
OF_PRETRAINING = (SHUFFLED, NOT_SELF_PRETRAINING)  # notes that what starts from it has too


def run_stage(job: Job, root: Path, runtime: Runtime, label: str = "", tracked: TrackedRun | None = None) -> Result:
    """The job's result: read if it is there, else computed, its parent first. Raises an SptError otherwise.

    Of several processes all run this; process 0 alone reads and writes the run's folder.
    """
    run = RunFolder(root, job.name)
    fresh = runtime.settings.resume == "never"
    if not fresh and (result := runtime.on_main(lambda: finished_result(run))) is not None:
        return result
    runtime.check_libraries()
    # Before the parent is trained: a mistake in the second stage is found at once.
    setup = runtime.each_rank(lambda: build_stage(job))
    parent = _parent(job, root, runtime, label, tracked)
    waiting = partial(logger.info, f"{run.path.name} is being run by another process; waiting for it")
    settings = runtime.settings
    with (
        runtime.entered_on_main(lambda: run.locked(waiting if settings.wait else None, settings.lease)),
        cleanup(lambda _: run.release()),
    ):
        result = runtime.on_main(lambda: _take_over(run, fresh))
        if result is not None:
            return result
        with stage_threads(setup, runtime, run):
            name = label or f"{job.resolved.name} seed {job.seed}"
            return _work(setup, run, parent, runtime, name, tracked or _tracked_alone(job))


def _take_over(run: RunFolder, fresh: bool) -> Result | None:
    """With the lock in hand: deal with what an earlier run left behind. A result, if another process has made it."""
    if fresh:
        if (aside := run.move_aside()) is not None:
            logger.info(f"{run.path.name} was there already; the old one is now {aside.name}")
        return None
    if (result := finished_result(run, locked=True)) is not None:
        return result
    status = run.status() or {}
    if status.get("state") == "diverged":
        raise DivergedError(f"{run.path.name} diverged before ({status.get('reason')}); --resume never runs it again")
    if status.get("state") == "running":  # nobody holds the lock, so nobody is running it
        left_by = f"process {status.get('pid')} on {status.get('host')}"
        logger.info(f"{run.path.name} was left by {left_by}, which was killed; taking it over")
    return None


def finished_result(run: RunFolder, locked: bool = False) -> Result | None:
    """The result of a finished run, else None. If the process that wrote it died before it had tidied up, that is done
    here, but not while another process holds the run's lock. `locked`: the caller holds it."""
    result = run.result()
    if result is None:
        return None
    if locked:
        _tidy(run)
    elif _is_untidy(run) and run.is_available():
        with contextlib.suppress(RunInUse), run.locked():
            _tidy(run)
    made_by = result.environment.get("spt")
    if made_by != __version__:
        logger.info(f"{run.name} was made by spt {made_by}, this is {__version__}; --resume never runs it again")
    return result


def _is_untidy(run: RunFolder) -> bool:
    return (run.status() or {}).get("state") != "done"


def _tidy(run: RunFolder) -> None:
    if _is_untidy(run):
        clean(run)
        run.set_status("done")  # last: until then the next to come cleans


class PretrainedParent:
    """The pretraining run that a finetuning starts from."""

    continued = False  # was it this command that brought it to its end?

    def __init__(self, path: Path) -> None:
        result = RunFolder(path.parent, path.name).result()
        if result is None or result.stage != "pretrain":
            state = (RunFolder(path.parent, path.name).status() or {}).get("state", "not a run")
            what = f"a {result.stage} run" if result else f"not finished ({state})"
            raise CheckpointError(f"{path} is {what}; finetuning starts from a finished pretraining run")
        self.weights = path / "checkpoints" / "best"
        self.result = result
        try:
            _, self.rows = read_meta(self.weights, f"pretrain-{result.key}")
        except CheckpointError as error:
            raise CheckpointError(f"{error}; move {path} away, then it is made again") from error


def open_weights(path: Path) -> PretrainedWeights:
    """A pretraining run that the user names, by its folder."""
    if not path.exists():
        raise UsageError(f"no run folder {path}")
    return PretrainedWeights(path.resolve(), PretrainedParent(path.resolve()).result.key)


def _tracked_alone(job: Job) -> TrackedRun:
    """How trackers call a run that belongs to no study."""
    arm = "scratch" if job.stage == "finetune" and job.parent is None else "spt"
    return TrackedRun(f"{job.resolved.name}, seed {job.seed}, {arm}")


def _parent(job: Job, root: Path, runtime: Runtime, label: str, tracked: TrackedRun | None) -> PretrainedParent | None:
    if job.parent is None:
        return None
    if isinstance(job.parent, PretrainedWeights):
        path = job.parent.path
    else:
        path = root / job.parent.name
        unfinished = runtime.on_main(lambda: RunFolder(root, path.name).result() is None)
        run_stage(job.parent, root, runtime, label, tracked)
        parent = runtime.each_rank(lambda: PretrainedParent(path))
        parent.continued = unfinished
        return parent
    return runtime.each_rank(lambda: PretrainedParent(path))


def _start_from(parent: PretrainedParent, setup: StageSetup) -> None:
    """Move the parent's weights into the model, once it is sure that this may be done."""
    job, data = setup.job, setup.data
    refuse_leak(parent.rows, training_fingerprints(job.resolved.recipe.task), data, parent.weights.parent.parent.name)
    moved = selected_tensors(setup.model, job.resolved.recipe.finetune.load)
    other = job.from_other_task
    matches = load_pretrained(parent.weights, setup.model, architecture(job), data.input, moved, other_task=other)
    logger.info(match_table(parent.result.key, matches))
    if not other and parent.result.data["train"].inputs != split_record(data.train).inputs:
        before, now = parent.result.data["train"].rows, len(data.train)
        logger.info(
            f"note: pretrained on other rows of the training split ({before:,}) than are finetuned on ({now:,})"
        )


def _work(
    setup: StageSetup,
    run: RunFolder,
    parent: PretrainedParent | None,
    runtime: Runtime,
    label: str,
    tracked: TrackedRun,
) -> Result:
    job, data = setup.job, setup.data
    if parent is not None:
        runtime.all_ranks(lambda: _start_from(parent, setup))
    records = {name: split_record(split) for name, split in data.splits.items()}
    repeated = overlap(data)
    for name, count in repeated.items() if not job.parent_key else ():
        if count:
            logger.info(
                f"note: {count} of the {len(data.splits[name])} {name} rows have the same input as a training row"
            )
    if job.train.precision == "bf16" and runtime.device.type == "cpu" and not has_bf16_instructions():
        logger.warning(
            "precision bf16: this CPU has no instructions for it, so training takes about twice as long as with fp32"
        )
    if job.train.precision == "tf32" and runtime.device.type != "cuda":
        logger.info("note: precision tf32 is for NVIDIA GPUs; this device computes as with fp32")
    described = environment(runtime.device, runtime.world)
    identity = {**job.settings(), "seed": job.seed, "parent": job.parent_key, "recipe": job.resolved.name}

    def create() -> None:
        continued = parent is not None and parent.continued  # that is what was resumed
        if runtime.settings.resume == "must" and not continued and not any(run.checkpoints.glob("step-*")):
            raise CheckpointError(f"{run.path} has no checkpoint to resume from; --resume auto starts at the beginning")
        run.create(job.resolved.to_yaml(), identity, {**described, "command": command_line()})
        run.set_status("running")

    runtime.on_main(create)

    def meta(step: int) -> CheckpointMeta:
        return CheckpointMeta(
            key=job.key, stage=job.stage, step=step, model=architecture(job), input=spec(data.input), data=records
        )

    try:
        with (
            cleanup(lambda error: _record_stop(run, error, runtime.rank)),
            runtime.kernels(),
            runtime.products(job.train.precision),
            runtime.tracked(
                tracked._replace(name=f"{tracked.name}, {job.stage}"),
                run.path,
                {"key": job.key, "seed": job.seed, "recipe": job.resolved.name},
            ),
        ):
            fitted = fit(setup, run, runtime, meta, f"{label} {job.stage}")
            result = _finish(setup, run, parent, fitted, records, repeated, described, runtime)
    except BaseException as raised:
        if isinstance(raised, Exception) and (runtime.world == 1 or getattr(raised, "known_to_all", False)):
            runtime.on_main(run.check)  # files that go missing are no failure where another process has the run
        error = _named(job, raised)
        _record_failure(run, error, runtime.rank)
        if error is raised:
            raise
        raise error from raised
    return result


def _named(job: Job, error: BaseException) -> BaseException:
    """What a user's own model raised on a batch, as a UsageError; any other error unchanged."""
    if isinstance(error, SptError) or not isinstance(error, Exception | SystemExit):
        return error
    try:
        component = find_plugin("models", job.resolved.recipe.model.name)
    except SptError:  # the file has gone meanwhile; the error itself is the one to tell
        return error
    if component.module.__name__.startswith("spt."):
        return error
    line = line_in(Path(str(component.module.__file__)), error)
    what = (
        f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"fails on a batch: {one_line(error)}"
    )
    return UsageError(f"model {component.name}{line} {what}") if line else error


def architecture(job: Job) -> dict[str, Any]:
    """What the weights' meaning depends on: the model's options, and the content of a user's file."""
    return {**without_paths("models", job.resolved.recipe.model), "name": job.resolved.identities["model"]}


def _finish(
    setup: StageSetup,
    run: RunFolder,
    parent: PretrainedParent | None,
    fitted: FitResult,
    records: dict[str, Any],
    repeated: dict[str, int],
    described: dict[str, Any],
    runtime: Runtime,
) -> Result:
    """Score the selected weights on test, if there are test rows, once, and write the result."""
    job, data = setup.job, setup.data
    scores, chance, predictions = None, None, None
    if setup.objective.labelled and len(data.test):
        draw = evaluation_draw(job.train, job.seed, fitted.state.best_step)
        model = setup.model.to(runtime.device)
        scores, predictions = evaluate(model, setup, data.test, runtime, draw, at_once=1, predict=True)
        chance = data.chance() if default_metric(setup.output) == "accuracy" else None
    told = _answer_analysis(setup, predictions, fitted, runtime)
    result = Result(
        key=job.key,
        stage=job.stage,
        recipe=job.resolved.name,
        task=job.resolved.task_name,
        model=job.resolved.model_name,
        seed=job.seed,
        parent=job.parent_key,
        settings=digest(job.settings()),
        smoke=bool(job.resolved.smoke),
        metric=default_metric(setup.output),
        selected_by=fitted.selected_by,
        higher_is_better=not LOWER_IS_BETTER[default_metric(setup.output)],
        chance=chance,
        val=fitted.state.best,
        test=scores,
        best_step=fitted.state.best_step,
        stop=fitted.stop,
        parent_stop=parent.result.stop if parent is not None else None,
        own=fitted.state.ledger,
        total=fitted.state.ledger + (parent.result.total if parent is not None else Ledger()),
        parameters=setup.model.parameter_counts(),
        data=records,
        repeated=repeated,
        notes=(*_notes(job, data, parent), *_metric_notes(setup, predictions)),
        **told,
        batch_size=job.train.batch_size,
        precision=job.train.precision,
        environment=described,
    )

    def write() -> None:
        run.check()
        if predictions is not None:
            _write_predictions(run, data, predictions)
        publish(run, fitted.state.best_step)
        run.finish(result, partial(clean, run))

    runtime.on_main(write)
    return result


def _answer_analysis(
    setup: StageSetup, predictions: Predictions | None, fitted: FitResult, runtime: Runtime
) -> dict[str, Any]:
    """What a result tells of the answers besides their scores: which classes were taken for which, groups of rows, and
    how far probabilities can be trusted. Neither the selected weights nor a score depend on it."""
    data, output = setup.data, setup.output
    told: dict[str, Any] = {}
    if predictions is not None:
        told["groups"] = tuple(group_scores(output, data.test.whole, predictions))
        if predictions.confusion is not None and output.classes <= MOST_CONFUSED:
            told |= {"classes": data.classes, "confusion": tuple(map(tuple, predictions.confusion.tolist()))}
    if "log_loss" not in of_whole_split(output):
        return told
    draw = evaluation_draw(setup.train, setup.job.seed, fitted.state.best_step)
    model = setup.model.to(runtime.device)
    _, validation = evaluate(model, setup, data.val, runtime, draw, at_once=1, predict=True)
    if validation is not None and validation.scored is not None:
        told["calibration"] = calibrate(validation.scored, None if predictions is None else predictions.scored)
    return told


def _metric_notes(setup: StageSetup, predictions: Predictions | None) -> tuple[str, ...]:
    """Where the compared metric of the test rows has its value by definition."""
    notes = () if predictions is None else predictions.notes
    return tuple(f"of the test rows {note}" for note in notes if default_metric(setup.output) in note)


def match_table(source: str, matches: list[TensorMatch]) -> str:
    """The transfer, part by part, as printed."""
    lines = [f"weights from pretrain-{source}"]
    lines += [f"  {m.part:<9} {m.outcome:<7} {m.tensors:>4} tensors {m.parameters:>12,} parameters" for m in matches]
    return "\n".join(lines)


def _notes(job: Job, data: TaskData, parent: PretrainedParent | None) -> tuple[str, ...]:
    """What distinguishes these scores from others of the same name."""
    recipe = job.resolved.recipe
    shuffles, finetuning = job.stage == "pretrain" and recipe.pretrain.shuffle_steps, job.stage == "finetune"
    inherited = [] if parent is None else [note for note in parent.result.notes if note.startswith(OF_PRETRAINING)]
    notes = {
        "scores are means over full batches, as in the published code: not exact, and rows are left out": (
            job.train.metric_average == "per_batch"
        ),
        SHUFFLED: shuffles,
        **dict.fromkeys(inherited, True),
        "only the head was trained (finetune.freeze)": finetuning and recipe.finetune.freeze,
        f"of the pretrained network only {', '.join(recipe.finetune.load)} was taken over (finetune.load)": (
            parent is not None and recipe.finetune.load != "all"
        ),
        f"pretraining's loss was added with weight {recipe.finetune.joint:g} (finetune.joint)": (
            finetuning and recipe.finetune.joint > 0
        ),
    }
    weights = job.settings_stage.objective.options.get("class_weights", "none")
    notes |= {
        "training rows were drawn with every class, or label, equally often: an epoch is as many draws as there are "
        "rows, some of them more than once (train.sampling)": job.train.sampling == "balanced",
        "rare classes weigh more in the training loss, not in these scores (objective.class_weights)": (
            finetuning and weights not in ("none", "batch")
        ),
    }
    if parent is not None and job.from_other_task:
        notes[f"pretrained on the inputs of {parent.result.task}"] = True
    return (*data.notes, *(note for note, holds in notes.items() if holds))


def _write_predictions(run: RunFolder, data: TaskData, predictions: Predictions) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = data.test.whole
    truth = np.asarray(rows.targets)
    columns: dict[str, Any] = {"id": rows.ids, **predictions.scores}
    if predictions.values is None:
        pass
    elif isinstance(data.target, Labels):
        for k in range(data.target.count):
            columns |= {f"label_{k}": truth[:, k], f"prediction_{k}": predictions.values[:, k]}
    elif predictions.margin is not None:
        columns |= {"label": truth, "prediction": predictions.values, "margin": predictions.margin}
    else:
        for k in range(predictions.values.shape[1]):
            columns |= {f"target_{k}": truth[:, k], f"prediction_{k}": predictions.values[:, k]}
    with replacing(run.path / FILE) as beside:
        pq.write_table(mark_run(pa.table(columns), run.name), beside)


def _record_stop(run: RunFolder, error: Stopped, rank: int) -> None:
    """A signal ends this process outside its training: said in status.json, unless another one has said why first.

    A launcher ends all processes when one has ended; what that one has written is the reason.
    """
    if (run.status() or {}).get("state") == "running":
        _record_failure(run, error, rank)


def _record_failure(run: RunFolder, error: BaseException, rank: int) -> None:
    """status.json says what happened, whoever reads the exit code; an error not of ours leaves its traceback too.

    What is known to all processes the first one records; what strikes one alone is its own to tell, for the others
    only learn that it is gone.
    """
    try:
        if rank > 0 and getattr(error, "known_to_all", False):
            return
        if isinstance(error, SptError):
            run.set_status("diverged" if isinstance(error, DivergedError) else "failed", str(error), error.exit_code)
        elif (dead := launch.dead_process()) is not None and (isinstance(error, Stopped) or is_lost_peer(error)):
            # Stopped by the launcher, or without its partner: either way, that is what happened.
            run.set_status("failed", f"process {dead} of this run was killed", BackendError.exit_code)
        elif isinstance(error, Stopped):
            run.set_status("stopped", str(error), error.exit_code)
        elif isinstance(error, KeyboardInterrupt):
            run.set_status("stopped", "interrupted", 130)
        elif (run.status() or {}).get("state") == "running" and is_lost_peer(error):
            run.set_status("failed", "another process of this run has ended", 4)
        elif (run.status() or {}).get("state") == "running":
            run.set_status("failed", f"{type(error).__name__}: {error}", 1)
            trace = hide_secrets("".join(traceback.format_exception(error)))
            (run.path / "traceback.txt").write_text(trace, encoding="utf-8")
    except (OutputError, OSError):
        pass  # the disk is full: the error itself is what the user must see
