"""Scores of trained models on held-out text: speedrun.json and the log rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from finetune.scores import common_words, held_out, whole_words
from finetune.scores.held_out import read_documents
from finetune.scores.masked_model import MaskedModel
from finetune.scores.text_scores import MISSING_REASON, text_scores
from pretrain.common.errors import InputError
from pretrain.common.files import write_json
from pretrain.common.wording import counted
from pretrain.config import PretrainConfig

RESULTS = "speedrun.json"
_NONE = "-"


@dataclass(frozen=True)
class Scores:
    """Scores of one run; None if a score does not apply to the model."""

    nats: float | None = None  # nats per masked token of the held-out text, 15 % masked 80/10/10
    accuracy: float | None = None  # accuracy on these tokens
    bits_per_character: float | None = None  # comparable only within a vocabulary
    common_word_bits: float | None = None  # bits per common word; comparable across vocabularies
    common_word_error: float | None = None  # standard error of `common_word_bits` over the words
    whole_word_bits: tuple[float, float] | None = None  # bounds of the bits per character of whole words
    unscored: str = ""  # reason why there are no word scores

    @property
    def headline(self) -> str:
        """The main score: comparable across vocabularies if there is one, otherwise within a vocabulary."""
        if self.common_word_bits is not None:
            return f"{self._common} bits per common word"
        if self.bits_per_character is not None:
            return f"{self.bits_per_character:.4f} bits per character, which compare runs of one vocabulary only"
        return "no score of held-out text"

    @property
    def _common(self) -> str:
        return f"{self.common_word_bits:.4f} ± {self.common_word_error:.4f}"

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key of runs with the same budget: bits per common word, then bits per character."""
        across, within = self.common_word_bits, self.bits_per_character
        return float("inf") if across is None else across, float("inf") if within is None else within

    def cells(self) -> dict[str, str]:
        """Return {column of the log: text}."""
        return {
            "bits/character, one vocabulary": _number(self.bits_per_character),
            "nats/token": _number(self.nats),
            "accuracy": _number(self.accuracy),
            "common words, bits": _NONE if self.common_word_bits is None else self._common,
            "whole words, bits/character": " to ".join(f"{one:.3f}" for one in self.whole_word_bits or ()) or _NONE,
        }


def measure(config: PretrainConfig, texts: Sequence[Path]) -> Scores:
    """Return the scores of a finished run.

    ELECTRA's discriminator predicts no tokens, so it has no scores. Raises the errors of `evaluate-pretrained`.
    """
    if config.electra.is_on:
        return Scores()
    parts = text_scores(MaskedModel(config.folder), read_documents(texts))
    found = {part: one["scores"] for part, one in parts}
    loss = found.pop(held_out.NAME)
    return Scores(
        nats=loss["nats_per_token"],
        accuracy=loss["accuracy"],
        bits_per_character=loss["bits_per_character"],
        **_words(found),
    )


def _words(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Convert the fields of `text_scores` to those of `Scores`."""
    common, whole = found[common_words.NAME], found[whole_words.NAME]
    why_not = [f"{part.replace('_', ' ')}: {x[MISSING_REASON]}" for part, x in found.items() if MISSING_REASON in x]
    return {
        "common_word_bits": common.get("bits"),
        "common_word_error": common.get("standard_error"),
        "whole_word_bits": None if MISSING_REASON in whole else (whole["lower"], whole["upper"]),
        "unscored": "; ".join(why_not),
    }


class Trial(BaseModel):
    """The run of one config with one budget."""

    model_config = ConfigDict(frozen=True)

    run: str  # name of its run folder
    budget: float
    flops: float  # executed FLOPs, computed from the number of trained tokens
    steps: int
    epochs: float = 0.0
    minutes: float = 0.0  # time of training over all starts, without evaluations and checkpoints
    ground: str  # SHA-256 of the text
    scores: Scores = Scores()
    config: dict[str, Any] = {}  # the run's full config
    machine: dict[str, Any] = {}  # environment.json of the run
    remarks: str = ""  # content of the column of remarks

    def row(self) -> dict[str, str]:
        """Return the log row, {column: text}. Columns that `evaluate-pretrained` measures are empty."""
        machine = f"{counted(self.machine.get('cpu_cores', 0), 'core')} of {self.machine.get('cpu')}"
        commit = re.sub(r"([0-9a-f]{7})[0-9a-f]{33}", r"\1", self.machine.get("git_commit") or "unknown")
        return {
            "date": str(self.machine.get("started", ""))[:10],
            "trial": re.sub(r"-[^-]+-(s\d+)$", r" \1", self.run),
            "budget": budget_text(self.budget),
            "FLOP": f"{self.flops:.4g}",
            "steps": f"{self.steps:,}",
            "epochs": f"{self.epochs:.2f}",
            "minutes": f"{self.minutes:.1f}",
            **self.scores.cells(),
            "BLiMP": _NONE,
            "transfer": _NONE,
            "machine": ", ".join(filter(None, self.machine.get("gpus", []))) or machine,
            "commit": commit,
            "remarks": self.remarks,
        }


_TRIALS = TypeAdapter(list[Trial])


def read(path: Path, ground: str) -> list[Trial]:
    """Return the trials in the file `path`; none if it does not exist.

    Raises `InputError` if it is damaged, or has trials on text with another SHA-256 than `ground`.
    """
    if not path.is_file():
        return []
    try:
        trials = _TRIALS.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{path}: damaged ({first['msg']}). Remove it; finished runs are measured again.") from None
    if any(one.ground != ground for one in trials):
        raise InputError(f"{path}: has trials on another text, which do not compare. Give another --out, or remove it.")
    return trials


def with_trial(trials: Sequence[Trial], trial: Trial) -> list[Trial]:
    """Add a trial, which replaces an earlier one of the same run; return the trials sorted by budget and score."""
    kept = [one for one in trials if one.run != trial.run]
    return sorted([*kept, trial], key=lambda one: (one.budget, one.scores.rank, one.run))


def write(trials: Sequence[Trial], path: Path) -> None:
    """Write speedrun.json atomically."""
    write_json(path, [one.model_dump(mode="json") for one in trials])


def table(trials: Sequence[Trial]) -> str:
    """Return the trials as the Markdown table at the end of docs/benchmarks/speedrun.md."""
    rows = [one.row() for one in trials]
    lines = [list(rows[0]), *([cell.replace("|", "\\|") for cell in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def budget_text(budget: float) -> str:
    """Format a budget: 500000000000000.0 as 5e14."""
    mantissa, exponent = f"{budget:.6e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4f}"
