"""Sounds, WFDB, EDF and .ts files as the user's own data: what is read, and what is refused in words."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from recordings import FILES, LABELS, SOUNDS, N, config, edf, label_files, make, sound, ts_text, wfdb_record
from test_custom import npy, wav

from spt.advisor.columns import ColumnRoles, decide
from spt.advisor.table import read_table
from spt.config.job import without_paths
from spt.config.recipe import Part
from spt.errors import DataError
from spt.inference.read import _kind
from spt.tasks import custom
from spt.tasks.own import arrays
from spt.tasks.own.new_rows import Known, NewOptions, open_rows
from spt.tasks.own.recordings import _chosen, _Signal
from spt.tasks.own.series import read_series

SERIES = {"list_column": "series", **LABELS, "label_column": "label"}


def opened(path, **options):
    data = custom.load(config(path, **options), Path("."))
    data.check()
    return data


def text_file(path, text):
    path.write_text(text)
    return path


def by_id(data):
    return {str(name): split.row(i) for split in data.splits.values() for i, name in enumerate(split.ids)}


def read(content, ending, folder, **options):
    path = folder / f"a{ending}"
    path.write_bytes(content)
    return arrays.read(path, None, "here", **options)


# ------------------------------------------------------------------------------------------------------------- sounds


@pytest.mark.parametrize("ending", SOUNDS)
def test_sounds_of_other_formats(tmp_path, ending):
    tones = [0.5 * np.sin(np.arange(2000) * (0.05 + 0.01 * i)) for i in range(N)]
    label_files(tmp_path, [f"{i}.{ending}" for i in range(N)])
    for i, tone in enumerate(tones):
        (tmp_path / f"{i}.{ending}").write_bytes(sound(ending, tone))
    data = opened(tmp_path, **FILES)
    assert data.interval == 1 / 8000 and data.input.channels == 1
    lossless = ending == "flac"
    assert data.train.values.dtype == (np.int16 if lossless else np.float32)
    for name, row in by_id(data).items():
        tone = tones[int(name.partition(".")[0])]
        scale = 32768 if lossless else 1
        error = np.abs(row[: len(tone), 0] / scale - tone[: len(row)])
        assert len(row) == len(tone) and (error.max() < 1e-3 if lossless else np.median(error) < 0.1)


def test_flac_beside_wav_and_stereo(tmp_path):
    label_files(tmp_path, [f"{i}.{('flac', 'wav')[i % 2]}" for i in range(N)])
    for i in range(N):
        (tmp_path / f"{i}.{('flac', 'wav')[i % 2]}").write_bytes(
            sound(("flac", "wav")[i % 2], np.full((50, 2), [0.25, i / 64]))
        )
    data = opened(tmp_path, **FILES, normalise="none")
    assert data.train.values.dtype == np.int16 and data.input.channels == 2
    assert all((row[:, 0] == 8192).all() for row in by_id(data).values())


@pytest.mark.parametrize("subtype", ["ULAW", "IMA_ADPCM", "DOUBLE"])
def test_kinds_of_wav_beyond_pcm(tmp_path, subtype):
    samples = 0.5 * np.sin(np.arange(1010) / 20)
    found = read(sound("wav", samples, subtype=subtype), ".wav", tmp_path)
    assert found.rate == 8000 and np.median(np.abs(found.steps[:1000, 0] - samples[:1000])) < 0.02


def test_sounds_of_24_bits_keep_them(tmp_path):
    import soundfile

    given = np.random.default_rng(0).normal(0, 0.1, 50)
    soundfile.write(tmp_path / "a.flac", given, 8000, subtype="PCM_24")
    found = arrays.read(tmp_path / "a.flac", None, "here")
    assert found.rate == 8000 and np.allclose(found.steps[:, 0], given, atol=2**-22)


# ------------------------------------------------------------------------------------------------------- WFDB and EDF


@pytest.mark.parametrize("named", ["r{}", "r{}.hea", "./r{}"])
def test_wfdb_records_in_physical_units(tmp_path, named):
    rows = [np.random.default_rng(i).normal(size=(20 + i, 2)) for i in range(N)]
    label_files(tmp_path, [named.format(i) for i in range(N)])
    for i, row in enumerate(rows):
        wfdb_record(tmp_path, f"r{i}", row, fmt=("16", "212", "24")[i % 3])
    data = opened(tmp_path, **FILES, normalise="none")
    assert data.interval == 1 / 360 and data.input.channels == 2
    for name, row in by_id(data).items():
        assert np.allclose(row, rows[int(name[1:-4])], atol=2e-3)
    one = opened(tmp_path, **FILES, channels=["V5"], normalise="none")
    assert np.allclose(by_id(one)["r3.hea"][:, 0], rows[3][:, 1], atol=2e-3)
    swapped = opened(tmp_path, **FILES, channels=["V5", "II"], normalise="none")
    assert np.array_equal(by_id(swapped)["r3.hea"], by_id(data)["r3.hea"][:, ::-1])


@pytest.mark.parametrize("bdf", [False, True])
def test_edf_and_bdf_in_physical_units(tmp_path, bdf):
    ending = "bdf" if bdf else "edf"
    rows = [np.random.default_rng(i).normal(size=100) for i in range(N)]
    label_files(tmp_path, [f"{i}.{ending}" for i in range(N)])
    for i, row in enumerate(rows):
        signals = {"C3": (row, 50), "temperature": (np.arange(2.0), 1), "C4": (-row, 50)}
        (tmp_path / f"{i}.{ending}").write_bytes(edf(signals, bdf))
    data = opened(tmp_path, **FILES, channels=["C4", "C3"], normalise="none")
    assert data.interval == 1 / 50
    for name, row in by_id(data).items():
        assert np.allclose(row, np.stack([-rows[int(name[:-4])], rows[int(name[:-4])]], 1), atol=1e-3)
    with pytest.raises(
        ValueError, match=r"several sampling rates \(C3 50, temperature 1, C4 50 a second\); .*channels"
    ):
        opened(tmp_path, **FILES)


def test_edited_signals_are_read_again(tmp_path):
    path, options = make("wfdb signals", tmp_path)
    assert path in custom.sources(options, Path(".")) and tmp_path / "r0.hea" in custom.sources(options, Path("."))
    assert len(custom.sources(options, Path("."))) == 1 + 2 * N


def test_files_that_no_row_names_are_refused(tmp_path):
    make("wfdb header", tmp_path)
    wfdb_record(tmp_path, "extra", np.zeros((9, 2)))
    with pytest.raises(ValueError, match=r"1 files that no row of labels\.csv names; there: 'extra\.hea'"):
        opened(tmp_path, **FILES)


def test_runs_without_channels_keep_their_keys():
    options = json.loads(config("a", **FILES).model_dump_json())
    assert "channels" not in without_paths("tasks", Part(name="custom", **options))
    options = json.loads(config("a", **FILES, channels=["II"]).model_dump_json())
    assert without_paths("tasks", Part(name="custom", **options))["channels"] == ["II"]


# ---------------------------------------------------------------------------------------------------------------- .ts


def test_series_of_the_archives(tmp_path):
    text_file(tmp_path / "Toy_TRAIN.ts", ts_text(40))
    text_file(tmp_path / "Toy_TEST.ts", ts_text(4))
    for path in (tmp_path, tmp_path / "Toy_TRAIN.ts"):
        data = opened(path, **SERIES, normalise="none")
        assert len(data.test) == 4 and len(data.train) + len(data.val) == 40 and data.input.channels == 2
        assert np.allclose(data.test.row(0)[:2, 0], [0.126, -0.132]) and data.test.targets.tolist() == [0, 1, 0, 1]
    assert custom.sources(config(tmp_path / "Toy_TRAIN.ts", **SERIES), Path(".")) == [
        tmp_path / "Toy_TRAIN.ts",
        tmp_path / "Toy_TEST.ts",
    ]
    decisions = decide(read_table(tmp_path / "Toy_TRAIN.ts"), ColumnRoles())
    assert decisions.options["list_column"] == "series" and decisions.options["label_column"] == "label"
    assert "splits: by the files' names (train, test)" in decisions.lines
    text_file(tmp_path / "Other_TRAIN.ts", ts_text())
    with pytest.raises(ValueError, match="several data sets"):
        opened(tmp_path, **SERIES)


def test_series_with_numbers_to_predict(tmp_path):
    text = ts_text(channels=1).replace("@classLabel true a b", "@targetLabel true").replace(":a", ":1.5")
    path = text_file(tmp_path / "a.ts", text.replace(":b", ":-2e1"))
    data = opened(path, **SERIES | {"split": "hash"}, target="real")
    assert {float(y) for y in data.train.targets[:, 0]} == {1.5, -20.0}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("@timeStamps false", "@timeStamps true", "line 3: series with timestamps are not read"),
        ("@problemName", "@author", "line 2: @author is not known"),
        ("@equalLength true", "@equalLength maybe", "line 6: @equallength is 'maybe'; true or false"),
        ("@classLabel true a b", "@classLabel true a", "line 11: the label 'b' is none of those"),
        ("@classLabel true a b\n", "", "neither @classLabel nor @targetLabel"),
        ("@data\n", "", "line 9: a header line begins with @"),
        ("@seriesLength 5", "@seriesLength 999999999999", "line 7: @serieslength is '999999999999'"),
        ("@seriesLength 5", "@seriesLength 6", "line 10: the series has 5 steps, the header says 6"),
        ("@dimensions 2", "@dimensions 3", "line 10: the series has 2 dimensions, 3 are expected"),
        ("0.126,", "", "line 10, dimension 2: 5 steps, but 4 in the first"),
        ("0.126,", "x,", "line 10, dimension 1, step 1: 'x' is not a number"),
        ("0.126,", "1e30,", "line 10, dimension 1, step 1: '1e30' is not a finite number"),
        ("0.126,", "(0,0.126),", "line 10, dimension 1: steps with timestamps, in brackets"),
        (":a\n", ":\n", "line 10: the label behind the last ':' is empty"),
        ("@data", "@missing false\n@data", None),
    ],
)
def test_series_that_are_refused(tmp_path, old, new, words):
    text = ts_text()
    assert old in text
    if words is None:
        text, words = text.replace("0.126,", "?,"), r"line 11, dimension 1, step 1: '\?' stands here, but"
    with pytest.raises(ValueError, match=words):
        opened(text_file(tmp_path / "a.ts", text.replace(old, new, 1)), **SERIES)


SHORT = ["@timeStamps false", "@classLabel true a b"]


@pytest.mark.parametrize(
    ("header", "series", "words"),
    [
        (["@equalLength true"], ["1,2:a", "1,2,3:b"], "line 6: the series has 3 steps, the header says 2 for all"),
        (["@univariate true"], ["1,2:3,4:a"], "line 5: the series has 2 dimensions, 1 are expected"),
        (["@univariate true", "@dimensions 2"], ["1:a"], "says @univariate true and 2 dimensions"),
        ([], ["1,2:3,4:a", "1,2:b"], "line 5: the series has 1 dimensions, 2 are expected"),
        (["@dimensions 0"], ["1:a"], "line 3: @dimensions is '0'; a number from 1 to"),
        (["@missing true", "@missing true"], ["1:a"], "line 4: @missing stands twice"),
        (["@targetLabel true"], ["1:a"], "line 3: @classLabel and @targetLabel are both given"),
        ([], ["1,2"], "line 4: a label behind a last ':' is announced"),
    ],
)
def test_headers_of_series_that_say_less(header, series, words):
    lines = [*SHORT, *header, "@data", *series]
    with pytest.raises(ValueError, match=words):
        list(read_series(iter(lines), Path("a.ts")))


def test_a_header_of_series_may_say_little():
    """Values may be missing where it does not deny it; without @equalLength lengths differ."""
    read = [*read_series(iter([*SHORT, "@data", "1,?,3:4,5,6:a", "7:8:b"]), Path("a.ts"))]
    assert [cells[1] for *_, cells in read] == ["a", "b"] and [number for number, *_ in read] == [4, 5]
    assert np.array_equal(read[0][2][0], [[1, 4], [np.nan, 5], [3, 6]], equal_nan=True)
    assert read[1][2][0].shape == (1, 2)


# ----------------------------------------------------------------------------------------------------- what is refused

FLAC = b"fLaC\x00\x00\x00\x22" + bytes.fromhex("10001000000000000000") + bytes.fromhex("01f40ff0")


def _wfdb(change, tmp_path):
    wfdb_record(tmp_path, "a", np.random.default_rng(0).normal(size=(30, 2)))
    text = (tmp_path / "a.hea").read_text()
    (tmp_path / "a.hea").write_text(change(text))
    return arrays.read(tmp_path / "a.hea", None, "here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda text: text.replace(" 30\n", " 3000\n", 1),
            r"a\.dat is cut short: 12,000 bytes are announced, 120 follow",
        ),
        (lambda text: text.replace(" 30\n", " 99999999999\n", 1), "too long for one row"),
        (lambda text: text.replace("a 2 360", "a/2 2 360", 1).replace("a.dat", "b 15\n#"), "several segments"),
        (lambda text: text.replace("a 2 360", "a 7 360", 1), "7 signals are announced, 2 described"),
        (lambda text: text.replace("a 2 360", "a 2 0", 1), "sampling frequency is 0"),
        (lambda text: text.replace("a.dat 16", "b.dat 16"), r"signal file b\.dat is not in"),
        (lambda text: text.replace("a.dat 16", "a.dat 99"), "format of a.dat is 99, which is not read"),
        (lambda text: text.replace("a.dat 16", "a.dat 16x4", 1), r"cut short: 300 bytes are announced, 120 follow"),
        (lambda text: text.replace(" 30\n", " 12\n").replace("16", "16x4", 1), "several sampling rates"),
        (lambda text: text.replace("a.dat 16", "a.dat 16+24"), r"cut short: 120 bytes are announced, 96 follow"),
        (lambda text: text.replace("a.dat 16", "a.dat 212", 1), r"format of a\.dat is 16 and 212, which is not read"),
        (
            lambda text: text.replace("a.dat 16", "a.dat 516").replace(" 30\n", " 9999999\n", 1),
            r"a\.dat unpacks to 19,999,998 samples from 120 bytes; it is not used",
        ),
        (lambda text: "", "cannot be read as a WFDB header"),
        (lambda text: "\0" * 100, "cannot be read as a WFDB header"),
    ],
)
def test_wfdb_records_that_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        _wfdb(change, tmp_path)


def test_several_samples_of_a_frame_are_steps(tmp_path):
    found = _wfdb(lambda text: text.replace(" 30\n", " 15\n").replace("a.dat 16", "a.dat 16x2"), tmp_path)
    assert found.rate == 720 and found.steps.shape == (30, 2) and found.signals == ("II [mV]", "V5 [mV]")


def test_of_two_signals_of_one_name_none_is_chosen():
    signals = [_Signal(name, "mV", 360) for name in ("II", "V5", "II")]
    assert _chosen(signals, ["V5"], "here") == [1] and _chosen(signals, [], "here") == [0, 1, 2]
    with pytest.raises(ValueError, match="here: 2 signals are called 'II'"):
        _chosen(signals, ["II"], "here")


def test_signals_outside_the_folder_are_not_opened(tmp_path):
    (tmp_path / "in").mkdir()
    wfdb_record(tmp_path, "a", np.zeros((30, 2)))
    (tmp_path / "in" / "a.hea").write_text((tmp_path / "a.hea").read_text())
    os.symlink(tmp_path / "a.dat", tmp_path / "in" / "a.dat")
    with pytest.raises(ValueError, match=r"'a\.dat' leads outside the folder in; it is not used"):
        arrays.read(tmp_path / "in" / "a.hea", None, "here")
    text = (tmp_path / "a.hea").read_text().replace("a.dat", "../a.dat")
    (tmp_path / "in" / "a.hea").write_text(text)
    with pytest.raises(ValueError, match=r"here, a\.hea"):
        arrays.read(tmp_path / "in" / "a.hea", None, "here")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c[:100], "it has 100 bytes"),
        (lambda c: c[:-7], "Incomplete data record"),
        (lambda c: c[:236] + b"900     " + c[244:], "indicates 900 data records"),
        (lambda c: c[:236] + b"-1      " + c[244:], "never finished"),
        (lambda c: c[:252] + b"9999" + c[256:], "9,999 signals are announced"),
        (lambda c: c[:252] + b"-1  " + c[256:], "-1 signals are announced"),
        (lambda c: c[:192] + b"EDF+D" + c[197:], "has gaps"),
        (lambda c: c[:244] + b"0       " + c[252:], "cannot be read as EDF"),
        (lambda c: bytes(len(c)), "cannot be read as EDF"),
    ],
)
def test_edf_files_that_are_refused(tmp_path, change, words):
    content = edf({"C3": (np.random.default_rng(0).normal(size=400), 100)})
    with pytest.raises(ValueError, match=words):
        read(change(content), ".edf", tmp_path)


def test_bdf_with_gaps_is_refused(tmp_path):
    content = edf({"C3": (np.random.default_rng(0).normal(size=400), 100)}, True)
    with pytest.raises(ValueError, match="has gaps"):
        read(content[:192] + b"BDF+D" + content[197:], ".bdf", tmp_path)


@pytest.mark.parametrize(
    ("ending", "content", "words"),
    [
        (".flac", b"", "cannot be read as a sound"),
        (".flac", b"fLaC" + bytes(200), "cannot be read as a sound|has no samples"),
        (".mp3", b"not a sound at all" * 9, "cannot be read as a sound|has no samples"),
        (".ogg", b"OggS" + bytes(300), "cannot be read as a sound"),
        (".flac", "cut", "cut short|cannot be read"),
        (".flac", "lie", "cut short|cannot be read"),
    ],
)
def test_sounds_that_are_refused(tmp_path, ending, content, words):
    if isinstance(content, str):
        whole = sound("flac", np.random.default_rng(0).normal(0, 0.1, 20000))
        lie = whole[:21] + b"\x0f\xff\xff\xff\xff" + whole[26:]  # of the number of samples: 68 thousand million
        content = whole[:9000] if content == "cut" else lie
    with pytest.raises(ValueError, match=words):
        read(content, ending, tmp_path)


def test_files_that_do_not_go_together_are_refused(tmp_path):
    def refused(words, *contents, **options):
        folder = label_files(tmp_path / str(len(os.listdir(tmp_path))), [name for name, _ in contents])
        for name, content in contents:
            (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=words):
            opened(folder, **FILES, **options)

    x = np.zeros(100)
    of = {unit: edf({"C3": (x + 1, 50), "C4": (x, 50)}, unit=unit) for unit in ("uV", "mV")}
    refused(r"its signals are C3 \[mV\], C4 \[mV\], but C3 \[uV\]", ("a.edf", of["uV"]), ("b.edf", of["mV"]))
    refused("its signals are C3", ("a.edf", of["uV"]), ("b.edf", edf({"C3": (x + 1, 50)})))
    refused(r"C3 \[uV\], C4 \[uV\], but C\?3", ("a.edf", of["uV"].replace(b"C3 ", b"C\n3")), ("b.edf", of["uV"]))
    refused("100 samples a second, but 50", ("a.edf", of["uV"]), ("b.edf", edf({"C3": (x, 100), "C4": (x, 100)})))
    refused(r"a \.flac file, but a \.edf file", ("a.edf", of["uV"]), ("b.flac", sound("flac", x)))
    refused("no signal 'C5'; there: 'C3', 'C4'", ("a.edf", of["uV"]), channels=["C5"])
    refused("channels names signals of .hea, .edf, .bdf files; .npy files", ("a.npy", npy(x)), channels=["C3"])
    refused(r"8,000 samples a second, but 4,000", ("a.wav", wav(rate=4000)), ("b.flac", sound("flac", x)))
    with pytest.raises(ValueError, match="array, channels and unlisted are for file_column"):
        config(tmp_path, list_column="x", label_column="y", channels=["a"])
    with pytest.raises(ValueError, match="names a signal twice"):
        config(tmp_path, **FILES, channels=["a", "a"])


@pytest.mark.parametrize(
    ("kind", "package", "extra"),
    [("flac", "soundfile", "audio"), ("wfdb header", "wfdb", "wfdb"), ("edf", "edfio", "edf")],
)
def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch, kind, package, extra):
    _, options = make(kind, tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"package {package}.*pip install 'selfpretrain\[{extra}\]'$"):
        custom.load(options, Path("."))
    if package == "soundfile":
        with pytest.raises(ValueError, match=r"is compressed or coded \(mu-law\).*selfpretrain\[audio\]"):
            read(MU_LAW, ".wav", tmp_path)


MU_LAW = b"RIFF\x40\0\0\0WAVEfmt \x10\0\0\0\x07\0\x01\0\x40\x1f\0\0\x40\x1f\0\0\x01\0\x08\0data\x04\0\0\0\1\2\3\4"


# ------------------------------------------------------------------------------------------- spt try, and new rows


@pytest.mark.parametrize("named", ["r{}", "r{}.hea"])
def test_try_finds_recordings(tmp_path, named):
    label_files(tmp_path, [named.format(i) for i in range(40)])
    for i in range(40):
        wfdb_record(tmp_path, f"r{i}", np.random.default_rng(i).normal(size=(20, 2)))
    decisions = decide(read_table(tmp_path), ColumnRoles())
    assert decisions.kind == "files" and decisions.options["file_column"] == "file"
    chosen = decide(read_table(tmp_path), ColumnRoles(channels=("V5",)))
    assert chosen.options["channels"] == ["V5"]


def test_new_recordings_are_read_as_training(tmp_path):
    (tmp_path / "train").mkdir()
    _, options = make("edf", tmp_path / "train")
    reader = custom._read(options, Path("."))
    data = custom.assemble(options, reader.files, reader.examples())
    told = json.loads(json.dumps(custom.reading(options, Path("."), data.input)))
    files = told["files"]
    assert files["kind"] == "EDF" and files["signals"] == ["C3 [uV]", "C4 [uV]"] and files["rate"] == 200

    def rows(path, **more):
        new = NewOptions.model_validate_json(
            json.dumps({"path": str(path), "file_column": "file", "unlisted": "ignore", **more})
        )
        known = Known(
            data.input,
            None,
            data.interval,
            kind=_kind(files),
            rate=200,
            signals=tuple(files["signals"]),
        )
        return list(open_rows(new, known).chunks())

    alone, folder = tmp_path / "a.edf", tmp_path / "new"
    folder.mkdir()
    x = np.random.default_rng(0).normal(size=200)
    alone.write_bytes(edf({"C3": (x, 200), "C4": (2 * x, 200)}))
    (folder / "b.edf").write_bytes(edf({"C4": (2 * x, 200), "T": (x[:1], 1), "C3": (x, 200)}))
    (first,) = rows(alone)
    assert np.allclose(first.values, np.stack([x, 2 * x], 1), atol=1e-3)
    (same,) = rows(folder, channels=["C3", "C4"])
    assert np.allclose(first.values, same.values, atol=1e-3)
    with pytest.raises(ValueError, match="several sampling rates"):
        rows(folder)
    (folder / "b.edf").write_bytes(edf({"C4": (2 * x, 200), "C3": (x, 200)}))
    with pytest.raises(ValueError, match=r"its signals are C4 \[uV\], C3 \[uV\], but C3 \[uV\], C4 \[uV\] in training"):
        rows(folder)
    assert _kind({"sound": True}) == "sound" and _kind({"sound": False}) == "array"


def test_a_folder_of_recordings_without_a_table_is_told(tmp_path):
    (tmp_path / "a.edf").write_bytes(edf({"C3": (np.zeros(200), 200)}))
    with pytest.raises(DataError, match=r"needs a table labels\.csv"):
        read_table(tmp_path)
