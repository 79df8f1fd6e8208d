"""Conversions of Open-Sora 1.2's inference: flags of `scripts/inference.py`, and files such as its `sample.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from longtake.config.tree import Node, plain
from longtake.dialects.command_line import as_flag
from longtake.dialects.opensora_v1_2.flags import truth
from longtake.dialects.opensora_v1_2.keys import INFERENCE, flags_of, frames_of
from longtake.dialects.opensora_v1_2.places import weights_flags
from longtake.dialects.opensora_v1_2.shared import is_old, translate_parts
from longtake.dialects.table import apply_rows
from longtake.dialects.translation import Say, Translation, value_of
from longtake.families.opensora_v1_2_strategy import carried
from longtake.generate.prompts import read_prompts
from longtake.system.tiny import world_size

_CARRIED = 5  # latent frames
_HEADS, _TINY_HEADS = 16, 8


def inference_flags(given: Mapping[str, list[str]], tiny: bool, say: Say) -> list[str]:
    """Return the flags of `scripts/inference.py` under the names that its files have. Raises `UserError` for
    bad ones."""
    flags: list[str] = []
    rows = flags_of("generate")
    for flag, values in given.items():
        key, takes = flag.replace("-", "_"), rows[flag].takes
        if key == "ckpt_path":
            flags += weights_flags(values[0], tiny, say)
        elif takes == "two":
            flags.append(f"--sampling_option.resolution={'x'.join(values)!r}")
        elif takes == "truth":
            flags.append(f"--{key}={truth(flag, values[0])}")
        elif key == "num_frames":
            flags.append(f"--num_frames={frames_of(values[0])}")
        else:
            flags.append(as_flag(key, values, is_text=takes == "text", is_list=takes == "list"))
    return flags


def translate_inference(work: Translation, tiny: bool) -> None:
    """Translate all keys of an inference file, and flags."""
    old = is_old(work)
    translate_parts(work, old, tiny, trains=False)
    if old:
        work.lay("master_dtype", "bf16")  # nothing trains, so weights are stored in the dtype of the matmuls
    _image_size(work)
    _rates(work)
    apply_rows(work, INFERENCE)
    _loops(work)
    _prompts(work)
    if (node := work.take("sample_name")) is not None and plain(node):
        work.put("save_prefix", f"{plain(node)}_", node)
    if (peers := math.gcd(world_size(), _TINY_HEADS if tiny else _HEADS)) > 1 and work.get("parallel.sequence") is None:
        work.say(f"parallel.sequence = {peers}: the processes share each video, as there")
        work.put("parallel.sequence", peers, work.tree)


def _image_size(work: Translation) -> None:
    """`image_size` -> `sampling_option.resolution`."""
    size = work.take("image_size")
    if size is None or (sides := plain(size)) is None:
        return
    if not isinstance(sides, (list, tuple)) or len(sides) != 2:
        work.refuse("image_size", size, "must be (height, width)")
    else:
        work.put("sampling_option.resolution", f"{sides[0]}x{sides[1]}", size)


def _rates(work: Translation) -> None:
    """`save_fps` is the rate that the model is told; frames are not left out of a video. A preset has one for both."""
    own = work.get("fps_save")
    saved, told = work.take("save_fps"), work.get("fps")
    saved = saved if value_of(saved) is not None else own
    told = told if value_of(told) is not None else own
    if saved is None or told is None:
        if saved is not None:
            work.put("fps_save", plain(saved), saved)
    elif plain(saved) != plain(told):
        rule = f"is not fps = {plain(told)}, which the model is told"
        work.refuse("save_fps", saved, rule, "write the same for both, as --fps and --save-fps")


def _loops(work: Translation) -> None:
    """`loop`, `condition_frame_length`, `condition_frame_edit` -> `num_clips`, `carries`."""
    loop, length, edit = (work.take(name) for name in ("loop", "condition_frame_length", "condition_frame_edit"))
    clips = value_of(loop) or 1
    if loop is None or clips == 1:
        for name, node in (("condition_frame_length", length), ("condition_frame_edit", edit)):
            if node is not None and work.heights.is_flag(node.origin):
                work.note(name, node, "does nothing with one clip, as there")
        return
    frames, ratio = value_of(length) or _CARRIED, value_of(edit) or 0.0
    if not isinstance(frames, int) or frames % _CARRIED:
        work.refuse("condition_frame_length", length or loop, f"must be a multiple of {_CARRIED}, 17 frames of a video")
        return
    work.put("num_clips", clips, loop)
    work.put("carries", carried(frames, ratio), loop)


def _prompts(work: Translation) -> None:
    """`prompt`, `prompt_path`, `reference_path`, `mask_strategy` -> `prompt`, `prompts`."""
    path, refs, masks = (work.take(name) for name in ("prompt_path", "reference_path", "mask_strategy"))
    prompt = work.get("prompt")
    given = [node for node in (refs, masks) if node is not None and any(value_of(node) or ())]
    if prompt is not None and path is not None and work.heights(prompt.origin) >= work.heights(path.origin):
        path = None  # a prompt counts before a file of them
    elif path is not None and plain(path) is not None:
        work.take("prompt")
    if not given:
        if path is not None and plain(path) is not None:
            work.put("prompts", plain(path), path)
        return
    start, end = work.take("start_index"), work.take("end_index")
    file = None if path is None else value_of(path)
    if file is None and prompt is None:
        work.refuse("reference_path", given[0], "is of prompts, and there are none", 'write --prompt "..." too')
        return
    texts = [one.text for one in read_prompts(None if file else plain(prompt), file)] if file or prompt else []
    texts = texts[value_of(start) or 0 : value_of(end)]
    told = [_with_tail(text, *pair) for text, pair in zip(texts, _pairs(work, len(texts), refs, masks), strict=False)]
    if told:
        work.put("prompt", told, given[0])


def _pairs(work: Translation, count: int, refs: Node | None, masks: Node | None) -> Sequence[tuple[str, str]]:
    """Return the reference and the strategy of each prompt; none, and a fault, where they are not as many."""
    lists: list[list[str]] = []
    for name, node in (("reference_path", refs), ("mask_strategy", masks)):
        values = value_of(node) or [""] * count
        values = [values] if isinstance(values, str) else list(map(str, values))
        if len(values) != count and node is not None:
            work.refuse(name, node, f"must be as many as the prompts, {count}", "give one for each prompt")
            return ()
        lists.append(values)
    return list(zip(*lists, strict=True))


def _with_tail(text: str, reference: str, strategy: str) -> str:
    """Return a prompt with what is given for it at its end, under what it says itself."""
    words, brace, tail = text.partition("{")
    try:
        own = json.loads(brace + tail) if brace else {}
    except ValueError:
        return text  # which is refused where it is read
    keys = {"reference_path": reference, "mask_strategy": strategy}
    merged = {key: value for key, value in {**keys, **own}.items() if value or key in own}
    return f"{words.strip()} {json.dumps(merged, ensure_ascii=False)}" if merged else text
