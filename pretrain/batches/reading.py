"""Count how often an epoch reads each token, by planning a part of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pretrain.batches.sampler import Sampler
from pretrain.batches.source import SourceSamples
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import TokenShards

_BLOCKS = 8  # counted of each source: some 8 million tokens
_AT_ONCE = 1 << 14  # samples


@dataclass(frozen=True)
class Reading:
    """Statistics of samples of one length, on the counted text. Shares are of its tokens, unless noted."""

    sequence_length: int
    input_format: str
    tokens: int  # counted
    reads: float  # of a token, on average
    unread: float  # share that is never read
    twice: float  # share that is read twice or more
    mean_length: float  # of samples, special tokens included
    at_sentence_ends: float  # share of the samples whose text stops at a sentence boundary
    labeled: float  # share of the samples with a label of their pair; 0 without pairs

    @property
    def line(self) -> str:
        """The statistics as a sentence."""
        labels = f" {self.labeled:.1%} have a label of their pair." if self.input_format == "segment_pairs" else ""
        return (
            f"length {self.sequence_length}: an epoch reads a token {self.reads:.3f} times, {self.unread:.2%} of the "
            f"tokens never and {self.twice:.2%} twice or more. {self.at_sentence_ends:.0%} of the samples end with a "
            f"sentence.{labels} Counted on {self.tokens:,} tokens."
        )


def count_readings(shards: TokenShards, config: PretrainConfig) -> list[dict[str, Any]]:
    """Return a `Reading`, as a dict, of each sequence length in the config's phases.

    Raises `InputError` if the corpus has no sample.
    """
    lengths = sorted({phase.sequence_length for phase in config.phases})
    return [asdict(count_reading(shards, config, length)) for length in lengths]


def count_reading(shards: TokenShards, config: PretrainConfig, length: int) -> Reading:
    """Plan a window of each source, of some 8 million tokens or all that it has, and count.

    Raises `InputError` if the corpus has no sample.
    """
    sampler = Sampler(shards, config.pairs, sequence_length=length, seed=config.seed, window_blocks=_BLOCKS)
    counts = [_count(source) for source in sampler.sources if source.samples]
    tokens, reads, unread, twice, samples, total, ends, labeled = np.sum(counts, axis=0).tolist()
    return Reading(
        sequence_length=length,
        input_format=config.pairs.chosen_format,
        tokens=int(tokens),
        reads=reads / tokens,
        unread=unread / tokens,
        twice=twice / tokens,
        mean_length=total / samples,
        at_sentence_ends=ends / samples,
        labeled=labeled / samples if config.pairs.has_classifier else 0.0,
    )


def _count(source: SourceSamples) -> Sequence[float]:
    """Count a source's first window: (tokens, reads, unread tokens, tokens read twice; samples, their tokens, samples
    that stop at a sentence boundary, samples with a label).
    """
    shard, begin, end = source.window_text(0, 0)
    order = np.lexsort((begin, shard))
    shard, begin, end = shard[order], begin[order], end[order]
    base = np.cumsum(end - begin) - (end - begin)
    key = (shard << 48) + begin
    changes = np.zeros(int((end - begin).sum()) + 1, np.int8)
    first, last = source.order.epoch(0).samples[:2].tolist()
    sums = np.zeros(4)
    for low in range(first, last, _AT_ONCE):
        plan = source.plan(np.arange(low, min(last, low + _AT_ONCE)))
        for segment_shard, segment_begin, length in (
            (plan.shard_a, plan.begin_a, plan.length_a),
            (plan.shard_b, plan.begin_b, plan.length_b),
        ):
            block = np.searchsorted(key, (segment_shard << 48) + segment_begin, side="right") - 1
            place = base[block] + segment_begin - begin[block]
            np.add.at(changes, place, 1)
            np.add.at(changes, place + length, -1)
        sums += len(plan.key), plan.lengths.sum(), plan.at_end.sum(), (plan.label >= 0).sum()
    times = np.cumsum(changes[:-1], dtype=np.int8)
    return [len(times), times.sum(dtype=np.int64), (times == 0).sum(), (times > 1).sum(), *sums]
