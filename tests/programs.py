"""Cases of test_program.py, for a process of its own: what checks the shapes of annotations in tests asks for sizes,
which would become those of the program. Prints what it finds as JSON."""

import json
import sys
from dataclasses import replace

import numpy as np
import torch
from test_streaming import TOKENS, VALUES, sequence, untrained
from test_trained_model import CPU

from spt.data.batching import collate
from spt.errors import UsageError
from spt.inference import program as module
from spt.inference.program import make_program
from spt.tasks.base import Classes


def off(model, program, rows):
    """How far the program's outputs are from the model's, relative to the largest."""
    batch = collate(model.split(rows), np.arange(len(rows)), model.input, Classes(2))
    theirs = program(batch.x, batch.context.valid).detach().numpy()
    ours = np.stack(model.logits(rows, runtime=CPU))
    return float(np.abs(ours - theirs).max() / np.abs(ours).max())


def tried(model, *cases):
    program = make_program(model)
    loaded = program.exported.module()
    return {**program.about(), "off": [off(model, loaded, rows) for rows in cases]}


def sequences(input, lengths):
    return [sequence(input, length, seed) for seed, length in enumerate(lengths)]


def every_case():
    any_size = sequences(TOKENS, [24]), sequences(TOKENS, [3, 20, 11, 2, 2, 7, 24])
    for pool in ("mean", "max", "last"):
        yield f"transformer, {pool}", tried(untrained("transformer", TOKENS, pool=pool), *any_size)
    padded = sequences(VALUES, [24, 5, 17, 1])
    yield "s4d", tried(untrained("s4d", VALUES), padded, sequences(VALUES, [24]))
    for name in ("gla", "lru", "mamba"):
        model = untrained(name, VALUES, causal=True)
        yield name, tried(model, padded, sequences(VALUES, [24]))
    steps = untrained("transformer", TOKENS, per_step=True)
    yield "steps", tried(steps, sequences(TOKENS, [9, 9]), sequences(TOKENS, [24]))
    pairs = untrained("transformer", TOKENS, sequences=2)
    yield "pairs", tried(pairs, [(sequence(TOKENS, 24, k), sequence(TOKENS, 4 + k, k)) for k in range(2)])
    yield "rnn", tried(untrained("rnn", VALUES), sequences(VALUES, [24, 24]))
    kept = untrained("s4d", VALUES, causal=True)
    before = kept.logits(padded, runtime=CPU)
    make_program(kept)
    yield "unchanged", bool(np.array_equal(before, kept.logits(padded, runtime=CPU)))
    model = untrained("transformer", TOKENS)
    yield "bfloat16", refusal(replace(model, computation=model.computation.model_copy(update={"precision": "bf16"})))
    real = module._difference
    module._difference = lambda ours, theirs, valid: real(ours, theirs * 1.001, valid)
    yield "off", refusal(model)


def refusal(model):
    try:
        make_program(model)
    except UsageError as error:
        return str(error)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(dict(every_case()), sys.stdout)
