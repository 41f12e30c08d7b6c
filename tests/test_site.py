"""The documentation as a site: every page is in its navigation, and it builds without a warning."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = {"index.md", "contributing.md", "changelog.md", "example-report/index.md"}  # which site_hooks.py adds


def pages(entries: list) -> list[str]:
    return [
        page
        for entry in entries
        for value in entry.values()
        for page in ([value] if isinstance(value, str) else pages(value))
    ]


def test_the_navigation_has_every_page_once():
    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(there - {"example-report/report.md"} | ELSEWHERE)


def test_every_model_has_an_equation():
    sections = re.split(r"^## ", (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8"), flags=re.M)[
        1:
    ]
    models = [section for section in sections if "\n- paper: " in section]
    assert len(models) > 30
    assert [section.split()[0] for section in models if not re.search(r"^    \S.*[=(]", section, re.M)] == []


@pytest.mark.slow
def test_it_builds_without_a_warning_and_works_offline(tmp_path):
    if find_spec("mkdocs") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("needs mkdocs-material: pip install .[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Compare sequence models fairly" in text and "README.md" not in text
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'src="http' not in text and 'rel="stylesheet" href="http' not in text, page.name
        # A block that Markdown did not understand stays in the text.
        assert "```" not in re.sub(r"<code>.*?</code>", "", text, flags=re.S), page.name
    assert '<span class="filename">waves.yaml</span>' in (tmp_path / "first-comparison.html").read_text(
        encoding="utf-8"
    )
