"""Compare sequence models fairly: self-pretrain on the task's own training inputs, finetune, report the gain.

The names below are the Python API, in `spt.api`; each is loaded when it is first asked for.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all until a command can answer a signal
if TYPE_CHECKING:
    from typing import Any

    from spt.api import (
        FinishedStudy,
        Report,
        SequenceClassifier,
        SequenceRegressor,
        Settings,
        SptError,
        TrainedRun,
        compare,
        corrected_interval,
        finetune,
        load_model,
        load_recipe,
        load_run,
        pretrain,
        read_report,
        run_study,
    )

__all__ = [
    "FinishedStudy",
    "Report",
    "SequenceClassifier",
    "SequenceRegressor",
    "Settings",
    "SptError",
    "TrainedRun",
    "compare",
    "corrected_interval",
    "finetune",
    "load_model",
    "load_recipe",
    "load_run",
    "pretrain",
    "read_report",
    "run_study",
]
__version__ = "0.1.0"
_root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
if all(os.path.isfile(os.path.join(_root, *name)) for name in (("models", "__init__.py"), ("pyproject.toml",))):
    __path__.append(_root)  # a source checkout: models/, tasks/ and recipes/ lie beside spt/


if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'spt' has no attribute {name!r}")
        from spt import api

        return getattr(api, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
