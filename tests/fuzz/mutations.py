"""Values and files changed at random: byte by byte, field by field, or as a whole."""

import copy
import hashlib
import io
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

# What no output may hold as it stands: markup, LaTeX, a spreadsheet's formula, a terminal's escape sequence.
HTML, LATEX, FORMULA, ESCAPE = "<img src=fuzz onerror=fuzz>", "\\fuzz{x}", "=fuzz(1)", "\x1b]0;fuzz\x07"
TEXTS = (
    *(
        HTML,
        LATEX,
        FORMULA,
        ESCAPE,
        "+fuzz",
        "@fuzz",
        "\r",
        "a\nb",
        "\x00",
        "\u202efuzz",
        "\x9b31m",
        "\ud800",
        "é" * 40,
    ),
    *(
        "../../fuzz",
        "/etc/passwd",
        "~",
        "a/b",
        ".",
        "",
        " ",
        "nan",
        "1e999",
        "-",
        "$x$",
        "$\\fuzz{x$",
        "a,b",
        '"',
        "{}",
        "[bold]fuzz",
    ),
    *("x" * 300, "[red", "a.b.c", "true", "null", "0x10", "1_000", "%s%n", "file:///etc/passwd", "none", "./fuzz.py"),
)
NUMBERS = (0, 1, -1, 2, 7, 0.5, -0.0, 1e-300, 1e300, 2**31, 2**63, 2**64, -(2**63), 10**30, 3.5)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
TOKENS = (
    *(b"nan", b"1e999", b"-1", b"0", b"99999999999999999999", b"2147483647", b"65535", b"?", b"\xff\xff\xff\xff"),
    *(
        b"\x00",
        b"\x80",
        b"../x",
        b",",
        b":",
        b"[",
        b"]",
        b"{",
        b'"',
        b"\n",
        b"@data\n",
        b"true",
        b"\x7f\xff\xff\xff",
        b" ",
    ),
    *(text.encode(errors="surrogatepass") for text in (HTML, LATEX, FORMULA, ESCAPE)),
)
scalars = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from(NUMBERS),
    st.sampled_from((None, True, False, *NOT_FINITE)),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.sampled_from(TEXTS), inner),
    max_leaves=5,
)
Tree = Any
Place = tuple[Any, ...]


def draw(chance: random.Random, strategy: st.SearchStrategy[Any] = values) -> Any:
    """One value of a strategy, the same for the same state of `chance`."""
    drawn = []

    @seed(chance.getrandbits(32))
    @settings(
        max_examples=3, database=None, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def collect(value: Any) -> None:
        drawn.append(value)

    collect()
    return drawn[-1]  # the first is the simplest there is


def change_bytes(chance: random.Random, content: bytes) -> bytes:
    """One to four changes, half of the time near the beginning, where headers are."""
    near = chance.random() < 0.5
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(min(len(content), 512 if near else len(content)) + 1)
        size, token = chance.randint(1, 64), chance.choice(TOKENS)
        content = {
            "byte": lambda c, a=at: c[:a] + bytes([chance.randrange(256)]) + c[a + 1 :],
            "bit": lambda c, a=at: c[:a] + bytes([x ^ 1 << chance.randrange(8) for x in c[a : a + 1]]) + c[a + 1 :],
            "token": lambda c, a=at, t=token: c[:a] + t + c[a + len(t) :],
            "insert": lambda c, a=at, t=token: c[:a] + t + c[a:],
            "remove": lambda c, a=at, n=size: c[:a] + c[a + n :],
            "repeat": lambda c, a=at, n=size: c[:a] + c[a : a + n] * 2 + c[a + n :],
            "cut": lambda c, a=at: c[:a],
        }[chance.choice(("byte", "bit", "token", "insert", "remove", "repeat", "cut"))](content)
    return content


def places(tree: Tree, at: Place = ()) -> Iterator[Place]:
    """Of every value in a tree of mappings and lists."""
    yield at
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield from places(value, (*at, key))


def change_tree(chance: random.Random, tree: Tree, others: Sequence[Tree] = ()) -> Tree:
    """Fields replaced, removed, renamed, doubled, nested, exchanged with each other, or taken from other trees."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        all_places = list(places(tree))
        if len(all_places) == 1:
            return draw(chance)
        *path, key = chance.choice(all_places[1:])
        node = tree
        for step in path:
            node = node[step]
        kind = chance.choice((*("alike",) * 8, *("value",) * 4, *KINDS_OF_CHANGE))
        if kind == "alike":
            node[key] = draw_alike(chance, node[key], key, others)
        elif kind == "value":
            node[key] = draw(chance)
        elif kind == "remove":
            del node[key]
        elif kind == "rename" and isinstance(node, dict):
            node[str(draw(chance, scalars))] = node.pop(key)
        elif kind == "exchange":
            node[key] = copy.deepcopy(at(tree, chance.choice(all_places[1:])))
        elif kind == "nest":
            for _ in range(chance.choice((1, 2, 50))):
                node[key] = [node[key]] if chance.random() < 0.5 else {"a": node[key]}
        elif kind == "add" and isinstance(node, dict):
            node[str(draw(chance, scalars))] = draw(chance)
        elif kind == "kind":
            node[key] = (
                str(node[key]) if not isinstance(node[key], str) else chance.choice((len(node[key]), [node[key]]))
            )
        elif others:
            other = chance.choice(others)
            node[key] = copy.deepcopy(at(other, chance.choice(list(places(other)))))
    return tree


KINDS_OF_CHANGE = ("remove", "rename", "exchange", "nest", "add", "kind", "other")


def draw_alike(chance: random.Random, value: Any, key: Any, others: Sequence[Tree]) -> Any:
    """A value of the same kind: what gets past the first checks."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        near = (value + 1, value - 1, value * 2, value / 2, value * 10, value / 100, -value, value * 1e6)
        if isinstance(value, int):
            near = tuple(int(number) for number in near)
        return chance.choice((*near, *NUMBERS, *NOT_FINITE))
    if isinstance(value, str):
        same = [at(tree, place) for tree in others for place in places(tree) if place and place[-1] == key]
        texts = sorted({text for text in same if isinstance(text, str)})
        return chance.choice(texts) if texts and chance.random() < 0.7 else chance.choice((*TEXTS, value + "x"))
    if isinstance(value, list) and value:
        return chance.choice((value[:1], value * 2, value[::-1], value[1:]))
    return draw(chance)


def at(tree: Tree, place: Place) -> Any:
    for step in place:
        tree = tree[step]
    return tree


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_yaml(tree: Tree) -> bytes:
    try:
        return yaml.dump(tree, Dumper=_Dumper, allow_unicode=True, sort_keys=False).encode(errors="surrogatepass")
    except yaml.YAMLError:  # of what YAML has no way to write
        return dump_json(tree)


def dump_json(tree: Tree) -> bytes:
    return json.dumps(tree).encode(errors="surrogatepass")


def change_file(chance: random.Random, path: Path, siblings: Sequence[Path] = ()) -> str:
    """Change a file in place; what was done, in a word or two."""
    if chance.random() < 0.1:
        return replace_file(chance, path, siblings)
    change = FIELDS.get(path.suffix)
    content = path.read_bytes()
    if change is not None and chance.random() < 0.65:
        try:
            path.write_bytes(change(chance, content))
            return "fields"
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError, NotImplementedError):
            pass  # a change that this kind of file cannot hold
    path.write_bytes(change_bytes(chance, content))
    return "bytes"


def sign(path: Path) -> None:
    """Make a checkpoint's checksums those of its changed files: what is wrong with them is then found by reading."""
    manifest = path.parent / "manifest.json"
    if path.name != manifest.name and path.is_file() and manifest.is_file():
        sums = json.loads(manifest.read_text())
        if path.name in sums:
            manifest.write_text(json.dumps({**sums, path.name: hashlib.sha256(path.read_bytes()).hexdigest()}))


SPOILT = {"zeros": b"\0" * 4096, "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "digits": b"9" * 6000}


def replace_file(chance: random.Random, path: Path, siblings: Sequence[Path]) -> str:
    kind = chance.choice(("removed", "empty", "folder", "link to itself", "zeros", "deep", "digits", *["sibling"] * 3))
    others = [other for other in siblings if other.name == path.name and other != path] or [path]
    content = chance.choice(others).read_bytes() if kind == "sibling" else SPOILT.get(kind, b"")
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind != "removed":
        path.write_bytes(content)
    return kind


def _json(chance: random.Random, content: bytes) -> bytes:
    return dump_json(change_tree(chance, json.loads(content)))


def _lines(chance: random.Random, content: bytes) -> bytes:
    """JSON Lines: a line changed, doubled, removed or out of its place."""
    lines = content.splitlines()
    index = chance.randrange(len(lines))
    kind = chance.choice(("change", "change", "change", "double", "remove", "move"))
    line = lines[index] if kind == "double" else lines.pop(index)
    if kind != "remove":
        new = _json(chance, line) if kind == "change" else line
        lines.insert(index if kind == "change" else chance.randint(0, len(lines)), new)
    return b"\n".join(lines) + b"\n"


def _yaml(chance: random.Random, content: bytes) -> bytes:
    return dump_yaml(change_tree(chance, yaml.safe_load(content)))


def _table(chance: random.Random, content: bytes) -> bytes:
    """CSV: a cell, a row or a column."""
    rows = [line.split(",") for line in content.decode().splitlines()]
    row = chance.choice(rows)
    kind = chance.choice(("cell", "cell", "row", "column", "double"))
    if kind == "cell":
        row[chance.randrange(len(row))] = str(draw(chance, scalars))
    elif kind == "row":
        rows.remove(row)
    elif kind == "column":
        column = chance.randrange(len(rows[0]))
        for each in rows:
            del each[column : column + 1]
    else:
        rows.append(row)
    return "\n".join(",".join(row) for row in rows).encode(errors="surrogatepass") + b"\n"


def _parquet(chance: random.Random, content: bytes) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(content))
    name = chance.choice(table.column_names)
    index, column = table.column_names.index(name), table[name].to_pylist()
    kind = chance.choice(("value", "value", "type", "drop", "rename", "rows", "double", "shuffle", "null", "empty"))
    if kind == "value":
        row = chance.randrange(len(column))
        column[row] = draw(chance, scalars)
        table = table.set_column(index, name, pa.array(column))
    elif kind == "type":
        to = chance.choice((pa.string(), pa.float16(), pa.int8(), pa.bool_(), pa.binary(), pa.float64(), pa.uint64()))
        table = table.set_column(index, name, pa.array([None if x is None else x for x in column]).cast(to))
    elif kind == "drop":
        table = table.drop_columns([name])
    elif kind == "rename":
        names = [str(draw(chance, scalars)) if i == index else old for i, old in enumerate(table.column_names)]
        table = table.rename_columns(names)
    elif kind == "rows":
        table = table.slice(chance.randrange(3), chance.randrange(len(column) + 1))
    elif kind == "double":
        table = pa.concat_tables([table, table])
    elif kind == "shuffle":
        order = list(range(len(column)))
        chance.shuffle(order)
        table = table.take(order)
    elif kind == "null":
        table = table.set_column(index, name, pa.nulls(len(column), chance.choice((pa.null(), table[name].type))))
    else:
        table = table.slice(0, 0)
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def _tensors(chance: random.Random, content: bytes) -> bytes:
    """Safetensors: the header's fields, or a tensor's name, shape, type or numbers."""
    if chance.random() < 0.4:
        (size,) = struct.unpack("<Q", content[:8])
        header = dump_json(change_tree(chance, json.loads(content[8 : 8 + size])))
        return struct.pack("<Q", len(header)) + header + content[8 + size :]
    import numpy as np
    from safetensors.numpy import load, save

    tensors = load(content)
    name = chance.choice(sorted(tensors))
    array = tensors[name]
    kind = chance.choice(("rename", "drop", "type", "shape", "nan", "huge", "empty", "more", "zeros"))
    if kind in ("rename", "drop"):
        del tensors[name]
    changed: Any = {
        "type": lambda: array.astype(
            chance.choice((np.float16, np.float64, np.int64, np.uint8, np.complex64, np.bool_))
        ),
        "shape": lambda: array.reshape(-1) if array.ndim > 1 else array[None],
        "nan": lambda: np.full_like(array, chance.choice(NOT_FINITE)),
        "huge": lambda: np.full_like(array, 1e30),
        "empty": lambda: array[:0] if array.ndim else array,
        "more": lambda: np.repeat(array, 2, 0) if array.ndim else array,
        "zeros": lambda: np.zeros_like(array),
    }.get(kind, lambda: array)()
    if kind != "drop":
        tensors[str(draw(chance, scalars)) if kind == "rename" else name] = changed
    return save(tensors)


FIELDS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    **{".json": _json, ".jsonl": _lines, ".yaml": _yaml, ".csv": _table, ".parquet": _parquet},
    ".safetensors": _tensors,
}


def copy_tree(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
