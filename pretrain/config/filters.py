"""Settings of the filters of `prepare`: near-duplicates and contamination."""

from __future__ import annotations

from pydantic import Field

from pretrain.common.sections import LocalPath, Section


class NearDuplicatesConfig(Section):
    """Finds documents of any source that are nearly equal to an earlier one, by MinHash and banding."""

    enabled: bool = Field(default=False, description="Drop documents that are similar to an earlier one.")
    threshold: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Minimum similarity to an earlier document to drop one: the Jaccard index of their sets of 3-word "
        "sequences, as MinHash estimates it. Changing 1 word in 8 gives about 0.5.",
    )


class EvaluationSetConfig(Section):
    """The passages of an evaluation set."""

    path: LocalPath = Field(
        description="File, or folder of files: .txt (a passage per line), .csv, .tsv, .jsonl, .json, .conll, .bio or "
        ".iob (words in the first column); also compressed with .gz, .bz2 or .xz."
    )
    name: str = Field(default="", description="Name on the corpus card. Empty uses the file's name.")
    columns: tuple[str, ...] = Field(
        default=(),
        description="Columns of .csv and .tsv, or keys of .jsonl and .json at any depth, with the passages. "
        "Empty uses all.",
    )


class ContaminationConfig(Section):
    """Finds documents that share a sequence of words with an evaluation set (Brown et al. 2020, GPT-3, appendix C)."""

    sets: tuple[EvaluationSetConfig, ...] = Field(default=(), description="Evaluation sets. Empty disables the filter.")


class FiltersConfig(Section):
    """Optional steps of `prepare`, all off by default, in the order in which they are applied."""

    contamination: ContaminationConfig = Field(
        default=ContaminationConfig(), description="Drop documents that contain text of evaluation sets."
    )
    near_duplicates: NearDuplicatesConfig = Field(
        default=NearDuplicatesConfig(), description="Drop documents that are nearly equal to an earlier one."
    )
