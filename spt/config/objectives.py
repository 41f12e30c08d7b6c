"""Options of the objectives, as in a recipe. What an objective does with a batch is in training/objectives.

No torch here: reading a recipe needs only the options.
"""

from math import inf
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from spt.config.recipe import Metric


class ObjectiveOptions(BaseModel):
    """Base of all objectives' options. `labelled` objectives see the task's targets; others get data without them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    labelled: ClassVar[bool]
    hides: ClassVar[bool] = False  # does it blank inputs?
    causal: ClassVar[bool] = False  # would a model that looks ahead see the answers?


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf


class SupervisedOptions(ObjectiveOptions):
    labelled: ClassVar[bool] = True

    loss: Literal["auto", "cross_entropy", "l1", "l2", "gaussian"] = Field(
        "auto",
        description="auto: cross_entropy (binary for labels) or l2; gaussian: a mean and a variance (elu + 1) for each "
        "target, scored by the negative logarithm of the normal density (S5 paper, appendix G.3.8), while mae, mse and "
        "r2 are those of the means",
    )
    class_weights: Literal["none", "batch", "balanced"] | dict[str, float] = Field(
        "none",
        description="balanced: an answer has weight n / (classes * count of its class), counted over the training rows "
        "in use, as in scikit-learn; for each of several labels, rows where it holds weigh as much in total as the "
        "rest; or {label: weight}, 1 for those not given. Both are for training: an evaluation weights all answers "
        "equally. "
        "batch: every class in a global batch has equal weight, each answer 1 / the count of its class there, as in "
        "the DLR paper's Pathfinder-Segmentation; an evaluation does the same over the whole split",
    )
    metric: Metric = Field(
        "auto",
        description="what is compared, and selects the checkpoint under select_by auto: for classes accuracy, "
        "balanced_accuracy (the same as accuracy_macro), f1 (of the class `positive`), f1_macro, f1_weighted, "
        "f1_micro, mcc, auroc, auprc, log_loss; for labels f1_macro, f1_micro, accuracy (their mean), exact_match, "
        "mcc, auroc, auprc (means over labels); for numbers mse (l2, gaussian), mae (l1), mape, r2, spearman; loss; "
        "for language models bits_per_byte or perplexity; auto: the first that fits",
    )
    positive: str | None = Field(
        None,
        description="the class that f1, auroc and auprc are computed for: its label where the task names its classes, "
        "else its number; null: of two classes the second; of more, auroc and auprc are means over classes, and f1 "
        "needs this option",
    )
    scale: Literal["none", "standard", "range", "reference"] = Field(
        "none",
        description="how real targets y are scaled for the loss, each by its own training values; predictions, mae, "
        "mse and r2 stay in the task's units. standard: mean 0, variance 1; range: 2 (y - lo) / (hi - lo) - 1 with "
        "lo = min y, hi = max y; reference: the same with lo = min |y|, hi = max |y|, as in the published code (BIDMC)",
    )

    @field_validator("class_weights", mode="before")
    @classmethod
    def _by_label(cls, weights: Any) -> Any:
        """Labels as text, as they stand in files: YAML takes 1 for a number and true for a truth value."""
        if isinstance(weights, str) and weights in ("none", "batch", "balanced"):
            return weights
        if not (isinstance(weights, dict) and weights and all(map(_is_weight, weights.values()))):
            raise ValueError(
                f"{weights!r:.60} are no weights; balanced is possible, or a number above 0 for a label at least, as "
                "in {label: 2}"
            )
        return {str(label).lower() if isinstance(label, bool) else str(label): w for label, w in weights.items()}

    @field_validator("positive", mode="before")
    @classmethod
    def _label_of_digits(cls, positive: Any) -> Any:
        """YAML reads 1 as a number, which is a class's label all the same."""
        return str(positive) if isinstance(positive, int) and not isinstance(positive, bool) else positive


class DenoisingOptions(ObjectiveOptions):
    labelled: ClassVar[bool] = False

    loss: Literal["auto", "cross_entropy", "l1"] = Field(
        "auto",
        description="auto: cross_entropy on tokens, l1 on normalised values; cross_entropy on values needs levels",
    )


class MaskedOptions(DenoisingOptions):
    hides: ClassVar[bool] = True

    ratio: float = Field(0.15, gt=0, lt=1, description="probability that a position is masked")
    span: int = Field(
        1, ge=1, description="steps masked together; overlapping spans merge, and the ratio stays the same"
    )


class NextOptions(DenoisingOptions):
    causal: ClassVar[bool] = True


OBJECTIVE_OPTIONS: dict[str, type[ObjectiveOptions]] = {
    "masked": MaskedOptions,
    "next": NextOptions,
    "supervised": SupervisedOptions,
}


def usual_metric(loss: str, text: bool = False) -> Metric:
    """What is compared where the objective does not choose: accuracy, bits per byte for language models, or the error
    that is minimised (SPT paper, appendix C)."""
    if loss == "cross_entropy":
        return "bits_per_byte" if text else "accuracy"
    if loss == "binary_cross_entropy":
        return "f1_macro"
    return "mae" if loss == "l1" else "mse"
