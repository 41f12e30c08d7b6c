"""Two runs on the same test examples, and several tasks together."""

import contextlib
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spt.report.across_tasks import TaskAggregate, aggregate, interquartile_mean, normalised
from spt.report.per_example import compare_examples
from spt.report.stats import bootstrap_examples, mcnemar
from spt.runs.predictions import FILE, NotComparable, mark_run

TASK = tuple[list[float], list[float]]


def predictions(folder: Path, columns: dict[str, Any]) -> Path:
    """A run folder with this file of predictions."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "predictions.parquet")
    return folder


def classes(folder: Path, said: Any, label: Any, ids: Any = None) -> Path:
    said, label = np.asarray(said), np.asarray(label)
    ids = np.arange(len(said)) if ids is None else np.asarray(ids)
    margin = np.ones(len(said))
    return predictions(folder, {"id": ids, "label": label, "prediction": said, "margin": margin})


def refused(*arguments: Any) -> str:
    with pytest.raises(NotComparable) as caught:
        compare_examples(*arguments)
    return str(caught.value)


def test_a_row_of_which_no_label_is_known_does_not_count(tmp_path: Path) -> None:
    def run(name: str, said: list[int]) -> Path:
        columns = {"id": range(3), "label_0": [1, -1, 0], "label_1": [0, -1, -1], "prediction_0": said}
        return predictions(tmp_path / name, columns | {"prediction_1": [0, 1, 1]})

    test = compare_examples(run("a", [1, 1, 1]), run("b", [1, 0, 0]), 0)
    assert (test.n, test.scratch, test.spt) == (2, pytest.approx(2 / 3), 1.0)


def test_classes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    label = random.integers(5, size=400)
    said = [np.where(random.random(400) < right, label, (label + 1) % 5) for right in (0.7, 0.8)]
    scratch, spt = classes(tmp_path / "scratch", said[0], label), classes(tmp_path / "spt", said[1], label)
    right = [answer == label for answer in said]
    got = compare_examples(scratch, spt, 3)
    only = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
    assert (got.metric, got.n, got.only_scratch, got.only_spt) == ("accuracy", 400, *only)
    assert (got.scratch, got.spt) == pytest.approx((right[0].mean(), right[1].mean()))
    assert got.difference == pytest.approx(got.spt - got.scratch)
    assert got.p == mcnemar(*only)
    interval = bootstrap_examples(right[0].astype(float), right[1].astype(float), np.random.default_rng(3))
    assert (got.low, got.high) == (interval.low, interval.high)
    assert got == compare_examples(scratch, spt, 3) != compare_examples(scratch, spt, 4)
    assert got.higher_is_better


def test_exchanging_the_arms_mirrors_the_items(tmp_path: Path) -> None:
    scratch = classes(tmp_path / "a", [0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 1, 0])
    spt = classes(tmp_path / "b", [0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0])
    one, other = compare_examples(scratch, spt, 0), compare_examples(spt, scratch, 0)
    assert (one.only_scratch, one.only_spt, one.p) == (0, 1, 1.0)
    assert (other.only_scratch, other.only_spt, other.p) == (1, 0, 1.0)
    assert other.difference == -one.difference


@pytest.mark.parametrize("name", [int, str])
def test_rows_are_matched_by_id(tmp_path: Path, name: type) -> None:
    random = np.random.default_rng(1)
    label, said = random.integers(3, size=60), random.integers(3, size=(2, 60))
    ids, order = np.array([name(i) for i in random.permutation(1000)[:60]]), random.permutation(60)
    scratch = classes(tmp_path / "scratch", said[0], label, ids)
    same = classes(tmp_path / "same", said[1], label, ids)
    shuffled = classes(tmp_path / "shuffled", said[1][order], label[order], ids[order])
    assert compare_examples(scratch, shuffled, 0) == compare_examples(scratch, same, 0)


def test_reals(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    truth = random.normal(size=(50, 2))
    answers = truth + random.normal(size=(2, 50, 2)) * [[[0.5, 0.5]], [[0.1, 0.2]]]

    def run(name: str, answer: Any) -> Path:
        columns = {f"target_{k}": truth[:, k] for k in (0, 1)}
        columns |= {f"prediction_{k}": answer[:, k].astype(np.float32) for k in (0, 1)}
        return predictions(tmp_path / name, {"id": np.arange(50), **columns})

    scratch, spt = run("scratch", answers[0]), run("spt", answers[1])
    for metric, error in {"mse": (answers - truth) ** 2, "mae": np.abs(answers - truth)}.items():
        got = compare_examples(scratch, spt, 0, metric=metric)
        assert (got.metric, got.n, got.higher_is_better) == (metric, 50, False)
        assert (got.scratch, got.spt) == pytest.approx((error[0].mean(), error[1].mean()), rel=1e-5)
        assert got.low is not None and got.high is not None and got.low < got.difference < got.high < 0
        assert (got.p, got.only_scratch, got.only_spt) == (None, None, None)
    assert compare_examples(scratch, spt, 0, metric="r2").metric == "mse"


@pytest.mark.parametrize("column", ["right", "squared_error"])
def test_answers_of_steps_count_by_step(tmp_path: Path, column: str) -> None:
    """As in the metric itself. An example without a scored step is none."""
    steps = np.array([1.0, 4.0, 0.0, 5.0])
    sums = np.array([[1.0, 2.0, 0.0, 0.0], [0.0, 4.0, 0.0, 5.0]])
    runs = [predictions(tmp_path / str(k), {"id": range(4), "steps": steps, column: sums[k]}) for k in (0, 1)]
    got = compare_examples(*runs, 0)
    assert (got.metric, got.n) == ({"right": "accuracy", "squared_error": "mse"}[column], 3)
    assert (got.scratch, got.spt, got.difference) == pytest.approx((0.3, 0.9, 0.6))
    assert (got.p, got.only_spt) == (None, None)
    unscored = [predictions(tmp_path / f"no{k}", {"id": [1], "steps": [0.0], column: [0.0]}) for k in (0, 1)]
    assert refused(*unscored, 0) == "no step of any example is scored"


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    good = classes(tmp_path / "good", [0, 1], [0, 1])
    (tmp_path / "empty").mkdir()
    assert refused(good, tmp_path / "empty", 0) == "empty/predictions.parquet is missing"
    assert refused(tmp_path / "nowhere", good, 0) == "nowhere/predictions.parquet is missing"
    (tmp_path / "folder" / "predictions.parquet").mkdir(parents=True)
    assert refused(good, tmp_path / "folder", 0) == "folder/predictions.parquet is not a file"
    content = (good / "predictions.parquet").read_bytes()
    bad = classes(tmp_path / "bad", [0, 1], [0, 1]) / "predictions.parquet"
    for damage in (b"", b"PAR1", b"not parquet at all", content[: len(content) // 2], content[:-1]):
        bad.write_bytes(damage)
        assert "bad/predictions.parquet cannot be read" in refused(good, bad.parent, 0)


def test_answers_of_another_run(tmp_path: Path) -> None:
    """The file names its run; an older one, which does not, is taken as it is."""
    good, other = classes(tmp_path / "good", [0, 1], [0, 1]), classes(tmp_path / "finetune-b", [1, 1], [0, 1])
    table = pq.ParquetFile(other / FILE).read()
    pq.write_table(mark_run(table, "finetune-a"), other / FILE)
    reason = "finetune-b/predictions.parquet holds the answers of another run, finetune-a; remove it"
    assert refused(good, other, 0).startswith(reason)
    for folder in ("finetune-b", "finetune-b.old2"):
        (tmp_path / folder).mkdir(exist_ok=True)
        pq.write_table(mark_run(table, "finetune-b"), tmp_path / folder / FILE)
        assert compare_examples(good, tmp_path / folder, 0).n == 2


def test_no_damage_is_fatal(tmp_path: Path) -> None:
    """Bytes overwritten anywhere give items or a reason."""
    good, bad = classes(tmp_path / "good", [0, 1, 2] * 9, [0, 1, 1] * 9), classes(tmp_path / "bad", [0] * 27, [0] * 27)
    content = (good / "predictions.parquet").read_bytes()
    random = np.random.default_rng(0)
    for _ in range(100):
        damaged = bytearray(content)
        for place in random.integers(len(content), size=3):
            damaged[place] = random.integers(256)
        (bad / "predictions.parquet").write_bytes(damaged)
        with contextlib.suppress(NotComparable):
            compare_examples(good, bad, 0)


def test_a_folder_named_like_a_setting_adds_no_column(tmp_path: Path) -> None:
    scratch, spt = (classes(tmp_path / "lr=0.1" / name, [0, 1], [0, 0]) for name in ("scratch", "spt"))
    assert compare_examples(scratch, spt, 0).n == 2


def test_other_examples(tmp_path: Path) -> None:
    scratch = classes(tmp_path / "scratch", [0, 1, 1], [0, 1, 1])
    others = classes(tmp_path / "others", [0, 1, 1], [0, 1, 1], [0, 1, 7])
    assert refused(scratch, others, 0) == "the runs were tested on different examples: 2 ids are in one file only"
    fewer = classes(tmp_path / "fewer", [0, 1], [0, 1])
    assert "1 ids are in one file only" in refused(scratch, fewer, 0)
    text = classes(tmp_path / "text", [0, 1, 1], [0, 1, 1], ["0", "1", "2"])
    assert "6 ids" in refused(scratch, text, 0)


def test_ids_that_repeat_are_matched_by_order_or_not_at_all(tmp_path: Path) -> None:
    scratch, spt = (classes(tmp_path / name, [0, 1, 1], [0, 1, 1], [5, 5, 6]) for name in ("scratch", "spt"))
    assert compare_examples(scratch, spt, 0).n == 3
    for name, ids in {"moved": [5, 6, 5], "other": [5, 6, 6], "more": [5, 5, 5, 6]}.items():
        run = classes(tmp_path / name, [0] * len(ids), [0] * len(ids), ids)
        assert "ids that repeat cannot be matched" in refused(scratch, run, 0)


def test_other_targets_and_other_columns(tmp_path: Path) -> None:
    scratch = classes(tmp_path / "scratch", [0, 1], [0, 1])
    assert "different targets" in refused(scratch, classes(tmp_path / "labels", [0, 1], [0, 0]), 0)
    steps = predictions(tmp_path / "steps", {"id": [0, 1], "steps": [1.0, 1.0], "right": [1.0, 0.0]})
    assert "different columns: label" in refused(scratch, steps, 0)
    more = predictions(tmp_path / "more", {"id": [0, 1], "steps": [1.0, 2.0], "right": [1.0, 0.0]})
    assert "different targets" in refused(steps, more, 0)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"id": pa.array([], pa.int64()), "label": pa.array([], pa.int64())}, "has no rows"),
        ({"label": [0], "prediction": [0]}, "has no ids"),
        ({"id": [[0], [1]], "label": [0, 1], "prediction": [0, 1]}, "has no ids"),
        ({"id": [0, 1]}, "has no answers"),
        ({"id": [0, 1], "target_1": [0.0, 1.0], "prediction_1": [0.0, 1.0]}, "has no answers"),
        ({"id": [0, 1], "label": [0, None], "prediction": [0, 1]}, "has empty cells"),
        ({"id": [0, 1], "label": ["a", "b"], "prediction": ["a", "b"]}, "answers that are not numbers"),
        ({"id": [0, 1], "target_0": [0.0, 1.0], "prediction_0": [math.inf, 1.0]}, "not finite"),
        ({"id": [0, 1], "target_0": [0.0, 1.0], "prediction_0": [0.0, math.nan]}, "not finite"),
    ],
)
def test_tables_that_cannot_be_compared(tmp_path: Path, columns: dict[str, Any], reason: str) -> None:
    scratch, spt = (predictions(tmp_path / name, columns) for name in ("scratch", "spt"))
    assert reason in refused(scratch, spt, 0)


def test_one_example_and_equal_answers(tmp_path: Path) -> None:
    scratch, spt = classes(tmp_path / "a", [0], [1]), classes(tmp_path / "b", [1], [1])
    got = compare_examples(scratch, spt, 0)
    assert (got.n, got.difference, got.low, got.high, got.p) == (1, 1.0, None, None, 1.0)
    same = classes(tmp_path / "c", [0, 1, 1], [0, 0, 1])
    got = compare_examples(same, same, 0)
    assert (got.difference, got.low, got.high, got.only_scratch, got.only_spt, got.p) == (0.0, 0.0, 0.0, 0, 0, 1.0)


def test_normalised() -> None:
    assert normalised(0.55, 0.1) == pytest.approx(0.5)
    assert (normalised(0.1, 0.1), normalised(1.0, 0.1)) == (0.0, 1.0)
    assert normalised(0.05, 0.1) == pytest.approx(-0.05 / 0.9)
    for score, chance, higher in [(None, 0.1, True), (0.5, None, True), (0.5, 0.1, False), (0.5, 1.0, True)]:
        assert normalised(score, chance, higher) is None
    assert (normalised(1.2, 0.1), normalised(math.nan, 0.1), normalised(0.5, -0.1)) == (None, None, None)


@pytest.mark.parametrize("runs", [(1,), (2, 1), (4,), (3, 3), (5, 5, 5), (3, 7, 10)])
def test_interquartile_mean(runs: tuple[int, ...]) -> None:
    from scipy import stats

    scores = np.concatenate([np.random.default_rng(n).normal(size=n) for n in runs])
    assert interquartile_mean(scores) == pytest.approx(stats.trim_mean(scores, 0.25))


def test_interquartile_mean_leaves_out_the_extremes() -> None:
    scores = np.array([1.0, 2.0, 3.0, -1e9, 4.0, 5.0, 6.0, 1e9])
    assert interquartile_mean(scores) == pytest.approx(3.5)


def tasks(seeds: tuple[int, ...], shift: float = 0.05, spread: float = 0.02, seed: int = 0) -> list[TASK]:
    random = np.random.default_rng([seed, *seeds])
    found = []
    for k, n in enumerate(seeds):
        scratch, spt = random.normal(0.3 + 0.1 * k, spread, (2, n))
        found.append((scratch.tolist(), (spt + shift).tolist()))
    return found


def test_aggregate_by_hand() -> None:
    from scipy import stats

    given = tasks((5, 3, 7))
    got = aggregate(given)
    assert got is not None
    assert got.pairs == 15
    scratch, spt = (stats.trim_mean(np.concatenate([task[arm] for task in given]), 0.25) for arm in (0, 1))
    assert (got.scratch.value, got.spt.value, got.difference.value) == pytest.approx((scratch, spt, spt - scratch))
    wins = [stats.mannwhitneyu(b, a).statistic / (len(a) * len(b)) for a, b in given]
    assert got.probability.value == pytest.approx(np.mean(wins))
    for interval in (got.scratch, got.spt, got.difference, got.probability):
        assert interval.low is not None and interval.high is not None
        assert interval.low <= interval.value <= interval.high
    assert got == aggregate(given, seed=0) != aggregate(given, seed=1)


def test_ties_count_half() -> None:
    got = aggregate([([0.1, 0.2, 0.3], [0.2, 0.2, 0.4]), ([0.5] * 3, [0.5] * 3)])
    assert got is not None
    assert got.probability.value == pytest.approx(((1 + 0.5 + 0 + 1 + 0.5 + 0 + 3) / 9 + 0.5) / 2)


def test_resamples_keep_pairs_together() -> None:
    """What the arms share at a seed drops out of their difference."""
    together = [np.random.default_rng(k).normal(0.5, 0.2, 6) for k in range(2)]
    got = aggregate([(scores.tolist(), (scores + 0.03).tolist()) for scores in together])
    assert got is not None
    assert (got.difference.low, got.difference.high) == pytest.approx((0.03, 0.03))
    assert got.spt.low is not None and got.spt.high is not None and got.spt.high - got.spt.low > 0.05


def test_each_task_keeps_its_own_seeds() -> None:
    """Stratified: with no spread within tasks there is none at all, however far the tasks lie apart."""
    got = aggregate([([0.2] * 4, [0.3] * 4), ([0.8] * 4, [0.9] * 4)])
    assert got is not None
    for interval, mean in [(got.scratch, 0.5), (got.spt, 0.6), (got.difference, 0.1), (got.probability, 1.0)]:
        assert (interval.value, interval.low, interval.high) == pytest.approx((mean, mean, mean))


def test_intervals_over_tasks_cover_the_truth_nearly_as_often_as_they_should() -> None:
    """Six tasks, ten seeds: 93 % in 2,000 draws. With one arm drawn by itself it would be far less or more."""
    covered = 0
    for seed in range(200):
        got = aggregate(tasks((10,) * 6, seed=seed), seed=seed, resamples=200)
        assert got is not None and got.difference.low is not None and got.difference.high is not None
        covered += got.difference.low <= 0.05 <= got.difference.high
    assert covered / 200 == pytest.approx(0.93, abs=0.05)


def test_probability_of_improvement_is_not_drawn_towards_that_of_the_pairs() -> None:
    """Arms that share most of their luck: SPT wins nearly every pair, but not every run of it beats
    every run of scratch.

    With pairs drawn together the intervals lie too high and hold the truth in 60 % of cases.
    """
    random, truth = (
        np.random.default_rng(8),
        0.5 * math.erfc(-0.5),
    )  # P(X > Y) of normal scores, means one deviation apart
    below = covered = 0
    for seed in range(200):
        shared, scratch, spt = random.normal(size=(3, 6, 5)) * np.reshape([0.9, 0.19**0.5, 0.19**0.5], (3, 1, 1))
        pairs = zip((shared + scratch).tolist(), (shared + spt + 1).tolist(), strict=True)
        got = aggregate(list(pairs), seed, resamples=200)
        assert got is not None and got.probability.low is not None and got.probability.high is not None
        covered += got.probability.low <= truth <= got.probability.high
        below += truth < got.probability.low
    assert covered >= 0.9 * 200
    assert below <= 0.1 * 200


@pytest.mark.parametrize("seeds", [(1, 1), (2, 2), (5, 1), (2, 5, 5)])
def test_too_few_seeds_for_an_interval(seeds: tuple[int, ...]) -> None:
    got = aggregate(tasks(seeds))
    assert got is not None
    assert (got.difference.low, got.difference.high) == (None, None) and got.pairs == sum(seeds)
    assert (got.probability.low, got.probability.high) == (None, None)


def test_one_task_is_no_aggregate() -> None:
    assert aggregate([]) is None
    assert aggregate(tasks((5,))) is None
    assert aggregate([*tasks((5,)), ([], [])]) is None
    with_empty = aggregate([*tasks((5, 3)), ([], [])])
    assert isinstance(with_empty, TaskAggregate)
    assert with_empty == aggregate(tasks((5, 3)))


@pytest.mark.parametrize("task", [([0.1], [0.1, 0.2]), ([0.1], [math.nan]), ([math.inf], [0.1])])
def test_scores_that_are_not_pairs(task: TASK) -> None:
    with pytest.raises(ValueError, match=r"as many scores|finite"):
        aggregate([*tasks((3, 3)), task])


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(0, 1), min_size=6, max_size=6), min_size=2, max_size=4))
def test_exchanging_the_arms_mirrors_the_aggregate(scores: list[list[float]]) -> None:
    given_tasks = [(row[:3], row[3:]) for row in scores]
    one = aggregate(given_tasks, resamples=50)
    other = aggregate([(spt, scratch) for scratch, spt in given_tasks], resamples=50)
    assert one is not None and other is not None
    assert one.scratch == other.spt
    assert other.probability.value == pytest.approx(1 - one.probability.value)
    assert one.difference.low is not None and other.difference.high is not None
    assert other.difference.high == pytest.approx(-one.difference.low, abs=1e-12)


def test_import_is_light() -> None:
    code = (
        "import sys, spt.report.across_tasks, spt.report.per_example;"
        "print(*(sys.modules.keys() & {'scipy.stats', 'pandas', 'pyarrow', 'torch'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
