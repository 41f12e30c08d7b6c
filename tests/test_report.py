"""Reports over hand-made runs: exact differences, honest verdicts, and no run that goes missing."""

import contextlib
import csv
import io
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from records import FINETUNING, MIB, SCRATCH, SPLITS, compared, finish, plan, row_of, shown, start, study

from spt.analysis.diff_reports import diff_reports
from spt.cli.output import console
from spt.config.recipe import LOWER_IS_BETTER, Metric
from spt.errors import DataError, OutputError, UsageError
from spt.report import collect, curves, format, machine, markdown, published, stats, terminal, verdict, write
from spt.report.collect import Report
from spt.report.ranking import brief_ranking
from spt.report.tables import by_section
from spt.runs.files import write_json
from spt.runs.folder import RunFolder
from spt.runs.result import LARGEST, GroupScore, Ledger, check_scores
from spt.training.metrics import text_scores


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small files are written here; that each survives a power cut is not the point."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


# Statistics and verdicts


def test_no_interval_of_a_fraction_passes_what_a_fraction_can_be() -> None:
    assert format.score_interval_text(0.9046, 1.0287, "accuracy") == "90.46 to 100.00"
    assert format.score_interval_text(-0.01, 0.2, "f1_macro") == "0.00 to 20.00"
    assert format.score_interval_text(-0.5, 1.25, "r2") == "-0.5000 to 1.250"
    assert format.score_interval_text(None, None, "accuracy") == "-"


def test_rounding_has_no_sign_and_a_small_difference_has_its_own():
    assert [format.delta_text(value, "accuracy") for value in (-1e-16, 1e-16, -3e-5)] == ["+0.00", "+0.00", "-0.00"]
    assert format.delta_text(-1e-16, "mse") == "+0.00"


def test_differences_are_taken_seed_by_seed(tmp_path: Path) -> None:
    row = row_of(compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86]))
    assert [seed.delta for seed in row.seeds] == pytest.approx([0.05, 0.04, 0.06])
    assert (row.scratch, row.spt, row.delta) == pytest.approx((0.75, 0.80, 0.05))
    assert (row.low, row.high) == pytest.approx((0.05 - 0.0248414, 0.05 + 0.0248414), abs=1e-6)  # t = 4.30265
    assert (row.n, row.planned, row.favour_spt, row.decision) == (3, 3, 3, "spt")
    assert row.p == pytest.approx(0.0131, abs=1e-4)
    assert row.verdict == "SPT beats scratch by 5.00 points (95 % interval 2.52 to 7.48, n=3)"
    assert (row.task, row.model, row.recipe, row.label) == (
        "digits",
        "transformer",
        "quickstart",
        "digits / transformer",
    )


def test_arms_meet_by_seed_and_not_by_order(tmp_path: Path) -> None:
    cells = [finish(tmp_path, "scratch", seed, 0.5 + seed / 10) for seed in (2, 0, 1)]
    cells += [finish(tmp_path, "spt", seed, 0.51 + seed / 10) for seed in (1, 2, 0)]
    row = row_of(plan(tmp_path, cells))
    assert [(seed.seed, seed.scratch_run, seed.spt_run, seed.pretrain_run) for seed in row.seeds] == [
        (seed, f"finetune-scratch{seed}", f"finetune-spt{seed}", f"pretrain-for-spt{seed}") for seed in range(3)
    ]
    assert [seed.delta for seed in row.seeds] == pytest.approx([0.01] * 3)


@pytest.mark.parametrize(
    ("scratch", "spt", "decision", "verdict"),
    [
        ([0.75], [0.80], "too few seeds", "cannot be decided with 1 seed: SPT - scratch is +5.00 points"),
        (
            [0.75, 0.76],
            [0.80, 0.8102],
            "too few seeds",
            "cannot be decided with 2 seeds: SPT - scratch is +5.01 points",
        ),
        (
            [0.75, 0.79, 0.86],
            [0.70, 0.75, 0.80],
            "scratch",
            "scratch beats SPT by 5.00 points (95 % interval 2.52 to 7.48, n=3)",
        ),
        (
            [0.70, 0.70, 0.70],
            [0.72, 0.69, 0.72],
            "open",
            "not decided: SPT - scratch is +1.00 points (95 % interval -3.30 to +5.30, n=3, 2 of 3 seeds "
            "favour SPT); 3 seeds could only have shown a difference of about 5.65 points or more",
        ),
        (
            [0.70, 0.71, 0.72],
            [0.72, 0.73, 0.74],
            "no spread",
            "not decided: SPT - scratch is +2.00 points with each of 3 seeds, no spread to judge it by",
        ),
    ],
    ids=["one seed", "two seeds", "scratch wins", "not decided", "no spread"],
)
def test_verdict_claims_what_the_seeds_can_carry(
    tmp_path: Path, scratch: list[float], spt: list[float], decision: str, verdict: str
) -> None:
    row = row_of(compared(tmp_path, scratch, spt))
    assert (row.decision, row.verdict) == (decision, verdict)


def test_one_seed_has_no_interval_and_two_have(tmp_path: Path) -> None:
    one, two = (
        row_of(compared(tmp_path / "1", [0.7], [0.8])),
        row_of(compared(tmp_path / "2", [0.7, 0.6], [0.8, 0.9])),
    )
    assert (one.low, one.high, one.p, one.detectable) == (None, None, None, None)
    assert two.low is not None and two.high is not None and two.low < two.high


def test_lower_can_be_better(tmp_path: Path) -> None:
    row = row_of(
        compared(tmp_path, [2.0, 2.1, 2.2], [1.5, 1.61, 1.69], metric="mse", higher_is_better=False, chance=2.15)
    )
    assert row.delta == pytest.approx(-0.5)
    assert (row.decision, row.favour_spt) == ("spt", 3)
    assert row.verdict == "SPT beats scratch by 0.500 in mse (lower is better, 95 % interval 0.475 to 0.525, n=3)"
    assert "scratch is not shown to be above chance (2.150; one-sided p 0.239)" in row.notes
    assert "SPT is not" not in str(row.notes)


def test_seeds_that_disagree_are_counted(tmp_path: Path) -> None:
    spt = [0.80, 0.81, 0.82, 0.83, 0.84, 0.85, 0.745]
    row = row_of(compared(tmp_path, [0.75] * 7, spt))
    assert row.decision == "spt"
    assert "n=7, 6 of 7 seeds favour SPT" in row.verdict


def test_different_data_is_no_comparison(tmp_path: Path) -> None:
    folder = compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    other = {**SPLITS, "test": SPLITS["test"].model_copy(update={"inputs": "xx"})}
    finish(tmp_path, "spt", 1, 0.79, data=other)
    row = row_of(folder)
    assert (row.decision, row.verdict) == (
        "different data",
        "not comparable: the arms did not see the same data",
    )
    assert row.warnings == ("the arms have different data in the test split (seed 1)",)
    assert "WARNING: the arms have different data in the test split (seed 1)" in shown(collect.read_report([folder]))


def test_smoke_runs_mean_nothing(tmp_path: Path) -> None:
    planned = row_of(plan(tmp_path, [finish(tmp_path, arm, 0, 0.5) for arm in ("scratch", "spt")], smoke=True))
    by_result = row_of(compared(tmp_path / "other", [0.1] * 3, [0.5, 0.6, 0.7], smoke=True))
    for row in (planned, by_result):
        assert row.smoke
        assert row.verdict == "smoke run: it shows that everything runs; its scores mean nothing"


def test_scores_near_chance_are_marked(tmp_path: Path) -> None:
    row = row_of(compared(tmp_path, [0.10, 0.12, 0.09], [0.3, 0.4, 0.5]))
    assert row.scratch_arm is not None and row.scratch_arm.above_chance is False
    assert row.spt_arm is not None and row.spt_arm.above_chance is True
    assert "scratch is not shown to be above chance (10.00; one-sided p 0.371)" in row.notes


# Cost


def test_cost_of_spt_includes_its_pretraining(tmp_path: Path) -> None:
    row = row_of(compared(tmp_path, [0.7, 0.8, 0.9], [0.8, 0.9, 0.9]))
    scratch, spt = row.scratch_arm, row.spt_arm
    assert scratch is not None and spt is not None
    assert (scratch.total.steps, scratch.pretraining.steps) == (100, 0)
    assert (spt.pretraining.steps, spt.finetuning.steps, spt.total.steps) == (60, 40, 100)
    assert (spt.pretraining.flops, spt.finetuning.flops, spt.total.flops) == (6e9, 4e9, 1e10)
    assert (spt.pretraining.peak_bytes, spt.finetuning.peak_bytes, spt.total.peak_bytes) == (
        3 * MIB,
        2 * MIB,
        3 * MIB,
    )
    assert row.ratios == {"steps": 1.0, "examples": 1.0, "flops": 1.0, "seconds": 1.25, "peak_bytes": 1.5}
    assert row.compute == "compute matched: steps ×1.00, examples ×1.00, FLOPs ×1.00"
    assert row.budgets.endswith("in all as many updates and as many epochs as scratch")


def test_memory_of_pretraining_is_unknown_where_finetuning_needed_more(tmp_path: Path) -> None:
    own = FINETUNING.model_copy(update={"peak_bytes": 5 * MIB})
    cells = [finish(tmp_path, "scratch", 0, 0.5), finish(tmp_path, "spt", 0, 0.6, own=own)]
    arm = row_of(plan(tmp_path, cells)).spt_arm
    assert arm is not None
    assert arm.pretraining.peak_bytes is None
    assert arm.finetuning.peak_bytes == arm.total.peak_bytes == 5 * MIB


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (
            Ledger(steps=20, examples=200, flops=2e9),
            "SPT used ×5.00 the training FLOPs of scratch: part of the difference may be compute "
            "(steps ×5.00, examples ×5.00, FLOPs ×5.00)",
        ),
        (
            Ledger(steps=200, examples=2000, flops=2e10),
            "scratch used ×2.00 the training FLOPs of SPT: part of the difference may be compute "
            "(steps ×0.50, examples ×0.50, FLOPs ×0.50)",
        ),
        (
            Ledger(steps=200, examples=1000, flops=1e10),
            "compute not matched on every axis: steps ×0.50, examples ×1.00, FLOPs ×1.00",
        ),
        (Ledger(), "compute was not recorded"),
    ],
    ids=["more", "less", "steps only", "unknown"],
)
def test_unmatched_compute_is_said(tmp_path: Path, own: Ledger, sentence: str) -> None:
    cells = [finish(tmp_path, "scratch", seed, 0.5, own=own) for seed in range(3)]
    cells += [finish(tmp_path, "spt", seed, 0.6) for seed in range(3)]
    assert row_of(plan(tmp_path, cells)).compute == sentence


def test_how_runs_ended_is_said(tmp_path: Path) -> None:
    cells = [finish(tmp_path, "scratch", seed, 0.5, best_step=100) for seed in range(2)]
    cells += [finish(tmp_path, "spt", 0, 0.6), finish(tmp_path, "spt", 1, 0.6, stop="patience")]
    row = row_of(plan(tmp_path, cells))
    assert row.scratch_arm is not None and row.spt_arm is not None
    assert (row.scratch_arm.stops, row.spt_arm.stops) == ({"budget": 2}, {"budget": 1, "patience": 1})
    assert row.scratch_arm.best_at_end == 2
    assert row.notes[:2] == (
        "stopped early by patience: 0 of 2 scratch runs and 1 of 2 SPT runs",
        "best at the last step, more training might help: 2 of 2 scratch runs and 0 of 2 SPT runs",
    )


def test_arms_of_different_size_or_device_are_said(tmp_path: Path) -> None:
    cells = [finish(tmp_path, "scratch", 0, 0.5, parameters={"total": 9}, environment={"device": "H200"})]
    cells += [finish(tmp_path, "spt", 0, 0.6)]
    warnings = row_of(plan(tmp_path, cells)).warnings
    assert any("numbers of parameters" in said for said in warnings)
    assert any("different devices" in said for said in warnings)


# Runs without a score


def damage(root: Path, name: str) -> None:
    (root / name / "result.json").write_text('{"format": 2, "key"')


def undo(root: Path, name: str) -> None:
    (root / name / "result.json").unlink()


def fail(root: Path, name: str, state: Any, reason: str, code: int) -> None:
    undo(root, name)
    RunFolder(root, name).set_status(state, reason, code)


@pytest.mark.parametrize(
    ("state", "reason", "code"),
    [
        ("diverged", "the loss became nan at step 12", 5),
        ("failed", "out of memory", 1),
        ("stopped", "SIGTERM", 75),
        ("running", "started, not finished", None),
        ("missing", "not run yet", None),
        ("missing", "its status is done, but there is no result", None),
        ("unreadable", "cannot be read as a result", None),
    ],
)
@pytest.mark.parametrize("arm", ["scratch", "spt"])
def test_a_run_without_a_score_is_listed_and_its_pair_left_out(
    tmp_path: Path, arm: Any, state: Any, reason: str, code: int | None
) -> None:
    folder = compared(tmp_path, [0.70, 0.75, 0.80, 0.10], [0.75, 0.79, 0.86, 0.95])
    name = f"finetune-{arm}3"
    if state == "unreadable":
        damage(tmp_path, name)
    elif state == "missing":
        undo(tmp_path, name)
        if "yet" in reason:
            (tmp_path / name / "status.json").unlink()
    else:
        fail(tmp_path, name, state, "" if state == "running" else reason, code or 0)
    made = collect.read_report([folder])
    (row,) = made.rows
    assert (row.n, row.planned) == (3, 4)
    assert (row.scratch, row.delta) == pytest.approx((0.75, 0.05))  # of the complete pairs
    assert row.verdict.endswith("n=3); 1 of 4 pairs incomplete")
    ((label, failure),) = made.failures
    assert (label, failure.arm, failure.seed, failure.run, failure.state) == (row.label, arm, 3, name, state)
    assert reason in failure.reason
    assert failure.exit_code == (0 if state == "running" else code)
    last = row.seeds[3]
    assert last.delta is None
    assert (last.scratch is None, last.spt is None) == (arm == "scratch", arm == "spt")
    assert (last.scratch_state, last.spt_state) == ((state, "done") if arm == "scratch" else ("done", state))
    for text in (shown(made), markdown.markdown(made)):
        assert state in text and "3 of 4" in text


def test_a_failed_pretraining_run_explains_the_missing_finetuning_run(tmp_path: Path) -> None:
    cells = [finish(tmp_path, "scratch", 0, 0.7), finish(tmp_path, "spt", 0, 0.7)]
    fail(tmp_path, "pretrain-for-spt0", "diverged", "the loss became nan at step 12", 5)
    cells[1]["run"] = "finetune-never"
    (failure,) = row_of(plan(tmp_path, cells)).failures
    assert (failure.state, failure.exit_code, failure.run) == ("diverged", 5, "finetune-never")
    assert failure.reason == "pretraining (pretrain-for-spt0): the loss became nan at step 12"


def test_no_pair_finished(tmp_path: Path) -> None:
    cells = [finish(tmp_path, "scratch", seed, 0.7) for seed in range(3)]
    cells += [{"arm": "spt", "seed": seed, "run": f"finetune-s{seed}", "row": 0} for seed in range(3)]
    finish(tmp_path, "spt", 1, 0.7, "finetune-s1")
    fail(tmp_path, "finetune-s1", "failed", "no memory", 1)  # so that SPT was begun
    made = collect.read_report([plan(tmp_path, cells)])
    (row,) = made.rows
    assert (row.decision, row.verdict) == ("no pair", "no pair of runs finished (0 of 3)")
    assert (row.n, row.scratch, row.spt, row.delta, row.low, row.only) == (0, None, None, None, None, None)
    assert [seed.scratch for seed in row.seeds] == [0.7] * 3
    assert len(made.failures) == 3
    assert "70.00  missing" in shown(made)


@pytest.mark.parametrize("arm", ["scratch", "spt"])
def test_where_one_arm_alone_was_run_its_own_mean_and_interval_are_told(tmp_path: Path, arm: str) -> None:
    scores, other = [0.70, 0.72, 0.77, 0.69], "spt" if arm == "scratch" else "scratch"
    cells = [
        finish(tmp_path, arm, seed, score, test={"accuracy": score, "f1_macro": score / 2})
        for seed, score in enumerate(scores[:3])
    ]
    cells.append(finish(tmp_path, arm, 3, 0.1))
    fail(tmp_path, f"finetune-{arm}3", "diverged", "the loss became nan at step 12", 5)
    cells += [{"arm": other, "seed": seed, "run": f"finetune-{other}{seed}", "row": 0} for seed in range(4)]
    made = collect.read_report([plan(tmp_path, cells)])
    (row,) = made.rows
    test = stats.paired(scores[:3])
    assert row.only is not None and (row.only.arm, row.only.n) == (arm, 3)
    assert (row.only.low, row.only.high) == (test.low, test.high)
    assert (row.n, row.planned, row.decision, row.delta) == (0, 4, "one arm", None)
    mine, theirs = (row.scratch, row.spt) if arm == "scratch" else (row.spt, row.scratch)
    assert mine == pytest.approx(0.73) and theirs is None
    name = "scratch" if arm == "scratch" else "SPT"
    assert row.verdict == (
        f"only {name} was run: accuracy 73.00 % (95 % interval 64.04 to 81.96, n=3); 1 of 4 runs have no score"
    )
    assert row.notes and "pairs" not in " ".join(row.notes)
    # The runs that were never asked for are not listed one by one; the one that was, is.
    assert [(failure.arm, failure.state) for _, failure in made.failures] == [(arm, "diverged")]
    text = markdown.markdown(made)
    score = "73.00 (64.04 to 81.96)"
    line = f"| 3 of 4 | {f'{score} | -' if arm == 'scratch' else f'- | {score}'} | - |"
    assert line in text and "Where one arm alone was run, n counts its runs" in text
    assert score in shown(made) and "0 of 4" not in text + shown(made)
    (record,) = csv.DictReader(io.StringIO(machine.to_csv(made, "rows")))
    assert (record["only_arm"], record["only_n"], float(record["only_low"])) == (arm, "3", test.low)
    assert record["failures"] == "1"
    answers = {each.question: (each.answer, each.evidence) for each in made.provenance.checklist}
    told = " ".join(f"{answer}, {evidence};" for answer, evidence in answers.values())
    assert "partly, 3 of 4 runs of the rows have a score" in told and "of 1 row only one arm was run" in told
    assert "yes, 3 runs a row" in told
    assert told.count("not applicable, one arm alone was run") == 2  # equal compute, the same data
    assert ("in 1 of 1 rows" in told) == (arm == "scratch")
    (metric,) = made.metrics
    assert (metric.metric, metric.n, getattr(metric, other)) == ("f1_macro", 3, None)
    assert getattr(metric, arm) == pytest.approx(0.365)


@pytest.mark.parametrize("left", ["finetune-spt0", "pretrain-for-spt0"])
def test_an_arm_of_which_anything_was_started_is_not_left_out(tmp_path: Path, left: str) -> None:
    """Results that were lost, or pretrainings before the first finetuning, are listed as what they are."""
    cells = [finish(tmp_path, arm, seed, 0.7) for arm in ("scratch", "spt") for seed in range(3)]
    for seed in range(3):
        shutil.rmtree(tmp_path / f"finetune-spt{seed}")
        shutil.rmtree(tmp_path / f"pretrain-for-spt{seed}", ignore_errors=True)
    (tmp_path / left).mkdir()
    made = collect.read_report([plan(tmp_path, cells)])
    assert made.rows[0].decision == "no pair" and len(made.failures) == 3


def test_over_splits_the_only_arm_has_the_mean_and_interval_of_splits(tmp_path: Path) -> None:
    scores = {"f1": [0.9, 0.9], "f2": [0.6], "f3": [0.5]}
    cells = [
        finish(tmp_path, "scratch", seed, score, f"finetune-{name}{seed}") | {"split": name}
        for name, each in scores.items()
        for seed, score in enumerate(each)
    ]
    row = row_of(plan(tmp_path, cells, splits=[*scores]))
    assert row.only is not None and (row.only.n, row.splits) == (4, 3)
    assert row.scratch == pytest.approx((0.9 + 0.6 + 0.5) / 3)
    assert row.only.low is not None and row.only.high is not None
    assert (row.only.low + row.only.high) / 2 == pytest.approx(row.scratch)
    assert "accuracy 66.67 %" in row.verdict and "3 splits, 4 runs" in row.verdict


def test_levels_and_budgets_of_the_only_arm_are_over_its_runs(tmp_path: Path) -> None:
    cells = []
    for row in range(2):
        cells += [
            finish(tmp_path, "scratch", s, 0.6 + row / 10, f"finetune-r{row}{s}") | {"row": row} for s in range(3)
        ]
        cells += [{"arm": "spt", "seed": s, "run": f"finetune-n{row}{s}", "row": row} for s in range(3)]
    own = SCRATCH.examples
    rows = [
        {"factors": {"share": share}, "total": {"axis": "examples", "amount": amount}}
        for share, amount in ((0.2, own), (0.4, 2 * own))
    ]
    made = collect.read_report([study(tmp_path, "compute", rows, cells)])
    assert [(level.n, level.scratch, level.spt) for level in made.levels] == [
        (3, 0.6, None),
        (3, pytest.approx(0.7), None),
    ]
    assert [(match.scratch, match.spt, len(match.warnings)) for match in made.matches] == [
        (own, None, 0),
        (own, None, 1),
    ]


def test_a_row_of_one_arm_differs_from_one_of_both(tmp_path: Path) -> None:
    cells = [finish(tmp_path / "a", "scratch", seed, 0.7 + seed / 50) for seed in range(3)]
    cells += [{"arm": "spt", "seed": seed, "run": f"finetune-spt{seed}", "row": 0} for seed in range(3)]
    both = compared(tmp_path / "b", [0.70, 0.72, 0.74], [0.80, 0.83, 0.85])
    diff = diff_reports(plan(tmp_path / "a", cells), both)
    assert "from 'one arm alone was run' to 'SPT beats scratch'" in diff.sentence
    assert diff.rows[0].failures == ()


def test_models_of_which_one_arm_was_run_are_ranked_in_it_alone(tmp_path: Path) -> None:
    cells = []
    for row, name in enumerate("ab"):
        cells += [
            finish(tmp_path, "scratch", seed, 0.6 + row / 10 + seed / 100, f"finetune-{name}{seed}", model=name)
            | {"row": row}
            for seed in range(3)
        ]
        cells += [{"arm": "spt", "seed": s, "run": f"finetune-no{name}{s}", "row": row} for s in range(3)]
    rows = [{"name": name, "task": "digits", "model": name} for name in "ab"]
    (comparison,) = collect.read_report([plan(tmp_path, cells, rows=rows)]).models
    assert "From scratch" in comparison.verdict and "self-pretraining" not in comparison.verdict
    assert "change" not in comparison.verdict and "order" not in brief_ranking(comparison)


def test_of_a_smoke_run_of_one_arm_no_number_is_told(tmp_path: Path) -> None:
    cells = [finish(tmp_path, "scratch", seed, 0.7, smoke=True) for seed in range(3)]
    row = row_of(plan(tmp_path, cells))
    assert (row.decision, row.verdict) == ("smoke", verdict.SMOKE) and row.only is not None


def test_an_error_of_one_run_alone_has_no_interval(tmp_path: Path) -> None:
    (cell,) = [finish(tmp_path, "scratch", 0, 0.25, metric="mse", higher_is_better=False)]
    row = row_of(plan(tmp_path, [cell]))
    assert row.verdict == "only scratch was run: mse 0.2500 (lower is better, 1 run)"


def test_a_planned_seed_without_any_cell_is_missed(tmp_path: Path) -> None:
    folder = compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    value = json.loads((folder / "study.json").read_text())
    write_json(folder / "study.json", value | {"seeds": [0, 1, 2, 3]})
    row = row_of(folder)
    assert (row.n, row.planned) == (3, 4)
    assert [(failure.arm, failure.seed, failure.state) for failure in row.failures] == [
        ("scratch", 3, "missing"),
        ("spt", 3, "missing"),
    ]


def test_names_end_harmless_in_every_file(tmp_path: Path) -> None:
    """Control characters, markup, formulas and very long names, from files that somebody else may have written."""
    name = "=1+2\x1b[31m<script>x</script>[x](http://e.x)`$\\input{x}\u202e\x00\udcff[red]"
    long = "m" * 100_000
    strange = {"recipe": name, "task": name, "model": long, "notes": (name,), "classes": (name, "b")}
    strange |= {"confusion": ((1, 2), (3, 4)), "groups": (GroupScore(name=name, rows=3, score=0.5),)}
    cells = [finish(tmp_path, arm, seed, 0.7, **strange) for arm in ("scratch", "spt") for seed in range(3)]
    named = {"name": name.replace("\udcff", ""), "task": "digits", "model": long}
    report = collect.read_report([plan(tmp_path, cells, rows=[named], command=f"spt {long}")])
    paths = write.write_report(report, tmp_path / "out", with_figures=True)
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths if path.suffix != ".png"}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        console().print(terminal.terminal(report))
    texts["terminal"] = output.getvalue()
    for file, text in texts.items():
        assert not set("\x1b\u202e\x00") & set(text), file
        assert "m" * 1000 not in text, file
    assert "<script>x" not in texts["report.html"] + texts["forest.svg"]
    prose = re.sub(r"(?<!\\)`[^`]*`", "", texts["report.md"])  # without code, in which nothing is a link
    assert not re.search(r"(?<!\\)\]\(http", prose)
    assert "\\input{" not in texts["report.tex"]
    for file in (name for name in texts if name.endswith(".csv")):
        assert not any(cell.startswith("=") for line in csv.reader(io.StringIO(texts[file])) for cell in line), file
    assert "[red]" in texts["terminal"]


@pytest.mark.parametrize("cell", ["-", "-1.5", "+1.20", "-1.20 to +3.00", "+3.1 %", "a=b", 3, None, "1e-3", "-1e-05"])
def test_cells_that_are_no_formula_stay(cell: Any) -> None:
    assert format.csv_cell(cell) == cell


@pytest.mark.parametrize("cell", ["=1+2", "@sum(1)", "+cmd|x", "-2+3", "-1 to A1", "\t=1", "\r=1", "-(1)"])
def test_cells_that_begin_like_a_formula_are_text(cell: str) -> None:
    assert format.csv_cell(cell) == f"'{cell}".replace("\r", "\\r")


def test_what_acts_on_a_terminal_is_escaped_in_cells() -> None:
    assert format.csv_cell("b\x1b[31m\u202e=\x07") == r"b\x1b[31m\u202e=\x07"
    assert format.csv_cell("\x1b=1+2") == r"\x1b=1+2" and format.csv_cell("=\x1b") == r"'=\x1b"
    assert format.csv_cell("a\nb\tc") == "a\nb\tc"


@pytest.mark.parametrize("score", [1e308, -1e308, 1e101])
def test_a_loss_that_no_number_of_32_bits_comes_near_is_refused(tmp_path: Path, score: float) -> None:
    """Differences and squares of such would be infinite."""
    folder = compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    path = tmp_path / "finetune-spt2" / "result.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"test": {**whole["test"], "loss": score}}))
    (failure,) = row_of(folder).failures
    assert f"(loss is {score:g}, which no loss can be)" in failure.reason


@pytest.mark.parametrize("score", [7, -0.1, float("inf"), -1e308])
@pytest.mark.parametrize("place", ["test", "val"])
def test_a_score_that_the_metric_cannot_have_is_refused(tmp_path: Path, place: str, score: float) -> None:
    folder = compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    path = tmp_path / "finetune-spt2" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {place: {"accuracy": score}}))
    row = row_of(folder)
    (failure,) = row.failures
    assert row.n == 2 and failure.state == "unreadable"
    assert f"result.json cannot be read as a result (accuracy is {score:g}, which no accuracy can be)" in failure.reason


GOOD_BIN = {"count": 1, "confidence": 0.5, "accuracy": 1.0}
GOOD = {"log_loss": 0.1, "brier": 0.2, "ece": 0.3, "bins": [GOOD_BIN] * 15}


@pytest.mark.parametrize(
    "wrong",
    [{"ece": float("inf")}, {"bins": [GOOD_BIN] * 14}, {"bins": [GOOD_BIN | {"accuracy": 7.0}] * 15}, {"brier": 1e300}],
)
def test_a_calibration_that_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    folder = compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    path = tmp_path / "finetune-spt2" / "result.json"
    whole = json.loads(path.read_text())
    for end, n in ((GOOD, 3), (GOOD | wrong, 2)):
        calibration = {"temperature": 1.0, "fitted": 9, "before": end, "after": end}
        path.write_text(json.dumps(whole | {"calibration": calibration}))
        assert row_of(folder).n == n


def test_every_metric_of_a_recipe_has_bounds_but_the_loss() -> None:
    for name in set(get_args(Metric)) - {"auto", "loss"}:
        with pytest.raises(ValueError, match=f"no {name} can be"):
            check_scores({name: 7.0 if not LOWER_IS_BETTER[name] else -7.0})
        check_scores({name: 1.0, "loss": -7.0})


def test_the_scores_of_a_language_model_that_diverges_are_scores() -> None:
    scores = text_scores(loss=1e6, answers=10, text_bytes=10)
    check_scores(scores)  # raises, else
    assert 1e99 < scores["perplexity"] < LARGEST and scores["bits_per_byte"] == pytest.approx(1e6 / math.log(2))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"metric": "mse"}, "scored in mse, the others in accuracy"),
        ({"metric": "loss", "test": {"loss": float("inf")}}, "scored in loss, the others in accuracy"),
        ({"test": {"loss": 0.1}}, "its result has no finite test accuracy"),
        ({"test": None}, "its result has no finite test accuracy"),
        ({"seed": 7}, "the folder holds a finetune run with seed 7"),
    ],
)
def test_a_result_that_does_not_fit_is_not_used(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    path = tmp_path / "finetune-spt2" / "result.json"
    text = json.dumps(json.loads(path.read_text()) | {"test": {changes.get("metric", "accuracy"): 0.5}} | changes)
    path.write_text(text)
    row = row_of(folder)
    assert row.n == 2
    (failure,) = row.failures
    assert (failure.state, failure.arm, failure.seed) == ("unusable", "spt", 2) and reason == failure.reason


# What a report is read from


def test_a_runs_folder_gives_every_comparison_and_pairs_the_rest(tmp_path: Path) -> None:
    compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    for seed in range(4):
        finish(tmp_path, "scratch", seed, 0.5, run=f"finetune-a{seed}", task="image")
        finish(tmp_path, "spt", seed, 0.6 + seed / 100, run=f"finetune-b{seed}", task="image")
    (tmp_path / "finetune-b3").rename(tmp_path / "finetune-b3.old1")
    start(tmp_path, "pretrain-x", state="failed", reason="out of memory", exit_code=1)
    made = collect.read_report([tmp_path])
    assert [(row.label, row.n, row.planned) for row in made.rows] == [
        ("digits / transformer", 3, 3),
        ("image / transformer", 3, 4),
    ]
    image = made.rows[1]
    assert image.delta == pytest.approx(0.11)
    assert [seed.pretrain_run for seed in image.seeds[:3]] == [f"pretrain-for-b{seed}" for seed in range(3)]
    assert [(label, failure.run, failure.state) for label, failure in made.failures] == [
        ("image / transformer", "", "missing"),
        ("", "pretrain-x", "failed"),
    ]
    assert "out of memory" in shown(made)


def test_configurations_that_could_be_paired_in_two_ways_are_rows_of_their_own(tmp_path: Path) -> None:
    for seed in range(3):
        finish(tmp_path, "scratch", seed, 0.5, settings="plain")
        finish(tmp_path, "spt", seed, 0.6, run=f"finetune-s{seed}", settings="small")
        finish(tmp_path, "spt", seed, 0.7, run=f"finetune-l{seed}", settings="large")
    finish(tmp_path, "spt", 9, 0.9, settings="lonely")
    rows = collect.read_report([tmp_path]).rows
    assert {row.source: (row.n, row.spt) for row in rows} == {
        "scratch plain / spt small+before": (3, pytest.approx(0.6)),
        "scratch plain / spt large+before": (3, pytest.approx(0.7)),
        "spt lonely+before": (0, 0.9),
    }
    assert len({row.label for row in rows}) == 3
    assert all(row.source in row.label for row in rows)


def test_runs_of_different_folds_are_not_paired(tmp_path: Path) -> None:
    for fold in ("a", "b"):
        tested = SPLITS["test"].model_copy(update={"inputs": fold})
        for seed in range(3):
            for arm, score in (("scratch", 0.5), ("spt", 0.6)):
                run, settings = f"finetune-{arm}{fold}{seed}", f"{arm}{fold}"
                finish(tmp_path, arm, seed, score, run=run, settings=settings, data=SPLITS | {"test": tested})
    rows = collect.read_report([tmp_path]).rows
    assert [(row.source, row.n) for row in rows] == [
        (f"scratch scratch{fold} / spt spt{fold}+before", 3) for fold in ("a", "b")
    ]


def test_two_runs_that_cannot_be_told_apart_are_not_mixed(tmp_path: Path) -> None:
    for seed in range(3):
        finish(tmp_path, "scratch", seed, 0.5)
        finish(tmp_path, "spt", seed, 0.6)
    finish(tmp_path, "spt", 0, 0.9, run="finetune-zzz", parent="another")
    made = collect.read_report([tmp_path])
    assert [row.spt for row in made.rows] == [pytest.approx(0.6)]
    assert made.warnings == ("finetune-zzz is left out: it has the same settings and seed as finetune-spt0",)
    assert "finetune-zzz" in shown(made)


def test_rows_of_several_comparisons_can_be_told_apart(tmp_path: Path) -> None:
    first = compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    cells = json.loads((first / "study.json").read_text())["cells"]
    names = [{"name": name, "task": "digits", "model": "transformer"} for name in ("mask-15", "mask-50")]
    second = plan(tmp_path, cells + [cell | {"row": 1} for cell in cells], "compare-2", rows=names)
    assert [row.label for row in collect.read_report([first, second, first]).rows] == [
        "digits / transformer, quickstart",
        "digits / transformer, mask-15",
        "digits / transformer, mask-50",
    ]
    assert len(collect.read_report([first, tmp_path]).rows) == 3  # a comparison inside another argument counts once
    plan(tmp_path, cells, "compare-3")
    assert [row.label for row in collect.read_report([tmp_path]).rows][::3] == [
        "digits / transformer, quickstart, compare-1",
        "digits / transformer, quickstart, compare-3",
    ]


def test_a_damaged_comparison_does_not_hide_the_others(tmp_path: Path) -> None:
    compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    (tmp_path / "compare-2").mkdir()
    (tmp_path / "compare-2" / "study.json").write_text("{")
    made = collect.read_report([tmp_path])
    assert len(made.rows) == 1
    (warning,) = made.warnings
    assert "compare-2" in warning and "is not a study" in warning


@pytest.mark.parametrize("folder", ["finetune-spt0", "finetune-scratch0", "pretrain-for-spt0"])
def test_a_single_run_is_shown_by_itself(tmp_path: Path, folder: str) -> None:
    compared(tmp_path, [0.7], [0.8])
    made = collect.read_report([tmp_path / folder])
    assert (made.rows, [run.name for run in made.runs]) == ((), [folder])
    text = shown(made)
    assert folder in text and "validation accuracy (%)" in text
    assert ("80.00" in text, "70.00" in text) == (folder == "finetune-spt0", folder == "finetune-scratch0")
    assert ("pretraining included" in text) == (folder == "finetune-spt0")
    assert machine.to_json(made)["results"][0]["result"]["seed"] == 0


def test_a_single_failed_run_says_why(tmp_path: Path) -> None:
    start(tmp_path, "finetune-x", state="diverged", reason="the loss became nan at step 12", exit_code=5)
    assert "diverged: the loss became nan at step 12" in shown(collect.read_report([tmp_path / "finetune-x"]))


def test_folders_without_anything_to_report(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        collect.read_report([tmp_path / "nowhere"])
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        collect.read_report([tmp_path / "file"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no study and no finished finetuning run; name a folder"):
        collect.read_report([tmp_path / "empty"])
    compared(tmp_path / "runs", [0.7], [0.8])
    damage(tmp_path / "runs", "finetune-spt0")
    with pytest.raises(DataError, match="cannot be read as a result"):
        collect.read_report([tmp_path / "runs" / "finetune-spt0"])
    with pytest.raises(DataError):
        collect.read_report([tmp_path / "runs", tmp_path / "empty"])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": 1}, "format"),
        ({"kind": "sweep"}, "kind"),
        ({"cells": [{"row": 3, "arm": "spt", "seed": 0, "run": "x"}]}, "not listed"),
        ({"cells": [{"row": 0, "arm": "dora", "seed": 0, "run": "x"}]}, r"cells\.0\.arm"),
        ({"cells": [{"row": 0, "arm": "spt", "seed": 0, "run": "../x"}]}, r"cells\.0\.run"),
        ({"cells": [{"row": 0, "arm": "spt", "seed": 0, "run": ".."}]}, r"cells\.0\.run"),
        ({"rows": None}, "rows"),
    ],
)
def test_a_wrong_comparison_is_refused_in_one_sentence(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint) as caught:
        collect.read_report([plan(tmp_path, [], **changes)])
    assert "\n" not in str(caught.value)


def test_text_that_is_no_comparison_is_refused(tmp_path: Path) -> None:
    folder = plan(tmp_path, [])
    for content in (b"", b"[]", b"\xff\xfe"):
        (folder / "study.json").write_bytes(content)
        with pytest.raises(DataError, match="is not a study"):
            collect.read_report([folder])


def test_the_working_folder_can_be_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(compared(tmp_path, [0.7, 0.8, 0.9], [0.8, 0.9, 0.9]))
    assert row_of(Path()).n == 3


# Renderings


def several(root: Path) -> Report:
    """Two recipes, one decided and one not, with a diverged run."""
    compared(root, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    fail(root, "finetune-spt2", "diverged", "loss | nan [red] " + "at step 12 " * 20, 5)
    for seed in range(5):
        finish(root, "scratch", seed, 0.5, run=f"finetune-a{seed}", task="image", recipe="[bold]lra/image")
        finish(
            root,
            "spt",
            seed,
            0.6 + seed / 99,
            run=f"finetune-b{seed}",
            task="image",
            recipe="[bold]lra/image",
        )
    return collect.read_report([root])


def test_terminal_fits_80_columns_and_puts_the_verdict_first(tmp_path: Path) -> None:
    made = several(tmp_path)
    text = shown(made)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    order = [
        text.index(part) for part in ("SPT beats scratch", "Test accuracy", "Seed by seed", "Cost", "Runs without")
    ]
    assert order == sorted(order)
    assert "[red]" in text  # markup in a reason is text
    for cell in ("image / transformer        5 ", "75.00", "diverged", "+5.00", "×1.25", "= SPT"):
        assert cell in text


def test_a_terminal_has_the_verdicts_in_brief_the_scores_and_behind_long_tables_the_verdicts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = several(tmp_path)
    page_only = format.ReportTable("Page only", ("a",), [("b",)], 1, narrow=())
    sections = by_section(made)
    monkeypatch.setattr(terminal, "by_section", lambda _: [*sections, (sections[-2][0], [page_only])])
    text = shown(made, full=False)
    assert len(text) < len(shown(made)) / 2 and max(map(len, text.splitlines())) <= 80
    parts = ("SPT is better\n", "Test accuracy", "Runs without")
    order = [text.index(part) for part in parts]
    assert order == sorted(order) and text.count("SPT is better\n") == 1 and "SPT beats scratch" not in text
    assert "Seed by seed" not in text and "= SPT" not in text
    monkeypatch.setattr(terminal, "REPEATED_AFTER", 1)
    again = shown(made, full=False)
    assert again.count("SPT is better\n") == 2 and again.rindex("SPT is better\n") > again.index("Runs without")
    monkeypatch.undo()
    text = shown(made, full=False)
    monkeypatch.setattr(terminal, "by_section", lambda _: [*sections, (sections[-2][0], [page_only])])
    every = [table.title for _, tables in sections for table in tables if table.narrow != ()]
    hidden = sum(f"\n{title}\n" not in text for title in every)
    assert f"\n{hidden} more tables, all columns and remarks: --full" in text


def test_in_brief_a_warning_stands_once_with_whose_it_is_unless_it_is_everybodys(tmp_path: Path) -> None:
    for task in ("digits", "image"):
        for arm in ("scratch", "spt"):
            for seed in range(3):
                own = {"notes": ("of all",) if task == "digits" else ("of all", "of one"), "own": SCRATCH}
                finish(tmp_path, arm, seed, 0.7 + seed / 50, f"finetune-{task}{arm}{seed}", task=task, **own)
    text = shown(collect.read_report([tmp_path]), width=120, full=False)
    assert text.count("WARNING: of all\n") == 1 and text.count("of all") == 1
    assert text.count("WARNING: of one (image / transformer)") == 1
    assert text.count("part of the difference may be compute") == 1


def test_a_verdict_in_brief_says_what_is_not_decided(tmp_path: Path) -> None:
    text = shown(collect.read_report([compared(tmp_path, [0.7, 0.72, 0.7], [0.71, 0.70, 0.72])]), full=False)
    assert "): not decided\n" in text


def test_markdown_tables_hold_every_column(tmp_path: Path) -> None:
    text = markdown.markdown(several(tmp_path))
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert "loss \\| nan \\[red\\]" in text
    columns = 0
    for line, after in zip(tables, [*tables[1:], ""], strict=True):
        columns = line.count("|") if after.startswith("|---") else columns
        assert line.replace("\\|", "").count("|") == columns
    assert "| digits / transformer | 2 of 3 | 72.50 | 77.00 | +4.50 | -1.85 to +10.85 |" in text
    assert "finetune-spt0" in text and "pretrain-for-spt0" in text
    assert "|  | pretraining | 60 | 600 | 6.00e9 | 6.0 s | 3 MiB |" in text
    assert "|  | = SPT | 100 | 1,000 | 1.00e10 | 10.0 s | 3 MiB |" in text


def test_csv_holds_the_metrics_own_units(tmp_path: Path) -> None:
    made = several(tmp_path)
    rows = list(csv.DictReader(io.StringIO(machine.to_csv(made, "rows"))))
    assert [(row["task"], row["n"], row["planned"], row["failures"]) for row in rows] == [
        ("digits", "2", "3", "1"),
        ("image", "5", "5", "0"),
    ]
    assert float(rows[0]["scratch"]) == pytest.approx(0.725)
    assert (rows[0]["spt_total_steps"], rows[0]["spt_pretraining_steps"]) == ("100.0", "60.0")
    assert rows[0]["ratio_seconds"] == "1.25"
    seeds = list(csv.DictReader(io.StringIO(machine.to_csv(made, "seeds"))))
    assert len(seeds) == 8
    assert (seeds[2]["scratch"], seeds[2]["spt"], seeds[2]["spt_state"]) == ("0.8", "", "diverged")
    assert seeds[1]["spt_run"] == "finetune-spt1"


def test_json_holds_what_a_script_needs(tmp_path: Path) -> None:
    value = json.loads(json.dumps(machine.to_json(several(tmp_path)), allow_nan=False))
    for row in value["rows"]:
        assert row.keys() >= {"task", "model", "scratch", "spt", "delta", "low", "high", "n"}
        assert row["low"] <= row["delta"] <= row["high"]
    assert value["verdicts"][0].startswith("digits / transformer: cannot be decided with 2 seeds")
    assert [(one["label"], one["seed"], one["exit_code"]) for one in value["failures"]] == [
        ("digits / transformer", 2, 5)
    ]
    assert value["runs"] == sorted(set(value["runs"]))
    assert len(value["runs"]) == 3 * (3 + 5)
    assert all(Path(run).is_dir() for run in value["runs"])


def test_files_are_the_same_bytes_for_the_same_results(tmp_path: Path) -> None:
    folder = compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    paths = write.write_report(collect.read_report([folder]), folder)
    names = ["report.html", "report.md", "report.tex", "report.csv", "seeds.csv", "report.json"]
    assert [path.name for path in paths] == names
    before = [path.read_bytes() for path in paths]
    value = json.loads((folder / "study.json").read_text())
    write_json(folder / "study.json", value | {"cells": value["cells"][::-1]})
    for run in tmp_path.glob("finetune-*"):
        RunFolder(tmp_path, run.name).set_status("done")  # with another time and process
        os.utime(run / "result.json", (0, 0))
    assert [path.read_bytes() for path in write.write_report(collect.read_report([folder]), folder)] == before
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".*"))


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Not what another process is writing, nor what one of another machine may be."""
    folder = compared(tmp_path, [0.7], [0.8])
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = platform.node()
    kept = [folder / f".report.html.{here}-{os.getppid()}-0a.tmp", folder / f".report.html.{here}x-{gone.pid}-0a.tmp"]
    left = folder / f".report.html.{here}-{gone.pid}-0a.tmp"
    for path in (*kept, left):
        path.touch()
    write.write_report(collect.read_report([folder]), folder)
    assert not left.exists() and all(path.exists() for path in kept)


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    made = collect.read_report([compared(tmp_path, [0.7], [0.8])])
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        write.write_report(made, tmp_path / "file")


def test_import_is_light() -> None:
    heavy = "{'torch', 'pandas', 'pyarrow', 'scipy.stats', 'matplotlib', 'accelerate'}"
    code = f"import sys, spt.report.collect, spt.report.terminal; print(*(sys.modules.keys() & {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_repeated_rows_other_batches_and_other_code_are_warned_of(tmp_path):
    cells = [
        finish(tmp_path, "scratch", 0, 0.5, batch_size=64, environment={"device": "cpu", "commit": "a"}),
        finish(tmp_path, "spt", 0, 0.6, repeated={"val": 0, "test": 7}, environment={"device": "cpu", "commit": "b"}),
    ]
    (row,) = collect.read_report([plan(tmp_path, cells)]).rows
    said = " ".join(row.warnings)
    assert "7 test rows have the same input as a training row" in said and "validation rows" not in said
    assert "different batch sizes" in said and "different versions of spt" in said and "precisions" not in said


# ------------------------------------------------------------------------------------------------------ odd results


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("chance",), "NaN"),
        (("total", "flops"), "Infinity"),
        (("total", "seconds"), "NaN"),
        (("total", "steps"), "1"),
        (("own", "steps"), "9" * 400),
        (("own", "operations"), '{"linear": 1e308}'),
        (("environment", "processes"), "null"),
        (("environment", "commit"), "[1]"),
        (("environment", "packages"), '{"torch": 2}'),
        (("environment", "extra"), "NaN"),
    ],
)
def test_a_result_that_cannot_be_reckoned_with_is_unreadable(
    tmp_path: Path, place: tuple[str, ...], value: str
) -> None:
    folder = compared(tmp_path, [0.7, 0.72], [0.8, 0.81])
    path = tmp_path / "finetune-spt1" / "result.json"
    raw = json.loads(path.read_text())
    at = raw
    for name in place[:-1]:
        at = at[name]
    at[place[-1]] = "HERE"
    path.write_text(json.dumps(raw).replace('"HERE"', value))
    made = collect.read_report([folder])
    (failure,) = made.rows[0].failures
    assert (failure.run, failure.state) == ("finetune-spt1", "unreadable")
    assert "cannot be read as a result" in failure.reason
    json.dumps(machine.to_json(made), allow_nan=False)


def test_costs_of_many_results_add_up_beyond_what_one_may_say() -> None:
    one = Ledger(flops=LARGEST, peak_bytes=1)
    assert (one + one).flops == 2 * LARGEST


def test_a_run_of_the_other_arm_or_from_another_pretraining_is_unusable(tmp_path: Path) -> None:
    cells = [finish(tmp_path, arm, seed, 0.7) for arm in ("scratch", "spt") for seed in range(4)]
    by = {(cell["arm"], cell["seed"]): cell for cell in cells}
    by["spt", 1]["run"] = finish(tmp_path, "spt", 1, 0.7, run="finetune-a", parent=None)["run"]
    by["scratch", 2]["run"] = finish(tmp_path, "scratch", 2, 0.7, run="finetune-b", parent="for-spt2")["run"]
    by["spt", 3]["parent"] = "pretrain-for-spt0"
    row = row_of(plan(tmp_path, cells))
    assert row.n == 1
    assert {(one.arm, one.seed, one.state, one.reason) for one in row.failures} == {
        ("spt", 1, "unusable", "the folder holds a run of the scratch arm"),
        ("scratch", 2, "unusable", "the folder holds a run of the SPT arm"),
        ("spt", 3, "unusable", "it started from pretrain-for-spt3, not from pretrain-for-spt0"),
    }


def test_damaged_lines_of_metrics_are_skipped(tmp_path: Path) -> None:
    start(tmp_path, "finetune-x")
    run = RunFolder(tmp_path, "finetune-x")
    good = ['{"kind": "val", "step": 1, "loss": NaN}', '{"kind": "val", "step": 2, "loss": 0.5}']
    big = "9" * 400
    bad = [
        f'{{"step": {big}}}',
        f'{{"step": 3, "loss": {big}}}',
        '{"step": 3, "loss": -1.7e308}',
        "[" * 200_000,
        '{"st',
    ]
    (run.path / "metrics.jsonl").write_text("\n".join([good[0], *bad, good[1]]))
    assert [row["step"] for row in run.metrics()] == [1, 2]
    assert curves._is_number(1e-3)
    assert not any(map(curves._is_number, (1.7e308, -(10**400), float("nan"), True)))


# ------------------------------------------------------------------------------------- beside the published numbers


def beside(root: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[tuple[str, ...]]:
    """What is told of the settings of a row with published numbers, the second seed of SPT being another recipe."""
    cells = [finish(root, arm, seed, 0.5 + seed / 9, recipe="lra/listops-dlr") for arm in ("scratch", "spt")
             for seed in (0, 1)]  # fmt: skip
    for cell in cells:
        (root / cell["run"] / "recipe.yaml").write_text(f"{cell['arm']} {cell['seed']}")
    monkeypatch.setattr(published, "changed", lambda path, pair: [(path / "recipe.yaml").read_text(), pair.recipe])
    rows = [{"name": "lra/listops-dlr", "task": "listops", "model": "dlr"}]
    return [one.differs for one in collect.read_report([plan(root, cells, rows=rows, **changes)]).precedents]


def test_published_numbers_stand_beside_every_run_but_no_smoke_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ("scratch 0", "lra/listops-dlr", "scratch 1", "spt 0", "spt 1")
    assert beside(tmp_path / "a", monkeypatch) == [told]
    assert beside(tmp_path / "b", monkeypatch, smoke=True) == []
