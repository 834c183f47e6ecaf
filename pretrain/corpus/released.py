"""Which tokenizers there are: the two kinds that `prepare` trains and has its own way for, and all others.

`wordpiece` is BERT's, `byte_bpe` any byte-level BPE. `released` is every other tokenizer.json, such as the Unigram of
XLM-R and DeBERTa-v3 or the BPE of Gemma and mmBERT; it is taken as it is and encodes whole documents, as the byte-level
BPE of another maker does (`whole_documents`).
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.errors import InputError
from pretrain.corpus.byte_level import is_own_byte_level, part_kinds
from pretrain.corpus.special_tokens import SPECIAL_TOKENS

_BERT_PARTS = ["WordPiece", "BertNormalizer", "BertPreTokenizer"]
MAX_WORD_CHARACTERS = 100  # longer words are [UNK]: google-research/bert tokenization.py, WordpieceTokenizer
# Line breaks, indentation and runs of blanks, as in code.
_LINES = "a\n    b\n\tc\n\n\nd  e\r\n"


def kind_of(tokenizer: Tokenizer) -> str:
    """`VocabularyConfig.kind`: wordpiece, byte_bpe or released."""
    described = json.loads(tokenizer.to_str())
    if is_bert(described):
        return "wordpiece"
    kinds = part_kinds(described)
    return "byte_bpe" if kinds[0] == "BPE" and "ByteLevel" in kinds else "released"


def takes_whole_documents(tokenizer: Tokenizer) -> bool:
    """Whether it is another maker's: neither BERT's WordPiece nor a byte-level BPE made by `prepare`."""
    described = json.loads(tokenizer.to_str())
    return not is_bert(described) and not is_own_byte_level(described)


def is_bert(described: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is BERT's: WordPiece with its division, normalizer and special tokens."""
    model = described["model"]
    if part_kinds(described) != _BERT_PARTS or not set(SPECIAL_TOKENS) <= set(model["vocab"]):
        return False
    return (model["continuing_subword_prefix"], model["max_input_chars_per_word"]) == ("##", MAX_WORD_CHARACTERS)


def released_from_json(path: Path, text: str) -> Tokenizer:
    """The tokenizer that the `text` of a tokenizer.json describes as it is, without truncation and padding.

    Raises `InputError`, which names `path`, if its tokens are random.
    """
    tokenizer = Tokenizer.from_str(text)
    if dropout := json.loads(text)["model"].get("dropout"):
        raise InputError(f"{path}: its BPE has a dropout of {dropout}, so its tokens are random. Set it to 0.")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def keeps_lines(tokenizer: Tokenizer) -> bool:
    """Whether line breaks and indentation are tokens, so that a text is what its tokens decode to.

    A blank at its beginning, which some tokenizers add, does not count.
    """
    decoded = tokenizer.decode(tokenizer.encode(_LINES, add_special_tokens=False).ids)
    return decoded.removeprefix(" ") == _LINES
