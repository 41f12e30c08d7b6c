"""What is changed, and which commands then read it."""

import json
import os
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.fuzz import mutations, process
from tests.fuzz.process import Step

ROOT = Path(__file__).resolve().parents[2]
TRAIN = {"steps": 4, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 2}
TASK = {
    **{"name": "custom", "path": "rows.csv", "text_column": "body", "label_column": "y", "split": "stratified"},
    **{"validation_fraction": 0.25, "test_fraction": 0.25},
}
TRANSFORMER = {"name": "transformer", "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16}
S4D = {"name": "s4d", "d_model": 8, "n_layers": 1, "d_state": 4}
RECIPE = {
    "task": TASK,
    "model": TRANSFORMER,
    "pretrain": {"objective": {"name": "masked", "ratio": 0.5}, "train": TRAIN},
    "finetune": {"train": TRAIN},
}
LONGER = {**RECIPE, "model": S4D, "pretrain": {**RECIPE["pretrain"], "train": {**TRAIN, "steps": 12}}}  # type: ignore[dict-item]
STUDIES: tuple[dict[str, Any], ...] = (
    {"kind": "compare", "recipes": ["tiny.yaml"], "seeds": 3, "arms": ["scratch", "spt", "frozen"]},
    {"kind": "compare", "recipes": ["tiny.yaml"], "splits": {"folds": 3, "repeats": 2}, "baselines": ["majority"]},
    {"kind": "models", "recipes": ["tiny.yaml", "s4d.yaml"], "match": "parameters"},
    {"kind": "compute", "recipes": ["tiny.yaml"], "budget": {"flops": 1e7}, "shares": [0.2, 0.5]},
    {"kind": "data", "recipes": ["tiny.yaml"], "fractions": [0.5, 1.0]},
    {"kind": "size", "recipes": ["tiny.yaml"], "sizes": {"small": {"d_model": 8}, "large": {"d_model": 32}}},
    {
        "kind": "variants",
        "recipes": ["tiny.yaml"],
        "variants": {"own": {}, "fast": {"finetune.train.learning_rate": 0.1}},
    },
    {"kind": "reach", "recipes": ["tiny.yaml"], "reaches": [1, 4, "full"]},
    {"kind": "objective", "recipes": ["tiny.yaml"], "objectives": [{"name": "masked", "ratio": 0.2}, {"name": "next"}]},
    {"kind": "tune", "recipes": ["tiny.yaml"], "space": {"learning_rate": [0.01, 0.02]}, "trial_seeds": [0]},
    {"kind": "tune", "recipes": ["tiny.yaml"], "space": {"learning_rate": {"low": 1e-3, "high": 1e-1}}, "trials": 3},
)


EXAMPLES = {**TASK, **TRANSFORMER, **TRAIN, "name": "masked", "ratio": 0.5, "dropout": 0.1}  # values that options take


class Target(NamedTuple):
    """`base` makes the files that every case starts from; `change` changes a copy and returns what is run on it."""

    base: Callable[[Path], None]
    change: Callable[[random.Random, Path], list[Step]]


def simple_base(case: Path) -> None:
    """Rows, and recipes over them; data prepared."""
    work = case / "work"
    work.mkdir(parents=True)
    chance = random.Random(0)
    texts = ["".join(chance.choice("abcdef ") for _ in range(chance.randint(3, 12))) + "x" for _ in range(48)]
    (work / "rows.csv").write_text("body,y\n" + "".join(f"{text},{'ab'[i % 2]}\n" for i, text in enumerate(texts)))
    (work / "new.csv").write_text("body,y\nabc def,a\nfed,b\na,a\n")
    for name, recipe in (("tiny", RECIPE), ("s4d", {**RECIPE, "model": S4D}), ("longer", LONGER)):
        (work / f"{name}.yaml").write_bytes(mutations.dump_yaml(recipe))
    made(case, "data", "prepare", "tiny.yaml")


def made(case: Path, *arguments: str, codes: Sequence[int] = (0,), fault: str | None = None) -> None:
    ended = process.run(Step(arguments), case, 600, fault, watched=False)
    if ended.code not in codes:
        raise RuntimeError(f"spt {' '.join(arguments)} ended with {ended.code}:\n{ended.err[-2000:]}")


def run_base(case: Path) -> None:
    """A finished comparison, and its model as a folder of its own."""
    simple_base(case)
    made(case, "compare", "tiny.yaml", "--seeds", "1", "--out", "runs")
    made(case, "report", *(f"runs/{path.name}" for path in (case / "work/runs").glob("compare-*")))
    made(case, "export", str(spt_run(case / "work")), "--out", "exported")


def spt_run(work: Path) -> Path:
    """The finetuning run that a pretraining run precedes, relative to `work`."""
    for path in sorted((work / "runs").glob("finetune-*/result.json")):
        if json.loads(path.read_text())["parent"]:
            return path.parent.relative_to(work)
    raise FileNotFoundError("no finished run of the SPT arm")


def checkpoint_base(case: Path) -> None:
    """Finished runs of an S4D model, and in `stopped` a pretraining that was stopped between two steps."""
    simple_base(case)
    made(case, "compare", "s4d.yaml", "--seeds", "1", "--out", "runs")
    made(case, "pretrain", "longer.yaml", "--save-every", "0", "--out", "stopped", codes=(75,), fault="stop")


def report_base(case: Path) -> None:
    """Studies of several kinds."""
    simple_base(case)
    small = ("finetune.train.steps=2", "pretrain.train.steps=2", "--out", "runs")
    made(
        case, "compare", "tiny.yaml", "--arms", "scratch,spt,frozen", "--seeds", "3", "--baselines", "majority", *small
    )
    made(case, "study", "tune", "tiny.yaml", "--space", "learning_rate=0.01,0.02", "--seeds", "2", *small)
    made(case, "study", "models", "tiny.yaml", "s4d.yaml", "--seeds", "2", *small)
    made(case, "compare", "tiny.yaml", "--splits", "2", "--seeds", "1", *small)


def recipes(chance: random.Random, work: Path) -> list[Step]:
    """YAML of a recipe: one of ours or a tiny one, changed by fields or bytes, or a tree drawn from nothing."""
    ours = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "studies")
    path = work / "tiny.yaml" if chance.random() < 0.6 else chance.choice(ours)
    others = [yaml.safe_load(chance.choice(ours).read_text()) for _ in range(2)]
    write_yaml(chance, work / "fuzz.yaml", path, others)
    own = path.parent == work
    small = ["--smoke"] if chance.random() < 0.3 else []
    commands = [["show", "fuzz.yaml", "--no-data"]]
    if own:
        commands += [
            ["show", "fuzz.yaml", *small],
            ["compare", "fuzz.yaml", "--dry-run", "--seeds", "2", "--out", "out", *small],
        ]
        commands += [["data", "check", "fuzz.yaml"]]
    return [Step(tuple(chance.choice(commands)), ("out",))]


def write_yaml(chance: random.Random, target: Path, source: Path, others: Sequence[Any]) -> None:
    kind = chance.random()
    if kind < 0.6:
        content = mutations.dump_yaml(mutations.change_tree(chance, yaml.safe_load(source.read_text()), others))
    elif kind < 0.9:
        content = mutations.change_bytes(chance, source.read_bytes())
    else:
        content = mutations.dump_yaml(mutations.draw(chance))
    target.write_bytes(content)


def keys_of(tree: Any) -> list[str]:
    return [".".join(map(str, place)) for place in mutations.places(tree) if place]


def override_keys() -> list[str]:
    from spt.config.recipe import Recipe

    found: list[str] = []

    def walk(schema: Any, whole: Any, prefix: str, depth: int) -> None:
        for name, inner in schema.get("properties", {}).items():
            found.append(prefix + name)
            for option in (inner, *inner.get("anyOf", ())):
                if "$ref" in option and depth < 4:
                    walk(whole["$defs"][option["$ref"].rpartition("/")[2]], whole, f"{prefix}{name}.", depth + 1)

    schema = Recipe.model_json_schema()
    walk(schema, schema, "", 0)
    return found


def overrides(chance: random.Random, work: Path) -> list[Step]:
    """`a.b=c` behind a recipe: keys of the schema, of models and tasks, misspelt and foreign ones; any values."""
    from spt.config.plugins import listing

    names = {"model.name": [row.name for row in listing("models")], "task.name": [row.name for row in listing("tasks")]}
    known = [
        *override_keys(),
        *keys_of(RECIPE),
        *(f"model.{name}" for name in ("d_model", "dropout", "d_state", "norm")),
    ]
    typed = [key for key in known if key.rpartition(".")[2] in EXAMPLES]
    given = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        kind = chance.random()
        if kind < 0.2:
            key = chance.choice(sorted(names))
            given.append(f"{key}={chance.choice(names[key])}")
            continue
        key = chance.choice(typed if chance.random() < 0.6 else known)
        if kind < 0.3:
            key = mutations.change_bytes(chance, key.encode()).decode(errors="replace")
        elif kind < 0.35:
            key += "." + chance.choice(known)
        example = EXAMPLES.get(key.rpartition(".")[2], 8)
        value = mutations.draw_alike(chance, example, "", ()) if chance.random() < 0.8 else mutations.draw(chance)
        text = value if isinstance(value, str) else json.dumps(value) if chance.random() < 0.8 else str(value)
        given.append(f"{key}={text}")
    given = [
        text.replace("\0", "").encode("utf-8", "replace").decode() for text in given
    ]  # which no command line holds
    given = [text for text in given if not text.startswith("-")]
    recipe = chance.choice(("tiny.yaml", "tiny.yaml", "quickstart", "s4d.yaml"))
    commands = [
        ["show", recipe, *given, "--no-data"],
        ["show", recipe, *given],
        ["show", recipe, *given, "--smoke"],
        ["compare", recipe, *given, "--dry-run", "--out", "out"],
        ["data", "check", "custom", "path=rows.csv", *(text.removeprefix("task.") for text in given)],
    ]
    if any(text.startswith("task.name=") for text in given):
        commands = commands[:1]  # some tasks generate their rows for minutes
    return [Step(tuple(chance.choice(commands)), ("out",))]


def studies(chance: random.Random, work: Path) -> list[Step]:
    """YAML of a study: of each kind, or one of ours."""
    ours = sorted((ROOT / "recipes/studies").glob("*.yaml"))
    own = chance.random() < 0.75
    if own:
        source = work / "study.yaml"
        source.write_bytes(mutations.dump_yaml(chance.choice(STUDIES)))
    else:
        source = chance.choice(ours)
    write_yaml(chance, work / "fuzz.yaml", source, [yaml.safe_load(chance.choice(ours).read_text()), *STUDIES])
    if not own or chance.random() < 0.3:
        return [Step(("study", "show", "fuzz.yaml"))]
    return [Step(("study", "run", "fuzz.yaml", "--dry-run", "--out", "out"), ("out",))]


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and ".locks" not in path.parts)


def runs(chance: random.Random, work: Path) -> list[Step]:
    """Any file of a finished comparison, or of an exported model."""
    run, other = spt_run(work), scratch_run(work)
    (study,) = (path.relative_to(work) for path in (work / "runs").glob("compare-*"))
    exported = chance.random() < 0.12
    places = [work / "exported"] if exported else [work / place for place in (run, run, other, parent(work), study)]
    path = chance.choice(files_below(chance.choice(places)))
    changed = path.relative_to(work)
    mutations.change_file(chance, path, files_below(work / "runs"))
    if chance.random() < 0.5:
        mutations.sign(path)
    if exported:
        return [Step(("predict", "exported", "new.csv", "--out", "out/new.csv"), ("out",))]
    chosen = str(run if changed.is_relative_to(run) else other if changed.is_relative_to(other) else run)
    return [
        Step(*step) for step in chance.sample(readers(chosen, str(run), str(other), str(study), str(parent(work))), 2)
    ]


def scratch_run(work: Path) -> Path:
    run = spt_run(work)
    return next(path.relative_to(work) for path in (work / "runs").glob("finetune-*") if path.name != run.name)


def parent(work: Path) -> Path:
    return next(path.relative_to(work) for path in (work / "runs").glob("pretrain-*"))


def readers(run: str, spt: str, scratch: str, study: str, before: str) -> list[tuple[Any, ...]]:
    """Commands, and what they may write to."""
    return [
        (("report", study, "--out", "out"), ("out",)),
        (("report", "runs"),),
        (("report", run, scratch, "--json"),),
        (("compare", "tiny.yaml", "--seeds", "1", "--out", "runs"), ("runs",)),
        (("study", "run", study, "--out", "runs"), ("runs",)),
        (("study", "status", "runs"),),
        (("predict", run, "new.csv", "--out", "out/new.csv"), ("out",)),
        (("predict", run, "--split", "test", "--calibrated", "--out", "out/new.jsonl"), ("out",)),
        (("embed", run, "new.csv", "--out", "out/new.npz"), ("out",)),
        (("export", run, "--out", "out/exported"), ("out",)),
        (("inspect", "attention", run, "--out", "out"), ("out",)),
        (("inspect", "kernels", run, "--out", "out"), ("out",)),
        (("inspect", "errors", spt, scratch, "--out", "out"), ("out",)),
        (("diff", spt, scratch, "--all"),),
        (("evaluate", run, "--cpu"),),
        (("finetune", "tiny.yaml", "--from", before, "--out", "runs"), ("runs",)),
    ]


def checkpoints(chance: random.Random, work: Path) -> list[Step]:
    """Weights and training states."""
    stopped = chance.random() < 0.5
    root = work / ("stopped" if stopped else "runs")
    paths = [path for path in files_below(root) if "checkpoints" in path.parts]
    path = max(chance.sample(paths, 2)) if stopped else chance.choice(paths)  # the newest state is read first
    if path.suffix in (".bin", ".pkl", ".pt") and chance.random() < 0.3:
        path.write_bytes(pickle.dumps(Planted()))
    else:
        mutations.change_file(chance, path, paths)
    if chance.random() < 0.7:
        mutations.sign(path)
    if stopped:
        return [Step(("pretrain", "longer.yaml", "--out", "stopped"), ("stopped",))]
    run, other, before = str(spt_run(work)), str(scratch_run(work)), str(parent(work))
    study = next(path.relative_to(work) for path in (work / "runs").glob("compare-*"))
    steps = readers(str(path.relative_to(work).parents[-3]), run, other, str(study), before)
    kept = [step for step in steps if step[0][0] not in ("report", "study", "diff")]
    arguments, *writes = chance.choice(kept)
    return [Step(tuple(word.replace("tiny.yaml", "s4d.yaml") for word in arguments), *writes)]


class Planted:
    """Pickled, it makes a folder wherever it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("unpickled",))


def reports(chance: random.Random, work: Path) -> list[Step]:
    """What reports read, of studies of several kinds."""
    names = ("study.json", "result.json", "metrics.jsonl", "predictions.parquet", "status.json", "env.json", "job.json")
    paths = [path for path in files_below(work / "runs") if path.name in (*names, "report.json", "recipe.yaml")]
    name = chance.choice(sorted({path.name for path in paths}))
    path = chance.choice([path for path in paths if path.name == name])
    folders = sorted(path.parent for path in (work / "runs").glob("*/study.json"))
    naming = [folder for folder in folders if path.parent.name in (folder / "study.json").read_text()]
    folder = path.parent if path.parent in folders else chance.choice(naming or folders)
    study = str(folder.relative_to(work))
    mutations.change_file(chance, path, paths)
    steps = [
        Step(("report", study, "--out", "out"), ("out",)),
        Step(("report", study, "--out", "out"), ("out",)),
        Step(("report", study, "--json"), (study,)),
        Step(("report", "runs")),
        Step(("study", "status", study)),
        Step(("diff", study, str(chance.choice(folders).relative_to(work)))),
    ]
    return [chance.choice(steps)]


def data(chance: random.Random, work: Path) -> list[Step]:
    """A file of every kind that is read as the user's own."""
    from recordings import KINDS, make

    if chance.random() < 0.2:  # what has enough rows for a plan
        mutations.change_file(chance, work / "rows.csv")
        return [Step(("try", "rows.csv", "--dry-run", "--out", "out"), ("out",))]
    kind = chance.choice(KINDS)
    folder = work / "data"
    folder.mkdir(exist_ok=True)
    path, config = make(kind, folder)
    options = config.model_dump(mode="json", exclude_unset=True) | {
        "path": "data" if str(config.path) != str(path) else f"data/{path.name}"
    }
    if chance.random() < 0.15:
        path = folder / "labels.csv" if (folder / "labels.csv").exists() else path
    mutations.change_file(chance, path, files_below(folder))
    if chance.random() < 0.15:
        options = mutations.change_tree(chance, options)
    words = [f"{key}={json.dumps(value)}" for key, value in options.items()] if isinstance(options, dict) else []
    words = [word.replace("\0", "").encode("utf-8", "replace").decode() for word in words]
    commands = [
        ["data", "check", "custom", *words],
        ["data", "prepare", "custom", *words],
    ]
    return [Step(tuple(chance.choice(commands)), ("out",))]


TARGETS = {
    "recipes": Target(simple_base, recipes),
    "overrides": Target(simple_base, overrides),
    "studies": Target(simple_base, studies),
    "runs": Target(run_base, runs),
    "data": Target(simple_base, data),
    "checkpoints": Target(checkpoint_base, checkpoints),
    "reports": Target(report_base, reports),
}
