"""Two documents, character by character (AAN, LRA Retrieval): does one cite the other? Up to 4,000 steps each.

Conventions are those of the S4 and SPT code: characters as in the file (texts look like Python byte strings, b'...',
and are kept that way), at most `max_length` - 1 of a document, then `<eos>`; the vocabulary is `<pad>`, `<unk>`,
`<eos>` and every character of the training documents in use, after cutting, the commonest first. `units: bytes` is
LRA's own form: bytes, no `<eos>`. An example is a pair of sequences; label 1: the first paper cites the second.

`dataset: imdb_movies` is a similar task on freely available texts: are two film reviews about the same film? (label 1:
yes). No film is in two splits: test films are those of the official test reviews, and a tenth of the training films is
drawn for validation. A film's reviews, in a seeded order, are each paired with the next, the last with the first. For
every such pair there is a pair from two films with the same first text, another pair's second text and the same two
verdicts, so that neither a single document nor the two verdicts give the answer away. Repeated texts are used once.
See `sources` for the files.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from spt.rng import generator
from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens
from spt.tasks.characters import END, character_tokens, code_points
from spt.tasks.files import (
    LRA_ADDRESS,
    LRA_ARCHIVE,
    LRA_BYTES,
    LRA_FOLDER,
    check_regular,
    class_numbers,
    data_folders,
    data_not_found,
    find_file,
    parquet_files,
    read_all_members,
    read_columns,
)
from spt.tasks.parallel import Reel, allocate

FILES = {part: f"new_aan_pairs.{name}.tsv" for part, name in (("train", "train"), ("val", "eval"), ("test", "test"))}
PUBLISHED = {"train": 147_086, "val": 18_090, "test": 17_437}  # pairs
MAX_LINE = 2**24  # bytes of a pair
LABELS = {"0.0": 0, "1.0": 1, "0": 0, "1": 1}
REVIEWS = 25_000  # of IMDb's train, and of its test
SEED = 42  # of films and pairs


class Config(TaskConfig):
    dataset: Literal["aan", "imdb_movies"] = Field(
        "aan", description="papers of the ACL Anthology Network (LRA's file), or film reviews, a stand-in"
    )
    units: Literal["characters", "bytes"] = Field(
        "characters", description="characters, then <eos>; or bytes (LRA's code)"
    )
    max_length: int = Field(
        4000, ge=2, le=2**20, description="most steps of a document, <eos> included; longer ones are cut"
    )
    quoting: Literal["none", "csv"] = Field(
        "none",
        description='aan: none: a " is a character like any other; csv: it quotes a field that begins with it, as in '
        "the S4 and SPT code, which merges rows where such quotes are unpaired",
    )

    def smoke_sizes(self) -> dict[str, int]:
        return {"max_length": 128}

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.dataset == "imdb_movies" and self.quoting == "csv":
            raise ValueError("quoting: csv is for aan, whose texts lie in a .tsv file")
        return self


# ------------------------------------------------------------------------------------------------------ hooks


def sources(config: Config, raw: Path) -> list[Path]:
    """The files in use, of the first kind found, in the data folder or a sub-folder.

    aan: new_aan_pairs.train.tsv, .eval.tsv and .test.tsv, in aan/, tsv_data/, lra_release/lra_release/tsv_data/ or the
    data folder; lra_release.gz (the inner of its two copies is read). imdb_movies: imdb/train.parquet and test.parquet
    with columns text, label and movie.
    """
    if config.dataset == "imdb_movies":
        return [path for split in ("train", "test") for path in parquet_files(data_folders(raw, "imdb"), split)]
    folder = _folder(raw)
    if folder is not None:
        return [folder / name for name in FILES.values() if (folder / name).exists()]
    archive = find_file(data_folders(raw, "aan"), LRA_ARCHIVE)
    return [] if archive is None else [archive]


def fetch(config: Config, raw: Path) -> None:
    """Nothing is downloaded, as no checksums are known: without the files, an error says where to get them."""
    if sources(config, raw):
        return
    if config.dataset == "imdb_movies":
        raise ValueError("the reviews with their films are published nowhere: put a Parquet copy into imdb/")
    raise ValueError(
        f"AAN is not downloaded, as no checksum of the 8.2 GB is known: get {LRA_ADDRESS} and put it, or "
        f"its folder tsv_data, into {raw}"
    )


def load(config: Config, raw: Path) -> TaskData:
    if config.dataset == "imdb_movies":
        by_split = {part: Pairs(pairs, config) for part, pairs in _films(raw).items()}
        notes = [STAND_IN]
    else:
        by_split, notes = _papers(raw, config)
    top = max(pairs.top for pairs in by_split.values())
    kind = np.uint8 if top < 2**8 else np.uint16 if top < 2**16 else np.uint32  # one type for all splits
    splits = {part: pairs.split(kind) for part, pairs in by_split.items()}
    train, val, test = splits.values()
    return TaskData(vocabulary(config, train), Classes(2), train, val, test, notes=tuple(notes))


STAND_IN = "pairs of IMDb reviews of one film or of two, not AAN: no published number refers to them"


def vocabulary(config: Config, train: Split) -> Tokens:
    """From the training rows in use, which may be a subset."""
    if config.units == "bytes":
        return Tokens(257, (-1, *range(256)), 0)  # every byte is known
    return character_tokens(train)


# ----------------------------------------------------------------------------------------------------- texts


class Pair(NamedTuple):
    name: str
    label: int
    texts: tuple[str, str]


class Pairs:
    """A split's pairs, cut, in a temporary file: the published ones would fill a small machine's memory."""

    def __init__(self, pairs: Iterable[Pair], config: Config) -> None:
        self.config = config
        self.names, self.labels = list[str](), list[int]()
        self.lengths = list[int]()  # in steps, of both texts of each pair
        self.top = 0  # the largest code
        self._cut = Reel(np.uint8)  # in UTF-8, or the bytes
        for name, label, texts in pairs:
            self.names.append(name)
            self.labels.append(label)
            for text in texts:
                cut, steps, top = self._kept(text)
                if not steps:
                    raise ValueError(f"pair {name}: one of the two documents is empty")
                self._cut.add(np.frombuffer(cut, np.uint8))
                self.lengths.append(steps)
                self.top = max(self.top, top)

    def _kept(self, text: str) -> tuple[bytes, int, int]:
        """What is kept of a text, as UTF-8, its length in steps and its largest code. NUL becomes U+FFFD."""
        if self.config.units == "bytes":
            cut = text[: self.config.max_length].encode("utf-8", "surrogatepass")[: self.config.max_length]
            return cut, len(cut), 255
        kept = text[: self.config.max_length - 1].replace("\0", "\ufffd")
        return kept.encode("utf-8", "surrogatepass"), len(kept) + 1, 127 if kept.isascii() else ord(max(kept))

    def split(self, kind: type[np.unsignedinteger[Any]]) -> Split:
        """Bytes, or code points with END after each text, as numbers of this type."""
        lengths = np.array(self.lengths, np.int64)
        stops = np.cumsum(lengths)
        starts = stops - lengths
        values = allocate((int(stops[-1]),), kind)
        for start, stop, cut in zip(starts.tolist(), stops.tolist(), self._cut.pieces(), strict=True):
            steps = values[start:stop]
            if self.config.units == "bytes":
                steps[:] = cut
                continue
            if len(cut) == len(steps) - 1:  # ASCII, whose bytes are the code points
                steps[:-1] = cut
            else:
                steps[:-1] = code_points(cut.tobytes().decode("utf-8", "surrogatepass"))
            steps[-1] = END
        labels = np.array(self.labels, np.int64)
        return Split(values, starts[::2], stops[1::2], labels, np.array(self.names), cuts=lengths[::2])


# ---------------------------------------------------------------------------------------------------- papers


def _papers(raw: Path, config: Config) -> tuple[dict[str, Pairs], list[str]]:
    folder, archive = _folder(raw), find_file(data_folders(raw, "aan"), LRA_ARCHIVE)
    splits: dict[str, Pairs] = {}
    tally = Tally()
    if folder is not None:
        for part, name in FILES.items():
            path = folder / name
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing; {folder} has others of the three files of pairs")
            check_regular(path)
            with path.open("rb") as file:
                splits[part] = Pairs(_rows(file.readline, str(path), part, config, tally), config)
    elif archive is not None:

        def read(member: str, readline: Callable[[int], bytes]) -> Pairs:
            part = next(part for part, name in FILES.items() if member.endswith(name))
            return Pairs(_rows(readline, f"{archive}, member {member}", part, config, tally), config)

        members = [f"{LRA_FOLDER}/tsv_data/{name}" for name in FILES.values()]
        splits = dict(zip(FILES, read_all_members(archive, members, read, LRA_BYTES), strict=True))
    else:
        raise data_not_found("AAN", raw, [f"{LRA_ARCHIVE} (or its folder tsv_data)"], "spt data prepare retrieval")
    notes = []
    if tally.quoted and config.quoting == "none":
        notes.append(f'{tally.quoted:,} documents begin with a ", which the published reader takes for quoting')
    sizes = {part: len(pairs.labels) for part, pairs in splits.items()}
    if sizes != PUBLISHED:
        ours, theirs = (", ".join(f"{n:,}" for n in counts.values()) for counts in (sizes, PUBLISHED))
        notes.append(f"{ours} pairs, not the {theirs} that published numbers refer to")
    return splits, notes


class Tally:
    quoted = 0  # documents that begin with a "


def _rows(readline: Callable[[int], bytes], where: str, part: str, config: Config, tally: Tally) -> Iterator[Pair]:
    """Pairs of a .tsv file without a header: label, two numbers of papers, two texts."""
    lines = _lines(readline, where)
    with _fields_of(MAX_LINE):
        rows: Iterator[list[str]] = (line.rstrip("\r\n").split("\t") for line in lines)
        if config.quoting == "csv":
            rows = csv.reader(lines, delimiter="\t")
        i = -1
        try:
            for i, row in enumerate(rows):
                if len(row) != 5:
                    raise ValueError(
                        f"{where}, row {i + 1:,} has {len(row)} columns; 5 are expected: label, two numbers, two texts"
                    )
                label = LABELS.get(row[0])
                if label is None:
                    raise ValueError(f"{where}, row {i + 1:,}: the label is {row[0]!r:.40}; 0.0 or 1.0 is expected")
                tally.quoted += row[3].startswith('"') + row[4].startswith('"')
                yield Pair(f"{part}-{i}", label, (row[3], row[4]))
        except csv.Error as error:
            raise ValueError(f"{where}, row {i + 2:,} cannot be read ({error}); use quoting: none") from None
    if i < 0:
        raise ValueError(f"{where} is empty")


def _lines(readline: Callable[[int], bytes], where: str) -> Iterator[str]:
    number = 0
    while line := readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise ValueError(f"{where}, line {number:,} has more than {MAX_LINE:,} bytes; it is not used")
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}, line {number:,} is not UTF-8 text (byte {error.start:,})") from None


@contextmanager
def _fields_of(most: int) -> Iterator[None]:
    """Raise the csv module's limit, which is one for the whole process, for a while."""
    before = csv.field_size_limit(most)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _folder(raw: Path) -> Path | None:
    names = ("", "tsv_data", "lra_release/lra_release/tsv_data", "lra_release/tsv_data")
    folders = [place / name for place in data_folders(raw, "aan") for name in names]
    return next((folder for folder in folders if any((folder / name).exists() for name in FILES.values())), None)


# ----------------------------------------------------------------------------------------------------- films


class Review(NamedTuple):
    name: str
    film: str
    good: int
    text: str


def _films(raw: Path) -> dict[str, list[Pair]]:
    folders = data_folders(raw, "imdb")
    reviews, seen = {}, set[str]()
    for split in ("train", "test"):
        paths = parquet_files(folders, split)
        if not paths:
            files = ["imdb/train.parquet and test.parquet with columns text, label and movie"]
            raise data_not_found("IMDb with its films", raw, files, "spt data prepare retrieval dataset=imdb_movies")
        first = dict[str, Review]()
        for review in _reviews(paths, split):
            first.setdefault(review.text, review)
        reviews[split] = [review for text, review in first.items() if text not in seen]
        seen |= set(first)
    seen_films = {review.film for review in reviews["train"]}
    training = sorted(seen_films)
    order = generator(SEED, "films").permutation(len(training))
    held = {training[i] for i in order[: len(training) // 10]}
    chosen = {
        "train": [review for review in reviews["train"] if review.film not in held],
        "val": [review for review in reviews["train"] if review.film in held],
        "test": [review for review in reviews["test"] if review.film not in seen_films],
    }
    return {part: _paired(part, split) for part, split in chosen.items()}


def _reviews(paths: Sequence[Path], split: str) -> list[Review]:
    table = read_columns(paths, REVIEWS, [("text",), ("label",), ("movie",)])
    where = ", ".join(map(str, paths))
    labels = class_numbers(table["label"], 2, where)
    reviews = []
    for i, (text, film) in enumerate(zip(table["text"], table["movie"], strict=True)):
        if not (isinstance(text, str) and text and isinstance(film, str) and film):
            raise ValueError(f"{where}, row {i}: the text is {text!r:.40} and the film {film!r:.40}; text is expected")
        reviews.append(Review(f"{split}{i}", film, int(labels[i]), text))
    return reviews


def _paired(part: str, reviews: list[Review]) -> list[Pair]:
    """As many pairs of one film as of two, in a seeded order; the module's docstring says which."""
    rng = generator(SEED, "pairs", part)
    films = defaultdict(list)
    for review in reviews:
        films[review.film].append(review)
    same: dict[tuple[int, int], list[tuple[Review, Review]]] = defaultdict(list)  # by verdicts, a film's together
    names = sorted(films)
    for f in rng.permutation(len(names)):
        shuffled = [films[names[f]][i] for i in rng.permutation(len(films[names[f]]))]
        following = shuffled[1:] + shuffled[:1] if len(shuffled) > 2 else shuffled[1:]
        for first, second in zip(shuffled, following, strict=False):
            same[first.good, second.good].append((first, second))
    pairs = []
    for _, group in sorted(same.items()):
        most = max(np.unique([first.film for first, _ in group], return_counts=True)[1])
        if len(group) < 2 * most:
            continue  # not enough films to be mixed
        shift = int(rng.integers(most, len(group) - most + 1))  # so far apart that the films differ
        for (first, second), (_, stranger) in zip(group, group[shift:] + group[:shift], strict=True):
            pairs.append(Pair(f"{part}-{first.name}-{second.name}", 1, (first.text, second.text)))
            pairs.append(Pair(f"{part}-{first.name}-{stranger.name}", 0, (first.text, stranger.text)))
    if not pairs:
        raise ValueError(f"the {part} split has too few films with two reviews or more to make pairs of")
    return [pairs[i] for i in rng.permutation(len(pairs))]
