"""The pendulum against its law, integrated here in plain loops, and against sequences of the official simulator."""

import math
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from scipy import stats

from spt.rng import keys, normals, uniforms
from spt.tasks import pendulum
from spt.tasks.base import Reals
from spt.tasks.pendulum import Config, clearness, kept_frames, load, make, render, simulate, spoil


class Reference(NamedTuple):
    """24 sequences of 100 frames."""

    noisy: np.ndarray  # (24, 100, 576)
    clean: np.ndarray  # (24, 100, 24, 24)
    targets: np.ndarray  # (24, 100, 2)
    clear: np.ndarray  # (24, 100)
    kept: np.ndarray  # (24, 50)


@pytest.fixture(scope="module")
def reference(data_dir):
    table = pq.read_table(data_dir / "pendulum_reference" / "sample.parquet").to_pydict()
    noisy, clean = (np.stack([np.frombuffer(one, np.uint8) for one in table[name]]) for name in ("noisy", "clean"))
    return Reference(
        noisy.reshape(24, 100, 576),
        clean.reshape(24, 100, 24, 24),
        np.array(table["targets"]).reshape(24, 100, 2),
        np.array(table["noise_factor"]),
        np.array(table["time_idx"]),
    )


def swing(angle, velocity, seconds):
    """Angle and velocity after a time, by the published scheme; 0 is upright."""
    for _ in range(round(seconds / 1e-4)):
        velocity += 1e-4 * (9.81 / (1 / 3) * math.sin(angle) - 0.1 * velocity)
        angle += 1e-4 * velocity
    return angle, velocity


def turned(angle):
    """Into [-pi, pi)."""
    return (angle + np.pi) % (2 * np.pi) - np.pi


# -------------------------------------------------------------------------------------------------- simulation


def test_angles_follow_the_published_scheme():
    rows = np.arange(3)
    angles = simulate(Config(frames=15, kept=1), "val", rows)
    starts = uniforms(keys(0, "pendulum", "start", "val", rows=rows), 1)[:, 0].tolist()
    pushes = normals(keys(0, "pendulum", "torque", "val", rows=rows), 15).tolist()
    for row, start, pushed in zip(angles, starts, pushes, strict=True):
        angle, velocity = 2 * math.pi * start, 0.0
        for frame in range(15):
            assert -math.pi <= row[frame] <= math.pi and abs(turned(row[frame] - (angle - math.pi))) < 1e-12
            angle, velocity = swing(angle, velocity, 0.01)
            velocity += 0.1 * pushed[frame]


def test_without_pushes_a_pendulum_loses_energy_and_hangs(monkeypatch):
    monkeypatch.setattr(pendulum, "TORQUE", 0.0)
    monkeypatch.setattr(pendulum, "FRICTION", 4.0)
    angles = simulate(Config(frames=800), "train", np.arange(3))
    assert np.abs(angles[:, -1]).max() < 1e-3  # 0 hangs


def test_start_and_pushes_have_their_laws():
    options = Config(frames=3, kept=1)
    angles = simulate(options, "train", np.arange(3000))
    assert stats.kstest((angles[:, 0] + np.pi) / (2 * np.pi), "uniform").pvalue > 1e-4
    upright = angles[:, 0] + np.pi
    a, v = upright.copy(), np.zeros(3000)
    for _ in range(200):  # two frames without a push
        v += 1e-4 * (29.43 * np.sin(a) - 0.1 * v)
        a += 1e-4 * v
    pushes = turned(angles[:, 2] - (a - np.pi)) / 0.01
    assert abs(pushes.std() / 0.1 - 1) < 0.06 and abs(pushes.mean()) < 0.01
    assert stats.kstest(pushes / pushes.std(), "norm").pvalue > 1e-4


def test_the_official_pendulum_starts_at_rest_and_moves_alike(reference):
    angles = np.arctan2(reference.targets[..., 0], reference.targets[..., 1])
    first = [swing(angle + math.pi, 0.0, 0.01)[0] - math.pi for angle in angles[:, 0]]
    assert np.abs(turned(angles[:, 1] - first)).max() < 1e-6
    ours = simulate(Config(), "train", np.arange(1000))
    speeds = [np.abs(turned(np.diff(a, axis=1))).mean(axis=0) for a in (angles, ours)]  # (99,), radians a frame
    assert abs(speeds[0][60:].mean() / speeds[1][60:].mean() - 1) < 0.25  # 24 sequences say no more


# ---------------------------------------------------------------------------------------------------- pictures


def test_clean_pictures_are_the_official_ones_to_the_pixel(reference):
    angles = np.arctan2(reference.targets[..., 0], reference.targets[..., 1])
    other = (render(angles) != reference.clean).any(axis=(2, 3))
    assert other.sum() <= 3  # of 2,400: there the angle that was drawn, off by 1e-5, ends in the next pixel
    near = [(render(angles[other] + by) == reference.clean[other]).all(axis=(1, 2)) for by in (-3e-5, 3e-5)]
    assert np.logical_or(*near).all()


def test_a_pendulum_that_hangs_points_down():
    picture = render(np.zeros(1))[0].astype(float)
    rows, columns = picture.sum(axis=1), picture.sum(axis=0)
    assert rows[12:22].min() > 100 and not rows[:9].any() and not columns[:9].any() and not columns[15:].any()
    right = render(np.array([np.pi / 2]))[0].astype(float)
    assert right.sum(axis=0)[12:22].min() > 100 and not right.sum(axis=0)[:9].any()


# ------------------------------------------------------------------------------------------------------- noise


def test_noise_factors_have_the_official_statistics(reference):
    ours = clearness(Config(), "train", np.arange(3000))
    assert (ours[:, :5] == 1).all() and 0 <= ours.min() and ours.max() == 1
    assert abs(ours.mean() - 0.51) < 0.02
    assert abs((ours == 1).mean() - 0.22) < 0.02 and abs((ours == 0).mean() - 0.18) < 0.02
    for factors, slack in ((ours, 0.02), (reference.clear, 0.08)):
        assert abs(factors.mean() - ours.mean()) < slack
        assert abs(np.corrcoef(factors[:, 5:-1].ravel(), factors[:, 6:].ravel())[0, 1] - 0.95) < slack
    steps = np.abs(np.diff(ours[:, 5:], axis=1))
    assert steps.max() <= 0.2 / 0.5 + 1e-9  # at most 0.2, over a distance of thresholds of at least 0.5


def test_a_walk_recovered_from_its_factors_is_uniform_in_steps():
    ours = clearness(Config(), "train", np.arange(2000))
    inner = (ours[:, 6:-1] > 0.25) & (ours[:, 6:-1] < 0.75)  # neither end within reach of a step
    steps = np.diff(ours[:, 6:], axis=1)[inner]
    assert abs(steps.mean()) < 0.01
    flat, _ = np.histogram(steps, bins=np.linspace(-0.2, 0.2, 9))  # steps are U(-.2, .2) / (.5 … 1): flat to here
    assert flat.std() / flat.mean() < 0.03


def test_spoiled_pixels_are_a_mix_with_uniform_noise():
    key = keys(3, "pixels", rows=np.arange(5))
    picture = np.arange(576, dtype=np.uint8)[None].repeat(5, axis=0)
    clear = np.array([1, 0, 0.25, 0.9, 1])
    spoiled = picture.copy()
    spoil(spoiled, clear, key)
    noise = 255 * uniforms(key, 576)
    for i in range(5):
        assert np.array_equal(spoiled[i], np.floor(clear[i] * picture[i] + (1 - clear[i]) * noise[i]).astype(np.uint8))
    assert np.array_equal(spoiled[[0, 4]], picture[[0, 4]])


def test_grey_levels_are_those_of_the_official_simulator(reference):
    options = Config(frames=100, kept=100, train_size=150)
    pictures = make(options, "train", 0, 150)[0]
    clear = clearness(options, "train", np.arange(150))
    noise = pictures[clear == 0]
    assert stats.chisquare(np.bincount(noise.ravel(), minlength=256)[:255]).pvalue > 1e-4 and noise.max() == 254
    official = reference.noisy[reference.clear == 0]
    assert abs(noise.mean() - official.mean()) < 0.5 and abs(noise.std() - official.std()) < 0.5
    assert abs(pictures[clear == 1].mean() - reference.noisy[reference.clear == 1].mean()) < 0.3
    assert abs(pictures.mean() - reference.noisy.mean()) < 8  # of 24 sequences
    edges = np.linspace(0, 256, 17)
    shares = [np.histogram(part, edges)[0] / part.size for part in (pictures, reference.noisy)]
    assert np.abs(shares[0] - shares[1]).max() < 0.06


# -------------------------------------------------------------------------------------------- rows and splits


def test_kept_frames_are_the_published_ones(reference):
    assert np.array_equal(kept_frames(Config(), "train", np.arange(24)), reference.kept)
    for split, offset in (("test", 0), ("val", 1000)):
        expected = [np.sort(np.random.default_rng(i + offset).choice(100, 50, replace=False)) for i in (0, 999)]
        assert np.array_equal(kept_frames(Config(), split, np.array([0, 999])), expected)


def test_seeded_frames_are_uniform():
    options = Config(keeping="seeded", frames=30, kept=10)
    found = kept_frames(options, "train", np.arange(6000))
    assert (np.diff(found, axis=1) > 0).all() and found.min() == 0 and found.max() == 29
    assert stats.chisquare(np.bincount(found.ravel(), minlength=30)).pvalue > 1e-4
    assert not np.array_equal(found, kept_frames(options.model_copy(update={"seed": 1}), "train", np.arange(6000)))


def test_a_row_holds_what_its_kept_frames_show():
    options = Config(train_size=20)
    pictures, targets, steps = make(options, "train", 0, 20)
    rows = np.arange(20)
    when = kept_frames(options, "train", rows)
    angles = np.take_along_axis(simulate(options, "train", rows), when, axis=1)
    assert pictures.shape == (20, 50, 576) and pictures.dtype == np.uint8
    assert np.allclose(targets, np.stack([np.sin(angles), np.cos(angles)], axis=-1), atol=1e-6)
    assert np.allclose((targets**2).sum(axis=-1), 1, atol=1e-6)
    assert (steps[:, 0] == 1).all() and np.array_equal(np.cumsum(steps, axis=1) - 1, when - when[:, :1])
    clear = np.take_along_axis(clearness(options, "train", rows), when, axis=1)
    assert (when[:, 0] < 5).mean() > 0.8 and (clear == 1).sum() > 100
    difference = pictures[clear == 1].astype(int) - render(angles[clear == 1]).reshape(-1, 576)
    assert (difference == 0).all(axis=1).mean() > 0.99  # the angle that is drawn is off by 1e-5


def test_frames_are_the_same_whichever_are_kept():
    every = make(Config(kept=100), "train", 3, 6)
    some = make(Config(), "train", 3, 6)
    when = kept_frames(Config(), "train", np.arange(3, 6))
    assert np.array_equal(np.take_along_axis(every[0], when[..., None], axis=1), some[0])
    assert np.array_equal(np.take_along_axis(every[1], when[..., None], axis=1), some[1])
    assert (every[2] == 1).all()


def test_splits_are_determined_disjoint_and_prefixes(tmp_path, monkeypatch):
    options = Config(frames=20, kept=8, train_size=30, eval_size=11)
    data = load(options, tmp_path)
    data.check()
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 30, "val": 11, "test": 11}
    assert data.target == Reals(2, per_step=True) and data.length == 8 and data.interval == 1
    assert data.input.frame == (24, 24) and data.input.levels == 256 and set(data.input.std) == {255.0}
    assert data.train.values.dtype == np.uint8 and data.train.values.shape == (240, 576)
    sequences = [split.row(i).tobytes() for split in data.splits.values() for i in range(len(split))]
    starts = [split.targets[8 * i].tobytes() for split in data.splits.values() for i in range(len(split))]
    assert len(set(sequences)) == len(set(starts)) == 52
    ids = [set(split.ids.tolist()) for split in data.splits.values()]
    assert len(set.union(*ids)) == 52

    monkeypatch.setattr(pendulum, "CHUNK", 7)  # other chunks, by several workers
    monkeypatch.setenv("SPT_WORKERS", "3")
    for max_rows in (None, 5):
        again = load(options.model_copy(update={"max_rows": max_rows}), tmp_path)
        for name, split in again.splits.items():
            whole = data.splits[name]
            assert len(split) == (max_rows or len(whole))
            n = len(split.values)
            assert np.array_equal(split.values, whole.values[:n]) and np.array_equal(split.ids, whole.ids[: len(split)])
            assert np.array_equal(split.targets, whole.targets[:n]) and np.array_equal(split.steps, whole.steps[:n])
    other = load(options.model_copy(update={"seed": 1, "max_rows": 5}), tmp_path)
    assert not np.array_equal(other.train.targets, data.train.targets[:40])
    assert np.array_equal(other.train.steps, data.train.steps[:40])  # published, whatever the seed


def test_options(tmp_path):
    options = {"frames": 20, "kept": 8, "train_size": 4, "eval_size": 3}
    assert load(Config(**options, times="drop"), tmp_path).train.steps is None
    data = load(Config(**options, validation="test"), tmp_path)
    assert np.array_equal(data.val.values, data.test.values) and "optimistic" in data.notes[0]
    assert not load(Config(**options), tmp_path).notes
    defaults = Config()
    assert (defaults.train_size, defaults.eval_size, defaults.frames, defaults.kept) == (2000, 1000, 100, 50)
    with pytest.raises(ValidationError, match="kept: 50 of frames: 40; at most all"):
        Config(frames=40)
    with pytest.raises(ValidationError, match="less than or equal to 4096"):
        Config(frames=5000)


def test_one_answer_for_all_explains_nothing():
    targets = make(Config(), "train", 0, 400)[1]
    assert np.abs(targets[..., 0].mean()) < 0.08  # sine: left and right alike; a pendulum hangs more often than not
    assert targets[..., 0].var() > 0.3 and targets[..., 1].var() > 0.2
