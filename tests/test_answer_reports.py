"""What a report tells of test answers: other metrics, groups with their worst, confusion, reliability."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from records import compared, finish, plan, shown

from spt.report import answers, figures, html, machine, markdown, plotting
from spt.report.collect import Report, read_report
from spt.report.stats import paired
from spt.report.write import write_report
from spt.runs.result import Calibration, GroupScore
from spt.training.calibration import calibrate
from spt.training.metrics import ScoredAnswers

GROUPS = {  # rows, and scores by arm and seed
    "north": (40, {"scratch": (0.5, 0.6, 0.7), "spt": (0.6, 0.65, 0.9)}),
    "south": (25, {"scratch": (0.4, 0.5, 0.5), "spt": (0.8, 0.85, 0.9)}),
    "tiny": (3, {"scratch": (0.0, 0.0, 0.0), "spt": (1.0, 0.0, 1.0)}),
}


def calibration(sharpness: float) -> Calibration:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 2, 200)
    logits = torch.tensor(sharpness * (rng.normal(size=(200, 2)) + np.eye(2)[truth]))
    return calibrate(ScoredAnswers(truth, logits, np.arange(200)), ScoredAnswers(truth, logits, np.arange(200)))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, cells = tmp_path_factory.mktemp("answers"), []
    for arm, hits in (("scratch", 30), ("spt", 33)):
        for seed in range(3):
            groups = tuple(
                GroupScore(name=name, rows=rows, score=scores[arm][seed]) for name, (rows, scores) in GROUPS.items()
            )
            test = {"accuracy": 0.7 + 0.01 * seed, "auroc": 0.8 + 0.01 * seed + 0.1 * (arm == "spt"), "log_loss": 0.5}
            confusion = ((hits + seed, 40 - hits - seed), (8, 20))
            told = {
                "classes": ("ill", "well"),
                "confusion": confusion,
                "calibration": calibration(4.0 if seed else 3.0),
            }
            cells.append(finish(root, arm, seed, 0.7, test=test, groups=groups, **told))
    return plan(root, cells)


@pytest.fixture(scope="module")
def report(study: Path) -> Report:
    return read_report([study])


def test_other_metrics_are_compared_seed_by_seed(report):
    auroc, log_loss = report.metrics
    assert (auroc.metric, auroc.n, auroc.higher_is_better) == ("auroc", 3, True) and not log_loss.higher_is_better
    assert (auroc.scratch, auroc.spt, auroc.delta) == pytest.approx((0.81, 0.91, 0.1))
    assert [seed.spt for seed in auroc.seeds] == pytest.approx([0.9, 0.91, 0.92])
    lines = list(csv.DictReader(io.StringIO(machine.to_csv(report, "metrics"))))
    assert [line["seed"] for line in lines if line["metric"] == "auroc"] == ["0", "1", "2"]


def test_groups_have_an_interval_over_seeds_and_the_worst_is_named(report):
    north, south, tiny = report.groups
    expected = paired([0.1, 0.05, 0.2])
    assert (north.delta, north.low, north.high) == pytest.approx((expected.mean, expected.low, expected.high))
    assert (north.group, north.rows, north.few, tiny.few) == ("north", 40, False, True)
    assert south.worst == ("scratch",) and north.worst == ("spt",), "the tiny one, worse in scratch, does not count"
    assert tiny.worst == ()


def test_of_groups_that_are_all_small_one_is_named_all_the_same():
    scored = {"label": "", "metric": "mae", "higher_is_better": False, "few": True, "n": 1, "delta": 0.0}
    scored |= {"low": None, "high": None, "spt": 1.0, "rows": 3}
    groups = [answers.GroupComparison(**scored, group=name, scratch=score) for name, score in (("a", 2.0), ("b", 3.0))]
    assert answers._worst(groups, "scratch") == "b", "of an error the largest is worst"


def test_a_group_without_a_score_in_an_arm_is_left_out_of_its_means(tmp_path):
    cells = []
    for arm in ("scratch", "spt"):
        for seed in range(3):
            score = None if (arm, seed) == ("spt", 1) else 0.5 + 0.1 * seed
            cells.append(finish(tmp_path, arm, seed, 0.5, groups=(GroupScore(name="a", rows=30, score=score),)))
    (group,) = read_report([plan(tmp_path, cells)]).groups
    assert (group.n, group.scratch) == (2, pytest.approx(0.6))


def test_groups_that_each_split_tests_anew_are_all_told(tmp_path):
    """Of folds of whole groups each tests others."""
    cells, where = [], {"k1": ("a", "b"), "k2": ("c",)}
    for arm, more in (("scratch", 0.0), ("spt", 0.1)):
        for split, names in where.items():
            for seed in range(2):
                groups = tuple(GroupScore(name=name, rows=30, score=0.5 + more + 0.1 * seed) for name in names)
                run = f"finetune-{arm}{split}{seed}"
                cells.append({**finish(tmp_path, arm, seed, 0.5, run=run, groups=groups), "split": split})
    found = read_report([plan(tmp_path, cells, splits=["k1", "k2"])]).groups
    assert [(group.group, group.n, group.low) for group in found] == [("a", 2, None), ("b", 2, None), ("c", 2, None)]
    assert [group.delta for group in found] == pytest.approx([0.1] * 3)


def test_confusion_is_the_mean_over_runs(report):
    scratch, spt = report.confusions
    assert [each.name for each in scratch.classes] == ["ill", "well"] and (scratch.runs, spt.arm) == (3, "spt")
    assert scratch.classes[0].counts == (31, 9) and spt.classes[0].counts == (34, 6)


def test_reliability_pools_the_answers_of_all_runs(report):
    scratch, _ = report.calibrations
    made = [calibration(3.0), calibration(4.0), calibration(4.0)]
    assert scratch.temperatures == tuple(each.temperature for each in made)
    assert sum(bin.count for bin in scratch.bins) == 600
    last = [each.before.bins[-1] for each in made if each.before]
    assert scratch.bins[-1].accuracy == pytest.approx(
        sum(bin.count * bin.accuracy for bin in last) / sum(bin.count for bin in last)
    )
    assert scratch.ece == pytest.approx(np.mean([each.before.ece for each in made if each.before]))
    assert scratch.ece_after < scratch.ece


def test_every_writer_shows_them(report, study, tmp_path):
    page = html.page(report, figures.all_figures(report))
    text = markdown.markdown(report)
    for words in ("Other metrics", "Groups of test rows", "Right and wrong answers by class", "after calibration"):
        assert words in page and words in text
    assert "south" in shown(report) and "3 (few)" in text
    record = json.loads(json.dumps(machine.to_json(report), allow_nan=False))
    assert [len(record[part]) for part in ("metrics", "groups", "confusions", "calibrations")] == [2, 3, 2, 2]
    paths = {path.name for path in write_report(report, tmp_path / "out", with_figures=True)}
    assert {"metrics.csv", "groups.csv", "confusion.svg", "reliability.svg", "confusion.csv"} <= paths


def test_the_figures_hold_every_number_that_is_drawn(report):
    plots = {plot.name: plot for plot in figures.all_figures(report)}
    confusion, reliability = plots["confusion"], plots["reliability"]
    assert {line["rows"] for line in confusion.data if line["arm"] == "scratch"} == {31, 9, 8, 20}
    assert sum(line["answers"] for line in reliability.data) == 4 * 600
    assert "with temperature" in plotting.svg(reliability)


def test_older_runs_have_none_of_it(tmp_path):
    report = read_report([compared(tmp_path, [0.5, 0.6, 0.7], [0.6, 0.7, 0.8])])
    assert (report.metrics, report.groups, report.confusions, report.calibrations) == ((), (), (), ())
    assert not {plot.name for plot in figures.all_figures(report)} & {"confusion", "reliability"}
