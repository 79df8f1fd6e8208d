"""The aspect tables that systems wrote down number by number, and how the systems' bucket rules differ: data only.

A table lists `ratio:HxW`, ratio = H/W as it was rounded by its authors; the order decides ties. The sizes come from
Open-Sora 1.2 (`opensora/datasets/aspect.py`), whose tables for 256 to 2048 go back to PixArt, and from CogVideoX-Fun
(`videox_fun/data/bucket_sampler.py`), which took over the one for 512. Many of Open-Sora 1.2's are no multiple of 8;
its autoencoder cuts them down.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Shape = tuple[int, int]  # (H, W) in pixels


@dataclass(frozen=True)
class SizeTable:
    """The shapes of one resolution."""

    num_pixels: int
    shapes: Mapping[str, Shape]  # ratio -> (H, W)
    weights: Mapping[str, int] | None = None  # a clip's ratio is drawn with these weights, whatever its own is


@dataclass(frozen=True)
class WalkLaw:
    """What one system does in its own way when it puts a clip into a bucket."""

    nearest: Literal["crop", "named", "key"]  # least crop; |H/W - h/w| over ratio names W:H; over table keys H/W
    tables: Mapping[str, SizeTable] | None = None  # resolution name -> table; None: computed from the name
    scaled: Mapping[str, SizeTable] | None = None  # suffix of `Npx` -> table at 512, each side times N/512
    words: Mapping[str, str] | None = None  # other words for the ratios of the tables
    second: Literal["skip", "stay"] = "skip"  # what the second probability of an entry is of
    min_area: float = 0.8  # of the pixel budget: below it a clip is too small
    fixed_interval: bool = False  # every frame_interval-th frame is read; the frame rate does not count
    longer: bool = False  # a clip must have more frames than it needs, not just as many
    stills_have_rate: bool = False  # the frame count of a still is divided by the interval of its frame rate, too


_WRITTEN = """
144p 36864
    0.38:117x312 0.43:125x291 0.48:133x277 0.50:135x270 0.53:139x262 0.54:141x260 0.56:144x256 0.62:151x241
    0.67:156x234 0.75:166x221 1.00:192x192 1.33:221x165 1.50:235x156 1.78:256x144 1.89:263x139 2.00:271x135
    2.08:277x132
240p 102240
    0.38:196x522 0.43:210x490 0.48:222x462 0.50:226x452 0.53:232x438 0.54:236x436 0.56:240x426 0.62:252x404
    0.67:262x393 0.75:276x368 1.00:320x320 1.33:370x278 1.50:392x262 1.78:426x240 1.89:440x232 2.00:452x226
    2.08:462x222
360p 230400
    0.38:294x784 0.43:314x732 0.48:332x692 0.50:340x680 0.53:350x662 0.54:352x652 0.56:360x640 0.62:380x608
    0.67:392x588 0.75:416x554 1.00:480x480 1.33:554x416 1.50:588x392 1.78:640x360 1.89:660x350 2.00:678x340
    2.08:692x332
512 262144
    0.25:256x1024 0.26:256x992 0.27:256x960 0.28:256x928 0.32:288x896 0.33:288x864 0.35:288x832 0.40:320x800
    0.42:320x768 0.48:352x736 0.50:352x704 0.52:352x672 0.57:384x672 0.60:384x640 0.68:416x608 0.72:416x576
    0.78:448x576 0.82:448x544 0.88:480x544 0.94:480x512 1.00:512x512 1.07:512x480 1.13:544x480 1.21:544x448
    1.29:576x448 1.38:576x416 1.46:608x416 1.67:640x384 1.75:672x384 2.00:704x352 2.09:736x352 2.40:768x320
    2.50:800x320 2.89:832x288 3.00:864x288 3.11:896x288 3.62:928x256 3.75:960x256 3.88:992x256 4.00:1024x256
480p 409920
    0.38:392x1046 0.43:420x980 0.48:444x925 0.50:452x904 0.53:466x880 0.54:470x870 0.56:480x854 0.62:506x810
    0.67:522x784 0.75:554x738 1.00:640x640 1.33:740x555 1.50:784x522 1.78:854x480 1.89:880x466 2.00:906x454
    2.08:924x444
720p 921600
    0.38:588x1568 0.43:628x1466 0.48:666x1388 0.50:678x1356 0.53:698x1318 0.54:706x1306 0.56:720x1280
    0.62:758x1212 0.67:784x1176 0.75:832x1110 1.00:960x960 1.33:1108x832 1.50:1176x784 1.78:1280x720
    1.89:1320x698 2.00:1358x680 2.08:1386x666
1080p 2073600
    0.38:882x2352 0.43:942x2198 0.48:998x2080 0.50:1018x2036 0.53:1048x1980 0.54:1058x1958 0.56:1080x1920
    0.62:1138x1820 0.67:1176x1764 0.75:1248x1664 1.00:1440x1440 1.33:1662x1246 1.50:1764x1176 1.78:1920x1080
    1.89:1980x1048 2.00:2036x1018 2.08:2078x998
2k 3686400
    0.38:1176x3136 0.43:1256x2930 0.48:1330x2770 0.50:1358x2716 0.53:1398x2640 0.54:1412x2612 0.56:1440x2560
    0.62:1518x2428 0.67:1568x2352 0.75:1662x2216 1.00:1920x1920 1.33:2218x1664 1.50:2352x1568 1.78:2560x1440
    1.89:2638x1396 2.00:2716x1358 2.08:2772x1330
2880 8294400
    0.25:1408x5760 0.26:1408x5568 0.27:1408x5376 0.28:1408x5184 0.32:1600x4992 0.33:1600x4800 0.34:1600x4672
    0.40:1792x4480 0.42:1792x4288 0.47:1920x4096 0.49:1920x3904 0.51:1920x3776 0.55:2112x3840 0.59:2112x3584
    0.68:2304x3392 0.72:2304x3200 0.78:2496x3200 0.83:2496x3008 0.89:2688x3008 0.93:2688x2880 1.00:2880x2880
    1.07:2880x2688 1.12:3008x2688 1.21:3008x2496 1.28:3200x2496 1.39:3200x2304 1.47:3392x2304 1.70:3584x2112
    1.82:3840x2112 2.03:3904x1920 2.13:4096x1920 2.39:4288x1792 2.50:4480x1792 2.92:4672x1600 3.00:4800x1600
    3.12:4992x1600 3.68:5184x1408 3.82:5376x1408 3.95:5568x1408 4.00:5760x1408
4k 8294400
    0.38:1764x4704 0.43:1886x4400 0.48:1996x4158 0.50:2036x4072 0.53:2096x3960 0.54:2118x3918 0.62:2276x3642
    0.56:2160x3840 0.67:2352x3528 0.75:2494x3326 1.00:2880x2880 1.33:3326x2494 1.50:3528x2352 1.78:3840x2160
    1.89:3958x2096 2.00:4072x2036 2.08:4156x1994
"""  # each: name, pixels, shapes


def _read(text: str) -> dict[str, SizeTable]:
    """Return the tables as they are written down above, by name."""
    tables = {}
    for table in re.split(r"\n(?=\S)", text.strip()):
        name, pixels, _ = table.split(maxsplit=2)
        shapes = re.findall(r"(\S+):(\d+)x(\d+)", table)
        tables[name] = SizeTable(int(pixels), {ratio: (int(height), int(width)) for ratio, height, width in shapes})
    return tables


_TABLES = _read(_WRITTEN)
_512 = _TABLES["512"].shapes
for _side in (256, 1024, 2048):
    _scaled = {ratio: (height * _side // 512, width * _side // 512) for ratio, (height, width) in _512.items()}
    _TABLES[str(_side)] = SizeTable(_side**2, _scaled)
OPENSORA_V1_2 = MappingProxyType(dict(sorted(_TABLES.items(), key=lambda item: item[1].num_pixels)))

_DRAWN = {
    "0.42": 1, "0.50": 2, "0.57": 4, "0.68": 4, "0.78": 4, "0.88": 4, "0.94": 8, "1.00": 8, "1.07": 8, "1.13": 4,
    "1.29": 4, "1.46": 4, "1.75": 4, "2.00": 2, "2.40": 1,
}  # fmt: skip

COGVIDEOX_FUN = MappingProxyType(
    {"": SizeTable(512**2, _512), "_crop": SizeTable(512**2, {ratio: _512[ratio] for ratio in _DRAWN}, _DRAWN)}
)

# Open-Sora 1.2's words for ratios, height to width; that of 50:27 is its own slip (50/27 is 1.85).
OPENSORA_V1_2_RATIOS = MappingProxyType(
    {
        "3:8": "0.38", "9:21": "0.43", "12:25": "0.48", "1:2": "0.50", "9:17": "0.53", "27:50": "0.54",
        "9:16": "0.56", "5:8": "0.62", "2:3": "0.67", "3:4": "0.75", "1:1": "1.00", "4:3": "1.33", "3:2": "1.50",
        "16:9": "1.78", "17:9": "1.89", "2:1": "2.00", "50:27": "2.08",
    }
)  # fmt: skip

LAWS: Mapping[str | None, WalkLaw] = MappingProxyType(
    {
        None: WalkLaw("crop"),
        "opensora_v2": WalkLaw("named", stills_have_rate=True),
        "opensora_v1_2": WalkLaw(
            "key", OPENSORA_V1_2, words=OPENSORA_V1_2_RATIOS, second="stay", fixed_interval=True, longer=True
        ),
        "cogvideox_fun": WalkLaw("key", scaled=COGVIDEOX_FUN, min_area=0.0, fixed_interval=True),
    }
)
