"""What a run would cost, as studies ask for it; spt/execution answers. No torch here."""

from typing import NamedTuple, Protocol, runtime_checkable

from spt.config.job import Job
from spt.config.recipe import ResolvedRecipe
from spt.tasks.base import TaskData


class Estimate(NamedTuple):
    """The cost of one job without its parent's, if it uses its whole budget."""

    steps: int
    examples: int
    flops: float
    parameters: int


@runtime_checkable
class CostModel(Protocol):
    """The data and the cost of jobs; asked only where a study needs them."""

    def identify_data(self, recipe: ResolvedRecipe) -> ResolvedRecipe:
        """The recipe with the identity of its data set, which jobs need."""

    def open_task(self, recipe: ResolvedRecipe) -> TaskData:
        """The recipe's data, its training rows in use."""

    def estimate(self, job: Job) -> Estimate:
        """Steps and analytic operations of the job's training."""

    def seconds_per_step(self, job: Job) -> float:
        """Device seconds of one optimiser step of the job, measured on this machine."""
