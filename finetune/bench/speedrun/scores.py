"""What a trained model is worth: the three parts of `evaluate-pretrained`, on the yardstick's own held-out text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.scores.blimp import blimp_score
from finetune.scores.finetuning import FinetuningSettings, finetuning_scores
from finetune.scores.held_out import HeldOutSettings, held_out_score
from finetune.scores.masked_model import fingerprint
from finetune.scores.record import Record
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
        bits_per_character: of the held-out text; compares vocabularies.
        blimp: mean accuracy of the paradigms.
        transfer: mean score of the fine-tunings.
        finetuning: config's name -> mean score.
    """

    nats: float | None = None
    accuracy: float | None = None
    bits_per_character: float | None = None
    blimp: float | None = None
    transfer: float | None = None
    finetuning: dict[str, float] = field(default_factory=dict)


def measure(config: PretrainConfig, out: Path, texts: Sequence[Path], wanted: ScoreSettings) -> Scores:
    """The scores of a finished run; what was measured before is read from `out`/scores.

    ELECTRA's discriminator predicts no tokens, so it has only fine-tunings. Raises as the parts of
    `evaluate-pretrained`.
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
        }
        if wanted.blimp is not None:
            found["blimp"] = blimp_score(run, wanted.blimp, limit=wanted.blimp_limit, record=record).overall
    if wanted.finetuning is not None:
        tuned = finetuning_scores(run, out / "finetuned", name[:48], wanted.finetuning, record=record)
        means = {key: statistics.fmean(one.pretrained) for key, one in tuned.items() if one.pretrained}
        found |= {"finetuning": means, "transfer": statistics.fmean(means.values()) if means else None}
    return Scores(**found)
