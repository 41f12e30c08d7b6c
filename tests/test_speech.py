"""Speech Commands and spoken digits: real clips against what was published, miniature official files, WAV files."""

import hashlib
import io
import json
import struct
import tarfile
import wave
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from spt.tasks import speech
from spt.tasks.speech import DIGITS, TEN, WORDS, Config, hashed_part
from spt.tasks.waves import read_wav, unit


def config(**options):
    return Config.model_validate_json(json.dumps(options))


def wav(samples, rate=16_000, width=2, channels=1):
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.asarray(samples).tobytes())
    return out.getvalue()


def shown(data, split, i):
    """A row as a model sees it."""
    return (split.row(i) - np.array(data.input.mean)) / np.array(data.input.std)


# -------------------------------------------------------------------------------------------------- WAV files


@pytest.mark.parametrize(("width", "kind"), [(1, np.uint8), (2, np.int16), (4, np.int32)])
def test_wav_gives_back_what_was_written(width, kind):
    info = np.iinfo(kind)
    given = np.random.default_rng(0).integers(info.min, info.max, (50, 3), dtype=kind, endpoint=True)
    found, rate = read_wav(wav(given, 44_100, width, 3), "x.wav", 50)
    assert rate == 44_100 and found.dtype == kind and np.array_equal(found, given)
    assert np.abs(unit(found)).max() <= 1


def test_wav_of_24_bits_fills_the_upper_ones():
    given = np.array([-(2**23), -1, 0, 1, 2**23 - 1])
    raw = b"".join(int(x).to_bytes(3, "little", signed=True) for x in given)
    found, _ = read_wav(wav(np.frombuffer(raw, np.uint8), width=3), "x.wav", 5)
    assert found.dtype == np.int32 and np.array_equal(found[:, 0], given * 256)
    assert np.allclose(unit(found)[:, 0], given / 2**23)


def riff(codec=1, channels=1, rate=16_000, bits=16, data=b"\1\0\2\0", extra=b"", before=b"", block=None, size=None):
    block = channels * bits // 8 if block is None else block
    form = struct.pack("<HHIIHH", codec, channels, rate, rate * block, block, bits) + extra
    body = b"WAVE" + before + b"fmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_wav_of_floats_extensible_formats_and_other_chunks():
    floats = np.array([0.25, -1.5], "<f4")
    found, _ = read_wav(riff(3, bits=32, data=floats.tobytes()), "x", 9)
    assert found.dtype == np.float32 and np.array_equal(found[:, 0], floats)
    tail = struct.pack("<HHIH", 22, 16, 4, 1) + bytes.fromhex("000000001000800000aa00389b71")
    odd = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    for content in (riff(0xFFFE, extra=tail), riff(before=odd), riff() + b"trailing"):
        assert read_wav(content, "x", 9)[0][:, 0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "no WAV file: it has 0 bytes"),
        (b"ID3" + bytes(100), "does not begin with RIFF"),
        (b"RIFX" + bytes(100), "RIFX file; convert"),
        (riff()[:30], "cut short: it has no format"),
        (riff()[:40], "cut short: it has no samples"),
        (riff()[:-1], "cut short: 4 bytes of samples are announced, 3 follow"),
        (riff(size=2**32 - 1), "cut short: 4,294,967,295 bytes"),
        (riff(data=b""), "has no samples"),
        (riff(data=b"\0\0\0"), "no whole number of frames"),
        (riff(codec=85), r"compressed or coded \(MP3\)"),
        (riff(codec=7, bits=8), "mu-law"),
        (riff(codec=999), "codec 999"),
        (riff(codec=0xFFFE), "codec 65534"),
        (riff(bits=12, block=2), "integers of 12 bits"),
        (riff(codec=3, bits=64), "floats of 64 bits"),
        (riff(channels=0), "0 channels"),
        (riff(channels=300), "300 channels"),
        (riff(rate=0), "sampling rate of 0"),
        (riff(block=7), "are not 7 bytes"),
        (riff(data=bytes(202)), "101 samples a channel; at most 100"),
        (riff(3, bits=32, data=np.array([np.nan], "<f4").tobytes()), "not a finite number"),
        (b"RIFF" + bytes(4) + b"WAVE" + b"data" + struct.pack("<I", 2) + b"\0\0", "samples come before their format"),
        (b"RIFF" + bytes(4) + b"WAVE" + b"fmt " + struct.pack("<I", 8) + bytes(8), "its format has 8 bytes"),
    ],
)
def test_odd_wav_files_are_refused_in_words(content, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        read_wav(content, "here.wav", 100)
    assert str(caught.value).startswith("here.wav") and "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------- three words


@pytest.fixture(scope="module")
def tables(data_dir):
    names = {"train": "train", "val": "validation", "test": "test"}
    return {part: pq.read_table(data_dir / "speech_commands_3" / f"{name}.parquet") for part, name in names.items()}


@pytest.fixture(scope="module")
def clips(tables):
    """Samples, word and speaker by clip, read directly."""
    found = {}
    for part, table in tables.items():
        for samples, file, word, speaker in zip(*(table[c] for c in ("audio", "file", "word", "speaker")), strict=True):
            found[str(file).removesuffix(".wav")] = (part, samples.values.to_numpy(), str(word), str(speaker))
    return found


@pytest.fixture(scope="module")
def three(data_dir):
    return speech.load(config(), data_dir)


def test_three_words_are_what_their_readme_says(three, clips):
    three.check()
    assert {name: len(split) for name, split in three.splits.items()} == {"train": 900, "val": 150, "test": 300}
    assert [np.bincount(split.targets).tolist() for split in three.splits.values()] == [[300] * 3, [50] * 3, [100] * 3]
    speakers = []
    for part, split in three.splits.items():
        assert {clips[name][0] for name in split.ids} == {part}
        speakers.append({clips[name][3] for name in split.ids})
        for i in range(len(split)):
            _, samples, word, _ = clips[split.ids[i]]
            assert ["bed", "cat", "happy"][split.targets[i]] == word
            row = split.row(i)
            assert row.shape == (16_000, 1) and np.array_equal(row[: len(samples), 0], samples)
            assert not row[len(samples) :].any()
    assert [len(own) for own in speakers] == [687, 100, 150] and len(set.union(*speakers)) == 937
    assert three.interval == 1 / 16_000 and three.length == 16_000 and three.train.values.dtype == np.int16
    assert any("bed, cat, happy" in note for note in three.notes)
    assert len(set(three.train.targets[:12])) == 3, "rows stand in a mixed order"


def test_the_hash_rule_gives_the_published_split(clips, data_dir, three):
    assert all(hashed_part(name) == part for name, (part, *_) in clips.items())
    again = speech.load(config(split="hash"), data_dir)
    for split, other in zip(three.splits.values(), again.splits.values(), strict=True):
        assert np.array_equal(split.ids, other.ids)


def test_global_scaling_is_of_the_training_clips(three):
    every = np.concatenate([shown(three, three.train, i) for i in range(900)])
    assert abs(every.mean()) < 1e-9 and abs(every.std() - 1) < 1e-9
    plain = np.concatenate([three.train.row(i) for i in range(900)]) / 2**15
    assert np.isclose(plain.std() * 2**15, three.input.std[0])


def test_scaling_per_step_is_the_published_one(three, data_dir):
    found = speech.load(config(scaling="per_step"), data_dir)
    raw = {name: split.values.reshape(-1, 16_000) / 2.0**30 for name, split in three.splits.items()}
    mean, std = raw["train"].mean(0), raw["train"].std(0, ddof=1)
    for name, split in found.splits.items():
        assert split.values.dtype == np.float32
        expected = (raw[name] - mean) / (std + 1e-5)
        assert np.abs(split.values.reshape(-1, 16_000) - expected).max() < 1e-5
    assert 0.1 < found.train.values.std() < 0.2
    assert (found.input.mean, found.input.std) == ((0.0,), (1.0,))


def test_no_scaling_is_division_by_full_scale(three, data_dir):
    found = speech.load(config(scaling="none"), data_dir)
    assert np.array_equal(found.test.values, three.test.values) and found.input.std == (32768.0,)
    assert np.abs(shown(found, found.test, 0)).max() < 1


TWO = {"dataset": "digits", "words": ["one", "two"]}


@pytest.mark.parametrize("options", [{}, TWO, {**TWO, "short": "pad", "length": 3001, "scaling": "per_step"}])
def test_half_the_rate_is_every_second_sample(options, three, data_dir):
    whole = speech.load(config(**options), data_dir) if options else three
    half = speech.load(config(**options, decimate=2), data_dir)
    assert half.interval == 2 * whole.interval and half.input == whole.input
    for split, other in zip(whole.splits.values(), half.splits.values(), strict=True):
        assert np.array_equal(split.ids, other.ids)
        assert all(np.array_equal(split.row(i)[::2], other.row(i)) for i in range(len(split)))
    assert any("one sample in 2" in note for note in half.notes)


@pytest.mark.parametrize("scaling", ["global", "per_step", "none"])
def test_dropped_samples_are_drawn_as_published(scaling, tmp_path):
    """Zero after the scaling, marked in a second channel, and no part of the statistics."""
    folder = tmp_path / "speech_commands"
    unpacked(folder, miniature(("bed", "yes"), speakers=40, n=160)[0])
    options = {"length": 160, "split": "random", "scaling": scaling}
    found = speech.load(config(**options, dropped=0.3), tmp_path)
    assert found.input.channels == 2 and any("30 % of the samples" in note for note in found.notes)
    order = sorted(name for split in found.splits.values() for name in split.ids.tolist())
    generator = torch.Generator().manual_seed(56789)
    left = {}
    for name in order:  # bed before yes
        left[name] = np.ones(160, bool)
        left[name][torch.randperm(160, generator=generator)[:48].numpy()] = False
    samples = {}
    for split in speech.load(config(**{**options, "scaling": "none"}), tmp_path).splits.values():
        samples |= {name: split.row(i)[:, 0].astype(np.float64) for i, name in enumerate(split.ids.tolist())}
    training = np.ma.array(
        [samples[name] for name in found.train.ids], mask=[~left[name] for name in found.train.ids.tolist()]
    )
    if scaling == "global":
        mean, std = training.mean(), training.std()
    elif scaling == "per_step":
        mean, std = training.mean(0).data, training.std(0, ddof=1).data + 1e-5 * 2.0**30
    else:
        mean, std = 0.0, 2.0**15
    for split in found.splits.values():
        for i, name in enumerate(split.ids.tolist()):
            assert np.array_equal(split.row(i)[:, 1], left[name])
            expected = np.where(left[name], (samples[name] - mean) / std, 0.0)
            assert np.allclose(split.row(i)[:, 0], expected, rtol=1e-4, atol=1e-6)
    assert (found.input.mean, found.input.std) == ((0.0, 0.0), (1.0, 1.0))
    half = speech.load(config(**options, dropped=0.3, decimate=2), tmp_path)
    assert np.array_equal(half.val.row(0), found.val.row(0)[::2])


def test_clips_may_keep_their_lengths(clips, data_dir):
    kept = speech.load(config(short="keep", words=["bed", "happy"]), data_dir)
    assert all(len(kept.val.row(i)) == len(clips[kept.val.ids[i]][1]) for i in range(100))
    assert abs(sum(shown(kept, kept.train, i).sum() for i in range(600))) < 1e-3


def test_random_split_is_stratified_and_of_all_clips(data_dir, clips):
    found = speech.load(config(split="random", short="drop"), data_dir)
    n = sum(len(samples) == 16_000 for _, samples, *_ in clips.values())
    assert [len(split) for split in found.splits.values()] == [831, 178, 179] and n == 1188
    names = sorted((k for k, v in clips.items() if len(v[1]) == 16_000), key=lambda k: (clips[k][2], k))
    from sklearn.model_selection import train_test_split

    words = [clips[name][2] for name in names]
    train, rest, _, own = train_test_split(names, words, train_size=0.7, random_state=0, stratify=words)
    val, test = train_test_split(rest, train_size=0.5, random_state=1, stratify=own)
    assert [split.ids.tolist() for split in found.splits.values()] == [train, val, test]
    assert any("at random" in note for note in found.notes)


def test_words_are_classes_in_the_order_given(data_dir):
    found = speech.load(config(words=["happy", "bed"]), data_dir)
    assert len(found.train) == 600 and found.target.count == 2
    assert {
        (name.partition("/")[0], label) for name, label in zip(found.train.ids, found.train.targets, strict=True)
    } == {
        ("happy", 0),
        ("bed", 1),
    }


def test_missing_words_are_named(data_dir):
    with pytest.raises(ValueError, match="has no clips of yes, no, up"):
        speech.load(config(words="ten"), data_dir)


# ---------------------------------------------------------------------------------------------------- digits


def test_spoken_digits(data_dir):
    found = speech.load(config(dataset="digits"), data_dir)
    found.check()
    assert [len(split) for split in found.splits.values()] == [2400, 300, 300]
    assert [np.bincount(split.targets).tolist() for split in found.splits.values()] == [
        [240] * 10,
        [30] * 10,
        [30] * 10,
    ]
    table = pq.read_table(data_dir / "fsdd" / "test.parquet")
    names = [
        f"{d}_{s}_{i}" for d, s, i in zip(*(table[c].to_pylist() for c in ("label", "speaker", "index")), strict=True)
    ]
    given = dict(zip(names, table["audio"], strict=True))
    assert set(found.test.ids) == set(names)
    for i in range(300):
        assert np.array_equal(found.test.row(i)[:, 0], given[found.test.ids[i]].values.to_numpy())
        assert found.test.targets[i] == int(found.test.ids[i][0])
    assert found.interval == 1 / 8000 and found.length == 18_262
    assert {int(name.rpartition("_")[2]) for name in found.val.ids} == set(range(5, 10))
    padded = speech.load(config(dataset="digits", short="pad", length=8000, words=["nine", "two"]), data_dir)
    assert padded.length == 8000 and set(padded.test.lengths) == {8000} and len(padded.test) == 60


# -------------------------------------------------------------------------------------- official files, small


def miniature(words=("bed", "yes", "no"), speakers=30, n=160):
    """Contents by member name, as in the official archive, and each clip's samples and part."""
    rng = np.random.default_rng(0)
    files, truth, lists = {}, {}, {"val": [], "test": []}
    for word in words:
        for s in range(speakers):
            name = f"{word}/{hashlib.sha1(str(s).encode()).hexdigest()[:8]}_nohash_{s % 2}.wav"
            samples = rng.integers(-3000, 3000, n - n // 4 * (s == 3)).astype(np.int16)
            part = "val" if s in (2, 5) else "test" if s in (3, 7, 8) else "train"
            files[name], truth[name.removesuffix(".wav")] = wav(samples), (part, samples)
            if part != "train":
                lists[part].append(name)
    files["validation_list.txt"] = "".join(f"{name}\n" for name in lists["val"]).encode()
    files["testing_list.txt"] = "".join(f"{name}\n" for name in lists["test"]).encode()
    files["_background_noise_/white_noise.wav"] = wav(np.zeros(50, np.int16))
    files["README.md"] = b"words"
    return files, truth


def unpacked(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def packed(path, files, monkeypatch, which="ARCHIVE"):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    known = getattr(speech, which)
    checksum = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    monkeypatch.setattr(speech, which, known._replace(checksum=checksum))


@pytest.mark.parametrize("place", ["speech_commands", "speech_commands/speech_commands_v0.02", ".", "archive"])
def test_official_files_are_read(place, tmp_path, monkeypatch):
    files, truth = miniature()
    if place == "archive":
        packed(tmp_path / "speech_commands_v0.02.tar.gz", dict(reversed(files.items())), monkeypatch)
    else:
        unpacked(tmp_path / place, files)
    found = speech.load(config(length=160), tmp_path)
    found.check()
    assert [len(split) for split in found.splits.values()] == [75, 6, 9]
    for part, split in found.splits.items():
        for i, name in enumerate(split.ids):
            assert truth[name][0] == part and ["bed", "no", "yes"][split.targets[i]] == name.partition("/")[0]
            assert np.array_equal(split.row(i)[: len(truth[name][1]), 0], truth[name][1])
    paths = speech.sources(config(), tmp_path)
    assert len(paths) == (1 if place == "archive" else 5) and all(path.exists() for path in paths)
    two = speech.load(config(length=160, words=["yes", "no"], split="hash"), tmp_path)
    for part, split in two.splits.items():
        assert all(hashed_part(name) == part for name in split.ids)


def test_all_words_have_the_published_classes(tmp_path):
    unpacked(tmp_path / "speech_commands", miniature(WORDS, n=32)[0])
    found = speech.load(config(length=32), tmp_path)
    by_word = {name.partition("/")[0]: label for name, label in zip(found.train.ids, found.train.targets, strict=True)}
    assert found.target.count == 35
    assert [by_word[word] for word in ("bed", "cat", "down", "zero", "backward", "happy")] == [0, 1, 2, 34, 17, 23]
    assert any("84,843" in note for note in found.notes)
    ten = speech.load(config(words="ten", split="random", short="drop", length=32), tmp_path)
    by_word = {name.partition("/")[0]: label for name, label in zip(ten.train.ids, ten.train.targets, strict=True)}
    assert [word for word, _ in sorted(by_word.items(), key=lambda item: item[1])] == TEN
    assert sum(map(len, ten.splits.values())) == 290, "the short clip of every word is dropped"


def test_the_class_orders_are_complete():
    assert len(WORDS) == len(set(WORDS)) == 35 and set(TEN) < set(WORDS) and set(DIGITS) < set(WORDS)


def test_version_one_is_told(tmp_path, monkeypatch):
    packed(tmp_path / "speech_commands_v0.01.tar.gz", miniature()[0], monkeypatch, "OLDER")
    assert any("version 0.01" in note for note in speech.load(config(length=160), tmp_path).notes)


def test_a_parquet_copy_may_hold_wav_files(tmp_path):
    files, truth = miniature()
    rows = [
        {"audio": {"bytes": content, "path": name}, "word": name.partition("/")[0], "file": name}
        for name, content in files.items()
        if "_nohash_" in name
    ]
    (tmp_path / "speech_commands").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "speech_commands" / "train.parquet")
    with pytest.raises(FileNotFoundError, match=r"not validation\.parquet"):
        speech.load(config(length=160), tmp_path)
    found = speech.load(config(length=160, split="random"), tmp_path)
    assert Counter(len(split) for split in found.splits.values()) == Counter([62, 14, 14])
    samples = truth[found.val.ids[0]][1]
    assert np.array_equal(found.val.row(0)[: len(samples), 0], samples)


def test_digits_from_their_folder(tmp_path):
    rng = np.random.default_rng(1)
    names = [f"{digit}_{who}_{i}" for digit in (1, 7) for who in ("ann", "bob") for i in range(12)]
    given = {name: rng.integers(-99, 99, rng.integers(20, 40)).astype(np.int16) for name in names}
    folder = tmp_path / "free-spoken-digit-dataset"
    unpacked(folder / "recordings", {f"{name}.wav": wav(samples, 8000) for name, samples in given.items()})
    found = speech.load(config(dataset="digits"), tmp_path)
    assert [len(split) for split in found.splits.values()] == [8, 20, 20] and found.target.count == 2
    assert all(np.array_equal(found.val.row(i)[:, 0], given[name]) for i, name in enumerate(found.val.ids))


def test_the_official_archive_is_downloaded_when_nothing_is_there(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(speech, "download", lambda *arguments: asked.append(arguments))
    speech.fetch(config(), tmp_path)
    assert asked[0][0].checksum.endswith("868ff58") and asked[0][1] == tmp_path / "speech_commands"
    unpacked(tmp_path / "speech_commands", miniature()[0])
    speech.fetch(config(), tmp_path)
    assert len(asked) == 1
    with pytest.raises(ValueError, match="put a copy of https://github"):
        speech.fetch(config(dataset="digits"), tmp_path)


# --------------------------------------------------------------------------------------------------- refusals


def _edit(name, content):
    def edit(files):
        files[name] = content

    return edit


CLIP = "bed/b6589fc6_nohash_0.wav"  # of speaker 0


@pytest.mark.parametrize(
    ("edit", "options", "complaint"),
    [
        (_edit(CLIP, b"RIFF"), {}, "b6589fc6_nohash_0.wav is no WAV file: it has 4 bytes"),
        (_edit(CLIP, wav(np.zeros(9, np.int16), 8000)), {}, "channels of int16 at 8,000 samples a second"),
        (_edit(CLIP, wav(np.zeros(8, np.int16), channels=2)), {}, "has 2 channels"),
        (_edit(CLIP, wav(np.zeros(8, np.uint8), width=1)), {}, "of uint8"),
        (_edit(CLIP, wav(np.zeros(2**20 + 1, np.int16))), {}, "1,048,577 samples a channel"),
        (_edit(CLIP, bytes(2**22)), {}, "more than the|more than such a file"),
        (lambda files: files.pop("testing_list.txt"), {}, "testing_list.txt"),
        (
            lambda files: files.pop(CLIP.replace("b6589fc6", "da4b9237")),
            {},
            "1 listed clips are not there, such as bed/",
        ),
        (_edit("validation_list.txt", b"bed/../../etc/passwd\n"), {}, "line 1 is 'bed/../../etc/passwd'"),
        (lambda files: files.update({"testing_list.txt": files["testing_list.txt"] * 2}), {}, "listed twice"),
        (lambda files: [files.pop(k) for k in list(files) if k[:2] in ("no", "ye")], {}, "clips of bed; two words"),
        (_edit("testing_list.txt", b""), {}, "no clips are left for the test split"),
        (lambda files: None, {"short": "drop", "length": 99}, "no clips are left for the train split"),
        (lambda files: None, {"words": ["cat", "bed"]}, "has no clips of cat"),
    ],
)
@pytest.mark.parametrize("form", ["folder", "archive"])
def test_bad_official_files_are_refused_in_words(form, edit, options, complaint, tmp_path, monkeypatch):
    files = miniature()[0]
    edit(files)
    if form == "folder":
        unpacked(tmp_path / "speech_commands", files)
    else:
        packed(tmp_path / "speech_commands_v0.02.tar.gz", files, monkeypatch)
    with pytest.raises((ValueError, FileNotFoundError), match=complaint) as caught:
        speech.load(config(**options), tmp_path)
    assert "\n" not in str(caught.value)


def test_archives_that_are_not_the_published_one(tmp_path, monkeypatch):
    path = tmp_path / "speech_commands_v0.02.tar.gz"
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is not the published file"):
        speech.load(config(), tmp_path)
    packed(path, miniature()[0], monkeypatch)
    path.write_bytes(path.read_bytes()[:-2000])
    cut = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    monkeypatch.setattr(speech, "ARCHIVE", speech.ARCHIVE._replace(checksum=cut))
    with pytest.raises(ValueError, match="damaged or cut short"):
        speech.load(config(), tmp_path)
    packed(path, miniature()[0], monkeypatch)
    monkeypatch.setattr(speech, "UNPACKED", 1000)
    with pytest.raises(ValueError, match="unpacks to more than 1,000 bytes"):
        speech.load(config(), tmp_path)
    packed(path, {f"../{CLIP}": b""}, monkeypatch)
    with pytest.raises(ValueError, match="leads outside"):
        speech.load(config(), tmp_path)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"word": ["bed"]}, "has no column audio"),
        ({"audio": [[1, 2]], "word": ["bird house"]}, "none of the 35"),
        ({"audio": [[1, 40_000]], "word": ["bed"]}, "beyond 16 bits"),
        ({"audio": [[0.5]], "word": ["bed"]}, "16-bit samples without gaps are expected"),
        ({"audio": [[1, None]], "word": ["bed"]}, "16-bit samples without gaps are expected"),
        ({"audio": [[]], "word": ["bed"]}, "holds null|no samples"),
        ({"audio": [None, [1]], "word": ["bed", "bed"]}, "a clip is missing"),
        ({"audio": ["RIFF"], "word": ["bed"]}, "WAV files as bytes"),
        ({"audio": [[1]], "word": ["bed"], "sampling_rate": [8000]}, "sampling rate is 8000"),
        ({"audio": [[1]], "word": ["bed"], "file": [7]}, "the file is 7"),
        ({"audio": [[1], [2]], "word": ["bed", "bed"], "file": ["bed/a.wav"] * 2}, "two words or more|occurs twice"),
        ({"audio": [[0] * (2**20 + 1)], "word": ["bed"]}, "the lists of column audio.* are too long"),
    ],
)
def test_bad_parquet_copies_are_refused_in_words(columns, complaint, tmp_path):
    (tmp_path / "speech_commands").mkdir()
    for name in ("train", "validation", "test"):
        pq.write_table(pa.table(columns), tmp_path / "speech_commands" / f"{name}.parquet")
    with pytest.raises(ValueError, match=complaint):
        speech.load(config(), tmp_path)


def test_nothing_there_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="spt data prepare speech"):
        speech.load(config(), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"take it from https://github\.com/Jako.*, and put fsdd/rec"):
        speech.load(config(dataset="digits"), tmp_path)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"words": ["bed", "bet"]}, "'bet', which is none of"),
        ({"words": ["bed"]}, "two or more different"),
        ({"words": ["bed", "bed"]}, "two or more different"),
        ({"dataset": "digits", "words": "ten"}, "words: ten is for commands"),
        ({"dataset": "digits", "split": "hash"}, "split: hash is for commands"),
        ({"scaling": "per_step", "short": "keep"}, "needs clips of one length"),
        ({"dataset": "digits", "scaling": "per_step"}, "needs clips of one length"),
        ({"dataset": "digits", "short": "drop"}, "needs a length"),
        ({"decimate": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_do_not_go_together(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        config(**options)
