"""The clips below a folder: every real file once, and a count of what looks like media and is not used."""

from __future__ import annotations

import mimetypes
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from longtake.data.clips.caption_files import CAPTION_SUFFIX, name_key
from longtake.data.clips.formats import CLIP_SUFFIXES, IMAGE_SUFFIXES, VIDEO_SUFFIXES, suffix_of
from longtake.small_files import is_unicode

_SHOWN = 3  # names in a sentence
# Folders of previews and deleted files that network drives and systems keep among the files of their users.
_SYSTEM_FOLDERS = frozenset({"@eadir", "@tmp", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "__macosx"})
_SYSTEM_FOLDERS |= {"$recycle.bin", "lost+found", "system volume information", "thumbnails"}
_OTHER_MEDIA = ".heic .heif .hif .jxl .psd .exr .cr2 .cr3 .crw .nef .arw .dng .raf .orf .rw2 .braw .r3d .insv"
_CAMERA_PREVIEWS = frozenset({".lrv", ".thm"})
_UNFINISHED = frozenset({".part", ".crdownload", ".download", ".partial", ".opdownload", ".tmp", ".aria2"})
_SIDECARS = frozenset({".caption", ".captions", ".cap", ".text", ".tags", ".json", ".md", ".srt", ".vtt"})
_TYPES = mimetypes.MimeTypes()  # Python's own table, whatever the machine has


@dataclass
class Walk:
    """Files below a folder, as sorted paths that start from it, with `/`."""

    clips: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # files that may hold captions
    unused: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))  # by suffix and reason
    unread: list[tuple[str, str]] = field(default_factory=list)  # folders that cannot be read, with the reason

    def notes(self) -> list[str]:
        """Return a sentence for each kind of file that is not used, and for each folder that cannot be read."""
        kinds = sorted(self.unused.items())
        files = [f"{len(paths):,} {suffix} not used ({shortened(paths)}): {why}" for (suffix, why), paths in kinds]
        return files + [f"folder {path} is not used: {reason}" for path, reason in self.unread]


class _File(NamedTuple):
    """A clip on the way, in the order in which one of several names is preferred."""

    is_link: bool  # reached by a symbolic link
    path: str
    target: str  # its real path
    inode: int | None  # None for a symbolic link


def walk(folder: Path) -> Walk:
    """Walk a folder. Links are followed last, so that a file is known by its real name; names that begin with a dot
    are left out."""
    result, start = Walk(), os.path.realpath(folder)
    pending, linked = [(str(folder), "", False)], []
    files: list[_File] = []
    visited: set[str] = set()
    while pending or linked:
        linked.sort()
        place, inside, is_system = pending.pop() if pending else linked.pop(0)
        real = os.path.realpath(place)
        if real in visited:
            continue
        visited.add(real)
        try:
            entries = list(os.scandir(place))
        except OSError as error:
            result.unread.append((inside or str(folder), error.strerror or str(error)))
            continue
        for entry in entries:
            path = f"{inside}/{entry.name}" if inside else entry.name
            if _is_folder(entry):
                below = (entry.path, path, is_system or entry.name.lower() in _SYSTEM_FOLDERS)
                if entry.is_symlink() and Path(start).is_relative_to(os.path.realpath(entry.path)):
                    result.unread.append((path, "it is a link to the folder itself or to one above"))
                elif not entry.name.startswith("."):
                    (linked if entry.is_symlink() else pending).append(below)
                continue
            suffix = suffix_of(entry.name)
            if reason := _reason_unused(entry.name, suffix, is_system):
                result.unused[suffix, reason].append(_printable(path))
            elif suffix in CLIP_SUFFIXES:
                target = os.path.realpath(entry.path) if entry.is_symlink() else os.path.join(real, entry.name)
                is_link = target != os.path.join(start, path)
                files.append(_File(is_link, path, target, None if entry.is_symlink() else entry.inode()))
            elif suffix == CAPTION_SUFFIX or suffix in _SIDECARS:
                result.texts.append(path)
    _add_clips(result, files)
    return result


def _add_clips(result: Walk, files: Sequence[_File]) -> None:
    """Take each real file once, by its real path where it has one in the folder, and leave out previews of videos."""
    seen: set[str] = set()
    by_inode: dict[int, str] = {}  # hard links share it; so may files of other file systems
    clips = []
    for file in sorted(files):
        twin = by_inode.setdefault(file.inode, file.target) if file.inode else file.target
        if file.target in seen or (twin != file.target and _is_same_file(twin, file.target)):
            result.unused[suffix_of(file.path), "links to other clips of the folder"].append(file.path)
        else:
            seen.add(file.target)
            clips.append(file.path)
    videos = {_stem_key(path) for path in clips if suffix_of(path) in VIDEO_SUFFIXES}
    captions = {name_key(path) for path in result.texts}
    for path in clips:
        is_picture = suffix_of(path) in IMAGE_SUFFIXES
        if is_picture and _stem_key(path) in videos and name_key(path + CAPTION_SUFFIX) not in captions:
            reason = "pictures by the name of a video, taken for its preview; rename them to train on them"
            result.unused[suffix_of(path), reason].append(path)
        else:
            result.clips.append(path)
    result.clips.sort()
    result.texts.sort()


def _reason_unused(name: str, suffix: str, is_system: bool) -> str | None:
    """Why a file that looks like media is not used; None for one that is, and for other files."""
    if suffix in _UNFINISHED and suffix_of(os.path.splitext(name)[0]) in CLIP_SUFFIXES:
        return "unfinished downloads"
    kind = (_TYPES.guess_type(f"x{suffix}")[0] or "").partition("/")[0]
    known = suffix in CLIP_SUFFIXES
    if not known and kind not in ("image", "video") and suffix not in (*_OTHER_MEDIA.split(), *_CAMERA_PREVIEWS):
        return None
    if name.startswith("."):
        return "their names begin with a dot"
    if is_system:
        return "in a folder of previews or deleted files"
    if suffix in _CAMERA_PREVIEWS:
        return "previews of a camera"
    if not known:
        return "neither Pillow nor FFmpeg reads them whole; convert pictures to .png or .jpg, videos to .mp4"
    return None if is_unicode(name) else "their names are not UTF-8; rename them"


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to where nobody may look
        return False


def _is_same_file(first: str, second: str) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _stem_key(path: str) -> str:
    return name_key(str(PurePosixPath(path).with_suffix("")))


def _printable(path: str) -> str:
    return path if is_unicode(path) else repr(os.fsencode(path))


def shortened(names: Sequence[str]) -> str:
    """Return the first names, in order, and how many more there are."""
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")
