"""Options of the objectives, as a recipe has them. What an objective does with a batch stands in training/objectives.

No torch here: reading a recipe needs the options alone.
"""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from spt.config.recipe import Metric


class ObjectiveOptions(BaseModel):
    """Base of all objectives' options. `labelled` objectives see the task's targets; others get data without them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    labelled: ClassVar[bool]
    hides: ClassVar[bool] = False  # does it blank inputs?
    causal: ClassVar[bool] = False  # would a model that looks ahead see the answers?


class SupervisedOptions(ObjectiveOptions):
    labelled: ClassVar[bool] = True

    loss: Literal["auto", "cross_entropy", "l1", "l2", "gaussian"] = Field(
        "auto",
        description="auto: cross_entropy or l2; gaussian: a mean and a variance (elu + 1) for each target, scored by "
        "the negative logarithm of the normal density (S5 paper, appendix G.3.8); mae, mse, r2 are those of the means",
    )
    class_weights: Literal["none", "batch"] = Field(
        "none",
        description="batch: every class that a global batch has counts alike, an answer of it 1 / its count there, as "
        "in the DLR paper's Pathfinder-Segmentation; an evaluation counts over the whole split",
    )
    metric: Metric = Field(
        "auto",
        description="what is compared, and selects under select_by auto: accuracy, f1_macro and accuracy_macro (all "
        "classes alike), mse (l2, gaussian), mae (l1), r2, loss, of language models bits_per_byte or perplexity; auto: "
        "the first that fits",
    )
    scale: Literal["none", "standard", "range", "reference"] = Field(
        "none",
        description="real targets y as the loss sees them, each scaled by its own training rows; predictions, mae, "
        "mse and r2 stay in the task's units. standard: mean 0, variance 1; range: 2 (y - lo) / (hi - lo) - 1 with "
        "lo = min y, hi = max y; reference: the same with lo = min |y|, hi = max |y|, as in the published code (BIDMC)",
    )


class DenoisingOptions(ObjectiveOptions):
    labelled: ClassVar[bool] = False

    loss: Literal["auto", "cross_entropy", "l1"] = Field(
        "auto",
        description="auto: cross_entropy on tokens, l1 on normalised values; cross_entropy on values needs levels",
    )


class MaskedOptions(DenoisingOptions):
    hides: ClassVar[bool] = True

    ratio: float = Field(0.15, gt=0, lt=1, description="probability that a position is hidden")
    span: int = Field(
        1, ge=1, description="steps hidden together; where spans overlap they merge, and the ratio stays what it is"
    )


class NextOptions(DenoisingOptions):
    causal: ClassVar[bool] = True


OBJECTIVE_OPTIONS: dict[str, type[ObjectiveOptions]] = {
    "masked": MaskedOptions,
    "next": NextOptions,
    "supervised": SupervisedOptions,
}


def usual_metric(loss: str, text: bool = False) -> Metric:
    """What is compared where the objective does not choose: accuracy, of language models bits per byte, or the error
    that is minimised (SPT paper, appendix C)."""
    if loss == "cross_entropy":
        return "bits_per_byte" if text else "accuracy"
    return "mae" if loss == "l1" else "mse"
