"""The network as a torch.export program: what it answers, what it takes, and that a model without one says so."""

import json

import numpy as np
import pytest
import torch
from test_export import asked, command
from test_streaming import TOKENS, VALUES, sequence, untrained
from test_trained_model import CPU, TINY, trained
from tiny import model_file

from spt.data.batching import collate
from spt.errors import UsageError
from spt.inference.program import Sizes, make_program
from spt.inference.trained_model import TrainedModel
from spt.tasks.base import Classes
from spt.training.load_run import load_run

ANY, FIXED_LENGTH, FIXED = Sizes(True, True), Sizes(True, False), Sizes(False, False)


def answers(program, model, rows):
    """The program's, to rows as the network is shown them."""
    batch = collate(model.split(rows), np.arange(len(rows)), model.input, Classes(2))
    return program(batch.x, batch.context.valid).detach().numpy()


def close(a, b):
    return np.allclose(a, b, atol=1e-4 * max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize("pool", ["mean", "max", "last"])
def test_a_transformers_program_takes_any_batch_and_length(pool):
    model = untrained("transformer", TOKENS, pool=pool)
    program = make_program(model)
    assert program.sizes == ANY
    for rows in ([sequence(TOKENS, 24)], [sequence(TOKENS, n, n) for n in (3, 20, 11, 2, 2, 2, 7)]):
        assert close(answers(program.exported.module(), model, rows), model.logits(rows, runtime=CPU))


def test_a_long_convolutions_program_has_one_length_and_takes_shorter_rows_padded():
    model = untrained("s4d", VALUES)
    program = make_program(model)
    assert program.sizes == FIXED_LENGTH and program.about() == {"batch": "any", "length": 24}
    rows = [sequence(VALUES, 24), sequence(VALUES, 5, 1), sequence(VALUES, 17, 2), sequence(VALUES, 1, 3)]
    assert close(answers(program.exported.module(), model, rows), model.logits(rows, runtime=CPU))


@pytest.mark.parametrize("name", ["gla", "lru", "mamba", "linear_transformer"])
def test_a_scans_program_answers_as_the_network(name):
    model = untrained(name, TOKENS, causal=True)
    program = make_program(model)
    assert not program.sizes.length
    rows = [sequence(TOKENS, 24, seed) for seed in range(program.rows)]
    assert close(answers(program.exported.module(), model, rows), model.logits(rows, runtime=CPU))


def test_answers_of_steps_and_of_pairs_have_programs():
    steps = untrained("transformer", TOKENS, per_step=True)
    rows = [sequence(TOKENS, 9), sequence(TOKENS, 9, 1)]
    found = answers(make_program(steps).exported.module(), steps, rows)
    assert close(found, np.stack(steps.logits(rows, runtime=CPU)))
    pairs = untrained("transformer", TOKENS, sequences=2)
    rows = [(sequence(TOKENS, 9), sequence(TOKENS, 4)), (sequence(TOKENS, 9, 1), sequence(TOKENS, 6, 2))] * 2
    assert close(answers(make_program(pairs).exported.module(), pairs, rows), pairs.logits(rows, runtime=CPU))


def test_outputs_of_training_do_not_depend_on_exporting():
    """What a program takes another way to, training takes as before."""
    model = untrained("s4d", VALUES, causal=True)
    before = model.logits([sequence(VALUES)], runtime=CPU)
    make_program(model)
    assert np.array_equal(before, model.logits([sequence(VALUES)], runtime=CPU))


def test_the_command_writes_a_program_that_torch_alone_runs(tmp_path):
    path = trained(tmp_path, "numbers")
    done = command(path, "--out", tmp_path / "out", "--program", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["program"] == {"batch": "any", "length": "2 to 12"} and "program.pt2" in told["files"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    program, rows = torch.export.load(tmp_path / "out" / "program.pt2").module(), load_run(path).data.test
    for i in range(len(rows)):
        x = (np.array(rows.row(i)) - config["input"]["mean"]) / config["input"]["std"]
        logits = program(torch.tensor(x, dtype=torch.float32)[None], torch.ones(1, len(x), dtype=torch.bool))
        assert close(logits.detach().numpy(), TrainedModel.open(path).logits([rows.row(i)], runtime=CPU))
    assert "program.pt2" in (tmp_path / "out" / "README.md").read_text()


def test_times_between_steps_are_an_input_of_the_program(tmp_path):
    model = {"name": "s5", "d_model": 8, "n_layers": 1, "d_state": 8, "blocks": 1}
    path = asked(tmp_path, "times", model=model)
    opened = TrainedModel.open(path)
    program = make_program(opened)
    assert len(program.exported.module()._in_spec.children_specs[0].children_specs) == 3


def test_without_a_program_nothing_is_written_and_the_reason_is_told(tmp_path):
    file = model_file(tmp_path, "x if float(x.sum()) > 0 else -x")
    path = trained(tmp_path, model={"name": str(file), "d_model": 8, "n_layers": 1})
    done = command(path, "--out", tmp_path / "out", "--program")
    assert done.exit_code == 2 and "has no program: torch.export cannot trace it" in done.stderr
    assert done.stderr.count("\n") == 1 and "without --program" in done.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*tmp"))
    assert command(path, "--out", tmp_path / "out").exit_code == 0


def test_a_program_that_answers_otherwise_is_none(monkeypatch):
    """The check sees a difference of one part in a thousand."""
    from spt.inference import program

    real = program._difference
    monkeypatch.setattr(program, "_difference", lambda ours, theirs, valid: real(ours, theirs * 1.001, valid))
    with pytest.raises(UsageError, match=r"outputs differ from the network's by 0\.001"):
        make_program(untrained("transformer", TOKENS))


def test_bfloat16_has_no_program(tmp_path):
    path = trained(tmp_path, finetune__train__precision="bf16", **TINY)
    with pytest.raises(UsageError, match="bfloat16"):
        make_program(TrainedModel.open(path))
