"""Small files of every kind that is read as the user's own, each with a table of their labels."""

import io
import json
import warnings

import numpy as np
from test_custom import npy, npz, write

from spt.tasks import custom

LABELS = {"label_column": "y", "validation_fraction": 0.25, "test_fraction": 0.25, "split": "stratified"}
FILES = {"file_column": "file", **LABELS}
SOUNDS = ("flac", "ogg", "mp3")
N = 16


def config(path, **options):
    return custom.Config.model_validate_json(json.dumps({"path": str(path), **options}))


def label_files(folder, names):
    """labels.csv: every other file is of class b."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "labels.csv", [{"file": name, "y": "ab"[i % 2]} for i, name in enumerate(names)])
    return folder


def sound(ending, samples, rate=8000, **options):
    import soundfile

    content = io.BytesIO()
    soundfile.write(content, samples, rate, format={"oga": "ogg"}.get(ending, ending).upper(), **options)
    return content.getvalue()


def wfdb_record(folder, name, samples, names=("II", "V5"), unit="mV", rate=360, fmt="16", **options):
    import wfdb

    several = {"units": [unit] * len(names), "sig_name": list(names), "fmt": [fmt] * len(names)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wfdb.wrsamp(name, fs=rate, p_signal=np.asarray(samples, float), write_dir=str(folder), **several, **options)


def edf(signals, bdf=False, unit="uV"):
    """Of {name: (samples, rate)}."""
    import edfio

    kind, whole = (edfio.BdfSignal, edfio.Bdf) if bdf else (edfio.EdfSignal, edfio.Edf)
    content = io.BytesIO()
    whole(
        [kind(np.asarray(x, float), rate, label=name, physical_dimension=unit) for name, (x, rate) in signals.items()]
    ).write(content)
    return content.getvalue()


def ts_text(n=N, channels=2, steps=5, header="", labels=True):
    """A .ts file of n series."""
    rng = np.random.default_rng(0)
    lines = ["# a comment", "@problemName Toy", "@timeStamps false", f"@univariate {str(channels == 1).lower()}"]
    lines += [f"@dimensions {channels}", "@equalLength true", f"@seriesLength {steps}"]
    lines += ["@classLabel true a b" if labels else "@classLabel false", *filter(None, [header]), "@data"]
    for i in range(n):
        series = ":".join(",".join(f"{v:.3f}" for v in rng.normal(size=steps)) for _ in range(channels))
        lines.append(f"{series}:{'ab'[i % 2]}" if labels else series)
    return "\n".join(lines) + "\n"


def make(kind, folder):
    """Write N rows of a kind; the file of the first row (the table itself), and the task's options."""
    rng = np.random.default_rng(1)
    rows = [{"x": rng.integers(0, 99, 4).tolist(), "y": "ab"[i % 2]} for i in range(N)]
    if kind in ("csv", "jsonl", "parquet"):
        path = write(folder / f"a.{kind}", rows)
        return path, config(path, list_column="x", **LABELS)
    if kind == "ts":
        path = folder / "a.ts"
        path.write_text(ts_text())
        return path, config(path, list_column="series", **LABELS | {"label_column": "label"})
    if kind in ("wfdb header", "wfdb signals"):
        label_files(folder, [f"r{i}" for i in range(N)])
        for i in range(N):
            wfdb_record(folder, f"r{i}", rng.normal(size=(20, 2)))
        return folder / ("r0.hea" if kind == "wfdb header" else "r0.dat"), config(folder, **FILES)
    label_files(folder, [f"{i}.{kind}" for i in range(N)])
    for i in range(N):
        samples = rng.normal(0, 0.1, 400)
        content = {
            "npy": lambda x: npy(x),
            "npz": lambda x: npz(x=x),
            "wav": lambda x: sound("wav", x),
            "edf": lambda x: edf({"C3": (x, 200), "C4": (x, 200)}),
            "bdf": lambda x: edf({"C3": (x, 200)}, bdf=True),
        }.get(kind, lambda x: sound(kind, x))(samples)
        (folder / f"{i}.{kind}").write_bytes(content)
    return folder / f"0.{kind}", config(folder, **FILES)


KINDS = (
    *("csv", "jsonl", "parquet", "ts", "npy", "npz", "wav", *SOUNDS),
    *("wfdb header", "wfdb signals", "edf", "bdf"),
)
