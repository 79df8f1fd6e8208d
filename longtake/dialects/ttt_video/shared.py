"""What training and sampling share of TTT-Video's words: the model, its weights, how it is spread and recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtake.config import load_config
from longtake.config.tree import Branch, Node, plain
from longtake.dialects.tiny_weights import leave_out_tiny_weights
from longtake.dialects.translation import Fixed, Translation
from longtake.dialects.ttt_video.words import sections_of
from longtake.presets import find_preset

LENGTHS = ("3sec", "9sec", "18sec", "30sec", "63sec")
MIXERS = ("ttt_mlp", "ttt_linear", "none", "large_chunk")
_SIZES: Mapping[str, Mapping[str, int]] = {
    "5B": {},
    "debug": {"num_attention_heads": 8, "num_layers": 6, "text_embed_dim": 512},
}
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
MOVED = {
    **{name: name for name in ("model.ttt_base_lr", "model.mini_batch_size")},
    "parallelism.dp_replicate": "parallel.replicate",
    "parallelism.dp_sharding": "parallel.shard",
    "parallelism.tp_sharding": "parallel.tensor",
}
_RECOMPUTED = "model.grad_ckpt_settings: all blocks are recomputed, once"
_KEPT = "not needed. Each block is recomputed once; the outputs of attention and of both scans are kept"
REMAT = {
    "transformer_checkpoint_layer_group_size": _RECOMPUTED,
    "scan_checkpoint_group_size": "the scan keeps its state as often as the square root of its steps",
    **dict.fromkeys(("forward_ssm", "reverse_ssm", "attention", "mlp", "seq_modeling_block"), _KEPT),
    "shard_transformer_inputs": "the inputs of recomputed blocks are cut over tensor peers in any case",
}


class Words:
    """The words of the other system with their values, each that is not written at its default."""

    def __init__(self, found: Mapping[str, tuple[Any, Node | None]], low: Node) -> None:
        self._found, self._low = found, low

    def __getitem__(self, name: str) -> Any:
        """Its value."""
        return self._found[name][0]

    def node(self, name: str) -> Node:
        """Where it is written, else the lowest place of all."""
        return self._found[name][1] or self._low

    def move(self, work: Translation, names: Mapping[str, str]) -> None:
        """Puts words that have a value under Longtake's names: name there -> name here."""
        for old, new in names.items():
            if self[old] not in (None, ""):
                work.put(new, self[old], self.node(old))

    def is_given(self, name: str) -> bool:
        """Whether it is written anywhere."""
        return self._found[name][1] is not None


def complete(work: Translation, verb: str) -> Words:
    """Takes every section of TTT-Video's out of the tree. Words that there are none of, and values of another kind than
    their defaults, are reported."""
    found: dict[str, tuple[Any, Node | None]] = {}
    for section, defaults in sections_of(verb).items():
        for key, default in defaults.items():
            node = work.take(f"{section}.{key}")
            value = default if node is None else plain(node)
            if node is not None and (kind := _wanted(value, default)) is not None:
                work.refuse(f"{section}.{key}", node, f"must be {kind}", f"write for example {default!r}")
                value = default
            if isinstance(default, int) and not isinstance(default, bool):
                value = int(value)
            found[f"{section}.{key}"] = value, node
        left = work.get(section)
        if section != "model" and isinstance(left, Branch):  # whose other keys are Longtake's
            work.refuse_rest(section, sorted(defaults))
    return Words(found, work.tree)


def _wanted(value: Any, default: Any) -> str | None:
    """The kind of value that a word must have where this one is of another."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return None if number and float(value).is_integer() else "a whole number"
    if isinstance(default, float):
        return None if number else "a number"
    return None if isinstance(value, (str, list, tuple)) or (value is None and default is None) else "text"


def lay_preset(work: Translation, words: Words, kind: str, tiny: bool) -> Mapping[str, Any]:
    """Lays Longtake's preset of the same stage beneath all that is written, and returns its keys."""
    length = words["model.video_length"] if words["model.video_length"] in LENGTHS else LENGTHS[0]
    mixer = words["model.ssm_layer"] if words["model.ssm_layer"] in MIXERS[:2] else MIXERS[0]
    between = "/" if kind == "train" else "_"
    file = find_preset(f"ttt_video/{mixer}{between}{length.removesuffix('ec')}", kind)
    assert file is not None, "there is one for each"
    tree = load_config(file, [], dict[str, Any]).tree
    own = tree if not tiny else {name: tree[name] for name in tree if name not in ("ae", "t5")}
    for name, value in own.items():
        if name != "exp_name" and (name != "bucket_config" or work.get(name) is None):  # --tiny has one of its own
            work.put(name, value, work.tree)
    return tree


def translate_model(work: Translation, words: Words, tiny: bool) -> None:
    """`model`, `checkpoint.init_state_dir`, `parallelism`, `remat` -> `model`, `ae`, `parallel`."""
    fix_word(work, words, "model.name", Fixed(("cogvideo",), "", "there is no other"))
    if words.is_given("model.norm_eps"):
        work.note("model.norm_eps", words.node("model.norm_eps"), "is read nowhere there: norms have 1e-6")
    if (size := choice(work, words, "model.size", _SIZES)) is not None and not tiny:
        for key, value in _SIZES[size].items():
            work.put(f"model.{key}", value, words.node("model.size"))
        if size == "debug":
            work.put("t5.dim", _SIZES[size]["text_embed_dim"], words.node("model.size"))
    mixer = choice(work, words, "model.ssm_layer", MIXERS)
    work.put("model.mixer", mixer, words.node("model.ssm_layer"))
    words.move(work, MOVED)
    weights = words.node("checkpoint.init_state_dir")
    if not words.is_given("checkpoint.init_state_dir") and not work.is_flag("model.from_pretrained"):
        work.take("model.from_pretrained")
    if tiny:
        leave_out_tiny_weights(work)
    if folder := words["checkpoint.init_state_dir"]:
        if not Path(folder).expanduser().exists():
            work.refuse("checkpoint.init_state_dir", weights, "is not there", "give the folder of a checkpoint")
        elif tiny:
            work.note("checkpoint.init_state_dir", weights, "--tiny leaves its weights out")
        else:
            work.put("model.from_pretrained", folder, weights)
    for text in dict.fromkeys(REMAT.values()):
        given = [key for key, said in REMAT.items() if said == text and words.is_given(f"remat.{key}")]
        if given := [key for key in given if words[f"remat.{key}"] is not False]:
            work.say(f"{', '.join(f'remat.{key}' for key in given)}: {text}")


def put_dtype(work: Translation, words: Words, name: str) -> None:
    """The dtype that the model computes in."""
    value = words[name]
    if value not in _DTYPES:
        fix = f"choose {' or '.join(_DTYPES)}" + ("; bf16 needs no loss scale" if value == "float16" else "")
        work.refuse(name, words.node(name), "is not here", fix)
        return
    work.put("dtype", _DTYPES[value], words.node(name))


def at_least(work: Translation, words: Words, least: Mapping[str, int]) -> None:
    """Reports numbers below the least that there can be."""
    for name, number in least.items():
        if words[name] < number:
            work.refuse(name, words.node(name), f"must be {number} or more")


def choice(work: Translation, words: Words, name: str, known: Any) -> Any:
    """A word's value; None, and a fault, for one that is none of those known."""
    if words[name] in known:
        return words[name]
    work.refuse(name, words.node(name), f"must be one of {', '.join(map(str, known))}")
    return None


def fix_word(work: Translation, words: Words, name: str, fixed: Fixed) -> None:
    """A word that can have some values only."""
    if words[name] not in fixed.values:
        work.refuse(name, words.node(name), f"must be {' or '.join(map(str, fixed.values))} here", fixed.otherwise)
    elif fixed.stands and words.is_given(name):
        work.note(name, words.node(name), fixed.stands)
