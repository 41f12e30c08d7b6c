"""Studies with controls: which runs they are, how they are made, and what a report says of them."""

import json
from pathlib import Path

import pytest
import yaml
from records import FINETUNING, PRETRAINING, compared, finish, plan, shown, start, study
from tiny import load, own_task, recipe_file, spt

from spt.config.job import Job
from spt.errors import DataError, RecipeError, UsageError
from spt.execution.estimate import MeasuredCosts
from spt.execution.run_study import ExecutionTarget, make_plan, run_study, study_folder
from spt.report import machine, markdown
from spt.report.collect import read_report
from spt.report.statements import statements
from spt.runs.index import comparisons_of
from spt.runs.plan import StudyPlan, read_plan
from spt.runs.result import Ledger
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.studies.arms import canonical
from spt.studies.grid import expand
from spt.studies.schema import from_mapping, read, to_yaml, validate

ALL = ["scratch", "spt", "frozen", "encoder", "shuffled", "other=quickstart-dlr", "joint=0.5"]


# -------------------------------------------------------------------------------------------------------- as asked for


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("scratch", "scratch"),
        ("spt", "spt"),
        ("frozen", "frozen"),
        ("encoder", "parts=encoder"),
        ("backbone.mixers.0", "parts=backbone.mixers.0"),
        ("encoder+backbone.norms", "parts=encoder+backbone.norms"),
        ("parts= encoder + backbone", "parts=encoder+backbone"),
        ("other=lra/text", "other=lra/text"),
        ("joint=0.50", "joint=0.5"),
    ],
)
def test_an_arm_has_one_spelling(text, arm):
    assert canonical(text) == canonical(arm) == arm


@pytest.mark.parametrize(
    ("arms", "complaint"),
    [
        (["scratch", "frozen"], "spt must be among the arms, since controls are read against both; add it"),
        (["frozen"], "scratch and spt must be among the arms"),
        (["scratch", "spt", "froze"], "'froze' is unknown; did you mean frozen"),
        (["scratch", "spt", "head"], "known: scratch, spt, frozen, encoder"),
        (["scratch", "spt", "frozen=1"], "unknown"),
        (["scratch", "spt", "parts="], "unknown"),
        (["scratch", "spt", "joint=0"], "a number above 0, such as joint=1"),
        (["scratch", "spt", "joint"], "a number above 0"),
        (["scratch", "spt", "joint=inf"], "a number above 0"),
        (["scratch", "spt", "encoder", "parts=encoder"], "parts=encoder is listed twice"),
    ],
)
def test_arms_that_make_no_sense_are_refused_in_a_sentence(arms, complaint):
    with pytest.raises(RecipeError, match=complaint):
        validate({"kind": "compare", "recipes": ["quickstart"], "arms": arms}, "a study")


def test_a_recipe_that_an_arm_names_is_found_from_anywhere(tmp_path, monkeypatch):
    file = {"kind": "compare", "recipes": ["mine.yaml"], "arms": ["scratch", "spt", "other=../b/yours.yaml"]}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "s.yaml").write_text(yaml.safe_dump(file))
    opened = read(str(tmp_path / "a" / "s.yaml")).study
    assert opened.arms[-1] == f"other={tmp_path / 'b' / 'yours.yaml'}"
    (tmp_path / "c").mkdir()
    assert yaml.safe_load(to_yaml(opened, tmp_path / "c"))["arms"][-1] == "other=../b/yours.yaml"


# --------------------------------------------------------------------------------------------------------- as planned


def grid_of(tmp_path: Path, arms=ALL, **changes):
    source = {"kind": "compare", "recipes": [str(recipe_file(tmp_path, **changes))], "arms": arms, "seeds": 2}
    return expand(
        from_mapping(source, "a study").study, False, MeasuredCosts(tmp_path / "runs", Runtime(Settings(cpu=True)))
    )


def test_each_arm_is_the_recipe_with_one_thing_changed(tmp_path):
    grid = grid_of(tmp_path)
    jobs = {(cell.arm, cell.job.seed): cell.job for cell in grid.cells}
    base = load(str(tmp_path / "tiny.yaml"))
    arms = [canonical(arm) for arm in ALL]
    assert set(jobs) == {(arm, seed) for arm in arms for seed in range(2)}
    assert [cell.arm for cell in grid.cells[:2]] == ["spt", "scratch"]  # the longest first
    for seed in range(2):
        pretraining, scratch = Job(base, "pretrain", seed), Job(base, "finetune", seed)
        spt_key = Job(base, "finetune", seed, pretraining).key
        assert (jobs["scratch", seed].key, jobs["spt", seed].key) == (scratch.key, spt_key)
        for arm, settings in (("frozen", {"freeze": True}), ("parts=encoder", {"load": ["encoder"]})):
            job = jobs[arm, seed]
            assert job.parent.key == pretraining.key
            assert job.settings() == jobs["spt", seed].settings() | settings
        shuffles = jobs["shuffled", seed]
        assert shuffles.parent.settings() == pretraining.settings() | {"shuffle_steps": True}
        assert shuffles.settings() | {"parent": 0} == jobs["spt", seed].settings() | {"parent": 0}
        joint = jobs["joint=0.5", seed]
        assert joint.parent is None and joint.settings()["joint"]["weight"] == 0.5
        assert {k: v for k, v in joint.settings().items() if k != "joint"} == scratch.settings()
        other = jobs["other=quickstart-dlr", seed]
        assert other.from_other_task is False  # digits again, of which more rows are in use
        assert other.parent.settings()["model"] == pretraining.settings()["model"]
        assert other.parent.resolved.recipe.task == load("quickstart-dlr").recipe.task


@pytest.mark.parametrize("budget", [{"epochs": 6}, {"steps": 18}, {"examples": 144}])
def test_another_tasks_inputs_get_as_many_updates(tmp_path, budget):
    """And as many evaluations, although that task has other numbers of rows."""
    train = {**budget, "batch_size": 8, "learning_rate": 0.01}
    grid = grid_of(tmp_path, pretrain__train=train)  # 24 rows; quickstart-dlr has 300 in use
    (job, *_) = (cell.job.parent for cell in grid.cells if cell.arm == "other=quickstart-dlr")
    assert (job.train.steps, job.train.evaluate_every, job.train.epochs) == (18, 3, None)
    (job, *_) = (cell.job.parent for cell in grid.cells if cell.arm == "spt")
    assert job.train.model_dump(exclude_unset=True).items() >= budget.items()


def test_a_plan_names_its_arms_and_one_without_controls_is_as_it_was(tmp_path):
    plain, grid = grid_of(tmp_path, ["scratch", "spt"]), grid_of(tmp_path)
    assert make_plan(plain).arms == ("scratch", "spt")
    assert make_plan(grid).arms == tuple(canonical(arm) for arm in ALL)
    assert study_folder(plain, tmp_path) != study_folder(grid, tmp_path)
    before = make_plan(plain).model_dump(mode="json")
    del before["arms"]
    assert StudyPlan.model_validate(before).arms == ("scratch", "spt")


def test_an_arm_that_contradicts_the_recipe_is_refused(tmp_path):
    with pytest.raises(UsageError, match="arm frozen: freeze and joint contradict"):
        grid_of(tmp_path, ["scratch", "spt", "frozen"], finetune__joint=1.0)


def test_two_recipes_of_one_name_are_not_one_arm(tmp_path):
    paths = []
    for name in "ab":
        (tmp_path / name).mkdir()
        paths.append(str(recipe_file(tmp_path / name)))
    with pytest.raises(UsageError, match="two arms are called other=tiny"):
        grid_of(tmp_path, ["scratch", "spt", *(f"other={path}" for path in paths)])


@pytest.mark.parametrize(
    ("arm", "complaint"),
    [
        ("other=toys.yaml", "9 tokens there, 17 tokens here"),
        ("backbone.layers.0", "no part backbone.layers.0; its parts"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path, monkeypatch, arm, complaint):
    own_task(tmp_path)
    (tmp_path / "tiny.yaml").rename(tmp_path / "toys.yaml")
    monkeypatch.chdir(tmp_path)
    grid = grid_of(tmp_path, ["scratch", "spt", arm])
    runtime = Runtime(Settings(quiet=True, cpu=True))
    with pytest.raises(UsageError, match=complaint):
        run_study(grid, tmp_path / "runs", ExecutionTarget(), runtime)
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------------------------------------------- as carried


@pytest.mark.slow
def test_all_arms_from_the_command_line(tmp_path):
    """Run, run again, reported; every control beside its cost."""
    own_task(tmp_path)
    (tmp_path / "other").mkdir()
    other = recipe_file(tmp_path / "other", task={"name": "../toy.py", "shift": 1})
    arms = f"scratch,spt,frozen,encoder,shuffled,other={other},joint=0.5"
    command = ("compare", "tiny.yaml", "--arms", arms, "--seeds", "3", "--cpu", "--out", "runs", "--json")
    done = spt(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = ["frozen", "parts=encoder", "shuffled", "other=tiny", "joint=0.5"]
    assert [control["arm"] for control in found["controls"]] == names
    (row,) = found["rows"]
    for control in found["controls"]:
        assert (control["n"], control["failures"], control["label"]) == (3, [], row["label"])
        over, below = control["over_scratch"], control["below_spt"]
        assert over["difference"] + below["difference"] == pytest.approx(row["delta"])
        assert over["tests"] <= 10
    ratios = {control["arm"]: control["ratios"]["flops"] for control in found["controls"]}
    spt_ratio = row["ratios"]["flops"]
    assert ratios["frozen"] < spt_ratio and ratios["joint=0.5"] == pytest.approx(2, rel=0.2)
    assert ratios["shuffled"] == ratios["parts=encoder"] == pytest.approx(spt_ratio)
    spent = {(cost["arm"], cost["part"]): cost["runs"] for cost in found["spent"]}
    assert spent["spt", "pretraining"] == spent["shuffled", "pretraining"] == spent["other=tiny", "pretraining"] == 3
    assert ("frozen", "pretraining") not in spent  # SPT's: made once, counted once
    again = spt(*command, cwd=tmp_path)
    assert json.loads(again.stdout)["controls"] == found["controls"]
    status = json.loads(spt("study", "status", "runs", "--json", cwd=tmp_path).stdout)["studies"][0]
    assert status["done"] == status["all"] == 30
    (folder,) = (tmp_path / "runs").glob("compare-*")
    assert "other=tiny" in (folder / "report.md").read_text() and "Controls" in (folder / "report.html").read_text()
    dry = json.loads(spt(*command, "--dry-run", cwd=tmp_path).stdout)
    assert len(dry["runs"]) == 30 and {run["state"] for run in dry["runs"]} == {"done"}


# --------------------------------------------------------------------------------------------------------- as reported

SCRATCH_SCORES, SPT_SCORES = (0.60, 0.61, 0.62, 0.60), (0.70, 0.72, 0.71, 0.70)
FROZEN, SHUFFLED, JOINT = (0.65, 0.66, 0.665, 0.65), (0.60, 0.615, 0.62, 0.595), (0.69, 0.725, 0.70, 0.71)


def control_cells(root, arm, scores, **changes):
    """A control's runs; each with a parent of its own, but for a joint loss."""
    kind = arm.partition("=")[0]
    cells = []
    for seed, score in enumerate(scores):
        base = "scratch" if kind == "joint" else "spt"
        cells.append(finish(root, base, seed, score, run=f"finetune-{kind}{seed}", **changes) | {"arm": arm})
    return cells


def controlled(root, **arms):
    """A comparison with these controls; names as keywords may be."""
    main = read_plan(compared(root, SCRATCH_SCORES, SPT_SCORES)).model_dump(mode="json")["cells"]
    cells = [cell for name, scores in arms.items() for cell in control_cells(root, ARMS.get(name, name), scores)]
    return plan(root, [*main, *cells], seeds=[0, 1, 2, 3], arms=["scratch", "spt", *(ARMS.get(n, n) for n in arms)])


ARMS = {"joint": "joint=0.5", "parts": "parts=encoder"}


def test_a_control_is_held_against_both_arms(tmp_path):
    report = read_report([controlled(tmp_path, frozen=FROZEN, shuffled=SHUFFLED, joint=JOINT)])
    frozen, shuffled, joint = report.controls
    (row,) = report.rows
    assert frozen.over_scratch.difference == pytest.approx(0.04875) and frozen.below_spt.difference == pytest.approx(
        0.05125
    )
    for control in report.controls:
        assert control.over_scratch.difference + control.below_spt.difference == pytest.approx(row.delta)
        assert (control.n, control.planned, control.label) == (4, 4, row.label)
        assert {contrast.tests for contrast in control.contrasts} == {6}
        assert all(contrast.holm >= contrast.p for contrast in control.contrasts)
    assert (frozen.over_scratch.decision, frozen.below_spt.decision) == ("first", "first")
    assert shuffled.over_scratch.decision == "open" and shuffled.below_spt.decision == "first"
    assert (joint.over_scratch.decision, joint.below_spt.decision) == ("first", "open")
    assert frozen.ratios["flops"] == pytest.approx((PRETRAINING.flops + FINETUNING.flops) / 1e10)
    assert frozen.cost.score == frozen.score == pytest.approx(sum(FROZEN) / 4)


def test_sentences_claim_what_the_intervals_show(tmp_path):
    report = read_report([controlled(tmp_path, frozen=FROZEN, shuffled=SHUFFLED, joint=JOINT, parts=SHUFFLED)])
    said = {control.arm: control.verdict for control in report.controls}
    assert said["frozen"].startswith(
        "the pretrained features alone, under a trained head: frozen beats scratch by 4.88"
    )
    assert "; what training all weights adds: SPT beats frozen by 5.12 points" in said["frozen"]
    assert said["shuffled"].startswith("pretraining on shuffled steps: not decided: shuffled - scratch is ")
    assert "; what their order adds: SPT beats shuffled by 10.00 points" in said["shuffled"]
    assert said["joint=0.5"].startswith("pretraining's loss beside the task's own, times 0.5: joint=0.5 beats scratch")
    assert "what a first stage adds: not decided: SPT - joint=0.5" in said["joint=0.5"]
    assert said["parts=encoder"].startswith("only encoder of the pretrained network: not decided")
    labels = [statement.label for statement in statements(report)]
    assert "digits / transformer, control shuffled" in labels
    assert machine.to_json(report)["controls"][0]["verdict"] == said["frozen"]
    text = shown(report)
    assert "Controls" in text and max(map(len, text.splitlines())) <= 80
    assert "| frozen | 4 | 65.62 | ×1.00 | +4.88 |" in markdown.markdown(report, [])


def test_a_report_without_controls_says_nothing_of_them(tmp_path):
    report = read_report([compared(tmp_path, SCRATCH_SCORES, SPT_SCORES)])
    assert report.controls == () and "ontrol" not in shown(report)


def test_controls_change_nothing_of_scratch_and_spt(tmp_path):
    with_controls = read_report([controlled(tmp_path / "a", frozen=FROZEN)]).rows[0]
    plain = read_report([compared(tmp_path / "b", SCRATCH_SCORES, SPT_SCORES)]).rows[0]
    assert with_controls == plain


def test_one_pair_in_two_studies_is_one_comparison(tmp_path):
    """Controls do not make another comparison of the same runs; nor are contrasts of the same runs counted twice."""
    folder = controlled(tmp_path, frozen=FROZEN)
    cells = read_plan(folder).model_dump(mode="json")["cells"]
    plan(tmp_path, [cell for cell in cells if cell["arm"] != "frozen"], "compare-2")
    plan(tmp_path, cells, "compare-3", command="another")
    report = read_report([tmp_path])
    assert len(report.rows) == 3 and {row.tests for row in report.rows} == {1}
    assert len(report.controls) == 2
    assert {contrast.tests for control in report.controls for contrast in control.contrasts} == {2}


def test_every_planned_run_of_a_control_is_accounted_for(tmp_path):
    folder = controlled(tmp_path, frozen=FROZEN[:2], joint=JOINT)
    cells = read_plan(folder).model_dump(mode="json")["cells"]
    start(tmp_path, "finetune-lost", state="diverged", reason="the loss is not finite", exit_code=7)
    lost = {"row": 0, "arm": "frozen", "seed": 2, "run": "finetune-lost", "parent": None}
    plan(tmp_path, [*cells, lost], seeds=[0, 1, 2, 3])
    report = read_report([folder])
    frozen, joint = report.controls
    assert (frozen.n, joint.n) == (2, 4) and frozen.over_scratch.decision == "too few seeds"
    assert [seed.state for seed in frozen.seeds] == ["done", "done", "diverged", "missing"]
    assert [(failure.arm, failure.seed, failure.state) for _, failure in report.failures] == [
        ("frozen", 2, "diverged"),
        ("frozen", 3, "missing"),
    ]
    assert frozen.score == pytest.approx(0.655) and frozen.scratch == pytest.approx(0.605)  # the same seeds
    first = report.provenance.checklist[0]
    assert first.question == "Is every planned run accounted for?" and first.answer == "partly"
    assert "8 of 8 runs of the rows have a score; other runs without one: 2" in first.evidence


@pytest.mark.parametrize(
    ("arm", "holds", "complaint"), [("frozen", "scratch", "the scratch arm"), ("joint=0.5", "spt", "the SPT arm")]
)
def test_a_folder_that_holds_another_arms_run_is_no_control(tmp_path, arm, holds, complaint):
    main = read_plan(compared(tmp_path, SCRATCH_SCORES, SPT_SCORES)).model_dump(mode="json")["cells"]
    wrong = finish(tmp_path, holds, 0, 0.7, run="finetune-wrong") | {"arm": arm, "parent": None}
    report = read_report([plan(tmp_path, [*main, wrong], seeds=[0, 1, 2, 3])])
    (control,) = report.controls
    assert control.n == 0 and complaint in control.failures[0].reason
    assert control.verdict.endswith("no pair of runs finished (0 of 4)")


def test_a_control_that_alone_was_run_has_its_mean(tmp_path):
    cells = [
        {"row": 0, "arm": arm, "seed": s, "run": f"finetune-no{arm}{s}"} for arm in ("scratch", "spt") for s in (0, 1)
    ]
    cells += [finish(tmp_path, "spt", s, 0.8 + s / 50, f"finetune-f{s}") | {"arm": "frozen"} for s in (0, 1)]
    (control,) = read_report([plan(tmp_path, cells)]).controls
    assert (control.n, control.score) == (0, pytest.approx(0.81))


def test_a_control_is_left_out_with_an_arm_where_the_other_alone_was_asked_for(tmp_path):
    cells = [finish(tmp_path, "scratch", s, 0.7 + s / 50) for s in range(3)]
    cells += [
        {"row": 0, "arm": arm, "seed": s, "run": f"finetune-{arm}{s}"} for arm in ("spt", "frozen") for s in range(3)
    ]
    report = read_report([plan(tmp_path, cells)])
    assert report.rows[0].decision == "one arm" and report.failures == ()


def test_a_control_of_another_metric_is_not_compared(tmp_path):
    main = read_plan(compared(tmp_path, SCRATCH_SCORES, SPT_SCORES)).model_dump(mode="json")["cells"]
    cells = control_cells(tmp_path, "frozen", FROZEN, metric="mse")
    (control,) = read_report([plan(tmp_path, main + cells, seeds=[0, 1, 2, 3])]).controls
    assert control.n == 0 and "scored in mse, the others in accuracy" in control.failures[0].reason


def test_a_shared_pretraining_is_paid_for_once(tmp_path):
    """By SPT, whose arm comes first; the control's own ledger has it too, since it needs it."""
    folder = compared(tmp_path, SCRATCH_SCORES[:3], SPT_SCORES[:3])
    cells = read_plan(folder).model_dump(mode="json")["cells"]
    for seed in range(3):
        cell = finish(tmp_path, "spt", seed, 0.7, run=f"finetune-frozen{seed}", parent=f"for-spt{seed}")
        cells.append(cell | {"arm": "frozen", "parent": f"pretrain-for-spt{seed}"})
    report = read_report([plan(tmp_path, cells)])
    parts = {(cost.arm, cost.part): cost.runs for cost in report.spent}
    assert parts == {
        ("scratch", "finetuning"): 3,
        ("spt", "pretraining"): 3,
        ("spt", "finetuning"): 3,
        ("frozen", "finetuning"): 3,
    }
    assert [cost.arm for cost in report.spent] == ["scratch", "spt", "spt", "frozen"]
    assert report.controls[0].cost.total.flops == (FINETUNING + PRETRAINING).flops
    assert sum((cost.ledger for cost in report.spent), start=Ledger()).steps == 3 * (100 + 60 + 40 + 40)


def test_cells_of_controls_stand_beside_the_pair(tmp_path):
    folder = controlled(tmp_path, frozen=FROZEN)
    (runs,) = comparisons_of(folder, read_plan(folder))
    assert {cell.arm for cell in runs.cells} == {"scratch", "spt"}
    assert {cell.arm for cell in runs.controls} == {"frozen"} and len(runs.controls) == 4


def test_a_plan_with_an_arm_of_no_kind_is_no_study(tmp_path):
    folder = study(tmp_path, "compare", [{}], [{"row": 0, "arm": "dora", "seed": 0, "run": "x"}], seeds=[0])
    with pytest.raises(DataError, match=r"cells\.0\.arm"):
        read_plan(folder)
