"""Distillation: learning from a teacher's predictions and hidden states, in addition to masked language modeling.

It follows Sanh et al. 2019, "DistilBERT", arXiv:1910.01108, section 2. Shape letters: T tokens, S sequences, K masked
tokens, H hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.batches.batch import StepBatch
from pretrain.common.errors import InputError
from pretrain.common.records import Metric
from pretrain.config import DistillationConfig, ModelConfig, PretrainConfig
from pretrain.model import cost
from pretrain.model.heads import PretrainingBatch, PretrainingModel, nsp_logits, pool
from pretrain.model.kernels.fused_cross_entropy import SoftTargets, soft_target_losses
from pretrain.objectives.masked import MaskedTokens
from pretrain.objectives.objective import FrozenModel, ReadFrozen

# Model settings that may differ between a teacher and a student that is initialized from its layers.
_MAY_DIFFER = (
    "family",
    "size",
    "layers",
    "max_positions",
    "hidden_dropout",
    "attention_dropout",
    "init_std",
    "attention_init",
)
# DistilBERT's values (from transformers' examples/research_projects/distillation/README.md).
TEMPERATURE, SOFT_WEIGHT, MLM_WEIGHT, COSINE_WEIGHT = 2.0, 5.0, 2.0, 1.0
# Model settings for which 0 means "as another setting" -> that setting.
_FALLBACK_SETTINGS = {"embedding": "hidden", "kv_heads": "heads"}


class Distillation(MaskedTokens):
    """Distillation; `build` and `check` raise `InputError` if the teacher is incompatible with the student."""

    setting = "distillation.teacher"
    frozen_role = "teacher"
    metrics: ClassVar[Mapping[str, Metric]] = {
        **MaskedTokens.metrics,
        "distil_loss": Metric(
            "nats",
            "KL divergence between teacher and student per masked token, both at the distillation temperature T, "
            "times T²; mean since the last record.",
            "Divergence from the teacher",
            "distil loss",
            live=True,
        ),
        "cosine_loss": Metric(
            "",
            "1 minus the cosine similarity of the student's and the teacher's last hidden states; mean over tokens.",
            "Cosine distance from the teacher",
        ),
    }
    model: DistillingModel

    _initial_weights: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def settings(self) -> DistillationConfig:
        return self.config.distillation

    def check(self, read: ReadFrozen) -> None:
        teacher = read(self.config, self.setting)
        if self.settings.initialize:
            student_weights(self.config, teacher, student_shapes(self.config, teacher))

    def build(self, read: ReadFrozen) -> None:
        teacher = read(self.config, self.setting)
        self.frozen_config = teacher.model
        self.identity = {"teacher": {"folder": teacher.folder, "fingerprint": teacher.fingerprint}}
        self.model = DistillingModel(
            self.config.model,
            self.vocabulary,
            self.config.pairs.has_classifier,
            teacher=_build_teacher(teacher, compile=self.forward_options["compile"]),
            **self.forward_options,
        )
        if self.settings.initialize:
            state = self.model.state_dict()
            shapes = {name: tensor.shape for name, tensor in state.items()}
            self._initial_weights = {**state, **student_weights(self.config, teacher, shapes)}

    @property
    def _has_cosine_loss(self) -> bool:
        """Return whether there is a cosine loss, which requires equal widths; true before the teacher is read."""
        return self.frozen_config is None or self.frozen_config.hidden == self.config.model.hidden

    def to(self, device: torch.device, dtype: torch.dtype) -> None:
        self.model.teacher.to(device=device, dtype=dtype)

    def initial_weights(self) -> Mapping[str, Tensor]:
        weights, self._initial_weights = self._initial_weights, {}  # frees the memory after use
        return weights

    def loss_weights(self, step: StepBatch) -> tuple[float, ...]:
        # `prediction_loss` already contains the weights of its two losses, which are both means over masked tokens.
        return 1 / max(step.masked, 1), 1 / max(step.labeled, 1), COSINE_WEIGHT / step.tokens

    def loss(self, output: DistillationLosses, weights: Sequence[float] | Tensor) -> Tensor:
        return output.prediction_loss * weights[0] + output.nsp_loss * weights[1] + output.cosine_loss * weights[2]

    def totals(self, output: DistillationLosses) -> Tensor:
        return torch.stack(list(output[1:]))

    def counts(self, step: StepBatch) -> tuple[float, ...]:
        return step.masked, step.labeled, step.tokens

    def means(self, totals: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        mlm_loss, nsp_loss, mlm_correct, nsp_correct, soft_loss, cosine_loss = totals
        masked, labeled, tokens = (max(count, 1) for count in counts)
        means = super().means([mlm_loss, nsp_loss, mlm_correct, nsp_correct], [masked, labeled])
        means["distil_loss"] = soft_loss / masked
        if self._has_cosine_loss:
            means["cosine_loss"] = cosine_loss / tokens
        loss = SOFT_WEIGHT * soft_loss / masked + MLM_WEIGHT * mlm_loss / masked
        return {**means, "loss": loss + (COSINE_WEIGHT * cosine_loss / tokens + nsp_loss / labeled)}

    def useful_flops(self, lengths: Sequence[float], masked: float) -> float:  # FLOPs for all positions
        return super().useful_flops(lengths, masked) + self._teacher_flops(lengths, masked)

    def model_flops(self, lengths: Sequence[float], masked: float) -> float:  # FLOPs that MFU counts
        return super().model_flops(lengths, masked) + self._teacher_flops(lengths, masked)

    def _teacher_flops(self, lengths: Sequence[float], masked: float) -> float:
        """Return the FLOPs of the teacher's forward pass: a third of the FLOPs of a forward and backward pass."""
        teacher = self.frozen_config
        if teacher is None:
            return 0.0
        queries = sum(lengths) if self._has_cosine_loss else masked
        return (cost.encoder_flops(teacher, lengths, queries) + cost.head_flops(teacher, self.vocabulary, masked)) / 3

    def last_rows(self, tokens: float, sequences: float, masked: float) -> list[float]:  # positions in the last layer
        needs_all_tokens = self._has_cosine_loss or self.config.pairs.has_classifier
        return [tokens if needs_all_tokens else masked]


OBJECTIVE = Distillation


# ---- the model


class DistillationLosses(NamedTuple):
    """Sums over the micro-batch, fp32 scalars; `Objective` divides them by global counts (docs/invariants.md).

    Only `prediction_loss`, `nsp_loss` and `cosine_loss` are differentiable.
    """

    prediction_loss: Tensor  # SOFT_WEIGHT * soft_loss + MLM_WEIGHT * mlm_loss
    mlm_loss: Tensor  # cross-entropy of the masked tokens, in nats
    nsp_loss: Tensor  # cross-entropy of the sentence-pair classifier, in nats
    mlm_correct: Tensor  # number of masked tokens that are predicted correctly
    nsp_correct: Tensor  # number of sentence pairs that are classified correctly
    soft_loss: Tensor  # KL divergence from the teacher's predictions, in nats
    cosine_loss: Tensor  # 1 - cosine similarity of the two models' last hidden states, over all tokens


class DistillingModel(PretrainingModel):
    """The student, with a teacher that is neither a submodule nor part of checkpoints.

    Args:
        arguments, options: arguments of `PretrainingModel` for the student.
        teacher: a model with the same vocabulary; it is not trained and runs without dropout.
    """

    def __init__(self, *arguments: Any, teacher: PretrainingModel, **options: bool) -> None:
        super().__init__(*arguments, **options)
        # A tuple hides the teacher from torch; otherwise DeepSpeed would partition it, and `parameters` would list it.
        self._teachers = (teacher.eval().requires_grad_(False),)

    @property
    def teacher(self) -> PretrainingModel:
        return self._teachers[0]

    def forward(self, batch: PretrainingBatch) -> DistillationLosses:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return losses and correct predictions of one micro-batch; encode all tokens only if a loss needs them."""
        rows_K, has_cosine = batch.masked_rows, self.teacher.shape.hidden == self.shape.hidden  # `shape`: ModelConfig
        needs_all_tokens = has_cosine or self.heads.next_sentence
        hidden = self.encode(batch) if needs_all_tokens else self.encode(batch, rows_K)
        with torch.no_grad():
            teacher_hidden = self.teacher.encode(batch) if has_cosine else self.teacher.encode(batch, rows_K)
        soft_targets = self._soft_targets(teacher_hidden.index_select(0, rows_K) if has_cosine else teacher_hidden)
        prediction_loss, mlm_loss, soft_loss, mlm_correct = soft_target_losses(
            self.heads.transform(hidden.index_select(0, rows_K) if needs_all_tokens else hidden, self.fused),
            self._decoder(),
            self.heads.decoder_bias,
            batch.masked_labels,
            soft_targets,
            self.fused,
        )
        zero = mlm_loss.new_zeros(())
        cosine_loss = zero
        if has_cosine:
            cosine_loss = (1 - F.cosine_similarity(hidden.float(), teacher_hidden.float(), dim=-1)).sum()
        nsp_loss, nsp_correct = self._pair_loss(hidden, batch) if self.heads.next_sentence else (zero, zero)
        return DistillationLosses(prediction_loss, mlm_loss, nsp_loss, mlm_correct, nsp_correct, soft_loss, cosine_loss)

    @torch.no_grad()
    def _soft_targets(self, hidden_KH: Tensor) -> SoftTargets:
        teacher = self.teacher
        return SoftTargets(
            teacher.heads.transform(hidden_KH, teacher.fused),
            teacher._decoder(),
            teacher.heads.decoder_bias,
            TEMPERATURE,
            SOFT_WEIGHT,
            MLM_WEIGHT,
        )

    def _pair_loss(self, hidden_TH: Tensor, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the loss and the number of correct predictions of the sentence-pair classifier."""
        pooled_SH = pool(hidden_TH, batch.cu_seqlens, self.shape.pooling)
        logits_S2 = nsp_logits(pooled_SH, self.heads.nsp_weights()).float()
        loss = F.cross_entropy(logits_S2, batch.nsp_labels, reduction="sum")
        return loss, (logits_S2.argmax(-1) == batch.nsp_labels).sum().float()


def evenly_spaced_layers(student_layers: int, teacher_layers: int) -> tuple[int, ...]:
    """Return the index of the teacher's layer for each layer of the student, evenly spaced from first to last.

    For 6 of 12 layers, these are DistilBERT's 0, 2, 4, 7, 9, 11 (transformers'
    examples/research_projects/distillation/scripts/extract_distilbert.py).
    """
    if student_layers == 1:
        return (0,)
    return tuple(round(index * (teacher_layers - 1) / (student_layers - 1)) for index in range(student_layers))


def _build_teacher(teacher: FrozenModel, *, compile: bool) -> PretrainingModel:
    """Build the teacher with its weights, without copying them or drawing random numbers."""
    with torch.device("meta"):
        vocabulary_size = len(teacher.state["embeddings.word"])
        model = PretrainingModel(teacher.model, vocabulary_size, teacher.next_sentence, compile=compile)
    model.load_state_dict(teacher.state, assign=True)
    return model


# ---- initial weights of a student


def student_shapes(config: PretrainConfig, teacher: FrozenModel) -> dict[str, torch.Size]:
    """Return the shapes of the parameters, by name, of a student with the teacher's pretraining heads."""
    # attention_init `neighbors` reads bias values, which meta tensors lack.
    model = config.model.model_copy(update={"attention_init": "normal"})
    with torch.device("meta"):
        student = PretrainingModel(model, len(teacher.state["embeddings.word"]), teacher.next_sentence)
    return {name: tensor.shape for name, tensor in student.state_dict().items()}


def student_weights(
    config: PretrainConfig, teacher: FrozenModel, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """Return the initial weights of a student: the teacher's embeddings, heads and selected layers.

    Args:
        config: the config of the student's run.
        teacher: the model to start from.
        shapes: the shapes of the student's parameters, by name; the result omits heads that the teacher lacks.

    Raises:
        InputError: the architectures or widths differ, or the teacher lacks a layer.
    """
    _check_same_architecture(config, teacher)
    layers = config.distillation.layers or evenly_spaced_layers(config.model.layers, teacher.model.layers)
    if max(layers) >= teacher.model.layers:
        raise InputError(
            f"distillation.layers: {list(layers)}, but {teacher.folder} has {teacher.model.layers} layers, numbered "
            f"from 0. List only numbers below {teacher.model.layers}."
        )
    state: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        weight = teacher.state.get(_teacher_name(name, layers))
        if weight is None:
            if name.startswith("heads."):
                continue
            raise InputError(
                f"distillation.layers: the student needs {name}, but layer {layers[0]} of {teacher.folder} lacks it. "
                "Start the list with 0, the teacher's first layer."
            )
        if name == "embeddings.position":
            weight = weight[: config.model.max_positions]
        if tuple(weight.shape) != tuple(shape):
            raise InputError(
                f"distillation.teacher: {teacher.folder}: {name} has shape {list(weight.shape)}, but "
                f"{list(shape)} in the student. Give the student that shape, or set distillation.initialize: false."
            )
        state[name] = weight
    return state


def _teacher_name(name: str, layers: Sequence[int]) -> str:
    """Return the name of the teacher's parameter that initializes the student's parameter `name`."""
    module, _, child = name.partition(".")
    if module != "layers":
        return name
    index, _, parameter = child.partition(".")
    return f"layers.{layers[int(index)]}.{parameter}" if int(index) < len(layers) else ""


def _setting_value(model: ModelConfig, name: str) -> Any:
    """Return the value of a model setting, or of its fallback setting if it is 0."""
    return getattr(model, name) or getattr(model, _FALLBACK_SETTINGS.get(name, name))


def _check_same_architecture(config: PretrainConfig, teacher: FrozenModel) -> None:
    """Raise `InputError` for the first model setting with which the student cannot start from the teacher's layers."""
    at_most_the_teachers = ("layers", "max_positions") if config.model.positions == "learned" else ("layers",)
    for name in ModelConfig.model_fields:
        student_value, teacher_value = (_setting_value(model, name) for model in (config.model, teacher.model))
        if name not in _MAY_DIFFER and student_value != teacher_value:
            raise InputError(
                f"model.{name}: {student_value!r}, but the teacher ({teacher.folder}) has {teacher_value!r}, and the "
                "student starts from its layers. Use the teacher's value, or distillation.initialize: false."
            )
        if name in at_most_the_teachers and student_value > teacher_value:
            raise InputError(
                f"model.{name}: {student_value}, but the teacher ({teacher.folder}) has only {teacher_value}. Lower "
                f"model.{name}, or set distillation.initialize: false."
            )
