"""Bits per common word and per whole word: the same question for every vocabulary, and one answer of an oracle."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import SPECIALS
from tokenizers import Tokenizer

from finetune.cli import main
from finetune.scores import common_words, masked_model
from finetune.scores.common_words import WORD_LIST, score_common_words, token_groups
from finetune.scores.masked_model import MaskedModel, MaskedSequence, Predictions, TokenGroups
from finetune.scores.passages import NoScoreError, PassageSettings, all_words, sample_words, tokenize_words
from finetune.scores.text_scores import text_scores
from finetune.scores.view import score_notes, score_rows, score_table
from finetune.scores.whole_words import score_whole_words
from pretrain.corpus.vocabulary import train_byte_vocabulary, train_vocabulary
from tests.scores.test_scores import make_masked_lm

SHA_256 = "5edbcf74a02665cac570f587cf0ad0f3ff88d786c65172b42b6f1896f14838cb"


def test_the_list_is_fixed_for_ever() -> None:
    """Scores by another list would not compare with earlier ones."""
    assert hashlib.sha256(WORD_LIST.read_bytes()).hexdigest() == SHA_256
    words = common_words.common_words()
    assert list(words) == sorted(set(words))
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)


def test_the_same_words_in_the_same_passages_are_scored() -> None:
    """Words between blanks, whole words around them; they depend on the document and the place in it alone."""
    text = "The quick fox (who ran) saw a dog, and the other fox saw the end of it."
    found = sample_words([text], PassageSettings(20, 100), lambda word: True)
    assert " ".join(one.word for one in found) == "quick fox saw a and the other fox saw the end of"
    assert found[2].passage == "(who ran) saw a dog,"
    assert all(f" {one.passage} " in f" {text} " for one in found)
    many = [f"{text} {number} {text}" for number in range(50)]
    some = sample_words(many, PassageSettings(20, 100), ["fox", "saw", "the"].__contains__)
    assert len(some) == 100
    assert set(sample_words(many[::-1], PassageSettings(20, 100), ["fox", "saw", "the"].__contains__)) == set(some)
    assert sample_words(many, PassageSettings(20, 100, seed=1), ["fox", "saw", "the"].__contains__) != some
    assert list(all_words(many[:1])).count("fox") == 4


def test_passages_of_formulas_are_left_out() -> None:
    text = "2 + 2 = 4 is so and 3 * 3 = 9 is 9 " * 5
    with pytest.raises(NoScoreError, match="contains no word to score"):
        sample_words([text], PassageSettings(), lambda word: True)


class Oracle:
    """Stands for a `MaskedModel`: knows the words' frequencies, and where words begin."""

    max_positions, mask_id, special_ids = 10_000, 4, {"cls": 2, "sep": 3, "mask": 4}

    def __init__(self, tokenizer: Tokenizer, words: Counter[str]) -> None:
        self.tokenizer, self.words = tokenizer, words
        self.unknown_id = -1 if tokenizer.token_to_id("[UNK]") is None else tokenizer.token_to_id("[UNK]")
        spelled = zip(words, tokenize_words(self, list(words)), strict=True)  # pyright: ignore[reportArgumentType]
        self.spelled = {word: tuple(tokens.tolist()) for word, tokens in spelled}
        self.beginnings: Counter[tuple[int, tuple[int, ...]]] = Counter()
        for word, tokens in self.spelled.items():
            for end in range(len(tokens) + 1):
                self.beginnings[len(tokens), tokens[:end]] += words[word]

    def predict(self, sequences: Sequence[MaskedSequence], advance: Any, among: TokenGroups | None = None) -> Any:
        said = self._among(sequences, among) if among else self._chained(sequences)
        return Predictions(np.array(said), np.zeros(len(said), bool))

    def _among(self, sequences: Sequence[MaskedSequence], among: TokenGroups) -> list[float]:
        mass = torch.zeros(self.tokenizer.get_vocab_size())
        for word, tokens in self.spelled.items():
            if len(tokens) == 1:
                mass[tokens[0]] += self.words[word]
        scores = among.group_logits(mass.log()[None]).log_softmax(-1)[0]
        assert all((one.ids == self.mask_id).sum() == len(one.labels) == 1 for one in sequences)
        return [float(scores[one.labels[0]]) for one in sequences]

    def _chained(self, sequences: Sequence[MaskedSequence]) -> list[float]:
        """A sequence reveals one token more of the word than the one before it, until none is left."""
        said, known = [], ()
        for one in sequences:
            left, label = int((one.ids == self.mask_id).sum()), int(one.labels[0])
            count = len(known) + left
            said.append(math.log(self.beginnings[count, (*known, label)] / self.beginnings[count, known]))
            known = (*known, label) if left > 1 else ()
        return said


@cache
def made_text() -> tuple[str, ...]:
    """Documents of the list's words and of 40,000 made-up ones, as frequent as words are: by Zipf's law."""
    draw = random.Random(0)
    syllables = [a + b + c for a in "bcdfglmnprstvw" for b in "aeiou" for c in ("", "l", "n", "r", "s")]
    made = dict.fromkeys("".join(draw.choices(syllables, k=draw.choice((2, 3, 3, 4)))) for _ in range(32_000))
    listed = list(common_words.common_words())
    draw.shuffle(listed)
    words = list(dict.fromkeys([*listed, *made]))
    stream = [word for rank, word in enumerate(words) for _ in range(math.ceil(20_000 / (rank + 100)))]
    draw.shuffle(stream)
    return tuple(" ".join(stream[begin : begin + 5000]) for begin in range(0, len(stream), 5000))


@cache
def oracle(kind: str, size: int) -> Oracle:
    documents = made_text()
    counts: Counter[bytes] = Counter(
        (b" " if kind == "bytes" else b"") + word.encode() for text in documents for word in text.split()
    )
    if kind == "bytes":
        tokenizer = train_byte_vocabulary(counts, size, min_frequency=1)
    else:
        tokenizer = train_vocabulary(counts, size, lowercase=kind == "uncased", min_frequency=1)
    return Oracle(tokenizer, Counter(all_words(documents)))


KINDS = [("uncased", 2000), ("cased", 16_000), ("uncased", 32_000), ("bytes", 8000)]


@pytest.mark.parametrize(("kind", "size"), KINDS)
def test_an_oracle_has_one_score_in_every_vocabulary(kind: str, size: int) -> None:
    """What it knows of words is the same, whatever their tokens are."""
    model: Any = oracle(kind, size)
    how, words = PassageSettings(words=1000), model.words
    occurrences = sample_words(made_text(), how, lambda word: True)
    expected = -sum(math.log2(words[one.word] / words.total()) for one in occurrences)
    characters = sum(len(one.word) + 1 for one in occurrences)
    whole = score_whole_words(model, made_text(), how)
    assert whole.upper == pytest.approx(expected / characters, abs=1e-6)
    assert whole.lower < whole.upper - 0.01
    assert 0 < whole.standard_error < 0.1

    whole_tokens = [word for word, tokens in model.spelled.items() if len(tokens) == 1]
    few = sorted(set(oracle("uncased", 2000).spelled) & set(common_words.common_words()) & _whole_everywhere())
    assert len(few) > 50
    for chosen in (few, common_words.common_words()):
        if size == 2000 and chosen is not few:
            missing = next(word for word in chosen if word not in whole_tokens)
            with pytest.raises(NoScoreError, match=f"the vocabulary lacks '{missing}' as a single token"):
                score_common_words(model, made_text(), how, chosen)
            continue
        score = score_common_words(model, made_text(), how, chosen)
        occurrences = sample_words(made_text(), how, set(chosen).__contains__)
        total = sum(words[word] for word in chosen)
        expected = -sum(math.log2(words[one.word] / total) for one in occurrences) / len(occurrences)
        assert score.bits == pytest.approx(expected, abs=1e-6)


def _whole_everywhere() -> set[str]:
    every = [oracle(kind, size).spelled for kind, size in KINDS]
    return {word for word in every[0] if all(len(spelled[word]) == 1 for spelled in every)}


# ---- against a loop over transformers


def test_scores_are_those_of_a_loop_over_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForMaskedLM

    folder = make_masked_lm(tmp_path)
    text = "the film was good and very zany or a book was fine but not the plot it is " * 9
    ours, model = MaskedModel(folder), AutoModelForMaskedLM.from_pretrained(folder).eval()
    how, words = PassageSettings(40, 30), ["book", "film", "good", "the"]

    def logits(ids: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.from_numpy(ids)[None]).logits[0].double()

    def passage(one: Any) -> tuple[np.ndarray, int]:
        ids, _ = ours.encode(one.passage)
        return ids, 1 + len(ours.encode(one.passage[: one.start])[0]) - 2

    listed, bits = [ours.tokenizer.token_to_id(word) for word in words], 0.0
    occurrences = sample_words([text], how, words.__contains__)
    for one in occurrences:
        ids, place = passage(one)
        ids[place] = SPECIALS.index("[MASK]")
        bits -= float(logits(ids)[place, listed].log_softmax(-1)[words.index(one.word)]) / math.log(2)
    score = score_common_words(ours, [text], how, words)
    assert score.bits == pytest.approx(bits / len(occurrences), abs=1e-4)
    monkeypatch.setattr(masked_model, "BATCH_TOKENS", 20)
    assert score_common_words(ours, [text], how, words).bits == pytest.approx(score.bits, abs=1e-5)

    nats = characters = 0.0
    for one in sample_words([text], how, lambda word: True):
        ids, place = passage(one)
        count = len(ours.tokenizer.encode(one.word, add_special_tokens=False).ids)
        for first in range(place, place + count):
            masked = ids.copy()
            masked[first : place + count] = SPECIALS.index("[MASK]")
            nats -= float(logits(masked)[first].log_softmax(-1)[ids[first]])
        characters += len(one.word) + 1
    assert score_whole_words(ours, [text], how).lower == pytest.approx(nats / math.log(2) / characters, abs=1e-4)


def test_tokens_that_spell_a_word_are_added(tmp_path: Path) -> None:
    """In any case, with accents, with the blank before it or without; not the inner pieces of WordPiece."""
    folder = make_masked_lm(tmp_path / "bert")
    entries = (folder / "vocab.txt").read_text().splitlines()
    swaps = {"poor": "Good", "awful": "GOOD", "fine": "göod", "plot": "##good"}
    (folder / "vocab.txt").write_text("\n".join(swaps.get(entry, entry) for entry in entries) + "\n")
    groups = token_groups(MaskedModel(folder), ["good", "the"])
    spelled = [entries.index(word) for word in ("good", "fine", "poor", "awful")]
    assert sorted(groups.tokens[groups.groups == 0]) == sorted(spelled)
    assert groups.tokens[groups.groups == 1].tolist() == [entries.index("the")]
    tokenizer = train_byte_vocabulary({b" the": 9, b"the": 9, b" The": 9}, 300, min_frequency=1)
    found = token_groups(Oracle(tokenizer, Counter({"the": 1})), ["the"]).tokens  # pyright: ignore[reportArgumentType]
    assert {tokenizer.id_to_token(int(token)) for token in found} == {"the", "The", "Ġthe", "ĠThe"}


def test_what_cannot_be_scored_says_why(tmp_path: Path) -> None:
    folder = make_masked_lm(tmp_path / "bert")
    found = dict(text_scores(MaskedModel(folder), ["the film was good and very zany " * 40]))
    missing = next(
        word for word in common_words.common_words() if word not in (folder / "vocab.txt").read_text().split()
    )
    reason = f"the vocabulary lacks {missing!r} as a single token"
    assert found["common_words"]["scores"] == {"why_not": reason}
    assert "positions" in found["whole_words"]["scores"]["why_not"]
    model = {"model": {"name": "small"}, **found}
    assert f"common words, small: no score, {reason}" in score_notes([model])
    assert {title.partition(",")[0] for title, _ in score_rows([model])} == {"held-out text"}
    assert reason in str(score_table([model]).caption)


def test_the_command_writes_both_scores(tmp_path: Path, monkeypatch: Any) -> None:
    """In JSON, the table and the page; other words need no other name, and replace the scores."""
    folder, text = make_masked_lm(tmp_path / "bert", positions=256), tmp_path / "text.txt"
    text.write_text("the film was good and very fine or a book was great " * 40)
    monkeypatch.setattr(common_words, "common_words", lambda: ("book", "film", "good"))
    words = ["evaluate-pretrained", str(folder), "--texts", str(text), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    (found,) = json.loads((tmp_path / "out/scores.json").read_text())["models"]
    common, whole = found["common_words"]["scores"], found["whole_words"]["scores"]
    assert (common["words"], whole["words"] > common["words"]) == (120, True)
    assert 0 < whole["lower"] <= whole["upper"]
    rows = dict(score_rows([found]))
    assert rows["common words, bits (English only)"] == [f"{common['bits']:.4f} ± {common['standard_error']:.4f}"]
    assert rows["whole words, bits per character (bounds)"] == [f"{whole['lower']:.4f} to {whole['upper']:.4f}"]
    assert "held-out text, bits per character (within one vocabulary)" in rows
    assert "common words, bits" in (tmp_path / "out" / "scores.html").read_text()
    monkeypatch.setattr(common_words, "common_words", lambda: ("film",))
    assert main(words) == 0
    (found,) = json.loads((tmp_path / "out/scores.json").read_text())["models"]
    assert found["common_words"]["scores"]["bits"] == 0
