"""The training loop: a step is a few micro-batches forward and backward, one reduction, one update."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from longtake.buckets.order import PassOrder
from longtake.checkpoint.state import Clock, RunState
from longtake.contracts import Batch, Conditions, UserError
from longtake.diffusion.objective import micro_batch_loss
from longtake.system.build import System
from longtake.system.encoders import CAPTIONS_AT_ONCE, flat_captions
from longtake.system.examples import clean_example
from longtake.train.config import RunConfig
from longtake.train.experts import EXPERTS, ExpertDraw
from longtake.train.health.interrupt import REQUESTS, StopRequest
from longtake.train.health.power import NodePower
from longtake.train.health.ranks import RankTimes
from longtake.train.health.weights import LARGEST, describe_broken
from longtake.train.optimizer.update import WeightUpdate
from longtake.train.record import HostCopy, Recorder, StepRecord
from longtake.train.saving import Saver
from longtake.train.stream import StepInput, StepStream, Turn
from longtake.train.sums import StepSums
from longtake.train.validating import Validator
from longtake.transfer import to_device


@dataclass
class Trainer:
    """A run in motion: the parts, and where it is."""

    config: RunConfig
    system: System
    updates: Sequence[WeightUpdate]  # of the system's denoisers
    stream: StepStream
    recorder: Recorder
    saver: Saver
    stop: StopRequest
    begun: RunState  # what every checkpoint says of the run; its clock and position are where the launch begins
    validator: Validator | None = None
    stopped: bool = False  # by Ctrl-C or SIGTERM

    def __post_init__(self) -> None:
        self.clock: Clock = self.begun.clock
        self.position: dict | None = self.begun.data  # None is the start of a pass
        self.power = NodePower(self.stream.world, self.config.log_every)
        encoders = self.system.encoders
        alone = self.stream.peers.mesh.num_peers == 1 and not self.config.dataset.stored
        self.embeds_ahead = encoders is not None and alone and encoders.embeds_ahead
        self.draw_expert = ExpertDraw.of_run(self.config, self.system)
        self.ranks = RankTimes(self.system, self.stream, self.config.log_every)

    def run(self, order: PassOrder, skip: int = 0) -> None:
        """Train to the end of the run, or until a stop is requested; save where it ends.

        `order`: the rest of the pass the run begins in, of which `skip` steps are left out.

        The loop never waits for the device: results of a step are read while the next one runs.
        """
        with collected_by_hand(self.config.gc_every) as collect:
            self._run(order, skip, collect)

    def _run(self, order: PassOrder, skip: int, collect: Callable[[int], object]) -> None:
        config = self.config
        self.pass_ended = order.num_steps == 0 and self.position is not None
        empty = self.system.embed_nothing()
        steps = self.stream.steps(order, skip, config.epochs, whole=self.position is None)
        while (config.max_steps is None or self.clock.global_step < config.max_steps) and (step := next(steps, None)):
            if self.validate():
                break
            expert = self.draw_expert(self.clock.global_step)
            update = self.updates[expert]
            rates = update.optimizer.rates(self.clock.global_step)
            sums = self.forward_backward(step, empty, expert)
            ranks = self.ranks.step(step, self.clock.global_step + 1)
            skip = self.recorder.health.skipped.judge(sums)
            update(self.clock.global_step + 1, rates, sums.grad_square, skip)
            samples = [slot.num_samples for slot in step.slots]
            tokens = sum(n * self.system.tokens(slot.bucket.shape) for n, slot in zip(samples, step.slots, strict=True))
            self.clock = self.clock.tick(step.pass_index, sum(samples), tokens)
            self.position, self.pass_ended = step.state, step.ends_pass
            counted = sum(samples), tokens
            seen = self.power.nodes, None if ranks is None else HostCopy(ranks)
            record = StepRecord(self.clock, step.slots, sums, rates, step.wait_seconds, *counted, step.faults, *seen)
            if self.system.low_noise is not None:
                record = replace(record, expert=EXPERTS[expert])
            self.stopped = self.recorder.push(record)
            collect(self.clock.global_step)
            if self.stopped or self._too_many_lost:
                break
            asked = self.recorder.take_requests()
            if asked & REQUESTS["sample"] and self.validate(now=True):
                break
            by_steps = config.ckpt_every and self.clock.global_step % config.ckpt_every == 0
            if by_steps or asked & REQUESTS["save"]:
                self.stopped = self.save() and self.clock.global_step != config.max_steps
                if self.stopped:
                    break
        if not self.stopped:
            self.recorder.check_trained()
        self.save(ends=True)
        with self.recorder.health.stopwatch.saving():
            self.saver.wait()
            if not self.recorder.health.skipped.in_a_row:
                self.saver.remove_old()
                self.stream.world.barrier()
        if not (self.stopped or self._too_many_lost):
            self.validate()
        self.recorder.close()
        if self._too_many_lost:
            lost, quarantine = self.recorder.health.lost, self.stream.quarantine
            raise self.stream.world.on_main(lambda: lost.refusal(config.dataset, quarantine))

    def validate(self, now: bool = False) -> bool:
        """Make the validation of this moment where one is due, or is asked for now; return whether a stop was asked
        for meanwhile."""
        if self.validator is not None:
            self.stopped = self.validator.make_due(self.clock, self.pass_ended, now)
        return self.stopped

    @property
    def _too_many_lost(self) -> bool:
        return self.recorder.health.lost.too_many(self.config.dataset)

    def forward_backward(self, step: StepInput, empty: Conditions, expert: int = 0) -> StepSums:
        """Accumulate the gradient of the step's loss in the parameters of a denoiser, by its index in `System.experts`;
        return sums over all ranks.

        The step's loss is the sum of its micro-batches' losses over `StepInput.loss_divisor`: a sample weighs the same
        in a full and in a short micro-batch, and full micro-batches of different batch sizes count alike.
        """
        peers, divisor, system = self.stream.peers, step.loss_divisor, self.system.experts[expert]
        mesh = peers.mesh
        sums = StepSums.zeros(self.stream.inputs.most_micro_batches, len(self.power.nodes), self.system.device)
        last, embedded = len(step.turns) - 1, 0
        for i, (turn, batch) in enumerate(zip(step.turns, step.batches, strict=True)):
            if self.embeds_ahead and i == embedded:
                embedded += self.embed_ahead(step.turns[i:])
            peers.use(peers.degree(batch.bucket))
            system.use(batch.bucket)
            if mesh.replicate > 1:  # replicas are summed once a step
                system.denoiser.set_requires_all_reduce(i == last)
            loss = self.micro_batch(batch, empty, system)
            # FSDP takes the mean over data ranks, each of which runs so many side by side
            (loss * (mesh.data_ranks * peers.at_once(batch.bucket) / divisor)).backward()
            if turn.number is not None:
                sums.losses[turn.number] = loss.detach()
                sums.shares[turn.number] = batch.weights.sum() / batch.bucket.batch_size
        self.power.put(sums.watts, self.clock.global_step + 1)
        sums.loaded.fill_(step.loaded)  # assigning would copy a number from the host, and wait for the device
        square = self.updates[expert].optimizer.grad_square_sum()  # in host memory with `parallel.cpu_offload`
        sums.grad_square.copy_(to_device(square, self.system.device))
        sums.flags.fill_(self.stop.flags(self.saver.failed))  # `save` says why it failed, on all ranks
        if mesh.size > 1:
            dist.all_reduce(sums.values)
        return sums

    @torch.no_grad()
    def embed_ahead(self, turns: Sequence[Turn]) -> int:
        """Embed the captions of the first of these micro-batches in one forward; return of how many. It is as many as
        make `CAPTIONS_AT_ONCE` captions at most, but one at least."""
        texts: list[str] = []
        count = 0
        for turn in turns:
            own = flat_captions(self.stream.loader.source.texts(turn.slot))
            if count and len({*texts, *own}) > CAPTIONS_AT_ONCE:
                break
            texts += own
            count += 1
        self.system.own_encoders.embed_ahead(texts)
        return count

    def micro_batch(self, batch: Batch, empty: Conditions, system: System) -> Tensor:
        """Return the loss of one micro-batch: the sum over samples of weight x loss, divided by the bucket's batch
        size."""
        config = self.config
        weights = batch.weights.to(system.device, non_blocking=True)
        dropout, left_out = config.text_dropout, config.no_i2v_ref_loss
        # the clean example is not held on to, for what it keeps beside would last until the end of forward
        noised, conditions = clean_example(system, batch, empty, weights, dropout).noised(system, left_out)
        prediction = system.denoiser(noised.x, noised.t, conditions)
        return micro_batch_loss(system.objective.loss, prediction, noised, weights, batch.bucket.batch_size)

    def save(self, ends: bool = False) -> bool:
        """Write a checkpoint of this moment, unless it is there already; return whether a stop was asked for by then.

        In the middle of steps that are left out none is written, so that retention keeps those of before. Raises
        `UserError`, and writes none, where tensors hold NaN or infinity, or weights are out of all bounds: it would be
        the last one.
        """
        recorder, health = self.recorder, self.recorder.health
        asked = recorder.flush()
        if health.skipped.in_a_row and not ends:
            return asked
        with recorder.meter.paused(), health.stopwatch.saving():
            tensors = {name: of for update in self.updates for name, of in update.tensors().items()}
            if broken := describe_broken(tensors, self.stream.world):
                raise UserError(
                    f"step {self.clock.global_step}: weights or optimizer state hold NaN, infinity or weights "
                    f"above {LARGEST:g} ({broken}); no checkpoint is written: continue from the last one with a lower "
                    "lr or grad_clip = 1.0"
                )
            self.saver.save(self.state(), tensors)
        health.watchdog.beat(self.clock.global_step)
        return asked

    def state(self) -> RunState:
        """Return the state of this step for a checkpoint, without tensors."""
        state = replace(self.begun, clock=self.clock, data=self.position, **self.recorder.health.kept())
        if len(self.updates) == 1:
            return state
        return replace(state, low_noise_updates=int(self.updates[1].optimizer.updates.item()))


@contextmanager
def collected_by_hand(every: int) -> Iterator[Callable[[int], object]]:
    """Stop Python's garbage collector in the body, which calls what it gets after each step, with the step's number.

    By itself the collector runs whenever enough objects were made, on each rank at another moment, and all other ranks
    wait for that one in their next collective; here it runs in the same steps on every rank. `every`, in steps: 0
    leaves the collector as it is. What exists at the start, such as modules and the model, is frozen and not traversed
    each time. At the end, also by an error, the collector is as it was before.
    """
    if not every:
        yield lambda step: None
        return
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda step: gc.collect() if step % every == 0 else None
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
