"""Several splits of one's own data: folds, what a study makes of them, and an interval that is right for them."""

import json
import math
import os
from functools import partial
from pathlib import Path

import measure_splits
import numpy as np
import pytest
from records import finish, plan
from test_custom import write
from tiny import recipe_file
from typer.testing import CliRunner

import spt
from spt.advisor.backbones import choose
from spt.advisor.budget import Plan, Shape, Timing
from spt.advisor.budget import plan as plan_within
from spt.config.job import without_paths
from spt.config.recipe import Part
from spt.data.dataset import open_task
from spt.errors import RecipeError, UsageError
from spt.execution.estimate import MeasuredCosts
from spt.report.collect import read_report
from spt.report.stats import paired, smallest_detectable, widened
from spt.runs.plan import read_plan
from spt.runs.result import SplitRecord
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.studies.grid import expand
from spt.studies.schema import to_yaml, validate
from spt.tasks import custom
from spt.tasks.own.splits import draw_folds
from spt_cli import app

# --------------------------------------------------------------------------------------------------------------- folds


def units(rng: np.random.Generator, n: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """(n,) keys, equal within a group, and (n,) classes that depend on the group."""
    group = rng.integers(groups, size=n)
    keys = rng.integers(2**63, size=groups, dtype=np.uint64)[group]
    return keys, (group % 3 + (rng.random(n) < 0.2)) % 3


def shares(folds: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """(folds, classes) How often each class is in each fold."""
    return np.stack([np.bincount(classes[folds == fold], minlength=3) for fold in np.unique(folds)])


def test_folds_keep_groups_whole_and_do_not_depend_on_the_order_of_rows():
    rng = np.random.default_rng(0)
    keys, classes = units(rng, 400, 60)
    ones = np.ones(400, np.int64)
    folds = draw_folds(5, keys, np.arange(400), classes, ones)
    assert set(folds) == set(range(5))
    assert all(len(set(folds[keys == key])) == 1 for key in keys)
    order = rng.permutation(400)
    assert (draw_folds(5, keys[order], np.arange(400), classes[order], ones) == folds[order]).all()


@pytest.mark.parametrize("seed", range(3))
def test_folds_are_as_balanced_as_scikit_learns(seed):
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    rng = np.random.default_rng(seed)
    keys, classes = units(rng, 400, 60)
    ones = np.ones(400, np.int64)

    def sklearns(splitter, groups=None):
        folds = np.empty(400, np.int64)
        for fold, (_, test) in enumerate(splitter.split(np.zeros(400), classes, groups)):
            folds[test] = fold
        return folds

    ours = shares(draw_folds(5, keys, np.arange(400), classes, ones), classes)
    theirs = shares(sklearns(StratifiedGroupKFold(5), keys), classes)
    assert np.ptp(ours, axis=0).max() <= np.ptp(theirs, axis=0).max() + 4
    own = rng.permutation(400).astype(np.uint64)  # every row by itself
    ours = shares(draw_folds(5, own, np.arange(400), classes, ones), classes)
    theirs = shares(sklearns(StratifiedKFold(5)), classes)
    assert np.ptp(ours, axis=0).max() <= 1 and np.ptp(theirs, axis=0).max() <= 1
    assert np.ptp(ours.sum(1)) <= 3


def table(tmp_path: Path, n: int = 40, groups: int = 12, name: str = "waves.csv", **columns) -> Path:
    rows = [
        {"g": f"g{i % groups}", "v0": i, "v1": -i, "v2": i * i % 7, "v3": i % 5, "y": "ab"[i % groups % 2]}
        | {key: value(i) for key, value in columns.items()}
        for i in range(n)
    ]
    return write(tmp_path / name, rows)


def opened(path: Path, **options):
    options = {"value_prefix": "v", "label_column": "y", "group_column": "g", **options}
    data = custom.load(custom.Config.model_validate_json(json.dumps({"path": str(path), **options})), Path("."))
    data.check()
    return data


def firsts(split) -> set[int]:
    """Which rows a split has: their first value numbers them."""
    return {round(float(split.row(i)[0, 0])) for i in range(len(split))}


@pytest.mark.parametrize("split", ["hash", "stratified"])
def test_every_row_is_in_the_test_split_of_one_fold_with_its_whole_group(tmp_path, split):
    path = table(tmp_path)
    tested: list[int] = []
    for fold in range(4):
        data = opened(path, folds=4, fold=fold, split=split)
        parts = [firsts(part) for part in (data.train, data.val, data.test)]
        assert sum(map(len, parts)) == 40 and set.union(*parts) == set(range(40))
        groups = [{row % 12 for row in part} for part in parts]
        assert not groups[0] & groups[1] and not groups[0] & groups[2] and not groups[1] & groups[2]
        assert data.notes[0].startswith("test rows, one of 4 folds, and validation rows were drawn from the training")
        tested += parts[2]
    assert sorted(tested) == list(range(40))
    again = opened(path, folds=4, split=split, split_seed=1)
    assert firsts(again.test) != firsts(opened(path, folds=4, split=split).test)


def test_validation_rows_of_the_data_stay_and_test_rows_only_move_if_that_is_asked_for(tmp_path):
    parts = {"s": lambda i: "validation" if i % 12 < 2 else "train"}
    data = opened(table(tmp_path, **parts), folds=5, split_column="s")
    assert {row % 12 for row in firsts(data.val)} == {0, 1} and len(data.test) <= 8
    parts = {"s": lambda i: "test" if i % 12 < 2 else "train"}
    path = table(tmp_path, name="own.csv", **parts)
    with pytest.raises(ValueError, match=r"own.csv has test rows of its own, .* say pool_splits: true, or take folds"):
        opened(path, folds=5, split_column="s")
    tested = [firsts(opened(path, folds=4, fold=k, split_column="s", pool_splits=True).test) for k in range(4)]
    assert sorted(row for part in tested for row in part) == list(range(40))


def test_pooled_rows_may_be_of_groups_that_the_files_had_parted(tmp_path):
    path = table(tmp_path, s=lambda i: "test" if i % 5 == 0 else "train")
    with pytest.raises(ValueError, match="has another split"):
        opened(path, split_column="s")
    data = opened(path, folds=4, split_column="s", pool_splits=True)
    groups = [{row % 12 for row in firsts(part)} for part in (data.train, data.val, data.test)]
    assert not groups[0] & groups[1] and not groups[0] & groups[2] and not groups[1] & groups[2]
    assert sum(len(part) for part in (data.train, data.val, data.test)) == 40


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"folds": 1}, "greater than or equal to 2"),
        ({"folds": 5, "fold": 5}, "fold is 5, but 5 folds count from 0"),
        ({"fold": 2}, "fold is 2, but folds is not given"),
        ({"folds": 5, "fold": -1}, "greater than or equal to 0"),
        ({"folds": "five"}, "valid integer"),
        ({"folds": 13}, "13 folds need as many groups of rows that stay together, but there are 12"),
    ],
)
def test_folds_that_are_impossible_are_refused_with_a_sentence(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        opened(table(tmp_path), **options)


def test_a_class_of_one_group_cannot_be_in_folds(tmp_path):
    path = table(tmp_path, y=lambda i: "rare" if i % 12 == 3 else "ab"[i % 2])
    problems = []
    for fold in range(4):
        try:
            opened(path, folds=4, fold=fold, split="stratified", validation_fraction=0.3)
        except ValueError as error:
            problems.append(str(error))
    assert len(problems) == 1 and "with folds a label has to occur in two rows, or groups" in problems[0]


def test_rows_without_a_label_are_in_no_fold(tmp_path):
    """They are of use in pretraining alone; every other row is tested once."""
    path = table(tmp_path, y=lambda i: "" if i % 12 in (3, 8) else "ab"[i % 2])
    for split in ("hash", "stratified"):
        tested: list[int] = []
        for fold in range(4):
            options = {"folds": 4, "fold": fold, "split": split, "validation_fraction": 0.3}
            data = opened(path, missing_labels="ignore", **options)
            assert {row % 12 for row in firsts(data.train)} >= {3, 8}
            tested += firsts(data.test)
        assert sorted(tested) == [i for i in range(40) if i % 12 not in (3, 8)]


def test_folds_of_several_labels_have_equal_shares_of_each(tmp_path):
    path = table(tmp_path, n=60, groups=60, y=lambda i: ";".join(f"l{k}" for k in (2, 3, 4) if i % k == 0))
    options = {"target": "labels", "label_separator": ";", "missing_labels": "none", "split": "stratified"}
    counts = []
    for fold in range(3):
        data = opened(path, folds=3, fold=fold, **options)
        counts.append((np.asarray(data.test.targets) == 1).sum(0))
    assert np.ptp(counts, axis=0).max() <= 3, counts


def test_runs_that_use_no_folds_keep_their_keys(tmp_path):
    options = custom.Config.model_validate_json('{"path": "a.csv", "value_prefix": "v", "label_column": "y"}')
    kept = without_paths("tasks", Part(name="custom", **options.model_dump(mode="json")))
    assert not {"folds", "fold", "pool_splits"} & kept.keys()
    folds = without_paths("tasks", Part(name="custom", **options.model_dump(mode="json") | {"folds": 5, "fold": 2}))
    assert (folds["folds"], folds["fold"]) == (5, 2)


# -------------------------------------------------------------------------------------------------------- the interval


def test_the_corrected_interval_is_the_formula_of_nadeau_and_bengio():
    from scipy import stats

    values = [0.02, 0.05, -0.01, 0.04, 0.03]
    for share in (0.2, 0.1):
        test = spt.corrected_interval(values, test_share=share)
        error = np.std(values, ddof=1) * math.sqrt(1 / 5 + share / (1 - share))
        t = np.mean(values) / error
        assert test.low == pytest.approx(np.mean(values) - stats.t.ppf(0.975, 4) * error)
        assert test.p == pytest.approx(2 * stats.t.sf(t, 4))
        assert test.detectable == pytest.approx(
            smallest_detectable(5, test.deviation) * math.sqrt(1 + 5 * share / (1 - share))
        )
        low, high = widened(test, 3)
        assert high - low == pytest.approx(2 * stats.t.ppf(1 - 0.05 / 6, 4) * error)
    # k folds: a test split is 1/(k - 1) of what is trained on
    spread = np.std(values, ddof=1)
    assert spt.corrected_interval(values, 1 / 5).error == pytest.approx(spread * math.sqrt(1 / 5 + 1 / 4))
    assert paired(values).error == pytest.approx(spread / math.sqrt(5))
    assert spt.corrected_interval(values[:2], 0.2).sign == 0, "two splits decide nothing"


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_share_of_the_rows_lies_between_0_and_1(share):
    with pytest.raises(ValueError, match="test_share is"):
        spt.corrected_interval([0.1, 0.2, 0.3], test_share=share)
    with pytest.raises(ValueError, match="finite numbers"):
        spt.corrected_interval([0.1, math.inf], test_share=0.2)


# ------------------------------------------------------------------------------------------------------------- studies


def study(**keys):
    return validate({"kind": "compare", "recipes": ["quickstart"], "seeds": 2, **keys}, "here")


def test_splits_are_a_number_of_folds_or_say_which():
    assert list(study(splits=3).splits.options(0)) == ["fold 0", "fold 1", "fold 2"]
    repeated = study(splits={"folds": 2, "repeats": 2}).splits.options(7)
    assert repeated["repeat 1, fold 0"] == {"split_seed": 8, "folds": 2, "fold": 0} and len(repeated) == 4
    drawn = study(splits={"random": 3}).splits.options(7)
    assert [each["split_seed"] for each in drawn.values()] == [7, 8, 9] and drawn["split 2"]["folds"] is None
    assert "splits:\n  folds: 3" in to_yaml(study(splits=3)) and study().splits is None


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        (1, "greater than or equal to 2"),
        (True, "splits"),
        ({}, "give folds or random"),
        ({"folds": 5, "random": 5}, "give folds or random"),
        ({"random": 5, "repeats": 2}, "repeats is for folds"),
        ({"folds": 100, "repeats": 100}, "10,000 splits are asked for"),
        ({"fold": 5}, "fold"),
        ("five", "splits"),
    ],
)
def test_splits_that_mean_nothing_are_refused(splits, said):
    with pytest.raises(RecipeError, match=said):
        study(splits=splits)


def test_other_kinds_of_study_have_no_splits():
    with pytest.raises(RecipeError, match="splits"):
        validate({"kind": "data", "recipes": ["quickstart"], "splits": 3}, "here")


SMALL = {"epochs": 1, "batch_size": 16, "learning_rate": 0.003}


def own_recipe(tmp_path: Path, data: Path, **task) -> Path:
    task = {"name": "custom", "path": str(data), "value_prefix": "v", "label_column": "y", "group_column": "g", **task}
    return recipe_file(
        tmp_path,
        task=task,
        model={"name": "transformer", "d_model": 8, "n_layers": 1, "n_heads": 1},
        pretrain={"objective": {"name": "masked", "ratio": 0.3}, "train": SMALL},
        finetune={"train": dict(SMALL)},
    )


@pytest.fixture
def costs(tmp_path):
    return MeasuredCosts(tmp_path / "runs", Runtime(Settings(quiet=True, cpu=True)))


def laid(source, costs, **keys):
    return expand(study(recipes=[str(source)], **keys), False, costs)


def test_every_arm_and_seed_is_run_on_every_split_and_pretrained_on_its_rows_alone(tmp_path, costs):
    source = own_recipe(tmp_path, table(tmp_path), split_seed=5)
    grid = laid(source, costs, splits=3, arms=["scratch", "spt", "frozen"], baselines=["majority"])
    assert grid.splits == ("fold 0", "fold 1", "fold 2")
    assert [(cell.job.seed, cell.split, cell.arm) for cell in grid.cells] == [
        (seed, split, arm) for seed in range(2) for split in grid.splits for arm in ("spt", "scratch", "frozen")
    ]
    for cell in grid.cells:
        task = cell.job.resolved.recipe.task
        assert (task.options["folds"], task.options["split_seed"]) == (3, 5)
        assert f"fold {task.options['fold']}" == cell.split
        if cell.arm != "scratch":
            assert cell.job.parent.resolved.recipe.task == task
            tested = firsts(open_task(task).test)
            assert not tested & firsts(open_task(cell.job.parent.resolved.recipe.task).train)
    assert len({cell.job.name for cell in grid.cells}) == 18
    assert [each.split for each in grid.baselines] == list(grid.splits)
    one = laid(own_recipe(tmp_path, table(tmp_path), split_seed=5, folds=3, fold=1), costs)
    inside = {cell.job.name for cell in grid.cells if cell.split == "fold 1" and cell.arm != "frozen"}
    assert {cell.job.name for cell in one.cells} == inside, "a split of a study is the run of the recipe that names it"


def test_few_rows_make_folds_where_a_random_split_has_none(tmp_path, costs):
    data = table(tmp_path, n=9, groups=9)
    source = own_recipe(tmp_path, data, split="stratified", validation_fraction=0.3)
    with pytest.raises(spt.SptError, match="none of the 9 rows is in the"):
        laid(source, costs)
    assert len(laid(source, costs, splits=3, seeds=1).cells) == 6


def test_data_with_splits_of_their_own_are_refused(tmp_path, costs):
    with pytest.raises(UsageError, match=r"tiny: splits are drawn of data of your own \(task custom\)"):
        laid(recipe_file(tmp_path), costs, splits=3)
    data = table(tmp_path, s=lambda i: ["test", "validation", *["train"] * 10][i % 12])
    with pytest.raises(spt.SptError, match="say pool_splits: true, or take folds out"):
        laid(own_recipe(tmp_path, data, split_column="s"), costs, splits=3)
    with pytest.raises(UsageError, match=r"test rows of their own, which every split .* set task.pool_splits=true"):
        laid(own_recipe(tmp_path, data, split_column="s"), costs, splits={"random": 3})
    pooled = own_recipe(tmp_path, data, split_column="s", pool_splits=True, split="stratified", test_fraction=0.3)
    grid = laid(pooled, costs, splits={"random": 3}, seeds=1)
    tested = [firsts(open_task(cell.job.resolved.recipe.task).test) for cell in grid.cells[::2]]
    assert tested[0] != tested[1]


def test_variants_of_a_recipe_are_run_on_the_same_splits(tmp_path, costs):
    source = own_recipe(tmp_path, table(tmp_path))
    variants = {"small": {}, "large": {"model.d_model": 16}}
    grid = expand(
        validate({"kind": "variants", "recipes": [str(source)], "variants": variants, "seeds": 1, "splits": 2}, "here"),
        False,
        costs,
    )
    assert len(grid.cells) == 2 * 2 * 2
    data = {(cell.row, cell.split): cell.job.resolved.data for cell in grid.cells}
    tasks = {(cell.row, cell.split): cell.job.resolved.recipe.task for cell in grid.cells}
    assert tasks[0, "fold 1"] == tasks[1, "fold 1"] != tasks[1, "fold 0"] and len({*data.values()}) == 2


# ------------------------------------------------------------------------------------------------------------- reports

NAMES = tuple(f"fold {i}" for i in range(5))


def rows_of(split: int) -> dict[str, SplitRecord]:
    """A fifth is tested."""
    sizes = {"train": 288, "val": 32, "test": 80}
    return {name: SplitRecord(rows=rows, inputs=f"{name}{split}", targets=f"{split}") for name, rows in sizes.items()}


def split_study(root: Path, gains: np.ndarray, lost: tuple[int, int] | None = None, **changes) -> Path:
    """A comparison of (splits, seeds) gains of SPT over scratch, which has 0.5 everywhere."""
    cells = []
    for (split, seed), gain in np.ndenumerate(gains):
        about = {"data": rows_of(split), "chance": 0.4 + 0.01 * split}
        for arm, score in (("scratch", 0.5), ("spt", 0.5 + float(gain))):
            name = f"finetune-{arm}{seed}on{split}"
            if (split, seed) != lost or arm == "scratch":
                cells.append({**finish(root, arm, seed, score, name, **about), "split": NAMES[split]})
            else:
                cells.append({"row": 0, "arm": arm, "seed": seed, "run": name, "parent": None, "split": NAMES[split]})
    return plan(root, cells, seeds=list(range(gains.shape[1])), splits=NAMES[: len(gains)], **changes)


def test_seeds_are_averaged_within_a_split_before_splits_are_compared(tmp_path):
    gains = np.random.default_rng(0).normal(0.04, 0.02, (5, 3))
    row = read_report([split_study(tmp_path, gains)]).rows[0]
    expected = spt.corrected_interval(gains.mean(1), test_share=0.2)
    assert (row.n, row.planned, row.splits, row.test_share) == (15, 15, 5, pytest.approx(0.2))
    assert (row.delta, row.low, row.high, row.p) == pytest.approx(
        (expected.mean, expected.low, expected.high, expected.p)
    )
    assert row.detectable == pytest.approx(expected.detectable)
    plain = paired(gains.ravel().tolist())
    assert row.high - row.low > 2 * (plain.high - plain.low), "pairs of overlapping splits are not fifteen draws"
    assert row.chance == pytest.approx(0.42)


def test_the_verdict_says_what_the_interval_is_for(tmp_path):
    wide = np.array([[0.08, 0.1], [0.1, 0.12], [0.09, 0.11], [0.1, 0.1], [0.08, 0.12]])
    row = read_report([split_study(tmp_path / "a", wide)]).rows[0]
    assert row.decision == "spt"
    assert "SPT beats scratch by 10.00 points" in row.verdict
    assert "for other splits of these data and other seeds, 5 splits, 10 pairs)" in row.verdict
    mixed = np.array([[0.02], [-0.03], [0.01], [-0.02], [0.03]])
    row = read_report([split_study(tmp_path / "b", mixed, lost=(4, 0))]).rows[0]
    assert row.decision == "open" and "4 splits could only have shown" in row.verdict
    assert "2 of 4 splits favour SPT" in row.verdict and row.verdict.endswith("1 of 5 pairs incomplete")
    row = read_report([split_study(tmp_path / "c", wide[:2])]).rows[0]
    assert (row.decision, row.n, row.splits) == ("too few splits", 4, 2)
    assert row.verdict.startswith("cannot be decided with 2 splits: SPT - scratch is +10.00 points")


def test_every_score_has_its_split_and_the_report_shows_them(tmp_path):
    from spt.report.figures import all_figures
    from spt.report.tables import all_tables
    from spt.report.write import write_report

    gains = np.random.default_rng(1).normal(0.04, 0.02, (3, 2))
    folder = split_study(tmp_path, gains)
    report = read_report([folder])
    assert {(each["seed"], each["split"]) for each in report.table_records("seeds")} == {
        (seed, split) for seed in range(2) for split in NAMES[:3]
    }
    assert report.table_records("rows")[0]["splits"] == 3
    tables = {table.title: table for table in all_tables(report)}
    assert [line[1] for line in tables["Seed by seed"].body][:3] == ["0, fold 0", "0, fold 1", "0, fold 2"]
    assert "corrected resampled t test over splits" in tables["Test accuracy (%)"].caption
    (figure,) = [each for each in all_figures(report) if each.name == "splits"]
    assert len(figure.data) == 6 and {line["split"] for line in figure.data} == set(NAMES[:3])
    write_report(report, folder)
    assert "Split by split" in (folder / "report.html").read_text(encoding="utf-8") and "fold 2" in (
        folder / "seeds.csv"
    ).read_text(encoding="utf-8")
    saved = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert {seed["split"] for seed in saved["rows"][0]["seeds"]} == set(NAMES[:3])
    checks = {check.question: check for check in report.provenance.checklist}
    told = " ".join(check.evidence for check in checks.values())
    assert "3 splits of the data a row" in told and "corrected for overlapping training sets" in told


def test_models_are_compared_by_the_same_interval_and_not_over_test_rows(tmp_path):
    rng = np.random.default_rng(2)
    gains = {name: rng.normal(0.05, 0.02, (5, 2)) for name in ("a", "b")}
    cells = []
    for row, (model, gain) in enumerate(gains.items()):
        for (split, seed), value in np.ndenumerate(gain):
            for arm, score in (("scratch", 0.5 + 0.1 * row), ("spt", 0.5 + 0.1 * row + float(value))):
                run = f"finetune-{model}{arm}{seed}on{split}"
                one = finish(tmp_path, arm, seed, score, run, data=rows_of(split), model=model, recipe=model)
                cells.append({**one, "row": row, "split": NAMES[split]})
    rows = [{"name": model, "task": "digits", "model": model} for model in gains]
    report = read_report([plan(tmp_path, cells, rows=rows, seeds=[0, 1], splits=NAMES)])
    (models,) = report.models
    contrast = next(each for each in models.contrasts if each.arm == "difference")
    differences = (gains["a"] - gains["b"]).mean(1)
    expected = spt.corrected_interval(differences, test_share=0.2)
    assert (contrast.n, contrast.splits, contrast.rows) == (10, 5, None)
    assert (contrast.low, contrast.high) == pytest.approx((expected.low, expected.high))
    assert contrast.adjusted_low == pytest.approx(expected.low), "one interaction: a family of one"
    spts = spt.corrected_interval(0.5 + gains["a"].mean(1), test_share=0.2)
    assert models.models[0].spt_low == pytest.approx(spts.low)
    assert not report.averages and not report.pooled


def test_averages_over_tasks_are_left_out_with_a_sentence(tmp_path):
    rows, cells = [], []
    for row, task in enumerate(("digits", "letters")):
        rows.append({"name": task, "task": task, "model": "transformer"})
        for split in range(3):
            data = {name: part.model_copy(update={"inputs": task}) for name, part in rows_of(split).items()}
            data["test"] = data["test"].model_copy(update={"targets": task})
            for arm in ("scratch", "spt"):
                run = f"finetune-{task}{arm}{split}"
                one = finish(tmp_path, arm, 0, 0.5 + 0.01 * split, run, data=data, task=task, recipe=task)
                cells.append({**one, "row": row, "split": NAMES[split]})
    report = read_report([plan(tmp_path, cells, rows=rows, seeds=[0], splits=NAMES[:3])])
    assert not report.pooled and not report.averages
    said = "not averaged over tasks with transformer: their scores are of several splits of the data"
    assert any(said in note for note in report.notes)


# ------------------------------------------------------------------------------------------------------- the command


def test_a_comparison_over_folds_is_planned_made_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    source = own_recipe(tmp_path, table(tmp_path))

    def call(*arguments, code=0):
        done = CliRunner().invoke(app, [*map(str, arguments)])
        assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
        return done

    asked = ("compare", source, "--splits", "3", "--seeds", "1", "--out", "runs")
    planned = json.loads(call(*asked, "--dry-run", "--json").stdout)
    assert planned["splits"] == ["fold 0", "fold 1", "fold 2"] and planned["left"]["runs"] == 9
    assert "seed 0 fold 2 scratch" in [run["label"].partition(" ")[2] for run in planned["runs"]]
    assert not Path("runs").exists()
    made = json.loads(call(*asked, "--json").stdout)["rows"][0]
    assert (made["n"], made["splits"]) == (3, 3) and made["test_share"] == pytest.approx(1 / 3, abs=0.02)
    (folder,) = Path("runs").glob("compare-*")
    assert read_plan(folder).splits == ("fold 0", "fold 1", "fold 2")
    (status,) = json.loads(call("study", "status", folder, "--json").stdout)["studies"]
    assert (status["done"], status["all"], len(status["splits"])) == (9, 9, 3)
    before = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("result.json")}
    call("study", "run", folder)
    assert before == {path: path.stat().st_mtime_ns for path in Path("runs").rglob("result.json")}
    assert "0, fold 1" in call("report", folder, "--full").stdout
    wrong = call("compare", source, "--splits", "folds=3,random=4", "--dry-run", code=2).stderr
    assert "give folds or random" in wrong


# ------------------------------------------------------------------------------------------------------------ spt try


def test_a_plan_over_splits_has_one_or_two_seeds_on_each_and_keeps_to_its_budget():
    timings = [Timing("a", 0.4, 0.4), Timing("b", 0.1, 0.1), Timing("c", 0.05, 0.05)]
    shape = {"shape": Shape(5, 1, 1, 10), "least": 2.0, "most": 60.0, "splits": 5}
    budgets = np.geomspace(1e5, 150, 40).tolist()
    plans = [plan_within(timings, seconds, **shape) for seconds in budgets]
    assert (plans[0].seeds, len(plans[0].models), plans[0].runs) == (2, 3, 90)
    assert {each.seeds for each in plans if len(each.models) < 3} == {1}
    assert all(each.splits == 5 and each.repeats == 5 for each in plans)
    assert all(each.seconds <= seconds for seconds, each in zip(budgets, plans, strict=True))
    with pytest.raises(UsageError, match=r"one model \(c\) on 5 splits takes about .*, or fewer --splits"):
        plan_within(timings, 1.0, **shape)


@pytest.fixture
def one_model(tmp_path, monkeypatch):
    """`spt try` with one model and one epoch."""
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr("spt.advisor.recipes.Template.most_epochs", property(lambda _: 1.0))
    monkeypatch.setattr("spt.execution.run_study.make_baselines", lambda *_: {})
    monkeypatch.setattr("spt.advisor.advise.choose", lambda *given: [c for c in choose(*given) if c.name == "tcn"])
    plan = "spt.advisor.advise.plan"
    monkeypatch.setattr(plan, lambda *_, splits=1, **__: Plan(("tcn",), 5 if splits == 1 else 1, 1.0, 1.0, (), splits))
    table(tmp_path)


TRY = ("try", "waves.csv", "--group", "g", "--label", "y", "--budget", "90s", "--json", "--cpu")


def test_few_rows_are_planned_on_folds_unless_one_split_is_asked_for(one_model):
    told = json.loads(CliRunner().invoke(app, [*TRY, "--dry-run"]).stdout)
    assert (told["plan"]["splits"], told["plan"]["seeds"], told["plan"]["runs"]) == (5, 1, 15)
    assert "splits: 5 folds, since there are few rows; each is the test split once" in told["decisions"][-1]
    told = json.loads(CliRunner().invoke(app, [*TRY, "--dry-run", "--splits", "1"]).stdout)
    assert (told["plan"]["splits"], told["plan"]["seeds"]) == (1, 5)
    done = CliRunner().invoke(app, [*TRY, "--dry-run", "--splits", "13"])
    assert done.exit_code == 2 and "--splits 13: task custom: waves.csv: 13 folds need" in done.stderr


def test_an_answer_over_folds_says_what_its_intervals_are_over(one_model, tmp_path):
    done = CliRunner().invoke(app, [*TRY, "--splits", "3"])
    assert done.exit_code == 0, (done.stderr, done.exception)
    told = json.loads(done.stdout)
    assert (told["rows"][0]["n"], told["rows"][0]["splits"]) == (3, 3)
    assert "3 splits" in told["answer"] and "seeds)" not in told["answer"]
    assert (told["leading"]["splits"], told["leading"]["seeds"]) == (3, 1)
    assert "splits: 3" in (tmp_path / "waves-try" / "study.yaml").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ coverage


@pytest.mark.parametrize("design", [1, 6])  # five random splits; five folds, drawn twice
def test_the_corrected_interval_holds_the_truth_and_the_uncorrected_one_does_not(design, monkeypatch):
    """The table of docs/splits.md with fewer draws: the standard error of a rate is 1 % at 95 %."""
    monkeypatch.setattr(measure_splits, "truth", partial(measure_splits.truth, draws=8000))
    rates = measure_splits.coverage(measure_splits.DESIGNS[design], "number", 400)
    assert rates.corrected >= 0.93
    assert rates.uncorrected < 0.92 and rates.pairs < 0.92
