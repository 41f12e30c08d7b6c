"""Models of equal size: the width or depth at which a model costs as much as another."""

import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MODEL

from spt.api import plan_study
from spt.config.plugins import find_plugin
from spt.errors import RecipeError, UsageError
from spt.execution.estimate import MeasuredCosts
from spt.execution.run_study import make_plan
from spt.report import collect
from spt.runs.plan import read_plan
from spt.runtime.settings import Settings
from spt.studies.equal_size import TOLERANCE, nearest_scales
from spt.studies.schema import StudySource, from_mapping, part_of

QUIET = Settings(cpu=True, quiet=True)
QUICK = ["quickstart", "quickstart-dlr", "quickstart-s4d", "quickstart-s5"]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 10**7), st.sampled_from([1.0, 2.0]), st.integers(0, 3))
def test_the_nearest_scale_is_found(step: int, start: int, target: int, power: float, jump: int) -> None:
    """Of every multiple that is accepted none is nearer, whatever the step, and also where counts jump a little."""

    def cost(value: int) -> float | None:
        return None if value % step else 3 * value**power + 50 + (value // step % 2) * jump

    found = nearest_scales(cost, start * step, float(target), accepts=lambda value: value % step == 0)
    every = [abs(c - target) for value in range(step, 1 << 14, step) if (c := cost(value)) is not None]
    reach = 3 * (1 << 14) ** power
    assert found.best.value % step == 0
    if target < reach / 2:
        assert abs(found.best.cost - target) == min(every)
        assert found.below is None or found.below.cost < target
        assert found.above is None or found.above.cost >= target


@settings(deadline=None, max_examples=100)
@given(
    st.integers(4, 512),
    st.floats(1 / 200, 200),
    st.sampled_from([1.0, 1.6, 2.0]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([0.0, TOLERANCE]),
)
def test_few_costs_are_asked_for(start: int, ratio: float, power: float, step: int, enough: float) -> None:
    """Each once, and none of a model that is much too large; where near is enough, the search ends there."""
    asked: dict[int, float] = {}

    def cost(value: int) -> float:
        assert value not in asked and value % step == 0
        asked[value] = 50.0 + float(value) ** power
        return asked[value]

    target = ratio * (50.0 + float(start * step) ** power)
    found = nearest_scales(cost, start * step, target, accepts=lambda value: value % step == 0, enough=enough)
    assert len(asked) <= (20 if enough else 26)
    assert max(asked.values()) <= 4 * max(target, asked[start * step])
    if enough:
        near = [value for value, paid in asked.items() if abs(paid / target - 1) <= enough]
        assert near == [] or near == [found.best.value] == [*asked][-1:]


def test_a_leap_of_costs_is_found_without_many() -> None:
    """Where a model gets another number of threads, say, no power law leads to it."""
    asked: list[int] = []

    def cost(value: int) -> float:
        asked.append(value)
        return value * (1.0 if value < 3000 else 1e3)

    found = nearest_scales(cost, 2000, 1e5)
    assert found.below and found.above and (found.below.value, found.above.value) == (2999, 3000)
    assert len(asked) < 40


def test_a_model_that_is_too_small_to_be_built_is_left() -> None:
    found = nearest_scales(lambda value: float(value) if value >= 16 else None, 64, 3.0)
    assert found.best.value == 16 and found.below is None


def planned(tmp_path: Path, recipes: list[str], **options: Any) -> Any:
    source = from_mapping({"kind": "models", "recipes": recipes, "seeds": 1, **options}, "test")
    return plan_study(source, out=tmp_path, settings=QUIET)


def parameters(study: Any) -> list[int]:
    return [study.costs.estimate(cell.job).parameters for cell in study.grid.cells if cell.arm == "scratch"]


def test_parameters_are_equal_within_five_per_cent(tmp_path: Path) -> None:
    first, *others = parameters(planned(tmp_path, QUICK))
    assert all(abs(other / first - 1) <= TOLERANCE for other in others)


@pytest.mark.parametrize("model", ["transformer", "dlr", "dss", "s4", "lru", "mega", "sgconv", "spade"])
def test_every_model_can_be_scaled(tmp_path: Path, model: str) -> None:
    """Widths that heads and copies divide; inner widths that are given keep their ratio."""
    text = (files("spt.recipes") / "quickstart-dlr.yaml").read_text(encoding="utf-8")
    options = {"transformer": ", d_ff: 48, n_heads: 2", "mega": ", d_ff: 64", "s4": ", n_ssm: 2"}.get(model, "")
    (tmp_path / "other.yaml").write_text(
        text.replace(
            "{name: dlr, d_model: 32, n_layers: 2, d_state: 32, ssm_lr: null}",
            f"{{name: {model}, d_model: 32, n_layers: 2{options}}}",
        )
    )
    study = planned(tmp_path, ["quickstart", str(tmp_path / "other.yaml")])
    first, other = parameters(study)
    assert abs(other / first - 1) <= TOLERANCE
    changes = study.grid.rows[1].changes
    if "d_ff" in changes:
        assert changes["d_ff"] / changes["d_model"] == pytest.approx({"transformer": 1.5, "mega": 2}[model], rel=0.05)


VARIANTS = {
    "Transformer": {},
    "DLR": {"model": {"name": "dlr", "d_model": 32, "n_layers": 2, "d_state": 32, "ssm_lr": None}},
    "one layer": {"model.n_layers": 1, "model.d_model": 48},
}


def variants(**options: Any) -> StudySource:
    raw = {"kind": "variants", "recipes": ["quickstart"], "variants": VARIANTS, "seeds": 1, **options}
    return from_mapping(raw, "test")


def test_variants_are_made_equal(tmp_path: Path) -> None:
    study = plan_study(variants(match="parameters"), out=tmp_path, settings=QUIET)
    first, *others = parameters(study)
    assert all(abs(other / first - 1) <= TOLERANCE for other in others)
    rows = study.grid.rows
    assert [row.factors["variant"] for row in rows] == list(VARIANTS) and rows[1].changes == {"d_model": 43}
    assert study.grid.study.scaled == {
        "quickstart": {level: row.changes for level, row in zip(VARIANTS, rows, strict=True)}
    }
    assert plan_study(StudySource("test", study.grid.study), out=tmp_path, settings=QUIET).grid.rows == rows


def test_some_of_the_equal_variants_are_the_whole_studys_runs(tmp_path: Path) -> None:
    whole = variants(match="parameters")
    with pytest.raises(UsageError, match="made equal when the whole study runs; run that first"):
        part_of(whole, levels=["DLR"])
    kept = StudySource("test", plan_study(whole, out=tmp_path, settings=QUIET).grid.study)
    _, dlr, _ = plan_study(kept, out=tmp_path, settings=QUIET).grid.rows
    (part,) = plan_study(part_of(kept, levels=["DLR"]), out=tmp_path, settings=QUIET).grid.rows
    assert part.resolved.recipe == dlr.resolved.recipe and part.resolved.recipe.model.options["d_model"] == 43


def test_some_of_the_equal_models_are_the_whole_studys_runs(tmp_path: Path) -> None:
    """With the first one its sizes are found again; without it they have to be known."""
    names = ["quickstart", "quickstart-dlr", "quickstart-s4d"]
    raw = {"kind": "models", "recipes": names, "match": "parameters", "seeds": 1}
    whole = from_mapping(raw, "test")
    planned = plan_study(whole, out=tmp_path, settings=QUIET).grid
    jobs = {cell.job.name for cell in planned.cells}
    assert planned.rows[1].changes and planned.rows[2].changes
    with pytest.raises(UsageError, match="made equal to quickstart when it runs; name that too, or run the whole"):
        part_of(whole, names[1:])
    for source, chosen in ((whole, names[:2]), (StudySource("test", planned.study), names[1:])):
        part = plan_study(part_of(source, chosen), out=tmp_path, settings=QUIET).grid
        assert len(part.cells) == 4 and {cell.job.name for cell in part.cells} < jobs


def test_variants_of_other_tasks_are_not_made_equal(tmp_path: Path) -> None:
    other = {"Transformer": {}, "fewer": {"task.subset_fraction": 0.1}}
    with pytest.raises(UsageError, match="variant fewer and quickstart, variant Transformer differ in"):
        plan_study(variants(variants=other, match="parameters"), out=tmp_path, settings=QUIET)


@pytest.mark.parametrize(
    ("scaled", "match", "complaint"),
    [
        ({"Transformer": {}, "DLR": {}}, "parameters", "scaled must hold every variant; one layer is missing"),
        ({"Transformer": {"d_model": 8}, "DLR": {}, "one layer": {}}, "parameters", "Transformer, but the first varia"),
        ({"Transformer": {}, "DLR": {}, "one layer": {}}, "none", "match none changes no model; take scaled out"),
    ],
)
def test_wrong_scales_of_variants_are_refused(scaled: dict[str, Any], match: str, complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        variants(scaled=scaled, match=match)


def test_operations_and_depth(tmp_path: Path) -> None:
    study = planned(tmp_path, QUICK[:2], match="flops")
    estimates = [study.costs.estimate(cell.job) for cell in study.grid.cells if cell.arm == "scratch"]
    first, second = (estimate.flops / estimate.examples for estimate in estimates)
    assert abs(second / first - 1) <= TOLERANCE
    deeper = planned(tmp_path, QUICK[:2], scale="depth")
    assert deeper.grid.rows[1].changes == {"n_layers": 3}


def test_what_cannot_be_made_equal_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        planned(tmp_path, QUICK[:2], scale="depth", set={"model.n_layers": 1})
    message = str(raised.value)
    assert "no depth makes its parameters equal to those of quickstart" in message
    assert re.search(r"\(11,\d{3}\) within 5 %; the nearest are .* at n_layers=1 and .* at n_layers=2", message)
    assert "name this recipe first" in message and "--scale width" in message


def variant(folder: Path, recipe: str, old: str, new: str) -> str:
    """A packaged recipe with another text in some place."""
    text = (files("spt.recipes") / f"{recipe}.yaml").read_text(encoding="utf-8")
    assert old in text
    (folder / "other.yaml").write_text(text.replace(old, new))
    return str(folder / "other.yaml")


def test_a_model_that_is_equal_already_stays_as_it_is(tmp_path: Path) -> None:
    """So its runs are those of other studies, though one width less would be nearer."""
    other = variant(tmp_path, "quickstart-dlr", "d_state: 32", "d_state: 34")
    study = planned(tmp_path, ["quickstart-dlr", other], set={"model.d_model": 128})
    first, second = parameters(study)
    assert study.grid.rows[1].changes == {} and 1.015 < second / first < 1.05


def test_even_widths_stay_even() -> None:
    """Of an odd head half could not be rotated."""
    config = find_plugin("models", "transformer").configure({"d_model": 32, "n_heads": 4, "d_head": 8, "d_ff": 49})
    assert config.at_scale("d_model", 36) == {"d_model": 36, "d_head": 8, "d_ff": 55}
    assert config.at_scale("d_model", 2)["d_head"] == 2


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("transformer, n_heads: 4, d_head: 16, d_ff: 64", {"d_ff": 2, "d_head": 0.5}),
        ("mega, d_attention: 16, d_hidden: 48", {"d_attention": 0.5, "d_hidden": 1.5}),
        ("s5, d_state: 32, feed_forward: mlp, d_ff: 96", {"d_ff": 3}),
        ("spade, n_ssm: 2, window: 16", {}),
        ("sgconv, kernel_dim: 8", {}),
    ],
)
def test_inner_widths_keep_their_ratio_and_other_sizes_stay(tmp_path: Path, model: str, kept: dict[str, float]) -> None:
    old = "{name: dlr, d_model: 32, n_layers: 2, d_state: 32, ssm_lr: null}"
    other = variant(tmp_path, "quickstart-dlr", old, f"{{name: {model}, d_model: 32, n_layers: 2}}")
    (_, row) = planned(tmp_path, ["quickstart", other]).grid.rows
    assert row.changes.keys() == {"d_model", *kept}
    for name, ratio in kept.items():
        assert row.changes[name] == pytest.approx(ratio * row.changes["d_model"], abs=1) and row.changes[name] % 2 == 0


def test_of_your_own_model_the_width_is_scaled(tmp_path: Path) -> None:
    """What it adds stays, unless it says that it is a width."""
    text = MODEL.replace("FORWARD", "x").replace("EXTRA", "").replace("    pass\n", "    cells: int = 8\n", 1)
    (tmp_path / "mine.py").write_text(text)
    old = "{name: dlr, d_model: 32, n_layers: 2, d_state: 32, ssm_lr: null}"
    mine = variant(tmp_path, "quickstart-dlr", old, "{name: ./mine.py, d_model: 32, n_layers: 2}")
    assert planned(tmp_path, ["quickstart", mine]).grid.rows[1].changes.keys() == {"d_model"}
    (tmp_path / "mine.py").write_text(text.replace("    cells", '    inner_widths = ("cells",)\n    cells', 1))
    changes = planned(tmp_path, ["quickstart", mine]).grid.rows[1].changes
    assert changes["cells"] == pytest.approx(changes["d_model"] / 4, abs=1)


def test_nothing_is_changed_with_none(tmp_path: Path) -> None:
    assert [dict(row.changes) for row in planned(tmp_path, QUICK, match="none").grid.rows] == [{}] * 4


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("subset_fraction: 0.3", "subset_fraction: 0.5", r"differ in task\.subset_fraction \(0\.5, 0\.3\), but models"),
        (
            "finetune:\n",
            "finetune:\n  objective: {metric: f1_macro}\n",
            r"finetune\.objective\.metric \(f1_macro, auto\)",
        ),
        (
            "batch_size: 32",
            "batch_size: 32\n    metric_average: per_batch",
            r"set finetune\.train\.metric_average=… and s",
        ),
    ],
)
def test_different_questions_are_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    """Other rows, or another score of them."""
    with pytest.raises(UsageError, match=complaint):
        planned(tmp_path, ["quickstart", variant(tmp_path, "quickstart-dlr", old, new)])


def test_different_tasks_are_refused(tmp_path: Path) -> None:
    task = "task: {name: skills, skill: reverse, length: 16}"
    other = variant(tmp_path, "quickstart-dlr", "task: {name: digits, subset_fraction: 0.3}", task)
    with pytest.raises(
        UsageError, match=r"other\.yaml is on the task skills, quickstart on digits.* name recipes of one"
    ):
        planned(tmp_path, ["quickstart", other])


def test_measured_widths_are_kept_in_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file holds what was found, so that another machine, with other times, makes the same runs."""

    def measure(seconds: Callable[[str, int], float]) -> None:
        def measured(self: MeasuredCosts, job: Any) -> float:
            return seconds(job.resolved.model_name, job.resolved.recipe.model.options["d_model"])

        monkeypatch.setattr(MeasuredCosts, "seconds_per_step", measured)

    measure(lambda model, width: 80.0 if model == "transformer" else float(width))
    here = planned(tmp_path, QUICK[:2], match="time")
    assert here.grid.rows[1].changes == {"d_model": 80}
    kept = from_mapping(json.loads(here.grid.study.model_dump_json()), "test")
    measure(lambda model, width: 1.0 / width)
    there = plan_study(kept, out=tmp_path, settings=QUIET)
    assert there.folder == here.folder


def test_times_are_those_of_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since batches may differ in size."""

    def measured(self: MeasuredCosts, job: Any) -> float:
        return job.train.batch_size * float(job.resolved.recipe.model.options["d_model"])

    monkeypatch.setattr(MeasuredCosts, "seconds_per_step", measured)
    other = variant(tmp_path, "quickstart-dlr", "batch_size: 32", "batch_size: 64")
    assert planned(tmp_path, ["quickstart", other], match="time").grid.rows[1].changes == {}


def test_a_second_study_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the folder of the first."""
    measured: list[int] = []

    def measure(self: MeasuredCosts, job: Any) -> float:
        measured.append(job.resolved.recipe.model.options["d_model"])
        seconds = 80.0 if job.resolved.model_name == "transformer" else float(measured[-1])
        return seconds * 1.001 ** len(measured)  # slower and slower: a busy machine

    monkeypatch.setattr(MeasuredCosts, "_measure", measure)
    here = planned(tmp_path, QUICK[:2], match="time")
    once = list(measured)
    assert planned(tmp_path, QUICK[:2], match="time").folder == here.folder
    assert measured == once and len(once) < 8 and 76 <= here.grid.rows[1].changes["d_model"] <= 84


def test_what_was_found_is_held_to_the_recipes(tmp_path: Path) -> None:
    """Which may have changed since."""

    def kept(width: int) -> Any:
        scaled = {"quickstart": {}, "quickstart-dlr": {"d_model": width}}
        return planned(tmp_path, QUICK[:2], scaled=scaled).grid.rows[1].changes

    assert kept(42) == {"d_model": 42}  # not the nearest, but near
    with pytest.raises(UsageError, match=r"under scaled \(d_model 60\) it has .* parameters, quickstart .*; take sc"):
        kept(60)


def test_what_was_found_changes_sizes_alone(tmp_path: Path) -> None:
    scaled = {"quickstart": {}, "quickstart-dlr": {"d_model": 42, "max_length": 64}}
    with pytest.raises(
        UsageError, match=r"has max_length under scaled, .* scale width changes only d_model; take scaled"
    ):
        planned(tmp_path, QUICK[:2], scaled=scaled)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"recipes": ["a"]}, "one recipe is no comparison of models; name at least two"),
        ({"scaled": {"a": {}}}, "b is missing from it or from recipes"),
        ({"scaled": {"a": {"d_model": 8}, "b": {}}}, "the first recipe is what the others are made equal to"),
        (
            {"scaled": {"a": {}, "b": {"d_model": 8}}, "match": "none"},
            "match none changes no model, but scaled .* of b",
        ),
    ],
)
def test_wrong_studies_are_refused(raw: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        from_mapping({"kind": "models", "recipes": ["a", "b"], **raw}, "test")


@pytest.mark.slow
def test_plan_and_report_hold_what_was_changed(tmp_path: Path) -> None:
    grid = planned(tmp_path, QUICK[:2]).grid
    assert [row.changes for row in make_plan(grid).rows] == [{}, {"d_model": 43}]
    source = from_mapping({"kind": "models", "recipes": QUICK[:2], "seeds": 1}, "test")
    finished = plan_study(source, smoke=True, out=tmp_path, settings=QUIET).run()
    (made,) = collect.read_report([finished.path]).models
    assert made.kind == "models" and [model.name for model in made.models] == ["transformer", "dlr"]
    assert "models of a smoke run are small" in str(read_plan(finished.path).notes)
