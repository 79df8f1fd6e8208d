"""Which files are clips, by the suffix of their names."""

from __future__ import annotations

import os

_IMAGES = ".png .jpg .jpeg .jpe .jfif .webp .avif .bmp .dib .tif .tiff .ppm .pgm .pbm .pnm .jp2 .j2k .tga"
_CONTAINERS = (
    ".mp4 .m4v .mov .qt .mkv .webm .avi .divx .gif .apng .ts .m2ts .mts .m2t .mpg .mpeg .mpe .vob .wmv .asf .flv .f4v "
    ".3gp .3g2 .ogv .ogm .mxf .rm .rmvb .nut .ivf .dv .mj2 .amv .wtv .nsv"
)
_STREAMS = ".y4m .h264 .264 .avc .h265 .265 .hevc .m1v .m2v .mpv .mjpeg .mjpg .obu"  # video without a container

IMAGE_SUFFIXES = frozenset(_IMAGES.split())  # what Pillow reads
VIDEO_SUFFIXES = frozenset(_CONTAINERS.split()) | frozenset(_STREAMS.split())  # what FFmpeg reads
CLIP_SUFFIXES = tuple(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))


def suffix_of(path: str | os.PathLike[str]) -> str:
    """`.mp4` of `A.MP4`."""
    return os.path.splitext(os.fspath(path))[1].lower()
