"""A report as flat records, one value a column: the lines of its CSV files and of its pandas frames."""

from collections.abc import Sequence
from typing import Any

from spt.report.arms import Cost, OnlyArm, Row
from spt.report.baselines import BaselineComparison, BaselineContrast
from spt.report.curves import Curve
from spt.report.ranking import ModelComparison
from spt.report.search import SearchResult


def row_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One record per row of the report, with a column for each factor of its studies."""
    nested = {"factors", "total", "ratios", "scratch_arm", "spt_arm", "only", "warnings", "notes"}
    nested |= {"seeds", "items", "failures"}
    factors = list(dict.fromkeys(name for row in rows for name in row.factors))
    records = []
    for row in rows:
        record = row.model_dump(exclude=nested)
        record |= {f"factor_{name}": row.factors.get(name) for name in factors}
        record |= {
            "matched_axis": row.total.axis if row.total else None,
            "matched_total": row.total.amount if row.total else None,
            **{f"only_{name}": getattr(row.only, name, None) for name in OnlyArm.model_fields},
        }
        for name, arm in (("scratch", row.scratch_arm), ("spt", row.spt_arm)):
            record[f"{name}_above_chance"] = arm.above_chance if arm else None
            record[f"{name}_chance_p"] = arm.chance_p if arm else None
            record[f"{name}_parameters"] = arm.parameters.get("total") if arm else None
            for part in ("total", "pretraining", "finetuning"):
                for axis in Cost.model_fields:
                    record[f"{name}_{part}_{axis}"] = getattr(getattr(arm, part), axis) if arm else None
        record |= {f"ratio_{axis}": ratio for axis, ratio in row.ratios.items()}
        records.append({**record, "failures": len(row.told_failures), "warnings": "; ".join(row.warnings)})
    return records


def seed_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One record per row and seed."""
    return [_shared(row) | seed.model_dump() for row in rows for seed in row.seeds]


def item_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One record per row and seed whose test items were compared."""
    return [_shared(row) | item.model_dump() for row in rows for item in row.items]


def _shared(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("label", "task", "model", "recipe", "source", "metric")}


def contrast_records(comparisons: Sequence[ModelComparison]) -> list[dict[str, Any]]:
    """One record per contrast between two models, with a column for each factor of its studies."""
    factors = list(dict.fromkeys(name for comparison in comparisons for name in comparison.factors))
    records = []
    for comparison in comparisons:
        for contrast in comparison.contrasts:
            record = {"label": comparison.label, **contrast.model_dump(exclude={"factors", "rows", "ratios"})}
            record |= {f"factor_{name}": comparison.factors.get(name) for name in factors}
            record |= {f"rows_{end}": getattr(contrast.rows, end, None) for end in ("n", "low", "high")}
            records.append(record | {f"ratio_{axis}": ratio for axis, ratio in contrast.ratios.items()})
    return records


def baseline_records(comparisons: Sequence[BaselineComparison]) -> list[dict[str, Any]]:
    """One record per baseline of a data set and network that it is compared with, in the network's better arm."""
    records = []
    for comparison in comparisons:
        for each in comparison.scores:
            about = {"label": comparison.label, "task": comparison.task} | each.model_dump(
                exclude={"runs", "settings", "notes", "n", "planned"}
            )
            about |= {"runs": each.n, "runs_planned": each.planned, "notes": "; ".join(each.notes)}
            contrasts = [c for c in comparison.contrasts if c.shown and c.baseline == each.baseline]
            records += [about | _against(contrast) for contrast in contrasts]
    return records


def _against(contrast: BaselineContrast) -> dict[str, Any]:
    names = (
        "network",
        "arm",
        "difference",
        "n",
        "planned",
        "splits",
        "low",
        "high",
        "p",
        "holm",
        "tests",
        "decision",
        "verdict",
    )
    return {"row": contrast.label, "network_score": contrast.score} | {name: getattr(contrast, name) for name in names}


def trial_records(searches: Sequence[SearchResult]) -> list[dict[str, Any]]:
    """One record per trial, with a column for each setting that was searched."""
    keys = list(dict.fromkeys(key for search in searches for key in search.space))
    return [
        {
            "study": search.study,
            "label": search.label,
            "recipe": search.recipe,
            "arm": trial.arm,
            "setting": trial.number,
            "chosen": trial.number == (search.spt if trial.arm == "spt" else search.scratch).chosen,
            "seed": trial.seed,
            **{f"space_{key}": trial.setting.get(key) for key in keys},
            "metric": search.metric,
            "validation": trial.value,
            "state": trial.state,
            "run": trial.run,
        }
        for search in searches
        for trial in search.trials
    ]


def curve_records(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """One record per run and logged step: the validation score, and what was logged of the training batches."""
    records = []
    for curve in curves:
        losses, accuracies = dict(curve.losses), dict(curve.accuracies)
        for step, share, value in zip(curve.steps, curve.shares, curve.values, strict=True):
            run = {"label": curve.label, "stage": curve.stage, "seed": curve.seed, "split": curve.split}
            values = {"run": curve.run, "step": step, "share": share, "metric": curve.metric, "validation": value}
            trained = {"training_loss": losses.get(step), "training_accuracy": accuracies.get(step)}
            records.append({**run, **values, **trained})
    return records
