"""Batches: samples balanced across ranks and micro-batches, unpadded, made in the background (invariants 1-3).

A rank plans the part of the global batch that it shares with other ranks, which needs offsets only. So they all know
the lengths of the part and balance it in the same way without communication (`balancing`). Each rank fetches and masks
the tokens of its own sequences. Losses are normalized by counts over all parts. A rank that planned the whole batch
knows them; otherwise the ranks exchange their own.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from pretrain.batches import balancing
from pretrain.batches.balancing import Assignment, BatchPart
from pretrain.batches.batch import MicroBatch, StepBatch, pinned
from pretrain.batches.exchange import Counts, Exchange
from pretrain.batches.filler import with_filler
from pretrain.batches.masking import Masker
from pretrain.batches.plan import SamplePlan
from pretrain.batches.sampler import Rollback, held_out_sampler, phase_sampler
from pretrain.batches.source import Machine
from pretrain.common.errors import InputError
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.corpus.shards import TokenShards

logger = logging.getLogger(__name__)

_LEAST_SEQUENCES = 16  # of held-out text whose loss is told apart
_PREFETCH_TOKENS = 1 << 22  # of one rank; a token is 28 bytes here, so this is 120 MB
_COUNTED_AT_ONCE = 1 << 16  # gathered at a time when masked tokens are counted from the text
_EVALUATION_SEQUENCES = 1024  # per StepBatch of an evaluation
_DIVIDED_SEQUENCES = 512  # of a machine, at least, if machines read different text: of fewer, their tokens differ more


M = TypeVar("M", "StepBatch", "RankShare")


@dataclass(frozen=True)
class RankShare:
    """One rank's share of one optimizer step, before the ranks have exchanged their counts."""

    micro_batches: tuple[MicroBatch, ...]  # other parts of the global batch may need more
    first_sample: int
    sequences: int  # over all ranks

    @property
    def counts(self) -> Counts:
        """Counts of its own sequences."""
        return Counts(
            tokens=sum(sum(batch.real_lengths) for batch in self.micro_batches),
            masked=sum(batch.targets for batch in self.micro_batches),
            labeled=sum(int((batch.nsp_labels >= 0).sum()) for batch in self.micro_batches),
        )

    def pinned(self) -> RankShare:
        """The same share with its micro-batches in page-locked memory."""
        return dataclasses.replace(self, micro_batches=tuple(map(pinned, self.micro_batches)))


_Made = StepBatch | RankShare | BaseException | None  # an error, or None at the end


class Loader:
    """The batches of one phase, prefetched by a background thread.

    Iterating gives one `StepBatch` per optimizer step until the phase ends. `stall_seconds` is the time that the
    consumer has waited so far.

    Args:
        start_step: the first step of the phase to give a batch for.
        rollback: the run's last one.
        prefetch: batches to make ahead, at most.
        pinned: whether batches lie in page-locked memory, for a GPU.
        machines: on which the ranks are, equally many on each and neighbors; needs an exchange.
        exchange: between the ranks, which take all steps together. Without it, each rank counts what it needs to know
            of the whole global batch.

    Raises:
        InputError: the corpus or the config cannot give such batches.
    """

    def __init__(
        self,
        shards: TokenShards,
        config: PretrainConfig,
        phase: int,
        *,
        rank: int,
        world_size: int,
        start_step: int = 0,
        rollback: Rollback | None = None,
        prefetch: int = 4,
        pinned: bool = False,
        machines: int = 1,
        exchange: Exchange | None = None,
    ) -> None:
        self.stall_seconds = 0.0
        self._exchange = exchange
        self._gpu = torch.cuda.current_device() if pinned else None  # the current one of the thread that trains
        self._maker = BatchMaker(
            shards,
            config,
            phase,
            seed=config.seed,
            rank=rank,
            world_size=world_size,
            machines=machines,
            rollback=rollback,
        )
        self._maker.check_batch()
        settings = config.phases[phase]
        step_tokens = settings.global_sequences * settings.sequence_length // world_size
        depth = max(1, min(prefetch, _PREFETCH_TOKENS // step_tokens))
        self._queue: queue.Queue[_Made] = queue.Queue(depth)
        self._ahead: deque[StepBatch | Future[StepBatch] | BaseException | None] = deque()
        self._closed = threading.Event()
        self.thread = threading.Thread(
            target=self._produce,
            args=(settings, start_step),
            name=f"loader-{rank}",
            daemon=True,
        )
        self.thread.start()

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one pass over the corpus."""
        return self._maker.samples_per_epoch

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        if self._closed.is_set():
            raise StopIteration
        start = time.perf_counter()
        item = self._take()
        self.stall_seconds += time.perf_counter() - start
        if isinstance(item, StepBatch):
            return item
        self.close()
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop the background thread; iteration ends."""
        self._closed.set()
        self.thread.join()

    def _take(self) -> StepBatch | BaseException | None:
        """The next step, or why there is none."""
        item = self._ahead.popleft() if self._ahead else self._fetch()
        if self._exchange is not None and isinstance(item, (StepBatch, Future)):
            # The exchange of the step after it begins. All ranks take steps together, so that wherever they stop, they
            # have begun equally many.
            self._ahead.append(self._fetch())
        if not isinstance(item, Future):
            return item
        try:
            return item.result()
        except BaseException as error:
            return error

    def _fetch(self) -> StepBatch | Future[StepBatch] | BaseException | None:
        """What the thread made for the next step; if counts are missing, their exchange begins."""
        made = self._queue.get()
        if not isinstance(made, RankShare):
            return made
        assert self._exchange is not None
        own = len(made.micro_batches)
        return self._exchange.submit(made.counts, own, lambda counts, most: self._whole(made, counts, most))

    def _whole(self, share: RankShare, counts: Counts, micro_batches: int) -> StepBatch:
        """A share with the counts of all ranks, and as many micro-batches as the ranks that have most."""
        if micro_batches > len(share.micro_batches):
            longer = self._maker.share(share.first_sample, share.sequences, micro_batches=micro_batches)
            share = self._placed(longer)
        return self._maker.whole(share, counts)

    def _produce(self, phase: PhaseConfig, start_step: int) -> None:
        last: BaseException | None = None
        try:
            for step in range(start_step, phase.steps):
                first, sequences = phase.first_sample(step), phase.sequences_at(step)
                exchanged = self._exchange is not None and self._maker.needs_exchange(sequences)
                if exchanged:
                    open_ = self._put(self._placed(self._maker.share(first, sequences)))
                else:
                    open_ = self._put(self._placed(self._maker.make(first, sequences)))
                if not open_:
                    return
        except BaseException as error:  # raised by the consumer, whatever its class
            last = error
        self._put(last)

    def _placed(self, made: M) -> M:
        if self._gpu is None:
            return made
        # In a new thread it is the first one, on which pinning would open another context of this process.
        torch.cuda.set_device(self._gpu)
        return made.pinned()

    def _put(self, item: _Made) -> bool:
        """Queue `item` for the consumer; False if the loader was closed meanwhile."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


def validation_batches(
    shards: TokenShards, config: PretrainConfig, phase: int, *, rank: int, world_size: int
) -> list[StepBatch]:
    """The held-out batches of a phase: the same samples every time, for every `config.seed`.

    At most `config.evaluation.sequences` samples; none if the corpus has no validation split. A batch has the samples
    of one source, or of several that have few (`held_out_texts`). Of a text that has fewer samples than there are
    ranks, as after a small run has grown, every rank evaluates all.

    Raises `InputError` if there is a split, but no sample in it.
    """
    if not shards.shards:
        return []
    try:
        maker = BatchMaker(shards, config, phase, seed=0, rank=rank, world_size=world_size, held_out=True)
    except InputError as error:
        raise InputError(
            f"held-out text of {error} Or hold out more documents (corpus.validation_fraction, or a source with "
            "held_out: true) and prepare the corpus again."
        ) from error
    counts = maker.sampler.counts(min(config.evaluation.sequences, maker.samples_per_epoch))
    without = sorted({shard.source for shard in shards.shards if not counts[shard.source]})
    if without and not rank and not phase:
        names = " and ".join(str(shards.sources[number].get("name", number)) for number in without)
        logger.warning("held-out text of %s is not evaluated: too small a share. Raise evaluation.sequences.", names)
    batches = []
    for text, own in held_out_texts(shards, counts, max(_LEAST_SEQUENCES, world_size)):
        count = sum(own)
        if count < world_size:
            alone = BatchMaker(shards, config, phase, seed=0, rank=0, world_size=1, held_out=True)
            made = [_on_all_ranks(alone.only(own).make(0, count), world_size)]
        else:
            parts = max(1, count // max(_EVALUATION_SEQUENCES, world_size))
            bounds = [*(count // world_size * part // parts * world_size for part in range(parts)), count]
            made = [maker.only(own).make(first, last - first) for first, last in itertools.pairwise(bounds)]
        batches += [dataclasses.replace(batch, text=text) for batch in made]
    return batches


def held_out_texts(shards: TokenShards, counts: Sequence[int], least: int) -> list[tuple[str, list[int]]]:
    """(name, samples of each source) of the texts whose losses are told apart: sources of at least so many samples.

    The others are one text, with all their names.
    """
    names = [source.get("name", f"source {number}") for number, source in enumerate(shards.sources)]
    large = [number for number, count in enumerate(counts) if count >= least]
    small = [number for number, count in enumerate(counts) if 0 < count < least]
    return [
        (" + ".join(names[number] for number in some), [c if n in some else 0 for n, c in enumerate(counts)])
        for some in [*([number] for number in large), *([small] if small else [])]
    ]


def _on_all_ranks(batch: StepBatch, world_size: int) -> StepBatch:
    """The batch of one rank as that of each of `world_size` ranks: the sums over them grow as the counts do."""
    names = ("sequences", "tokens", "masked", "labeled")
    scaled = {name: world_size * getattr(batch, name) for name in names}
    return dataclasses.replace(batch, **scaled, copies=world_size)


class BatchMaker:
    """Makes one rank's share of any batch, in the calling thread.

    `held_out` batches are masked by `masking.probability`, whatever the phases say, and mixed as the corpus says, so
    that losses compare across phases and forks. Their micro-batches hold at least two sequences, since any
    number of those can be assigned to any number of ranks; without a backward pass they still take less memory than the
    training's.
    """

    def __init__(
        self,
        shards: TokenShards,
        config: PretrainConfig,
        phase: int,
        *,
        seed: int,
        rank: int,
        world_size: int,
        machines: int = 1,
        held_out: bool = False,
        rollback: Rollback | None = None,
    ) -> None:
        settings = config.phases[phase]
        length = settings.sequence_length
        # Text that is here is divided among all ranks, whose tokens then differ least. Machines that fetch different
        # text have not exactly the same number of sequences.
        is_divided = shards.is_streamed and min(settings.batch_sizes) >= max(machines * _DIVIDED_SEQUENCES, world_size)
        is_divided &= config.engine.micro_batch_tokens >= 2 * length
        count = machines if is_divided else 1
        self._machine = Machine(rank * count // world_size, count)
        self.rank, self.world_size = rank, world_size
        self._length = length
        self._config, self._phase, self._folder = config, phase, shards.folder
        self._budget = max(config.engine.micro_batch_tokens, 2 * length if held_out else 0)
        self._paired = config.pairs.has_classifier
        share = config.masking.probability
        self._masking_shares = (share, share) if held_out else config.masking_shares(phase)
        self._is_filled = config.engine.cuda_graphs is True and not held_out
        self._phase_sequences = settings.sequences
        self.sampler = (
            held_out_sampler(shards, config, phase)
            if held_out
            else phase_sampler(shards, config, phase, seed=seed, rollback=rollback, machine=self._machine)
        )
        most = 0 if held_out else settings.max_predictions
        self._masker = Masker(shards, config.masking, sequence_length=length, max_predictions=most)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one pass over the corpus."""
        return self.sampler.samples_per_epoch

    def only(self, counts: Sequence[int]) -> BatchMaker:
        """Makes batches of so many first samples of each source, as `Sampler.only`."""
        other = copy.copy(self)
        other.sampler = self.sampler.only(counts)
        return other

    def check_batch(self) -> None:
        """Raise `InputError` if the corpus is too small for one batch, or the batch cannot be balanced across ranks."""
        settings, where = self._config.phases[self._phase], f"phases.{self._phase}.global_sequences"
        _check_balance(self._config, self._phase, where, settings.global_sequences, self.world_size)
        if settings.ramp_from:
            first = f"phases.{self._phase}.ramp_from"
            _check_balance(self._config, self._phase, first, settings.ramp_from, self.world_size)
        self.sampler.check_cache(f"phases.{self._phase}")
        if self.samples_per_epoch < settings.global_sequences:
            raise InputError(
                f"{where}: {settings.global_sequences}, but {self._folder} holds only {self.samples_per_epoch} samples "
                f"of up to {settings.sequence_length} tokens. Add text or lower it to {self.samples_per_epoch} or less."
            )

    def needs_exchange(self, sequences: int) -> bool:
        """Whether counts over all ranks need the lengths, or the text, of sequences that this rank does not look at."""
        if self.world_size == 1:
            return False
        if self._machine.count > 1 or not self._masker.has_exact_counts:
            return True
        return balancing.number_of_parts(sequences, self.world_size) > 1

    def make(self, first_sample: int, sequences: int) -> StepBatch:
        """The batch of samples `first_sample` to `first_sample + sequences - 1`, this rank's part of it.

        Without an exchange: the rank counts what it has to know of the whole batch, which takes longer. Not if machines
        read different text.
        """
        with self.sampler.holding():
            return self._make(first_sample, sequences)

    def _make(self, first_sample: int, sequences: int) -> StepBatch:
        own = balancing.part_of(self.rank, sequences, self.world_size)
        plans = [self.assign(first_sample, part) for part in balancing.parts(sequences, self.world_size)]
        most = max(assignment.micro_batches for _, assignment in plans)
        plan, assignment = plans[balancing.parts(sequences, self.world_size).index(own)]
        if assignment.micro_batches < most:
            plan, assignment = self.assign(first_sample, own, most)
        share = RankShare(self._own(own, plan, assignment), first_sample, sequences)
        if self.world_size == 1:
            return self.whole(share, share.counts)
        counts = [dataclasses.astuple(self._counts(plan)) for plan, _ in plans]
        return self.whole(share, Counts(*map(sum, zip(*counts, strict=True))))

    def share(self, first_sample: int, sequences: int, *, micro_batches: int = 1) -> RankShare:
        """This rank's share of the same batch, of at least so many micro-batches, without the counts of other ranks.

        With the largest number that any rank needs, the micro-batches are those of `make`.
        """
        part = balancing.part_of(self.rank, sequences, self.world_size)
        if self._machine.count > 1:
            machine = self._machine
            part = balancing.part_of_machine(machine.number, machine.count, sequences, self.world_size)
        with self.sampler.holding():  # a share is made again in another thread
            plan, assignment = self.assign(first_sample, part, micro_batches)
            return RankShare(self._own(part, plan, assignment), first_sample, sequences)

    def whole(self, share: RankShare, counts: Counts) -> StepBatch:
        """A share with the counts of all ranks."""
        return StepBatch(
            micro_batches=share.micro_batches,
            sequences=share.sequences,
            tokens=counts.tokens,
            masked=counts.masked,
            labeled=counts.labeled,
            epoch=share.first_sample // self.samples_per_epoch,
            first_sample=share.first_sample,
        )

    def assign(self, first_sample: int, part: BatchPart, micro_batches: int = 1) -> tuple[SamplePlan, Assignment]:
        """The sequences of a part of the batch that begins with `first_sample`, and who gets which."""
        samples = first_sample + part.first + np.arange(part.sequences)
        if part.machine >= 0:
            samples = samples[self.sampler.owners(samples) == part.machine]
        plan = self.sampler.plan(samples)
        return plan, balancing.balance(plan.lengths, part.ranks, self._budget, micro_batches=micro_batches)

    def _own(self, part: BatchPart, plan: SamplePlan, assignment: Assignment) -> tuple[MicroBatch, ...]:
        own = range(self.rank - part.first_rank, part.ranks * assignment.micro_batches, part.ranks)
        return tuple(self._micro_batch(plan[assignment.members(number)]) for number in own)

    def _counts(self, plan: SamplePlan) -> Counts:
        """Counts of planned samples."""
        return Counts(
            tokens=int(plan.lengths.sum()),
            masked=self._masked(plan),
            labeled=int((plan.label >= 0).sum()) if self._paired else 0,
        )

    def _micro_batch(self, plan: SamplePlan) -> MicroBatch:
        rows = self.sampler.gather(plan)
        masked = self._masker.apply(rows, plan.key, self._masking_share(plan))
        batch = MicroBatch(
            input_ids=torch.from_numpy(masked.input_ids),
            token_types=torch.from_numpy(rows.token_types),
            positions=torch.from_numpy(rows.positions),
            cu_seqlens=torch.from_numpy(rows.starts.astype(np.int32)),
            masked_rows=torch.from_numpy(masked.rows),
            masked_labels=torch.from_numpy(masked.labels),
            nsp_labels=torch.from_numpy(plan.label if self._paired else plan.label[:0]),
            token_keys=torch.from_numpy(masked.token_keys),
            lengths=tuple(plan.lengths.tolist()),
        )
        return with_filler(batch, self._length) if self._is_filled else batch

    def _masked(self, plan: SamplePlan) -> int:
        """Masked tokens of these samples."""
        if not len(plan.key):
            return 0
        if self._masker.has_exact_counts:
            special = plan.lengths - plan.ordinary
            return int(self._masker.counts(plan.lengths, special_tokens=special, share=self._masking_share(plan)).sum())
        # How many tokens are chosen depends on the text, so all of it has to be looked at.
        portion = np.cumsum(plan.lengths) // _COUNTED_AT_ONCE
        parts = np.split(np.arange(len(portion)), np.flatnonzero(np.diff(portion)) + 1)
        return sum(
            self._masker.count(self.sampler.gather(part), part.key, self._masking_share(part))
            for part in (plan[members] for members in parts)
        )

    def _masking_share(self, plan: SamplePlan) -> np.ndarray:
        """Share of each sample's tokens to predict, float64 [B]: a function of its number alone (invariant 1)."""
        first, last = self._masking_shares
        return first + (last - first) * (plan.number / self._phase_sequences)


def _check_balance(config: PretrainConfig, phase: int, where: str, sequences: int, world_size: int) -> None:
    if why := config.why_not_balanced(phase, sequences, world_size):
        raise InputError(f"{where} ({sequences}) {why}.")
