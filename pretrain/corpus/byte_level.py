"""Byte-level BPE vocabularies (Radford et al. 2019, section 2.2): training them, and encoding pieces with them.

Documents are split into words as in GPT-2, but combining marks belong to the word of the letter before them: GPT-2
splits words of Hindi, Thai or Khmer at every vowel sign, which results in several times as many tokens.

Every string can be encoded, so there is no unknown token, and nothing is normalized, except that each line break
becomes a space unless the corpus keeps line breaks (`with_joined_lines`). A space belongs to the word after it
("\u0120word"). The first word of a string also gets a space, so that it has the same tokens as elsewhere; RoBERTa and
ModernBERT do not do this, which hurts named-entity recognition. `add_prefix_space` of `tokenizers` would also put a
space after each special token ("[MASK]." would become "[MASK] ."). The pre-tokenizer is therefore Metaspace with a
space as its mark, which only changes the first word, followed by the splitter.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pretrain.common.errors import InputError

SPACE = "\u0120"  # the character that represents the byte of a space
_END_OF_PIECE = "\0"
_LINE_END = r"[ \t\r]*\n[ \t\r\n]*"
LINE_JOINER = {"type": "Replace", "pattern": {"Regex": _LINE_END}, "content": " "}
_PIECES_PER_STRING = 100  # number of pieces that `PieceEncoder` joins into one string
# The pattern in openai/gpt-2 encoder.py, except that combining marks and joiners belong to words.
_SPLITTER = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}[\p{L}\p{M}\x{200B}-\x{200D}]*| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer is a byte-level BPE."""
    steps: list[Any] = [step for step in (tokenizer.normalizer, tokenizer.pre_tokenizer) if step is not None]
    return isinstance(tokenizer.model, models.BPE) and any(b'"ByteLevel"' in step.__getstate__() for step in steps)


def is_bertrain_byte_level(spec: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json gives the same tokens as a `byte_tokenizer`, with or without line breaks."""
    if spec["model"]["type"] != "BPE" or spec["normalizer"] not in (None, LINE_JOINER):
        return False
    names = [token["content"] for token in spec["added_tokens"]]
    entries = spec["model"]["vocab"]
    if not {"[CLS]", "[SEP]", *names} <= entries.keys() or max(entries.values()) >= len(entries):
        return False
    special_ids = {name: entries[name] for name in {*names, "[CLS]", "[SEP]"}}
    expected = json.loads(byte_tokenizer(special_ids, [], names).to_str())
    for key in ("vocab", "merges", "ignore_merges"):  # these may differ
        expected["model"][key] = spec["model"][key]
    return all(expected[key] == spec[key] for key in ("model", "pre_tokenizer", "added_tokens"))


def with_joined_lines(tokenizer: Tokenizer) -> Tokenizer:
    """Make a `byte_tokenizer` replace line breaks and the spaces around them by a space; return others unchanged."""
    serialized = tokenizer.to_str()
    if not is_bertrain_byte_level(json.loads(serialized)):
        return tokenizer
    joining = Tokenizer.from_str(serialized)
    joining.normalizer = normalizers.Replace(Regex(_LINE_END), " ")  # pyright: ignore[reportAttributeAccessIssue]
    return joining


def join_lines(text: str) -> str:
    """Normalize `text` like the tokenizer that `with_joined_lines` returns."""
    if "\n" not in text:
        return text
    spaces = " \t\r"
    first, *inner, last = text.split("\n")
    return " ".join([first.rstrip(spaces), *filter(None, (line.strip(spaces) for line in inner)), last.lstrip(spaces)])


def byte_tokenizer(
    vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], special_tokens: Sequence[str]
) -> Tokenizer:
    """Make the tokenizer for `vocabulary` (token -> id), with the post-processor for [CLS] A [SEP] B [SEP].

    [MASK] includes the space before it, as in RoBERTa, so that a space in the text does not hint at the masked token.
    """
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    metaspace = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([metaspace, bertrain_splitter()])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    template = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    # The character offsets of a token exclude its space.
    offsets = processors.ByteLevel(add_prefix_space=True, trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([offsets, template])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, lstrip=name == "[MASK]") for name in special_tokens]
    )
    return tokenizer


def bertrain_splitter() -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer of a `byte_tokenizer`."""
    split = pre_tokenizers.Split(Regex(_SPLITTER), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])  # pyright: ignore[reportArgumentType]


class PieceEncoder:
    """Encodes many pieces per call, which is several times as fast as one by one.

    A piece is split and encoded as it is: no space is added, and the name of a special token is ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        is_bertrain = is_bertrain_byte_level(json.loads(tokenizer.to_str()))
        splitter = bertrain_splitter() if is_bertrain else pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer = Tokenizer(tokenizer.model)
        self._tokenizer.pre_tokenizer = splitter  # pyright: ignore[reportAttributeAccessIssue]
        self._tokenizer.add_special_tokens([AddedToken(_END_OF_PIECE, special=True, normalized=False)])
        self._end_id = self._tokenizer.token_to_id(_END_OF_PIECE)

    def encode(self, pieces: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of tokens per piece, int64 [P], and all tokens, int32. Pieces contain no NUL."""
        starts = range(0, len(pieces), _PIECES_PER_STRING)
        strings = [b"\0".join((*pieces[start : start + _PIECES_PER_STRING], b"")).decode() for start in starts]
        encoded = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        tokens = np.concatenate([np.zeros(0, np.int32), *(np.array(encoding.ids, np.int32) for encoding in encoded)])
        is_end = tokens == self._end_id
        return np.bincount(np.cumsum(is_end)[~is_end], minlength=len(pieces)), tokens[~is_end]


# ---------------------------------------------------------------- training


def train_byte_level(
    counts: dict[bytes, int], size: int, special_tokens: Sequence[str], *, min_frequency: int
) -> Tokenizer:
    """Train a vocabulary of at most `size` entries on counts of pieces. `special_tokens` get the lowest ids.

    All 256 bytes are entries. The same counts give the same vocabulary with the same ids: since every byte has a fixed
    id, `tokenizers` never assigns ids in the order of a hash map.
    """
    words = _pre_tokens(counts)
    if not words:
        raise InputError("corpus.sources: no words to train a vocabulary on.")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if size < len(special_tokens) + len(alphabet):
        raise InputError(
            f"corpus.vocabulary.size: {size}, but byte_bpe needs {len(special_tokens) + len(alphabet)} entries for the "
            "special tokens and the 256 bytes alone. Raise it, such as to 32768."
        )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=[*special_tokens, *alphabet],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.train_from_iterator(repeat_words(words), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return byte_tokenizer(model["vocab"], [(merge[0], merge[1]) for merge in model["merges"]], special_tokens)


def _pre_tokens(counts: dict[bytes, int]) -> dict[str, int]:
    """Return {pre-token: count}, sorted; each byte is represented by GPT-2's character for it."""
    split = bertrain_splitter().pre_tokenize_str
    words: Counter[str] = Counter()
    for piece, count in counts.items():
        inner = piece.removeprefix(b" ")
        # Most pieces are letters with or without a space, and are not split.
        if inner.isalpha():
            words[(SPACE if len(inner) < len(piece) else "") + inner.decode()] += count
            continue
        for word, _ in split(piece.decode()):
            words[word] += count
    return dict(sorted(words.items()))


def component_types(spec: dict[str, Any]) -> list[str]:
    """Return the types of the model, the normalizer and the pre-tokenizer in a tokenizer.json."""
    return [spec["model"]["type"], *_types_of(spec["normalizer"]), *_types_of(spec["pre_tokenizer"])]


def _types_of(step: dict[str, Any] | None) -> list[str]:
    """Return the type of a normalizer or pre-tokenizer, or the types in a sequence."""
    if step is None:
        return []
    steps = step.get("pretokenizers", step.get("normalizers", [step]))
    return [inner_step["type"] for inner_step in steps]


# ---------------------------------------------------------------- training text


_TRAINING_CHUNK = 1 << 16  # characters passed to a trainer at a time


def repeat_words(words: dict[str, int]) -> Iterator[str]:
    """Yield strings that contain each word as often as it was counted, since trainers accept text, not counts."""
    chunk: list[str] = []
    remaining = _TRAINING_CHUNK
    for word, count in words.items():
        text = word + " "
        while count:
            times = min(count, remaining // len(text) + 1)
            chunk.append(text * times)
            count -= times
            remaining -= times * len(text)
            if remaining <= 0:
                yield "".join(chunk)
                chunk, remaining = [], _TRAINING_CHUNK
    yield "".join(chunk)
