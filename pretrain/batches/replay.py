"""Replay: text of a general corpus, mixed into a run's corpus to reduce forgetting.

The sources of the general corpus become additional sources of the mixture. Their weights follow from the configured
share of the samples. Replayed samples are determined like all other samples (invariant 1 in docs/invariants.md).
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.common.errors import InputError
from pretrain.corpus.shards import TokenShards

_SHARE_KEY = "replay_share"  # key of `TokenShards.sources` entries: share of samples of all replayed sources together


def with_replay(shards: TokenShards, general: TokenShards, share: float) -> TokenShards:
    """Add the sources of `general` to `shards`; together, the added sources provide `share` of every epoch's samples.

    The vocabulary of `general` must be the vocabulary of `shards` or a prefix of it.

    Raises:
        InputError: the corpora store tokens in different dtypes, or `general` has no text.
    """
    if not general.shards:
        raise InputError(f"{general.folder}: no text in this split, so nothing can be replayed. Prepare it again.")
    ours, theirs = (corpus.shards[0].tokens.dtype if corpus.shards else None for corpus in (shards, general))
    if ours is not None and ours != theirs:
        raise InputError(
            f"{general.folder}: its tokens are {theirs}, but {shards.folder} has {ours}: one vocabulary has "
            "more than 2^16 entries. Add fewer words, or prepare the general corpus again."
        )
    digest = hashlib.sha256(f"{shards.fingerprint} {general.fingerprint} {share!r}".encode())
    start = len(shards.sources)
    # Replayed sources have no names: a phase's weights apply only to the run's sources, whose names may be the same.
    replayed = [{"weight": source.get("weight", 1.0), _SHARE_KEY: share} for source in general.sources]
    return dataclasses.replace(
        shards,
        fingerprint=digest.hexdigest(),
        sources=[*shards.sources, *replayed],
        shards=[*shards.shards, *(dataclasses.replace(shard, source=shard.source + start) for shard in general.shards)],
        fingerprints=tuple(
            corpus.source_fingerprint(index) for corpus in (shards, general) for index in range(len(corpus.sources))
        ),
    )


def is_replayed(source: Mapping[str, Any]) -> bool:
    """Return whether a source is replayed from the general corpus."""
    return _SHARE_KEY in source


def mixture_weights(sources: Sequence[Mapping[str, Any]], weights: list[float], samples: Sequence[int]) -> list[float]:
    """Return how many epochs of each source an epoch of the mixture reads.

    Args:
        sources: all sources; each replayed one stores the share of samples of all replayed sources together.
        weights: weight of each source, relative to the other sources of its kind (replayed or not).
        samples: number of samples in an epoch of each source.

    Raises `InputError` if there is nothing to replay.
    """
    share = next((float(source[_SHARE_KEY]) for source in sources if _SHARE_KEY in source), None)
    if share is None:
        return weights
    counts = [weight * count for weight, count in zip(weights, samples, strict=True)]
    not_replayed = sum(count for source, count in zip(sources, counts, strict=True) if _SHARE_KEY not in source)
    replayed = sum(count for source, count in zip(sources, counts, strict=True) if _SHARE_KEY in source)
    if not_replayed and not replayed:
        raise InputError(
            "adaptation.replay_corpus: none of its documents has the sentences that a sample needs, so nothing can be "
            "replayed. Add text, or set pairs.objective: none."
        )
    factor = share / (1 - share) * not_replayed / max(replayed, 1.0)
    return [weight * factor if is_replayed(source) else weight for source, weight in zip(sources, weights, strict=True)]
