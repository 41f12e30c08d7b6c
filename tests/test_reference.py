"""Conventions of the published code as options, and the recipes of the papers' tables."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import load, loaded, own_task, run, spt_job
from typer.testing import CliRunner, Result

from spt.analysis.full_size import full_network, full_task
from spt.config.job import Job
from spt.config.load import load as load_recipe
from spt.config.load import packaged, resolve
from spt.config.recipe import HeadConfig, Recipe, StepHeadConfig, Train
from spt.config.yaml import parse_yaml
from spt.errors import RecipeError, UsageError
from spt.models.base import Context
from spt.report.published_settings import PARAMETERS, load_published_settings
from spt.runs.folder import RunFolder
from spt.studies.schema import packaged as packaged_studies
from spt.studies.schema import read as read_study
from spt.tasks.base import Tokens, Values
from spt.tasks.speech import SECOND, TEN
from spt.training.build import build_stage
from spt.training.network import Head, SequenceModel, output_of_head, published_count
from spt.training.objectives import OBJECTIVES, Output
from spt.training.optimizer import factor, reduces_rate, set_rates
from spt_cli import app

SMALL = {name: text for name, text in packaged().items() if name.startswith("small/")}
DIAGNOSTIC = {name: text for name, text in packaged().items() if name.startswith("recall/")}
ROWS = {name: text for name, text in packaged().items() if "/" in name and name not in SMALL | DIAGNOSTIC}
REFERENCE = [name for name in ROWS if name.startswith("reference/")]


def resolved(name: str) -> Recipe:
    return resolve(parse_yaml(ROWS[name], name), name)[0]


def train(**options):
    return Train(**{"epochs": 1, "batch_size": 4, "learning_rate": 0.1, **options})


# ------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("patience", [0, 1, 3])
def test_a_plateau_is_that_of_torch(patience):
    """The rate after every evaluation, against ReduceLROnPlateau over a run that improves, stalls and improves."""
    losses = [5, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2]
    options = train(schedule="plateau", plateau_factor=0.2, plateau_patience=patience)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.2, patience=patience, threshold=0.0, threshold_mode="abs", eps=0.0
    )
    best, waited, reductions = 9.0, 0, 0
    for step, loss in enumerate(losses):
        theirs.step(loss)
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        reductions += reduces_rate(waited, options)
        ours = 0.1 * factor(step, len(losses), options, reductions)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"]), f"evaluation {step}"
    assert reductions >= 2
    assert not reduces_rate(waited=patience + 1, train=train())


def test_a_plateau_after_warm_up():
    options = train(schedule="plateau", plateau_factor=0.5, warmup_steps=4)
    assert [factor(step, 100, options) for step in (0, 3, 4, 99)] == [0.25, 1, 1, 1]
    assert [factor(step, 100, options, reductions=2) for step in (4, 99)] == [0.25, 0.25]
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "peak": 0.8}], lr=0.8)
    set_rates(optimizer, 50, 100, options, reductions=3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_cosine_from_the_start_is_that_of_s5():
    """In its code a cosine over the steps after the warm-up, whose argument counts the warm-up's steps too."""
    options, warmup, total = train(schedule="cosine", cosine_from="start", warmup_steps=20), 20, 100
    for step in range(total):
        theirs = (step + 1) / warmup if step < warmup else 0.5 * (1 + np.cos(np.pi * min(step, 80) / 80))
        assert factor(step, total, options) == pytest.approx(theirs, abs=1e-12)
    assert factor(99, total, options) == factor(80, total, options) == 0.0 < factor(79, total, options)
    plain = train(schedule="cosine", warmup_steps=20)
    assert [factor(step, total, plain) for step in (10, 20, 60)] == [0.55, 1.0, pytest.approx(0.5)]


def test_steps_fall_at_their_milestones():
    """The published BIDMC schedule: half the rate at 100, 200, 300 and 400 of 500 epochs."""
    options = train(schedule="steps", milestones=(0.2, 0.4, 0.6, 0.8), step_factor=0.5)
    rates = [factor(step, 5000, options) for step in range(5000)]
    assert [rates.index(rate) for rate in (1.0, 0.5, 0.25, 0.125, 0.0625)] == [0, 1000, 2000, 3000, 4000]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plateau_factor": 0.5}, "plateau_factor has no effect under schedule constant"),
        ({"schedule": "cosine", "plateau_patience": 3}, "plateau_patience has no effect under schedule cosine"),
        ({"schedule": "plateau", "milestones": [0.5]}, "milestones has no effect under schedule plateau"),
        ({"step_factor": 0.1}, "step_factor has no effect"),
        ({"cosine_from": "start"}, "cosine_from has no effect under schedule constant"),
        ({"cosine_steps": 9}, "cosine_steps has no effect under schedule constant"),
        ({"schedule": "cosine", "cosine_steps": 5}, "cosine_steps 5 is less than steps 6"),
        ({"schedule": "cosine", "cosine_steps": 9, "warmup_steps": 9, "steps": 9}, "warmup_steps 9 leaves none"),
        ({"schedule": "steps"}, "needs milestones"),
        ({"schedule": "steps", "milestones": [0.5, 0.5]}, "must rise"),
        ({"schedule": "steps", "milestones": [0.5, 100]}, "lie in (0, 1)"),
        ({"schedule": "plateau", "patience": 11}, "patience 11 stops the run before"),
        ({"schedule": "plateau", "plateau_factor": 1.5}, "less than 1"),
        ({"schedule": "plato"}, "plateau"),
        ({"metric_average": "approximate"}, "per_batch"),
        ({"validation_masks": "none"}, "redrawn"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, options, words):
    base = {"steps": 6, "batch_size": 8, "learning_rate": 0.01}
    with pytest.raises(RecipeError) as caught:
        loaded(tmp_path, pretrain__train={**base, **options})
    assert any("pretrain.train" in line and words in line for line in caught.value.problems), caught.value.problems


def test_a_plateau_schedule_in_a_run(tmp_path, monkeypatch):
    """The rate falls when validation stops improving; cut short and resumed, it falls at the same steps."""
    settings = {
        "steps": 14, "batch_size": 8, "learning_rate": 1.0, "evaluate_every": 2,
        "schedule": "plateau", "plateau_patience": 0, "plateau_factor": 0.5,
    }  # fmt: skip
    job = Job(own_task(tmp_path, scratch={"train": settings}), "finetune", 0)

    def rates(root):
        lines = [line for line in RunFolder(root, job.name).metrics() if line["kind"] == "train"]
        return [line["learning_rate"] for line in lines]

    run(job, tmp_path / "whole")
    whole = rates(tmp_path / "whole")
    assert whole == sorted(whole, reverse=True) and whole[0] == 1.0 and whole[-1] <= 0.25

    def dies(optimizer, step, total, train, reductions):
        set_rates(optimizer, step, total, train, reductions)
        if reductions == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("spt.training.loop.set_rates", dies)
        run(job, tmp_path / "parts", save_every=0.0)
    run(job, tmp_path / "parts")
    assert rates(tmp_path / "parts") == whole


# --------------------------------------------------------------------------------------------------- identity head


def test_an_identity_head_scores_by_the_last_norm():
    config = StepHeadConfig(identity=True)
    output = output_of_head(Output("cross_entropy", True, 1, 9), 16, config)
    assert output == Output("cross_entropy", True, 1, 16)
    head, x = Head(16, output, config), torch.randn(2, 5, 16)
    context = Context(torch.ones(2, 5, dtype=torch.bool), padded=False)
    assert torch.equal(head(x, context), x) and not list(head.parameters()) and head.flops(7).total == 0.0
    plain = Output("cross_entropy", True, 1, 9)
    assert output_of_head(plain, 16, StepHeadConfig()) == plain == output_of_head(plain, 16, HeadConfig())


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (Output("cross_entropy", True, 1, 17), "d_model = 16 numbers, fewer than the 17"),
        (Output("cross_entropy", True, 3, 5), "3 x cross_entropy"),
        (Output("l1", True, 1), "1 x l1"),
    ],
)
def test_an_identity_head_that_cannot_be(output, words):
    with pytest.raises(UsageError, match=f"pretrain.head.identity: .*{words}.*identity=false"):
        output_of_head(output, 16, StepHeadConfig(identity=True))


def test_identity_is_for_steps_and_has_no_layer(tmp_path):
    for place, head, words in (
        ("pretrain", {"identity": True, "mlp": True}, "pretrain.head: identity is no head at all"),
        ("finetune", {"identity": True}, "finetune.head.identity: unknown key"),
    ):
        with pytest.raises(RecipeError, match=words):
            loaded(tmp_path, **{f"{place}__head": head})


def test_pretraining_without_a_head_and_a_new_one_afterwards(tmp_path):
    one = own_task(tmp_path, pretrain__head={"identity": True}, model__d_model=16)
    pretrain = build_stage(Job(one, "pretrain", 0))
    assert pretrain.output.classes == 16 and pretrain.model.parameter_counts()["head"] == 0
    result = run(spt_job(one), tmp_path / "runs")
    assert result.parameters["head"] > 0 and result.test is not None


# -------------------------------------------------------------------------------------------- through the pipeline


def test_a_model_that_looks_ahead_cannot_predict_the_next_step(tmp_path):
    with pytest.raises(UsageError, match=r"this model looks ahead; set model\.causal=true"):
        build_stage(Job(loaded(tmp_path, pretrain__objective={"name": "next"}), "pretrain", 0))
    build_stage(Job(loaded(tmp_path, pretrain__objective={"name": "next"}, model__causal=True), "pretrain", 0))


CONVENTIONS = {
    "model": {"name": "transformer", "d_model": 16, "n_layers": 1, "n_heads": 2, "positions": "sinusoidal"},
    "model__mask_padding": False,
    "model__tied_projections": True,
}


@pytest.mark.parametrize("kind", ["tokens", "bytes"])
@pytest.mark.parametrize("objective", ["masked", "next"])
def test_every_convention_at_once(tmp_path, kind, objective):
    """Tokens without a head, or two channels of 256 levels; sequences of different lengths; both objectives."""
    settings = {
        "steps": 6, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 3, "weight_decay_on": "all",
        "weight_decay": 0.1, "max_grad_norm": None, "drop_last": True, "metric_average": "per_batch",
    }  # fmt: skip
    redrawn = {"validation_masks": "redrawn"} if objective == "masked" else {}
    one = own_task(
        tmp_path,
        **CONVENTIONS,
        model__causal=objective == "next",
        task={"name": "./toy.py", "kind": kind},
        pretrain={
            "objective": {"name": objective, "loss": "cross_entropy"},
            "head": {"identity": kind == "tokens"},
            "train": {**settings, **redrawn},
        },
        finetune={"train": settings},
    )
    result = run(spt_job(one), tmp_path / "runs")
    assert result.test is not None
    eighths = result.test["accuracy"] * 16  # 19 test rows: two batches of 8, and three rows left out
    assert eighths == pytest.approx(round(eighths))
    pretrained = RunFolder(tmp_path / "runs", Job(one, "pretrain", 0).name).result()
    assert pretrained is not None and 0 < pretrained.val["loss"] < 10


@pytest.mark.parametrize("loss", ["auto", "l1"])
@pytest.mark.parametrize("scale", ["standard", "range", "reference"])
def test_scaled_targets_are_predicted_in_their_own_units(tmp_path, scale, loss):
    import pyarrow.parquet as pq

    settings = {"steps": 40, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 20}
    one = own_task(
        tmp_path,
        task={"name": "./toy.py", "kind": "values", "target": "reals"},
        finetune={"objective": {"name": "supervised", "scale": scale, "loss": loss}, "train": settings},
    )
    job = Job(one, "finetune", 0)
    result = run(job, tmp_path / "runs")
    table = pq.read_table(tmp_path / "runs" / job.name / "predictions.parquet").to_pydict()
    errors = torch.tensor([[table[f"prediction_{k}"][i] - table[f"target_{k}"][i] for k in (0, 1)] for i in range(19)])
    assert result.test["mae"] == pytest.approx(float(errors.abs().mean()), rel=1e-5)
    assert result.test["mse"] == pytest.approx(float(errors.square().mean()), rel=1e-5)
    assert result.test["loss"] != pytest.approx(result.test["mae" if loss == "l1" else "mse"], rel=0.1)


# --------------------------------------------------------------------------------------------------------- recipes

SOURCES = (
    "Amos, Berant, Gupta 2024, ",
    "Gupta, Mehta, Berant 2022, Table",
    "Smith, Warrington, Linderman 2023, ",
)
PUBLISHED = r"Published (accuracy|R²): SPT (none|[\d.]+\d)|No pretrained \w+ is published"


def header(name: str) -> str:
    return re.sub(r"\n# ", " ", ROWS[name].partition("\ntask:")[0])


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_complete_and_says_what_it_is(name):
    """Without data: every name and option is known, and the header names source, numbers and choices."""
    recipe, told = resolved(name), header(name)
    assert f"Run: spt compare {name} " in told
    assert any(source in told for source in SOURCES) and "ours" in told.lower()
    assert re.search(PUBLISHED, told)
    options = recipe.model.options
    objective = OBJECTIVES[recipe.pretrain.objective.name]
    assert options["causal"] == objective.causal or recipe.task.name == "books"  # the next token is the task itself
    for stage in ("pretrain", "finetune"):
        settings = recipe.train(stage)
        conventions = (settings.drop_last, settings.metric_average, settings.max_grad_norm)
        assert conventions == ((True, "per_batch", None) if name in REFERENCE else (False, "exact", 1.0))
    attends = recipe.model.name == "transformer"
    assert options.get("tied_projections", False) == (name in REFERENCE and attends)
    pixels = name in REFERENCE and recipe.pretrain.objective.options["loss"] == "l1"
    assert recipe.pretrain.train.select_by == ("r2" if pixels else "auto")  # the paper's choice of checkpoint
    assert (recipe.pretrain.train.validation_masks == "redrawn") == (name in REFERENCE and objective.hides)
    assert recipe.pretrain.head.identity == (name in REFERENCE and recipe.task.name in ("text", "retrieval"))
    padded = recipe.task.name in ("text", "retrieval", "listops")
    seen = options.get("mask_padding", True) is False or options["norm"] == "batch_padded"
    assert seen == (name in REFERENCE and padded and objective.hides)
    if not name.startswith(("reference/", "lra/")):
        return
    _, _, body = ROWS[name].partition("\ntask:")
    for option in (
        "tied_projections",
        "identity",
        "drop_last",
        "metric_average",
        "select_by",
        "redrawn",
        "mask_padding",
        "weight_decay_on: all",
    ):
        assert (option in told) == (option in body), f"{option} is set, but not told, or the reverse"


@pytest.mark.parametrize("name", SMALL)
def test_a_small_recipe_is_complete_and_claims_no_published_number(name):
    resolve(parse_yaml(SMALL[name], name), name)
    told = re.sub(r"\n# ", " ", SMALL[name].partition("\ntask:")[0])
    assert f"Run: spt compare small/{name.partition('/')[2]} " in told and "ublished number" in told
    assert not re.search(PUBLISHED, told)


@pytest.mark.parametrize("name", DIAGNOSTIC)
def test_a_diagnostic_is_complete_and_builds_at_full_size(name):
    recipe = resolve(parse_yaml(DIAGNOSTIC[name], name), name)[0]
    told = re.sub(r"\n# ", " ", DIAGNOSTIC[name].partition("\ntask:")[0])
    assert f"Run: spt compare {name}" in told and "Source: " in told and "Ours: " in told
    assert whole_network(recipe).parameter_counts()["total"] > 1000
    assert recipe.model.options["causal"] and recipe.train("pretrain") == recipe.train("finetune")


def asked(recipe: Recipe) -> tuple[Tokens | Values, Output, int]:
    """Input, answer and longest sequence of a task of full size, without its data."""
    full = full_task(recipe.task)
    return full.input, full.output, full.length


STATED = re.compile(r"\(([\d.]+ [MK]) parameters\)")
ALSO = {"lra/image-transformer": "3.232 M", "lra/text-transformer": "12.95 M"}  # headers without a number
SETTINGS = load_published_settings().recipes


def whole_network(recipe: Recipe) -> SequenceModel:
    """A recipe's finetuned network at full size, on the meta device."""
    return full_network(full_task(recipe.task), recipe.model, recipe.encoder, recipe.finetune.head)


@pytest.mark.parametrize("name", [name for name in ROWS if "pythia" not in name])
def test_a_row_builds_at_full_size_with_the_parameters_it_states(name):
    """Numbers are those of the papers and of the published configurations; a header that has one has the file's."""
    recipe = resolved(name)
    model, told, entry = whole_network(recipe), STATED.search(header(name)), SETTINGS.get(name)
    assert model.flops(asked(recipe)[2]).forward > 0
    stated = entry.parameters if entry else told[1] if told else ALSO.get(name)
    if entry and told:
        assert told[1] == stated, "published_settings.yaml has another number"
    if stated is None:
        return
    printed, _, unit = stated.partition(" ")
    digits = len(printed.partition(".")[2])
    fits = abs(published_count(model) / {"M": 1e6, "K": 1e3}[unit] - float(printed)) <= 0.51 * 10**-digits
    assert fits != (entry is not None and PARAMETERS in entry.departs), published_count(model)


def shown(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["show", *arguments])


def test_a_row_is_shown_without_its_data(tmp_path, monkeypatch):
    """Its values, its parameters beside the published ones, and how long each arm trains."""
    monkeypatch.setenv("SPT_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path))
    found = json.loads(shown("lra/retrieval-transformer", "--no-data", "--json").stdout)
    assert found["published parameters"] == {"printed": "1.268 M", "ours": found["parameters"]["total"] - 128}
    assert {"key": "model.d_model", "value": 128, "origin": "recipe"} in found["values"]
    assert "pretrains for 147,104 updates (32 epochs)" in found["budgets"]  # 4,597 an epoch: batches of 32 pairs
    text = shown("lra/retrieval-transformer", "--no-data").stdout
    assert "published 1.268 M" in " ".join(text.split()) and "scratch trains for" in text
    assert not any(tmp_path.iterdir())


def test_published_parameters_are_those_of_the_published_network():
    changed = json.loads(shown("lra/retrieval-transformer", "model.d_ff=64", "--no-data", "--json").stdout)
    assert changed["published parameters"] is None and changed["parameters"]["total"] < 1_200_000
    trained = json.loads(shown("lra/retrieval-transformer", "--no-data", "--json", "finetune.train.epochs=1").stdout)
    assert trained["published parameters"] is not None and "finetunes for 9,193 updates (1 epoch)" in trained["budgets"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["small/image"], "is for the papers' recipes"),
        (["lra/pathx-s4", "task.resolution=32"], "task.resolution is changed"),
        (["lra/pathx-s4", "--smoke"], "is changed"),
    ],
)
def test_without_data_only_what_is_known_is_shown(arguments, told):
    done = shown(*arguments, "--no-data")
    assert done.exit_code == 2 and told in done.stderr


STUDIES = [name for name in packaged_studies() if read_study(name).study.kind == "variants"]


QUICK = ("spt-table-2", "dlr-table-1", "s5-table-3")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in STUDIES]
)
def test_every_variant_of_a_packaged_study_builds_at_full_size(name):
    """Without the weights that a checkpoint would bring."""
    study = read_study(name).study
    for recipe in study.recipes:
        for level in study.levels(recipe):
            one = load_recipe(recipe, changes=study.changes_of(recipe, level)).recipe
            if one.model.options.get("checkpoint") is None:
                assert whole_network(one).parameter_counts()["total"] > 1000, (recipe, level)


def stand_in(cache, monkeypatch, **sizes):
    """Random weights where the hub's client would keep those of Pythia 70M."""
    import huggingface_hub
    from transformers import GPTNeoXConfig, GPTNeoXModel

    own = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
    place = cache / "models--EleutherAI--pythia-70m-deduped"
    GPTNeoXModel(GPTNeoXConfig(**{**own, **sizes}, vocab_size=8)).save_pretrained(place / "snapshots" / ("0" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))


def papers(folder: Path) -> None:
    """Pairs in the form of the archive's Retrieval files, whose texts are nowhere to be had in small."""
    (folder / "aan").mkdir(parents=True)
    for part, n in (("train", 20), ("eval", 8), ("test", 8)):
        rows = [f'{i % 2}.0\t{i}\t{i + 1}\tof "{part} {i}" on words\t{"all of it " * (i + 1)}{part}' for i in range(n)]
        (folder / "aan" / f"new_aan_pairs.{part}.tsv").write_text("\n".join(rows) + "\n")


def ten_words(folder: Path) -> None:
    """Noise for the ten words of Speech Commands, of which the data folder has other ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "speech_commands").mkdir(parents=True)
    spoken = [word for word in TEN for _ in range(8)]
    noise = np.random.default_rng(0).integers(-9000, 9000, (len(spoken), SECOND), dtype=np.int16)
    columns = {"audio": list(noise), "word": spoken, "file": [f"{word}/{i}.wav" for i, word in enumerate(spoken)]}
    pq.write_table(pa.table(columns), folder / "speech_commands" / "train.parquet")


STAND_INS = {  # by how recipes begin: what makes their data in small
    "lra/retrieval": papers,
    "reference/retrieval": papers,
    "speech/sc10": ten_words,
}


def data_of(name: str, folder: Path, data_dir: Path) -> Path:
    """The data folder of a recipe: the tests' own, or one made here."""
    for beginning, make in STAND_INS.items():
        if name.startswith(beginning):
            make(folder / "data")
            return folder / "data"
    return data_dir


def goes(name: str, folder: Path) -> None:
    """Both stages, small, on a few rows."""
    result = run(spt_job(load(name, smoke=True)), folder)
    assert result.smoke and result.test is not None


@pytest.mark.parametrize(
    "name",
    ["lra/listops-transformer", "skills/select-attention",
     *(pytest.param(name, marks=pytest.mark.slow) for name in (
         "lra/pathx-transformer", "lra/pathfinder-s4", "skills/reverse-dlr", "skills/subtrees-dlr", "pendulum/s5",
         "skills/segmentation-128-dlr"))],
)  # fmt: skip
def test_a_row_of_a_generated_task_runs_in_smoke_size(name, tmp_path, monkeypatch):
    monkeypatch.setenv("SPT_DATA_DIR", str(tmp_path / "nothing"))
    goes(name, tmp_path)


def test_a_row_of_pairs_runs_in_smoke_size(tmp_path, monkeypatch):
    papers(tmp_path / "data")
    monkeypatch.setenv("SPT_DATA_DIR", str(tmp_path / "data"))
    goes("lra/retrieval-transformer", tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "bidmc/hr-s4",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("speech/sc35-transformer-causal", "books/dlr")),
    ],
)
def test_a_row_of_real_data_runs_in_smoke_size(name, tmp_path, data_dir, monkeypatch):
    monkeypatch.setenv("SPT_DATA_DIR", str(data_dir))
    goes(name, tmp_path)
