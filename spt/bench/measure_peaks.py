"""The process that `spt.bench.peaks` starts: jobs as JSON on standard input, peaks in bytes on standard output."""

import json
import sys

from spt.bench.models import peak_of_step
from spt.bench.operations import Case, peak_of_operation
from spt.bench.training_step import Variant


def main() -> None:
    jobs = json.load(sys.stdin)
    peaks = [peak_of_step(Variant(**job)) if "model" in job else peak_of_operation(Case(**job)) for job in jobs]
    sys.stdout.write(f"\n{json.dumps(peaks)}\n")


if __name__ == "__main__":
    main()
