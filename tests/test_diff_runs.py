"""Two runs side by side, from files that were made by hand and by nobody else."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from records import FINETUNING, SPLITS, finish
from rich.console import Console
from typer.testing import CliRunner

from spt.analysis import diff_runs as module
from spt.analysis.diff_runs import RunDiff, diff_runs
from spt.config.job import digest
from spt.errors import DataError, UsageError
from spt.runs.files import write_json
from spt.runs.folder import RunFolder
from spt.runs.result import SplitRecord
from spt_cli import app

TRAIN = {"epochs": 4.0, "learning_rate": 0.01, "milestones": [0.5]}
ENVIRONMENT = {
    "spt": "0.1.0",
    "commit": "abc",
    "python": "3.11.7",
    "packages": {"torch": "2.8", "numpy": "2.1"},
    "device": "cpu",
    "processes": 1,
    "threads": 1,
    "command": "spt compare quickstart",
}


def recipe_of(**changes: Any) -> dict[str, Any]:
    """A resolved recipe; changes as `finetune__train__epochs=8`."""
    recipe: dict[str, Any] = {  # YAML would write one list in two places as an alias
        "task": {"name": "digits", "subset_fraction": 0.3, "data": "/here"},
        "model": {"name": "transformer", "d_model": 32, "n_heads": 4},
        "encoder": {"init_std": 0.3},
        "pretrain": {
            "objective": {"name": "masked", "ratio": 0.5},
            "head": {"mlp": False},
            "train": copy.deepcopy(TRAIN),
        },
        "finetune": {"objective": {"name": "supervised"}, "head": {"pool": "mean"}, "train": copy.deepcopy(TRAIN)},
        "scratch": {"train": copy.deepcopy(TRAIN) | {"epochs": 5.0}},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        part = recipe
        for name in path:
            part = part[name]
        if value is None:
            del part[last]
        else:
            part[last] = value
    return recipe


def run(
    root: Path,
    arm: str = "scratch",
    seed: int = 0,
    score: float | None = 0.8,
    recipe: dict[str, Any] | None = None,
    parent: dict[str, Any] | None = None,
    environment: dict[str, Any] = ENVIRONMENT,
    **changes: Any,
) -> Path:
    """A run's whole folder, named by its key; without a score it is not finished. `parent`: the recipe beside it."""
    recipe = recipe or recipe_of()
    stage = "pretrain" if arm == "pretrain" else "finetune"
    section = recipe["scratch"] if arm == "scratch" and recipe["scratch"] else recipe[stage]
    job: dict[str, Any] = {
        "format": 1,
        "stage": stage,
        "data": "v1",
        "task": {key: value for key, value in recipe["task"].items() if key != "data"},
        "model": recipe["model"],
        "encoder": recipe["encoder"],
        "objective": recipe[stage]["objective"],
        "head": recipe[stage]["head"],
        "train": section["train"],
        "parent": changes.pop("parent_key", f"p{seed}") if arm == "spt" else None,
        "seed": seed,
    } | changes.pop("job", {})
    key = digest(job)
    folder = root / f"{stage}-{key}"
    root.mkdir(parents=True, exist_ok=True)
    made = RunFolder(root, folder.name)
    made.create(yaml.safe_dump(recipe, sort_keys=False), {**job, "recipe": "quickstart"}, environment)
    if score is None:
        made.set_status("stopped", "by hand", 75)
    else:
        fields = {"stage": stage, "key": key, "environment": environment, **changes}
        fields |= {"parent": job["parent"]} if arm == "spt" else {}
        fields |= {"test": None, "data": unlabelled()} if arm == "pretrain" else {}
        finish(root, "scratch", seed, score, run=folder.name, **fields)
    if parent is not None:
        RunFolder(root, f"pretrain-{job['parent']}").create(yaml.safe_dump(parent, sort_keys=False), {}, {})
    return folder


def unlabelled() -> dict[str, SplitRecord]:
    return {name: split.model_copy(update={"targets": None}) for name, split in SPLITS.items()}


def keys(entries: tuple[module.Change, ...]) -> list[str]:
    return [entry.key for entry in entries]


def shown(found: RunDiff, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(module.render(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_and_itself(tmp_path):
    a = run(tmp_path / "x")
    b = run(tmp_path / "y")
    found = diff_runs(a, b)
    assert found.sentence == "same computation: keys equal; data equal; code equal; scores equal"
    assert found.same_key and found.warnings == found.notes == ()
    for part in (found.settings, found.stages, found.data, found.code, found.environment, found.training):
        assert part == ()
    assert {score.change for score in found.scores} == {0.0}
    assert {cost.ratio for cost in found.costs if cost.a} == {1.0}


def test_another_seed(tmp_path):
    found = diff_runs(run(tmp_path), run(tmp_path, seed=3, score=0.75))
    assert found.sentence == "same settings, other seed (0, 3); data equal; code equal"
    assert found.same_key is False
    test = next(score for score in found.scores if score.key == "test.accuracy")
    assert (test.a, test.b, test.change) == (0.8, 0.75, pytest.approx(-0.05))
    assert "test accuracy (%) 80.00 75.00 -5.00" in " ".join(shown(found).split())


def test_the_same_key_with_another_score_is_a_warning(tmp_path):
    found = diff_runs(run(tmp_path / "x"), run(tmp_path / "y", score=0.9))
    assert found.sentence.endswith("; scores differ")
    (warning,) = found.warnings
    assert warning.startswith("the same computation gave a different score (test accuracy)")
    assert "WARNING: the same computation gave a different score" in shown(found)


def test_settings_and_what_they_concern(tmp_path):
    changed = recipe_of(
        finetune__train__epochs=8.0,
        pretrain__objective__ratio=0.7,
        encoder__init_std=1.0,
        scratch__train__milestones=[0.2],
    )
    a, b = run(tmp_path), run(tmp_path, recipe=changed)
    found, complete = diff_runs(a, b), diff_runs(a, b, everything=True)
    assert keys(found.settings) == ["encoder.init_std", "scratch.train.milestones"]
    assert (found.hidden, complete.hidden) == (2, 0) and complete.sentence == found.sentence
    assert {(entry.key, entry.concerns) for entry in complete.settings} == {
        ("encoder.init_std", "both"),
        ("pretrain.objective.ratio", "neither"),
        ("finetune.train.epochs", "neither"),
        ("scratch.train.milestones", "both"),
    }
    assert found.sentence == (
        "settings differ in 2 keys (encoder.init_std, scratch.train.milestones); data equal; code equal"
    )
    text, whole = shown(found), shown(complete)
    assert "2 more keys differ that neither run was computed from (--all)" in text
    assert "finetune.train.epochs" not in text
    assert "finetune.train.epochs      4.0     8.0     used by neither" in whole
    assert "scratch.train.milestones   [0.5]   [0.2]" in text
    spt = diff_runs(run(tmp_path, "spt"), run(tmp_path, "spt", recipe=changed), everything=True)
    assert {entry.key: entry.concerns for entry in spt.settings}["finetune.train.epochs"] == "both"
    assert {entry.key: entry.concerns for entry in spt.settings}["scratch.train.milestones"] == "neither"
    assert {entry.key: entry.concerns for entry in spt.settings}["pretrain.objective.ratio"] == "both"


def test_scratch_without_a_section_of_its_own_is_finetune(tmp_path):
    recipe = recipe_of(scratch=False) | {"scratch": None}
    changed = recipe_of(finetune__train__epochs=8.0) | {"scratch": None}
    found = diff_runs(run(tmp_path, recipe=recipe), run(tmp_path, recipe=changed))
    assert [(entry.key, entry.concerns) for entry in found.settings] == [("finetune.train.epochs", "both")]
    assert found.sentence.startswith("settings differ in 1 key (finetune.train.epochs);")


def test_another_model_counts_what_both_have(tmp_path):
    other = recipe_of(model__name="dlr", model__n_heads=None, model__d_state=8)
    found = diff_runs(run(tmp_path), run(tmp_path, recipe=other))
    assert found.sentence.startswith("settings differ in 1 key (model.name), and 2 exist in only one of them; ")
    assert {entry.key: entry.there for entry in found.settings} == {
        "model.name": "both",
        "model.n_heads": "a",
        "model.d_state": "b",
    }
    assert "model.d_state   -             8" in shown(found)


def test_both_arms_of_a_recipe(tmp_path):
    a, b = run(tmp_path), run(tmp_path, "spt", parent=recipe_of())
    found = diff_runs(a, b)
    assert found.settings == ()
    assert [(entry.key, entry.a, entry.b) for entry in found.stages] == [("train.epochs", 5.0, 4.0)]
    assert found.sentence == (
        "different arms, scratch and SPT; same recipe; the arms' own settings differ in 1 key (train.epochs); data "
        "equal; code equal"
    )
    assert found.notes == ("train is scratch.train in A and finetune.train in B",)
    assert {cost.key.partition(".")[0] for cost in found.costs} == {"own", "total"}


def test_pretraining_and_finetuning(tmp_path):
    before = run(tmp_path, "pretrain")
    after = run(tmp_path, "spt", parent_key=before.name.removeprefix("pretrain-"))
    found = diff_runs(before, after)
    assert found.sentence.startswith("different stages, pretraining and SPT; same recipe; the stages' own settings ")
    assert found.data == ()
    assert "only B was given labels; inputs are compared" in found.notes
    assert "B started from the weights of A" in found.notes
    assert {entry.key for entry in found.stages} == {"objective.name", "objective.ratio", "head.mlp", "head.pool"}
    assert [score.change for score in found.scores if score.a is not None and score.b is not None] == [None, None]
    assert "different stages answer different questions" in shown(found)


def test_a_pretraining_run_of_another_recipe(tmp_path):
    other = recipe_of(task__subset_fraction=1.0, pretrain__train__epochs=9.0)
    found = diff_runs(run(tmp_path, "spt", parent=recipe_of()), run(tmp_path, "spt", seed=1, parent=other))
    assert [(entry.key, entry.a, entry.b) for entry in found.settings] == [
        ("pretrain.train.epochs", 4.0, 9.0),
        ("parent.task.subset_fraction", None, 1.0),
    ]
    assert found.settings[1].concerns == "b"
    alone = diff_runs(run(tmp_path / "y", "spt"), run(tmp_path / "y", "spt", parent_key="zz"))
    assert alone.sentence.startswith("same settings, other pretraining run;")
    assert any("pretrain-zz, from which B started, is not beside it" in note for note in alone.notes)


def test_paths_and_contents(tmp_path):
    a = run(tmp_path)
    b = run(tmp_path, seed=1, recipe=recipe_of(task__data="/there"))
    found = diff_runs(a, b, everything=True)
    assert [(entry.key, entry.place) for entry in found.settings] == [("task.data", True)]
    assert found.sentence.startswith("same settings, other seed")
    assert "a path, not part of the key" in shown(found)
    c = run(tmp_path, job={"model": {"name": "transformer@12ab", "d_model": 32, "n_heads": 4}, "data": "v2"})
    found = diff_runs(a, c)
    assert keys(found.settings) == ["model.name, its content", "task, version of its data"]
    assert found.sentence.startswith("settings differ in 2 keys")


def test_data_code_and_machine(tmp_path):
    a = run(tmp_path)
    data = {"train": SPLITS["train"].model_copy(update={"rows": 5, "inputs": "zz"}), "test": SPLITS["test"]}
    environment = ENVIRONMENT | {"commit": "def", "packages": {"torch": "2.9", "numpy": "2.1"}, "device": "H200"}
    own = FINETUNING.model_copy(update={"steps": 80})
    b = run(tmp_path, seed=1, data=data, environment=environment, own=own, stop="patience")
    found = diff_runs(a, b)
    assert found.sentence == (
        "same settings, other seed (0, 1); data differ (train rows and inputs); code differs (commit abc vs def); "
        "environment differs (torch, device)"
    )
    assert keys(found.data) == ["train rows", "train inputs"]
    assert keys(found.environment) == ["torch", "device"]
    assert keys(found.training) == ["best step", "stopped by"]
    steps = next(cost for cost in found.costs if cost.key == "own.steps")
    assert (steps.a, steps.b, steps.ratio) == (100.0, 80.0, 0.8)
    text = shown(found)
    assert "steps 100 80 ×0.80" in " ".join(text.split())
    assert "device seconds" in text  # of one run they are not its seconds
    dirty = ENVIRONMENT | {"commit": "abc+"}
    same = diff_runs(run(tmp_path / "y", environment=dirty), run(tmp_path / "y", seed=1, environment=dirty))
    assert "same commit, but with uncommitted changes" in same.sentence


def test_unfinished_runs_and_missing_files(tmp_path):
    a, b = run(tmp_path), run(tmp_path, seed=1, score=None)
    found = diff_runs(a, b)
    assert found.sentence == (
        "same settings, other seed (0, 1); data unknown until both runs are finished; code equal; "
        "B is not finished (stopped)"
    )
    assert found.b.reason == "by hand"
    assert all(score.b is None for score in found.scores) and all(cost.ratio is None for cost in found.costs)
    assert "stopped: by hand" in shown(found)
    both = diff_runs(b, b)
    assert both.scores == both.costs == () and both.sentence.startswith("same computation: keys equal;")
    for name in ("recipe.yaml", "job.json", "env.json"):
        (a / name).unlink()
    found = diff_runs(a, b)
    assert "settings unknown: a recipe.yaml is missing" in found.sentence
    assert [note.partition(":")[0] for note in found.notes] == ["A has no recipe.yaml", "A has no job.json"]
    found = diff_runs(a, a)
    assert found.sentence.startswith("same computation")


def test_an_edited_job_is_reported(tmp_path):
    a = run(tmp_path)
    job = json.loads((a / "job.json").read_text())
    write_json(a / "job.json", job | {"seed": 7})
    assert "job.json of B does not match its result: a file was edited by hand" in (
        diff_runs(run(tmp_path / "y"), a).warnings
    )
    b = run(tmp_path, seed=2, score=None)
    job = json.loads((b / "job.json").read_text())
    write_json(b / "job.json", job | {"seed": 7})
    assert "job.json of B does not match the key in its folder's name" in diff_runs(a, b).warnings[-1]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("job.json", '{"stage": "fine', "job.json cannot be read as JSON"),
        ("job.json", "[]", "job.json does not hold a JSON object"),
        ("env.json", "\x00", "env.json cannot be read as JSON"),
        ("recipe.yaml", "task: {name", "recipe.yaml, line 2"),
        ("recipe.yaml", "- 1", "recipe.yaml is not a recipe"),
        ("result.json", '{"format": 1, "val": {"accuracy": NaN}}', "result.json cannot be read as JSON"),
        ("result.json", '{"format": 1, "val": {"accuracy": 1e999}}', "1e999 is out of range"),
        ("env.json", '{"command": ["spt"]}', "env.json was not written by a run: command: input should be"),
        ("recipe.yaml", "task: {max_rows: .inf}", "recipe.yaml is not a recipe"),
        ("result.json", '{"format": 99}', "result.json has format 99 of another version of spt"),
        ("result.json", '{"format": 1}', "result.json is not the result of a run: key: missing"),
    ],
)
def test_damaged_files(tmp_path, name, text, words):
    a, b = run(tmp_path), run(tmp_path, seed=1)
    (b / name).write_text(text + "\n")
    with pytest.raises(DataError) as error:
        diff_runs(a, b)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_is_not_a_run(tmp_path):
    a = run(tmp_path)
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "study.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "nothing", "does not exist; name a run folder"),
        (a / "result.json", "is a file, not a folder"),
        (tmp_path / "study", "is a study, not a run; to compare reports"),
        (tmp_path / "empty", "is not a run"),
        (tmp_path, "it holds runs: name one of them"),
    ):
        with pytest.raises(UsageError, match=words):
            diff_runs(a, path)


def test_the_command(tmp_path):
    a, b = run(tmp_path), run(tmp_path, recipe=recipe_of(encoder__init_std=1.0, finetune__train__epochs=9.0))
    done = CliRunner().invoke(app, ["diff", str(a), str(b), "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["sentence"].startswith("settings differ in 1 key (encoder.init_std)")
    assert [entry["key"] for entry in found["settings"]] == ["encoder.init_std"]
    every = json.loads(CliRunner().invoke(app, ["diff", str(a), str(b), "--json", "--all"]).stdout)
    assert [entry["key"] for entry in every["settings"]] == ["encoder.init_std", "finetune.train.epochs"]
    done = CliRunner().invoke(app, ["diff", str(a), str(b)])
    assert done.exit_code == 0 and "encoder.init_std   0.3   1.0" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert CliRunner().invoke(app, ["diff", str(a), str(tmp_path / "no")]).exit_code == 2
