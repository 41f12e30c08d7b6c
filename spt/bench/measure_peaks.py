"""The process that `spt.bench.peaks` starts: jobs as JSON on standard input, peaks in bytes on standard output."""

import json
import sys
from typing import Any

from spt.bench.models import peak_of_step
from spt.bench.operations import Case, peak_of_operation
from spt.bench.slopes import time_and_peak
from spt.bench.training_step import Step, Variant


def main() -> None:
    sys.stdout.write(f"\n{json.dumps([_measured(job) for job in json.load(sys.stdin)])}\n")


def _measured(job: dict[str, Any]) -> Any:
    if "rounds" in job:
        return time_and_peak(Variant(**job["variant"]), job["rounds"])
    return peak_of_step(Step(Variant(**job))) if "model" in job else peak_of_operation(Case(**job))


if __name__ == "__main__":
    main()
