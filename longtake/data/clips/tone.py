"""HDR and wide gamuts as sRGB: HLG and PQ pixels (ITU-R BT.2100), and SDR of BT.2020's or P3's primaries.

Diffuse white (203 cd/m², BT.2408) and everything darker keeps its brightness up to a knee; highlights up to
1,000 cd/m² are compressed above it. The brightest channel decides, so hues stay.
"""

from __future__ import annotations

from functools import cache

import numpy as np

PQ, HLG = 16, 18  # codes of H.273 for the transfer
HDR_TRANSFERS = frozenset({PQ, HLG})
BT2020, P3 = 9, 12  # codes of H.273 for the primaries

_WHITE_NITS, _PEAK_NITS, _PQ_NITS = 203.0, 1000.0, 10000.0
_KNEE = 0.6  # of diffuse white
_SYSTEM_GAMMA = 1.2  # of HLG on a display of 1,000 cd/m²
_LUMINANCE = np.array([0.2627, 0.6780, 0.0593], np.float32)  # of BT.2020's primaries
TO_BT709 = {  # linear light of other primaries in those of BT.709 and sRGB (BT.2087, SMPTE EG 432-1)
    BT2020: np.array([[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], np.float32),
    P3: np.array([[1.2249, -0.2247, 0.0], [-0.0420, 1.0419, 0.0], [-0.0197, -0.0786, 1.0979]], np.float32),
}
_STEPS = 1 << 12  # entries of the table of sRGB's curve, spaced by square roots


def tone_map(pixels: np.ndarray, transfer: int, primaries: int = BT2020) -> np.ndarray:
    """uint16 [H, W, 3] of full range under `PQ` or `HLG` -> uint8 [H, W, 3] sRGB."""
    light = _linear(transfer)[pixels]
    if transfer == HLG:
        light *= ((light @ _LUMINANCE) ** (_SYSTEM_GAMMA - 1))[..., None]
        light *= _PEAK_NITS / _WHITE_NITS
    if primaries in TO_BT709:
        light = light @ TO_BT709[primaries].T
    np.maximum(light, 0, out=light)
    brightest = light.max(axis=-1, keepdims=True)
    light *= _compress(brightest) / np.maximum(brightest, 1e-6)
    return _as_srgb(light)


def narrow_gamut(pixels: np.ndarray, primaries: int) -> np.ndarray:
    """uint8 [H, W, 3] of SDR with primaries of `TO_BT709` -> uint8 [H, W, 3] sRGB."""
    return _as_srgb(np.maximum(_srgb_light()[pixels] @ TO_BT709[primaries].T, 0))


def _as_srgb(light: np.ndarray) -> np.ndarray:
    """Linear light from 0, float32, as bytes; overwrites it."""
    steps = np.sqrt(np.minimum(light, 1, out=light), out=light) * (_STEPS - 1)
    return _srgb()[(steps + 0.5).astype(np.uint16)]


def _compress(light: np.ndarray) -> np.ndarray:
    """Up to the knee unchanged; above it Reinhard's curve, which reaches 1 at the peak."""
    peak = (_PEAK_NITS / _WHITE_NITS - _KNEE) / (1 - _KNEE)
    above = np.clip((light - _KNEE) / (1 - _KNEE), 0, peak)
    return np.where(light > _KNEE, _KNEE + (1 - _KNEE) * above * (1 + above / peak**2) / (1 + above), light)


@cache
def _linear(transfer: int) -> np.ndarray:
    """Light of each 16-bit code, float32 [65536]: of PQ in units of diffuse white, of HLG the scene's in [0, 1]."""
    signal = np.arange(1 << 16) / ((1 << 16) - 1)
    if transfer == HLG:
        a, b, c = 0.17883277, 0.28466892, 0.55991073
        return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12).astype(np.float32)
    m1, m2, c1, c2, c3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
    root = signal ** (1 / m2)
    light = (np.maximum(root - c1, 0) / (c2 - c3 * root)) ** (1 / m1)
    return (light * _PQ_NITS / _WHITE_NITS).astype(np.float32)


@cache
def _srgb_light() -> np.ndarray:
    """Return the light of each byte (IEC 61966-2-1): float32 [256]."""
    signal = np.arange(256) / 255
    return np.where(signal <= 0.04045, signal / 12.92, ((signal + 0.055) / 1.055) ** 2.4).astype(np.float32)


@cache
def _srgb() -> np.ndarray:
    """Return the byte of each square root of linear light (IEC 61966-2-1): uint8 [_STEPS]."""
    light = (np.arange(_STEPS) / (_STEPS - 1)) ** 2
    curve = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.round(curve * 255).astype(np.uint8)
