"""How a report writes numbers, scores and tables."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from spt.errors import visible
from spt.runs.plan import factors_text, setting_text

ARM = {"scratch": "scratch", "spt": "SPT"}  # as displayed


class ReportTable(NamedTuple):
    title: str
    header: tuple[str, ...]
    body: Sequence[tuple[str, ...]]
    text_columns: int  # the first columns; the others are numbers
    narrow: tuple[tuple[int, ...], ...] | None = None  # columns of parts that fit into 80 characters; None: all fit
    caption: str = ""


def count_text(count: int | float) -> str:
    return f"{count:,.0f}" if count < 1e6 else f"{count / 1e6:,.1f}M"


def flops_text(flops: float) -> str:
    mantissa, exponent = f"{flops:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def time_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def csv_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """A line for each mapping, all with the keys of the first; an empty text for no lines.

    A text that a spreadsheet would take for a formula has an apostrophe before it.
    """
    file = io.StringIO()
    if lines:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: csv_cell(value) for name, value in line.items()} for line in lines)
    return file.getvalue()


FORMULA = re.compile(r"[=@\t\r]|[+-](?!(?:[\d.,]+(?:e[+-]?\d+)?(?: %| to [+-]?[\d.,]+(?:e[+-]?\d+)?)?)?$)")


def csv_cell(value: Any) -> Any:
    """A value as a cell of a CSV file: a spreadsheet would compute a text that begins like a formula, so it gets an
    apostrophe before it, and what acts on a terminal is escaped; numbers and intervals stay as they are."""
    if not isinstance(value, str):
        return value
    return visible(f"'{value}" if FORMULA.match(value) else value)


def abbreviate(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def slug(text: str) -> str:
    """A name for a file or an anchor: lower-case letters, digits, hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "other"


def shorten(text: str, most: int) -> str:
    """The text, without its middle if it is longer than `most` characters."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


NO_DIFFERENCE = 1e-12  # of means: rounding in float64, whose sign says nothing
WHOLE = 1e-7  # rounding of a share of right rows: less than one part in a float32


def is_percent(metric: str) -> bool:
    """Whether the metric is a fraction, displayed in percent and points."""
    return metric.startswith(("accuracy", "balanced_accuracy", "exact_match", "f1", "auroc", "auprc"))


def metric_text(metric: str) -> str:
    return f"{metric} (%)" if is_percent(metric) else metric


def score_text(score: float | None, metric: str) -> str:
    if score is None:
        return "-"
    return f"{100 * score:.2f}" if is_percent(metric) else f"{score:#.4g}".removesuffix(".")


def score_interval_text(low: float | None, high: float | None, metric: str) -> str:
    """Of a fraction only what lies between 0 and 1: a t interval of a score near an end reaches beyond it."""
    if low is None or high is None:
        return "-"
    ends = (min(max(end, 0.0), 1.0) for end in (low, high)) if is_percent(metric) else (low, high)
    return " to ".join(score_text(end, metric) for end in ends)


def delta_text(delta: float | None, metric: str) -> str:
    if delta is None:
        return "-"
    if abs(delta) < NO_DIFFERENCE:
        delta = 0.0
    return f"{100 * delta:+.2f}" if is_percent(metric) else f"{delta:+#.3g}".removesuffix(".")


def size_text(delta: float | None, metric: str) -> str:
    """A difference without its sign."""
    return "-" if delta is None else delta_text(abs(delta), metric).removeprefix("+")


def interval_text(low: float | None, high: float | None, metric: str) -> str:
    return "-" if low is None or high is None else f"{delta_text(low, metric)} to {delta_text(high, metric)}"


def size_interval_text(low: float | None, high: float | None, metric: str) -> str:
    """An interval that does not hold zero, without signs."""
    ends = sorted(abs(end) for end in (low, high) if end is not None)
    return " to ".join(size_text(end, metric) for end in ends) or "-"


def ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"×{ratio:.2f}" if ratio < 10 else f"×{ratio:.3g}"


def p_text(p: float | None) -> str:
    return "-" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"


class Group(NamedTuple):
    """Lines of a table under one label, with their metric where the records have none of their own."""

    label: str
    records: Iterable[Any]
    metric: str = ""


Cell = Callable[[Any, str], str]  # text of a record, given its metric

TEXTS: dict[str, Cell] = {  # text of a field, given the record's metric
    **dict.fromkeys(("scratch", "spt", "chance", "published_scratch", "published_spt", "value"), score_text),
    **dict.fromkeys(("delta", "published_delta", "difference", "scratch_change", "spt_change"), delta_text),
    **dict.fromkeys(("log_loss", "log_loss_after", "brier", "brier_after"), lambda score, _: f"{score:.4f}"),
    **dict.fromkeys(("ece", "ece_after"), lambda share, _: f"{100 * share:.2f}"),
    **dict.fromkeys(("p", "holm", "wilcoxon_p", "wilcoxon_holm"), lambda p, _: p_text(p)),
    **dict.fromkeys(("steps", "examples", "positions"), lambda count, _: count_text(count)),
    **dict.fromkeys(("seconds", "device_seconds"), lambda seconds, _: time_text(seconds)),
    **dict.fromkeys(("only_scratch", "only_spt", "rows", "repeated"), lambda n, _: "-" if n is None else f"{n:,}"),
    **dict.fromkeys(("scratch_arm", "spt_arm"), lambda arm, _: _chance_text(arm)),
    "factors": lambda factors, _: factors_text(factors),
    "setting": lambda setting, _: setting_text(setting),
    **dict.fromkeys(("command", "created"), lambda text, _: text or "-"),
    "arm": lambda arm, _: ARM.get(arm, arm or ""),
    "detectable": size_text,
    "flops": lambda flops, _: flops_text(flops),
    "peak_bytes": lambda size, _: f"{size / 2**20:,.0f} MiB" if size else "-",
}

CELLS: dict[str, Cell] = {  # columns that show several fields
    "n": lambda record, _: part_text(record.n, getattr(record, "planned", record.n)),
    "items": lambda item, _: f"{item.n:,}",
    "95 % interval": lambda record, metric: interval_text(record.low, record.high, metric),
}


def _chance_text(arm: Any) -> str:
    if arm is None or arm.chance_p is None:
        return "-"
    return p_text(arm.chance_p) + (" (items)" if arm.chance_test == "binomial" else "")


def part_text(count: int, whole: int) -> str:
    return str(count) if count == whole else f"{count} of {whole}"


@dataclass(frozen=True)
class TableSpec:
    """A table with a line for each record, made by calling it with a report.

    `columns` is its header, as "task / model | scratch | SPT: spt". The first column holds the labels of the groups,
    each other one the field of that name, or the one that its name is followed by, unless `cells` has a text for it.
    """

    title: str | Callable[[Any], str]
    columns: str
    groups: Callable[[Any], Iterable[Group]]
    cells: Mapping[str, Cell] = field(default_factory=dict)
    text_columns: int = 1
    narrow: tuple[tuple[int, ...], ...] | None = None
    caption: str | Callable[[Any], str] = ""

    def __call__(self, report: Any) -> ReportTable:
        title, caption = (text(report) if callable(text) else text for text in (self.title, self.caption))
        header, fields = zip(*(column.partition(": ")[::2] for column in self.columns.split(" | ")), strict=True)
        body = []
        for group in self.groups(report):
            for number, record in enumerate(group.records):
                metric = getattr(record, "metric", group.metric)
                line = [self._text(record, metric, *column) for column in zip(header[1:], fields[1:], strict=True)]
                body.append(("" if number else group.label, *line))
        return ReportTable(title, header, body, self.text_columns, self.narrow, caption)

    def _text(self, record: Any, metric: str, name: str, field: str) -> str:
        if cell := self.cells.get(name) or CELLS.get(name):
            return cell(record, metric)
        value, kind = attrgetter(field or name)(record), (field or name).rpartition(".")[2]
        return TEXTS[kind](value, metric) if kind in TEXTS else "-" if value is None else str(value)
