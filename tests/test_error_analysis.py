"""spt errors: tables against brute force, breakdowns against naive recursion, and the command end to end."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from typer.testing import CliRunner

import spt_cli
from spt.analysis import predictions
from spt.analysis.error_figures import error_figures
from spt.analysis.errors import (
    MAX_LEVELS,
    ErrorAnalysis,
    Evaluation,
    RunPredictions,
    analyse_errors,
    as_picture,
    groups,
    hardest_rows,
    readable,
    to_json,
)
from spt.config.job import Job
from spt.tasks import images, listops, segmentation, subtrees
from spt.tasks.base import Classes, Reals, Split, Tokens, Values
from spt.tasks.generators.listops import tokenize
from tests import tiny

DLR = {"name": "dlr", "d_model": 8, "n_layers": 1, "causal": True, "d_state": 4}
STEPS = {"steps": 2, "batch_size": 4, "learning_rate": 0.01, "evaluate_every": 2}


# ------------------------------------------------------------------------------------------------ hand-made answers


def rows_of(lengths: list[int], targets: Any, **options: Any) -> Split:
    return Split.from_rows([np.arange(n, dtype=np.uint8) for n in lengths], targets, **options)


def class_evaluation(truth: list[int], count: int = 3, lengths: list[int] | None = None, **fields: Any) -> Evaluation:
    labels = np.array(truth)
    rows = rows_of(lengths or [4] * len(labels), labels, ids=[f"r{i}" for i in range(len(labels))])
    return Evaluation(
        "toy", "test", Tokens(9), Classes(count), rows, np.arange(len(labels), dtype=np.int32), None, labels, **fields
    )


def run_predictions(predicted: list[int], margin: list[float] | None = None, label: str = "scratch") -> RunPredictions:
    return RunPredictions(label, f"finetune-{label}", np.array(predicted), None if margin is None else np.array(margin))


def table(analysis: ErrorAnalysis, name: str) -> list[dict[str, Any]]:
    (lines,) = [table.lines for table in analysis.tables if table.name == name]
    return list(lines)


def names(analysis: ErrorAnalysis) -> list[str]:
    return [table.name for table in analysis.tables]


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)


@settings(max_examples=30)
@given(PAIRS)
def test_class_scores_against_counting(pairs: list[tuple[int, int]]) -> None:
    truth, predicted = map(list, zip(*pairs, strict=True))
    analysis = analyse_errors(class_evaluation(truth, 4), [run_predictions(predicted)])
    for k, line in enumerate(table(analysis, "classes")):
        hits = sum(t == s == k for t, s in pairs)
        true, answered = truth.count(k), predicted.count(k)
        assert line["support"] == true
        assert line["recall"] == (hits / true if true else None)
        assert line["precision"] == (hits / answered if answered else None)
        assert line["F1"] == (2 * hits / (true + answered) if true + answered else None)
    assert analysis.matrix is not None and analysis.matrix.sum() == len(pairs)
    for t in range(4):
        assert table(analysis, "confusion")[t] == {"truth": str(t)} | {f"as {s}": pairs.count((t, s)) for s in range(4)}
    wrong = [pair for pair in pairs if pair[0] != pair[1]]
    if not wrong:
        assert analysis.sentence == f"All {len(pairs)} test rows correct."
        assert "confusions" not in names(analysis)
        return
    most = max(wrong.count(pair) for pair in wrong)
    first = table(analysis, "confusions")[0]
    assert (first["count"], first["of"]) == (most, truth.count(int(first["truth"])))
    assert first["share"] == first["count"] / first["of"]
    assert sum(line["count"] for line in table(analysis, "confusions")) <= len(wrong)


def test_the_first_sentence() -> None:
    analysis = analyse_errors(class_evaluation([0, 0, 0, 1, 2]), [run_predictions([0, 1, 1, 1, 0])])
    assert analysis.sentence == "40.0 % of 5 test rows correct; the most common confusion is 0 predicted as 1, 2 of 3."


def test_one_class_and_predictions_that_are_not_a_class() -> None:
    analysis = analyse_errors(
        class_evaluation([1, 1], 3), [run_predictions([1, 4])]
    )  # a head may have more outputs than there are classes
    lines = table(analysis, "classes")
    assert [line["recall"] for line in lines] == [None, 0.5, None, None, None]
    assert [line["precision"] for line in lines] == [None, 1.0, None, None, 0.0]
    assert "- if" in next(table.caption for table in analysis.tables if table.name == "classes")
    json.dumps(to_json(analysis), allow_nan=False)
    assert error_figures(analysis)


def test_names_and_many_classes() -> None:
    analysis = analyse_errors(class_evaluation([0, 1, 2], names=("ant", "bee", "cow")), [run_predictions([0, 2, 2])])
    assert table(analysis, "confusions")[0]["truth"] == "bee"
    many = analyse_errors(class_evaluation([0, 400, 400, 299], 500), [run_predictions([0, 7, 7, 299])])
    assert many.matrix is None
    assert names(many)[:1] == ["confusions"]
    assert "400 predicted as 7, 2 of 2" in many.sentence
    assert error_figures(many)[0].title == "Largest confusions"


@settings(max_examples=30)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=80))
def test_bins_hold_what_they_say(values: list[int]) -> None:
    labels, of = groups(np.array(values))
    distinct = len(set(values))
    assert len(labels) == (distinct if distinct <= MAX_LEVELS else len(labels)) <= MAX_LEVELS
    bounds = []
    for i, label in enumerate(labels):
        inside = [value for value, group in zip(values, of.tolist(), strict=True) if group == i]
        low, high = min(inside), max(inside)
        assert label == (str(low) if low == high else f"{low}–{high}")
        bounds.append((low, high))
    assert all(before[1] < after[0] for before, after in pairwise(bounds))


def test_words_are_groups() -> None:
    labels, of = groups(np.array([b"SM", b"MAX", b"SM"]))
    assert (labels, of.tolist()) == (["MAX", "SM"], [1, 0, 1])
    few, _ = groups(np.array([0.5, 0.5]))
    assert few == ["0.5 to 0.5"]


def test_groups_against_counting() -> None:
    chance = np.random.default_rng(3)
    truth, predicted = chance.integers(0, 3, 90), chance.integers(0, 3, 90)
    kind, depth = np.array([b"a", b"b"])[chance.integers(0, 2, 90)], chance.integers(1, 5, 90)
    evaluation = class_evaluation(
        truth.tolist(), attributes={"depth": depth, "kind": kind}, lengths=(3 + depth).tolist()
    )
    analysis = analyse_errors(evaluation, [run_predictions(predicted.tolist())])
    right = truth == predicted
    for line in table(analysis, "by-depth"):
        inside = depth == int(line["depth"])
        assert (line["n"], line["accuracy"]) == (inside.sum(), right[inside].mean())
        interval = binomtest(int(right[inside].sum()), int(inside.sum())).proportion_ci(0.95, method="wilson")
        assert (line["low"], line["high"]) == (interval.low, interval.high)
    assert [line["accuracy"] for line in table(analysis, "by-length")] == [
        line["accuracy"] for line in table(analysis, "by-depth")
    ]
    crossed = table(analysis, "by-depth-and-kind")
    assert sum(line["n"] for line in crossed) == 90
    for line in crossed:
        inside = (depth == int(line["depth"])) & (kind == line["kind"].encode())
        assert (line["n"], line["accuracy"]) == (inside.sum(), right[inside].mean())


def test_the_most_confident_error_comes_first() -> None:
    evaluation = class_evaluation([0, 1, 2, 0])
    run = run_predictions([1, 1, 0, 2], [0.1, 9.0, 3.0, 0.7])
    assert hardest_rows(evaluation, run).tolist() == [2, 3, 0]
    lines = table(analyse_errors(evaluation, [run], 2), "hardest")
    assert [line["id"] for line in lines] == ["r2", "r3"]
    assert (lines[0]["label"], lines[0]["answer"], lines[0]["margin"]) == ("2", "0", 3.0)
    assert lines[0]["row"] == "0 1 2 3"
    without = analyse_errors(evaluation, [run], samples=False)
    assert "row" not in table(without, "hardest")[0]
    assert to_json(analyse_errors(evaluation, [run]))["samples"]
    assert not to_json(without)["samples"]


def test_margins_that_are_not_finite_come_last() -> None:
    run = run_predictions([1, 1, 0], [np.nan, 0.1, np.nan])
    analysis = analyse_errors(class_evaluation([0, 0, 1]), [run])
    assert [(line["id"], line["margin"]) for line in table(analysis, "hardest")] == [
        ("r1", 0.1),
        ("r0", None),
        ("r2", None),
    ]
    json.dumps(to_json(analysis), allow_nan=False)
    assert predictions._margin_note(run) == ["2 of 3 predictions of finetune-scratch have no finite margin"]
    assert predictions._margin_note(run_predictions([1], [0.0])) == predictions._margin_note(run_predictions([1])) == []


def test_two_runs_side_by_side() -> None:
    evaluation = class_evaluation([0, 0, 1, 1, 2])
    runs = [run_predictions([0, 1, 1, 0, 1], label="scratch"), run_predictions([0, 0, 0, 0, 2], label="SPT")]
    analysis = analyse_errors(evaluation, runs)
    assert analysis.sentence == "scratch 40.0 %, SPT 60.0 % of 5 test rows correct; 1 by scratch alone, 2 by SPT alone."
    assert [line["n"] for line in table(analysis, "between")] == [1, 1, 2, 1]
    assert [(line["id"], line["right"]) for line in table(analysis, "only")] == [
        ("r1", "SPT"),
        ("r2", "scratch"),
        ("r4", "SPT"),
    ]
    first = table(analysis, "confusions")[0]
    assert (first["truth"], first["answer"], first["count scratch"], first["count SPT"]) == ("1", "0", 1, 2)


def number_evaluation(truth: Any) -> Evaluation:
    numbers = np.asarray(truth, np.float32)
    n = len(numbers)
    rows = rows_of([4] * n, numbers)
    return Evaluation(
        "toy", "test", Tokens(9), Reals(numbers.shape[1]), rows, np.arange(n, dtype=np.int32), None, numbers
    )


def test_numbers_against_formulas() -> None:
    chance = np.random.default_rng(4)
    truth = chance.normal(size=(50, 2)).astype(np.float32)
    truth[:, 1] = 3.0
    predicted = (truth + chance.normal(0.2, 0.5, (50, 2))).astype(np.float32)
    evaluation = number_evaluation(truth)
    analysis = analyse_errors(evaluation, [RunPredictions("scratch", "r", predicted)], 3)
    first, second = table(analysis, "outputs")
    error = predicted[:, 0].astype(float) - truth[:, 0]
    assert first["bias"] == pytest.approx(error.mean())
    assert first["RMSE"] == pytest.approx((error**2).mean() ** 0.5)
    assert first["MAE"] == pytest.approx(np.abs(error).mean())
    assert first["R²"] == pytest.approx(1 - (error**2).mean() / truth[:, 0].astype(float).var())
    assert second["R²"] is None
    squared = np.square(predicted.astype(float) - truth).mean(1)
    assert [line["id"] for line in table(analysis, "hardest")] == [str(i) for i in np.argsort(-squared)[:3]]
    other = RunPredictions("SPT", "s", truth)
    between = table(analyse_errors(evaluation, [RunPredictions("scratch", "r", predicted), other]), "between")
    assert [line["n"] for line in between] == [0, 50, 0]


def test_steps_are_grouped_by_position() -> None:
    truth = np.array([0, 1, 1, 0, 1])  # rows of 3 and 4 steps, of which 2 and 3 are scored
    row, step = np.array([0, 0, 1, 1, 1], np.int32), np.array([0, 2, 0, 2, 3], np.int32)
    rows = rows_of([3, 4], [np.zeros(3, np.int8), np.zeros(4, np.int8)], per_step=True)
    evaluation = Evaluation("toy", "test", Tokens(9), Classes(2, per_step=True), rows, row, step, truth)
    analysis = analyse_errors(evaluation, [run_predictions([0, 0, 0, 1, 1])])
    assert analysis.sentence.startswith("40.0 % of 5 scored steps in 2 test rows correct;")
    assert [(line["position"], line["n"], line["accuracy"]) for line in table(analysis, "by-position")] == [
        ("0", 2, 0.5),
        ("2", 2, 0.0),
        ("3", 1, 1.0),
    ]
    assert [(line["id"], line["steps"], line["wrong"]) for line in table(analysis, "hardest")] == [
        ("1", 3, 2),
        ("0", 2, 1),
    ]


def test_pixels_have_their_intersection_over_union() -> None:
    """Two pictures of 2 x 2; of the union's pixels, how many both have."""
    truth, predicted = [0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0]
    rows = np.repeat(np.arange(2, dtype=np.int32), 4)
    evaluation = class_evaluation(truth, 2, [4, 4], row_width=2)
    evaluation = replace(
        evaluation, rows=rows_of([4, 4], [0, 0]), row=rows, step=np.tile(np.arange(4, dtype=np.int32), 2)
    )
    assert [line["IoU"] for line in table(analyse_errors(evaluation, [run_predictions(predicted)]), "classes")] == [
        3 / 5,
        3 / 5,
    ]


def test_pictures() -> None:
    pixels = np.arange(24, dtype=np.uint8)
    grey = Split.from_rows(pixels.reshape(1, 24, 1), [0])
    evaluation = class_evaluation([0])
    evaluation = replace(evaluation, rows=grey, input=Values(1, levels=24), row_width=4)
    assert np.allclose(np.asarray(as_picture(evaluation, 0)), pixels.reshape(6, 4) / 23)
    tokens = replace(evaluation, rows=Split.from_rows(pixels.reshape(1, 24), [0]), input=Tokens(24))
    assert np.allclose(np.asarray(as_picture(tokens, 0)), pixels.reshape(6, 4) / 23)
    coloured = replace(evaluation, rows=Split.from_rows(pixels.reshape(1, 8, 3), [0]), input=Values(3, levels=24))
    assert np.allclose(np.asarray(as_picture(coloured, 0)), pixels.reshape(2, 4, 3) / 23)
    film = replace(
        evaluation, rows=Split.from_rows(pixels.reshape(1, 2, 12), [0]), input=Values(12, levels=24, frame=(3, 4))
    )
    side_by_side = np.concatenate([pixels[:12].reshape(3, 4), pixels[12:].reshape(3, 4)], 1)
    assert np.allclose(np.asarray(as_picture(film, 0)), side_by_side / 23)
    assert as_picture(replace(evaluation, row_width=None), 0) is None
    assert as_picture(replace(evaluation, row_width=7), 0) is None
    mixed = images.Config(dataset="mnist", permuted=True)
    flat = np.arange(28 * 28, dtype=np.uint16)
    placed = images.picture(mixed, flat[images.bit_reversal(28 * 28)])
    assert np.array_equal(placed, flat.reshape(28, 28))


def test_a_row_as_text_is_cut_and_cannot_command_a_terminal() -> None:
    evaluation = class_evaluation([0], lengths=[200])
    shown = readable(evaluation, 0, 40)
    assert (shown[:8], shown[-4:], len(shown) <= 41) == ("0 1 2 3 ", " 199", True)
    escape = replace(evaluation, readable=lambda row: "a\x1b[31mb\nc")
    assert readable(escape, 0) == "a�[31mb c"


def test_pairs_are_told_apart() -> None:
    rows = Split.from_pairs([(np.arange(3, dtype=np.uint8), np.arange(100, dtype=np.uint8))], [1])
    shown = readable(replace(class_evaluation([1]), rows=rows), 0, 60)
    assert shown.startswith("0 1 2 | 0 1 2 3")
    assert shown.endswith(" 99")


# --------------------------------------------------------------------------------------------------- breakdowns

TREES = st.recursive(
    st.integers(0, 9),
    lambda inner: st.tuples(st.sampled_from(["MIN", "MAX", "MED", "SM"]), st.lists(inner, min_size=1, max_size=4)),
    max_leaves=20,
).filter(lambda tree: isinstance(tree, tuple))


def closings(tree: Any) -> Iterator[tuple[int, str, int, int]]:
    """(height, operator, arguments, tokens) of every subtree, in the order of their closing brackets."""
    for argument in tree[1]:
        if isinstance(argument, tuple):
            yield from closings(argument)
    yield height(tree), tree[0], len(tree[1]), len(written(tree).split())


def height(tree: Any) -> int:
    return 1 + max(map(height, tree[1])) if isinstance(tree, tuple) else 0


def written(tree: Any) -> str:
    return f"[{tree[0]} {' '.join(map(written, tree[1]))} ]" if isinstance(tree, tuple) else str(tree)


@settings(max_examples=30)
@given(st.lists(TREES, min_size=1, max_size=3))
def test_subtrees_against_recursion(trees: list[Any]) -> None:
    made = tokenize([written(tree).encode() for tree in trees])
    table = subtrees.TABLE
    rows = Split.from_rows([table[row] for row in made.rows()], [table[row] for row in made.rows()], per_step=True)
    config = subtrees.Config()
    attributes = subtrees.breakdown(config, rows)
    closing = np.flatnonzero(made.codes == 10)
    kinds = [word.decode() for word in attributes["operator"][closing].tolist()]
    columns = [attributes[name][closing].tolist() for name in ("height", "arguments", "subtree tokens")]
    assert list(zip(columns[0], kinds, *columns[1:], strict=True)) == [one for tree in trees for one in closings(tree)]
    assert [subtrees.readable(config, rows.row(i)) for i in range(len(trees))] == [written(tree) for tree in trees]


@settings(max_examples=20)
@given(st.lists(TREES, min_size=1, max_size=3))
def test_listops_against_recursion(trees: list[Any]) -> None:
    config = listops.Config(source="generated")
    made = tokenize([written(tree).encode() for tree in trees])
    part = listops.Expressions(made, np.zeros(len(made.codes), np.int8), np.arange(len(trees)))
    rows = listops._split(part, listops._table(config), config)
    attributes = listops.breakdown(config, rows)
    assert attributes["depth"].tolist() == [height(tree) for tree in trees]
    assert [word.decode() for word in attributes["operator"].tolist()] == [tree[0] for tree in trees]
    assert attributes["length"].tolist() == [len(written(tree).split()) for tree in trees]
    assert listops.readable(config, rows.row(0)) == written(trees[0])


@pytest.mark.parametrize("convention", ["s4", "lra"])
def test_listops_rows_that_were_cut(convention: str) -> None:
    config = listops.Config(source="generated", convention=convention, max_length=5)
    made = tokenize([b"[MAX 1 [MIN 2 [SM 3 4 ] ] ]", b"7"])
    part = listops.Expressions(made, np.zeros(len(made.codes), np.int8), np.arange(2))
    rows = listops._split(part, listops._table(config), config)
    attributes = listops.breakdown(config, rows)
    kept = 4 if convention == "s4" else 5
    assert attributes["length"].tolist() == [kept, 1]
    assert attributes["depth"].tolist() == [2 if kept == 4 else 3, 0]
    assert attributes["operator"].tolist() == [b"MAX", b"digit"]


def test_subtrees_as_the_official_code_has_them(data_dir: Path) -> None:
    import pyarrow.parquet as pq

    path = data_dir / "listops" / "subtrees_official_code_2k.parquet"
    with pq.ParquetFile(path) as file:
        official = next(file.iter_batches(batch_size=8)).to_pylist()
    made = tokenize([row["source"].encode() for row in official])
    table = subtrees.TABLE
    rows = Split(table[made.codes], made.starts, made.stops, made.codes, np.arange(len(official)), per_step=True)
    attributes = subtrees.breakdown(subtrees.Config(), rows)
    for i, row in enumerate(official):
        here = slice(made.starts[i], made.stops[i])
        closing = np.flatnonzero(made.codes[here] == 10)
        assert [str(n) for n in attributes["height"][here][closing]] == list(map(str, row["subtree_heights"]))
        kinds = [f"[{word.decode()}" for word in attributes["operator"][here][closing].tolist()]
        assert kinds == list(map(str, row["subtree_ops"]))


def test_segmentation_pixels() -> None:
    pixels = np.zeros((2, 4, 1), np.uint8)
    pixels[:, 1] = 200
    classes = np.array([[0, 1, 0, 0], [0, 2, 0, 0]])
    rows = Split.from_rows(pixels, classes, per_step=True)
    attributes = segmentation.breakdown(segmentation.Config(), rows)
    assert attributes["brightness"].tolist() == [0, 200, 0, 0] * 2
    assert attributes["picture"].tolist() == [b"none joined"] * 4 + [b"two discs joined"] * 4


# ----------------------------------------------------------------------------------------------------- the command


def errors(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(spt_cli.app, ["inspect", "errors", *map(str, arguments), "--cpu"])
    return done.exit_code, done.stdout, done.stderr


def errors_json(*arguments: str | Path) -> dict[str, Any]:
    code, out, error = errors(*arguments, "--json")
    assert code == 0, error
    analysis: dict[str, Any] = json.loads(out)
    return analysis


def made(folder: Path, spt: bool = False, own: bool = False, **changes: Any) -> Path:
    """A finished run's folder."""
    fields = {"finetune__train": STEPS, "pretrain__train": dict(STEPS), **changes}
    recipe = tiny.own_task(folder, **fields) if own else tiny.loaded(folder, **fields)
    job = tiny.spt_job(recipe) if spt else Job(recipe, "finetune", 0)
    tiny.run(job, folder / "runs")
    return folder / "runs" / job.name


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are named, but drawn in other tests."""
    monkeypatch.setattr("spt.analysis.error_figures.save", lambda drawing, folder: [folder / f"{drawing.name}.png"])


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Scratch and SPT."""
    folder = tmp_path_factory.mktemp("digits")
    return made(folder), made(folder, spt=True)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("own"), own=True, task__kind="values", task__target="reals")


def test_digits(digits: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = digits
    result = json.loads((run / "result.json").read_text())
    analysis = errors_json(run, "--out", tmp_path / "a", "--top", "3")
    assert analysis["runs"][0]["accuracy"] == pytest.approx(result["test"]["accuracy"])
    assert analysis["rows"] == analysis["items"] == 24
    assert len(analysis["tables"]["hardest"]["lines"]) == 3
    written = {path.name for path in (tmp_path / "a").iterdir()}
    assert written == set(analysis["files"])
    assert {"errors.json", "confusion.csv", "figure-confusion.svg", "figure-hardest.png"} <= written
    assert json.loads((tmp_path / "a" / "errors.json").read_text())["sentence"] == analysis["sentence"]
    assert not (run / "errors").exists()
    code, out, error = errors(run, "--out", tmp_path / "a", "--no-samples")
    assert (code, "licence" in error) == (0, False)
    assert out.replace("\n", "").startswith(analysis["sentence"].partition(";")[0])
    assert not any("hardest.png" in path.name for path in (tmp_path / "a").iterdir()), "of the call before"


@pytest.mark.usefixtures("undrawn")
def test_validation_rows_are_predicted_by_the_network(digits: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = digits
    result = json.loads((run / "result.json").read_text())
    analysis = errors_json(run, "--split", "val", "--out", tmp_path)
    assert analysis["runs"][0]["accuracy"] == pytest.approx(result["val"]["accuracy"])


@pytest.mark.usefixtures("undrawn")
def test_two_arms(digits: tuple[Path, Path], tmp_path: Path) -> None:
    analysis = errors_json(*digits, "--out", tmp_path)
    assert [run["label"] for run in analysis["runs"]] == ["scratch", "SPT"]
    assert sum(line["n"] for line in analysis["tables"]["between"]["lines"]) == 24


@pytest.mark.usefixtures("undrawn")
def test_predictions_of_no_use(digits: tuple[Path, Path], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = Path(shutil.copytree(digits[0], tmp_path / digits[0].name))
    path = run / "predictions.parquet"
    whole, kept = errors_json(run, "--out", tmp_path / "a"), pq.ParquetFile(path).read()
    assert not any("computed them again" in note for note in whole["notes"])
    others = kept.set_column(0, "id", pa.array(range(kept.num_rows)))
    for harm in (
        path.unlink,
        lambda: path.write_bytes(b"PAR1 and no more"),
        lambda: pq.write_table(others, path),
        lambda: pq.write_table(kept.set_column(1, "label", kept["prediction"]), path),
    ):
        harm()
        analysis = errors_json(run, "--out", tmp_path / "a")
        assert any("computed them again" in note for note in analysis["notes"])
        assert analysis["tables"]["confusion"] == whole["tables"]["confusion"]
        margins = [[line["margin"] for line in each["tables"]["hardest"]["lines"]] for each in (whole, analysis)]
        assert margins[1] == pytest.approx(margins[0], abs=1e-4)


@pytest.mark.usefixtures("undrawn")
def test_what_is_refused(digits: tuple[Path, Path], own: Path, tmp_path: Path) -> None:
    scratch, _ = digits
    pretraining = next(scratch.parent.glob("pretrain-*"))
    for arguments, code, words in (
        ([tmp_path / "nothing"], 2, "no run folder"),
        ([tmp_path], 6, "not finished"),
        ([pretraining], 6, "is a pretraining run"),
        ([scratch, pretraining], 6, "is a pretraining run"),
        ([scratch, scratch], 2, "named twice"),
        ([scratch, own], 2, "different test rows or targets"),
    ):
        exit_code, _, error = errors(*arguments, "--out", tmp_path / "out")
        assert (exit_code, words in error, error.count("\n")) == (code, True, 1), error
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undrawn")
def test_two_seeds_of_one_arm(digits: tuple[Path, Path], tmp_path: Path) -> None:
    one = tiny.loaded(tmp_path, finetune__train=STEPS, pretrain__train=dict(STEPS))
    job = Job(one, "finetune", 1)
    tiny.run(job, tmp_path / "runs")
    analysis = errors_json(digits[0], tmp_path / "runs" / job.name, "--out", tmp_path / "a")
    assert [run["label"] for run in analysis["runs"]] == ["seed 0", "seed 1"]


@pytest.mark.slow
def test_numbers_of_an_own_task(own: Path, tmp_path: Path) -> None:
    result = json.loads((own / "result.json").read_text())
    analysis = errors_json(own, "--out", tmp_path)
    outputs = analysis["tables"]["outputs"]["lines"]
    assert np.mean([line["RMSE"] ** 2 for line in outputs]) == pytest.approx(result["test"]["mse"], rel=1e-5)
    assert np.mean([line["R²"] for line in outputs]) == pytest.approx(result["test"]["r2"], rel=1e-4, abs=1e-4)
    assert "figure-predicted.png" in analysis["files"]
    assert sum(line["n"] for line in analysis["tables"]["by-length"]["lines"]) == 19


BREAKDOWN = """

def breakdown(config, rows):
    return {"odd": rows.lengths % 2 if SHAPE else rows.lengths[:-1]}

def class_names(config):
    return "small", "large"
"""


@pytest.mark.usefixtures("undrawn")
def test_a_task_names_its_groups_and_data_must_be_those_of_the_run(tmp_path: Path) -> None:
    run = made(tmp_path, own=True)
    file = tmp_path / "toy.py"
    file.write_text(tiny.TASK + BREAKDOWN.replace("SHAPE", "True"))
    analysis = errors_json(run, "--out", tmp_path / "a")
    assert [line["odd"] for line in analysis["tables"]["by-odd"]["lines"]] == ["0", "1"]
    assert [line["class"] for line in analysis["tables"]["classes"]["lines"]] == ["small", "large"]
    file.write_text(tiny.TASK + BREAKDOWN.replace("SHAPE", "False"))
    code, _, error = errors(run, "--out", tmp_path / "a")
    assert (code, "breakdown: odd has the shape (18,)" in error) == (3, True), error
    file.write_text(tiny.TASK.replace("default_rng(config.shift)", "default_rng(config.shift + 1)"))
    code, _, error = errors(run, "--out", tmp_path / "a")
    assert (code, "not those that" in error) == (3, True), error


def test_subtrees_run(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    sizes = {"train_size": 8, "val_size": 4, "test_size": 12}
    law = {"min_tokens": 8, "max_tokens": 60, "max_depth": 4, "max_args": 3}
    run = made(tmp_path, task={"name": "subtrees", "source": "generated", **sizes, **law}, model=DLR)
    analysis = errors_json(run, "--out", tmp_path / "a")
    kept = pq.ParquetFile(run / "predictions.parquet").read()
    steps, right = sum(kept["steps"].to_pylist()), sum(kept["right"].to_pylist())
    assert analysis["items"] == steps
    assert analysis["runs"][0]["accuracy"] == pytest.approx(right / steps)
    wrong = {line["id"]: line["steps"] - line["wrong"] for line in analysis["tables"]["hardest"]["lines"]}
    assert wrong == {
        name: right
        for name, right in zip(kept["id"].to_pylist(), kept["right"].to_pylist(), strict=True)
        if name in wrong
    }
    for name in ("by-height", "by-operator", "by-arguments", "by-subtree-tokens", "by-height-and-operator"):
        assert sum(line["n"] for line in analysis["tables"][name]["lines"]) == steps
    assert "figure-by-height-and-operator.svg" in analysis["files"]
    assert analysis["tables"]["hardest"]["lines"][0]["row"].startswith("[")


@pytest.mark.slow
def test_segmentation_run(tmp_path: Path) -> None:
    task = {"name": "segmentation", "train_size": 4, "val_size": 1, "test_size": 3, "distractors": 2}
    train = {**STEPS, "batch_size": 1, "steps": 1, "evaluate_every": 1}
    run = made(tmp_path, task=task, model=DLR, finetune__train=train, pretrain__train=dict(train))
    analysis = errors_json(run, "--out", tmp_path / "a")
    assert analysis["items"] == 3 * 128**2
    classes = analysis["tables"]["classes"]["lines"]
    assert [line["class"] for line in classes] == ["elsewhere", "long path", "path with both discs"]
    result = json.loads((run / "result.json").read_text())
    assert analysis["runs"][0]["accuracy"] == pytest.approx(result["test"]["accuracy"])
    assert np.mean([line["recall"] for line in classes if line["support"]]) == pytest.approx(
        result["test"]["accuracy_macro"]
    )
    assert {"IoU"} <= classes[0].keys()
    assert "figure-rows.png" in analysis["files"]


@pytest.mark.usefixtures("undrawn")
def test_skills_run(tmp_path: Path) -> None:
    task = {"name": "skills", "skill": "cumsum", "length": 16, "train_size": 8, "eval_size": 4}
    run = made(tmp_path, task=task, model=DLR)
    result = json.loads((run / "result.json").read_text())
    analysis = errors_json(run, "--out", tmp_path / "a")
    by = analysis["tables"]["by-position"]["lines"]
    assert sum(line["n"] * line["RMSE"] ** 2 for line in by) / 64 == pytest.approx(result["test"]["mse"], rel=1e-5)
    assert "figure-rows.png" in analysis["files"]
