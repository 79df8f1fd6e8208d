"""Checks of what the model makes of the clips: its loss by noise level, what other conventions would make of it, and
whether it reads its captions, times and conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longtake.contracts import Conditions
from longtake.doctor.case import FEW, QUANTILES, Case, Shot
from longtake.doctor.finding import EXPLAINS, SEEN, SYMPTOM, TRAINED, UNTRAINED, Finding, left_out
from longtake.doctor.measures import change, in_one_cell
from longtake.parallel.shard import local_tensor
from longtake.system.examples import kinds_apart

_GOOD = 0.8  # an alternative is believed from here on, of a plain guess's error; small models of 250 steps have 0.4
_BETTER = 0.1  # by which it has to be better (natural logarithm); healthy runs have up to 0.06, planted faults 0.3
_FEWEST = 4  # clips by which alternatives are compared
_SURE = 3.0  # standard errors over the clips
# Share of wrong captions that are worse: half where captions say nothing of their clips, all where they say everything
_RIGHT = 0.65
_UNSURE = 0.6  # from here on it may be a run that has just begun to learn them
_OTHERS = 7  # captions that each clip is tried with
_READS = 1e-4  # relative change of a prediction below which a time, a caption or a condition is not read
_ROUNDING = 1e-6  # relative change of a prediction that rounding in float32 explains


def curve(case: Case, name: str = "loss by noise level") -> Finding:
    """Return the losses beside those of an untrained model, which says nothing, and how many times the error of a
    guess from mean and spread the model makes."""
    shots = [case.shot(case.level(share)) for share in QUANTILES]
    objective = case.system.objective
    loss = [float(objective.loss(shot.prediction, shot.noised).mean()) for shot in shots]
    silent = [float(objective.loss(torch.zeros_like(shot.prediction), shot.noised).mean()) for shot in shots]
    skills = [float(shot.skill().mean()) for shot in shots]
    rows = zip((f"{case.level(share):.2f}" for share in QUANTILES), loss, silent, skills, strict=True)
    figure = "; ".join(f"at {at}: {own:.3f} of {none:.3f}, x {skill:.2f}" for at, own, none, skill in rows)
    if not all(map(math.isfinite, loss)):
        advice = "go back to the last checkpoint whose loss was finite, with a lower lr"
        return Finding(name, figure, "fault", "predictions are not finite", advice, SEEN)
    if not case.trained:
        return left_out(name, UNTRAINED)
    mean = math.exp(sum(map(math.log, skills)) / len(skills))
    if mean > 1:
        advice = "see the other causes; if there are none, it has trained too little: go on"
        verdict = "fault" if mean > 1.3 else "suspect"
        return Finding(name, figure, verdict, "the model knows less than the latents' mean and spread", advice, SYMPTOM)
    return Finding(name, figure)


@dataclass(frozen=True)
class Other:
    """Something that could be otherwise, and how good the model is with it."""

    what: str
    cause: str
    advice: str
    skills: Tensor  # [levels, B]

    @property
    def kind(self) -> str:
        """The cause without the particulars, such as the factor of a scale."""
        return self.cause.partition(":")[0]


def alternatives(case: Case) -> Finding:
    """Whether the model is good once the clips, the latents, the time or the prediction are taken otherwise."""
    name = "other conventions"
    if not case.trained:
        return left_out(name, UNTRAINED)
    if case.count < _FEWEST:
        return left_out(name, f"{case.count} clips are too few to compare; --clips {_FEWEST} or more")
    levels = [case.level(share) for share in FEW]
    shots = [case.shot(level) for level in levels]
    own = torch.stack([shot.skill() for shot in shots])
    tried = [
        *_predictions(shots),
        *_told(case, levels),
        *_latents(case, levels),
        *_conditions(case, levels),
    ]
    surest = max(tried, key=lambda other: _sure_gain(own, other.skills))
    alike = [other for other in tried if other.kind == surest.kind and _sure_gain(own, other.skills) > 0]
    best = max(alike or [surest], key=lambda other: _gain(own, other.skills)[0])
    gain = _gain(own, best.skills)[0]
    good = float(best.skills.log().mean().exp())
    figure = f"{float(own.log().mean().exp()):.2f} of a plain guess's error as it is; {good:.2f} with {best.what}"
    figure += f", the best of {len(tried)} others"
    if gain > _BETTER and _sure_gain(own, best.skills) > 0 and good < _GOOD:
        return Finding(name, figure, "fault", best.cause, best.advice, EXPLAINS + 0.35 * (1 - good))
    return Finding(name, figure)


def _gain(own: Tensor, other: Tensor) -> tuple[float, float]:
    """How much lower the error of the others is, as a logarithm, and its standard error over the clips."""
    ratio = (own.clamp_min(1e-9).log() - other.nan_to_num(1e9).clamp_min(1e-9).log()).mean(0)
    return float(ratio.mean()), float(ratio.std() / len(ratio) ** 0.5) if len(ratio) > 1 else 0.0


def _sure_gain(own: Tensor, other: Tensor) -> float:
    """What is left of the gain if it is `_SURE` standard errors lower: a change that helps all clips comes before one
    that helps a few of them more."""
    gain, error = _gain(own, other)
    return gain - _SURE * error


def _predictions(shots: list[Shot]) -> Iterator[Other]:
    for what in shots[0].line.predictions():
        found = [shot.line.predictions().get(what, shot.line) for shot in shots]
        skills = torch.stack([shot.skill(line) for shot, line in zip(shots, found, strict=True)])
        yield Other(
            f"its prediction read as {what}",
            f"wrong prediction type: the model predicts {what}",
            "change the keys of `objective` to those that the weights were trained with",
            skills,
        )


def _told(case: Case, levels: list[float]) -> Iterator[Other]:
    whole = case.system.objective.noise_time
    unit = 1000.0 if whole <= 1 else 1 / 1000.0
    for what, tell in {
        "time told backwards": lambda t: whole - t,
        f"time times {unit:g}": lambda t: t * unit,
    }.items():
        skills = torch.stack([case.shot(level, told=tell(level * whole)).skill() for level in levels])
        advice = "change objective.type to that of the weights, or the times that they are told"
        yield Other(what, f"wrong time convention: right with {what}", advice, skills)


def _latents(case: Case, levels: list[float]) -> Iterator[Other]:
    own = case.latents
    factors = [1 / 8, 1 / 5.5, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1.5, 2, 3, 4, 5.5, 8]
    for factor in factors:
        what = f"latents times {factor:.3g}"
        advice = f"write the scale that the weights were trained with, near {case.scale_times(factor)}"
        yield Other(what, f"wrong scaling of latents: right with {what}", advice, _of(case, levels, own * factor))
    b, c, f, h, w = own.shape
    swapped = {"latents' frames and channels swapped": own.reshape(b, f, c, h, w).transpose(1, 2)} if f > 1 else {}
    swapped |= {"latents' rows and columns swapped": own.transpose(3, 4)} if h == w > 1 else {}
    if case.system.encoders is not None and case.batch.video.numel():
        video = case.batch.video
        pixels = {"colours from blue to red": video.flip(1), "frames from last to first": video.flip(2)}
        if video.shape[3] == video.shape[4]:
            pixels["rows and columns of pixels swapped"] = video.transpose(3, 4).contiguous()
        with torch.no_grad():
            swapped |= {
                f"the {what}": case.system.encode(replace(case.batch, video=other))
                for what, other in pixels.items()
                if other.shape[2] > 1 or "frames" not in what
            }
    for what, latents in swapped.items():
        advice = "read the clips, or the stored latents, in the order that the weights were trained with"
        yield Other(what, f"swapped: right with {what}", advice, _of(case, levels, latents.contiguous()))


def _of(case: Case, levels: list[float], latents: Tensor) -> Tensor:
    return torch.stack([case.shot(level, latents).skill() for level in levels])


def _conditions(case: Case, levels: list[float]) -> Iterator[Other]:
    """Facts of the clips, such as a rate, half and twice as large."""
    for fact in _facts(case):
        for factor in (0.5, 2.0):
            skills = torch.stack([case.shot(level, changed=_times(fact, factor)).skill() for level in levels])
            cause = f"wrong {fact}: right when it is {factor:g} times what the clips are said to have"
            yield Other(f"{fact} times {factor:g}", cause, "probe the clips again (`longtake data probe`)", skills)


def _facts(case: Case) -> list[str]:
    texts = {text.condition for text in case.config.family.texts}
    return [name for name in case.config.model.conditions if name not in texts]


def _times(fact: str, factor: float) -> Callable[[Conditions], Conditions]:
    def changed(conditions: Conditions) -> Conditions:
        value = conditions.get(fact)
        is_fact = value is not None and value.is_floating_point() and value.dim() <= 2
        return conditions.updated(**{fact: value * factor}) if is_fact else conditions

    return changed


def text(case: Case) -> Finding:
    """Return the loss with the right caption, with those of the other clips, and with none."""
    name = "captions used"
    if not case.trained:
        return left_out(name, UNTRAINED)
    written, count = case.batch.text, case.count
    others = range(1, min(count, _OTHERS + 1))
    pairs = [(i, (i + k) % count) for k in others for i in range(count)]
    different = torch.tensor([written[i] != written[j] for i, j in pairs]).view(-1, count)
    if count < 3 or different.sum() < count:
        return left_out(name, "too few different captions among the clips")
    levels = [case.level(share) for share in FEW]
    right = [case.shot(level) for level in levels]
    none = [case.shot(level, text=case.no_text) for level in levels]
    own = torch.stack([shot.skill() for shot in right]).log().mean(0)
    without = torch.stack([shot.skill() for shot in none]).log().mean(0)
    wrong, moved = [], []
    for k in others:
        roll = case.text.map(lambda value, k=k: value.roll(-k, 0))
        shots = [case.shot(level, text=roll) for level in levels]
        wrong.append(torch.stack([shot.skill() for shot in shots]).log().mean(0))
        moved += [change(a.prediction, b.prediction) for a, b in zip(right, shots, strict=True)]
    excess = torch.stack(wrong) - own  # [others, count]: above 0 where the clip's own caption is better
    return judge_text(excess[different], max(moved), float((without - own).mean()), good=float(own.mean()) < 0)


def judge_text(excess: Tensor, moved: float, without: float, good: bool) -> Finding:
    """excess: by how much (natural logarithm) each wrong caption's error is above the right one's; moved: the largest
    change of a prediction that a wrong caption makes; without: the mean excess with no caption; good: whether the
    model knows anything."""
    name, better = "captions used", float((excess > 0).float().mean())
    figure = (
        f"error {math.expm1(float(excess.mean())):+.1%} with wrong captions, {math.expm1(without):+.1%} with none; "
    )
    figure += f"the right one is better than {better:.0%} of the wrong, which change predictions by {moved:.1%}"
    if moved < _READS:
        advice = "check that embeddings reach the model: the text encoder's width, dropout_ratio, weights of its layers"
        return Finding(name, figure, "fault", "dead captions: the model does not read them", advice, EXPLAINS)
    if better >= _RIGHT:
        return Finding(name, figure)
    if good and float(excess.abs().median()) > 0.01:  # it goes by captions, and not by the right ones
        advice = "compare some rows of the table with their clips: the column or the order of its rows is another's"
        if better < _UNSURE:
            cause = "shuffled captions: they are not those of their clips"
            return Finding(name, figure, "fault", cause, advice, TRAINED + 0.05)
        cause = "shuffled captions, or not learned yet: the right ones are hardly better"
        return Finding(name, figure, "suspect", cause, f"train longer, and {advice}", SYMPTOM + 0.05)
    advice = "train longer, or raise the learning rate; with dropout_ratio near 1 captions are never seen"
    return Finding(name, figure, "suspect", "captions make no difference to the model", advice, SYMPTOM + 0.05)


def conditions(case: Case) -> Finding:
    """Whether the model reads the other things that it is conditioned on."""
    name, level = "conditions used", case.level(0.5)
    if not case.trained:
        return left_out(name, UNTRAINED)
    if not (facts := _facts(case)):
        return left_out(name, "the model has none beside its captions")
    plain, found = case.shot(level), {}
    for fact in facts:
        other = case.shot(level, changed=_times(fact, 1.5))
        given = case.clean.conditions
        if fact in given and float(_times(fact, 1.5)(given)[fact].float().sub(given[fact].float()).abs().max()) > 0:
            found[fact] = change(plain.prediction, other.prediction)
    if not found:
        return left_out(name, "nothing of the kind is given to it here")
    figure = ", ".join(
        f"{fact} half as large again changes predictions by {value:.2%}" for fact, value in found.items()
    )
    if dead := [fact for fact, value in found.items() if value < 1e-7 and could_be_read(case, fact, level)]:
        advice = "check that the weights have its layers, and that they are trained"
        return Finding(name, figure, "suspect", f"{dead[0]} is not read by the model", advice, 0.3)
    return Finding(name, figure)


@torch.no_grad()
def could_be_read(case: Case, fact: str, level: float) -> bool:
    """Whether a fact changes a prediction with random weights: not so a place among tokens where there is one. The
    weights are put back."""
    parameters = [local_tensor(p.data) for p in case.system.denoiser.parameters()]
    kept = [p.to("cpu", copy=True) for p in parameters]
    try:
        for p in parameters:
            p.normal_(0, 0.1)
        one, other = case.shot(level), case.shot(level, changed=_times(fact, 1.5))
        return change(one.prediction, other.prediction) > 0
    finally:
        for p, value in zip(parameters, kept, strict=True):
            p.copy_(value)


def known(case: Case) -> Finding:
    """Whether frames that are given make the others better."""
    name, nothing = "known frames used", case.config.family.kind_of_nothing
    trained = {kind: weight for kind, weight in (case.config.condition_config or {}).items() if kind != nothing}
    if not trained or not max(trained.values()):
        return left_out(name, "the run trains on none")
    kind = max(trained, key=lambda one: trained[one])
    if not case.trained or not case.batch.choices:
        return left_out(name, UNTRAINED)
    if kinds_apart(case.config, {kind: 1}, case.system.latent) and case.batch.encoded:
        return left_out(name, "the run reads stored latents")
    given, level = case.knowing({kind: 1}), case.level(0.7)
    free = (given.known.released > 0).expand_as(given.latents) if given.known is not None else None
    if free is None or free.all() or not free.any():
        return left_out(name, f"{kind} makes nothing known of these clips")
    shots = case.shot(level, clean=given), case.shot(level, clean=case.knowing(None))
    found, plain = ((shot.cleaned - shot.clean)[free].square().mean().item() for shot in shots)
    figure = f"error of the other places x {found / plain:.2f} where {kind} is known"
    if found < 0.99 * plain:
        return Finding(name, figure)
    advice = "check the weights of the layers that take known frames, and that condition_config weighs them"
    return Finding(name, figure, "suspect", "known frames make no difference to the model", advice, SYMPTOM)


def times(case: Case) -> Finding:
    """Whether the model tells times apart that bfloat16 does not, and whether those drawn are rounded."""
    name, objective = "precision of timesteps", case.system.objective
    whole, level = objective.noise_time, case.level(0.5)
    far = change(case.shot(level, told=0.2 * whole).prediction, case.shot(level, told=0.8 * whole).prediction)
    if far < _READS:
        if not case.trained:
            return left_out(name, UNTRAINED)
        advice = "check the weights of its time embedding"
        return Finding(
            name,
            f"the far ends of time change predictions by {far:.1e}",
            "fault",
            "the model does not read the time",
            advice,
            TRAINED,
        )
    near, across = [], []
    for scale in sorted({1.0, 1000.0 / whole if whole <= 1 else 1.0}):
        one, same, other = (case.shot(level, told=told).prediction for told in in_one_cell(0.75 * whole, scale))
        near.append(change(one, same))
        across.append(change(same, other))
    figure = f"times that bfloat16 makes one change predictions by {min(near):.1e}, the far ends by {far:.1e}"
    if any(a == 0 and b > _ROUNDING for a, b in zip(near, across, strict=True)):
        advice = "keep times in float32 up to the time embedding"
        return Finding(name, figure, "fault", "timesteps are rounded to bfloat16", advice, SEEN)
    if min(near) == 0:
        advice = "see the other causes: it tells far times apart, and none of a neighbourhood"
        return Finding(name, figure, "suspect", "the model hardly reads the time", advice, SYMPTOM)
    return Finding(name, figure)
