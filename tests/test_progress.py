"""How far many runs are together, how long they will still take, and what trackers call them."""

import io
import json
import pickle
import time

import pytest
from rich.console import Console
from test_execute import SETTINGS, family, requests, tuned
from tiny import loaded, recipe_file, spt_job

from spt.config.job import Job
from spt.execution import queue, run_study, slurm
from spt.execution.estimate import MeasuredCosts
from spt.execution.local import run_locally
from spt.execution.progress import StudyProgress
from spt.execution.queue import RunRequest, run_here
from spt.execution.run_study import ExecutionTarget
from spt.execution.slurm import ArrayElement
from spt.runs.folder import RunFolder
from spt.runs.result import Ledger, Result
from spt.runtime import progress
from spt.runtime.distributed import Runtime
from spt.runtime.progress import Board, Update, about, forward_progress
from spt.runtime.settings import Settings
from spt.runtime.trackers import TrackedRun, start_options
from spt.studies.grid import expand
from spt.studies.schema import validate
from spt.studies.status import render, study_status

FLOPS = {"pretrain": 100.0, "finetune": 10.0}


def planned(job: Job) -> float:
    return FLOPS[job.stage]


@pytest.fixture
def seconds(monkeypatch):
    """What finished runs have taken, by name; nothing is read from a disk."""
    taken: dict[str, float] = {}

    def result(run: RunFolder) -> Result | None:
        return _result(run.name, taken[run.name]) if run.name in taken else None

    monkeypatch.setattr(RunFolder, "result", result)
    return taken


def _result(name: str, seconds: float) -> Result:
    stage, _, key = name.partition("-")
    return Result.model_construct(
        stage=stage, key=key, settings=stage, task="digits", model="transformer", own=Ledger(seconds=seconds, steps=1)
    )


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("runs: ")]


# ------------------------------------------------------------------------------------------------------- the estimate


def test_time_left_is_what_such_runs_took(tmp_path, seconds):
    """By operations, over the workers there are; nothing is said before a run has ended, and none is cut in two."""
    one = loaded(tmp_path)
    jobs = [run for seed in range(3) for run in (Job(one, "pretrain", seed), spt_job(one, seed))]
    shown = StudyProgress(tmp_path, planned)
    with shown.over(jobs, len(jobs)):
        assert shown.seconds_left() is None
        seconds[jobs[0].name] = 50.0
        shown.end(jobs[0])
        # No finetuning has ended yet: 130 operations at 2 a second.
        assert shown.seconds_left() == pytest.approx(2 * 50 + 3 * 5)
        seconds[jobs[1].name] = 20.0  # slower by operation than the pretraining was
        shown.end(jobs[1])
        assert shown.seconds_left() == pytest.approx(2 * 50 + 2 * 20)
        shown.show(None, jobs[2], Update("a", 3, 4, 0.0, ""))
        assert shown.seconds_left() == pytest.approx(50 / 4 + 50 + 2 * 20)
    with shown.over(jobs[2:], len(jobs), workers=2):
        assert shown.seconds_left() == pytest.approx((2 * 50 + 2 * 20) / 2)
    with shown.over(jobs[2:4], len(jobs), workers=2):
        assert shown.seconds_left() == pytest.approx(50 + 20), "a finetuning waits for its pretraining"


def test_failed_and_reused_runs_are_no_work_done(tmp_path, seconds):
    one = loaded(tmp_path)
    jobs = [Job(one, "finetune", seed) for seed in range(3)]
    shown = StudyProgress(tmp_path, planned)
    with shown.over(jobs[1:], 3):
        seconds[jobs[0].name] = 7.0  # was there before
        assert shown.seconds_left() is None
        shown.end(jobs[1], failed=True)
        assert shown.seconds_left() is None and shown._facts(None) == "1 of them failed"


def test_an_estimate_after_a_run_computes_no_settings_again(tmp_path, seconds, monkeypatch):
    """Of thousands of runs that are left that took seconds, after every one of them."""
    one = loaded(tmp_path)
    jobs = [Job(one, "finetune", seed) for seed in range(7)]
    asked: list[int] = []
    settings = Job.settings
    shown = StudyProgress(tmp_path, planned)
    with shown.over(jobs, len(jobs)):
        for count, job in enumerate(jobs[:5], 1):
            seconds[job.name] = [9.0, 1.0, 5.0, 2.0, 4.0][count - 1]
            shown.end(job)
            assert shown.seconds_left() == pytest.approx((7 - count) * [9.0, 5.0, 5.0, 3.5, 4.0][count - 1]), (
                "the median"
            )
            if count == 1:
                monkeypatch.setattr(Job, "settings", lambda job: asked.append(job.seed) or settings(job))
    assert not asked


def test_what_cannot_be_planned_has_no_estimate(tmp_path, seconds):
    one = loaded(tmp_path)
    jobs = [Job(one, "finetune", 0), Job(one, "finetune", 1), Job(tuned(one, 0.5), "finetune", 0)]
    shown = StudyProgress(tmp_path, lambda job: None if job is jobs[2] else 10.0)
    seconds[jobs[0].name] = 4.0
    with shown.over(jobs, 3):
        shown.end(jobs[0])
        assert shown.seconds_left() is None
        shown.end(jobs[2], failed=True)
        assert shown.seconds_left() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0.2, "1 s"), (119.0, "119 s"), (180.0, "3 min"), (7300.0, "2.0 h"), (4e4, "11 h"), (2e5, "2.3 days")],
)
def test_an_estimate_is_no_more_precise_than_it_is(amount, text):
    assert about(amount) == f"about {text}"


# ------------------------------------------------------------------------------------------------------ where it shows


def test_a_log_has_one_line_a_run(tmp_path, seconds, capsys):
    one = loaded(tmp_path)
    jobs = [Job(one, "finetune", seed) for seed in range(3)]
    seconds |= {job.name: 60.0 * 60 for job in jobs}
    shown = StudyProgress(tmp_path, planned, quiet=False)
    with shown.over(jobs, 4):
        for i, job in enumerate(jobs):
            shown.end(job, failed=i == 1)
    assert lines(capsys.readouterr().err) == [
        "runs: 2 of 4 done, about 2.0 h left",
        "runs: 3 of 4 done, 1 of them failed, about 60 min left",
        "runs: 4 of 4 done, 1 of them failed",
    ]
    with StudyProgress(tmp_path, planned, quiet=False).over(jobs[:1], 1) as shown:
        shown.end(jobs[0])
    with StudyProgress(tmp_path, planned, quiet=True).over(jobs, 3) as shown:
        shown.end(jobs[0])
    assert capsys.readouterr().err == "", "one run needs no such line, and quiet is quiet"


def test_a_terminal_has_a_bar_of_all_runs(monkeypatch, tmp_path, seconds):
    """It says our estimate, not one from how fast it grew."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    one = loaded(tmp_path)
    jobs = [Job(one, "finetune", seed) for seed in range(3)]
    seconds[jobs[0].name] = 400.0
    shown = StudyProgress(tmp_path, planned, quiet=False)
    with shown.over(jobs, 5):
        shown.end(jobs[0])
        shown.show(None, jobs[1], Update("[2/3] a", 5, 10, 0.0, "val 1"))
        bars = shown._board._bars
        screen.truncate(0)
        bars.refresh()
        rows = Console(width=100).render_lines(bars.get_renderable())
        texts = ["".join(part.text for part in row).rstrip() for row in rows]
    first, second = texts
    assert first.split()[0] == "runs" and "3/5" in first and first.endswith("about 10 min left")
    assert "-:--:--" not in first and "5/10" in second


def counts(text: str) -> list[str]:
    return [line.split(",")[0] for line in lines(text)]


@pytest.mark.slow
def test_here_and_by_workers_the_same_is_said(tmp_path, capfd):
    """Of a study whose first run is there already; an estimate is in its folder while it runs, and gone afterwards."""
    one = loaded(tmp_path)
    jobs = requests(*family(one), *family(one, 1))
    kept: list[dict] = []

    class Kept(StudyProgress):
        def _keep_estimate(self, left: float | None) -> None:
            super()._keep_estimate(left)
            kept.append(json.loads((tmp_path / "progress.json").read_text()))

    for where, make in (
        ("here", lambda root, shown: run_here(jobs, root, Runtime(SETTINGS), shown)),
        ("two", lambda root, shown: run_locally(jobs, root, SETTINGS, 2, tmp_path / "study", shown)),
    ):
        root = tmp_path / where
        assert run_here(jobs[:1], root, Runtime(SETTINGS)) == []
        capfd.readouterr()
        kept.clear()
        assert make(root, Kept(root, planned, tmp_path, quiet=False)) == []
        found = capfd.readouterr().err
        assert counts(found) == [f"runs: {n} of 6 done" for n in range(2, 7)]
        assert [("left" in line) for line in lines(found)] == [True] * 4 + [False]
        assert [estimate["left"] is not None for estimate in kept] == [True] * 4 + [False]
        assert not (tmp_path / "progress.json").exists()


def test_a_stage_alone_shows_itself_as_before(tmp_path):
    """Bars of a run reach the board of all runs, not one of their own."""
    updates: list[Update] = []
    with forward_progress(updates.append):
        from spt.training.stage import run_stage

        run_stage(Job(loaded(tmp_path), "pretrain", 0), tmp_path / "runs", Runtime(Settings(cpu=True)))
    assert updates and updates[0].label.endswith("pretrain")


def test_on_slurm_the_files_of_runs_tell(tmp_path, seconds):
    """How many are at work, and how much of their operations they have logged."""
    one = loaded(tmp_path)
    jobs = [Job(one, "finetune", seed) for seed in range(5)]
    shown = StudyProgress(tmp_path, planned)
    for job, flops in ((jobs[1], 5.0), (jobs[2], 0.0)):
        run = RunFolder(tmp_path, job.name)
        run.path.mkdir()
        run.set_status("running")
        run.log("train", 1, flops=flops)
        run.log("val", 1, accuracy=0.5)
    seconds[jobs[0].name] = 8.0
    with shown.over(jobs, 5):
        shown.look(jobs[1:])
        shown.end(jobs[0])
        assert shown.seconds_left() == pytest.approx((4 + 3 * 8) / 2)


def test_status_tells_the_time_left_while_something_runs(tmp_path, monkeypatch):
    raw = {"kind": "compare", "recipes": [str(recipe_file(tmp_path))], "seeds": 2}
    root = tmp_path / "runs"
    runtime = Runtime(SETTINGS)
    grid = expand(validate(raw, "here"), False, MeasuredCosts(root, runtime))
    monkeypatch.setattr(run_study, "run_here", lambda *_: [])
    folder, _ = run_study.run_study(grid, root, ExecutionTarget(), runtime)

    def left() -> float | None:
        return study_status(folder)["studies"][0]["left"]

    (folder / "progress.json").write_text(json.dumps({"time": time.time() - 100, "left": 700.0}))
    assert left() is None, "nothing runs"
    run = RunFolder(root, grid.jobs[0].name)
    run.path.mkdir(parents=True)
    run.set_status("running")
    with run.locked():
        assert left() == pytest.approx(600, abs=5)
        text = io.StringIO()
        Console(file=text, width=100).print(render(study_status(folder)))
        assert "0 of 6 runs done, about 10 min left" in text.getvalue()
        for wrong in ("{", "[]", '{"time": 0, "left": null}', '{"time": 0, "left": 700}'):
            (folder / "progress.json").write_text(wrong)
            assert left() is None


# ----------------------------------------------------------------------------------------------------------- trackers


def study_grid(tmp_path, **keys):
    raw = {"kind": "compute", "recipes": [str(recipe_file(tmp_path))], "seeds": [3], **(keys or {"shares": [0, 0.5]})}
    return expand(validate(raw, "here"), False, MeasuredCosts(tmp_path, Runtime(SETTINGS)))


def study_requests(tmp_path, **keys) -> list[RunRequest]:
    grid = study_grid(tmp_path, **keys)
    return [*run_study.trial_requests(grid), *run_study.cell_requests(grid)]


def test_runs_of_one_arm_are_counted_alone(tmp_path):
    grid = study_grid(tmp_path, kind="compare", seeds=3)
    for arm, count in ((None, 6), ("scratch", 3), ("spt", 3)):
        numbers = [request.label.split()[0] for request in run_study.cell_requests(grid, arm)]
        assert numbers == [f"[{i}/{count}]" for i in range(1, count + 1)]


def names(asked: list[RunRequest]) -> list[tuple[str, str]]:
    return [(request.job.stage, request.tracked.name.removeprefix("tiny, ")) for request in queue.in_order(asked)]


def test_a_run_that_rows_share_is_called_by_what_they_have_in_common(tmp_path):
    """A baseline of every share has none, a pretraining for all settings no setting."""
    found = names(study_requests(tmp_path, shares=[0, 0.2, 0.4]))
    assert found == [
        ("pretrain", "share 0.2, seed 3, spt"),
        ("finetune", "share 0.2, seed 3, spt"),
        ("finetune", "seed 3, scratch"),
        ("pretrain", "share 0.4, seed 3, spt"),
        ("finetune", "share 0.4, seed 3, spt"),
    ]
    found = names(study_requests(tmp_path, kind="data", fractions=[0.5, 1], pretrain_on="all"))
    assert found[:3] == [
        ("pretrain", "pretrained on all inputs, seed 3, spt"),
        ("finetune", "fraction 0.5, pretrained on all inputs, seed 3, spt"),
        ("finetune", "fraction 0.5, pretrained on all inputs, seed 3, scratch"),
    ]
    found = names(study_requests(tmp_path, kind="tune", space={"learning_rate": [0.1, 0.2]}))
    assert found[:2] == [("pretrain", "trial, seed 0, spt"), ("finetune", "trial, learning_rate 0.1, seed 0, spt")]
    assert [stage for stage, _ in found].count("pretrain") == 1


def test_a_run_is_called_by_its_row(tmp_path, monkeypatch):
    """Whoever makes it: here, a worker (who is sent the request), an element of a Slurm array."""
    called: list[tuple] = []

    def run_stage(job, root, runtime, label, tracked) -> None:
        called.append((job.stage, *tracked))

    monkeypatch.setattr(queue, "run_stage", run_stage)
    asked = [run_study.in_group(request, "s") for request in study_requests(tmp_path)]
    expected = [(stage, f"tiny, share 0.5, seed 3, {arm}", "s") for stage, arm in
                (("pretrain", "spt"), ("finetune", "spt"), ("finetune", "scratch"))]  # fmt: skip
    run_here(asked, tmp_path / "runs", Runtime(SETTINGS))
    assert called == expected
    sent = [pickle.loads(pickle.dumps(request)) for request in queue.in_order(asked)]
    assert [(request.job.stage, *request.tracked) for request in sent] == expected
    for request in queue.in_order(asked):
        ArrayElement(request.job, tmp_path, SETTINGS, request.tracked)()
    assert called[3:] == expected


def test_a_studys_runs_are_a_group(tmp_path, monkeypatch):
    seen: list[RunRequest] = []
    monkeypatch.setattr(run_study, "run_here", lambda requests, *_: seen.extend(requests) or [])
    raw = {"kind": "tune", "recipes": [str(recipe_file(tmp_path))], "space": {"learning_rate": [0.1]}, "seeds": 1}
    runtime = Runtime(SETTINGS)
    grid = expand(validate(raw, "here"), False, MeasuredCosts(tmp_path, runtime))
    folder, _ = run_study.run_study(grid, tmp_path, ExecutionTarget(), runtime)
    assert {request.tracked.group for request in queue.in_order(seen)} == {folder.name}
    assert seen[0].tracked.name == "tiny, trial, learning_rate 0.1, seed 0, spt"


def test_slurms_elements_get_the_names_and_its_runs_are_counted(tmp_path, monkeypatch, capfd):
    from test_slurm import QUICK, Cluster

    cluster, one = Cluster(monkeypatch), loaded(tmp_path)
    jobs = [RunRequest(job, "", TrackedRun(f"row {i}", "s")) for i, job in enumerate(family(one))]
    shown = StudyProgress(tmp_path / "runs", planned, quiet=False)
    assert slurm.run_on_slurm(jobs, tmp_path / "runs", SETTINGS, QUICK, tmp_path / "study", shown) == []
    elements = [element for _, found in cluster.arrays for element in found]
    assert sorted(element.tracked for element in elements) == [("row 0", "s"), ("row 1", "s"), ("row 1", "s")]
    assert counts(capfd.readouterr().err) == [f"runs: {n} of 3 done" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("tracker", "options"),
    [
        ("wandb", {"name": "a, seed 0, spt, pretrain", "group": "s"}),
        ("trackio", {"name": "a, seed 0, spt, pretrain", "group": "s"}),
        ("mlflow", {"run_name": "a, seed 0, spt, pretrain", "tags": {"group": "s"}}),
        ("tensorboard", {}),
    ],
)
def test_trackers_are_started_with_names(tmp_path, monkeypatch, tracker, options):
    runtime = Runtime(Settings(quiet=True, cpu=True, tracker=tracker))
    started: list[tuple] = []
    monkeypatch.setattr("accelerate.tracking.filter_trackers", lambda *_: [])
    monkeypatch.setattr(
        runtime.accelerator,
        "init_trackers",
        lambda project, config, init_kwargs: started.append((project, init_kwargs)),
    )
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    run = TrackedRun("a, seed 0, spt, pretrain", "s")
    with runtime.tracked(run, tmp_path, {}):
        pass
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with runtime.tracked(run, tmp_path, {}):
        pass
    own = "mine" if tracker == "wandb" else "spt"
    assert started == [("spt", {tracker: options}), (own, {tracker: options})]
    assert "group" not in start_options("wandb", TrackedRun("a"))


def test_a_run_of_no_study_says_what_it_is(tmp_path, monkeypatch):
    seen: list[TrackedRun] = []
    one = loaded(tmp_path)
    real = Runtime.tracked
    monkeypatch.setattr(Runtime, "tracked", lambda self, run, *rest: seen.append(run) or real(self, run, *rest))
    from tiny import run

    run(spt_job(one), tmp_path / "runs")
    run(Job(one, "finetune", 1), tmp_path / "runs")
    names = ["tiny, seed 0, spt, pretrain", "tiny, seed 0, spt, finetune", "tiny, seed 1, scratch, finetune"]
    assert seen == [TrackedRun(name) for name in names]


def test_a_board_of_many_runs_counts_those_that_are_done(capsys):
    with Board(runs=3, done=1) as board:
        board.count_run()
        board.count_run("about 3 min left")
    assert capsys.readouterr().err.splitlines() == ["runs: 2 of 3 done", "runs: 3 of 3 done, about 3 min left"]
