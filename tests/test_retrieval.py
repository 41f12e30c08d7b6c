"""Pairs of documents: miniature official files, and the real film reviews."""

import csv
import io
import json
import tarfile
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spt.tasks import retrieval
from spt.tasks.base import Tokens
from spt.tasks.retrieval import FILES, Config


def config(**options):
    return Config.model_validate_json(json.dumps(options))


def documents(split, i):
    """The two sequences of a pair, as stored."""
    row, cut = split.row(i), int(split.cuts[i])
    return row[:cut], row[cut:]


def text(codes):
    assert codes[-1] == 0, "<eos>"
    return "".join(map(chr, codes[:-1]))


# --------------------------------------------------------------------------------------------------- papers


def papers():
    """Rows of the three files: (label, id, id, text, text)."""
    rng = np.random.default_rng(0)

    def document(n):
        return "b'" + "".join(rng.choice(list('abcde \\n."Q'), n)) + "'"

    return {
        part: [(f"{i % 2}.0", str(i), str(i + 100), document(5 + i), document(30 - i)) for i in range(n)]
        for part, n in (("train", 12), ("val", 4), ("test", 5))
    }


def written(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    for part, own in rows.items():
        (folder / FILES[part]).write_bytes(table(own))


def table(rows):
    return "".join("\t".join(row) + "\n" for row in rows).encode("utf-8", "surrogatepass")


def packed(path, rows, inner="lra_release/lra_release/tsv_data", more=()):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in [
            ("lra_release/listops-1000/basic_train.tsv", b"Source\tTarget\n"),
            *((f"{inner}/{FILES[part]}", table(own)) for part, own in rows.items()),
            *more,
        ]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("place", [".", "aan", "tsv_data", "lra_release/lra_release/tsv_data", "archive"])
def test_the_official_files_are_read(place, tmp_path):
    rows = papers()
    if place == "archive":
        packed(tmp_path / "lra_release.gz", dict(reversed(rows.items())), more=[("lra_release/x/y", bytes(99))])
    else:
        written(tmp_path / place, rows)
    data = retrieval.load(config(), tmp_path)
    data.check()
    for part, split in data.splits.items():
        assert len(split) == len(rows[part]) and split.targets.tolist() == [int(float(row[0])) for row in rows[part]]
        for i, (_, _, first, second) in enumerate(row[1:] for row in rows[part]):
            assert [text(codes) for codes in documents(split, i)] == [first, second]
    assert data.train.values.dtype == np.uint8 and data.length == 34 and data.target.count == 2
    assert len(retrieval.sources(config(), tmp_path)) == (1 if place == "archive" else 3)
    assert any("12, 4, 5 pairs, not the 147,086, 18,090, 17,437" in note for note in data.notes)


def test_documents_are_cut_and_end_with_eos(tmp_path):
    rows = papers()
    rows["test"][0] = ("1.0", "1", "2", "näïve \U0001f600", "a\0b" + "c" * 40)
    written(tmp_path, rows)
    data = retrieval.load(config(max_length=9), tmp_path)
    assert [text(codes) for codes in documents(data.test, 0)] == ["näïve \U0001f600", "a\ufffdbccccc"]
    assert data.length == 9 and {split.values.dtype for split in data.splits.values()} == {np.dtype(np.uint32)}
    data = retrieval.load(config(max_length=9, units="bytes"), tmp_path)
    first, second = documents(data.test, 0)
    assert bytes(first) == "näïve \U0001f600".encode()[:9] and bytes(second) == b"a\0bcccccc"
    ids = data.input.ids(np.arange(256))
    assert data.input.vocab == 257 and ids.tolist() == list(range(1, 257)) and data.train.values.dtype == np.uint8


def test_the_vocabulary_is_of_the_training_rows_in_use(tmp_path):
    rows = papers()
    rows["val"][0] = ("1.0", "1", "2", "§", "b'aQ'")
    written(tmp_path, rows)
    data = retrieval.load(config(), tmp_path)
    counts = Counter("".join(row[3] + row[4] for row in rows["train"]))
    expected = [ord(c) for c, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    assert data.input == Tokens(len(counts) + 3, (-1, -1, 0, *expected), 1)
    assert data.input.ids(documents(data.val, 0)[0]).tolist() == [1, 2]
    few = data.train.take(np.array([0]))
    own = Counter(rows["train"][0][3] + rows["train"][0][4])
    assert retrieval.vocabulary(config(), few).vocab == len(own) + 3


def test_quotes_are_characters_unless_told_otherwise(tmp_path):
    rows = papers()
    rows["train"][2] = ("1.0", "3", "4", '"quoted"', 'says "so"')
    written(tmp_path, rows)
    plain = retrieval.load(config(), tmp_path)
    assert [text(codes) for codes in documents(plain.train, 2)] == ['"quoted"', 'says "so"']
    assert any('1 documents begin with a "' in note for note in plain.notes)
    before = csv.field_size_limit()
    quoted = retrieval.load(config(quoting="csv"), tmp_path)
    assert [text(codes) for codes in documents(quoted.train, 2)] == ["quoted", 'says "so"']
    assert csv.field_size_limit() == before
    rows["train"][2] = ("1.0", "3", "4", '"open', "text")
    written(tmp_path, rows)
    assert len(retrieval.load(config(), tmp_path).train) == 12
    merged = retrieval.load(config(quoting="csv"), tmp_path)
    assert len(merged.train) < 12 and "\t" in text(documents(merged.train, 2)[0])


def test_texts_longer_than_csvs_limit_are_read(tmp_path):
    rows = papers()
    rows["train"][0] = ("1.0", "1", "2", "b'" + "x" * 200_000 + "'", "y")
    written(tmp_path, rows)
    for quoting in ("none", "csv"):
        assert retrieval.load(config(quoting=quoting, max_length=2**20), tmp_path).length == 200_004


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda rows: rows["train"].insert(3, ("1.0", "1", "2", "a")), "row 4 has 4 columns; 5 are expected"),
        (lambda rows: rows["train"].insert(0, ("a b c",)), "row 1 has 1 columns"),
        (lambda rows: rows["train"].insert(3, ("1.0", "1", "2", "a", "b", "c")), "row 4 has 6 columns"),
        (lambda rows: rows["val"].insert(1, ("2.0", "1", "2", "a", "b")), "row 2: the label is '2.0'; 0.0 or 1.0"),
        (lambda rows: rows["val"].insert(1, ("", "1", "2", "a", "b")), "the label is ''"),
        (lambda rows: rows["test"].clear(), "is empty"),
        (lambda rows: rows.pop("val"), "eval.tsv"),
        (lambda rows: rows["test"].insert(0, ("0.0", "1", "2", "\udcff", "b")), "row 1|line 1 is not UTF-8"),
        (lambda rows: rows["test"].insert(0, ("0.0", "1", "2", "x" * 1000, "b")), "line 1 has more than 1,000"),
    ],
)
@pytest.mark.parametrize("form", ["folder", "archive"])
def test_bad_files_are_refused_in_words(form, change, complaint, tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "MAX_LINE", 1000)
    rows = papers()
    change(rows)
    if form == "folder":
        written(tmp_path, rows)
    else:
        packed(tmp_path / "lra_release.gz", rows)
    with pytest.raises((ValueError, FileNotFoundError), match=complaint) as caught:
        retrieval.load(config(), tmp_path)
    assert "\n" not in str(caught.value)


def test_bad_archives_are_refused_in_words(tmp_path, monkeypatch):
    path = tmp_path / "lra_release.gz"
    packed(path, papers(), inner="lra_release/tsv_data")
    with pytest.raises(ValueError, match="has no member lra_release/lra_release/tsv_data/new_aan_pairs"):
        retrieval.load(config(), tmp_path)
    packed(path, papers())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="damaged or cut short"):
        retrieval.load(config(), tmp_path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="damaged or cut short"):
        retrieval.load(config(), tmp_path)
    packed(path, papers())
    monkeypatch.setattr(retrieval, "LRA_BYTES", 200)
    with pytest.raises(ValueError, match="unpacks to more than 200 bytes"):
        retrieval.load(config(), tmp_path)


def test_nothing_there_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="spt data prepare retrieval"):
        retrieval.load(config(), tmp_path)
    with pytest.raises(ValueError, match=r"get https://storage\.googleapis\.com/long-range-arena/lra_release\.gz"):
        retrieval.fetch(config(), tmp_path)
    with pytest.raises(FileNotFoundError, match="dataset=imdb_movies"):
        retrieval.load(config(dataset="imdb_movies"), tmp_path)
    with pytest.raises(ValueError, match="quoting: csv is for aan"):
        config(dataset="imdb_movies", quoting="csv")


# ---------------------------------------------------------------------------------------------------- films


@pytest.fixture(scope="module")
def reviews(data_dir):
    """Film, verdict and text by review, such as train17."""
    found = {}
    for part in ("train", "test"):
        read = pq.read_table(data_dir / "imdb" / f"{part}.parquet").select(["movie", "label", "text"]).to_pylist()
        found |= {f"{part}{i}": (row["movie"], row["label"], row["text"]) for i, row in enumerate(read)}
    return found


@pytest.fixture(scope="module")
def films(data_dir):
    return retrieval.load(config(dataset="imdb_movies", max_length=50), data_dir)


def test_film_pairs_are_balanced_and_true(films, reviews):
    films.check()
    assert [len(split) for split in films.splits.values()] == [43_292, 4_262, 46_836]
    assert any("not AAN" in note for note in films.notes)
    for part, split in films.splits.items():
        pairs = [name.split("-")[1:] for name in split.ids.tolist()]
        label = np.array([reviews[a][0] == reviews[b][0] for a, b in pairs])
        assert np.array_equal(label, split.targets == 1) and label.mean() == 0.5
        assert all(a.startswith("test" if part == "test" else "train") for a, _ in pairs)
        for side in (0, 1):  # each text as often in pairs of either kind
            kinds = [Counter(pair[side] for pair, same in zip(pairs, label, strict=True) if same == k) for k in (0, 1)]
            assert kinds[0] == kinds[1]
        verdicts = [(reviews[a][1], reviews[b][1]) for a, b in pairs]
        kinds = [Counter(v for v, same in zip(verdicts, label, strict=True) if same == k) for k in (0, 1)]
        assert kinds[0] == kinds[1] and len(kinds[0]) > 1
        for i in range(0, len(split), 997):
            for codes, name in zip(documents(split, i), pairs[i], strict=True):
                assert text(codes) == reviews[name][2][:49]


def test_films_lie_in_one_split_and_texts_are_used_once(films, reviews):
    sides, texts = [], []
    for split in films.splits.values():
        used = {name for pair in split.ids.tolist() for name in pair.split("-")[1:]}
        sides.append({reviews[name][0] for name in used})
        texts += [reviews[name][2] for name in used]
    assert sum(map(len, sides)) == len(set.union(*sides))
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda c: c.pop("movie"), "no column movie"),
        (lambda c: c["movie"].__setitem__(3, None), "row 3: the text is"),
        (lambda c: c["text"].__setitem__(3, ""), "row 3: the text is ''"),
        (lambda c: c["label"].__setitem__(3, 2), "row 3: the label is 2"),
        (lambda c: c.update(movie=[f"t{i}" for i in range(40)]), "too few films"),
        (lambda c: [column.pop() for column in c.values()], "39 rows; 40 are expected"),
    ],
)
def test_bad_reviews_are_refused_in_words(change, complaint, tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "REVIEWS", 40)
    for part in ("train", "test"):
        columns = {
            "text": [f"{part} review {i}" for i in range(40)],
            "label": [i % 2 for i in range(40)],
            "movie": [f"{part}{i // 2}" for i in range(40)],
        }
        change(columns)
        pq.write_table(pa.table(columns), tmp_path / f"{part}.parquet")
    with pytest.raises(ValueError, match=complaint):
        retrieval.load(config(dataset="imdb_movies"), tmp_path)
