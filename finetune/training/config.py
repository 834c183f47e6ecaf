"""The config of a fine-tuning: the checkpoint to start from, one task, and its training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, create_model, field_validator, model_validator

from finetune.tasks import custom_metric, registry
from pretrain.common import settings
from pretrain.common.errors import InputError
from pretrain.common.extensions import check_name
from pretrain.common.sections import Keys, Location, Section
from pretrain.common.setting_errors import first_problem
from pretrain.config import (
    FREE_IN_ALL_RUNS,
    CheckpointConfig,
    EngineConfig,
    OptimizerConfig,
    PhaseConfig,
    PretrainConfig,
    RunConfig,
    SpikeConfig,
    keep_precision,
)

TASKS = (*(task.kind for task in registry.TASKS), "task")
"""Names of the config's task sections, of which a config has exactly one."""

PRESETS: dict[str, dict[str, Any]] = {
    # Learning rate and epochs depend on the hidden size and the number of examples (`FinetuneConfig.filled`).
    "auto": {"examples_per_step": 32, "warmup_share": 0.1},
    # The middle of the grid in Devlin et al. 2019, appendix A.3; warm-up as in google-research/bert run_classifier.py.
    "devlin": {"examples_per_step": 32, "learning_rate": 3e-5, "epochs": 3.0, "warmup_share": 0.1},
    # Mosbach et al. 2021, "On the stability of fine-tuning BERT", section 6: a small rate, warm-up, bias
    # correction (which torch's AdamW always has) and 20 epochs even for small sets.
    "stable": {"examples_per_step": 16, "learning_rate": 2e-5, "epochs": 20.0, "warmup_share": 0.1},
    # google-research/bert README.md, the 24 smaller models: 4 epochs at a rate from 3e-4 to 3e-5.
    "small-bert": {"examples_per_step": 32, "learning_rate": 1e-4, "epochs": 4.0, "warmup_share": 0.1},
}

GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    # Devlin et al. 2019, appendix A.3.
    "devlin": {
        "training.examples_per_step": (16, 32),
        "training.learning_rate": (5e-5, 3e-5, 2e-5),
        "training.epochs": (2.0, 3.0, 4.0),
    },
    # google-research/bert README.md.
    "small-bert": {
        "training.examples_per_step": (8, 16, 32, 64, 128),
        "training.learning_rate": (3e-4, 1e-4, 5e-5, 3e-5),
        "training.epochs": (4.0,),
    },
}


_PRESET_IF_ZERO = ("examples_per_step", "learning_rate", "epochs")  # settings for which 0 means the preset's value

# BERT-Base's rate (Devlin et al. 2019, appendix A.3) and hidden size; smaller models need higher rates (decision 0155).
_BASE_RATE, _BASE_HIDDEN = 3e-5, 768
_MIN_RATE, _MAX_RATE = 1e-5, 1e-3
_MIN_EPOCHS, _MAX_EPOCHS = 3.0, 20.0
_MIN_STEPS = 300  # if `_MIN_EPOCHS` have fewer steps, train for more epochs, at most `_MAX_EPOCHS`


class TrainingConfig(Section):
    """Length, batch size and learning rate of the training. `preset` supplies missing values."""

    preset: Literal["auto", "devlin", "stable", "small-bert"] = Field(
        default="auto",
        description="Source of missing values: auto chooses learning rate and epochs by hidden size and number of "
        "examples; the others are published recipes: devlin for thousands of examples, stable for few examples, "
        "small-bert for models smaller than BERT-Base.",
    )
    examples_per_step: int = Field(
        default=0,
        ge=0,
        description="Examples per optimizer step over all workers (entities, questions: windows); 0: from the preset.",
    )
    learning_rate: float = Field(
        default=0.0, ge=0, description="Peak learning rate; 0: from the preset (auto: by hidden size)."
    )
    epochs: float = Field(
        default=0.0,
        ge=0,
        description="Passes over the training set; 0: from the preset (auto: by number of examples).",
    )
    steps: int = Field(default=0, ge=0, description="Optimizer steps; more than 0 overrides epochs.")
    warmup_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Fraction of the steps over which the learning rate rises linearly to its peak. Then it falls "
        "linearly to 0.",
    )
    layer_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Ratio of a layer's learning rate to the rate of the layer above it; 1: same rate for all.",
    )
    patience: int = Field(
        default=0,
        ge=0,
        description="Stop after this many successive evaluations without improvement: a better score, or the same "
        "score with a lower held-out loss. 0: never stop early.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        preset = values.get("preset", "auto")
        defaults = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        return defaults | {key: value for key, value in values.items() if key not in _PRESET_IF_ZERO or value != 0}


class FinetuneEvaluationConfig(Section):
    """Frequency of evaluations on the dev sets."""

    every_epochs: float = Field(
        default=1.0,
        gt=0,
        description="Epochs between two evaluations; 0.5 evaluates twice per epoch.",
    )


class _BaseConfig(RunConfig):
    start_from: Location = Field(
        default="",
        description="Folder or address of the checkpoint to start from: a released one, an export or a run. --from "
        "sets it, too.",
    )
    random_weights: bool = Field(
        default=False, description="Use only the architecture and tokenizer of start_from, with random weights."
    )
    max_length: int = Field(
        default=128,
        ge=8,
        description="Tokens per window, including special tokens. Longer examples are cut into several windows.",
    )
    fold: str = Field(
        default="",
        pattern=r"^([1-9]\d*/[1-9]\d*)?$",
        description="Fold of the training set to hold out and score, such as 2/5. --folds sets it.",
    )
    task: dict[str, Any] | None = Field(
        default=None,
        description="A custom task: kind is its module, such as my_package.lengths; the other keys are its settings.",
    )

    @field_validator("task")
    @classmethod
    def _check_kind(cls, task: Any) -> Any:
        if isinstance(task, dict):  # else it is a section created by `extended_class`, after this check
            try:
                check_name(str(task.get("kind", "")))
            except ValueError as error:
                known = ", ".join(built_in.kind for built_in in registry.TASKS)
                raise ValueError(f"kind: {error}. The built-in tasks are the sections {known}") from None
        return task

    def custom_modules(self) -> Iterator[tuple[Keys, str, str]]:
        if self.task is not None:
            yield ("task", "kind"), registry.__name__, str(self.task["kind"])
        for section in (built_in.kind for built_in in registry.TASKS):
            if ":" in (metric := getattr(getattr(self, section), "metric", "")):
                yield (section, "metric"), custom_metric.__name__, metric
        yield from super().custom_modules()

    def extended_class(self) -> type[Section]:
        if self.task is None:
            return type(self)
        settings_type: Any = registry.custom_task(self.task["kind"]).settings_type
        section: Any = create_model("Task", __base__=settings_type, kind=(str, ...))
        fields: Any = {"task": (section | None, None)}
        return create_model(type(self).__name__, __base__=type(self), **fields)


def _section_field(task: type[registry.Task[Any]]) -> tuple[Any, Any]:
    description = (task.settings_type.__doc__ or "").partition("\n")[0]
    return task.settings_type | None, Field(default=None, description=description)


# {name of a section: its field}, one for each task of the registry.
_SECTIONS: dict[str, Any] = {task.kind: _section_field(task) for task in registry.TASKS}
_WithTask = create_model("_WithTask", __base__=_BaseConfig, **_SECTIONS)


class FinetuneConfig(_WithTask):
    """The complete config of a fine-tuning."""

    SUBJECT = "fine-tuning run"

    training: TrainingConfig = Field(
        default=TrainingConfig(), description="Length of the training, batch size and learning rate."
    )
    evaluation: FinetuneEvaluationConfig = Field(
        default=FinetuneEvaluationConfig(), description="When to evaluate on the dev set."
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="The optimizer.")
    engine: EngineConfig = Field(default=EngineConfig(), description="Precision, ZeRO stage and micro-batches.")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(keep_last=1), description="When to save checkpoints, and how many to keep."
    )
    # Losses of small batches normally fluctuate a lot.
    guard: SpikeConfig = Field(default=SpikeConfig(spike_sigmas=0), description="Reaction to loss spikes.")

    @model_validator(mode="after")
    def _check_task(self) -> FinetuneConfig:
        sections = [name for name in TASKS if getattr(self, name) is not None]
        if len(sections) != 1:
            present = " and ".join(sections) or "none of them"
            raise ValueError(
                f"{sections[1] if sections else 'name'} - exactly one task is needed, one of {', '.join(TASKS)}; found "
                f"{present}"
            )
        if self.engine.cuda_graphs is True:
            raise ValueError("engine.cuda_graphs is for pretraining. Set it to false")
        if self.max_length > self.engine.micro_batch_tokens:
            raise ValueError(
                f"engine.micro_batch_tokens ({self.engine.micro_batch_tokens}) is smaller than max_length "
                f"({self.max_length})"
            )
        if self.training.examples_per_step < self.scheduling.workers:
            raise ValueError(
                f"training.examples_per_step ({self.training.examples_per_step}) is smaller than scheduling.workers "
                f"({self.scheduling.workers}); every worker needs an example"
            )
        return self

    @property
    def task_name(self) -> str:
        """The name of the task's section, such as classification."""
        return next(name for name in TASKS if getattr(self, name) is not None)

    @property
    def task_settings(self) -> Section:
        """The task's section."""
        if self.task is None:
            return getattr(self, self.task_name)
        values = {name: value for name, value in self.task.items() if name != "kind"}
        try:
            return registry.custom_task(self.task["kind"]).settings_type.model_validate(values)
        except ValidationError as error:
            raise InputError(f"task: {first_problem(error)}") from None

    def make_task(self, state: Mapping[str, Any] | None = None) -> registry.Task[Any]:
        """Create the task that the config describes; `state` is its saved state in a trained model."""
        settings = self.task_settings
        custom = registry.custom_task(self.task["kind"]) if self.task else None
        task = custom(settings, state) if custom else registry.make_task(settings, state)
        if self.fold:
            fold, _, num_folds = self.fold.partition("/")
            task.fold = int(fold), int(num_folds)
        return task

    def repeated_sets(self) -> list[tuple[str, str]]:
        """List (set, earlier set) for dev and test sets that are the same file or dataset split as an earlier set."""
        section = self.task_settings
        is_split = bool(getattr(section, "dataset", ""))
        origins: dict[str, str] = {}
        repeated = []
        for name in ("train", "dev", "test"):
            setting = getattr(section, name, "")
            if is_split and name == "train":
                setting = setting or "train"
            if setting:
                origin = setting if is_split else str(Path(setting).expanduser().resolve())
                if (earlier := origins.setdefault(origin, name)) != name:
                    repeated.append((name, earlier))
        return repeated

    def filled(self, hidden: int, examples: int) -> FinetuneConfig:
        """Return the config with learning rate and epochs filled in if they are missing.

        The rate is BERT-Base's, divided by the square of the ratio of the model's hidden size to BERT-Base's. Small
        training sets get more epochs, so that training has enough steps.
        """
        training = self.training
        rate = _BASE_RATE * (_BASE_HIDDEN / hidden) ** 2
        epochs = _MIN_STEPS * training.examples_per_step / max(1, examples)
        values = {
            "learning_rate": training.learning_rate or float(f"{min(max(rate, _MIN_RATE), _MAX_RATE):.1e}"),
            "epochs": training.epochs or round(min(max(epochs, _MIN_EPOCHS), _MAX_EPOCHS), 1),
        }
        return self.model_copy(update={"training": training.model_copy(update=values)})

    def total_steps(self, examples: int) -> int:
        """Return the number of optimizer steps for a training set of this many examples."""
        steps = math.ceil(examples * self.training.epochs / self.training.examples_per_step)
        return self.training.steps or max(1, steps)

    def phase(self, examples: int) -> PhaseConfig:
        """Return the schedule for a training set of this many examples, as a phase of pretraining."""
        training, steps = self.training, self.total_steps(examples)
        return PhaseConfig(
            sequence_length=self.max_length,
            global_sequences=training.examples_per_step,
            steps=steps,
            peak_learning_rate=training.learning_rate,
            warmup_steps=round(training.warmup_share * steps),
        )

    def evaluate_every_steps(self, examples: int) -> int:
        """Return the optimizer steps between two evaluations, at least 1, for a training set of this many examples."""
        return math.ceil(examples * self.evaluation.every_epochs / self.training.examples_per_step)


def load_config(
    config: settings.AnyConfig, overrides: settings.Overrides = (), *, imports: bool = False
) -> FinetuneConfig:
    """Load a fine-tuning config with overrides, as `settings.load` does."""
    return settings.load(config, FinetuneConfig, overrides, imports=imports)


def config_type(path: Path | str) -> type[RunConfig]:
    """Return the class of a config: `FinetuneConfig` if it has a task section, else `PretrainConfig`."""
    return FinetuneConfig if settings.top_level_keys(path) & set(TASKS) else PretrainConfig


# Settings that may change when a run is resumed.
FREE_IN_FINETUNING = (*FREE_IN_ALL_RUNS, "start_from", "training.patience")


def forbidden_changes(old: FinetuneConfig, new: FinetuneConfig, _done: int = 0) -> list[str]:
    """List settings that differ although a resumed run must keep them, as "name (old value -> new value)"."""
    return settings.differences(old, keep_precision(new, old), ignore=FREE_IN_FINETUNING)
