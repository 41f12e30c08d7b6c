"""What text tasks share: a step is a character, stored as its code point; and which characters are tokens."""

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import Split, Tokens

END = 0  # the code of <eos>; other codes are Unicode's code points, or bytes
SPECIAL = (-1, -1, END)  # <pad>, <unk>, <eos>
UNKNOWN = 1


def code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint32)


def character_tokens(train: Split, min_count: int = 1) -> Tokens:
    """Tokens for the characters that occur at least `min_count` times: the commonest first, ties by code point."""
    counts = train.counts()
    counts[END] = 0
    frequent = np.flatnonzero(counts >= min_count)
    if not len(frequent):
        raise ValueError(
            f"no character occurs {min_count} times in the {len(train):,} training rows in use; lower min_count"
        )
    codes = (*SPECIAL, *frequent[np.argsort(-counts[frequent], kind="stable")].tolist())
    return Tokens(len(codes), codes, UNKNOWN)
