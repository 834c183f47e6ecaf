"""Settings of the filters of `prepare`: quality rules, near-duplicates, contamination, language, mojibake."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from pretrain.common.kinds import not_one_of
from pretrain.common.settings import LocalPath, Section

RULE_SETS: dict[str, tuple[str, ...]] = {
    "gopher_quality": (
        "min_words",
        "max_words",
        "min_mean_word_length",
        "max_mean_word_length",
        "max_symbols_per_word",
        "max_bullet_lines",
        "max_ellipsis_lines",
        "min_alphabetic_words",
        "min_stop_words",
    ),
    "gopher_repetition": (
        "max_repeated_lines",
        "max_repeated_line_characters",
        "max_top_2_gram",
        "max_top_3_gram",
        "max_top_4_gram",
        "max_repeated_5_grams",
        "max_repeated_6_grams",
        "max_repeated_7_grams",
        "max_repeated_8_grams",
        "max_repeated_9_grams",
        "max_repeated_10_grams",
    ),
    "fineweb": ("min_punctuated_lines", "max_short_lines", "max_lines_per_word"),
    "c4": ("max_curly_brackets", "max_lorem_ipsum"),
    "characters": ("max_odd_characters",),
}
"""Sets of quality rules. A rule has the name of the field of `QualityConfig` that holds its threshold."""
RULES = tuple(rule for rules in RULE_SETS.values() for rule in rules)


def _share(default: float, description: str) -> float:
    return Field(default=default, ge=0, le=1, description=description)


class QualityConfig(Section):
    """Rules that drop whole documents. A document is counted under the first rule of the list below that it breaks.

    Words are separated by blanks, lines are paragraphs; both without the empty ones.
    """

    enabled: bool = Field(default=False, description="Drop the documents that break one of the rules.")
    rules: tuple[str, ...] = Field(
        default=("gopher_quality", "gopher_repetition", "fineweb", "characters"),
        description="Rules to apply, by the names of the fields below, or of their sets: gopher_quality (Rae et al. "
        "2021, appendix A1.1), gopher_repetition (the same, table A1), fineweb (Penedo et al. 2024, section 3.6), c4 "
        "(Raffel et al. 2020, section 2.2), characters.",
    )
    skip: tuple[str, ...] = Field(
        default=(), description="Rules, or sets of them, to leave out of rules: max_words keeps whole books."
    )
    min_words: int = Field(default=50, ge=0, description="gopher_quality: words that a document needs.")
    max_words: int = Field(default=100_000, ge=1, description="gopher_quality: most words of a document.")
    min_mean_word_length: float = Field(
        default=3.0, ge=0, description="gopher_quality: characters of a document's words, on average, at least."
    )
    max_mean_word_length: float = Field(
        default=10.0, gt=0, description="gopher_quality: characters of a document's words, on average, at most."
    )
    max_symbols_per_word: float = Field(
        default=0.1, ge=0, description="gopher_quality: number signs or ellipses, whichever are more, per word."
    )
    max_bullet_lines: float = _share(0.9, "gopher_quality: share of lines that begin with a bullet.")
    max_ellipsis_lines: float = _share(0.3, "gopher_quality: share of lines that end with an ellipsis.")
    min_alphabetic_words: float = _share(0.8, "gopher_quality: share of words with a letter.")
    min_stop_words: int = Field(
        default=2, ge=0, description="gopher_quality: how many of stop_words a document has, each counted once."
    )
    stop_words: tuple[str, ...] = Field(
        default=("the", "be", "to", "of", "and", "that", "have", "with"),
        description="Frequent words of the language; the default is English.",
    )
    max_repeated_lines: float = _share(0.3, "gopher_repetition: share of lines that were there before.")
    max_repeated_line_characters: float = _share(
        0.2, "gopher_repetition: share of characters in lines that were there before. FineWeb has 0.1."
    )
    max_top_2_gram: float = _share(0.2, "gopher_repetition: share of characters in the most frequent pair of words.")
    max_top_3_gram: float = _share(0.18, "gopher_repetition: the same for 3 words.")
    max_top_4_gram: float = _share(0.16, "gopher_repetition: the same for 4 words.")
    max_repeated_5_grams: float = _share(
        0.15, "gopher_repetition: share of characters in sequences of 5 words that were there before."
    )
    max_repeated_6_grams: float = _share(0.14, "gopher_repetition: the same for 6 words.")
    max_repeated_7_grams: float = _share(0.13, "gopher_repetition: the same for 7 words.")
    max_repeated_8_grams: float = _share(0.12, "gopher_repetition: the same for 8 words.")
    max_repeated_9_grams: float = _share(0.11, "gopher_repetition: the same for 9 words.")
    max_repeated_10_grams: float = _share(0.1, "gopher_repetition: the same for 10 words.")
    min_punctuated_lines: float = _share(0.12, "fineweb: share of lines that end with punctuation.")
    max_short_lines: float = _share(0.67, "fineweb: share of lines with at most 30 characters.")
    max_lines_per_word: float = Field(default=0.3, ge=0, description="fineweb: lines per word.")
    max_curly_brackets: int = Field(default=0, ge=0, description="c4: curly brackets, a sign of program code.")
    max_lorem_ipsum: int = Field(default=0, ge=0, description="c4: occurrences of the filler text 'lorem ipsum'.")
    max_odd_characters: float = _share(
        0.1, "characters: share of control, unassigned, private and replacement characters, and of pictographs."
    )

    @field_validator("rules", "skip")
    @classmethod
    def _check_rules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in RULE_SETS and name not in RULES:
                raise ValueError(not_one_of(name, (*RULE_SETS, *RULES)))
        return names

    @property
    def chosen_rules(self) -> tuple[str, ...]:
        """The names of the rules that apply, in the order of `RULES`."""
        chosen, skipped = _rules_of(self.rules), _rules_of(self.skip)
        return tuple(rule for rule in RULES if rule in chosen and rule not in skipped)

    @model_validator(mode="after")
    def _check_together(self) -> QualityConfig:
        if self.enabled and not self.chosen_rules:
            raise ValueError("rules: none is left to apply. Name some, or set enabled: false")
        for low, high in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} ({getattr(self, low)}) is above {high} ({getattr(self, high)})")
        return self


def _rules_of(names: tuple[str, ...]) -> set[str]:
    return {rule for name in names for rule in RULE_SETS.get(name, (name,))}


class NearDuplicatesConfig(Section):
    """Documents that are nearly equal to an earlier one, of any source, found by MinHash and banding.

    A pair of documents with similarity s shares a band with probability 1 - (1 - s^rows)^bands.
    """

    enabled: bool = Field(default=False, description="Drop documents that are similar to an earlier one.")
    threshold: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Similarity from which a document is dropped: the common share of all different sequences of words "
        "in both (Jaccard), as MinHash estimates it. With sequences of 3, changing an eighth of the words gives 0.5.",
    )
    ngram: int = Field(default=3, ge=1, le=20, description="Words in a sequence; case and punctuation do not count.")
    bands: int = Field(default=32, ge=1, le=512, description="Bands: more find more pairs.")
    rows: int = Field(default=4, ge=1, le=64, description="Minima in a band: more find fewer pairs.")

    @model_validator(mode="after")
    def _check_size(self) -> NearDuplicatesConfig:
        if self.bands * self.rows > 1024:
            raise ValueError(f"bands ({self.bands}) times rows ({self.rows}) is above 1024. Choose fewer")
        return self


class LanguageConfig(Section):
    """Language identification with lingua, which works offline and is installed separately."""

    keep: tuple[str, ...] = Field(
        default=(),
        description="ISO 639-1 codes of the languages whose documents stay, such as en. Without any, it is off.",
    )
    sample_characters: int = Field(
        default=500,
        ge=20,
        description="Characters of a document that identify its language, from five evenly spaced places.",
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
    drop: bool = Field(default=True, description="Drop the documents. false only counts them.")
    ngram: int = Field(default=13, ge=2, le=100, description="Words in a sequence; case and punctuation do not count.")
    shortest: int = Field(
        default=8, ge=2, description="Words of the shortest text that is looked for, if it has fewer than ngram."
    )

    @model_validator(mode="after")
    def _check_together(self) -> ContaminationConfig:
        if self.shortest > self.ngram:
            raise ValueError(f"shortest ({self.shortest}) is above ngram ({self.ngram}). Lower it")
        return self


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
