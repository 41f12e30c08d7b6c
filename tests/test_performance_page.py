"""docs/performance.md is made from files of measurements: their form, its tables, its figure."""

import json
import re

import performance_page
import pytest
import torch
from performance_page import (
    Row,
    Table,
    comparison,
    measured,
    of_models,
    origin,
    published,
    result,
    rounding_errors,
    slopes_figure,
    write_figures,
)
from pydantic import ValidationError
from tiny import ROOT
from typer.testing import CliRunner

from spt.checks.rounding import model_rounding, native_models
from spt_cli import app

TEMPLATE = (ROOT / "docs" / "performance.md.in").read_text(encoding="utf-8")
AIM = {
    "what": "DLR",
    "configuration": "L = 1,024",
    "published_ms": 300,
    "ours_ms": 100,
    "ratio": 3.1,
    "ours_bf16_ms": 60.5,
    "memory_published_mib": 1713,
    "memory_ours_mib": 980,
    "floor": "the product alone takes 90 ms",
    "note": "one round",
}


def table(*rows):
    return Table(source="somebody/code, 1234567", machine="a machine", commit="abc", date="2026-01-02", rows=rows)


def test_a_comparison_and_where_it_is_from():
    text = comparison(table(AIM, {"what": "S4", "published_ms": [10, 20], "ours_ms": 0.5}))
    head, rule, first, second, _, foot = text.splitlines()
    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|") == len(AIM) + 1
    assert first.startswith("| DLR | L = 1,024 | 300 | 100 | ×3.1 | 60.5 | 1,713 | 980 | the product")
    assert second.startswith("| S4 |  | 10 to 20 | 0.5 |  |") and rule.startswith("| --- | --- | ---: |")
    assert foot == "*a machine; published: somebody/code, 1234567; ours: commit abc; 2026-01-02.*"
    assert "note" not in comparison(table({"what": "S4", "ours_ms": 1}))


def test_a_ratio_is_checked_against_its_times():
    assert Row(what="x", published_ms=10, ours_ms=4).ratio == 2.5
    with pytest.raises(ValidationError, match="the ratio is 4"):
        Row(what="x", published_ms=10, ours_ms=4, ratio=4)
    with pytest.raises(ValidationError, match="ours_msec"):
        Row(what="x", ours_msec=4)


def test_every_measurement_is_on_the_page():
    """And nothing that the page asks for is missing."""
    asked = set(re.findall(r"{{ (\w+) ([\w,-]+) }}", TEMPLATE))
    others = {
        "published",
        "operations",
        "architectures",
        "programs",
        "preparing",
        "scaling",
    }  # but the first for pages of their own
    files = {path.stem for path in performance_page.MEASUREMENTS.glob("*.json")} - others
    together = {name for kind, names in asked if kind == "models" for name in names.split(",")}
    alone = {(kind, name) for kind, name in asked if kind != "models"}
    of_bench = {("measured", name) for name in files - together - {"errors"}}
    assert alone == {("published", name) for name in published()} | of_bench | {("errors", "errors")}
    for name in files:
        assert origin(result(name)) in performance_page.performance_page()


@pytest.mark.parametrize(
    "arguments", [("op", "scan", "--quick"), ("task", "digits", "subset_fraction=0.1", "--quick")], ids=lambda a: a[0]
)
def test_whatever_is_saved_can_be_shown(arguments, tmp_path):
    """As the command prints it: the same numbers, in Markdown."""
    done = CliRunner().invoke(app, ["bench", *arguments, "--save", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    text = measured(json.loads((tmp_path / "a.json").read_text()))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = {cell.strip() for row in rows[2:] for cell in row.split("|")} - {""}
    assert len(rows) > 3 and all(cell in done.stdout for cell in cells)
    assert re.search(r"spt \S+, commit \S+; 20\d\d-", text)


def test_models_at_two_lengths_are_one_table():
    """The fastest first; what is not there, or has not fitted, has no time."""
    times, facts = {"a": 0.02, "b": 0.01, "c": 0.3}, result("slopes")

    def row(name, length, failed=None):
        sizes = {"model": name, "options": {"d_model": 8}, "length": length, "batch": 2, "failed": failed}
        measured = {"parameters": 1234, "seconds": {"step": times[name]}, "peak_bytes": 2**21}
        return sizes if failed else {**sizes, **measured}

    rows = [[row("a", 10), row("b", 10), row("c", 10, "out of memory")], [row("a", 2000)]]
    text = of_models([{**facts, "rows": each} for each in rows])
    head, rule, *lines = text.split("\n\n")[0].splitlines()
    sizes = [f"{unit}, L = {length}, B = 2" for length in ("10", "2,000") for unit in ("ms", "MiB")]
    assert head == f"| {' | '.join(['model', 'd_model', 'parameters', *sizes])} |"
    assert rule.startswith("| --- | ---: |") and lines == [
        "| `b` | 8 | 1,234 | 10 | 2 |  |  |",
        "| `a` | 8 | 1,234 | 20 | 2 | 20 | 2 |",
        "| `c` | 8 |  | out of memory |  |  |  |",
    ]
    assert text.count(origin(facts)) == 2


def test_every_model_has_its_rounding_errors():
    """And those of one, measured again, are near: nobody has changed what it computes."""
    rows = result("errors")["rows"]
    assert list(rows) == native_models()
    assert "| `s4` |" in rounding_errors(result("errors")) and "| `linformer` |" in rounding_errors(result("errors"))
    again = model_rounding("mingru", torch.device("cpu"))
    assert again.keys() == rows["mingru"].keys() and not again["causal"]
    for name in again.keys() - {"causal"}:
        assert 1 / 3 < again[name] / rows["mingru"][name] < 3, name
    assert again["float32 output"] < again["bfloat16 output"] / 100


def test_rounding_is_checked_by_a_command(tmp_path):
    """A model that cannot be computed is a row with its reason, and the others are still checked."""
    (tmp_path / "broken.py").write_text(
        "from spt.models.mingru import Config, build as built\n"
        "def build(config):\n    raise RuntimeError('no kernel image')\n"
    )
    found = CliRunner().invoke(
        app, ["check", "rounding", "tcn", str(tmp_path / "broken.py"), "--length", "32", "--cpu", "--json"]
    )
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)["rows"]
    assert rows["tcn"]["float32 output"] < 1e-5 < rows["tcn"]["bfloat16 output"]
    assert list(rows.values())[1] == {"failed": "RuntimeError: no kernel image"}
    shown = CliRunner().invoke(app, ["check", "rounding", str(tmp_path / "broken.py"), "--length", "32", "--cpu"])
    assert shown.exit_code == 4 and "broken.py failed: RuntimeError: no kernel image" in shown.stdout
    assert CliRunner().invoke(app, ["check", "rounding", "mingrue", "--cpu"]).exit_code == 2


def test_the_figure_is_of_the_measurements(tmp_path):
    """The one in docs/ is the saved result's, and is only drawn again for another result."""
    assert write_figures(ROOT / "docs" / "figures") == [], "docs/figures/slopes.svg is of another result; run make docs"
    drawn = write_figures(tmp_path)
    assert [path.name for path in drawn] == ["slopes.svg", "slopes.png"] and write_figures(tmp_path) == []
    (tmp_path / "slopes.svg").write_text("<svg></svg>")
    assert write_figures(tmp_path) == drawn


def test_a_row_that_is_left_out_is_not_drawn():
    found = result("slopes")
    count = len(slopes_figure(found).data)
    found["rows"][0]["failed"] = "out of memory"
    assert len(slopes_figure(found).data) == count - 1
