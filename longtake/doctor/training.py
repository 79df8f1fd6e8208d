"""Checks of training: weights loaded in full, moved by training, better than those it began with, one clip learned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from longtake.contracts import Conditions, Noised
from longtake.doctor.case import FEW, Case
from longtake.doctor.finding import EXPLAINS, SEEN, SPOILED, SYMPTOM, TRAINED, Finding, left_out
from longtake.models.initial import initial_values
from longtake.parallel.shard import local_tensor
from longtake.system.pretrained import open_pretrained
from longtake.track.trackers import METRICS_FILE, read_lines
from longtake.train.config import RunConfig
from longtake.train.optimizer.update import WeightUpdate

_SAMPLED = 1024  # numbers of a tensor that are kept to see whether it moves
_MOST_DRAWN = 1 << 26  # numbers that are drawn anew, of the smallest matrices; one core takes seconds for them
_MOVED = 1e-4  # of the target, below which training has changed nothing to be seen
_STEPS = 200  # on one clip
_LEARNED = 0.9  # of the loss at the start; healthy runs of four families end at 0.5, where it is called learned
_WARMUP = 10
_WINDOWS = 20  # that a run's losses are cut into


def loaded(case: Case) -> Finding:
    """Whether the weights that the run starts from are there in full."""
    name, model = "weights loaded", case.config.model
    if model.from_pretrained is None:
        return Finding(name, "none given: the run starts from scratch")
    with open_pretrained(model, case.config.lora) as (weights, said):
        missing, surplus, notes = weights.missing, weights.surplus, weights.notes
        count = len(weights)
    figure = f"{count} tensors read, {len(missing)} missing, {len(surplus)} unknown; {said}"
    if missing:
        return Finding(
            name,
            f"{figure}; the first is missing: {missing[0]}",
            "fault",
            "missing weights: they start at random",
            "give files of the whole model; model.strict_load = True refuses such ones",
            SEEN,
        )
    if surplus:
        figure += f"; the first is unknown: {surplus[0]}"
        return Finding(name, figure, "suspect", "weights of another model", "make `model` that of the weights", 0.45)
    return Finding(name, f"{figure}{'; ' if notes else ''}{'; '.join(notes)}")


def sampled(model: nn.Module) -> dict[str, Tensor]:
    """Return some numbers of every parameter that trains, on the CPU."""
    return {name: _some(p) for name, p in model.named_parameters() if p.requires_grad}


def _some(p: Tensor) -> Tensor:
    flat = local_tensor(p.data).flatten()
    return flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu().clone()


def moved(case: Case, before: Mapping[str, Tensor], changed: float, steps: int) -> Finding:
    """Whether what trains has moved in the run's steps; before: `sampled` of the weights that it began with; changed:
    how far predictions have moved since, as a share of what they are to be."""
    name, after = "weights trained", sampled(case.system.denoiser)
    still = [key for key, value in after.items() if torch.equal(value, before[key])]
    adapters = case.system.adapter_parameters()
    figure = f"{len(after) - len(still)} of {len(after)} trained tensors have moved in {steps} steps"
    figure += f", predictions by {changed:.1e} of the target"
    if not after:
        return left_out(name, "nothing trains")
    what = "adapters" if adapters else "weights"
    if len(still) == len(after):
        advice = "check the rates (optim.schedule, optim.groups), freeze and train_only: nothing gets an update"
        return Finding(name, figure, "fault", f"frozen {what}: training does not change them", advice, SEEN)
    if len(still) > len(after) / 2:
        advice = f"check optim.groups, freeze and train_only; the first that stays: {still[0]}"
        return Finding(name, figure, "suspect", f"frozen {what}: most do not change", advice, 0.6)
    if changed < _MOVED:
        advice = f"train longer, or raise {rate_key(case.config)} = {_peak(case):g}"
        return Finding(
            name, figure, "suspect", f"{what} that hardly move: too low a rate, or too few steps", advice, 0.6
        )
    return Finding(name, figure)


def drawn(case: Case) -> Finding | None:
    """Whether blocks of a trained model are as they are drawn at the start; None where that cannot be told. Those that
    start new by the rules of their format, such as a mixer that the weights have none of, are not looked at."""
    model, left = case.system.denoiser, []
    with open_pretrained(case.config.model, case.config.lora) as (weights, _):
        given = {*weights, *weights.missing}
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1 and name in given}
    sums = zip(sorted(sizes, key=sizes.__getitem__), accumulate(sorted(sizes.values())), strict=True)
    names = [name for name, total in sums if total <= _MOST_DRAWN]
    for key in names:
        try:
            first = initial_values(model, key, case.config.seed).get(key)
        except (AttributeError, ValueError):
            continue
        own = _some(model.get_parameter(key))
        if first is not None and first.any() and torch.equal(own, _some(first)):
            left.append(key)
    if not left:
        return None
    figure = f"{len(left)} of {len(names)} matrices are as they were drawn at the start, the first {left[0]}"
    verdict = "fault" if len(left) > len(names) / 20 else "suspect"
    advice = "give the whole model's weights, and see what `freeze` holds back"
    return Finding("weights drawn", figure, verdict, "missing weights: they are as drawn", advice, SEEN - 0.02)


def against_start(before: Sequence[float], after: Sequence[float], pretrained: bool, key: str = "lr") -> Finding:
    """Return the losses of the clips with the run's weights beside those that it began with, at zero learning rate.
    key: where the run writes its rate."""
    name, one, other = "loss beside the start's", fmean(before), fmean(after)
    figure = f"{other:.4f} with the run's weights, {one:.4f} with those it began with"
    figure += " (the base model's)" if pretrained else " (drawn)"
    if other > 1.02 * one:
        advice = f"write a tenth of {key} and begin again from the base; if the loss still rises, see the other causes"
        weight = SPOILED if is_spoiled(before, after, pretrained) else TRAINED
        return Finding(name, figure, "fault", "too high a rate: training has made the model worse", advice, weight)
    return Finding(name, figure)


def is_spoiled(before: Sequence[float], after: Sequence[float], pretrained: bool) -> bool:
    """Whether training has made a model so bad that whatever else it shows comes of that: worse by half than its base.
    Weights as drawn predict zeros, than which much else makes a model worse."""
    return pretrained and fmean(after) > 1.5 * fmean(before)


def averaged(
    raw: Sequence[float], ema: Sequence[float], decay: float | None, steps: int, spoiled: bool = False
) -> Finding:
    """Return the averaged weights beside those as trained. spoiled: training has made those worse than the base, of
    which an average that differs is a symptom."""
    one, other = fmean(raw), fmean(ema)
    figure = f"{other:.4f} with the averaged weights (ema_decay = {decay}), {one:.4f} as trained, after {steps} steps"
    if other > 1.15 * one:
        advice = f"generate with --ema False, or train with ema_decay = {max(0.0, 1 - 10 / max(steps, 20)):.4g}"
        cause = "the average is behind the weights"
        weight = SYMPTOM if spoiled else TRAINED + 0.2
        return Finding("averaged weights", figure, "fault", cause, advice, weight)
    return Finding("averaged weights", figure)


def history(lines: Sequence[Mapping[str, Any]], key: str = "lr") -> Finding:
    """How the loss went, by the run's metrics; key: where the run writes its rate."""
    name = "course of the loss"
    losses = [float(line["loss"]) for line in lines if "loss" in line]
    skipped = sum(bool(line.get("skipped")) for line in lines)
    finite = [loss for loss in losses if math.isfinite(loss)]
    if len(losses) < 2 * _WINDOWS:
        return left_out(name, f"{len(losses)} steps are too few to tell")
    rates = [float(line["lr"]) for line in lines if "lr" in line]
    advice = f"go back to before it rose, with a tenth of {key} = {max(rates):g}, warmup_steps and grad_clip = 1"
    if skipped > len(losses) / 20 or len(finite) < len(losses):
        figure = f"{skipped} of {len(losses)} steps were left out, {len(losses) - len(finite)} losses are not finite"
        return Finding(name, figure, "fault", "too high a rate: steps had to be left out", advice, TRAINED + 0.3)
    size = len(finite) // _WINDOWS
    logs = [math.log(max(loss, 1e-12)) for loss in finite]  # so that one of 1e9 does not hide the others
    windows = [logs[i * size : (i + 1) * size] for i in range(_WINDOWS)]
    means = [fmean(window) for window in windows]
    error = max(stdev(window) for window in windows[-3:]) / size**0.5 if size > 1 else 0.0
    last, best, first = map(math.exp, (fmean(means[-3:]), min(means), means[0]))
    figure = f"{first:.4g} at first, {best:.4g} at best, {last:.4g} at the end"
    if math.log(last / best) > max(0.1, 5 * error):
        weight = TRAINED + (0.45 if last > 0.9 * first else 0.1)
        return Finding(name, figure, "fault", "too high a rate: the loss has risen", advice, weight)
    return Finding(name, figure)


def overfit(case: Case, steps: int = _STEPS, on_progress: Callable[[float], None] = lambda share: None) -> Finding:
    """One clip, its noise at two levels fixed, trained at the run's rate; where its loss does not fall, at lower and
    higher rates too. The weights are put back."""
    name, model = "one clip learned", case.system.denoiser
    kept = {key: p.data.detach().to("cpu", copy=True) for key, p in model.named_parameters() if p.requires_grad}
    if not kept:
        return left_out(name, "nothing trains")
    rate = _peak(case)
    tried: dict[float, float] = {}
    try:
        factors = 1.0, 0.1, 0.01, 10.0
        for number, factor in enumerate(factors):

            def learned(share: float, number: int = number) -> None:
                on_progress((number + share) / len(factors))

            tried[factor] = _learn(case, rate * factor, steps, learned)
            for key, value in kept.items():
                model.get_parameter(key).data.copy_(value)
            if tried[factor] < _LEARNED:
                break
    except torch.OutOfMemoryError:
        return left_out(name, "not enough memory on one device; --quick leaves it out")
    return judge_overfit(tried, rate, steps, rate_key(case.config))


def judge_overfit(tried: Mapping[float, float], rate: float, steps: int, key: str = "lr") -> Finding:
    """tried: factor of the rate -> the loss at the end over that at the start; key: where a run writes its rate."""
    name, own = "one clip learned", tried[1.0]
    figure = "; ".join(f"loss x {left:.3g} at lr {rate * factor:.3g}" for factor, left in tried.items())
    figure += f", in {steps} steps at most"
    better = next((factor for factor, left in tried.items() if left < _LEARNED), None)
    if better == 1.0:
        return Finding(name, figure)
    if better is None:
        if own > 1:
            advice = f"lower {key}"
            return Finding(name, figure, "fault", "too high a rate: one clip is not learned", advice, EXPLAINS)
        advice = f"check {key} = {rate:.3g}, freeze, train_only and optim.groups, and that gradients reach the weights"
        return Finding(
            name, figure, "fault", "the model does not learn: frozen, or without gradients", advice, EXPLAINS
        )
    advice = f"write {key} = {rate * better:.3g}"
    if better < 1:
        return Finding(name, figure, "fault", "too high a rate: one clip is learned at a lower one", advice, 0.97)
    return Finding(name, figure, "suspect", "too low a rate to learn one clip", advice, 0.3)


def rate_key(config: RunConfig) -> str:
    """Return the key that the rate of a run stands in."""
    if config.optim.schedule:
        return "the highest rate of optim.schedule"
    return "lr" if config.optim.lr is None else "optim.lr"


def _peak(case: Case) -> float:
    """Return the highest rate of the run."""
    optim = case.config.optim
    points = [point[1] for point in optim.schedule] if optim.schedule else []
    return max(points) if points else optim.lr or case.config.lr


def _learn(case: Case, rate: float, steps: int, on_progress: Callable[[float], None]) -> float:
    """Return the loss of one clip after training on it, over that before; ends early where it has halved, or
    is lost."""
    system = case.system
    update = WeightUpdate(system.denoiser, case.config.model_copy(update={"ema_decay": None}))
    examples = [_first_clip(*case.clean.noised(case.system, level=case.level(one))) for one in FEW]
    first = None
    for step in range(1, steps + 2):
        losses = []
        for noised, conditions in examples:
            prediction = system.denoiser(noised.x, noised.t, conditions)
            loss = system.objective.loss(prediction, noised).mean() / len(examples)
            loss.backward()
            losses.append(float(loss.detach()))
        total = sum(losses)
        first = total if first is None else first
        if step > steps or not math.isfinite(total) or total < 0.5 * first or total > 100 * first:
            break
        update(step, rate * min(1.0, step / _WARMUP), update.optimizer.grad_square_sum(), None)
        on_progress(step / steps)
    system.denoiser.zero_grad(set_to_none=True)
    return total / first if math.isfinite(total) else math.inf


def _first_clip(noised: Noised, conditions: Conditions) -> tuple[Noised, Conditions]:
    one = {name: None if value is None else value[:1] for name, value in vars(noised).items()}
    return Noised(**one), conditions.map(lambda tensor: tensor[:1])


def lines_of(folder: Any) -> list[dict[str, Any]]:
    """Return the metrics of a run, one for each step; none where it has none."""
    path = folder / METRICS_FILE
    return read_lines(path) if path.exists() else []
