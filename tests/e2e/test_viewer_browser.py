"""The viewer in a real browser: click, filter, keys, live update, themes, a telephone's width, hostile text."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="the viewer needs fastapi: pip install 'cothink[serve]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="drives a browser: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def row(k: int) -> dict:
    return {"stage": 1, "step": k, "time": float(k), "reward": k / 10, "accuracy": k / 20}


@pytest.fixture
def runs(tmp_path, made_run, made_episode):
    wrong = made_episode("t1", ("meta", HOSTILE), ("reasoning", r"\boxed{5}"), accuracy=0.0)
    wrong["turns"][0] |= {"pieces": ["<img", " src"], "logprobs": [-0.1, -4.0]}
    right = [made_episode(f"r{k}", ("meta", r"\boxed{3}"), ("reasoning", r"\boxed{4}")) for k in range(3)]
    for name, other in (("first", wrong), ("second", {**wrong, "accuracy": 1.0, "verdict": "right"})):
        episodes = {"01-rl/000002": [wrong, *right], "02-after/000000": [other, *right]}
        made_run(tmp_path / "runs" / name, metrics=[row(1), row(2)], episodes=episodes)
    return tmp_path / "runs"


@pytest.fixture
def address(runs):
    """The viewer on a free port, as `cothink view` serves it."""
    import uvicorn

    from cothink.report.app import app
    from cothink.stages.comparing import evaluated

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app(runs, evaluated), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def page(address):
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme="light")
        page = context.new_page()
        page.set_default_timeout(20_000)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        foreign: list[str] = []
        page.on("request", lambda r: None if r.url.startswith(address) else foreign.append(r.url))
        page.goto(address)
        yield page
        assert not complaints and not foreign
        assert page.title() == "cothink view"  # no text of a run was run
        browser.close()


def test_a_reader_goes_from_the_list_to_a_token(page, runs):
    page.wait_for_selector(".runs > li")
    assert page.locator(".runs b").all_inner_texts() in (["first", "second"], ["second", "first"])
    page.click(".runs > li:has-text('first')")
    page.wait_for_selector("#curves svg")
    assert page.locator("#curves svg").count() == 2

    with (runs / "first" / "metrics.jsonl").open("a") as file:  # the run trains on while it is looked at
        file.write(json.dumps(row(7)) + "\n")
    page.wait_for_selector('#curves svg[data-frame^="1 7 "]')
    page.hover("#curves svg >> nth=0")
    assert "reward: " in page.inner_text("#tip")

    page.keyboard.press("2")
    page.wait_for_selector("#episodes > li >> nth=3")
    page.select_option("select[name=verdict]", "wrong")
    sync_api.expect(page.locator("#episodes > li")).to_have_count(1)
    page.keyboard.press("Escape")
    page.select_option("select[name=verdict]", "")
    page.select_option("select[name=flip]", "fixed")
    sync_api.expect(page.locator("#episodes > li")).to_have_count(3)
    page.select_option("select[name=flip]", "")
    sync_api.expect(page.locator("#episodes > li")).to_have_count(4)
    page.evaluate("document.activeElement.blur()")

    page.keyboard.press("j")
    page.wait_for_selector(".reading .episode.chat")
    assert "<img src=x" in page.inner_text(".reading .turn >> nth=0")
    page.click(".reading summary:has-text('2 tokens')")
    assert page.locator(".tokens .p4").get_attribute("title").startswith("log-prob -4.000, p 0.018")
    page.keyboard.press("t")
    page.wait_for_selector(".reading .episode.tree")
    page.keyboard.press("j")
    page.wait_for_selector(".reading :text('question r0')")
    page.keyboard.press("/")
    page.keyboard.type("r2")
    sync_api.expect(page.locator("#episodes > li")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.click("#keys button")
    page.keyboard.press("u")
    page.wait_for_selector(".runs > li")


def test_two_runs_are_read_side_by_side(page):
    page.wait_for_selector(".runs > li >> nth=1")
    for box in page.locator(".runs input").all():
        box.check()
    page.click("#compare")
    page.wait_for_selector("#pairs > li")
    assert page.locator("#pairs > li").count() == 1 and page.locator("#curves svg").count() == 2
    page.click("#pairs > li")
    page.wait_for_selector(".both .episode >> nth=1")
    assert page.locator(".both .episode header .badge.right").count() == 1


def test_a_viewer_that_is_gone_is_told(page):
    page.wait_for_selector(".runs > li")
    assert not page.locator("#lost").is_visible()
    page.route("**/api/runs*", lambda route: route.abort())
    page.wait_for_selector("#lost", state="visible")
    page.unroute("**/api/runs*")
    page.wait_for_selector("#lost", state="hidden")


def test_themes_and_a_telephone(page):
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    page.keyboard.press("d")
    assert page.evaluate(paper) == "rgb(20, 23, 27)"
    page.reload()
    assert page.evaluate(paper) == "rgb(20, 23, 27)"  # the choice is kept
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_selector(".runs > li")
    names = page.locator(".runs b").all_inner_texts()
    for tab in ("curves", "episodes", "evaluations", "about"):
        page.goto(page.url.partition("#")[0] + f"#run={names[0]}&tab={tab}")
        page.wait_for_selector(".tabs ~ *")
        time.sleep(0.2)
        assert page.evaluate("document.documentElement.scrollWidth") == 390, tab
    page.goto(page.url.partition("#")[0] + f"#run={names[0]}&tab=episodes")
    page.click("#episodes > li >> nth=1")
    page.wait_for_selector(".reading .episode")
    assert not page.locator("#episodes").is_visible()  # one thing at a time
    page.click("#back")
    assert page.locator("#episodes").is_visible()


def test_the_report_opens_from_disk_and_stays_within_a_telephone(page, runs, tmp_path):
    from cothink import api

    path, _ = api.report([runs / "first", runs / "second"], out=tmp_path / "report.html")
    other = page.context.new_page()
    other.set_viewport_size({"width": 390, "height": 800})
    asked: list[str] = []
    other.on("request", lambda r: asked.append(r.url))
    other.goto(path.as_uri())
    assert asked == [path.as_uri()] and "owned" not in other.title()
    assert other.evaluate("document.documentElement.scrollWidth") == 390
    assert other.locator("svg.plot").count() == 2
    other.close()
