"""Memory of Wan's autoencoders on a GPU while they encode or decode a video as a stream, counted on the meta device.

    python benchmarks/encoder_memory.py             81 and 161 frames at 480x832, both versions, bf16 and fp32
    python benchmarks/encoder_memory.py --tiny      few channels and a small video, to see that it runs

Counted are the weights in use, the frames or latents given, all activations and caches, and the results of one chunk;
the scratch memory of convolution kernels is not. Nothing is allocated or computed, no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import print_table, write_json
from torch import Tensor, nn

from longtake.encoders.autoencoder import Autoencoder, build_autoencoder
from longtake.encoders.wan_config import WanVAEConfig
from longtake.models.trace import Trace

LIMIT_BYTES = 8e9
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TINY: dict[str, Any] = {"base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 1}


def encode(autoencoder: Autoencoder, shape: tuple[int, int, int]) -> None:
    """Encode a stream of chunks that come to the device one by one."""
    frames, *sides = shape

    def chunks() -> Iterator[Tensor]:
        for length in autoencoder.stream_lengths(frames):
            yield torch.empty(1, 3, length, *sides, device="meta")

    for _ in autoencoder.posterior_of_stream(chunks()):
        pass


def decode(autoencoder: Autoencoder, shape: tuple[int, int, int]) -> None:
    """Decode latents into a stream of chunks that leave the device one by one."""
    latents = torch.empty(1, *autoencoder.latent(*shape), device="meta")
    for _ in autoencoder.decode_stream(latents, shape[0]):
        pass


def bytes_of(config: WanVAEConfig, shape: tuple[int, int, int], what: str) -> tuple[int, int]:
    """Bytes of the weights in use, and of everything else at its peak."""
    autoencoder = build_autoencoder(config, _DTYPES[config.dtype])
    parts = nn.ModuleDict({**(autoencoder.encoding if what == "encode" else autoencoder.decoding)})
    with torch.no_grad(), Trace(parts) as trace:
        (encode if what == "encode" else decode)(autoencoder, shape)
    return sum(tensor.nbytes for tensor in parts.state_dict().values()), trace.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few channels and a small video")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    sides, lengths, sizes = ((32, 64), (17, 33), _TINY) if given.tiny else ((480, 832), (81, 161), {})
    lines: list[dict[str, Any]] = []
    for version in ("2.1", "2.2"):
        for dtype in _DTYPES:
            config = WanVAEConfig(**{"version": version, "dtype": dtype, **sizes})
            for what in ("encode", "decode"):
                for frames in lengths:
                    weights, rest = bytes_of(config, (frames, *sides), what)
                    line = {"version": version, "dtype": dtype, "what": what, "frames": frames}
                    lines.append(line | {"weights": weights, "rest": rest, "total": weights + rest})
    rows = [
        (
            f"{line['version']}, {line['dtype']}, {line['what']}, {line['frames']} x {sides[0]} x {sides[1]}",
            f"{line['weights'] / 1e9:.2f}",
            f"{line['rest'] / 1e9:.2f}",
            f"{line['total'] / 1e9:.2f}",
            "yes" if line["total"] < LIMIT_BYTES else "no",
        )
        for line in lines
    ]
    print_table(("Wan's autoencoder", "weights, GB", "beyond them", "total", "below 8 GB"), rows)
    write_json(given.json, "encoder_memory", {"tiny": given.tiny, "sides": sides, "lines": lines})


if __name__ == "__main__":
    main()
