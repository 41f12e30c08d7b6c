"""What README.md and docs/studies.md say of the example report is what its tables hold."""

import csv
import re

import pytest
from tiny import ROOT

from spt.report.format import delta_text, interval_text, p_text, score_text
from spt.studies.schema import read

FOLDER = ROOT / "docs" / "example-report"


def rows(name):
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def told(page):
    return " ".join((ROOT / page).read_text(encoding="utf-8").replace("−", "-").split())


@pytest.fixture(scope="module")
def gains():
    return rows("report")


def test_it_is_the_packaged_study(gains):
    study = read("models-quickstart").study
    assert [row["recipe"] for row in gains] == list(study.recipes)
    assert {row["command"] for row in gains} == {"spt study run models-quickstart"}
    assert all(int(row["n"]) == study.seeds for row in gains)


def test_every_score_of_the_page_on_studies_is_in_it(gains):
    table = told("docs/studies.md").partition("## One real study")[2].partition("## ")[0]
    for row in gains:
        scores = [score_text(float(row[arm]), "accuracy") for arm in ("scratch", "spt")]
        ends = interval_text(float(row["low"]), float(row["high"]), "accuracy")
        cells = [*scores, f"{delta_text(float(row['delta']), 'accuracy')} ({ends})"]
        assert f"| {' | '.join(cells)} |" in table, row["label"]
    s5 = next(row for row in gains if row["model"] == "s5")
    assert s5["decision"] == "spt alone" and f"Holm's p {p_text(float(s5['holm']))}" in table
    decisions = {row["decision"] for row in [*gains, *rows("models")]}
    assert all(each == "open" or each.endswith(" alone") for each in decisions), "the page says that nothing is decided"
    within = [row for row in rows("models") if row["arm"] in ("scratch", "spt")]
    apart = [row for row in within if float(row["rows_low"]) * float(row["rows_high"]) > 0]
    assert (len(within), len(apart)) == (12, 6), "the page says: six of twelve over test rows"


def test_the_front_page_says_what_it_shows(gains):
    text = told("README.md")
    deltas = [100 * float(row["delta"]) for row in gains]
    assert f"raises all four means, by {min(deltas):.1f} to {max(deltas):.1f} points" in text and min(deltas) > 0
    best = max(rows("baselines"), key=lambda row: float(row["score"]))
    assert f"(logistic regression scores {100 * float(best['score']):.0f} %" in text and best["baseline"] == "logistic"


def test_the_untuned_gain_beside_it_is_that_of_the_table_of_fourteen(gains):
    table = told("docs/studies.md")
    row = re.search(r"\| `dlr` \| ([0-9.]+) \| [0-9]+ \| ([0-9.]+) \| [0-9]+ \| \+([0-9.]+) \(", table)
    assert row is not None
    scratch, _, gain = row.groups()
    assert f"DLR from scratch scores {scratch} and gains {gain} points" in table
    assert f"DLR [had gained {float(gain):.1f} points]" in told("README.md")
    tuned = 100 * float(next(row["delta"] for row in gains if row["model"] == "dlr"))
    assert tuned / float(gain) == pytest.approx(0.2, abs=0.02), "four fifths were the rate"
