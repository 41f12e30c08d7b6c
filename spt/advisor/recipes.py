"""The files that `spt try` leaves: a commented recipe for each backbone and the study of them, to run and to edit."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spt.advisor.backbones import Candidate
from spt.advisor.classes import ClassOptions
from spt.config.yaml import dump_yaml

PRETRAINING = 2 / 3  # of SPT's budget; finetuning has the rest, and scratch all of it
EVALUATIONS = 10  # of a stage; fewer, of many validation rows, so that training is not kept waiting
STUDY = "study.yaml"


@dataclass(frozen=True)
class Template:
    """What all recipes of one answer share."""

    source: str  # DATA, as it was given
    task: dict[str, Any]  # options of the task `custom`, but for where the data are
    where: dict[str, Any]  # path or hub
    lines: tuple[str, ...]  # the decisions
    rows: int  # training rows
    labelled: int  # of them with a label
    validation: int  # rows
    length: int
    tokens: str | None  # what a token is; None: values
    real: bool
    epochs: float  # passes over the training rows that scratch has; SPT has as many in both stages together
    metric: str | None = None  # what is compared, where that is not the usual one
    unlabelled: Path | None = None  # more rows for pretraining, which then is no self-pretraining
    classes: ClassOptions = field(default_factory=ClassOptions)

    @property
    def batch_size(self) -> int:
        return 8 if self.labelled < 100 else 16 if self.labelled < 1000 or self.length > 2048 else 32

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.rows // self.batch_size)

    @property
    def evaluations(self) -> int:
        return max(3, min(EVALUATIONS, 300 * self.batch_size // max(1, self.validation)))

    @property
    def most_epochs(self) -> float:
        """As many as such data are worth: some thousand updates, and at most sixty passes."""
        return min(60.0, max(3.0, 3000 / self.steps_per_epoch))

    @property
    def least_epochs(self) -> float:
        """Fewer updates teach a network nothing."""
        return min(6.0, max(0.2, 60 / self.steps_per_epoch))

    def steps(self, epochs: float) -> int:
        """Updates that so many passes over the training rows are."""
        return max(1, round(epochs * self.steps_per_epoch))

    def with_epochs(self, epochs: float) -> "Template":
        return replace(self, epochs=epochs)


def recipe_text(template: Template, candidate: Candidate, changes: dict[str, int], folder: Path) -> str:
    """A recipe as YAML. Relative paths begin at the folder in which it will lie."""
    where = dict(template.where)
    if "path" in where:
        where["path"] = os.path.relpath(where["path"], folder)
    task = {"name": "custom", **where, **template.task}
    pretraining = round(template.epochs * PRETRAINING, 2)
    finetuning = round(template.epochs - pretraining, 2)
    first, then = template.steps(pretraining), template.steps(finetuning)
    few = template.labelled < template.rows  # passes over them are shorter than those of pretraining
    objective = {"name": "supervised", **({"scale": "standard"} if template.real else {})}
    objective |= {"metric": template.metric} if template.metric is not None else {}
    objective |= template.classes.objective
    fast = int(candidate.options["d_model"]) < 64
    rate, total = 3e-3 if fast else 1e-3, round(pretraining + finetuning, 2)
    text = [
        f"# {candidate.name} on {template.source}. {candidate.why}",
        f"# Run: spt compare {candidate.name}.yaml     All of them, at equal parameters: spt study run {STUDY}",
        "# How the columns were read:",
        *(f"# - {line}" for line in template.lines),
        _section("task", task),
        _section("model", {"name": candidate.name, **candidate.options, **changes}).rstrip("\n")
        + ("  # as many parameters as the first recipe's, within 5 %\n" if changes else "\n"),
        _section("pretrain", {"objective": _masks(template), **_more_rows(template, folder)}).rstrip(),
        _train(template, pretraining, first, 8e-3 if fast else 2e-3, in_steps=few or template.unlabelled is not None),
        "finetune:",
        *([_indented({"objective": objective})] if len(objective) > 1 else []),
        *([] if template.task.get("per_step") else ["  head: {pool: mean}"]),
        _train(template, finetuning, then, rate, template.classes.sampling, in_steps=few),
        f"scratch: # as many {'updates' if few else 'epochs'} as both stages of SPT together",
        _train(template, total, first + then, rate, template.classes.sampling, in_steps=few),
    ]
    return "\n".join(line.rstrip("\n") for line in text) + "\n"


def study_text(template: Template, names: Sequence[str], seeds: int, splits: int = 1) -> str:
    """The study of all recipes."""
    study: dict[str, Any] = {"kind": "models" if len(names) > 1 else "compare"}
    study["recipes"] = [f"{name}.yaml" for name in names]
    if len(names) > 1:
        study["match"] = "parameters"
    study |= {"seeds": seeds, **({"splits": splits} if splits > 1 else {}), "baselines": "auto"}
    head = (
        f"# Does self-pretraining help on {template.source}, and with which model? Both arms of every recipe.\n"
        f"# Run: spt study run {STUDY}     More seeds: spt study run {STUDY} --seeds 10\n"
    )
    return head + dump_yaml(study)


def _masks(template: Template) -> dict[str, Any]:
    """What pretraining hides: of words few, of letters more; of signals runs of steps, since one alone is easily seen
    from its neighbours."""
    if template.tokens is not None:
        return {"name": "masked", "ratio": 0.15 if template.tokens == "words" else 0.3}
    span = max(1, min(16, template.length // 32))
    return {"name": "masked", "ratio": 0.5 if span == 1 else 0.3, **({"span": span} if span > 1 else {})}


def _more_rows(template: Template, folder: Path) -> dict[str, Any]:
    if template.unlabelled is None:
        return {}
    return {"data": os.path.relpath(template.unlabelled, folder), "not_self_pretraining": True}


def _train(
    template: Template, epochs: float, steps: int, rate: float, sampling: str | None = None, *, in_steps: bool = False
) -> str:
    """`in_steps`: so many updates, whatever rows a stage has, not so many passes over them."""
    return _indented(
        {
            "train": {
                **({"steps": steps} if in_steps else {"epochs": epochs}),
                "batch_size": template.batch_size,
                **({"sampling": sampling} if sampling is not None else {}),
                "learning_rate": rate,
                "schedule": "cosine",
                "warmup_fraction": 0.1,
                "weight_decay": 0.01,
                "evaluate_every": max(1, steps // template.evaluations),
            }
        }
    )


def _section(name: str, values: dict[str, Any]) -> str:
    return dump_yaml({name: values}, width=110)


def _indented(values: dict[str, Any]) -> str:
    text = dump_yaml(values)
    return "\n".join(f"  {line}" for line in text.splitlines())
