"""The report's page as a reader's browser has it: no error, no request, tables that sort, figures that are seen."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from records import SCRATCH, arms, finish, study

from spt.report import collect, figures, write
from spt.runs.folder import RunFolder

pytestmark = pytest.mark.browser

DESKTOP, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (binary and driver):
        reason = "chromium and chromedriver are not on the path (Debian: apt-get install chromium chromium-driver)"
        pytest.fail(reason, pytrace=False) if os.environ.get("CI") == "true" else pytest.skip(reason)
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"):
        options.add_argument(f"--{flag}")
    for flag in ("disable-background-networking", "disable-component-update", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield opened
    opened.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with everything in it: levels, seeds, learning curves, a failure, a name that wants to be a tag."""
    root = tmp_path_factory.mktemp("runs")
    rows = [{"factors": {"share": share}} for share in (0.2, 0.4)] + [{"task": "<script>alert(1)</script>"}]
    cells = [*arms(root, 0, "a", [0.70, 0.75, 0.80], [0.75, 0.79, 0.86])]
    cells += arms(root, 1, "b", [0.70, 0.75, 0.80], [0.85, 0.89, 0.96])
    cells += arms(root, 2, "c", [0.20, 0.25, 0.30], [0.15, 0.19, 0.26], task="<script>alert(1)</script>")
    for cell in cells:
        for name in filter(None, (cell["run"], cell["parent"])):
            for step in range(10, 101, 10):
                RunFolder(root, name).log("train", step, loss=2 - step / 100)
                RunFolder(root, name).log("val", step, loss=2 - step / 100, accuracy=step / 110)
    cells.append({"row": 0, "arm": "spt", "seed": 3, "run": "finetune-lost", "parent": None})
    cells.append(finish(root, "scratch", 3, 0.7, run="finetune-kept", own=SCRATCH) | {"row": 0})
    made = study(root, "compute", rows, cells, seeds=[0, 1, 2])
    write.write_report(collect.read_report([made]), made)
    return made


@pytest.fixture
def page(browser: Any, folder: Path) -> Any:
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what earlier tests left
    size(browser, DESKTOP)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    browser.get((folder / "report.html").as_uri())
    return browser


def size(browser: Any, width_height: tuple[int, int]) -> None:
    width, height = width_height
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )


def column(page: Any, table: str, number: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll(`${arguments[0]} tbody tr`)].map(r => r.cells[arguments[1]].innerText)"
    )
    return page.execute_script(script, table, number)


def test_nothing_is_complained_of_and_nothing_is_requested(page: Any, folder: Path) -> None:
    assert page.title and "scratch" in page.title
    assert page.get_log("browser") == []
    events = [json.loads(line["message"])["message"] for line in page.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert (folder / "report.html").as_uri() in asked
    assert {url for url in asked if not url.startswith("data:")} == {(folder / "report.html").as_uri()}


def test_the_page_itself_forbids_requests(page: Any) -> None:
    script = """
        const done = arguments[0];
        document.addEventListener("securitypolicyviolation", event => done(event.effectiveDirective));
        fetch("http://127.0.0.1:9/").catch(() => 0);
    """
    assert page.execute_async_script(script) == "connect-src"


def test_figures_are_there_and_say_what_they_show(page: Any, folder: Path) -> None:
    found = page.execute_script(
        "return [...document.querySelectorAll('figure svg')].map(s => [s.getBoundingClientRect().width,"
        " s.getBoundingClientRect().height, s.querySelector('title').textContent, s.querySelector('desc').textContent])"
    )
    drawn = figures.all_figures(collect.read_report([folder]))
    assert [title for _, _, title, _ in found] == [one.title for one in sorted(drawn, key=lambda d: order(d.name))]
    assert all(width > 200 and height > 80 and text for width, height, _, text in found)
    ids = page.execute_script("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def order(name: str) -> int:
    stems = ("forest", "levels", "seeds", "learning", "pretraining", "expected", "compute")
    return next(number for number, stem in enumerate(stems) if name.startswith(stem))


def test_tables_sort_by_number_and_by_word(page: Any) -> None:
    table = "#differences .table"
    heads = page.find_elements("css selector", f"{table} th button")
    names = [head.text for head in heads]
    delta = names.index("delta")
    before = column(page, table, delta)
    assert before == ["+5.00", "+15.00", "-5.00"]
    heads[delta].click()
    assert column(page, table, delta) == ["-5.00", "+5.00", "+15.00"]
    assert (
        page.execute_script("return document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "ascending"
    )
    heads[delta].click()
    assert column(page, table, delta) == ["+15.00", "+5.00", "-5.00"]
    heads[0].click()
    assert column(page, table, 0) == sorted(column(page, table, 0))
    assert len(page.find_elements("css selector", f"{table} th[aria-sort]")) == 1
    seeds = "#seeds .table"
    assert "" not in column(page, seeds, 0)  # every line stands by itself
    page.find_elements("css selector", f"{seeds} th button")[2].click()
    found = column(page, seeds, 2)
    assert found == sorted(found, key=float) and len(found) == 9


def test_it_fits_a_phone(page: Any) -> None:
    size(page, PHONE)
    wide, there = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert there == PHONE[0] and wide <= there
    widths = page.execute_script(
        "return [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width)"
    )
    assert all(300 < width <= PHONE[0] for width in widths)
    small = page.execute_script(
        "return Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height))"
    )
    assert small >= 7


def test_dark_mode_and_paper(page: Any) -> None:
    script = """
        const text = document.querySelector("figure svg text");
        return [getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(text).fill]
    """
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    light_look = page.execute_script(script)
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", **dark})
    assert page.execute_script(script) == ["rgb(20, 24, 29)", "rgb(230, 233, 238)"]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", **dark})
    assert page.execute_script(script) == light_look == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]


def test_names_stay_text(page: Any) -> None:
    assert "<script>alert(1)</script>" in page.find_element("css selector", ".lead").text
    assert len(page.find_elements("css selector", "script")) == 1


def test_failures_and_verdicts_are_read_first(page: Any) -> None:
    found = page.execute_script("return [...document.querySelectorAll('.lead .verdict, section')].map(e => e.id)")
    assert found[:4] == ["", "", "", ""] and "failures" not in found[:3]
    assert {"differences", "levels", "seeds", "training", "cost", "origin", "checklist"} <= set(found)
