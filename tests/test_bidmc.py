"""BIDMC: windows, targets and patients held against the real recordings; miniature official files."""

import functools
import gzip
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.model_selection import train_test_split

from spt.tasks import bidmc
from spt.tasks.bidmc import Config

TARGETS = ("hr", "rr", "spo2")


def config(**options):
    return Config.model_validate_json(json.dumps(options))


def shown(data, values):
    return (values - np.array(data.input.mean)) / np.array(data.input.std)


# ------------------------------------------------------------------------------------------- real recordings


@pytest.fixture(scope="module")
def table(data_dir):
    """Recordings by number: subject, (60001, 2) signals, and numerics by name."""
    read = pq.read_table(data_dir / "bidmc" / "recordings.parquet")
    columns = {
        name: [row.values.to_numpy(zero_copy_only=False) for row in read[name]]
        for name in ("ppg", "ecg", "hr", "rr", "spo2")
    }
    subjects = read["subject"].to_pylist()
    signals = [np.stack(pair, 1) for pair in zip(columns["ppg"], columns["ecg"], strict=True)]
    numerics = [{name: columns[name][i] for name in TARGETS} for i in range(len(subjects))]
    return dict(zip(read["record"].to_pylist(), zip(subjects, signals, numerics, strict=True), strict=True))


@pytest.fixture(scope="module")
def loaded(data_dir):
    return {target: bidmc.load(config(target=target), data_dir) for target in TARGETS}


@pytest.mark.parametrize(("target", "rows"), [("hr", 7938), ("rr", 7797), ("spo2", 7822)])
def test_windows_and_targets_are_those_of_the_recordings(target, rows, loaded, table):
    data = loaded[target]
    data.check()
    assert sum(map(len, data.splits.values())) == rows, "windows whose numerics are all measured, of 53 x 150"
    assert data.length == 4000 and data.interval == 1 / 125
    for split in data.splits.values():
        for i in np.random.default_rng(0).integers(len(split), size=25).tolist():
            number, second = map(int, split.ids[i].split("-"))
            _, signals, numerics = table[number]
            assert second % 3 == 0 and np.array_equal(split.row(i), signals[125 * second : 125 * second + 4000])
            heard = [float(x) for x in numerics[target][second : second + 32]]
            assert math.isclose(split.targets[i, 0], sum(heard) / 32, rel_tol=1e-9)
    first = {int(name[:2]): name for name in np.concatenate([split.ids for split in data.splits.values()])}
    assert set(first) == set(range(1, 54)), "every recording is used"


def test_no_patient_stands_on_two_sides(loaded, table):
    sides = []
    for split in loaded["hr"].splits.values():
        numbers = {int(name[:2]) for name in split.ids}
        sides.append({table[number][0] for number in numbers})
        if len(sides) > 1:
            assert len(numbers) == 8
    assert sum(map(len, sides)) == len(set.union(*sides)) == 46
    for data in loaded.values():  # the same patients whatever is asked
        assert [{table[int(name[:2])][0] for name in split.ids} for split in data.splits.values()] == sides
    assert [len({name[:2] for name in split.ids[:40]}) > 5 for split in loaded["hr"].splits.values()] == [True] * 3


def test_another_seed_draws_other_patients(data_dir, loaded):
    other = bidmc.load(config(split_seed=1), data_dir)
    assert {name[:2] for name in other.test.ids} != {name[:2] for name in loaded["hr"].test.ids}


def test_the_known_patients_are_those_of_the_parquet_copy(table):
    by_subject = {}
    for number, (subject, *_) in table.items():
        by_subject.setdefault(subject, []).append(number)
    assert tuple(tuple(own) for own in by_subject.values() if len(own) > 1) == bidmc.ONE_PATIENT


def test_windows_share_their_steps(loaded):
    assert {len(split.values) for split in loaded["hr"].splits.values()} == {37 * 60_001, 8 * 60_001}


def test_a_few_missing_numerics_may_be_left_out_of_the_mean(data_dir, table):
    data = bidmc.load(config(target="rr", missing="all"), data_dir)
    assert sum(map(len, data.splits.values())) == 53 * 150
    splits = data.splits.values()
    rows = {name: value for split in splits for name, value in zip(split.ids, split.targets[:, 0], strict=True)}
    heard = table[13][2]["rr"][0:32].astype(float)
    assert np.isnan(heard).sum() == 4 and math.isclose(rows["13-0"], np.nanmean(heard))


def test_random_windows_are_drawn_as_published(data_dir):
    data = bidmc.load(config(split="windows", missing="all"), data_dir)
    assert [len(split) for split in data.splits.values()] == [5565, 1192, 1193]
    names = [f"{number:02d}-{3 * k}" for number in range(1, 54) for k in range(150)]
    train, rest = train_test_split(names, train_size=0.7, random_state=0)
    val, test = train_test_split(rest, train_size=0.5, random_state=1)
    assert [split.ids.tolist() for split in data.splits.values()] == [train, val, test]
    assert data.train.values is data.test.values and any("overlap" in note for note in data.notes)


def test_scaling_is_of_the_training_steps(data_dir, loaded):
    data = loaded["hr"]
    steps = shown(data, data.train.values)
    assert np.allclose(steps.min(0), -1) and np.allclose(steps.max(0), 1)
    standard = bidmc.load(config(scaling="standard"), data_dir)
    held = np.zeros(len(standard.train.values), bool)
    for start, stop in zip(standard.train.starts, standard.train.stops, strict=True):
        held[start:stop] = True
    assert not held.all()
    steps = shown(standard, standard.train.values[held])
    assert np.allclose(steps.mean(0), 0, atol=1e-6) and np.allclose(steps.std(0), 1)
    plain = bidmc.load(config(scaling="none"), data_dir)
    assert plain.input.mean == (0, 0) and plain.input.std == (1, 1)


# ------------------------------------------------------------------------------------- miniature official files


def recordings(n=8, seconds=40):
    rng = np.random.default_rng(0)
    signals = {number: rng.uniform(0, 1, (125 * seconds + 1, 2)).round(4) for number in range(1, n + 1)}
    numerics = {number: rng.integers(60, 99, (seconds + 1, 3)).astype(float) for number in range(1, n + 1)}
    numerics[2][5, 1] = np.nan
    return signals, numerics


def write_csv(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in csv_files().items():
        (folder / name).write_text(content)


@functools.cache
def csv_files():
    signals, numerics = recordings()
    found = {}
    for number in signals:
        order = np.random.default_rng(number)  # another order of columns in every file, as in the real ones
        files = {
            "Signals": ({"PLETH": signals[number][:, 0], "II": signals[number][:, 1], "RESP": None, "V": None}, 125),
            "Numerics": (dict(zip(("HR", "RESP", "SpO2"), numerics[number].T, strict=True)) | {"PULSE": None}, 1),
        }
        for kind, (columns, rate) in files.items():
            names = list(order.permutation(list(columns)))
            length = len(signals[number] if kind == "Signals" else numerics[number])
            lines = [", ".join(["Time [s]", *names])]
            for i in range(length):
                fields = [0.5 if columns[name] is None else columns[name][i] for name in names]
                lines.append(",".join([f"{i / rate:.6g}", *("" if np.isnan(f) else f"{f:.6g}" for f in fields)]))
            found[f"bidmc_{number:02d}_{kind}.csv"] = "\n".join(lines) + "\n"
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_physionets_files_give_what_a_parquet_copy_gives(target, tmp_path):
    signals, numerics = recordings()
    write_csv(tmp_path / "one" / "bidmc" / "bidmc_csv")
    (tmp_path / "two").mkdir()
    columns = {
        "record": pa.array(signals),
        "subject": [f"s{6 if number in (6, 7, 8) else number}" for number in signals],
        "ppg": [s[:, 0].astype(np.float32) for s in signals.values()],
        "ecg": [s[:, 1].astype(np.float32) for s in signals.values()],
        **{
            name: [x[:, c].astype(np.float32) for x in numerics.values()] for c, name in enumerate(("hr", "rr", "spo2"))
        },
    }
    pq.write_table(pa.table(columns), tmp_path / "two" / "recordings.parquet")
    one, two = (bidmc.load(config(target=target), tmp_path / name) for name in ("one", "two"))
    one.check()
    for split, other in zip(one.splits.values(), two.splits.values(), strict=True):
        assert np.array_equal(split.ids, other.ids) and np.array_equal(split.targets, other.targets)
        assert np.array_equal(split.values, other.values) and np.array_equal(split.starts, other.starts)
    assert sum(map(len, one.splits.values())) == (8 * 3 - (2 if target == "rr" else 0))
    assert [len({name[:2] for name in split.ids}) for split in one.splits.values()] == [6, 1, 1]
    assert any("8 recordings, not the 53" in note for note in one.notes)
    assert len(bidmc.sources(config(), tmp_path / "one")) == 16
    assert one.input.mean == (0, 0) and one.input.std == (1, 1), "what lies in [-1, 1] is left alone"


HEADER = [
    "# a comment",
    "@problemName BIDMC32HR",
    "@timestamps false",
    "@missing false",
    "@univariate false",
    "@dimensions 2",
    "@equalLength true",
    "@seriesLength 4000",
    "@targetlabel true",
    "@data",
]


def cases(n, seed):
    return np.random.default_rng(seed).normal(size=(n, 2, 4000)).round(3), np.arange(n) + 60.5 + 100 * seed


def write_ts(path, values, targets, header=HEADER, change=None):
    lines = [":".join([*(",".join(map(str, c)) for c in v), str(t)]) for v, t in zip(values, targets, strict=True)]
    if change is not None:
        lines[1] = change(lines[1])
    text = "\n".join([*header, *lines]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_archives_windows_are_drawn_as_published(suffix, tmp_path):
    (train, a), (test, b) = cases(14, 0), cases(6, 1)
    write_ts(tmp_path / f"BIDMC32HR_TRAIN.ts{suffix}", train, a)
    write_ts(tmp_path / f"BIDMC32HR_TEST.ts{suffix}", test, b)
    data = bidmc.load(config(source="archive", split="windows"), tmp_path)
    data.check()
    values, targets = np.concatenate([train, test]), np.concatenate([a, b])
    parts = [*train_test_split(np.arange(20), train_size=0.7, random_state=0)]
    parts[1:] = train_test_split(parts[1], train_size=0.5, random_state=1)
    for split, rows in zip(data.splits.values(), parts, strict=True):
        assert np.array_equal(split.targets[:, 0], targets[rows])
        for i, row in enumerate(rows):
            assert np.allclose(split.row(i), values[row].T, atol=1e-6)
    assert [len(rows) for rows in parts] == [14, 3, 3] and any("overlap" in note for note in data.notes)
    assert len(bidmc.sources(config(source="archive", split="windows"), tmp_path)) == 2
    with pytest.raises(FileNotFoundError, match="BIDMC32RR_TRAIN"):
        bidmc.load(config(source="archive", split="windows", target="rr"), tmp_path)


@pytest.mark.parametrize(
    ("header", "change", "complaint"),
    [
        (HEADER, lambda line: line.replace(":", ",", 1), "line 12 has 1 dimensions; 2 are"),
        (HEADER, lambda line: line.partition(",")[2], "a series of 3,999 numbers; 4,000 are"),
        (HEADER, lambda line: line[: line.rindex(":")], "line 12 has 1 dimensions"),
        (HEADER, lambda line: line + ",1", "a field that is no number"),
        (HEADER, lambda line: "?" + line[line.index(",") :], "a field that is no number"),
        (HEADER, lambda line: "nan" + line[line.index(",") :], "missing or not finite"),
        (HEADER, lambda line: line[: line.rindex(":")] + ":inf", "missing or not finite"),
        (HEADER, lambda line: "1" * 2**22 + line, "more than 4,194,304 bytes"),
        (HEADER[:-1], None, "data come before the line @data"),
        (["@timestamps true", "@data"], None, "@timestamps is 'true'; false is"),
        (["@dimensions 3", "@data"], None, "@dimensions is '3'; 2 is"),
        (["@targetlabel false", "@data"], None, "@targetlabel is 'false'"),
    ],
)
def test_bad_archive_files_are_refused_in_words(header, change, complaint, tmp_path):
    write_ts(tmp_path / "BIDMC32HR_TRAIN.ts", *cases(14, 0), header, change)
    write_ts(tmp_path / "BIDMC32HR_TEST.ts", *cases(6, 1))
    with pytest.raises(ValueError, match=complaint) as caught:
        bidmc.load(config(source="archive", split="windows"), tmp_path)
    assert "\n" not in str(caught.value)


def edited(name, change):
    def edit(folder):
        path = folder / f"bidmc_{name}.csv"
        path.write_text(change(path.read_text()))

    return edit


def line(number, change):
    def edit(text):
        lines = text.split("\n")
        lines[number - 1] = change(lines[number - 1])
        return "\n".join(lines)

    return edit


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda folder: (folder / "bidmc_03_Numerics.csv").unlink(), "bidmc_03_Numerics.csv is missing"),
        (edited("03_Numerics", lambda text: text.replace("HR", "H")), "no column 'HR'"),
        (edited("03_Signals", lambda text: text.replace("V", "II")), "no column 'II', or more than one"),
        (edited("03_Signals", lambda text: ""), "no column 'Time"),
        (edited("03_Signals", line(7, lambda text: text + ",1")), "line 7: 6 fields"),
        (edited("03_Signals", line(7, lambda text: text.replace("0.04", "x"))), "line 7: could not convert"),
        (
            edited("03_Signals", line(7, lambda text: text.replace("0", "\r", 1))),
            "Signals.csv, line 7: new-line character",
        ),
        (edited("03_Signals", line(7, lambda text: "")), "line 8: the time is 0.048 s; 0.04 s"),
        (
            edited("03_Signals", lambda text: text[: text.rindex("\n", 0, -1)]),
            "5,000 samples at 125 Hz and 41 numerics",
        ),
        (edited("03_Signals", line(7, lambda text: "0.04,,,,")), "samples that are not finite"),
        (edited("03_Numerics", line(7, lambda text: "5,inf,inf,inf,inf")), "an infinite hr"),
        (lambda folder: [path.unlink() for path in folder.glob("*_0[3-8]_*")], "2 patients cannot be split"),
    ],
)
def test_bad_recordings_are_refused_in_words(edit, complaint, tmp_path):
    write_csv(tmp_path / "bidmc_csv")
    edit(tmp_path / "bidmc_csv")
    with pytest.raises((ValueError, FileNotFoundError), match=complaint) as caught:
        bidmc.load(config(), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: c.pop("hr"), "no column hr"),
        (lambda c: c.update(hr=[1.0] * 4), "lists of numbers are expected"),
        (lambda c: c.update(hr=[["a"] * 41] * 4), "lists of string; numbers"),
        (lambda c: c.update(record=[1, 1, 2, 3]), "a recording twice"),
        (lambda c: c.update(subject=["a", None, "b", "c"]), "the subject None"),
        (lambda c: c.update(ecg=[[0.0] * 5000] * 4), "5,001 samples of ppg, 5,000 of ecg"),
        (lambda c: c.update(ppg=[[0.0] * 5000] * 4, ecg=[[0.0] * 5000] * 4), "5,000 samples at 125 Hz"),
        (lambda c: c.update(hr=[[math.nan] * 41] * 4), "no window of 4,000 samples with hr"),
        (lambda c: c.update(ppg=[[2.0] * 5001] * 4), "ppg is constant"),
    ],
)
def test_bad_parquet_copies_are_refused_in_words(change, complaint, tmp_path):
    rng = np.random.default_rng(0)
    columns = {
        "record": [1, 2, 3, 4],
        "subject": list("abcd"),
        "ppg": [rng.uniform(size=5001).tolist() for _ in range(4)],
        "ecg": [rng.uniform(size=5001).tolist() for _ in range(4)],
        "hr": [[80.0] * 41] * 4,
    }
    change(columns)
    pq.write_table(pa.table(columns), tmp_path / "recordings.parquet")
    with pytest.raises(ValueError, match=complaint):
        bidmc.load(config(), tmp_path)


def test_nothing_there_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"take it from https://physionet\.org.*, and put bidmc/bidmc_csv/ or"):
        bidmc.load(config(), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"take it from https://zenodo\.org/records/4001463"):
        bidmc.load(config(source="archive", split="windows", target="rr"), tmp_path)
    with pytest.raises(ValueError, match=r"put the folder bidmc_csv from https://physionet\.org"):
        bidmc.fetch(config(), tmp_path)
    with pytest.raises(ValueError, match=r"BIDMC32RR_TRAIN\.ts .*zenodo\.org/records/4001463"):
        bidmc.fetch(config(source="archive", split="windows", target="rr"), tmp_path)


def test_options_that_do_not_go_together():
    with pytest.raises(ValueError, match="says nothing of patients"):
        config(source="archive")
    with pytest.raises(ValueError, match="multiple of 125"):
        config(length=4001)
