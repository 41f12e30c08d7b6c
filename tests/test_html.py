"""What the page, the figures and the checklist of a report hold, without a browser."""

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import rc_context
from records import SCRATCH, SPLITS, arms, compared, finish, plan, study

from spt.errors import UsageError
from spt.report import collect, figures, html, panels, plotting, provenance, write
from spt.report.collect import Report
from spt.report.format import ReportTable
from spt.report.plotting import DARK, LIGHT, Palette, Plot
from spt.report.records import curve_records
from spt.report.search import SearchResult
from spt.runs.folder import RunFolder
from spt.runs.result import SplitRecord


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def by_share(root: Path) -> Path:
    cells = arms(root, 0, "a", [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    cells += arms(root, 1, "b", [0.70, 0.75, 0.80], [0.85, 0.89, 0.96])
    rows = [{"factors": {"share": share}} for share in (0.2, 0.4)]
    return study(root, "compute", rows, cells)


def learn(root: Path, name: str, values: list[float], every: int = 10, above: float | None = None) -> None:
    """`above`: by how much the accuracy on training batches is above that of validation, if it is logged."""
    for number, value in enumerate(values, start=1):
        accuracy = {} if above is None else {"accuracy": value + above}
        RunFolder(root, name).log("train", every * number, loss=1 / number, **accuracy)
        RunFolder(root, name).log("val", every * number, loss=1 / number, accuracy=value)


def whole(made: Report) -> str:
    return html.page(made, figures.all_figures(made))


def drawn(made: Report) -> dict[str, Plot]:
    return {one.name: one for one in figures.all_figures(made)}


# ------------------------------------------------------------------------------------------------------------ drawing


def contrast(first: str, second: str) -> float:
    """The ratio of WCAG 2: 1 for equal colours, 21 for black on white."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((light(first), light(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_are_told_from_their_paper(palette: Palette) -> None:
    assert min(contrast(text, palette.paper) for text in (palette.ink, palette.faint)) >= 4.5
    marks = (palette.scratch, palette.spt, palette.pretrain, *palette.series)
    assert min(contrast(mark, palette.paper) for mark in marks) >= 3


def picture(palette: Palette) -> Any:
    made = plotting.new_figure(3.0, 2.0)
    axes = made.subplots()
    axes.plot([1, 2], [1, 3], color=palette.spt, label="a < b & c")
    axes.scatter([1], [2], color=palette.series[2])
    axes.legend()
    return made


def test_an_svg_has_variables_for_colours_and_names_of_its_own() -> None:
    one = Plot("one", "A <title>", "said & done", picture, [{"x": 1}])
    whole = plotting.svg(one)
    inline = plotting.inline(whole)
    assert whole == plotting.svg(one)
    assert "var(--spt)" in inline and "var(--series-2)" in inline and "var(--ink)" in inline
    assert not re.search(r"#01\d\d\d\d", inline) and "<style>:root" not in inline
    assert LIGHT.spt in whole and DARK.spt in whole and "prefers-color-scheme:dark" in whole
    assert "A &lt;title&gt;" in inline and "said &amp; done" in inline and "a &lt; b &amp; c" in inline
    names, used = set(re.findall(r'\bid="([^"]+)"', inline)), set(re.findall(r'(?:href="|url\()#([^")]+)', inline))
    assert used <= names and all(name.startswith("one-") for name in names)
    assert "DejaVu" not in inline.split("<style")[0]


def test_a_figure_is_saved_three_times(tmp_path: Path) -> None:
    paths = plotting.save(Plot("one", "t", "c", picture, [{"x": 1, "y": None}, {"x": 2, "y": "a,b"}]), tmp_path)
    assert [path.name for path in paths] == ["one.svg", "one.png", "one.csv"]
    assert paths[1].read_bytes().startswith(b"\x89PNG") and paths[0].read_text(encoding="utf-8").startswith("<svg")
    assert list(csv.DictReader(io.StringIO(paths[2].read_text(encoding="utf-8")))) == [
        {"x": "1", "y": ""},
        {"x": "2", "y": "a,b"},
    ]
    with pytest.raises(UsageError):
        plotting.save(Plot("../one", "t", "c", picture, []), tmp_path)


# ------------------------------------------------------------------------------------------------------------ figures


def test_every_number_that_is_drawn_is_in_the_figures_table(tmp_path: Path) -> None:
    found = drawn(collect.read_report([by_share(tmp_path)]))
    assert list(found) == ["forest", "seeds", "levels-compute", "compute"]
    forest = found["forest"].data
    assert [(line["label"], line["delta"]) for line in forest] == [
        ("digits / transformer, share 0.2", pytest.approx(0.05)),
        ("digits / transformer, share 0.4", pytest.approx(0.15)),
    ]
    assert len(found["seeds"].data) == 6
    levels = [(line["place"], line["arm"], round(line["mean"], 4)) for line in found["levels-compute"].data]
    assert levels == [(20, "scratch", 0.75), (20, "SPT", 0.8), (40, "scratch", 0.75), (40, "SPT", 0.9)]
    low, high = found["levels-compute"].data[0]["low"], found["levels-compute"].data[0]["high"]
    assert (low, high) == pytest.approx((0.75 - 0.124207, 0.75 + 0.124207), abs=1e-5)  # t = 4.30265, s = 0.05
    assert {line["flops"] for line in found["compute"].data} == {1e10}


def test_points_of_the_forest_lie_where_its_table_says(tmp_path: Path) -> None:
    found = drawn(collect.read_report([by_share(tmp_path)]))["forest"]
    (axes,) = found.draw(LIGHT).axes
    marks = [line for line in axes.lines if line.get_marker() == "s"]
    assert [line.get_xdata()[0] for line in marks] == pytest.approx([5, 15])
    assert [line.get_markerfacecolor() for line in marks] == [LIGHT.spt, LIGHT.spt]


def test_what_is_not_decided_is_hollow(tmp_path: Path) -> None:
    folder = compared(tmp_path, [0.70, 0.80, 0.75], [0.75, 0.70, 0.90])
    (axes,) = drawn(collect.read_report([folder]))["forest"].draw(LIGHT).axes
    (mark,) = [line for line in axes.lines if line.get_marker() == "s"]
    assert mark.get_markerfacecolor() == LIGHT.paper


def test_no_pair_is_no_figure_and_one_seed_has_no_interval(tmp_path: Path) -> None:
    lost = plan(tmp_path / "a", [finish(tmp_path / "a", "scratch", 0, 0.5)])
    assert drawn(collect.read_report([lost])) == {}
    one = drawn(collect.read_report([compared(tmp_path / "b", [0.5], [0.6])]))
    assert one["forest"].data[0]["low"] is None
    for figure in one.values():
        assert plotting.svg(figure)


def test_each_metric_has_figures_of_its_own(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "a", [0.7, 0.8], [0.8, 0.9])
    cells += arms(tmp_path, 1, "b", [1.5, 1.4], [1.1, 1.2], metric="mse", higher_is_better=False, task="pendulum")
    found = drawn(collect.read_report([study(tmp_path, "compare", [{}, {"task": "pendulum"}], cells)]))
    assert {"forest-accuracy", "forest-mse", "seeds-accuracy", "seeds-mse", "compute-mse"} <= found.keys()
    (axes,) = found["forest-mse"].draw(LIGHT).axes
    assert "below 0: SPT is better" in axes.get_xlabel() and axes.lines[0].get_color() == LIGHT.spt


# ------------------------------------------------------------------------------------------------------------- curves


def test_learning_curves_follow_each_stage(tmp_path: Path) -> None:
    folder = compared(tmp_path, [0.7, 0.8], [0.8, 0.9])
    learn(tmp_path, "finetune-scratch0", [0.2, 0.4, 0.6], every=30)
    learn(tmp_path, "finetune-spt0", [0.5, 0.7], every=20)
    learn(tmp_path, "pretrain-for-spt0", [0.1], every=60)
    with (tmp_path / "finetune-spt0" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "val", "step": 40, "accuracy": NaN}\n{"kind": "val", "st')
    made = collect.read_report([folder])
    found = {curve.stage: curve for curve in made.curves}
    assert set(found) == {"scratch", "finetuning", "pretraining"} and len(made.curves) == 3
    assert found["scratch"].shares == pytest.approx((0.3, 0.6, 0.9))  # of 100 steps
    assert found["finetuning"].shares == pytest.approx((0.5, 1.0)) and found["finetuning"].values == (0.5, 0.7)
    assert found["pretraining"].shares == (1.0,)
    assert {"learning", "pretraining"} <= drawn(made).keys()
    write.write_report(made, folder)
    lines = list(csv.DictReader(io.StringIO((folder / "curves.csv").read_text(encoding="utf-8"))))
    assert [(line["stage"], line["step"], line["training_loss"]) for line in lines[:2]] == [
        ("pretraining", "60", "1.0"),
        ("finetuning", "20", "1.0"),
    ]


def test_accuracy_on_training_batches_stands_beside_that_of_validation(tmp_path: Path) -> None:
    folder = compared(tmp_path, [0.7, 0.8], [0.8, 0.9])
    learn(tmp_path, "finetune-scratch0", [0.2, 0.4], above=0.25)
    learn(tmp_path, "finetune-spt0", [0.5, 0.7])  # of an earlier version
    learn(tmp_path, "pretrain-for-spt0", [0.1])
    made = collect.read_report([folder])
    curves = {curve.stage: curve for curve in made.curves}
    assert curves["scratch"].values == (0.2, 0.4) and curves["scratch"].training == {10: 0.45, 20: 0.65}
    assert curves["finetuning"].values == (0.5, 0.7) and not curves["finetuning"].training
    plot = drawn(made)["learning"]
    assert [line["training accuracy"] for line in plot.data] == [None, None, 0.45, 0.65]
    assert "Dotted" in plot.caption
    figure = plot.draw(LIGHT)
    labels = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    assert list(labels["scratch, training"]) == [45.0, 65.0] and "finetuning, training" not in labels
    assert "Dotted" not in drawn(made)["pretraining"].caption
    assert [record["training_accuracy"] for record in curve_records([curves["scratch"]])] == [0.45, 0.65]


def test_a_run_that_diverged_is_shown_as_far_as_it_came(tmp_path: Path) -> None:
    cells = [finish(tmp_path, arm, seed, 0.7 + seed / 10) for arm in ("scratch", "spt") for seed in (0, 1)]
    folder = plan(tmp_path, [*cells, {"row": 0, "arm": "scratch", "seed": 2, "run": "finetune-lost", "parent": None}])
    learn(tmp_path, "finetune-scratch0", [0.5])
    (tmp_path / "finetune-lost").mkdir()
    learn(tmp_path, "finetune-lost", [0.1, 0.2])
    lost = next(curve for curve in collect.read_report([folder]).curves if curve.run == "finetune-lost")
    assert lost.planned == 100 and lost.shares == pytest.approx((0.1, 0.2))


# --------------------------------------------------------------------------------------------------------- provenance


def answers(made: Report) -> dict[str, str]:
    return {check.question: check.answer for check in made.provenance.checklist}


def about(made: Report, words: str) -> str:
    (answer,) = [answer for question, answer in answers(made).items() if words in question]
    return answer


CLEAN = {
    "spt": "0.1",
    "commit": "abc",
    "python": "3.11",
    "system": "Linux",
    "device": "cpu",
    "packages": {"torch": "2"},
}


def test_the_checklist_of_a_clean_comparison_has_no_no(tmp_path: Path) -> None:
    made = collect.read_report([compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86], environment=CLEAN)])
    assert set(answers(made).values()) <= {"yes", "not applicable"}, answers(made)
    (use,) = [use for use in made.provenance.data if use.split == "train"]
    assert (use.rows, use.inputs, use.pretraining, use.finetuning) == (400, "aa", 3, 6)
    (one,) = made.provenance.environments
    assert (one.runs, one.commit) == (9, "abc")
    assert made.provenance.commands[0].command == "spt compare quickstart --seeds 3"


ONE_NO = {
    "seeds": ({}, [0.7], "enough seeds", "no"),
    "edited code": ({"environment": CLEAN | {"commit": "abc+"}}, None, "version of the code", "no"),
    "an installed copy": ({"environment": CLEAN | {"commit": None}}, None, "version of the code", "partly"),
    "no better than chance": ({"chance": 0.9}, None, "constant answer", "no"),
    "validation is test": (
        {"data": SPLITS | {"val": SplitRecord(rows=360, inputs="cc", targets="dd")}},
        None,
        "validation alone",
        "no",
    ),
    "rows in two splits": ({"repeated": {"test": 4}}, None, "disjoint", "partly"),
    "still improving": ({"best_step": 100}, None, "last checkpoint", "partly"),
    "a smoke run": ({"smoke": True}, None, "full runs", "no"),
}


@pytest.mark.parametrize("case", ONE_NO)
def test_the_checklist_sees(tmp_path: Path, case: str) -> None:
    changes, scores, words, answer = ONE_NO[case]
    scratch = scores or [0.70, 0.75, 0.80]
    folder = compared(tmp_path, scratch, [score + 0.05 + score / 100 for score in scratch], **changes)
    assert about(collect.read_report([folder]), words) == answer


def test_the_checklist_sees_failures_other_data_and_other_costs(tmp_path: Path) -> None:
    cells = [finish(tmp_path, "scratch", seed, 0.7, data={"train": SPLITS["test"]}) for seed in range(3)]
    cells += [finish(tmp_path, "spt", seed, 0.8, own=SCRATCH) for seed in range(2)]
    made = collect.read_report([plan(tmp_path, cells)])
    assert about(made, "every planned run") == "partly"
    assert about(made, "same data") == "no"
    assert about(made, "same compute") == "no"


def test_a_row_that_has_not_begun_is_not_one_without_chance(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "a", [0.7, 0.71, 0.72], [0.8, 0.81, 0.82])
    later = [{"row": 1, "arm": arm, "seed": 0, "run": f"finetune-{arm}", "parent": None} for arm in ("scratch", "spt")]
    made = collect.read_report([study(tmp_path, "compare", [{"name": "a"}, {"name": "b"}], [*cells, *later])])
    assert about(made, "constant answer") == "no"
    none = compared(tmp_path / "mse", [0.7, 0.71], [0.8, 0.81], metric="mse", chance=None, higher_is_better=False)
    assert about(collect.read_report([none]), "constant answer") == "not applicable"


def test_figures_are_drawn_again_where_one_of_their_files_is_gone(tmp_path: Path) -> None:
    folder = by_share(tmp_path)
    write.write_report(collect.read_report([folder]), folder, with_figures=True)
    for path in (folder / "figures").glob("*.png"):
        path.unlink()
    write.write_report(collect.read_report([folder]), folder)
    assert list((folder / "figures").glob("*.png"))


def test_levels_of_two_folders_of_one_name_are_two_lines(tmp_path: Path) -> None:
    def made(place: str, levels: list[float], score: float) -> Path:
        root = tmp_path / place
        cells = [
            cell
            for i, level in enumerate(levels)
            for cell in arms(root, i, f"{level}", [score, score], [score + level / 10] * 2)
        ]
        return study(root, "data", [{"factors": {"fraction": level}} for level in levels], cells)

    report = collect.read_report([made("p", [0.1, 0.5], 0.3), made("q", [0.5, 1.0], 0.8)])
    found = {family.label: [line["place"] for line in family.lines] for family in figures._families(report.rows)}
    assert found == {"digits / transformer": [10, 10, 50, 50], "digits / transformer (2)": [50, 50, 100, 100]}


# --------------------------------------------------------------------------------------------------------------- page


class Outline(HTMLParser):
    """Elements in order, and what is asked of other places."""

    VOID = ("meta", "link", "br", "use", "path", "rect", "line", "circle", "clippath")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.unbalanced: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [str(found["id"])] if "id" in found else []
        self.addresses += [str(found[name]) for name in ("src", "href", "xlink:href") if name in found]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "link", "br"):
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)


def test_the_page_is_whole_and_asks_for_nothing(tmp_path: Path) -> None:
    folder = by_share(tmp_path)
    learn(tmp_path, "finetune-aspt0", [0.5, 0.7])
    text = whole(collect.read_report([folder]))
    outline = Outline()
    outline.feed(text)
    assert not outline.open and not outline.unbalanced
    assert len(outline.ids) == len(set(outline.ids))
    assert all(address.startswith(("#", "data:")) for address in outline.addresses)
    assert {address[1:] for address in outline.addresses if address.startswith("#")} <= set(outline.ids)
    assert not re.search(r"https?://(?!www\.w3\.org/)", text) and "@import" not in text
    verdict, table = text.index("SPT beats scratch by 15.00 points"), text.index("<table>")
    assert verdict < table


def test_a_single_run_has_a_page_too(tmp_path: Path) -> None:
    finish(tmp_path, "scratch", 0, 0.7)
    text = whole(collect.read_report([tmp_path / "finetune-scratch0"]))
    assert "<h3" in text and "finetune-scratch0" in text and "<svg" not in text


def test_words_of_users_stay_words(tmp_path: Path) -> None:
    evil = '<img src=x onerror="alert(1)">'
    cells = arms(tmp_path, 0, "a", [0.7, 0.8], [0.8, 0.9], task=evil, recipe=evil)
    folder = study(tmp_path, "compare", [{"task": evil, "name": evil}], cells, command=f"spt compare {evil}")
    text = whole(collect.read_report([folder]))
    assert "<img" not in text and "&lt;img src=x" in text


def test_labels_that_repeat_are_filled_in(tmp_path: Path) -> None:
    sheet = ReportTable("Costs", ("task", "arm", "n"), [("a", "scratch", "1"), ("", "SPT", "2"), ("b", "", "3")], 2)
    lines = html.lines(sheet)
    assert [(line[0].text, line[0].again) for line in lines] == [("a", False), ("a", True), ("b", False)]
    assert lines[2][1].text == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("+1.25", 1.25), ("-3", -3), ("−3", -3), ("< 0.001", 0.001), ("×1.02", 1.02), ("1,200", 1200), ("1.5M", 1.5e6),
        ("2.00e11", 2e11), ("45.0 s", 45), ("2.0 min", 120), ("1.5 h", 5400), ("512 MiB", 2**29), ("3 of 5", 3),
        ("-0.26 to +2.42", -0.26), ("+0.4 %", 0.4), ("-", None), ("", None), ("diverged", None),
    ],
)  # fmt: skip
def test_a_column_is_sorted_by_its_numbers(text: str, value: float | None) -> None:
    assert html.number(text) == (None if value is None else pytest.approx(value))


@given(st.floats(-1e12, 1e12, allow_nan=False))
def test_plain_numbers_are_read_as_they_are(value: float) -> None:
    assert html.number(f"{value:.6e}") == pytest.approx(value, rel=1e-5)
    assert html.number(f"{value:+,.2f}") == pytest.approx(value, abs=0.006)


def test_a_report_as_files(tmp_path: Path) -> None:
    folder = by_share(tmp_path)
    paths = write.write_report(collect.read_report([folder]), tmp_path / "out", with_figures=True)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in paths}
    assert "![What self-pretraining gains](figures/forest.svg)" in (tmp_path / "out" / "report.md").read_text(
        encoding="utf-8"
    )
    assert {"report.html", "report.tex", "report.md", "figures/forest.svg", "figures/forest.png"} <= names
    before = [path.read_bytes() for path in paths]
    assert [
        path.read_bytes() for path in write.write_report(collect.read_report([folder]), tmp_path / "out", True)
    ] == before
    value = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert value["provenance"]["checklist"] and value["precedents"] == []


# ------------------------------------------------------------------------------- what ugly inputs did, and do no longer


def test_names_may_hold_anything(tmp_path: Path) -> None:
    """$ is no formula, a leading underscore no reason to leave an entry out, a control character no broken SVG."""
    rows = [{"task": "a$x_{$b", "model": "_own.net"}, {"task": "c\x07d #010100 url(#x)", "model": "名前"}]
    cells = [*arms(tmp_path, 0, "a", [0.7, 0.8], [0.8, 0.9]), *arms(tmp_path, 1, "b", [0.7, 0.8], [0.8, 0.9])]
    found = drawn(collect.read_report([study(tmp_path, "compare", rows, cells)]))
    forest, compute = plotting.svg(found["forest"]), plotting.svg(found["compute"])
    ElementTree.fromstring(forest)
    assert "a$x_{$b / _own.net" in forest and "#010100 url(#x)" in forest
    assert "_own.net, SPT" in compute
    assert plotting.png(found["seeds"])


def test_long_names_stay_inside(tmp_path: Path) -> None:
    long = "/a/very/long/path/" + "x" * 200 + ".py"
    cells = arms(tmp_path, 0, "a", [0.7, 0.8], [0.8, 0.9])
    found = drawn(collect.read_report([study(tmp_path, "compare", [{"task": long, "model": long}], cells)]))
    assert "…" in plotting.svg(found["forest"]) and max(map(len, panels.wrapped(long, 20).splitlines())) <= 20


def test_series_that_are_alike_once_shortened_have_an_entry_each(tmp_path: Path) -> None:
    names = [f"models/{'x' * 30}{i}{'y' * 30}.py" for i in range(3)]
    assert list(panels.legend_entries([*names, names[0]]).values()) == [
        f"models/xxxxxx … yyyyyyyyyy.py{number}" for number in ("", " (2)", " (3)")
    ]
    cells = [cell for i in range(3) for cell in arms(tmp_path, i, str(i), [0.7, 0.8], [0.8, 0.9])]
    found = drawn(collect.read_report([study(tmp_path, "compare", [{"model": name} for name in names], cells)]))
    figure = found["compute"].draw(plotting.LIGHT)
    assert len(figure.legends[0].get_texts()) == 6  # three models, two arms


def test_two_folders_of_one_study_have_a_line_each(tmp_path: Path) -> None:
    made = collect.read_report([by_share(tmp_path / "first"), by_share(tmp_path / "second")])
    (levels,) = [plot for plot in figures.all_figures(made) if plot.name == "levels-compute"]
    labels = dict.fromkeys(line["label"] for line in levels.data)
    assert len(labels) == 2 and list(labels)[1] == f"{next(iter(labels))} (2)"
    assert [sum(line["label"] == label for line in levels.data) for label in labels] == [4, 4]


def test_a_users_matplotlib_settings_do_not_matter(tmp_path: Path) -> None:
    (one,) = [d for d in figures.all_figures(collect.read_report([by_share(tmp_path)])) if d.name == "forest"]
    before = plotting.svg(one), plotting.png(one)
    with rc_context({"font.size": 30, "savefig.bbox": "tight", "text.usetex": True, "lines.linewidth": 9}):
        assert (plotting.svg(one), plotting.png(one)) == before


@pytest.mark.parametrize(
    ("kind", "factors", "sizes", "ticks"),
    [
        ("size", [{"size": "S"}, {"size": "M"}], [210_000, 830_000], ["210k", "830k"]),
        ("data", [{"fraction": 0.2}, {"fraction": 0.8}], [100, 100], ["20", "80"]),
        ("size", [{"size": "S"}, {"size": "M"}], [100, 100], ["S", "M"]),  # equal sizes: side by side
    ],
)
def test_levels_within_a_decade_have_their_names(
    tmp_path: Path, kind: str, factors: list[Any], sizes: list[int], ticks: list[str]
) -> None:
    cells = []
    for row, size in enumerate(sizes):
        cells += arms(tmp_path, row, f"r{row}", [0.7, 0.8], [0.8, 0.9], parameters={"total": size})
    made = collect.read_report([study(tmp_path, kind, [{"factors": one} for one in factors], cells)])
    (axes,) = drawn(made)[f"levels-{kind}"].draw(LIGHT).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ticks


def fractions(root: Path, metric: str = "accuracy", **changes: Any) -> Path:
    """Text and Image over two fractions: 0.4 to 0.5 and 0.8 to 0.84; 0.5 to 0.45 and 0.6 to 0.6."""
    rows, cells = [], []
    scores = {"text": [(0.4, 0.5), (0.8, 0.84)], "image": [(0.5, 0.45), (0.6, 0.6)]}
    for task, levels in scores.items():
        for fraction, (scratch, spt) in zip((0.01, 1.0), levels, strict=True):
            runs = [scratch - 0.02, scratch + 0.02], [spt - 0.01, spt + 0.01]
            cells += arms(root, len(rows), f"{task}{fraction}", *runs, task=task, metric=metric, **changes)
            rows.append({"name": f"lra/{task}-s4", "task": task, "factors": {"fraction": fraction}})
    return study(root, "data", rows, cells)


def test_the_gain_relative_to_scratch_is_drawn_over_fractions_of_the_data(tmp_path: Path) -> None:
    """Figure 3 of the SPT paper, right."""
    found = drawn(collect.read_report([fractions(tmp_path)]))
    assert {"levels-data", "levels-gain"} <= set(found)
    gains = [(line["label"], line["place"], line["gain"]) for line in found["levels-gain"].data]
    assert gains == [
        ("text / transformer", 1, pytest.approx(25)),
        ("text / transformer", 100, pytest.approx(5)),
        ("image / transformer", 1, pytest.approx(-10)),
        ("image / transformer", 100, pytest.approx(0, abs=1e-9)),
    ]
    (axes,) = found["levels-gain"].draw(LIGHT).axes
    lines = [line for line in axes.lines if line.get_label().endswith("transformer")]
    assert [list(line.get_xdata()) for line in lines] == [[1, 100], [1, 100]]
    assert list(lines[0].get_ydata()) == pytest.approx([25, 5]) and axes.get_xscale() == "log"


def test_the_gain_is_positive_where_less_is_better_and_spt_has_less(tmp_path: Path) -> None:
    found = drawn(collect.read_report([fractions(tmp_path, metric="mse", higher_is_better=False, chance=None)]))
    assert [round(line["gain"], 6) for line in found["levels-gain"].data] == [-25, -5, 10, 0]


def test_no_gain_is_drawn_from_a_score_of_zero_or_for_other_studies(tmp_path: Path) -> None:
    cells = arms(tmp_path, 0, "a", [0.0, 0.0], [0.1, 0.1]) + arms(tmp_path, 1, "b", [0.5, 0.5], [0.6, 0.6])
    rows = [{"factors": {"fraction": fraction}} for fraction in (0.01, 0.1)]
    found = drawn(collect.read_report([study(tmp_path, "data", rows, cells)]))
    assert [line["place"] for line in found["levels-gain"].data] == [10]
    assert "levels-gain" not in drawn(collect.read_report([by_share(tmp_path / "other")]))


def test_two_studies_of_one_recipe_have_panels_of_their_own(tmp_path: Path) -> None:
    folders = [by_share(tmp_path / name) for name in ("a", "b")]
    folders[1].rename(tmp_path / "b" / "compute-2")
    found = drawn(collect.read_report([folders[0], tmp_path / "b" / "compute-2"]))["levels-compute"]
    assert {line["label"] for line in found.data} == {
        "digits / transformer, compute-1",
        "digits / transformer, compute-2",
    }
    assert len(found.draw(LIGHT).axes) == 2


def test_equal_costs_look_equal(tmp_path: Path) -> None:
    (axes,) = drawn(collect.read_report([by_share(tmp_path)]))["compute"].draw(LIGHT).axes
    low, high = axes.get_xlim()
    assert low < 0.95e10 and high > 1.05e10


def test_a_link_to_a_study_is_that_study(tmp_path: Path) -> None:
    folder = compared(tmp_path / "runs", [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    (tmp_path / "link").symlink_to(folder)
    assert collect.read_report([tmp_path / "link"]).rows == collect.read_report([folder]).rows


def test_figures_of_an_earlier_report_do_not_stay(tmp_path: Path) -> None:
    folder = by_share(tmp_path)
    write.write_report(collect.read_report([folder]), folder, with_figures=True)
    assert (folder / "figures" / "levels-compute.svg").exists()
    (folder / "figures" / "mine.svg").touch()
    value = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    (folder / "study.json").write_text(json.dumps(value | {"cells": [c for c in value["cells"] if c["row"] == 0]}))
    write.write_report(collect.read_report([folder]), folder)
    assert not (folder / "figures" / "levels-compute.svg").exists() and (folder / "figures" / "mine.svg").exists()
    assert len((folder / "figures" / "forest.csv").read_text(encoding="utf-8").splitlines()) == 2


def test_files_of_the_users_own_stay(tmp_path: Path) -> None:
    """They may have the names that a report's files have, or begin as these do."""
    folder, paper = by_share(tmp_path / "runs"), tmp_path / "paper"
    mine = [paper / name for name in ("groups.csv", "figures/learning-rates.pdf", "figures/seeds-box.svg")]
    (paper / "figures").mkdir(parents=True)
    for path in mine:
        path.write_text("mine", encoding="utf-8")
    write.write_report(collect.read_report([folder]), paper, with_figures=True)
    assert all(path.read_text(encoding="utf-8") == "mine" for path in mine)
    write.write_report(collect.read_report([folder]), paper, with_figures=True)
    assert all(path.is_file() for path in mine[1:]), "nor are figures taken for those of the report before"


def test_the_checklist_sees_a_pretraining_on_other_data(tmp_path: Path) -> None:
    folder = compared(tmp_path, [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])
    for path in tmp_path.glob("pretrain-*/result.json"):
        path.write_text(path.read_text(encoding="utf-8").replace('"aa"', '"other"'))
    made = collect.read_report([folder])
    assert about(made, "same data") == "no"
    assert {(use.inputs, use.pretraining, use.finetuning) for use in made.provenance.data if use.split == "train"} == {
        ("aa", 0, 6),
        ("other", 3, 0),
    }


def test_labels_that_differ_are_two_lines(tmp_path: Path) -> None:
    cells = [finish(tmp_path, "scratch", seed, 0.7) for seed in range(3)]
    other = {name: held.model_copy(update={"targets": "zz"}) for name, held in SPLITS.items()}
    cells += [finish(tmp_path, "spt", seed, 0.8, data=other) for seed in range(3)]
    made = collect.read_report([plan(tmp_path, cells)])
    assert {use.targets for use in made.provenance.data if use.split == "train"} == {"bb", "zz"}


def test_the_checklist_of_nothing_says_yes_to_nothing(tmp_path: Path) -> None:
    lost = {"row": 0, "arm": "spt", "seed": 0, "run": "finetune-lost", "parent": None}
    assert "yes" not in answers(collect.read_report([plan(tmp_path, [lost])])).values()


def test_the_checklist_sees_unequal_searches() -> None:
    arm = {"settings": 2, "trials": 2, "done": 2, "lost": 0, "space": {}, "spent": {}, "unknown": 0, "chosen": 0,
           "setting": {}, "value": 1.0, "edges": (), "expected": ()}  # fmt: skip
    search = SearchResult.model_validate(
        {"study": "s", "label": "l", "task": "t", "model": "m", "recipe": "r", "metric": "accuracy",
         "higher_is_better": True, "protocol": "trials", "equal": False, "space": {}, "scratch": arm, "spt": arm,
         "trials": (), "failures": (), "warnings": (), "notes": ()}
    )  # fmt: skip
    facts = provenance.ChecklistInput([], [], [], 0, provenance.Provenance(), [search])
    assert provenance._tuning(facts)[0] == "no"
    alike = search.model_copy(update={"equal": True})
    assert provenance._tuning(facts._replace(searches=[alike]))[0] == "yes"


@pytest.mark.parametrize("palette", [plotting.LIGHT, plotting.DARK])
def test_series_look_different_whatever_their_colour(palette):
    looks = [tuple(palette.line(number).values()) for number in range(64)]
    assert len(set(looks)) == 64
    assert len({look[1:] for look in looks[:8]}) == 8, "nothing is conveyed by colour alone"
