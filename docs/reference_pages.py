"""The reference pages of the documentation, made from the code.

What they say stands in one place each: keys and options in the pydantic models, commands in their signatures, exit
codes in spt/errors.py, models and tasks in their own files. Plug-ins, the terminal and the machine have no part in it.
"""

import importlib
import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin
from unittest.mock import patch

from pydantic import BaseModel
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    import typer

    from spt.models.base import Backbone

NOTICE = "*Made from the code by `make docs`; edit the code, not this page.*"
KEYS = ("key", "values", "default", "meaning")
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min": "≥", "max": "≤"}


class Variable(NamedTuple):
    """An environment variable that is read or set somewhere in spt."""

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable("SPT_RUNS_DIR", "`runs`", "folder of the run folders; `--out` goes before it"),
    Variable("SPT_DATA_DIR", "`data`", "folder with raw data sets, only ever read; `--data-dir` goes before it"),
    Variable("SPT_CACHE_DIR", "`~/.cache/spt`", "folder of prepared data"),
    Variable("XDG_CACHE_HOME", "`~/.cache`", "the user's cache folder, whose `spt` is used without SPT_CACHE_DIR"),
    Variable("SPT_WORKERS", "all cores", "how many work at once where rows are generated; `--workers` goes before it"),
    Variable("SPT_JOBS", "`auto`", "how many runs of a study are made at once; `--jobs` goes before it"),
    Variable("WANDB_PROJECT", "`spt`", "the project that `--tracker wandb` logs to"),
    Variable("SPT_DEBUG", "", "anything but 0: show the traceback of whatever goes wrong, as `--debug` does"),
    Variable("HF_HOME", "`~/.cache/huggingface`", "where Hugging Face libraries keep what they downloaded"),
    Variable("HF_HUB_OFFLINE", "", "1: `spt data prepare` does not reach the hub either; no other command does"),
    Variable(
        "OMP_NUM_THREADS",
        "torch's; cores / processes where several run",
        "threads of a process; small networks have one",
    ),
    Variable("CUDA_VISIBLE_DEVICES", "all", "GPUs in use; `--jobs` deals them out to its workers"),
    Variable("ACCELERATE_MIXED_PRECISION", "", "of accelerate launch; not used, precision is the recipe's"),
    *(
        Variable(name, "", "of a launcher (torchrun, accelerate launch, srun): which process of how many this is")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ),
    *(
        Variable(name, "", "of Slurm: the job, and which process of a step this is")
        for name in (
            *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_LOCALID", "SLURM_PROCID"),
            *("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"),
        )
    ),
    *(
        Variable(name, "", "of Slurm: which part `--shard auto` makes, of how many")
        for name in (
            *("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX"),
            *("SLURM_ARRAY_TASK_STEP", "SLURM_ARRAY_TASK_COUNT", "SLURM_NTASKS"),
        )
    ),
    Variable("JOB_COMPLETION_INDEX", "", "of Kubernetes: which part `--shard auto/N` makes, from 0"),
    Variable("TORCHELASTIC_RESTART_COUNT", "", "of torchrun: how often it has started the processes again"),
    Variable("SOURCE_DATE_EPOCH", "", "read by libraries; named where it is no number"),
    Variable("SPT_EXIT_CODE_FILE", "", "set by spt for processes it starts: where the first to end leaves its code"),
    Variable("PYTHONPATH", "", "set by spt for processes it starts, so that they import the same spt"),
    Variable("GIT_OPTIONAL_LOCKS", "", "set by spt for the git that names the commit of a checkout"),
    Variable("GLIBC_TUNABLES", "", "set, or any `MALLOC_…`: malloc on a CPU stays as these say (performance.md)"),
    Variable("KEOPS_VERBOSE", "0", "KeOps says what it compiles"),
    Variable("PYKEOPS_VERBOSE", "0", "the same of its Python part"),
    Variable("TRITON_INTERPRET", "", "1: Triton computes on the CPU by its interpreter, slowly, for tests"),
    Variable("KINETO_LOG_LEVEL", "99", "`spt bench`: how much the profiler says"),
)


# ------------------------------------------------------------------------------------------------------------- pages


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", NOTICE, *(part for part in parts if part)]) + "\n"


# ------------------------------------------------------------------------------------------------------------ recipe


def recipe_page() -> str:
    """Every key of a recipe, with its default and meaning."""
    from spt.config.recipe import EncoderConfig, Finetune, HeadConfig, Pretrain, Recipe, Scratch, StepHeadConfig, Train
    from spt.training.objectives import OBJECTIVES

    parts = [
        "A recipe is one YAML file. What a key is worth comes, lowest first, from the default here, the file, and "
        "`a.b=c` on the command line. A key that is not here is an error. `spt show RECIPE` prints a recipe with every "
        "default filled in and where each value came from; `spt recipes schema` is this page as JSON schema.",
        _section("The file", Recipe, ""),
        "The keys of `task` beside its name are in [tasks.md](tasks.md), those of `model` in [models.md](models.md).",
        _section("encoder", EncoderConfig, "encoder."),
        _section("pretrain", Pretrain, "pretrain."),
        _section("pretrain.head", StepHeadConfig, "pretrain.head."),
        _section("finetune", Finetune, "finetune."),
        _section("finetune.head", HeadConfig, "finetune.head."),
        _section("scratch", Scratch, "scratch."),
        _section("pretrain.train, finetune.train, scratch.train", Train, "train."),
    ]
    for name, objective in OBJECTIVES.items():
        place = "finetune" if objective.labelled else "pretrain"
        parts.append(_section(f"{place}.objective: {name}", objective, "objective."))
    return _page("Recipes, key by key", *parts)


def study_page() -> str:
    """Every key of a study's file, kind by kind."""
    from spt.studies.schema import KINDS, PRETRAIN_TUNABLE, TUNABLE, Range, Rule, Splits, packaged_spaces

    fields = [kind.model_fields for kind in KINDS.values()]
    common = [name for name in fields[0] if all(name in one for one in fields)]
    rows = [(f"`{name}`", *_field(fields[0][name])) for name in common if name != "kind"]
    kinds = ", ".join(f"`{name}`" for name in KINDS)
    parts = [
        "A study is one YAML file, run by `spt study run FILE`; `--save FILE` writes one from the options of "
        "`spt study KIND`. It trains both arms, scratch and SPT, in every setting, over seeds.",
        f"## Of every kind\n\n{_table(KEYS, [('`kind`', kinds, 'required', _said(fields[0]['kind'])), *rows])}",
    ]
    for name, kind in KINDS.items():
        own = {key: field for key, field in kind.model_fields.items() if key not in common}
        parts.append(f"## {name}\n\n{_prose(kind.__doc__)}\n\n{_fields(own) if own else 'No keys of its own.'}")
    tunable = ", ".join(f"`{name}`" for name in TUNABLE)
    others = ", ".join(f"`{name}`" for name in PRETRAIN_TUNABLE if name.removeprefix("pretrain.") not in TUNABLE)
    parts.append(
        f"Settings that can be tuned, see [recipe.md](recipe.md): {tunable}. Of pretraining: each of these after "
        f"`pretrain.`, and {others}."
    )
    spaces = [
        (
            f"`{name}`",
            "; ".join(f"`{key}` {', '.join(map(str, values))}" for key, values in each["space"].items()),
            each["description"],
        )
        for name, each in packaged_spaces().items()
    ]
    parts.append(f"## Packaged spaces of tune\n\n{_table(('space', 'settings', 'meaning'), spaces)}")
    parts.append(_section("A range in the space of tune", Range, ""))
    parts += [_section("An entry of where", Rule, ""), _section("splits", Splits, "")]
    return _page("Studies, key by key", *parts)


def _section(title: str, model: type[BaseModel], prefix: str) -> str:
    return f"## {title}\n\n{_prose(model.__doc__)}\n\n{_fields(model.model_fields, prefix)}"


def _fields(fields: Mapping[str, FieldInfo], prefix: str = "") -> str:
    rows = [(f"`{prefix}{name}`", *_field(field)) for name, field in fields.items()]
    return _table(KEYS, rows)


def _field(field: FieldInfo) -> tuple[str, str, str]:
    """(values, default, meaning)"""
    values = _values(field.annotation, field.metadata)
    default = "required" if field.is_required() else _shown(field.get_default(call_default_factory=True))
    return values, default, _said(field)


def _said(field: FieldInfo) -> str:
    return field.description or ""


def _values(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What may stand there, in words: `text or null`, `whole number, ≥ 1`."""
    from spt.config.recipe import Part

    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(inner[0], [*inner[1:], *metadata])
    if origin in (Union, types.UnionType):
        return ", or ".join(_values(one, metadata if one is not type(None) else ()) for one in inner)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in inner)
    if origin in (tuple, list):
        many = f"list of {len(inner)}" if origin is tuple and inner[-1] is not Ellipsis else "list"
        least = next((f" (at least {one.min_length})" for one in metadata if getattr(one, "min_length", None)), "")
        return f"{many}{least}: {_values(inner[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "`name` and options" if annotation is Part else "mapping, see below"
    plain = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text", Path: "path", Any: "anything"}
    plain |= {type(None): "`null`"}
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation))) + (
        _bounds(metadata) if annotation in (int, float) else ""
    )


def _bounds(metadata: Iterable[Any]) -> str:
    """` > 0 and < 1`"""
    found = [(sign, getattr(one, name, None)) for one in metadata for name, sign in SIGNS.items()]
    return " and".join(f" {sign} {bound:,}" for sign, bound in found if bound is not None)


def _shown(default: Any) -> str:
    from spt.config.recipe import Part

    if isinstance(default, Part):
        return f"`{default.name}`"
    if isinstance(default, BaseModel):
        return "its defaults"
    return f"`{default}`" if isinstance(default, str | Path) else f"`{json.dumps(default, ensure_ascii=False)}`"


# ---------------------------------------------------------------------------------------------------------- commands


class Option(NamedTuple):
    """An argument or an option of a command, as its table has it."""

    field: str
    usage: str  # of an argument, its place in the command line; of an option, nothing
    name: str
    values: str
    default: str
    meaning: str

    @property
    def row(self) -> tuple[str, ...]:
        return (f"`{self.name}`", self.values, self.default, self.meaning)


def commands_page() -> str:
    """Every command with its options, exit codes, variables."""
    from spt.cli.options import RuntimeOptions, StudyOptions

    header = ("argument or option", *KEYS[1:])
    listed = dict(commands())
    whole = {option.field: option for option in _options(listed["compare"])}
    shared = {
        "Options of commands that make many runs": (
            StudyOptions,
            [whole[field] for field in StudyOptions._fields if field != "as_json"],
        ),
        "Options of commands that train": (
            RuntimeOptions,
            [whole[field] for field in RuntimeOptions._fields if field != "debug"],
        ),
    }
    parts = [
        "Results go to standard output, everything else to standard error. `spt COMMAND --help` says the same as this "
        "page.",
        f"## Exit codes\n\n{_exit_codes()}",
        "Launchers turn any child's code into 1, so a run's `status.json` repeats it.",
        "## Environment variables\n\n"
        + _table(("variable", "default", "meaning"), [(f"`{v.name}`", v.default, v.meaning) for v in VARIABLES]),
    ]
    parts += [
        f"## {title}\n\n{_prose(group.__doc__)}\n\n{_table(header, [option.row for option in options])}"
        for title, (group, options) in shared.items()
    ]
    for name, callback in listed.items():
        options = _options(callback)
        also = []
        for title, (_, group) in shared.items():
            if {option.field for option in group} <= {option.field for option in options}:
                options = [option for option in options if option not in group]
                also.append(f"[{title.lower().replace('options of', 'those of')}](#{_anchor(title)})")
        plain = [option for option in options if option.field in ("as_json", "debug")]
        own = [option for option in options if option not in plain]
        usage = " ".join(["spt", name, *(option.usage for option in own if option.usage)])
        also += [f"`{option.name}`" for option in plain]
        parts += [
            f"## spt {name}\n\n`{usage}`\n\n{_prose(inspect.getdoc(callback))}",
            _table(header, [option.row for option in own]) if own else "",
            f"Also {', '.join(also)}." if also else "",
        ]
    return _page("Commands", *parts)


def commands() -> Iterator[tuple[str, Callable[..., None]]]:
    """Every command of `spt` by its words (`study run`), in the order of the help."""
    app = importlib.import_module("spt_cli").app
    yield from _registered(app, "")


def _registered(group: "typer.Typer", prefix: str) -> Iterator[tuple[str, Callable[..., None]]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield f"{prefix}{command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            named = isinstance(inner.name, str)  # commands of a group without a name stand among those around it
            yield from _registered(inner.typer_instance, f"{prefix}{inner.name} " if named else prefix)


def _options(callback: Callable[..., None]) -> list[Option]:
    return [_option(parameter) for parameter in inspect.signature(callback).parameters.values()]


def _option(parameter: inspect.Parameter) -> Option:
    from typer.models import ArgumentInfo

    annotation, info = parameter.annotation, None
    if get_origin(annotation) is Annotated:
        annotation, info = get_args(annotation)
    kinds = [one for one in (get_args(annotation) or (annotation,)) if one is not type(None)]
    optional = parameter.default is not inspect.Parameter.empty
    repeated = get_origin(annotation) is list or any(get_origin(kind) is list for kind in kinds)
    values = "" if annotation is bool else _values(annotation, [info] if info else [])
    values = values.removesuffix(", or `null`").removeprefix("list: ")
    default = _command_default(parameter.default, getattr(info, "show_default", True)) if optional else "required"
    meaning = (getattr(info, "help", None) or "") + (f" Or `{info.envvar}`." if info and info.envvar else "")
    if info is None or isinstance(info, ArgumentInfo):
        metavar = getattr(info, "metavar", None) or parameter.name.upper()
        usage = metavar if not optional or metavar.startswith("[") else f"[{metavar}]"
        return Option(parameter.name, usage, metavar, values, default, meaning)
    given = (info.default, *(info.param_decls or ()))  # in Annotated, typer takes the first for the default
    name = next(one for one in given if isinstance(one, str) and one.startswith("--"))
    if info.metavar:
        name = f"{name} {info.metavar}"
    if repeated and "repeat" not in meaning:
        meaning += " (repeat)"
    return Option(parameter.name, "" if optional else name, name, values, default, meaning)


def _command_default(default: Any, shown: Any) -> str:
    if isinstance(shown, str):
        return shown
    if default is True:  # --this/--no-this
        return "on"
    return "" if default is None or default is False else f"`{default}`"


def _exit_codes() -> str:
    """The table in spt/errors.py."""
    lines = (importlib.import_module("spt.errors").__doc__ or "").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return _table(tuple(rows[0]), [tuple(row) for row in rows[2:]])


# ------------------------------------------------------------------------------------------------------------ models


def models_page() -> str:
    """A card for each model."""
    from spt.config.plugins import find_plugin
    from spt.models.base import BackboneConfig

    cards = [_model_card(row, find_plugin("models", row.name).module) for row in _listed("models")]
    return _page(
        "Models, one by one",
        "A recipe names one as `model: {name: s4, …}`. Parameters are those of the backbone with its default options "
        "(d_model 128, n_layers 4, 1,024 steps), the cost is that of one block on one sequence, in leading terms: L "
        "steps, D width, N state size, c chunk, E inner width. Directions, whether it can go step by step, irregular "
        "times and back ends were found by building the model with its default options. [../models.md](../models.md) "
        "says how models are put together.\n\n"
        "The pictures show what an untrained block sees: each pixel how much one step's output (downwards, 64 of them) "
        "moves with one step's input (to the right), two-sided on the left, causal on the right, over three decades "
        "from the largest value off the diagonal (yellow) down; the diagonal holds the residual connection. They are "
        "drawn by docs/mixing_figures.py from the code itself. An empty half is a direction that the model "
        "does not have; the one of `hf` is GPT-NeoX.",
        f"## Options of every model\n\n{_prose(BackboneConfig.__doc__)}\n\n{_fields(BackboneConfig.model_fields)}",
        *cards,
    )


def _model_card(row: Any, module: ModuleType) -> str:
    from spt.models.base import BackboneConfig

    shared = BackboneConfig.model_fields
    own = {
        name: field
        for name, field in module.Config.model_fields.items()
        if name not in shared or _field(field) != _field(shared[name])
    }
    facts = [
        ("paper", row.paper),
        ("parameters", f"{row.parameters:,}"),
        ("cost", row.cost),
        *_built(row.name),
        ("recipes", _recipes("model", row.name)),
    ]
    options = f"Options that are its own, or have another default here:\n\n{_fields(own)}" if own else ""
    picture = f"![Which steps an untrained block of {row.name} mixes](../figures/mixing/{row.name}.png)"
    return _card(row.name, module, facts, picture, options)


def _built(name: str) -> list[tuple[str, str]]:
    """What small models of this kind turn out to be able to do."""
    from spt.models.ops import backends

    kinds = {causal: model for causal in (False, True) if (model := _small(name, causal)) is not None}
    one = next(iter(kinds.values()))
    resets = sorted({prefix for mixer in one._layers for prefix in mixer.state_space})
    priors = ["`structured`", "`random`"]
    if resets:
        priors.append(f"`random_ssm` (parameters {', '.join(f'`{prefix}…`' for prefix in resets)})")
    found = [
        ("direction", " and ".join({False: "two-sided", True: "causal"}[causal] for causal in kinds)),
        ("step by step", "yes, if causal" if True in kinds and kinds[True].recurrent else "no"),
        ("irregular times", "taken account of" if one.uses_step_times else "not taken account of"),
        ("initialisation", ", ".join(priors)),
    ]
    flags: dict[backends.Choice, str] = {"attention": "--attention", "kernels": "--backend"}
    for choice, flag in flags.items():
        if choice in _asked(name):
            names = ", ".join(f"`{backend}`" for backend in backends.NAMES[choice])
            found.append((f"back ends of {choice}", f"`{flag}`: {names}"))
    return found


@cache
def _small(name: str, causal: bool) -> "Backbone | None":
    """A small model; None where the model says that it cannot be so."""
    from spt.checks.model_contract import tiny
    from spt.config.plugins import find_plugin
    from spt.errors import UsageError

    try:
        return tiny(find_plugin("models", name), causal)
    except UsageError:
        return None


@cache
def _asked(name: str) -> frozenset[str]:
    """The choices of back ends that a forward pass of the model looks at."""
    import torch

    from spt.checks.model_contract import all_valid, sequence, valid_length
    from spt.models.ops import backends

    model = _small(name, False) or _small(name, True)
    assert model is not None
    seen, current = set(), backends.current

    def look(choice: backends.Choice = "kernels") -> str:
        seen.add(choice)
        return current(choice)

    x = sequence(1, valid_length(model, 16))
    with patch.object(backends, "current", look), torch.no_grad():
        model(x, all_valid(x))
    return frozenset(seen)


# ------------------------------------------------------------------------------------------------------------- tasks


def tasks_page() -> str:
    """A card for each task."""
    from spt.config.plugins import find_plugin
    from spt.tasks.base import TaskConfig

    cards = [_task_card(row.name, find_plugin("tasks", row.name).module) for row in _listed("tasks")]
    return _page(
        "Tasks, one by one",
        "A recipe names one as `task: {name: text, …}`. Input, target and length are those of the default options, "
        "where rows are made here or come with a library; of data sets that are read, `spt data check TASK` says them, "
        "with rows, classes and what trivial answers score. [../data.md](../data.md) says where files are looked for.",
        f"## Options of every task\n\n{_prose(TaskConfig.__doc__)}\n\n{_fields(TaskConfig.model_fields)}",
        *cards,
    )


def _task_card(name: str, module: ModuleType) -> str:
    from spt.tasks.base import TaskConfig

    own = {key: field for key, field in module.Config.model_fields.items() if key not in TaskConfig.model_fields}
    facts = [*_made(module), *_files(module), ("recipes", _recipes("task", name))]
    files = _prose(inspect.getdoc(module.sources)) if hasattr(module, "sources") else ""
    return _card(name, module, facts, f"**Files.** {files}" if files else "", _fields(own) if own else "")


def _made(module: ModuleType) -> list[tuple[str, str]]:
    """What a few rows of a task show that needs no files."""
    from spt.tasks.base import Classes

    generated = getattr(module, "INDEXABLE", False)
    if not generated and (hasattr(module, "sources") or hasattr(module, "fetch")):
        return []
    data = module.load(module.Config(max_rows=2) if generated else module.Config(), Path("/nonexistent"))
    every = "every step" if data.target.per_step else "the sequence"
    if isinstance(data.target, Classes):
        target, metric = f"one of {data.target.count:,} classes, of {every}", "`accuracy`"
    else:
        target, metric = f"{_count(data.target.size, 'number')}, of {every}", "`mse`, `mae` where the loss is l1"
    found = [
        ("input", _input(data.input)),
        ("target", target),
        ("longest", f"{data.length:,} steps"),
        ("chosen and compared by", metric),
    ]
    if not generated:
        rows = ", ".join(f"{key} {len(split):,}" for key, split in data.splits.items())
        found.append(("rows", rows))
        if (chance := data.chance()) is not None:
            found.append(("chance", f"{chance:.2%} of the test answers are the commonest training class"))
    if hasattr(module, "resample"):
        again = module.Config.model_fields["resample_each_epoch"].default
        other = "false`: the same ones" if again else "true`: new ones"
        told = "new ones in every epoch" if again else "the same in every epoch"
        found.append(("training rows", f"{told} (`resample_each_epoch: {other})"))
    return found


def _input(given: Any) -> str:
    from spt.tasks.base import Tokens

    if isinstance(given, Tokens):
        return f"one of {given.vocab:,} tokens a step"
    text = f"{_count(given.channels, 'number')} a step"
    text += f", a picture of {given.frame[0]}×{given.frame[1]}" if given.frame else ""
    return text + (f", {given.levels} levels" if given.levels else "")


def _files(module: ModuleType) -> list[tuple[str, str]]:
    """What `spt data prepare` does for the task."""
    found = []
    if hasattr(module, "fetch"):
        found.append(("`spt data prepare`", _prose(inspect.getdoc(module.fetch)).replace("\n", " ")))
    urls = dict.fromkeys(url for value in vars(module).values() for url in _urls(value))
    if urls:
        found.append(("addresses", ", ".join(f"<{url}>" for url in urls)))
    if hasattr(module, "hub"):
        found.append(("copy on the hub", f"`{module.hub(module.Config())[0]}`, by `spt data prepare --from-hub`"))
    return found


def _urls(value: Any) -> Iterator[str]:
    """Of every published file in a module's tables."""
    from spt.tasks.files import Download

    if isinstance(value, Download):
        yield from value.urls
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _urls(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _urls(inner)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


# ------------------------------------------------------------------------------------------------------------- cards


def _listed(kind: Literal["models", "tasks"]) -> list[Any]:
    """Ours, without installed plug-ins."""
    from spt.config.plugins import listing

    return [row for row in listing(kind) if row.source == "spt"]


def _card(name: str, module: ModuleType, facts: Iterable[tuple[str, str]], *parts: str) -> str:
    listed = "\n".join(f"- {key}: {value}" for key, value in facts if value)
    said = (inspect.getdoc(module) or "").replace("See `sources` for the files.", "")  # they stand below
    said = "\n".join(line.rstrip() for line in said.rstrip().split("\n"))
    return "\n\n".join(part for part in (f"## {name}", _prose(said), listed, *parts) if part)


def _recipes(place: Literal["task", "model"], name: str) -> str:
    """The packaged recipes that use it."""
    return ", ".join(f"`{recipe}`" for recipe, parts in _parts().items() if parts[place] == name)


@cache
def _parts() -> dict[str, dict[str, str]]:
    from spt.config.load import packaged
    from spt.config.yaml import parse_yaml

    raw = {name: parse_yaml(text, name) for name, text in packaged().items()}
    return {name: {place: one[place]["name"] for place in ("task", "model")} for name, one in raw.items()}


# ---------------------------------------------------------------------------------------------------------- Markdown


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _prose(text: str | None) -> str:
    """A docstring; its indented lines are code."""
    lines = inspect.cleandoc(text or "").split("\n")
    return "\n".join(line if line.startswith("    ") else _escaped(line) for line in lines)


def _escaped(text: str) -> str:
    """Asterisks, and what looks like a tag, are themselves outside of code."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"(\*|<(?=[a-z/]))", r"\\\1", piece) for piece in pieces)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
