"""Equal tuning: what each arm of each model tries, in pretraining too; the choice among it; what it cost."""

import itertools
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import yaml
from records import finish, shown, study
from tiny import RECIPE, changed, recipe_file
from typer.testing import CliRunner

from spt.data.dataset import identify_data, open_task
from spt.errors import UsageError
from spt.execution.run_study import apply_selection, make_plan
from spt.report import collect, markdown, provenance
from spt.runs.files import write_json
from spt.runs.folder import RunFolder
from spt.runs.plan import ARMS, read_plan
from spt.studies import selection
from spt.studies.costs import Estimate
from spt.studies.grid import expand
from spt.studies.schema import packaged_spaces, validate
from spt_cli import app

EPOCH = 100.0  # operations that a pass costs here


class Costs:
    """A cost model: a pass over the rows costs 100 operations, a step 10."""

    def identify_data(self, recipe):
        return identify_data(recipe)

    def open_task(self, recipe):
        return open_task(recipe.recipe.task)

    def estimate(self, job):
        train = job.train
        flops = EPOCH * train.epochs if train.epochs else 10.0 * (train.steps or train.examples / train.batch_size)
        return Estimate(0, 0, flops, 0)

    def seconds_per_step(self, job):
        raise AssertionError("no time is measured for a search")


TRAIN = {"epochs": 2, "batch_size": 8, "learning_rate": 0.01}
RECIPE_IN_EPOCHS = changed(RECIPE, pretrain__train={**TRAIN, "epochs": 3}, finetune__train=TRAIN)


def laid(folder, *, base=None, smoke=False, models=("tiny",), **options):
    """A tuning study over recipes of one task, laid out by the cost model above."""
    paths = []
    for number, name in enumerate(models):
        paths.append(str(folder / f"{name}.yaml"))
        recipe = changed(RECIPE_IN_EPOCHS if base is None else base, model__d_model=16 + 8 * number)
        Path(paths[-1]).write_text(yaml.safe_dump(recipe))
    return expand(validate({"kind": "tune", "recipes": paths, "seeds": 2, **options}, "here"), smoke, Costs())


def of(search, arm):
    return [trial for trial in search.trials if trial.arm == arm]


def counts(grid):
    """Trials by model and arm."""
    return {(search.row, arm): len(of(search, arm)) for search in grid.searches for arm in ARMS}


def costs_of(grid):
    """Operations of each arm's runs, each run counted once."""
    (search,) = grid.searches
    total = {}
    for arm in ARMS:
        runs = {run.name: run for trial in of(search, arm) for run in (trial.job, trial.job.parent) if run}
        total[arm] = sum(Costs().estimate(run).flops for run in runs.values())
    return total


BOTH_STAGES = {
    "learning_rate": [0.1, 0.01],
    "pretrain.learning_rate": [1e-3, 1e-4],
    "pretrain.objective.ratio": [0.15, 0.5],
}


# The same number for every model and arm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"space": {"learning_rate": [0.1, 0.01, 0.03], "batch_size": [4, 8]}},
        {"space": {"learning_rate": {"low": 1e-4, "high": 1e-1}, "weight_decay": [0.0, 0.1]}, "trials": 7},
        {"space": {**BOTH_STAGES, "learning_rate": {"low": 1e-4, "high": 1e-1}}, "trials": 7, "trial_seeds": [0, 4]},
        {"space": "spt-paper", "trials": 9},
    ],
    ids=["default", "grid", "random", "both stages", "spt-paper"],
)
def test_every_model_and_arm_has_as_many_trials(options, tmp_path):
    grid = laid(tmp_path, models=("a", "b", "c"), **options)
    assert len(grid.searches) == 3 and len(set(counts(grid).values())) == 1, counts(grid)
    for search in grid.searches:
        for arm in ARMS:
            different = {json.dumps(values) for values in search.settings[arm]}
            assert len(different) == len(search.settings[arm]), "no setting is tried twice"
            tries = Counter((trial.row, trial.job.seed) for trial in of(search, arm))
            assert set(tries) == set(itertools.product(range(len(different)), grid.study.trial_seeds))
            assert set(tries.values()) == {1}


def test_a_drawn_size_is_one_that_can_be(tmp_path):
    grid = laid(tmp_path, space={"batch_size": {"low": 0.3, "high": 0.45}}, trials=1)
    assert {values["batch_size"] for values in grid.searches[0].settings["scratch"]} == {1}


def test_scratch_tries_the_supervised_settings_that_spt_does(tmp_path):
    """And, where SPT's differ in pretraining alone, others."""
    space = {"learning_rate": {"low": 1e-4, "high": 1e-1}, "batch_size": [4, 8], "pretrain.epochs": [1, 5]}
    (search,) = laid(tmp_path, space=space, trials=6).searches
    supervised = [{k: v for k, v in values.items() if k != "pretrain.epochs"} for values in search.settings["spt"]]
    assert search.settings["scratch"] == supervised, "six draws of a continuous setting differ"
    doubled = 0
    for seed in range(5):
        grid = laid(tmp_path, space={**space, "learning_rate": [0.1, 0.01, 0.03]}, trials=5, search_seed=seed)
        spt, scratch = (
            {json.dumps({k: v for k, v in values.items() if k != "pretrain.epochs"}) for values in settings}
            for settings in (grid.searches[0].settings[arm] for arm in ("spt", "scratch"))
        )
        assert spt <= scratch and len(scratch) == 5
        doubled += len(spt) < 5
    assert doubled, "in some of them SPT tries one supervised setting after two pretrainings"


def test_a_grid_without_as_many_for_scratch_says_so(tmp_path):
    grid = laid(tmp_path, space=BOTH_STAGES)
    assert counts(grid) == {(0, "scratch"): 2, (0, "spt"): 8}
    (note,) = grid.notes
    assert note == (
        "tiny: scratch tries 2 settings, all that the space has for it, SPT 8; --trials 2 gives both as many"
    )
    alone = laid(tmp_path, space={"pretrain.learning_rate": [1e-3, 1e-4]})
    assert alone.searches[0].settings == {"scratch": [{}], "spt": [{"pretrain.learning_rate": r} for r in (1e-3, 1e-4)]}
    assert laid(tmp_path, space={"learning_rate": [0.1, 0.01]}).notes == []


# Pretraining's own settings


def test_pretrainings_settings_reach_pretraining_alone(tmp_path):
    space = {**BOTH_STAGES, "pretrain.epochs": [1, 5], "pretrain.weight_decay": [0.3]}
    (search,) = laid(tmp_path, space=space).searches
    for trial in search.trials:
        values, job = search.settings[trial.arm][trial.row], trial.job
        assert job.train.model_dump() == {**job.train.model_dump(), **TRAIN, "learning_rate": values["learning_rate"]}
        if trial.arm == "scratch":
            assert job.parent is None and set(values) == {"learning_rate"}
            continue
        before = job.parent.train
        assert (before.learning_rate, before.epochs) == (values["pretrain.learning_rate"], values["pretrain.epochs"])
        assert (before.weight_decay, job.train.weight_decay) == (0.3, 0.0)
        assert job.parent.settings()["objective"]["ratio"] == values["pretrain.objective.ratio"]


def test_pretrainings_that_trials_share_are_made_once(tmp_path):
    """Settings that differ in supervised training alone start from one pretraining: eight of it for 24 trials."""
    space = {**BOTH_STAGES, "weight_decay": [0.0, 0.1, 0.2]}
    grid = laid(tmp_path, space=space, trial_seeds=[0, 1])
    spt = of(grid.searches[0], "spt")
    parents = {trial.job.parent.name for trial in spt}
    assert len(spt) == 48 and len({trial.job.name for trial in spt}) == 48
    assert len(parents) == 2 * 4, "two rates and two ratios, with either seed"


def test_a_larger_batch_is_no_more_pretraining(tmp_path):
    """A budget in steps shows as many examples, and is evaluated after as many, whatever the batch."""
    space = {"pretrain.batch_size": [4, 8, 16]}
    for trial in of(laid(tmp_path, base=RECIPE, space=space).searches[0], "spt"):
        train = trial.job.parent.train
        assert (train.steps, train.examples, train.batch_size) == (None, 6 * 8, (4, 8, 16)[trial.row])
        assert train.evaluate_every == (6, 3, 2)[trial.row], "3 steps of 8 examples, or nearly"
        assert (trial.job.train.steps, trial.job.train.batch_size) == (6, 8), "finetuning is as it was"
    for trial in of(laid(tmp_path, base=RECIPE, space={**space, "pretrain.steps": [12]}).searches[0], "spt"):
        assert trial.job.parent.train.examples == 12 * 8


@pytest.mark.parametrize(
    ("space", "complaint"),
    [
        ({"pretrain.rate": [1]}, "not a tunable setting of pretraining"),
        ({"pretrain.objective.rato": [1]}, r"did you mean pretrain\.objective\.ratio"),
        ({"finetune.learning_rate": [1]}, "did you mean learning_rate"),
        ({"pretrain.epochs": [1], "pretrain.steps": [1]}, "are both pretraining's budget"),
        ({"pretrain.epochs": [-1]}, "epochs: input should be greater than 0"),
        ({"pretrain.batch_size": ["many"]}, "batch_size: input should be a valid integer"),
        ({"pretrain.objective.ratio": [1.5]}, r"pretrain\.objective\.ratio: input should be less than 1"),
        ({"schedule": ["x2"]}, "the recipe's own value is constant; give the values themselves"),
        ({"pretrain.steps": ["x2"]}, "the recipe's own value is None"),
        ({"weight_decay": ["x1", "x3"]}, r"space\.weight_decay is 0\.0, 0\.0, since the recipe's own value is 0\.0"),
        ("spt-papers", "space 'spt-papers' is unknown; known: default, spt-paper"),
    ],
)
def test_a_space_that_cannot_be_is_refused(space, complaint, tmp_path):
    with pytest.raises(UsageError, match=complaint):
        laid(tmp_path, space=space)


def test_an_option_of_another_objective_is_refused(tmp_path):
    causal = changed(RECIPE, pretrain__objective={"name": "next"}, model__causal=True)
    with pytest.raises(UsageError, match=r"pretrain\.objective\.ratio: unknown key.*its objective is next"):
        laid(tmp_path, base=causal, space={"pretrain.objective.ratio": [0.5]})


def test_a_smoke_run_of_a_search_stays_small(tmp_path):
    space = {"batch_size": [8, 128], "pretrain.batch_size": [8, 128], "pretrain.epochs": [0.5, 200]}
    for trial in laid(tmp_path, base=RECIPE, smoke=True, space=space).searches[0].trials:
        rows = trial.job.resolved.recipe.task.options["max_rows"]
        assert trial.job.train.batch_size == (8 if search_values(trial, space) == 8 else rows) <= rows
        if trial.arm == "spt":
            assert trial.job.parent.train.epochs <= 1 and trial.job.parent.train.batch_size <= rows


def search_values(trial, space):
    grid = list(itertools.product(*(v for k, v in space.items() if trial.arm == "spt" or not k.startswith("pretrain"))))
    return grid[trial.row][0]


# Packaged spaces


def test_the_papers_grid_is_a_packaged_space(tmp_path):
    """Learning rate x batch size in both stages (SPT paper, section 3)."""
    (search,) = laid(tmp_path, base=changed(RECIPE, task__max_rows=None), space="spt-paper").searches
    tried = {tuple(values.values()) for values in search.settings["spt"]}
    rates, sizes = (1e-3, 5e-4, 1e-4), (8, 32, 128)
    assert tried == set(itertools.product(rates, sizes, rates, sizes))
    assert {tuple(values.values()) for values in search.settings["scratch"]} == set(itertools.product(rates, sizes))
    assert list(search.settings["spt"][0]) == [
        *("learning_rate", "batch_size", "pretrain.learning_rate", "pretrain.batch_size")
    ]


def test_the_default_space_lies_around_each_arms_own_rate(tmp_path):
    base = changed(RECIPE_IN_EPOCHS, scratch__train={**TRAIN, "learning_rate": 0.5})
    grid = laid(tmp_path, base=base)
    (search,) = grid.searches
    assert [values["learning_rate"] for values in search.settings["spt"]] == [0.003, 0.01, 0.03]
    assert [values["learning_rate"] for values in search.settings["scratch"]] == [0.15, 0.5, 1.5]
    assert make_plan(grid).searches[0].relative == ("learning_rate",)
    (whole,) = laid(tmp_path, base=base, space={"batch_size": ["x0.5", "x1", "x2"], "pretrain.epochs": ["x2"]}).searches
    assert [values["batch_size"] for values in whole.settings["spt"]] == [4, 8, 16]
    assert {values["pretrain.epochs"] for values in whole.settings["spt"]} == {6.0}


@pytest.mark.parametrize("name", packaged_spaces())
def test_packaged_spaces_are_spaces(name, tmp_path):
    raw = validate({"kind": "tune", "recipes": ["a"], "space": name}, "here")
    assert validate({"kind": "tune", "recipes": ["a"], "space": dict(raw.space)}, "here") == raw
    assert packaged_spaces()[name]["description"]


# The same total compute


def test_scratch_has_trials_until_they_cost_what_spts_cost(tmp_path):
    """SPT: two pretrainings of 300, each counted once, and six finetunings of 200; a setting of scratch costs 200."""
    space = {"learning_rate": {"low": 1e-4, "high": 1e-1}, "pretrain.learning_rate": [1e-3, 1e-4]}
    grid = laid(tmp_path, space=space, trials=6, protocol="compute")
    assert counts(grid) == {(0, "scratch"): 9, (0, "spt"): 6}
    assert costs_of(grid) == {"spt": 2 * 300 + 6 * 200, "scratch": 9 * 200}
    (note,) = grid.notes
    assert note == ("tiny: the same total compute: SPT tries 6 settings for 1.8e+03 operations, scratch 9 for 1.8e+03")
    seeds = laid(tmp_path, space=space, trials=6, protocol="compute", trial_seeds=[0, 1])
    assert counts(seeds) == {(0, "scratch"): 2 * 9, (0, "spt"): 2 * 6}


@pytest.mark.parametrize("epochs", [0.5, 1.0, 7.0, 40.0])
def test_the_arms_differ_by_less_than_one_setting(epochs, tmp_path):
    base = changed(RECIPE_IN_EPOCHS, scratch__train={**TRAIN, "epochs": 3 + epochs})
    space = {"learning_rate": {"low": 1e-4, "high": 1e-1}, "pretrain.epochs": [1, epochs + 1]}
    costs = costs_of(laid(tmp_path, base=base, space=space, trials=5, protocol="compute"))
    assert 0 <= costs["scratch"] - costs["spt"] < (3 + epochs) * EPOCH, "what is left over is the baseline's"


def test_a_part_of_a_grid_is_drawn_from_all_of_it(tmp_path):
    """Not its first corner; the same part whenever it is laid out."""
    space = {"learning_rate": [10.0**-n for n in range(1, 9)], "weight_decay": [0.0, 0.1]}
    base = changed(RECIPE_IN_EPOCHS, scratch__train={**TRAIN, "epochs": 8})
    grids = [laid(tmp_path, base=base, space=space, protocol="compute", search_seed=seed) for seed in (0, 0, 1)]
    first, again, other = ([tuple(v.values()) for v in grid.searches[0].settings["scratch"]] for grid in grids)
    assert len(first) == 5 == len(set(first)) and first == again != other  # 16 x 200 + 300 are 4.4 of 800
    assert len({rate for rate, _ in first}) > 3


def test_a_grid_too_small_for_the_compute_is_tried_whole(tmp_path):
    grid = laid(tmp_path, space=BOTH_STAGES, protocol="compute")
    assert counts(grid) == {(0, "scratch"): 2, (0, "spt"): 8}
    assert grid.notes[0].endswith("scratch 2 for 400, all that the space has for it")


# The choice, on made-up runs


def scored(root, grid, score):
    """Results of all trials, with validation scores by arm and setting; the test scores say the opposite."""
    for search in grid.searches:
        for trial in search.trials:
            value, job = score(trial.arm, search.settings[trial.arm][trial.row]), trial.job
            options = {"val": {"accuracy": value, "loss": 1.0}, "parent": job.parent_key}
            finish(root, trial.arm, job.seed, 1 - value, run=job.name, **options)


def test_the_best_score_after_finetuning_chooses_both_stages(tmp_path):
    def score(arm, values):
        if arm == "scratch":
            return {0.1: 0.4, 0.01: 0.6}[values["learning_rate"]]
        best = (values["learning_rate"], values["pretrain.learning_rate"], values["pretrain.objective.ratio"])
        return 0.9 if best == (0.1, 1e-4, 0.5) else 0.2

    grid = laid(tmp_path, models=("a", "b"), space=BOTH_STAGES)
    scored(tmp_path / "runs", grid, score)
    chosen, plan, messages = apply_selection(grid, tmp_path / "runs")
    assert [search.chosen for search in plan.searches] == [{"scratch": 1, "spt": 3}] * 2
    assert len(chosen.cells) == 2 * 2 * 2
    for cell in chosen.cells:
        assert cell.job.train.learning_rate == (0.1 if cell.arm == "spt" else 0.01)
        if cell.arm == "spt":
            assert cell.job.parent.train.learning_rate == 1e-4
            assert cell.job.parent.settings()["objective"]["ratio"] == 0.5
    assert messages[0] == (
        "a: chosen on validation: scratch learning_rate 0.01; SPT learning_rate 0.1, pretrain.learning_rate 0.0001, "
        "pretrain.objective.ratio 0.5"
    )


def test_nothing_is_chosen_while_the_longer_list_is_unfinished(tmp_path):
    root, grid = tmp_path / "runs", laid(tmp_path, space=BOTH_STAGES)
    scored(root, grid, lambda arm, values: 0.5)
    (search,) = make_plan(grid).searches
    assert [len(selection.scored_settings(root, search, arm)) for arm in ("scratch", "spt")] == [2, 8]
    last = of(grid.searches[0], "spt")[-1].job
    RunFolder(root, last.name).path.joinpath("result.json").unlink()
    assert selection.select_settings(root, search) == "1 trials of SPT are not finished"


# The report, on made-up runs


def reported(folder, scratch, spt, **changes):
    """A study over so many learning rates of scratch, and of SPT over learning rates with one of two pretrainings."""
    settings = {
        "scratch": [{"learning_rate": rate / 10} for rate in range(1, scratch + 1)],
        "spt": [{"learning_rate": rate / 10, "pretrain.epochs": 1 + rate % 2} for rate in range(1, spt + 1)],
    }
    trials = []
    for arm, values in settings.items():
        for number, value in enumerate(values):
            parent = f"shared{value['pretrain.epochs']}" if arm == "spt" else None
            run = f"finetune-{arm}{number}"
            finish(folder, arm, 0, 0.5, run=run, val={"accuracy": number / 10}, parent=parent)
            parent = parent and f"pretrain-{parent}"
            trials.append({"arm": arm, "number": number, "seed": 0, "run": run, "parent": parent})
    search = {"row": 0, "settings": settings, "trials": trials, "chosen": {"scratch": scratch - 1, "spt": spt - 1}}
    return study(folder, "tune", [{}], [], searches=[search | changes], seeds=[0])


def tuned_equally(made):
    """The line of the checklist."""
    return provenance._tuning(provenance.ChecklistInput([], [], [], 0, provenance.Provenance(), made.searches))


def test_a_report_shows_what_each_arms_trials_cost(tmp_path):
    """Four finetunings of 4e9 operations and the two pretrainings of 6e9 that they share; four of 1e10 from scratch."""
    made = collect.read_report([reported(tmp_path, 4, 4)])
    (search,) = made.searches
    assert (search.scratch.spent.flops, search.spt.spent.flops) == (4e10, 4 * 4e9 + 2 * 6e9)
    assert (search.scratch.spent.seconds, search.spt.spent.seconds) == (4 * 8.0, 4 * 4.0 + 2 * 6.0)
    assert search.equal and search.warnings == ()
    text = markdown.markdown(made)
    chosen = "learning_rate 0.4, pretrain.epochs 1"
    assert f"|  | SPT | {chosen} | learning_rate, pretrain.epochs | 4 | 0 | 2.80e10 | 28.0 s | 30.00 |" in text
    assert "the same number of trials; both arms: learning_rate 0.1, 0.2, 0.3, 0.4 / SPT: pretrain.epochs 1, 2" in text
    assert "| scratch | learning_rate 0.4 | learning_rate | 4 | 0 | 4.00e10 | 32.0 s | 30.00 |" in text
    assert tuned_equally(made)[1].startswith("8 trials, as many in both arms; a chosen value is at the edge")
    for part in ("2.80e10", "28.0 s", "the same number of trials"):
        assert part in " ".join(shown(made).split())
    told = "SPT: the chosen learning_rate 0.4, pretrain.epochs 1 are at the edge of the search space; widen it there"
    assert told in search.notes


def test_a_cost_that_is_not_known_is_said(tmp_path):
    folder = reported(tmp_path, 2, 2)
    (tmp_path / "finetune-spt1" / "result.json").unlink()
    (search,) = collect.read_report([folder]).searches
    assert search.spt.unknown == 1 and "SPT: the cost of 1 runs without a result is not counted" in search.notes


def test_fewer_trials_of_an_arm_or_a_model_are_warned_of(tmp_path):
    (search,) = collect.read_report([reported(tmp_path / "a", 2, 4)]).searches
    told = "the arms were not tuned equally: scratch has 2 settings in 2 trials, SPT 4 in 4"
    assert search.warnings == (told,) and not search.equal
    folder = reported(tmp_path / "b", 4, 4)
    plan = json.loads((folder / "study.json").read_text())
    (one,) = plan["searches"]
    fewer = [trial for trial in one["trials"] if trial["number"] < 2]
    plan["rows"] *= 2
    plan["searches"] = [one, {**one, "row": 1, "trials": fewer, "chosen": {}}]
    write_json(folder / "study.json", plan)
    made = collect.read_report([folder])
    assert [search.equal for search in made.searches] == [True, True]
    answer, evidence = tuned_equally(made)
    assert answer == "no" and evidence.startswith("12 trials, unequal by arm or model in digits / transformer, quick")


def test_the_same_compute_is_held_to_what_the_runs_took(tmp_path):
    """SPT's four trials took 2.8e10 operations, a setting of scratch takes 1e10: three are as many as they pay for."""
    for scratch, equal in ((1, False), (2, True), (3, True), (4, False)):
        made = collect.read_report([reported(tmp_path / str(scratch), scratch, 4, protocol="compute")])
        (search,) = made.searches
        assert search.equal is equal and bool(search.warnings) is not equal, scratch
        assert "the same total compute (operations)" in markdown.markdown(made)
    assert search.warnings == (
        "the arms were not tuned at the same total compute: scratch's trials took 4e+10 operations, SPT's 2.8e+10",
    )


def test_values_of_an_arms_own_may_differ_and_others_not(tmp_path):
    folder = reported(tmp_path, 3, 3)
    plan = json.loads((folder / "study.json").read_text())
    for values in plan["searches"][0]["settings"]["scratch"]:
        values["learning_rate"] *= 5
    for relative, equal in ((["learning_rate"], True), ([], False)):
        plan["searches"][0]["relative"] = relative
        write_json(folder / "study.json", plan)
        made = collect.read_report([folder])
        assert made.searches[0].equal is equal
        assert "learning_rate" in made.searches[0].spt.edges, "0.3 is the largest that SPT tried"
        if not equal:
            assert made.searches[0].warnings == ("the arms were not tuned equally: they tried different settings",)
    assert "scratch: learning_rate 0.5, 1, 1.5 / SPT: learning_rate 0.1, 0.2, 0.3; pretrain.epochs 1, 2" in (
        markdown.markdown(made)
    )


def test_a_setting_without_values_is_the_recipes_own(tmp_path):
    settings = {"scratch": [{}], "spt": [{"pretrain.epochs": 1}]}
    folder = reported(tmp_path, 1, 1, settings=settings)
    made = collect.read_report([folder])
    assert "scratch: 1 of 1 trials, the recipe's own; SPT: 1 of 1 trials, pretrain.epochs 1" in (
        " ".join(shown(made).split())
    )
    assert "| scratch | the recipe's own | no |" in markdown.markdown(made)


def test_a_plan_with_one_list_for_both_arms_is_read(tmp_path):
    """As they were written before pretraining was tuned."""
    folder = reported(tmp_path, 3, 3, settings=[{"learning_rate": rate / 10} for rate in (1, 2, 3)], space={})
    (search,) = read_plan(folder).searches
    assert search.settings["scratch"] == search.settings["spt"] and len(search.settings["spt"]) == 3
    assert collect.read_report([folder]).searches[0].equal


def test_a_plan_without_an_arms_trials_is_read(tmp_path):
    folder = reported(tmp_path, 0, 2, settings={"spt": [{}, {}]}, protocol="compute", chosen={})
    (search,) = collect.read_report([folder]).searches
    assert (search.scratch.trials, search.spt.trials, search.equal) == (0, 2, False)


# From beginning to end


@pytest.mark.slow
def test_a_search_of_both_stages_from_beginning_to_end(tmp_path, monkeypatch):
    """By the command: every pretraining once, the report's cost that of the runs, and nothing made again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    recipe_file(tmp_path)
    words = (
        "study tune tiny.yaml --space learning_rate=x0.3,x1 --space pretrain.learning_rate=0.01,0.001 --space default"
    )
    words += " --protocol compute --space pretrain.epochs=0.5,5 --seeds 1 --smoke --cpu --out runs --json"

    def call():
        done = CliRunner().invoke(app, words.split())
        assert done.exit_code == 0, (done.stderr, done.exception)
        return json.loads(done.stdout)

    report, root = call(), tmp_path / "runs"
    (search,) = report["searches"]
    assert (search["spt"]["trials"], search["spt"]["done"]) == (8, 8)
    assert search["protocol"] == "compute" and search["scratch"]["settings"] == 2  # all that there are
    results = {path.parent.name: json.loads(path.read_text()) for path in root.glob("*/result.json")}
    assert sum(name.startswith("pretrain-") for name in results) == 4, "two rates, two budgets"
    trials = {trial["run"] for trial in search["trials"] if trial["arm"] == "spt"}
    flops = sum(one["own"]["flops"] for name, one in results.items() if name in trials or name[:3] == "pre")
    assert search["spt"]["spent"]["flops"] == pytest.approx(flops)
    assert report["rows"][0]["n"] == 1
    (study_file,) = root.glob("tune-*/study.yaml")
    assert yaml.safe_load(study_file.read_text())["space"]["learning_rate"] == ["x0.3", "x1"]
    before = {path: path.stat().st_mtime_ns for path in root.rglob("result.json")}
    call()
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("result.json")}
