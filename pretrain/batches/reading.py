"""Counts how often an epoch reads each token, by planning a part of the epoch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pretrain.batches.sampler import Sampler
from pretrain.batches.source import SourceSamples
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import TokenShards

_BLOCKS = 8  # number of blocks of each source that are counted: about 8 million tokens
_BATCH_SAMPLES = 1 << 14  # number of samples planned at a time


@dataclass(frozen=True)
class Reading:
    """Statistics of the samples of one sequence length, on the counted text."""

    sequence_length: int
    input_format: str
    tokens: int  # number of counted tokens
    reads: float  # mean number of times that a token is read
    unread: float  # share of the tokens that are never read
    twice: float  # share of the tokens that are read twice or more
    mean_length: float  # mean number of tokens of a sample, including special tokens
    at_sentence_ends: float  # share of the samples that end at a sentence boundary
    labeled: float  # share of the samples with an NSP or SOP label; 0 without pairs

    @property
    def line(self) -> str:
        """The statistics as a sentence."""
        labels = f" {self.labeled:.1%} have a sentence-pair label." if self.input_format == "segment_pairs" else ""
        return (
            f"length {self.sequence_length}: an epoch reads a token {self.reads:.3f} times, {self.unread:.2%} of the "
            f"tokens never and {self.twice:.2%} twice or more. {self.at_sentence_ends:.0%} of the samples end at a "
            f"sentence boundary.{labels} Counted on {self.tokens:,} tokens."
        )


def count_readings(shards: TokenShards, config: PretrainConfig) -> list[dict[str, Any]]:
    """Return a `Reading`, as a dict, for each sequence length in the config's phases.

    Raises `InputError` if the corpus has no sample.
    """
    lengths = sorted({phase.sequence_length for phase in config.phases})
    return [asdict(count_reading(shards, config, length)) for length in lengths]


def count_reading(shards: TokenShards, config: PretrainConfig, length: int) -> Reading:
    """Plan the first window of each source, about 8 million tokens, and count how often each token is read.

    Raises `InputError` if the corpus has no sample.
    """
    sampler = Sampler(shards, config.pairs, sequence_length=length, seed=config.seed, window_blocks=_BLOCKS)
    counts = [_count_window(source) for source in sampler.sources if source.samples]
    tokens, reads, unread, twice, samples, sample_tokens, sentence_ends, labeled = np.sum(counts, axis=0).tolist()
    return Reading(
        sequence_length=length,
        input_format=config.pairs.chosen_format,
        tokens=int(tokens),
        reads=reads / tokens,
        unread=unread / tokens,
        twice=twice / tokens,
        mean_length=sample_tokens / samples,
        at_sentence_ends=sentence_ends / samples,
        labeled=labeled / samples if config.pairs.has_classifier else 0.0,
    )


def _count_window(source: SourceSamples) -> Sequence[float]:
    """Count a source's first window; return the numbers of (tokens, reads, unread tokens, tokens read twice or more,
    samples, tokens of the samples, samples that end at a sentence boundary, labeled samples).
    """
    shard, start, end = source.window_text(0, 0)
    order = np.lexsort((start, shard))
    shard, start, end = shard[order], start[order], end[order]
    block_start = np.cumsum(end - start) - (end - start)
    key = (shard << 48) + start
    changes = np.zeros(int((end - start).sum()) + 1, np.int8)  # reads of each token, minus the previous token's
    first, stop = source.order.epoch(0).samples_before[:2].tolist()
    sums = np.zeros(4)
    for batch_start in range(first, stop, _BATCH_SAMPLES):
        plan = source.plan(np.arange(batch_start, min(stop, batch_start + _BATCH_SAMPLES)))
        for segment_shard, segment_start, length in (
            (plan.shard_a, plan.start_a, plan.length_a),
            (plan.shard_b, plan.start_b, plan.length_b),
        ):
            block = np.searchsorted(key, (segment_shard << 48) + segment_start, side="right") - 1
            position = block_start[block] + segment_start - start[block]
            np.add.at(changes, position, 1)
            np.add.at(changes, position + length, -1)
        sums += len(plan.key), plan.lengths.sum(), plan.ends_at_sentence.sum(), (plan.label >= 0).sum()
    reads = np.cumsum(changes[:-1], dtype=np.int8)
    return [len(reads), reads.sum(dtype=np.int64), (reads == 0).sum(), (reads > 1).sum(), *sums]
