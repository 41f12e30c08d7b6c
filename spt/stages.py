"""Where everything is joined: a job's data, network, objective and directory. `ensure` is the way in."""

import json
import math
import re
import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spt import __version__
from spt.batch import collate, pieces
from spt.checkpoint import About, Match, about, clean, publish, spec, transplant
from spt.components import find, line_in
from spt.errors import CheckpointError, DataError, DivergedError, OutputError, SptError, Stopped, UsageError, brief
from spt.evaluate import Predictions, evaluate
from spt.losses import default_metric
from spt.models.base import Backbone, Unsupported, randomise
from spt.network import Encoder, Head, SequenceModel, headed
from spt.objectives import OBJECTIVES, Objective, Output, evaluation_draw, known_metrics
from spt.optim import groups
from spt.plan import Job, Weights, digest, placeless
from spt.recipe import LOWER_IS_BETTER, Part
from spt.run import Ledger, Result, Run, State, writing
from spt.runtime import Runtime, command_line, environment, lost
from spt.seeding import seeded
from spt.store import open_task, overlap, record, refuse_leak, training_fingerprints
from spt.tasks.base import Split, TaskData, sequence_lengths
from spt.train import Fitted, fit, plan_steps


@dataclass(frozen=True)
class Bound:
    """A job with its data and its network. Pretraining data carry no labels: they are taken away here."""

    job: Job
    data: TaskData
    objective: Objective
    output: Output
    model: SequenceModel


def bind(job: Job) -> Bound:
    """Everything that can be wrong with a job is found here, before its directory exists."""
    recipe, stage = job.loaded.recipe, job.settings_stage
    data = open_task(recipe.task)
    options = json.dumps(stage.objective.options)
    objective = OBJECTIVES[stage.objective.name].model_validate_json(options)
    if not objective.labelled:
        data = data.mapped(Split.unlabelled)
    if (span := stage.objective.options.get("span", 1)) > data.length:
        raise UsageError(
            f"{job.stage}.objective.span is {span}, but this task's sequences have at most {data.length:,} steps"
        )
    if objective.causal and not recipe.model.options["causal"]:
        raise UsageError(
            f"objective {stage.objective.name} predicts step t + 1 from the steps up to t, but this model looks ahead; "
            "set model.causal=true"
        )
    width = recipe_width(recipe.model)
    output = headed(objective.output(data), width, stage.head)
    _check_train(job, objective, output, data)
    # Streams of their own: the head is the same in both arms, and the scratch arm starts where pretraining started.
    try:
        with seeded(job.seed, "encoder"):
            encoder = Encoder(data.input, width, recipe.encoder)
        with seeded(job.seed, "backbone"):
            backbone = build_backbone(recipe.model, data.length)
        with seeded(job.seed, "head"):
            head = Head(width, output, stage.head)
        if recipe.model.options.get("initialisation") == "random":  # the whole network, as the SPT paper has it
            for name, part in (("encoder", encoder), ("head", head)):
                with seeded(job.seed, f"random {name}"):
                    randomise(part)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # sizes that no machine can hold
        if not re.search("memory|alloc|overflow|too large|numel|storage", str(error), re.I):
            raise
        raise UsageError(f"the network is too large to build here: {brief(error)}") from error
    bound = Bound(job, data, objective, output, SequenceModel(encoder, backbone, head))
    _check_abilities(bound)
    _check_costs(bound)
    _check_scored(bound)
    return bound


def _check_abilities(bound: Bound) -> None:
    """The model can take sequences of this task's lengths, as it says itself."""
    backbone, name = bound.model.backbone, bound.job.loaded.recipe.model.name
    data = bound.data
    lengths = np.unique(np.concatenate([np.unique(sequence_lengths(split)) for split in data.splits.values()]))
    odd = lengths[lengths % backbone.multiple != 0]
    if odd.size:
        raise UsageError(
            f"model {name} takes sequences whose length is a multiple of {backbone.multiple}, but this task has some "
            f"of {odd[0]:,} steps; choose another model, or cut the sequences to such a length"
        )
    if not backbone.padding and lengths.size > 1:
        raise UsageError(
            f"model {name} cannot leave padding out of account, but this task's sequences have {lengths[0]:,} to "
            f"{lengths[-1]:,} steps; choose another model, or sequences of one length"
        )
    if data.train.steps is not None and not backbone.timed:
        raise UsageError(
            f"model {name} takes no account of the time between steps, which this task's sequences have; choose s5, or "
            "leave times out by the task's option"
        )
    if data.future and bound.objective.labelled and not bound.job.loaded.recipe.model.options["causal"]:
        raise UsageError(
            "this task's targets are later inputs, which a model that looks ahead sees; set model.causal=true"
        )


def _check_scored(bound: Bound) -> None:
    """Something of the validation split is scored; usually its first rows show it."""
    split, data = bound.data.val, bound.data
    draw = evaluation_draw(bound.job.train, bound.job.seed, 0)
    for rows in pieces(np.arange(len(split)), 64):
        _, targets = bound.objective.pose(collate(split, rows, data.input, data.target), draw)
        if targets.weight.any():
            return
    why = "it is too small for the masking ratio, or its sequences have one step"
    if bound.objective.labelled:
        why = "none of its steps has a target"
    raise DataError(
        f"objective {bound.job.settings_stage.objective.name}: no step of the validation split is scored; {why}"
    )


def _check_train(job: Job, objective: Objective, output: Output, data: TaskData) -> None:
    """What training settings cannot know of the task."""
    place, train, rows = f"{job.settings_name}.train", job.train, len(data.train)
    if train.batch_size > rows:
        raise UsageError(
            f"{place}.batch_size is {train.batch_size}, but {rows} training rows are in use; choose at most {rows}"
        )
    allowed = {"auto", *known_metrics(output)}
    if train.select not in allowed:
        raise UsageError(
            f"{place}.select: {train.select} is no metric of this stage; choose among {', '.join(sorted(allowed))}"
        )
    if train.validation_masks == "redrawn" and not objective.hides:
        raise UsageError(
            f"{place}.validation_masks: redrawn has no effect, since this objective hides nothing; leave it out"
        )
    if output.per_step and objective.labelled and job.loaded.recipe.finetune.head.pool != "mean":
        pool = job.loaded.recipe.finetune.head.pool
        raise UsageError(f"finetune.head.pool: {pool} has no effect, since this task asks at every step; leave it out")
    for name, split in (("validation", data.val), ("test", data.test)) if train.evaluation == "batches" else ():
        if len(split) < train.batch_size:
            raise UsageError(
                f"{place}.evaluation: batches needs a full batch of {train.batch_size}, but the {name} split has "
                f"{len(split)} rows; use exact"
            )


def _check_costs(bound: Bound) -> None:
    """The model states what it costs, names only parameters it has, and the budget reaches beyond the warm-up."""
    model, train, length = bound.model, bound.job.train, bound.data.length
    try:
        flops, own = float(model.flops(length)), float(model.backbone.flops(length))
    except Exception as error:
        raise UsageError(f"model {bound.job.loaded.recipe.model.name}: flops fails with {brief(error)}") from error
    if not (math.isfinite(flops) and flops > 0 and own >= 0):
        raise UsageError(f"model {bound.job.loaded.recipe.model.name}: flops({length}) is {own}")
    groups(model, train)
    steps = plan_steps(model, bound.data, train)
    if train.warmup_steps > steps:
        raise UsageError(
            f"{bound.job.settings_name}.train.warmup_steps is {train.warmup_steps}, but the budget is {steps} steps"
        )


def recipe_width(part: Part) -> int:
    return int(part.options["d_model"])


def build_backbone(part: Part, length: int) -> Backbone:
    """The backbone for sequences of up to `length` steps; `max_length` is the task's unless the recipe says more."""
    component = find("models", part.name)
    config = component.module.Config.model_validate_json(json.dumps(part.options))
    if config.max_length is not None and config.max_length < length:
        raise UsageError(f"model.max_length is {config.max_length}, but this task has sequences of {length} steps")
    if config.max_length is None:
        config = config.model_copy(update={"max_length": length})
    try:
        backbone = component.module.build(config)
    except SptError:
        raise
    except Unsupported as error:
        raise UsageError(f"model {part.name}: {error}") from error
    except (Exception, SystemExit) as error:
        if component.module.__name__.startswith("spt.models."):
            if isinstance(error, ValueError):  # options that contradict each other only once the layers are known
                raise UsageError(f"model {part.name}: {error}") from error
            raise
        raise UsageError(f"model {part.name}: build fails with {brief(error)}") from error
    if not isinstance(backbone, Backbone):
        raise UsageError(f"model {part.name}: build returned {type(backbone).__name__}, not a Backbone")
    if type(backbone.multiple) is not int or backbone.multiple < 1:
        raise UsageError(f"model {part.name}: its multiple is {backbone.multiple!r}, not a number of steps")
    names: dict[int, str] = {}
    for name, parameter in backbone.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise UsageError(
                f"model {part.name}: {first} and {name} are one parameter under two names, which no checkpoint can "
                "hold; register a shared module once and hand it to the others in a tuple, where torch does not see it"
            )
    return backbone


Say = Callable[[str], None]


def ensure(
    job: Job,
    root: Path,
    runtime: Runtime,
    say: Say = lambda text: None,
    label: str = "",
    made: Container[str] = frozenset(),
) -> Result:
    """The job's result: read if it is there, else computed, its parent first. Raises an SptError otherwise.

    Of several processes all run this; process 0 alone reads and writes the run's folder. Runs named in `made` are not
    made anew, whatever the settings say.
    """
    run = Run(root, job.name)
    fresh = runtime.settings.resume == "never" and job.name not in made
    if not fresh and (result := runtime.once(lambda: finished(run, say))) is not None:
        return result
    runtime.check_libraries()
    # Before the parent is trained: a mistake in the second stage is found at once.
    bound = runtime.alike(lambda: bind(job))
    parent = _parent(job, root, runtime, say, label, made)
    waiting = partial(say, f"{run.path.name} is being made by another process; waiting for it")
    with runtime.on_main(lambda: run.locked(waiting if runtime.settings.wait else None)):
        result = runtime.once(lambda: _take_over(run, fresh, say))
        if result is not None:
            return result
        return _work(bound, run, parent, runtime, say, label or f"{job.loaded.name} seed {job.seed}")


def _take_over(run: Run, fresh: bool, say: Say) -> Result | None:
    """With the lock in hand: what was left behind, made room for or told. A result if another process had made it."""
    if fresh:
        if (aside := run.move_aside()) is not None:
            say(f"{run.path.name} was there already; the old one is now {aside.name}")
        return None
    if (result := finished(run, say)) is not None:
        return result
    status = run.status() or {}
    if status.get("state") == "diverged":
        raise DivergedError(f"{run.path.name} diverged before ({status.get('reason')}); --resume never runs it again")
    if status.get("state") == "running":  # nobody holds the lock, so nobody is running it
        left_by = f"process {status.get('pid')} on {status.get('host')}"
        say(f"{run.path.name} was left by {left_by}, which ended without a word; taking it over")
    return None


def finished(run: Run, say: Say) -> Result | None:
    """A finished run, as it is. A process that died right after writing it may have left the rest undone."""
    result = run.result()
    if result is None:
        return None
    if (run.status() or {}).get("state") != "done":
        clean(run)
        run.set_status("done")  # last: until then the next to come cleans
    made_by = result.environment.get("spt")
    if made_by != __version__:
        say(f"{run.name} was made by spt {made_by}, this is {__version__}; --resume never makes it anew")
    return result


class Parent:
    """The pretraining run that a finetuning starts from."""

    def __init__(self, path: Path) -> None:
        result = Run(path.parent, path.name).result()
        if result is None or result.stage != "pretrain":
            state = (Run(path.parent, path.name).status() or {}).get("state", "not a run")
            what = f"a {result.stage} run" if result else f"not finished ({state})"
            raise CheckpointError(f"{path} is {what}; finetuning starts from a finished pretraining run")
        self.weights = path / "checkpoints" / "best"
        self.result = result
        try:
            self.about, self.rows = about(self.weights)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; move {path} away, then it is made again") from error


def open_weights(path: Path) -> Weights:
    """A pretraining run that the user names, by its folder."""
    if not path.exists():
        raise UsageError(f"no run folder {path}")
    return Weights(path.resolve(), Parent(path.resolve()).result.key)


def _parent(job: Job, root: Path, runtime: Runtime, say: Say, label: str, made: Container[str]) -> Parent | None:
    if job.parent is None:
        return None
    if isinstance(job.parent, Weights):
        path = job.parent.path
    else:
        ensure(job.parent, root, runtime, say, label, made)
        path = root / job.parent.name
    return runtime.alike(lambda: Parent(path))


def _start_from(parent: Parent, bound: Bound, say: Say) -> None:
    """Move the parent's weights into the model, once it is sure that this may be done."""
    job, data = bound.job, bound.data
    refuse_leak(parent.rows, training_fingerprints(job.loaded.recipe.task), data, parent.weights.parent.parent.name)
    matches = transplant(parent.weights, bound.model, architecture(job), data.input)
    say(match_table(parent.result.key, matches))
    if parent.result.data["train"].inputs != record(data.train).inputs:
        there, here = parent.result.data["train"].rows, len(data.train)
        say(f"note: pretrained on other rows of the training split ({there:,}) than are finetuned on ({here:,})")


def _work(bound: Bound, run: Run, parent: Parent | None, runtime: Runtime, say: Say, label: str) -> Result:
    job, data, model = bound.job, bound.data, bound.model
    if parent is not None:
        runtime.together(lambda: _start_from(parent, bound, say))
    records = {name: record(split) for name, split in data.splits.items()}
    repeated = overlap(data)
    for name, count in repeated.items() if not job.parent_key else ():
        if count:
            say(f"note: {count} of the {len(data.splits[name])} {name} rows have the same input as a training row")
    described = environment(runtime.device, runtime.world)
    identity = {**job.settings(), "seed": job.seed, "parent": job.parent_key, "recipe": job.loaded.name}

    def create() -> None:
        if runtime.settings.resume == "must" and not any(run.checkpoints.glob("step-*")):
            raise CheckpointError(f"{run.path} has no checkpoint to resume from; --resume auto starts at the beginning")
        run.create(job.loaded.to_yaml(), identity, {**described, "command": command_line()})
        run.set_status("running")

    runtime.once(create)

    def what(step: int) -> About:
        return About(
            key=job.key(), stage=job.stage, step=step, model=architecture(job), input=spec(data.input), data=records
        )

    try:
        with (
            runtime.kernels(),
            runtime.tracked("spt", run.path, {"key": job.key(), "seed": job.seed, "recipe": job.loaded.name}),
        ):
            arguments = (model, bound.objective, bound.output, data, job.train, job.seed, run, runtime, what, say)
            fitted = fit(*arguments, f"{label} {job.stage}")
            result = _finish(bound, run, parent, fitted, records, repeated, described, runtime)
    except BaseException as raised:
        error = _named(job, raised)
        _record_failure(run, error, runtime.rank)
        if error is raised:
            raise
        raise error from raised
    return result


def _named(job: Job, error: BaseException) -> BaseException:
    """What a user's own model raised on a batch, in words; all else as it is."""
    if isinstance(error, SptError) or not isinstance(error, Exception):
        return error
    try:
        component = find("models", job.loaded.recipe.model.name)
    except SptError:  # the file has gone meanwhile; the error itself is the one to tell
        return error
    if component.module.__name__.startswith("spt."):
        return error
    line = line_in(Path(str(component.module.__file__)), error)
    return UsageError(f"model {component.name}{line} fails on a batch: {brief(error)}") if line else error


def architecture(job: Job) -> dict[str, Any]:
    """What the weights' meaning depends on: the model's options, and the content of a user's file."""
    return {**placeless("models", job.loaded.recipe.model), "name": job.loaded.identities["model"]}


def _finish(
    bound: Bound,
    run: Run,
    parent: Parent | None,
    fitted: Fitted,
    records: dict[str, Any],
    repeated: dict[str, int],
    described: dict[str, Any],
    runtime: Runtime,
) -> Result:
    """Score the selected weights on test, once, and write the result."""
    job, data = bound.job, bound.data
    scores, chance, predictions = None, None, None
    if bound.objective.labelled:
        scores, predictions = evaluate(
            bound.model.to(runtime.device),
            bound.objective,
            bound.output,
            data.test,
            data,
            runtime,
            job.train,
            evaluation_draw(job.train, job.seed, fitted.position.best_step),
            at_once=1,
            predict=True,
        )
        chance = data.chance() if default_metric(bound.output) == "accuracy" else None
    result = Result(
        key=job.key(),
        stage=job.stage,
        recipe=job.loaded.name,
        task=job.loaded.identities["task"].partition("@")[0],
        model=job.loaded.identities["model"].partition("@")[0],
        seed=job.seed,
        parent=job.parent_key,
        settings=digest(job.settings()),
        smoke=job.loaded.smoke,
        metric=default_metric(bound.output),
        selected_by=fitted.selected_by,
        higher_is_better=not LOWER_IS_BETTER[default_metric(bound.output)],
        chance=chance,
        val=fitted.position.best,
        test=scores,
        best_step=fitted.position.best_step,
        stop=fitted.stop,
        own=fitted.position.ledger,
        total=fitted.position.ledger + (parent.result.total if parent is not None else Ledger()),
        parameters=bound.model.parameter_counts(),
        data=records,
        repeated=repeated,
        notes=_notes(job, data),
        batch_size=job.train.batch_size,
        precision=job.train.precision,
        environment=described,
    )

    def write() -> None:
        if predictions is not None:
            _write_predictions(run, data, predictions)
        publish(run, fitted.position.best_step)
        run.finish(result, partial(clean, run))

    runtime.once(write)
    return result


def match_table(source: str, matches: list[Match]) -> str:
    """The transfer, part by part, as printed."""
    lines = [f"weights from pretrain-{source}"]
    lines += [f"  {m.part:<9} {m.outcome:<7} {m.tensors:>4} tensors {m.parameters:>12,} parameters" for m in matches]
    return "\n".join(lines)


def _notes(job: Job, data: TaskData) -> tuple[str, ...]:
    """What distinguishes these scores from others of the same name."""
    batches = "scores are means over full batches, as in the published code: not exact, and rows are left out"
    return (*data.notes, *([batches] if job.train.evaluation == "batches" else []))


def _write_predictions(run: Run, data: TaskData, predictions: Predictions) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    truth = np.asarray(data.test.targets)
    columns: dict[str, Any] = {"id": data.test.ids, **predictions.scores}
    if predictions.values is None:
        pass
    elif predictions.margin is not None:
        columns |= {"label": truth, "prediction": predictions.values, "margin": predictions.margin}
    else:
        for k in range(predictions.values.shape[1]):
            columns |= {f"target_{k}": truth[:, k], f"prediction_{k}": predictions.values[:, k]}
    with writing(run.path):
        pq.write_table(pa.table(columns), run.path / "predictions.parquet")


def _record_failure(run: Run, error: BaseException, rank: int) -> None:
    """status.json says what happened, whoever reads the exit code; an error not of ours leaves its traceback too.

    What is known to all processes the first one records; what strikes one alone is its own to tell, for the others
    only learn that it is gone.
    """
    try:
        if rank > 0 and getattr(error, "known_to_all", False):
            return
        if isinstance(error, SptError):
            states: dict[type[SptError], State] = {Stopped: "stopped", DivergedError: "diverged", SptError: "failed"}
            state = next(name for kind, name in states.items() if isinstance(error, kind))
            run.set_status(state, str(error), error.exit_code)
        elif isinstance(error, KeyboardInterrupt):
            run.set_status("stopped", "interrupted", 130)
        elif (run.status() or {}).get("state") == "running" and lost(error):
            run.set_status("failed", "another process of this run has ended", 4)
        elif (run.status() or {}).get("state") == "running":
            run.set_status("failed", f"{type(error).__name__}: {error}", 1)
            (run.path / "traceback.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except (OutputError, OSError):
        pass  # the disk is full: the error itself is what the user must see
