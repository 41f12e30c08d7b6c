"""A few backbones that suit a kind of data and a length, each with the reason why it is there."""

from dataclasses import dataclass, field
from typing import Any

QUADRATIC = 1024  # steps up to which full attention is affordable


@dataclass(frozen=True)
class Candidate:
    """A model of the comparison."""

    name: str  # of the model and of its recipe's file
    why: str
    options: dict[str, Any] = field(default_factory=dict)
    control: bool = False  # asks what order is worth; the first to go when time is short


def width(rows: int) -> int:
    """Of the first model, which the others are made as large as."""
    return 32 if rows < 2000 else 64


def choose(tokens: bool, length: int, d: int) -> list[Candidate]:
    """The first, of width d, is what the others are made equal to in parameters."""
    size: dict[str, Any] = {"d_model": d, "n_layers": 2}
    attention = {**size, "n_heads": 4, "d_ff": 2 * d}
    if length <= QUADRATIC:
        transformer = Candidate("transformer", "Attention sees all steps at once, whatever their distance.", attention)
    else:
        transformer = Candidate(
            "transformer",
            f"Attention within windows of 128 steps and their neighbours; all {length:,} steps at once cost too much.",
            {**attention, "window": 128},
        )
    minimal = Candidate(
        "mingru",
        "A gated recurrence: what it keeps depends on the input, and its cost grows with the length alone.",
        size,
    )
    local = Candidate(
        "tcn", "Dilated convolutions over a few steps: enough where the answer lies in short patterns.", size
    )
    if tokens:
        bag = Candidate(
            "bag_of_steps", "No mixing of steps at all: what is right without their order.", size, control=True
        )
        return [transformer, minimal, local, bag]
    state_space = Candidate(
        "s4d",
        "A state space, made for long signals of real numbers: a kernel as long as the sequence.",
        {**size, "d_state": 32, "ssm_lr": 1e-3},
    )
    return [transformer, state_space, minimal, local]
