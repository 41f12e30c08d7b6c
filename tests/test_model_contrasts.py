"""Which model is better, and whether self-pretraining changes that: exact contrasts, and no claim beyond the seeds."""

import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import FINETUNING, SPLITS, arms, plan, shown, study
from scipy import stats as scipy_stats
from simulations import SIMULATIONS, Simulation, comparison, false_change, naive_change

from spt.report import collect, figures, html, latex, machine, markdown, model_figures, write
from spt.report.collect import Report
from spt.report.models import compare_models
from spt.report.ranking import ModelComparison, brief_ranking, changes_ranking, pairs_of, rank, winner_loser
from spt.report.stats import average, friedman, holm, wilcoxon
from spt.runs.result import SplitRecord

Scores = tuple[Sequence[float], Sequence[float]]  # of scratch and SPT, by seed

A: Scores = ([0.88, 0.89, 0.87, 0.885, 0.875], [0.90, 0.91, 0.905, 0.91, 0.90])
B: Scores = ([0.77, 0.78, 0.775, 0.765, 0.785], [0.905, 0.91, 0.90, 0.915, 0.90])


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def compared(root: Path, models: dict[str, Scores], task: str = "digits", **changes: Any) -> Path:
    """A comparison of several models on one task."""
    cells = [
        cell
        for row, (model, scores) in enumerate(models.items())
        for cell in arms(root, row, f"{task}{model}", *scores, model=model, recipe=model, task=task, **changes)
    ]
    return study(root, "compare", [{"name": model, "task": task, "model": model} for model in models], cells)


def only(report: Report) -> ModelComparison:
    (comparison,) = report.models
    return comparison


def test_contrasts_are_paired_t_tests_with_holm_over_both_arms(tmp_path: Path) -> None:
    models = {"a": A, "b": B, "c": ([0.7, 0.72, 0.71, 0.7, 0.73], [0.9, 0.89, 0.91, 0.9, 0.88])}
    made = machine.to_json(collect.read_report([compared(tmp_path, models)]))["contrasts_between_models"]
    assert [(c["first"], c["second"], c["arm"]) for c in made] == [
        (a, b, arm) for a, b in (("a", "b"), ("a", "c"), ("b", "c")) for arm in ("scratch", "spt", "difference")
    ]
    for contrast in made:
        first, second = (np.array(models[contrast[name]]) for name in ("first", "second"))
        gains = {"scratch": first[0] - second[0], "spt": first[1] - second[1]}
        expected = gains["spt"] - gains["scratch"] if contrast["arm"] == "difference" else gains[contrast["arm"]]
        test = scipy_stats.ttest_1samp(expected, 0)
        interval = test.confidence_interval(0.95)
        family = 3 if contrast["arm"] == "difference" else 6
        wide = test.confidence_interval(1 - 0.05 / family)
        assert (contrast["difference"], contrast["n"]) == (pytest.approx(expected.mean()), 5)
        assert (contrast["low"], contrast["high"]) == pytest.approx((interval.low, interval.high))
        assert (contrast["adjusted_low"], contrast["adjusted_high"]) == pytest.approx((wide.low, wide.high))
        assert (contrast["p"], contrast["tests"]) == (pytest.approx(test.pvalue), family)
    for family in (["scratch", "spt"], ["difference"]):
        members = [contrast for contrast in made if contrast["arm"] in family]
        assert [c["holm"] for c in members] == pytest.approx(holm([c["p"] for c in members]))


def test_the_verdict_says_who_leads_and_whether_that_changes(tmp_path: Path) -> None:
    comparison = only(collect.read_report([compared(tmp_path, {"transformer": A, "dlr": B})]))
    assert comparison.verdict == (
        "From scratch transformer beats dlr by 10.50 points (95 % interval 8.98 to 12.02, n=5). "
        "After self-pretraining they differ by at most 0.62 points (transformer - dlr is -0.10, 95 % interval -0.62 to "
        "+0.42, n=5). dlr gains 10.60 points more from self-pretraining than transformer (95 % interval 8.67 to 12.53, "
        "n=5): training from scratch misjudges their ranking"
    )
    assert [ranking.order for ranking in comparison.rankings] == [
        (("transformer",), ("dlr",)),
        (("dlr", "transformer"),),
    ]


def test_the_verdict_in_brief_has_both_rankings_and_who_changes_places(tmp_path: Path) -> None:
    comparison = only(collect.read_report([compared(tmp_path, {"transformer": A, "dlr": B})]))
    orders = "from scratch transformer > dlr; after self-pretraining dlr, transformer"
    assert brief_ranking(comparison) == f"{orders}; order changes: transformer and dlr"
    same = only(collect.read_report([compared(tmp_path / "same", {"transformer": A, "dlr": A})]))
    assert brief_ranking(same).endswith("; no order is shown to change")


def test_the_verdict_comes_first_everywhere(tmp_path: Path) -> None:
    folder = compared(tmp_path, {"transformer": A, "dlr": B})
    report = collect.read_report([folder])
    said = "From scratch transformer beats dlr by 10.50 points"
    row = "SPT beats scratch by"
    for text in (
        " ".join(shown(report, 200).split()),
        markdown.markdown(report),
        html.page(report, []),
        latex.latex(report),
        json.dumps(machine.to_json(report)["verdicts"]),
    ):
        assert 0 <= text.index(said) < text.index(row)
    assert "from scratch transformer > dlr" in shown(report, 200)[-300:]  # and in brief last on a terminal
    write.write_report(report, folder)
    assert (folder / "models.csv").read_text().startswith("label,task,arm,first,second,")


@pytest.mark.parametrize(
    ("a", "b", "sentence", "changes"),
    [
        ((0.9, 0.8), (0.8, 0.9), "training from scratch misjudges their ranking, self-pretraining reverses it", True),
        ((0.9, 0.899), (0.8, 0.901), "training from scratch misjudges their ranking", True),
        ((0.799, 0.95), (0.801, 0.9), "training from scratch misjudges their ranking", True),
        ((0.9, 0.902), (0.8, 0.9), "training from scratch overstates the lead of a; the order of their means", False),
        ((0.8045, 0.95), (0.8, 0.9), "training from scratch understates the lead of a; the order of", False),
        ((0.85, 0.95), (0.8, 0.85), "their ranking stays, the lead of a grows", False),
        ((0.9, 0.95), (0.8, 0.9), "their ranking stays", False),
        ((0.9, 0.95), (0.8, 0.85), "Whether self-pretraining changes how they compare: not decided", False),
    ],
)
def test_what_an_interaction_means(
    a: tuple[float, float], b: tuple[float, float], sentence: str, changes: bool
) -> None:
    rng = np.random.default_rng(3)
    rows = {
        name: comparison(name, *((mean + rng.normal(0, 0.004, 8)).tolist() for mean in means))
        for name, means in (("a", a), ("b", b))
    }
    (made,) = compare_models([rows])
    assert sentence in made.verdict
    assert changes_ranking(pairs_of(made)[0]) is changes


def test_one_arm_decided_and_the_other_not_is_no_change(tmp_path: Path) -> None:
    a: Scores = ([0.85, 0.85, 0.86], [0.86, 0.80, 0.90])
    b: Scores = ([0.80, 0.801, 0.81], [0.80, 0.82, 0.81])
    comparison = only(collect.read_report([compared(tmp_path, {"a": a, "b": b})]))
    assert "that one arm is decided and the other is not does not show it" in comparison.verdict
    assert "misjudges" not in comparison.verdict
    assert not changes_ranking(pairs_of(comparison)[0])


def test_a_ranking_splits_only_where_all_before_beat_all_after(tmp_path: Path) -> None:
    top, near, low = [0.90, 0.91, 0.92, 0.90], [0.89, 0.92, 0.90, 0.91], [0.5, 0.51, 0.49, 0.5]
    report = collect.read_report([compared(tmp_path, {"x": (low, low), "y": (top, top), "z": (near, near)})])
    assert machine.to_json(report)["rankings"][0]["order"] == [["y", "z"], ["x"]]


def test_a_ranking_splits_on_all_pairs_not_on_neighbours() -> None:
    """a beats b and b beats c, but a and c, of other seeds, are not decided: no split."""
    rows = {name: comparison(name, [0.5, 0.6, 0.7], [0.5, 0.6, 0.7]) for name in "abc"}
    (made,) = compare_models([rows])
    decided = {("a", "b"): "first", ("b", "c"): "first"}
    contrasts = [
        each.model_copy(update={"decision": decided.get((each.first, each.second), each.decision)})
        for each in made.contrasts
    ]
    assert rank(made.model_copy(update={"contrasts": tuple(contrasts)}), "scratch").order == (("a", "b", "c"),)


def test_an_interaction_that_is_decided_only_on_its_own_says_so() -> None:
    """Three models: the interval for all three interactions holds 0, that of the one alone does not."""
    rng = np.random.default_rng(5)
    means = {"a": (0.80, 0.85), "b": (0.80, 0.8425), "c": (0.80, 0.846)}
    rows = {
        name: comparison(name, *((mean + rng.normal(0, 0.004, 6)).tolist() for mean in both))
        for name, both in means.items()
    }
    (made,) = compare_models([rows])
    alone = [each for each in made.contrasts if each.arm == "difference" and each.decision.endswith(" alone")]
    assert len(alone) == 1 and alone[0].low * alone[0].high > 0 > alone[0].adjusted_low * alone[0].adjusted_high
    assert "on its own; not decided among the 3 interactions of this report" in alone[0].verdict


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=2, max_size=4))
def test_rankings_hold_every_model_once_and_never_contradict_a_contrast(scores: list[list[int]]) -> None:
    rows = {str(i): comparison(str(i), [s / 20 for s in line], [s / 40 for s in line]) for i, line in enumerate(scores)}
    (made,) = compare_models([rows])
    for ranking in made.rankings:
        assert sorted(name for group in ranking.order for name in group) == sorted(rows)
        places = {name: place for place, group in enumerate(ranking.order) for name in group}
        beats = [winner_loser(each) for each in made.contrasts if each.arm == ranking.arm]
        for pair in filter(None, beats):
            assert places[pair[0]] <= places[pair[1]]


def test_lower_can_be_better(tmp_path: Path) -> None:
    models: dict[str, Scores] = {"a": ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2]), "b": ([1.5, 1.61, 1.69], [1.4, 1.52, 1.58])}
    folder = compared(tmp_path, models, metric="mse", higher_is_better=False, chance=3.0)
    comparison = only(collect.read_report([folder]))
    assert [ranking.order for ranking in comparison.rankings] == [(("b",), ("a",)), (("a",), ("b",))]
    assert "From scratch b beats a by 0.500 in mse (lower is better" in comparison.verdict
    assert (
        "self-pretraining reverses it" in comparison.verdict
        and "a gains 0.900 in mse more from self-pretraining than b" in comparison.verdict
    )


def test_intervals_over_test_rows(tmp_path: Path) -> None:
    folder = compared(tmp_path, {"a": ([0.8, 0.7, 0.7], [0.9, 0.9, 0.9]), "b": ([0.5, 0.6, 0.5], [0.9, 0.9, 0.9])})
    for run in tmp_path.glob("finetune-*"):
        right = round(100 * json.loads((run / "result.json").read_text())["test"]["accuracy"])
        answers = {"id": range(100), "label": [1] * 100, "prediction": [int(i < right) for i in range(100)]}
        pq.write_table(pa.table({name: list(values) for name, values in answers.items()}), run / "predictions.parquet")
    scratch, spt, gain = only(collect.read_report([folder])).contrasts
    assert scratch.rows is not None and spt.rows is not None and gain.rows is not None
    assert scratch.difference == pytest.approx(0.2) and scratch.rows.n == 100
    assert scratch.rows.low == pytest.approx(0.2 - 0.07, abs=0.02) and scratch.rows.high == pytest.approx(
        0.27, abs=0.02
    )
    assert (spt.rows.low, spt.rows.high) == (0, 0)
    assert gain.rows.low == pytest.approx(-0.27, abs=0.02)


def test_json_has_these_keys(tmp_path: Path) -> None:
    value = machine.to_json(over_tasks(tmp_path, 2))
    keys = {
        "models": "label task kind factors metric higher_is_better models verdict warnings",
        "contrasts_between_models": """task factors arm first second metric higher_is_better n planned splits difference
            low high p holm tests adjusted_low adjusted_high detectable rows ratios decision verdict""",
        "rankings": "task factors arm metric order unranked",
        "models_across_tasks": """label kind factors metric higher_is_better tasks models left_out averages friedman
            contrasts changed verdict warnings""",
    }
    for name, expected in keys.items():
        assert set(value[name][0]) == set(expected.split()), name
    assert set(value["contrasts_between_models"][0]["ratios"]) == {
        "parameters", "flops_per_example", "seconds_per_step", "peak_bytes",
    }  # fmt: skip


def test_what_is_decided_orders_a_ranking_before_means(tmp_path: Path) -> None:
    """A model with more seeds has two bad ones that the other does not have."""
    a: Scores = ([0.9, 0.91, 0.9, 0.91, 0.3, 0.3], [0.9] * 6)
    b: Scores = ([0.8, 0.81, 0.805, 0.8], [0.85, 0.86, 0.85, 0.86])
    comparison = only(collect.read_report([compared(tmp_path, {"a": a, "b": b})]))
    assert comparison.contrasts[0].decision == "first" and comparison.models[0].scratch < comparison.models[1].scratch
    assert comparison.rankings[0].order == (("a",), ("b",))


def test_a_ranking_says_what_is_decided_within_a_tie_and_what_has_no_spread(tmp_path: Path) -> None:
    models: dict[str, Scores] = {
        "a": ([0.9, 0.91, 0.9, 0.91], [0.9] * 4),
        "b": ([0.86, 0.93, 0.80, 0.95], [0.9] * 4),
        "c": ([0.8, 0.81, 0.805, 0.8], [0.9] * 4),
    }
    verdict = only(collect.read_report([compared(tmp_path, models)])).verdict
    assert (
        "From scratch, best first: a, b, c (models between commas are not told apart;" in verdict
        and "; of these a beats c" in verdict
    )
    assert (
        "After self-pretraining, best first: a, b, c; 3 of 3 pairs differ by the same at every seed: no spread"
        in verdict
    )


def test_many_decided_pairs_within_a_tie_are_counted(tmp_path: Path) -> None:
    """One model that nobody can be told from holds the others together; few pairs are told by winner."""

    def scores(size: int) -> dict[str, Scores]:
        apart = {
            f"m{k}": ([0.9 - 0.05 * k + 1e-4 * (k + 1) ** seed for seed in range(4)], [0.9] * 4) for k in range(size)
        }
        return {**apart, "wild": ([0.2, 0.95, 0.4, 0.99], [0.9] * 4)}

    few, many = (only(collect.read_report([compared(tmp_path / str(n), scores(n))])).verdict for n in (3, 5))
    assert "; of these m0 beats m1 and m2, m1 beats m2" in few
    assert "; of the 15 pairs 10 are decided, as the contrasts below say" in many and "m0 beats m1" not in many


# What cannot be compared


def test_one_model_has_no_contrast(tmp_path: Path) -> None:
    report = collect.read_report([compared(tmp_path, {"a": A})])
    assert report.models == () and machine.to_json(report)["contrasts_between_models"] == []
    assert "one model, a: a second recipe beside it would show which model is better" in report.notes


def test_unequal_seeds_are_compared_where_they_meet(tmp_path: Path) -> None:
    shorter: Scores = (B[0][:3], B[1][:3])
    cells = arms(tmp_path, 0, "a", *A, model="a", recipe="a") + arms(tmp_path, 1, "b", *shorter, model="b", recipe="b")
    rows = [{"name": name, "task": "digits", "model": name} for name in "ab"]
    comparison = only(collect.read_report([plan(tmp_path, cells, rows=rows)]))
    assert {(each.n, each.planned) for each in comparison.contrasts} == {(3, 5)}
    assert "2 of 5 pairs incomplete" in comparison.verdict
    one, two = tmp_path / "one", tmp_path / "two"
    folders = [compared(one, {"a": A}), compared(two, {"b": shorter})]
    apart = only(collect.read_report(folders))
    assert {each.n for each in apart.contrasts} == {3}
    assert apart.warnings == (
        "the models have different seeds (a seeds 0, 1, 2, 3, 4; b seeds 0, 1, 2); they are compared at those that two "
        "of them share",
    )


def test_different_splits_are_not_compared(tmp_path: Path) -> None:
    other = {**SPLITS, "test": SplitRecord(rows=360, inputs="xx", targets="yy")}
    cells = arms(tmp_path, 0, "a", *A, model="a", recipe="a")
    cells += arms(tmp_path, 1, "b", *B, model="b", recipe="b", data=other)
    rows = [{"name": name, "task": "digits", "model": name} for name in "ab"]
    report = collect.read_report([plan(tmp_path, cells, rows=rows)])
    told = "rows of digits are tested on several sets of rows, and models are compared within each: a; b"
    assert report.models == () and told in report.notes


def test_different_training_rows_are_not_compared(tmp_path: Path) -> None:
    other = {**SPLITS, "train": SplitRecord(rows=360, inputs="xx", targets="yy")}
    cells = arms(tmp_path, 0, "a", *A, model="a", recipe="a")
    cells += arms(tmp_path, 1, "b", *B, model="b", recipe="b", data=other)
    rows = [{"name": name, "task": "digits", "model": name} for name in "ab"]
    comparison = only(collect.read_report([plan(tmp_path, cells, rows=rows)]))
    assert {each.decision for each in comparison.contrasts} == {"different data"}
    assert "not comparable: the runs did not see the same data" in comparison.verdict
    assert all(len(ranking.order) == 1 for ranking in comparison.rankings)


def test_different_metrics_are_not_compared(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "a", *A, model="a", recipe="a")
    cells += arms(tmp_path, 1, "b", *B, model="b", recipe="b", metric="mse", higher_is_better=False, chance=None)
    rows = [{"name": name, "task": "digits", "model": name} for name in "ab"]
    report = collect.read_report([plan(tmp_path, cells, rows=rows)])
    assert report.models == ()
    assert any("it is scored in mse, the others in accuracy" in note for note in report.notes)


def test_one_metric_in_opposite_directions_is_not_compared(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "a", *A, model="a", recipe="a", task="t")
    cells += arms(tmp_path, 1, "b", *B, model="b", recipe="b", task="t", higher_is_better=False)
    rows = [{"name": name, "task": "t", "model": name} for name in "ab"]
    report = collect.read_report([study(tmp_path, "compare", rows, cells)])
    assert report.models == () and any("has the opposite direction" in note for note in report.notes)


def test_a_missing_arm_is_not_contrasted(tmp_path: Path) -> None:
    comparison = only(collect.read_report([compared(tmp_path, {"a": A, "b": (B[0], [])})]))
    scratch, spt, gain = comparison.contrasts
    assert scratch.decision == "first" and (spt.decision, gain.decision) == ("no pair", "no pair")
    assert comparison.rankings[1].unranked == ("b",)
    assert "After self-pretraining: no pair of runs finished (0 of 5)" in comparison.verdict
    assert "misjudges" not in comparison.verdict


def test_diverged_runs_are_said(tmp_path: Path) -> None:
    from records import start

    folder = compared(tmp_path, {"a": A, "b": B})
    for seed in (1, 3):
        (tmp_path / f"finetune-digitsbscratch{seed}" / "result.json").unlink()
        start(tmp_path, f"finetune-digitsbscratch{seed}", state="diverged", reason="loss is nan", exit_code=5)
    comparison = only(collect.read_report([folder]))
    assert comparison.warnings == (
        "b diverged or has no score in the scratch arm at seeds 1, 3: its mean is of the other seeds, so it may look "
        "better than it is",
    )
    assert comparison.contrasts[0].n == 3 and "2 of 5 pairs incomplete" in comparison.verdict


def test_few_seeds_decide_nothing(tmp_path: Path) -> None:
    two = {"a": (A[0][:2], A[1][:2]), "b": (B[0][:2], B[1][:2])}
    comparison = only(collect.read_report([compared(tmp_path, two)]))
    assert comparison.verdict.startswith("From scratch: cannot be decided with 2 seeds: a - b is")
    assert "misjudges" not in comparison.verdict and len(comparison.rankings[0].order) == 1


def test_costs_that_differ_are_in_the_verdict(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "a", *A, model="a", recipe="a", parameters={"total": 120}, own=FINETUNING)
    cells += arms(tmp_path, 1, "b", *B, model="b", recipe="b", parameters={"total": 100}, own=FINETUNING)
    rows = [{"name": name, "task": "digits", "model": name} for name in "ab"]
    comparison = only(collect.read_report([plan(tmp_path, cells, rows=rows)]))
    assert comparison.verdict.endswith("They differ in size or cost: parameters ×1.20 (a : b)")
    assert comparison.contrasts[0].ratios["parameters"] == pytest.approx(1.2)
    assert comparison.contrasts[0].ratios["flops_per_example"] == 1


def data_sets(root: Path, recipes: Sequence[tuple[str, str, str]]) -> Path:
    """One study of task `custom`: (recipe, model, targets of its test rows) in each row."""
    name, cells = "compare", []
    for row, (recipe, model, targets) in enumerate(recipes):
        data = SPLITS | {"test": SplitRecord(rows=360, inputs=targets, targets=targets)}
        about = {"task": "custom", "recipe": recipe, "model": model, "data": data, "settings": f"{recipe}{model}"}
        scores = A if model == "a" else B
        cells += arms(root, row, f"{name}{recipe}{row}", *scores, **about)
    return study(
        root, name, [{"name": recipe, "task": "custom", "model": model} for recipe, model, _ in recipes], cells
    )


def test_models_of_two_data_sets_that_one_task_reads_are_two_groups(tmp_path: Path) -> None:
    recipes = [("one", "a", "x"), ("one-b", "b", "x"), ("two", "a", "y"), ("two-b", "b", "y")]
    made = collect.read_report([data_sets(tmp_path, recipes)])
    assert [(group.label, [model.name for model in group.models]) for group in made.models] == [
        ("custom, one, one-b", ["a", "b"]),
        ("custom, two, two-b", ["a", "b"]),
    ]
    (across,) = made.models_across_tasks
    assert across.tasks == ("one", "two") and not [note for note in made.notes if "not compared" in note]
    (compute,) = [plot for plot in figures.all_figures(made) if plot.name == "compute"]
    assert {line["model"] for line in compute.data} == {"a (one)", "a (two)", "b (one-b)", "b (two-b)"}
    alone = collect.read_report([data_sets(tmp_path / "other", recipes[::2])])
    assert alone.models == ()


def test_splits_of_one_data_set_are_no_tasks(tmp_path: Path) -> None:
    """Loops of one's own over folds: each has other test rows, and the recipes' names are the same."""
    folders = [data_sets(tmp_path / fold, [("mine", "a", fold), ("mine-b", "b", fold)]) for fold in ("x", "y", "z")]
    made = collect.read_report(folders)
    assert len(made.models) == 3 and not made.pooled and not made.averages and not made.models_across_tasks
    told = [note for note in made.notes if "splits of one data set are not independent as tasks are" in note]
    assert [note.partition(":")[0] for note in told] == [
        "models are not compared over 3 tasks",
        "not averaged over tasks with a",
        "not averaged over tasks with b",
    ]


def unstarted(row: int, name: str) -> list[dict[str, Any]]:
    """The cells of a row of which no run has begun."""
    return [
        {"row": row, "arm": arm, "seed": seed, "run": f"finetune-{name}{arm}{seed}", "parent": None}
        for arm in ("scratch", "spt")
        for seed in range(5)
    ]


def rows_of(rows: str) -> dict[str, SplitRecord]:
    return {**SPLITS, "test": SplitRecord(rows=360, inputs=rows, targets=rows)}


def test_what_has_no_results_is_no_split_of_a_data_set(tmp_path: Path) -> None:
    """Neither a smoke run nor a study that has not begun keeps two tasks from being averaged."""
    rows = [{"name": "digits/t", "task": "digits"}, {"name": "waves/t", "task": "waves"}]
    cells = arms(tmp_path / "full", 0, "d", *A, recipe="digits/t", data=rows_of("d"))
    cells += arms(tmp_path / "full", 1, "w", *B, recipe="waves/t", task="waves", data=rows_of("w"))
    full = study(tmp_path / "full", "compare", rows, cells)
    few = arms(tmp_path / "smoke", 0, "d", *A, recipe="digits/t", smoke=True, data=rows_of("few"))
    smoke = study(tmp_path / "smoke", "compare", rows[:1], few, smoke=True)
    begun = study(tmp_path / "begun", "compare", rows[:1], unstarted(0, "n"))
    for folders in ([full], [full, smoke], [full, begun]):
        made = collect.read_report(folders)
        assert len(made.pooled) == 1 and not [note for note in made.notes if "not averaged" in note]
    twice = arms(tmp_path / "twice", 0, "d", *A, recipe="d1")
    two = study(tmp_path / "twice", "compare", [{"name": "d1"}, {"name": "d2"}], [*twice, *unstarted(1, "n")])
    assert not [note for note in collect.read_report([two]).notes if "not averaged" in note]  # of one task
    later = study(tmp_path / "later", "compare", [rows[1]], unstarted(0, "n"))
    notes = collect.read_report([two, later]).notes
    assert any("runs of digits / transformer, d2, waves / transformer are missing" in note for note in notes)


def test_a_missing_run_is_no_reason_where_there_is_no_scale(tmp_path: Path) -> None:
    names = ("t1", "t2", "t3")
    cells = [
        cell
        for i, name in enumerate(names[:2])
        for cell in arms(
            tmp_path, i, name, *A, recipe=name, task=name, data=rows_of(name), metric="mse", chance=None,
            higher_is_better=False,
        )
    ]  # fmt: skip
    rows = [{"name": name, "task": name} for name in names]
    made = collect.read_report([study(tmp_path, "compare", rows, [*cells, *unstarted(2, "n")])])
    assert len(made.averages) == 1 and not [note for note in made.notes if "not averaged" in note]
    assert made.averages[0].incomplete == ("t3 / transformer",)


def test_variants_that_have_not_begun_join_those_that_have(tmp_path: Path) -> None:
    rows = [{"name": "quickstart", "factors": {"variant": name}} for name in "abcd"]
    cells = [*arms(tmp_path, 0, "a", *B), *arms(tmp_path, 1, "b", *A), *unstarted(2, "c"), *unstarted(3, "d")]
    made = collect.read_report([study(tmp_path, "variants", rows, cells)])
    assert [group.label for group in made.models] == ["digits, variants of quickstart"] and not made.notes


def test_a_row_without_results_is_in_no_group_of_test_rows(tmp_path: Path) -> None:
    recipes = [("one", "a", "x"), ("one-b", "b", "x"), ("two", "a", "y")]
    cells = [
        cell
        for i, (recipe, model, rows) in enumerate(recipes)
        for cell in arms(
            tmp_path, i, recipe, *(A if model == "a" else B), task="custom", recipe=recipe, model=model,
            data=rows_of(rows), settings=recipe,
        )
    ]  # fmt: skip
    rows = [{"name": name, "task": "custom", "model": model} for name, model, _ in (*recipes, ("two-b", "b", ""))]
    made = collect.read_report([study(tmp_path, "compare", rows, [*cells, *unstarted(3, "two-b")])])
    assert [model.name for model in only(made).models] == ["a", "b"] and "without a score" not in only(made).verdict
    assert any(note.endswith("models are compared within each: one, one-b; two") for note in made.notes)


def test_no_more_than_all_can_be_possible(tmp_path: Path) -> None:
    wild = ([0.1, 0.9, 0.4], [0.9, 0.1, 0.5])
    made = collect.read_report([compared(tmp_path, {"a": wild, "b": ([0.9, 0.1, 0.2], [0.1, 0.9, 0.6])})])
    assert "From scratch they differ by at most 100.00 points (" in only(made).verdict


def test_ranks_without_tests_have_no_bars(tmp_path: Path) -> None:
    folders = [
        compared(tmp_path, {"a": A, "b": B, "c": B}, "digits"),
        compared(tmp_path / "r2", {"a": A, "b": B, "c": B}, "waves", metric="r2", chance=None),
    ]
    (across,) = collect.read_report(folders).models_across_tasks
    assert not across.contrasts and model_figures._cliques(["a", "b", "c"], across, "spt") == []
    assert "Scores in several metrics, so" in model_figures._rank_diagram("ranks", across).caption
    one = across.model_copy(update={"metric": "accuracy"})
    assert "No two models share a seed in every task, so" in model_figures._rank_diagram("ranks", one).caption


def test_two_models_in_either_order_count_once(tmp_path: Path) -> None:
    """The same runs in two comparisons, whose rows are the other way round."""
    first = compared(tmp_path, {"a": A, "b": B})
    plan = json.loads((first / "study.json").read_text())
    plan["rows"].reverse()
    for cell in plan["cells"]:
        cell["row"] = 1 - cell["row"]
    second = first.with_name("compare-2")
    second.mkdir()
    (second / "study.json").write_text(json.dumps(plan))
    report = collect.read_report([first, second])
    tests = {(each.arm, each.tests) for comparison in report.models for each in comparison.contrasts}
    assert len(report.models) == 2 and tests == {("scratch", 2), ("spt", 2), ("difference", 1)}


def test_scratch_at_every_share_counts_once(tmp_path: Path) -> None:
    """Levels of a study share their scratch runs: one comparison of them, not three."""
    cells, rows = [], []
    for name, scores in (("a", A), ("b", B)):
        base = arms(tmp_path, 0, name, *scores, model=name, recipe=name)
        for share in (0.2, 0.4):
            rows.append({"name": name, "task": "digits", "model": name, "factors": {"share": share}})
            spt = arms(tmp_path, 0, f"{name}{share}", [], scores[1], model=name, recipe=name)
            cells += [cell | {"row": len(rows) - 1} for cell in base if cell["arm"] == "scratch"]
            cells += [cell | {"row": len(rows) - 1} for cell in spt]
    report = collect.read_report([study(tmp_path, "compute", rows, cells)])
    assert [comparison.label for comparison in report.models] == ["digits, share 0.2", "digits, share 0.4"]
    assert {
        each.tests for comparison in report.models for each in comparison.contrasts if each.arm != "difference"
    } == {3}


def test_variants_are_compared_where_they_answer_the_same_test_rows(tmp_path: Path) -> None:
    """By their names, though one model is in all of them: x and y ask the same, z something else."""
    other = {**SPLITS, "test": SplitRecord(rows=360, inputs="xx", targets="yy")}
    named = [("x", "wide"), ("y", "deep"), ("z", "wide"), ("z", "deep")]
    rows = [{"name": r, "task": "digits", "model": "dlr", "factors": {"variant": variant}} for r, variant in named]
    cells = [
        cell
        for i, row in enumerate(rows)
        for cell in arms(
            tmp_path, i, f"{i}", *(A, B)[i % 2], model="dlr", recipe=row["name"], task="digits",
            data=other if row["name"] == "z" else SPLITS,
        )
    ]  # fmt: skip
    report = collect.read_report([study(tmp_path, "variants", rows, cells)])
    assert [each.label for each in report.models] == ["digits, variants of x and y", "digits, variants of z"]
    for each in report.models:
        assert [model.name for model in each.models] == ["wide", "deep"] and not each.factors
        assert "wide beats deep by 10.50 points" in each.verdict


def test_variants_without_results_are_told_apart_by_recipe(tmp_path: Path) -> None:
    rows = [{"name": recipe, "task": "digits", "model": "dlr", "factors": {"variant": variant}}
            for recipe in ("x", "y") for variant in ("wide", "deep")]  # fmt: skip
    planned = [{"row": i, "arm": "scratch", "seed": 0, "run": f"finetune-{i}"} for i in range(4)]
    report = collect.read_report([study(tmp_path, "variants", rows, planned)])
    assert [each.label for each in report.models] == ["digits, variants of x", "digits, variants of y"]


def test_several_rows_of_one_model_are_not_picked_from(tmp_path: Path) -> None:
    folders = [
        compared(tmp_path / "1", {"a": A}),
        compared(tmp_path / "2", {"a": B}),
        compared(tmp_path / "3", {"b": B}),
    ]
    report = collect.read_report(folders)
    assert report.models == () and any("several rows of digits are a" in note for note in report.notes)


# Over tasks


def over_tasks(root: Path, count: int, seeds: int = 4) -> Report:
    rng = np.random.default_rng(0)
    means = {"a": (0.5, 0.85), "b": (0.8, 0.86), "c": (0.6, 0.80)}
    folders = []
    for task in range(count):
        models = {
            name: tuple([round(float(mean + rng.normal(0, 0.01)), 4) for _ in range(seeds)] for mean in both)
            for name, both in means.items()
        }
        folders.append(compared(root / str(task), models, task=f"task{task}"))
    return collect.read_report(folders)


def test_averages_and_ranks_over_tasks(tmp_path: Path) -> None:
    report = over_tasks(tmp_path, 3)
    (across,) = report.models_across_tasks
    ranks = {(each.model, each.arm): each.mean_rank for each in across.averages}
    assert [ranks[name, "scratch"] for name in "abc"] == [3, 1, 2]
    plain = [np.mean([np.mean(_scores(model, "scratch")) for model in _models(report, "b")])]
    assert next(e for e in across.averages if (e.model, e.arm) == ("b", "scratch")).average == pytest.approx(plain[0])
    assert across.changed == (("a", "c"),)
    assert "a and c change places" in across.verdict
    assert "3 tasks are too few for Wilcoxon's test to tell any two models apart" in across.verdict
    assert across.friedman["scratch"] == pytest.approx(scipy_stats.friedmanchisquare([1] * 3, [3] * 3, [2] * 3).pvalue)
    gains = {frozenset((c.first, c.second)): c.better for c in across.contrasts if c.arm == "difference"}
    assert gains == {frozenset("ab"): "a", frozenset("ac"): "a", frozenset("bc"): "c"}


def _models(report: Report, name: str) -> list[Any]:
    return [model for comparison in report.models for model in comparison.models if model.name == name]


def _scores(model: Any, arm: str) -> float:
    return float(getattr(model, arm))


def test_a_model_that_misses_a_task_is_left_out(tmp_path: Path) -> None:
    folders = [
        compared(tmp_path / "1", {"a": A, "b": B, "c": A}),
        compared(tmp_path / "2", {"a": B, "b": A}, task="other"),
    ]
    (across,) = collect.read_report(folders).models_across_tasks
    assert (across.models, across.left_out) == (("a", "b"), ("c",))
    assert "Left out, since a task or an arm is missing: c" in across.verdict


def test_a_task_of_two_sizes_is_two_tasks_in_averages(tmp_path: Path) -> None:
    """Pathfinder and Path-X have one name, and pictures of their own."""

    def size(folder: str, targets: str) -> Path:
        root, data = tmp_path / folder, {**SPLITS, "test": SplitRecord(rows=360, inputs=folder, targets=targets)}
        rows = [{"name": f"{folder}-{model}", "task": "pathfinder", "model": model} for model in "ab"]
        cells = [
            cell
            for row, scores in enumerate((A, B))
            for cell in arms(
                root,
                row,
                f"{folder}{row}",
                *scores,
                model="ab"[row],
                recipe=rows[row]["name"],
                task="pathfinder",
                data=data,
            )
        ]
        return study(root, "compare", rows, cells)

    (across,) = collect.read_report([size("small", "32"), size("large", "128")]).models_across_tasks
    assert (across.models, across.tasks) == (("a", "b"), ("small-a", "large-a"))
    again = collect.read_report([tmp_path / "small" / "compare-1", size("again", "32")])
    assert again.models_across_tasks == () and "which do not count as tasks" in " ".join(again.notes)


def test_warnings_of_each_task_are_told_over_tasks(tmp_path: Path) -> None:
    few: Scores = (A[0][:3], A[1][:3])
    folders = [compared(tmp_path / "1", {"a": A, "b": B}), compared(tmp_path / "2", {"a": A}, task="other")]
    folders.append(compared(tmp_path / "3", {"b": few}, task="other"))
    (across,) = collect.read_report(folders).models_across_tasks
    assert any(text.startswith("other: the models have different seeds") for text in across.warnings)


def test_bars_join_what_the_test_does_not_tell_apart() -> None:
    """Ranked a, b, c, d; only a and c, a and d are told apart: bars over a-b and over b-c-d, none within another."""

    def across(*apart: str) -> Any:
        pairs = [SimpleNamespace(first=x, second=y, arm="spt", wilcoxon_holm=0.01) for x, y in apart]
        other = SimpleNamespace(first="b", second="c", arm="scratch", wilcoxon_holm=0.01)
        return SimpleNamespace(contrasts=(*pairs, other))

    cliques = inspect.unwrap(model_figures._cliques)
    assert cliques("abcd", across("ac", "da"), "spt") == [["a", "b"], ["b", "c", "d"]]
    assert cliques("abcd", across(), "spt") == [["a", "b", "c", "d"]]
    assert cliques("ab", across("ab"), "spt") == []


def test_different_data_are_not_averaged_over_tasks(tmp_path: Path) -> None:
    other = {**SPLITS, "train": SplitRecord(rows=360, inputs="xx", targets="yy")}
    folders = [compared(tmp_path / "1", {"a": A, "b": B})]
    cells = arms(tmp_path / "2", 0, "a", *A, model="a", recipe="a", task="other")
    cells += arms(tmp_path / "2", 1, "b", *B, model="b", recipe="b", task="other", data=other)
    folders.append(plan(tmp_path / "2", cells, rows=[{"name": n, "task": "other", "model": n} for n in "ab"]))
    report = collect.read_report(folders)
    assert report.models_across_tasks == ()
    assert "models are not compared over 2 tasks: of other they did not see the same data" in report.notes


def test_average_is_welchs(tmp_path: Path) -> None:
    """With one task it is the t interval; with two it agrees with Welch's test of a difference."""
    first, second = [0.1, 0.2, 0.4, 0.3], [0.5, 0.9, 0.7]
    one = average([first])
    interval = scipy_stats.ttest_1samp(first, 0).confidence_interval(0.95)
    assert (one.low, one.high) == pytest.approx((interval.low, interval.high))
    both = average([first, [-value for value in second]])
    welch = scipy_stats.ttest_ind(first, second, equal_var=False)
    assert (both.p, both.degrees) == (pytest.approx(welch.pvalue), pytest.approx(welch.df))
    half = welch.confidence_interval(0.95)
    assert (2 * both.low, 2 * both.high) == pytest.approx((half.low, half.high))
    assert both.error == pytest.approx((half.high - half.low) / 4 / scipy_stats.t.ppf(0.975, welch.df))
    assert average([[0.1, 0.2], [0.3, 0.4, 0.5]]).low is None
    assert average([[0.1] * 3, [0.2] * 3]).p is None


def test_rank_tests_are_scipys() -> None:
    table = np.random.default_rng(1).normal(size=(8, 3))
    assert friedman(table.tolist()) == pytest.approx(scipy_stats.friedmanchisquare(*table.T).pvalue)
    assert friedman([[1.0, 2.0], [2.0, 1.0]]) is None and friedman([[1.0, 1.0, 1.0]] * 4) is None
    differences = (table[:, 0] - table[:, 1]).tolist()
    assert wilcoxon(differences) == pytest.approx(scipy_stats.wilcoxon(differences).pvalue)
    assert wilcoxon([0.0, 0.0]) is None


# Error rates

QUICK, DRAWS = 60, 600
LIBERAL = {"interval of a task average misses the truth, six unequal tasks": 0.06}  # as docs/statistics.md says


def test_changes_are_claimed_less_often_than_by_one_decided_arm() -> None:
    assert naive_change(5, QUICK) > 0.15 and false_change(5, QUICK) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize("simulation", SIMULATIONS, ids=lambda simulation: simulation.rate.__name__)
def test_error_rates_are_as_stated(simulation: Simulation, n: int) -> None:
    """Up to three standard errors of so many draws above the rate that is stated."""
    if simulation.nominal == "-":
        return
    stated = LIBERAL.get(simulation.name, 0.05)
    assert simulation.rate(n, DRAWS) <= stated + 3 * (stated * (1 - stated) / DRAWS) ** 0.5


def test_documentation_has_every_simulation() -> None:
    page = (Path(__file__).parents[1] / "docs" / "statistics.md").read_text(encoding="utf-8")
    assert all(f"| {simulation.name} | {simulation.nominal} |" in page for simulation in SIMULATIONS)


def test_variants_over_tasks_are_named_by_what_they_share(tmp_path: Path) -> None:
    """Not by the first variant, which is one of what is compared; also where another stands first in a second task."""
    folders = []
    for task, order in (("one", ("wide", "deep")), ("two", ("deep", "wide"))):
        rows = [{"name": task, "task": task, "model": "dlr", "factors": {"variant": each}} for each in order]
        cells = [
            cell
            for i, variant in enumerate(order)
            for cell in arms(
                tmp_path / task, i, variant, *(A if variant == "wide" else B), model="dlr", recipe=task, task=task
            )
        ]
        folders.append(study(tmp_path / task, "variants", rows, cells))
    (across,) = collect.read_report(folders).models_across_tasks
    assert across.label == "2 tasks" and not across.factors and {*across.models} == {"wide", "deep"}


def test_smoke_runs_are_put_in_no_order_where_some_are_missing(tmp_path: Path) -> None:
    folder = compared(tmp_path, {"a": A, "b": B, "c": (A[0], [])}, smoke=True)
    comparison = only(collect.read_report([folder]))
    assert "smoke" in {contrast.decision for contrast in comparison.contrasts} != {"smoke"}
    assert "smoke" in comparison.verdict and "best first" not in comparison.verdict
    assert brief_ranking(comparison) == comparison.verdict
