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
    FEW,
    ErrorAnalysis,
    EvaluationRows,
    RunAnswers,
    analyse_errors,
    as_picture,
    confusion,
    groups,
    hardest_rows,
    readable,
    to_json,
    wilson,
)
from spt.config.job import Job
from spt.tasks import images, listops, segmentation, subtrees
from spt.tasks.base import Classes, Reals, Split, Tokens, Values
from spt.tasks.generators.listops import DRAWN, OPERATORS, tokenize, tokens
from tests import tiny

DLR = {"name": "dlr", "d_model": 8, "n_layers": 1, "causal": True, "d_state": 4}
STEPS = {"steps": 2, "batch_size": 4, "learning_rate": 0.01, "evaluate_every": 2}


# ------------------------------------------------------------------------------------------------ hand-made answers


def rows_of(lengths: list[int], targets: Any, **options: Any) -> Split:
    return Split.from_rows([np.arange(n, dtype=np.uint8) for n in lengths], targets, **options)


def asked_classes(truth: list[int], count: int = 3, lengths: list[int] | None = None, **fields: Any) -> EvaluationRows:
    labels = np.array(truth)
    rows = rows_of(lengths or [4] * len(labels), labels, ids=[f"r{i}" for i in range(len(labels))])
    return EvaluationRows(
        "toy", "test", Tokens(9), Classes(count), rows, np.arange(len(labels), dtype=np.int32), None, labels, **fields
    )


def told(said: list[int], margin: list[float] | None = None, label: str = "scratch") -> RunAnswers:
    return RunAnswers(label, f"finetune-{label}", np.array(said), None if margin is None else np.array(margin))


def table(found: ErrorAnalysis, name: str) -> list[dict[str, Any]]:
    (one,) = [table for table in found.tables if table.name == name]
    return [dict(line) for line in one.lines]


def names(found: ErrorAnalysis) -> list[str]:
    return [table.name for table in found.tables]


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)


@settings(max_examples=30)
@given(PAIRS)
def test_class_scores_against_counting(pairs: list[tuple[int, int]]) -> None:
    truth, said = map(list, zip(*pairs, strict=True))
    found = analyse_errors(asked_classes(truth, 4), [told(said)])
    for k, line in enumerate(table(found, "classes")):
        hits = sum(t == s == k for t, s in pairs)
        true, answered = truth.count(k), said.count(k)
        assert line["support"] == true
        assert line["recall"] == (hits / true if true else None)
        assert line["precision"] == (hits / answered if answered else None)
        assert line["F1"] == (2 * hits / (true + answered) if true + answered else None)
    assert confusion(truth, said, 4).sum() == len(pairs)
    for t in range(4):
        assert table(found, "confusion")[t] == {"truth": str(t)} | {f"as {s}": pairs.count((t, s)) for s in range(4)}
    wrong = [pair for pair in pairs if pair[0] != pair[1]]
    if not wrong:
        assert found.sentence == f"All of {len(pairs)} test rows right."
        assert "confusions" not in names(found)
        return
    most = max(wrong.count(pair) for pair in wrong)
    first = table(found, "confusions")[0]
    assert (first["count"], first["of"]) == (most, truth.count(int(first["truth"])))
    assert first["share"] == first["count"] / first["of"]
    assert sum(line["count"] for line in table(found, "confusions")) <= len(wrong)


def test_the_first_sentence() -> None:
    found = analyse_errors(asked_classes([0, 0, 0, 1, 2]), [told([0, 1, 1, 1, 0])])
    assert found.sentence == "40.0 % of 5 test rows right; the commonest confusion is 0 taken for 1, 2 of 3."


def test_one_class_and_answers_that_are_no_class() -> None:
    found = analyse_errors(
        asked_classes([1, 1], 3), [told([1, 4])]
    )  # a head may have more outputs than there are classes
    lines = table(found, "classes")
    assert [line["recall"] for line in lines] == [None, 0.5, None, None, None]
    assert [line["precision"] for line in lines] == [None, 1.0, None, None, 0.0]
    assert "- where" in next(one.caption for one in found.tables if one.name == "classes")
    json.dumps(to_json(found), allow_nan=False)
    assert error_figures(found)


def test_names_and_many_classes() -> None:
    found = analyse_errors(asked_classes([0, 1, 2], names=("ant", "bee", "cow")), [told([0, 2, 2])])
    assert table(found, "confusions")[0]["truth"] == "bee"
    many = analyse_errors(asked_classes([0, 400, 400, 299], 500), [told([0, 7, 7, 299])])
    assert many.matrix is None
    assert names(many)[:1] == ["confusions"]
    assert "400 taken for 7, 2 of 2" in many.sentence
    assert error_figures(many)[0].title == "Largest confusions"


@settings(max_examples=20)
@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_as_in_scipy(counts: tuple[int, int]) -> None:
    right, n = counts
    expected = binomtest(right, n).proportion_ci(0.95, method="wilson")
    assert wilson(right, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


@settings(max_examples=30)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=80))
def test_bins_hold_what_they_say(values: list[int]) -> None:
    labels, of = groups(np.array(values))
    distinct = len(set(values))
    assert len(labels) == (distinct if distinct <= FEW else len(labels)) <= FEW
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
    truth, said = chance.integers(0, 3, 90), chance.integers(0, 3, 90)
    kind, depth = np.array([b"a", b"b"])[chance.integers(0, 2, 90)], chance.integers(1, 5, 90)
    asked = asked_classes(truth.tolist(), attributes={"depth": depth, "kind": kind}, lengths=(3 + depth).tolist())
    found = analyse_errors(asked, [told(said.tolist())])
    right = truth == said
    for line in table(found, "by-depth"):
        inside = depth == int(line["depth"])
        assert (line["n"], line["accuracy"]) == (inside.sum(), right[inside].mean())
        assert line["low"] <= line["accuracy"] <= line["high"]
    assert [line["accuracy"] for line in table(found, "by-length")] == [
        line["accuracy"] for line in table(found, "by-depth")
    ]
    crossed = table(found, "by-depth-and-kind")
    assert sum(line["n"] for line in crossed) == 90
    for line in crossed:
        inside = (depth == int(line["depth"])) & (kind == line["kind"].encode())
        assert (line["n"], line["accuracy"]) == (inside.sum(), right[inside].mean())


def test_the_surest_mistake_comes_first() -> None:
    asked = asked_classes([0, 1, 2, 0])
    one = told([1, 1, 0, 2], [0.1, 9.0, 3.0, 0.7])
    assert hardest_rows(asked, one).tolist() == [2, 3, 0]
    lines = table(analyse_errors(asked, [one], 2), "hardest")
    assert [line["id"] for line in lines] == ["r2", "r3"]
    assert (lines[0]["label"], lines[0]["answer"], lines[0]["margin"]) == ("2", "0", 3.0)
    assert lines[0]["row"] == "0 1 2 3"
    without = analyse_errors(asked, [one], samples=False)
    assert "row" not in table(without, "hardest")[0]
    assert to_json(analyse_errors(asked, [one]))["samples"]
    assert not to_json(without)["samples"]


def test_margins_that_are_no_numbers_come_last() -> None:
    one = told([1, 1, 0], [np.nan, 0.1, np.nan])
    found = analyse_errors(asked_classes([0, 0, 1]), [one])
    assert [(line["id"], line["margin"]) for line in table(found, "hardest")] == [
        ("r1", 0.1),
        ("r0", None),
        ("r2", None),
    ]
    json.dumps(to_json(found), allow_nan=False)
    assert predictions._ambiguity_note(one) == ["2 of 3 answers of finetune-scratch have no finite margin"]
    assert predictions._ambiguity_note(told([1], [0.0])) == predictions._ambiguity_note(told([1])) == []


def test_two_runs_side_by_side() -> None:
    asked = asked_classes([0, 0, 1, 1, 2])
    runs = [told([0, 1, 1, 0, 1], label="scratch"), told([0, 0, 0, 0, 2], label="SPT")]
    found = analyse_errors(asked, runs)
    assert found.sentence == "scratch 40.0 %, SPT 60.0 % of 5 test rows right; 1 in scratch alone, 2 in SPT alone."
    assert [line["n"] for line in table(found, "between")] == [1, 1, 2, 1]
    assert [(line["id"], line["right"]) for line in table(found, "only")] == [
        ("r1", "SPT"),
        ("r2", "scratch"),
        ("r4", "SPT"),
    ]
    first = table(found, "confusions")[0]
    assert (first["truth"], first["answer"], first["count scratch"], first["count SPT"]) == ("1", "0", 1, 2)


def asked_numbers(truth: Any) -> EvaluationRows:
    numbers = np.asarray(truth, np.float32)
    n = len(numbers)
    rows = rows_of([4] * n, numbers)
    return EvaluationRows(
        "toy", "test", Tokens(9), Reals(numbers.shape[1]), rows, np.arange(n, dtype=np.int32), None, numbers
    )


def test_numbers_against_formulas() -> None:
    chance = np.random.default_rng(4)
    truth = chance.normal(size=(50, 2)).astype(np.float32)
    truth[:, 1] = 3.0
    said = (truth + chance.normal(0.2, 0.5, (50, 2))).astype(np.float32)
    asked = asked_numbers(truth)
    found = analyse_errors(asked, [RunAnswers("scratch", "r", said)], 3)
    first, second = table(found, "outputs")
    error = said[:, 0].astype(float) - truth[:, 0]
    assert first["bias"] == pytest.approx(error.mean())
    assert first["RMSE"] == pytest.approx((error**2).mean() ** 0.5)
    assert first["MAE"] == pytest.approx(np.abs(error).mean())
    assert first["R²"] == pytest.approx(1 - (error**2).mean() / truth[:, 0].astype(float).var())
    assert second["R²"] is None
    squared = np.square(said.astype(float) - truth).mean(1)
    assert [line["id"] for line in table(found, "hardest")] == [str(i) for i in np.argsort(-squared)[:3]]
    other = RunAnswers("SPT", "s", truth)
    between = table(analyse_errors(asked, [RunAnswers("scratch", "r", said), other]), "between")
    assert [line["n"] for line in between] == [0, 50, 0]


def test_steps_are_grouped_by_position() -> None:
    truth = np.array([0, 1, 1, 0, 1])  # rows of 3 and 4 steps, of which 2 and 3 are scored
    row, step = np.array([0, 0, 1, 1, 1], np.int32), np.array([0, 2, 0, 2, 3], np.int32)
    rows = rows_of([3, 4], [np.zeros(3, np.int8), np.zeros(4, np.int8)], per_step=True)
    asked = EvaluationRows("toy", "test", Tokens(9), Classes(2, per_step=True), rows, row, step, truth)
    found = analyse_errors(asked, [told([0, 0, 0, 1, 1])])
    assert found.sentence.startswith("40.0 % of 5 scored steps in 2 test rows right;")
    assert [(line["position"], line["n"], line["accuracy"]) for line in table(found, "by-position")] == [
        ("0", 2, 0.5),
        ("2", 2, 0.0),
        ("3", 1, 1.0),
    ]
    assert [(line["id"], line["steps"], line["wrong"]) for line in table(found, "hardest")] == [
        ("1", 3, 2),
        ("0", 2, 1),
    ]


def test_pixels_have_their_intersection_over_union() -> None:
    """Two pictures of 2 x 2; of the union's pixels, how many both have."""
    truth, said = [0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0, 0, 0]
    rows = np.repeat(np.arange(2, dtype=np.int32), 4)
    asked = asked_classes(truth, 2, [4, 4], row_width=2)
    asked = replace(asked, rows=rows_of([4, 4], [0, 0]), row=rows, step=np.tile(np.arange(4, dtype=np.int32), 2))
    assert [line["IoU"] for line in table(analyse_errors(asked, [told(said)]), "classes")] == [3 / 5, 3 / 5]


def test_pictures() -> None:
    pixels = np.arange(24, dtype=np.uint8)
    grey = Split.from_rows(pixels.reshape(1, 24, 1), [0])
    asked = asked_classes([0])
    asked = replace(asked, rows=grey, input=Values(1, levels=24), row_width=4)
    assert np.allclose(np.asarray(as_picture(asked, 0)), pixels.reshape(6, 4) / 23)
    tokens = replace(asked, rows=Split.from_rows(pixels.reshape(1, 24), [0]), input=Tokens(24))
    assert np.allclose(np.asarray(as_picture(tokens, 0)), pixels.reshape(6, 4) / 23)
    coloured = replace(asked, rows=Split.from_rows(pixels.reshape(1, 8, 3), [0]), input=Values(3, levels=24))
    assert np.allclose(np.asarray(as_picture(coloured, 0)), pixels.reshape(2, 4, 3) / 23)
    film = replace(
        asked, rows=Split.from_rows(pixels.reshape(1, 2, 12), [0]), input=Values(12, levels=24, frame=(3, 4))
    )
    side_by_side = np.concatenate([pixels[:12].reshape(3, 4), pixels[12:].reshape(3, 4)], 1)
    assert np.allclose(np.asarray(as_picture(film, 0)), side_by_side / 23)
    assert as_picture(replace(asked, row_width=None), 0) is None
    assert as_picture(replace(asked, row_width=7), 0) is None
    mixed = images.Config(dataset="mnist", permuted=True)
    flat = np.arange(28 * 28, dtype=np.uint16)
    placed = images.picture(mixed, flat[images.bit_reversal(28 * 28)])
    assert np.array_equal(placed, flat.reshape(28, 28))


def test_a_row_as_text_is_cut_and_cannot_command_a_terminal() -> None:
    asked = asked_classes([0], lengths=[200])
    shown = readable(asked, 0, 40)
    assert (shown[:8], shown[-4:], len(shown) <= 41) == ("0 1 2 3 ", " 199", True)
    escape = replace(asked, readable=lambda row: "a\x1b[31mb\nc")
    assert readable(escape, 0) == "a�[31mb c"


def test_pairs_are_told_apart() -> None:
    rows = Split.from_pairs([(np.arange(3, dtype=np.uint8), np.arange(100, dtype=np.uint8))], [1])
    shown = readable(replace(asked_classes([1]), rows=rows), 0, 60)
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
    table = tokens(subtrees.SPECIALS, OPERATORS[:DRAWN])
    rows = Split.from_rows([table[row] for row in made.rows()], [table[row] for row in made.rows()], per_step=True)
    config = subtrees.Config()
    found = subtrees.breakdown(config, rows)
    closing = np.flatnonzero(made.codes == 10)
    kinds = [word.decode() for word in found["operator"][closing].tolist()]
    columns = [found[name][closing].tolist() for name in ("height", "arguments", "subtree tokens")]
    assert list(zip(columns[0], kinds, *columns[1:], strict=True)) == [one for tree in trees for one in closings(tree)]
    assert [subtrees.readable(config, rows.row(i)) for i in range(len(trees))] == [written(tree) for tree in trees]


@settings(max_examples=20)
@given(st.lists(TREES, min_size=1, max_size=3))
def test_listops_against_recursion(trees: list[Any]) -> None:
    config = listops.Config(source="generated")
    made = tokenize([written(tree).encode() for tree in trees])
    part = listops.Expressions(made, np.zeros(len(made.codes), np.int8), np.arange(len(trees)))
    rows = listops._split(part, listops._table(config), config)
    found = listops.breakdown(config, rows)
    assert found["depth"].tolist() == [height(tree) for tree in trees]
    assert [word.decode() for word in found["operator"].tolist()] == [tree[0] for tree in trees]
    assert found["length"].tolist() == [len(written(tree).split()) for tree in trees]
    assert listops.readable(config, rows.row(0)) == written(trees[0])


@pytest.mark.parametrize("convention", ["s4", "lra"])
def test_listops_rows_that_were_cut(convention: str) -> None:
    config = listops.Config(source="generated", convention=convention, max_length=5)
    made = tokenize([b"[MAX 1 [MIN 2 [SM 3 4 ] ] ]", b"7"])
    part = listops.Expressions(made, np.zeros(len(made.codes), np.int8), np.arange(2))
    rows = listops._split(part, listops._table(config), config)
    found = listops.breakdown(config, rows)
    kept = 4 if convention == "s4" else 5
    assert found["length"].tolist() == [kept, 1]
    assert found["depth"].tolist() == [2 if kept == 4 else 3, 0]
    assert found["operator"].tolist() == [b"MAX", b"digit"]


def test_subtrees_as_the_official_code_has_them(data_dir: Path) -> None:
    import pyarrow.parquet as pq

    path = data_dir / "listops" / "subtrees_official_code_2k.parquet"
    with pq.ParquetFile(path) as file:
        told = next(file.iter_batches(batch_size=8)).to_pylist()
    made = tokenize([row["source"].encode() for row in told])
    table = tokens(subtrees.SPECIALS, OPERATORS[:DRAWN])
    rows = Split(table[made.codes], made.starts, made.stops, made.codes, np.arange(len(told)), per_step=True)
    found = subtrees.breakdown(subtrees.Config(), rows)
    for i, row in enumerate(told):
        here = slice(made.starts[i], made.stops[i])
        closing = np.flatnonzero(made.codes[here] == 10)
        assert [str(n) for n in found["height"][here][closing]] == list(map(str, row["subtree_heights"]))
        kinds = [f"[{word.decode()}" for word in found["operator"][here][closing].tolist()]
        assert kinds == list(map(str, row["subtree_ops"]))


def test_segmentation_pixels() -> None:
    pixels = np.zeros((2, 4, 1), np.uint8)
    pixels[:, 1] = 200
    classes = np.array([[0, 1, 0, 0], [0, 2, 0, 0]])
    rows = Split.from_rows(pixels, classes, per_step=True)
    found = segmentation.breakdown(segmentation.Config(), rows)
    assert found["brightness"].tolist() == [0, 200, 0, 0] * 2
    assert found["picture"].tolist() == [b"none joined"] * 4 + [b"two discs joined"] * 4


# ----------------------------------------------------------------------------------------------------- the command


def errors(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(spt_cli.app, ["inspect", "errors", *map(str, arguments), "--cpu"])
    return done.exit_code, done.stdout, done.stderr


def told_json(*arguments: str | Path) -> dict[str, Any]:
    code, out, error = errors(*arguments, "--json")
    assert code == 0, error
    found: dict[str, Any] = json.loads(out)
    return found


def made(folder: Path, spt: bool = False, own: bool = False, **changes: Any) -> Path:
    """A finished run's folder."""
    fields = {"finetune__train": STEPS, "pretrain__train": dict(STEPS), **changes}
    one = tiny.own_task(folder, **fields) if own else tiny.loaded(folder, **fields)
    job = tiny.spt_job(one) if spt else Job(one, "finetune", 0)
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
    found = told_json(run, "--out", tmp_path / "a", "--top", "3")
    assert found["runs"][0]["accuracy"] == pytest.approx(result["test"]["accuracy"])
    assert found["rows"] == found["items"] == 24
    assert len(found["tables"]["hardest"]["lines"]) == 3
    written = {path.name for path in (tmp_path / "a").iterdir()}
    assert written == set(found["files"])
    assert {"errors.json", "confusion.csv", "figure-confusion.svg", "figure-hardest.png"} <= written
    assert json.loads((tmp_path / "a" / "errors.json").read_text())["sentence"] == found["sentence"]
    assert not (run / "errors").exists()
    code, out, error = errors(run, "--out", tmp_path / "a", "--no-samples")
    assert (code, "licence" in error) == (0, False)
    assert out.replace("\n", "").startswith(found["sentence"].partition(";")[0])
    assert not any("hardest.png" in path.name for path in (tmp_path / "a").iterdir()), "of the call before"


@pytest.mark.usefixtures("undrawn")
def test_validation_rows_are_answered_anew(digits: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = digits
    result = json.loads((run / "result.json").read_text())
    found = told_json(run, "--split", "val", "--out", tmp_path)
    assert found["runs"][0]["accuracy"] == pytest.approx(result["val"]["accuracy"])


@pytest.mark.usefixtures("undrawn")
def test_two_arms(digits: tuple[Path, Path], tmp_path: Path) -> None:
    found = told_json(*digits, "--out", tmp_path)
    assert [one["label"] for one in found["runs"]] == ["scratch", "SPT"]
    assert sum(line["n"] for line in found["tables"]["between"]["lines"]) == 24


@pytest.mark.usefixtures("undrawn")
def test_predictions_of_no_use(digits: tuple[Path, Path], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = Path(shutil.copytree(digits[0], tmp_path / digits[0].name))
    path = run / "predictions.parquet"
    whole, kept = told_json(run, "--out", tmp_path / "a"), pq.ParquetFile(path).read()
    assert not any("answered anew" in note for note in whole["notes"])
    others = kept.set_column(0, "id", pa.array(range(kept.num_rows)))
    for harm in (
        path.unlink,
        lambda: path.write_bytes(b"PAR1 and no more"),
        lambda: pq.write_table(others, path),
        lambda: pq.write_table(kept.set_column(1, "label", kept["prediction"]), path),
    ):
        harm()
        found = told_json(run, "--out", tmp_path / "a")
        assert any("answered anew" in note for note in found["notes"])
        assert found["tables"]["confusion"] == whole["tables"]["confusion"]
        margins = [[line["margin"] for line in each["tables"]["hardest"]["lines"]] for each in (whole, found)]
        assert margins[1] == pytest.approx(margins[0], abs=1e-4)


@pytest.mark.usefixtures("undrawn")
def test_what_is_refused(digits: tuple[Path, Path], own: Path, tmp_path: Path) -> None:
    scratch, _ = digits
    pretraining = next(scratch.parent.glob("pretrain-*"))
    for arguments, code, said in (
        ([tmp_path / "nothing"], 2, "no run folder"),
        ([tmp_path], 6, "not finished"),
        ([pretraining], 6, "is a pretraining run"),
        ([scratch, pretraining], 6, "is a pretraining run"),
        ([scratch, scratch], 2, "named twice"),
        ([scratch, own], 2, "different test rows or targets"),
    ):
        found, _, error = errors(*arguments, "--out", tmp_path / "out")
        assert (found, said in error, error.count("\n")) == (code, True, 1), error
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("undrawn")
def test_two_seeds_of_one_arm(digits: tuple[Path, Path], tmp_path: Path) -> None:
    one = tiny.loaded(tmp_path, finetune__train=STEPS, pretrain__train=dict(STEPS))
    job = Job(one, "finetune", 1)
    tiny.run(job, tmp_path / "runs")
    found = told_json(digits[0], tmp_path / "runs" / job.name, "--out", tmp_path / "a")
    assert [one["label"] for one in found["runs"]] == ["seed 0", "seed 1"]


def test_numbers_of_an_own_task(own: Path, tmp_path: Path) -> None:
    result = json.loads((own / "result.json").read_text())
    found = told_json(own, "--out", tmp_path)
    outputs = found["tables"]["outputs"]["lines"]
    assert np.mean([line["RMSE"] ** 2 for line in outputs]) == pytest.approx(result["test"]["mse"], rel=1e-5)
    assert np.mean([line["R²"] for line in outputs]) == pytest.approx(result["test"]["r2"], rel=1e-4, abs=1e-4)
    assert "figure-predicted.png" in found["files"]
    assert sum(line["n"] for line in found["tables"]["by-length"]["lines"]) == 19


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
    found = told_json(run, "--out", tmp_path / "a")
    assert [line["odd"] for line in found["tables"]["by-odd"]["lines"]] == ["0", "1"]
    assert [line["class"] for line in found["tables"]["classes"]["lines"]] == ["small", "large"]
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
    found = told_json(run, "--out", tmp_path / "a")
    kept = pq.ParquetFile(run / "predictions.parquet").read()
    steps, right = sum(kept["steps"].to_pylist()), sum(kept["right"].to_pylist())
    assert found["items"] == steps
    assert found["runs"][0]["accuracy"] == pytest.approx(right / steps)
    wrong = {line["id"]: line["steps"] - line["wrong"] for line in found["tables"]["hardest"]["lines"]}
    assert wrong == {
        name: right
        for name, right in zip(kept["id"].to_pylist(), kept["right"].to_pylist(), strict=True)
        if name in wrong
    }
    for name in ("by-height", "by-operator", "by-arguments", "by-subtree-tokens", "by-height-and-operator"):
        assert sum(line["n"] for line in found["tables"][name]["lines"]) == steps
    assert "figure-by-height-and-operator.svg" in found["files"]
    assert found["tables"]["hardest"]["lines"][0]["row"].startswith("[")


def test_segmentation_run(tmp_path: Path) -> None:
    task = {"name": "segmentation", "train": 4, "val": 1, "test": 3, "distractors": 2}
    train = {**STEPS, "batch_size": 1, "steps": 1, "evaluate_every": 1}
    run = made(tmp_path, task=task, model=DLR, finetune__train=train, pretrain__train=dict(train))
    found = told_json(run, "--out", tmp_path / "a")
    assert found["items"] == 3 * 128**2
    classes = found["tables"]["classes"]["lines"]
    assert [line["class"] for line in classes] == ["elsewhere", "long path", "path with both discs"]
    result = json.loads((run / "result.json").read_text())
    assert found["runs"][0]["accuracy"] == pytest.approx(result["test"]["accuracy"])
    assert np.mean([line["recall"] for line in classes if line["support"]]) == pytest.approx(
        result["test"]["accuracy_macro"]
    )
    assert {"IoU"} <= classes[0].keys()
    assert "figure-rows.png" in found["files"]


@pytest.mark.usefixtures("undrawn")
def test_skills_run(tmp_path: Path) -> None:
    task = {"name": "skills", "skill": "cumsum", "length": 16, "rows": 8, "held": 4}
    run = made(tmp_path, task=task, model=DLR)
    result = json.loads((run / "result.json").read_text())
    found = told_json(run, "--out", tmp_path / "a")
    by = found["tables"]["by-position"]["lines"]
    assert sum(line["n"] * line["RMSE"] ** 2 for line in by) / 64 == pytest.approx(result["test"]["mse"], rel=1e-5)
    assert "figure-rows.png" in found["files"]
