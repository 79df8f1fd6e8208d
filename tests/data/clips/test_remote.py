from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from longtake.contracts import UserError
from longtake.data.clips import file_cache, servers
from longtake.data.clips.file_cache import FileCache
from longtake.data.clips.locations import file_name, is_url, join_location
from longtake.data.clips.video import ClipError, write_image, write_video
from longtake.data.loading.loader import SlotLoader
from longtake.data.probing.probe import probe_table
from longtake.data.tables.table import ClipTable
from tests import forks
from tests.data.made_clips import make_dataset, make_slot, noise_frames
from tests.data.servers import FileServer, file_server
from tests.train.runs import PATIENCE_SECONDS

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five clips, a still, and a table of them, probed on this machine."""
    folder = tmp_path_factory.mktemp("served")
    for number in range(5):
        write_video(folder / f"{number}.mp4", noise_frames(20, 24, 32, seed=number), 12)
    write_image(folder / "still ünï.png", noise_frames(1, 40, 24)[0])
    names = [*(f"{number}.mp4" for number in range(5)), "still ünï.png"]
    (folder / "list.csv").write_text("path,text\n" + "".join(f"{name},clip {name}\n" for name in names))
    probe_table(folder / "list.csv", folder / "clips.parquet")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[FileServer]:
    with file_server(folder) as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_cache, "_FIRST_PAUSE_SECONDS", 0.01)


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "cache", 10**9)


def kept(cache: FileCache) -> list[str]:
    """Names of the files in the cache's folders."""
    return sorted(path.name for path in cache.folder.glob("??/*"))


def read(cache: FileCache, url: str) -> bytes:
    with cache.local(url) as path:
        return Path(path).read_bytes()


@pytest.mark.parametrize(
    "location",
    ["s3://b/a.mp4", "https://h/a", "zip://a.mp4::s3://b/x.zip", "simplecache::s3://b/a", "file:///a.mp4"],
)
def test_a_url_names_a_protocol(location: str) -> None:
    assert is_url(location)


@pytest.mark.parametrize("location", ["a.mp4", "/data/a.mp4", "a:b.mp4", "what? a://b", ""])
def test_a_path_does_not(location: str) -> None:
    assert not is_url(location)


def test_relative_paths_start_from_a_folder_or_a_url() -> None:
    assert join_location(Path("/data"), "sub/a.mp4") == "/data/sub/a.mp4"
    assert join_location("s3://bucket/set/", "sub/a.mp4") == "s3://bucket/set/sub/a.mp4"
    assert join_location("s3://bucket/set", "/local/a.mp4") == "/local/a.mp4"
    assert join_location(Path("/data"), "https://host/a.mp4") == "https://host/a.mp4"
    assert join_location("https://host/set/", "a b#1?.mp4") == "https://host/set/a b%231%3F.mp4"
    assert join_location("https://host/set", "50%20.mp4") == "https://host/set/50%2520.mp4"
    assert join_location("s3://bucket/set", "a#b%20?.mp4") == "s3://bucket/set/a#b%20?.mp4"
    assert join_location("https://host/set", "https://host/a%20b.mp4") == "https://host/a%20b.mp4"
    assert file_name("https://host/a.png?key=1.mp4#x") == "/a.png"
    assert file_name("s3://bucket/what?.png") == "s3://bucket/what?.png"


def test_a_file_of_this_machine_is_read_where_it_lies(folder: Path, cache: FileCache) -> None:
    for location in (str(folder / "0.mp4"), f"file://{folder}/0.mp4"):
        with cache.local(location) as path:
            assert path == str(folder / "0.mp4")
    assert not cache.folder.exists()


def test_a_url_is_fetched_once_and_kept(server: FileServer, folder: Path, cache: FileCache) -> None:
    url, before = server.url("0.mp4?token=1"), server.asked["0.mp4"]
    for _ in range(3):
        assert read(cache, url) == (folder / "0.mp4").read_bytes()
    assert server.asked["0.mp4"] == before + 1
    assert [os.path.splitext(name)[1] for name in kept(cache)] == [".mp4"], "a decoder may look at the suffix"


@pytest.mark.parametrize("path", ["busy2/1.mp4", "torn2/1.mp4", "blind/1.mp4", "still%20%C3%BCn%C3%AF.png"])
def test_a_file_comes_whole_whatever_the_net_does(
    path: str, server: FileServer, folder: Path, cache: FileCache
) -> None:
    name = "still ünï.png" if path.endswith("png") else "1.mp4"
    assert read(cache, server.url(path)) == (folder / name).read_bytes()
    assert len(kept(cache)) == 1


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("absent.mp4", "cannot be fetched: no such file on the server"),
        ("closed/2.mp4", "cannot be fetched: the server answers 403 Forbidden"),
        ("busy99/2.mp4", "cannot be fetched: the server answers 503 Service Unavailable"),
        ("torn99/2.mp4", "cannot be fetched: .*"),
        ("short/2.mp4", r"cannot be fetched: \d+ of \d+ bytes came"),
    ],
)
def test_what_cannot_be_fetched_says_why_and_leaves_nothing(
    path: str, reason: str, server: FileServer, cache: FileCache
) -> None:
    with pytest.raises(ClipError, match=f"^{reason}$"):
        read(cache, server.url(path))
    assert kept(cache) == []


def test_a_server_that_is_not_there_is_said(cache: FileCache) -> None:
    with pytest.raises(ClipError, match=r"^cannot be fetched: .*[Cc]onnect"):
        read(cache, "http://127.0.0.1:9/a.mp4")


def test_a_server_that_is_not_there_is_asked_for_one_file_and_not_for_its_others(
    server: FileServer, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    original = file_cache.find_file
    monkeypatch.setattr(file_cache, "find_file", lambda url: asked.append(url) or original(url))
    for number in range(10):
        with pytest.raises(ClipError, match=r"^cannot be fetched: .*[Cc]onnect"):
            read(FileCache(cache.folder), f"http://127.0.0.1:9/{number}.mp4")  # another process's, for all it knows
    assert set(asked) == {"http://127.0.0.1:9/0.mp4"}
    assert read(cache, server.url("0.mp4?there")), "other servers are"


def test_a_server_that_comes_back_is_found_again(
    folder: Path, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file_server(folder) as server:
        urls = [server.url(f"{number}.mp4") for number in range(3)]
        port = server._server.server_port
    with pytest.raises(ClipError):
        read(cache, urls[0])
    [mark] = cache.folder.glob("*.absent")
    monkeypatch.setattr(file_cache, "_ABSENT_SECONDS", 0.0)
    with file_server(folder, port):
        assert read(cache, urls[1]) == (folder / "1.mp4").read_bytes()
    assert not mark.exists()


@pytest.mark.parametrize("url", ["foo://bucket/a.mp4", "foo::http://127.0.0.1/a.mp4"])
def test_an_unknown_protocol_is_not_the_clips_fault(url: str, cache: FileCache) -> None:
    with pytest.raises(UserError, match=r"foo:// is not a protocol that fsspec knows; write s3://"):
        read(cache, url)


def test_a_server_that_falls_silent_is_given_up(
    server: FileServer, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_SILENCE_SECONDS", 0.1)
    with pytest.raises(ClipError, match=r"^cannot be fetched: nothing came for 0.1 s$"):
        read(cache, server.url("silent/3.mp4"))
    assert kept(cache) == []
    monkeypatch.setattr(servers, "_SILENCE_SECONDS", 30)
    short = FileCache(cache.folder, cache.capacity_bytes, download_seconds=0.3)
    with pytest.raises(ClipError, match=r"^cannot be fetched: took longer than dataset.download_seconds$"):
        read(short, server.url("silent/3.mp4"))
    assert kept(cache) == []


class _Sleepy:
    """A file system whose first download sleeps until it is told to wake, and then writes all the same."""

    def __init__(self, content: bytes):
        self.content, self.calls, self.woken, self.done = content, 0, threading.Event(), threading.Event()

    def get_file(self, _: str, target: str) -> None:
        self.calls += 1
        if self.calls == 1:
            self.woken.wait(PATIENCE_SECONDS)
            Path(target).write_bytes(b"late")
            self.done.set()
        else:
            Path(target).write_bytes(self.content)


def test_a_download_that_was_given_up_and_wakes_up_late_spoils_nothing(
    cache: FileCache, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = _Sleepy(b"whole")
    with monkeypatch.context() as patched:
        patched.setattr(servers, "_SILENCE_SECONDS", 0.5)
        patched.setattr(file_cache, "find_file", lambda _: (system, "", 5))
        with cache.local("sleepy://a.mp4") as path:
            system.woken.set()
            assert system.done.wait(PATIENCE_SECONDS)
            assert Path(path).read_bytes() == b"whole"
    assert len(kept(cache)) == 2, "what came late lies under a name that nobody reads"
    read(FileCache(cache.folder, 100), server.url("0.mp4"))
    assert len(kept(cache)) == 1, "and is swept"


def test_a_missing_package_is_not_the_clips_fault(cache: FileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(
        UserError, match=r"^s3://b/a.mp4: needs a package .*; pip install '\.\[remote\]' in Longtake's folder$"
    ):
        read(cache, "s3://b/a.mp4")


def test_fsspec_is_imported_only_for_urls(folder: Path) -> None:
    lines = (
        "import sys",
        "from longtake.data.tables.table import ClipTable; from longtake.data.clips.file_cache import FileCache",
        "from longtake.data.probing.probe import probe_table",
        f"ClipTable.open({str(folder / 'clips.parquet')!r}).location(0)",
        f"with FileCache({str(folder / 'cache')!r}).local({str(folder / '0.mp4')!r}): pass",
        "assert not {'fsspec', 's3fs', 'aiohttp'} & sys.modules.keys()",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_a_cache_that_cannot_be_written_is_not_the_clips_fault(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^dataset.cache_dir = .*; name a folder that can be written"):
        read(FileCache(tmp_path / "file", 10**9), server.url("0.mp4"))


def sizes(folder: Path) -> list[int]:
    return [(folder / f"{number}.mp4").stat().st_size for number in range(5)]


def test_the_cache_gives_up_what_was_not_used_for_the_longest_time(
    server: FileServer, folder: Path, tmp_path: Path
) -> None:
    cache = FileCache(tmp_path / "cache", int(3.5 * max(sizes(folder))))
    urls = [server.url(f"{number}.mp4?lru") for number in range(5)]
    for url in urls[:3]:
        read(cache, url)
        time.sleep(0.02)
    read(cache, urls[0])  # used: 1 is now the oldest
    read(cache, urls[3])
    assert len(kept(cache)) == 3
    before = server.asked.copy()
    for place in (0, 2, 3):
        read(cache, urls[place])
    assert server.asked == before, "these were kept"
    read(cache, urls[1])
    assert server.asked["1.mp4"] == before["1.mp4"] + 1
    total = sum(path.stat().st_size for path in cache.folder.glob("??/*"))
    assert total <= cache.capacity_bytes
    assert total <= int((cache.folder / "used").read_text()) <= cache.capacity_bytes


def test_a_file_in_use_is_not_deleted_and_one_larger_than_the_cache_is_read(
    server: FileServer, folder: Path, tmp_path: Path
) -> None:
    cache = FileCache(tmp_path / "cache", 100)
    with cache.local(server.url("0.mp4")) as first:
        for number in (1, 2):
            assert read(cache, server.url(f"{number}.mp4")) == (folder / f"{number}.mp4").read_bytes()
        assert Path(first).read_bytes() == (folder / "0.mp4").read_bytes()
    read(cache, server.url("3.mp4"))
    assert len(kept(cache)) == 1, "those that nobody reads are gone"


def test_files_that_are_not_the_caches_stay(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    mine = [tmp_path / "notes.txt", tmp_path / "ab" / "holiday.mp4"]
    for path in mine:
        path.write_text("precious")
    cache = FileCache(tmp_path, 100)
    for number in range(3):
        read(cache, server.url(f"{number}.mp4"))
    assert all(path.exists() for path in mine)


def test_what_a_killed_download_left_is_swept_and_a_living_one_is_not(server: FileServer, tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 100)
    (tmp_path / "ab").mkdir()
    dead, living = (tmp_path / "ab" / f"{letter * 32}.mp4.500.partial" for letter in "ab")
    for path in (dead, living):
        path.write_bytes(b"half")
    with open(living, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        read(cache, server.url("0.mp4"))
        assert not dead.exists()
        assert living.exists()


def test_readers_at_the_same_time_share_one_download(server: FileServer, folder: Path, cache: FileCache) -> None:
    url, before = server.url("4.mp4?shared"), server.asked["4.mp4"]
    with ThreadPoolExecutor(8) as pool:
        contents = list(pool.map(lambda _: read(cache, url), range(16)))
    assert set(contents) == {(folder / "4.mp4").read_bytes()}
    assert server.asked["4.mp4"] == before + 1


def _read_at_random(cache: FileCache, urls: list[str], expected: list[bytes], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(25):
        place = int(torch.randint(len(urls), (), generator=generator))
        assert read(cache, urls[place]) == expected[place]


def test_processes_that_push_each_others_files_out_all_read_what_they_want(
    server: FileServer, folder: Path, tmp_path: Path
) -> None:
    cache = FileCache(tmp_path / "cache", int(2.2 * max(sizes(folder))))
    urls = [server.url(f"{number}.mp4?raced") for number in range(5)]
    expected = [(folder / f"{number}.mp4").read_bytes() for number in range(5)]
    forks.serve()
    context = multiprocessing.get_context("forkserver")
    other = context.Process(target=_read_at_random, args=(cache, urls, expected, 1))
    other.start()
    while other.is_alive():
        _read_at_random(cache, urls, expected, 2)
    assert other.exitcode == 0
    assert sum(path.stat().st_size for path in cache.folder.glob("??/*")) <= cache.capacity_bytes
    assert not list(cache.folder.glob("??/*.partial"))


def same_batches(remote_table: ClipTable, local_table: ClipTable, num_workers: int = 0, **settings: object) -> None:
    """The two tables give the same pixels and captions, row for row."""
    slots = [make_slot(local_table, rows) for rows in ([0, 1], [2, 3], [4, 0])]
    slots.append(make_slot(local_table, [5], (1, 16, 16)))
    expected = [make_dataset(local_table)[slot] for slot in slots]
    loader = SlotLoader(make_dataset(remote_table, **settings), num_workers)
    try:
        batches = list(loader.fetch(iter(slots)))
    finally:
        loader.close()
    for batch, other in zip(batches, expected, strict=True):
        assert batch.faults == ()
        assert torch.equal(batch.video, other.video)
        assert batch.text == other.text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_table_of_urls_is_probed_and_loaded_like_files(
    num_workers: int, server: FileServer, folder: Path, tmp_path: Path
) -> None:
    names = [*(f"{number}.mp4" for number in range(5)), "still ünï.png"]
    rows = "".join(f"{server.url(name)},clip {name}\n" for name in names)
    (tmp_path / "list.csv").write_text("path,text\n" + rows)
    result = probe_table(tmp_path / "list.csv", tmp_path / "clips.parquet", cache=FileCache(tmp_path / "cache"))
    assert (result.kept, result.bad) == (6, 0)
    table, local = ClipTable.open(tmp_path / "clips.parquet"), ClipTable.open(folder / "clips.parquet")
    assert table.location(0) == server.url("0.mp4")
    for name in ("num_frames", "height", "width"):
        assert getattr(table, name).tolist() == getattr(local, name).tolist()
    same_batches(table, local, num_workers, cache_dir=str(tmp_path / "cache"))


def test_dataset_root_may_be_a_url(server: FileServer, folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "clips.parquet", tmp_path / "clips.parquet")
    table = ClipTable.open(tmp_path / "clips.parquet", root=server.url(""))
    assert table.location(1) == server.url("1.mp4")
    same_batches(table, ClipTable.open(folder / "clips.parquet"), cache_dir=str(tmp_path / "cache"))


def test_probing_below_a_url_writes_whole_urls(server: FileServer, folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "list.csv", tmp_path / "list.csv")
    cache = FileCache(tmp_path / "cache")
    result = probe_table(tmp_path / "list.csv", tmp_path / "clips.csv", root=server.url(""), cache=cache, workers=2)
    assert result.bad == 0
    assert ClipTable.open(tmp_path / "clips.csv").location(3) == server.url("3.mp4")


def test_a_clip_that_cannot_be_fetched_is_a_fault(server: FileServer, folder: Path, tmp_path: Path) -> None:
    table = ClipTable.open(folder / "clips.parquet", root=server.url("closed"))
    batch = make_dataset(table, cache_dir=str(tmp_path / "cache"))[make_slot(table, [0, 1])]
    assert batch.weights.tolist() == [0, 0]
    assert [fault.path for fault in batch.faults] == ["0.mp4", "1.mp4"]
    assert batch.faults[0].reason == "cannot be fetched: the server answers 403 Forbidden"


@pytest.fixture
def bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on an S3 server of this process; its address and keys are in the environment, as users have them."""
    pytest.importorskip("s3fs")
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto.server")
    fsspec = pytest.importorskip("fsspec")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="clips")
    for path in folder.iterdir():
        if path.is_file():
            client.upload_file(str(path), "clips", f"set/{path.name}")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield "s3://clips/set"
    server.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_clips_in_an_s3_bucket_are_probed_and_loaded(bucket: str, folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "list.csv", tmp_path / "list.csv")
    with open(tmp_path / "list.csv", "a") as file:
        file.write("absent.mp4,nothing\n")
    cache = FileCache(tmp_path / "cache")
    result = probe_table(tmp_path / "list.csv", tmp_path / "clips.parquet", root=bucket, cache=cache)
    assert result.bad_rows == ((6, "absent.mp4", "cannot be fetched: no such file on the server"),)
    table = ClipTable.open(tmp_path / "clips.parquet")
    assert table.location(0) == "s3://clips/set/0.mp4"
    shutil.rmtree(cache.folder)
    for num_workers in (0, 2):
        local = ClipTable.open(folder / "clips.parquet")
        same_batches(table, local, num_workers, cache_dir=str(tmp_path / f"cache{num_workers}"))


def test_a_clip_in_a_google_bucket_is_fetched(
    server: FileServer, folder: Path, cache: FileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url("").rstrip("/"))
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it looks for keys of the machine's owner
    pytest.importorskip("gcsfs")
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    assert read(cache, "gs://clips/2.mp4") == (folder / "2.mp4").read_bytes()
    with pytest.raises(ClipError, match=r"^cannot be fetched: no such file on the server$"):
        read(cache, "gs://clips/absent.mp4")


def test_any_protocol_that_fsspec_knows_will_do(folder: Path, cache: FileCache) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/a.mp4", (folder / "0.mp4").read_bytes())
    assert read(cache, "memory://a.mp4") == (folder / "0.mp4").read_bytes()
