"""docs/hugging-face.md is made from measured times, and these from the command that the page names."""

import json
import re

import hugging_face_page as page
import measure_architectures as measuring
import pytest

SMALL = {"layers": 1, "width": 16, "batch": "1", "length": "16"}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Measurements of their own, in no time."""
    monkeypatch.setattr(measuring, "FILE", tmp_path / "architectures.json")
    monkeypatch.setattr(measuring, "SIZES", SMALL)
    monkeypatch.setattr(measuring, "SECONDS", 0.0)
    return measuring.FILE


def test_every_architecture_of_the_page_was_measured_as_it_says():
    rows = json.loads(page.FILE.read_text(encoding="utf-8"))["rows"]
    lines = [
        line for line in page.hugging_face_page().splitlines() if re.match(r"\| `[a-z]\w*`.* \|.*\|.*\|.*\|.*\|", line)
    ]
    two_sided = {name: "✓" in line.split("|")[4] for line in lines for name in page.names_in(line.split("|")[1])}
    assert len(two_sided) == 50 and sorted(page.named()) == sorted(two_sided)
    assert {name: not row["causal"] for name, row in rows.items()} == two_sided
    assert "{{" not in page.hugging_face_page() and f"`{measuring.COMMAND}`" in page.hugging_face_page()


def test_a_cell_names_what_it_tells_of():
    rows = {"one": {"seconds": {"step": 0.1}}, "two": {"seconds": {"step": 23.4}}}
    asked = (["one"], ["two", "three", "one"], ["three"], ["three", "four"])
    assert [page.cell(names, rows) for names in asked] == ["0.10", "two 23, three –, one 0.10", "–", "–"]


def test_measuring_goes_on_where_it_was_interrupted(file, monkeypatch, capsys):
    """Each is written when it is done, one that fails is told of; what another machine measured is dropped."""
    assert measuring.measure_all(["fnet", "qqqqqq"], measuring.measured_here()) == ["qqqqqq"]
    out, err = capsys.readouterr()
    assert re.fullmatch(r"fnet: [\d.e-]+ s\n", out) and "no architecture" in err
    before = measuring.measured_here()
    assert list(before["rows"]) == ["fnet"] and not before["rows"]["fnet"]["causal"]
    assert before["rows"]["fnet"]["steps"] == measuring.LEAST and before["environment"] == measuring.here()
    assert measuring.measure_all(["gpt_neo"], before) == []
    rows = json.loads(file.read_text())["rows"]
    assert rows["fnet"] == before["rows"]["fnet"] and rows["gpt_neo"]["causal"]
    elsewhere = {**measuring.here(), "cpu": "another"}
    monkeypatch.setattr(measuring, "here", lambda: elsewhere)
    assert measuring.measured_here() == {}
