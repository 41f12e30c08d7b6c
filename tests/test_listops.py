"""ListOps and SubTrees: the law of the trees, values by an interpreter written here, files, what is refused."""

import hashlib
import io
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import chisquare, ks_2samp

from spt.tasks import listops, subtrees
from spt.tasks.generators.listops import (
    CLOSE,
    NAMES,
    OPEN,
    Law,
    Malformed,
    Trees,
    deal,
    distinct,
    draw,
    evaluate,
    text,
    tokenize,
    values,
)

NOWHERE = Path("nowhere")  # generated tasks need no files
LRA = Law(500, 2000, 10, 10)
LISTOPS_WORDS = ["<pad>", "<unk>", "<eos>", "]", *"0123456789", "[MAX", "[MED", "[MIN", "[SM"]


class Node:
    """A subtree, from a list of tokens without parentheses; `closing` lists its inner nodes by closing bracket."""

    def __init__(self, words, closing):
        word, self.begin = words.pop(0)
        self.arguments, self.name, self.height = [], word, 0
        self.size = 1
        if not word.startswith("["):
            self.value = int(word)
            return
        while words[0][0] != "]":
            self.arguments.append(Node(words, closing))
        self.end = words.pop(0)[1]
        numbers = sorted(node.value for node in self.arguments)
        half = len(numbers) // 2
        self.value = {
            "[MIN": lambda: numbers[0],
            "[MAX": lambda: numbers[-1],
            "[SM": lambda: sum(numbers) % 10,
            "[MED": lambda: numbers[half] if len(numbers) % 2 else int((numbers[half - 1] + numbers[half]) / 2),
            "[FIRST": lambda: self.arguments[0].value,
            "[LAST": lambda: self.arguments[-1].value,
        }[word]()
        self.height = 1 + max(node.height for node in self.arguments)
        self.size = 2 + sum(node.size for node in self.arguments)
        closing.append(self)


def interpret(source):
    """(root, inner nodes in the order of their closing brackets)"""
    words = [(word, i) for i, word in enumerate(w for w in source.split() if w not in "()")]
    words.reverse()
    stack, closing = _Front(words), []
    root = Node(stack, closing)
    assert not stack.words, "something is left behind the expression"
    return root, closing


class _Front:
    """A list taken from its front in constant time."""

    def __init__(self, words):
        self.words = words

    def pop(self, _):
        return self.words.pop()

    def __getitem__(self, _):
        return self.words[-1]


def official(data_dir, *names):
    tables = [pq.read_table(data_dir / "listops" / f"{name}.parquet") for name in names]
    return [row for table in tables for row in table.to_pylist()]


def read_back(split, i, words):
    return [words[token] for token in split.row(i)]


# ------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("[MED 2 3 ]", 2),
        ("[MED 1 2 9 ]", 2),
        ("[MED 9 0 9 0 ]", 4),
        ("[SM 9 9 9 ]", 7),
        ("[MAX 2 6 [MED [SM 3 1 6 ] 8 3 ] 4 5 ]", 6),
        ("[FIRST 4 9 [LAST 1 7 ] ]", 4),
        ("[LAST 4 9 [FIRST 1 7 ] ]", 1),
        ("[MIN 7 ]", 7),
        ("( ( ( [MAX 2 ) 9 ) ] )", 9),
        ("3", 3),
    ],
)
def test_worked_values(source, value):
    assert evaluate(tokenize([source.encode()])).roots.tolist() == [value]
    assert interpret(source)[0].value == value


def test_every_value_in_real_files(data_dir):
    lra = [f"lra_official_code_{split}" for split in ("train", "validation", "test")]
    rows = official(data_dir, "nyu_test_d20s", "nyu_test_d20", *lra)
    assert len(rows) == 23_000
    trees = tokenize([row["source"].encode() for row in rows])
    found = evaluate(trees).roots
    assert found.tolist() == [row["target"] for row in rows]
    for row in rows[:20_200]:
        assert interpret(row["source"])[0].value == row["target"]
    lengths = np.diff(trees.stops, prepend=0)[-3000:]
    assert lengths.tolist() == [row["length"] for row in rows[-3000:]]


def test_every_generated_value():
    data = listops.load(listops.Config(source="generated", max_rows=100), NOWHERE)
    for split in data.splits.values():
        for i in range(len(split)):
            words = read_back(split, i, LISTOPS_WORDS)
            assert words.pop() == "<eos>" and 500 < len(words) < 2000
            assert interpret(" ".join(words))[0].value == split.targets[i]


def test_every_generated_subtree():
    words = ["<pad>", "<unk>", *LISTOPS_WORDS[3:]]
    values_10 = subtrees.load(subtrees.Config(source="generated", max_rows=4), NOWHERE)
    values_17 = subtrees.load(subtrees.Config(source="generated", max_rows=4, classes="vocabulary"), NOWHERE)
    assert (values_10.target.count, values_17.target.count) == (10, 17)
    for one, two in zip(values_10.splits.values(), values_17.splits.values(), strict=True):
        for i in range(len(one)):
            source = read_back(one, i, words)
            root, closing = interpret(" ".join(source))
            assert 7000 < len(source) < 8180 and root.size == len(source) and root.height <= 14
            assert max(len(node.arguments) for node in closing) <= 9
            expected = np.full(len(source), -1)
            expected[[node.end for node in closing]] = [node.value for node in closing]
            assert np.array_equal(one.targets[one.starts[i] : one.stops[i]], expected)
            named = two.targets[two.starts[i] : two.stops[i]]
            assert [words[k] for k in named[named >= 0]] == [str(node.value) for node in closing]
            assert np.array_equal(named >= 0, expected >= 0)


def test_subtrees_are_those_of_the_official_code(data_dir):
    for name in ("8k", "2k"):
        rows = official(data_dir, f"subtrees_official_code_{name}")
        trees = tokenize([row["source"].encode() for row in rows])
        found = evaluate(trees)
        for i, row in enumerate(rows):
            here = slice(trees.starts[i], trees.stops[i])
            ends = np.flatnonzero(trees.codes[here] == CLOSE)
            assert ends.tolist() == row["subtree_inds"]
            assert found.values[here][ends].tolist() == row["subtree_evals"]
            assert found.lengths[here][ends].tolist() == row["subtree_lengths"]
            assert found.heights[here][ends].tolist() == row["subtree_heights"]
            assert (np.delete(found.values[here], ends) == -1).all()
            if i < 5:
                closing = interpret(row["source"])[1]
                assert [node.size for node in closing] == row["subtree_lengths"]
                assert [node.height for node in closing] == row["subtree_heights"]


# --------------------------------------------------------------------------------------------------------- law


def length_law(law):
    """Chance of each length of a kept tree, exactly: polynomials whose x^k stands for k tokens."""

    def node(level):
        leaf = np.zeros(law.max_tokens)
        leaf[1] = 1.0
        if level == law.max_depth:
            return leaf
        child, power, inner = node(level + 1), leaf * 0, np.zeros(law.max_tokens)
        power[2] = 1.0  # operator and bracket
        for count in range(1, law.max_args + 1):
            power = np.convolve(power, child)[: law.max_tokens]
            if count >= 2:
                inner += power / (law.max_args - 1)
        return 0.75 * leaf + 0.25 * inner

    chances = node(1)
    chances[: law.min_tokens + 1] = 0
    return chances / chances.sum()


@pytest.mark.parametrize("law", [Law(0, 60, 3, 4), Law(1, 40, 5, 2), Law(8, 30, 2, 10), Law(20, 60, 4, 5)])
def test_lengths_follow_the_law_exactly(law):
    n = 6000
    lengths = np.diff(draw(1, law, 0, 0, n).stops, prepend=0)
    expected = n * length_law(law)
    seen = np.bincount(lengths, minlength=law.max_tokens)
    assert (seen[expected == 0] == 0).all(), "strict limits, and lengths that no tree has"
    order = np.argsort(-expected)
    common = order[expected[order] >= 8]
    rest = n - seen[common].sum(), n - expected[common].sum()
    last = [[rest[i]] if rest[1] >= 8 else [] for i in (0, 1)]
    kept = np.append(seen[common], last[0]), np.append(expected[common], last[1])
    assert chisquare(kept[0], kept[1] * kept[0].sum() / kept[1].sum()).pvalue > 1e-3


def test_digits_operators_and_arguments_are_uniform():
    trees = draw(2, Law(0, 500, 6, 7), 0, 0, 6000)
    counts = np.bincount(trees.codes, minlength=len(NAMES))
    assert chisquare(counts[:10]).pvalue > 1e-3
    assert chisquare(counts[OPEN : OPEN + 4]).pvalue > 1e-3 and counts[OPEN + 4 :].sum() == 0
    two_levels = draw(3, Law(1, 500, 2, 7), 0, 0, 6000)  # kept whatever their length, so that the law is not bent
    arguments = np.bincount(np.diff(two_levels.stops, prepend=0) - 2)[2:]
    assert len(arguments) == 6 and chisquare(arguments).pvalue > 1e-3


def described(trees):
    """What is compared of expressions: lengths, heights, values, root operators, shares of tokens and of arguments."""
    found = evaluate(trees)
    depth = np.cumsum((trees.codes >= OPEN).astype(int) - (trees.codes == CLOSE))  # of the token before the next
    opens = trees.codes >= OPEN
    arguments = Counter()
    for row in trees.rows()[:400]:
        stack = [0]
        for code in row.tolist():
            if code >= OPEN:
                stack[-1] += 1
                stack.append(0)
            elif code == CLOSE:
                arguments[stack.pop()] += 1
            else:
                stack[-1] += 1
    share = np.array([arguments[k] for k in range(2, 11)], float)
    return {
        "lengths": np.diff(trees.stops, prepend=0),
        "heights": found.heights[trees.stops - 1],
        "roots": np.bincount(found.roots, minlength=10) / len(trees.stops),
        "first": np.bincount(trees.codes[trees.starts] - OPEN, minlength=4) / len(trees.stops),
        "tokens": np.bincount(trees.codes, minlength=15)[:15] / len(trees.codes),
        "arguments": share / share.sum(),
        "levels": np.bincount(depth[opens], minlength=16)[:16] / opens.sum(),
        "values": np.bincount(found.values[found.values >= 0], minlength=10) / (found.values >= 0).sum(),
    }


def compare(ours, theirs, tolerance):
    for name in ("lengths", "heights"):
        assert ks_2samp(ours[name], theirs[name]).pvalue > 1e-3, name
    for name, allowed in tolerance.items():
        assert np.abs(ours[name] - theirs[name]).max() < allowed, (name, ours[name], theirs[name])


def test_same_law_as_the_official_generator(data_dir):
    names = [f"lra_official_code_{split}" for split in ("train", "validation", "test")]
    theirs = described(tokenize([row["source"].encode() for row in official(data_dir, *names)]))
    ours = described(Trees.joined(list(distinct(7, LRA, 3000, templates=False, what="test"))))
    shares = {"tokens": 0.002, "arguments": 0.006, "levels": 0.012, "values": 0.004, "roots": 0.03, "first": 0.04}
    compare(ours, theirs, shares)
    assert abs(np.median(ours["lengths"]) - 937) < 30 and abs(ours["lengths"].mean() - 1024) < 30
    assert ours["roots"].argmax() in (0, 9) and ours["heights"].max() == 9


@pytest.mark.parametrize(
    ("name", "law", "n"), [("8k", Law(7000, 8180, 15, 9), 60), ("2k", Law(1500, 2000, 10, 10), 240)]
)
def test_same_law_as_the_official_subtrees(data_dir, name, law, n):
    sources = [row["source"].encode() for row in official(data_dir, f"subtrees_official_code_{name}")]
    theirs = described(tokenize(sources))
    trees = Trees.joined(list(distinct(0, law, n, templates=True, what="test")))
    ours = described(trees)
    compare(ours, theirs, {"tokens": 0.006, "arguments": 0.015, "levels": 0.04, "values": 0.012})
    if name == "8k":
        brackets = [int((row == CLOSE).sum()) for row in trees.rows()]
        assert abs(np.median(brackets) - 1150) < 60
        assert np.median(ours["heights"]) == 14


# -------------------------------------------------------------------------------------------------------- text


def published(codes):
    """An expression as published: operator and first argument are a pair, this and the next argument, at last with `]`.

    A pair is `( left right )`.
    """
    names = text(codes).split()
    before = [0] * len(names)  # opening parentheses at a token
    open_lists, out = [], list(names)
    for i, name in enumerate(names):
        if name.startswith("["):
            open_lists.append(i)
            continue
        if name == "]":
            before[open_lists[-1]] += 1
            out[i] += " )"
            open_lists.pop()
        if open_lists:
            before[open_lists[-1]] += 1
            out[i] += " )"
    return " ".join("( " * count + name for count, name in zip(before, out, strict=True))


def test_text_form_is_the_published_one(data_dir):
    for name in ("lra_official_code_test", "nyu_test_d20"):
        sources = [row["source"] for row in official(data_dir, name)[:500]]
        trees = tokenize([source.encode() for source in sources])
        assert [published(row) for row in trees.rows()] == sources
    assert published(np.array([OPEN + 1, 2, 9, CLOSE], np.uint8)) == "( ( ( [MAX 2 ) 9 ) ] )"
    for row in distinct(0, Law(0, 200, 8, 5), 50, templates=False, what="test"):
        printed, bare = published(row), text(row)
        assert len(printed.split()) == 3 * len(row) - 2 and len(bare.split()) == len(row)
        for form in (printed, bare):
            assert np.array_equal(tokenize([form.encode()]).codes, row)


# ------------------------------------------------------------------------------------- seeds, splits and workers


def rows_of(split):
    return [split.row(i).tobytes() for i in range(len(split))]


def test_a_limit_gives_the_first_rows(monkeypatch):
    tiny = {"source": "generated", "min_tokens": 0, "max_tokens": 8, "max_depth": 3, "max_args": 2}
    sizes = {"train_size": 300, "val_size": 40, "test_size": 20}
    for module, options in ((listops, tiny), (subtrees, {**tiny, "min_tokens": 4, "unique": "trees"})):
        whole = module.load(module.Config(**options, **sizes), NOWHERE)
        assert [len(split) for split in whole.splits.values()] == [300, 40, 20]
        for max_rows in (1, 7, 30, 200):
            part = module.load(module.Config(**options, **sizes, max_rows=max_rows), NOWHERE)
            for mine, theirs in zip(part.splits.values(), whole.splits.values(), strict=True):
                assert len(mine) == min(max_rows, len(theirs))
                assert rows_of(mine) == rows_of(theirs)[: len(mine)]
                assert mine.ids.tolist() == theirs.ids[: len(mine)].tolist()


def test_no_expression_is_there_twice():
    tiny = listops.Config(
        source="generated",
        min_tokens=0,
        max_tokens=8,
        max_depth=3,
        max_args=2,
        train_size=300,
        val_size=40,
        test_size=20,
    )
    rows = [row for split in listops.load(tiny, NOWHERE).splits.values() for row in rows_of(split)]
    assert len(set(rows)) == len(rows) == 360
    assert len({row[:-1] for row in rows} & {bytes([4 + k]) for k in range(10)}) == 10, "short ones are common"


def test_no_template_is_there_twice():
    law = Law(3, 20, 3, 3)
    rows = list(distinct(0, law, 100, templates=True, what="test"))
    assert len({row[row >= CLOSE].tobytes() for row in rows}) == 100
    free = list(distinct(0, law, 100, templates=False, what="test"))
    assert len({row[row >= CLOSE].tobytes() for row in free}) < 80 and len({row.tobytes() for row in free}) == 100


def test_splits_are_dealt_in_turn():
    assert deal([5, 1, 2], None).tolist() == [0, 1, 2, 0, 2, 0, 0, 0]
    assert deal([5, 1, 2], 1).tolist() == [0, 1, 2]
    assert deal([5, 1, 2], 3).tolist() == [0, 1, 2, 0, 2, 0]


def test_workers_change_nothing_and_seeds_do(monkeypatch):
    found = []
    for workers, seed in (("1", 0), ("2", 0), ("3", 0), ("1", 1)):
        monkeypatch.setenv("SPT_WORKERS", workers)
        row = list(distinct(seed, Law(50, 300, 8, 6), 600, templates=False, what="test"))
        trees = Trees.joined(row)
        found.append(hashlib.sha256(trees.codes.tobytes() + values(trees, "test").tobytes()).hexdigest())
    assert found[0] == found[1] == found[2] != found[3]


def test_the_same_rows_without_numba():
    pytest.importorskip("numba")
    script = (
        "import sys, hashlib, pathlib\n"
        "if sys.argv[1] == 'plain': sys.modules['numba'] = None\n"
        "from spt.tasks.generators import compiled, listops as g\n"
        "from spt.tasks import listops, subtrees\n"
        "assert compiled.is_compiled() == (sys.argv[1] != 'plain')\n"
        "a = listops.load(listops.Config(source='generated', max_rows=20), pathlib.Path('nowhere'))\n"
        "b = subtrees.load(subtrees.Config(source='generated', variant='short', max_rows=5), pathlib.Path('nowhere'))\n"
        "for split in (*a.splits.values(), *b.splits.values()):\n"
        "    print(hashlib.sha256(split.values.tobytes() + split.targets.tobytes()).hexdigest())\n"
    )
    run = [
        subprocess.run([sys.executable, "-c", script, kind], capture_output=True, text=True, check=True).stdout
        for kind in ("plain", "compiled")
    ]
    assert run[0] == run[1] and run[0].count("\n") == 6


def test_trees_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="at most 12 tokens, never more than min_tokens 500"):
        listops.Config(max_depth=2)
    with pytest.raises(ValueError, match="no length lies between"):
        listops.Config(min_tokens=1999)
    with pytest.raises(ValueError, match="more than max_length 2048"):
        subtrees.Config(max_length=2048)
    few = listops.Config(
        source="generated", min_tokens=0, max_tokens=3, max_depth=1, train_size=20, val_size=1, test_size=1
    )
    with pytest.raises(ValueError, match=r"only 10 different trees among .* drawn, but 22 are asked for"):
        listops.load(few, NOWHERE)


# ------------------------------------------------------------------------------------------------------- files


def test_conventions_of_s4_and_lra(data_dir):
    rows = official(data_dir, "lra_official_code_train")
    s4 = listops.load(listops.Config(source="released"), data_dir)
    assert s4.input.vocab == 18 and s4.target.count == 10
    assert [len(split) for split in s4.splits.values()] == [2000, 500, 500]
    assert "2,000 / 500 / 500 rows" in s4.notes[0]
    assert s4.train.targets.tolist() == [row["target"] for row in rows]
    words = [word for word in rows[3]["source"].split() if word not in "()"]
    assert read_back(s4.train, 3, LISTOPS_WORDS) == [*words, "<eos>"]
    cut = listops.load(listops.Config(source="released", max_length=600, max_rows=20), data_dir)
    assert read_back(cut.train, 3, LISTOPS_WORDS) == [*words[:599], "<eos>"] and cut.length == 600
    lra = listops.load(listops.Config(source="released", convention="lra", max_length=600, max_rows=20), data_dir)
    bare = [word for word in LISTOPS_WORDS if word != "<eos>"]
    assert read_back(lra.train, 3, bare) == words[:600] and lra.input.vocab == 17
    assert listops.Config(convention="lra").steps == 2000 and listops.Config().steps == 2048
    counts = np.bincount(s4.train.values, minlength=18)
    assert counts[:2].sum() == 0 and counts[3] > counts[4:14].max() and counts[4:14].min() > counts[14:].max()


@pytest.mark.parametrize(("nyu", "vocab", "last"), [("d20s", 18, 17), ("d20", 20, 18)])
def test_original_files(data_dir, nyu, vocab, last):
    data = listops.load(listops.Config(source="nyu", nyu=nyu), data_dir)
    data.check()
    assert [len(split) for split in data.splits.values()] == [8000, 1000, 1000]
    assert data.input.vocab == vocab and int(data.train.values.max()) == last
    assert any("no published number" in note for note in data.notes)
    everything = sorted(id for split in data.splits.values() for id in split.ids.tolist())
    assert everything == sorted(f"test-{i}" for i in range(10_000))
    rows = official(data_dir, f"nyu_test_{nyu}")
    for split in data.splits.values():
        assert split.targets.tolist() == [rows[int(id[5:])]["target"] for id in split.ids]


def test_original_tables(data_dir, tmp_path):
    rows = official(data_dir, "nyu_test_d20s")[:60]
    (tmp_path / "listops").mkdir()
    for name, part in (("train", rows[:40]), ("test", rows[40:])):
        lines = "".join(f"{row['target']}\t{row['source']}\n" for row in part)
        (tmp_path / "listops" / f"{name}_d20s.tsv").write_text(lines)
    data = listops.load(listops.Config(source="nyu"), tmp_path)
    assert [len(split) for split in data.splits.values()] == [36, 4, 20]
    assert data.test.targets.tolist() == [row["target"] for row in rows[40:]]


HEADER = "Source\tTarget\n"
GOOD = "( ( ( [MAX 2 ) 9 ) ] )\t9\n"


def tables(folder, train=GOOD * 3, val=GOOD * 2, test=GOOD, header=HEADER):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("val", val), ("test", test)):
        if rows is not None:
            (folder / f"basic_{name}.tsv").write_bytes((header + rows).encode("utf-8", "surrogateescape"))


@pytest.mark.parametrize("place", ["listops-1000", "listops/listops-1000", "lra_release/lra_release/listops-1000"])
def test_released_tables(tmp_path, place):
    tables(tmp_path / place)
    data = listops.load(listops.Config(), tmp_path)
    assert [len(split) for split in data.splits.values()] == [3, 2, 1]
    assert read_back(data.test, 0, LISTOPS_WORDS) == ["[MAX", "2", "9", "]", "<eos>"] and data.test.targets[0] == 9
    assert len(listops.load(listops.Config(max_rows=2), tmp_path).train) == 2
    assert not listops.sources(listops.Config(source="generated"), tmp_path)


def test_released_archive_is_read_from_its_inner_folder(tmp_path):
    wrong = GOOD.replace("\t9", "\t1")
    with tarfile.open(tmp_path / "lra_release.gz", "w:gz") as archive:
        for folder, row in (("lra_release/listops-1000", wrong), (listops.FOLDER, GOOD)):
            for name, count in (("test", 1), ("train", 3), ("val", 2)):
                content = (HEADER + row * count).encode()
                member = tarfile.TarInfo(f"{folder}/basic_{name}.tsv")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    data = listops.load(listops.Config(source="released"), tmp_path)
    assert [len(split) for split in data.splits.values()] == [3, 2, 1] and data.train.targets.tolist() == [9] * 3
    whole = (tmp_path / "lra_release.gz").read_bytes()
    (tmp_path / "lra_release.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged or cut short"):
        listops.load(listops.Config(source="released"), tmp_path)
    with tarfile.open(tmp_path / "lra_release.gz", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"has no member lra_release/lra_release/listops-1000/basic_train.tsv"):
        listops.load(listops.Config(source="released"), tmp_path)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"train": GOOD + "[MAX 2 9 ]\t8\n"}, r"line 3: its label is '8', but the expression's value is 9"),
        ({"train": GOOD + "[MAX 2 9 ]\tx\n"}, r"line 3: its label is 'x'"),
        ({"val": "[AVG 2 9 ]\t8\n"}, r"line 2: '\[AVG' is no token of ListOps"),
        ({"val": GOOD + "[MAXIMUM 2 9 ]\t8\n"}, r"line 3: '\[MAXIMUM' is no token"),
        ({"val": GOOD + "[MAX 2 12 ]\t8\n"}, r"line 3: '12' is no token"),
        ({"val": GOOD + "[MAX 2 \udcff ]\t8\n"}, r"line 3: '.' is no token"),
        ({"test": "[MAX 2 9\t9\n"}, "line 2: it lacks a closing bracket"),
        ({"test": "[MAX 2 9 ] ]\t9\n"}, "line 2: it has more closing brackets than operators"),
        ({"test": "[MAX 2 9 ] 3\t9\n"}, "line 2: it goes on after its end"),
        ({"test": "4 [MAX 2 9 ]\t9\n"}, "line 2: it goes on after its end"),
        ({"test": "[MAX ]\t9\n"}, "line 2: an operator has no argument"),
        ({"test": "( )\t9\n"}, "line 2: it is empty"),
        ({"test": GOOD + "\n"}, "line 3: 1 fields; 2 are expected"),
        ({"test": "[MAX 2 9 ]\t9\t3\n"}, "line 2: 3 fields; 2 are expected"),
        ({"test": "[FIRST 2 9 ]\t2\n"}, r"line 2: the operator \[FIRST does not belong"),
        ({"test": ""}, "basic_test.tsv has no rows"),
        ({"test": None}, "not one file for each of training, validation and test"),
        ({"header": "source\tlabel\n"}, "the first line is 'source | label'; Source | Target are expected"),
        ({"header": ""}, "the first line is"),
    ],
)
def test_bad_tables_are_refused_in_words(tmp_path, options, complaint):
    tables(tmp_path / "listops-1000", **options)
    with pytest.raises((ValueError, FileNotFoundError), match=complaint):
        listops.load(listops.Config(), tmp_path)


def test_bad_parquet_is_refused_in_words(tmp_path):
    names = [tmp_path / f"{name}.parquet" for name in listops.COPIES[0]]
    rows = {"source": ["[MAX 2 9 ]"], "target": [9]}
    for path in names:
        pq.write_table(pa.table(rows), path)
    released = listops.Config(source="released")
    assert len(listops.load(released, tmp_path).train) == 1
    for change, complaint in (
        ({"target": [8]}, "row 0: its label is 8"),
        ({"source": [None]}, "row 0: the source is None"),
        ({"source": ["[MAX 2\n9 ]"]}, "row 0: it has several lines"),
        ({"source": ["[MAX é 9 ]"]}, "row 0: 'é' is no token"),
    ):
        pq.write_table(pa.table(rows | change), names[1])
        with pytest.raises(ValueError, match=complaint):
            listops.load(released, tmp_path)
    pq.write_table(pa.table({"text": ["a"]}), names[1])
    with pytest.raises(ValueError, match="has no column source"):
        listops.load(released, tmp_path)
    names[1].write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="damaged or no Parquet file"):
        listops.load(released, tmp_path)


@pytest.mark.parametrize("options", [{"source": "released"}, {"source": "nyu"}])
def test_missing_files_are_named(tmp_path, options):
    with pytest.raises(FileNotFoundError, match="is not in the data folder"):
        listops.load(listops.Config(**options), tmp_path)
    with pytest.raises(FileNotFoundError, match="is not in the data folder"):
        subtrees.load(subtrees.Config(source="released"), tmp_path)


def test_malformed_knows_its_row():
    with pytest.raises(Malformed, match="expression 1"):
        tokenize([b"[MAX 2 9 ]", b"[MAX oops ]"])


COLUMNS = ["subtree_evals", "subtree_lengths", "subtree_heights", "subtree_ops", "subtree_inds"]


def subtree_tables(folder, parts):
    folder.mkdir(exist_ok=True)
    for name, rows in parts.items():
        lines = ["Source\tTarget\tSubTreeEvals\tSubTreeLengths\tSubTreeHeights\tSubTreeOps\tSubTreeInds\tId"]
        for i, row in enumerate(rows):
            cells = [row["source"], row["target"], *(" ".join(map(str, row[c])) for c in COLUMNS), i]
            lines.append("\t".join(map(str, cells)))
        (folder / f"subtrees_{name}.tsv").write_text("\n".join(lines) + "\n")


def test_subtrees_from_files(data_dir, tmp_path):
    rows = official(data_dir, "subtrees_official_code_2k")
    subtree_tables(tmp_path / "subtrees", {"train": rows[:40], "val": rows[40:50], "test": rows[50:]})
    from_tables = subtrees.load(subtrees.Config(variant="short"), tmp_path)
    from_parquet = subtrees.load(subtrees.Config(source="released", variant="short"), data_dir)
    for one, two in zip(from_tables.splits.values(), from_parquet.splits.values(), strict=True):
        assert np.array_equal(one.values, two.values) and np.array_equal(one.targets, two.targets)
    assert [len(split) for split in from_tables.splits.values()] == [40, 10, 10]
    split = from_tables.test
    for i, row in enumerate(rows[50:]):
        targets = split.targets[split.starts[i] : split.stops[i]]
        assert np.flatnonzero(targets >= 0).tolist() == row["subtree_inds"]
        assert targets[row["subtree_inds"]].tolist() == row["subtree_evals"]
    from_tables.check()
    with pytest.raises(ValueError, match=r"line 2: 1,\d+ tokens, more than max_length 1,500"):
        subtrees.load(subtrees.Config(source="released", variant="short", max_length=1500), tmp_path)


@pytest.mark.parametrize("column", COLUMNS)
def test_wrong_subtrees_are_refused(data_dir, tmp_path, column):
    rows = official(data_dir, "subtrees_official_code_2k")[:6]
    wrong = list(rows[4][column])
    wrong[3] = "[MAX" if wrong[3] == "[MIN" else "[MIN" if column == "subtree_ops" else (wrong[3] + 1) % 10
    bad = {**rows[4], column: wrong}
    subtree_tables(tmp_path / "subtrees", {"train": rows[:3], "val": [rows[3], bad], "test": rows[5:]})
    with pytest.raises(ValueError, match=rf"subtrees_val.tsv, line 3: {column} are not those of the expression"):
        subtrees.load(subtrees.Config(), tmp_path)
