"""`spt try`: columns are found from names and contents, what is ambiguous is asked, plans keep to a budget, and the
answer claims no more than the runs show."""

import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from records import SCRATCH, SPLITS, arms, compared, finish, study
from records import plan as made_plan
from tiny import environment
from typer.testing import CliRunner

from spt.advisor.advise import Layout, Request, _better_metric, _planned, _time, advise
from spt.advisor.advise import _record as recorded
from spt.advisor.answer import ARM, answer, seeds_needed
from spt.advisor.arrays import convert
from spt.advisor.backbones import choose, width
from spt.advisor.budget import Plan, Shape, Timing, budget_text, parse_budget, plan
from spt.advisor.classes import ClassOptions, given_weights
from spt.advisor.columns import AmbiguousError, ColumnRoles, LabelPeriod, decide
from spt.advisor.recipes import Template, recipe_text
from spt.advisor.recordings import label_windows, shortened
from spt.advisor.table import Column, read_table
from spt.config.load import complete_part, load
from spt.config.recipe import Part
from spt.errors import DataError, UsageError
from spt.report.collect import read_report
from spt.runs.files import write_json
from spt.runtime.settings import Settings
from spt.tasks.base import Classes, Split, TaskData, Values
from spt_cli import app

RNG = random.Random(0)
WORDS = ["film", "was", "long", "dull", "bright", "slow", "loud", "kind", "of", "a", "joke"]


def write(path, header, rows):
    text = [",".join(header), *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(text) + "\n")
    return path


def sensors(n=24, steps=12):
    """One row a step: patient, visit, minute, two values, outcome."""
    return ["patient", "visit", "minute", "rate", "oxygen", "outcome"], [
        [
            visit // 2,
            f"v{visit}",
            minute,
            round(RNG.gauss(70, 5), 2),
            round(RNG.gauss(97, 1), 2),
            "ill" if visit // 2 % 2 else "well",
        ]
        for visit in range(n)
        for minute in range(steps)
    ]


def texts(n=40):
    return [" ".join(RNG.choices(WORDS, k=8)) for _ in range(n)]


def series(n=40, length=8):
    return [" ".join(f"{RNG.gauss(0, 1):.3f}" for _ in range(length)) for _ in range(n)]


CASES = {
    "steps": (
        *sensors(),
        {},
        "long",
        {"id_column": "visit", "time_column": "minute", "group_column": "patient"}
        | {"label_column": "outcome", "value_columns": ["rate", "oxygen"]},
    ),
    "texts": (
        ["body", "stars"],
        [[t, "good" if i % 2 else "bad"] for i, t in enumerate(texts())],
        {},
        "text",
        {"text_column": "body", "label_column": "stars"},
    ),
    "lists": (
        ["signal", "label"],
        [[s, i % 3] for i, s in enumerate(series())],
        {},
        "list",
        {"list_column": "signal", "label_column": "label"},
    ),
    "channels": (
        ["ppg", "ecg", "ill"],
        [[s, t, i % 2] for i, (s, t) in enumerate(zip(series(), series(), strict=True))],
        {},
        "list",
        {"list_columns": ["ppg", "ecg"], "label_column": "ill"},
    ),
    "spectra": (
        ["id", "nm_1", "nm_2", "nm_3", "nm_4", "nm_5", "age", "class"],
        [[f"s{i}", *(round(RNG.random(), 4) for _ in range(5)), 20 + i, "ab"[i % 2]] for i in range(40)],
        {},
        "wide",
        {"value_columns": [f"nm_{k}" for k in range(1, 6)], "label_column": "class", "id_column": "id"},
    ),
    "real": (
        ["signal", "target"],
        [[s, round(RNG.random(), 5)] for s in series()],
        {},
        "list",
        {"list_column": "signal", "label_column": "target", "target": "real"},
    ),
    "split column": (
        ["text", "split", "y"],
        [[t, ["train", "train", "val", "test"][i % 4], i % 2] for i, t in enumerate(texts())],
        {},
        "text",
        {"text_column": "text", "split_column": "split", "label_column": "y"},
    ),
    "no name": (
        ["note", "verdict"],
        [[t, i % 2] for i, t in enumerate(texts())],
        {},
        "text",
        {"label_column": "verdict"},
    ),
    "group": (
        ["speaker", "signal", "word"],
        [[f"p{i % 8}", s, "ab"[i % 2]] for i, s in enumerate(series())],
        {},
        "list",
        {"group_column": "speaker", "label_column": "word"},
    ),
    "no group": (
        ["speaker", "signal", "word"],
        [[f"p{i % 8}", s, "ab"[i % 2]] for i, s in enumerate(series())],
        {"group": "none"},
        "list",
        {"label_column": "word", "group_column": None},
    ),
    "given label": (
        ["text", "label", "other"],
        [[t, i % 2, i % 3] for i, t in enumerate(texts())],
        {"label": "other"},
        "text",
        {"label_column": "other"},
    ),
    "given inputs": (
        ["a", "b", "y"],
        [[s, t, i % 2] for i, (s, t) in enumerate(zip(series(), series(), strict=True))],
        {"inputs": ("b",)},
        "list",
        {"list_column": "b", "list_columns": None},
    ),
    "dates": (
        ["device_id", "timestamp", "x", "label"],
        [[f"d{k}", f"2024-01-{day:02}T00:00:00", k + day, k % 2] for k in range(24) for day in range(1, 9)],
        {},
        "long",
        {"id_column": "device_id", "time_column": "timestamp", "value_columns": ["x"], "label_column": "label"},
    ),
    "labelled steps": (
        ["id", "time", "x", "label"],
        [[k, t, RNG.random(), (t + k) % 2] for k in range(24) for t in range(8)],
        {},
        "long",
        {"per_step": True, "label_column": "label"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_columns_are_found(case, tmp_path):
    header, rows, given, kind, expected = CASES[case]
    found = decide(read_table(write(tmp_path / "rows.csv", header, rows)), ColumnRoles(**given))
    assert found.kind == kind
    assert {name: found.options.get(name) for name in expected} == expected
    complete_part("tasks", case, {"name": "custom", "path": str(tmp_path / "rows.csv"), **found.options})
    assert any(line.startswith("label: ") for line in found.lines)


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_rows_decides_nothing(case, tmp_path):
    header, rows, given, _, _ = CASES[case]
    first = decide(read_table(write(tmp_path / "rows.csv", header, rows)), ColumnRoles(**given))
    for seed in range(3):
        mixed = random.Random(seed).sample(rows, len(rows))
        again = decide(read_table(write(tmp_path / "rows.csv", header, mixed)), ColumnRoles(**given))
        assert (again.kind, again.options, again.lines) == (first.kind, first.options, first.lines)


def test_arrays_are_rows_of_steps_of_channels_with_their_groups(tmp_path):
    x, y = np.arange(4 * 3 * 2).reshape(4, 3, 2), ["a", "b", "a", "b"]
    np.savez(tmp_path / "data.npz", X=x, y=y, groups=[1, 1, 2, 2])
    convert(tmp_path / "data.npz", tmp_path / "data.parquet")
    assert pq.read_table(tmp_path / "data.parquet").to_pydict() == {
        "sequence": x.tolist(),
        "label": y,
        "group": [1, 1, 2, 2],
    }


AMBIGUOUS = {
    "label": (
        ["text", "mood", "tone"],
        [[t, i % 2, i % 3] for i, t in enumerate(texts())],
        {},
        "--label",
        {"mood", "tone"},
    ),
    "input": (
        ["text_a", "text_b", "y"],
        [[t, u, i % 2] for i, (t, u) in enumerate(zip(texts(), texts(), strict=True))],
        {},
        "--inputs",
        {"text_a", "text_b"},
    ),
    "lengths": (
        ["a", "b", "y"],
        [[s, t, i % 2] for i, (s, t) in enumerate(zip(series(), series(length=5), strict=True))],
        {},
        "--inputs",
        {"a", "b"},
    ),
    "group": (
        ["patient", "subject", "x", "y"],
        [[i % 7, i % 9, s, i % 2] for i, s in enumerate(series())],
        {},
        "--group",
        {"patient", "subject", "none"},
    ),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_what_is_ambiguous_is_asked_with_its_choices(case, tmp_path):
    header, rows, given, option, choices = AMBIGUOUS[case]
    table = read_table(write(tmp_path / "rows.csv", header, rows))
    with pytest.raises(AmbiguousError) as caught:
        decide(table, ColumnRoles(**given))
    assert caught.value.option == option and {value for value, _ in caught.value.choices} == choices
    for value in choices:
        assert f"{option} {value}" in str(caught.value)
        field = option.removeprefix("--")
        decide(
            table, ColumnRoles(**given, **{field: (value,) if field == "inputs" else value})
        )  # each of them settles it


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0123, "12.3 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (1.84, "1.8 s")]
)
def test_long_steps_are_told_in_seconds(seconds, told):
    assert _time(seconds) == told


@pytest.mark.parametrize(
    ("header", "cell", "given", "words"),
    [
        (["x1", "x2", "x3", "x4", "x5", "y"], "7", {"time": "x1"}, "--time x1: a row here is a whole sequence"),
        (["a;b;c"], "1;2;3", {}, "if its cells stand between ';', write it with commas"),
        (["note", "label", "label"], "1", {}, "beside several that are called 'label'"),
        (["", ""], "1", {}, "beside several that are called ''"),
    ],
)
def test_what_no_column_can_be_is_said_with_its_reason(tmp_path, header, cell, given, words):
    rows = [[*([cell] * (len(header) - 1)), i % 2] if len(header) > 1 else [cell] for i in range(40)]
    if "time" in given:
        rows = [[*(RNG.random() for _ in header[1:]), i % 2] for i in range(40)]
    with pytest.raises(UsageError, match=re.escape(words)):
        decide(read_table(write(tmp_path / "rows.csv", header, rows)), ColumnRoles(**given))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((0, 5)), "the inputs are empty, with the shape (0, 5)"),
        (np.zeros((4, 5), complex), "the inputs are of the type complex128, not real numbers"),
        (np.full((4, 5), np.inf), "hold what is not a finite number"),
        (np.zeros(4), "the inputs have shape (4,)"),
    ],
)
def test_arrays_that_are_no_inputs_say_what_they_are(tmp_path, x, words):
    np.savez(tmp_path / "data.npz", X=x, y=np.arange(len(x)) % 2)
    with pytest.raises(DataError, match=re.escape(words)):
        convert(tmp_path / "data.npz", tmp_path / "data.parquet")


def test_names_of_files_that_are_not_there_are_no_choice(tmp_path):
    rows = [[s, f"cat/{i}.wav", i % 2] for i, s in enumerate(series())]
    table = read_table(write(tmp_path / "rows.csv", ["signal", "file", "label"], rows))
    assert decide(table, ColumnRoles()).options["list_column"] == "signal"
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "0.wav").touch()
    with pytest.raises(AmbiguousError):
        decide(table, ColumnRoles())


def test_a_group_on_both_sides_of_the_files_is_told(tmp_path):
    for name, rows in (("train", 40), ("test", 20)):
        write(
            tmp_path / f"{name}.csv",
            ["speaker", "signal", "word"],
            [[f"p{i % 4}", s, i % 2] for i, s in enumerate(series(rows))],
        )
    found = decide(read_table(tmp_path), ColumnRoles())
    assert "group_column" not in found.options
    assert any("both sides" in line for line in found.lines)


def test_columns_of_a_folder_come_from_its_training_rows(tmp_path):
    """A test file may hold anything: it is not looked at."""
    write(tmp_path / "train.csv", ["text", "label"], [[t, i % 2] for i, t in enumerate(texts())])
    before = [decide(read_table(tmp_path), ColumnRoles()).lines[1:]]
    write(tmp_path / "test.csv", ["text", "label"], [[t, "odd"] for t in texts(5)])
    after = decide(read_table(tmp_path), ColumnRoles())
    assert "2 classes: 0 20, 1 20" in " ".join(after.lines)
    assert [line for line in before[0] if line.startswith("label")] == [
        line for line in after.lines if line.startswith("label")
    ]


# -------------------------------------------------------------------------------------------------------------- budget


TIMINGS = [
    Timing("a", 0.4, 0.4),
    Timing("b", 0.1, 0.1),
    Timing("c", 0.05, 0.05),
    Timing("bag", 0.01, 0.01, control=True),
]
SHAPE = {"shape": Shape(5, 1, 1, 10), "least": 2.0, "most": 60.0}


def test_models_go_before_seeds_and_the_dearest_first():
    plans = [plan(TIMINGS, seconds, **SHAPE) for seconds in np.geomspace(1e5, 10, 60).tolist()]
    sizes = [(len(each.models), each.seeds) for each in plans]
    assert sizes[0] == (4, 10) and sizes[-1][0] == 1
    assert [models for models, _ in sizes] == sorted((models for models, _ in sizes), reverse=True)
    assert all(seeds >= 5 for models, seeds in sizes if models > 2)
    assert all(seeds >= 3 for models, seeds in sizes if models > 1)
    assert {each.models for each in plans if len(each.models) == 3} == {("a", "b", "c")}  # the control goes first
    assert {each.models for each in plans if len(each.models) == 2} == {("b", "c")}  # then the dearest
    assert all(2.0 <= each.epochs <= 60.0 for each in plans)


def test_a_plan_keeps_to_its_budget():
    for seconds in np.geomspace(50, 1e5, 40).tolist():
        for jobs in (1, 2):
            assert plan(TIMINGS, seconds, jobs=jobs, **SHAPE).seconds <= seconds


def test_a_budget_that_is_too_short_says_which_would_do():
    with pytest.raises(UsageError, match="one model with one seed") as caught:
        plan(TIMINGS, 1.0, **SHAPE)
    wanted = parse_budget(str(caught.value).rpartition("--budget ")[2])
    made = plan(TIMINGS, wanted, **SHAPE)
    assert made.seeds >= 3 and len(made.models) == 2


@pytest.mark.parametrize(
    ("seconds", "timings", "jobs"),
    [(50.0, TIMINGS, 1), (120.0, TIMINGS, 16), (1e5, TIMINGS, 16), (1000.0, [Timing("quick", 1e-3, 1e-3)], 1)],
)
def test_a_plan_is_carried_out_by_as_many_workers_as_it_was_made_for(seconds, timings, jobs):
    """One where all work is over within a minute."""
    template = Template("rows", {}, {}, (), 40, 40, 8, 8, None, False, 60.0)
    found = Layout(template, Part(name="custom"), (), (), tuple(timings), 1, 1, at_once=16)
    made = _planned(found, Request("rows.csv", budget="1h"), seconds)
    shape = Shape(5, 1, 1, template.evaluations)
    times = [each.seconds(made.epochs, shape) for each in timings if each.name in made.models]
    work = sum(times) * made.seeds
    assert made.jobs == jobs and made.seconds <= seconds
    assert made.seconds == pytest.approx(max(work / (1 if jobs == 1 else 0.85 * jobs), *times))


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800.0), ("900s", 900.0), ("2h", 7200.0), ("1h30m", 5400.0)])
def test_budgets_are_read(text, seconds):
    assert parse_budget(text) == seconds
    assert parse_budget(budget_text(seconds)) >= seconds


def test_values_of_a_column_that_look_alike_are_counted_apart():
    column = Column("code")
    column.add(["713426002", "713426003", "5", "0.1", "0.30000000001", "0.3"])
    assert sorted(column.counts()) == ["0.1", "0.3", "0.30000000001", "5", "713426002", "713426003"]
    assert set(column.counts().values()) == {1}


@pytest.mark.parametrize("now", [{}, {"window": 50}, {"window": 100, "stride": 10}])
def test_a_plan_is_gone_on_with_only_where_all_that_was_asked_is_asked_again(tmp_path, now):
    request = Request("rows.csv", out=tmp_path, transforms={"window": 100})
    made = asdict(Plan(("a",), 3, 1.0, 10.0))
    record = {"asked": request.asked, "decisions": [], "findings": [], "plan": made, "timings": [], "jobs": 1}
    write_json(tmp_path / "try.json", record | {"needed": 1.0, "files": {}})
    assert recorded(request) is not None
    with pytest.raises(UsageError, match=f"written with another --{'stride' if 'stride' in now else 'window'}"):
        recorded(replace(request, transforms=now))


def test_what_was_answered_on_the_terminal_need_not_be_given_again(tmp_path):
    folder = tmp_path / "of mine"
    asked = Request("rows.csv", out=folder)
    answered = replace(asked, given=replace(asked.given, label="tone"), answered=("label",))
    made = asdict(Plan(("a",), 3, 1.0, 10.0))
    record = {"asked": answered.asked, "answered": ["label"], "decisions": [], "findings": [], "plan": made}
    folder.mkdir()
    write_json(folder / "try.json", record | {"timings": [], "jobs": 1, "needed": 1.0, "files": {}})
    for same in (asked, answered, replace(answered, answered=())):
        assert recorded(same) is not None
    with pytest.raises(UsageError, match=f"another --label; .*: spt study run '{folder}/study.yaml' --out '"):
        recorded(replace(asked, given=replace(asked.given, label="mood")))
    with pytest.raises(UsageError, match="another --time"):
        recorded(replace(asked, given=replace(asked.given, time="when")))


def test_a_budget_is_never_said_smaller_than_it_is():
    for seconds in (*range(1, 3 * 3600, 7), 5.9, 120.5, 7200.9):
        assert seconds <= parse_budget(budget_text(float(seconds))) < 2 * seconds + 5


def test_both_arms_take_as_many_steps():
    """One of both stages together, the other of finetuning; an evaluation and a start take their time too."""
    one = Timing("a", 0.5, 0.5)
    alone = one.seconds(0.0, Shape(100, 0, 0, 0))
    assert one.seconds(3.0, Shape(100, 0, 0, 0)) - alone == pytest.approx(2 * 300 * 0.5) and alone > 0
    assert one.seconds(0.0, Shape(100, 2, 0, 5)) - alone == pytest.approx(3 * 5 * 2 * 0.5 / 3)


@pytest.mark.parametrize("text", ["", "0m", "30", "-5m", "soon", "1e9h", "nan", "m", "5 minutes"])
def test_odd_budgets_are_refused(text):
    with pytest.raises(UsageError, match="30m"):
        parse_budget(text)


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("length", [16, 512, 4096])
def test_backbones_exist_and_have_reasons(tokens, length):
    for rows in (50, 50_000):
        for candidate in choose(tokens, length, width(rows)):
            complete_part("models", candidate.name, {"name": candidate.name, **candidate.options})
            assert candidate.why.endswith(".")


def test_more_seeds_are_needed_for_smaller_differences():
    spread = [-0.01, 0.0, 0.01, 0.02, -0.02]
    needed = [seeds_needed([mean + each for each in spread]) for mean in (0.05, 0.02, 0.01)]
    assert needed == sorted(needed) and needed[0] >= 3
    assert seeds_needed([0.0001 + each for each in spread]) is None
    assert seeds_needed([0.1]) is None and seeds_needed([0.1, 0.1, 0.1]) is None


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SPT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("SPT_RUNS_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments):
    done = CliRunner().invoke(app, ["try", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_a_terminal_is_asked(folder):
    """The question is shown with numbers, the answer taken, and the plan made; elsewhere it is a usage error."""
    header, rows, *_ = AMBIGUOUS["label"]
    write(folder / "rows.csv", header, rows)
    code, _, said = call("rows.csv", "--dry-run")
    assert code == 2 and "--label mood" in said
    here, there = pty.openpty()
    command = [sys.executable, "-m", "spt_cli", "try", "rows.csv", "--dry-run", "--budget", "2s"]
    env = environment({"SPT_CACHE_DIR": str(folder / "cache")})
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=there, stdout=subprocess.DEVNULL, stderr=there)
    os.close(there)
    shown, answered, until = b"", False, time.monotonic() + 120
    while time.monotonic() < until:
        if select.select([here], [], [], 0.5)[0]:
            try:
                shown += os.read(here, 4096)
            except OSError:
                break
        if b"Which" in shown and not answered:
            os.write(here, b"7\n")  # out of range: asked again
            os.write(here, b"2\n")
            answered = True
        if process.poll() is not None and not select.select([here], [], [], 0)[0]:
            break
    process.wait(60)
    os.close(here)
    text = shown.decode(errors="replace")
    assert "1  mood" in text and "2  tone" in text
    assert "a number from 1 to 2" in text and "label: column 'tone'" in text


def tiny(folder):
    header, rows = sensors(30, 8)
    return write(folder / "tiny.csv", header, rows)


@pytest.fixture
def quick(folder, monkeypatch):
    """A table, of which one small model with two seeds is made."""
    tiny(folder)
    monkeypatch.setattr("spt.advisor.recipes.Template.most_epochs", property(lambda _: 2.0))
    monkeypatch.setattr("spt.advisor.recipes.Template.least_epochs", property(lambda _: 1.0))
    monkeypatch.setattr("spt.advisor.advise.plan", lambda *_, **__: Plan(("tcn",), 2, 2.0, 1.0, ("transformer",)))
    monkeypatch.setattr("spt.execution.run_study.make_baselines", lambda *_: {})  # which have tests of their own
    monkeypatch.setattr(
        "spt.advisor.advise.choose", lambda *given: [each for each in choose(*given) if each.name == "tcn"]
    )
    return folder


def results(made):
    return {path: path.stat().st_mtime_ns for path in made.glob("runs/*/result.json")}


def test_from_a_file_to_an_answer(quick, monkeypatch):
    """Decisions, recipes, runs, answer; the same command continues, and edited files are left alone."""
    made = quick / "tiny-try"
    code, out, said = call("tiny.csv", "--budget", "90s", "--dry-run", "--json", "--cpu")
    assert code == 0, said
    preview = json.loads(out)
    assert preview["plan"]["models"] == ["tcn"] and not made.exists()
    with monkeypatch.context() as clock:  # the budget ends behind a pretraining and a finetuning
        at_end = SimpleNamespace(monotonic=lambda: 1e12 if len(results(made)) >= 2 else 0.0)
        clock.setattr("spt.execution.queue.time", at_end)
        code, out, said = call("tiny.csv", "--budget", "90s", "--json", "--cpu")
    assert code == 0, said
    answered = json.loads(out)["answer"]
    assert "The budget ended before 3 runs were made; the same command makes them." in answered
    assert len(kept := results(made)) == 2
    code, out, said = call("tiny.csv", "--budget", "90s", "--json", "--cpu")
    assert code == 0 and kept.items() <= results(made).items(), said
    answered = json.loads(out)
    assert answered["recommendation"] is None and answered["answer"].startswith("Not decided")
    assert len(answered["rows"]) == 1 and answered["rows"][0]["n"] == 2
    assert answered["decisions"] == preview["decisions"] or answered["decisions"]
    assert {"tcn.yaml", "study.yaml", "try.json", "runs"} == {path.name for path in made.iterdir()}
    text = (made / "tcn.yaml").read_text()
    recipe = yaml.safe_load(text)
    assert "# - label: column 'outcome'" in text and recipe["task"]["path"] == "../tiny.csv"
    trains = [recipe[stage]["train"]["epochs"] for stage in ("pretrain", "finetune", "scratch")]
    assert trains[0] + trains[1] == pytest.approx(trains[2])
    before = results(made)
    code, again, said = call("tiny.csv", "--budget", "90s", "--json", "--cpu")
    assert code == 0 and json.loads(again)["answer"] == answered["answer"]
    code, words, _ = call("tiny.csv", "--budget", "90s", "--cpu")
    assert code == 0 and words.split() == answered["answer"].split()
    assert max(map(len, words.splitlines())) <= 80
    assert results(made) == before
    code, _, said = call("tiny.csv", "--budget", "2m")
    assert code == 2 and "--budget" in said and "spt study run" in said
    (made / "tcn.yaml").write_text(text.replace("epochs", "epochs "))
    code, _, said = call("tiny.csv", "--budget", "90s")
    assert code == 2 and "was changed" in said


# ------------------------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize(("real", "metric"), [(False, "auroc"), (True, "spearman"), (False, None), (True, None)])
def test_a_metric_goes_into_the_recipes(real, metric, tmp_path):
    task = {"value_prefix": "x", "label_column": "y", "target": "real" if real else "classes"}
    shape = {"rows": 90, "labelled": 90, "validation": 20, "length": 8, "tokens": None, "real": real, "epochs": 3.0}
    template = Template("rows.csv", task, {"path": str(tmp_path / "rows.csv")}, (), **shape, metric=metric)
    candidate = choose(False, 8, 16)[0]
    objective = yaml.safe_load(recipe_text(template, candidate, {}, tmp_path))["finetune"].get("objective", {})
    assert objective.get("metric") == metric and objective.get("scale") == ("standard" if real else None)


@pytest.mark.parametrize("labelled", [20, 50, 999, 1000])
def test_arms_have_equal_budgets_however_few_rows_have_labels(labelled, tmp_path):
    task = {"value_prefix": "x", "label_column": "y"}
    shape = {"rows": 1000, "labelled": labelled, "validation": 20, "length": 8, "tokens": None, "real": False}
    template = Template("rows.csv", task, {"path": str(tmp_path / "rows.csv")}, (), **shape, epochs=24.0)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(template, choose(False, 8, 16)[0], {}, tmp_path))
    pretrain, finetune, scratch = map(load(str(path)).recipe.train, ("pretrain", "finetune", "scratch"))
    if labelled < 1000:
        steps = -(-1000 // scratch.batch_size) * 24
        assert (pretrain.steps, finetune.steps, scratch.steps) == (steps * 2 // 3, steps // 3, steps)
        assert "as many updates as both stages of SPT together" in path.read_text()
        assert all(each.steps // each.evaluate_every == 10 for each in (pretrain, finetune, scratch))
    else:
        assert (pretrain.epochs, finetune.epochs, scratch.epochs) == (16, 8, 24)
        assert "as many epochs as both stages of SPT together" in path.read_text()


def test_a_stride_in_seconds_is_told_as_it_was_given():
    given, period = {"stride": "2s", "window": "8s"}, LabelPeriod(10, 400, 1000)
    options = {"label_at": "mean"}
    long = {"length": 50_000, "interval": 0.01, "recordings": 4, "most": 1000, "values": True}
    chosen, (line,) = label_windows(options, {"stride": "2s"}, period, 1000)
    assert "one every 2s (window" in line and "stride" not in chosen
    chosen, (line,) = shortened({}, {"stride": "2s"}, **long)
    assert "one every 2s, 4 steps" in line and "stride" not in chosen and chosen["window"] > 0
    assert shortened({}, given, **long) == ({}, ())


def test_a_stride_waits_for_a_window_and_is_refused_without_one(quick):
    header, rows, *_ = CASES["steps"]
    write(quick / "visits.csv", header, rows)
    asked = Request("visits.csv", ColumnRoles(), "90s", settings=Settings(cpu=True, quiet=True))
    with pytest.raises(UsageError, match=r"--stride 2: sequences of up to 12 steps are not cut into windows here"):
        advise(replace(asked, transforms={"stride": 2}), lambda _: None)
    parts = advise(replace(asked, transforms={"stride": 2, "window": 4}), lambda _: None)
    assert "stride: 2" in next(iter(parts.files.values()))


def test_how_many_recordings_are_scored_is_told(quick):
    rows = [{"x": [float(np.sin(9 * i + j * (1 + i % 2))) for j in range(12)], "y": "ab"[i % 2]} for i in range(60)]
    (quick / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told: list[str] = []
    asked = Request("d.jsonl", ColumnRoles(), "90s", settings=Settings(cpu=True, quiet=True))
    advise(replace(asked, transforms={"window": 4}), told.append)
    (line,) = [line for line in told if line.startswith("rows: ")]
    assert line.startswith(
        "rows: 108 train, 36 validation, 36 test (windows; 12 recordings are scored in validation, 12 in test)"
    )


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("balanced", "balanced"),
        ("rare=5,usual=1", {"rare": 5.0, "usual": 1.0}),
        ("a=b=0.5", {"a=b": 0.5}),
        (None, None),
    ],
)
def test_what_is_said_of_classes_goes_into_both_arms(text, weights, tmp_path):
    task = {"value_prefix": "x", "label_column": "y"}
    shape = {"rows": 90, "labelled": 90, "validation": 20, "length": 8, "tokens": None, "real": False, "epochs": 3.0}
    said = ClassOptions("1", given_weights(text), "balanced") if text else ClassOptions()
    template = Template("rows.csv", task, {"path": str(tmp_path / "rows.csv")}, (), **shape, classes=said)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(template, choose(False, 8, 16)[0], {}, tmp_path))
    recipe = load(str(path)).recipe
    options = recipe.finetune.objective.options
    assert options["class_weights"] == (weights or "none") and options["positive"] == ("1" if text else None)
    sampling = "balanced" if text else None
    assert recipe.train("finetune").sampling == recipe.train("scratch").sampling == sampling
    assert recipe.train("pretrain").sampling is None


def test_an_unknown_metric_is_refused_before_the_data_are_read(tmp_path):
    with pytest.raises(UsageError, match="--metric aurok: unknown metric; did you mean auroc"):
        advise(Request(str(tmp_path / "nowhere.csv"), metric="aurok"), print)


@pytest.mark.parametrize(("ill", "metric", "told"), [(2, None, True), (9, None, False), (2, "mcc", False)])
def test_of_two_unbalanced_classes_a_better_metric_is_named(ill, metric, told):
    labels = np.arange(20) < ill
    split = Split.from_rows(np.zeros((20, 4, 1), np.float32), labels.astype(np.int64))
    data = TaskData(Values(1), Classes(2), split, split, split, classes=("well", "ill"))
    said = _better_metric(Request("rows.csv", metric=metric), data)
    assert bool(said) == told and all("90% of the training answers are 'well'" in line for line in said)


@pytest.mark.slow
def test_killed_it_goes_on_to_the_same_answer(quick):
    """A real process, killed while it makes its runs."""
    command, made = ["tiny.csv", "--budget", "10m", "--json", "--cpu"], quick / "tiny-try"
    code, whole, said = call(*command)
    assert code == 0 and len(results(made)) == 6, said
    shutil.rmtree(made / "runs")
    env = environment({"SPT_CACHE_DIR": str(quick / "cache"), "OMP_NUM_THREADS": "1"})
    process = subprocess.Popen([sys.executable, "-m", "spt_cli", "try", *command], cwd=quick, env=env)
    until = time.monotonic() + 200
    while process.poll() is None and len(results(made)) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL and 2 <= len(kept := results(made)) < 6
    code, again, said = call(*command)
    assert code == 0 and kept.items() <= results(made).items(), said
    whole, again = json.loads(whole), json.loads(again)
    assert again["answer"] == whole["answer"] and again["recommendation"] == whole["recommendation"]
    scores = ("scratch", "spt", "delta", "low", "high", "n", "decision")
    assert [[row[key] for key in scores] for row in again["rows"]] == [
        [row[key] for key in scores] for row in whole["rows"]
    ]


def test_a_copy_of_a_data_set_of_the_hub_is_tried_by_its_name(quick):
    header, rows, *_ = CASES["texts"]
    copy = quick / "data" / "hub" / "owner--films"
    copy.mkdir(parents=True)
    table = pa.table({name: [str(row[k]) for row in rows] for k, name in enumerate(header)})
    pq.write_table(table, copy / "train.parquet")
    advice = advise(Request("owner/films", budget="90s", settings=Settings(cpu=True, quiet=True)), lambda _: None)
    recipe = yaml.safe_load(advice.files["tcn.yaml"])
    assert recipe["task"]["hub"] == "owner/films" and "path" not in recipe["task"]
    assert (recipe["task"]["text_column"], recipe["task"]["label_column"]) == ("body", "stars")


# ---------------------------------------------------------------------------------------------------------- the answer


def answered(folder, seeds=5):
    return answer(read_report([folder]), folder, folder.parent, seeds, "10m")


LOW, UNLIKE = [-0.01, -0.005, 0.0, 0.005, 0.01], [0.003, -0.002, 0.001, -0.004, 0.002]


def around(mean, differences=LOW):
    return [mean + each for each in differences]


@pytest.mark.parametrize(
    ("scratch", "spt", "arm", "words"),
    [
        (around(0.5), around(0.7, UNLIKE), "spt", "Use transformer with self-pretraining: it beats training from"),
        (around(0.7), around(0.5, UNLIKE), "scratch", "Use transformer trained from scratch: it beats self-pretrain"),
        (around(0.5), around(0.5), None, "Self-pretraining changes nothing for transformer: both arms score the same"),
        (around(0.5), around(0.5, UNLIKE), None, "Whether self-pretraining helps transformer is not decided"),
        ([0.5, 0.51], [0.7, 0.72], None, "Not decided: transformer has 2 complete pairs of runs, and fewer than three"),
        ([0.5], [0.7], None, "Not decided: transformer has 1 complete pair of runs"),
    ],
)
def test_the_answer_claims_what_the_runs_show(tmp_path, scratch, spt, arm, words):
    said = answered(compared(tmp_path / "runs", scratch, spt), seeds=len(scratch))
    assert said.words.startswith(words), said.words
    assert (said.recommendation or {}).get("arm") == arm
    if arm is not None:
        assert "by 20.00 points" in said.words and said.words.count("which is decided") == 1
        best = sum(spt if arm == "spt" else scratch) / len(spt)
        assert said.recommendation["test"] == pytest.approx(best) and said.recommendation["seeds"] == 5
        assert f"has test accuracy {100 * best:.2f} %" in said.words
    assert ("Three seeds at least are needed: --budget 10m with another --out has them" in said.words) == (
        len(scratch) < 3
    )


def test_of_two_models_validation_chooses_and_the_other_may_be_beaten(tmp_path):
    """Of a loss the smallest; the better model is decided in the arm that is recommended."""
    for metric, higher in (("accuracy", True), ("loss", False)):
        root, sign = tmp_path / metric / "runs", 1 if higher else -1
        given = {"metric": metric, "higher_is_better": higher}
        cells = [
            *arms(root, 0, "a", around(0.5), around(0.5 + 0.2 * sign, UNLIKE), val={metric: 0.5}, **given),
            *arms(root, 1, "b", around(0.5), around(0.5 + 0.1 * sign), val={metric: 0.5 - 0.1 * sign}, **given),
        ]
        rename(root, "b", "dlr")
        said = answered(study(root, "compare", [{}, {"name": "other", "model": "dlr"}], cells))
        assert said.leading["model"] == said.recommendation["model"] == "transformer", said.words
        assert said.recommendation["arm"] == "spt" and said.recommendation["model_decided"]
        assert "It is better than dlr, which is decided too." in said.words


def test_of_two_models_one_without_enough_seeds_does_not_lead(tmp_path):
    """However good its one seed is on validation; the leading arm is the one that is recommended."""
    root = tmp_path / "runs"
    cells = [
        *arms(root, 0, "a", around(0.5), around(0.7, UNLIKE), val={"accuracy": 0.5}),
        *arms(root, 1, "b", [0.9], [0.9], val={"accuracy": 0.9}),
    ]
    rename(root, "b", "dlr")
    said = answered(study(root, "compare", [{}, {"name": "other", "model": "dlr"}], cells))
    assert said.leading["model"] == said.recommendation["model"] == "transformer"
    for name, arm, val in (("spt", "spt", 0.4), ("scratch", "scratch", 0.6)):  # test decides, whatever validation says
        root = tmp_path / name
        finished = [
            *(
                finish(root, "scratch", i, s, val={"accuracy": 0.5})
                for i, s in enumerate(around(0.5 + 0.4 * (arm != "spt")))
            ),
            *(finish(root, "spt", i, s, val={"accuracy": val}) for i, s in enumerate(around(0.7, UNLIKE))),
        ]
        said = answered(made_plan(root, finished))
        assert said.recommendation["arm"] == arm != said.leading["arm"]
        assert said.leading["test"] == pytest.approx(0.5 if arm == "spt" else 0.7), "of the leading arm itself"
        best = 0.7 if arm == "spt" else 0.9
        assert said.recommendation["test"] == pytest.approx(best) and f"{ARM[arm]}, has test accuracy" in said.words


def test_a_model_that_is_worse_in_the_other_arm_alone_is_not_beaten(tmp_path):
    root = tmp_path / "runs"
    cells = [
        *arms(root, 0, "a", around(0.5), around(0.7, UNLIKE), val={"accuracy": 0.5}),
        *arms(root, 1, "b", around(0.3, UNLIKE), around(0.7), val={"accuracy": 0.4}),
    ]
    rename(root, "b", "dlr")
    said = answered(study(root, "compare", [{}, {"name": "other", "model": "dlr"}], cells))
    assert said.recommendation["arm"] == "spt" and not said.recommendation["model_decided"]
    assert "dlr is not shown to be worse" in said.words


@pytest.mark.parametrize(("metric", "higher"), [("accuracy", True), ("loss", False)])
def test_what_is_decided_of_the_other_models_is_told(tmp_path, metric, higher):
    root, sign = tmp_path / "runs", 1 if higher else -1
    given = {"metric": metric, "higher_is_better": higher}
    cells = [
        *arms(root, 0, "a", around(0.5), around(0.5 + 0.001 * sign, UNLIKE), val={metric: 0.9 * sign}, **given),
        *arms(root, 1, "b", around(0.5), around(0.5 - 0.2 * sign, UNLIKE), val={metric: 0.5 * sign}, **given),
        *arms(root, 2, "c", around(0.3), around(0.3 + 0.1 * sign, UNLIKE), val={metric: 0.4 * sign}, **given),
        *arms(root, 3, "d", around(0.3), around(0.3, UNLIKE), val={metric: 0.4 * sign}, **given),
    ]
    rows = [{}]
    for name, model in (("b", "dlr"), ("c", "s4"), ("d", "s5")):
        rename(root, name, model)
        rows.append({"name": "other", "model": model})
    said = answered(study(root, "compare", rows, cells)).words
    assert said.startswith("Whether self-pretraining helps transformer is not decided"), said
    size = ("20.00 points", "10.00 points") if higher else ("0.200 in loss", "0.100 in loss")
    told = f"Of the others, self-pretraining hurts dlr by {size[0]} and helps s4 by {size[1]}, which is decided."
    assert told in said, said


def rename(root, name, model):
    for path in root.glob(f"finetune-{name}*/result.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "model": model, "recipe": "other"}))


def test_the_answer_says_what_would_tell_more(tmp_path):
    """More seeds, a longer training, more test rows: where each of them would."""
    wide = around(0.5), around(0.51)[::-1]
    said = answered(compared(tmp_path / "a", *wide)).words
    assert "seeds would show a difference of this size: spt study run" in said
    apart = answered(compared(tmp_path / "of mine", *wide)).words
    assert f"spt study run '{tmp_path}/of mine/study.yaml' --seeds" in apart and "/of mine/runs'" in apart
    few = {"train": SPLITS["train"], "test": SPLITS["test"].model_copy(update={"rows": 20})}
    said = answered(compared(tmp_path / "b", *wide, data=few)).words
    assert "The test split has 20 rows, so one of them is 5.00 points" in said
    late = answered(compared(tmp_path / "c", *wide, best_step=100, own=SCRATCH)).words
    assert "Most runs were best at their last step" in late and "Most runs" not in said and "split has" not in late
    perfect = answered(compared(tmp_path / "d", [1.0] * 5, [1.0] * 5, best_step=100, own=SCRATCH)).words
    assert "Most runs" not in perfect


def test_without_a_finished_run_nothing_is_decided(tmp_path):
    cell = {"row": 0, "arm": "scratch", "seed": 0, "run": "finetune-0", "parent": None}
    said = answered(made_plan(tmp_path / "runs", [cell]))
    assert said.words.startswith("Not decided: no run has finished") and said.recommendation is said.leading is None
