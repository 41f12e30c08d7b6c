"""Tables of where the numbers of a report come from."""

from spt.report.collect import Report
from spt.report.format import ReportTable


def checklist_table(report: Report) -> ReportTable:
    body = [(check.question, check.answer, check.evidence) for check in report.provenance.checklist]
    caption = "Answered from the runs' own files. A no is not always a fault, but a reader should know of it."
    return ReportTable("Reproducibility checklist", ("question", "answer", "evidence"), body, 3, (), caption)


def data_table(report: Report) -> ReportTable:
    header = (
        "task",
        "split",
        "hash of inputs",
        "hash of labels",
        "rows",
        "also in train",
        "pretrainings",
        "finetunings",
    )
    body = [
        (
            use.task,
            use.split,
            use.inputs,
            use.targets or "-",
            f"{use.rows:,}",
            f"{use.repeated:,}",
            str(use.pretraining),
            str(use.finetuning),
        )
        for use in report.provenance.data
    ]
    caption = (
        "Hashes over all rows in order; runs with the same hash saw the same rows. Also in train: rows whose input "
        "also occurs in training. Pretraining sees inputs only."
    )
    return ReportTable("Splits", header, body, 4, (), caption)


def environment_table(report: Report) -> ReportTable:
    header = ("code", "Python and packages", "system", "device", "runs", "processes", "threads")
    body = [
        (
            f"spt {environment.spt}" + (f", commit {environment.commit}" if environment.commit else ""),
            ", ".join(
                [
                    f"Python {environment.python}",
                    *(f"{name} {version}" for name, version in environment.packages.items()),
                ]
            ),
            environment.system,
            environment.device,
            str(environment.runs),
            str(environment.processes),
            "-" if environment.threads is None else str(environment.threads),
        )
        for environment in report.provenance.environments
    ]
    caption = "A + after a commit: with uncommitted changes. Each run's env.json has its own."
    return ReportTable("Environment", header, body, 4, (), caption)


def command_table(report: Report) -> ReportTable:
    body = [(study.study, study.command or "-", study.created or "-") for study in report.provenance.commands]
    caption = (
        "The same command in the same folder reuses what is finished; elsewhere it repeats every run. On one CPU "
        "process of the same environment the numbers are the same, bit for bit."
    )
    return ReportTable("Commands", ("study", "command", "started"), body, 3, (), caption)
