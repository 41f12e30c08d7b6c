"""Reports of studies over hand-made runs: many rows at once, levels, budgets and searches, with honest statistics."""

import csv
import io
import json
import math
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from records import FINETUNING, PRETRAINING, SCRATCH, SPLITS, Cell, arms, compared, finish, plan, row_of, shown, study
from scipy import special

from spt.report import collect, figures, machine, markdown, write
from spt.report.arms import Row
from spt.report.collect import Report
from spt.report.plotting import LIGHT
from spt.runs.files import write_json
from spt.runs.folder import RunFolder
from spt.runs.result import Ledger, SplitRecord


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small files are written here; that each survives a power cut is not the point."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def t_test(differences: Sequence[float]) -> tuple[float, float, float]:
    """Two-sided p and 95 % interval, as textbooks have them."""
    n, mean = len(differences), statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(n)
    margin = special.stdtrit(n - 1, 0.975) * error
    return 2 * special.stdtr(n - 1, -abs(mean) / error), mean - margin, mean + margin


def holm(p: Sequence[float]) -> list[float]:
    """By definition: of the hypotheses with a smaller or equal p, the largest p times those that were left."""
    m = len(p)
    return [min(1.0, max((m - sum(r < q for r in p)) * q for q in p if q <= mine)) for mine in p]


def minus(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(first, second, strict=True)]


def tasks(root: Path, scores: dict[str, tuple[list[float], list[float]]], **changes: Any) -> Path:
    """A comparison with one row for each task."""
    cells = [
        cell
        for row, (task, (scratch, spt)) in enumerate(scores.items())
        for cell in arms(root, row, task, scratch, spt, task=task, **changes)
    ]
    return study(root, "compare", [{"name": task, "task": task} for task in scores], cells)


THREE = {
    "clear": ([0.70, 0.71, 0.72], [0.80, 0.811, 0.819]),
    "thin": ([0.70, 0.70, 0.70], [0.72, 0.73, 0.74]),
    "open": ([0.60, 0.60, 0.60], [0.61, 0.59, 0.62]),
}


# The rows of one report as a family


def test_holm_counts_every_row_and_verdicts_allow_for_it(tmp_path: Path) -> None:
    made = collect.read_report([tasks(tmp_path, THREE)])
    p = [t_test(minus(spt, scratch))[0] for scratch, spt in THREE.values()]
    assert [row.p for row in made.rows] == pytest.approx(p)
    assert [row.holm for row in made.rows] == pytest.approx(holm(p))
    assert [row.tests for row in made.rows] == [3, 3, 3]
    assert p[1] < 0.05 < holm(p)[1]  # otherwise this shows nothing
    assert [row.decision for row in made.rows] == ["spt", "spt alone", "open"]
    thin = made.rows[1]
    assert thin.verdict == (
        "SPT beats scratch by 3.00 points (95 % interval 0.52 to 5.48, n=3) on its own; not decided among the 3 "
        f"comparisons of this report (Holm p {holm(p)[1]:.3f})"
    )
    assert "alone" not in made.rows[0].verdict
    for text in (shown(made), markdown.markdown(made)):
        assert "Holm p" in text and f"{holm(p)[1]:.3f}" in text
    assert f"| +0.52 to +5.48 | {p[1]:.3f} | {holm(p)[1]:.3f} | " in markdown.markdown(made)
    lines = list(csv.DictReader(io.StringIO(machine.to_csv(made, "rows"))))
    assert [float(line["holm"]) for line in lines] == pytest.approx(holm(p))


def test_alone_a_row_is_decided_by_its_interval(tmp_path: Path) -> None:
    row = row_of(tasks(tmp_path, {"thin": THREE["thin"]}))
    assert (row.decision, row.tests) == ("spt", 1)
    assert row.holm == row.p


def test_scratch_can_win_alone_too(tmp_path: Path) -> None:
    swapped = {task: scores[::-1] for task, scores in THREE.items()}
    row = collect.read_report([tasks(tmp_path, swapped)]).rows[1]
    assert row.decision == "scratch alone"
    assert row.verdict.startswith("scratch beats SPT by 3.00 points") and "not decided among" in row.verdict


def test_equal_rows_are_one_comparison(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "a", *THREE["thin"])
    same = [cell | {"row": 1} for cell in cells]
    made = collect.read_report([study(tmp_path, "compare", [{"name": "one"}, {"name": "two"}], [*cells, *same])])
    assert made.warnings == (
        "digits / transformer, one and digits / transformer, two are the same runs; they count as one comparison",
    )
    assert [(row.tests, row.decision) for row in made.rows] == [(1, "spt")] * 2
    assert made.rows[0].holm == made.rows[1].holm == made.rows[0].p
    assert "WARNING: digits / transformer, one" in " ".join(shown(made).split())


def test_rows_that_are_no_comparison_are_not_counted(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "a", *THREE["thin"])
    cells += arms(tmp_path, 1, "b", *THREE["clear"], smoke=True)
    cells += arms(tmp_path, 2, "c", *THREE["clear"])
    other = {**SPLITS, "test": SPLITS["test"].model_copy(update={"inputs": "xx"})}
    finish(tmp_path, "spt", 1, 0.79, run="finetune-cspt1", data=other)
    cells += [{"row": 3, "arm": "spt", "seed": 0, "run": "finetune-never"}]
    rows = [{"name": name} for name in "abcd"]
    made = collect.read_report([study(tmp_path, "compare", rows, cells)]).rows
    assert [row.decision for row in made] == ["spt", "smoke", "different data", "no pair"]
    assert [row.tests for row in made] == [1, 0, 0, 0]
    assert [row.holm for row in made[1:]] == [None] * 3


# Against chance


def binomial_tail(correct: int, n: int, chance: float) -> float:
    return math.fsum(math.comb(n, k) * chance**k * (1 - chance) ** (n - k) for k in range(correct, n + 1))


def arm_of(row: Row, arm: str) -> Any:
    found = row.scratch_arm if arm == "scratch" else row.spt_arm
    assert found is not None
    return found


def test_one_seed_is_compared_with_chance_by_its_test_rows(tmp_path: Path) -> None:
    made = collect.read_report([compared(tmp_path, [45 / 360], [60 / 360])])
    (row,) = made.rows
    for arm, correct, above in (("scratch", 45, False), ("spt", 60, True)):
        found = arm_of(row, arm)
        assert (found.above_chance, found.chance_test) == (above, "binomial")
        assert found.chance_p == pytest.approx(binomial_tail(correct, 360, 0.1))
    p = binomial_tail(45, 360, 0.1)
    assert f"scratch is not shown to be above chance (10.00; one-sided p {p:.3f})" in row.notes
    for text in (shown(made), markdown.markdown(made)):
        assert f"{p:.3f} (items)" in text and "< 0.001 (items)" in text.replace("&lt;", "<")


def test_several_seeds_are_compared_with_chance_one_sided(tmp_path: Path) -> None:
    row = row_of(compared(tmp_path, [0.11, 0.13, 0.16], [0.05, 0.06, 0.04]))
    p = t_test([0.01, 0.03, 0.06])[0] / 2
    assert 0.05 < p < 0.1
    assert (arm_of(row, "scratch").chance_p, arm_of(row, "scratch").above_chance) == (pytest.approx(p), False)
    assert arm_of(row, "spt").chance_p > 0.5 and arm_of(row, "spt").chance_test == "t"


def test_accuracy_over_steps_is_not_counted_in_rows(tmp_path: Path) -> None:
    found = arm_of(row_of(compared(tmp_path, [0.5001], [0.6])), "scratch")
    assert (found.above_chance, found.chance_p, found.chance_test) == (None, None, None)


# Test items


def answers(root: Path, run: str, right: Sequence[bool]) -> None:
    """A run's predictions: the label is 1, and wrong answers are 0."""
    ids = np.arange(len(right))
    said = np.array(right, dtype=np.int64)
    pq.write_table(
        pa.table({"id": ids, "label": np.ones_like(said), "prediction": said}), root / run / "predictions.parquet"
    )


def test_items_are_compared_seed_by_seed(tmp_path: Path) -> None:
    folder = compared(tmp_path, [0.5, 0.5], [0.75, 0.75])
    before = collect.read_report([folder])
    assert "test items not compared at seeds 0, 1 (seed 0: finetune-scratch0/predictions.parquet is missing)" in (
        before.rows[0].notes
    )
    assert before.rows[0].items == () and "Test items" not in shown(before)
    write.write_report(before, folder)
    assert not (folder / "items.csv").exists()
    answers(tmp_path, "finetune-scratch0", [True] * 10 + [False] * 10)
    answers(tmp_path, "finetune-spt0", [True] * 8 + [False] * 2 + [True] * 7 + [False] * 3)
    made = collect.read_report([folder])
    (row,) = made.rows
    (item,) = row.items
    assert (item.seed, item.n, item.only_scratch, item.only_spt) == (0, 20, 2, 7)
    assert item.p == pytest.approx(2 * sum(math.comb(9, k) for k in range(3)) / 2**9)
    assert item.difference == pytest.approx(0.25)
    assert item.low is not None and item.high is not None and item.low < 0.25 < item.high
    assert any(note.startswith("test items not compared at seed 1: finetune-scratch1") for note in row.notes)
    for text in (shown(made), markdown.markdown(made)):
        assert "Test items, seed by seed" in text and "0.180" in text
        assert "generalises to other test items, not to networks of other seeds" in " ".join(text.split())
    write.write_report(made, folder)
    (line,) = csv.DictReader(io.StringIO((folder / "items.csv").read_text()))
    assert (line["label"], line["seed"], line["only_spt"]) == ("digits / transformer", "0", "7")
    (tmp_path / "finetune-spt0" / "predictions.parquet").write_bytes(b"half a fi")
    assert collect.read_report([folder]).rows[0].items == ()  # and no error
    write.write_report(collect.read_report([folder]), folder)
    assert not (folder / "items.csv").exists()


# Across tasks


def iqm(scores: Sequence[float]) -> float:
    cut = len(scores) // 4
    return statistics.fmean(sorted(scores)[cut : len(scores) - cut])


def test_tasks_of_which_runs_are_missing_are_named(tmp_path: Path) -> None:
    folder = tasks(tmp_path, THREE)
    RunFolder(tmp_path, "finetune-openspt1").path.joinpath("result.json").unlink()
    made = collect.read_report([folder])
    (average,) = made.averages
    assert (average.tasks, average.incomplete) == (("clear", "thin"), ("open / transformer",))
    assert "Not counted, since runs are missing: open / transformer." in " ".join(shown(made).split())
    RunFolder(tmp_path, "finetune-thinspt1").path.joinpath("result.json").unlink()
    made = collect.read_report([folder])
    assert not made.averages and not made.pooled
    assert (
        "not averaged over tasks with transformer: runs of thin / transformer, open / transformer are missing"
        in made.notes
    )


def test_tasks_are_averaged_on_one_scale(tmp_path: Path) -> None:
    made = collect.read_report([tasks(tmp_path, THREE)])
    (pooled,) = made.pooled
    scratch, spt = ([(score - 0.1) / 0.9 for pair in THREE.values() for score in pair[arm]] for arm in (0, 1))
    assert (pooled.tasks, pooled.model, pooled.pairs) == (("clear", "thin", "open"), "transformer", 9)
    assert (pooled.scratch.value, pooled.spt.value) == pytest.approx((iqm(scratch), iqm(spt)))
    assert pooled.difference.value == pytest.approx(iqm(spt) - iqm(scratch))
    better = [np.mean([(y > x) + (y == x) / 2 for x in a for y in b]) for a, b in THREE.values()]
    assert pooled.probability.value == pytest.approx(np.mean(better))
    for one in (pooled.difference, pooled.probability):
        assert one.low is not None and one.high is not None and one.low <= one.value <= one.high
    for text in (shown(made), markdown.markdown(made)):
        flat = " ".join(text.split())
        assert f"{pooled.difference.value:+.3f} ({pooled.difference.low:+.3f} to {pooled.difference.high:+.3f})" in flat
        assert "Across tasks" in flat and "not other tasks" in flat
        assert "interquartile mean of normalised scores" in flat


def test_the_plain_average_over_tasks_is_the_papers(tmp_path: Path) -> None:
    """A task weighs the same whatever its number of seeds."""
    more = {"open": (THREE["open"][0] * 2, THREE["open"][1] * 2), "new": ([0.1] * 6, [0.2] * 6)}
    made = collect.read_report(
        [tasks(tmp_path / "three", {task: THREE[task] for task in ("clear", "thin")}), tasks(tmp_path / "six", more)]
    )
    (average,) = made.averages
    every = {task: THREE[task] for task in ("clear", "thin")} | more
    scratch, spt = (statistics.fmean(statistics.fmean(pair[arm]) for pair in every.values()) for arm in (0, 1))
    assert (average.scratch, average.spt) == pytest.approx((scratch, spt))
    assert average.difference == pytest.approx(spt - scratch)
    assert average.low is not None and average.high is not None and average.low < average.difference < average.high
    assert (average.published_spt, average.source) == (None, "")
    for text in (shown(made), markdown.markdown(made)):
        assert "Plain averages" in text and f"{100 * average.spt:.2f}" in text and f"{100 * scratch:.2f}" in text


def test_a_published_average_stands_beside_all_of_its_tasks(tmp_path: Path) -> None:
    """Of Table 7: four tasks of S4 at both initialisations; with three of them there is none."""
    names = ("listops", "text", "image", "pathx")

    def averages(folder: Path, chosen: Sequence[str]) -> list[Any]:
        rows, cells = [], []
        for initialisation in ("structured", "random"):
            for task in chosen:
                scores = [0.5, 0.51, 0.52], [0.6, 0.62, 0.61]
                cells += arms(folder, len(rows), f"{task}{initialisation}", *scores, task=task, model="s4")
                factors = {"initialisation": initialisation}
                rows.append({"name": f"lra/{task}-s4", "task": task, "model": "s4", "factors": factors})
        return list(collect.read_report([study(folder, "init", rows, cells)]).averages)

    structured, random = averages(tmp_path / "four", names)
    assert (structured.published_scratch, structured.published_spt) == (0.8285, 0.8447)
    assert (random.published_scratch, random.published_spt) == (0.7433, 0.8275)
    assert structured.source == "SPT, Table 7, p. 17" and not structured.doubts
    assert len(random.doubts) == 1 and random.doubts[0].startswith("82.75: not the mean of the four tasks")
    assert structured.scratch == pytest.approx(0.51) and structured.spt == pytest.approx(0.61)
    assert {average.source for average in averages(tmp_path / "three", names[:3])} == {""}


def test_one_task_of_several_sizes_is_several_tasks_of_an_average(tmp_path: Path) -> None:
    """Pathfinder, PathX and PathX-256 are one task by name; the paper's average leaves PathX-256 out."""
    scores = [0.5, 0.51, 0.52], [0.6, 0.62, 0.61]
    rows, cells = [], []
    for name in ("listops", "text", "retrieval", "image", "pathfinder", "pathx", "pathx256"):
        task = "pathfinder" if name.startswith("path") else name
        data = {"test": SplitRecord(rows=9, inputs="i", targets=name)}
        best = ([0.9] * 3, [0.9] * 3) if name == "pathx256" else scores
        cells += arms(tmp_path, len(rows), name, *best, task=task, model="s4", data=data)
        rows.append({"name": f"lra/{name}-s4", "task": task, "model": "s4"})
    made = collect.read_report([study(tmp_path, "compare", rows, cells)])
    (average,) = made.averages
    assert average.tasks == ("listops", "text", "retrieval", "image", "lra/pathfinder-s4", "lra/pathx-s4")
    assert average.left_out == ("lra/pathx256-s4",) and average.scratch == pytest.approx(0.51)
    assert (average.published_scratch, average.published_spt) == (0.8609, 0.8675)
    (pooled,) = made.pooled
    assert len(pooled.tasks) == 7 and "lra/pathx256-s4" in pooled.tasks


def test_a_text_cut_elsewhere_is_no_other_task(tmp_path: Path) -> None:
    cells, names = [], ("lra/text-transformer", "reference/text-rotary-masked")
    for row, name in enumerate(names):
        data = {"test": SplitRecord(rows=9, inputs=name, targets="t")}
        cells += arms(tmp_path, row, f"r{row}", *THREE["thin"], task="text", data=data)
    cells += arms(tmp_path, 2, "c", *THREE["open"], task="image")
    rows = [*({"name": name, "task": "text"} for name in names), {"name": "c", "task": "image"}]
    made = collect.read_report([study(tmp_path, "compare", rows, cells)])
    assert made.averages == () and made.pooled == ()


def test_averages_are_of_one_metric_and_of_distinct_tasks(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "a", *THREE["thin"]) + arms(tmp_path, 1, "b", *THREE["clear"])
    cells += arms(tmp_path, 2, "c", *THREE["open"], task="image")
    made = collect.read_report([study(tmp_path, "compare", [{"name": "a"}, {"name": "b"}, {"name": "c"}], cells)])
    assert made.averages == ()


def test_few_seeds_give_no_interval_over_tasks(tmp_path: Path) -> None:
    two = {task: (scratch[:2], spt[:2]) for task, (scratch, spt) in THREE.items()}
    (pooled,) = collect.read_report([tasks(tmp_path, two)]).pooled
    assert (pooled.difference.low, pooled.probability.high) == (None, None)
    assert "no interval: too few seeds" in pooled.verdict


def test_tasks_without_a_scale_or_with_missing_runs_are_left_out(tmp_path: Path) -> None:
    folder = tasks(tmp_path, {**THREE, "half": THREE["clear"]})
    for arm in ("scratch", "spt"):  # the other pairs are complete
        (tmp_path / f"finetune-half{arm}1" / "result.json").unlink()
    error = arms(tmp_path, 4, "error", [1.0, 1.1, 1.2], [0.9, 1.0, 1.0], task="error", metric="mse",
                 higher_is_better=False, chance=2.0)  # fmt: skip
    value = json.loads((folder / "study.json").read_text())
    value["rows"].append({"name": "error", "task": "error", "model": "transformer"})
    value["cells"] += error
    write_json(folder / "study.json", value)
    (pooled,) = collect.read_report([folder]).pooled
    assert pooled.tasks == ("clear", "thin", "open")
    assert pooled.left_out == ("half / transformer", "error / transformer")


def test_levels_and_models_are_not_averaged_as_tasks(tmp_path: Path) -> None:
    rows, cells = [], []
    for fraction in (0.1, 1.0):
        for task, pair in THREE.items():
            model = "s4" if task == "open" else "transformer"
            cells += arms(tmp_path, len(rows), f"{task}{fraction}", *pair, task=task, model=model)
            rows.append({"name": task, "task": task, "model": model, "factors": {"fraction": fraction}})
    made = collect.read_report([study(tmp_path, "data", rows, cells)])
    assert [(one.label, one.tasks) for one in made.pooled] == [
        ("transformer, fraction 0.1", ("clear", "thin")),
        ("transformer, fraction 1", ("clear", "thin")),
    ]


def test_two_rows_of_one_task_are_not_averaged(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "a", *THREE["thin"]) + arms(tmp_path, 1, "b", *THREE["clear"])
    cells += arms(tmp_path, 2, "c", *THREE["open"], task="image")
    rows = [{"name": "a"}, {"name": "b"}, {"name": "c", "task": "image"}]
    made = collect.read_report([study(tmp_path, "compare", rows, cells)])
    assert made.pooled == ()
    assert made.notes == (
        "not averaged over tasks with transformer: a task has several rows, which do not count as tasks",
    )


def test_equal_rows_are_averaged_once(tmp_path: Path) -> None:
    first = tasks(tmp_path, THREE)
    shutil.copytree(first, tmp_path / "compare-2")
    (pooled,) = collect.read_report([tmp_path]).pooled
    assert (pooled.tasks, pooled.pairs) == (("clear", "thin", "open"), 9)


# Levels and contrasts

STRUCTURED = ([0.80, 0.81, 0.83], [0.85, 0.87, 0.87])
RANDOM = ([0.60, 0.62, 0.62], [0.84, 0.845, 0.86])


def init(root: Path, **changes: Any) -> Path:
    cells = arms(root, 0, "s", *STRUCTURED, **changes) + arms(root, 1, "r", *RANDOM, **changes)
    rows = [{"factors": {"initialisation": name}} for name in ("structured", "random")]
    return study(root, "init", rows, cells)


def test_initialisations_are_contrasted_in_each_arm_and_in_the_gain(tmp_path: Path) -> None:
    made = collect.read_report([init(tmp_path)])
    assert [row.label for row in made.rows] == [
        "digits / transformer, initialisation structured",
        "digits / transformer, initialisation random",
    ]
    gains = [minus(pair[1], pair[0]) for pair in (STRUCTURED, RANDOM)]
    wanted = {
        "scratch": minus(STRUCTURED[0], RANDOM[0]),
        "SPT": minus(STRUCTURED[1], RANDOM[1]),
        "SPT - scratch": minus(*gains),
    }
    assert [one.what for one in made.contrasts] == list(wanted)
    p = []
    for one, differences in zip(made.contrasts, wanted.values(), strict=True):
        value, low, high = t_test(differences)
        p.append(value)
        assert (one.first, one.second, one.label, one.n) == ("structured", "random", "digits / transformer", 3)
        assert (one.difference, one.p) == pytest.approx((statistics.fmean(differences), value))
        assert (one.low, one.high) == pytest.approx((low, high))
    assert [one.holm for one in made.contrasts] == pytest.approx(holm(p))
    assert [one.tests for one in made.contrasts] == [3] * 3
    assert [one.decision for one in made.contrasts] == ["first", "open", "second"]
    assert made.contrasts[0].verdict.startswith("structured beats random by 20.00 points")
    assert made.contrasts[2].verdict.startswith("random beats structured by ")
    assert made.rows[0].tests == 2  # contrasts are a family of their own
    for text in (shown(made), markdown.markdown(made)):
        assert "Contrasts" in text and "structured - random" in " ".join(text.split())
        assert "structured beats random by 20.00 points" in " ".join(text.split())


def test_a_contrast_that_holds_only_alone_says_so(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "s", [0.72, 0.73, 0.74], [0.8, 0.83, 0.81])
    cells += arms(tmp_path, 1, "r", [0.70, 0.70, 0.70], [0.8, 0.81, 0.82])
    rows = [{"factors": {"initialisation": name}} for name in ("structured", "random")]
    one = collect.read_report([study(tmp_path, "init", rows, cells)]).contrasts[0]
    assert one.decision == "first alone"
    assert "on its own; not decided among the 3 contrasts of this study (Holm p" in one.verdict


def test_contrasts_need_the_same_data_and_real_runs(tmp_path: Path) -> None:
    other = {**SPLITS, "test": SPLITS["test"].model_copy(update={"inputs": "xx"})}
    cells = arms(tmp_path, 0, "s", *STRUCTURED) + arms(tmp_path, 1, "r", *RANDOM, data=other)
    rows = [{"factors": {"initialisation": name}} for name in ("structured", "random")]
    made = collect.read_report([study(tmp_path, "init", rows, cells)])
    assert [row.decision for row in made.rows] == ["spt", "spt"]
    assert {one.decision for one in made.contrasts} == {"different data"}
    assert {one.holm for one in made.contrasts} == {None}
    assert {one.decision for one in collect.read_report([init(tmp_path / "smoke", smoke=True)]).contrasts} == {"smoke"}


def test_recipes_of_one_study_are_contrasted_apart(tmp_path: Path) -> None:
    rows, cells = [], []
    for recipe in ("short", "long"):
        for name, pair in (("structured", STRUCTURED), ("random", RANDOM)):
            cells += arms(tmp_path, len(rows), recipe + name, *pair)
            rows.append({"name": recipe, "factors": {"initialisation": name}})
    made = collect.read_report([study(tmp_path, "init", rows, cells)])
    assert [one.label for one in made.contrasts] == ["digits / transformer, short"] * 3 + [
        "digits / transformer, long"
    ] * 3
    assert {one.tests for one in made.contrasts} == {6}


def test_levels_are_listed_with_their_change(tmp_path: Path) -> None:
    scores = {"100K": ([0.5, 0.6], [0.55, 0.66]), "1M": ([0.6, 0.7], [0.8, 0.8]), "3M": ([0.6, 0.6], [0.7, 0.9])}
    rows, cells = [], []
    for row, (size, pair) in enumerate(scores.items()):
        cells += arms(tmp_path, row, size, *pair)
        rows.append({"factors": {"size": size}})
    folder = study(tmp_path, "size", rows, cells)
    (tmp_path / "finetune-1Mspt1" / "result.json").unlink()
    made = collect.read_report([folder])
    assert [level.factors for level in made.levels] == [{"size": size} for size in scores]
    assert [level.n for level in made.levels] == [2, 1, 2]
    assert [level.scratch_change for level in made.levels] == [None, pytest.approx(0.1), pytest.approx(-0.05)]
    assert [level.spt_change for level in made.levels] == [None, pytest.approx(0.25), pytest.approx(-0.1)]
    assert made.contrasts == made.best == ()
    for text in (shown(made), markdown.markdown(made)):
        assert "Scores by level" in text and "size 100K" in text and "+25.00" in text
    assert "Scores by level" not in shown(collect.read_report([compared(tmp_path / "other", [0.5], [0.6])]))


# How far a layer has to see


def reach(root: Path, scores: dict[int | str, tuple[list[float], list[float]]], **changes: Any) -> Path:
    """A study of reach on 64 steps, with two layers."""
    rows, cells = [], []
    for row, (steps, pair) in enumerate(scores.items()):
        cells += arms(root, row, f"r{steps}", *pair, **changes)
        layer = 63 if steps == "full" else int(steps)
        rows.append({"factors": {"reach": steps}, "seen": {"layer": layer, "layers": 2, "network": min(63, 2 * layer)}})
    return study(root, "reach", rows, cells)


WHOLE = ([0.80, 0.81, 0.83], [0.90, 0.91, 0.92])
CUT: dict[int | str, tuple[list[float], list[float]]] = {
    1: ([0.50, 0.51, 0.52], [0.60, 0.615, 0.62]),
    4: ([0.60, 0.62, 0.63], [0.89, 0.91, 0.925]),
    16: ([0.79, 0.82, 0.82], [0.91, 0.90, 0.92]),
    "full": WHOLE,
}


def test_each_reach_is_held_against_the_whole(tmp_path: Path) -> None:
    made = collect.read_report([reach(tmp_path, CUT)])
    assert [row.label for row in made.rows][::3] == [
        "digits / transformer, reach 1", "digits / transformer, reach full",
    ]  # fmt: skip
    assert [row.seen for row in made.rows] == [1, 4, 16, 63]
    contrasts = [contrast for needed in made.reaches for contrast in needed.contrasts]
    tests = [t_test(minus(WHOLE[arm], CUT[steps][arm])) for arm in (0, 1) for steps in (1, 4, 16)]
    assert [contrast.p for contrast in contrasts] == pytest.approx([p for p, *_ in tests])
    assert [contrast.holm for contrast in contrasts] == pytest.approx(holm([p for p, *_ in tests]))
    assert [(one.first, one.second) for one in contrasts[:2]] == [("reach full", "reach 1"), ("reach full", "reach 4")]
    scratch, spt = made.reaches
    assert (scratch.what, scratch.whole, scratch.too_short, scratch.enough) == ("scratch", 63, 4, 16)
    assert (spt.what, spt.too_short, spt.enough) == ("SPT", 1, 4)
    assert spt.possible_loss == pytest.approx(tests[4][2])
    assert spt.verdict == (
        "after self-pretraining 4 of 63 steps per layer are enough as far as 3 seeds show (2 layers see 8): reach full "
        f"- reach 4 is +0.17 points (95 % interval {100 * tests[4][1]:+.2f} to {100 * tests[4][2]:+.2f}), so that up "
        f"to {100 * tests[4][2]:.2f} may be lost; 1 is too few: {spt.contrasts[0].verdict}"
    ).replace("-1", "\u22121").replace("\u2212", "-")
    (drawn,) = [plot for plot in figures.all_figures(made) if plot.name == "levels-reach"]
    assert [(line["place"], line["level"]) for line in drawn.data[::2]] == [
        (1, "1"), (4, "4"), (16, "16"), (63, "full"),
    ]  # fmt: skip
    assert figures.LEVEL_AXIS["reach"] in "".join(text.get_text() for text in drawn.draw(LIGHT).texts)
    for text in (shown(made), markdown.markdown(made)):
        plain = " ".join(text.split())
        assert "digits / transformer, reach" in plain and "16 of 63 steps per layer are enough as far as 3" in plain
        assert "reach full - reach 16" in plain


CASES = {  # scores at reach 4 and at 16; the reach that is too short, the one that is enough; words of the verdict
    "the longest is too short": ([0.60, 0.61, 0.63], [0.70, 0.71, 0.735], 16, None, "16 of 63 steps"),
    "none is": ([0.80, 0.82, 0.82], [0.81, 0.80, 0.84], None, 4, "4 of 63 steps per layer are enough as far as 3"),
    "one may be": ([0.79, 0.795, 0.81], [0.81, 0.80, 0.84], None, 16, "; whether 4 are enough is not decided"),
    "the longest may be": ([0.4, 0.42, 0.44], [0.79, 0.795, 0.81], 4, None, "not decided whether 16 of 63 steps"),
    "the same": ([0.4, 0.42, 0.44], WHOLE[0], 4, 16, "is +0.00 points"),
    "a constant loss": ([0.4, 0.42, 0.44], [0.79, 0.80, 0.82], 4, None, "not decided whether 16"),
    "better": ([0.4, 0.42, 0.44], [0.90, 0.92, 0.93], 4, 16, "is -10.33 points (95 % interval -11.77 to -8.90); 4 are"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_how_far_a_layer_has_to_see(tmp_path: Path, case: str) -> None:
    short, longer, too_short, enough, said = CASES[case]
    spt = [0.9, 0.91, 0.93]
    made = collect.read_report([reach(tmp_path, {4: (short, spt), 16: (longer, spt), "full": (WHOLE[0], spt)})])
    found = made.reaches[0]
    assert (found.too_short, found.enough) == (too_short, enough)
    assert said in found.verdict and found.verdict.startswith("from scratch ")


def test_how_far_a_layer_has_to_see_may_be_unknown(tmp_path: Path) -> None:
    def found(name: str, scores: dict[int | str, tuple[list[float], list[float]]], **changes: Any) -> list[str]:
        return [each.verdict for each in collect.read_report([reach(tmp_path / name, scores, **changes)]).reaches]

    two = {steps: (scratch[:2], spt[:2]) for steps, (scratch, spt) in CUT.items()}
    assert all(
        "cannot be decided with 2 seeds: reach full - reach 1 is +30.00" in said for said in found("two", two)[:1]
    )
    assert found("smoke", CUT, smoke=True) == []
    folder = reach(tmp_path / "part", CUT)
    for run in (tmp_path / "part").glob("finetune-r4scratch*"):
        shutil.rmtree(run)
    scratch, spt = collect.read_report([folder]).reaches
    assert "is not known: no pair of runs finished at reach 4" in scratch.verdict and spt.enough == 4


def test_lower_is_better_of_reaches_too(tmp_path: Path) -> None:
    worse = {4: ([0.9, 0.91, 0.92], [0.5, 0.51, 0.53]), "full": ([0.5, 0.52, 0.51], [0.5, 0.52, 0.51])}
    made = collect.read_report([reach(tmp_path, worse, metric="mse", higher_is_better=False)])
    scratch, spt = made.reaches
    assert (scratch.too_short, scratch.enough) == (4, None)
    assert (spt.too_short, spt.enough) == (None, 4)
    assert spt.possible_loss == pytest.approx(-t_test(minus([0.5, 0.52, 0.51], [0.5, 0.51, 0.53]))[1])


# Shares of a budget


def shares(root: Path, scores: dict[float, list[float]], amount: float = 1000, axis: str = "examples") -> Path:
    scratch = [finish(root, "scratch", seed, 0.7 + seed / 100) for seed in range(len(next(iter(scores.values()))))]
    rows, cells = [], []
    for row, (share, spt) in enumerate(scores.items()):
        cells += [cell | {"row": row} for cell in scratch] + arms(root, row, f"s{share}", [], spt)
        rows.append({"factors": {"share": share}, "total": {"axis": axis, "amount": amount}})
    return study(root, "compute", rows, cells)


CLEAR = {0.2: [0.80, 0.81, 0.82], 0.4: [0.90, 0.911, 0.921], 0.6: [0.71, 0.72, 0.731]}
CLOSE = {0.2: [0.80, 0.81, 0.82], 0.4: [0.81, 0.80, 0.84], 0.6: [0.71, 0.72, 0.731]}


@pytest.mark.parametrize("scores", [CLEAR, CLOSE], ids=["decided", "not decided"])
def test_the_best_share_is_tested_against_all_others(tmp_path: Path, scores: dict[float, list[float]]) -> None:
    made = collect.read_report([shares(tmp_path, scores)])
    (best,) = made.best
    assert (best.best, best.n, best.label) == ("share 0.4", 3, "digits / transformer")
    assert best.score == pytest.approx(statistics.fmean(scores[0.4]))
    p = [t_test(minus(scores[a], scores[b]))[0] for a, b in ((0.2, 0.4), (0.2, 0.6), (0.4, 0.6))]
    assert [one.holm for one in best.contrasts] == pytest.approx([holm(p)[0], holm(p)[2]])  # of all three pairs
    assert best.decided == (scores is CLEAR)
    said = f"share 0.4 has the best SPT score ({100 * statistics.fmean(scores[0.4]):.2f})"
    assert best.verdict == (
        f"{said} and beats every other share (n=3, Holm)"
        if scores is CLEAR
        else f"the best share is not decided: {said}, but it is not shown to be better than share 0.2 "
        f"(Holm p {holm(p)[0]:.3f})"
    )
    for text in (shown(made), markdown.markdown(made)):
        assert said in " ".join(text.split())
    assert [level.factors["share"] for level in made.levels] == [0.2, 0.4, 0.6]


def test_the_best_share_needs_runs_and_seeds(tmp_path: Path) -> None:
    (best,) = collect.read_report([shares(tmp_path / "two", {share: spt[:2] for share, spt in CLEAR.items()})]).best
    assert best.verdict.startswith("the best share cannot be decided with 2 seeds: share 0.4 has") and not best.decided
    folder = shares(tmp_path / "none", CLEAR)
    for seed in range(3):
        shutil.rmtree(tmp_path / "none" / f"finetune-s0.6spt{seed}")
    (best,) = collect.read_report([folder]).best
    assert best.verdict == "the best share is not known: no finished SPT run at share 0.6"
    assert collect.read_report([shares(tmp_path / "one", {0.2: [0.8] * 3})]).best == ()


def test_a_share_of_zero_is_not_a_share_of_spt(tmp_path: Path) -> None:
    folder = shares(tmp_path, CLEAR)
    value = json.loads((folder / "study.json").read_text())
    value["rows"].append(value["rows"][0] | {"factors": {"share": 0.0}})
    value["cells"] += [cell | {"row": 3} for cell in value["cells"][:3]]
    assert {cell["arm"] for cell in value["cells"][-3:]} == {"scratch"}
    write_json(folder / "study.json", value)
    assert collect.read_report([folder]).best[0].decided


def test_lower_is_better_among_shares_too(tmp_path: Path) -> None:
    rows, cells = [], []
    for row, (share, spt) in enumerate(CLEAR.items()):
        cells += arms(tmp_path, row, f"s{share}", [0.9] * 3, spt, metric="mse", higher_is_better=False, chance=1.0)
        rows.append({"factors": {"share": share}})
    (best,) = collect.read_report([study(tmp_path, "compute", rows, cells)]).best
    assert (best.best, best.decided) == ("share 0.6", True)


def test_matched_budgets_are_compared_with_the_total(tmp_path: Path) -> None:
    made = collect.read_report([shares(tmp_path, {0.2: CLEAR[0.2]})])
    (match,) = made.matches
    assert (match.total.axis, match.total.amount, match.scratch, match.spt) == ("examples", 1000, 1000, 1000)
    assert (match.mismatch["examples"], match.mismatch["steps"], match.mismatch["flops"]) == (0, 0, 0)
    assert match.mismatch["epochs"] == 0 and match.mismatch["time"] is None  # device time was not recorded
    assert match.warnings == () == made.rows[0].warnings
    for text in (shown(made), markdown.markdown(made)):
        assert "Matched budgets" in text and "1,000" in text and "+0.0 %" in text
    (line,) = csv.DictReader(io.StringIO(machine.to_csv(made, "rows")))
    assert (line["factor_share"], line["matched_axis"], line["matched_total"]) == ("0.2", "examples", "1000.0")


@pytest.mark.parametrize(
    ("axis", "amount", "mismatch"),
    [("epochs", 2.5, 0.1), ("flops", 1e10, 0.2), ("time", 8.0, 0.25), ("examples", 1000, 0.1)],
)
def test_a_residual_mismatch_is_warned_of(tmp_path: Path, axis: str, amount: float, mismatch: float) -> None:
    own = Ledger(steps=40, examples=500, flops=6e9, seconds=1.0, device_seconds=4.0)
    total = own + PRETRAINING.model_copy(update={"device_seconds": 6.0})
    cells = [finish(tmp_path, "scratch", 0, 0.7, own=SCRATCH.model_copy(update={"device_seconds": 8.0}))]
    cells += [finish(tmp_path, "spt", 0, 0.8, own=own, total=total)]
    rows = [{"factors": {"share": 0.6}, "total": {"axis": axis, "amount": amount}}]
    made = collect.read_report([study(tmp_path, "compute", rows, cells)])
    (match,) = made.matches
    assert match.mismatch[axis] == pytest.approx(mismatch)  # type: ignore[index]
    assert match.scratch == pytest.approx(amount) and match.spt == pytest.approx(amount * (1 + mismatch))
    wanted = (
        f"SPT has +{100 * mismatch:.1f}% {axis} of the intended total",
        f"the arms are not matched: SPT has +{100 * mismatch:.1f}% {axis} against scratch",
    )
    assert match.warnings == made.rows[0].warnings == wanted
    assert f"WARNING: {wanted[1]}" in " ".join(shown(made).split())
    assert f"+{100 * mismatch:.1f} %" in markdown.markdown(made)


def test_a_total_that_neither_arm_reached_is_warned_of(tmp_path: Path) -> None:
    made = collect.read_report([shares(tmp_path, {0.2: CLEAR[0.2]}, amount=1100)])
    assert made.rows[0].warnings == (
        "scratch has -9.1% examples of the intended total",
        "SPT has -9.1% examples of the intended total",
    )
    close = collect.read_report([shares(tmp_path / "close", {0.2: CLEAR[0.2]}, amount=1040)])
    assert close.rows[0].warnings == ()


# What a study has spent


def test_shared_runs_are_counted_once(tmp_path: Path) -> None:
    made = collect.read_report([shares(tmp_path, CLEAR)])
    spent = {(one.arm, one.part): one for one in made.spent}
    assert {key: one.runs for key, one in spent.items()} == {
        ("scratch", "finetuning"): 3,
        ("spt", "pretraining"): 9,
        ("spt", "finetuning"): 9,
    }
    assert spent["scratch", "finetuning"].ledger.steps == 3 * SCRATCH.steps
    assert spent["spt", "pretraining"].ledger.examples == 9 * PRETRAINING.examples
    assert spent["spt", "finetuning"].ledger.flops == pytest.approx(9 * FINETUNING.flops)
    assert spent["spt", "finetuning"].ledger.positions == 9 * FINETUNING.positions
    text = markdown.markdown(made)
    assert "| compute-1 | scratch, finetuning | 3 | 300 | 3,000 | 192,000 | 3.00e10 | 0.0 s | 24.0 s |" in text
    assert "|  | SPT, total | 18 | 900 | 9,000 | 576,000 | 9.00e10 | 0.0 s | 90.0 s |" in text
    assert "Total cost" in shown(made)


def test_runs_without_a_result_are_counted_separately(tmp_path: Path) -> None:
    folder = compared(tmp_path, [0.7, 0.8], [0.8, 0.9])
    (tmp_path / "finetune-scratch1" / "result.json").unlink()
    RunFolder(tmp_path, "finetune-scratch1").set_status("diverged", "the loss became nan", 5)
    shutil.rmtree(tmp_path / "finetune-spt1")
    made = collect.read_report([folder])
    found = {(one.arm, one.part): (one.runs, one.unknown) for one in made.spent}
    assert found == {("scratch", "finetuning"): (1, 1), ("spt", "pretraining"): (2, 0), ("spt", "finetuning"): (1, 0)}
    assert "1 + 1 ?" in markdown.markdown(made)


def test_runs_without_a_study_are_summed_too(tmp_path: Path) -> None:
    for seed in range(2):
        finish(tmp_path, "scratch", seed, 0.5)
        finish(tmp_path, "spt", seed, 0.6)
    assert {(one.study, one.arm, one.part, one.runs) for one in collect.read_report([tmp_path]).spent} == {
        ("", "scratch", "finetuning", 2),
        ("", "spt", "pretraining", 2),
        ("", "spt", "finetuning", 2),
    }


def test_operations_are_summed_by_kind(tmp_path: Path) -> None:
    assert "by kind" not in shown(collect.read_report([compared(tmp_path / "old", [0.5], [0.6])]))
    own = SCRATCH.model_copy(update={"operations": {"linear": 6e9, "attention": 2e9}})
    made = collect.read_report([plan(tmp_path, [finish(tmp_path, "scratch", seed, 0.5, own=own) for seed in range(2)])])
    assert made.spent[0].ledger.operations == {"linear": 1.2e10, "attention": 4e9}
    text = markdown.markdown(made)
    assert "| compare-1 | scratch | linear | 1.20e10 | 75.0 % |" in text
    assert "|  | scratch | attention | 4.00e9 | 25.0 % |" in text


def test_parameters_are_shown_with_and_without_encoder_and_head(tmp_path: Path) -> None:
    made = collect.read_report([compared(tmp_path, [0.7], [0.8])])
    assert "| digits / transformer | both | 115 | 100 | 10 | 5 |" in markdown.markdown(made)
    cells = [finish(tmp_path / "b", "scratch", 0, 0.5, parameters={"total": 9, "backbone": 9})]
    text = markdown.markdown(
        collect.read_report([plan(tmp_path / "b", [*cells, finish(tmp_path / "b", "spt", 0, 0.6)])])
    )
    assert "| digits / transformer | scratch | 9 | 9 | - | - |" in text


# Searches

RATES = (0.001, 0.003, 0.01, 0.03)


def tuned(
    root: Path,
    scratch: Sequence[Sequence[float]],
    spt: Sequence[Sequence[float]],
    chosen: dict[str, int] | None = None,
    finals: bool = True,
    **changes: Any,
) -> Path:
    """A search over as many learning rates as there are scores, each a list by seed."""
    trials = []
    for arm, settings in (("scratch", scratch), ("spt", spt)):
        for number, scores in enumerate(settings):
            for seed, score in enumerate(scores):
                options = {"val": {changes.get("metric", "accuracy"): score}, **changes}
                cell = finish(root, arm, seed, 0.1, run=f"finetune-t{arm}{number}-{seed}", **options)
                trials.append({name: cell[name] for name in ("arm", "seed", "run", "parent")} | {"number": number})
    settings = [{"learning_rate": rate, "name": "adamw"} for rate in RATES[: max(len(scratch), len(spt))]]
    search = {
        "row": 0,
        "space": {"learning_rate": [one["learning_rate"] for one in settings], "name": ["adamw"]},
        "settings": settings,
        "trials": trials,
        "chosen": chosen or {},
    }
    cells: list[Cell] = arms(root, 0, "final", [0.7, 0.71, 0.72], [0.8, 0.82, 0.81]) if finals and chosen else []
    return study(root, "tune", [{}], cells, searches=[search], seeds=[0, 1, 2])


FOUND = {"scratch": 1, "spt": 3}
SCRATCH_TRIALS = [[0.50, 0.52], [0.60, 0.64], [0.55, 0.57], [0.40, 0.30]]
SPT_TRIALS = [[0.50, 0.52], [0.60, 0.64], [0.55, 0.57], [0.70, 0.74]]


def subsets(values: Sequence[float], k: int) -> float:
    """Mean best of k, over all subsets."""
    from itertools import combinations

    return statistics.fmean(max(chosen) for chosen in combinations(values, k))


def test_edges_of_both_arms_are_told_in_brief(tmp_path: Path) -> None:
    edges = {"scratch": 3, "spt": 3}
    text = " ".join(shown(collect.read_report([tuned(tmp_path, SPT_TRIALS, SPT_TRIALS, edges)]), full=False).split())
    assert "scratch: the chosen learning_rate 0.03 is at the edge" in text
    assert "SPT: the chosen learning_rate 0.03 is at the edge" in text


def test_a_search_shows_trials_choice_and_edges(tmp_path: Path) -> None:
    made = collect.read_report([tuned(tmp_path, SCRATCH_TRIALS, SPT_TRIALS, FOUND)])
    (search,) = made.searches
    assert (search.label, search.metric, search.higher_is_better) == ("digits / transformer", "accuracy", True)
    assert (search.scratch.settings, search.scratch.trials, search.scratch.done) == (4, 8, 8)
    assert search.scratch.setting == {"learning_rate": 0.003, "name": "adamw"}
    assert (search.scratch.value, search.spt.value) == pytest.approx((0.62, 0.72))
    assert (search.scratch.edges, search.spt.edges) == ((), ("learning_rate",))
    assert search.warnings == ()
    (note,) = search.notes
    assert note == "SPT: the chosen learning_rate 0.03 is at the edge of the search space; widen it there"
    means = [statistics.fmean(scores) for scores in SCRATCH_TRIALS]
    assert [one.settings for one in search.scratch.expected] == [1, 2, 4]
    assert [one.value for one in search.scratch.expected] == pytest.approx([subsets(means, k) for k in (1, 2, 4)])
    assert made.rows[0].decision == "spt" and made.rows[0].n == 3
    for text in (shown(made), markdown.markdown(made)):
        flat = " ".join(text.split())
        assert "Search" in flat and "Expected best on validation" in flat and "widen" in flat
        assert "learning_rate 0.001, 0.003, 0.01, 0.03; name adamw" in flat
        assert "62.00" in flat and "72.00" in flat
    label, chosen = "digits / transformer: accuracy (%)", "learning_rate 0.003, name adamw"
    assert f"| {label} | scratch | {chosen} | no | 8 | 0 | 8.00e10 | 64.0 s | 62.00 |" in markdown.markdown(made)
    chosen = "learning_rate 0.03, name adamw | learning_rate"
    assert f"|  | SPT | {chosen} | 8 | 0 | 8.00e10 | 80.0 s | 72.00 |" in markdown.markdown(made)
    assert "| digits / transformer | SPT | 3 | learning_rate 0.03, name adamw | 1 | 74.00 |" in markdown.markdown(made)
    lines = list(csv.DictReader(io.StringIO(machine.to_csv(made, "searches"))))
    assert len(lines) == 16
    assert [line["space_learning_rate"] for line in lines if line["chosen"] == "True"] == ["0.003"] * 2 + ["0.03"] * 2
    assert (lines[0]["validation"], lines[0]["state"], lines[0]["run"]) == ("0.5", "done", "finetune-tscratch0-0")
    spent = {(one.arm, one.part): one.runs for one in made.spent}
    assert spent == {
        ("scratch", "finetuning"): 3,
        ("scratch", "tuning"): 8,
        ("spt", "pretraining"): 11,
        ("spt", "finetuning"): 3,
        ("spt", "tuning"): 8,
    }


def test_lost_trials_count_and_missing_ones_are_listed(tmp_path: Path) -> None:
    one_seed = [[scores[0]] for scores in SCRATCH_TRIALS]
    folder = tuned(tmp_path, one_seed, one_seed, finals=False)
    (tmp_path / "finetune-tscratch1-0" / "result.json").unlink()
    RunFolder(tmp_path, "finetune-tscratch1-0").set_status("diverged", "the loss became nan", 5)
    shutil.rmtree(tmp_path / "finetune-tspt2-0")
    made = collect.read_report([folder])
    assert made.rows == ()  # nothing is chosen yet
    (search,) = made.searches
    assert (search.scratch.done, search.scratch.lost, search.spt.done, search.spt.lost) == (3, 1, 3, 0)
    assert search.notes == (
        "scratch: the cost of 1 runs without a result is not counted",
        "scratch: 1 of 4 trials have no score; they still count as trials",
        "SPT: 1 of 4 trials are not finished",
    )
    assert [one.value for one in search.scratch.expected] == pytest.approx(
        [subsets([0.5, 0.4, 0.55, 0.4], k) for k in (1, 2, 4)]  # as the worst of the others
    )
    assert [one.settings for one in search.spt.expected] == [1, 2, 3]  # the missing one has not ended
    assert [(label, failure.arm, failure.seed, failure.state) for label, failure in made.failures] == [
        ("digits / transformer", "scratch", 0, "diverged"),
        ("digits / transformer", "spt", 0, "missing"),
    ]
    text = shown(made)
    assert "not chosen yet" in " ".join(text.split()) and "trial of setting 1" in " ".join(text.split())
    assert "nothing chosen yet" in " ".join(markdown.markdown(made).split())


def test_lower_can_be_better_on_validation(tmp_path: Path) -> None:
    options = {"metric": "mse", "higher_is_better": False, "chance": 1.0}
    losses = [[0.3], [0.1], [0.2], [0.4]]
    (search,) = collect.read_report([tuned(tmp_path, losses, losses, {"scratch": 1, "spt": 0}, **options)]).searches
    assert not search.higher_is_better
    assert [one.value for one in search.scratch.expected] == pytest.approx([0.25, 1 / 6, 0.1])
    assert search.warnings == ("the setting chosen for SPT is not the best on validation (0.3; best 0.1)",)
    by_loss = {"val": {"loss": 0.3, "accuracy": 0.5}, "selected_by": "loss"}
    folder = tuned(tmp_path / "loss", [[0.0]], [[0.0]], {"scratch": 0, "spt": 0}, **by_loss)
    (search,) = collect.read_report([folder]).searches
    assert (search.metric, search.higher_is_better, search.scratch.value) == ("loss", False, 0.3)
    assert search.scratch.edges == ()  # one value has no edge


def test_unequal_searches_are_warned_of(tmp_path: Path) -> None:
    (search,) = collect.read_report(
        [tuned(tmp_path, SCRATCH_TRIALS, SPT_TRIALS[:3], {"scratch": 1, "spt": 1})]
    ).searches
    assert search.warnings == ("the arms were not tuned equally: scratch has 4 settings in 8 trials, SPT 3 in 6",)
    assert "WARNING: the arms were not tuned equally" in " ".join(
        shown(collect.read_report([tmp_path / "tune-1"])).split()
    )
    folder = tuned(tmp_path / "b", SCRATCH_TRIALS[:3], SPT_TRIALS[:3])
    value = json.loads((folder / "study.json").read_text())
    value["searches"][0]["trials"] = [
        trial | {"number": 2 if (trial["arm"], trial["number"]) == ("spt", 1) else trial["number"]}
        for trial in value["searches"][0]["trials"]
        if (trial["arm"], trial["number"]) not in (("spt", 2), ("scratch", 2))
    ]
    write_json(folder / "study.json", value)
    (search,) = collect.read_report([folder]).searches
    assert search.warnings == ("the arms were not tuned equally: they tried different settings",)


def test_a_trial_that_is_also_the_final_run_is_counted_once(tmp_path: Path) -> None:
    folder = tuned(tmp_path, [[0.5]], [[0.6]], {"scratch": 0, "spt": 0}, finals=False)
    value = json.loads((folder / "study.json").read_text())
    value["cells"] = [
        {"row": 0, **{name: trial[name] for name in ("arm", "seed", "run", "parent")}}
        for trial in value["searches"][0]["trials"]
    ]
    write_json(folder / "study.json", value)
    assert {(one.arm, one.part): one.runs for one in collect.read_report([folder]).spent} == {
        ("scratch", "tuning"): 1,
        ("spt", "pretraining"): 1,
        ("spt", "tuning"): 1,
    }


# Studies that are only partly there, and their files


def data(root: Path) -> Path:
    rows, cells = [], []
    for row, fraction in enumerate((0.05, 1.0)):
        split = {**SPLITS, "train": SplitRecord(rows=int(400 * fraction), inputs=f"a{row}", targets="b")}
        cells += arms(root, row, f"f{fraction}", *THREE["thin"], data=split)
        rows.append({"factors": {"fraction": fraction}})
    return study(root, "data", rows, cells, notes=["the subsets are nested"])


KINDS = {
    "compare": lambda root: tasks(root, THREE),
    "compute": lambda root: shares(root, CLEAR),
    "data": data,
    "init": init,
    "reach": lambda root: reach(root, CUT),
    "tune": lambda root: tuned(root, SCRATCH_TRIALS, SPT_TRIALS, FOUND),
}


def complete(made: Report) -> None:
    """Every form of it can be written."""
    assert shown(made) and markdown.markdown(made)
    json.dumps(machine.to_json(made), allow_nan=False)
    assert all(isinstance(text, str) for text in (machine.to_csv(made, "rows"), machine.to_csv(made, "seeds")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_study_that_is_only_partly_there_is_reported(tmp_path: Path, kind: str) -> None:
    folder = KINDS[kind](tmp_path)
    complete(collect.read_report([folder]))
    runs = sorted(path for path in tmp_path.iterdir() if path.name.startswith(("finetune-", "pretrain-")))
    planned = len(collect.read_report([folder]).folders)
    assert planned == len(runs)
    order = np.random.default_rng(0).permutation(len(runs))
    for count, index in enumerate(order, 1):
        shutil.rmtree(runs[index])
        if count % 4 and count != len(runs):
            continue
        made = collect.read_report([folder])
        complete(made)
        assert len(made.folders) == planned - count
    made = collect.read_report([folder])
    assert {row.decision for row in made.rows} <= {"no pair"} and made.spent == ()
    assert {failure.state for _, failure in made.failures} == {"missing"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_runs_holds_its_study(tmp_path: Path, kind: str) -> None:
    folder = KINDS[kind](tmp_path)
    assert (
        collect.read_report([tmp_path]).rows
        == collect.read_report([folder, tmp_path]).rows
        == collect.read_report([folder]).rows
    )


@pytest.mark.parametrize("kind", KINDS)
def test_lines_fit_80_columns(tmp_path: Path, kind: str) -> None:
    assert max(map(len, shown(collect.read_report([KINDS[kind](tmp_path)])).splitlines())) <= 80


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(tmp_path: Path, kind: str) -> None:
    folder = KINDS[kind](tmp_path)
    paths = write.write_report(collect.read_report([folder]), folder)
    names = ["report.html", "report.md", "report.tex", "report.csv", "seeds.csv"]
    names += [*(["searches.csv"] if kind == "tune" else []), "report.json"]
    assert [path.name for path in paths] == names
    before = [path.read_bytes() for path in paths]
    value = json.loads((folder / "study.json").read_text())
    value["cells"] = value["cells"][::-1]
    write_json(folder / "study.json", value)
    assert [path.read_bytes() for path in write.write_report(collect.read_report([folder]), folder)] == before


def test_notes_of_planning_are_passed_on(tmp_path: Path) -> None:
    made = collect.read_report([data(tmp_path)])
    assert made.notes == ("data-1: the subsets are nested",)
    for text in (shown(made), markdown.markdown(made)):
        assert "data-1: the subsets are nested" in text


def test_csv_has_a_column_for_each_factor(tmp_path: Path) -> None:
    first, second = data(tmp_path / "a"), init(tmp_path / "b")
    lines = list(csv.DictReader(io.StringIO(machine.to_csv(collect.read_report([first, second]), "rows"))))
    assert [(line["factor_fraction"], line["factor_initialisation"]) for line in lines] == [
        ("0.05", ""),
        ("1.0", ""),
        ("", "structured"),
        ("", "random"),
    ]
    assert [line["label"] for line in lines][:2] == [
        "digits / transformer, fraction 0.05",
        "digits / transformer, fraction 1",
    ]


def test_json_has_these_keys(tmp_path: Path) -> None:
    """Scripts read them: a change here is a change of `render.FORMAT`."""
    value = machine.to_json(collect.read_report([shares(tmp_path / "a", CLEAR), init(tmp_path / "b"),
                                        tasks(tmp_path / "c", THREE),
                                        tuned(tmp_path / "d", SCRATCH_TRIALS, SPT_TRIALS, FOUND),
                                        reach(tmp_path / "e", CUT)]))  # fmt: skip
    assert value["format"] == 2
    assert set(value) == {
        "format", "kind", "rows", "models", "contrasts_between_models", "rankings", "models_across_tasks", "verdicts",
        "levels", "contrasts", "best", "reaches", "pooled", "averages", "matches", "searches", "spent",
        "precedents", "provenance", "controls", "baselines", "failures", "warnings", "notes", "runs", "results",
        "metrics", "confusions", "calibrations", "groups",
    }  # fmt: skip
    keys = {
        "rows": """label kind task model recipe factors seen total source command smoke not_self_pretraining metric
            higher_is_better chance scratch spt delta low high confidence p holm tests n planned splits test_share
            favour_spt detectable decision verdict ratios compute budgets scratch_arm spt_arm only warnings notes
            seeds items failures""",
        "levels": "study label factors metric n scratch spt delta scratch_change spt_change",
        "contrasts": """study label what first second metric higher_is_better n planned splits difference low high p
            holm tests decision verdict""",
        "best": "study label metric best score n decided verdict contrasts",
        "reaches": "study label what metric whole too_short enough possible_loss verdict contrasts",
        "pooled": """kind model factors label tasks pairs scratch spt difference probability confidence left_out
            verdict""",
        "averages": """kind model factors label metric tasks left_out incomplete scratch spt difference low high
            published_scratch published_spt source doubts""",
        "matches": "label total scratch spt mismatch warnings",
        "searches": """study label task model recipe metric higher_is_better protocol equal space scratch spt trials
            failures warnings notes""",
        "spent": "study arm part runs unknown ledger",
    }
    for name, wanted in keys.items():
        assert set(value[name][0]) == set(wanted.split()), name
    assert set(value["rows"][0]["spt_arm"]) == {
        "score", "total", "pretraining", "finetuning", "stops", "best_at_end", "above_chance", "chance_p",
        "chance_test", "parameters",
    }  # fmt: skip
    assert set(value["searches"][0]["spt"]) == {
        "settings", "trials", "done", "lost", "space", "spent", "unknown", "chosen", "setting", "value", "edges",
        "expected",
    }  # fmt: skip
    assert set(value["matches"][0]["mismatch"]) == {"epochs", "steps", "examples", "flops", "time"}
