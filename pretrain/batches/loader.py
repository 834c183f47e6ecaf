"""Prepares batches in the background: unpadded samples, balanced across ranks and micro-batches.

It keeps invariants 1 to 3 of docs/invariants.md. The ranks that share a part of the global batch (`balancing`) all plan
the whole part from document offsets alone. So they know its lengths and compute the same balanced assignment without
communication. A rank fetches and masks only the tokens of its sequences. Losses are normalized by global counts: a
rank either plans the whole batch and counts it, or the ranks exchange their counts.
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

_MIN_HELD_OUT_SEQUENCES = 16  # minimum number of sequences of a held-out source to report its loss separately
_PREFETCH_TOKENS = 1 << 22  # maximum number of tokens that a rank prefetches: 120 MB, at 28 bytes per token
_COUNT_CHUNK_TOKENS = 1 << 16  # number of tokens gathered at a time to count masked tokens
_EVALUATION_SEQUENCES = 1024  # approximate number of sequences per `StepBatch` of an evaluation
# Minimum sequences per machine and batch for machines to read different text; with fewer, token counts differ too much.
_MIN_MACHINE_SEQUENCES = 512

Batch = TypeVar("Batch", "StepBatch", "RankShare")


@dataclass(frozen=True)
class RankShare:
    """One rank's share of one optimizer step, before the ranks have exchanged their counts."""

    micro_batches: tuple[MicroBatch, ...]  # ranks in other parts of the batch may have more
    first_sample: int  # index of the batch's first sample within the phase
    sequences: int  # number of sequences, over all ranks

    @property
    def counts(self) -> Counts:
        return Counts(
            tokens=sum(sum(batch.real_lengths) for batch in self.micro_batches),
            masked=sum(batch.targets for batch in self.micro_batches),
            labeled=sum(int((batch.nsp_labels >= 0).sum()) for batch in self.micro_batches),
        )

    def pinned(self) -> RankShare:
        return dataclasses.replace(self, micro_batches=tuple(map(pinned, self.micro_batches)))


_QueueItem = StepBatch | RankShare | BaseException | None  # None: the end of the phase


class Loader:
    """The batches of one phase, prefetched by a background thread.

    Iterating yields one `StepBatch` per optimizer step of the phase. `stall_seconds` is the total time that the
    consumer has waited.

    Args:
        start_step: index of the phase's step whose batch is yielded first.
        rollback: the run's latest rollback.
        prefetch: maximum number of batches to prepare ahead.
        pin_memory: whether to put batches into page-locked memory, for a GPU.
        machines: number of machines, each with the same number of consecutive ranks; more than one needs `exchange`.
        exchange: sums counts over the ranks. Without it, each rank counts the tokens of the whole global batch.

    Raises:
        InputError: the corpus is too small for a batch, or the batch cannot be balanced across ranks.
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
        pin_memory: bool = False,
        machines: int = 1,
        exchange: Exchange | None = None,
    ) -> None:
        self.stall_seconds = 0.0
        self._exchange = exchange
        self._gpu = torch.cuda.current_device() if pin_memory else None  # current device of the training thread
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
        self._queue: queue.Queue[_QueueItem] = queue.Queue(depth)
        self._lookahead: deque[StepBatch | Future[StepBatch] | BaseException | None] = deque()
        self._closed = threading.Event()
        name = f"loader-{rank}"
        self.thread = threading.Thread(target=self._produce, args=(settings, start_step), name=name, daemon=True)
        self.thread.start()

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the corpus."""
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
        """Stop the background thread and the iteration."""
        self._closed.set()
        self.thread.join()

    def _take(self) -> StepBatch | BaseException | None:
        """Return the next batch, None at the end, or an error."""
        item = self._lookahead.popleft() if self._lookahead else self._fetch()
        if self._exchange is not None and isinstance(item, (StepBatch, Future)):
            # Request the exchange for the next step. All ranks take the same steps, so whenever they stop, they have
            # requested the same number of exchanges.
            self._lookahead.append(self._fetch())
        if not isinstance(item, Future):
            return item
        try:
            return item.result()
        except BaseException as error:
            return error

    def _fetch(self) -> StepBatch | Future[StepBatch] | BaseException | None:
        """Return the next queued item; if it lacks the counts of all ranks, request their exchange."""
        item = self._queue.get()
        if not isinstance(item, RankShare):
            return item
        assert self._exchange is not None
        count = len(item.micro_batches)
        return self._exchange.submit(item.counts, count, lambda counts, largest: self._complete(item, counts, largest))

    def _complete(self, share: RankShare, counts: Counts, micro_batches: int) -> StepBatch:
        """Complete a share with the counts of all ranks, split into `micro_batches`, the maximum over all ranks."""
        if micro_batches > len(share.micro_batches):
            split = self._maker.make_share(share.first_sample, share.sequences, micro_batches=micro_batches)
            share = self._pinned(split)
        return self._maker.complete(share, counts)

    def _produce(self, phase: PhaseConfig, start_step: int) -> None:
        end: BaseException | None = None
        try:
            for step in range(start_step, phase.steps):
                first, sequences = phase.first_sample(step), phase.sequences_at(step)
                if self._exchange is not None and self._maker.needs_exchange(sequences):
                    is_queued = self._put(self._pinned(self._maker.make_share(first, sequences)))
                else:
                    is_queued = self._put(self._pinned(self._maker.make(first, sequences)))
                if not is_queued:
                    return
        except BaseException as error:  # any exception is raised again by the consumer
            end = error
        self._put(end)

    def _pinned(self, item: Batch) -> Batch:
        if self._gpu is None:
            return item
        # A new thread starts on GPU 0, where pinning memory would create another CUDA context.
        torch.cuda.set_device(self._gpu)
        return item.pinned()

    def _put(self, item: _QueueItem) -> bool:
        """Queue `item` for the consumer; return False if the loader was closed meanwhile."""
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
    """Return the held-out batches of a phase: the same samples every time, for every `config.seed`.

    There are at most `config.evaluation.sequences` samples, or none if the corpus has no validation split. A batch has
    samples of one source, or of several small sources (`held_out_texts`). If a group has fewer samples than there are
    ranks, every rank evaluates all of them.

    Raises `InputError` if the validation split has no sample.
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
    unevaluated = sorted({shard.source for shard in shards.shards if not counts[shard.source]})
    if unevaluated and not rank and not phase:
        names = " and ".join(str(shards.sources[source].get("name", source)) for source in unevaluated)
        logger.warning("held-out text of %s is not evaluated (share too small). Raise evaluation.sequences.", names)
    batches = []
    for text, source_counts in held_out_texts(shards, counts, max(_MIN_HELD_OUT_SEQUENCES, world_size)):
        count = sum(source_counts)
        if count < world_size:
            single_rank_maker = BatchMaker(shards, config, phase, seed=0, rank=0, world_size=1, held_out=True)
            group = [_on_all_ranks(single_rank_maker.limit_to(source_counts).make(0, count), world_size)]
        else:
            parts = max(1, count // max(_EVALUATION_SEQUENCES, world_size))
            bounds = [*(count // world_size * part // parts * world_size for part in range(parts)), count]
            limited = maker.limit_to(source_counts)
            group = [limited.make(start, stop - start) for start, stop in itertools.pairwise(bounds)]
        batches += [dataclasses.replace(batch, text=text) for batch in group]
    return batches


def held_out_texts(shards: TokenShards, counts: Sequence[int], minimum: int) -> list[tuple[str, list[int]]]:
    """Group the sources for reporting their losses; return (name, number of samples of each source) of each group.

    A source with at least `minimum` samples is a group; the others form one group, named after all of them.
    """
    names = [source.get("name", f"source {index}") for index, source in enumerate(shards.sources)]
    large = [index for index, count in enumerate(counts) if count >= minimum]
    small = [index for index, count in enumerate(counts) if 0 < count < minimum]
    return [
        (" + ".join(names[index] for index in group), [count if n in group else 0 for n, count in enumerate(counts)])
        for group in [*([index] for index in large), *([small] if small else [])]
    ]


def _on_all_ranks(batch: StepBatch, world_size: int) -> StepBatch:
    """Convert a batch for one rank into a batch that all ranks evaluate: its counts become sums over all ranks."""
    names = ("sequences", "tokens", "masked", "labeled")
    scaled = {name: world_size * getattr(batch, name) for name in names}
    return dataclasses.replace(batch, **scaled, copies=world_size)


class BatchMaker:
    """Creates one rank's share of any batch, in the calling thread.

    Batches of held-out text use `masking.probability` and the corpus's mix of sources, regardless of the phase, so that
    losses are comparable across phases and runs. Their micro-batches have room for at least two sequences, so that any
    number of sequences can be assigned to any number of ranks. Without a backward pass, they still need less memory
    than training.
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
        # Token counts are most similar if all ranks share the text, as with a local corpus. Machines that stream
        # different text do not have exactly the same number of sequences.
        min_batch = max(machines * _MIN_MACHINE_SEQUENCES, world_size)
        is_divided = shards.is_streamed and min(settings.batch_sizes) >= min_batch
        is_divided &= config.engine.micro_batch_tokens >= 2 * length
        divisions = machines if is_divided else 1
        self._machine = Machine(rank * divisions // world_size, divisions)
        self.rank, self.world_size = rank, world_size
        self._length = length
        self._config, self._phase, self._folder = config, phase, shards.folder
        self._budget = max(config.engine.micro_batch_tokens, 2 * length if held_out else 0)
        self._has_pairs = config.pairs.has_classifier
        probability = config.masking.probability
        self._masking_shares = (probability, probability) if held_out else config.masking_shares(phase)
        self._adds_filler = config.engine.cuda_graphs is True and not held_out
        self._phase_sequences = settings.sequences
        self.sampler = (
            held_out_sampler(shards, config, phase)
            if held_out
            else phase_sampler(shards, config, phase, seed=seed, rollback=rollback, machine=self._machine)
        )
        max_predictions = 0 if held_out else settings.max_predictions
        self._masker = Masker(shards, config.masking, sequence_length=length, max_predictions=max_predictions)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the corpus."""
        return self.sampler.samples_per_epoch

    def limit_to(self, counts: Sequence[int]) -> BatchMaker:
        """Return a copy that makes batches of only the first `counts[i]` samples of each source i."""
        limited = copy.copy(self)
        limited.sampler = self.sampler.limit_to(counts)
        return limited

    def check_batch(self) -> None:
        """Raise `InputError` if the corpus is too small for one batch, or the batch cannot be balanced across ranks."""
        settings, where = self._config.phases[self._phase], f"phases.{self._phase}.global_sequences"
        _check_balance(self._config, self._phase, where, settings.global_sequences, self.world_size)
        if settings.ramp_from:
            ramp_where = f"phases.{self._phase}.ramp_from"
            _check_balance(self._config, self._phase, ramp_where, settings.ramp_from, self.world_size)
        self.sampler.check_cache(f"phases.{self._phase}")
        if self.samples_per_epoch < settings.global_sequences:
            raise InputError(
                f"{where}: {settings.global_sequences}, but {self._folder} holds only {self.samples_per_epoch} samples "
                f"of up to {settings.sequence_length} tokens. Add text or lower it to {self.samples_per_epoch} or less."
            )

    def needs_exchange(self, sequences: int) -> bool:
        """Return whether this rank cannot compute the counts of the whole batch from the lengths that it knows."""
        if self.world_size == 1:
            return False
        if self._machine.count > 1 or not self._masker.has_exact_counts:
            return True
        return balancing.number_of_parts(sequences, self.world_size) > 1

    def make(self, first_sample: int, sequences: int) -> StepBatch:
        """Return this rank's share of the batch that starts at `first_sample` and has `sequences` samples.

        The rank itself counts the tokens of the whole batch, which takes longer than an exchange and is impossible if
        machines read different text.
        """
        with self.sampler.keep_text_cached():
            return self._make(first_sample, sequences)

    def _make(self, first_sample: int, sequences: int) -> StepBatch:
        part = balancing.part_of(self.rank, sequences, self.world_size)
        plans = [self.assign(first_sample, batch_part) for batch_part in balancing.parts(sequences, self.world_size)]
        micro_batches = max(assignment.micro_batches for _, assignment in plans)
        plan, assignment = plans[balancing.parts(sequences, self.world_size).index(part)]
        if assignment.micro_batches < micro_batches:
            plan, assignment = self.assign(first_sample, part, micro_batches)
        share = RankShare(self._micro_batches_of(part, plan, assignment), first_sample, sequences)
        if self.world_size == 1:
            return self.complete(share, share.counts)
        counts = [dataclasses.astuple(self._counts(plan)) for plan, _ in plans]
        return self.complete(share, Counts(*map(sum, zip(*counts, strict=True))))

    def make_share(self, first_sample: int, sequences: int, *, micro_batches: int = 1) -> RankShare:
        """Return this rank's share of a batch in at least `micro_batches` micro-batches, without other ranks' counts.

        If `micro_batches` is the maximum over all ranks, the share has the same micro-batches as in `make`.
        """
        part = balancing.part_of(self.rank, sequences, self.world_size)
        if self._machine.count > 1:
            machine = self._machine
            part = balancing.part_of_machine(machine.index, machine.count, sequences, self.world_size)
        with self.sampler.keep_text_cached():  # the exchange thread also calls this method
            plan, assignment = self.assign(first_sample, part, micro_batches)
            return RankShare(self._micro_batches_of(part, plan, assignment), first_sample, sequences)

    def complete(self, share: RankShare, counts: Counts) -> StepBatch:
        """Complete a share with the counts of all ranks."""
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
        """Plan a part of the batch that starts at `first_sample`; return the plan and its micro-batch assignment."""
        samples = first_sample + part.first_sample + np.arange(part.sequences)
        if part.machine >= 0:
            samples = samples[self.sampler.owners(samples) == part.machine]
        plan = self.sampler.plan(samples)
        return plan, balancing.balance(plan.lengths, part.ranks, self._budget, micro_batches=micro_batches)

    def _micro_batches_of(self, part: BatchPart, plan: SamplePlan, assignment: Assignment) -> tuple[MicroBatch, ...]:
        indices = range(self.rank - part.first_rank, part.ranks * assignment.micro_batches, part.ranks)
        return tuple(self._micro_batch(plan[assignment.members(index)]) for index in indices)

    def _counts(self, plan: SamplePlan) -> Counts:
        """Return the counts of the planned samples."""
        return Counts(
            tokens=int(plan.lengths.sum()),
            masked=self._count_masked(plan),
            labeled=int((plan.label >= 0).sum()) if self._has_pairs else 0,
        )

    def _micro_batch(self, plan: SamplePlan) -> MicroBatch:
        tokens = self.sampler.gather(plan)
        masked = self._masker.apply(tokens, plan.key, self._masking_share(plan))
        batch = MicroBatch(
            input_ids=torch.from_numpy(masked.input_ids),
            token_types=torch.from_numpy(tokens.token_types),
            positions=torch.from_numpy(tokens.positions),
            cu_seqlens=torch.from_numpy(tokens.starts.astype(np.int32)),
            masked_rows=torch.from_numpy(masked.indices),
            masked_labels=torch.from_numpy(masked.labels),
            nsp_labels=torch.from_numpy(plan.label if self._has_pairs else plan.label[:0]),
            token_keys=torch.from_numpy(masked.token_keys),
            lengths=tuple(plan.lengths.tolist()),
        )
        return with_filler(batch, self._length) if self._adds_filler else batch

    def _count_masked(self, plan: SamplePlan) -> int:
        """Return the number of masked tokens of these samples."""
        if not len(plan.key):
            return 0
        if self._masker.has_exact_counts:
            special, share = plan.lengths - plan.content_length, self._masking_share(plan)
            return int(self._masker.max_counts(plan.lengths, special_tokens=special, probability=share).sum())
        # The number of masked tokens depends on the text, so all of it must be read, in chunks.
        chunk = np.cumsum(plan.lengths) // _COUNT_CHUNK_TOKENS
        chunks = np.split(np.arange(len(chunk)), np.flatnonzero(np.diff(chunk)) + 1)
        return sum(
            self._masker.count_masked(self.sampler.gather(chunk_plan), chunk_plan.key, self._masking_share(chunk_plan))
            for chunk_plan in (plan[members] for members in chunks)
        )

    def _masking_share(self, plan: SamplePlan) -> np.ndarray:
        """Return the share of tokens to predict, float64 [B]; it depends only on the index of the sample."""
        initial, final = self._masking_shares
        return initial + (final - initial) * (plan.sample_index / self._phase_sequences)


def _check_balance(config: PretrainConfig, phase: int, where: str, sequences: int, world_size: int) -> None:
    if reason := config.balance_problem(phase, sequences, world_size):
        raise InputError(f"{where} ({sequences}) {reason}.")
