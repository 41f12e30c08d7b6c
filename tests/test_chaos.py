"""The program that disturbs commands (tests/chaos): a few disturbances make no difference, a planted fault does."""

import json
import shutil
import subprocess
import sys

import pytest
from tiny import ROOT, environment

from tests.chaos.compare import differences
from tests.chaos.kinds import KINDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the chaos program needs /proc and namespaces of Linux")
STAGES = ("--scenario", "pretrain, finetune")


def chaos(*arguments: str, timeout: float = 550) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.chaos", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)


def test_a_few_disturbances_make_no_difference():
    done = chaos("--count", "3", "--seed", "5", *STAGES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" disturbances, 0 differences")


@pytest.mark.slow
def test_a_planted_fault_is_found_and_a_campaign_goes_on(tmp_path):
    """An optimizer that forgets its state at every resume; the same command again repeats no case."""
    command = ("--count", "6", "--seed", "0", "--plant", "--state", str(tmp_path), *STAGES)
    first = chaos(*command)
    assert first.returncode == 1, first.stdout + first.stderr
    assert "model.safetensors: another content" in first.stdout
    assert not first.stdout.endswith(" 0 differences\n")
    again = chaos(*command)
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1] and "model.safetensors" not in again.stdout


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_forty_disturbances_make_no_difference():
    done = chaos("--count", "40", "--seed", "6", timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("finetune-1/metrics.jsonl", '{"loss": 0.25}\n', ": [0].loss is 0.25 in place of 0.5"),
        ("finetune-1/model.safetensors", "other", ": another content"),
        ("finetune-1/result.json", '{"accuracy": 0.5, "created": 2}', ""),
        ("study-1/report.html", "at 2026-01-02T00:00:00+0000", ""),
        ("study-1/.report.html.1.tmp", "", " should not be there"),
    ],
)
def test_what_counts_as_a_difference(name, content, said, tmp_path):
    whole = tmp_path / "whole"
    for folder in ("finetune-1", "study-1"):
        (whole / folder).mkdir(parents=True)
    (whole / "finetune-1/metrics.jsonl").write_text('{"loss": 0.5}\n')
    (whole / "finetune-1/model.safetensors").write_text("these")
    (whole / "finetune-1/result.json").write_text(json.dumps({"accuracy": 0.5, "created": 1}))
    (whole / "study-1/report.html").write_text("at 2026-01-01T00:00:00+0000")
    shutil.copytree(whole, tmp_path / "runs")
    (tmp_path / "runs" / name).write_text(content)
    found = differences(whole, tmp_path / "runs")
    assert found == ([f"{name}{said}"] if said else [])


def test_every_kind_says_what_it_does():
    assert all(kind.text and set(kind.codes) <= {-9, 4, 7, 8, 75, 130} for kind in KINDS.values())
