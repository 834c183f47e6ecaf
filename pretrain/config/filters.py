"""Settings of the filters of `prepare`: quality rules, near-duplicates, contamination, language, mojibake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from pretrain.common.kinds import not_one_of
from pretrain.common.sections import LocalPath, Section

RULE_SETS: dict[str, dict[str, float]] = {
    "gopher_quality": {
        "min_words": 50,
        "max_words": 100_000,
        "min_mean_word_length": 3,  # characters
        "max_mean_word_length": 10,
        "max_symbols_per_word": 0.1,  # number signs or ellipses, whichever are more
        "max_bullet_lines": 0.9,  # share of lines that begin with a bullet
        "max_ellipsis_lines": 0.3,  # share of lines that end with an ellipsis
        "min_alphabetic_words": 0.8,  # share of words with a letter
        "min_stop_words": 2,  # of `stop_words`, each counted once
    },
    # Shares of lines, or of characters, that were there before, and of those in the most frequent n words.
    "gopher_repetition": {
        "max_repeated_lines": 0.3,
        "max_repeated_line_characters": 0.2,  # FineWeb has 0.1
        **{f"max_top_{n}_gram": share for n, share in ((2, 0.2), (3, 0.18), (4, 0.16))},
        **{f"max_repeated_{n}_grams": (20 - n) / 100 for n in range(5, 11)},
    },
    "fineweb": {
        "min_punctuated_lines": 0.12,  # share of lines that end with punctuation
        "max_short_lines": 0.67,  # share of lines with at most 30 characters
        "max_lines_per_word": 0.3,
    },
    "c4": {"max_curly_brackets": 0, "max_lorem_ipsum": 0},
    # Share of control, unassigned, private and replacement characters, and of pictographs.
    "characters": {"max_odd_characters": 0.1},
}
"""Set of quality rules -> rule -> its published threshold, in the order in which they are applied."""
_PUBLISHED = {rule: threshold for rules in RULE_SETS.values() for rule, threshold in rules.items()}


class QualityConfig(Section):
    """Rules that drop whole documents. A document is counted under the first rule of `RULE_SETS` that it breaks.

    Words are separated by spaces, lines are paragraphs; both without the empty ones.
    """

    enabled: bool = Field(default=False, description="Drop the documents that break one of the rules.")
    rules: tuple[str, ...] = Field(
        default=("gopher_quality", "gopher_repetition", "fineweb", "characters"),
        description="Rules to apply, by name or by set: gopher_quality (Rae et al. "
        "2021, appendix A1.1), gopher_repetition (the same, table A1), fineweb (Penedo et al. 2024, section 3.6), c4 "
        "(Raffel et al. 2020, section 2.2), characters.",
    )
    thresholds: Mapping[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="Rule -> threshold in place of the published one, such as {max_words: 1000000000}, which keeps "
        "whole books. A rule that begins with min_ needs at least that, one with max_ at most. Published: "
        + ", ".join(f"{rule} {threshold:g}" for rule, threshold in _PUBLISHED.items())
        + ".",
    )
    stop_words: tuple[str, ...] = Field(
        default=("the", "be", "to", "of", "and", "that", "have", "with"),
        description="Frequent words of the language, for min_stop_words; the default is English.",
    )

    @field_validator("thresholds")
    @classmethod
    def _check_thresholds(cls, given: Mapping[str, float]) -> Mapping[str, float]:
        for rule, threshold in given.items():
            if rule not in _PUBLISHED:
                raise ValueError(not_one_of(rule, tuple(_PUBLISHED)))
            if 0 < _PUBLISHED[rule] < 1 < threshold:
                raise ValueError(f"{rule}: {threshold:g} is above 1, and is a share")
        return given

    @field_validator("rules")
    @classmethod
    def _check_rules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in RULE_SETS and name not in _PUBLISHED:
                raise ValueError(not_one_of(name, (*RULE_SETS, *_PUBLISHED)))
        return names

    @property
    def chosen_rules(self) -> tuple[str, ...]:
        """The names of the rules that apply, in the order of `RULE_SETS`."""
        chosen = {rule for name in self.rules for rule in RULE_SETS.get(name, (name,))}
        return tuple(rule for rule in _PUBLISHED if rule in chosen)

    def threshold(self, rule: str) -> float:
        """What a document's figure is compared with."""
        return self.thresholds.get(rule, _PUBLISHED[rule])

    @model_validator(mode="after")
    def _check_together(self) -> QualityConfig:
        if self.enabled and not self.chosen_rules:
            raise ValueError("rules: none is left to apply. Name some, or set enabled: false")
        for low, high in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
            if self.threshold(low) > self.threshold(high):
                raise ValueError(f"{low} ({self.threshold(low):g}) is above {high} ({self.threshold(high):g})")
        return self


class NearDuplicatesConfig(Section):
    """Documents that are nearly equal to an earlier one, of any source, found by MinHash and banding."""

    enabled: bool = Field(default=False, description="Drop documents that are similar to an earlier one.")
    threshold: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Similarity from which a document is dropped: the common share of all different sequences of words "
        "in both (Jaccard), as MinHash estimates it. Sequences have 3 words: a change of an eighth gives 0.5.",
    )


class LanguageConfig(Section):
    """Language identification with lingua, which works offline and is installed separately."""

    keep: tuple[str, ...] = Field(
        default=(),
        description="ISO 639-1 codes of the languages whose documents stay, such as en. Without any, it is off.",
    )


class EvaluationSetConfig(Section):
    """Texts that a later evaluation uses."""

    path: LocalPath = Field(
        description="File, or folder of files: .txt (a text per line), .csv, .tsv, .jsonl, .json, .conll, .bio or .iob "
        "(words in the first column); also compressed with .gz, .bz2 or .xz."
    )
    name: str = Field(default="", description="Name on the corpus card. Empty uses the file's name.")
    columns: tuple[str, ...] = Field(
        default=(),
        description="Columns of .csv and .tsv, or keys of .jsonl and .json at any depth, that hold the texts. "
        "Empty takes all.",
    )


class ContaminationConfig(Section):
    """Documents that share a sequence of words with an evaluation set (Brown et al. 2020, GPT-3, appendix C)."""

    sets: tuple[EvaluationSetConfig, ...] = Field(default=(), description="Evaluation sets. Without any, it is off.")


class FiltersConfig(Section):
    """Optional steps of `prepare`, all off by default, in the order in which they are applied."""

    repair_mojibake: bool = Field(
        default=False, description="Repair text that was decoded with another encoding than its own: cafÃ© for café."
    )
    language: LanguageConfig = Field(
        default=LanguageConfig(), description="Drop documents of other languages than those to keep."
    )
    quality: QualityConfig = Field(default=QualityConfig(), description="Rules that drop documents.")
    contamination: ContaminationConfig = Field(
        default=ContaminationConfig(), description="Drop documents that contain text of evaluation sets."
    )
    near_duplicates: NearDuplicatesConfig = Field(
        default=NearDuplicatesConfig(), description="Drop documents that are nearly equal to an earlier one."
    )
