"""Parity with the published implementations, over every case of the index in the folder that SPT_GOLDEN names.

Each file has an adapter that computes, with our layers, every result a case holds: kernels, outputs, recurrent outputs
and states, gradients. What is left out has to stand in a table here, with its reason; all else that is not met fails.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

import parity_attention
import parity_block
import parity_diagonal
import parity_mega
import parity_s4
import parity_s5
import pytest
import torch
from golden import DTYPES, Adapter, Case, all_cases, deviation, index

FAMILIES: dict[str, Adapter] = {
    "hippo.npz": parity_s4.hippo,
    "s4_dplr.npz": parity_s4.s4,
    "s4d.npz": parity_diagonal.s4d,
    "s4_block.npz": parity_block.s4_block,
    "dss.npz": parity_diagonal.dss,
    "dlr.npz": parity_diagonal.dlr,
    "sgconv.npz": parity_diagonal.sgconv,
    "s5.npz": parity_s5.s5,
    "s5_variable_step.npz": parity_s5.s5,
    "s5_layer.npz": parity_s5.s5_layer,
    "lru.npz": parity_s5.lru,
    "attn_dlr.npz": parity_attention.attn_dlr,
    "attn_nfs.npz": parity_attention.attn_nfs,
    "mega.npz": parity_mega.mega,
}


class Feature(NamedTuple):
    """Of the published code: cases of these files with such a configuration, and these of their arrays."""

    files: str
    has: Callable[[Mapping[str, Any]], bool]
    arrays: str
    why: str

    def covers(self, file: str, name: str, array: str) -> bool:
        config = index()["files"][file]["cases"][name]["config"]
        return fnmatch(file, self.files) and self.has(config) and (self.arrays == "*" or fnmatch(array, self.arrays))


LEFT_OUT = (  # no counterpart here
    Feature("dss*", lambda config: config.get("version") == "clip", "*", "real parts cut off; in no published result"),
    Feature("dss*", lambda config: config.get("sep_dt_re_im"), "*", "two steps a feature; in no published result"),
    Feature("hippo*", lambda config: True, "nplr.B", "clipped in a basis whose phases LAPACK chose; see nplr.B_noclip"),
    Feature("hippo*", lambda config: True, "diag.legs.B", "the same"),
)
LOOSE = (  # what the reference itself limits in float64, to about 1e-8
    Feature("s4d*", lambda config: config.get("disc") == "dss", "*", "one cast to float32"),
    Feature("hippo*", lambda config: True, "nplr_f32.*", "computed in float32"),
    Feature("hippo*", lambda config: True, "diag.*", "computed in float32"),
    Feature("s4_dplr*", lambda config: True, "*diag*", "step by eigenvectors of a matrix that is far from normal"),
)


def left_out(file: str, name: str, array: str = "") -> str | None:
    """The reason, for a whole case (no array named) or for one array."""
    return next((feature.why for feature in LEFT_OUT if feature.covers(file, name, array)), None)


def tolerance(case: Case, array: str, dtype: str) -> float:
    if dtype == "float32":
        return 2e-4 if case.file.startswith("s4_dplr") else 1e-4
    return 1e-6 if any(feature.covers(case.file, case.name, array) for feature in LOOSE) else 1e-9


CASES = [(file, name) for file, name in all_cases() if left_out(file, name) is None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("file", "name"), CASES, ids=lambda value: str(value).removesuffix(".npz"))
def test_parity(golden_dir, file, name, dtype):
    assert file in FAMILIES, f"{file} has no adapter here and is not in the table of what is left out"
    check(Case(file, name, DTYPES[dtype]), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("file", "name"), CASES, ids=lambda value: str(value).removesuffix(".npz"))
def test_parity_on_a_gpu(golden_dir, file, name, dtype):
    with torch.device("cuda"):
        check(Case(file, name, DTYPES[dtype], "cuda"), dtype)


@pytest.mark.parametrize("file", FAMILIES)
def test_nothing_is_left_on_the_cpu(golden_dir, file):
    """On a device that computes nothing but knows its tensors from a CPU's: one case of each file. What asks for a
    number, as some adapters do, is beyond it."""
    name = next(case for each, case in CASES if each == file)
    try:
        with torch.device("meta"):
            FAMILIES[file](Case(file, name, torch.float32, "meta"))
    except RuntimeError as error:
        assert "meta tensors" in str(error), error


def check(case: Case, dtype: str) -> None:
    """Every result of the case that is not left out."""
    file, name = case.file, case.name
    found = FAMILIES[file](case)
    wrong = {}
    for array in case.results:
        if left_out(file, name, array) is not None:
            continue
        assert array in found, f"{case}: no answer of ours for {array}"
        pair = found[array]
        ours, theirs = pair if isinstance(pair, tuple) else (pair, case.array(array))
        assert ours.dtype == theirs.dtype or array in ("l_kernel_after",), f"{array}: {ours.dtype} for {theirs.dtype}"
        off = deviation(ours, theirs)
        if not off <= tolerance(case, array, dtype):
            wrong[array] = off
    assert not wrong, f"{case} in {dtype}: {', '.join(f'{array} is off by {off:.1e}' for array, off in wrong.items())}"


def test_there_are_cases(golden_dir):
    """Every file of the index is answered for, and what is left out exists."""
    answered = {file for file, name in all_cases() if file in FAMILIES or left_out(file, name) is not None}
    assert CASES and answered == set(index()["files"])


def test_the_comparison_notices(golden_dir):
    """A kernel off by one part in a million, a missing array and a wrong shape are seen."""
    file, name = CASES[0]
    case = Case(file, name, DTYPES["float64"])
    array = case.array(case.results[0])
    assert deviation(array * (1 + 1e-6), array) > 1e-9 >= deviation(array, array)
    with pytest.raises(AssertionError, match="shape"):
        deviation(array[..., :-1], array)
