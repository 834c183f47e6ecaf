"""The config of a run: tracking, scheduling, and all sections together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from pretrain.common import settings
from pretrain.common.addresses import is_remote, local_run
from pretrain.common.errors import InputError
from pretrain.common.extensions import check_name, is_custom
from pretrain.common.sections import Keys, Location, Section, WritableLocation, check_location
from pretrain.common.setting_errors import first_problem
from pretrain.config.adaptation import AdaptationConfig
from pretrain.config.data import MASKING_SCHEMES, SOURCES, CorpusConfig, MaskingConfig, PairsConfig
from pretrain.config.engine import CheckpointConfig, EngineConfig, SpikeConfig
from pretrain.config.model import ModelConfig
from pretrain.config.objectives import DistillationConfig, ElectraConfig
from pretrain.config.schedule import (
    EvaluationConfig,
    OptimizerConfig,
    PhaseConfig,
    PretrainOptimizerConfig,
)

OBJECTIVES, CALLBACKS = "pretrain.objectives", "pretrain.run.callbacks"
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

ConfigT = TypeVar("ConfigT", bound="RunConfig")


class TrackingConfig(Section):
    """Metrics and W&B."""

    log_every_steps: int = Field(default=10, ge=1, description="Optimizer steps between records in metrics.jsonl.")
    wandb: Literal["auto", "offline", "online", "off"] = Field(
        default="auto",
        description="Mode of W&B. auto is online if a W&B key is set, else offline; off if W&B is not installed.",
    )
    project: str = Field(default="bertrain", description="W&B project.")
    run_id: str = Field(
        default="",
        max_length=64,
        description="W&B id of the run. Empty generates one; a submitted job uses its job name.",
    )
    group: str = Field(default="", description="W&B group. Empty means the run's name.")

    def check_names(self) -> None:
        """Raise `InputError` if W&B would reject a name.

        Only called for runs that start: recorded configs may have such names, and must remain readable.
        """
        if self.wandb == "off":
            return
        if len(self.project) > 128 or set(self.project) & set("/\\#?%:"):
            raise InputError(
                f"tracking.project: {self.project!r} must be at most 128 characters without / \\ # ? % : for W&B. The "
                "environment variable WANDB_ENTITY chooses the team."
            )
        if self.run_id != self.run_id.strip() or set(self.run_id) & set(":;,#?/'"):
            raise InputError(
                f"tracking.run_id: {self.run_id!r} must have none of : ; , # ? / ' and no space around it, for W&B."
            )


class SchedulingConfig(Section):
    """Workers, the cluster, and restarts."""

    workers: int = Field(default=1, ge=1, description="Number of worker processes: one per GPU, or CPU workers.")
    min_workers: int = Field(
        default=0,
        ge=0,
        description="Minimum number of workers (at most workers) with which the run continues if nodes are lost. It "
        "grows again when nodes return. 0 always requires all workers.",
    )
    cpus_per_worker: int = Field(
        default=0, ge=0, description="CPU threads per worker. 0 divides the cores of a node among its workers."
    )
    address: str = Field(
        default="",
        description="Address of the Ray cluster for pretrain and prepare. Empty uses this machine only.",
    )
    hang_seconds: float = Field(
        default=180.0,
        ge=0,
        description="Seconds after which a worker without progress, or without a heartbeat, is considered hung and all "
        "workers restart. The limit is at least ten times the duration of recent long micro-batches. A restart of "
        "hundreds of GPUs takes minutes; for a few workers, a shorter limit such as 30 is fine. Waits for a batch, or "
        "for the storage of the run folder, may take ten times as long. 0 disables the check.",
    )
    wait_for_nodes_seconds: float = Field(
        default=1800.0,
        ge=0,
        description="Seconds to wait for nodes of a cluster (address) at the start and after a loss. The autoscaler "
        "is requested to start the missing nodes. Not used by sweep and --seeds, which use the "
        "available nodes.",
    )
    start_seconds: float = Field(
        default=0.0,
        ge=0,
        description="Limit in seconds for all workers to start after Ray has placed them; raise it for a slow shared "
        ".venv. 0 means 120, plus half a second per worker.",
    )
    max_failures: int = Field(
        default=3,
        ge=0,
        description="Maximum number of restarts after worker failures without a new checkpoint in between. "
        "One more failure stops the run.",
    )

    @model_validator(mode="after")
    def _check_range(self) -> SchedulingConfig:
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers ({self.min_workers}) is more than workers ({self.workers})")
        return self


def parse_callback(entry: str | Mapping[str, Any]) -> tuple[str, bool, dict[str, Any]]:
    """Return (name of the function or class, whether its errors stop the run, options of the class)."""
    options = {"call": entry} if isinstance(entry, str) else dict(entry)
    return str(options.pop("call", "")), options.pop("on_error", "warn") == "stop", options


def _check_callback(entry: Any) -> Any:
    if not isinstance(entry, str | dict):
        raise ValueError("use my_package.module:name, or a section with this name as `call`")
    if isinstance(entry, dict) and (policy := entry.get("on_error", "warn")) not in ("warn", "stop"):
        raise ValueError(f"on_error: {policy!r} is not one of warn, stop")
    check_name(parse_callback(entry)[0], with_attribute=True)
    return entry


class RunConfig(Section):
    """Settings that pretraining and fine-tuning runs share."""

    name: str = Field(description="Run name: up to 63 ASCII letters, digits, '.', '_', '-'; first a letter or digit.")
    run_dir: WritableLocation = Field(
        default="",
        description="Run folder, or an address such as s3://bucket/runs/mini: the run then trains in a local folder, "
        "and every checkpoint is stored at the address. Empty means runs/<name>.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of initialization, sampling, masking and dropout.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="The optimizer.")
    engine: EngineConfig = Field(default=EngineConfig(), description="Precision, ZeRO and micro-batches.")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Checkpoints.")
    guard: SpikeConfig = Field(default=SpikeConfig(), description="Detection of loss spikes, and rollbacks.")
    tracking: TrackingConfig = Field(default=TrackingConfig(), description="Metrics and W&B.")
    scheduling: SchedulingConfig = Field(default=SchedulingConfig(), description="Workers, the cluster, and restarts.")
    callbacks: tuple[Annotated[Any, AfterValidator(_check_callback)], ...] = Field(
        default=(),
        description="Custom functions or classes to call after steps, evaluations and checkpoints, such as "
        "my_package.hooks:tell, or {call: my_package.hooks:Tell, on_error: stop, OPTION: VALUE}. An error in one is "
        "shown once; with on_error: stop, it stops the run, which can be resumed.",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _RUN_NAME.fullmatch(name):
            raise ValueError(f"{name!r} must be 1 to 63 of A-Z, a-z, 0-9 and . _ -, and start with a letter or digit")
        return name

    def custom_modules(self) -> Iterator[tuple[Keys, str, str]]:
        for index, entry in enumerate(self.callbacks):
            yield ("callbacks", index), CALLBACKS, parse_callback(entry)[0]

    @property
    def folder(self) -> Path:
        """Return the run folder on this machine."""
        return local_run(self.run_dir or f"runs/{self.name}")

    @property
    def address(self) -> str:
        """Return the address at which the run is also stored; "" for a local run."""
        return self.run_dir if is_remote(self.run_dir) else ""


class PretrainConfig(RunConfig):
    """All settings of a pretraining run."""

    SUBJECT = "pretraining run"

    optimizer: PretrainOptimizerConfig = Field(default=PretrainOptimizerConfig(), description="The optimizer.")
    corpus: CorpusConfig = Field(description="The text and the prepared corpus.")
    model: ModelConfig = Field(default=ModelConfig(), description="Shape of the encoder.")
    pairs: PairsConfig = Field(default=PairsConfig(), description="Sequences and pairs cut from documents.")
    masking: MaskingConfig = Field(default=MaskingConfig(), description="Masked language modeling.")
    phases: tuple[PhaseConfig, ...] = Field(min_length=1, description="Phases of training, in order; at least one.")
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="Evaluation on held-out sequences.")
    start_from: Location = Field(
        default="",
        description="Folder or address of a checkpoint to continue from: a released one, an export or a run. model and "
        "corpus.vocabulary are then the checkpoint's. --from sets it, too. Empty starts from random weights.",
    )
    fork_from: str = Field(
        default="",
        description="Checkpoint from which the run starts, as RUN@STEP, such as runs/mini@2000; weights, moments "
        "and position in the data are taken from it. Settings up to that step must be the same; later phases may "
        "differ. --fork sets it, too.",
    )
    adaptation: AdaptationConfig = Field(
        default=AdaptationConfig(), description="Settings of a run that continues from the checkpoint in start_from."
    )
    distillation: DistillationConfig = Field(
        default=DistillationConfig(), description="Learning from the predictions of a larger model."
    )
    electra: ElectraConfig = Field(
        default=ElectraConfig(), description="Detection of tokens that a generator has replaced."
    )
    objective: str = Field(
        default="",
        description="Custom objective, a module such as my_package.places. Empty is masked language modeling, or the "
        "objective of distillation.teacher or electra.generator_width.",
    )

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, objective: str) -> str:
        if objective:
            check_name(objective)
        return objective

    def custom_modules(self) -> Iterator[tuple[Keys, str, str]]:
        modules = [(("corpus", "sources", n, "kind"), SOURCES, each.kind) for n, each in enumerate(self.corpus.sources)]
        modules += [(("masking", "scheme"), MASKING_SCHEMES, self.masking.scheme)]
        modules += [(("objective",), OBJECTIVES, self.objective)]
        yield from (module for module in modules if is_custom(module[2]))
        yield from super().custom_modules()

    @field_validator("fork_from")
    @classmethod
    def _check_fork(cls, fork: str) -> str:
        if fork:
            run, _, step = fork.rpartition("@")
            if not (run and step.isascii() and step.isdigit()):
                raise ValueError(f"{fork!r} is not RUN@STEP, such as runs/mini@2000")
            check_location(run)
        return fork

    @model_validator(mode="after")
    def _check_start(self) -> PretrainConfig:
        """Reject settings that have no effect without a checkpoint to continue from."""
        if self.start_from:
            return self
        _reject_changes("adaptation", self.adaptation, "start_from: the checkpoint to continue from")
        if added := self.corpus.vocabulary.added_words:
            raise ValueError(
                f"corpus.vocabulary.added_words ({added}) needs start_from: the checkpoint whose vocabulary is extended"
            )
        return self

    @model_validator(mode="after")
    def _check_distillation(self) -> PretrainConfig:
        settings = self.distillation
        if not settings.teacher:
            _reject_changes("distillation", settings, "distillation.teacher: the model to learn from")
            return self
        if self.start_from:
            raise ValueError(
                f"start_from ({self.start_from}) and distillation.teacher ({settings.teacher}) both set the initial "
                "weights. Remove one of them"
            )
        if len(settings.layers) not in (0, self.model.layers):
            raise ValueError(
                f"distillation.layers ({list(settings.layers)}) has {len(settings.layers)} numbers for the "
                f"{self.model.layers} layers of the model (model.layers)"
            )
        return self

    @model_validator(mode="after")
    def _check_electra(self) -> PretrainConfig:
        if not self.electra.is_on:
            _reject_changes("electra", self.electra, "electra.generator_width, such as 0.25")
            return self
        if self.pairs.has_classifier:
            raise ValueError(f"electra does not fit the objective {self.pairs.objective}. Set pairs.objective: none")
        for other, value in (("start_from", self.start_from), ("distillation.teacher", self.distillation.teacher)):
            if value:
                raise ValueError(f"electra and {other} ({value}) do not fit together. Remove one of them")
        try:
            self.electra.generator(self.model)
        except ValidationError as error:
            raise ValueError(
                f"electra.generator_width ({self.electra.generator_width}): {first_problem(error)}"
            ) from None
        return self

    @property
    def _objective_section(self) -> str:
        """Return the name of the section that selects an objective; "" if none does."""
        return "electra" if self.electra.is_on else "distillation" if self.distillation.teacher else ""

    @property
    def graph_obstacle(self) -> str:
        """Return the reason why passes cannot be captured as CUDA graphs; "" if they can."""
        if objective := self._objective_section or (self.objective and f"objective ({self.objective})"):
            return f"does not fit {objective}: only masked language modeling of one model ignores filler in its loss"
        if not self.model.fits_flash_attention:
            return (
                "does not fit the model: it needs flash attention. That requires a head width that is a multiple of "
                f"8, up to 256 (here {self.model.head_width}), and no relative positions (model.positions is "
                f"{self.model.positions})"
            )
        return (obstacle := self.engine.graph_obstacle) and f"engine.{obstacle}"

    @model_validator(mode="after")
    def _check_shapes(self) -> PretrainConfig:
        if self.objective and self._objective_section:
            raise ValueError(
                f"objective ({self.objective}) and {self._objective_section} both select the objective. Remove one"
            )
        if self.engine.cuda_graphs is True and (reason := self.graph_obstacle):
            raise ValueError(f"engine.cuda_graphs {reason}. Set it to false")
        return self

    @model_validator(mode="after")
    def _check_phases(self) -> PretrainConfig:
        for index, phase in enumerate(self.phases):
            if phase.sequence_length > self.model.max_positions:
                raise ValueError(
                    f"phases.{index}.sequence_length ({phase.sequence_length}) exceeds "
                    f"model.max_positions ({self.model.max_positions})"
                )
            for name, is_local in (("rotary_base", False), ("local_rotary_base", True)):
                missing = "local_attention" if is_local else "rotary positions"
                if getattr(phase, name) and not (self.model.local_attention if is_local else self.model.rotary_base):
                    raise ValueError(f"phases.{index}.{name} has no effect: the model has no {missing}. Set it to 0")
            if phase.sequence_length > self.engine.micro_batch_tokens:
                raise ValueError(
                    f"engine.micro_batch_tokens ({self.engine.micro_batch_tokens}) is smaller than "
                    f"phases.{index}.sequence_length ({phase.sequence_length})"
                )
            # The batch sizes of a ramp are multiples of its first one.
            if phase.ramp_from and (reason := self.batch_problem(index, phase.ramp_from)):
                raise ValueError(f"phases.{index}.ramp_from ({phase.ramp_from}) {reason}")
            if reason := self.batch_problem(index, phase.global_sequences):
                raise ValueError(f"phases.{index}.global_sequences ({phase.global_sequences}) {reason}")
        return self

    def batch_problem(self, phase: int, sequences: int) -> str:
        """Return why a batch cannot be balanced with some of the allowed numbers of workers; "" if it can."""
        allowed = range(self.scheduling.min_workers or self.scheduling.workers, self.scheduling.workers + 1)
        return next(filter(None, (self.balance_problem(phase, sequences, workers) for workers in allowed)), "")

    def balance_problem(self, phase: int, sequences: int, workers: int) -> str:
        """Return why a batch cannot be balanced across this number of workers (`balancing.balance`); "" if it can."""
        if sequences < workers:
            return f"is less than the number of workers ({workers}); every worker needs a sequence"
        length, budget = self.phases[phase].sequence_length, self.engine.micro_batch_tokens
        if sequences % workers and budget < 2 * length:
            return (
                f"is not a multiple of the workers ({workers}), and engine.micro_batch_tokens ({budget}) fits only "
                f"one sequence of {length}; choose a multiple, or micro_batch_tokens of at least {2 * length}"
            )
        return ""

    @property
    def total_steps(self) -> int:
        """Return the number of optimizer steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def model_in(self, phase: int) -> ModelConfig:
        """Return the model's shape with the rotary bases of a phase."""
        phase_config = self.phases[phase]
        return self.model.with_rotary_bases(phase_config.rotary_base, phase_config.local_rotary_base)

    def weight_decay(self, phase: int) -> float:
        """Return the optimizer's decoupled weight decay in a phase."""
        decay = self.phases[phase].weight_decay
        return self.optimizer.decay_over(self.phases[: phase + 1]) if decay is None else decay

    def averaged_steps(self, step: int) -> int:
        """Return the number of steps whose weights the average after the 0-based `step` includes; 0 for no average."""
        index, step_in_phase = self.phase_at(step)
        phase = self.phases[index]
        averaged = max(1, round(phase.averaged_share * phase.steps)) if phase.averaged_share else 0
        return max(0, step_in_phase + 1 - (phase.steps - averaged))

    def masking_shares(self, phase: int) -> tuple[float, float]:
        """Return the share of tokens to predict at the start and at the end of a phase; it changes linearly.

        Ankner et al. 2023, "Dynamic Masking Rate Schedules for MLM Pretraining", section 2.
        """
        initial = self.phases[phase].masking_probability or self.masking.probability
        return initial, self.phases[phase].final_masking_probability or initial

    @property
    def largest_masking_share(self) -> float:
        """Return the largest share of a sequence's tokens to predict at any time, evaluations included."""
        shares = (share for phase in range(len(self.phases)) for share in self.masking_shares(phase))
        return max(self.masking.probability, *shares)

    def phase_at(self, step: int) -> tuple[int, int]:
        """Return (index of the phase, 0-based step within it) of the 0-based optimizer `step`."""
        for index, phase in enumerate(self.phases):
            if step < phase.steps:
                return index, step
            step -= phase.steps
        raise IndexError("step is past the last phase")


def _reject_changes(section: str, settings: Section, requirement: str) -> None:
    """Raise `ValueError` if a setting differs from its default: without the `requirement`, it would have no effect."""
    for name, value in settings.model_dump(exclude_defaults=True).items():
        raise ValueError(f"{section}.{name} ({value}) needs {requirement}")


def load_config(
    config: settings.AnyConfig, overrides: settings.Overrides = (), *, imports: bool = False
) -> PretrainConfig:
    """Load the pretraining config in `config`, with overrides, as `settings.load` does."""
    return settings.load(config, PretrainConfig, overrides, imports=imports)


def config_of(folder: Path) -> PretrainConfig:
    """Load the pretraining config that a run recorded in its `folder`, as `settings.load_recorded` does."""
    return settings.load_recorded(folder / "config.yaml", PretrainConfig)
