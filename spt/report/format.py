"""How a report writes numbers, scores and tables."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    """A line for each mapping, all with the keys of the first; an empty text for no lines."""
    file = io.StringIO()
    if lines:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return file.getvalue()


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


WHOLE = 1e-7  # rounding of a share of right rows: less than one part in a float32


def is_percent(metric: str) -> bool:
    """Whether the metric is a fraction, displayed in percent and points."""
    return metric.startswith(("accuracy", "f1", "auroc"))


def metric_text(metric: str) -> str:
    return f"{metric} (%)" if is_percent(metric) else metric


def score_text(score: float | None, metric: str) -> str:
    if score is None:
        return "-"
    return f"{100 * score:.2f}" if is_percent(metric) else f"{score:#.4g}".removesuffix(".")


def delta_text(delta: float | None, metric: str) -> str:
    if delta is None:
        return "-"
    return f"{100 * delta:+.2f}" if is_percent(metric) else f"{delta:+#.3g}".removesuffix(".")


def size_text(delta: float | None, metric: str) -> str:
    """A difference without its sign."""
    return "-" if delta is None else delta_text(abs(delta), metric).removeprefix("+")


def interval_text(low: float | None, high: float | None, metric: str) -> str:
    return "-" if low is None or high is None else f"{delta_text(low, metric)} to {delta_text(high, metric)}"


def ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"×{ratio:.2f}" if ratio < 10 else f"×{ratio:.3g}"


def p_text(p: float | None) -> str:
    return "-" if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"
