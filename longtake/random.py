"""Counter-based randomness: every random choice is a pure function of what it is about.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in integers
on the CPU, so the numbers are the same on any machine, in any process and after any restart:

    key     = 64 bits mixed from (seed, stage, purpose)
    counter = (block, pass, sample low 32 bits, sample high 32 bits)

Each block gives four 32-bit words; a sample may draw 2^34 words for each purpose in each pass, and no two of
(pass, sample, block) share a counter.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from typing import Protocol

import numpy as np

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
PHILOX_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
PHILOX_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_M0, _M1 = map(np.uint64, PHILOX_MULTIPLIERS)
_W0, _W1 = PHILOX_KEY_STEPS
_CHUNK = 1 << 14  # counters: the working set stays in the second-level cache (about twice as fast as one sweep)


_PIECE = 1 << 18  # numbers that a thread draws at once, a multiple of the four of a block


class Purpose(IntEnum):
    """Purpose of a draw. The numbers are part of the run format: never renumber, only add."""

    ORDER = 0  # the sample's key
    BUCKET = 1  # keep and skip draws of the bucket assignment
    WINDOW = 2  # which frames of the clip
    CROP = 3
    CAPTION = 4  # which caption column
    MASK = 5  # condition kind
    POSTERIOR = 6  # autoencoder posterior
    NOISE = 7
    TIMESTEP = 8
    DROPOUT = 9  # text encoders dropped
    MIX = 10  # which bucket fills which slot
    WEIGHTS = 11  # initial parameters
    COPY = 12  # extra copy of a clip in a weighted mix
    SAMPLING = 13  # noise of generated videos
    VALIDATION = 14
    ROUNDING = 15  # of weights kept in bf16
    SOLVER = 16  # noise that a solver adds at a step
    COMPANION = 17  # which of a clip's reference stills
    KNOWN_NOISE = 18  # noise on pixels that are given
    AUTOENCODER = 19  # which clips an autoencoder is fitted on, and which of their blocks
    EXPERT = 20  # which of two denoisers a step trains
    COMPANION_POSTERIOR = 1024  # of what a clip brings along, and the numbers above for others that it brings


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds of Philox4x32. `counter`: uint32 [N, 4]; `key`: two 32-bit integers; returns uint32 [N, 4]."""
    out = np.empty(counter.shape, np.uint32)
    for start in range(0, len(counter), _CHUNK):
        stop = start + _CHUNK
        c0, c1, c2, c3 = (counter[start:stop, i].astype(np.uint64) for i in range(4))
        p0, p1 = np.empty_like(c0), np.empty_like(c0)
        k0, k1 = int(key[0]), int(key[1])
        for _ in range(10):
            np.multiply(c0, _M0, out=p0)
            np.multiply(c2, _M1, out=p1)
            np.right_shift(p1, _HALF, out=c0)
            c0 ^= c1
            c0 ^= np.uint64(k0)
            np.bitwise_and(p1, _MASK, out=c1)
            np.right_shift(p0, _HALF, out=c2)
            c2 ^= c3
            c2 ^= np.uint64(k1)
            np.bitwise_and(p0, _MASK, out=c3)
            k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
        for i, c in enumerate((c0, c1, c2, c3)):
            out[start:stop, i] = c
    return out


def hash64(*parts: int | str | bytes) -> int:
    """Return a 64-bit hash of a few values (BLAKE2b), the same in every process; for names, paths and keys."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


def stream_key(seed: int, stage: int, purpose: int) -> tuple[int, int]:
    """Return the Philox key of one purpose in one stage of a run."""
    word = hash64("longtake", int(seed), int(stage), int(purpose))
    return word & 0xFFFFFFFF, word >> 32


def words(
    seed: int,
    stage: int,
    purpose: int,
    pass_index: int,
    samples: np.ndarray | int,
    num_words: int,
    first_block: int = 0,
) -> np.ndarray:
    """Random 32-bit words for each sample: uint32 [N, num_words]; `samples`: uint64 [N] or one id (then N = 1).
    `first_block`: skips so many blocks of four words."""
    ids = np.atleast_1d(np.asarray(samples, dtype=np.uint64))
    blocks = -(-num_words // 4)
    counter = np.empty((len(ids), blocks, 4), np.uint32)
    counter[..., 0] = np.arange(first_block, first_block + blocks, dtype=np.uint32)
    counter[..., 1] = pass_index
    counter[..., 2] = (ids & _MASK).astype(np.uint32)[:, None]
    counter[..., 3] = (ids >> np.uint64(32)).astype(np.uint32)[:, None]
    out = philox4x32(counter.reshape(-1, 4), stream_key(seed, stage, purpose))
    return out.reshape(len(ids), blocks * 4)[:, :num_words]


def uniforms(
    seed: int, stage: int, purpose: int, pass_index: int, samples: np.ndarray | int, count: int, first_block: int = 0
) -> np.ndarray:
    """Uniform numbers in [0, 1) with 24 bits: float32 [N, count]. The law of every keep, window and dropout draw."""
    raw = words(seed, stage, purpose, pass_index, samples, count, first_block)
    return (raw >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def normals(
    seed: int, stage: int, purpose: int, pass_index: int, samples: np.ndarray | int, count: int, first_block: int = 0
) -> np.ndarray:
    """Return standard normal numbers by Box-Muller: float32 [N, count], from pairs of uniforms in (0, 1] and [0, 1)."""
    raw = words(seed, stage, purpose, pass_index, samples, count + (count & 1), first_block)
    radius = ((raw[:, 0::2] >> np.uint32(8)).astype(np.float32) + np.float32(1.0)) * np.float32(2.0**-24)
    angle = (raw[:, 1::2] >> np.uint32(8)).astype(np.float32) * np.float32(2.0 * np.pi * 2.0**-24)
    np.log(radius, out=radius)
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    out = np.empty(raw.shape, np.float32)
    out[:, 0::2] = radius * np.cos(angle)
    out[:, 1::2] = radius * np.sin(angle)
    return out[:, :count]


def sample_keys(seed: int, stage: int, pass_index: int, samples: np.ndarray) -> np.ndarray:
    """Return the order keys of a pass: uint64 [N]. A bucket runs its samples by ascending key."""
    raw = words(seed, stage, Purpose.ORDER, pass_index, samples, 2).astype(np.uint64)
    return (raw[:, 1] << np.uint64(32)) | raw[:, 0]


def mixed(values: np.ndarray) -> np.ndarray:
    """Each value by the 64-bit finaliser of SplitMix64 (Steele et al., OOPSLA 2014): uint64 [N], one to one."""
    with np.errstate(over="ignore"):
        z = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample_ids(clip_ids: np.ndarray, copies: np.ndarray | int = 0) -> np.ndarray:
    """Return the id of (clip, copy): uint64 [N]. Copy 0 keeps the clip's own id; others are mixed with their number."""
    clip_ids = np.asarray(clip_ids, dtype=np.uint64)
    copies = np.broadcast_to(np.asarray(copies, dtype=np.uint64), clip_ids.shape)
    with np.errstate(over="ignore"):
        numbered = clip_ids + copies * np.uint64(0x9E3779B97F4A7C15)
    return np.where(copies == 0, clip_ids, mixed(numbered))


def parameter_normals(seed: int, name: str, count: int) -> np.ndarray:
    """Return standard normals for the initial values of one named parameter: float32 [count], equal on every mesh."""
    return _in_threads(normals, seed, name, count)


def parameter_uniforms(seed: int, name: str, count: int) -> np.ndarray:
    """Uniforms in [0, 1) for the initial values of one named parameter: float32 [count]."""
    return _in_threads(uniforms, seed, name, count)


def _in_threads(draw: Callable[..., np.ndarray], seed: int, name: str, count: int) -> np.ndarray:
    """Return the numbers of one named parameter, drawn in pieces on the cores of this process."""
    numbers, sample = np.empty(count, np.float32), hash64(name)

    def fill(start: int) -> None:
        piece = numbers[start : start + _PIECE]
        piece[:] = draw(seed, 0, Purpose.WEIGHTS, 0, sample, len(piece), start // 4)[0]

    starts = range(0, count, _PIECE)
    threads = min(num_threads(), len(starts))
    if threads <= 1:
        for start in starts:
            fill(start)
        return numbers
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(fill, starts):  # raises what a thread raised
            pass
    return numbers


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads() -> int:
    """Cores that this process may use, shared with other processes of the run on this machine."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class Numbers(Protocol):
    """Source of the random numbers of a mask, or of another choice of many steps, in the order of its steps."""

    def integer(self, low: int, high: int) -> int:
        """One of low .. high - 1."""

    def share(self) -> float:
        """Return a number in [0, 1)."""

    def bits(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return as many fair coin tosses, bool."""

    def some(self, count: int, of: int) -> Sequence[int]:
        """Different ones of 0 .. of - 1, in any order."""


class OwnNumbers:
    """The numbers of one sample, a pure function of its key."""

    def __init__(self, *key: int) -> None:
        self._key, self._drawn = hash64("mask", *key), 0

    def integer(self, low: int, high: int) -> int:
        return low + (int(self._words(1)[0]) * max(high - low, 1) >> 32)

    def share(self) -> float:
        return int(self._words(1)[0]) / 2**32

    def bits(self, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        packed = self._words(-(-count // 32)).astype("<u4").view(np.uint8)
        return np.unpackbits(packed, count=count).astype(bool).reshape(shape)

    def some(self, count: int, of: int) -> Sequence[int]:
        return np.argsort(self._words(of), kind="stable")[:count].tolist()

    def normal(self) -> float:
        """Return a standard normal number."""
        self._drawn += 1
        return float(normals(self._key, 0, Purpose.MASK, self._drawn, 0, 1)[0, 0])

    def _words(self, count: int) -> np.ndarray:
        self._drawn += 1
        return words(self._key, 0, Purpose.MASK, self._drawn, 0, count)[0]
