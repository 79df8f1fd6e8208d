"""The pictures of docs/ui.md: `longtake ui` on folders of yours, driven in headless Chromium as a person would.

    python tools/ui_pictures.py outputs clips --into docs/images

The first folder holds a run `shapes` with validations (demo/shapes, 700 steps, validate_every = 350), the second its
clips with their table `clips.parquet`.
"""

from __future__ import annotations

import argparse
import io
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

MOST_MS = 300_000
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1200, "height": 900}


def kept(page: Page, path: Path, height: int | None = None) -> None:
    """A picture of the page down to `height`, in few colours: flat areas and letters lose nothing."""
    page.wait_for_timeout(1500)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    if height is not None:
        picture = picture.crop((0, 0, picture.width, min(height, picture.height)))
    picture.quantize(128).save(path, optimize=True)
    print(f"{path}: {picture.width} x {picture.height}, {path.stat().st_size / 1000:.0f} kB")


def draw(page: Page, clips: Path, into: Path) -> None:
    page.wait_for_selector("#prompt textarea")
    page.fill("#prompt textarea", "a green triangle moves right")
    page.fill("#seed input, #seed textarea", "7")
    page.wait_for_selector("#needs td")
    page.click("#make")
    page.wait_for_selector("#made video")
    page.wait_for_timeout(2000)
    kept(page, into / "ui_generate.png")
    page.set_viewport_size(PHONE)
    kept(page, into / "ui_phone.png", 1700)
    page.set_viewport_size(DESK)
    page.get_by_role("tab", name="Runs").click()
    page.click("#samples")
    page.wait_for_selector("#run_page iframe")
    kept(page, into / "ui_runs.png", 1900)
    page.get_by_role("tab", name="Data").click()
    for field, value in (("#table", clips / "clips.parquet"), ("#bucket_run", "shapes")):
        page.fill(f"{field} input", str(value))
        page.press(f"{field} input", "Enter")
    page.click("#report")
    page.wait_for_selector("#data_page iframe")
    page.click("#show")
    page.wait_for_selector(".clip video")
    kept(page, into / "ui_data.png")
    page.get_by_role("tab", name="LoRA").click()
    page.fill("#clips input, #clips textarea", str(clips))
    page.fill("#trigger input, #trigger textarea", "sks")
    page.fill("#lora_name input, #lora_name textarea", "my_lora")
    page.wait_for_timeout(1500)
    page.click("#plan")
    page.wait_for_selector("#plan_page .lt")
    kept(page, into / "ui_lora.png", 1500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=Path("docs/images"))
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    options = parser.parse_args()
    command = [sys.executable, "-m", "longtake", "ui", *map(str, options.roots), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = server.stdout.readline().removeprefix("open ").strip()
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport=DESK)
            page.set_default_timeout(MOST_MS)
            page.goto(address)
            draw(page, options.roots[-1].resolve(), options.into)
            browser.close()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


if __name__ == "__main__":
    main()
