"""Text to tokens: words tokenized once give what the tokenizer gives for the whole text."""

from __future__ import annotations

import numpy as np
import pytest
from corpora import make_vocabulary
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from finetune.tasks.datasets.text import TextEncoder
from tests.tasks.refusals import refused

# All kinds of spaces, combining marks, ideographs, and letters whose lower case has two characters.
ODD = (
    " \t\n\r\u00a0\u200b\u200d\u2028\u3000.,-[]#'\u0301\u0308éÉß"
    "\u0130\u03a3\u4e2d\u6587\uac00\u1100\u1161\U0001f600\x00\x07\ufffd"
)
TEXTS = st.lists(
    st.text(
        st.one_of(st.sampled_from(ODD), st.sampled_from("abcXYZ"), st.characters(exclude_categories=["Cs"])),
        max_size=60,
    ),
    max_size=6,
)


def make_tokenizer(*, lowercase: bool, added: AddedToken | None = None) -> Tokenizer:
    words = [*make_vocabulary(120)[:-2], "中", "é", "##é", "中a"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(["[MASK]", "[SEP]"])
    if added:
        tokenizer.add_tokens([added])
    return tokenizer


ENCODERS = {lowercase: TextEncoder(make_tokenizer(lowercase=lowercase), 32) for lowercase in (False, True)}


@pytest.mark.parametrize("lowercase", [False, True])
@settings(deadline=None, max_examples=300)
@given(texts=TEXTS)
@example(texts=[])
@example(texts=["", " ", "  a  ", "a\u0301 \u0301b", "[MASK] a[MASK]b [ MASK ]", "中a 文", "a" * 120 + " " + "b" * 99])
@example(texts=[" ".join(f"w{n}" for n in range(1000))])  # more distinct words than fit one line
def test_words_give_what_the_whole_text_gives(lowercase: bool, texts: list[str]) -> None:
    encoder = ENCODERS[lowercase]
    assert encoder.splits_at_spaces
    mine, whole = encoder.encode(texts), encoder.encode_whole(texts)
    assert np.array_equal(mine.ids, whole.ids)
    assert np.array_equal(mine.starts, whole.starts)
    assert np.array_equal(mine.offsets, whole.offsets)
    assert (mine.ids.dtype, mine.starts.dtype, mine.offsets.dtype) == (np.int32, np.int64, np.int32)


def test_special_tokens_are_found_around_texts_of_several_tokens() -> None:
    tokenizer = Tokenizer(models.BPE({"[CLS]": 0, "[SEP]": 1, "\u2581": 2, "a": 3}, [], byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    refused("adds no special tokens", TextEncoder, tokenizer, 32)
    tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", 1), ("[CLS]", 0))
    assert tokenizer.encode("a", add_special_tokens=False).ids == [2, 3]
    encoder = TextEncoder(tokenizer, 32)
    found = (encoder.prefix, encoder.between, encoder.suffix)
    assert [part.tolist() for part in found] == [[0], [1, 1], [1]]


@pytest.mark.parametrize(
    "added", [AddedToken("new york"), AddedToken("<x>", lstrip=True), AddedToken("<x>", rstrip=True)]
)
def test_a_token_with_spaces_is_left_to_the_tokenizer(added: AddedToken) -> None:
    encoder = TextEncoder(make_tokenizer(lowercase=True, added=added), 32)
    texts = ["in new york a", "a <x> b"]
    assert not encoder.splits_at_spaces
    mine, whole = encoder.encode(texts), encoder.tokenizer.encode_batch(texts, add_special_tokens=False)
    assert mine.ids.tolist() == [number for one in whole for number in one.ids]
