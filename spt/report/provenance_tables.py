"""The tables of where a report's numbers come from."""

from spt.report.collect import Report
from spt.report.format import ReportTable


def checklist_table(report: Report) -> ReportTable:
    body = [(check.question, check.answer, check.evidence) for check in report.provenance.checklist]
    caption = "Answered from the runs' own files. A no is not always a fault; it is what a reader has to know."
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
        "stands in training as well. Pretraining is given inputs alone."
    )
    return ReportTable("Splits", header, body, 4, (), caption)


def environment_table(report: Report) -> ReportTable:
    header = ("code", "Python and packages", "system", "device", "runs", "processes", "threads")
    body = [
        (
            f"spt {one.spt}" + (f", commit {one.commit}" if one.commit else ""),
            ", ".join([f"Python {one.python}", *(f"{name} {version}" for name, version in one.packages.items())]),
            one.system,
            one.device,
            str(one.runs),
            str(one.processes),
            "-" if one.threads is None else str(one.threads),
        )
        for one in report.provenance.environments
    ]
    caption = "A + behind a commit: files differed from it. Each run's env.json has its own."
    return ReportTable("Environment", header, body, 4, (), caption)


def command_table(report: Report) -> ReportTable:
    body = [(one.study, one.command or "-", one.created or "-") for one in report.provenance.commands]
    caption = (
        "The same command in the same folder reuses what is finished; elsewhere it makes everything again. On one CPU "
        "process of the same environment the numbers are the same, bit for bit."
    )
    return ReportTable("Commands", ("study", "command", "begun"), body, 3, (), caption)
