"""tests/conditions.py: a run of the suite under a condition says how it ended, once, and fails where a test does."""

import json
import subprocess
import sys

import pytest
from tiny import ROOT, environment

sys.path.insert(0, str(ROOT))  # tests.conditions is a program, run from the root of a checkout

from tests import conditions

FAILING = "import os\n\ndef test_time_zone():\n    assert os.environ.get('TZ') != 'Nowhere/At_all'\n"


@pytest.mark.timeout(120)
def test_a_condition_reaches_the_tests_and_their_end_is_kept(tmp_path):
    (tmp_path / "test_zone.py").write_text(FAILING)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tests.conditions", "--out", out, "--only", "quiet", "--only", "no-time-zone"]
    command += ["--workers", "0", "--", tmp_path / "test_zone.py"]
    for _ in range(2):  # the second time from what is kept
        done = subprocess.run(command, cwd=ROOT, env=environment({"TZ": "UTC"}), capture_output=True, text=True)
        assert done.returncode == 1 and done.stdout.splitlines()[-1] == "2 runs, 1 with failures", (
            done.stdout + done.stderr
        )
    quiet, zone = map(json.loads, (out / "runs.jsonl").read_text().splitlines())
    assert (quiet["condition"], quiet["code"], quiet["said"]) == ("quiet", 0, "1 passed")
    assert (zone["code"], zone["said"]) == (1, "1 failed") and zone["failed"][0].endswith("::test_time_zone")


def test_what_a_machine_does_not_allow_is_told():
    assert conditions.impossible(conditions.Condition()) is None
    assert conditions.impossible(conditions.Condition(prefix=("no-such-tool",))) == "there is no program no-such-tool"
    assert "xx_XX is not installed" in conditions.impossible(conditions.Condition({"LC_ALL": "xx_XX"}))
    assert conditions.impossible(conditions.Condition(prefix=("false",))) == "false: "


def test_a_prefix_is_before_the_suite(tmp_path, monkeypatch):
    text = "import os\n\ndef test_one():\n    assert os.environ['SEEN'] == 'yes'\n"
    (tmp_path / "test_one.py").write_text(text)
    condition = conditions.Condition(prefix=("env", "SEEN=yes"))
    monkeypatch.setitem(conditions.CONDITIONS, "quiet", condition)
    ended = conditions.run_suite("quiet", tmp_path, 0, [str(tmp_path / "test_one.py")])
    assert (ended["code"], ended["said"]) == (0, "1 passed")


def test_burners_work_as_long_as_they_are_wanted():
    with conditions.busy(2) as burners:
        assert [burner.poll() for burner in burners] == [None, None]
    assert all(burner.returncode for burner in burners)
