"""Makes small synthetic token corpora on disk, in the format of `pretrain.corpus.shards`."""

import hashlib
import json
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pretrain.common.files import write_manifest
from pretrain.corpus.blocks import write_blocks

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
Document = list[np.ndarray]  # one integer array per sentence


def make_corpus(
    folder: Path,
    *,
    documents: int = 200,
    vocabulary_size: int = 1000,
    seed: int = 0,
    sources: int = 1,
    weights: Sequence[float] = (),
    validation_documents: int = 20,
) -> Path:
    """Write a corpus of random documents (1 to 40 sentences of 2 to 60 tokens), and return its folder.

    Every source gets `documents` training documents in one or two shards and `validation_documents` held-out
    ones. Tokens follow a Zipf law that is shifted per document, so that both heads have something to learn.
    """
    random = np.random.default_rng(seed)
    vocabulary = make_vocabulary(vocabulary_size)
    splits = {}
    for split, count in (("train", documents), ("validation", validation_documents)):
        per_source = [[_random_document(random, vocabulary) for _ in range(count)] for _ in range(sources)]
        splits[split] = [
            (source, part)
            for source, written in enumerate(per_source)
            for part in (written[: len(written) // 2], written[len(written) // 2 :])
            if part
        ]
    return write_corpus(folder, splits, vocabulary, weights=weights or (1.0,) * sources)


def make_corpus_of_two_piece_words(folder: Path, *, documents: int = 40) -> Path:
    """Write a corpus of documents of two sentences of three words, each of two pieces, and return its folder."""
    random, vocabulary = np.random.default_rng(0), make_vocabulary(300)
    beginnings, pieces = ([n for n, entry in enumerate(vocabulary) if entry[:3] in kind] for kind in ({"wor"}, {"##p"}))
    sentences = np.stack([random.choice(of, (documents, 2, 3)) for of in (beginnings, pieces)], -1)
    written = [list(document) for document in sentences.reshape(documents, 2, 6)]
    return write_corpus(folder, {"train": [(0, written)], "validation": [(0, written[:5])]}, vocabulary)


def make_vocabulary(size: int) -> list[str]:
    """Return special tokens, letters and their ## forms, made-up words and ## pieces, and two [unused] tokens."""
    letters = list(string.ascii_lowercase + string.punctuation)
    entries = [*SPECIALS, *letters, *(f"##{letter}" for letter in string.ascii_lowercase)]
    entries += [f"##p{number}" if number % 5 == 0 else f"word{number}" for number in range(max(0, size))]
    return [*entries[: size - 2], "[unused0]", "[unused1]"]


def write_corpus(
    folder: Path,
    splits: dict[str, list[tuple[int, list[Document]]]],
    vocabulary: list[str],
    *,
    weights: Sequence[float] = (1.0,),
) -> Path:
    """Write a corpus folder with its manifest; `splits` is {name: [(index of the source, documents of a shard)]}."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.uint16 if len(vocabulary) <= 1 << 16 else np.uint32
    digest = hashlib.sha256(json.dumps([vocabulary, list(weights)]).encode())
    shards = []
    for split, parts in splits.items():
        for number, (source, documents) in enumerate(parts):
            shard = {"name": f"{split}-{number:05d}", "split": split, "source": source}
            arrays = shard_arrays(documents, dtype)
            for kind, array in arrays.items():
                np.save(folder / f"{shard['name']}.{kind}.npy", array)
                digest.update(array.tobytes())
                shard[kind] = len(array) - (kind != "tokens")
            write_blocks(folder / f"{shard['name']}.blocks.npy", arrays)
            shards.append(shard)
    write_tokenizer(folder, vocabulary)
    card = {"documents": sum(s["documents"] for s in shards), "tokens": sum(s["tokens"] for s in shards)}
    (folder / "card.json").write_text(json.dumps(card))
    (folder / "card.md").write_text("# A synthetic corpus\n")
    write_manifest(
        folder,
        {
            "format": 1,
            "folded": True,
            "fingerprint": digest.hexdigest(),
            "vocabulary_size": len(vocabulary),
            "dtype": np.dtype(dtype).name,
            "special_ids": {name[1:-1].lower(): vocabulary.index(name) for name in SPECIALS},
            "sources": [
                {"name": f"source-{number}", "weight": weight, "license": "none"}
                for number, weight in enumerate(weights)
            ],
            "shards": shards,
        },
    )
    return folder


def shard_arrays(documents: list[Document], dtype: type) -> dict[str, np.ndarray]:
    """Return the arrays of a shard: tokens, dtype [T]; sentences, uint64 [S + 1]; documents, uint64 [D + 1, 2]."""
    sentences = [sentence for document in documents for sentence in document]
    offsets = np.concatenate([[0], np.cumsum([len(sentence) for sentence in sentences], dtype=np.int64)])
    counts = np.concatenate([[0], np.cumsum([len(document) for document in documents], dtype=np.int64)])
    return {
        "tokens": np.concatenate(sentences).astype(dtype),
        "sentences": offsets.astype(np.uint64),
        "documents": np.stack([counts, offsets[counts]], axis=1).astype(np.uint64),
    }


def write_tokenizer(folder: Path, vocabulary: list[str]) -> None:
    """Write vocab.txt, tokenizer.json and tokenizer_config.json of an uncased BERT tokenizer for `vocabulary`."""
    (folder / "vocab.txt").write_text("".join(f"{entry}\n" for entry in vocabulary), encoding="utf-8")
    ids = {entry: number for number, entry in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "mask_token": "[MASK]", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 512}))


def _random_document(random: np.random.Generator, vocabulary: list[str]) -> Document:
    """Return 1 to 40 sentences of 2 to 60 tokens; sentences start with a whole word."""
    word_ids = np.arange(len(SPECIALS), len(vocabulary) - 2)
    first_ids = np.array([token_id for token_id in word_ids if not vocabulary[token_id].startswith("##")])
    shift = int(random.integers(len(word_ids)))
    document = []
    for _ in range(int(random.integers(1, 41))):
        ranks = np.minimum(random.zipf(1.3, int(random.integers(2, 61))), len(word_ids)) - 1
        sentence = word_ids[(ranks + shift) % len(word_ids)]
        sentence[0] = first_ids[(ranks[0] + shift) % len(first_ids)]
        document.append(sentence)
    return document
