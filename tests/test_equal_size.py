"""Models of equal size: the width or depth at which a model costs as much as another."""

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spt.api import plan_study
from spt.errors import RecipeError, UsageError
from spt.execution.estimate import MeasuredCosts
from spt.execution.run_study import make_plan
from spt.report import collect
from spt.runs.plan import read_plan
from spt.runtime.settings import Settings
from spt.studies.equal_size import TOLERANCE, nearest_scales
from spt.studies.schema import from_mapping

QUIET = Settings(cpu=True, quiet=True)
QUICK = ["quickstart", "quickstart-dlr", "quickstart-s4d", "quickstart-s5"]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 10**7), st.sampled_from([1.0, 2.0]), st.integers(0, 3))
def test_the_nearest_scale_is_found(step: int, start: int, target: int, power: float, jump: int) -> None:
    """Of every multiple that is accepted none is nearer, whatever the step, and also where counts jump a little."""

    def cost(value: int) -> float | None:
        return None if value % step else 3 * value**power + 50 + (value // step % 2) * jump

    found = nearest_scales(cost, start * step, float(target))
    every = [abs(c - target) for value in range(step, 1 << 14, step) if (c := cost(value)) is not None]
    reach = 3 * (1 << 14) ** power
    assert found.best.value % step == 0
    if target < reach / 2:
        assert abs(found.best.cost - target) == min(every)
        assert found.below is None or found.below.cost < target
        assert found.above is None or found.above.cost >= target


def test_few_costs_are_asked_for() -> None:
    asked: list[int] = []

    def cost(value: int) -> float | None:
        asked.append(value)
        return float(value**2) if value % 8 == 0 else None

    assert nearest_scales(cost, 32, 4000.0**2).best.value == 4000
    assert len(asked) == len(set(asked)) < 8 + 2 * 12 + 6


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
    assert "at n_layers=1 and" in message and "at n_layers=2" in message and "--scale width" in message


def test_nothing_is_changed_with_none(tmp_path: Path) -> None:
    assert [dict(row.changes) for row in planned(tmp_path, QUICK, match="none").grid.rows] == [{}] * 4


def test_different_data_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    text = (files("spt.recipes") / "quickstart-dlr.yaml").read_text(encoding="utf-8")
    other.write_text(text.replace("subset_fraction: 0.3", "subset_fraction: 0.5"))
    with pytest.raises(UsageError, match=r"differ in task\.subset_fraction, but models are compared on the same data"):
        planned(tmp_path, ["quickstart", str(other)])


def test_one_recipe_is_refused() -> None:
    with pytest.raises(RecipeError, match="one recipe is no comparison of models; name at least two"):
        from_mapping({"kind": "models", "recipes": ["quickstart"]}, "test")


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


def test_plan_and_report_hold_what_was_changed(tmp_path: Path) -> None:
    grid = planned(tmp_path, QUICK[:2]).grid
    assert [row.changes for row in make_plan(grid).rows] == [{}, {"d_model": 43}]
    source = from_mapping({"kind": "models", "recipes": QUICK[:2], "seeds": 1}, "test")
    finished = plan_study(source, smoke=True, out=tmp_path, settings=QUIET).run()
    (made,) = collect.read_report([finished.path]).models
    assert made.kind == "models" and [model.name for model in made.models] == ["transformer", "dlr"]
    assert "models of a smoke run are small" in str(read_plan(finished.path).notes)
