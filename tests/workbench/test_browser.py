"""The dashboard in a real browser: started as a user starts it, looked at, clicked, and never talking to the outside."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect, sync_playwright

from analyses.catalogue import ANALYSES
from analyses.passage import PASSAGE
from models import checkpoint, corpus
from models.config import GPTConfig
from models.vocabulary import Vocabulary

ARGUMENTS = ("--no-sandbox", "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 120
PICTURE = '[data-testid="stVegaLiteChart"] svg'
ANYTHING = f'{PICTURE}, [data-testid="stDataFrame"] canvas'


def _lack(reason: str) -> Any:
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def _executable(playwright: Any) -> str:
    """An installed Chromium: the one named by CHROMIUM, one on the path, or Playwright's own."""
    found = (
        os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
    )
    if not Path(found).exists():
        _lack("needs Chromium: install it, or name it in CHROMIUM, or run `playwright install chromium`")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser's profile that reaches this machine only."""
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=_executable(playwright), args=list(ARGUMENTS))
        context = launched.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
        context.set_default_timeout(SECONDS * 1000)
        context.route(re.compile(r"^https?://(?!127\.0\.0\.1[:/])"), lambda route: route.abort())
        yield context
        launched.close()


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory, random_weights: Any) -> str:
    """The shipped checkpoint, or a random one of the same kind where there is none."""
    if "baby" in checkpoint.available():
        return "baby"
    characters = Vocabulary.of("\n ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz:")
    config = GPTConfig(d_vocab=len(characters), n_ctx=40, d_model=16, n_layers=2, n_heads=2)
    return str(checkpoint.save(tmp_path_factory.mktemp("checkpoints") / "random", random_weights(config), characters))


@pytest.fixture(scope="module")
def address(name: str, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard started by `workbench app` on a free port of this machine; its corpus is the built-in passage."""
    folder = tmp_path_factory.mktemp("home")
    text = folder / "passage.txt"
    text.write_text(PASSAGE, encoding="utf-8")
    environment = os.environ | {corpus.VARIABLE: str(text), "XDG_CACHE_HOME": str(folder), "LOCALAPPDATA": str(folder)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from workbench.cli import main; main()", "app", "--no-browser"]
    command += ["--port", str(port), "--checkpoint", name]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        command, cwd=root, env=environment | {"PYTHONPATH": str(root)}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait_for(f"http://127.0.0.1:{port}/_stcore/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _wait_for(url: str, process: subprocess.Popen) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"the dashboard stopped with exit code {process.returncode}"
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the dashboard did not answer within {SECONDS:.0f} seconds")


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A browser tab; the test fails if it asked for anything outside this machine, or a script broke."""
    page, outside, broken = browser.new_page(), [], []

    def seen(url: str) -> None:
        if urllib.parse.urlsplit(url).hostname not in (None, "127.0.0.1"):
            outside.append(url)

    page.on("request", lambda request: seen(request.url))
    page.on("websocket", lambda connection: seen(connection.url))
    page.on("pageerror", lambda error: broken.append(str(error)))
    yield page
    page.close()
    assert outside == []
    assert broken == []


def settled(tab: Any) -> None:
    """Wait until the page is there and nothing is being computed."""
    tab.wait_for_selector("h1")
    tab.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]')


def look(tab: Any, url: str) -> None:
    tab.goto(url)
    settled(tab)
    assert tab.locator('[data-testid="stException"]').count() == 0
    assert "Traceback" not in tab.inner_text("body")


def drawn(tab: Any) -> int:
    """The number of charts and tables, once every one of them is on the page."""
    tab.locator(ANYTHING).first.wait_for()
    tab.wait_for_function("[...document.querySelectorAll('[data-testid=stVegaLiteChart]')].every(e => e.querySelector('svg'))")
    return tab.locator(ANYTHING).count()


def text_box(tab: Any) -> Any:
    return tab.get_by_test_id("stSidebar").get_by_role("textbox", name="Text to read")


def heads(tab: Any) -> Any:
    return tab.locator('[data-testid="stVegaLiteChart"]').first.locator(".mark-rect path")


def test_home(tab: Any, address: str) -> None:
    look(tab, address)
    assert tab.locator("h1").inner_text() == "Look inside a tiny GPT"
    tab.get_by_role("tab", name="Self-check").click()
    tab.get_by_role("cell", name="number of parameters", exact=True).wait_for()
    assert tab.get_by_text("fails", exact=True).count() == 0


@pytest.mark.parametrize("slug", [analysis.slug for analysis in ANALYSES])
def test_every_page_draws(slug: str, tab: Any, address: str) -> None:
    look(tab, f"{address}/{slug}" + ("?method=zero" if slug == "ablation" else ""))
    assert drawn(tab) >= 1
    assert tab.locator('[data-testid="stAlertContentError"]').count() == 0
    wide = tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide[0] <= wide[1]


def test_a_click_on_a_head_chooses_it_on_every_page(tab: Any, address: str) -> None:
    look(tab, f"{address}/attention-patterns")
    tab.wait_for_url(re.compile("layer=0.*head=0"))
    drawn(tab)
    heads(tab).nth(1).click()
    tab.wait_for_url(re.compile("head=1"))
    settled(tab)
    expect(tab.locator('[data-testid="stVegaLiteChart"]').nth(1).get_by_text("The chosen head: L0H1")).to_have_count(1)
    tab.get_by_test_id("stTopNavSection").filter(has_text="Circuits").or_(tab.get_by_text("Circuits", exact=True)).first.click()
    tab.get_by_text("OV circuit", exact=True).locator("visible=true").last.click()
    tab.wait_for_url(re.compile("ov-circuit.*head=1"))
    settled(tab)
    expect(tab.get_by_text("The chosen head: L0H1")).to_have_count(1)


def test_an_address_restores_the_view(tab: Any, address: str) -> None:
    look(tab, f"{address}/attention-patterns?text=KING%0AKING&layer=1&head=1")
    expect(text_box(tab)).to_have_value("KING\nKING")
    expect(tab.get_by_text("The chosen head: L1H1")).to_have_count(1)
    drawn(tab)
    link = tab.url
    look(tab, link)
    expect(tab).to_have_url(link)
    expect(tab.get_by_text("The chosen head: L1H1")).to_have_count(1)


def test_a_wrong_address_is_a_sentence(tab: Any, address: str) -> None:
    look(tab, f"{address}/attention-patterns?text=K%C3%96NIG&layer=99&head=x")
    drawn(tab)
    told = tab.locator('[data-testid="stAlert"]').inner_text()
    assert "Changed to" in told
    assert "moved to" in told
    assert "not a whole number" in told
    expect(tab.locator(PICTURE)).to_have_count(4)


def test_a_wrong_text_stays_and_gives_a_sentence(tab: Any, address: str) -> None:
    look(tab, f"{address}/attention-patterns")
    text_box(tab).fill("KÖNIG")
    text_box(tab).press("Control+Enter")
    tab.locator('[data-testid="stAlertContentError"]').wait_for()
    assert "'Ö'" in tab.locator('[data-testid="stAlertContentError"]').inner_text()
    expect(text_box(tab)).to_have_value("KÖNIG")


def test_downloads_are_what_they_say(tab: Any, address: str) -> None:
    look(tab, f"{address}/attention-patterns")
    expect(tab.locator(PICTURE)).to_have_count(4)
    tab.locator('[data-testid="stPopover"]').get_by_role("button", name="Download").last.click()
    for label, magic in (("PNG", b"\x89PNG"), ("PDF", b"%PDF"), ("CSV", b"layer,head,query_position,"), ("NetCDF", b"\x89HDF")):
        with tab.expect_download() as download:
            tab.locator('[data-testid="stPopoverBody"]').get_by_role("button", name=label).click()
        assert Path(download.value.path()).read_bytes().startswith(magic)
        assert download.value.suggested_filename.startswith("attention-patterns-L0H0.")
