"""Whether a command ended as it may: with a result, or with one sentence and a documented exit code."""

import csv
import re
from pathlib import Path

from tests.fuzz.mutations import FORMULA, HTML, LATEX
from tests.fuzz.process import Ended

CODES = {0, 2, 3, 4, 5, 6, 7, 8}  # 1 is a bug; nothing here asks to stop
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
LONGEST = 10_000  # characters of an error


def problems_of(ended: Ended, changed: list[str], written: list[Path]) -> list[str]:
    """What is wrong with the end of a command, with the files it changed elsewhere and those it wrote."""
    found = [*ended.forbidden]
    found += [f"changes {name}" for name in changed]
    if ended.code is None:
        return [*found, "hangs"]
    if ended.code < 0:
        found.append(f"is killed by signal {-ended.code}")
    elif ended.code not in CODES:
        found.append(f"exit code {ended.code}: {cause(ended)}")
    text = ended.out + ended.err
    if "Traceback (most recent call last)" in text and ended.code != 1:
        found.append(f"traceback: {cause(ended)}")
    if ended.code in CODES - {0, 8}:
        sentences = [line for line in ended.err.splitlines() if line.startswith("spt: ")]
        if len(sentences) != 1 and "Usage:" not in ended.err:
            found.append(f"{len(sentences)} sentences")
        if len(ended.err) > LONGEST:
            found.append("a long message")
    for name, stream in (("output", ended.out), ("messages", ended.err)):
        if match := CONTROLS.search(stream):
            found.append(f"U+{ord(match[0]):04X} in the {name}")
    found += [problem for path in written for problem in harm(path)]
    return list(dict.fromkeys(found))


def cause(ended: Ended) -> str:
    """The last line of a traceback, and the last place in it that is ours."""
    trace = ended.trace or ended.err
    places = re.findall(r'File "[^"]*?/((?:spt|tasks|models)/[^"]+)", line (\d+), in (\S+)', trace)
    kinds = re.findall(r"^(\w[\w.]*(?:Error|Exception|Interrupt|Exit|Forbidden|Warning))\b.*$", trace, re.M)
    place = f" in {places[-1][0]} {places[-1][2]}" if places else ""
    return f"{kinds[-1] if kinds else trace.strip()[-80:]}{place}"


def harm(path: Path) -> list[str]:
    """Markup, LaTeX or a formula that a report, a table or a figure passes on as it stands."""
    raw = {".html": HTML, ".svg": HTML, ".md": HTML, ".tex": LATEX}.get(path.suffix)
    if path.name.endswith((".tmp", ".part", ".incomplete")):
        return [f"leaves {path.name}"]
    if raw is not None and raw in path.read_text(encoding="utf-8", errors="replace"):
        return [f"{raw} in {path.name}"]
    if path.suffix == ".csv" and path.name not in ("new.csv", "rows.csv", "labels.csv"):
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            cells = [cell for row in csv.reader(file) for cell in row]
        if any(cell.startswith((FORMULA, "+fuzz", "@fuzz")) for cell in cells):
            return [f"a formula in {path.name}"]
    return []
