"""Loss by position: an oracle whose answer is known, a loop over transformers, and which sequences count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.cli import main
from finetune.scores.masked_model import MaskedModel, MaskedSequence, Predictions
from finetune.scores.passages import NoScoreError
from finetune.scores.positions import PositionSettings, score_positions
from finetune.scores.view import score_rows
from pretrain.corpus.vocabulary import train_vocabulary
from tests.scores.test_scores import make_masked_lm
from tests.scores.test_word_scores import Oracle

HOW = PositionSettings()
NUMBER = {"0-63": 0, "64-127": 1, "128-255": 2, "256-511": 3}


class Places:
    """A model whose loss is a known function of the position: the number of its range, and its distance from it."""

    def __init__(self, positions: int = 512) -> None:
        self.tokenizer = train_vocabulary({b"the": 9}, 100, lowercase=True, min_frequency=1)
        self.special_ids, self.max_positions = Oracle.special_ids, positions
        self.seen: list[int] = []

    def predict(self, sequences: Sequence[MaskedSequence], advance: Any) -> Predictions:
        self.seen = [len(one.ids) for one in sequences]
        places = np.concatenate([one.places for one in sequences])
        number = np.floor(np.log2(np.maximum(places, 32))) - 5
        return Predictions(-number - places / 1e6, np.zeros(len(places), bool))


def document(words: int) -> str:
    return " ".join(["the"] * words)


def test_an_oracle_gets_its_own_function_of_the_position() -> None:
    model: Any = Places()
    score = score_positions(model, [document(600 + n) for n in range(40)], HOW)
    assert (score.length, score.sequences) == (512, 40)
    assert {name: round(nats, 3) for name, nats in score.nats.items()} == NUMBER
    # The mean of a range is that of its places, special tokens left out: the masks are everywhere in it.
    begins = {"0-63": (1, 63), "64-127": (64, 127), "128-255": (128, 255), "256-511": (256, 510)}
    for name, (first, last) in begins.items():
        assert (score.nats[name] - NUMBER[name]) * 1e6 == pytest.approx((first + last) / 2, rel=0.1)
        assert 0 < score.standard_errors[name] < 1e-5


def test_only_whole_sequences_count_and_short_text_has_shorter_ones() -> None:
    """So each range is of the same texts: short documents, of which the late ranges have nothing, are left out."""
    model: Any = Places()
    assert list(score_positions(model, [document(600)] * 16 + [document(500)] * 100, HOW).nats) == list(NUMBER)
    assert model.seen == [512] * 16
    score = score_positions(model, [document(600)] * 15, HOW)
    assert (score.length, score.sequences) == (256, 30)
    assert list(score_positions(Places(514), [document(600)] * 16, HOW).nats) == list(NUMBER)  # type: ignore[arg-type]
    few = score_positions(model, [document(600)] * 100, PositionSettings(tokens=512 * 20))
    assert few.sequences == 20
    with pytest.raises(NoScoreError, match="fewer than 16 sequences of 64 tokens"):
        score_positions(model, [document(40)] * 100, HOW)


def test_the_score_is_that_of_a_loop_over_transformers(tmp_path: Path) -> None:
    """By the command, whose table has a row for each range."""
    from transformers import AutoModelForMaskedLM

    folder, text = make_masked_lm(tmp_path / "bert", positions=128), tmp_path / "text.txt"
    text.write_text("the film was good and very fine or a book was great the end " * 200)
    words = ["evaluate-pretrained", str(folder), "--texts", str(text), "--text-scores", "positions"]
    words += ["--out", str(tmp_path)]
    assert main(words) == 0
    (found,) = json.loads((tmp_path / "scores.json").read_text())["models"]
    assert found.keys() == {"model", "positions"}
    score = found["positions"]["scores"]

    ours, reference = MaskedModel(folder), AutoModelForMaskedLM.from_pretrained(folder).eval()
    losses: dict[bool, list[float]] = {False: [], True: []}

    def predict(sequences: Sequence[MaskedSequence], advance: Any) -> Predictions:
        for one in sequences:
            with torch.no_grad():
                logits = reference(input_ids=torch.from_numpy(one.ids)[None]).logits[0].double().log_softmax(-1)
            for place, label in zip(one.places, one.labels, strict=True):
                losses[bool(place >= 64)].append(-float(logits[place, label]))
        return Predictions(np.zeros(sum(len(one.places) for one in sequences)), np.zeros(0, bool))

    ours.predict = predict  # type: ignore[method-assign]
    score_positions(ours, [text.read_text().strip()], HOW)
    expected = {"0-63": np.mean(losses[False]), "64-127": np.mean(losses[True])}
    assert score["nats"] == pytest.approx(expected, abs=1e-4)
    row = dict(score_rows([found]))["positions 64-127, nats per masked token"]
    assert row == [f"{score['nats']['64-127']:.4f} ± {score['standard_errors']['64-127']:.4f}"]
