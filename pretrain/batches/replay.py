"""Replay: text of a second corpus mixed into a run's own, so that a model forgets less of what it knew.

The second corpus's sources become further sources of the mixture, whose weights follow from the share of the samples
that they shall have. A replayed sample is what it is for any other source (invariant 1).
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.common.errors import InputError
from pretrain.corpus.shards import TokenShards

_SHARE = "replay_share"  # key of a source in `TokenShards.sources`: the share of all samples of the replayed sources


def with_replay(shards: TokenShards, general: TokenShards, share: float) -> TokenShards:
    """`shards` with the sources of `general`, which together give `share` of the samples of every epoch.

    The vocabulary is that of `shards`; that of `general` must be the same, or its beginning.

    Raises:
        InputError: the corpora keep their tokens in different widths, or `general` has no text.
    """
    if not general.shards:
        raise InputError(f"{general.folder}: no text in this split, so nothing can be replayed. Prepare it again.")
    ours, theirs = (one.shards[0].tokens.dtype if one.shards else None for one in (shards, general))
    if ours is not None and ours != theirs:
        raise InputError(
            f"{general.folder}: its tokens are {theirs}, but those of {shards.folder} are {ours}: one vocabulary has "
            "more than 2^16 entries. Add fewer words, or prepare the general corpus again."
        )
    digest = hashlib.sha256(f"{shards.fingerprint} {general.fingerprint} {share!r}".encode())
    behind = len(shards.sources)
    # Without names: weights of a phase are for the run's own sources, which may have the same ones.
    replayed = [{"weight": source.get("weight", 1.0), _SHARE: share} for source in general.sources]
    return dataclasses.replace(
        shards,
        fingerprint=digest.hexdigest(),
        sources=[*shards.sources, *replayed],
        shards=[*shards.shards, *(dataclasses.replace(one, source=one.source + behind) for one in general.shards)],
        fingerprints=tuple(
            corpus.source_fingerprint(number) for corpus in (shards, general) for number in range(len(corpus.sources))
        ),
    )


def is_replayed(source: Mapping[str, Any]) -> bool:
    """Whether a source is of the second corpus."""
    return _SHARE in source


def mixture_weights(sources: Sequence[Mapping[str, Any]], weights: list[float], samples: Sequence[int]) -> list[float]:
    """How many epochs of each source go into an epoch of the mixture.

    Args:
        sources: of the corpus; replayed ones have the share of the samples that all of them give together.
        weights: of the sources, which count among the replayed ones and among the others.
        samples: of one epoch of each source.

    Raises `InputError` if there is nothing to replay.
    """
    share = next((float(source[_SHARE]) for source in sources if _SHARE in source), None)
    if share is None:
        return weights
    counts = [weight * count for weight, count in zip(weights, samples, strict=True)]
    own = sum(count for source, count in zip(sources, counts, strict=True) if _SHARE not in source)
    replayed = sum(count for source, count in zip(sources, counts, strict=True) if _SHARE in source)
    if own and not replayed:
        raise InputError(
            "adaptation.replay_corpus: none of its documents has the sentences that a sample needs, so nothing can be "
            "replayed. Add text, or set pairs.objective: none."
        )
    factor = share / (1 - share) * own / max(replayed, 1.0)
    return [weight * factor if _SHARE in source else weight for source, weight in zip(sources, weights, strict=True)]
