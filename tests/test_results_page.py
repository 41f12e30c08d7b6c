"""docs/results_page.py: what the stored results of the declared study are said to show."""

import re
from collections import Counter

import pytest
import results_page as page
from keep_report import kept
from performance_page import is_current
from tiny import ROOT

from spt.baselines.registry import BASELINES
from spt.baselines.run import _scored
from spt.baselines.scores import ComparedMetric
from spt.config.load import load
from spt.data.dataset import open_task
from spt.report.format import is_percent
from spt.report.plotting import svg
from spt.report.results import StoredResult, StoredRun, read_results
from spt.report.stats import paired
from spt.studies.schema import read

RATE = "{}.train.learning_rate (0.15, recipe 0.0015)"


def stored(model, arm, scores, budget=1.0, table="real-tune", **changes):
    """A cell with these scores by seed."""
    facts = {"steps": 10, "device_seconds": 60, "spt": "0", "commit": "a", "torch": "2", "machine": "m"}
    departures = (RATE.format("scratch" if arm == "scratch" else "finetune"),)
    runs = [
        StoredRun(
            seed=seed, run=f"finetune-{arm}{seed}", score=score, date="2026-11-27", departures=departures, **facts
        )
        for seed, score in enumerate(scores)
    ]
    fields = {"table": table, "row": f"small/real-digits-{model}", "column": f"digits, fraction {budget}"}
    fields |= {"recipe": fields["row"], "factors": {} if budget == 1 else {"fraction": budget}}
    fields |= {"metric": "accuracy", "planned": 5, "arm": arm, "runs": tuple(runs)}
    return StoredResult(**(fields | changes))


def both(model, scratch, spt, budget=1.0, **changes):
    return [stored(model, arm, scores, budget, **changes) for arm, scores in (("scratch", scratch), ("spt", spt))]


UP, DOWN, OPEN = (
    ([0.8, 0.82, 0.81], [0.9, 0.93, 0.92]),
    ([0.9, 0.93, 0.92], [0.8, 0.82, 0.81]),
    ([0.7, 0.8], [0.8, 0.7]),
)


def lines(table):
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]


def test_a_gain_is_decided_by_its_interval_alone():
    cells = page.study_cells([*both("transformer", *UP), *both("s4", *DOWN), *both("dlr", *OPEN)])
    found = {line[1]: line for line in lines(page.scores(cells))}
    verdicts = [found[model][5] for model in ("Transformer", "S4", "DLR")]
    assert verdicts == ["helps; 3 seeds", "hurts; 3 seeds", "open; 2 seeds"]
    assert found["Transformer"][:4] == ["digits, all", "Transformer", "81.00", "91.67"]
    gain, low, _, high = found["Transformer"][4].replace("(", "").replace(")", "").split()
    assert float(low) < float(gain) == 10.67 < float(high)


def test_only_seeds_of_both_arms_are_paired_and_arms_alone_are_no_cell():
    (cell,) = page.study_cells([*both("s4", [0.5, 0.6, 0.7], [0.6, 0.8]), stored("dlr", "scratch", [0.5])])
    assert cell.gains() == {0: pytest.approx(0.1), 1: pytest.approx(0.2)}


def test_budgets_and_studies_are_kept_apart():
    of_labels = both("s4", [0.1], [0.2], table="real-labels") + both("s4", [0.3], [0.4], 0.1, table="real-labels")
    cells = page.study_cells([*of_labels, *both("s4", [0.5], [0.6]), *both("s4", [0], [0], table="another")])
    assert [(cell.budget, cell.mean("scratch")) for cell in cells] == [(1.0, 0.5), (0.1, 0.3)]


def test_means_are_of_the_seeds_that_both_arms_have_and_lost_runs_are_named():
    scratch, spt = both("s4", [0.5, 0.9], [0.6, 0.7])
    lost = scratch.runs[1].model_copy(update={"score": None, "state": "diverged"})
    (cell,) = page.study_cells([scratch.model_copy(update={"runs": (scratch.runs[0], lost)}), spt])
    assert lines(page.scores([cell]))[0][2:] == ["50.00", "60.00", "+10.00", "open; 1 seeds; scratch 1 diverged"]
    assert not page.study_cells([scratch.model_copy(update={"runs": (lost,)}), spt])  # nothing to compare


def test_both_arms_are_from_one_table():
    first, second = both("s4", [0.5], [0.6]), both("s4", [0.7], [0.9], table="real-labels")
    (cell,) = page.study_cells([first[0], *second])
    assert cell.mean("scratch") == 0.7
    assert not page.study_cells([first[0], second[1]])


def test_what_the_plan_does_not_know_is_refused():
    with pytest.raises(ValueError, match="the plan has no"):
        page.study_cells(both("s4", [0.5], [0.6], 0.3))
    with pytest.raises(AssertionError, match="mse"):
        page.study_cells(both("s4", [0.5], [0.6], metric="mse"))


def test_orders_are_of_means_and_missing_data_sets_are_named():
    cells = page.study_cells([*both("s4", [0.8, 0.8], [0.95, 0.9]), *both("dlr", [0.9, 0.9], [0.8, 0.8])])
    assert lines(page.rankings(cells)) == [["digits", "all", "DLR, S4", "S4, DLR"]]
    assert page.missing(cells) == "Not run yet: image, heart, speech, digits with a tenth of the labels."
    both_budgets = [
        cell._replace(data=data, budget=budget) for cell in cells for data in page.SETS for budget in (1, 0.1)
    ]
    assert page.missing(both_budgets) == "All four data sets were run."
    everywhere = [cell for cell in both_budgets if cell.budget == 1]
    assert page.unfinished([everywhere, cells]) == "Declared for all four data sets; not run yet: image, heart, speech."
    assert page.unfinished([everywhere, everywhere]) == "All four data sets."


def test_other_metrics_have_other_units():
    heart = [result.model_copy(update={"recipe": "small/real-heart-s4"}) for result in both("s4", *UP, metric="r2")]
    assert [cell[:6] for cell in lines(page.scores(page.study_cells(heart)))[0][2:5]] == ["0.8100", "0.9167", "+0.107"]


def test_the_best_network_stands_beside_the_baselines():
    cells = page.study_cells(both("s4", *UP, baselines={"majority": 0.1, "tfidf": 0.95}))
    ((_, _, network, others),) = lines(page.baselines(cells))
    assert network == "S4, SPT 91.67" and others == "tfidf 95.00; majority 10.00"


def test_chosen_rates_and_edges():
    cells = page.study_cells(both("s4", *UP))
    assert lines(page.rates(cells)) == [["digits", "S4", "0.15 (edge)", "0.15 (edge)"]]
    scratch, _ = both("s4", *UP)
    first = scratch.runs[0].model_copy(update={"departures": ()})
    assert page.chosen_rate(scratch.model_copy(update={"runs": (first,)}), "scratch") == 0.0015  # the recipe's
    with pytest.raises(ValueError, match="several learning rates"):
        page.chosen_rate(scratch.model_copy(update={"runs": (first, *scratch.runs[1:])}), "scratch")


def test_a_published_cell_is_met_only_where_it_is_complete():
    cell = {"paper": "s5", "table": "3", "row": "S5", "column": "MSE", "recipe": "pendulum/s5"}
    scores = [0.0034 + 1e-5 * (seed % 3) for seed in range(20)]
    whole = stored("s5", "scratch", scores, metric="mse", planned=20, factors={"variant": "S5"}, **cell)
    part = whole.model_copy(update={"runs": whole.runs[:19]})
    far = whole.model_copy(
        update={"runs": tuple(run.model_copy(update={"score": run.score + 0.001}) for run in whole.runs)}
    )
    assert [lines(page.published([each]))[0][4] for each in (whole, part, far)] == ["yes", "not complete", "no"]
    place = {"paper": "spt", "table": "1", "row": "Transformer", "column": "PathX"}  # printed: no better than chance
    (line,) = lines(page.published([stored("s4", "scratch", [0.5], planned=1, **place)]))
    assert line[1:] == ["-", "50.00", "1 of 1", "", f"`{RATE.format('scratch')}`"]


def test_the_figure_has_every_seed_and_its_caption_every_gain():
    plot = page.gains_figure(page.study_cells([*both("transformer", *UP), *both("s4", *DOWN, 0.1)]))
    assert (
        len(plot.data) == 6
        and "digits, all, Transformer +10.67 (" in plot.caption
        and "digits, a tenth, S4 -10.67" in plot.caption
    )
    assert "<svg" in svg(plot)


def test_the_later_looks_stand_beside_the_declared_one():
    looks = {"equal": page.study_cells([*both("s4", *UP), *both("s4", *DOWN, 0.1)]), "longer": [], "larger": []}
    looks["longer"] = [looks["equal"][0]]
    plot = page.updates_figure(looks)
    drawn = [(each["series"], each["seed"]) for each in plot.data]
    assert drawn == [(look, seed) for look in ("equal", "longer") for seed in range(3)], "with all labels alone"
    assert "equal, digits, S4 +10.67 (" in plot.caption and "longer, digits, S4 +10.67" in plot.caption
    assert "larger" not in svg(plot), "a look that was not run has no mark in the legend"


@pytest.mark.parametrize("plot", page.stored_figures(), ids=lambda plot: plot.name)
def test_the_figures_in_the_documentation_are_of_the_stored_results(plot):
    assert is_current(ROOT / "docs" / "figures", plot), "run make docs"


def test_decided_gains_are_counted():
    up, down, undecided = (page.study_cells(both("s4", *scores)) for scores in (UP, DOWN, OPEN))
    told = page.counts([*3 * up, *2 * down, *undecided])
    assert told == "Of 6 gains 3 are shown to be positive, 2 negative, and 1 are open."


@pytest.fixture(scope="module")
def chosen_rates():
    """By recipe: what real-tune chose for every data set whose results are stored."""
    return {
        cell.scratch.recipe: {
            f"{stage}.train.learning_rate": page.chosen_rate(result, stage)
            for stage, result in (("finetune", cell.spt), ("scratch", cell.scratch))
        }
        for cell in page.study_cells(read_results(ROOT / "results"))
        if cell.budget == 1
    }


def test_the_second_study_has_the_rates_that_the_first_one_chose(chosen_rates):
    study = read("real-labels").study
    given = {recipe: each.set for each in study.where for recipe in each.recipes}
    assert given == chosen_rates and set(study.recipes) == set(chosen_rates)


@pytest.mark.parametrize("name", ["real-longer", "real-larger"])
def test_the_longer_studies_have_the_same_rates_and_the_epochs_that_the_plan_says(name, chosen_rates):
    """Finetuning as long as scratch trains in real-tune; in the larger one scratch has the epochs of both stages."""
    study = read(name).study
    given = {name: {} for name in study.recipes}
    for each in study.where:
        for recipe in each.recipes:
            given[recipe] |= each.set
    for recipe, rates in chosen_rates.items():
        declared = load(recipe).recipe
        finetuning = declared.scratch.train.epochs
        epochs = {"finetune.train.epochs": finetuning}
        if name == "real-larger":
            epochs["scratch.train.epochs"] = declared.pretrain.train.epochs + finetuning
        assert given.pop(recipe) == rates | epochs
    assert not given


@pytest.mark.parametrize("fraction", [1.0, 0.1])
def test_the_stored_baselines_of_digits_are_what_is_computed(fraction):
    (known,) = {
        tuple(cell.scratch.baselines.items())
        for cell in page.study_cells(read_results(ROOT / "results"))
        if cell.data == "digits" and cell.budget == fraction
    }
    recipe = load("small/real-digits-s4").recipe
    data = open_task(recipe.task.model_copy(update={"subset_fraction": fraction, "subset_seed": 42}))
    for name, score in known:
        if name != "boosting":  # whose trees differ between versions of scikit-learn by more than a row or two
            fitted = BASELINES[name].fit(data, ComparedMetric("accuracy"), 0)
            assert _scored(fitted, data, data.test)[0]["accuracy"] == pytest.approx(score, abs=0.005), name


@pytest.mark.parametrize("file", ["README.md", "docs/choosing.md"])
def test_what_is_told_first_is_what_is_stored(file):
    text = " ".join((ROOT / file).read_text(encoding="utf-8").replace("−", "-").split())
    cells = page.study_cells(read_results(ROOT / "results"))
    verdicts = Counter(page.verdict(cell.gain) for cell in cells)
    assert len(cells) == verdicts.total() and set(verdicts) <= {"helps", "hurts", "open"}
    assert f"Of {len(cells)} gains {verdicts['helps']} are shown to be positive" in text
    assert f"{verdicts['hurts']} negative" in text and f"{verdicts['open']} are open" in text
    for cell in cells:
        if page.verdict(cell.gain) != "open":
            means = cell.mean("scratch"), cell.mean("spt")
            shown = [f"{100 * mean:.1f}" if is_percent(cell.metric) else f"{mean:.2f}" for mean in means]
            assert all(number in text for number in shown), shown
    later = [
        cell for look in (page.LONGER, page.LARGER) for cell in page.study_cells(read_results(ROOT / "results"), look)
    ]
    for gain, percent in ((cell.gain, is_percent(cell.metric)) for cell in later if page.verdict(cell.gain) != "open"):
        low, high = (f"{100 * end:.1f}" if percent else f"{end:.3f}" for end in (gain.low, gain.high))
        size = abs(gain.mean)
        sizes = f"{100 * size:.0f}|{100 * size:.1f}" if percent else f"{size:.2f}"
        assert re.search(rf"[ +-]({sizes}) [^|.]*\({low} to {high}\)", text), f"{sizes} ({low} to {high})"
    if file == "README.md":
        found = Counter(page.verdict(cell.gain) for cell in later)
        counted = f"{found['helps']} are shown to be positive and {found['hurts']} negative; {found['open']} are open"
        assert f"Of these {len(later)} gains {counted}" in text


def test_the_front_page_has_the_published_numbers_that_were_obtained():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    cells = [cell for cell in read_results(ROOT / "results") if cell.paper is not None and cell.complete]
    for cell in cells:
        scores = [run.score for run in cell.runs if run.score is not None]
        mean = sum(scores) / len(scores)
        assert (f"{mean:.2e}".replace("e-0", "e-") if mean < 0.01 else f"{mean:.2f}") in text, cell
    assert len(cells) == 4, "README says: four were run"


def test_what_is_said_of_the_pendulum_without_times_is_stored():
    text = " ".join((ROOT / "docs/results/published.md.in").read_text(encoding="utf-8").split())
    found = {cell.row: cell for cell in read_results(ROOT / "results") if cell.paper == "s5"}
    told, dropped = ({run.seed: run.score for run in found[row].runs} for row in ("S5", "S5-drop"))
    more = paired([dropped[seed] - told[seed] for seed in sorted(told)])
    mean, low, high = (f"{value:.2e}".replace("e-0", "e-") for value in (more.mean, more.low, more.high))
    assert f"higher by {mean} ({low} to {high} over twenty seeds)" in text and more.n == 20
    assert f"error is {sum(dropped.values()) / sum(told.values()):.2f} times S5's" in text
    appended = {run.seed: run.score for run in found["S5-append"].runs}
    for words, others, sign in (("higher than S5's", told, 1), ("lower than S5-drop's", dropped, -1)):
        more = paired([sign * (appended[seed] - others[seed]) for seed in sorted(appended)])
        mean, low, high = (f"{value:.2e}".replace("e-0", "e-") for value in (more.mean, more.low, more.high))
        assert f"{words} by {mean} ({low} to {high}" in text and more.n == 6


def test_time_is_counted_once_for_a_run_that_stands_in_two_tables():
    twice = [*both("s4", *UP), *both("s4", *UP, table="real-labels")]  # six runs of a minute
    assert page.spent(twice) == "6 runs in 0.1 hours of one core"


def test_what_trials_took_is_read_from_reports():
    lines = [
        ("scratch, tuning", 18, "30.0 min"),
        ("SPT, pretraining", 18, "18.0 min"),
        ("SPT, finetuning", 15, "8 min"),
    ]
    table = "\n".join(f"| x | {what} | {runs} | 1 | 2 | 3 | 4 | {time} | 9.9 h |" for what, runs, time in lines)
    report = (
        f"| a | + finetuning | 5 | 19.8 s | 1 MiB |\n{table}\n|  | SPT, tuning | 18 | 1 | 2 | 3 | 4 | 1.5 h | 9.9 h |\n"
    )
    assert page.of_trials([report, report]) == f"{2 * (30 + 18 * 3 / 18 + 90) / 60:.1f} hours"


def test_an_unknown_place_in_a_source_is_an_error(tmp_path):
    path = tmp_path / "a.md.in"
    path.write_text("# A\n\n{{ nothing }}\n")
    with pytest.raises(KeyError):
        page._page(path)


def test_a_kept_report_has_its_title_and_no_folder_of_this_machine(tmp_path):
    study = tmp_path / "runs" / "tune-1"
    study.mkdir(parents=True)
    text = (
        f"# Self-pretraining\n\ncommand `spt study run x --out {study.parent}`\n| {study.parent}/finetune-1 | # b |\n"
    )
    (study / "report.md").write_text(text, encoding="utf-8")
    assert kept(study, "Digits") == "# Digits\n\ncommand `spt study run x`\n| runs/finetune-1 | # b |\n"
