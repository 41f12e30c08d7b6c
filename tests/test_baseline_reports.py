"""Studies held against answers without a network: which are planned and made, and what a report says of them."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from records import ENVIRONMENT, SPLITS, arms, compared, finish, shown, study
from tiny import RECIPE, changed, load, own_task, recipe_file, spt

from spt.advisor.answer import Answer, answer
from spt.analysis.diff_reports import diff_reports
from spt.baselines import majority
from spt.baselines.base import Fitted
from spt.baselines.job import BaselineJob, baseline_jobs
from spt.baselines.registry import BASELINES, compared_metric
from spt.baselines.run import run_baseline
from spt.config.job import Job
from spt.data.dataset import open_task
from spt.errors import DataError, RecipeError, UsageError
from spt.execution.baselines import make_baselines
from spt.execution.estimate import MeasuredCosts
from spt.execution.run_study import ExecutionTarget, make_plan, run_study, study_folder
from spt.report import html, latex, machine, markdown
from spt.report.collect import read_report
from spt.report.per_example import compare_examples, example_scores
from spt.report.results import collect_results, merge
from spt.report.statements import statements
from spt.runs.baseline import BaselineResult, baseline_outcome, read_baseline
from spt.runs.files import write_json, write_text
from spt.runs.index import Failure
from spt.runs.plan import StudyPlan, read_plan
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.studies.grid import expand
from spt.studies.schema import from_mapping, part_of, to_yaml, validate, with_baselines
from spt.studies.status import study_status
from spt.tasks.base import TaskData
from spt.training.build import build_stage
from spt.training.metrics import default_metric

# --------------------------------------------------------------------------------------------------------- as asked for


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([], ()),
        ("auto", "auto"),
        (["auto"], "auto"),
        ("tfidf", ("tfidf",)),
        (["majority", "boosting"], ("majority", "boosting")),
    ],
)
def test_baselines_of_every_kind_of_study(given, meant):
    for raw in ({"kind": "compare"}, {"kind": "data", "fractions": [0.5, 1.0]}, {"kind": "tune"}):
        assert validate({**raw, "recipes": ["quickstart"], "baselines": given}, "a study").baselines == meant


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["tfdif"], "'tfdif' is no baseline; did you mean tfidf"),
        ("forest", "'forest' is no baseline; known: auto, boosting, catch22"),
        (["majority", "majority"], "majority is listed twice"),
        (["auto", "tfidf"], "'auto' is no baseline"),
        (3, "baselines"),
    ],
)
def test_baselines_that_are_none_are_refused(given, complaint):
    with pytest.raises(RecipeError, match=complaint):
        validate({"kind": "compare", "recipes": ["quickstart"], "baselines": given}, "a study")


def test_an_option_sets_them_and_a_file_keeps_them():
    source = from_mapping({"kind": "compare", "recipes": ["quickstart"]}, "a study")
    named = with_baselines(source, ["majority", "tfidf"])
    assert validate({"kind": "compare", **named.study.model_dump(mode="json")}, "a study") == named.study
    assert "baselines:\n- majority\n- tfidf" in to_yaml(named.study)
    assert part_of(named, ["quickstart"]).study.baselines == ("majority", "tfidf")
    assert with_baselines(named, ["auto"]).study.baselines == "auto"


def grid_of(tmp_path: Path, recipes=None, kind="compare", seeds=2, **options):
    raw = {"kind": kind, "recipes": recipes or [str(recipe_file(tmp_path))], "seeds": seeds, **options}
    costs = MeasuredCosts(tmp_path / "runs", Runtime(Settings(cpu=True)))
    return expand(from_mapping(raw, "a study").study, False, costs)


def test_each_data_set_has_its_own(tmp_path):
    """Rows of one data set share their baselines; a baseline with chance is made for every seed."""
    paths = []
    for name, rows in (("a", 24), ("b", 24), ("c", 20)):
        recipe = changed(RECIPE, task__max_rows=rows, model__d_model=8 if name == "b" else 16)
        (tmp_path / name).mkdir()
        paths.append(str(recipe_file(tmp_path / name, recipe).rename(tmp_path / f"{name}.yaml")))
    grid = grid_of(tmp_path, paths, baselines="auto")
    found = [(job.name, job.seed, rows) for job, rows, _ in grid.baselines]
    one = [("majority", None), ("linear_probe", None), ("logistic", None), ("tfidf", None)]
    one += [("boosting", 0), ("boosting", 1)]
    assert found == [(*each, rows) for rows in ([0, 1], [2]) for each in one]
    assert len({job.key for job, *_ in grid.baselines}) == 12
    written = make_plan(grid)
    assert StudyPlan.model_validate(written.model_dump(mode="json")) == written
    plain = grid_of(tmp_path, paths)
    assert plain.baselines == [] and study_folder(plain, tmp_path) != study_folder(grid, tmp_path)
    before = make_plan(plain).model_dump(mode="json")
    assert before.pop("baselines") == [] and StudyPlan.model_validate(before).baselines == ()


def test_fractions_are_data_sets_of_their_own(tmp_path):
    grid = grid_of(tmp_path, kind="data", fractions=[0.5, 1.0], baselines=["majority"])
    assert [rows for _, rows, _ in grid.baselines] == [[0], [1]]
    half, whole = (run_baseline(job, tmp_path) for job, *_ in grid.baselines)
    assert (half.fitted, whole.fitted) == (12, 24) and half.data["test"] == whole.data["test"]


def test_what_does_not_fit_is_left_out_or_refused(tmp_path):
    with pytest.raises(UsageError, match="tiny: no baseline catch22: it describes numbers in time"):
        grid_of(tmp_path, baselines=["majority", "catch22"])
    (tmp_path / "w").mkdir()
    waves = own_task(tmp_path / "w", task__kind="values", task__target="numbers")
    assert waves.data
    path = (tmp_path / "w" / "tiny.yaml").rename(tmp_path / "w" / "waves.yaml")
    grid = grid_of(tmp_path, [str(recipe_file(tmp_path)), str(path)], baselines=["tfidf", "catch22"])
    assert [(job.name, rows) for job, rows, _ in grid.baselines] == [("tfidf", [0]), ("catch22", [1])]
    assert sum("no baseline" in note for note in grid.notes) == 2


def test_the_metric_is_the_one_that_networks_are_compared_in(tmp_path):
    positive = {"name": "supervised", "metric": "f1", "positive": "0"}
    for number, (changes, of_class) in enumerate(
        (
            ({}, None),
            ({"finetune__objective": {"name": "supervised", "metric": "f1_macro"}}, None),
            ({"finetune__objective": {"name": "supervised", "metric": "auroc"}}, 1),
            ({"finetune__objective": positive}, 0),
            ({"task__target": "numbers"}, None),
        )
    ):
        (folder := tmp_path / str(number)).mkdir()
        recipe = own_task(folder, **changes)
        job = Job(recipe, "finetune", 0)
        assert compared_metric(recipe, open_task(recipe.recipe.task)).positive == of_class
        assert compared_metric(recipe, open_task(recipe.recipe.task)).name == default_metric(build_stage(job).output)


# -------------------------------------------------------------------------------------------------------------- as made


def jobs_of(tmp_path, names=None, seeds=(0,), **changes) -> list[BaselineJob]:
    recipe = load(str(recipe_file(tmp_path, **changes)))
    data = open_task(recipe.recipe.task)
    return baseline_jobs(names, recipe, data, compared_metric(recipe, data), seeds)[0]


def test_a_baseline_is_a_folder_that_is_made_once(tmp_path, monkeypatch):
    (job,) = jobs_of(tmp_path, ["majority"])
    result = run_baseline(job, tmp_path / "runs")
    folder = tmp_path / "runs" / f"baseline-{result.key}"
    assert {path.name for path in folder.iterdir()} == {"job.json", "status.json", "result.json", "predictions.parquet"}
    assert read_baseline(tmp_path / "runs", folder.name) == result
    assert json.loads((folder / "job.json").read_text())["baseline"] == "majority"
    assert example_scores(folder).score.mean() == pytest.approx(result.test["accuracy"])
    assert compare_examples(folder, folder, 0).difference == 0

    def again(data: TaskData, metric: str, seed: int) -> Fitted:
        raise AssertionError("it was made already")

    monkeypatch.setitem(BASELINES, "majority", replace(BASELINES["majority"], fit=again))
    assert run_baseline(job, tmp_path / "runs") == result


def test_the_name_is_what_is_computed(tmp_path):
    """Data, metric, seed and version; nothing of the model."""
    (job,) = jobs_of(tmp_path, ["boosting"])
    (again,) = jobs_of(tmp_path, ["boosting"], model__d_model=8)
    (seed,) = jobs_of(tmp_path, ["boosting"], seeds=(1,))
    (rows,) = jobs_of(tmp_path, ["boosting"], task__max_rows=20)
    objective = {"name": "supervised", "metric": "f1_macro"}
    (metric,) = jobs_of(tmp_path, ["boosting"], finetune__objective=objective)
    assert job.key == again.key and len({each.key for each in (job, seed, rows, metric)}) == 4
    assert job.settings().keys() == {"format", "baseline", "version", "seed", "data", "task", "metric"}
    positive = [{**objective, "metric": "f1", "positive": name} for name in ("0", "1")]
    (zero,), (one,) = (jobs_of(tmp_path, ["boosting"], finetune__objective=each) for each in positive)
    assert zero.key != one.key


def test_a_failure_is_listed_and_the_rest_is_made(tmp_path, monkeypatch):
    def broken(data, metric, seed):
        raise DataError("there is no way to fit this")

    def bug(data, metric, seed):
        raise ZeroDivisionError("a bug")

    jobs, root = jobs_of(tmp_path, ["linear_probe", "tfidf", "majority"]), tmp_path / "runs"
    monkeypatch.setitem(BASELINES, "linear_probe", replace(BASELINES["linear_probe"], fit=broken))
    monkeypatch.setitem(BASELINES, "tfidf", replace(BASELINES["tfidf"], fit=bug))
    failed = make_baselines(jobs, root)
    assert list(failed.values()) == [
        "there is no way to fit this",
        "ZeroDivisionError: a bug (traceback.txt in its folder)",
    ]
    first, second, third = (baseline_outcome(root, job.folder) for job in jobs)
    assert isinstance(first, Failure) and (first.state, first.reason) == ("failed", "there is no way to fit this")
    assert isinstance(second, Failure) and (root / jobs[1].folder / "traceback.txt").is_file()
    assert isinstance(third, BaselineResult)
    monkeypatch.undo()
    assert make_baselines(jobs, root) == {}  # the same command tries again what failed
    assert all(isinstance(baseline_outcome(root, job.folder), BaselineResult) for job in jobs)


def test_what_is_not_begun_by_the_deadline_is_left_out_with_words(tmp_path, caplog):
    caplog.set_level("INFO")
    jobs, root = jobs_of(tmp_path, ["boosting", "linear_probe", "majority"]), tmp_path / "runs"
    assert make_baselines(jobs, root, deadline=0.0) == {}
    done = [isinstance(baseline_outcome(root, job.folder), BaselineResult) for job in jobs]
    assert done == [False, False, True]
    assert (
        "left out, since the time is up: linear_probe, boosting; the same command makes what is missing" in caplog.text
    )
    make_baselines(jobs, root)
    assert all(isinstance(baseline_outcome(root, job.folder), BaselineResult) for job in jobs)


def test_an_interrupted_baseline_leaves_no_result_and_is_made_again(tmp_path, monkeypatch):
    def interrupted(data, metric, seed):
        raise KeyboardInterrupt

    (job,), root = jobs_of(tmp_path, ["majority"]), tmp_path / "runs"
    with monkeypatch.context() as patch:
        patch.setitem(BASELINES, "majority", replace(BASELINES["majority"], fit=interrupted))
        with pytest.raises(KeyboardInterrupt):
            run_baseline(job, root)
    outcome = baseline_outcome(root, job.folder)
    assert isinstance(outcome, Failure) and outcome.state == "stopped"
    assert isinstance(run_baseline(job, root), BaselineResult)


def test_no_baseline_is_handed_a_test_label(tmp_path, monkeypatch):
    seen = []

    def looks(data: TaskData, metric: str, seed: int) -> Fitted:
        seen.append((data.train.targets is None, data.val.targets is None, data.test.targets is None))
        return majority.fit(data, metric, seed)

    (job,) = jobs_of(tmp_path, ["majority"])
    monkeypatch.setitem(BASELINES, "majority", replace(BASELINES["majority"], fit=looks))
    run_baseline(job, tmp_path / "runs")
    assert seen == [(False, False, True)]


def test_of_several_parts_of_a_study_the_first_makes_them(tmp_path):
    grid, root = grid_of(tmp_path, baselines=["majority", "boosting"], seeds=1), tmp_path / "runs"
    for part, made in (((2, 2), 0), ((1, 2), 2)):
        folder, failed = run_study(grid, root, ExecutionTarget(part=part), Runtime(Settings(cpu=True, quiet=True)))
        assert failed == 0 and len(list(root.glob("baseline-*"))) == made
        (status,) = study_status(folder)["studies"]
        assert (status["baselines"]["all"], status["baselines"]["done"]) == (2, made)


def test_a_baseline_alone_is_no_report(tmp_path):
    (job,) = jobs_of(tmp_path, ["majority"])
    run_baseline(job, tmp_path / "runs")
    with pytest.raises(UsageError, match="is a baseline; name the study that is held against it"):
        read_report([tmp_path / "runs" / job.folder])


def test_restart_moves_the_old_one_aside(tmp_path):
    jobs, root = jobs_of(tmp_path, ["majority"]), tmp_path / "runs"
    make_baselines(jobs, root)
    make_baselines(jobs, root, restart=True)
    assert sorted(path.name for path in root.glob("baseline-*")) == [jobs[0].folder, f"{jobs[0].folder}.old1"]


def test_a_damaged_result_is_said_in_a_sentence(tmp_path):
    (job,), root = jobs_of(tmp_path, ["majority"]), tmp_path / "runs"
    run_baseline(job, root)
    write_text(root / job.folder / "result.json", "{")
    outcome = baseline_outcome(root, job.folder)
    assert isinstance(outcome, Failure) and outcome.state == "unreadable" and "move the folder away" in outcome.reason
    assert list(make_baselines([job], root).values()) == [outcome.reason]


# --------------------------------------------------------------------------------------------------- the command itself


def test_the_command_makes_them_and_reports(tmp_path):
    recipe_file(tmp_path)
    words = ("compare", "tiny.yaml", "--baselines", "auto", "--seeds", "1", "--cpu", "--out", "runs")
    dry = spt(*words, "--dry-run", "--json", cwd=tmp_path)
    planned = json.loads(dry.stdout)["baselines"]
    assert [each["state"] for each in planned] == ["missing"] * 5 and not list((tmp_path / "runs").glob("baseline-*"))
    done = spt(*words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (comparison,) = found["baselines"]
    names = {"majority", "linear_probe", "logistic", "tfidf", "boosting"}
    assert {each["baseline"] for each in comparison["scores"]} == names
    assert comparison["verdict"].startswith("cannot be decided with 1 seed: transformer ")
    results = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/baseline-*/result.json")}
    assert set(results) == {each["run"] for each in planned}
    networks = tmp_path.glob("runs/finetune-*/result.json")
    data = {json.dumps(json.loads(path.read_text())["data"], sort_keys=True) for path in networks}
    assert {json.dumps(result["data"], sort_keys=True) for result in results.values()} == data
    (folder,) = tmp_path.glob("runs/compare-*")
    assert (folder / "baselines.csv").is_file() and read_plan(folder).baselines
    again = spt("study", "run", folder, "--json", cwd=tmp_path)
    assert json.loads(again.stdout)["baselines"] == found["baselines"] and "[baseline" not in again.stderr


# --------------------------------------------------------------------------------------------------------- in a report


def finish_baseline(root: Path, name: str, score: float | None, seed: int | None = None, **changes) -> dict:
    key = f"{name}{'' if seed is None else seed}"
    folder = root / f"baseline-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    if score is not None:
        metric = changes.get("metric", "accuracy")
        fields = {
            "key": key, "baseline": name, "title": BASELINES[name].title, "version": 1, "task": "digits", "seed": seed,
            "metric": metric, "higher_is_better": True, "val": {metric: 0.5}, "test": {metric: score},
            "sees": "something", "fitted": 400, "seconds": 2.0, "data": SPLITS,
            "environment": {},
        }  # fmt: skip
        write_text(folder / "result.json", BaselineResult(**{**fields, **changes}).model_dump_json())
    return {"name": name, "rows": [0], "seed": seed, "run": folder.name}


def held(root: Path, scratch, spt, baselines: dict[str, float | list[float]], **changes) -> Path:
    """A comparison with these test scores by seed, held against these baselines."""
    folder = compared(root, scratch, spt, **changes)
    planned = []
    for name, scores in baselines.items():
        each = enumerate(scores) if isinstance(scores, list) else [(None, scores)]
        planned += [finish_baseline(root, name, score, seed, **changes) for seed, score in each]
    value = json.loads((folder / "study.json").read_text())
    write_json(folder / "study.json", value | {"baselines": planned})
    return folder


def verdict(folder: Path) -> str:
    (comparison,) = read_report([folder]).baselines
    return comparison.verdict


SCRATCH, SPT = [0.80, 0.82, 0.81, 0.79], [0.86, 0.87, 0.88, 0.87]


@pytest.mark.parametrize(
    ("baselines", "said"),
    [
        (
            {"majority": 0.1, "tfidf": 0.7},
            r"transformer beats every baseline: transformer after SPT is 17.00 points ahead of the best of them, "
            r"TF-IDF with logistic regression \(70.00\) \(95 % interval 15.70 to 18.30, n=4\)",
        ),
        (
            {"majority": 0.1, "tfidf": 0.95},
            r"no network here beats TF-IDF with logistic regression \(95.00\): the best, transformer after SPT, is "
            r"8.00 points behind \(95 % interval 6.70 to 9.30, n=4\)",
        ),
        (
            {"tfidf": 0.869},
            r"no network here is shown to beat TF-IDF with logistic regression \(86.90\): the best, transformer after "
            r"SPT, is 0.10 points ahead, which is not decided \(95 % interval -1.20 to \+1.40, n=4\)",
        ),
        (
            {"boosting": [0.60, 0.99, 0.30, 0.95]},
            r"no network here is shown to beat Gradient boosting \(71.00\): the best, transformer after SPT, is 16.00 "
            r"points ahead, which is not decided",
        ),
    ],
)
def test_verdicts(tmp_path, baselines, said):
    assert re.match(said, verdict(held(tmp_path, SCRATCH, SPT, baselines)))


def test_the_answer_of_a_try_begins_with_what_is_better_without_a_network(tmp_path):
    def said(name: str, score: float) -> Answer:
        folder = held(tmp_path / name, SCRATCH, SPT, {"majority": 0.1, "tfidf": score})
        return answer(read_report([folder]), folder, tmp_path, 4, "10m")

    better, worse = said("better", 0.95), said("worse", 0.7)
    first = "Use no network trained like these: TF-IDF with logistic regression (something) has test accuracy 95.00 %"
    assert better.words.startswith(first) and "Of the networks, transformer is better with self-pre" in better.words
    assert worse.words.startswith(
        "Use transformer with self-pretraining: it beats training from scratch by 6.50 points"
    )
    assert [each.recommendation["better_baseline"] for each in (better, worse)] == ["tfidf", None]


def test_a_baseline_is_better_that_beats_every_network_in_its_better_arm(tmp_path):
    """Not one network of two, nor an arm that nobody would take; of several such baselines the best."""

    def said(name: str, rows: list, cells: list, **baselines: float) -> Answer:
        root = tmp_path / name
        planned = [
            finish_baseline(root, each, score) | {"rows": [*range(len(rows))]} for each, score in baselines.items()
        ]
        folder = study(root, "compare", rows, cells, baselines=planned)
        return answer(read_report([folder]), folder, tmp_path, 4, "10m")

    one, two = {"model": "transformer"}, {"name": "other", "model": "s4"}
    cells = arms(tmp_path / "one", 0, "a", SCRATCH, SPT) + arms(
        tmp_path / "one", 1, "b", [0.6, 0.61, 0.6, 0.62], [0.5, 0.51, 0.5, 0.52], model="s4", recipe="other"
    )
    between = said("one", [one, two], cells, tfidf=0.7)
    assert between.recommendation["better_baseline"] is None and between.words.startswith("Use transformer with self-")
    assert "Without a network: 1 of 2 networks beat every baseline" in between.words
    unsure = said("arm", [one], arms(tmp_path / "arm", 0, "a", [0.1, 0.9, 0.3, 0.8], SPT), majority=0.93, tfidf=0.95)
    assert (
        unsure.words.startswith("Use no network trained like these: TF-IDF") and "Without a network" not in unsure.words
    )


def test_few_seeds_decide_nothing(tmp_path):
    found = verdict(held(tmp_path, SCRATCH[:2], SPT[:2], {"tfidf": 0.5}))
    assert found == (
        "cannot be decided with 2 seeds: transformer after SPT is 36.50 points ahead of the best of them, TF-IDF with "
        "logistic regression (50.00)"
    )


def test_without_a_spread_nothing_is_decided(tmp_path):
    found = verdict(held(tmp_path, [0.5] * 3, [0.6] * 3, {"tfidf": 0.7}))
    assert found.endswith("is 10.00 points behind, with each of 3 seeds, so that there is no spread to judge it by")


def test_smoke_and_other_data_are_not_compared(tmp_path):
    assert verdict(held(tmp_path / "a", SCRATCH, SPT, {"tfidf": 0.5}, smoke=True)).startswith("smoke run")
    folder = held(tmp_path / "b", SCRATCH, SPT, {"tfidf": 0.5})
    finish_baseline(tmp_path / "b", "tfidf", 0.5, data={"test": {"rows": 360, "inputs": "other"}})
    assert verdict(folder) == "not comparable: the runs did not see the same data"


def test_lower_can_be_better(tmp_path):
    errors = {"metric": "mse", "higher_is_better": False, "chance": None}
    found = verdict(held(tmp_path / "a", [0.5, 0.52, 0.51], [0.3, 0.31, 0.33], {"linear_probe": 0.2}, **errors))
    assert found.startswith(
        "no network here beats Linear probe (0.2000): the best, transformer after SPT, is 0.113 in mse behind"
    )
    found = verdict(held(tmp_path / "b", [0.1, 0.12, 0.11], [0.3, 0.31, 0.33], {"linear_probe": 0.2}, **errors))
    assert found.startswith("transformer beats every baseline: transformer from scratch is 0.0900 in mse ahead of")


def test_failures_are_listed_and_the_rest_compared(tmp_path):
    report = read_report([held(tmp_path, SCRATCH, SPT, {"tfidf": 0.7, "majority": None})])
    (comparison,) = report.baselines
    assert comparison.verdict.startswith("transformer beats every baseline that was made: ")
    assert [(label, failure.arm, failure.state) for label, failure in report.failures] == [
        ("digits", "baseline majority", "missing")
    ]
    assert verdict(held(tmp_path / "b", SCRATCH, SPT, {"majority": None})) == "no baseline has finished"


def test_stored_results_hold_the_mean_score_of_each(tmp_path):
    folder = held(tmp_path, SCRATCH, SPT, {"tfidf": 0.7, "boosting": [0.5, 0.6, None], "majority": None})
    for path in tmp_path.glob("finetune-*"):
        write_json(path / "env.json", ENVIRONMENT)
    scratch, spt = collect_results(folder, "mine")
    assert scratch.baselines == spt.baselines == {"tfidf": 0.7, "boosting": pytest.approx(0.55)}
    assert merge(scratch.model_copy(update={"baselines": {"majority": 0.1, "tfidf": 0.2}}), scratch).baselines == {
        "majority": 0.1, "tfidf": 0.7, "boosting": pytest.approx(0.55)
    }  # fmt: skip
    assert scratch.summary()["baselines"] == scratch.baselines


def test_several_networks_on_one_data_set(tmp_path):
    rows = [{"model": "transformer"}, {"name": "other", "model": "s4"}]
    cells = arms(tmp_path, 0, "a", SCRATCH, SPT) + arms(
        tmp_path, 1, "b", [0.6, 0.61, 0.6, 0.62], [0.5, 0.51, 0.5, 0.52], model="s4", recipe="other"
    )
    planned = [
        finish_baseline(tmp_path, "tfidf", 0.7) | {"rows": [0, 1]},
        finish_baseline(tmp_path, "majority", 0.1) | {"rows": [0, 1]},
    ]
    report = read_report([study(tmp_path, "compare", rows, cells, baselines=planned)])
    (comparison,) = report.baselines
    assert comparison.verdict.startswith(
        "1 of 2 networks beat every baseline: transformer after SPT is 17.00 points ahead"
    )
    assert comparison.beaten_by == {"tfidf": ("transformer",), "majority": ("transformer", "s4")}
    shown_arms = {(c.network, c.arm) for c in comparison.contrasts if c.shown}
    assert shown_arms == {("transformer", "spt"), ("s4", "scratch")}
    assert {c.tests for c in comparison.contrasts} == {
        8
    }  # both arms, two networks, two baselines: also those not shown


def test_a_network_that_shares_no_seed_with_a_baseline_does_not_keep_the_report_from_being_made(tmp_path):
    """The best network lost the one seed at which the forest was made."""
    cells = [finish(tmp_path, "scratch", seed, 0.9, f"finetune-a{seed}", model="a") | {"row": 0} for seed in (1, 2, 3)]
    cells += [
        finish(tmp_path, "scratch", seed, 0.7 + seed / 100, f"finetune-b{seed}", model="b") | {"row": 1}
        for seed in range(4)
    ]
    planned = [finish_baseline(tmp_path, "boosting", 0.8 if seed == 0 else None, seed) for seed in range(4)]
    planned = [each | {"rows": [0, 1]} for each in (*planned, finish_baseline(tmp_path, "majority", 0.1))]
    folder = study(tmp_path, "models", [{"model": "a"}, {"model": "b"}], cells, baselines=planned, seeds=[0, 1, 2, 3])
    (comparison,) = read_report([folder]).baselines
    assert "Gradient boosting (80.00)" in comparison.verdict
    assert "b from scratch, is 10.00 points behind" in comparison.verdict


def test_a_baseline_at_whose_seeds_no_network_finished_is_not_compared(tmp_path):
    cells = [finish(tmp_path, "scratch", seed, 0.7 + seed / 100) | {"row": 0} for seed in (1, 2, 3)]
    planned = [finish_baseline(tmp_path, "boosting", 0.8, 0), finish_baseline(tmp_path, "majority", 0.1)]
    folder = study(tmp_path, "compare", [{}], cells, baselines=planned, seeds=[0, 1, 2, 3])
    (comparison,) = read_report([folder]).baselines
    assert comparison.verdict.startswith(
        "transformer beats every baseline: transformer from scratch is 62.00 points ahead"
    )
    assert comparison.verdict.endswith("; not compared, without a seed in common: Gradient boosting (80.00)")


def test_a_baseline_is_beaten_by_the_better_arm_alone(tmp_path):
    """A decided win of the other arm, whose mean is lower, is not told as the network's."""
    scratch, spt = [0.800, 0.801, 0.799, 0.800, 0.800], [0.90, 0.72, 0.88, 0.70, 0.86]
    (comparison,) = read_report([held(tmp_path, scratch, spt, {"boosting": 0.78})]).baselines
    won = {each.arm: each.decision for each in comparison.contrasts}
    assert won == {"scratch": "first", "spt": "open"} and comparison.beaten_by == {"boosting": ()}
    assert comparison.verdict.startswith("no network here is shown to beat") and "which is not decided" in (
        comparison.verdict
    )


def test_every_writer_shows_them(tmp_path):
    folder = held(tmp_path, SCRATCH, SPT, {"tfidf": 0.95, "boosting": [0.5, 0.6, 0.5, 0.6]})
    report = read_report([folder])
    said = "no network here beats TF-IDF"
    assert ("digits, baselines", report.baselines[0].verdict) in [(s.label, s.verdict) for s in statements(report)]
    text = shown(report)
    assert "no network here beats" in text and max(map(len, text.splitlines())) <= 80
    for page in (markdown.markdown(report), html.page(report, []), latex.latex(report)):
        assert said in page and "Baselines without a network" in page and "Networks against baselines" in page
    value = machine.to_json(report)
    assert any(said in line for line in value["verdicts"])
    assert set(value["baselines"][0]) == {
        "label", "task", "metric", "higher_is_better", "rows", "scores", "contrasts", "beaten_by", "verdict",
        "failures",
    }  # fmt: skip
    assert set(value["baselines"][0]["scores"][0]) == {
        "baseline", "title", "sees", "metric", "score", "n", "planned", "one_number", "seconds", "fitted", "settings",
        "notes", "runs",
    }  # fmt: skip
    assert set(value["baselines"][0]["contrasts"][0]) == {
        "first", "second", "difference", "metric", "higher_is_better", "n", "planned", "splits", "low", "high", "p",
        "holm", "tests", "decision", "verdict", "label", "network", "arm", "shown", "baseline", "score",
        "baseline_score",
    }  # fmt: skip
    lines = list(csv.DictReader(io.StringIO(machine.to_csv(report, "baselines"))))
    assert [(line["baseline"], line["arm"], line["runs"]) for line in lines] == [
        ("tfidf", "spt", "1"),
        ("boosting", "spt", "4"),
    ]
    assert report.to_pandas("baselines")["score"].tolist() == [0.95, 0.55]
    assert "baseline-tfidf" in {Path(name).name for name in report.folders}


def test_a_report_without_baselines_says_nothing_of_them(tmp_path):
    report = read_report([compared(tmp_path, SCRATCH, SPT)])
    assert report.baselines == () and machine.to_csv(report, "baselines") == ""
    for page in (shown(report), markdown.markdown(report), html.page(report, []), latex.latex(report)):
        assert "aselines" not in page.replace("baseline better than a constant", "")


def test_baselines_change_nothing_of_scratch_and_spt(tmp_path):
    with_baselines = read_report([held(tmp_path / "a", SCRATCH, SPT, {"tfidf": 0.95})])
    plain = read_report([compared(tmp_path / "b", SCRATCH, SPT)])
    assert with_baselines.rows == plain.rows


def test_a_diff_of_reports_tells_what_changed(tmp_path):
    first, second = (held(tmp_path / name, SCRATCH, SPT, {"tfidf": score}) for name, score in (("a", 0.95), ("b", 0.7)))
    found = diff_reports(first, second)
    assert sorted(change.key.partition(":")[0] for change in found.statements) == ["digits, baselines"] * 2
    plain = compared(tmp_path / "c", SCRATCH, SPT)
    assert len(diff_reports(first, plain).statements) == 1


def test_the_same_runs_count_once(tmp_path):
    first = held(tmp_path, SCRATCH, SPT, {"tfidf": 0.7})
    value = json.loads((first / "study.json").read_text())
    second = tmp_path / "compare-2"
    second.mkdir()
    write_json(second / "study.json", value)
    (comparison,) = read_report([first, second]).baselines
    assert {contrast.tests for contrast in comparison.contrasts} == {2}
