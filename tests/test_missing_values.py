"""Missing input values: how they are read, that no number stands for one anywhere, and the notes on them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_custom import npy, write
from tiny import loaded, run, spt_job

from spt.baselines import boosting, catch22, linear_probe, logistic
from spt.baselines.scores import ComparedMetric
from spt.config.job import without_paths
from spt.config.recipe import EncoderConfig, Part
from spt.data.batching import collate, shuffled
from spt.data.cache import from_spec
from spt.data.features import filled
from spt.data.fingerprints import fingerprints, with_fingerprints
from spt.data.linear_probe import linear_probe as probe
from spt.data.summary import render, summarise
from spt.errors import DataError, UsageError
from spt.inference.predict import Source, predict
from spt.inference.program import make_program
from spt.inference.trained_model import TrainedModel
from spt.models.base import Context
from spt.rng import Draw
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.tasks import custom
from spt.tasks.base import Classes, Split, TaskData, Values, describe
from spt.tasks.own import static
from spt.tasks.own.parsing import MissingValueError, NameEncoder, is_missing, parse_list, parse_lists, parse_numbers
from spt.training.losses import weighted_sum
from spt.training.metrics import metrics, sums
from spt.training.network import Encoder
from spt.training.objectives import OBJECTIVES, Masked, Next, Output
from spt.training.transfer import unlike

CPU = Runtime(Settings(quiet=True, cpu=True))
LONG = {"id_column": "p", "time_column": "t", "value_columns": ["v", "w"], "label_column": "y", "missing": "hidden"}
NAN = np.nan


def opened(path, **options):
    config = custom.Config.model_validate_json(json.dumps({"path": str(path), **options}))
    data = custom.load(config, Path("."))
    data.check()
    return data


def rows_of(data):
    """By id, as lists with None for what is missing."""
    return {
        str(name): [[None if np.isnan(v) else float(v) for v in step] for step in split.row(i)]
        for split in data.splits.values()
        for i, name in enumerate(split.ids)
    }


def steps(n=40, missing=0.3, length=5):
    """Rows of n sequences, a row a step; about so many cells are missing."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(n):
        for t in range(length + i % 3):
            v, w = (None if rng.random() < missing else round(float(rng.normal(i % 2, 1)), 3) for _ in range(2))
            rows.append({"p": f"p{i}", "t": t, "v": v, "w": w, "y": "ab"[i % 2]})
    return rows


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_every_format_of_the_long_layout_gives_the_same_gaps(tmp_path, ending):
    rows = steps()
    path = write(tmp_path / f"a.{ending}", rows)
    found = rows_of(opened(path, **LONG))
    for name in found:
        assert found[name] == [
            [pytest.approx(r[c]) if r[c] is not None else None for c in "vw"] for r in rows if r["p"] == name
        ]


@pytest.mark.parametrize("cell", ["", " ", "NaN", "nan", "NA", "n/a", "NULL", "none", "<NA>"])
def test_what_stands_in_a_cell_without_a_value(tmp_path, cell):
    rows = [{"a": cell if i % 3 == 0 else i, "b": i, "c": 2 * i, "y": i % 2} for i in range(30)]
    data = opened(write(tmp_path / "a.csv", rows), value_columns=["a", "b", "c"], label_column="y", missing="hidden")
    assert sum(np.isnan(split.values).sum() for split in data.splits.values()) == 10


@pytest.mark.parametrize(
    "cell",
    [[1, None, 3], "[1, null, 3]", "[1, NaN, 3]", "1 nan 3", "1 NA 3"],
)
def test_lists_with_gaps(tmp_path, cell):
    rows = [{"x": cell if i % 2 else [1, i, 3], "y": i % 2} for i in range(30)]
    data = opened(write(tmp_path / "a.jsonl", rows), list_column="x", label_column="y", missing="hidden")
    found = np.concatenate([split.values for split in data.splits.values()]).reshape(-1, 3)
    assert np.isnan(found).sum() == 15 and np.isnan(found[:, 1]).sum() == 15


def test_lists_of_channels_with_gaps(tmp_path):
    steps_of = [[1, 2], None, [None, 4]]
    rows = [{"x": steps_of if i % 2 else [[i, 0]] * 3, "y": i % 2} for i in range(30)]
    expected = {"x": [[1, 2], [None, None], [None, 4]]}["x"]
    for ending in ("jsonl", "parquet"):
        data = opened(write(tmp_path / f"a.{ending}", rows), list_column="x", label_column="y", missing="hidden")
        assert expected in rows_of(data).values(), ending
    rows = [{"a": None if i % 3 == 0 else [1, 2], "b": [i, None], "y": i % 2} for i in range(30)]
    for ending in ("jsonl", "parquet"):
        path = write(tmp_path / f"b.{ending}", rows)
        data = opened(path, list_columns=["a", "b"], label_column="y", missing="hidden")
        assert [[None, 0.0], [None, None]] in rows_of(data).values(), ending


def test_arrays_with_gaps(tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(30):
        (tmp_path / "in" / f"{i}.npy").write_bytes(npy(np.array([[1.0, i], [NAN, 2.0]])))
    rows = [{"f": f"{i}.npy", "y": i % 2} for i in range(30)]
    write(tmp_path / "in" / "labels.csv", rows)
    with pytest.raises(MissingValueError, match=r"step 2: nan is not a finite.*; missing: hidden shows"):
        opened(tmp_path / "in", file_column="f", label_column="y", split="stratified")
    data = opened(tmp_path / "in", file_column="f", label_column="y", split="stratified", missing="hidden")
    assert all(steps[1] == [None, 2.0] for steps in rows_of(data).values())


def test_mean_and_deviation_are_those_of_the_observed_training_cells(tmp_path):
    data = opened(write(tmp_path / "a.csv", steps()), **LONG)
    assert data.input.missing
    np.testing.assert_allclose(data.input.mean, np.nanmean(data.train.values.astype(float), axis=0))
    np.testing.assert_allclose(data.input.std, np.nanstd(data.train.values.astype(float), axis=0))
    whole = opened(write(tmp_path / "b.csv", steps(missing=0)), **LONG)
    plain = opened(tmp_path / "b.csv", **{**LONG, "missing": "refuse"})
    assert whole.input.mean == plain.input.mean and whole.input.std == plain.input.std
    assert "no value is missing" in whole.notes


def test_shares_are_told(tmp_path):
    path = write(tmp_path / "a.csv", [{**row, "w": row["w"] if row["p"] != "p3" else None} for row in steps()])
    (note,) = [note for note in opened(path, **LONG).notes if note.startswith("values are missing")]
    assert re.search(r"column v \d+\.\d+% of train, \d+\.\d+% of validation, \d+\.\d+% of test; column w", note)
    summary = summarise(Part(name="custom", path=str(path), **LONG))
    data = opened(path, **LONG)
    assert summary["missing"]["train"] == pytest.approx(np.isnan(data.train.values).mean(axis=0))
    assert "of each channel missing" in render(summary)
    assert all(np.isfinite(value) for value in summary["guesses"].values())
    assert all(np.isfinite(value) for split in summary["values"].values() for value in split.values())


BAD = {  # name -> (rows, options, words)
    "refused": (
        steps(),
        {"missing": "refuse"},
        r"line \d+, column v: the cell is empty; a number is expected; missing: hidden",
    ),
    "a text": ([*steps(), {"p": "z", "t": 0, "v": "?", "w": 1, "y": "a"}], {}, "column v: '\\?' is not a number"),
    "infinite": ([*steps(), {"p": "z", "t": 0, "v": "inf", "w": 1, "y": "a"}], {}, "'inf' is not a finite number"),
    "large": ([*steps(), {"p": "z", "t": 0, "v": 1e30, "w": 1, "y": "a"}], {}, "1e[+]?30.* is not a finite number"),
    "no value": (
        [{**row, "w": None} for row in steps()],
        {},
        "column w has no value in any training row; leave it out",
    ),
    "a time": ([*steps(), {"p": "z", "t": None, "v": 1, "w": 1, "y": "a"}], {}, "column t: the cell is empty"),
    "a label": ([*steps(), {"p": "z", "t": 0, "v": 1, "w": 1, "y": None}], {}, "column y: the cell is empty"),
    "an id": ([*steps(), {"p": None, "t": 0, "v": 1, "w": 1, "y": "a"}], {}, "column p: the cell is empty"),
    "tokens": (steps(), {"tokens": "ids", "value_columns": ["v"]}, "missing: hidden is for values and static features"),
    "a word": (steps(), {"missing": "impute"}, "missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_told_in_one_sentence(tmp_path, name):
    rows, options, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        opened(write(tmp_path / "a.csv", rows), **{**LONG, **options})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"x": [1, "n/a"]}, "line 7, column x, step 2: 'n/a' is not a number"),
        ({"x": [1, True, None]}, "line 7, column x, step 2: True is not a number"),
        ({"x": [None, [1, 2], [3]]}, "line 7, column x, step 3: a list of 1 stands here"),
        ({"x": None}, "line 7, column x: the cell is empty; leave the row out"),
        ({"x": []}, "line 7, column x: the sequence has no steps"),
        ({"x": [1, 1e40, None]}, r"step 2: 1e\+40 is not a finite number"),
    ],
)
def test_lists_that_are_wrong_are_told_though_values_may_be_missing(tmp_path, row, words):
    path = write(tmp_path / "a.jsonl", [*({"x": [i, None], "y": i % 2} for i in range(6)), {**row, "y": 1}])
    with pytest.raises(ValueError, match=words):
        opened(path, list_column="x", label_column="y", missing="hidden")


CELLS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["NaN", "1 nan 2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(cell=CELLS, cells=st.lists(CELLS, min_size=1, max_size=4))
def test_any_cell_is_numbers_with_gaps_or_one_sentence(cell, cells):
    for parse in (
        lambda: parse_list(cell, "line 1", True),
        lambda: parse_list(json.dumps(cell), "line 1", True),
        lambda: parse_lists(cells, "abcd"[: len(cells)], "line 1", True),
        lambda: parse_numbers(cells, lambda i: f"line {i}", is_missing),
        lambda: static.encode(NameEncoder(), cells, lambda i: f"line {i}", True).astype(float),
    ):
        try:
            found = parse()
        except ValueError as error:
            assert "line" in str(error) and "\n" not in str(error)
        else:
            assert found.dtype.kind in "iuf" and not np.isinf(found.astype(float)).any()


def test_weights_of_other_inputs_are_told_apart():
    plain, gappy = describe(Values(1)), describe(Values(1, missing=True))
    assert unlike(plain, gappy) == "values cannot be missing there and may here (missing: hidden)"
    assert unlike(describe(Values(1, static=2)), plain) == "2 static features there, 0 here"
    assert not unlike(gappy, gappy)


def test_runs_without_the_option_keep_their_keys():
    config = custom.Config(path=Path("a.csv"), list_column="x", label_column="y")
    part = Part(name="custom", **config.model_dump(mode="json"))
    assert (
        part.options["missing"] == "refuse" and not {"missing", "static_columns"} & without_paths("tasks", part).keys()
    )
    assert "missing" not in describe(Values(1)) and "static" not in describe(Values(1))
    for input in (Values(2, missing=True), Values(1, static=3)):
        assert from_spec(json.loads(json.dumps(describe(input)))) == input


def test_equal_rows_have_equal_fingerprints_whatever_bits_stand_for_nan():
    other = np.uint32(0xFFC00001).view(np.float32)
    assert np.isnan(other)
    one, two = (Split.from_rows([np.array([[1.0], [gap]], np.float32)], [0]) for gap in (np.float32(NAN), other))
    assert np.array_equal(fingerprints(one), fingerprints(two))


# --------------------------------------------------------------------------------------------------- no number leaks

FLAGS = st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=4, max_size=4)


def example(seed=0, n=3, length=4, missing=0.4):
    """A task whose values may be missing."""
    rng = np.random.default_rng(seed)
    values = rng.normal(1, 2, (n, length, 2)).astype(np.float32)
    values[rng.random(values.shape) < missing] = NAN
    split = with_fingerprints(Split.from_rows(values, np.arange(n) % 2))
    return TaskData(Values(2, (1.0, 1.0), (2.0, 2.0), missing=True), Classes(2), split, split, split)


@settings(max_examples=40, deadline=None)
@given(flags=FLAGS, number=st.floats(-1e6, 1e6), seed=st.integers(0, 9))
def test_a_step_is_the_linear_map_of_its_channels_and_flags(flags, number, seed):
    """Whatever number stands in a missing cell: [x (1 - m), m] through one map."""
    torch.manual_seed(seed)
    encoder = Encoder(Values(2, missing=True), 8, EncoderConfig())
    torch.nn.init.normal_(encoder.missing.weight)
    m, x = torch.tensor(flags)[None], torch.randn(1, 4, 2)
    shown = torch.where(m, number, x)  # what a table might hold there
    both = torch.cat([shown * ~m, m.float()], -1)
    expected = torch.nn.functional.linear(
        both, torch.cat([encoder.map.weight, encoder.missing.weight], 1), encoder.map.bias
    )
    context = Context(torch.ones(1, 4, dtype=torch.bool), False)
    torch.testing.assert_close(encoder(x.masked_fill(m, NAN), None, context), expected)
    hidden = torch.tensor([[True, False, False, True]])
    y = encoder(x.masked_fill(hidden[..., None], 0).masked_fill(m & ~hidden[..., None], NAN), hidden, context)
    torch.testing.assert_close(y[hidden], encoder.hidden.expand(2, -1))  # its flags are hidden with it


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 99), number=st.floats(-1e6, 1e6), objective=st.sampled_from([Masked(ratio=0.5), Next()]))
def test_observed_cells_alone_give_loss_gradient_and_metrics(seed, number, objective):
    data = example(seed)
    batch = collate(data.train, np.arange(3), data.input, data.target)
    _, targets = objective.make_inputs(batch, Draw(seed, "corruption", 0))
    output = Output("l1", per_step=True, size=2)
    assert targets.values.isfinite().all()
    logits = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    picked = logits if targets.scored is None else logits.flatten(0, 1)[targets.scored]

    def told(targets):
        logits.grad = None
        loss = weighted_sum(output, picked, targets)
        loss.backward(retain_graph=True)
        totals = {name: value.sum(0) for name, value in sums(output, picked.detach(), targets).items()}
        return loss.item(), logits.grad.clone(), metrics(output, totals) if targets.weight.any() else {}

    loss, gradient, scores = told(targets)
    other, gradient_too, scores_too = told(targets._replace(values=targets.values.masked_fill(~targets.known, number)))
    assert loss == other and torch.equal(gradient, gradient_too) and scores == scores_too
    error = (logits.detach() - targets.values).abs()
    by_hand = sum(
        error[i, t][targets.known[i, t]].mean().item() for i in range(3) for t in range(4) if targets.weight[i, t]
    )
    assert loss == pytest.approx(by_hand, rel=1e-5)
    assert not gradient[~targets.known].any()
    blank = ~targets.known.any(-1)
    assert not targets.weight[blank].any(), "a step without a value is not scored"


def test_every_batch_says_which_cells_are_known():
    """Also one without a gap: an evaluation joins the sums of all batches."""
    data = example(missing=0)
    for objective in (Masked(ratio=0.5), Next()):
        _, targets = objective.make_inputs(collate(data.train, np.arange(3), data.input, data.target), Draw(0, "c", 0))
        assert targets.known is not None


@pytest.mark.parametrize("name", ["masked", "next"])
def test_steps_that_are_scored_are_expected_to_be(name):
    """What a budget of operations is planned by."""
    data = example(n=2000, missing=0.7)
    objective = OBJECTIVES[name](**({"ratio": 0.5} if name == "masked" else {}))
    _, targets = objective.make_inputs(collate(data.train, np.arange(2000), data.input, data.target), Draw(0, "c", 0))
    found = float(targets.weight.sum()) / 2000
    assert objective.scored_steps(data.train, gaps=True) == pytest.approx(found, rel=0.05)
    assert objective.scored_steps(data.train) > 1.4 * found


def test_gaps_move_with_their_steps_where_these_are_shuffled_and_padding_has_none():
    data = example()
    rows = [data.train.row(0), data.train.row(1)[:2]]
    split = Split.from_rows(rows, [0, 1])
    batch = collate(split, np.arange(2), data.input, data.target)
    assert not batch.x[1, 2:].any() and not batch.x[1, 2:].isnan().any()
    moved = shuffled(batch, Draw(0, "corruption", 0))
    assert sorted(moved.x[0].isnan().sum(1).tolist()) == sorted(batch.x[0].isnan().sum(1).tolist())


@pytest.mark.parametrize("init", ["torch", "flax"])
def test_an_encoder_of_whole_values_is_as_it_was(init):
    """The same draws, so that every weight is the same, and nothing more."""
    made = []
    for missing in (False, True):
        torch.manual_seed(0)
        made.append(Encoder(Values(3, missing=missing), 8, EncoderConfig(positions="circle", init=init)))
    plain, gappy = (encoder.state_dict() for encoder in made)
    assert set(gappy) - set(plain) == {"missing.weight"} and not gappy["missing.weight"].any()
    assert all(torch.equal(plain[name], gappy[name]) for name in plain)
    extra = made[1].flops(10).total - made[0].flops(10).total
    assert extra == 2 * 2 * 10 * 3 * 8  # forward, and the gradient of the weights


def test_what_takes_no_missing_values_says_so():
    with pytest.raises(UsageError, match="cnn takes whole pictures, but values of this task may be missing"):
        Encoder(Values(64, frame=(8, 8), missing=True), 8, EncoderConfig(frame_encoder="cnn"))
    with pytest.raises(ValueError, match="none of which can be missing"):
        Values(1, levels=256, missing=True)


# ----------------------------------------------------------------------------------------------------------- baselines


def test_gaps_are_filled_on_the_line_between_neighbours():
    row = np.array([[NAN, 1.0, NAN], [2.0, NAN, NAN], [NAN, NAN, NAN], [4.0, 4.0, NAN]])
    expected = [[2, 1, 7], [2, 2, 7], [3, 3, 7], [4, 4, 7]]
    np.testing.assert_allclose(filled(Values(3, (5.0, 6.0, 7.0), missing=True), row), expected)


def test_baselines_and_the_probe_take_missing_values():
    data = example(n=60, length=12)
    targets = (np.arange(60) % 2).astype(np.int64)
    values = data.train.values.copy()
    values[np.repeat(targets, 12) == 1, 0] = NAN  # that it is missing tells the class
    split = with_fingerprints(Split(values, data.train.starts, data.train.stops, targets, np.arange(60)))
    data = TaskData(data.input, data.target, split, split, split)
    assert probe(data)["test"]["accuracy"] == 1
    for baseline in (linear_probe, logistic, catch22, boosting):
        fitted = baseline.BASELINE.fit(data, ComparedMetric("accuracy"), 0)
        from spt.baselines.base import Query

        scores = fitted.answer(Query(split.unlabelled(), np.arange(60)))
        assert np.isfinite(scores).all() and (scores.argmax(1) == targets).mean() > 0.95, baseline.__name__


# ----------------------------------------------------------------------------------------------------------- both arms

TINY = {
    "model": {"name": "s5", "d_model": 8, "n_layers": 1, "d_state": 4, "blocks": 1, "causal": True},
    "pretrain": {
        "objective": {"name": "masked", "ratio": 0.5},
        "train": {"steps": 3, "batch_size": 8, "learning_rate": 0.02},
    },
    "finetune": {"train": {"steps": 3, "batch_size": 8, "learning_rate": 0.02}},
}


def made(folder, rows, **changes):
    """A finetuning after pretraining, of these rows; and its folder."""
    path = write(folder / "a.csv", rows)
    one = loaded(folder, **{"task": {"name": "custom", "path": str(path), **LONG}, **TINY, **changes})
    job = spt_job(one)
    pretraining = run(job.parent, folder / "runs")
    return one, pretraining, run(job, folder / "runs"), folder / "runs" / job.name


@pytest.mark.parametrize("objective", ["masked", "next"])
def test_both_arms_learn_from_rows_with_gaps(tmp_path, objective):
    options = {"name": objective, **({"ratio": 0.5} if objective == "masked" else {})}
    _, pretraining, result, folder = made(tmp_path, steps(), pretrain__objective=options)
    for scores in (pretraining.val, result.val, result.test):
        assert all(np.isfinite(value) for value in scores.values()), scores
    model = TrainedModel.open(folder)
    assert model.network.encoder.missing.weight.abs().max() > 0, "M learns"
    # New rows: from a file, and in memory, as one.
    new = write(tmp_path / "new.csv", [{**row, "p": f"n{row['p']}"} for row in steps(9)])
    summary = predict(folder, Source(new), tmp_path / "out.jsonl", CPU)
    assert summary.rows == 9 and any("values" in note and "are missing" in note for note in summary.notes)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    whole = [
        [[NAN if v is None else v for v in (r["v"], r["w"])] for r in steps(9) if r["p"] == f"p{i}"] for i in range(9)
    ]
    by_id = {line["id"]: line["p_a"] for line in lines}
    chances = model.predict_proba(whole)
    np.testing.assert_allclose([by_id[f"np{i}"] for i in range(9)], chances[:, 0], atol=1e-6)
    stream = model.stream()
    for step in whole[0]:
        answer = stream(step)
    np.testing.assert_allclose(answer, model.logits(whole[:1])[0], atol=1e-5)
    make_program(model)
    with pytest.raises(DataError, match="not finite"):
        model.predict([[[np.inf, 1.0]]])


def test_a_model_of_whole_rows_refuses_gaps(tmp_path):
    task = {"name": "custom", "path": str(write(tmp_path / "a.csv", steps(missing=0))), **LONG, "missing": "refuse"}
    one = loaded(tmp_path, task=task, **TINY)
    job = spt_job(one)
    run(job.parent, tmp_path / "runs")
    run(job, tmp_path / "runs")
    model = TrainedModel.open(tmp_path / "runs" / job.name)
    with pytest.raises(DataError, match="trained without missing values"):
        model.predict([[[NAN, 1.0]]])
    new = write(tmp_path / "new.csv", steps(9))
    with pytest.raises(DataError, match=r"column v: the cell is empty.*; the model was trained without missing values"):
        predict(tmp_path / "runs" / job.name, Source(new), tmp_path / "out.csv", CPU)
    assert not (tmp_path / "out.csv").exists()


def test_published_means_of_batches_are_refused_before_training(tmp_path):
    with pytest.raises(UsageError, match="per_batch cannot leave missing values out"):
        made(tmp_path, steps(), pretrain__train__metric_average="per_batch")


# ------------------------------------------------------------------------------------------------------------- spt try


def tried(path, given=None):
    """What `spt try` makes of a file, and what it says of missing values and of columns that it leaves out."""
    from spt.advisor.advise import _locate, _with_gaps
    from spt.advisor.columns import ColumnRoles, decide
    from spt.advisor.table import read_table

    where, table = _locate(str(path), path.parent)
    made = _with_gaps(where, decide(read_table(table), given or ColumnRoles()), print)
    said = [line for line in made.lines if line.startswith(("missing", "left out", "beside"))]
    return made.options, " ".join(said)


@pytest.mark.parametrize("empty", ["", "NA", "nan"])
def test_spt_try_finds_missing_values_in_columns(tmp_path, empty):
    rows = [
        {
            "id": r["p"],
            "time": r["t"],
            **{c: r[c] if r[c] is not None else empty for c in "vw"},
            "age": 3,
            "label": r["y"],
        }
        for r in steps()
    ]
    options, said = tried(write(tmp_path / "a.csv", [{**row, "age": 40 + len(row["id"])} for row in rows]))
    assert options["missing"] == "hidden" and options["value_columns"] == ["v", "w", "age"]
    assert re.match(r"missing: values are missing.*column v \d+.\d+% of train.*\(missing: hidden\)", said)


def test_spt_try_finds_missing_values_in_lists_arrays_and_files(tmp_path):
    rows = [{"x": [1, i, None if i % 3 else 2], "label": i % 2, "age": 50 + i % 3} for i in range(60)]
    options, said = tried(write(tmp_path / "a.jsonl", rows))
    assert options["missing"] == "hidden" and "left out: column 'age' (--static age would show" in said
    rows = [{"x": f"{'NA' if i % 2 else i} nan {i}", "label": i // 2 % 2} for i in range(60)]
    options, said = tried(write(tmp_path / "d.csv", rows))
    assert options["missing"] == "hidden" and options["list_column"] == "x"
    whole, said = tried(write(tmp_path / "b.jsonl", [{**row, "x": [1, i, 2]} for i, row in enumerate(rows)]))
    assert "missing" not in whole and "static_columns" not in whole and "missing" not in said
    x = np.random.default_rng(0).normal(size=(60, 5))
    np.savez(tmp_path / "c.npz", X=np.where(x > 1, NAN, x), y=np.arange(60) % 2)
    assert tried(tmp_path / "c.npz")[0]["missing"] == "hidden"
    (tmp_path / "in").mkdir()
    for i in range(40):
        (tmp_path / "in" / f"{i}.npy").write_bytes(npy(np.array([1.0, i, NAN])))
    write(tmp_path / "in" / "labels.csv", [{"file": f"{i}.npy", "label": i % 2} for i in range(40)])
    assert tried(tmp_path / "in")[0]["missing"] == "hidden"


def test_spt_try_takes_static_columns_and_finds_gaps_in_them(tmp_path):
    from spt.advisor.columns import ColumnRoles

    rows = [
        {"x": [1, i, 2], "label": i % 2, "age": None if i % 9 == 0 else 50 + i % 3, "sex": "fm"[i % 2]}
        for i in range(60)
    ]
    options, said = tried(write(tmp_path / "a.jsonl", rows), ColumnRoles(static=("age", "sex")))
    assert options["static_columns"] == ["age", "sex"] and options["missing"] == "hidden"
    assert "beside the sequence: columns 'age', 'sex'" in said and "static features are missing in some rows" in said
