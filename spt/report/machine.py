"""A report for programs: JSON and CSV."""

from typing import Any

from spt.report.collect import Report, Table
from spt.report.format import csv_text
from spt.report.statements import statements

FORMAT = 2  # of report.json; raised when a field changes its meaning

# Parts of a report, as they stand in it.
PARTS = (
    "levels",
    "contrasts",
    "controls",
    "baselines",
    "metrics",
    "confusions",
    "calibrations",
    "groups",
    "best",
    "reaches",
    "pooled",
    "averages",
    "matches",
    "searches",
    "spent",
    "precedents",
    "provenance",
)


def to_json(report: Report) -> dict[str, Any]:
    """What `--json` prints and report.json holds."""
    records = report.model_dump(mode="json")
    return {
        "format": FORMAT,
        "kind": "report",
        "rows": records["rows"],
        "models": [
            {name: part for name, part in comparison.items() if name not in ("contrasts", "rankings")}
            for comparison in records["models"]
        ],
        "contrasts_between_models": [contrast for each in records["models"] for contrast in each["contrasts"]],
        "rankings": [ranking for comparison in records["models"] for ranking in comparison["rankings"]],
        "models_across_tasks": records["models_across_tasks"],
        "verdicts": [f"{said.label}: {said.verdict}" for said in statements(report)],
        **{name: records[name] for name in PARTS},
        "failures": [{"label": label, **failure.model_dump(mode="json")} for label, failure in report.failures],
        "warnings": records["warnings"],
        "notes": records["notes"],
        "runs": records["folders"],
        "results": records["runs"],
    }


def to_csv(report: Report, table: Table) -> str:
    return csv_text(report.table_records(table))
