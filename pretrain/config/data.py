"""Settings of the data: sources, vocabulary, corpus, sentence pairs and masking."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, field_validator, model_validator

from pretrain.common.addresses import is_remote, local_path
from pretrain.common.kinds import check_kind
from pretrain.common.sections import LocalPath, Location, Section
from pretrain.config.filters import FiltersConfig
from pretrain.config.model import MAX_ROWS

# Packages whose modules are the built-in values of `SourceConfig.kind` and of `MaskingConfig.scheme`.
SOURCES = "pretrain.corpus.sources"
MASKING_SCHEMES = "pretrain.batches.masking"


class SourceConfig(Section):
    """One source of text. `kind` determines whether `path` or `dataset` is required."""

    kind: str = Field(
        description="Text format: mediawiki, wikiextractor, books, files, sentences, lines, jsonl, parquet, csv, "
        "huggingface or docstrings, or a custom module such as my_package.markdown."
    )
    name: str = Field(default="", description="Name on the corpus card. Empty uses the kind and the file name.")
    path: Location = Field(
        default="",
        description="File, folder or glob, relative to the working directory, or the address of files in an object "
        "store, such as s3://bucket/wiki/*.jsonl.gz, which are fetched. Required for every kind except huggingface "
        "and docstrings.",
    )
    dataset: LocalPath = Field(
        default="",
        description="Required for huggingface, unused otherwise: name of a Hub dataset or a folder of save_to_disk.",
    )
    subset: str = Field(
        default="", description="Only for huggingface: name of the dataset's configuration, such as 20231101.en."
    )
    split: str = Field(default="train", description="Only for huggingface: split to read.")
    revision: str = Field(default="", description="Only for huggingface: commit, required for a Hub dataset.")
    text_column: str = Field(
        default="text", description="Only for jsonl, parquet, csv and huggingface: column with the text."
    )
    quoting: Literal["auto", "standard", "none"] = Field(
        default="auto",
        description="Only for csv: standard (RFC 4180), none (quotes are ordinary characters), or auto (standard for "
        ".csv; none for .tsv, but a cell that starts with a quote is an error).",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="How often each epoch reads this source: 0.5 reads half of it, 2 reads all of it twice.",
    )
    held_out: bool = Field(
        default=False,
        description="Hold out all documents of this source for validation. The vocabulary is trained without them. "
        "Usually set corpus.validation_fraction to 0 as well.",
    )
    license: str = Field(default="unknown", description="License of the text, shown on the corpus card.")

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        check_kind(SOURCES, kind)
        return kind

    @model_validator(mode="after")
    def _check_location(self) -> SourceConfig:
        required = {"huggingface": "dataset", "docstrings": ""}.get(self.kind, "path")
        if required and not getattr(self, required):
            raise ValueError(f"kind: {self.kind} needs {required}")
        return self


class VocabularyConfig(Section):
    """The vocabulary: trained on the corpus, or read from `path`."""

    kind: Literal["wordpiece", "byte_bpe", "released"] = Field(
        default="wordpiece",
        description="wordpiece is BERT's. byte_bpe is the byte-level BPE of GPT-2, RoBERTa and ModernBERT: it "
        "can encode any text and normalizes nothing. released is any other tokenizer.json, such as XLM-R's, "
        "DeBERTa-v3's or mmBERT's, which path must name.",
    )
    path: LocalPath = Field(
        default="",
        description="Existing vocab.txt or tokenizer.json to use; for byte_bpe, a tokenizer.json from `prepare` or a "
        "released model such as RoBERTa, ModernBERT or EuroBERT. "
        "Empty trains a new vocabulary.",
    )
    size: int = Field(
        default=30522,
        ge=64,
        le=MAX_ROWS,
        description="Number of tokens in a new vocabulary, including special tokens. The default of byte_bpe is "
        "32768: a multiple of 64 makes the output layer faster on GPUs.",
    )
    lowercase: bool = Field(
        default=True,
        description="Lower-case the text and strip accents (an uncased vocabulary). byte_bpe and released accept only "
        "false, their default.",
    )
    strip_accents: bool | None = Field(
        default=None,
        description="Remove accents, and the vowel signs of Hindi and other Indic scripts. Empty means the "
        "value of lowercase. Only for wordpiece; BertTokenizer has the same setting.",
    )
    min_frequency: int = Field(default=2, ge=1, description="Minimum number of occurrences of a token pair to merge.")
    added_words: int = Field(
        default=0,
        ge=0,
        description="Only with start_from: maximum number of words of the text to add to the checkpoint's vocabulary. "
        "The words that save the most tokens are chosen.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_kind(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kind") in ("byte_bpe", "released"):
            return {"size": 32768, "lowercase": False, **values}
        return values

    @model_validator(mode="after")
    def _check_case(self) -> VocabularyConfig:
        reasons = {"byte_bpe": "which normalizes nothing", "released": "whose tokenizer.json determines it"}
        reason = reasons.get(self.kind, "")
        if reason and self.lowercase:
            raise ValueError(f"lowercase must be false with kind: {self.kind}, {reason}. Remove it")
        if reason and self.strip_accents is not None:
            raise ValueError(f"strip_accents has no effect with kind: {self.kind}, {reason}. Remove it")
        return self


class CorpusConfig(Section):
    """The text to prepare, and how and where to prepare it."""

    dir: Location = Field(
        description="Folder of the token shards, tokenizer, manifest and card, or an address such as "
        "s3://bucket/corpora/wiki."
    )
    cache: ByteSize = Field(
        default=ByteSize(0),
        description="Only if dir is an address: disk space on each machine to cache training text, such as 50GB. "
        "Training then starts immediately and prefetches text. 0 copies the whole corpus to each machine first.",
    )
    sources: tuple[SourceConfig, ...] = Field(
        default=(), description="Text to prepare. May be empty if dir already has a prepared corpus."
    )
    vocabulary: VocabularyConfig = Field(default=VocabularyConfig(), description="The vocabulary.")
    line_breaks: Literal["auto", "keep"] = Field(
        default="auto",
        description="keep preserves line breaks and indentation, for code and tables; the vocabulary must have tokens "
        "for them. auto does so only with a released tokenizer that has such tokens.",
    )
    min_document_words: int = Field(
        default=20,
        ge=0,
        description="Minimum number of words in a document; shorter ones are dropped and counted. Spaces separate "
        "words. In scripts without spaces, two characters of Chinese or Japanese, or four of Thai, Lao, Khmer, "
        "Burmese, Tibetan and the like, count as a word.",
    )
    filters: FiltersConfig = Field(default=FiltersConfig(), description="Filters of documents, all off by default.")
    validation_fraction: float = Field(
        default=0.005, ge=0, lt=1, description="Share of the documents to hold out for validation, chosen by hash."
    )
    shard_tokens: int = Field(default=100_000_000, ge=1000, description="Number of tokens per shard file.")
    language: str = Field(
        default="en", description="ISO 639-1 code of the language. Sentence splitting uses its list of abbreviations."
    )
    processes: int = Field(
        default=0,
        ge=0,
        description="Number of processes that prepare the corpus. 0 uses one per core of this machine, "
        "or of the cluster that scheduling.address names.",
    )

    @model_validator(mode="after")
    def _check_dir(self) -> CorpusConfig:
        if self.cache and not is_remote(self.dir):
            raise ValueError(f"cache has no effect with dir: {self.dir}, which is not an address. Remove cache")
        for index, source in enumerate(self.sources):
            if source.path and local_path(source.path) == self.folder:
                raise ValueError(
                    f"dir: {self.dir} is the folder that sources.{index} reads. Choose another "
                    "folder, such as a subfolder"
                )
        return self

    @property
    def folder(self) -> Path:
        """Return the corpus's folder on this machine."""
        return local_path(self.dir)


class MaskingConfig(Section):
    """Masked language modeling (MLM), Devlin et al. section 3.1."""

    probability: float = Field(
        default=0.15,
        gt=0,
        lt=1,
        description="Share of each sequence's tokens to predict. Phases may override it, but only in training.",
    )
    mask_share: float = Field(
        default=0.8,
        ge=0,
        le=1,
        description="Share of the predicted tokens that are replaced by [MASK]. NeoBERT uses 1, with random_share 0.",
    )
    random_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the predicted tokens that are replaced by a random token; the others stay unchanged. "
        "The sum of mask_share and random_share is at most 1.",
    )
    scheme: str = Field(
        default="tokens",
        description="How the tokens to predict are chosen: tokens (one by one), whole_words (all tokens of a word), or "
        "a custom module such as my_package.window.",
    )

    @field_validator("scheme")
    @classmethod
    def _check_scheme(cls, scheme: str) -> str:
        check_kind(MASKING_SCHEMES, scheme)
        return scheme

    @model_validator(mode="after")
    def _check_together(self) -> MaskingConfig:
        if self.mask_share + self.random_share > 1:
            raise ValueError(
                f"mask_share ({self.mask_share}) and random_share ({self.random_share}) add up to more than 1"
            )
        return self


class PairsConfig(Section):
    """The rules for cutting documents into sequences, and the prediction task for pairs of segments.

    Devlin et al. appendix A.2; Liu et al. 2019, section 4.2; Lan et al. 2020, section 3.1.
    """

    objective: Literal["none", "nsp", "sop"] = Field(
        default="nsp",
        description="Prediction for pairs of segments. nsp (next-sentence prediction): whether the second segment "
        "follows the first or, in half of the pairs, comes from another document. sop (ALBERT's sentence-order "
        "prediction): whether two adjacent segments are swapped, as in half of the pairs. none: sequences have one "
        "segment.",
    )
    input_format: Literal["", "segment_pairs", "doc_sentences", "full_sentences"] = Field(
        default="",
        description="Content of a sequence, named as in RoBERTa. segment_pairs: two segments, for nsp and sop. "
        "doc_sentences: consecutive sentences of one document. full_sentences: the same, filled up after a [SEP] with "
        "sentences of the next documents. Empty means segment_pairs for nsp and sop, and doc_sentences for none.",
    )
    short_share: float = Field(
        default=0.1, ge=0, le=1, description="Share of the sequences that get a random length below the maximum."
    )

    @property
    def has_classifier(self) -> bool:
        """Return whether sequences are segment pairs and the model has a classification head for them."""
        return self.objective != "none"

    @property
    def chosen_format(self) -> Literal["segment_pairs", "doc_sentences", "full_sentences"]:
        """Return `input_format`, or the default format of the objective."""
        return self.input_format or ("segment_pairs" if self.has_classifier else "doc_sentences")

    @model_validator(mode="after")
    def _check_together(self) -> PairsConfig:
        if self.has_classifier != (self.chosen_format == "segment_pairs"):
            allowed = "segment_pairs" if self.has_classifier else "doc_sentences or full_sentences"
            raise ValueError(
                f"input_format: {self.input_format} does not fit the objective {self.objective}; use {allowed}, or "
                f"set objective to {'none' if self.has_classifier else 'nsp or sop'}"
            )
        return self
