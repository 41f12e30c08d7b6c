"""What a training step costs at lengths up to 2^20 on one device: docs/measurements/scaling.json, for docs/scaling.md.

    python docs/measure_scaling.py             those that are not there yet; all, on another machine

One small layer, one sequence, one step behind a warm-up, each in a process of its own: growth of resident memory, and
the processor time of all threads together, which other work on the machine disturbs less than the clock.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure_architectures import here, measured_here

from spt.bench.models import parse_models
from spt.bench.timing import memory_growth
from spt.bench.training_step import Step
from spt.runs.files import write_json

FILE = Path(__file__).resolve().parent / "measurements" / "scaling.json"
COMMAND = "python docs/measure_scaling.py"
SIZES: dict[str, Any] = {"layers": 1, "width": 16, "batch": "1"}
MODELS = {
    "s4d": ("s4d",),
    "s5": ("s5", "d_state=32"),
    "transformer, window of 128": ("transformer", "n_heads=1", "d_ff=32", "window=128"),
    "transformer": ("transformer", "n_heads=1", "d_ff=32"),
}
LONGEST = {"transformer": 2**14}  # beyond which a step takes minutes
LENGTHS = (2**14, 2**16, 2**18, 2**20)


def measure(model: str, length: int) -> dict[str, float]:
    (variant,) = parse_models(MODELS[model], length=str(length), cpu=True, **SIZES)
    step = Step(variant)
    step(length=16, optimise=False)
    seconds = 0.0

    def work() -> None:
        nonlocal seconds
        before = time.process_time()
        step()
        seconds = time.process_time() - before

    peak = memory_growth(step.clock.device, work)
    return {"peak_bytes": peak, "processor_seconds": seconds}


def main() -> None:
    if len(sys.argv) == 3:
        sys.stdout.write(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
        return
    before = measured_here(FILE)
    facts = {"kind": "scaling", **SIZES, "command": COMMAND, "environment": before.get("environment") or here()}
    rows = dict(before.get("rows", {}))
    for length in LENGTHS:
        for model in MODELS:
            if length > LONGEST.get(model, length) or str(length) in rows.get(model, {}):
                continue
            done = subprocess.run([sys.executable, __file__, model, str(length)], capture_output=True, check=True)
            rows.setdefault(model, {})[str(length)] = json.loads(done.stdout.splitlines()[-1])
            sys.stdout.write(f"{model}, {length:,}: {rows[model][str(length)]}\n")
            write_json(FILE, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
