"""python docs/keep_report.py STUDY-FOLDER NAME TITLE

Keeps the report of a finished study as docs/results/reports/NAME.md: every table, without figures, and with `runs` for
the folder that the runs were made in.
"""

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "results" / "reports"


def kept(study: Path, title: str) -> str:
    text = (study / "report.md").read_text(encoding="utf-8")
    text = re.sub(r" --out [^ `|]+", "", text).replace(str(study.resolve().parent), "runs")
    return re.sub(r"\A# .*\n", f"# {title}\n", text)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{sys.argv[2]}.md"
    path.write_text(kept(Path(sys.argv[1]), sys.argv[3]), encoding="utf-8")
    sys.stdout.write(f"wrote {path}\n")
