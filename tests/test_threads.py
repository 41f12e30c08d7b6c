"""Threads of a run follow from its work, and stay; runs of one thread share the cores."""

import json
from dataclasses import replace

import pytest
import torch
from tiny import loaded, recipe_file, run

import spt
from spt.analysis import reevaluate
from spt.analysis.resolved import resolve_overview
from spt.cli import options
from spt.config.job import Job
from spt.errors import UsageError
from spt.execution import estimate, run_study
from spt.execution.estimate import MeasuredCosts
from spt.execution.run_study import ExecutionTarget
from spt.execution.slurm import Slurm
from spt.runs.folder import RunFolder
from spt.runtime import launch, progress
from spt.runtime.distributed import Runtime
from spt.runtime.progress import Bar, Board, forward_progress
from spt.runtime.settings import Settings
from spt.studies.grid import expand
from spt.studies.schema import validate
from spt.training import loop, stage, threads
from spt.training.build import build_stage
from spt.training.load_run import load_run
from spt.training.threads import stage_threads, thread_count

CPU = Settings(quiet=True, cpu=True)


@pytest.fixture(autouse=True)
def three_threads():
    """A process for which torch has three threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3, "a stage has left its own number behind"
    torch.set_num_threads(before)


@pytest.fixture
def large(monkeypatch):
    """Every network counts as a large one."""
    monkeypatch.setattr(threads, "SMALL_STEP", 0.0)


@pytest.fixture
def job(tmp_path):
    return Job(loaded(tmp_path), "finetune", 0)


def spy(monkeypatch, module, name):
    """The numbers of threads with which a function is called."""
    seen, function = [], getattr(module, name)

    def called(*arguments, **options):
        seen.append(torch.get_num_threads())
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, called)
    return seen


# ------------------------------------------------------------------------------------------------------------- threads


def recorded(root, job):
    """In env.json and in result.json."""
    environment = json.loads((root / job.name / "env.json").read_text())
    result = RunFolder(root, job.name).result()
    return environment["threads"], result and result.environment["threads"]


def test_a_small_network_trains_and_is_scored_on_one_thread(tmp_path, monkeypatch, job):
    training, scoring = spy(monkeypatch, stage, "fit"), spy(monkeypatch, stage, "evaluate")
    run(job, tmp_path)
    assert training == [1] and scoring == [1, 1], "of test, and of validation for the temperature"
    assert recorded(tmp_path, job) == (1, 1)


def test_a_large_network_has_what_torch_has(tmp_path, monkeypatch, large, job):
    training = spy(monkeypatch, stage, "fit")
    run(job, tmp_path)
    assert training == [3] and recorded(tmp_path, job) == (3, 3)


def test_the_limit_is_one_of_operations_a_step(tmp_path, monkeypatch, job):
    """As `spt show` counts them: of an example, times the batch."""
    setup = build_stage(job)
    shown = next(s for s in resolve_overview(job.resolved)["stages"] if s["stage"] == "scratch")
    assert shown["CPU threads"] == 1
    a_step = (shown["forward FLOPs an example"] + shown["backward FLOPs an example"]) * 8
    for limit, expected in ((1.001 * a_step, 1), (0.999 * a_step, 3)):
        monkeypatch.setattr(threads, "SMALL_STEP", limit)
        assert thread_count(setup) == expected


def test_the_user_may_choose(tmp_path, monkeypatch, job):
    training = spy(monkeypatch, stage, "fit")
    run(job, tmp_path, threads=2)
    assert training == [2] and recorded(tmp_path, job) == (2, 2)


def interrupted(job, root, monkeypatch, **settings):
    """A run that fails after its first step, with a checkpoint."""
    save = loop.save_state

    def fails(*arguments):
        save(*arguments)
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_state", fails)
        with pytest.raises(RuntimeError, match="interrupted"):
            run(job, root, save_every=0.0, **settings)


def test_a_continued_run_keeps_its_threads(tmp_path, monkeypatch, messages, job):
    interrupted(job, tmp_path, monkeypatch, threads=2)
    assert recorded(tmp_path, job) == (2, None)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    run(job, tmp_path)
    assert recorded(tmp_path, job) == (2, 2)
    assert not [text for text in messages if "threads" in text]


def test_what_changes_last_digits_is_said(tmp_path, monkeypatch, messages, job):
    interrupted(job, tmp_path, monkeypatch, threads=2)
    run(job, tmp_path, threads=4)
    assert recorded(tmp_path, job) == (4, 4)
    (note,) = [text for text in messages if "threads" in text]
    assert note == f"note: {job.name} was begun with threads=2 and goes on with 4; last digits may differ"


def test_fewer_cores_than_threads_are_warned_of(tmp_path, monkeypatch, messages, job):
    interrupted(job, tmp_path, monkeypatch, threads=4)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    run(job, tmp_path)
    assert recorded(tmp_path, job) == (4, 4)
    assert [text for text in messages if "--threads 2 is faster" in text]


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, 2), ({"device": "NVIDIA H100"}, 1), ({"threads": "2"}, 1), ({"threads": 0}, 1), (None, 1), ([], 1)],
)
@pytest.mark.slow
def test_only_what_a_cpu_has_recorded_is_kept(tmp_path, monkeypatch, job, change, expected):
    interrupted(job, tmp_path, monkeypatch, threads=2)
    path = tmp_path / job.name / "env.json"
    if isinstance(change, dict):
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    else:
        path.write_text("{" if change is None else "[]")
    run(job, tmp_path)
    assert recorded(tmp_path, job) == (expected, expected)


def test_a_run_without_a_checkpoint_begins_anew(tmp_path, monkeypatch, job):
    def fails(*_):
        raise RuntimeError("at once")

    with monkeypatch.context() as patch:
        patch.setattr(stage, "fit", fails)
        with pytest.raises(RuntimeError):
            run(job, tmp_path, threads=2)
    assert recorded(tmp_path, job) == (2, None)
    run(job, tmp_path)
    assert recorded(tmp_path, job) == (1, 1)


@pytest.mark.parametrize(("asked", "expected"), [(None, 3), (2, 2)])
def test_a_gpu_process_keeps_its_threads(monkeypatch, job, asked, expected):
    monkeypatch.setattr(Runtime, "device", torch.device("cuda"))
    with stage_threads(build_stage(job), Runtime(Settings(threads=asked))):
        assert torch.get_num_threads() == expected


def test_process_0_decides_for_all(monkeypatch, job):
    monkeypatch.setattr(Runtime, "on_main", lambda *_: 2)
    with stage_threads(build_stage(job), Runtime(CPU)):
        assert torch.get_num_threads() == 2


def test_evaluating_and_measuring_follow_the_rule(tmp_path, monkeypatch, job):
    run(job, tmp_path)
    seen = spy(monkeypatch, reevaluate, "evaluate")
    finished = load_run(tmp_path / job.name)
    reevaluate.evaluate_run(finished, finished.data, finished.data.test, Runtime(CPU))
    measured = spy(monkeypatch, estimate, "time_steps")
    MeasuredCosts(tmp_path, Runtime(CPU)).seconds_per_step(job)
    assert seen == measured == [1]


def test_torch_is_not_asked_for_the_impossible():
    from typer.testing import CliRunner

    from spt_cli import app

    for value in ("0", "-1", "2000", "two"):
        assert CliRunner().invoke(app, ["compare", "quickstart", "--threads", value]).exit_code == 2


# --------------------------------------------------------------------------------------------------------- runs at once


@pytest.fixture
def made(monkeypatch):
    """How many runs would be made at once; None where they are made here, one after the other."""
    found = []

    def record(how):
        def make(requests, *arguments):
            if requests:
                found.append(how(arguments))
            return []

        return make

    monkeypatch.setattr(run_study, "run_here", record(lambda _: None))
    monkeypatch.setattr(run_study, "run_locally", record(lambda arguments: arguments[2]))
    monkeypatch.setattr(run_study, "run_on_slurm", record(lambda _: "slurm"))
    monkeypatch.setattr(launch, "usable_cores", lambda: 4)
    return found


def study(tmp_path, settings=CPU, smoke=False, seeds=2, recipe=None, target=None, **keys):
    """Two seeds of both arms by default: six runs."""
    target = target or ExecutionTarget("auto")
    runtime, root = Runtime(settings), tmp_path / "runs"
    raw = {"kind": "compare", "recipes": [str(recipe_file(tmp_path, **(recipe or {})))], "seeds": seeds, **keys}
    grid = expand(validate(raw, "here"), smoke, MeasuredCosts(root, runtime))
    run_study.run_study(grid, root, target, runtime)
    return grid


def test_as_many_runs_as_cores(tmp_path, made):
    study(tmp_path)
    study(tmp_path, replace(CPU, threads=1))
    study(tmp_path, target=ExecutionTarget("auto", part=(1, 2)))  # three runs
    study(tmp_path, target=ExecutionTarget(7))
    study(tmp_path, target=ExecutionTarget())
    assert made == [4, 4, 3, 7, None]


@pytest.mark.slow
def test_no_more_than_are_left(tmp_path, made):
    grid = study(tmp_path)
    root = tmp_path / "runs"
    jobs = list(run_study._all_runs(grid.jobs).values())
    assert len(jobs) == 6
    for job in jobs[:4]:
        run(job, root)
    study(tmp_path)
    run(jobs[4], root)
    study(tmp_path)
    run(jobs[5], root)
    study(tmp_path)
    study(tmp_path, replace(CPU, resume="never"))
    assert made == [4, 2, None, None, 4]


def test_a_large_network_among_them_has_the_cores_to_itself(tmp_path, monkeypatch, made):
    """Also in one row of several; and one thread asked for does not say that memory suffices for many."""
    sizes = {"small": {"d_model": 16}, "large": {"d_model": 32}}
    a_step = threads.mean_flops(build_stage(Job(loaded(tmp_path), "pretrain", 0))).total * 8
    monkeypatch.setattr(threads, "SMALL_STEP", 1.5 * a_step)
    study(tmp_path)
    study(tmp_path, kind="size", sizes=sizes)
    study(tmp_path, replace(CPU, threads=1), kind="size", sizes=sizes)
    assert made == [4, None, None]


def test_what_tuning_goes_on_with_is_looked_at_too(tmp_path, monkeypatch, made):
    """All trials are done, none of the runs at what they choose."""
    options = {"kind": "tune", "space": {"learning_rate": [0.01, 0.02]}}
    with monkeypatch.context() as patch:
        patch.setattr(run_study, "cell_requests", lambda *_: [])
        grid = study(tmp_path, **options)
    for job in run_study._all_runs(grid.jobs).values():
        run(job, tmp_path / "runs")
    study(tmp_path, **options)  # nothing of trials; of the rest, seed 0 is done
    monkeypatch.setattr(threads, "SMALL_STEP", 0.0)
    study(tmp_path, **options)
    assert made == [4, None, 3, None, None]


def test_nothing_is_started_where_it_would_not_help(tmp_path, monkeypatch, made):
    study(tmp_path, smoke=True)
    study(tmp_path, smoke="full")
    study(tmp_path, replace(CPU, threads=2))
    study(tmp_path, target=ExecutionTarget("auto", Slurm()))
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "1")
        study(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "usable_cores", lambda: 1)
        study(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(Runtime, "device", torch.device("cpu"))
        study(tmp_path, replace(CPU, cpu=False))
        study(tmp_path)  # --cpu
    assert made == [None, None, None, "slurm", None, None, None, 4]


def test_not_every_seed_is_built_to_decide(tmp_path, monkeypatch, made):
    built = spy(monkeypatch, run_study, "build_stage")
    study(tmp_path, seeds=20)
    assert made == [4] and len(built) == 2  # a pretraining and a finetuning


def test_the_option_is_a_number_or_auto():
    assert [options.jobs(text) for text in ("auto", "1", "256")] == ["auto", 1, 256]
    for text in ("0", "257", "1000", "-1", "many", "", "²"):
        with pytest.raises(UsageError, match="or auto, is expected"):
            options.jobs(text)
    with pytest.raises(UsageError, match="or auto, is expected"):
        ExecutionTarget(0)
    with pytest.raises(UsageError, match="contradict"):
        ExecutionTarget(2, Slurm())


def test_commands_ask_for_auto_and_the_variable_for_another(monkeypatch):
    from typer.testing import CliRunner

    import spt.api
    from spt_cli import app

    asked = []

    def plan(*_, jobs, **__):
        asked.append(jobs)
        raise UsageError("enough")

    monkeypatch.setattr(spt.api, "plan_study", plan)
    for variable, arguments in ((None, []), ("3", []), ("3", ["--jobs", "auto"]), ("auto", ["--jobs", "2"])):
        monkeypatch.setenv("SPT_JOBS", variable) if variable else monkeypatch.delenv("SPT_JOBS")
        assert CliRunner().invoke(app, ["compare", "quickstart", *arguments]).exit_code == 2
    assert asked == ["auto", 3, "auto", 2]


@pytest.mark.slow
def test_runs_at_once_give_the_numbers_of_runs_one_by_one(tmp_path, monkeypatch, messages):
    monkeypatch.setattr(launch, "usable_cores", lambda: 2)
    path = recipe_file(tmp_path, model__dropout=0.1)
    for jobs in (1, "auto"):
        spt.compare(path, seeds=2, jobs=jobs, out=tmp_path / str(jobs), settings=CPU)
    assert messages.count("6 runs to make, up to 2 at once") == 1
    names = sorted(path.parent.name for path in (tmp_path / "1").glob("*/result.json"))
    assert len(names) == 6
    for name in names:
        one, two = (RunFolder(tmp_path / jobs, name).result() for jobs in ("1", "auto"))
        timed = {"seconds", "device_seconds", "peak_bytes"}
        for ledger in ("own", "total"):
            mine, theirs = (getattr(result, ledger).model_dump(exclude=timed) for result in (one, two))
            assert mine == theirs
        assert one.model_dump(exclude={"own", "total"}) == two.model_dump(exclude={"own", "total"})


# ------------------------------------------------------------------------------------------------------------- progress


def test_progress_of_several_runs_is_shown_here(monkeypatch, capsys):
    monkeypatch.setattr(progress, "OFTEN", 0.0)
    updates = []
    with forward_progress(updates.append), Bar("[1/2] a", 10, start=2) as bar:
        bar.note("val accuracy .5")
        bar.update(4, 16)
    assert [(u.label, u.step, u.total) for u in updates] == [("[1/2] a", 2, 10), ("[1/2] a", 4, 10)]
    assert updates[1].facts.endswith("examples/s  val accuracy .5") and capsys.readouterr().err == ""

    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Board(runs=2) as board:
        for clock[0] in (0.0, 10.0, 31.0, 40.0):  # two at work: a line of each in half a minute
            for who in (0, 1):
                board.show(who, updates[1]._replace(label=f"[{who}]"))
        board.remove(0)
        clock[0] = 47.0  # one is left
        board.show(1, updates[1])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["[0]", "[1]", "[1/2] a"]
    assert "step 4 of 10, " in lines[0] and lines[0].endswith("val accuracy .5")


def test_a_quiet_run_shows_nothing(monkeypatch, capsys):
    monkeypatch.setattr(progress, "OFTEN", 0.0)
    monkeypatch.setattr(progress, "EVERY", -1.0)
    updates = []
    for forward in (False, True):
        with forward_progress(updates.append) if forward else Board(quiet=True), Bar("a", 10, quiet=True) as bar:
            bar.update(4, 16)
    assert not updates and capsys.readouterr().err == ""
