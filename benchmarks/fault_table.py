"""The faults that `faults.py` plants: mistakes that a change of the code might make, each in another part of it.

An old text is as short as it can be and stands once in the package, so that it follows code that moves to another file.
Code that is written anew takes its fault along: the same mistake, in the new words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Edit:
    """One place of a fault."""

    file: str  # where the text is looked for first, from the root; then in the whole package
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A mistake, and the test files that should find it, the quick ones first."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


def _fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(name, (Edit(f"longtake/{file}.py", old, new),), tuple(f"tests/{test}.py" for test in tests))


FAULTS = (
    # The order of the samples
    _fault(
        "a sample lost: micro-batches that fill no whole forward of neighbours are left out",
        "buckets/deal",
        "for start in range(0, len(together), size):",
        "for start in range(0, len(together) - size + 1, size):",
        *("buckets/test_deal", "parallel/test_bucket_sequence"),
    ),
    _fault(
        "a sample twice: the last sample of an era counts as not passed",
        "buckets/sweep",
        "(keys <= last_key[place])",
        "(keys < last_key[place])",
        *("buckets/test_eras", "buckets/test_order"),
    ),
    _fault(
        "a stale key on resume: the last keys are those of the window's start",
        "buckets/order",
        '"last": self._last_keys(slot),',
        '"last": self._last_keys(windows * window_slots),',
        *("buckets/test_eras", "buckets/test_order"),
    ),
    _fault(
        "keeping and skipping share a draw",
        "buckets/assign",
        "resolution.name, entry, True, draw)",
        "resolution.name, entry, False, draw)",
        *("buckets/test_assign", "buckets/test_laws"),
    ),
    _fault(
        "the pass of the clock stays that of the launch",
        "train/loop",
        "self.clock.tick(step.pass_index,",
        "self.clock.tick(order.pass_index,",
        "train/test_resume",
    ),
    # Random choices
    _fault(
        "dropout draws with the purpose of the condition's kind",
        "system/examples",
        'Purpose.DROPOUT, "uniform"',
        'Purpose.MASK, "uniform"',
        *("system/test_build", "data/loading/test_draws", "data/loading/test_dataset"),
    ),
    _fault(
        "the wrong view: windows are drawn by the pass where a store was made by views",
        "data/loading/draws",
        "Purpose.WINDOW, view_of(slot.pass_index, views),",
        "Purpose.WINDOW, slot.pass_index,",
        *("data/loading/test_draws", "train/test_latents"),
    ),
    # Clips
    _fault(
        "the last window of a clip is never taken",
        "data/clips/transforms",
        "int(u * (total - span + 1))",
        "int(u * (total - span))",
        "data/clips/test_frames",
    ),
    _fault(
        "the caption's rate is rounded half to even",
        "data/clips/captions",
        "math.floor(known_fps + 0.5)",
        "round(known_fps)",
        "data/clips/test_captions",
    ),
    _fault(
        "the quarantine is not on disk before its step",
        "data/loading/quarantine",
        "            os.fsync(descriptor)\n",
        "",
        *("data/loading/test_quarantine", "train/test_kills"),
    ),
    _fault(
        "an edit list that hides the first frames is passed over",
        "data/probing/mp4",
        " or begin > shown.min():",
        ":",
        *("data/probing/test_probe", "data/probing/test_formats", "data/probing/test_zoo"),
    ),
    # The objective and the loss
    _fault(
        "the mask of the loss is the first channel of the known latents",
        "diffusion/known",
        "counted=(~held).to(noised.target)",
        "counted=1 - known.latents[:, :1, :, :1, :1].to(noised.target)",
        *("train/test_known_frames", "train/test_image_to_video"),
    ),
    _fault(
        "the shift of timesteps cuts tokens at an odd edge off",
        "diffusion/flow",
        "-(-height // self.patch_size) * -(-width // self.patch_size)",
        "(height // self.patch_size) * (width // self.patch_size)",
        *("diffusion/test_flow", "diffusion/test_timesteps", "diffusion/test_golden_runs"),
    ),
    _fault(
        "the posterior of frames known at the end is drawn with the numbers of the beginning",
        "system/known_frames",
        'batch.draws["posterior"][row, :, frames]',
        'batch.draws["posterior"][row, :, : len(window.frames)]',
        *("train/test_known_frames", "system/test_encoded"),
    ),
    _fault(
        "the branch of guidance without known frames keeps the prompt",
        "generate/sample",
        "NOTHING: blank[NEGATIVE]",
        "NOTHING: blank[PROMPT]",
        *("generate/test_sample", "generate/test_known_frames", "generate/test_golden"),
    ),
    # A step
    _fault(
        "a missed reduction: replicas are summed after the first micro-batch alone",
        "train/loop",
        "set_requires_all_reduce(i == last)",
        "set_requires_all_reduce(i == 0)",
        *("train/test_worlds", "parallel/test_runs", "parallel/test_law_of_meshes"),
    ),
    _fault(
        "the gradient is divided by this rank's micro-batches, not by those of the step",
        "train/loop",
        "mesh.data_ranks * peers.at_once(batch.bucket) / divisor",
        "peers.at_once(batch.bucket) / len(step.turns)",
        *("train/test_worlds", "parallel/test_runs"),
    ),
    _fault(
        "the average is a step late",
        "train/optimizer/update",
        "self.ema.update(step, skip)",
        "self.ema.update(step - 1, skip)",
        *("train/optimizer/test_ema", "train/optimizer/test_runs"),
    ),
    _fault(
        "no float32 masters where the run computes in bf16",
        "system/build",
        'if config.master_dtype == "bf16":',
        'if "bf16" in (config.master_dtype, config.dtype):',
        *("system/test_build", "train/optimizer/test_runs", "parallel/test_shard"),
    ),
    _fault(
        "the block of quantised moments follows from a rank's shard",
        "train/optimizer/sharded",
        "block_size(tuple(p.shape))",
        "block_size(tuple(local.shape))",
        *("train/optimizer/test_quantise", "train/optimizer/test_meshes"),
    ),
    _fault(
        "a race: moments come in before those that lay there have left",
        "parallel/host",
        "self._to_device.wait_event(self._freed[place])",
        "pass",
        *("train/optimizer/test_storage", "pretended/test_devices"),
    ),
    # Meshes
    _fault(
        "swapped ranks: a peer's place among sequence and among tensor peers",
        "parallel/mesh",
        "index, tensor_index = divmod(self.rank - first, self.tensor)",
        "tensor_index, index = divmod(self.rank - first, sequence)",
        *("parallel/test_mesh", "parallel/test_law_of_meshes"),
    ),
    _fault(
        "the wrong shard of a fused layer's third part",
        "parallel/tensor",
        "        start += size\n",
        "        start = size\n",
        *("parallel/test_shard", "parallel/test_law_of_meshes"),
    ),
    _fault(
        "ring attention takes its own block in every turn of backward",
        "parallel/ring",
        "attend_block_backward(grad, q, keys[0], keys[1], out, lse, backend)",
        "attend_block_backward(grad, q, k, v, out, lse, backend)",
        *("parallel/test_ring", "parallel/test_law_of_meshes"),
    ),
    _fault(
        "blocks are computed again with the lengths of a later forward",
        "parallel/recomputation",
        "return nullcontext(), cut.captured()",
        "return nullcontext(), nullcontext()",
        *("parallel/test_recompute_of_peers", "parallel/test_law_of_meshes"),
    ),
    # Checkpoints and runs
    _fault(
        "a checkpoint's tensors are not on disk when COMPLETE says so",
        "checkpoint/writer",
        "os.fsync(stream.fileno())",
        "stream.flush()",
        *("checkpoint/test_save_and_load", "checkpoint/test_background", "train/test_kills"),
    ),
    Fault(
        "COMPLETE stands in the folder before its state does",
        (
            Edit("longtake/checkpoint/writer.py", "    write_whole(partial / STATE_FILE, state)\n", ""),
            Edit(
                "longtake/checkpoint/writer.py",
                "    replace(partial, target)\n",
                "    replace(partial, target)\n    write_whole(target / STATE_FILE, state)\n",
            ),
        ),
        ("tests/checkpoint/test_save_and_load.py", "tests/checkpoint/test_background.py", "tests/train/test_kills.py"),
    ),
    _fault(
        "of fewer checkpoints than are to be kept the oldest is removed",
        "checkpoint/runs",
        "complete[:-keep_n_latest]",
        "complete[: len(complete) - keep_n_latest]",
        "checkpoint/test_runs",
    ),
    _fault(
        "a run that goes on forgets its seconds",
        "train/start",
        "if not place.continues:\n        state",
        "if True:\n        state",
        *("train/health/test_goodput", "train/test_resume"),
    ),
    _fault(
        "the step after the checkpoint stays in the metrics",
        "track/trackers",
        'record["step"] <= last_step]',
        'record["step"] <= last_step + 1]',
        *("track/test_trackers", "train/test_resume"),
    ),
    # Weights, adapters, encoders, stores, plans
    _fault(
        "alpha of PEFT's file is taken to be the rank",
        "weights/lora_config",
        'positive_number(values["lora_alpha"], f"{place}: lora_alpha") if "lora_alpha" in values else None',
        "None",
        *("weights/test_lora", "system/test_lora"),
    ),
    _fault(
        "norms of heads are not reordered with their projections",
        "weights/mmdit",
        '"*.k_proj.*", "*.query_norm.*", "*.key_norm.*")',
        '"*.k_proj.*")',
        *("weights/test_mmdit", "weights/test_diffusers_flux"),
    ),
    _fault(
        "tiles fade over one cell less",
        "encoders/tiles",
        "dtype=torch.float64, device=after.device) / extent",
        "dtype=torch.float64, device=after.device) / max(1, extent - 1)",
        *("encoders/test_tiles", "encoders/test_kl"),
    ),
    _fault(
        "parts of a store that several ranks make overlap",
        "encode/run",
        "part - 1 + parts * rank",
        "part - 1 + rank",
        *("encode/test_run", "encode/test_cli"),
    ),
    _fault(
        "the plan counts gradients of the first micro-batch from the third on",
        "plan/memory",
        "layout.micro_batches > 1",
        "layout.micro_batches > 2",
        *("plan/test_memory", "plan/test_run"),
    ),
    # Configs, other systems' words, launches
    _fault(
        "a flag does not change what the bases of a base derive",
        "config/layers",
        "(name in layer.child.places or self.is_overridden(layer.child, name))",
        "name in layer.child.places",
        *("config/test_laws", "config/test_layers"),
    ),
    _fault(
        "an expression that the evaluator does not know is executed",
        "config/evaluator",
        'self.fault(expr, "cannot stand in a configuration", ALLOWED)',
        'return eval(compile(ast.Expression(expr), self.file, "eval"), {"__builtins__": {}})',
        *("config/test_reader", "config/test_fuzz", "config/test_faults"),
    ),
    _fault(
        "Open-Sora's buffer of recomputed blocks counts bytes",
        "dialects/opensora_v2/training",
        "size *= ELEMENT_BYTES.get(dtype, 2)",
        "size *= 1",
        "dialects/test_training_words",
    ),
    _fault(
        "a second request to stop postpones the end",
        "cluster/host",
        "min(end, self._kill_at)",
        "end",
        *("cluster/test_host", "cluster/test_launch"),
    ),
)


def place_of(tree: Path, edit: Edit) -> Path:
    """The one file of a tree in which an edit's old text stands, once. Raises ValueError with what is wrong."""
    named = tree / edit.file
    files = [named] if named.is_file() and edit.old in named.read_text(encoding="utf-8") else []
    files = files or [path for path in sorted((tree / "longtake").rglob("*.py")) if edit.old in path.read_text("utf-8")]
    counts = {path: path.read_text(encoding="utf-8").count(edit.old) for path in files}
    if list(counts.values()) != [1]:
        found = ", ".join(f"{path.relative_to(tree)} ({count})" for path, count in counts.items()) or "nowhere"
        raise ValueError(f"{edit.old!r} must stand once, in {edit.file} or elsewhere in longtake; found: {found}")
    return files[0]


def check(tree: Path) -> list[str]:
    """What of the table does not fit a tree, a line each."""
    wrong = []
    for fault in FAULTS:
        wrong += [f"{fault.name}: no file {test}" for test in fault.tests if not (tree / test).is_file()]
        for edit in fault.edits:
            try:
                place_of(tree, edit)
            except ValueError as error:
                wrong.append(f"{fault.name}: {error}")
    return wrong
