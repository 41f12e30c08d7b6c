"""`spt try`: columns are found from names and contents, what is ambiguous is asked, plans keep to a budget, and the
answer claims no more than the runs show."""

import json
import os
import pty
import random
import select
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from tiny import environment
from typer.testing import CliRunner

from spt.advisor.answer import seeds_needed
from spt.advisor.backbones import choose, width
from spt.advisor.budget import Plan, Shape, Timing, budget_text, parse_budget, plan
from spt.advisor.columns import AmbiguousError, ColumnRoles, decide
from spt.advisor.table import read_table
from spt.config.load import complete_part
from spt.errors import UsageError
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


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800.0), ("900s", 900.0), ("2h", 7200.0), ("1h30m", 5400.0)])
def test_budgets_are_read(text, seconds):
    assert parse_budget(text) == seconds
    assert parse_budget(budget_text(seconds)) >= seconds


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


def test_from_a_file_to_an_answer(folder, monkeypatch):
    """Decisions, recipes, runs, answer; the same command continues, and edited files are left alone."""
    tiny(folder)
    monkeypatch.setattr("spt.advisor.recipes.Template.most_epochs", property(lambda _: 2.0))
    monkeypatch.setattr("spt.advisor.recipes.Template.least_epochs", property(lambda _: 1.0))
    monkeypatch.setattr("spt.advisor.advise.plan", lambda *_, **__: Plan(("tcn",), 2, 2.0, 1.0, ("transformer",)))
    monkeypatch.setattr("spt.execution.run_study.make_baselines", lambda *_: {})  # which have tests of their own
    monkeypatch.setattr(
        "spt.advisor.advise.choose", lambda *given: [each for each in choose(*given) if each.name == "tcn"]
    )
    code, out, said = call("tiny.csv", "--budget", "90s", "--dry-run", "--json", "--cpu")
    assert code == 0, said
    preview = json.loads(out)
    assert preview["plan"]["models"] == ["tcn"] and not (folder / "tiny-try").exists()
    code, out, said = call("tiny.csv", "--budget", "90s", "--json", "--cpu")
    assert code == 0, said
    told = json.loads(out)
    assert told["recommendation"] is None and told["answer"].startswith("Not decided")
    assert len(told["rows"]) == 1 and told["rows"][0]["n"] == 2
    assert told["decisions"] == preview["decisions"] or told["decisions"]
    made = folder / "tiny-try"
    assert {"tcn.yaml", "study.yaml", "try.json", "runs"} == {path.name for path in made.iterdir()}
    text = (made / "tcn.yaml").read_text()
    recipe = yaml.safe_load(text)
    assert "# - label: column 'outcome'" in text and recipe["task"]["path"] == "../tiny.csv"
    trains = [recipe[stage]["train"]["epochs"] for stage in ("pretrain", "finetune", "scratch")]
    assert trains[0] + trains[1] == pytest.approx(trains[2])
    results = {path: path.stat().st_mtime_ns for path in made.glob("runs/*/result.json")}
    code, again, said = call("tiny.csv", "--budget", "90s", "--json", "--cpu")
    assert code == 0 and json.loads(again)["answer"] == told["answer"]
    assert {path: path.stat().st_mtime_ns for path in made.glob("runs/*/result.json")} == results
    code, _, said = call("tiny.csv", "--budget", "2m")
    assert code == 2 and "--budget" in said and "spt study run" in said
    (made / "tcn.yaml").write_text(text.replace("epochs", "epochs "))
    code, _, said = call("tiny.csv", "--budget", "90s")
    assert code == 2 and "was changed" in said
