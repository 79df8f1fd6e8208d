"""The page as a person uses it, in headless Chromium: a trained run, a video made, stopped and made again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from longtake.contracts import ClipFault
from longtake.data.loading.quarantine import append_quarantine
from longtake.data.tables.rows import open_rows
from longtake.train.folder import QUARANTINE_FILE
from tests.generate.runs import make_run

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; apt-get install chromium")]
MOST_MS = 120_000  # for what a loaded machine does


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    run = make_run(folder).folder
    shutil.copytree(run, run.with_name("other"))
    append_quarantine(run / QUARANTINE_FILE, [ClipFault("gone.mp4", 3, 0, "its file ends too early")])
    return folder


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "longtake", "ui", str(root), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().removeprefix("open ").strip()
    server.send_signal(signal.SIGINT)
    server.wait(30)


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: sync_api.Browser, address: str) -> Iterator[sync_api.Page]:
    """The open page; at the end nothing was asked of any other server, and no script has failed."""
    page = browser.new_page(viewport={"width": 1200, "height": 1000})
    page.set_default_timeout(MOST_MS)
    asked, failed = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#prompt textarea")
    yield page
    page.close()
    assert {url for url in asked if not url.startswith((address, "data:", "blob:"))} == set()
    assert failed == []


def test_a_video_is_made_shown_with_its_settings_and_made_again_by_its_command(
    page: sync_api.Page, root: Path, tmp_path: Path
) -> None:
    page.fill("#prompt textarea", "a red circle <moves> left")
    page.fill("#seed textarea, #seed input", "11")
    sync_api.expect(page.locator("#needs")).to_contain_text("32px 1:1, 8 frames", timeout=MOST_MS)
    page.click("#make")
    page.wait_for_selector("#made video")
    page.click("#made summary")
    shown = page.inner_text("#made")
    assert "a red circle <moves> left" in shown
    command = re.search(r"longtake generate .*", shown)
    assert command is not None
    assert "--seed 11" in command[0]
    (made,) = (root / "ui" / "videos").rglob("*.mp4")
    job = json.loads((root / "ui" / "queue" / "0001" / "job.json").read_text())
    again = [str(tmp_path) if word == job["about"]["folder"] else word for word in job["words"]]
    subprocess.run([sys.executable, "-m", "longtake", *again], check=True, capture_output=True)
    (second,) = tmp_path.rglob("*.mp4")
    assert second.read_bytes() == made.read_bytes()


def test_what_is_wrong_is_said_before_the_click_and_a_generation_can_be_stopped(
    page: sync_api.Page, root: Path
) -> None:
    page.fill("#prompt textarea", "a blue square")
    page.fill("#resolution textarea, #resolution input", "tiny")
    sync_api.expect(page.locator("#needs .bad")).to_contain_text("tiny", timeout=MOST_MS)
    page.fill("#resolution textarea, #resolution input", "32px")
    page.get_by_role("button", name="First frame and LoRA").click()
    page.set_input_files("#image input[type=file]", root / "clips" / "clips" / "still_00000.png")
    sync_api.expect(page.locator("#needs .bad")).to_contain_text("cond_embed", timeout=MOST_MS)
    first = page.locator("#ref textarea, #ref input")
    assert Path(first.input_value()).is_relative_to(root / "ui" / "uploads")
    page.locator("#image").get_by_label("Clear").click()
    sync_api.expect(first).to_have_value("", timeout=MOST_MS)
    page.fill("#steps textarea", "900")
    sync_api.expect(page.locator("#needs")).to_contain_text("900 steps", timeout=MOST_MS)
    page.click("#make")
    sync_api.expect(page.locator("#now .state")).to_have_text("running", timeout=MOST_MS)
    page.click("#cancel")
    sync_api.expect(page.locator("#now .state")).to_have_text("stopped", timeout=MOST_MS)
    chosen(page, "#model", root / "outputs" / "other")
    sync_api.expect(page.locator("#steps textarea")).to_have_value("3", timeout=MOST_MS)
    page.get_by_label("An earlier generation").first.click()
    page.get_by_role("option", name="a blue square").first.click()
    page.get_by_role("button", name="Take its settings").click()
    sync_api.expect(page.locator("#steps textarea")).to_have_value("900", timeout=MOST_MS)
    page.wait_for_timeout(3000)  # in which a model that is another would bring its own
    assert page.input_value("#steps textarea") == "900"


def chosen(page: sync_api.Page, field: str, value: object) -> None:
    page.fill(f"{field} input", str(value))
    page.press(f"{field} input", "Enter")


def test_a_run_goes_on_by_the_queue_with_its_curves_and_beside_another(page: sync_api.Page, root: Path) -> None:
    page.get_by_role("tab", name="Runs").click()
    chosen(page, "#run", root / "outputs" / "run")
    sync_api.expect(page.locator("#curves .tiles")).to_contain_text("steps of 3")
    page.fill("#up_to textarea", "3")
    page.click("#go_on")
    sync_api.expect(page.locator("body")).to_contain_text("give a whole number above 3", timeout=MOST_MS)
    page.fill("#up_to textarea", "5")
    page.click("#go_on")
    sync_api.expect(page.locator("#queue")).to_contain_text("--max-steps 5", timeout=MOST_MS)
    sync_api.expect(page.locator("#curves .tiles")).to_contain_text("5steps of 5", timeout=MOST_MS)
    chosen(page, "#other", root / "outputs" / "other")
    page.click("#compare")
    frame = page.frame_locator("#run_page iframe")
    sync_api.expect(frame.locator("body")).to_contain_text("At equal steps", timeout=MOST_MS)
    page.click("#ask_stop")
    sync_api.expect(page.locator("body")).to_contain_text("no run is training there", timeout=MOST_MS)


def test_captions_are_mended_and_what_could_not_be_read_has_its_reason(page: sync_api.Page, root: Path) -> None:
    table = root / "clips" / "clips.parquet"
    page.get_by_role("tab", name="Data").click()
    sync_api.expect(page.locator("#lost")).to_contain_text("its file ends too early", timeout=MOST_MS)
    chosen(page, "#table", table)
    chosen(page, "#bucket_run", root / "outputs" / "run")
    page.click("#report")
    frame = page.frame_locator("#data_page iframe")
    sync_api.expect(frame.locator("body")).to_contain_text("32px", timeout=MOST_MS)
    page.click("#next")
    sync_api.expect(page.locator("#clips_said")).to_contain_text("7 to 12 of 20", timeout=MOST_MS)
    box = page.locator(".caption textarea").nth(1)
    box.fill("a shape that somebody has looked at")
    page.click("#next")
    sync_api.expect(page.locator("body")).to_contain_text("1 caption not saved", timeout=MOST_MS)
    page.click("#save")
    sync_api.expect(page.locator("body")).to_contain_text("1 of 20 captions changed", timeout=MOST_MS)
    columns, _ = open_rows(table).whole()
    assert columns.column("text").to_pylist()[7] == "a shape that somebody has looked at"


def test_adapters_are_trained_on_a_folder_of_clips_once_their_plan_was_seen(page: sync_api.Page, root: Path) -> None:
    page.get_by_role("tab", name="LoRA").click()
    chosen(page, "#base", root / "outputs" / "other")
    page.fill("#clips textarea, #clips input", str(root / "clips"))
    page.fill("#trigger textarea, #trigger input", "sks")
    page.fill("#lora_name textarea, #lora_name input", "mine")
    page.fill("#lora_steps textarea", "2")
    page.fill("#rank textarea", "-1")
    page.click("#plan")  # there is none, so nothing may be queued
    sync_api.expect(page.locator("#plan_page")).to_contain_text("must be greater than 0", timeout=MOST_MS)
    page.click("#train")
    sync_api.expect(page.locator("body")).to_contain_text("press Show the plan again", timeout=MOST_MS)
    page.fill("#rank textarea", "2")
    page.click("#plan")
    frame = page.frame_locator("#plan_page iframe")
    sync_api.expect(frame.locator("body")).to_contain_text("Memory and time", timeout=MOST_MS)
    page.click("#train")
    sync_api.expect(page.locator("body")).to_contain_text("on the queue, see the tab", timeout=MOST_MS)
    page.click("#train")
    sync_api.expect(page.locator("body")).to_contain_text(
        re.compile("name mine: (a command|there is)"), timeout=MOST_MS
    )
    page.get_by_role("tab", name="Runs").click()
    state = page.locator("#queue tr", has_text="exp-name mine").locator(".state")
    sync_api.expect(state).to_have_text("done", timeout=MOST_MS)
    assert "sks, " in (root / "mine" / "config.py").read_text()


def test_files_outside_of_the_roots_are_not_served(address: str, root: Path) -> None:
    outside = root.parent / "outside.png"
    outside.write_bytes(b"\x89PNG")
    (root / "link.png").symlink_to(outside)
    inside = root / "inside.png"
    inside.write_bytes(b"\x89PNG")
    assert urllib.request.urlopen(f"{address}media?path={inside}").read() == b"\x89PNG"
    for place in ("media?path={}", "page?path={}", "gradio_api/file={}"):
        for path in (outside, root / "link.png", "/etc/passwd", os.path.abspath("pyproject.toml")):
            with pytest.raises(urllib.error.HTTPError, match=r"40[34]"):
                urllib.request.urlopen(address + place.format(path))
