"""Byte-level BPE: the ids are tokenizers' own, every text comes back, words begin where GPT-2's splitting says."""

from __future__ import annotations

import functools
import itertools
import json
import string
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from pretrain.batches.masking import Masker
from pretrain.batches.sampler import Sampler
from pretrain.common.errors import InputError
from pretrain.config import MaskingConfig, PairsConfig, PretrainConfig, SourceConfig
from pretrain.corpus.byte_level import bertrain_splitter
from pretrain.corpus.byte_words import entry_strings, is_byte_vocabulary
from pretrain.corpus.extension import extend_vocabulary
from pretrain.corpus.pieces import DocumentPieces
from pretrain.corpus.prepare import prepare
from pretrain.corpus.shards import open_shards
from pretrain.corpus.splitters import Gpt2Splitter
from pretrain.corpus.tokenize import BytePairs, WordTable
from pretrain.corpus.tokenizer_files import load_vocabulary
from pretrain.corpus.vocabulary import (
    SPECIAL_TOKENS,
    read_vocabulary,
    save_tokenizer,
    special_ids,
    train_byte_vocabulary,
    train_vocabulary,
)
from pretrain.reporting.fill_mask import MaskedSentence, make_filling, maskable_words
from tests.corpus.preparing import document_tokens, masked_words, preparation

TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog doesn't care. In 1999 the fox's naïve friends said: "
    "“We'll see!” Über 2024 they're all re-entering Zürich; Ελληνικά, русский язык. 漢字かな交じり文。 don't won't "
)
PLAIN = "the cat sat on a mat and the dog ran to the house where many people lived for a long time near the big river"
# What GPT-2's splitting treats specially: white space of all kinds, apostrophes, numbers, combining marks, emoji.
ODD = " \t\r\x01\x0b\x0c\x1c\x7f\x85\xa0\xad\u0301\u1680\u200b\u2003\u2028\u3000\ufeff''sdmtrevl019²½٣Ⅷ漢字ß。—“😀𝒳𠀀€é"
LINE = st.text(
    st.one_of(
        st.sampled_from(ODD),
        st.sampled_from(string.printable.replace("\n", "")),
        st.characters(exclude_categories=["Cs"], exclude_characters="\n\0"),
    ),
    max_size=60,
)
TRAIN = "from tests.corpus.test_byte_bpe import trained; print(trained.__wrapped__().to_str())"


def cut(texts: Sequence[str], table: WordTable) -> DocumentPieces:
    """Documents of one sentence each, which are not empty."""
    return Gpt2Splitter.for_bertrain(None).cut(texts, [[0]] * len(texts), table)


def counts(*texts: str) -> dict[bytes, int]:
    table = WordTable()
    pieces = cut(texts, table).pieces
    return dict(zip(table.words(np.arange(table.size)), np.bincount(pieces).tolist(), strict=True))


@functools.cache
def trained(size: int = 420) -> Tokenizer:
    return train_byte_vocabulary(counts(TEXT * 3, PLAIN * 5, "漢字 " * 2), size, min_frequency=2)


@functools.cache
def library() -> Tokenizer:
    tokenizer = Tokenizer.from_str(trained().to_str())
    tokenizer.encode_special_tokens = True
    return tokenizer


def theirs(text: str) -> list[int]:
    """Ids of a text by the library's own reading of the whole text; names of special tokens are ordinary text."""
    return library().encode(text, add_special_tokens=False).ids


def ours(texts: list[str], tokenizer: Tokenizer | None = None) -> list[list[int]]:
    """Ids of each of `texts`."""
    table = WordTable()
    found = cut(texts, table)
    pieces = BytePairs(tokenizer or trained(), table)
    tokens, offsets = pieces.tokens(found.pieces, found.sentences, np.dtype(np.uint16))
    return [tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)]


@settings(max_examples=300, deadline=None)
@given(lines=st.lists(LINE, min_size=1, max_size=4))
@example(lines=["", "  ", "\t", " a", "\ta", "  a", "a ", "a  ", "\xa0", "\xa0a\xa0 b"])
@example(lines=["a \xa0b", "\xa0 \xa0b", "a  b   c\t\td \t e", "  don't  'twas ''s 'S ('tis", "1's2nd x''ll'd"])
@example(lines=["किताब", "क\u200dष ๆำ1ำ!ำ ำ", "می\u200cخواهم", "ស\u200bិ❤\ufe0f \u0301a\u0301\u0301b", "ﷺ\u0670x\u0670"])
@example(lines=["[MASK] is [SEP] not special[PAD]", "😀😀a𝒳1 𠀀漢", "e\u0301e \u0301", "²½٣9Ⅷx"])
def test_ids_are_those_of_the_library(lines: list[str]) -> None:
    lines = [line for line in lines if line]
    assert ours(lines) == [theirs(line) for line in lines] if lines else True
    table, divide = WordTable(), bertrain_splitter().pre_tokenize_str
    for line in lines:
        pieces = [piece.decode() for piece in table.words(cut([line], table).pieces)]
        whole = line if line.startswith(" ") else " " + line
        assert [word for piece in pieces for word, _ in divide(piece)] == [word for word, _ in divide(whole)]


def test_training_gives_the_same_ids_in_every_process() -> None:
    outputs = {
        subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, check=True, text=True).stdout.strip()
        for _ in range(2)
    }
    assert outputs == {trained().to_str()}


def test_a_vocabulary_has_the_special_tokens_all_bytes_and_the_most_frequent_words() -> None:
    vocabulary = trained().get_vocab()
    entries = sorted(vocabulary, key=vocabulary.__getitem__)
    assert tuple(entries[:5]) == SPECIAL_TOKENS
    assert sorted(vocabulary.values()) == list(range(420))
    assert set(entries[5:261]) == set(pre_tokenizers.ByteLevel.alphabet())
    assert {"Ġthe", "Ġdog", "'t"} <= set(entries)
    with pytest.raises(InputError, match=r"size: 260, but byte_bpe needs 261"):
        train_byte_vocabulary(counts(TEXT), 260, min_frequency=1)


def test_merges_are_those_of_the_library_trained_on_the_text_itself() -> None:
    from tokenizers import trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        min_frequency=2,
        special_tokens=[*SPECIAL_TOKENS, *alphabet],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    library.train_from_iterator([TEXT * 3, PLAIN * 5, "漢字 " * 2], trainer)
    assert library.get_vocab() == trained().get_vocab()


def test_a_text_begins_as_it_would_within_another() -> None:
    """No other place gets a blank that is not there."""
    tokenizer = trained()
    first, second = "The dog doesn't care.", "In 1999 they're all here."
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    assert [*itertools.chain(*ours([f"{first} {second}"]))] == encode(f"{first} {second}").ids
    assert encode("dog").ids == encode(" dog").ids == encode("the dog").ids[-1:]
    assert encode("dog [MASK].").tokens == ["Ġdog", " [MASK]", "."]
    assert tokenizer.encode("The [MASK] ran", "dog").tokens == [
        *("[CLS]", "ĠThe", " [MASK]", "Ġran", "[SEP]", "Ġdog", "[SEP]")
    ]


def test_offsets_are_those_of_the_letters() -> None:
    text = "The dog, the dog"
    words = [text[a:b] for a, b in trained().encode(text).offsets[1:-1]]
    assert words == ["The", "dog", ",", "the", "dog"]


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path, trained())
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == trained().get_vocab()
    for text in (TEXT, "dog [MASK].", " x  y\n", "漢\u0301😀"):
        assert loaded(text)["input_ids"] == trained().encode(text).ids
        assert (
            loaded.decode(loaded(text, add_special_tokens=False)["input_ids"]).lstrip()
            == text.replace(" [MASK]", "[MASK]").lstrip()
        )
    assert {name: getattr(loaded, f"{name}_token_id") for name in special_ids(trained())} == special_ids(trained())
    assert loaded(["the", "dog"], is_split_into_words=True)["input_ids"] == trained().encode("the dog").ids


def test_taking_over_gives_the_same_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, trained())
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_vocabulary(path, lowercase=False, kind="byte_bpe").to_str() == trained().to_str()
    with pytest.raises(InputError, match=r"kind: wordpiece, but .* is a vocabulary of kind byte_bpe"):
        load_vocabulary(tmp_path, lowercase=False)


def test_taking_over_keeps_added_words(tmp_path: Path) -> None:
    extended = extend_vocabulary(train_byte_vocabulary(counts(PLAIN), 300, min_frequency=1), {"quokkaburra": 9}, 2)
    save_tokenizer(tmp_path, extended.tokenizer, {})
    again = load_vocabulary(tmp_path, lowercase=False, kind="byte_bpe")
    assert again.encode("a quokkaburra").tokens[2:-1] == extended.words


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    documents = [
        {
            "text": f"{PLAIN.capitalize()} {n}. {TEXT}\n  {PLAIN} (the dog's {n} ideas)。The。  "
            + " ".join(PLAIN.split()[n:])
        }
        for n in range(12)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    prepare(config(folder, folder / "corpus"), quiet=True)
    return folder


def config(folder: Path, target: Path, **vocabulary: Any) -> PretrainConfig:
    sources = [SourceConfig(kind="jsonl", path=str(folder / "a.jsonl"))]
    return preparation(target, sources, vocabulary={"kind": "byte_bpe", "size": 400, **vocabulary})


def test_a_corpus_has_the_tokens_that_its_tokenizer_gives_the_text(corpus: Path) -> None:
    """Line ends are blanks, for both; no sentence gets a blank that the text has not."""
    shards = open_shards(corpus / "corpus", "train")
    tokenizer = Tokenizer.from_file(str(corpus / "corpus" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (corpus / "a.jsonl").open()]
    expected = {tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts}
    assert set(document_tokens(shards)) < expected
    shard = shards.shards[0]
    ends = shard.sentences.astype(int)
    sentences = {tokenizer.decode(shard.tokens[a:b].tolist()) for a, b in itertools.pairwise(ends)}
    assert " The quick brown fox jumps over the lazy dog, and the dog doesn't care." in sentences
    assert shards.vocabulary_size == 400
    card = json.loads((corpus / "corpus" / "card.json").read_text())
    assert card["vocabulary"] == {"size": 400, "lowercase": False, "kind": "byte_bpe"}
    assert card["totals"]["unknown_tokens"] == 0


def test_a_given_vocabulary_makes_the_same_corpus(corpus: Path, tmp_path: Path) -> None:
    prepare(config(corpus, tmp_path / "again", path=str(corpus / "corpus")), quiet=True)
    assert open_shards(tmp_path / "again", "train").fingerprint == open_shards(corpus / "corpus", "train").fingerprint
    with pytest.raises(InputError, match=r"corpus\.vocabulary\.kind: was 'byte_bpe'"):
        prepare(config(corpus, corpus / "corpus", kind="wordpiece"), quiet=True)


def test_words_begin_at_blanks_and_between_letters_numbers_and_marks() -> None:
    text = "unthinkable (foxes) don't re-enter42 Ελληνικά, naïve;x 字漢"
    expected = [" unthinkable", " (", "foxes", ")", " don", "'t", " re", "-", "enter", "42", " Ελληνικά", ",", " naïve"]
    assert masked_words(trained(), text) == [*expected, ";", "x", " 字", "漢"]


def test_whole_words_are_masked_together(corpus: Path) -> None:
    shards = open_shards(corpus / "corpus", "train")
    masking = MaskingConfig.model_validate({"scheme": "whole_words", "mask_share": 1.0, "random_share": 0.0})
    sampler = Sampler(shards, PairsConfig(objective="none"), sequence_length=64, seed=0)
    plan = sampler.plan(np.arange(40))
    rows = sampler.gather(plan)
    masked = Masker(shards, masking, sequence_length=64, max_predictions=0).apply(rows, plan.key)
    entries = read_vocabulary(corpus / "corpus" / "vocab.txt")
    assert is_byte_vocabulary(entries)
    hidden = np.zeros(len(rows.input_ids), bool)
    hidden[masked.indices] = True
    joined = [
        n
        for n in range(1, len(hidden))
        if rows.is_content[n - 1 : n + 1].all() and is_inside_word(*(entries[k] for k in rows.input_ids[n - 1 : n + 1]))
    ]
    assert (hidden[joined] == hidden[np.array(joined) - 1]).all()
    assert hidden[joined].sum() > 20


def is_inside_word(before: str, here: str) -> bool:
    """Whether letters follow letters; the character for a blank is not ASCII."""
    return (before[-1] + here[0]).isascii() and (before[-1] + here[0]).isalpha()


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_entries_spell_the_text(text: str) -> None:
    assume(not any(token in text for token in SPECIAL_TOKENS))  # which hypothesis finds in the code
    encoding = trained().encode(text, add_special_tokens=False)
    assert "".join(entry_strings(encoding.tokens)) == (text if text[:1] == " " or not text else f" {text}")


def test_a_character_of_several_tokens_stands_in_the_last() -> None:
    assert entry_strings(["Ġa", "ð", "Ł", "ĺ", "Ģ", "!"]) == [" a", "", "", "", "😀", "!"]
    assert entry_strings(["ð", "Ł"]) == ["", "\ufffd"]


def test_a_wordpiece_vocabulary_is_not_taken_for_bytes() -> None:
    pieces = train_vocabulary({b"walking": 3, b"talking": 3, b"king": 9}, 90, lowercase=True, min_frequency=1)
    assert not is_byte_vocabulary(list(pieces.get_vocab()))
    assert is_byte_vocabulary(list(trained().get_vocab()))
    assert not is_byte_vocabulary([*trained().get_vocab(), "##ing"])


def test_a_filling_shows_text() -> None:
    entries = sorted(trained().get_vocab(), key=trained().get_vocab().__getitem__)
    text = "the dog and the dog and the dog and the dog and the, the naïve."
    tokens = tuple(trained().encode(text, add_special_tokens=False).ids)
    place = tokens.index(entries.index("Ġand"))
    words = {entries[tokens[n]] for n in maskable_words(entry_strings([entries[token] for token in tokens]))}
    assert {"Ġthe", "Ġdog", "Ġand"} <= words <= {entry for entry in entries if entry.startswith("Ġ")}
    probabilities = [0.0] * len(entries)
    probabilities[entries.index("Ġdog")] = 0.75
    shown = make_filling(MaskedSentence(tokens, place), probabilities, trained(), entries.index("[MASK]"))
    assert (shown.before, shown.truth, shown.after) == (
        "the dog ",
        "and",
        " the dog and the dog and the dog and the, the naïve.",
    )
    assert shown.guesses[0] == ("dog", 0.75)
    assert maskable_words([*[" यह", " हिन्दी"] * 5, "।"]) == [1, 3, 5, 7, 9]
