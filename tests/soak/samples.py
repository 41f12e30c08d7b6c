"""What a command holds while it runs, sampled from outside, and how that grows."""

import contextlib
import csv
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import psutil


@dataclass(frozen=True)
class Sample:
    session: int  # the commands that made the runs, one after the other; each starts with a process of its own
    runs: int  # done so far
    seconds: float  # since the session began
    memory_mb: float  # resident, summed over the command's processes, as is what follows
    files: float
    threads: float
    processes: float
    run_seconds: float  # of each run since the sample before
    processor_seconds: float  # likewise; it does not depend on what else the machine does
    temporary: int  # entries in the folder for temporary files


QUANTITIES = {  # what should stay the same from run to run: its unit
    "memory_mb": "MB",
    "files": "open files",
    "threads": "threads",
    "temporary": "temporary files",
    "processor_seconds": "s of processor time a run",
}


class Recorder:
    """A CSV file of samples, to which a later session adds its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = read_samples(path)
        self.session = 1 + max((sample.session for sample in self.samples), default=0)

    def watch(
        self,
        command: Sequence[str],
        count_runs: Callable[[], int],
        environment: Mapping[str, str],
        every: float,
        cwd: Path,
    ) -> int:
        """Start the command and sample it until it ends; returns its exit code."""
        temporary = Path(environment["TMPDIR"])
        temporary.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        with (self.path.parent / "log.txt").open("ab") as log:
            process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log, cwd=cwd)
        before, moment, spent = count_runs(), start, 0.0
        try:
            while True:
                try:
                    return process.wait(every)
                except subprocess.TimeoutExpired:
                    runs, now = count_runs(), time.monotonic()
                    if runs > before:
                        held, used = _held(process.pid)
                        self._add(
                            Sample(
                                session=self.session,
                                runs=runs,
                                seconds=round(now - start, 2),
                                **held,
                                run_seconds=round((now - moment) / (runs - before), 5),
                                processor_seconds=round((used - spent) / (runs - before), 5),
                                temporary=sum(1 for _ in temporary.iterdir()),
                            )
                        )
                        before, moment, spent = runs, now, used
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()

    def _add(self, sample: Sample) -> None:
        new = not self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Sample)], lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(asdict(sample))
        self.samples.append(sample)


def _held(pid: int) -> tuple[dict[str, float], float]:
    """What a process and its descendants hold now, and the processor time that they have used, in seconds."""
    held, used = dict.fromkeys(("memory_mb", "files", "threads", "processes"), 0.0), 0.0
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            numbers = (process.memory_info().rss / 2**20, process.num_fds(), process.num_threads(), 1)
            held = {name: held[name] + number for name, number in zip(held, numbers, strict=True)}
            used += sum(process.cpu_times()[:4])  # with that of children that have ended
    return {name: round(number, 1) for name, number in held.items()}, used


def read_samples(path: Path) -> list[Sample]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Sample(**{field.name: field.type(line[field.name]) for field in fields(Sample)})
            for line in csv.DictReader(file)
        ]


def longest_session(samples: Sequence[Sample]) -> list[Sample]:
    """Of the session that made most runs, the samples after its first tenth, in which it loads what it needs."""
    sessions: dict[int, list[Sample]] = {}
    for sample in samples:
        sessions.setdefault(sample.session, []).append(sample)
    longest = max(sessions.values(), key=lambda members: members[-1].runs - members[0].runs, default=[])
    return longest[max(1, len(longest) // 10) :]


def slopes(samples: Sequence[Sample]) -> dict[str, float]:
    """How much each quantity grows with 1,000 runs: the slope of a straight line, by least squares."""
    chosen = longest_session(samples)
    if len(chosen) < 2 or chosen[0].runs == chosen[-1].runs:
        return {}
    runs = np.array([sample.runs for sample in chosen]) / 1000
    return {name: float(np.polyfit(runs, [getattr(s, name) for s in chosen], 1)[0]) for name in QUANTITIES}


def slope_text(samples: Sequence[Sample]) -> str:
    grown = slopes(samples)
    parts = [f"{grown[name]:+.3g} {unit}" for name, unit in QUANTITIES.items() if name in grown]
    return f"per 1,000 runs: {', '.join(parts)}" if parts else "too few samples for a slope"
