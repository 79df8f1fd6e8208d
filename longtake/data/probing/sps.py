"""The picture size that an H.264 or H.265 stream states in its sequence header (SPS), as MP4 files keep it."""

from __future__ import annotations

_HIGH_PROFILES = frozenset({44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244})  # that state their chroma
_LARGEST_SIDE = 1 << 16


def read_avcc(data: bytes) -> tuple[int, int] | None:
    """Height and width from an `avcC` box (ISO 14496-15 §5.3.3); None unless it holds exactly one clear header."""
    if len(data) < 8 or data[0] != 1 or data[5] & 31 != 1:
        return None
    length = int.from_bytes(data[6:8], "big")
    return _h264_size(_unescape(data[8 : 8 + length]))


def read_hvcc(data: bytes) -> tuple[int, int] | None:
    """Height and width from an `hvcC` box (ISO 14496-15 §8.3.3); None unless it holds exactly one clear header."""
    headers = []
    at = 23
    for _ in range(data[22] if len(data) > 22 else 0):
        kind, count = data[at] & 63, int.from_bytes(data[at + 1 : at + 3], "big")
        at += 3
        for _ in range(count):
            length = int.from_bytes(data[at : at + 2], "big")
            if kind == 33:
                headers.append(data[at + 2 : at + 2 + length])
            at += 2 + length
    return _h265_size(_unescape(headers[0])) if len(headers) == 1 else None


class _Bits:
    """Reads a header bit by bit. Raises `IndexError` past its end."""

    def __init__(self, data: bytes):
        self._value, self._left = int.from_bytes(data, "big"), len(data) * 8

    def take(self, count: int) -> int:
        """Return the next `count` bits as a number."""
        self._left -= count
        if self._left < 0:
            raise IndexError("the header ends early")
        return (self._value >> self._left) & ((1 << count) - 1)

    def skip_golombs(self, count: int) -> None:
        """Pass over so many Exp-Golomb numbers."""
        for _ in range(count):
            self.golomb()

    def golomb(self) -> int:
        """Return the next Exp-Golomb number (H.264 §9.1)."""
        zeros = 0
        while not self.take(1):
            zeros += 1
            if zeros > 32:
                raise ValueError("no such number")
        return (1 << zeros) - 1 + self.take(zeros)

    def signed_golomb(self) -> int:
        """Return the next signed Exp-Golomb number (H.264 §9.1.1)."""
        number = self.golomb()
        return (number + 1) // 2 if number % 2 else -(number // 2)


def _unescape(data: bytes) -> bytes:
    return data.replace(b"\0\0\3", b"\0\0")


def _h264_size(data: bytes) -> tuple[int, int] | None:
    """H.264 §7.3.2.1.1."""
    if len(data) < 4 or data[0] & 31 != 7:
        return None
    profile, bits = data[1], _Bits(data[4:])
    bits.golomb()  # its number
    chroma = 1
    if profile in _HIGH_PROFILES:
        chroma = bits.golomb()
        bits.take(1 if chroma == 3 else 0)  # planes apart
        bits.golomb(), bits.golomb(), bits.take(1)  # bit depths, transform bypass
        if bits.take(1):
            for number in range(12 if chroma == 3 else 8):
                if bits.take(1):
                    _skip_scaling_list(bits, 16 if number < 6 else 64)
    bits.golomb()  # frame numbers
    order = bits.golomb()
    if order == 0:
        bits.golomb()
    elif order == 1:
        bits.take(1), bits.signed_golomb(), bits.signed_golomb()
        for _ in range(bits.golomb()):
            bits.signed_golomb()
    bits.golomb(), bits.take(1)  # reference frames, gaps
    columns, rows = bits.golomb() + 1, bits.golomb() + 1
    frames_only = bits.take(1)
    if not frames_only:
        bits.take(1)
    bits.take(1)  # direct 8x8
    fields = 2 - frames_only
    size = _cropped(bits, rows * 16 * fields, columns * 16, chroma, fields)
    return size if _has_square_pixels(bits) else None


def _has_square_pixels(bits: _Bits) -> bool:
    """By H.264 §E.1.1, which comes next; also where it does not say."""
    return not (bits.take(1) and bits.take(1)) or bits.take(8) <= 1


def _skip_scaling_list(bits: _Bits, length: int) -> None:
    last = step = 8
    for _ in range(length):
        if step:
            step = (last + bits.signed_golomb()) % 256
        last = step or last


def _h265_size(data: bytes) -> tuple[int, int] | None:
    """H.265 §7.3.2.2.1."""
    if len(data) < 16 or data[0] >> 1 & 63 != 33:
        return None
    bits = _Bits(data[2:])
    bits.take(4)
    layers = bits.take(3)
    bits.take(1 + 88 + 8)  # nesting; general profile and level
    present = [(bits.take(1), bits.take(1)) for _ in range(layers)]
    if layers:
        bits.take(2 * (8 - layers))
    for profile, level in present:
        bits.take(88 * profile + 8 * level)
    bits.golomb()  # its number
    chroma = bits.golomb()
    bits.take(1 if chroma == 3 else 0)  # planes apart
    width, height = bits.golomb(), bits.golomb()
    size = _cropped(bits, height, width, chroma)
    return size if _reaches_aspect(bits, layers) and _has_square_pixels(bits) else None


def _reaches_aspect(bits: _Bits, layers: int) -> bool:
    """Skips what stands before the aspect of pixels (H.265 §7.3.2.2.1, behind the margins); False where that has parts
    which are not read here: scaling lists, and sets of reference pictures that follow from others."""
    bits.skip_golombs(2)  # bit depths
    order_bits = bits.golomb() + 4
    for _ in range(layers + 1 if bits.take(1) else 1):
        bits.skip_golombs(3)  # pictures that are held back
    bits.skip_golombs(6)  # sizes of blocks
    if bits.take(1) and bits.take(1):  # scaling lists of its own
        return False
    bits.take(2)  # partitions, offsets
    if bits.take(1):  # blocks without prediction
        bits.take(8)  # bit depths
        bits.skip_golombs(2)  # sizes
        bits.take(1)  # loop filter
    for number in range(bits.golomb()):  # sets of reference pictures
        if number and bits.take(1):
            return False
        for _ in range(bits.golomb() + bits.golomb()):
            bits.golomb()  # distance
            bits.take(1)  # whether it is used
    if bits.take(1):  # long-term ones
        for _ in range(bits.golomb()):
            bits.take(order_bits + 1)
    bits.take(2)  # motion vectors, smoothing
    return True


def _cropped(bits: _Bits, height: int, width: int, chroma: int, fields: int = 1) -> tuple[int, int] | None:
    """Return the size without its margins, which come next, in units of a sample of colour."""
    left, right, top, bottom = [bits.golomb() for _ in range(4)] if bits.take(1) else (0, 0, 0, 0)
    height -= (top + bottom) * (2 if chroma == 1 else 1) * fields
    width -= (left + right) * (2 if chroma in (1, 2) else 1)
    return (height, width) if 0 < height < _LARGEST_SIDE and 0 < width < _LARGEST_SIDE else None
