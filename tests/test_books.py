"""Language modelling of books: nothing of a text is lost or moved, tokens of a file, what is refused."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from spt.tasks import books
from spt.tasks.books import Config, load

TEXTS = {
    "train": [
        "It was the best of times,\r\nit was the worst of times.\n" * 9,
        "",
        "Über die Brücke – naïve café 🙂.\n" * 5,
    ],
    "validation": ["Call me Ishmael. Some years ago,\n\n  never mind how long precisely.\n" * 4],
    "test": ["Alice was beginning to get very tired.\n" * 4, "  So she was considering …  \n" * 5],
}


def folder(place, texts=TEXTS):
    for split, found in texts.items():
        (place / split).mkdir(parents=True)
        for i, text in enumerate(found):
            (place / split / f"{i + 9}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return place


def parquet_folder(place, texts=TEXTS):
    place.mkdir()
    for split, found in texts.items():
        pq.write_table(pa.table({"text": found}), place / f"{split}.parquet")
    return place


def stream(split):
    """All tokens of a split: its inputs and the last target."""
    return np.append(split.values, split.targets[-1])


def test_chunks_joined_are_the_text(tmp_path):
    for chunk in (2, 7, 64):
        data = load(Config(chunk=chunk, path=str(folder(tmp_path / f"b{chunk}"))), tmp_path)
        data.check()
        assert data.future and data.input.vocab == data.target.count == 256 and data.target.per_step
        for name, texts in zip(("train", "val", "test"), TEXTS.values(), strict=True):
            split, whole = data.splits[name], "".join(texts).encode()
            rows = (len(whole) - 1) // chunk
            assert (split.lengths == chunk).all() and len(split) == rows
            assert stream(split).astype(np.uint8).tobytes() == whole[: rows * chunk + 1]
            for i in range(rows):  # also over a chunk's end
                targets = split.targets[split.starts[i] : split.stops[i]]
                assert targets.astype(np.uint8).tobytes() == whole[i * chunk + 1 : (i + 1) * chunk + 1]
            assert split.text_bytes.tolist() == [chunk] * rows
            assert split.ids.tolist() == [f"{name}-{i}" for i in range(rows)]


def test_real_books(data_dir):
    data = load(Config(), data_dir)
    data.check()
    for name, file, count in (("train", "train", 58), ("val", "validation", 4), ("test", "test", 4)):
        texts = pq.read_table(data_dir / "books" / f"{file}.parquet").column("text").to_pylist()
        whole = "".join(texts).encode()
        split = data.splits[name]
        assert len(texts) == count and len(split) == (len(whole) - 1) // 4096
        assert stream(split).tobytes() == whole[: 4096 * len(split) + 1]
        assert split.text_bytes.sum() == 4096 * len(split) and split.values.dtype == np.uint8
    assert "PG-19-like books, not PG-19: 58 train, 4 val, 4 test" in data.notes
    width = len(whole) / len("".join(f"{text} " for text in texts).split())
    assert f"{width:.4f} bytes a word" in data.notes[-1]


def test_the_official_counts_need_no_note(tmp_path, monkeypatch):
    monkeypatch.setattr(books, "OFFICIAL", {"train": 3, "val": 1, "test": 2})
    data = load(Config(chunk=8, path=str(folder(tmp_path / "b"))), tmp_path)
    assert not any("PG-19" in note for note in data.notes)


def test_folders_and_parquet_files_give_the_same(tmp_path):
    one = load(Config(chunk=8, path=str(folder(tmp_path / "a"))), tmp_path)
    two = load(Config(chunk=8, path=str(parquet_folder(tmp_path / "b"))), tmp_path)
    (tmp_path / "c").mkdir()
    folder(tmp_path / "c" / "pg19")
    three = load(Config(chunk=8), tmp_path / "c")
    for name in one.splits:
        for other in (two, three):
            assert np.array_equal(stream(one.splits[name]), stream(other.splits[name]))
    assert len(books.sources(Config(), tmp_path / "c")) == 6


def test_books_in_the_order_of_their_numbers(tmp_path):
    folder(tmp_path / "books", {"train": ["a" * 9] + ["b" * 9] * 2, "val": ["x" * 9], "test": ["y" * 9]})  # 9, 10, 11
    data = load(Config(chunk=8), tmp_path)
    assert bytes(stream(data.train).tolist()) == (b"a" * 9 + b"b" * 18)[:25]


def test_an_end_behind_every_book(tmp_path):
    data = load(Config(chunk=8, end_of_text=True, path=str(folder(tmp_path / "b"))), tmp_path)
    data.check()
    assert data.input.vocab == 257
    expected = [token for text in TEXTS["train"] for token in (*text.encode(), 256)]
    found = stream(data.train)
    assert found.tolist() == expected[: len(found)] and len(expected) - len(found) < 8
    rows = data.train.targets.reshape(-1, 8)
    assert data.train.text_bytes.tolist() == (rows < 256).sum(1).tolist() and (rows == 256).any()


# ------------------------------------------------------------------------------------------------- tokenizers


def trained():
    """A unigram tokenizer with T5's conventions, and its pieces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([text for texts in TEXTS.values() for text in texts if "Über" not in text], trainer)
    return tokenizer, json.loads(tokenizer.to_str())["model"]["vocab"]


def number(n):
    found = b""
    while n > 127:
        found, n = found + bytes([n & 127 | 128]), n >> 7
    return found + bytes([n])


def field(key, value):
    if isinstance(value, int):
        return number(key << 3) + number(value)
    if isinstance(value, float):
        return number(key << 3 | 5) + np.float32(value).tobytes()
    return number(key << 3 | 2) + number(len(value)) + value


def spiece(pieces, kind=1):
    """A SentencePiece model's bytes: pieces, of which the third is the unknown one, and how it was trained."""
    found = b""
    for i, (piece, score) in enumerate(pieces):
        found += field(
            1, field(1, piece.encode()) + field(2, float(score)) + field(3, 2 if i == 2 else 3 if i < 2 else 1)
        )
    return (
        found
        + field(2, field(1, b"corpus.txt") + field(3, kind) + field(4, len(pieces)))
        + field(3, field(1, b"identity"))
    )


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    place = tmp_path_factory.mktemp("tokenizers")
    tokenizer, pieces = trained()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    (place / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    (place / "spiece.model").write_bytes(spiece(pieces))
    return place, tokenizer, pieces


@pytest.mark.parametrize(("name", "sentinels"), [("tokenizer.json", 0), ("spiece.model", 100)])
def test_tokens_of_a_file(tmp_path, tokenizers, name, sentinels):
    place, tokenizer, pieces = tokenizers
    options = {"tokens": "t5", "tokenizer": str(place / name), "path": str(folder(tmp_path / "b")), "chunk": 8}
    data = load(Config(**options), tmp_path)
    data.check()
    assert data.input.vocab == data.target.count == len(pieces) + sentinels
    for split, texts in zip(data.splits.values(), TEXTS.values(), strict=True):
        encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        expected = [token for ids in encoded for token in ids]
        found = stream(split)
        assert found.tolist() == expected[: len(found)] and len(expected) - len(found) < 8
    ended = load(Config(**options, end_of_text=True), tmp_path)
    ends = np.flatnonzero(stream(ended.train) == 1)
    counts = [len(tokenizer.encode(text, add_special_tokens=False).ids) for text in TEXTS["train"]]
    assert ends[:2].tolist() == [counts[0], counts[0] + 1]


def test_bytes_of_tokens_are_those_of_the_text(tmp_path, tokenizers):
    place, tokenizer, _ = tokenizers
    text = TEXTS["train"][2]  # letters of 2 to 4 bytes, many unknown
    coder = books.Pieces(place / "tokenizer.json", Config(tokens="t5", tokenizer="x"))
    for source in (text, *TEXTS["test"], *TEXTS["validation"], "é"):
        ((tokens, widths),) = coder.encode([source])
        assert len(tokens) == len(widths) and widths.sum() == len(source.encode()) and widths.min() >= 0
        encoded = tokenizer.encode(source, add_special_tokens=False)
        starts = [start for start, _ in encoded.offsets][1:]
        assert np.cumsum(widths)[:-1].tolist() == [len(source[:start].encode()) for start in starts]
    data = load(
        Config(tokens="t5", tokenizer=str(place / "tokenizer.json"), path=str(folder(tmp_path / "b")), chunk=8),
        tmp_path,
    )
    for split, texts in zip(data.splits.values(), TEXTS.values(), strict=True):
        widths = np.concatenate([width for _, width in coder.encode(texts)])[1 : 8 * len(split) + 1]
        assert split.text_bytes.tolist() == widths.reshape(-1, 8).sum(1).tolist()


# ---------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("change", "options", "complaint"),
    [
        ({"test": [b"caf\xe9 " * 9]}, {}, r"test/9.txt is not UTF-8 text \(byte 3\)"),
        ({"test": []}, {}, "there are no test texts"),
        ({"validation": ["short"]}, {}, "5 tokens in 1 texts .*smaller chunk"),
        ({"test": ["", ""]}, {}, "0 tokens in 2 texts"),
        ({}, {"tokens": "t5", "tokenizer": "none.json"}, "there is no tokenizer .*none.json"),
        ({}, {"tokens": "t5", "tokenizer": "bad.json"}, "is no file of the tokenizers library"),
        ({}, {"tokens": "t5", "tokenizer": "bad.model"}, "is no SentencePiece model"),
        ({}, {"tokens": "t5", "tokenizer": "cut.model"}, "is no SentencePiece model"),
        ({}, {"tokens": "t5", "tokenizer": "bpe.model"}, "not a unigram model.*; give a tokenizer.json instead"),
        ({}, {"tokens": "t5", "tokenizer": "vocab.txt"}, "neither a tokenizer.json nor a spiece.model"),
        ({}, {"tokens": "t5", "tokenizer": "other.json", "end_of_text": True}, "has no token </s>"),
        ({}, {"path": "elsewhere"}, "PG-19, or other books, is not in the data folder"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(tmp_path, change, options, complaint):
    folder(tmp_path / "books", TEXTS | change)
    for name, content in (
        ("bad.json", b'{"model": 3}'),
        ("bad.model", b"\xff" * 40),
        ("cut.model", spiece([("<pad>", 0), ("</s>", 0), ("<unk>", 0), ("a", -1)])[:30]),
        ("bpe.model", spiece([("<pad>", 0), ("</s>", 0), ("<unk>", 0), ("a", -1)], kind=2)),
        ("vocab.txt", b"a\nb\n"),
        ("other.json", Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)).to_str().encode()),
    ):
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=complaint):
        load(Config(**{"chunk": 8} | options), tmp_path)


def test_bad_parquet_is_refused_in_words(tmp_path):
    place = parquet_folder(tmp_path / "books")
    for table, complaint in (
        (pa.table({"book": ["a"]}), "has no column text; it has book"),
        (pa.table({"text": ["a" * 9, None]}), "row 1: the text is None"),
        (pa.table({"text": [1, 2]}), "row 0: the text is 1"),
    ):
        pq.write_table(table, place / "test.parquet")
        with pytest.raises(ValueError, match=complaint):
            load(Config(chunk=8), tmp_path)
    (place / "test.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="damaged or no Parquet file"):
        load(Config(chunk=8), tmp_path)


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match="needs tokenizer"):
        Config(tokens="t5")
    with pytest.raises(ValueError, match="tokenizer is for tokens: t5"):
        Config(tokenizer="spiece.model")
