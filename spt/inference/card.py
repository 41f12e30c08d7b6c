"""The model card of an exported folder: Markdown with the front matter that the Hugging Face hub reads."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spt.config.yaml import dump_yaml
from spt.inference.trained_model import TrainedModel
from spt.runs.result import NOT_SELF_PRETRAINING
from spt.tasks.base import Classes, Labels, Reals, Tokens, Values

SHOWN = 20  # classes by name


def model_card(model: TrainedModel, name: str) -> str:
    """README.md of the folder `name`."""
    about = model.about
    front = dump_yaml(_front_matter(model))
    smoke = ["**From a smoke run: a few steps to show that it runs. Its scores and its answers mean nothing.**", ""]
    lines = [
        f"# {about['model']}, {'pretrained' if model.target is None else 'trained'} on {about['task']}",
        "",
        *(smoke if about["smoke"] else []),
        *_what_it_does(model),
        "",
        "## Use",
        "",
        *_use(model, name),
        "",
        "## How it was trained",
        "",
        *_training(about),
        "",
        "## Scores",
        "",
        *_scores(about),
        "",
        "## Intended use and limits",
        "",
        *_limits(model),
        "",
    ]
    return f"---\n{front}---\n\n" + "\n".join(lines)


def _front_matter(model: TrainedModel) -> dict[str, Any]:
    about, test = model.about, model.about["test"] or {}
    kind = "feature-extraction" if model.target is None else "sequence-modelling"
    front: dict[str, Any] = {
        "library_name": "spt",
        "license": "other",
        "license_name": "not-stated",
        "tags": ["spt", "self-pretraining", "long-sequences", str(about["model"]), kind],
    }
    if test and not about["smoke"]:
        metrics = [{"type": metric, "name": f"test {metric}", "value": score} for metric, score in _known(test)]
        task, data = (
            {"type": kind, "name": about["task"]},
            {"type": about["task"], "name": about["task"], "split": "test"},
        )
        front |= {
            "metrics": [metric for metric, _ in _known(test)],
            "model-index": [
                {"name": about["recipe"], "results": [{"task": task, "dataset": data, "metrics": metrics}]}
            ],
        }
    return front


def _what_it_does(model: TrainedModel) -> Iterator[str]:
    about = model.about
    unit = "pairs of sequences" if model.sequences == 2 else "sequences"
    if isinstance(model.input, Tokens):
        what = f"tokens, of which there are {model.input.vocab:,}"
    else:
        what = f"{model.input.channels} number{'s' * (model.input.channels != 1)} a step"
    yield f"It takes {unit} of {what}, in training up to {model.length:,} steps long."
    each = "every step" if model.output.per_step else "each pair" if model.sequences == 2 else "each sequence"
    if model.target is None:
        yield "It was pretrained without labels, so it answers no question: its features (`embed`) are of use."
    elif isinstance(model.target, Classes):
        names = ", ".join(f"`{name}`" for name in model.classes[:SHOWN])
        more = ", …" if len(model.classes) > SHOWN else ""
        yield f"Of {each} it tells one of {model.target.count:,} classes{': ' * bool(names)}{names}{more}."
    elif isinstance(model.target, Labels):
        labels = model.classes or tuple(map(str, range(model.target.count)))
        names = ", ".join(f"`{name}`" for name in labels[:SHOWN]) + ", …" * (len(labels) > SHOWN)
        yield f"Of {each} it tells of each of {len(labels):,} labels whether it holds: {names}."
    else:
        yield f"Of {each} it tells {model.output.size} number{'s' * (model.output.size != 1)}."
    if isinstance(model.input, Values) and model.input.missing:
        yield "Values may be missing: NaN in an array, an empty cell in a table."
    if static := model.reading.get("static"):
        yield f"Beside each sequence it takes {', '.join(column['name'] for column in static)}."
    counts = about["parameters"]
    yield f"It has {counts.get('total', 0):,} parameters."


def _use(model: TrainedModel, name: str) -> Iterator[str]:
    trust = ", trust_code=True" if model.architecture.model.name.endswith(".py") else ""
    yield "```python"
    yield "import spt"
    yield ""
    yield f'model = spt.load_model("{name}"{trust})'
    yield "model.embed(rows)" if model.target is None else "model.predict(rows)"
    yield "```"
    yield ""
    yield f"It needs `pip install selfpretrain` (it was made with spt {model.about['spt']}), nothing else."
    if trust:
        yield "Its network is code of its author's, `model.py`: read it before you trust it."
    if program := model.about.get("program"):
        yield ""
        kind = "tokens" if isinstance(model.input, Tokens) else "values, less their mean and over their deviation"
        if isinstance(model.input, Values) and model.input.missing:
            kind += ", NaN where one is missing"
        yield (
            f"`program.pt2` is the network as a `torch.export` program of `x` ({kind}) and `valid` (which steps are no "
            f"padding): batches of {program['batch']} sequences, {program['length']} steps"
            f"{', shorter ones padded behind' if program['padding'] else ', none of them padding'}."
        )
        if isinstance(model.target, Reals) and model.output.scale:
            scale, shift = (", ".join(map(_number, each)) for each in (model.output.scale, model.output.shift))
            yield f"Its answers times {scale}, plus {shift}, are in the target's units."


def _training(about: Mapping[str, Any]) -> Iterator[str]:
    rows = about["rows"]
    yield (
        f"Task {about['task']}, recipe {about['recipe']}, seed {about['seed']}: {rows.get('train', 0):,} training "
        f"rows, {rows.get('val', 0):,} of validation, {rows.get('test', 0):,} of test."
    )
    yield ""
    for stage in about["training"]:
        budget = (
            f"{stage['steps']:,} optimiser steps, {stage['examples']:,} examples"
            if stage["steps"]
            else "its run is not here"
        )
        yield (
            f"- {stage['stage']}, objective {stage['objective']}: {budget}; batch size {stage['batch_size']}, learning "
            f"rate {stage['learning_rate']:g}, weight decay {stage['weight_decay']:g}, {stage['precision']}."
        )
    if about["stage"] == "finetune" and about["arm"] == "scratch":
        yield "- It started from random weights, without pretraining."
    elif about["stage"] == "finetune" and any(note.startswith(NOT_SELF_PRETRAINING) for note in about["notes"]):
        yield "- It was pretrained without labels, on more than its training rows (see below), then finetuned."
    elif about["stage"] == "finetune":
        yield "- It was pretrained on the training rows' own inputs, without labels, then finetuned (self-pretraining)."
    yield f"- The weights are those of step {about['best_step']:,}, selected on validation by {about['selected_by']}."


def _scores(about: Mapping[str, Any]) -> Iterator[str]:
    val, test = dict(_known(about["val"])), dict(_known(about["test"] or {}))
    yield f"| metric, seed {about['seed']} | validation | test |"
    yield "|---|---|---|"
    for metric in dict.fromkeys((*test, *val)):
        yield f"| {metric} | {_number(val.get(metric))} | {_number(test.get(metric))} |"
    seeds = about.get("seeds") or {}
    if len(seeds) > 1:
        scores = np.array([*seeds.values()])
        yield ""
        listed = ", ".join(f"{_number(score)} (seed {seed})" for seed, score in seeds.items())
        yield (
            f"Test {about['metric']} of all {len(seeds)} seeds of this recipe: {listed}; mean "
            f"{_number(scores.mean())}, standard deviation {_number(scores.std(ddof=1))}. This model is one of them, "
            "whichever of them is the best on test."
        )
    elif seeds:
        yield ""
        yield "One seed: how much the score would differ with another one is not known."


def _limits(model: TrainedModel) -> Iterator[str]:
    about = model.about
    yield "- For rows like those of training: measured, written and cut likewise. On others its scores do not hold."
    if isinstance(model.input, Tokens) and model.input.codes is not None:
        yield "- What the training rows did not hold is one unknown token to it."
    elif not isinstance(model.input, Tokens):
        yield "- Values are shifted and scaled as in training; give them in the same units."
    yield f"- Nobody has tried it on sequences of more than {model.length:,} steps."
    if isinstance(model.target, Classes | Labels):
        yield "- Its probabilities are not calibrated, and it knows no answer but its classes."
    yield (
        "- Weights can hold traces of their training data, whose licence and rules of privacy apply to them; no "
        "licence of the data is recorded here, so say yours before you pass the folder on."
    )
    for note in about["notes"]:
        yield f"- Of the data: {note}."


def _known(scores: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [
        (metric, score) for metric, score in scores.items() if isinstance(score, int | float) and np.isfinite(score)
    ]


def _number(score: Any) -> str:
    return "" if score is None else f"{score:.4g}"
