"""Corpora whose tokens are numbered, so that every token of a sample says where it came from; and their samples."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from corpora import shard_arrays

from pretrain.batches.sampler import Sampler
from pretrain.batches.source import SourceSamples
from pretrain.config import PairsConfig
from pretrain.corpus.shards import Shard, TokenShards

SINGLE: dict[str, Any] = {"objective": "none"}
JOINED: dict[str, Any] = {"objective": "none", "input_format": "full_sentences"}
NEXT: dict[str, Any] = {"objective": "nsp"}
ORDER: dict[str, Any] = {"objective": "sop"}
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


def numbered(documents_by_shard, *, sources=None, weights=(1.0,)) -> TokenShards:
    """Return shards of documents, given as lists of sentence lengths; token i of the corpus has id i + 5."""
    first, shards = len(SPECIAL), []
    for number, documents in enumerate(documents_by_shard):
        written = []
        for document in documents:
            ends = first + np.cumsum([0, *document])
            written.append([np.arange(*sentence) for sentence in itertools.pairwise(ends.tolist())])
            first = int(ends[-1])
        source = sources[number] if sources else 0
        arrays = shard_arrays(written, np.uint32)
        tokens, sentences, documents = (arrays[name] for name in ("tokens", "sentences", "documents"))
        shards.append(Shard(f"train-{number:05d}", "train", source, tokens, sentences, documents))
    described = [{"name": f"s{i}", "weight": weight} for i, weight in enumerate(weights)]
    return TokenShards(Path("nowhere"), "fingerprint", first, SPECIAL, described, shards)


def random_documents(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 50, random.integers(1, longest)).tolist() for _ in range(count)]


def sampler(shards: TokenShards, length: int = 128, *, seed: int = 0, more=None, **pairs) -> Sampler:
    return Sampler(shards, PairsConfig.model_validate(pairs), sequence_length=length, seed=seed, **(more or {}))


class Text:
    """The document, sentence and source of each numbered token."""

    def __init__(self, shards: TokenShards) -> None:
        document, sentence, source = ([np.full(5, -1)] for _ in range(3))
        documents = sentences = 0
        for shard in shards.shards:
            counts = np.diff(shard.documents.astype(np.int64), axis=0)
            lengths = np.diff(shard.sentences.astype(np.int64))
            document.append(np.repeat(np.arange(len(counts)) + documents, counts[:, 1]))
            sentence.append(np.repeat(np.arange(len(lengths)) + sentences, lengths))
            source.append(np.full(len(shard.tokens), shard.source))
            documents += len(counts)
            sentences += len(lengths)
        self.document, self.sentence, self.source = map(np.concatenate, (document, sentence, source))
        self.documents = documents


def times_read(shards: TokenShards, made: Sampler | SourceSamples, samples: np.ndarray) -> np.ndarray:
    """Return how often samples read each token, in the order of the shards."""
    counts = np.zeros(sum(len(shard.tokens) for shard in shards.shards) + 1, np.int64)
    bases = np.cumsum([0, *(len(shard.tokens) for shard in shards.shards)])
    plan = made.plan(samples)
    for shard, begin, length in (
        (plan.shard_a, plan.start_a, plan.length_a),
        (plan.shard_b, plan.start_b, plan.length_b),
    ):
        np.add.at(counts, bases[shard] + begin, 1)
        np.add.at(counts, bases[shard] + begin + length, -1)
    return np.cumsum(counts)[:-1]


def epoch(made: Sampler, number: int = 0) -> np.ndarray:
    return np.arange(made.samples_per_epoch) + number * made.samples_per_epoch
