"""docs/results_page.py: what the stored results of the declared study are said to show."""

import pytest
import results_page as page
from tiny import ROOT

from spt.report.results import StoredResult, StoredRun, read_results
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
    found = {line[2]: line for line in lines(page.scores(cells))}
    assert [found[model][7] for model in ("Transformer", "S4", "DLR")] == ["helps", "hurts", "open"]
    assert found["Transformer"][:6] == ["digits", "all", "Transformer", "81.00", "91.67", "+10.67"]
    low, high = found["Transformer"][6].split(" to ")
    assert float(low) < 10.67 < float(high) and found["Transformer"][8] == "3"


def test_only_seeds_of_both_arms_are_paired_and_arms_alone_are_no_cell():
    (cell,) = page.study_cells([*both("s4", [0.5, 0.6, 0.7], [0.6, 0.8]), stored("dlr", "scratch", [0.5])])
    assert cell.gains() == {0: pytest.approx(0.1), 1: pytest.approx(0.2)}


def test_budgets_and_studies_are_kept_apart():
    of_labels = both("s4", [0.1], [0.2], table="real-labels") + both("s4", [0.3], [0.4], 0.1, table="real-labels")
    cells = page.study_cells([*of_labels, *both("s4", [0.5], [0.6]), *both("s4", [0], [0], table="another")])
    assert [(cell.budget, cell.mean("scratch")) for cell in cells] == [(1.0, 0.5), (0.1, 0.3)]


@pytest.mark.parametrize(("spread", "word"), [(0.001, "decided"), (0.09, "open")])
def test_models_change_places(spread, word):
    one = [0.80 + spread * sign for sign in (-1, 1, 0, 0.5, -0.5)]
    cells = page.study_cells(
        [*both("s4", [0.80] * 5, [0.95] * 5), *both("dlr", [0.90] * 5, [each + 0.1 for each in one])]
    )
    ((_, _, scratch, spt, told),) = lines(page.rankings(cells))
    assert (scratch, spt, told) == ("DLR > S4", "S4 > DLR", f"S4 and DLR ({word})")
    still = page.study_cells([*both("s4", [0.80] * 5, [0.95] * 5), *both("dlr", [0.70] * 5, one)])
    assert lines(page.rankings(still))[0][4] == "none"


def test_the_best_network_stands_beside_the_baselines():
    cells = page.study_cells(both("s4", *UP, baselines={"majority": 0.1, "tfidf": 0.95}))
    ((_, _, network, others),) = lines(page.baselines(cells))
    assert network == "S4, SPT 91.67" and others == "tfidf 95.00; majority 10.00"


def test_chosen_rates_and_edges():
    cells = page.study_cells(both("s4", *UP))
    assert lines(page.rates(cells)) == [["digits", "S4", "0.15 (edge)", "0.15 (edge)"]]
    plain = [
        result.model_copy(update={"runs": (result.runs[0].model_copy(update={"departures": ()}),)})
        for result in both("s4", *UP)
    ]
    assert lines(page.rates(page.study_cells(plain))) == [["digits", "S4", "0.0015", "0.0015"]]


def test_a_published_cell_is_met_only_where_it_is_complete():
    cell = {"paper": "s5", "table": "3", "row": "S5", "column": "MSE", "recipe": "pendulum/s5"}
    scores = [0.0034 + 1e-5 * (seed % 3) for seed in range(20)]
    whole = stored("s5", "scratch", scores, metric="mse", planned=20, factors={"variant": "S5"}, **cell)
    part = whole.model_copy(update={"runs": whole.runs[:19]})
    far = whole.model_copy(
        update={"runs": tuple(run.model_copy(update={"score": run.score + 0.001}) for run in whole.runs)}
    )
    assert [lines(page.published([each]))[0][5] for each in (whole, part, far)] == ["yes", "not complete", "no"]


def test_the_figure_has_every_seed_and_its_caption_every_gain():
    plot = page.gains_figure(page.study_cells([*both("transformer", *UP), *both("s4", *DOWN, 0.1)]))
    assert len(plot.data) == 6 and "digits, all, Transformer +10.67; digits, a tenth, S4 -10.67" in plot.caption
    assert "<svg" in page.svg(plot)


def test_the_second_study_has_the_rates_that_the_first_one_chose():
    """Of every data set whose results are stored; and only of those."""
    study = read("real-labels").study
    given = {recipe: each.set for each in study.where for recipe in each.recipes}
    chosen = {
        cell.scratch.recipe: {
            f"{stage}.train.learning_rate": page.chosen_rate(result, stage)
            for stage, result in (("finetune", cell.spt), ("scratch", cell.scratch))
        }
        for cell in page.study_cells(read_results(ROOT / "results"))
        if cell.budget == 1
    }
    assert given == chosen and set(study.recipes) == set(chosen)


def test_an_unknown_place_in_a_source_is_an_error(tmp_path):
    path = tmp_path / "a.md.in"
    path.write_text("# A\n\n{{ nothing }}\n")
    with pytest.raises(KeyError):
        page._page(path)
