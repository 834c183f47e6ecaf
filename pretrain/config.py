"""One YAML file is one run: the frozen models every other module reads its settings from.

Unknown keys are refused with the nearest known name and the line of the file; every knob carries its unit
in its name and its meaning in its description. `load_config` is the way in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from pretrain.common import settings
from pretrain.common.kinds import check_kind
from pretrain.common.settings import LocalPath, Section

_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")

Precision = Literal["bf16", "fp16", "fp32"]
R = TypeVar("R", bound="RunConfig")

# Widths and lengths up to which the seeds of dropout are told apart within int32 (model/hash_rng.py, ALONG).
MAX_WIDTH = 8192
SOURCES = "pretrain.corpus.sources"  # the package of which every module is a kind of source
MASKING_SCHEMES = "pretrain.batches.masking"  # likewise, a masking scheme


class SourceConfig(Section):
    """One source of text. Which of `path`, `dataset` is needed depends on `kind`."""

    kind: str = Field(description="Format of the text: the name of a module in pretrain/corpus/sources.")
    name: str = Field(default="", description="Name on the corpus card; empty takes the kind and the path's stem.")
    path: LocalPath = Field(default="", description="A file, folder or glob; relative to the working directory.")
    dataset: LocalPath = Field(default="", description="huggingface: hub name, or a folder written by save_to_disk.")
    subset: str = Field(default="", description="huggingface: configuration name, such as 20231101.en.")
    split: str = Field(default="train", description="huggingface: split to read.")
    revision: str = Field(default="", description="huggingface: pinned commit, required for hub names.")
    text_column: str = Field(default="text", description="jsonl, parquet, csv, huggingface: the column with the text.")
    weight: float = Field(
        default=1.0, gt=0, description="Passes over this source per epoch; 0.5 sees half of it, 2 all twice."
    )
    licence: str = Field(default="unknown", description="Licence to print on the corpus card.")

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        check_kind(SOURCES, kind)
        return kind

    @model_validator(mode="after")
    def _check_place(self) -> SourceConfig:
        needed = {"huggingface": "dataset", "docstrings": ""}.get(self.kind, "path")
        if needed and not getattr(self, needed):
            raise ValueError(f"kind: {self.kind} needs {needed}")
        return self


class VocabularyConfig(Section):
    """The WordPiece vocabulary: trained on the corpus, or taken over from `path`."""

    path: LocalPath = Field(default="", description="Existing vocab.txt or tokenizer.json; empty trains a new one.")
    size: int = Field(default=30522, ge=64, description="Entries to train, special tokens included.")
    lowercase: bool = Field(default=True, description="Uncased: lower-case and strip accents, as BertNormalizer does.")
    min_frequency: int = Field(default=2, ge=1, description="A pair must occur this often to be merged.")
    training_bytes: int = Field(
        default=1 << 30, ge=1, description="Train on at most this much text, sampled by document hash."
    )


class CorpusConfig(Section):
    """Where the text comes from and where its token shards go."""

    dir: LocalPath = Field(description="Folder of the token shards, tokenizer, manifest and card.")
    sources: tuple[SourceConfig, ...] = Field(
        default=(), description="Texts to prepare; may be empty when dir is already prepared."
    )
    vocabulary: VocabularyConfig = VocabularyConfig()
    min_document_words: int = Field(default=20, ge=0, description="Shorter documents are dropped and counted.")
    validation_fraction: float = Field(
        default=0.005, ge=0, lt=1, description="Share of documents held out, by document hash."
    )
    shard_tokens: int = Field(default=100_000_000, ge=1000, description="Tokens per shard file.")
    language: str = Field(default="en", description="ISO 639-1 code, for the abbreviations of sentence splitting.")
    processes: int = Field(
        default=0,
        ge=0,
        description="Preparation processes; 0 means one per core, of the cluster if there is one.",
    )


class ModelConfig(Section):
    """Shape of the encoder. `size` fills whatever is not given."""

    size: Literal["mini", "small", "medium", "base", "large", "custom"] = "base"
    layers: int = Field(default=0, ge=0, description="Transformer layers.")
    hidden: int = Field(default=0, ge=0, le=MAX_WIDTH, description="Hidden width.")
    heads: int = Field(default=0, ge=0, description="Attention heads; hidden must be a multiple.")
    intermediate: int = Field(default=0, ge=0, description="Feed-forward width; 0 means 4 x hidden.")
    max_positions: int = Field(default=512, ge=8, le=MAX_WIDTH, description="Learned position embeddings.")
    embedding: int = Field(
        default=0,
        ge=0,
        le=MAX_WIDTH,
        description="Width of the embeddings where it is not hidden (0): then projected to it, as in ELECTRA.",
    )
    # The default: google-research/bert modeling.py, layer_norm (tf.contrib's); torch's is 1e-5, RoBERTa's too.
    layer_norm_eps: float = Field(default=1e-12, gt=0, le=0.1, description="Added to the variance in every LayerNorm.")
    hidden_dropout: float = Field(
        default=0.1, ge=0, lt=1, description="Dropout after embeddings, attention output and FFN."
    )
    attention_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout on attention probabilities. On CUDA drawn by the kernel, from its generator.",
    )
    init_std: float = Field(default=0.02, gt=0, description="Truncated-normal initialisation, at two deviations.")
    attention_init: Literal["normal", "neighbours"] = Field(
        default="normal",
        description="Initial values of attention: BERT's, or heads that attend to adjacent tokens, for small runs.",
    )
    norm: str = Field(default="layer_norm", description="Norm of embeddings, layers and heads: layer_norm.")
    activation: str = Field(default="gelu", description="Activation of the feed-forward network: gelu, relu or tanh.")

    # layers, hidden, heads: google-research/bert README.md (the 24 smaller models), Devlin et al. section 3.
    @model_validator(mode="before")
    @classmethod
    def _fill_from_size(cls, values: Any) -> Any:
        sizes = {
            "mini": (4, 256, 4),
            "small": (4, 512, 8),
            "medium": (8, 512, 8),
            "base": (12, 768, 12),
            "large": (24, 1024, 16),
        }
        if isinstance(values, dict):
            values = dict(values)
            size = values.get("size", "base")
            shape = sizes.get(size, (0, 0, 0)) if isinstance(size, str) else (0, 0, 0)
            for key, value in zip(("layers", "hidden", "heads"), shape, strict=True):
                if not values.get(key):
                    values[key] = value
            if not values.get("intermediate") and isinstance(values.get("hidden"), int):
                values["intermediate"] = 4 * values["hidden"]
        return values

    @model_validator(mode="after")
    def _check_shape(self) -> ModelConfig:
        if min(self.layers, self.hidden, self.heads) < 1:
            raise ValueError("size: custom needs layers, hidden and heads")
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.attention_init == "neighbours" and self.embedding not in (0, self.hidden):
            raise ValueError("attention_init: neighbours needs embeddings as wide as hidden")
        if self.attention_init == "neighbours" and self.hidden // self.heads % 2:
            raise ValueError(
                f"attention_init: neighbours needs heads of an even width, not {self.hidden // self.heads}"
            )
        return self


class MaskingConfig(Section):
    """Masked language modelling, Devlin et al. section 3.1."""

    probability: float = Field(default=0.15, gt=0, lt=1, description="Share of each sequence's tokens to predict.")
    mask_share: float = Field(default=0.8, ge=0, le=1, description="Of those, replaced by [MASK].")
    random_share: float = Field(default=0.1, ge=0, le=1, description="Of those, replaced by a uniform ordinary token.")
    whole_word: bool = Field(default=False, description="Mask all pieces of a word together.")
    scheme: str = Field(
        default="",
        description="How tokens are chosen: the name of a module in pretrain/batches/masking; empty takes whole_words "
        "if whole_word is true, else tokens.",
    )

    @property
    def chosen_scheme(self) -> str:
        """The scheme that `scheme` and `whole_word` name together."""
        return self.scheme or ("whole_words" if self.whole_word else "tokens")

    @field_validator("scheme")
    @classmethod
    def _check_scheme(cls, scheme: str) -> str:
        if scheme:
            check_kind(MASKING_SCHEMES, scheme)
        return scheme

    @model_validator(mode="after")
    def _check_together(self) -> MaskingConfig:
        if self.mask_share + self.random_share > 1:
            raise ValueError(f"mask_share {self.mask_share} and random_share {self.random_share} are over 1 together")
        if self.whole_word and self.chosen_scheme != "whole_words":
            raise ValueError(f"whole_word: true contradicts scheme: {self.scheme}; leave one of them out")
        return self


class PairsConfig(Section):
    """How sequences are cut from documents, Devlin et al. appendix A.2."""

    next_sentence: bool = Field(
        default=True, description="Sentence pairs with NSP; false packs full sentences in one segment."
    )
    random_next_share: float = Field(
        default=0.5, ge=0, le=1, description="Share of pairs whose second segment is random."
    )
    short_share: float = Field(
        default=0.1, ge=0, le=1, description="Share of sequences with a random shorter target length."
    )


class OptimizerConfig(Section):
    name: Literal["adamw", "lamb"] = "adamw"
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    epsilon: float = Field(default=1e-6, gt=0)
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled; biases and LayerNorm are exempt.")


class PhaseConfig(Section):
    """One stretch of training at one sequence length."""

    sequence_length: int = Field(ge=8, description="Longest sequence in tokens, special tokens included.")
    global_sequences: int = Field(ge=1, description="Sequences per optimizer step over all workers.")
    steps: int = Field(ge=1, description="Optimizer steps of this phase.")
    peak_learning_rate: float = Field(gt=0)
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Steps of linear warm-up: from 1/warmup_steps of the peak to the peak, which the last of them has.",
    )
    decay: Literal["linear", "polynomial", "constant"] = "linear"
    decay_power: float = Field(
        default=0.5, gt=0, description="Exponent of polynomial decay; NVIDIA's LAMB recipe uses 0.5."
    )
    final_learning_rate: float = Field(default=0.0, ge=0)
    max_predictions: int = Field(
        default=0,
        ge=0,
        description="Masked tokens per sequence at most; 0 means masking.probability of the length.",
    )

    @model_validator(mode="after")
    def _check_steps(self) -> PhaseConfig:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must not exceed steps ({self.steps})")
        return self


# DeepSpeed's settings that ours decide, and which.
_NAMED = {
    "zero_optimization.stage": "engine.zero_stage",
    "bf16.enabled": "engine.precision",
    "fp16.enabled": "engine.precision",
    "gradient_clipping": "engine.gradient_clip_norm",
    "train_batch_size": "phases and engine.micro_batch_tokens",
    "train_micro_batch_size_per_gpu": "phases and engine.micro_batch_tokens",
    "gradient_accumulation_steps": "phases and engine.micro_batch_tokens",
    "optimizer": "the section optimizer",
    "scheduler": "the phases' learning rates",
}


class EngineConfig(Section):
    """Precision, ZeRO and the micro-batch."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto",
        description="Floating-point type of the arithmetic. auto: on GPUs bf16 from Ampere on, fp16 on Volta and "
        "Turing, else fp32; on CPUs bf16 or fp32, whichever multiplies matrices faster.",
    )
    micro_batch_tokens: int = Field(default=8192, ge=8, description="Most tokens a worker holds in one forward pass.")
    gradient_clip_norm: float = Field(
        default=1.0, ge=0, description="Global gradient norm to clip to; 0 does not clip."
    )
    activation_checkpointing: bool = Field(
        default=False, description="Recompute layers in the backward pass to save memory."
    )
    compile: bool = Field(default=True, description="torch.compile the layers.")
    max_bad_steps: int = Field(
        default=5,
        ge=1,
        description="Steps with NaN or inf in a row before the run goes back to its newest checkpoint.",
    )
    deepspeed: dict[str, Any] = Field(default_factory=dict, description="DeepSpeed settings we do not name.")

    @property
    def settled_precision(self) -> Precision:
        """`precision` once auto has become one; see `pretrain.model.precision`."""
        if self.precision == "auto":
            raise ValueError("engine.precision is not settled yet")
        return self.precision

    @field_validator("deepspeed")
    @classmethod
    def _check_deepspeed(cls, values: dict[str, Any]) -> dict[str, Any]:
        for key, ours in _NAMED.items():
            section: Any = values
            for part in key.split("."):
                section = section.get(part) if isinstance(section, dict) else None
            if section is not None:
                raise ValueError(f"{key} is set by {ours}; leave it out here")
        return values


class CheckpointConfig(Section):
    every_steps: int = Field(default=1000, ge=1)
    keep_last: int = Field(
        default=2, ge=1, description="Newest checkpoints kept; the best by validation loss is kept besides."
    )
    background: bool = Field(
        default=True,
        description="Copy in memory and write while training goes on: 12 bytes per parameter over all workers more.",
    )
    retry_seconds: float = Field(
        default=60.0,
        ge=0,
        description="How long to try again where the storage fails; a full disk only once.",
    )


class EvaluationConfig(Section):
    every_steps: int = Field(default=1000, ge=1)
    sequences: int = Field(default=1024, ge=1, description="Held-out sequences per evaluation, always the same ones.")


class SpikeConfig(Section):
    """What is done about training that goes wrong: back to the last checkpoint, past the data that did it."""

    spike_sigmas: float = Field(
        default=10.0,
        ge=0,
        description="A loss so many standard deviations over the last 64 steps' median is a spike; 0 looks for none.",
    )
    spike_share: float = Field(default=0.2, ge=0, description="It must be over the median by this share of it, too.")
    max_rollbacks: int = Field(default=3, ge=0, description="After so many the run stops (exit 4).")


class TrackingConfig(Section):
    log_every_steps: int = Field(default=10, ge=1)
    straggler_factor: float = Field(
        default=1.5, gt=1, description="A worker so many times slower than the others' median is named."
    )
    wandb: Literal["auto", "offline", "online", "off"] = Field(
        default="auto", description="auto: online if a key is set."
    )
    project: str = "bertrain"
    run_id: str = Field(
        default="",
        max_length=64,
        description="W&B's id of the run; empty makes one. A submitted job has its name.",
    )
    group: str = ""
    tags: tuple[str, ...] = ()


class SchedulingConfig(Section):
    workers: int = Field(default=1, ge=1, description="Worker processes: one per GPU, or CPU workers.")
    min_workers: int = Field(
        default=0,
        ge=0,
        description="Go on with as few where nodes are lost, and grow again when they return; 0 means always `workers`.",
    )
    cpus_per_worker: int = Field(default=0, ge=0, description="CPU threads per worker; 0 shares the cores out.")
    address: str = Field(
        default="", description="Ray cluster to join, for prepare as well; empty keeps to this machine."
    )
    cluster: str = Field(default="", description="What --dry-run tells the time for without --on, such as 8xH100.")
    hang_seconds: float = Field(
        default=180.0,
        ge=0,
        description="Seconds without progress in any worker, or without a sign of life from one, after which the workers "
        "are restarted; ten times what long micro-batches take of late where that is more. A restart of hundreds of GPUs costs "
        "minutes; a few workers can have less, such as 30. 0 never restarts them.",
    )
    data_stall_seconds: float = Field(
        default=1800.0,
        ge=0,
        description="The same for a worker that waits for a batch or for the run folder's storage, which a restart seldom "
        "helps; at least hang_seconds. 0 waits for ever.",
    )
    wait_for_nodes_seconds: float = Field(
        default=1800.0,
        ge=0,
        description="On a cluster (address): how long to wait for nodes, at the start and when some are lost. An "
        "autoscaler is told what is missing. Not for sweep, glue and --seeds: they take the nodes that are there.",
    )
    max_failures: int = Field(default=3, ge=0, description="Worker failures survived by restarting from a checkpoint.")

    @model_validator(mode="after")
    def _check_range(self) -> SchedulingConfig:
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers ({self.min_workers}) is more than workers ({self.workers})")
        return self


class RunConfig(Section):
    """What every run has, whatever it trains."""

    name: str = Field(description="Run id: a-z, 0-9 and dashes, at most 63.")
    run_dir: LocalPath = Field(default="", description="Run folder; empty means runs/<name>.")
    seed: int = Field(default=0, ge=0, lt=2**63)
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: SpikeConfig = SpikeConfig()
    tracking: TrackingConfig = TrackingConfig()
    scheduling: SchedulingConfig = SchedulingConfig()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _RUN_NAME.fullmatch(name):
            raise ValueError(f"{name!r} must be 1 to 63 of a-z, 0-9 and '-', and not begin with '-'")
        return name

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run_dir or f"runs/{self.name}")


class PretrainConfig(RunConfig):
    """Everything a pretraining run is."""

    corpus: CorpusConfig
    model: ModelConfig = ModelConfig()
    pairs: PairsConfig = PairsConfig()
    masking: MaskingConfig = MaskingConfig()
    phases: tuple[PhaseConfig, ...] = Field(min_length=1)
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _check_phases(self) -> PretrainConfig:
        if self.model.embedding not in (0, self.model.hidden):
            raise ValueError(
                f"model.embedding ({self.model.embedding}) is for released models; the decoder is tied to the "
                f"embeddings, so pretraining needs them as wide as model.hidden ({self.model.hidden}), or 0"
            )
        for number, phase in enumerate(self.phases):
            if phase.sequence_length > self.model.max_positions:
                raise ValueError(
                    f"phases.{number}.sequence_length ({phase.sequence_length}) exceeds "
                    f"model.max_positions ({self.model.max_positions})"
                )
            if phase.sequence_length > self.engine.micro_batch_tokens:
                raise ValueError(
                    f"engine.micro_batch_tokens ({self.engine.micro_batch_tokens}) is smaller than "
                    f"phases.{number}.sequence_length ({phase.sequence_length})"
                )
            least = self.scheduling.min_workers or self.scheduling.workers
            for workers in range(least, self.scheduling.workers + 1):
                if why := self.why_not_dealt(number, phase.global_sequences, workers):
                    raise ValueError(f"phases.{number}.global_sequences ({phase.global_sequences}) {why}")
        return self

    def why_not_dealt(self, phase: int, sequences: int, workers: int) -> str:
        """Why a batch of so many sequences cannot be dealt out (`batches.loader.deal`); "" where it can."""
        if sequences < workers:
            return f"is less than the number of workers ({workers}); every worker needs a sequence"
        length, budget = self.phases[phase].sequence_length, self.engine.micro_batch_tokens
        if sequences % workers and budget < 2 * length:
            return (
                f"cannot be dealt to {workers} workers evenly while engine.micro_batch_tokens ({budget}) holds only one "
                f"sequence of {length}; take a multiple, or micro_batch_tokens of at least {2 * length}"
            )
        return ""

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> tuple[int, int]:
        """(phase number, 0-based step within it) of the 0-based optimizer `step`."""
        for number, phase in enumerate(self.phases):
            if step < phase.steps:
                return number, step
            step -= phase.steps
        raise IndexError("past the last phase")


def with_precision(config: R, precision: Precision) -> R:
    """`config` with this `engine.precision`."""
    return config.model_copy(update={"engine": config.engine.model_copy(update={"precision": precision})})


def as_begun(config: R, before: RunConfig) -> R:
    """`config` with the precision that `before`, an earlier start of the run, settled, if `config` leaves it to auto."""
    if config.engine.precision != "auto" or before.engine.precision == "auto":
        return config
    return with_precision(config, before.engine.precision)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> PretrainConfig:
    """The run described by the YAML file `path` with `key.path=value` overrides, as `settings.load` reads it."""
    return settings.load(path, PretrainConfig, overrides)


# What may differ between any run and its continuation: nothing here changes which samples are seen or how they
# are weighed.
FREE_ON_RESUME = (
    "run_dir",
    "scheduling",
    "tracking",
    "checkpoint",
    "guard",
    "engine.zero_stage",
    "engine.micro_batch_tokens",
    "engine.activation_checkpointing",
    "engine.compile",
    "engine.max_bad_steps",
)
_FREE_ON_RESUME = (
    *FREE_ON_RESUME,
    # Compared by its fingerprint, which the checkpoint carries.
    "corpus",
    "evaluation.every_steps",
    # Learning rates: what one lowers after a divergence.
    "phases.*.peak_learning_rate",
    "phases.*.warmup_steps",
    "phases.*.decay",
    "phases.*.decay_power",
    "phases.*.final_learning_rate",
)


def changed_for_resume(before: PretrainConfig, after: PretrainConfig) -> list[str]:
    """Dotted names of the settings that differ although a resumed run must keep them, with both values."""
    return settings.differences(before, as_begun(after, before), free=_FREE_ON_RESUME)
