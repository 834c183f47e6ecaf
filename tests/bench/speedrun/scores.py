"""What a trained model is worth: scores of `evaluate-pretrained` on the yardstick's own held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.scores import common_words, held_out, whole_words
from finetune.scores.held_out import read_documents
from finetune.scores.masked_model import MaskedModel
from finetune.scores.text_scores import WHY_NOT, text_scores
from pretrain.config import PretrainConfig


@dataclass(frozen=True)
class Scores:
    """Scores of one run, None where the model cannot have them."""

    nats: float | None = None  # per masked token of the held-out text, 15 % masked 80/10/10
    accuracy: float | None = None  # of these tokens
    bits_per_character: float | None = None  # of the held-out text; compares runs of one vocabulary only
    common_word_bits: float | None = None  # of common words in the held-out text; compares vocabularies
    common_word_error: float | None = None  # standard error of it, over the words
    whole_word_bits: tuple[float, float] | None = None  # bounds of the bits per character of whole words
    unscored: str = ""  # why there is no score of words

    @property
    def headline(self) -> str:
        """The one number: that which compares vocabularies, or else that within one."""
        if self.common_word_bits is not None:
            return f"{self.common_word_bits:.4f} ± {self.common_word_error:.4f} bits of common words"
        if self.bits_per_character is not None:
            return f"{self.bits_per_character:.4f} bits per character, which compare runs of one vocabulary only"
        return "no score of held-out text"


def measure(config: PretrainConfig, texts: Sequence[Path]) -> Scores:
    """The scores of a finished run.

    ELECTRA's discriminator predicts no tokens, so it has none. Raises as the parts of `evaluate-pretrained`.
    """
    if config.electra.is_on:
        return Scores()
    parts = text_scores(MaskedModel(config.folder), read_documents(texts))
    found = {part: one["scores"] for part, one in parts}
    loss = found.pop(held_out.PART)
    return Scores(
        nats=loss["nats_per_token"],
        accuracy=loss["accuracy"],
        bits_per_character=loss["bits_per_character"],
        **_words(found),
    )


def _words(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of `Scores` from those of `text_scores`."""
    common, whole = found[common_words.PART], found[whole_words.PART]
    why_not = [f"{part.replace('_', ' ')}: {one[WHY_NOT]}" for part, one in found.items() if WHY_NOT in one]
    return {
        "common_word_bits": common.get("bits"),
        "common_word_error": common.get("standard_error"),
        "whole_word_bits": None if WHY_NOT in whole else (whole["lower"], whole["upper"]),
        "unscored": "; ".join(why_not),
    }
