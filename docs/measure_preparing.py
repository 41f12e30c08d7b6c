"""Measures the memory that preparing data of one's own takes.

    python docs/measure_preparing.py --gb 10 --write    10 GB of each layout, in TMPDIR: 40 GB of disk are needed
    python docs/measure_preparing.py --gb 0.2 lists     one layout, smaller; printed, not written

Written is docs/measurements/preparing.json; docs/file-formats.md quotes it.

Rows are generated, then `spt data prepare` reads them in a process of its own. Its memory is looked at every hundredth
of a second: all of it, and the part that no file stands behind, which is what cannot be given back.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spt.runs.files import write_json

FILE = Path(__file__).resolve().parent / "measurements" / "preparing.json"
COMMAND = "python docs/measure_preparing.py --gb 10 --write"
STEPS, GROUP = 4096, 4096  # of a row, and rows of a row group
LAYOUTS = {
    "lists": ["list_column=x", "label_column=y"],
    "arrays": ["file_column=file", "label_column=y"],
    "texts": ["text_column=x", "label_column=y"],
    "long": ["id_column=id", "time_column=t", "value_prefix=v", "label_column=y"],
}
CHANNELS = 16  # of the long layout


def generate(layout: str, folder: Path, size: float) -> int:
    """Write about this many bytes of rows; how many bytes there are."""
    rng = np.random.default_rng(0)
    if layout == "arrays":
        names = []
        for i in range(max(60, int(size / (64 * 4 * STEPS)))):
            names.append(f"{i}.npy")
            np.save(folder / names[-1], rng.standard_normal(64 * STEPS, np.float32))
        (folder / "labels.csv").write_text("file,y\n" + "".join(f"{n},{i % 2}\n" for i, n in enumerate(names)))
    else:
        with pq.ParquetWriter(folder / "train.parquet", _schema(layout), compression="none") as file:
            for batch in _batches(layout, rng, size):
                file.write_batch(batch, row_group_size=2**30)
    return sum(path.stat().st_size for path in folder.iterdir())


def _schema(layout: str) -> Any:
    if layout == "long":
        columns = {"id": pa.int32(), "t": pa.int32(), **{f"v{k}": pa.float32() for k in range(CHANNELS)}}
        return pa.schema([*columns.items(), ("y", pa.int8())])
    return pa.schema([("x", pa.string() if layout == "texts" else pa.list_(pa.float32())), ("y", pa.int8())])


def _batches(layout: str, rng: np.random.Generator, size: float) -> Iterator[Any]:
    done = row = 0
    while done < size:
        y = pa.array((np.arange(GROUP) + row) % 2, pa.int8())
        if layout == "long":
            n = 64 * GROUP
            step = np.arange(n)
            values = [pa.array(rng.standard_normal(n, np.float32)) for _ in range(CHANNELS)]
            ids = (row + step % GROUP).astype(np.int32)  # a step of every sequence, then the next
            times = (step // GROUP).astype(np.int32)
            batch = pa.record_batch(
                [pa.array(ids), pa.array(times), *values, pa.array(ids % 2, pa.int8())], _schema(layout)
            )
        elif layout == "texts":
            letters = rng.integers(97, 123, (GROUP, STEPS), np.uint8)
            batch = pa.record_batch([pa.array([each.tobytes().decode() for each in letters]), y], _schema(layout))
        else:
            flat = pa.array(rng.standard_normal(GROUP * STEPS, np.float32))
            lists = pa.ListArray.from_arrays(pa.array(np.arange(GROUP + 1, dtype=np.int32) * STEPS), flat)
            batch = pa.record_batch([lists, y], _schema(layout))
        yield batch
        done, row = done + batch.nbytes, row + GROUP


def prepare(layout: str, data: Path, cache: Path, limit: int | None) -> dict[str, float]:
    """Seconds and the most memory, in MB, of `spt data prepare`; `limit`: bytes that no file stands behind."""
    command = [sys.executable, "-m", "spt", "data", "prepare", "custom", f"path={data}", *LAYOUTS[layout]]
    environment = {**os.environ, "SPT_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}

    def confine() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, preexec_fn=confine)
    most = {"VmRSS": 0, "RssAnon": 0}
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        for name, _, text in (line.partition(":") for line in lines):
            if name in most:
                most[name] = max(most[name], int(text.split()[0]))
        time.sleep(0.01)
    if process.wait():
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "memory": round(most["VmRSS"] / 1000),
        "without_files": round(most["RssAnon"] / 1000),
    }


def measure(layout: str, size: float, limit: int | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="spt-preparing-") as temporary:
        folder = Path(temporary)
        (folder / "rows").mkdir()
        written = generate(layout, folder / "rows", size)
        found = prepare(layout, folder / "rows", folder / "cache", limit)
        shutil.rmtree(folder / "rows")
    return {"layout": layout, "gb": round(written / 1e9, 2), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help=f"of {', '.join(LAYOUTS)}; default: all")
    parser.add_argument("--gb", type=float, default=1.0, help="of generated rows (default: 1)")
    parser.add_argument("--limit-mb", type=int, help="memory that no file stands behind (RLIMIT_DATA)")
    parser.add_argument("--write", action="store_true", help="into the file, in place of the same layouts")
    given = parser.parse_args()
    unknown = {*given.layouts} - LAYOUTS.keys()
    if unknown:
        parser.error(f"{', '.join(unknown)}: layouts are {', '.join(LAYOUTS)}")
    limit = None if given.limit_mb is None else given.limit_mb * 10**6
    for layout in given.layouts or LAYOUTS:
        small, large = measure(layout, 1e7, limit), measure(layout, 1e9 * given.gb, limit)
        row = {**large, "small": {key: small[key] for key in ("gb", "seconds", "memory", "without_files")}}
        print(json.dumps(row), flush=True)  # noqa: T201
        if given.write:
            rows = json.loads(FILE.read_text("utf-8"))["rows"] if FILE.exists() else []
            rows = [each for each in rows if each["layout"] != layout]
            write_json(FILE, {"command": COMMAND, "rows": sorted([*rows, row], key=lambda each: each["layout"])})


if __name__ == "__main__":
    main()
