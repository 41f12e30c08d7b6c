"""What changed between two reports, over hand-made runs."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from records import FINETUNING, PRETRAINING, arms, compared, finish, plan, start, study
from rich.console import Console
from typer.testing import CliRunner

from spt.analysis import diff_reports as module
from spt.analysis.diff_reports import ReportDiff, diff_reports
from spt.errors import DataError, UsageError
from spt.report import collect, write
from spt.report.arms import Row
from spt.report.machine import FORMAT, to_json
from spt_cli import app


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def kept(folder: Path, path: Path) -> Path:
    """The report of a folder as a file."""
    path.write_text(json.dumps(to_json(collect.read_report([folder]))))
    return path


def edit(folder: Path, run: str, **scores: float) -> None:
    path = folder.parent / run / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps(result | {"test": scores}))


def shown(found: ReportDiff, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(module.render(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_nothing_changed(tmp_path):
    folder = compared(tmp_path / "runs", [0.7, 0.72, 0.74], [0.8, 0.81, 0.85])
    file = kept(folder, tmp_path / "a.json")
    for a, b in ((folder, folder), (file, folder), (folder, file), (file, file)):
        found = diff_reports(a, b)
        assert (found.sentence, found.changed) == ("nothing changed", False)
        assert found.warnings == found.only_a == found.only_b == found.statements == ()
        (row,) = found.rows
        assert not row.changed and [mean.change for mean in row.means] == [0.0] * 3 and row.seeds == ()
    assert "unchanged: digits / transformer" in shown(found)
    assert "Nothing here is tested" not in shown(found)


def test_a_verdict_turns_with_more_seeds(tmp_path):
    scratch, spt = [0.70, 0.72, 0.74, 0.71, 0.73], [0.80, 0.81, 0.85, 0.80, 0.84]
    a = compared(tmp_path / "a", scratch[:2], spt[:2])
    b = compared(tmp_path / "b", scratch, spt)
    found = diff_reports(a, b)
    assert found.sentence == (
        "0 of 1 row keeps its verdict; digits / transformer changed from 'too few seeds' to 'SPT beats scratch'"
    )
    (row,) = found.rows
    assert row.verdict_changed and {seed.there for seed in row.seeds} == {"b"}
    assert (row.a["pairs"], row.b["pairs"]) == ([0, 1], [0, 1, 2, 3, 4])
    assert {(seed.key, seed.a["state"], seed.b["state"]) for seed in row.seeds} == {
        (f"{seed}.{arm}", "absent", "done") for seed in (2, 3, 4) for arm in ("scratch", "spt")
    }
    changes = {mean.key: mean.change for mean in row.means}
    assert changes["scratch"] == pytest.approx(sum(scratch) / 5 - sum(scratch[:2]) / 2)
    assert changes["delta"] == pytest.approx(changes["spt"] - changes["scratch"])
    assert found.warnings == ()
    text = shown(found)
    for words in ("VERDICT CHANGED", "seeds added: 2, 3, 4", "not over the same seeds: 0, 1 in A, 0, 1, 2, 3, 4 in B"):
        assert words in text
    assert "Nothing here is tested" in text
    back = diff_reports(b, a)
    assert {seed.there for seed in back.rows[0].seeds} == {"a"} and "seeds lost: 2, 3, 4" in shown(back)


def test_the_same_run_with_another_score_is_a_warning(tmp_path):
    folder = compared(tmp_path / "runs", [0.7, 0.72, 0.74], [0.8, 0.81, 0.85])
    before = kept(folder, tmp_path / "a.json")
    edit(folder, "finetune-spt1", accuracy=0.91)
    found = diff_reports(before, folder)
    (warning,) = found.warnings
    assert "finetune-spt1 (SPT, seed 1) had 81.00, now 91.00; results were edited" in warning
    (seed,) = found.rows[0].seeds
    assert (seed.key, seed.a["run"], seed.b["run"]) == ("1.spt", "finetune-spt1", "finetune-spt1")
    assert (seed.a["score"], seed.b["score"]) == (0.81, 0.91)
    assert found.sentence == "1 of 1 row keeps its verdict; details changed in digits / transformer"
    assert "1 SPT 81.00 91.00 +10.00 same run" in " ".join(shown(found).split())


def test_other_runs_of_a_seed_are_no_warning(tmp_path):
    a = compared(tmp_path / "a", [0.7, 0.72], [0.8, 0.81])
    cells = arms(tmp_path / "b", 0, "other", [0.7, 0.73], [0.8, 0.81])
    found = diff_reports(a, plan(tmp_path / "b", cells))
    assert found.warnings == ()
    assert "different runs, so different settings, data or pretraining: seeds 0, 1" in shown(found, 120)


def test_failures_then_and_now(tmp_path):
    folder = compared(tmp_path / "runs", [0.7, 0.72, 0.74], [0.8, 0.81, 0.85])
    shutil.rmtree(tmp_path / "runs" / "finetune-spt2")
    start(tmp_path / "runs", "finetune-spt2", state="diverged", reason="loss is nan", exit_code=5)
    before = kept(folder, tmp_path / "a.json")
    finish(tmp_path / "runs", "spt", 2, 0.85)
    (row,) = diff_reports(before, folder).rows
    failures = [(failure.key, failure.a["state"], failure.there) for failure in row.failures]
    assert failures == [("2.spt", "diverged", "a")]
    assert [seed.there for seed in row.seeds] == ["both"]
    assert (row.a["n"], row.b["n"]) == (2, 3)
    assert "failed in A, not in B: SPT, seed 2 (diverged: loss is nan)" in shown(diff_reports(before, folder))
    (back,) = diff_reports(folder, before).rows
    assert [failure.there for failure in back.failures] == ["b"]


def test_costs_are_told_above_five_percent(tmp_path):
    a = compared(tmp_path / "a", [0.7, 0.72], [0.8, 0.81])
    slower = FINETUNING.model_copy(update={"seconds": 6.0, "flops": 4.1e9})
    totals = {"own": slower, "total": slower + PRETRAINING}
    cells = [finish(tmp_path / "b", "scratch", seed, score) for seed, score in enumerate([0.7, 0.72])]
    cells += [finish(tmp_path / "b", "spt", seed, score, **totals) for seed, score in enumerate([0.8, 0.81])]
    found = diff_reports(a, plan(tmp_path / "b", cells))
    (cost,) = found.rows[0].costs
    assert (cost.key, cost.a, cost.b) == ("spt.seconds", 10.0, 12.0)
    assert cost.ratio == pytest.approx(1.2)
    assert "SPT seconds 10.0 s 12.0 s ×1.20" in " ".join(shown(found).split())


def test_rows_are_matched_by_what_they_are_about(tmp_path):
    def made(root: Path, levels: list[float], better: float) -> Path:
        cells = [
            cell
            for row, level in enumerate(levels)
            for cell in arms(root, row, f"l{level}", [0.7, 0.72, 0.74], [0.7 + better, 0.72 + better, 0.745 + better])
        ]
        return study(root, "compute", [{"factors": {"share": level}} for level in levels], cells)

    a, b = made(tmp_path / "a", [0.2, 0.4, 0.6], 0.0), made(tmp_path / "b", [0.6, 0.8, 0.4], 0.1)
    found = diff_reports(a, b)
    assert [row.label for row in found.rows] == [f"digits / transformer, share {level}" for level in (0.4, 0.6)]
    assert all(row.verdict_changed for row in found.rows)
    assert [side["label"] for side in found.only_a] == ["digits / transformer, share 0.2"]
    assert [side["label"] for side in found.only_b] == ["digits / transformer, share 0.8"]
    assert found.sentence.startswith("0 of 2 rows keep their verdict; digits / transformer, share 0.4 changed from ")
    assert found.sentence.endswith("; rows: 1 only in A, 1 only in B")
    assert "Only in A" in shown(found) and "Only in B" in shown(found)
    none = diff_reports(a, compared(tmp_path / "c", [0.7], [0.8]))
    assert none.sentence == "the reports have no row in common: 3 only in A, 1 only in B"


def test_rows_of_the_same_runs_belong_together(tmp_path):
    """Though another study about the same subject comes first."""
    runs = tmp_path / "runs"
    same = study(runs, "compare", [{}], arms(runs, 0, "x", [0.7, 0.72], [0.8, 0.83]))
    other = study(tmp_path / "more", "compare", [{}], arms(tmp_path / "more", 0, "y", [0.3, 0.32], [0.4, 0.43]))
    both = tmp_path / "both"
    write.write_report(collect.read_report([other, same]), both)
    found = diff_reports(same, both)
    assert [row.label.endswith("#2") for row in found.rows] == [True] and not found.rows[0].seeds
    assert [side["label"][-2:] for side in found.only_b] == ["#1"]


def test_studies_that_share_runs_are_found_in_either_order(tmp_path):
    cells = arms(tmp_path, 0, "x", [0.7, 0.72, 0.71, 0.73], [0.8, 0.83, 0.82, 0.84])
    few = plan(tmp_path, [cell for cell in cells if cell["seed"] < 3], "compare-1")
    all_ = plan(tmp_path, cells, "compare-2")
    write.write_report(collect.read_report([few, all_]), tmp_path / "a")
    write.write_report(collect.read_report([all_, few]), tmp_path / "b")
    assert diff_reports(tmp_path / "a", tmp_path / "b").sentence == "nothing changed"


def test_changed_verdicts_come_first(tmp_path):
    def made(root: Path, second: float) -> Path:
        cells = arms(root, 0, "x", [0.7, 0.72, 0.74], [0.8, 0.81, 0.85], task="digits")
        cells += arms(root, 1, "y", [0.7, 0.72, 0.74], [0.70 + second, 0.73 + second, 0.735 + second], task="images")
        return study(root, "compare", [{"task": "digits"}, {"task": "images"}], cells)

    found = diff_reports(made(tmp_path / "a", 0.0), made(tmp_path / "b", 0.2))
    assert [(row.label, row.verdict_changed) for row in found.rows] == [
        ("images / transformer", True),
        ("digits / transformer", False),
    ]
    assert found.sentence.startswith(
        "1 of 2 rows keep their verdict; images / transformer changed from 'not decided' to 'SPT beats scratch'"
    )


def test_a_row_that_had_no_result_yet_is_found_again(tmp_path):
    folder = compared(tmp_path / "runs", [0.7, 0.72], [0.8, 0.81])
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder, tmp_path / "empty" / folder.name)
    found = diff_reports(tmp_path / "empty" / folder.name, folder)
    (row,) = found.rows
    assert (row.a["decision"], row.metric) == ("no pair", "accuracy") and row.verdict_changed
    assert [failure.there for failure in row.failures] == ["a"] * 4
    assert "from 'no pair finished' to" in found.sentence


def test_every_field_of_a_row_is_compared(tmp_path):
    folder = compared(tmp_path / "runs", [0.7, 0.72, 0.74], [0.8, 0.81, 0.85])
    raw = to_json(collect.read_report([folder]))
    path = tmp_path / "b.json"
    unsaid = {"label", "source", "command", "verdict", "compute", "ratios", "detectable", "favour_spt"}
    apart = {"task", "model", "recipe", "factors", "kind", "metric"}
    other = {
        **{
            "not_self_pretraining": True,
            "smoke": True,
            "higher_is_better": False,
            "decision": "open",
            "total": {"axis": "flops", "amount": 1.0},
        },
        **{"warnings": ["odd"], "notes": ["odd"], "seeds": [], "items": None, "failures": None},
        **{"scratch_arm": None, "spt_arm": None, "only": {"arm": "spt", "n": 1, "low": None, "high": None}},
    }
    for name in Row.model_fields.keys() - unsaid:
        value = raw["rows"][0][name]
        new = other.get(name, 0.5 if isinstance(value, int | float) or value is None else "odd")
        if name in ("n", "planned", "splits", "tests", "seen"):
            new = 9
        if name == "factors":
            new = {"share": 1.0}
        if name == "kind":
            new = "data"
        if name in ("scratch_arm", "spt_arm"):
            new = value | {"best_at_end": 77}
        if new is None:
            continue
        path.write_text(json.dumps(raw | {"rows": [raw["rows"][0] | {name: new}]}))
        found = diff_reports(folder, path)
        assert found.changed, name
        assert bool(found.only_a) == (name in apart), name
    path.write_text(json.dumps(raw | {"warnings": ["odd"]}))
    assert [(text.key, text.there) for text in diff_reports(folder, path).statements] == [("WARNING: odd", "b")]
    assert "WARNING: odd" in shown(diff_reports(folder, path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format": 2, "kind"', "cannot be read as JSON"),
        ('{"format": 2, "kind": "report", "rows": [{"delta": NaN}]}', "cannot be read as JSON"),
        ('{"format": 2, "kind": "report", "rows": [{"delta": -1e308}]}', "cannot be read as JSON"),
        ("[]", "is not a report.json of spt"),
        ('{"format": 2, "kind": "study", "rows": []}', "is not a report.json of spt"),
        ('{"format": 1, "kind": "report", "rows": []}', f"has format 1 of another version of spt, not {FORMAT}"),
        (f'{{"format": {FORMAT}, "kind": "report", "rows": [{{}}]}}', "is not a report of this version of spt"),
        (f'{{"format": {FORMAT}, "kind": "report", "rows": []}}', "is not a report of this version"),
    ],
)
def test_files_that_are_no_reports(tmp_path, text, words):
    folder = compared(tmp_path / "runs", [0.7], [0.8])
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        diff_reports(folder, path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_reports_without_rows(tmp_path):
    finish(tmp_path, "scratch", 0, 0.7)
    run = tmp_path / "finetune-scratch0"
    with pytest.raises(UsageError, match="no rows to compare"):
        diff_reports(run, run)
    with pytest.raises(UsageError, match="no rows to compare"):
        diff_reports(kept(run, tmp_path / "a.json"), run)
    with pytest.raises(UsageError, match="does not exist"):
        diff_reports(tmp_path / "no", run)


def test_the_command(tmp_path):
    folder = compared(tmp_path / "runs", [0.7, 0.72, 0.74], [0.8, 0.81, 0.85])
    before = kept(folder, tmp_path / "a.json")
    edit(folder, "finetune-scratch0", accuracy=0.69)
    done = CliRunner().invoke(app, ["diff", str(before), str(folder), "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["changed"] and found["sentence"].startswith("1 of 1 row keeps its verdict")
    done = CliRunner().invoke(app, ["diff", str(before), str(folder)])
    assert done.stdout.startswith("1 of 1 row keeps its verdict")
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert not (folder / "report.json").exists()  # only compared, not written
    done = CliRunner().invoke(app, ["diff", str(before)])
    assert done.exit_code == 2 and "Missing argument" in done.stderr


def test_a_folder_that_a_report_was_written_to_is_that_report(tmp_path: Path) -> None:
    folder = compared(tmp_path / "runs", [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    write.write_report(collect.read_report([folder]), tmp_path / "out")
    assert diff_reports(tmp_path / "out", folder).sentence == diff_reports(folder, folder).sentence
