"""The pictures of models in the documentation: every model has one, and they show what the code does."""

import numpy as np
import pytest
from mixing_figures import FOLDER, derivatives, picture
from PIL import Image

from spt.config.plugins import listing

OURS = [row.name for row in listing("models") if row.source == "spt"]


@pytest.mark.parametrize("name", OURS)
def test_every_model_has_a_picture(name: str) -> None:
    with Image.open(FOLDER / f"{name}.png") as found:
        assert found.size == (396, 192)


def test_no_picture_is_of_a_model_that_is_gone() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.png")) == sorted(OURS)


def test_only_models_of_one_direction_have_an_empty_half() -> None:
    def empty(name: str) -> list[bool]:
        with Image.open(FOLDER / f"{name}.png") as found:
            seen = np.asarray(found.convert("RGBA"))[:, :, 3]
        return [not seen[:, :192].any(), not seen[:, -192:].any()]

    assert {name: empty(name) for name in OURS if any(empty(name))} == {
        "linformer": [False, True],
        "time_mixer": [False, True],
    }


def test_a_block_without_mixing_moves_its_own_step_alone() -> None:
    sizes = derivatives("bag_of_steps", causal=False)
    assert sizes is not None and (np.diag(sizes) > 0.1).all()
    assert sizes[~np.eye(len(sizes), dtype=bool)].max() == 0


@pytest.mark.parametrize("name", ["transformer", "s4", "mingru"])
def test_a_causal_block_has_nothing_above_the_diagonal(name: str) -> None:
    causal, both = derivatives(name, causal=True), derivatives(name, causal=False)
    assert causal is not None and both is not None
    above = np.triu_indices(len(causal), 1)
    assert causal[above].max() < 1e-3 * causal.max() < both[above].max()


@pytest.mark.parametrize("name", ["tcn", "dlr"])
def test_a_picture_is_that_of_the_code(name: str) -> None:
    """To within the rounding of another machine."""
    drawn = np.asarray(picture(name).convert("L"), dtype=float)
    with Image.open(FOLDER / f"{name}.png") as stored:
        kept = np.asarray(stored.convert("RGBA").convert("L"), dtype=float)
    assert np.abs(drawn - kept).mean() < 4
