"""A corpus in memory, for benchmarks of data loading."""

from pathlib import Path

import numpy as np

from pretrain.corpus.shards import Shard, TokenShards

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY_SIZE = 30522


def synthetic_corpus(folder: Path) -> TokenShards:
    """Return five million tokens in memory: documents of 1 to 60 sentences, sentences of 5 to 45 tokens.

    The vocabulary is written to `folder`.
    """
    random = np.random.default_rng(0)
    sentences = np.concatenate(([0], np.cumsum(random.integers(5, 46, 200_000))))
    documents = np.concatenate(([0], np.cumsum(random.integers(1, 61, 7000))))
    documents = documents[documents < len(sentences)]
    tokens = random.integers(len(SPECIALS), VOCABULARY_SIZE, sentences[documents[-1]]).astype(np.uint16)
    table = np.stack((documents, sentences[documents]), axis=1).astype(np.uint64)
    return of_shards(folder, [Shard("train-00000", "train", 0, tokens, sentences.astype(np.uint64), table)])


def of_shards(folder: Path, shards: list[Shard]) -> TokenShards:
    """Return a corpus of these shards, with a vocabulary in `folder`."""
    words = [f"##p{i}" if i % 4 == 0 else f"w{i}" for i in range(VOCABULARY_SIZE - len(SPECIALS))]
    (folder / "vocab.txt").write_text("".join(f"{entry}\n" for entry in (*SPECIALS, *words)), encoding="utf-8")
    special_ids = {special[1:-1].lower(): number for number, special in enumerate(SPECIALS)}
    return TokenShards(folder, "synthetic", VOCABULARY_SIZE, special_ids, [{"weight": 1.0}], shards)
