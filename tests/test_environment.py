"""What the machine can do is found out, recorded, and said where it costs time."""

import itertools

import pytest
import torch
from tiny import loaded, run

from spt.checks import installation
from spt.config.job import Job
from spt.runtime.environment import environment, has_bf16_instructions

X86 = {"architecture": "x86_64", "avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}


@pytest.mark.parametrize(
    ("capabilities", "there"),
    [
        (X86, False),
        ({**X86, "avx512_bf16": True}, True),
        ({**X86, "amx_bf16": True}, True),
        ({"architecture": "aarch64", "neon": True, "bf16": False}, False),
        ({"architecture": "aarch64", "neon": True, "bf16": True}, True),
        ({}, True),  # a torch that cannot tell: nobody is warned of what is not known
    ],
)
def test_instructions_for_bf16(capabilities, there):
    assert has_bf16_instructions(capabilities) == there


def test_the_environment_names_the_machine(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**X86, "cpu_name": "A CPU"}, raising=False)
    found = environment(torch.device("cpu"))
    assert found["cpu"] == "A CPU" and found["instructions"] == "avx2 avx512_f" and found["cores"] >= 1
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert environment(torch.device("cpu"))["cpu"]


@pytest.mark.parametrize(("precision", "there", "warned"), [("bf16", False, 1), ("bf16", True, 0), ("fp32", False, 0)])
def test_a_run_in_bf16_says_where_that_is_slow(tmp_path, monkeypatch, messages, precision, there, warned):
    monkeypatch.setattr("spt.training.stage.has_bf16_instructions", lambda: there)
    run(Job(loaded(tmp_path, finetune__train__precision=precision), "finetune", 0), tmp_path)
    assert len([text for text in messages if "precision bf16" in text and "twice as long" in text]) == warned


@pytest.fixture
def quick_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(installation, "has_bf16_instructions", lambda: True)
    monkeypatch.setattr(installation, "_share_of_processor", lambda: 0.99)
    monkeypatch.setattr(installation, "compiler_problem", lambda device: None)
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("has_bf16_instructions", lambda: False, "twice as long as fp32"),
        ("_share_of_processor", lambda: 0.5, "50% of it is left"),
        ("compiler_problem", lambda device: "no compiler", "cannot be used (no compiler): --compile has no effect"),
        ("importlib.util.find_spec", lambda name: None, "numba is not installed"),
    ],
)
def test_doctor_says_what_is_slow_and_never_fails_of_it(quick_machine, monkeypatch, name, value, words):
    probe = installation.PROBES["what is slow here"]
    assert probe() == "nothing"
    monkeypatch.setattr(f"spt.checks.installation.{name}", value)
    check = installation._timed("what is slow here", probe)
    assert check.ok and words in check.detail


@pytest.mark.parametrize(("used", "share"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
def test_the_share_of_the_processor_is_of_the_time_asked_for(monkeypatch, used, share):
    """By clocks of the test: each look at one is a hundredth of a second later."""
    looks = itertools.count()
    now = [0.0]

    def look():
        now[0] = 0.01 * next(looks)
        return now[0]

    monkeypatch.setattr(installation.time, "perf_counter", look)
    monkeypatch.setattr(installation.time, "process_time", lambda: torch.get_num_threads() * used * now[0])
    assert installation._share_of_processor() == pytest.approx(share, abs=0.1)
