"""JSON nested deeper than Python reads is damaged like any other."""

import pytest

from spt.errors import OutputError
from spt.runs.folder import CLOCK, RunFolder
from spt.studies import status
from spt.training import threads
from spt.training.checkpoint import verify

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path, "pretrain-1")
    run.path.mkdir()
    for name in ("status.json", "env.json", "manifest.json", CLOCK, status.PROGRESS):
        (run.path / name).write_text(DEEP)
    return run


def test_files_of_a_run_nested_too_deeply_are_damaged(run):
    assert run.status() is None and threads._begun_with(run) is None and status._seconds_left(run.path) is None
    assert verify(run.path) == "manifest.json is damaged"
    with pytest.raises(OutputError, match="cannot be read"):
        run.recorded_end()
