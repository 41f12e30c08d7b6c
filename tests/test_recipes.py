"""Recipes: every shipped one works, every mistake is said in words, with its place and all at once."""

import itertools
import json

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny import RECIPE, changed, load, loaded, recipe_file, run, spt_job

from spt.config.job import Job
from spt.config.load import describe, packaged, read, schema
from spt.config.overrides import apply_overrides, flatten, parse_overrides, split_arguments
from spt.config.plugins import listing
from spt.config.yaml import parse_yaml
from spt.errors import RecipeError, UsageError
from spt.studies.schema import read as read_study
from spt.training.build import build_stage

QUICKSTARTS = [name for name in packaged() if name.startswith("quickstart")]
TRAINED = ["quickstart", "quickstart-dlr", "quickstart-s4d", "quickstart-s5"]  # others: tests/test_every_recipe.py


@pytest.mark.parametrize("name", TRAINED)
def test_a_shipped_recipe_loads_and_builds(name):
    one = load(name)
    for job in (spt_job(one), Job(one, "pretrain", 0), Job(one, "finetune", 0)):
        assert build_stage(job).model.parameter_counts()["total"] > 0
    assert read(name)[1].startswith("# "), "a recipe begins by saying what it is"


@pytest.mark.parametrize("name", TRAINED)
def test_a_shipped_recipe_runs_in_smoke_size(name, tmp_path):
    result = run(spt_job(load(name, smoke=True)), tmp_path)
    assert result.smoke and result.test is not None and result.total.steps <= 16


def values(recipe):
    return parse_yaml(read(recipe)[1], recipe)


def test_every_model_has_a_quickstart_which_differs_in_the_model_alone_or_in_what_was_tuned():
    models = {row.name for row in listing("models")} - {"transformer", "hf"}
    assert {name.removeprefix("quickstart-") for name in QUICKSTARTS} == {"quickstart", *models}
    assert set(read_study("models-digits").study.recipes) == set(QUICKSTARTS)
    tuned = read_study("tune-quickstart").study
    assert set(tuned.recipes) == set(TRAINED)
    plain = values("quickstart-mamba")
    del plain["model"]
    for name in QUICKSTARTS:
        mine = values(name)
        model = mine.pop("model")["name"]
        assert name == "quickstart" or name == f"quickstart-{model}"
        for stage in ("finetune", "scratch") if name in TRAINED else ():
            for setting, grid in tuned.space.items():
                assert mine[stage]["train"][setting] in grid, name
                mine[stage]["train"][setting] = plain[stage]["train"][setting]
        assert mine == plain, name


def test_in_models_digits_all_models_have_the_settings_of_those_that_are_not_tuned():
    (rule,) = read_study("models-digits").study.where
    assert set(rule.recipes) == set(TRAINED)
    plain = flatten(values("quickstart-mamba"))
    tuned = itertools.product(("finetune", "scratch"), read_study("tune-quickstart").study.space)
    places = [f"{stage}.train.{setting}" for stage, setting in tuned]
    assert rule.set == {place: plain[place] for place in places}


PLAIN = """
from spt.models.base import Backbone, BackboneConfig

class Config(BackboneConfig):
    pass

def build(config):
    return Backbone(config, lambda: [])
"""


def problems(tmp_path, **changes):
    with pytest.raises(RecipeError) as caught:
        load(str(recipe_file(tmp_path, **changes)))
    return caught.value.problems


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"modle": {"name": "transformer"}}, "modle", "did you mean model?"),
        ({"pretrain__train__learning_rat": 1}, "pretrain.train.learning_rat", "did you mean learning_rate?"),
        ({"model__n_haeds": 4}, "model.n_haeds", "did you mean n_heads?"),
        ({"task__split_sed": 4}, "task.split_sed", "did you mean split_seed?"),
        ({"pretrain__objective__ration": 0.2}, "pretrain.objective.ration", "did you mean ratio?"),
        ({"model__name": "transfomer"}, "model.name", "did you mean transformer?"),
        ({"task__name": "digit"}, "task.name", "did you mean digits?"),
        ({"pretrain__objective__name": "maskd"}, "pretrain.objective.name", "masked"),
        ({"pretrain__objective": {"name": "supervised"}}, "pretrain.objective.name", "needs labels"),
        ({"finetune__objective": {"name": "masked"}}, "finetune.objective.name", "it asks for no labels"),
        ({"pretrain__train__steps": "many"}, "pretrain.train.steps", "valid integer"),
        ({"pretrain__train__steps": True}, "pretrain.train.steps", "valid integer"),
        ({"pretrain__train__steps": 0}, "pretrain.train.steps", "greater than 0"),
        ({"pretrain__train__learning_rate": -1.0}, "pretrain.train.learning_rate", "greater than 0"),
        ({"pretrain__train__learning_rate": float("inf")}, "pretrain.train.learning_rate", "finite"),
        ({"encoder": {"init_std": float("inf")}}, "encoder.init_std", "finite"),
        ({"pretrain__train__lr": 0.1}, "pretrain.train.lr", "did you mean learning_rate?"),
        ({"pretrain__objective__ratio": 1.5}, "pretrain.objective.ratio", "less than 1"),
        ({"pretrain__train__epochs": 3}, "pretrain.train", "epochs and steps are given"),
        ({"pretrain__train__steps": None}, "pretrain.train", "none is given"),
        ({"pretrain__train__warmup_steps": 9}, "pretrain.train", "more than steps"),
        ({"pretrain__train__precision": False}, "pretrain.train.precision", "fp32"),
        ({"pretrain__head__pool": "mean"}, "pretrain.head.pool", "unknown key"),
        ({"model__n_heads": 3}, "model", "not a multiple"),
        ({"task": "digits"}, "task", "object"),
        ({"task": None}, "task", "object"),
        ({"finetune": {}}, "finetune.train", "missing"),
        ({"scratch": {"train": {"steps": 2}}}, "scratch.train.batch_size", "missing"),
        ({"scratch": {"head": {}}}, "scratch.head", "unknown key"),
        ({"[x]": 1}, "[x]", "unknown key"),  # keys that look like a branch of one of our own unions
        ({"int": 1}, "int", "unknown key"),
        ({"": 1}, '""', "unknown key"),
        ({"pretrain__train__[x]": 1}, "pretrain.train.[x]", "unknown key"),
        ({"pretrain__train__str": 1}, "pretrain.train.str", "unknown key"),
    ],
)
def test_each_mistake_has_its_place_and_words(tmp_path, changes, place, words):
    found = problems(tmp_path, **changes)
    assert any(line.startswith(f"{place}:") and words in line for line in found), found


def test_all_mistakes_come_at_once(tmp_path):
    found = problems(
        tmp_path, model__n_haeds=4, pretrain__train__stepz=3, task__split_seed="x", finetune__train__batch_size=0
    )
    assert len(found) == 4
    assert {line.partition(":")[0] for line in found} == {
        "model.n_haeds", "pretrain.train.stepz", "task.split_seed", "finetune.train.batch_size",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "is not a recipe"),
        ("just words", "is not a recipe"),
        ("a: [1, 2", "line"),
        ("a: 1\na: 2", "the key a is given twice"),
        ("a: &x 1\nb: *x", "aliases"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "aliases"),  # the beginning of a billion laughs
        ("a: {b: 1}\nc:\n  <<: {d: 1}", "merge keys"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: !!bool maybe", "not readable"),
        ("a: !!binary |\n  aGk=", "unknown key"),
        ("a: \x00", "not readable|special characters"),
        ("{" * 5000, "not readable|line"),
        ("task: {1: 2}", "task"),
        ("? [a, b]\n: 1", "plain word"),
    ],
)
def test_broken_or_malicious_yaml(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(str(path))
    assert any(word in str(caught.value) for word in words.split("|")), caught.value


def test_files_that_are_no_recipes(tmp_path):
    for name, make in {
        "missing.yaml": lambda path: None,
        "folder.yaml": lambda path: path.mkdir(),
        "bytes.yaml": lambda path: path.write_bytes(b"\xff\xfe\x00"),
        "huge.yaml": lambda path: path.write_text("a: 1\n" * 300_000),
    }.items():
        make(tmp_path / name)
        with pytest.raises(UsageError):
            load(str(tmp_path / name))
    with pytest.raises(UsageError, match=r"did you mean quickstart\?"):
        load("quikstart")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1E5", 100000.0), ("3", 3), ("-2", -2), (".5", 0.5), ("1.", 1.0), ("no", "no"), ("on", "on"),
     ("true", True), ("null", None), ("~", None), ("010", 10), ("2024-01-01", "2024-01-01"), ("1:30", "1:30"),
     ("", None),      ("[1, a]", [1, "a"]), (".inf", float("inf"))],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text, value):
    assert parse_yaml(text, "test") == value and type(parse_yaml(text, "test")) is type(value)


def test_keys_are_text_so_that_none_is_lost():
    found = parse_yaml("{1: a, 1.0: b, true: c, 0.50: d, yes: e}", "test")
    assert found == {"1": "a", "1.0": "b", "true": "c", "0.5": "d", "yes": "e"}
    for text in ("{1: a, '1': b}", "{a: {0.5: a, .5: b}}"):
        with pytest.raises(UsageError, match="is given twice"):
            parse_yaml(text, "test")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_the_resolved_recipe(number):
    assert parse_yaml(yaml.safe_dump({"a": number}), "test")["a"] == number


def test_overrides(tmp_path):
    path = str(recipe_file(tmp_path))
    one = load(path, ["pretrain.train.learning_rate=1e-4", "model.positions=[rotary, learned]", "scratch.train.steps=3",
                      "scratch.train.batch_size=4", "scratch.train.learning_rate=0.1"])  # fmt: skip
    assert one.recipe.pretrain.train.learning_rate == 1e-4
    assert one.recipe.model.options["positions"] == ["rotary", "learned"]
    assert one.recipe.train("scratch").steps == 3
    assert one.origins["pretrain.train.learning_rate"] == "command line"
    assert one.origins["pretrain.train.steps"] == "recipe"
    assert one.origins["pretrain.train.betas"] == "default"
    assert set(one.origins) == set(flatten(one.recipe.model_dump(mode="json")))


def test_of_a_section_and_its_name_the_later_counts():
    section = "pretrain.objective={name: masked, ratio: 0.3}"
    assert load("quickstart", [section, "pretrain.objective.name=next"]).recipe.pretrain.objective.name == "next"
    assert load("quickstart", ["pretrain.objective.name=next", section]).recipe.pretrain.objective.name == "masked"


def test_a_norm_takes_no_options_of_batch_norm_with_it():
    resolved = load("lra/pathfinder-s5", ["model.norm=layer"])
    assert "norm_momentum" not in resolved.recipe.model.options or resolved.recipe.model.options["norm_momentum"] != 0.1
    assert any("model.norm=layer drops norm_momentum=0.1" in note for note in resolved.notes)
    with pytest.raises(RecipeError, match="norm_momentum has no effect with norm: layer"):
        load("lra/pathfinder-s5", ["model.norm=layer", "model.norm_momentum=0.2"])


def test_an_override_of_one_budget_replaces_the_other(tmp_path):
    one = load(str(recipe_file(tmp_path)), ["pretrain.train.epochs=2"])
    assert one.recipe.pretrain.train.epochs == 2 and one.recipe.pretrain.train.steps is None
    assert any("replaces steps=6" in note for note in one.notes)


def test_another_model_keeps_what_all_models_share(tmp_path):
    other = tmp_path / "plain.py"
    other.write_text(PLAIN)
    one = load(str(recipe_file(tmp_path)), [f"model.name={other}"])
    assert one.recipe.model.options["d_model"] == 16 and "n_heads" not in one.recipe.model.options
    assert any("n_heads" in note and "d_ff" in note for note in one.notes)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.d_modl=3"], "did you mean d_model"),
        (["pretrain.train.steps.x=3"], "is a value in this recipe, not a section"),
        (["pretrain.train.steps=3", "pretrain.train.steps=4"], "given twice"),
        (["pretrain.train.steps=[1"], "the value of pretrain.train.steps"),
        (["nonsense=3"], "unknown key"),
    ],
)
def test_wrong_overrides(tmp_path, overrides, words):
    with pytest.raises(UsageError, match=words):
        load(str(recipe_file(tmp_path)), overrides)


@pytest.mark.parametrize(
    ("text", "value"),
    [("|", "|"), (";", ";"), ("-", "-"), ("#", "#"), (", ", ","), ('"|"', "|"), ("~", None), ("", None), ("-3", -3)],
)
def test_marks_alone_are_text_on_the_command_line(text, value):
    """YAML alone would begin a block, a list or a comment with some of them."""
    assert parse_overrides([f"task.label_separator={text}"]) == {"task.label_separator": value}


def test_a_warm_up_longer_than_the_epochs_is_refused(tmp_path):
    one = loaded(tmp_path, pretrain__train={"epochs": 2, "batch_size": 8, "learning_rate": 0.1, "warmup_steps": 100})
    with pytest.raises(UsageError, match="warmup_steps is 100, but the budget is 6 steps"):
        build_stage(Job(one, "pretrain", 0))


def test_arguments_are_told_apart():
    arguments = ["quickstart", "a.b=c", "./x=1.yaml", "seed=3", "/tmp/a=b.yaml"]
    assert split_arguments(arguments) == (["quickstart", "./x=1.yaml", "/tmp/a=b.yaml"], ["a.b=c", "seed=3"])


def test_the_resolved_recipe_is_a_recipe_and_means_the_same(tmp_path):
    one = loaded(tmp_path, finetune__head={"pool": "max", "mlp": True})
    path = tmp_path / "resolved.yaml"
    path.write_text(one.to_yaml())
    again = load(str(path))
    assert again.recipe == one.recipe
    assert spt_job(again).key == spt_job(one).key


def test_keys_change_with_the_science_and_nothing_else(tmp_path):
    base = spt_job(loaded(tmp_path))
    assert base.key == spt_job(loaded(tmp_path, model={**RECIPE["model"], "dropout": 0.0})).key  # a default written out
    renamed = tmp_path / "other-name.yaml"
    renamed.write_text(yaml.safe_dump(RECIPE))
    assert spt_job(load(str(renamed))).key == base.key
    keys = {base.key, spt_job(loaded(tmp_path), seed=1).key, Job(loaded(tmp_path), "finetune", 0).key}
    settings = base.settings()
    assert not {"init", "step_times"} & settings["encoder"].keys()  # of before there were others
    assert not {"init", "mlp_activation"} & settings["head"].keys()
    for change in (
        {"task__split_seed": 1},
        {"model__dropout": 0.1},
        {"encoder": {"init_std": 0.5}},
        {"encoder": {"hidden_std": 0.5}},
        {"encoder": {"init": "flax"}},
        {"finetune__head": {"init": "flax"}},
        {"finetune__head": {"mlp": True}},
        {"finetune__head": {"mlp": True, "mlp_activation": "tanh"}},
        {"pretrain__objective__ratio": 0.4},
        {"pretrain__train__learning_rate": 0.02},
        {"finetune__head": {"pool": "max"}},
        {"finetune__train__batch_size": 4},
    ):
        keys.add(spt_job(loaded(tmp_path, **change)).key)
    assert len(keys) == 15
    # what only the other stage or the other arm does, leaves a run alone
    scratch = {"scratch": {"train": {"steps": 9, "batch_size": 8, "learning_rate": 0.01}}}
    assert spt_job(loaded(tmp_path, **scratch)).key == base.key
    one, other = (Job(loaded(tmp_path, **c), "pretrain", 0) for c in ({}, {"finetune__train__batch_size": 4}))
    assert one.key == other.key


def test_a_users_file_is_known_by_its_content(tmp_path):
    text = PLAIN
    keys = set()
    for folder, content in (("a", text), ("b", text), ("c", text + "# edited\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(content)
        one = load(str(recipe_file(tmp_path / folder, model={"name": "./mine.py", "d_model": 16})))
        assert one.identities["model"].startswith("mine@")
        keys.add(spt_job(one).key)
    assert len(keys) == 2  # the folder does not matter, the content does


def test_schema_describes_the_shipped_recipes():
    found = schema()
    assert found["properties"].keys() >= {"task", "model", "pretrain", "finetune", "scratch", "encoder"}
    names = [option["properties"]["name"].get("const") for option in found["properties"]["model"]["anyOf"]]
    assert "transformer" in names
    json.dumps(found)


def test_schema_agrees_with_the_recipes(tmp_path):
    checker = jsonschema.Draft202012Validator(schema())
    for text in packaged().values():
        checker.validate(parse_yaml(text, "packaged"))
    checker.validate(RECIPE)
    assert list(checker.iter_errors(changed(RECIPE, pretrain__train__stepz=3)))
    assert list(checker.iter_errors(changed(RECIPE, model__n_haeds=3)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# One line.\n# Run: spt compare x\nmodel: {}\n", "One line."),
        ("# A task of 3.5 steps. A model, with\n# its options. More.\nmodel: {}\n",
         "A task of 3.5 steps. A model, with its options."),
        (f"# A task. A\n# {'very ' * 40}long sentence.\n", "A task."),
        (f"# A\n# {'very ' * 40}long sentence. More.\n", f"A {'very ' * 40}long sentence."),
        ("# No end\nmodel: {}\n", "No end"),
        ("model: {} # nothing\n", ""),
    ],
)  # fmt: skip
def test_a_description_is_of_whole_sentences(text, told):
    assert describe(text) == told


def test_the_order_of_changes_plays_no_part():
    changes = {"model.options.num_attention_heads": 8, "model.name": "hf", "model.architecture": "gpt_neox"}
    found = []
    for keys in itertools.permutations(changes):
        raw = {"model": {"name": "other", "d_model": 8, "options": {"own": 1}}}
        apply_overrides(raw, {key: changes[key] for key in keys})
        found.append(raw)
    assert (
        found
        == [{"model": {"name": "hf", "d_model": 8, "architecture": "gpt_neox", "options": {"num_attention_heads": 8}}}]
        * 6
    )


def test_budgets_replace_each_other_where_training_is_set_up():
    raw = {"task": {"name": "./mine.py", "examples": 5}, "finetune": {"train": {"epochs": 5}}}
    notes = apply_overrides(raw, {"task.steps": 100, "finetune.train.steps": 7})
    assert raw == {"task": {"name": "./mine.py", "examples": 5, "steps": 100}, "finetune": {"train": {"steps": 7}}}
    assert notes == ["finetune.train.steps=7 replaces epochs=5"]
