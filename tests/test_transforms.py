"""Windows, resampling, patches and spectrograms of recordings: what is made, stored, scored, and done with new rows."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_custom import wav, write
from tiny import loaded, run

import spt
from spt.advisor.advise import _open
from spt.advisor.columns import ColumnRoles, LabelPeriod, decide
from spt.advisor.recordings import given_transforms, label_windows, shortened
from spt.advisor.table import read_table
from spt.analysis.predictions import read_predictions
from spt.analysis.reevaluate import reevaluate
from spt.baselines.base import Fitted
from spt.baselines.run import _scored
from spt.config.job import Job, without_paths
from spt.config.recipe import Part
from spt.data import summary
from spt.data.cache import _write, read_prepared
from spt.data.dataset import open_task
from spt.data.fingerprints import refuse_leak, rows_hash, with_fingerprints
from spt.data.summary import summarise
from spt.errors import CheckpointError, DataError, UsageError
from spt.inference.answers import Answering
from spt.inference.export import export
from spt.inference.predict import Source, embed, predict
from spt.inference.trained_model import TrainedModel
from spt.rng import Draw
from spt.runs.predictions import read_columns
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.tasks import custom
from spt.tasks.base import IGNORED, Split, class_counts
from spt.tasks.own import transforms
from spt.tasks.own.transforms import Plan, SpectrogramOptions, TransformOptions, plan, transform
from spt.training import evaluate as evaluation
from spt.training.evaluate import evaluate
from spt.training.load_run import load_run
from spt.training.objectives import Output
from spt.training.recordings import averaged

CPU = Runtime(Settings(quiet=True, cpu=True))
LIST = {"list_column": "x", "id_column": "id", "group_column": "person"}
SHARES = {"validation_fraction": 0.25, "test_fraction": 0.25}
SMALL = {
    "model": {"name": "transformer", "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8},
    "finetune": {"train": {"steps": 4, "batch_size": 8, "learning_rate": 0.02}},
    "pretrain": {
        "objective": {"name": "masked", "ratio": 0.5},
        "train": {"steps": 2, "batch_size": 8, "learning_rate": 0.02},
    },
}


def put(path, rows):
    """A table of these rows; its path."""
    write(path, rows)
    return path


def recordings(n=12, channels=1, seed=0):
    """Rows of n recordings of 20 to 29 steps, two of each person, with a label and with a label for every 5 steps."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        x = rng.normal(size=(20 + i % 10, channels)).round(3) + i // 2 % 2
        labels = rng.normal(size=-(-len(x) // 5)).round(2).tolist()
        x = x[:, 0] if channels == 1 else x
        rows.append({"person": f"p{i // 2}", "id": f"r{i}", "x": x.tolist(), "y": "ab"[i // 2 % 2], "hr": labels})
    return rows


def opened(folder, rows, **options):
    path = put(folder / "rows.jsonl", rows)
    config = {"path": str(path), **LIST, **SHARES, "label_column": "y", **options}
    data = custom.load(custom.Config.model_validate_json(json.dumps(config)), folder)
    data.check()
    return data


def rows_of(*lengths, channels=1, **fields):
    total = sum(lengths)
    stops = np.cumsum(lengths)
    values = np.arange(total * channels, dtype=np.float32).reshape(total, channels)
    return Split(
        values, stops - np.array(lengths), stops, None, np.array([f"r{i}" for i in range(len(lengths))]), **fields
    )


# ---------------------------------------------------------------------------------------------------------- resampling


def test_what_is_too_fast_for_the_new_rate_is_filtered_out_before():
    t = np.arange(4000) / 1000
    slow, fast = np.sin(2 * np.pi * 10 * t), np.sin(2 * np.pi * 240 * t)
    found = transforms.resampled((slow + fast)[:, None], 1, 4)[:, 0]
    assert len(found) == 1000
    assert np.abs(found - slow[::4])[50:-50].max() < 0.02, "240 Hz would be 10 Hz after every fourth step"
    assert transforms.resampled(np.full((3, 1), 7.0), 2, 3) == pytest.approx(np.full((2, 1), 7.0), abs=5e-3)
    assert transforms.resampled(np.full((1, 1), 7.0), 1, 3) == pytest.approx(7.0, abs=1e-4)


def test_a_rate_is_reached_from_the_known_one_and_the_interval_follows(tmp_path):
    data = opened(tmp_path, recordings(20), rate=100, resample=40)
    assert data.interval == pytest.approx(1 / 40)
    assert set(data.train.lengths) <= {math.ceil(0.4 * length) for length in range(20, 30)}
    assert opened(tmp_path, recordings(20), resample="2/5").train.values == pytest.approx(data.train.values)
    assert (
        plan(TransformOptions(resample=16000), 44100.0).ratio == plan(TransformOptions(resample="160/441"), None).ratio
    )


def test_sounds_are_resampled_from_their_own_rate(tmp_path):
    names = [f"{i}.wav" for i in range(10)]
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(wav(i, rate=4000, samples=60))
    put(tmp_path / "labels.csv", [{"file": name, "y": "ab"[i % 2]} for i, name in enumerate(names)])
    options = {"path": str(tmp_path), "file_column": "file", "label_column": "y", "resample": 1000, **SHARES}
    data = custom.load(custom.Config.model_validate_json(json.dumps(options)), tmp_path)
    assert data.interval == 1 / 1000
    assert data.length == 15
    assert data.train.values.dtype == np.float32
    options["spectrogram"] = {"window": 8, "hop": 4, "log": True}
    data = custom.load(custom.Config.model_validate_json(json.dumps(options)), tmp_path)
    assert data.interval == 4 / 1000
    assert data.input.channels == 5


def test_a_steps_label_after_resampling_is_that_of_the_nearest_step(tmp_path):
    rows = [{"p": f"p{i}", "t": t / 10, "v": t + i, "y": "abc"[t // 4 % 3]} for i in range(9) for t in range(24)]
    path = put(tmp_path / "rows.csv", rows)
    options = {"id_column": "p", "time_column": "t", "value_columns": ["v"], "label_column": "y", "per_step": True}
    config = {"path": str(path), **options, **SHARES, "resample": 5}
    data = custom.load(custom.Config.model_validate_json(json.dumps(config)), tmp_path)
    assert data.interval == pytest.approx(0.2)
    assert data.train.targets[:12].tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]


# ------------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("keep", [False, True])
def test_windows_are_views_on_the_recordings_values(keep):
    rows = rows_of(10, 3, 7)
    found = transform(Plan(window=4, stride=3, keep_last=keep), rows, str)
    windows = found.rows
    assert windows.values is rows.values
    expected = {"r0": [(0, 4), (3, 7), (6, 10)], "r1": [(0, 3)], "r2": [(0, 4), (3, 7)]}
    begun = dict(zip(rows.ids.tolist(), rows.starts.tolist(), strict=True))
    wanted = [(f"{name}@{a}", begun[name] + a, begun[name] + b) for name, ends in expected.items() for a, b in ends]
    assert list(zip(windows.ids.tolist(), windows.starts.tolist(), windows.stops.tolist(), strict=True)) == wanted
    assert found.recording.tolist() == [0, 0, 0, 1, 2, 2]


def test_what_is_left_at_the_end_is_dropped_or_kept():
    dropped, kept = (transform(Plan(window=4, stride=4, keep_last=keep), rows_of(10), str) for keep in (False, True))
    assert dropped.rows.lengths.tolist() == [4, 4]
    assert kept.rows.lengths.tolist() == [4, 4, 2]
    assert "what is left at the end of 1 is not used" in dropped.notes[0]
    assert "left" not in kept.notes[0]


def test_windows_of_a_person_stay_in_one_split(tmp_path):
    data = opened(tmp_path, recordings(30), window=8, stride=4)
    people = [{int(str(name).split("@")[0][1:]) // 2 for name in split.ids} for split in data.splits.values()]
    assert all(people)
    assert not people[0] & people[1] and not people[0] & people[2] and not people[1] & people[2]


def test_shared_steps_are_stored_once_and_read_as_they_were(tmp_path):
    data = opened(tmp_path, recordings(40, channels=2), window=16, stride=2, score="recording").mapped(
        with_fingerprints
    )
    assert data.train.shares_steps
    _write(tmp_path / "kept", data)
    again = read_prepared(tmp_path / "kept")
    for before, after in zip(data.splits.values(), again.splits.values(), strict=True):
        assert len(after.values) == len(before.values) < int(before.lengths.sum())
        assert all(np.array_equal(before.row(i), after.row(i)) for i in range(len(before)))
        for name in ("ids", "recordings", "sources", "targets", "fingerprints"):
            assert np.array_equal(getattr(before, name), getattr(after, name))
    apart = again.mapped(lambda split: with_fingerprints(replace(split.packed(), fingerprints=np.empty(0, np.uint64))))
    assert rows_hash(apart) == rows_hash(again), "a row is the same row, shared or not"


def test_labels_of_steps_are_cut_along(tmp_path):
    rows = [{"p": f"p{i}", "v": t, "y": "ab"[(t + i) % 2]} for i in range(12) for t in range(11)]
    path = put(tmp_path / "rows.csv", rows)
    options = {"id_column": "p", "layout": "long", "value_columns": ["v"], "label_column": "y", "per_step": True}
    config = {"path": str(path), **options, **SHARES, "window": 4, "stride": 3, "split": "stratified"}
    data = custom.load(custom.Config.model_validate_json(json.dumps(config)), tmp_path).mapped(with_fingerprints)
    _write(tmp_path / "kept", data)
    for split in (data.train, read_prepared(tmp_path / "kept").train):
        for i in range(len(split)):
            steps, labels = split.row(i)[:, 0], split.targets[split.starts[i] : split.stops[i]]
            person = int(str(split.ids[i])[1:].split("@")[0])
            assert labels.tolist() == ((steps.astype(int) + person) % 2).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_rows_keep_their_values_when_what_none_covers_is_left_out(seed):
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 60, 8)
    if seed % 2:
        starts = np.sort(starts)
    rows = rows_of(80)
    rows = replace(
        rows, starts=starts, stops=starts + rng.integers(1, 20, 8), ids=np.arange(8), steps=rows.values[:, 0].copy()
    )
    covered = {step for a, b in zip(rows.starts, rows.stops, strict=True) for step in range(a, b)}
    before = [rows.row(i).copy() for i in range(8)]
    trimmed = rows.trimmed(in_place=bool(seed % 2))
    assert len(trimmed.values) == len(trimmed.steps) == len(covered)
    assert all(np.array_equal(trimmed.row(i), before[i]) for i in range(8))
    assert trimmed.shares_steps == (len(covered) < int(rows.lengths.sum()))
    assert not rows.packed().shares_steps


def test_every_step_counts_once_in_statistics(tmp_path):
    whole = opened(tmp_path, recordings(30))
    windows = opened(tmp_path, recordings(30), window=8, stride=1)
    assert windows.input.mean == pytest.approx(whole.input.mean)
    assert windows.input.std == pytest.approx(whole.input.std)
    assert sum(len(piece) for piece in windows.train.pieces(7)) == len(whole.train.values)
    assert class_counts(windows.train, 2).sum() == len(windows.train)


def test_pretraining_on_windows_of_a_test_recording_is_a_leak_at_any_stride(tmp_path):
    data = opened(tmp_path, recordings(30), window=8, stride=4).mapped(with_fingerprints)
    other = opened(tmp_path, recordings(30), window=5, stride=5, split_seed=3).mapped(with_fingerprints)
    assert not np.isin(other.train.fingerprints, data.test.fingerprints).any()
    with pytest.raises(CheckpointError, match="test rows of this task"):
        refuse_leak(other.train.seen, data.train.seen, replace(data, val=data.train), "a run")
    refuse_leak(data.train.seen, data.train.seen, data, "a run")
    whole = opened(tmp_path, recordings(30), split_seed=3).mapped(with_fingerprints)
    with pytest.raises(CheckpointError, match="test rows of this task"):  # also one that was seen whole
        refuse_leak(whole.train.seen, data.train.seen, data, "a run")


# ------------------------------------------------------------------------------------------------------ labels in time


def test_a_windows_label_is_the_mean_or_the_last_of_those_within_it(tmp_path):
    rows = recordings(16)
    rows[0]["hr"][1] = None
    by_id = {row["id"]: row for row in rows}
    for how, combine in (("mean", np.mean), ("last", lambda labels: labels[-1])):
        data = opened(tmp_path, rows, label_column="hr", target="real", label_at=how, window=10, stride=5)
        for split in data.splits.values():
            for name, target in zip(split.ids.tolist(), split.targets[:, 0].tolist(), strict=True):
                recording, _, start = name.partition("@")
                labels = by_id[recording]["hr"][int(start) // 5 : int(start) // 5 + 2]
                assert target == pytest.approx(combine([label for label in labels if label is not None]))


def test_a_windows_class_is_the_commonest_within_it_and_windows_without_one_are_left_out(tmp_path):
    rows = recordings(16)
    for row in rows:
        row["y"] = ["a", "b", "b", None, None][: len(row["hr"])] + ["a"] * (len(row["hr"]) - 5)
    options = {"label_at": "majority", "window": 10, "stride": 5, "rate": 50, "label_rate": 10}
    data = opened(tmp_path, rows, **options)
    labels = {}
    for split in data.splits.values():
        labels |= dict(zip(split.ids.tolist(), split.targets.tolist(), strict=True))
    assert [labels.get(f"r9@{start}") for start in (0, 5, 10, 15)] == [0, 1, 1, None]
    assert any("windows without a label within them are left out" in note for note in data.notes)


def test_a_label_at_the_end_of_a_recording_is_not_beyond_it(tmp_path):
    """Five labels, one every 5 steps, end with step 20; a sixth has no step."""
    options = {"label_column": "hr", "target": "real", "label_at": "last", "window": 10, "rate": 1, "label_rate": 0.2}
    rows = [{**row, "x": row["x"][:20], "hr": [*range(5)]} for row in recordings(40)]
    assert {float(y) for y in opened(tmp_path, rows, **options).train.targets[:, 0]} == {1.0, 3.0}
    rows[7]["hr"] = [*range(6)]
    with pytest.raises(ValueError, match=r"line 8.*: 6 labels at 0\.2 a second are longer than 20 steps at 1"):
        opened(tmp_path, rows, **options)


def test_labels_follow_the_resampled_steps(tmp_path):
    rows = recordings(16)
    shared = {"label_column": "hr", "target": "real", "label_at": "mean", "rate": 10, "label_rate": 2}
    fast = opened(tmp_path, rows, window="1s", stride="0.5s", **shared)
    slow = opened(tmp_path, rows, window="1s", stride="1s", resample=2, **shared)
    lengths = {row["id"]: row["x"] for row in rows}
    by_second = {
        (name.partition("@")[0], int(name.partition("@")[2]) / 10): float(target[0])
        for split in fast.splits.values()
        for name, target in zip(split.ids.tolist(), split.targets, strict=True)
    }
    for name, target in zip(slow.train.ids.tolist(), slow.train.targets[:, 0], strict=True):
        second = int(name.partition("@")[2]) / 2
        if second + 1 <= len(lengths[name.partition("@")[0]]) / 10:  # else filled up to a whole step
            assert target == pytest.approx(by_second[name.partition("@")[0], second])


# ------------------------------------------------------------------------------------------- patches and spectrograms


@pytest.mark.parametrize(("pad", "last"), [(False, [2, 12]), (True, [3, 13])])
def test_a_patch_holds_the_channels_of_its_steps_one_step_after_another(pad, last):
    found = transform(Plan(patch=4, pad_patch=pad), rows_of(11, 40, channels=2), str).rows
    assert found.lengths.tolist() == [last[0], 10]
    assert found.row(0)[1].tolist() == list(range(8, 16))
    assert found.row(1)[0].tolist() == list(range(22, 30))
    if pad:
        assert found.row(0)[2].tolist() == [16, 17, 18, 19, 20, 21, 20, 21], "the last step is repeated"


def test_pretraining_hides_whole_patches(tmp_path):
    from spt.data.batching import collate
    from spt.training.objectives import Masked

    data = opened(tmp_path, recordings(20), patch=5)
    batch = collate(data.train, np.arange(4), data.input, data.target)
    inputs, _ = Masked(ratio=0.5).make_inputs(batch, Draw(0, "x", 0))
    assert inputs.hidden.any()
    assert (inputs.x[inputs.hidden] == 0).all()
    assert inputs.x.shape[-1] == data.input.channels == 5
    assert data.interval == 5


@pytest.mark.parametrize("log", [True, False])
def test_a_frame_is_the_fourier_transform_of_its_steps_under_a_hann_window(log):
    x = np.random.default_rng(0).normal(size=(103, 2))
    found = transforms.frames(x, SpectrogramOptions(window=16, hop=6, log=log))
    assert len(found) == 1 + (103 - 16) // 6
    weights = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(16) / 16)
    for i, frame in enumerate(found):
        size = np.abs(np.fft.rfft(x[6 * i : 6 * i + 16] * weights[:, None] / weights.sum(), axis=0)).T.reshape(-1)
        assert frame == pytest.approx(np.log(size**2 + 1e-10) if log else size, rel=1e-4, abs=1e-5)


def test_windows_without_a_stride_follow_each_other_frame_by_frame():
    """A window's frames begin at whole hops, so that windows do too."""
    options = TransformOptions(window=100, spectrogram=SpectrogramOptions(window=16, hop=8))
    assert plan(options, None).stride == 96
    assert plan(TransformOptions(window=100), None).stride == 100
    assert Plan(window=4, stride=6, keep_last=True).cut(12) == [(0, 4), (6, 10)], "what lies between windows is no row"


def test_a_label_between_two_steps_is_that_of_the_nearer_one():
    rows = replace(rows_of(4), targets=np.array([10, 11, 12, 13]), per_step=True)
    found = transform(Plan(up=3, down=2), rows, str).rows
    at = np.arange(6) * 2 / 3  # of each new step, among the old ones
    assert found.targets.tolist() == [10 + round(each) for each in at]


def test_frames_of_windows_are_those_within_them():
    x = rows_of(100)
    made = Plan(window=40, stride=24, spectrogram=SpectrogramOptions(window=16, hop=8))
    found = transform(made, x, str).rows
    for i, start in enumerate((0, 24, 48)):
        assert found.row(i) == pytest.approx(
            transforms.frames(x.values[start : start + 40], made.spectrogram), abs=1e-4
        )


# ------------------------------------------------------------------------------------------------- scored by recording


def test_probabilities_and_numbers_of_windows_are_averaged():
    which = np.array([7, 2, 7])
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0], [3.0, -1.0]])
    found = averaged(Output("cross_entropy", False, 1, 2), logits, which).softmax(-1)
    assert torch.allclose(found, torch.stack([logits[1].softmax(-1), logits[[0, 2]].softmax(-1).mean(0)]))
    assert averaged(Output("l2", False, 2), logits, which).tolist() == [[2.0, 0.0], [1.5, 0.0]]
    mean, raw = averaged(Output("gaussian", False, 1), logits, which)[1].tolist()
    variances = torch.nn.functional.elu(logits[[0, 2], 1]) + 1
    expected = float((variances + logits[[0, 2], 0] ** 2).mean() - 1.5**2)
    assert mean == 1.5
    assert math.isclose(torch.nn.functional.elu(torch.tensor(raw)) + 1, expected, rel_tol=1e-5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on windows, scored by recording."""
    folder = tmp_path_factory.mktemp("windows")
    path = put(folder / "rows.jsonl", recordings(40))
    task = {"name": "custom", "path": str(path), **LIST, **SHARES, "label_column": "y"}
    task |= {"window": 9, "stride": 3, "score": "recording", "patch": 3}
    job = Job(loaded(folder, task=task, **SMALL), "finetune", 0)
    return folder, run(job, folder), folder / job.name


def test_an_evaluation_counts_the_recordings_that_it_scores(finished):
    _, result, path = finished
    found = reevaluate(path, [], "test", Runtime(Settings(quiet=True, cpu=True)))
    assert found["rows"] == result.data["test"].recordings < result.data["test"].rows
    assert found["scores"] == pytest.approx(result.test)


def test_errors_of_recordings_have_the_users_labels_and_lack_none(finished):
    _, _, path = finished
    found = read_predictions([path], "test", Runtime(Settings(quiet=True, cpu=True)))
    assert found.evaluation.names == load_run(path).data.classes and found.evaluation.names[0] in ("a", "b", "0")
    assert not [note for note in found.notes if "left out" in note]


def test_errors_of_recordings_leave_out_those_that_lack_a_number(tmp_path):
    rows = [{**row, "u": float(i), "v": None if i % 4 == 0 else float(-i)} for i, row in enumerate(recordings(40))]
    task = {"name": "custom", "path": str(put(tmp_path / "rows.jsonl", rows)), **LIST, **SHARES}
    task |= {"label_columns": ["u", "v"], "target": "real", "missing_labels": "ignore"}
    task |= {"window": 9, "stride": 3, "score": "recording", "patch": 3}
    job = Job(loaded(tmp_path, task=task, **SMALL), "finetune", 0)
    run(job, tmp_path)
    found = read_predictions([tmp_path / job.name], "val", Runtime(Settings(quiet=True, cpu=True)))
    lacking = int(np.isnan(load_run(tmp_path / job.name).data.val.whole.targets).any(axis=1).sum())
    assert lacking and any(note.startswith(f"{lacking} rows that lack some") for note in found.notes)
    assert len(found.runs[0].predicted) == len(found.evaluation.rows)


def test_overlapping_windows_miss_as_many_values_as_their_recordings(tmp_path):
    rows = recordings(40)
    for row in rows:
        row["x"][3] = None
    data = opened(tmp_path, rows, window=8, stride=2, missing="hidden")
    for name, split in data.splits.items():
        steps = sum(len(piece) for piece in split.pieces())
        missing = sum(int(np.isnan(piece).any(axis=1).sum()) for piece in split.pieces())
        assert 0 < missing < steps < int(split.lengths.sum())
        assert summary._missing(data)[name][0] == pytest.approx(missing / steps)


def test_a_score_is_of_recordings_whatever_the_batches(finished, monkeypatch):
    _, result, path = finished
    loaded_run = load_run(path)
    setup, test = loaded_run.setup, loaded_run.data.test
    whole = test.whole
    assert result.data["test"].scored == len(whole) < result.data["test"].rows == len(test)
    model = TrainedModel.open(path)
    logits = torch.from_numpy(model.logits(replace(test, recordings=None)))
    chances = torch.stack([logits[test.recordings == k].softmax(-1).mean(0) for k in np.unique(test.recordings)])
    right = (chances.argmax(-1).numpy() == whole.targets).mean()
    loss = -chances.log()[np.arange(len(whole)), whole.targets].mean()
    assert result.test["accuracy"] == pytest.approx(right)
    assert result.test["loss"] == pytest.approx(float(loss), rel=1e-5)
    for positions in (1, 50):
        monkeypatch.setattr(evaluation, "EVALUATION_POSITIONS", positions)
        shuffled = test.take(np.random.default_rng(0).permutation(len(test)))
        scores, _ = evaluate(loaded_run.network, setup, shuffled, CPU, Draw(0, "x", 0), at_once=1)
        assert scores == pytest.approx({name: result.test[name] for name in scores}, rel=1e-5)
    columns = read_columns(path / "predictions.parquet")
    assert columns["id"].tolist() == whole.ids.tolist()
    assert "@" not in "".join(columns["id"])
    assert columns["prediction"].tolist() == chances.argmax(-1).tolist()


def test_new_rows_go_through_the_same_transforms(finished, tmp_path):
    folder, result, path = finished
    source = Source(folder / "rows.jsonl", [])
    told = predict(path, source, tmp_path / "out.parquet", CPU)
    assert told.rows == told.scored == 40
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert table["id"] == [f"r{i}" for i in range(40)]
    stored = read_columns(path / "predictions.parquet")
    names = {str(name): "ab"[k] for name, k in zip(stored["id"], stored["prediction"], strict=True)}
    assert {name: given for name, given in zip(table["id"], table["prediction"], strict=True) if name in names} == names
    of_split = predict(path, Source(None, [], "test"), tmp_path / "split.parquet", CPU)
    assert (of_split.rows, of_split.scores["accuracy"]) == (result.data["test"].scored, result.test["accuracy"])
    model = TrainedModel.open(path)
    raw = [np.array(row["x"]) for row in recordings(40)]
    assert model.predict(raw).tolist() == table["prediction"]
    assert model.predict_proba(raw)[:, 0] == pytest.approx(np.array(table["p_a"]), abs=1e-5)
    assert len(model.embed(raw)) == 40
    embedded = embed(path, source, tmp_path / "e.npz", CPU)
    vectors = np.load(tmp_path / "e.npz")["embedding"]
    assert embedded.rows == len(vectors) > embedded.recordings == 40
    assert embedded.amount == f"{len(vectors)} windows of 40 recordings" and told.amount == "40 rows"
    export(path, tmp_path / "taken")
    assert spt.load_model(tmp_path / "taken").predict(raw).tolist() == table["prediction"]
    np.save(tmp_path / "rows.npy", np.stack([x[:20] for x in raw]))
    arrays = predict(path, Source(tmp_path / "rows.npy", []), tmp_path / "arrays.parquet", CPU)
    assert arrays.rows == 40
    model = replace(model, length=2)  # as if training's windows had been shorter
    longer = Answering(model, CPU)
    longer.answer(load_run(path).data.test)
    (note,) = longer.notes()
    assert note.startswith(f"{longer.longer} of {longer.sequences} sequences") and longer.sequences > longer.rows
    with pytest.raises(UsageError, match="trained with patch"):
        model.stream()
    with pytest.raises(DataError, match="fewer than a patch of 3"):
        model.predict([[1.0, 2.0]])


def test_an_analysis_is_of_recordings(finished):
    _, result, path = finished
    stored, whole = read_columns(path / "predictions.parquet"), load_run(path).data.test.whole
    found = read_predictions([path], "test", CPU)
    assert found.evaluation.rows.ids.tolist() == whole.ids.tolist()
    assert found.runs[0].predicted.tolist() == stored["prediction"].tolist()
    validation = read_predictions([path], "val", CPU)
    right = validation.runs[0].predicted == validation.evaluation.truth
    assert right.mean() == pytest.approx(result.val["accuracy"])


def test_baselines_are_scored_by_recording_too(tmp_path):
    data = opened(tmp_path, recordings(40), window=8, stride=4, score="recording")
    answered = np.random.default_rng(0).random((len(data.test), 2))
    place = {int(start): i for i, start in enumerate(data.test.starts)}

    def answer(asked):
        return np.stack([answered[place[int(asked.split.starts[row])]] for row in asked.rows])

    scores, columns = _scored(Fitted(answer, "", 1), data, data.test)
    means = np.stack([answered[data.test.recordings == k].mean(0) for k in np.unique(data.test.recordings)])
    assert columns["id"].tolist() == data.test.whole.ids.tolist()
    assert columns["prediction"].tolist() == means.argmax(1).tolist()
    assert scores["accuracy"] == pytest.approx((means.argmax(1) == data.test.whole.targets).mean())


def test_an_estimator_answers_each_row_once_by_its_windows(tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(24, 40)), np.arange(24) % 2
    options = {"model_options": {"d_model": 8, "n_layers": 1, "n_heads": 2}, "epochs": 1, "pretrain_epochs": 1}
    model = spt.SequenceClassifier(**options, window=20, stride=10, resample="1/1", patch=5, device="cpu").fit(X, y)
    chances = model.predict_proba(X)
    windows = np.stack([model.model_.predict_proba(X[:, a : a + 20]) for a in (0, 10, 20)]).mean(0)
    assert chances == pytest.approx(windows, abs=1e-5)
    model.save(tmp_path / "saved")
    assert spt.SequenceClassifier.load(tmp_path / "saved").predict_proba(X) == pytest.approx(chances, abs=1e-6)
    assert spt.load_model(tmp_path / "saved").predict_proba(X) == pytest.approx(chances, abs=1e-6)


# ----------------------------------------------------------------------------------------------- keys, and wrong input


def test_a_recipe_that_transforms_nothing_keeps_its_key():
    options = custom.Config(path=Path("x.csv"), list_column="x", label_column="y").model_dump(mode="json")
    named = set(TransformOptions.model_fields) & set(without_paths("tasks", Part(name="custom", **options)))
    assert named <= {"subset_fraction", "subset_seed", "stratified", "max_rows"}


WRONG = {
    "resample without a rate": ({"resample": 50}, "that of the data is not known"),
    "resample to nothing": ({"resample": 0}, "is no rate"),
    "resample by words": ({"resample": "half"}, "neither a rate"),
    "resample by a long ratio": ({"resample": "1/1001"}, "neither a rate"),
    "resample to an odd rate": ({"rate": 100, "resample": 99.9371}, "is no ratio of whole numbers"),
    "rate without a sign": ({"rate": -1}, "greater than 0"),
    "a window of nothing": ({"window": 0}, "is no span"),
    "a window in minutes": ({"window": "1m"}, "is no span"),
    "seconds without a rate": ({"window": "1s"}, "the rate of the data is not known"),
    "seconds that are no steps": ({"window": "0.155s", "rate": 100}, "a whole number is needed"),
    "a stride alone": ({"stride": 4}, "stride is for windows"),
    "a score alone": ({"score": "recording"}, "score is for windows"),
    "the last of no windows": ({"last_window": "keep"}, "last_window is for windows"),
    "a patch of one step": ({"patch": 1}, "greater than or equal to 2"),
    "a window of half a patch": ({"patch": 4, "window": 10}, "8 or 12 are"),
    "a stride of half a patch": ({"patch": 4, "window": 8, "stride": 2}, "4 is the smallest"),
    "two front ends": ({"patch": 4, "spectrogram": {}}, "give one of them"),
    "the last of no patches": ({"last_patch": "pad"}, "last_patch is for patch"),
    "a patch too long": ({"patch": 25}, "fewer than a patch of 25"),
    "a frame too long": ({"spectrogram": {"window": 25, "hop": 5}}, "fewer than a frame of 25"),
    "a hop over steps": ({"spectrogram": {"window": 8, "hop": 9}}, "lie in no frame"),
    "a frame of what": ({"spectrogram": {"windows": 8}}, "spectrogram"),
    "a window shorter than a frame": ({"window": 8, "spectrogram": {"window": 16}}, "holds no frame of 16"),
    "too long after all": ({"window": 8, "max_length": 7}, "8 steps is left, max_length is 7"),
    "labels at a rate of what": ({"label_rate": 1}, "label_rate is for label_at"),
    "the mean of classes": ({"window": 8, "label_at": "mean"}, "has no meaning for classes"),
    "one label for a list": ({"window": 8, "label_at": "last"}, "is not a list of labels"),
    "a recording's score of windows' labels": (
        {"window": 8, "label_at": "last", "score": "recording"},
        "every window has its own",
    ),
    "labels that are too many": (
        {"window": 8, "label_at": "last", "label_column": "hr", "rate": 10, "label_rate": 0.5, "target": "real"},
        "are longer than",
    ),
    "labels that are too few": (
        {"window": 8, "label_at": "last", "label_column": "x2", "target": "real"},
        "label_rate",
    ),
    "tokens in patches": ({"tokens": "ids", "patch": 4}, "no meaning for tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_together_is_told(tmp_path, name):
    options, message = WRONG[name]
    rows = recordings(8)
    for row in rows:
        row["x2"] = row["x"] + [0.0] * 7
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, rows, **options)


def test_irregular_times_are_not_resampled(tmp_path):
    rows = [{"p": f"p{i}", "t": t * t, "v": t + i, "y": "ab"[i % 2]} for i in range(8) for t in range(9)]
    path = put(tmp_path / "rows.csv", rows)
    options = {"id_column": "p", "time_column": "t", "value_columns": ["v"], "label_column": "y", **SHARES}
    for change, message in (({"resample": "1/2"}, "equal times"), ({"patch": 3, "times": "steps"}, "times: steps")):
        with pytest.raises(ValueError, match=message):
            config = custom.Config.model_validate_json(json.dumps({"path": str(path), **options, **change}))
            custom.load(config, tmp_path)


# ------------------------------------------------------------------------------------------------------------- spt try


def test_a_try_windows_few_long_recordings_and_joins_steps_of_many():
    found = {"length": 60_001, "interval": 1 / 125, "most": 4096, "values": True}
    few, lines = shortened({}, {}, recordings=53, **found)
    assert few == {"window": 4000, "stride": 2000, "score": "recording"}
    assert "cut into windows of 4,000" in lines[0]
    many, _ = shortened({}, {}, recordings=2000, **found)
    assert many == {"patch": 16, "last_patch": "pad"}
    short, _ = shortened({}, {}, recordings=53, **{**found, "most": 2048})
    assert short == {"window": 4000, "stride": 2000, "patch": 4, "last_patch": "pad", "score": "recording"}
    assert shortened({}, {"window": 9000}, recordings=53, **found) == ({}, ())
    of_text, _ = shortened({}, {}, recordings=53, **{**found, "values": False})
    assert of_text == {"max_length": 4096, "truncate": True}
    per_step, _ = shortened({"per_step": True}, {}, recordings=53, **found)
    assert per_step == {"window": 4000}
    given = given_transforms(patch=8, spectrogram=None)
    joined, _ = shortened({}, given, recordings=53, length=7500, interval=1.0, most=4096, values=True)
    assert joined["window"] % 8 == joined["stride"] % 8 == 0


@pytest.mark.parametrize(
    "options",
    [{"window": "x"}, {"stride": "4 m"}, {"spectrogram": "a,b"}, {"spectrogram": "256;128"}, {"window": "-4"}],
)
def test_options_of_a_try_are_checked(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        given_transforms(**options)


def test_no_label_is_known_of_new_windows_without_one(finished, tmp_path):
    _, _, path = finished
    rows = recordings(4, seed=1)
    for row in rows:
        del row["y"]
    told = predict(path, Source(put(tmp_path / "new.jsonl", rows), []), tmp_path / "out.csv", CPU)
    assert (told.rows, told.scored, told.scores) == (4, 0, None)
    assert IGNORED == -1
    assert Path(told.out).exists()


LABELS_IN_TIME = [
    ({"label": "hr"}, {"label_at": "last", "target": "real", "window": 5}),
    ({"label": "state"}, {"label_at": "last", "window": 5}),
    ({"label": "y"}, {"window": 8, "stride": 4, "score": "recording"}),
]


@pytest.mark.parametrize(("roles", "expected"), LABELS_IN_TIME)
def test_a_try_opens_long_recordings_whatever_their_label(tmp_path, monkeypatch, roles, expected):
    monkeypatch.setattr("spt.advisor.recordings.LONGEST", 8)
    rows = recordings(40)
    for row in rows:
        row["state"] = ["still" if label > 0 else "moving" for label in row["hr"]]
    path = put(tmp_path / "rows.jsonl", rows)
    decisions = decide(read_table(path), ColumnRoles(inputs=("x",), id="id", group="person", **roles))
    _, data, added, lines = _open({"path": path}, decisions, {}, 8)
    options = {**decisions.options, **added}
    assert {name: options.get(name) for name in expected} == expected
    assert data.length == expected["window"]
    in_time = "a row is a window of 5 steps with its label, one every 5"
    assert (in_time if "label_at" in expected else "cut into windows of 8, one every 4") in lines[-1]
    data.check()


@pytest.mark.parametrize(
    ("period", "given", "expected"),
    [
        (LabelPeriod(3000, 900, 90_000), {}, {"window": 3000}),  # a label's own steps are enough
        (LabelPeriod(10, 900, 240), {}, {"window": 60, "stride": 10}),
        (LabelPeriod(10, 900, 240), {"patch": 4}, {"window": 60, "stride": 20}),
        (LabelPeriod(10, 900, 240), {"stride": 60}, {"window": 60}),
        (LabelPeriod(10, 900, 240), {"spectrogram": {"window": 128, "hop": 20}}, {"window": 140, "stride": 20}),
        (LabelPeriod(1, 900, 20), {}, {"window": 20, "stride": 1}),
        (LabelPeriod(1, 10**6, 10**5), {}, {"window": 512, "stride": 10}),
        (LabelPeriod(125, 900, 90_000), {}, {"window": 625, "stride": 125}),
        (LabelPeriod(5000, 900, 90_000), {}, None),  # longer than a network is shown
        (LabelPeriod(10, 900, 240), {"window": 40}, None),
        (LabelPeriod(10, 900, 240), {"resample": "1/3"}, None),
        (None, {}, None),
    ],
)
def test_every_label_in_time_has_a_window_with_what_was_before(period, given, expected):
    chosen, (line,) = label_windows({"label_at": "majority"}, given, period, 4096)
    assert chosen == ({} if expected is None else {**expected, "label_at": "last"})
    assert line.startswith("labels: a window has the commonest" if expected is None else "labels: one ")


def test_a_try_of_short_recordings_answers_their_labels_in_time(tmp_path):
    rows = recordings(40)
    for row in rows:
        row["state"] = ["still" if label > 0 else "moving" for label in row["hr"]]
    lists = sorted({str(row["state"]) for row in rows})
    path = put(tmp_path / "rows.jsonl", [{**row, "age": lists.index(str(row["state"]))} for row in rows])
    roles = ColumnRoles(inputs=("x",), id="id", group="person", label="state")
    decisions = decide(read_table(path), roles)
    part, data, _, lines = _open({"path": path}, decisions, {}, 4096)
    state = {row["id"]: row["state"] for row in rows}
    for split in data.splits.values():
        for name, target in zip(split.ids.tolist(), split.targets.tolist(), strict=True):
            recording, _, begin = name.partition("@")
            assert data.classes[target] == state[recording][(int(begin) + 20) // 5 - 1]
    assert "a row is a window of 20 steps and has the last label within it, one every 5" in lines[-1]
    assert not any("away" in finding for finding in summarise(part, scored=False)["findings"])
    lines = _open({"path": path}, decisions, {"window": 40}, 4096)[3]
    assert "each has one label" in lines[-1]


def test_new_rows_of_a_model_of_labels_in_time_need_none(tmp_path):
    rows = [{**row, "z": [i % 2] * len(row["x"])} for i, row in enumerate(recordings(40))]
    put(tmp_path / "rows.jsonl", rows)
    put(tmp_path / "bare.jsonl", recordings(40))
    task = {"name": "custom", "path": str(tmp_path / "rows.jsonl"), **LIST, **SHARES, "label_column": "z"}
    job = Job(loaded(tmp_path, task={**task, "window": 9, "label_at": "majority"}, **SMALL), "finetune", 0)
    run(job, tmp_path)
    told = [
        predict(tmp_path / job.name, source, tmp_path / f"{i}.csv", CPU)
        for i, source in enumerate(
            [
                Source(tmp_path / "rows.jsonl", []),
                Source(tmp_path / "rows.jsonl", ["label_column="]),
                Source(tmp_path / "bare.jsonl", []),
            ]
        )
    ]
    assert len({each.rows for each in told}) == 1 and told[0].scored == told[0].rows
    assert told[1].scores is None and told[2].scores is None


EMPTY = [None, []]


def some_without(rows, column):
    """Every third row without its labels, by either kind of empty cell."""
    return [row if i % 3 else {**row, column: EMPTY[i % 2]} for i, row in enumerate(rows)]


@pytest.mark.parametrize("options", [{}, {"label_rate": 0.2, "rate": 1}])
@pytest.mark.parametrize(
    ("column", "how"), [("hr", {"label_at": "mean", "target": "real"}), ("state", {"label_at": "majority"})]
)
def test_a_recording_without_labels_in_time_is_unknown_where_rows_may_be(tmp_path, column, how, options):
    rows = recordings(40)
    for i, row in enumerate(rows):
        row["state"] = ["a" if (i + j) % 3 else "b" for j in range(len(row["hr"]))]
    path = put(tmp_path / "rows.jsonl", rows)
    task = {"name": "custom", "path": str(path), **LIST, **SHARES, "label_column": column, "window": 8, **how}
    job = Job(loaded(tmp_path, task=task | options, **SMALL), "finetune", 0)
    run(job, tmp_path)
    gaps = put(tmp_path / "gaps.jsonl", some_without(rows, column))
    with_all, with_some = (
        predict(tmp_path / job.name, Source(file), tmp_path / f"{file.stem}.csv", CPU) for file in (path, gaps)
    )
    assert with_some.rows == with_all.rows == with_all.scored
    windows = [max(1, len(row["x"]) // 8) for row in rows]
    assert with_all.scored - with_some.scored == sum(windows[::3])
    with pytest.raises(DataError, match="not a list of labels"):
        open_task(Part(**task | options | {"path": str(gaps)}))
    data = open_task(Part(**task | options | {"path": str(gaps), "missing_labels": "ignore"}))
    assert len(data.train) > len(data.labelled().train) > 0


def test_unknown_classes_are_counted_by_what_is_scored(finished, tmp_path):
    rows = [{**row, "y": "c" if i < 3 else row["y"]} for i, row in enumerate(recordings(12))]
    told = predict(finished[2], Source(put(tmp_path / "new.jsonl", rows)), tmp_path / "out.csv", CPU)
    assert told.notes[-1].startswith("3 labels are none of the model's classes ('c')")
    assert (told.rows, told.scored) == (12, 9)


def test_overlapping_windows_of_steps_with_several_labels(tmp_path):
    """The labels of a step stand once, however many windows share it."""
    lines = [f"r{i},{(7 * i + t) % 9},{t // 5 % 2},{t // 7 % 2}" for i in range(30) for t in range(20 + i)]
    (tmp_path / "long.csv").write_text("\n".join(["id,x,s0,s1", *lines]))
    task = {"layout": "long", "id_column": "id", "value_columns": ["x"], "per_step": True, "target": "labels"}
    options = {**task, "label_columns": ["s0", "s1"], "window": 10, "stride": 5}
    data = open_task(Part(name="custom", path=str(tmp_path / "long.csv"), **options))
    assert data.train.shares_steps and data.train.targets.shape == (len(data.train.values), 2)
