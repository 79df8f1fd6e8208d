"""What the page lets in and out: paths inside the roots, the token, this machine's own name, words of a command."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from longtake.config.load import resolve
from longtake.config.section import Section
from longtake.contracts import UserError
from longtake.ui import gate, server
from longtake.ui.data import Clips
from longtake.ui.generate import FIELDS, flag, looked_at, words_of
from longtake.ui.roots import MalformedPath, Roots

TOKEN = "a token+of/enough=length;"


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    for name in ("one", "two", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "clip.mp4").write_bytes(b"")
    (tmp_path / "two" / "only_here.mp4").write_bytes(b"")
    (tmp_path / "one" / "link").symlink_to(tmp_path / "outside")
    return Roots.of([tmp_path / "one", tmp_path / "two"])


def test_paths_inside_the_roots_are_found(roots: Roots, tmp_path: Path) -> None:
    assert roots.path("clip.mp4") == tmp_path / "one" / "clip.mp4"
    assert roots.path("only_here.mp4") == tmp_path / "two" / "only_here.mp4"
    assert roots.path(str(tmp_path / "two")) == tmp_path / "two"


def test_adapters_are_offered_as_no_model(roots: Roots, tmp_path: Path) -> None:
    for name in ("model", "adapter_model"):
        (tmp_path / "one" / f"{name}.safetensors").write_bytes(b"")
    assert roots.models() == [str(tmp_path / "one" / "model.safetensors")]


def test_roots_nothing_chosen_or_nothing_found_names_what_to_choose(roots: Roots, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^Choose a table or a folder first$"):
        roots.path("", "table")
    with pytest.raises(UserError, match=r'^No folder or table "clips" in .*; .* absolute path$'):
        roots.path("clips", "clips")


def test_roots_are_found_as_they_were_typed_and_those_with_clips_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/run/validation", "outputs/clips.v1", "clips/sub"):
        Path(name).mkdir(parents=True)
    Path("outputs/run/config.py").write_text("")
    for name in ("outputs/run/validation/a.mp4", "clips/sub/b.MP4"):
        Path(name).write_bytes(b"")
    roots = Roots.of([Path("outputs"), Path("clips")])
    assert Clips(roots).tables()[0] == ("clips", str(tmp_path / "clips"))
    assert roots.clip_folders() == [tmp_path / "clips"]
    for text in ("clips", "./clips/", "clips/sub/..", str(tmp_path / "clips")):
        assert roots.path(text) == tmp_path / "clips"
    assert roots.path("clips/sub") == roots.path("sub") == tmp_path / "clips" / "sub"
    assert roots.path("outputs/run") == roots.path("run") == tmp_path / "outputs" / "run"
    with pytest.raises(UserError):
        roots.path("clips/../elsewhere")
    assert Roots.of([tmp_path / "clips" / "sub"]).clip_folders() == [tmp_path / "clips" / "sub"]


@pytest.mark.parametrize("text", ["../outside/clip.mp4", "link/clip.mp4", "/etc/passwd", "{}/outside", "../one2"])
def test_paths_outside_are_refused_links_followed(roots: Roots, tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="outside of what this page may see"):
        roots.path(text.format(tmp_path))
    assert server._served(roots, text.format(tmp_path), (".mp4",), str, lambda said, code: code) == 404


def test_files_that_a_prompt_names_are_inside_too(roots: Roots, tmp_path: Path) -> None:
    prompt = f'a day {{"reference_path": "{tmp_path}/outside/clip.mp4", "mask_strategy": "0"}}'
    with pytest.raises(UserError, match="outside of what this page may see"):
        looked_at(["generate", "opensora_v1_2/240p", "--prompt", prompt], roots, [])


def test_of_uploads_only_pictures_are_taken(roots: Roots) -> None:
    roots.uploads.mkdir(parents=True)
    for name in ("start.png", "run.py", "clips.csv"):
        (roots.uploads / name).write_bytes(b"")
    assert roots.path("ui/uploads/start.png") == roots.uploads / "start.png"
    for name in ("run.py", "clips.csv", ""):
        with pytest.raises(UserError, match="is an upload"):
            roots.path(f"ui/uploads/{name}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("../outside/clip.mp4 0.5", "outside of what this page may see"),
        ("gone.safetensors 0.5", 'No LoRA file "gone.safetensors"'),
        ("clip.mp4", "write clip.mp4 0.5"),
        ("clip.mp4 nan", "write clip.mp4 0.5"),
    ],
)
def test_a_line_of_adapters_is_refused_for_what_is_wrong_with_it(roots: Roots, line: str, words: str) -> None:
    form = dict.fromkeys(FIELDS) | {"model": "opensora_v2/256px", "prompt": "a day", "lora_more": line}
    with pytest.raises(UserError, match=words):
        words_of(form, roots, roots.own)


def test_what_is_written_for_a_number_is_left_to_the_command(roots: Roots) -> None:
    form = dict.fromkeys(FIELDS) | {"model": "opensora_v2/256px", "prompt": "a day", "num_frames": " "}
    for name, flags in (
        ("guidance", ["--guidance", "0"]),
        ("num_sample", ["--num-sample", "0"]),
        ("seed", ["--seed", "0"]),
    ):
        assert words_of({**form, name: "0"}, roots, Path("to"))[4:] == [*flags, "--save-dir", "to"]


def asked(token: str | None, loopback: bool, path: str = "/", **headers: str) -> tuple[int, dict[str, str]]:
    """The status and headers that a request gets; 200 where the page behind the gate is reached."""
    sent: list[dict] = []

    async def page(scope: dict, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def keep(message: dict) -> None:
        sent.append(message)

    path, _, query = path.partition("?")
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "query_string": query.encode(), "headers": pairs}
    asyncio.run(gate.Gate(page, token, loopback)(scope, None, keep))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_only_who_has_the_token_gets_in() -> None:
    assert gate.token_for("127.0.0.1", None) is None
    assert len(gate.token_for("0.0.0.0", None) or "") >= 32
    with pytest.raises(UserError, match="--token: has 5 characters"):
        gate.token_for("0.0.0.0", "short")
    assert asked(TOKEN, False, host="there:7860")[0] == 401
    assert (
        asked(TOKEN, False, "/gradio_api/queue/join", host="there", cookie=f"{gate.cookie_name(TOKEN)}=wrong")[0] == 401
    )
    assert asked(TOKEN, False, "/?token=wrong", host="there")[0] == 401
    status, headers = asked(TOKEN, False, f"/?token={quote(TOKEN)}", host="there")
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly; SameSite=Strict" in headers["set-cookie"]
    cookie = headers["set-cookie"].split(";")[0]
    assert asked(TOKEN, False, host="there", cookie=f'of another page={{"a": 1}}; {cookie}')[0] == 200
    status, headers = asked(TOKEN, False, host="there", cookie=cookie)
    assert status == 200
    assert "default-src 'self'" in headers["content-security-policy"]


@contextmanager
def served(token: str) -> Iterator[str]:
    """The address of a page behind a gate, on a port of its own."""
    uvicorn = pytest.importorskip("uvicorn")

    async def page(scope: dict, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": token.encode()})

    place = server._listen("127.0.0.1", 0)
    running = uvicorn.Server(uvicorn.Config(gate.Gate(page, token, True), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [place]})
    thread.start()
    try:
        yield f"http://localhost:{place.getsockname()[1]}/"
    finally:
        running.should_exit = True
        thread.join()


def test_a_browser_stays_in_two_pages_of_one_host() -> None:
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())  # a cookie goes to all ports of a host
    tokens = [f"{name} {TOKEN}" for name in ("one", "two")]
    with served(tokens[0]) as one, served(tokens[1]) as two:
        for address, token in zip((one, two), tokens, strict=True):
            assert browser.open(f"{address}?token={quote(token)}").read().decode() == token
        assert [browser.open(address).read().decode() for address in (one, two)] == tokens
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(one)


def test_pages_of_elsewhere_cannot_use_a_browser_to_get_in() -> None:
    assert asked(None, True, host="localhost:7860")[0] == 200
    assert asked(None, True, host="[::1]:7860", origin="http://[::1]:7860")[0] == 200
    assert asked(None, True, host="elsewhere.example:7860")[0] == 403
    assert asked(None, True, host="127.0.0.1:7860", origin="http://elsewhere.example")[0] == 403


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "[::1"}, {"host": "]"}, {"host": "localhost:x"}, {"host": "[::1]x:1"}, {"host": "a@localhost"},
        {"host": "localhost", "origin": "http://[::1"}, {"host": "localhost", "x-forwarded-host": "[::1"},
    ],
)  # fmt: skip
def test_gate_malformed_headers_are_answered_400(token: str | None, headers: dict[str, str]) -> None:
    assert asked(token, token is None, **headers)[0] == 400


def test_gate_names_too_long_for_a_file_are_answered_400(roots: Roots) -> None:
    assert asked(None, True, f"/static/{'a' * 256}", host="localhost")[0] == 400
    assert asked(None, True, f"/static/{'a' * 255}", host="localhost")[0] == 200
    for text in ("a" * 256, "é" * 128, "a/" * 3000, "a\0b", "\ud83d", ""):
        assert server._served(roots, text, (".mp4",), str, lambda message, code: code) == 400


@pytest.mark.parametrize("text", ["a" * 300, 7, ["x"], {"a": 1}, True, "\ud83d"])
def test_roots_values_that_are_no_path_are_one_sentence_without_a_folder(roots: Roots, text: object) -> None:
    for find in (roots.path, roots.model):
        with pytest.raises(MalformedPath) as caught:
            find(text)  # type: ignore[arg-type]
        assert "/" not in str(caught.value)


def test_gate_errors_of_the_api_are_answered_400_and_others_stay() -> None:
    async def failing(scope: dict, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        raise AttributeError("'int' object has no attribute 'strip'")

    statuses = []

    async def keep(message: dict) -> None:
        statuses.append(message.get("status"))

    scope = {"type": "http", "query_string": b"", "headers": [(b"host", b"localhost")]}
    asyncio.run(gate.Gate(failing, None, True)({**scope, "path": "/gradio_api/run/ask"}, None, keep))
    with pytest.raises(AttributeError):
        asyncio.run(gate.Gate(failing, None, True)({**scope, "path": "/page"}, None, keep))
    assert statuses == [400, None, 500, None]


def test_gate_token_in_any_path_leads_back_into_the_page() -> None:
    for path, location in (("//elsewhere.example/", "/elsewhere.example/"), ("/€", "/%E2%82%AC")):
        status, headers = asked(TOKEN, False, f"{path}?token={quote(TOKEN)}", host="there")
        assert (status, headers["location"]) == (303, location)


class Asked(Section):
    prompt: str | list[str] | None
    save_dir: str = "samples"


@pytest.mark.parametrize("text", ["--save-dir=/etc", "-x", "[1, 2]", "'a'", "none", " a ", 'a "b" c', "a\nb", "12"])
def test_a_prompt_is_never_another_flag(text: str) -> None:
    assert resolve({}, flag("prompt", text), Asked).value == Asked(prompt=text)


def test_without_gradio_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(UserError, match=r"gradio is not installed; pip install '\.\[ui\]'"):
        server.serve([tmp_path])
    assert not list(tmp_path.iterdir())
