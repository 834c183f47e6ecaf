"""What a trained model is worth: the three parts of `evaluate-pretrained`, on the yardstick's own held-out text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.scores import blimp, common_words, finetuning, whole_words
from finetune.scores.blimp import blimp_score
from finetune.scores.finetuning import FinetuningScore, finetuning_scores
from finetune.scores.finetuning_runs import FinetuningSettings
from finetune.scores.held_out import HeldOutSettings, held_out_score
from finetune.scores.masked_model import fingerprint
from finetune.scores.record import Record
from finetune.scores.text_scores import WHY_NOT, WORD_PARTS, text_scores
from pretrain.common.errors import RunError, StoppedError
from pretrain.common.files import locked
from pretrain.common.wording import counted
from pretrain.config import PretrainConfig


@dataclass(frozen=True)
class ScoreSettings:
    """What is measured besides the held-out loss.

    Attributes:
        blimp: folder of BLiMP's files; None leaves it out.
        blimp_limit: pairs of each paradigm; 0 takes all.
        finetuning: None without fine-tunings.
    """

    blimp: Path | None = None
    blimp_limit: int = 0
    finetuning: FinetuningSettings | None = None


@dataclass(frozen=True)
class Scores:
    """Scores of one run, None where they were not asked for or the model cannot have them.

    Attributes:
        nats: per masked token of the held-out text, 15 % masked 80/10/10.
        accuracy: of these tokens.
        bits_per_character: of the held-out text; compares runs of one vocabulary only.
        common_word_bits: of common words in the held-out text; compares vocabularies.
        common_word_error: standard error of it, over the words.
        whole_word_bits: (lower, upper) bound of the bits per character of whole words in the held-out text.
        unscored: why there is no score of words.
        blimp: mean accuracy of the paradigms.
        transfer: mean score of the fine-tunings.
        finetuning: config's name -> mean score.
        random: the same from random weights, where they were asked for.
        blimp_limit: pairs of each paradigm that `blimp` is of; 0 for all.
        seeds: config's name -> runs that its mean is of.
    """

    nats: float | None = None
    accuracy: float | None = None
    bits_per_character: float | None = None
    blimp: float | None = None
    transfer: float | None = None
    finetuning: dict[str, float] = field(default_factory=dict)
    random: dict[str, float] = field(default_factory=dict)
    blimp_limit: int = 0
    seeds: dict[str, int] = field(default_factory=dict)
    common_word_bits: float | None = None
    common_word_error: float | None = None
    whole_word_bits: tuple[float, float] | None = None
    unscored: str = ""

    @property
    def headline(self) -> str:
        """The one number: that which compares vocabularies, or else that within one."""
        if self.common_word_bits is not None:
            return f"{self.common_word_bits:.4f} ± {self.common_word_error:.4f} bits of common words"
        if self.bits_per_character is not None:
            return f"{self.bits_per_character:.4f} bits per character, which compare runs of one vocabulary only"
        return "no score of held-out text"

    @property
    def remarks(self) -> list[str]:
        """What the scores are of, where that is a choice of the command: rows differ in it."""
        of = ", ".join(f"{name} ({counted(count, 'seed')})" for name, count in self.seeds.items())
        return [
            *([self.unscored] if self.unscored else []),
            *([f"BLiMP: first {counted(self.blimp_limit, 'pair')} of each paradigm"] if self.blimp_limit else []),
            *([f"transfer: {of}"] if self.transfer is not None and of else []),
        ]


def measure(
    config: PretrainConfig, out: Path, texts: Sequence[Path], wanted: ScoreSettings
) -> tuple[Scores, RunError | None]:
    """The scores of a finished run, with those that an earlier call measured, and why fine-tunings failed, if they did.

    What was measured before is read from `out`/scores. ELECTRA's discriminator predicts no tokens, so it has only
    fine-tunings. Raises as the parts of `evaluate-pretrained`, except for fine-tunings that failed.
    """
    run, name = config.folder, config.folder.name
    record = Record(out / "scores" / f"{name}.json", {"name": name, "fingerprint": fingerprint(run)})
    found: dict[str, Any] = {}
    if not config.electra.is_on:
        length = min(HeldOutSettings().length, config.model.max_positions)
        held_out = held_out_score(run, texts, how=HeldOutSettings(length), record=record)
        found = {
            "nats": held_out.nats_per_token,
            "accuracy": held_out.accuracy,
            "bits_per_character": held_out.bits_per_character,
            **_words(text_scores(run, texts, parts=WORD_PARTS, record=record)),
        }
        if wanted.blimp is not None:
            blimp_score(run, wanted.blimp, limit=wanted.blimp_limit, record=record)
        found |= _blimp(record)
    failure = None
    if wanted.finetuning is not None:
        try:
            # One trial at a time: they share the runs from random weights.
            with locked(out / "finetuned" / ".turn.lock"):
                finetuning_scores(run, out / "finetuned", name[:48], wanted.finetuning, record=record)
        except StoppedError:
            raise
        except RunError as error:
            failure = error
    return Scores(**found, **_transfer(record, wanted.finetuning)), failure


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


def _blimp(record: Record) -> dict[str, Any]:
    """The mean of all paradigms and its limit; {} if some are missing."""
    part = record.content.get(blimp.PART, {})
    scores = part.get("scores", {})
    if not scores or blimp.missing_paradigms(scores):
        return {}
    return {"blimp": scores["overall"], "blimp_limit": part["how"].get("limit", 0)}


def _transfer(record: Record, wanted: FinetuningSettings | None) -> dict[str, Any]:
    """The means of the fine-tunings that were asked for now, or else earlier, and the mean of all of them."""
    scores = record.read(finetuning.PART, {})
    names = list(scores) if wanted is None else [path.stem for path in wanted.configs]
    tuned = {name: FinetuningScore.from_data(scores[name]) for name in names if name in scores}
    means = _means(tuned, "pretrained")
    whole = bool(means) and len(means) == len(names)
    seeds = {name: len(tuned[name].pretrained) for name in means}
    return {
        "finetuning": means,
        "random": _means(tuned, "random"),
        "seeds": seeds,
        "transfer": statistics.fmean(means.values()) if whole else None,
    }


def _means(tuned: Mapping[str, FinetuningScore], start: str) -> dict[str, float]:
    return {name: statistics.fmean(values) for name, one in tuned.items() if (values := getattr(one, start))}
