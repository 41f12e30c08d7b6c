"""What mkdocs is told of this repository: README, CONTRIBUTING and CHANGELOG are pages, code is named without a link,
and a block that is a file has its name above it.

Links in the files are those of a checkout, so that they work where the files are read without the site, too.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/example-report/report.md": "example-report/index.md",  # beside report.html, the same as one page
}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)|(!\[[^\]]*\])\(([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that lie elsewhere or under another name."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relink(text, (ROOT / source).parent, page)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    if page.file.src_uri in PAGES.values():
        return markdown  # its links are done
    return relink(markdown, ROOT / "docs" / Path(page.file.src_uri).parent, page.file.src_uri)


def relink(text: str, folder: Path, page: str) -> str:
    """The text of a file in this folder with links from this page: to pages of the site, to nothing outside it."""

    def link(match: re.Match[str]) -> str:
        words, target = (match[1], match[2]) if match[2] else (match[3], match[4])
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_sign, anchor = target.partition("#")
        inside = _place((folder / path).resolve())
        if inside is None:
            return words if words.startswith("`") else f"{words} (`{(folder / path).resolve().relative_to(ROOT)}`)"
        depth = page.count("/")
        bracketed = words if match[3] else f"[{words}]"
        return f"{bracketed}({'../' * depth}{inside}{hash_sign}{anchor})"

    parts = re.split(r"(^```.*?^```\n?)", text, flags=re.M | re.S)  # code stays as it is, but for the name of its file
    return "".join(titled(part) if part.startswith("```") else LINK.sub(link, part) for part in parts)


def titled(block: str) -> str:
    """`file=NAME` behind the language, which the tests read, as the title that the site shows."""
    return re.sub(r"\A(```\w*) +file=(\S+)", r'\1 title="\2"', block)


def _place(path: Path) -> str | None:
    """Where the site has a file of the repository."""
    name = path.relative_to(ROOT).as_posix()
    return PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else None)
