"""`spt bench`: what it measures is there, adds up, and does not depend on how fast this machine is."""

import json
from unittest.mock import Mock

import pytest
import torch
import yaml
from jsonschema import validate
from tiny import RECIPE, ROOT, changed, model_file, recipe_file, spt
from torch import nn
from typer.testing import CliRunner

from spt.bench import models, operations, parts, slopes, study, tables, timing
from spt.bench.cases import OPERATIONS
from spt.bench.models import parse_models
from spt.bench.operations import Case, Trial, parse_operations
from spt.bench.parts import shares
from spt.bench.peaks import KilledError, TooSlowError, peaks_in_subprocess
from spt.bench.timing import Times, Timings, alternate
from spt.bench.training_step import Step, Variant
from spt.cli.output import print_json
from spt.config.plugins import listing
from spt.errors import BackendError, UsageError
from spt.models.base import Backbone
from spt.studies.equal_size import TOLERANCE
from spt_cli import app

SECONDS = {"type": "object", "additionalProperties": {"type": ["number", "null"], "minimum": 0}}
SHARE = {"type": "number", "minimum": 0, "maximum": 1}
COMMON = {
    "seconds": {**SECONDS, "required": ["forward", "backward", "optimiser", "step"]},
    "step_quartiles": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "number"}},
    "steps": {"type": "integer", "minimum": 1},
    "ratio": {**SECONDS, "required": ["forward", "backward", "optimiser", "step"]},
    "peak_bytes": {"type": ["integer", "null"], "minimum": 0},
    "peak_ratio": {"type": ["number", "null"]},
    "backend": {"type": "string"},
}
ROWS = {
    "model": COMMON
    | {
        "model": {"type": "string"},
        "options": {"type": "object", "required": ["d_model", "n_layers"]},
        "length": {"type": "integer"},
        "batch": {"type": "integer"},
        "precision": {"enum": ["fp32", "bf16"]},
        "attention": {"enum": ["auto", "sdpa", "varlen", "flash", "math"]},
        "compiled": {"type": "boolean"},
        "parameters": {"type": "integer"},
        "positions_per_second": {"type": "number", "exclusiveMinimum": 0},
        "flops_per_second": {"type": "number", "exclusiveMinimum": 0},
        "failed": {"type": ["string", "null"]},
        "launches": {"type": ["object", "null"], "additionalProperties": {"type": "integer", "minimum": 1}},
        "shares": {
            "type": "object",
            "properties": dict.fromkeys(timing.PARTS, SHARE),
            "required": list(timing.PARTS),
            "additionalProperties": False,
        },
    },
    "op": COMMON
    | {
        "operation": {"enum": list(OPERATIONS)},
        "sizes": {"type": "object", "additionalProperties": {"type": "integer"}},
        "error": {"type": "number", "minimum": 0},
        "gradient_error": {"type": "number", "minimum": 0},
    },
}


def schema(kind):
    row = {"type": "object", "properties": ROWS[kind], "required": list(ROWS[kind])}
    top = {
        "kind": {"const": kind},
        "rounds": {"type": "integer"},
        "environment": {"type": "object", "required": ["device", "threads", "packages"]},
        "rows": {"type": "array", "minItems": 1, "items": row},
    }
    return {"type": "object", "properties": top, "required": list(top)}


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def here(monkeypatch):
    """Peaks found by this process: a process more takes seconds, and has a test of its own."""

    def peak(job):
        try:
            return (
                models.peak_of_step(Step(Variant(**job)))
                if "model" in job
                else operations.peak_of_operation(Case(**job))
            )
        except Exception:
            return None

    for module in (models, operations):
        monkeypatch.setattr(module, "peaks_in_subprocess", lambda jobs: [peak(job) for job in jobs])


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Tiny work on two threads waits for a busy neighbour."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)


# ----------------------------------------------------------------------------------------------------------- models


@pytest.mark.slow
def test_model_as_json(tmp_path):
    """In a real process, with peaks from another one; models of a user too, which may print."""
    file = model_file(tmp_path, forward="print('noise') or x")
    arguments = ("transformer", "n_heads=2", file, "--length", "16,32", "--quick", "--json")
    done = spt("bench", "model", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    validate(found, schema("model"))
    rows = found["rows"]
    assert [(row["length"], row["options"]["d_model"]) for row in rows] == [(16, 16), (32, 16), (16, 16), (32, 16)]
    assert rows[0]["ratio"]["step"] == rows[0]["peak_ratio"] == 1
    assert rows[0]["options"]["n_heads"] == 2 and "n_heads" not in rows[2]["options"]
    for row in rows:
        assert sum(row["shares"].values()) == pytest.approx(1) and row["failed"] is None
        assert row["seconds"]["step"] > max(row["seconds"][part] for part in ("forward", "backward", "optimiser"))
    assert rows[0]["peak_bytes"] > 0
    assert rows[0]["shares"]["attention"] > 0 and rows[2]["shares"]["attention"] == 0
    assert not list(tmp_path.glob("runs"))


def test_models_of_as_many_parameters():
    arguments = [
        "transformer",
        "d_model=32",
        "n_heads=4",
        "d_ff=48",
        "dlr",
        "d_state=32",
        "mingru",
        "bag_of_steps",
        "d_ff=48",
    ]
    rows = parse_models(arguments, length="64,128", batch="2", layers=2, match_parameters=True, cpu=True)
    assert [row.options["d_model"] for row in rows[:2]] == [32, 32] and rows[0].given == "d_model=32 n_heads=4 d_ff=48"
    counts = [sum(p.numel() for p in Step(row).model.parameters()) for row in rows]
    assert all(abs(count / counts[0] - 1) <= TOLERANCE for count in counts)
    assert [row.length for row in rows] == [64, 128] * 4 and rows[-1].given.startswith("d_ff=48 d_model=")
    assert rows[-1].options["d_ff"] / 48 == pytest.approx(rows[-1].options["d_model"] / 128, rel=0.1)
    with pytest.raises(UsageError, match="no width gives it"):
        parse_models(["transformer", "d_model=8", "time_mixer"], length="4096", layers=1, match_parameters=True)


def test_what_is_printed(here):
    text = call(
        "model", "transformer", "transformer", "n_heads=2", "--quick", "--precision", "fp32,bf16", "--cpu"
    ).stdout
    assert "transformer, fp32" in text and "n_heads=2" in text and "×1.00" in text
    for word in ("forward", "backward", "optimiser", "peak", "attn", "linear", " thread", "medians of 2 rounds"):
        assert word in text
    assert "kernel" not in text  # no part of any of these
    text = call("op", "convolution", "--quick").stdout
    assert "convolution B=2" in text and "plain" in text and "torch" in text and "e-0" in text


QUICK = ("transformer", "s4", "s5", "hf")


@pytest.mark.parametrize(
    "name",
    [row.name if row.name in QUICK else pytest.param(row.name, marks=pytest.mark.slow) for row in listing("models")],
)
def test_every_model_can_be_measured(name, here):
    """And what makes a kernel, a scan or attention is seen to."""
    (variant,) = parse_models([name], length="70", batch="2", layers=1, width=8, cpu=True)
    step = Step(variant)
    found = shares(step, step().step)
    assert sum(found.values()) == pytest.approx(1) and found["optimiser"] > 0
    assert (found["linear"] > 0) == (name != "tcn"), "of convolutions alone"
    kernel = any(module.rpartition(".")[2] == "kernel" for module, _ in step.model.named_modules())
    softmax = {"transformer", "dlr_attention", "linformer", "mega", "spade", "hf"}
    linear = {"retnet", "gla", "mamba2", "deltanet", "gated_deltanet", "xlstm"}
    scans = {"s5", "lru", "linoss", "mingru", "minlstm", "rglru", "hgrn", "mamba", "rnn"}
    short = {"tcn", "rglru", "mamba", "mamba2", "deltanet", "gated_deltanet", "xlstm"}  # convolutions over few steps
    expected = {"kernel": kernel, "convolution": kernel or name in short, "attention": name in softmax | linear}
    assert found["scan"] > 0 or name not in scans, found
    for part, there in expected.items():
        assert (found[part] > 0) == there, (part, found)
    assert step.operations() > 0


def test_an_option_within_an_option_is_named_as_in_a_recipe():
    """Of the one model before it."""
    variants = parse_models(["options={attention_bias: true}", "hf", "options.intermediate_size=8", "hf"], quick=True)
    assert [variant.options["options"] for variant in variants] == [
        {"attention_bias": True, "intermediate_size": 8},
        {"attention_bias": True},
    ]
    wide = ["transformer", "hf", "d_model=32", "options.intermediate_size=64", "options.num_attention_heads=1"]
    _, scaled = parse_models(wide, width=64, layers=1, match_parameters=True)
    assert scaled.options["options"]["intermediate_size"] == 2 * scaled.options["d_model"] > 64


def test_a_step_does_the_same_work_every_time():
    """Learning rates are 0: the weights stay, AdamW's state does not."""
    (variant,) = parse_models(["transformer"], quick=True, cpu=True)
    step = Step(variant)
    before = [p.detach().clone() for p in step.parameters]
    step(optimise=False)
    assert not step.optimizer.state
    for _ in range(3):
        step()
    assert all(torch.equal(a, b) for a, b in zip(before, step.parameters, strict=True))
    assert all(float(state["exp_avg_sq"].sum()) > 0 for state in step.optimizer.state.values())
    assert len(step.optimizer.state) == len(step.parameters) and all(p.grad is None for p in step.parameters)


class Parts(nn.Module):
    """One known piece of work in each part."""

    def __init__(self):
        super().__init__()
        self.kernel = Square()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x, context):
        torch.cat([self.kernel(self.weight), self.weight])
        return x

    def flops(self, length):
        return 1.0


class Square(nn.Module):
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x @ x))


def recorded(function, model=None):
    """Operations and their parts, of forward and backward pass."""
    from torch.profiler import profile

    with parts.marked_kernels(model or nn.Module()), profile() as events:
        function().sum().backward()
    finder = parts._PartFinder(events.events())
    return {(event.name, finder.part(event)) for event in events.events()}


def test_a_part_owns_all_that_is_done_within_it():
    """A product and a transform are the kernel's own where a `kernel` makes them, also in the backward pass."""
    model, x = Parts(), torch.randn(8, 8, requires_grad=True)
    inside = recorded(lambda: model.kernel(model.weight), model)
    for name in ("aten::mm", "aten::_fft_r2c", "aten::_fft_c2r"):
        assert {part for event, part in inside if event == name} == {"kernel"}
    outside = recorded(lambda: torch.fft.irfft(torch.fft.rfft(x @ x)).tanh())
    for name, part in (
        ("aten::mm", "linear"),
        ("aten::_fft_r2c", "convolution"),
        ("aten::_fft_c2r", "convolution"),
        ("aten::tanh", "pointwise"),
        ("aten::tanh_backward", "pointwise"),
    ):
        assert {found for event, found in outside if event == name} == {part}
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    attention = recorded(lambda: nn.functional.scaled_dot_product_attention(q, q, q))
    assert {part for event, part in attention if "flash_attention" in event} == {"attention"}
    gru, scan = nn.GRU(4, 4), torch.randn(3, 1, 4)
    assert {part for event, part in recorded(lambda: gru(scan)[0]) if event in ("aten::mm", "aten::addmm")} == {"scan"}


def test_our_operations_are_known_by_their_module():
    cases = {name: Trial(Case(name, OPERATIONS[name].small, "torch", cpu=True)) for name in OPERATIONS}
    expected = {
        "convolution": "convolution",
        "vandermonde": "kernel",
        "vandermonde_shared": "kernel",
        "dplr_krylov": "kernel",
        "scan": "scan",
        "scan_varying": "scan",
    }
    for name, part in expected.items():
        found = recorded(lambda trial=cases[name]: torch.view_as_real(y) if (y := trial._forward()).is_complex() else y)
        functions = {event: where for event, where in found if event.startswith("_")}
        assert functions and set(functions.values()) == {part}, name


def test_a_variant_without_memory_is_a_row(here, monkeypatch):
    real = Backbone.forward

    def forward(backbone, x, context):
        if len(x) > 2:
            raise torch.OutOfMemoryError("none left")
        return real(backbone, x, context)

    monkeypatch.setattr(Backbone, "forward", forward)
    result = call("model", "transformer", "--quick", "--batch", "4,2", "--json", "--cpu")
    big, small = json.loads(result.stdout)["rows"]
    assert big["failed"] == "out of memory" and "seconds" not in big
    assert small["ratio"]["step"] == 1 and "batch 4" in result.stderr
    assert "out of memory" in call("model", "transformer", "--quick", "--batch", "4,2", "--cpu").stdout
    assert "smaller batch" in call("model", "transformer", "--quick", "--batch", "3", "--cpu", code=4).stderr


@pytest.mark.slow
def test_a_killed_process_is_reported(tmp_path):
    """As the system does where memory is short: it ends the process that measures the peak, and that alone."""
    file = model_file(tmp_path)
    kill = "import os, sys; sys.argv[0].endswith('measure_peaks.py') and os.kill(os.getpid(), 9)"
    file.write_text(file.read_text().replace("x = self.map(x)", f"{kill}; x = self.map(x)"))
    variants = parse_models([str(file)], quick=True, cpu=True)
    with pytest.raises(BackendError, match="killed"):
        models.bench_models(variants, 1, separate_peaks=False)


def test_gradient_checkpointing_and_compilation(here, monkeypatch, messages):
    """Options of a row; without a compiler, that is logged and the rest is measured."""
    variants = parse_models(["transformer"], compile=True, recompute=True, quick=True, cpu=True)
    assert [variant.compiled for variant in variants] == [False, True]
    assert Step(variants[0]).model.recompute
    monkeypatch.setattr(models, "compiler_problem", lambda device: "no compiler")
    found = models.bench_models(variants, 1, separate_peaks=False)
    assert len(found["rows"]) == 1 and "no compiler" in messages[0]


# ------------------------------------------------------------------------------------------------------------- slopes


def power_law(time, memory, constant=0.0):
    """A process that measures a row: its costs are powers of the length."""

    def measure(jobs, limit=None):
        ((variant, _),) = [(Variant(**job["variant"]), job["rounds"]) for job in jobs]
        seconds = constant + 1e-6 * variant.length**time
        spent = {"forward": seconds, "backward": 0.0, "optimiser": 0.0, "step": seconds}
        return [{"failed": None, "seconds": spent, "steps": 1, "peak_bytes": round(1000 * variant.length**memory)}]

    return measure


def test_exponents_are_those_of_the_upper_half(monkeypatch):
    """Here a constant cost hides the growth of short rows; the fit would be 1.3 over all lengths."""
    monkeypatch.setattr(slopes, "peaks_in_subprocess", power_law(1.5, 1.0, constant=0.1))
    found = slopes.bench_slopes(slopes.parse_slopes(["dlr", "s4"], cpu=True), 1, 60.0)
    assert [row["length"] for row in found["rows"]] == 2 * [2**n for n in range(10, 19)]
    for fit in found["exponents"]:
        assert fit["lengths"] == [2**n for n in range(14, 19)]
        assert fit["seconds"] == pytest.approx(1.5, abs=0.02) and fit["peak_bytes"] == pytest.approx(1, abs=1e-6)


def test_models_of_slopes():
    """Those of the page by default, with options for all in front; one sequence each."""
    models = slopes.parse_slopes(["d_model=32"], quick=True, cpu=True)
    assert [rows[0].model for rows in models] == ["dlr", "s4", "s4d", "s5", "lru", "transformer"]
    assert models[-1][0].options["window"] == 512 and {row.options["d_model"] for rows in models for row in rows} == {
        32
    }
    assert {row.batch for rows in models for row in rows} == {1}
    (rows,) = slopes.parse_slopes(["s4"], longest=5000, cpu=True)
    assert [row.length for row in rows] == [1024, 2048, 4096]


def test_rows_that_cannot_be_measured_are_left_out(monkeypatch, messages):
    """Too slow or without memory: said, and longer ones are not tried."""
    real, tried = power_law(1, 1), []

    def measure(jobs, limit=None):
        variant = Variant(**jobs[0]["variant"])
        tried.append((variant.model, variant.length))
        if (variant.model, variant.length) == ("s4", 128):
            raise TooSlowError
        if (variant.model, variant.length) == ("s4d", 64):
            raise KilledError
        return [{"failed": "out of memory"}] if (variant.model, variant.length) == ("s5", 32) else real(jobs)

    monkeypatch.setattr(slopes, "peaks_in_subprocess", measure)
    models = slopes.parse_slopes(["s4", "s4d", "s5"], quick=True, cpu=True)
    found = slopes.bench_slopes(models, 1, 7.0)
    assert tried == [("s4", 32), ("s4", 64), ("s4", 128), ("s4d", 32), ("s4d", 64), ("s5", 32)]
    s4, s4d, s5 = found["exponents"]
    assert s4["lengths"] == [32, 64] and s4["seconds"] == pytest.approx(1)
    assert s4d["seconds"] is None and s5["lengths"] == []
    assert ["more than 7 s" in messages[0], "killed" in messages[1], "out of memory" in messages[2]] == 3 * [True]
    from rich.console import Console

    with (console := Console(width=200)).capture() as captured:
        console.print(tables.render(found))
    for words in ("s4 left out from 128 on: more than 7 s", "s4d left out from 64 on", "s5 left out from 32 on"):
        assert words in " ".join(captured.get().split())  # a table's note is wrapped
    with pytest.raises(BackendError, match="nothing could be measured"):
        slopes.bench_slopes(models[-1:], 1, 7.0)


def test_slopes_are_measured_and_saved(monkeypatch, tmp_path):
    """The file holds what is printed, and what it can be traced by."""

    def here(jobs, limit=None):
        return [slopes.time_and_peak(Variant(**job["variant"]), job["rounds"]) for job in jobs]

    monkeypatch.setattr(slopes, "peaks_in_subprocess", here)
    file = tmp_path / "a.json"
    result = call("slopes", "lru", "--quick", "--longest", "64", "--cpu", "--json", "--save", file)
    found = json.loads(file.read_text())
    assert json.loads(result.stdout) == found and found["kind"] == "slopes" and len(found["rows"]) == 2
    assert all(row["seconds"]["step"] > 0 and row["steps"] >= 2 and row["failed"] is None for row in found["rows"])
    assert {"cpu", "cores", "instructions", "threads", "commit", "spt"} <= found["environment"].keys()
    assert found["environment"]["packages"]["torch"] == torch.__version__
    assert found["date"].startswith("20") and isinstance(found["command"], str)
    assert "exponent" in call("slopes", "lru", "--quick", "--longest", "64", "--cpu").stdout


def tiny_study(tmp_path, **more):
    file = tmp_path / "tiny.yaml"
    whole = {"kind": "variants", "recipes": ["quickstart-dlr", "quickstart"], "variants": {"DLR": {}}, **more}
    file.write_text(json.dumps(whole))
    return file


def test_rows_of_a_study_are_held_against_the_first_of_their_recipe_and_length(tmp_path):
    from rich.console import Console

    file = tiny_study(tmp_path, variants={"DLR": {}, "narrow": {"model.d_model": 16}})
    options = ("--batch", "4", "--rounds", "1", "--cpu", "--json")
    found = json.loads(call("study", file, "quickstart-dlr", *options).stdout)
    first, second = found["rows"]
    assert found["kind"] == "study" and first["relative_time"] == 1.0
    assert second["relative_time"] * second["relative_throughput"] == pytest.approx(1.0)
    assert [row["factors"] for row in found["rows"]] == [{"variant": "DLR"}, {"variant": "narrow"}]
    assert (first["length"], first["batch"], first["failed"], first["published"]) == (64, 4, None, {})
    assert first["examples_per_second"] == pytest.approx(4 / first["seconds_per_step"])
    assert second["parameters"] < first["parameters"]
    with (console := Console(width=200)).capture() as captured:
        console.print(tables.render({**found, "rows": [first, {**second, "published": {"relative_throughput": 1.1}}]}))
    assert "quickstart-dlr, narrow" in captured.get() and "×1.1" in captured.get()


def test_each_recipe_and_length_has_a_first_row_and_one_may_lack_memory(monkeypatch):
    """Rows 0, 1, 3 are of one length; 1 takes twice as long as 0, and 3 does not fit. Row 2 is alone."""
    no_memory = BackendError("there is no memory for a single sequence")

    def measured(number, length, outcome):
        row = Mock(spec=study.Measured, number=number)
        row.step.side_effect = lambda: outcome if isinstance(outcome, Times) else raises(outcome)
        row.row.resolved.name, row.setup.data.length, row.setup.train.batch_size = "quickstart", length, 2
        row.runtime.device = torch.device("cpu")
        return row

    def raises(error):
        raise error

    outcomes = [(64, Times(1.0, 0.0)), (64, Times(2.0, 0.0)), (32, Times(4.0, 0.0)), (64, no_memory)]
    rows = [measured(number, *outcome) for number, outcome in enumerate(outcomes)]
    monkeypatch.setattr(study, "_description", lambda row: {"number": row.number})
    found = study.bench_study("any", rows, 2)["rows"]
    assert [(row["number"], row.get("relative_time")) for row in found] == [(0, 1.0), (1, 2.0), (3, None), (2, 1.0)]
    assert found[1]["relative_throughput"] == 0.5 and "no memory" in found[2]["failed"]
    with pytest.raises(BackendError, match="no memory"):
        study.bench_study("any", rows[3:], 1)


@pytest.mark.parametrize(
    ("recipe", "level", "published"),
    [
        ("skills/shift-dlr", "ATTENTION 1 layer 2^12", {"relative_time": 6.3}),
        ("skills/sort-dlr", "ATTENTION + 2xFF 2 layers 2^9", {"relative_time": 2.6}),
        ("skills/segmentation-128-dlr", "LOCALATTENTION", {"relative_time": 19.0}),
        ("books/dlr", "DLR, 16 experts, pre-norm", {"relative_throughput": 1.1}),
        ("skills/mips-dlr", "DLR 1 layer 2^12", {}),
    ],
)
def test_published_times_stand_beside_a_row(recipe, level, published):
    assert study.published_times(recipe, {"variant": level}) == published


def test_a_study_or_a_recipe_that_is_not_there(tmp_path):
    assert "unknown study" in call("study", "dlr-table-9", code=2).output
    assert "quickstart-s5 is no recipe of" in call("study", tiny_study(tmp_path), "quickstart-s5", code=2).output


def test_a_row_without_memory_is_no_error(monkeypatch):
    def none_left(variant):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(slopes, "Step", none_left)
    ((variant, *_),) = slopes.parse_slopes(["lru"], quick=True)
    assert slopes.time_and_peak(variant, 1) == {"failed": "out of memory"}


def test_a_process_that_takes_too_long_is_ended():
    (variants,) = slopes.parse_slopes(["lru"], quick=True, cpu=True)
    with pytest.raises(TooSlowError):
        peaks_in_subprocess([{"variant": dict(vars(variants[0])), "rounds": 1}], limit=0.05)


@pytest.mark.parametrize(("name", "code"), [("nowhere/a.json", 7), (".", 7)])
def test_a_file_that_cannot_be_written_is_an_error_before_measuring(name, code, tmp_path, monkeypatch):
    monkeypatch.setattr(operations, "bench_operations", lambda *_: pytest.fail("it was measured"))
    assert "cannot write" in call("op", "scan", "--quick", "--save", tmp_path / name, code=code).stderr
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------- measuring


def test_rows_take_turns():
    order = []

    def run(name, seconds):
        order.append(name)
        return Times(seconds, seconds, 0.0)

    first, second = alternate([lambda: run("a", 0.5), lambda: run("b", 1.0)], 3)
    assert "".join(order) == "ab" + "abbaab"
    assert second.ratio(first, "step") == 2 and first.median("step") == 1
    assert second.ratio(first, "optimiser") is None


def test_a_short_row_is_repeated():
    (found,) = alternate([lambda: Times(0.005, 0.005, 0.0)], 2)
    assert [len(steps) for steps in found.rounds] == [5, 5]


def test_a_ratio_is_that_of_its_own_round():
    """A neighbour who takes half the machine in one round changes no ratio."""
    fast, slow = (Timings([[Times(seconds, 0.0)] for seconds in row]) for row in ((1.0, 9.0, 1.0), (2.0, 18.0, 2.0)))
    assert slow.ratio(fast, "forward") == 2
    assert slow.quartiles() == (2, 10) and Timings([[Times(1.0, 0.0)]]).quartiles() == (1, 1)


def test_peaks_are_those_of_the_work():
    """64 MiB more, whatever was in use and given back before."""
    torch.zeros(2**24).sum()
    device = torch.device("cpu")
    assert 0.9 * 2**26 < timing.memory_growth(device, lambda: torch.ones(2**24).sum()) < 1.2 * 2**26
    assert timing.memory_growth(device, lambda: None) < 2**22


# --------------------------------------------------------------------------------------------------------- operations


@pytest.mark.slow
def test_operations_as_json():
    found = json.loads(call("op", "--quick", "--json").stdout)
    validate(found, schema("op"))
    assert [(row["operation"], row["backend"]) for row in found["rows"]] == [
        (name, backend) for name in OPERATIONS for backend in ("plain", "torch")
    ]
    for row in found["rows"]:
        assert row["error"] < 1e-4 and row["gradient_error"] < 1e-3, row
        assert row["backend"] != "plain" or row["ratio"]["step"] == 1


@pytest.mark.parametrize(
    ("name", "letter"), [(name, letter) for name in OPERATIONS for letter in ["", *OPERATIONS[name].sizes]]
)
def test_an_operation_is_its_formula(name, letter):
    """In double precision, result and gradients; also where a size is 1."""
    sizes = {**OPERATIONS[name].small, **({letter: 1} if letter else {})}
    ours, plain = (Trial(Case(name, sizes, backend, cpu=True), double=True).results() for backend in ("torch", "plain"))
    error, gradient_error = operations._errors(ours, plain)
    assert error < 1e-9 and gradient_error < 1e-9


def test_an_error_is_seen(monkeypatch):
    wrong = OPERATIONS["scan"]._replace(ours=lambda sizes, inputs: 1.01 * inputs[1] * inputs[0])
    monkeypatch.setitem(OPERATIONS, "scan", wrong)
    ours, plain = (Trial(Case("scan", wrong.small, backend, cpu=True)).results() for backend in ("torch", "plain"))
    assert min(operations._errors(ours, plain)) > 0.01


def test_sizes_of_operations():
    cases = parse_operations(["convolution", "scan", "L=7", "H=2"], quick=True)
    assert [case.sizes["L"] for case in cases] == [7] * 4 and cases[0].sizes["H"] == 2 and "H" not in cases[2].sizes
    assert {case.operation for case in parse_operations([])} == set(OPERATIONS)
    for library in ("triton", "keops"):
        assert [case.operation for case in parse_operations([], backend=library)] == [
            name for name, operation in OPERATIONS.items() if library in operation.libraries
        ]


# -------------------------------------------------------------------------------------------------------------- tasks


def test_task(tmp_path, monkeypatch):
    found = json.loads(call("task", "digits", "subset_fraction=0.1", "--quick", "--json").stdout)
    assert found["kind"] == "task" and found["rows"]["train"] == 100 and found["batch"] == 64
    assert found["seconds"]["generate"] > 0 and found["seconds"]["open"] > 0
    for kind in ("batch", "masked"):
        assert found["positions_per_second"][kind] == pytest.approx(64 * found["examples_per_second"][kind])
    monkeypatch.chdir(tmp_path)
    lines = [f"row {i},{'ab'[i % 2]}" for i in range(60)]
    (tmp_path / "mine.csv").write_text("\n".join(["text,label", *lines]))
    options = ("custom", "path=mine.csv", "text_column=text", "label_column=label", "--quick", "--batch", "7")
    found = json.loads(call("task", *options, "--json").stdout)
    assert found["seconds"]["generate"] is None and found["batch"] == 7  # it is read
    assert "a batch of 7" in call("task", *options).stdout


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("model",), 2, "Missing argument"),
        (("model", "d_model=4"), 2, "no model is named"),
        (("model", "transformr"), 2, "did you mean transformer?"),
        (("model", "./nowhere.py"), 2, "no file"),
        (("model", "transformer", "n_hads=3"), 2, "did you mean n_heads?"),
        (("model", "transformer", "d_model=30"), 2, "not a multiple"),
        (("model", "transformer", "--length", "0"), 2, "whole numbers of at least 1"),
        (("model", "transformer", "--length", "8,x"), 2, "whole numbers of at least 1"),
        (("model", "transformer", "--batch", "0"), 2, "whole numbers of at least 1"),
        (("model", "transformer", "--batch", ""), 2, "whole numbers of at least 1"),
        (("model", "transformer", "max_length=3", "--length", "8"), 2, "max_length is 3"),
        (("model", "transformer", "--layers", "0"), 2, "--layers"),
        (("model", "transformer", "--precision", "fp16"), 2, "'fp16' is unknown"),
        (("model", "transformer", "--backend", "keop"), 2, "did you mean keops?"),
        (("model", "transformer", "--rounds", "0"), 2, "--rounds"),
        (("slopes", "transformr"), 2, "did you mean transformer?"),
        (("slopes", "--longest", "1024"), 2, "a slope needs two lengths"),
        (("op", "convolutoin"), 2, "did you mean convolution?"),
        (("op", "scan", "M=3"), 2, "M is not a size of scan"),
        (("op", "scan", "L=0"), 2, "whole number of at least 1"),
        (("op", "scan", "L=1.5"), 2, "whole number of at least 1"),
        (("op", "scan", "--backend", "keops"), 2, "cannot compute scan"),
        (("task", "digts"), 2, "did you mean digits?"),
        (("task", "digits", "--batch", "0"), 2, "--batch"),
        (("task", "digits", "max_row=3"), 2, "did you mean max_rows?"),
    ],
)
def test_mistakes_are_one_sentence(arguments, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call(*arguments, code=code)
    assert words in " ".join(result.stderr.split()).replace("│ ", "") and result.stdout == ""
    assert "Traceback" not in result.output and not list(tmp_path.iterdir())


def test_a_model_that_fails_is_reported(tmp_path, here):
    file = model_file(tmp_path, forward="1 / 0")
    assert "ZeroDivisionError" in call("model", file, "--quick", code=2).stderr


def test_without_keops(tmp_path):
    (tmp_path / "pykeops").mkdir()
    (tmp_path / "pykeops" / "__init__.py").write_text("raise ImportError('not here')")
    arguments = ("bench", "op", "vandermonde", "--backend", "torch,keops", "--quick")
    done = spt(*arguments, cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert done.returncode == 4 and "keops" in done.stderr and "not here" in done.stderr and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_commands_of_the_page(monkeypatch, tmp_path):
    """docs/performance.md: their options are understood; what they measure has tests of its own."""
    monkeypatch.setattr(models, "bench_models", lambda variants, *_, **__: [variant.model for variant in variants])
    monkeypatch.setattr(operations, "bench_operations", lambda cases, *_: [case.operation for case in cases])
    monkeypatch.setattr(slopes, "bench_slopes", lambda found, *_: [rows[0].model for rows in found])
    monkeypatch.setattr(study, "parse_study", lambda name, recipes, **_: [name, *recipes])
    monkeypatch.setattr(study, "bench_study", lambda name, rows, _: rows)
    monkeypatch.chdir(tmp_path)
    lines = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()
    commands = [line.split()[3:] for line in lines if line.startswith("$ spt bench ")]
    commands = [command for command in commands if command[0] != "gpu"]  # test_bench_gpu.py
    assert {command[0] for command in commands} == {"model", "slopes", "study", "op", "task"}
    for command in commands:
        assert json.loads(call(*command, "--quick", "--json").stdout)


def test_the_page_names_every_operation_and_part():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in [f"`{name}`" for name in OPERATIONS] + [
        f"\n| {tables.SHORT.get(part, part)} |" for part in timing.PARTS
    ]:
        assert name in page, name


def test_a_study_of_ones_own_recipes_made_equal_is_measured(tmp_path):
    for name, width in (("first", 96), ("second", 64)):
        model = {"name": "transformer", "d_model": width, "n_layers": 1, "n_heads": 2, "d_ff": 64}
        task = {"name": "digits"}
        path = recipe_file(tmp_path, changed(RECIPE, model=model, task=task, finetune__train__batch_size=32))
        path.rename(tmp_path / f"{name}.yaml")
    study_text = {"kind": "models", "recipes": ["first.yaml", "second.yaml"], "match": "parameters"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(study_text))
    rows = study.parse_study(str(tmp_path / "mine.yaml"), cpu=True)
    assert [row.row.resolved.name for row in rows] == ["first", "second"]
    (one,) = study.parse_study(str(tmp_path / "mine.yaml"), ["first.yaml"], cpu=True)
    assert one.row.resolved.name == "first"


def test_json_has_null_for_what_is_no_number(capsys):
    print_json({"a": [float("nan"), 1.5, float("inf")], "b": ({"c": float("-inf")},)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, None], "b": [{"c": None}]}
