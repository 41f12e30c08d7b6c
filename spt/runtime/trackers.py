"""How a run is called where trackers show it: project, group and name. No tracker's own library is imported here."""

import os
from typing import Any, NamedTuple

PROJECT = "spt"


class TrackedRun(NamedTuple):
    """A run's name for people, `quickstart, share 0.2, seed 3, spt, pretrain`, and the study that it belongs to."""

    name: str
    group: str = ""


def project(tracker: str) -> str:
    """The user's own variable stands above ours; MLflow's is heeded by Accelerate."""
    return (os.environ.get("WANDB_PROJECT") or PROJECT) if tracker == "wandb" else PROJECT


def start_options(tracker: str, run: TrackedRun) -> dict[str, Any]:
    """What a tracker of Accelerate is started with. TensorBoard has none: its files lie in the run's folder."""
    group = {"group": run.group} if run.group else {}
    if tracker in ("wandb", "trackio"):
        return {"name": run.name, **group}
    if tracker == "mlflow":
        return {"run_name": run.name, "tags": group}
    return {}
