"""A limit of hours beside a stage's budget: where it ends a run, who agrees on it, and that the step then stays."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from records import compared, finish, plan
from test_processes import QUIET, finished, same_outcome
from tiny import RECIPE, TASK, changed, loaded, own_task, run, spt, spt_job, weights

from spt.config.job import Job
from spt.config.recipe import Train
from spt.errors import OutputError, RecipeError, Stopped, UsageError
from spt.execution.estimate import MeasuredCosts, RuntimeForecast
from spt.report import verdict
from spt.report.collect import read_report
from spt.runs.folder import RunFolder
from spt.runs.plan import read_plan
from spt.runs.result import Ledger, Result
from spt.runtime import progress
from spt.runtime.distributed import Runtime
from spt.runtime.progress import Bar, forward_progress
from spt.runtime.settings import Settings
from spt.studies.grid import expand
from spt.studies.schema import TUNABLE, validate
from spt.training import loop
from spt.training.step import Learner

TRAIN = {"steps": 20, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 3, "schedule": "cosine"}
COMPUTE = {"kind": "compute", "shares": [0.5], "match": "examples"}


class Clock:
    """Time that passes in steps (and evaluations) of training alone, until something happens at a step."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.step, self.evaluation = 1000.0, 600.0, 0.0
        self.at: dict[int, BaseException] = {}  # raised in training the step after this one
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now))
        real, evaluate = Learner.step, loop.evaluate

        def step(learner, prefetcher, number, size):
            if number in self.at:
                raise self.at.pop(number)
            self.now += self.step
            return real(learner, prefetcher, number, size)

        def evaluated(*given, **named):
            self.now += self.evaluation
            return evaluate(*given, **named)

        monkeypatch.setattr(Learner, "step", step)
        monkeypatch.setattr(loop, "evaluate", evaluated)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def job_of(tmp_path: Path, hours: float | None = 1.0, **more) -> Job:
    limit = {} if hours is None else {"max_hours": hours}
    one = own_task(tmp_path, finetune__train={**TRAIN, **limit, **more}, model__dropout=0.2)
    return Job(one, "finetune", 0)


def ended(root: Path, job: Job) -> dict:
    return json.loads((root / job.name / "clock.json").read_text())


def evaluations(root: Path, job: Job) -> list[int]:
    return [row["step"] for row in RunFolder(root, job.name).metrics() if row["kind"] == "val"]


def same_weights(one: Path, two: Path) -> bool:
    a, b = (weights(folder / "checkpoints" / "best") for folder in (one, two))
    return all((a[key] == b[key]).all() for key in a)


# ------------------------------------------------------------------------------------------------------ where it ends


def test_the_step_after_the_time_is_over_is_the_last(tmp_path, clock, messages):
    """It is evaluated and may be the best; until there everything is as without a limit, the schedule too."""
    job, whole = job_of(tmp_path), job_of(tmp_path, None)
    result = run(job, tmp_path / "runs")
    assert (result.stop, result.own.steps, result.own.seconds) == ("time", 7, 4200.0)
    assert evaluations(tmp_path / "runs", job) == [3, 6, 7] and result.best_step in (3, 6, 7)
    assert ended(tmp_path / "runs", job) == {"step": 7, "stop": "time"}
    assert any("1 hours of training are over, so step 7 of 20 is the last" in text for text in messages)
    unlimited = run(whole, tmp_path / "runs")
    assert (unlimited.stop, unlimited.own.steps) == ("budget", 20)
    assert not (tmp_path / "runs" / whole.name / "clock.json").exists()
    rows, others = (RunFolder(tmp_path / "runs", one.name).metrics() for one in (job, whole))
    assert [row for row in rows if row["step"] <= 6] == [row for row in others if row["step"] <= 6]


def test_evaluations_take_time_too(tmp_path, clock):
    clock.evaluation = 1200.0
    assert run(job_of(tmp_path), tmp_path / "runs").own.steps == 5  # 3 steps, an evaluation, and the next that is over


@pytest.mark.parametrize(("hours", "steps", "stop"), [(3.2, 20, "budget"), (5.0, 20, "budget"), (3.0, 19, "time")])
def test_a_budget_that_ends_first_is_a_budget(tmp_path, clock, hours, steps, stop):
    job = job_of(tmp_path, hours)
    result = run(job, tmp_path / "runs")
    assert (result.own.steps, result.stop) == (steps, stop)
    assert ended(tmp_path / "runs", job) == {"step": steps, "stop": stop}


def test_patience_that_ends_first_is_patience(tmp_path, clock, messages):
    """At the very step at which the time is over, too; a repeat stops there by itself."""
    options = {"patience": 1, "learning_rate": 1e-12, "schedule": "constant"}
    clock.step = 600.0
    job = job_of(tmp_path, 1.0, **options)
    result = run(job, tmp_path / "runs")
    assert (result.stop, result.own.steps) == ("patience", 6)
    assert ended(tmp_path / "runs", job) == {"step": 6, "stop": "patience"}
    assert not any("is the last" in text for text in messages)
    clock.step = 3600.0
    assert run(job, tmp_path / "runs", resume="never").own.steps == 6


# ---------------------------------------------------------------------------------------- resumes, kills and repeats


def test_time_counts_while_it_trains_and_only_then(tmp_path, clock):
    """Stopped after 4 steps, killed after 6 with the state of 6, a night in between: the end is that of one go."""
    job = job_of(tmp_path)
    assert run(job, tmp_path / "whole").own.steps == 7

    class Dies(BaseException):
        pass

    clock.at = {4: Stopped("stopped"), 6: Dies()}
    for error in (Stopped, Dies):
        with pytest.raises(error):
            run(job, tmp_path / "parts", save_every=0.0)
        clock.now += 36000.0
    result = run(job, tmp_path / "parts")
    assert (result.own.steps, result.stop, result.own.seconds) == (7, "time", 4200.0)
    assert same_weights(tmp_path / "whole" / job.name, tmp_path / "parts" / job.name)
    assert evaluations(tmp_path / "parts", job) == [3, 6, 7]


def test_an_end_that_is_recorded_stays(tmp_path, clock):
    """Killed after the decision: neither a slower nor a faster machine moves the last step."""
    job = job_of(tmp_path)
    run(job, tmp_path / "whole")
    for name, seconds in (("faster", 1.0), ("slower", 7200.0)):
        clock.step, clock.at = 600.0, {6: KeyboardInterrupt()}
        with pytest.raises(KeyboardInterrupt):
            run(job, tmp_path / name, save_every=3000.0)  # the state of step 5
        assert ended(tmp_path / name, job) == {"step": 7, "stop": "time"}
        clock.step = seconds
        assert run(job, tmp_path / name).own.steps == 7
        assert same_weights(tmp_path / "whole" / job.name, tmp_path / name / job.name)


@pytest.mark.parametrize("seconds", [1.0, 3000.0])
def test_a_repeat_ends_where_the_first_did(tmp_path, clock, seconds):
    """Also one that is interrupted, and the repeat of a repeat, whose own predecessor had recorded nothing yet."""
    job, root = job_of(tmp_path), tmp_path / "runs"
    run(job, root)
    clock.step, clock.at = seconds, {2: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run(job, root, resume="never")
    assert run(job, root).own.steps == 7
    clock.at = {2: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        run(job, root, resume="never")
    result = run(job, root, resume="never")
    assert (result.own.steps, result.stop) == (7, "time")
    assert sorted(path.name for path in root.glob("*.old*")) == [f"{job.name}.old{n}" for n in (1, 2, 3)]
    assert same_weights(root / job.name, root / f"{job.name}.old1")


def test_the_newest_of_many_repeats_is_heeded(tmp_path):
    folder = RunFolder(tmp_path, "finetune-a")
    assert folder.recorded_end() is None
    for number, step in ((2, 5), (10, 9), (9, 7)):
        path = tmp_path / f"finetune-a.old{number}"
        path.mkdir()
        (path / "clock.json").write_text(json.dumps({"step": step, "stop": "time"}))
    for stranger in ("finetune-a.old", "finetune-a.old11x", "finetune-b.old12"):
        (tmp_path / stranger).mkdir()
        (tmp_path / stranger / "clock.json").write_text("{}")
    (tmp_path / "finetune-a.old11").mkdir()
    assert folder.recorded_end() == (9, "time")


def test_a_whole_budget_is_repeated_whole(tmp_path, clock):
    job, root = job_of(tmp_path), tmp_path / "runs"
    clock.step = 1.0
    assert run(job, root).stop == "budget"
    clock.step = 600.0
    result = run(job, root, resume="never")
    assert (result.own.steps, result.stop) == (20, "budget")


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 0, "stop": "time"}', '{"step": 3, "stop": "whim"}'])
def test_an_end_that_cannot_be_read_is_told(tmp_path, clock, text):
    job, root = job_of(tmp_path), tmp_path / "runs"
    run(job, root)
    (root / job.name / "clock.json").write_text(text)
    with pytest.raises(OutputError, match=r"clock.json cannot be read .*; remove it, and the clock decides again"):
        run(job, root, resume="never")


def test_both_stages_have_limits_of_their_own(tmp_path, clock):
    limits = {"pretrain__train__max_hours": 0.5, "finetune__train__max_hours": 100}
    job = spt_job(loaded(tmp_path, **limits))
    result = run(job, tmp_path / "runs")
    assert (result.stop, result.parent_stop) == ("budget", "time")
    assert result.total.steps - result.own.steps == 4


# --------------------------------------------------------------------------------------------------- several processes


@pytest.mark.slow
def test_processes_agree_on_the_step(tmp_path):
    """The time is over with the first step. One process repeats what two have done."""
    (tmp_path / "toy.py").write_text(TASK)
    small = changed(RECIPE, task={"name": "./toy.py"}, finetune__train__max_hours=1e-9)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    command = ("finetune", "small.yaml", "--scratch", "--out")
    done = spt(*command, "two", "--num-processes", 2, cwd=tmp_path, env=QUIET)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("so step 2 of 6 is the last") == 1
    (result,) = finished(tmp_path / "two").values()
    assert (result["own"]["steps"], result["stop"]) == (2, "time")
    done = spt(*command, "one", cwd=tmp_path, env=QUIET)
    assert done.returncode == 0, done.stderr
    same_outcome(tmp_path / "one", tmp_path / "two")


# ------------------------------------------------------------------------------------------- keys, studies, forecasts


def test_runs_without_a_limit_keep_their_names(tmp_path):
    train = job_of(tmp_path, None).settings()["train"]
    assert set(train) == set(Train.model_fields) - {"max_hours", "cosine_steps", "cosine_from", "sampling"}
    assert job_of(tmp_path).settings()["train"]["max_hours"] == 1.0
    names = {job_of(tmp_path, hours).name for hours in (None, 1.0, 2.0)}
    assert len(names) == 3 and job_of(tmp_path, 1).name in names


@pytest.mark.parametrize("hours", [0, -1, ".inf", "soon"])
def test_a_limit_is_a_positive_number(tmp_path, hours):
    with pytest.raises(RecipeError, match="max_hours"):
        loaded(tmp_path, finetune__train__max_hours=yaml.safe_load(str(hours)))


def test_a_limit_alone_is_no_budget(tmp_path):
    with pytest.raises(RecipeError, match="is the budget, but none is given"):
        loaded(tmp_path, finetune__train={"max_hours": 1.0, "batch_size": 8, "learning_rate": 0.1})


@pytest.mark.parametrize("section", ["pretrain", "finetune"])
@pytest.mark.parametrize("study", [COMPUTE, {"kind": "tune", "space": {"learning_rate": [0.1]}, "protocol": "compute"}])
@pytest.mark.parametrize("smoke", [False, True])
def test_matched_budgets_have_no_limit(tmp_path, section, study, smoke):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(changed(RECIPE, **{f"{section}__train__max_hours": 1.0})))
    costs = MeasuredCosts(tmp_path, Runtime(Settings(quiet=True, cpu=True)))
    with pytest.raises(UsageError, match=f"{section}.train.max_hours ends a run .*set {section}.train.max_hours=null"):
        expand(validate({**study, "recipes": [str(path)], "seeds": 1}, "here"), smoke, costs)
    free = {**study, "recipes": [str(path)], "seeds": 1, "set": {f"{section}.train.max_hours": None}}
    assert expand(validate(free, "here"), smoke, costs).rows


def test_a_limit_is_not_tuned():
    assert "max_hours" not in TUNABLE


def test_forecasts_know_of_the_limit(tmp_path):
    job = job_of(tmp_path, 2.0)
    past = Result.model_construct(stage="finetune", settings="", task=job.resolved.task_name,
                                  model=job.resolved.model_name, own=Ledger(seconds=100.0))  # fmt: skip
    forecast = RuntimeForecast()
    forecast.observe(past, 1.0)
    assert forecast.seconds(job, 10.0) == 1000.0 and forecast.seconds(job, 1e6) == 7200.0


def test_a_bar_knows_of_the_limit(monkeypatch):
    now, updates = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with forward_progress(updates.append), Bar("a", 100, most=50.0) as bar:
        now[0] = 10.0
        bar.update(1, 8)
    assert updates[-1].left == 40.0


# ------------------------------------------------------------------------------------------------------------- report


def results(root: Path, *changes: dict) -> list[Result]:
    found = []
    for seed, change in enumerate(changes):
        arm = "spt" if "parent_stop" in change or change.pop("spt", False) else "scratch"
        cell = finish(root, arm, seed, 0.5 + seed / 100, **change)
        found.append(RunFolder(root, cell["run"]).result())
    return found


def test_a_report_says_what_the_clock_ended(tmp_path):
    at = [Ledger(steps=steps, examples=10, flops=1.0, seconds=1.0) for steps in (1200, 1350)]
    scratch = results(tmp_path, {}, {}, {"stop": "patience"})
    spt = results(tmp_path, {"spt": True, "stop": "time", "own": at[0]}, {"parent_stop": "time"},
                  {"spt": True, "stop": "time", "own": at[1]})  # fmt: skip
    notes = verdict.notes({"scratch": scratch, "SPT": spt})
    clock = "1 of 3 pretrainings of SPT, at step 60; 2 of 3 SPT runs, at steps 1,200 and 1,350"
    assert f"ended by the clock: {clock}" in notes
    assert any(note.startswith("stopped early by patience: 1 of 3 scratch") for note in notes)
    assert "every run used its whole budget" not in notes
    only = verdict.notes({"scratch": scratch[:1], "SPT": spt[1:2]})
    assert "every run used its whole budget" not in only and any("pretrainings of SPT, at step 60" in n for n in only)
    assert "every run used its whole budget" in verdict.notes({"scratch": scratch[:1], "SPT": scratch[1:2]})


def test_a_control_that_the_clock_ended_says_so(tmp_path):
    from test_arms import FROZEN, SCRATCH_SCORES, SPT_SCORES, control_cells

    main = read_plan(compared(tmp_path, SCRATCH_SCORES, SPT_SCORES)).model_dump(mode="json")["cells"]
    cells = control_cells(tmp_path, "frozen", FROZEN, stop="time")
    (control,) = read_report([plan(tmp_path, main + cells, seeds=[0, 1, 2, 3])]).controls
    assert control.verdict.endswith("; ended by the clock: 4 of 4 frozen runs, at steps 40, 40, 40 and 40")
    assert control.cost.stops == {"time": 4}
