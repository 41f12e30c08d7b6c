"""Whatever stands in the user's files: a sentence or rows, never a traceback, a hang or a large allocation.

Valid files of every kind are changed at random, and read in this process. Thousands of them, read by commands:
    .venv/bin/python -m tests.fuzz --target data --count 2000
"""

import contextlib
import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import KINDS, make

from spt.tasks import custom

ROOM = 2**29  # bytes that may be allocated beyond what is
TEXTS = ("csv", "jsonl", "ts", "wfdb header")
TOKENS = (
    *(b"nan", b"1e999", b"-1", b"0", b"99999999999999999999", b"2147483647", b"65535", b"?", b"\xff\xff\xff\xff"),
    *(b"\x00", b"\x80", b"../x", b",", b":", b"[", b'"', b"\n", b"@data\n", b"true", b"\x7f\xff\xff\xff", b" "),
)

place = st.floats(0, 1, exclude_max=True)
change = st.one_of(
    st.tuples(st.just("byte"), place, st.integers(0, 255)),
    st.tuples(st.just("bit"), place, st.integers(0, 7)),
    st.tuples(st.just("token"), place, st.integers(0, len(TOKENS) - 1)),
    st.tuples(st.just("insert"), place, st.integers(0, len(TOKENS) - 1)),
    st.tuples(st.just("remove"), place, st.integers(1, 64)),
    st.tuples(st.just("repeat"), place, st.integers(1, 64)),
    st.tuples(st.just("cut"), place, st.just(0)),
)
# Half of the places are near the beginning, where headers are.
changes = st.tuples(st.lists(change, min_size=1, max_size=4), st.booleans())


def changed(content, how):
    steps, header = how
    for kind, where, number in steps:
        at = int(where * (min(len(content), 512) if header else len(content)))
        if kind == "byte":
            content = content[:at] + bytes([number]) + content[at + 1 :]
        elif kind == "bit" and content:
            content = content[:at] + bytes([content[at] ^ 1 << number]) + content[at + 1 :]
        elif kind == "token":
            content = content[:at] + TOKENS[number] + content[at + len(TOKENS[number]) :]
        elif kind == "insert":
            content = content[:at] + TOKENS[number] + content[at:]
        elif kind == "remove":
            content = content[:at] + content[at + number :]
        elif kind == "repeat":
            content = content[:at] + content[at : at + number] * 2 + content[at + number :]
        elif kind == "cut":
            content = content[:at]
    return content


@contextlib.contextmanager
def little_memory():
    """What asks for much more memory than there is in use gets a MemoryError, which no test allows."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(kind, folder):
    folder.mkdir()
    path, config = make(kind, folder)
    valid = path.read_bytes()
    custom.load(config, Path(".")).check()

    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(changes)
    def read(how):
        path.write_bytes(changed(valid, how))
        try:
            custom.load(config, Path(".")).check()
        except ValueError as error:
            words = str(error)
            assert words and "\n" not in words and "Traceback" not in words and len(words) < 700, words

    with little_memory():
        read()


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_refused_in_words_or_read(kind, tmp_path):
    fuzz(kind, tmp_path / "data")
