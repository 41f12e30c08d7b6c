"""`spt data check`: trivial scores and odd rows of any task, and what the page shows of them."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from test_predictions import asking, data_of
from tiny import environment, spt

from spt.config.recipe import Part
from spt.data import summary
from spt.data.fingerprints import with_fingerprints
from spt.data.linear_probe import linear_probe
from spt.data.summary import _conflicts, _findings, render, summarise
from spt.tasks.base import Classes, Reals, Split, TaskData, Tokens, Values


def task(rows, targets, input, target, **extra):
    n = len(rows)
    cut = [slice(0, n // 2), slice(n // 2, 3 * n // 4), slice(3 * n // 4, n)]
    parts = [with_fingerprints(Split.from_rows(rows[c], targets[c], ids=np.arange(n)[c], **extra)) for c in cut]
    return TaskData(input, target, *parts)


def test_a_probe_finds_what_needs_no_order():
    rng = np.random.default_rng(0)
    counts = [rng.integers(0, 5, 40).astype(np.uint8) for _ in range(400)]
    often = [int((row == 3).sum() > 8) for row in counts]
    assert linear_probe(task(counts, often, Tokens(5), Classes(2)))["test"]["accuracy"] > 0.9
    order = [int(row[7] > row[8]) for row in counts]
    assert linear_probe(task(counts, order, Tokens(5), Classes(2)))["test"]["accuracy"] < 0.75

    waves = rng.normal(size=(400, 30, 2)).astype(np.float32)
    place = waves[:, 4, 1:2] * 3 + 7
    found = linear_probe(task(waves, place, Values(2), Reals(1)))
    assert found["test"]["r2"] > 0.95 and found["features"] == "all numbers of a row"
    long = rng.normal(size=(300, 3000, 1)).astype(np.float32) * rng.uniform(1, 3, (300, 1, 1)).astype(np.float32)
    loud = long.std(axis=1)
    found = linear_probe(task(long, loud, Values(1), Reals(1)))
    assert found["test"]["r2"] > 0.95 and found["features"].startswith("moments")
    noise = rng.normal(size=(300, 1))
    assert linear_probe(task(long, noise, Values(1), Reals(1)))["test"]["r2"] < 0.2


def test_ranges_of_steps_are_of_the_rows_in_use(tmp_path):
    few, all_rows = (asking(tmp_path, "numbers", **more).recipe.task for more in ({"task__subset_fraction": 0.1}, {}))
    data = data_of(asking(tmp_path, "numbers", task__subset_fraction=0.1))
    targets = np.concatenate([*replace(data.train, values=data.train.targets).pieces()])
    known = targets[np.isfinite(targets[:, 0])]
    found, whole = (summarise(part)["targets"]["train"] for part in (few, all_rows))
    assert found["max"] == pytest.approx(known.max(0).tolist()) and found["mean"] == pytest.approx(
        known.mean(0).tolist()
    )
    assert whole["max"][0] > found["max"][0] or whole["mean"] != found["mean"]


def test_a_probe_of_steps_and_pairs(tmp_path):
    tags = data_of(asking(tmp_path, "tags", task__rows=200))
    assert linear_probe(tags)["test"]["accuracy"] > 0.95  # the token itself decides
    numbers = data_of(asking(tmp_path, "numbers", task__rows=200))
    assert 0.5 < linear_probe(numbers)["test"]["r2"] <= 1  # one of two is the token, the other a running sum
    pairs = data_of(asking(tmp_path, "pairs", task__rows=200))
    found = linear_probe(pairs)
    assert "both sequences" in found["features"] and found["test"]["accuracy"] > 0.6
    one_class = replace(tags, train=replace(tags.train, targets=np.zeros_like(tags.train.targets)))
    assert linear_probe(one_class) is None


def test_a_probe_sees_neither_validation_nor_padding(tmp_path):
    data = data_of(asking(tmp_path, "tags", task__rows=50))
    other = replace(data, val=replace(data.val, targets=np.zeros_like(data.val.targets)))
    assert linear_probe(other) == linear_probe(data)


def test_odd_rows_are_found():
    rng = np.random.default_rng(0)
    waves = rng.normal(size=(40, 6, 3)).astype(np.float32)
    waves[:, :, 1] = 2.5
    rare = np.array([0] * 39 + [1])
    found = _findings(task(waves[::-1], np.roll(rare, 1), Values(3), Classes(2)))
    assert any("1 of 3 channels are constant in the training rows: 1 (2.5)" in line for line in found)
    assert any("1 of 2 classes have fewer than two training rows" in line for line in found)
    assert any("95.0% of the training answers are class 0" in line for line in found)
    twice = np.repeat(rng.normal(size=(20, 6, 1)).astype(np.float32), 2, axis=0)
    said = task(twice, np.tile([0, 1], 20), Values(1), Classes(2))
    assert _conflicts(said.train) == 10
    assert any(
        "10 training rows have the input of an earlier row, but another target" in line for line in _findings(said)
    )
    agreed = task(twice, np.repeat([0, 1] * 10, 2), Values(1), Classes(2))
    assert _findings(agreed) == []


@pytest.mark.parametrize("ask", ["tags", "numbers", "pairs", "times", "next", "plain"])
def test_the_page_of_every_kind_of_task(ask, tmp_path):
    one = asking(tmp_path, ask, task__rows=40, task__interval=0.5)
    found = json.loads(json.dumps(summarise(one.recipe.task), allow_nan=False))
    page = render(found)
    assert sum(found["lengths"]["train"]["histogram"]) == (80 if ask == "pairs" else 40)
    assert ("pairs of sequences" in page) == (ask == "pairs")
    assert ("from step to step" in page) == (ask == "times")
    assert "one step stands for 0.5" in page and "probe " in page
    assert (found["chance"] is None) == (ask == "numbers")


@pytest.mark.slow
def test_the_command_shows_it(tmp_path):
    env = {"SPT_CACHE_DIR": str(tmp_path / "cache"), "SPT_WORKERS": "1"}
    done = spt("data", "check", "skills", "max_rows=8", "length=16", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "training rows are drawn again for every epoch" in done.stdout and "r2" in done.stdout
    for workers, said in (("0", "workers"), ("many", "workers")):
        done = spt("data", "prepare", "listops", "max_rows=3", "--workers", workers, cwd=tmp_path, env=env)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    env["SPT_WORKERS"] = "-3"
    done = spt("compare", "quickstart", "task.name=listops", "--smoke", "--seeds", "1", cwd=tmp_path, env=env)
    assert done.returncode == 3 and "SPT_WORKERS is '-3'" in done.stderr, (done.returncode, done.stderr)


def test_long_work_says_how_far_it_is(monkeypatch, caplog):
    import time

    from spt.tasks.parallel import map_chunks

    clock = iter(range(0, 10_000, 6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level("INFO", "spt.tasks"):
        assert list(map_chunks(lambda first, last: last - first, 10, 2, "pictures")) == [2] * 5
    assert any("pictures: " in line and " of 10 rows" in line for line in caplog.messages)


@pytest.mark.parametrize("by", ["threads", "processes"])
def test_workers_keep_the_order_and_pass_errors_on(by, monkeypatch):
    from spt.tasks.parallel import map_chunks

    monkeypatch.setenv("SPT_WORKERS", "2")
    assert list(map_chunks(range, 20, 3, "x", by=by)) == [range(i, min(i + 3, 20)) for i in range(0, 20, 3)]
    with pytest.raises(ValueError, match=r"math domain|positive"):
        list(map_chunks(math.log, 20, 3, "x", by=by))  # of 0


def test_workers_do_not_run_the_script_again(tmp_path):
    """Which would wait for them, without `if __name__ == "__main__"`."""
    (tmp_path / "script.py").write_text(
        "import operator\nprint('begun')\nfrom spt.tasks.parallel import map_chunks\n"
        "print(list(map_chunks(operator.sub, 10, 3, 'x', 'processes')), __file__, __spec__)\n"
    )
    env = environment({"SPT_WORKERS": "2"})
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    path = tmp_path / "script.py"
    assert done.stdout == f"begun\n[-3, -3, -3, -1] {path.name} None\n".replace(path.name, str(path)), done.stderr


def test_workers_find_what_the_script_gives_them(tmp_path):
    """Its own class, in an argument of a function of a library."""
    (tmp_path / "script.py").write_text(
        "from functools import partial\nfrom spt.tasks.parallel import map_chunks\n"
        "class Law(tuple):\n    pass\n"
        "if __name__ == '__main__':\n"
        "    print([len(each.start) for each in map_chunks(partial(slice, Law('ab')), 10, 3, 'x', 'processes')])\n"
    )
    env = environment({"SPT_WORKERS": "2"})
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "[2, 2, 2, 2]\n", done.stderr


def test_a_tasks_own_findings_are_shown(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from spt.tasks.digits import Config, load\ndef findings(config, raw):\n    return ['column x gives it away']\n"
    )
    found = summarise(Part(name=str(tmp_path / "mine.py"), max_rows=20))
    assert "column x gives it away" in found["findings"] and "column x gives it away" in render(found)


def test_rows_of_many_lengths_or_words_are_probed():
    rng = np.random.default_rng(0)
    lengths = [20] * 30 + [int(n) for n in rng.integers(10, 20, 30)]  # training rows alone are equally long
    rows = [rng.normal(size=(n, 1)).astype(np.float32) for n in lengths]
    found = linear_probe(task(np.array(rows, object), rng.integers(0, 2, 60), Values(1), Classes(2)))
    assert found["features"].startswith("moments")
    words = [rng.integers(0, 100_000, 30).astype(np.int32) for _ in range(60)]
    assert linear_probe(task(np.array(words), rng.integers(0, 2, 60), Tokens(100_000), Classes(2))) is not None


def test_rows_of_which_nothing_is_asked_are_shown(tmp_path):
    data = data_of(asking(tmp_path, "numbers"))
    assert linear_probe(replace(data, test=replace(data.test, targets=np.full_like(data.test.targets, np.nan)))) is None


def test_the_median_of_much_is_that_of_a_part():
    from spt.data.summary import _median

    rng = np.random.default_rng(0)
    values = rng.normal([0, 5], size=(3000, 100, 2)).astype(np.float32)
    split = Split.from_rows(values, np.zeros(3000, np.int64))
    assert np.allclose(_median(split), np.median(split.values, axis=0))
    assert np.allclose(_median(split.take(np.tile(np.arange(3000), 40))), [0, 5], atol=0.01)


def test_functions_are_compiled_where_nothing_can_be_kept(monkeypatch):
    from spt.tasks.generators import compiled

    class Numba:
        @staticmethod
        def njit(function, nogil, cache=False):
            if cache:
                raise RuntimeError("cannot cache function: no locator available")
            return lambda: "compiled"

    def plain():
        return None

    monkeypatch.setattr(compiled, "_numba", lambda: Numba)
    assert compiled.jit(plain)() == "compiled"
    monkeypatch.setattr(compiled, "_numba", lambda: None)
    assert compiled.jit(plain) is plain


def test_a_number_that_no_row_of_a_split_has_is_a_dash():
    assert summary._target_line({"min": [None, 1.0], "max": [None, 2.5]}) == "min - 1, max - 2.5"


@pytest.mark.parametrize("value", [0.1, 0.0])
def test_a_constant_target_has_an_r2_of_one_or_nothing(value):
    """As in the networks' metric: one for the right answer alone."""
    rows = [*np.random.default_rng(0).normal(size=(60, 4, 1)).astype(np.float32)]
    varied, constant = np.linspace(0, 1, 60)[:, None], np.full((60, 1), value)
    for train, expected in ((varied, 0.0), (constant, 1.0)):
        train_split = Split.from_rows(rows, train)
        test_split = Split.from_rows(rows, constant)
        data = TaskData(Values(1), Reals(1), *map(with_fingerprints, (train_split, train_split, test_split)))
        assert linear_probe(data)["test"]["r2"] == pytest.approx(expected)
