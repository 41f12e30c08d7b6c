"""Stored results: what comes with spt is consistent, and finished runs are taken into files of one cell each."""

import json
import os
import shutil
from importlib.resources import files

import pytest
from records import ENVIRONMENT, arms, plan, shown, start, study
from test_cli import call

from spt.config.load import load, packaged
from spt.errors import DataError, UsageError
from spt.report import collect, results
from spt.report.results import StoredResult, add_results, collect_results, merge, read_results, select_results
from spt.report.stats import corrected_interval
from spt.runs.files import write_json

PENDULUM = {"name": "pendulum/s5", "task": "pendulum", "model": "s5"}
S5 = {**PENDULUM, "factors": {"variant": "S5"}}


def finished(root, scores, name="a", overrides=(), **row):
    """A study with a row of S5 on the pendulum, as run by the packaged recipe."""
    settings = {"recipe": "pendulum/s5", "task": "pendulum", "model": "s5", "metric": "mse"}
    cells = arms(root, 0, name, scores, scores[:1], **settings, higher_is_better=False, chance=None)
    text = load("pendulum/s5", overrides).to_yaml()
    for cell in cells:
        write_json(root / cell["run"] / "env.json", ENVIRONMENT)
        (root / cell["run"] / "recipe.yaml").write_text(text, encoding="utf-8")
    return study(root, "variants", [S5 | row], cells)


@pytest.fixture
def stored(tmp_path):
    return add_results(finished(tmp_path / "runs", [0.0030, 0.0032, 0.0034]), tmp_path / "results")


def test_those_that_come_with_spt_can_be_read_and_are_of_this_code():
    found = read_results()
    names = [path.name for path in files("spt.results").iterdir() if path.name.endswith(".json")]
    assert sorted(f"{result.name}.json" for result in found) == sorted(names)
    for result in found:
        assert all(run.commit and not run.commit.endswith("+") for run in result.runs), f"{result.name}: which commit?"
        assert result.recipe in packaged(), f"{result.name}: {result.recipe} does not come with spt"
        if result.published_cell is not None:
            assert result.planned >= result.published_cell.seeds, f"{result.name}: the paper has more runs"


def test_runs_become_a_file_beside_the_published_number(tmp_path, stored):
    (result,) = stored
    assert (result.source, result.row, result.column, result.arm) == ("S5, Table 3", "S5", "MSE", "scratch")
    assert [run.score for run in result.runs] == [0.0030, 0.0032, 0.0034]
    assert result.runs[0].machine == "a processor, 2 cores" and not result.departures
    row = result.summary()
    assert (row["published"], row["n"], row["planned"], row["complete"]) == (0.00341, 3, 20, False)
    assert row["ours"] == pytest.approx(0.0032) and row["low"] == pytest.approx(0.0032 - 4.302653 * 0.0002 / 3**0.5)
    assert read_results(tmp_path / "results") == [result]


def test_a_later_run_of_a_seed_replaces_it_and_others_stay(tmp_path, stored):
    again = finished(tmp_path / "later", [0.0040], name="b")
    (result,) = add_results(again, tmp_path / "results")
    assert [run.score for run in result.runs] == [0.0040, 0.0032, 0.0034]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"metric": "mae"}, "has the metric mse, and these runs mae"),
        ({"recipe": "another"}, "has the recipe pendulum/s5"),
        ({"factors": {"variant": "S5-drop"}}, "has the factors"),
    ],
)
def test_what_is_not_the_same_cell_is_not_added_to_it(stored, changes, complaint):
    with pytest.raises(UsageError, match=complaint):
        merge(stored[0], stored[0].model_copy(update=changes))


def test_runs_with_other_settings_are_not_added_to_those_that_stay(tmp_path, stored):
    before = (tmp_path / "results" / f"{stored[0].name}.json").read_text()
    other = finished(tmp_path / "other", [0.004], name="b", overrides=["model.ssm_lr=0.1"])
    with pytest.raises(
        UsageError, match=r"has seed 0 with other settings \(the recipe's\) than these runs \(model.ssm_lr"
    ):
        add_results(other, tmp_path / "results")
    all_of_them = finished(tmp_path / "all", [0.004] * 3, name="c", overrides=["model.ssm_lr=0.1"])
    with pytest.raises(UsageError, match="keep them under another --table, or remove the file"):
        add_results(all_of_them, tmp_path / "results")
    assert (tmp_path / "results" / f"{stored[0].name}.json").read_text() == before


def test_two_settings_of_a_recipe_of_ones_own_are_not_mixed(tmp_path):
    for name, overrides in (("a", []), ("b", ["model.ssm_lr=0.1"]), ("c", [])):
        root = tmp_path / name
        folder = finished(root, [0.003, 0.004], name=name, overrides=overrides)
        plan = (folder / "study.json").read_text(encoding="utf-8")
        (folder / "study.json").write_text(plan.replace('"name": "pendulum/s5"', '"name": "mine"'), encoding="utf-8")
    add_results(tmp_path / "a", tmp_path / "kept", "mine")
    with pytest.raises(UsageError, match=r"other settings \(mine is not a packaged recipe.*keep them under another"):
        add_results(tmp_path / "b", tmp_path / "kept", "mine")
    assert folder and len(add_results(tmp_path / "c", tmp_path / "kept", "mine")) == 2  # both arms
    done = call("results", "--add", tmp_path / "c", "--table", "mine", "--folder", tmp_path / "kept", "zzz", code=2)
    assert "leave the words out" in done.stderr


OWN = """
task: {{name: custom, path: {0}/rows.csv, label_column: y, value_columns: [x], folds: 3, fold: {1}}}
model: {{name: {0}/mine.py, d_model: 16, n_layers: 1}}
pretrain:
  objective: {{name: masked, ratio: 0.5}}
  data: {0}/more.csv
  not_self_pretraining: true
  train: {{steps: 6, batch_size: 8, learning_rate: 0.01}}
finetune: {{train: {{steps: 6, batch_size: 8, learning_rate: 0.01}}}}
"""


def test_splits_and_places_of_files_are_no_other_settings(tmp_path):
    """Of a recipe of one's own: more seeds, made in another folder, join those that are stored."""

    def folds(root, seeds):
        root.mkdir()
        (root / "rows.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(40)), encoding="utf-8")
        (root / "more.csv").write_text("x\n1\n2\n", encoding="utf-8")
        (root / "mine.py").write_text((files("spt.models") / "tcn.py").read_text(encoding="utf-8"), encoding="utf-8")
        cells = []
        for fold in range(3):
            settings = {"recipe": "mine", "task": "custom", "model": "mine", "test_share": 1 / 3}
            for cell in arms(root, 0, f"f{fold}", [0.7] * seeds, [0.8] * seeds, **settings):
                (root / cell["run"] / "recipe.yaml").write_text(OWN.format(root, fold), encoding="utf-8")
                write_json(root / cell["run"] / "env.json", ENVIRONMENT)
                cells.append(cell | {"split": f"fold {fold}"})
        row = {"name": "mine", "task": "custom", "model": "mine"}
        return plan(root, cells, rows=[row], splits=["fold 0", "fold 1", "fold 2"])

    assert len(add_results(folds(tmp_path / "a", 1), tmp_path / "kept", "mine")) == 2
    kept = add_results(folds(tmp_path / "b", 2), tmp_path / "kept", "mine")
    assert [(len(each.runs), len({run.departures for run in each.runs})) for each in kept] == [(6, 1), (6, 1)]
    assert "44136fa355b3" not in kept[0].runs[0].departures[0]  # the settings were read


def test_two_settings_of_one_cell_in_one_folder_are_not_mixed(tmp_path):
    finished(tmp_path, [0.003, 0.004])
    (tmp_path / "variants-1").rename(tmp_path / "variants-2")
    finished(tmp_path, [0.005] * 3, name="b", overrides=["model.ssm_lr=0.1"])
    done = call("results", "--add", tmp_path, "--folder", tmp_path / "kept", "--table", "mine", code=2)
    assert "with two settings (" in done.stderr and "name the folder of one study" in done.stderr
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("names", [("lr 0.1", "lr 0,1"), ("A", "a")])
def test_tables_whose_files_would_have_one_name_are_told_apart(tmp_path, names):
    folder = finished(tmp_path / "runs", [0.003, 0.004])
    add_results(folder, tmp_path / "results", names[0])
    before = {path: path.read_text() for path in (tmp_path / "results").iterdir()}
    with pytest.raises(UsageError, match=f"is of another cell .*{names[0]}.* than these runs .*choose another --table"):
        add_results(folder, tmp_path / "results", names[1])
    assert before == {path: path.read_text() for path in (tmp_path / "results").iterdir()}


@pytest.mark.parametrize("names", [("甲", "乙"), ("x" * 200, "x" * 199 + "y")])
def test_names_that_a_file_cannot_tell_have_one_of_their_own(tmp_path, names):
    folder = finished(tmp_path / "runs", [0.003, 0.004])
    for name in names:
        add_results(folder, tmp_path / "results", name)
    found = read_results(tmp_path / "results")
    assert sorted({result.table for result in found}) == sorted(names) and len(found) == 4
    assert all(len(result.name) < 200 for result in found)


def test_smoke_runs_are_not_taken_and_that_is_said(tmp_path):
    folder = finished(tmp_path, [0.003])
    for path in tmp_path.glob("finetune-*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"smoke": True}))
    plan = folder / "study.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"smoke": True}))
    with pytest.raises(DataError, match="smoke runs are not taken"):
        collect_results(folder)


def test_complete_with_all_seeds_and_only_unshortened(tmp_path):
    scores = [0.003 + seed / 1e5 for seed in range(20)]
    (result,) = collect_results(finished(tmp_path / "whole", scores))
    assert result.complete
    other = ["finetune.train.epochs=3", "model.ssm_lr=0.1"]
    (shorter,) = collect_results(finished(tmp_path / "shorter", scores, overrides=other))
    assert [text.partition(" ")[0] for text in shorter.departures] == ["model.ssm_lr", "scratch.train.epochs"]
    assert not shorter.complete
    (departing,) = collect_results(finished(tmp_path / "departing", scores, overrides=other[1:]))
    assert departing.complete and departing.departures
    longer = ["finetune.train.epochs=99999"]
    (result,) = collect_results(finished(tmp_path / "longer", scores, overrides=longer))
    assert result.complete and len(result.departures) == 1 and not result.summary()["shortened"]


@pytest.mark.parametrize(
    ("departure", "shortens"),
    [
        ("task.max_rows (100, recipe null)", True),
        ("task.max_rows (null, recipe 2000)", False),
        ("task.subset_rows (100, recipe null)", True),
        ("task.subset_rows (200, recipe 100)", False),
        ("finetune.train.patience (5, recipe null)", True),
        ("finetune.train.patience (null, recipe 5)", False),
        ("finetune.train.epochs (null, recipe 3.0)", True),
        ("finetune.train.steps (1e2, recipe 300)", True),
        ("finetune.train.epochs (99999.0, study 100.0)", False),
        ("task.subset_fraction (1.0, recipe 0.5)", False),
        ("model.d_model (4, recipe 8)", False),
    ],
)
def test_less_to_train_on_shortens_a_run(stored, departure, shortens):
    run = stored[0].runs[0].model_copy(update={"departures": (departure,)})
    assert run.shortened == shortens


def test_failed_runs_are_kept_and_running_ones_are_not(tmp_path):
    folder = finished(tmp_path, [0.003, 0.004, 0.005, 0.006])
    plan = json.loads((folder / "study.json").read_text())
    for seed, state in ((1, "diverged"), (2, "running")):
        cell = plan["cells"][seed]
        (tmp_path / cell["run"] / "result.json").unlink()
        start(tmp_path, cell["run"], state=state, reason="the loss is not finite")
        write_json(tmp_path / cell["run"] / "env.json", ENVIRONMENT)
    (result,) = collect_results(folder)
    assert [(run.seed, run.state) for run in result.runs] == [(0, "done"), (1, "diverged"), (3, "done")]
    assert result.summary()["failed"] == 1


def test_a_run_whose_result_cannot_be_used_has_failed(tmp_path):
    folder = finished(tmp_path, [0.003, 0.004])
    path = tmp_path / "finetune-ascratch1" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"test": None}))
    (result,) = collect_results(folder)
    assert [(run.seed, run.state, run.score) for run in result.runs] == [(0, "done", 0.003), (1, "failed", None)]
    assert not result.complete and result.summary()["failed"] == 1


def test_a_run_whose_pretraining_diverged_is_kept_with_that_machine(tmp_path):
    folder = finished(tmp_path, [0.003, 0.004])
    plan = json.loads((folder / "study.json").read_text())
    for cell in plan["cells"]:
        if cell["arm"] == "spt":
            shutil.rmtree(tmp_path / cell["run"])
            cell["parent"] = "pretrain-odd"
    start(tmp_path, "pretrain-odd", state="diverged", reason="the loss is not finite")
    write_json(tmp_path / "pretrain-odd" / "env.json", ENVIRONMENT)
    (tmp_path / "pretrain-odd" / "recipe.yaml").write_text(load("pendulum/s5").to_yaml(), encoding="utf-8")
    write_json(folder / "study.json", plan)
    scratch, spt = collect_results(folder, "gentle pendulum")
    assert [run.state for run in scratch.runs] == ["done", "done"]
    assert [(run.state, run.machine, run.departures) for run in spt.runs] == [("diverged", "a processor, 2 cores", ())]


def test_a_row_of_which_no_run_has_a_result_does_not_keep_the_others_out(tmp_path):
    folder = finished(tmp_path, [0.003])
    plan = json.loads((folder / "study.json").read_text())
    start(tmp_path, "finetune-x", state="failed", reason="no memory")
    plan["rows"].append(plan["rows"][0] | {"factors": {"variant": "S5-drop"}})
    plan["cells"].append({"row": 1, "arm": "scratch", "seed": 0, "run": "finetune-x"})
    write_json(folder / "study.json", plan)
    assert {result.column for result in collect_results(folder, "gentle pendulum")} == {"pendulum, variant S5"}


def test_a_score_is_not_lost_to_a_run_that_failed_where_it_was_made_again(stored):
    (old,) = stored
    lost = old.runs[0].model_copy(update={"score": None, "state": "failed"})
    assert merge(old, old.model_copy(update={"runs": (lost,)})).runs == old.runs
    again = merge(old.model_copy(update={"runs": (lost, *old.runs[1:])}), old.model_copy(update={"runs": old.runs[:1]}))
    assert again.runs == old.runs


@pytest.mark.parametrize("stage", ["stop", "parent_stop"])
def test_a_run_that_the_clock_ended_is_shortened(tmp_path, stage):
    scratch, spt = collect_results(finished(tmp_path, [0.003]), "gentle pendulum")
    assert scratch.complete and spt.complete
    for path in tmp_path.glob("finetune-*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {stage: "time"}))
    for result in collect_results(tmp_path / "variants-1", "gentle pendulum"):
        assert result.runs[0].out_of_time and result.runs[0].shortened and not result.complete


def test_the_date_is_that_of_the_runs_end_and_not_of_its_copy(tmp_path):
    folder = finished(tmp_path, [0.003])
    status = tmp_path / "finetune-ascratch0" / "status.json"
    status.write_text('{"state": "done", "time": 86399.0}')
    assert collect_results(folder)[0].runs[0].date == "1970-01-01"


def test_splits_of_one_data_set_are_no_independent_runs(stored):
    """Their interval is the one that a report has: over splits, for training sets that overlap."""
    scores = {"fold 0": [0.70, 0.72], "fold 1": [0.80, 0.82], "fold 2": [0.90, 0.88]}
    run = stored[0].runs[0]
    runs = tuple(
        run.model_copy(update={"seed": seed, "split": split, "score": score, "test_share": 1 / 3})
        for split, each in scores.items()
        for seed, score in enumerate(each)
    )
    result = StoredResult.model_validate(stored[0].model_copy(update={"runs": runs}).model_dump())
    expected = corrected_interval([0.71, 0.81, 0.89], 1 / 3)
    row = result.summary()
    assert row["n"] == 6 and row["ours"] == pytest.approx(0.8033333)
    assert (row["low"], row["high"]) == pytest.approx((expected.low, expected.high))
    lost = runs[0].model_copy(update={"test_share": None})
    with pytest.raises(ValueError, match="has the share of the rows that it tests"):
        StoredResult.model_validate(stored[0].model_copy(update={"runs": (lost,)}).model_dump())


def test_a_table_of_ones_own_has_both_arms(tmp_path):
    found = collect_results(finished(tmp_path, [0.003, 0.004]), "gentle pendulum")
    assert [(result.arm, len(result.runs), result.published) for result in found] == [
        ("scratch", 2, None), ("spt", 1, None)
    ]  # fmt: skip
    assert found[0].source == "gentle pendulum" and found[0].column == "pendulum, variant S5"
    assert found[0].complete and not found[0].departures and not found[0].baselines


def test_a_table_of_ones_own_says_in_what_it_departs_from_the_packaged_recipe(tmp_path):
    folder = finished(tmp_path, [0.003], overrides=["finetune.train.epochs=3", "model.ssm_lr=0.1"])
    scratch, spt = collect_results(folder, "gentle pendulum")
    assert [text.partition(" ")[0] for text in scratch.departures] == ["model.ssm_lr", "scratch.train.epochs"]
    assert [text.partition(" ")[0] for text in spt.departures] == ["finetune.train.epochs", "model.ssm_lr"]
    assert not scratch.complete and not spt.complete  # shortened


def test_nothing_to_take_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no finished run that belongs to a cell"):
        collect_results(tmp_path / "empty")
    with pytest.raises(UsageError, match="there is no folder"):
        collect_results(tmp_path / "nowhere")


def test_names_that_no_file_could_have_are_refused(tmp_path):
    folder = finished(tmp_path, [0.003])
    done = call("results", "--add", folder, "--folder", tmp_path / "results", "--table", "x" * 300, code=2)
    assert "cannot be stored: table: string should have at most 200" in done.stderr


def test_a_cell_whose_runs_all_failed_says_so(stored):
    run = stored[0].runs[0].model_copy(update={"score": None, "state": "diverged"})
    assert stored[0].model_copy(update={"runs": (run,)}).sentence() == "scratch: none of 1 runs with spt came to an end"


def test_a_run_without_its_environment_is_not_taken(tmp_path):
    folder = finished(tmp_path, [0.003])
    (tmp_path / "finetune-ascratch0" / "env.json").write_text("{}")
    done = call("results", "--add", folder, "--folder", tmp_path / "results", code=7)
    assert "does not say where the run was made" in done.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metric": "r2"}, "the cell's metric is mse"),
        ({"row": "S6"}, "has no cell S6"),
        ({"paper": "s9"}, "has no cell"),
        ({"planned": 0}, "planned: input should be greater"),
        ({"more": 1}, "more: unknown key"),
        ({"runs": []}, "runs: "),
        ({"recipe": "x" * 300}, "recipe: string should have at most"),
    ],
)
def test_files_that_cannot_be_are_refused(change, words, tmp_path, stored):
    path = tmp_path / "results" / f"{stored[0].name}.json"
    write_json(path, json.loads(path.read_text()) | change)
    with pytest.raises(DataError) as caught:
        read_results(tmp_path / "results")
    assert words in str(caught.value)


def test_a_score_needs_a_run_that_is_done(stored):
    run = stored[0].runs[0].model_dump()
    with pytest.raises(ValueError, match="a run has a score if it is done"):
        StoredResult.model_validate(stored[0].model_dump() | {"runs": [run | {"state": "failed"}]})
    with pytest.raises(ValueError, match="a seed is there twice"):
        StoredResult.model_validate(stored[0].model_dump() | {"runs": [run, run]})


def test_a_file_has_its_name(tmp_path, stored):
    path = tmp_path / "results" / f"{stored[0].name}.json"
    path.rename(path.with_name("x.json"))
    with pytest.raises(DataError, match=f"rename it to {stored[0].name}.json"):
        read_results(tmp_path / "results")


def test_reports_show_them_beside_the_published_number(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(results, "_packaged", lambda: tuple(stored))
    report = collect.read_report([tmp_path / "runs" / "variants-1"])
    (published,) = report.precedents
    assert "scratch: obtained with spt 0.003200 (0.002703 to 0.003697), 3 of 20 runs, not complete" in published.remarks
    assert shown(report)


def test_the_command(tmp_path, stored):
    folder = ("--folder", tmp_path / "results")
    text = call("results", *folder).stdout
    assert "0.003410" in text and "0.003200" in text and "3 of 20" in text
    (row,) = json.loads(call("results", *folder, "--json").stdout)
    assert {"source", "table", "row", "column", "published", "ours", "low", "high", "n", "complete"} <= row.keys()
    call("results", *folder, "listops", code=2)
    call("results", "--table", "x", code=2)
    done = call("results", "--add", tmp_path / "runs", "--folder", tmp_path / "more", "--table", "x")
    assert "wrote 2 files" in done.stderr
    assert "published" in text and "published" not in done.stdout and "S5: MSE" in text  # nothing is, of one's own
    whole = finished(
        tmp_path / "whole", [0.003 + seed / 1e5 for seed in range(20)], overrides=["finetune.train.epochs=3"]
    )
    assert "clean commit" not in done.stderr
    for path in (tmp_path / "runs").glob("*/env.json"):
        write_json(path, ENVIRONMENT | {"commit": "0123456789ab+"})
    edited = call("results", "--add", tmp_path / "runs", "--folder", tmp_path / "edited", "--table", "x")
    assert "not made from a clean commit" in " ".join(edited.stderr.split())
    assert "20 of 20, shortened" in call("results", "--add", whole, "--folder", tmp_path / "short").stdout


def test_the_command_names_studies_of_ones_own_and_shows_one_on_request(tmp_path, stored):
    folder = ("--folder", tmp_path / "results")
    call("results", "--add", tmp_path / "runs", *folder, "--table", "gentle pendulum")
    call("results", "--add", tmp_path / "runs", *folder, "--table", "other pendulum")
    short = call("results", *folder)
    assert "S5: MSE" in short.stdout and "pendulum, variant S5" not in short.stdout
    assert [line.split() for line in short.stdout.splitlines()[-2:]] == [
        ["gentle", "pendulum", "2"], ["other", "pendulum", "2"]
    ]  # fmt: skip
    assert "spt results NAME shows one of them, --full all" in short.stderr
    chosen, full = call("results", *folder, "gentle pendulum"), call("results", *folder, "--full")
    assert chosen.stdout.count("pendulum, variant S5") == 2 and full.stdout.count("pendulum, variant S5") == 4
    assert not chosen.stderr and not full.stderr and "S5: MSE" in full.stdout


def test_whether_a_folder_can_be_read_is_found_by_reading_it(tmp_path, stored, monkeypatch):
    """Typer would ask first, whom root and access lists deceive, and answer in a box with its own code."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert "0.003200" in call("results", "--folder", tmp_path / "results").stdout


def test_a_file_that_is_nested_too_deeply_is_no_result(tmp_path):
    (tmp_path / "a.json").write_text("[" * 100_000 + "]" * 100_000)
    done = call("results", "--folder", tmp_path, code=DataError.exit_code)
    assert "cannot be read as a stored result: ValueError: it is nested too deeply" in done.stderr


def test_metrics_are_named_where_they_differ(tmp_path, stored):
    other = stored[0].model_copy(update={"paper": None, "table": "mine", "metric": "r2"})
    same = other.model_copy(update={"metric": "mse", "row": "other"})
    for result in (other, same):
        write_json(tmp_path / "results" / f"{result.name}.json", result.model_dump(mode="json"))
    text = call("results", "--folder", tmp_path / "results", "--full").stdout
    assert "metric" in text.partition("mine")[2] and "metric" not in text.partition("mine")[0]


def test_words_choose(stored):
    other = stored[0].model_copy(update={"paper": None, "table": "s5"})
    assert select_results([*stored, other], ["S5"]) == [other], "a name is that of one study"
    assert select_results(stored, ["PENDULUM", "table 3"]) == stored and not select_results(stored, ["listops"])
