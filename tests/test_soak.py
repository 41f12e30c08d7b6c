"""Many runs: what reports of them read, draw and list, and that nothing grows while they are made."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from records import compared, shown
from tiny import ROOT, environment

from spt.report import collect, figures, html, plotting, tables
from spt.report.collect import Report
from spt.report.panels import MOST_SEEDS
from spt.runs.folder import RunFolder, keeping_results

opened: Counter[Path] | None = None  # files, by their path, while a test listens


def hook(event: str, arguments: tuple[object, ...]) -> None:
    if opened is not None and event == "open" and isinstance(arguments[0], str | Path):
        opened[Path(arguments[0])] += 1


@pytest.fixture
def opens() -> Counter[Path]:
    """The files that the test opens."""
    global opened
    if not hasattr(hook, "added"):  # a hook stays for as long as the process does
        sys.addaudithook(hook)
        hook.added = True  # type: ignore[attr-defined]
    opened = Counter()
    yield opened
    opened = None


def scores(count: int) -> list[list[float]]:
    return [[0.5 + 0.001 * (seed % 7) for seed in range(count)], [0.6 + 0.001 * (seed % 5) for seed in range(count)]]


def test_a_report_reads_each_result_once(tmp_path: Path, opens: Counter[Path]) -> None:
    folder = compared(tmp_path, *scores(4))
    opens.clear()
    collect.read_report([folder])
    results = {path: count for path, count in opens.items() if path.name == "result.json"}
    assert len(results) == 12 and set(results.values()) == {1}


def test_a_result_is_read_again_for_the_next_report(tmp_path: Path) -> None:
    compared(tmp_path, *scores(1))
    run = RunFolder(tmp_path, "finetune-scratch0")
    with keeping_results():
        first = run.result()
        assert first is not None and run.result() is first
        run.finish(first.model_copy(update={"test": {"accuracy": 0.125}}))
        assert RunFolder(tmp_path, "finetune-scratch0").result() is first
    again = run.result()
    assert again is not None and again.test == {"accuracy": 0.125}


@pytest.fixture
def long_report(tmp_path: Path) -> Report:
    """As if each of its two seeds had been run six hundred times."""
    report = collect.read_report([compared(tmp_path, *scores(2))])
    (row,) = report.rows
    seeds = tuple(seed.model_copy(update={"seed": 2 * k + seed.seed}) for k in range(600) for seed in row.seeds)
    return report.model_copy(update={"rows": (row.model_copy(update={"seeds": seeds}),)})


def test_a_long_table_ends_and_says_where_the_rest_is(long_report: Report) -> None:
    (table,) = (table for table in tables.all_tables(long_report) if len(table.body) > 100)
    assert len(table.body) == tables.MOST_LINES
    note = "The first 1,000 of 1,200 lines; report.json and the CSV files have the others."
    assert table.caption.endswith(note)
    assert note in html.page(long_report, []) and note in " ".join(shown(long_report, 200).split())
    assert len(long_report.table_records("seeds")) == 1_200


def test_a_panel_draws_a_hundred_seeds_and_its_numbers_are_of_all(long_report: Report) -> None:
    (plot,) = (plot for plot in figures.all_figures(long_report) if plot.name == "seeds")
    assert len(plot.data) == 1_200
    assert f"Of up to 1,200 seeds a panel the first {MOST_SEEDS} are drawn." in plot.caption
    assert plotting.svg(plot).count("<use ") < 3 * MOST_SEEDS


@pytest.mark.slow
def test_nothing_grows_from_run_to_run(tmp_path: Path) -> None:
    import subprocess

    from tests.soak.samples import longest_session, read_samples

    command = [sys.executable, "-m", "tests.soak", "runs", "--count", "90", "--every", "0.3", "--out", tmp_path]
    made = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "per 1,000 runs: " in made.stdout.splitlines()[-1] and (tmp_path / "runs.png").stat().st_size > 1_000
    samples = longest_session(read_samples(tmp_path / "runs.csv"))
    assert len(samples) > 5
    for name, most in (("files", 4), ("threads", 4), ("memory_mb", 30)):
        held = [getattr(sample, name) for sample in samples]
        assert max(held) - min(held) <= most, (name, held)
    assert {sample.temporary for sample in samples} == {0}


@pytest.mark.slow
def test_runs_that_are_made_up_are_runs_that_spt_takes_as_finished(tmp_path: Path) -> None:
    from tests.soak.folders import finish_study, plan_comparison, recipe_files, trained_pairs

    recipes = recipe_files(tmp_path / "recipes", 2)
    study = plan_comparison(recipes, 12, tmp_path / "runs")
    folder = finish_study(study, trained_pairs(recipes[0], tmp_path / "trained"))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*-*/*") if path.parent != folder}
    finished = study.run()
    assert finished.path == folder and not finished.failed
    assert [row.n for row in finished.report.rows] == [12, 12] and not finished.report.failures
    assert {path: path.stat().st_mtime_ns for path in files} == files
