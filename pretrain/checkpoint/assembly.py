"""Assembles a model from a file's tensors, and maps them to parameters (invariant 6 in docs/invariants.md).

`ours` is the name of one of our parameters, or a `StackedName`, and `theirs` is the family's name for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.checkpoint.layouts import Architecture, StackedName, TaskHead, encoder_shapes, task_head
from pretrain.checkpoint.mapping import LEFT_OUT, MappedTensor
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig
from pretrain.model.norms import get_norm
from pretrain.model.parameters import head_parameters

# Tensors of all other types are quantized: their values are meaningless without the scales in other tensors.
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Shapes = dict[str, tuple[int | None, ...]]
"""Name of our parameter -> its shape; None allows any size."""


@dataclass(frozen=True)
class ReleasedModel:
    """A released model in memory; all tensors fp32.

    Attributes:
        family: a key of `layouts.LAYOUTS`.
        model: the shape of the encoder.
        backbone: state dict of `pretrain.model.encoder.Encoder`, always complete.
        head: the tensors of a task's head that are in the file: dense_weight [H, H], dense_bias [H], norm_weight [H],
            norm_bias [H] (its first layer: BERT's pooler, ModernBERT's prediction head), out_weight [labels, H] and
            out_bias [labels].
        config: config.json as read; for our runs, {} or only the field with the pooling.
        mapping: for each tensor in the file, the parameter that it fills.
        token_types: number of token types that the model supports; if it is below 2, every token must have type 0.
        pretraining: parameters of the pretraining heads (`pretrain.model.heads.Heads`) that are complete in the file.
        sentence_files: the files that sentence-transformers needs, to write next to exports; name -> content.
    """

    family: str
    model: ModelConfig
    backbone: dict[str, Tensor]
    head: dict[str, Tensor]
    config: dict[str, Any]
    mapping: tuple[MappedTensor, ...]
    token_types: int
    pretraining: dict[str, Tensor]
    sentence_files: dict[str, Any] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        """Return the number of rows of the word embeddings, padding included."""
        return len(self.backbone["embeddings.word"])

    def prediction_state(self, *, next_sentence: bool = False) -> tuple[dict[str, Tensor], str]:
        """Return (state dict of `pretrain.model.heads.PretrainingModel`, name of its first missing parameter or "")."""
        parameters = head_parameters(self.model, self.vocabulary_size, next_sentence)
        needed = [f"heads.{parameter.name}" for parameter in parameters]
        missing = next((name for name in needed if name not in self.pretraining), "")
        heads = {name: self.pretraining[name] for name in needed if name in self.pretraining}
        return {**self.backbone, **heads}, missing

    def task_head(self, purpose: str) -> TaskHead:
        """Return the family's head for a task ("sequence", "tokens" or "spans")."""
        return task_head(self.family, self.config, self.model, purpose)


def assemble(
    tensors: Mapping[str, Tensor], arch: Architecture, config: dict[str, Any], *, where: str = "checkpoint"
) -> ReleasedModel:
    """Assemble the model from a family's `tensors`, by the family's names.

    The backbone must be complete. A head that is incomplete or has another shape is left out entirely, and so is a
    masked-language-modeling head whose decoder differs from the word embeddings although the config ties them.

    Raises:
        InputError: the backbone is incomplete; `where`, the name of the file, is for the message.
    """
    layout, model = arch.layout, arch.model
    heads = _head_shapes(arch, task_head(layout.family, config, model, "sequence"))
    source = _Source(tensors, arch, heads, where)
    if prefix := _wrapper_prefix(source):
        stripped = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        if len(stripped) == len(tensors):
            released = assemble(stripped, arch, config, where=where)
            mapping = (mapped._replace(name=name) for mapped, name in zip(released.mapping, tensors, strict=True))
            return replace(released, mapping=tuple(mapping))
    backbone = _backbone(source, arch)
    head_state: dict[str, Tensor] = {}
    parameter_of = {chunk.name: ours.name for ours, chunk in source.chunks.items() if ours.name in backbone}
    reasons: dict[str, str] = {}
    for shapes in heads:
        names = {ours: source.chunks[StackedName(ours)].name for ours in shapes if StackedName(ours) in source.chunks}
        if not names:
            continue
        head = {ours: source.read(StackedName(ours)).contiguous() for ours in names}
        reason = _head_defect(head, shapes, source, backbone)
        if reason:
            reasons |= dict.fromkeys(names.values(), f"{LEFT_OUT}{reason}")
        else:
            head_state |= head
            parameter_of = {**{name: ours for ours, name in names.items()}, **parameter_of}
    targets = {name: f"{LEFT_OUT}{layout.skip_reason(name)}" for name in tensors} | reasons | parameter_of
    for name in tensors:
        tied = layout.tied_parameter(name, model)
        if tied and name not in parameter_of:
            has_head = "heads.mlm_transform_weight" in head_state or "heads.mlm_bias" in head_state
            targets[name] = f"{LEFT_OUT}tied to {tied}" if has_head else f"{LEFT_OUT}its head is not read"
    return ReleasedModel(
        family=layout.family,
        model=model,
        backbone=backbone,
        head={ours.removeprefix("head."): tensor for ours, tensor in head_state.items() if ours.startswith("head.")},
        config=config,
        mapping=tuple(MappedTensor(name, tuple(tensor.shape), targets[name]) for name, tensor in tensors.items()),
        token_types=arch.token_types,
        pretraining=_in_module_order(head_state),
    )


# ---- locating our parameters in the file


class _Chunk(NamedTuple):
    """Part `index` of a tensor in the file, which consists of `total` equal parts along the first axis."""

    name: str
    index: int = 0
    total: int = 1


class _Source:
    """The tensors of a file, and the location of each of our parameters in them."""

    def __init__(self, tensors: Mapping[str, Tensor], arch: Architecture, heads: list[Shapes], where: str) -> None:
        self.tensors, self.layout, self.model, self.where = tensors, arch.layout, arch.model, where
        parameters = self._parameters_by_name(heads)
        self.chunks: dict[StackedName, _Chunk] = {}
        for name in tensors:
            names = self.layout.current_names(name)
            for index, current in enumerate(names):
                for ours in parameters.get(current, ()):
                    self._locate(ours, _Chunk(name, index, len(names)))
        self._locate_tied()
        self._reject_extra_layers(parameters)

    def read(self, ours: StackedName) -> Tensor:
        """Return the values of one parameter, or of one of its stacked parts, fp32."""
        name, index, total = self.chunks[ours]
        whole = self.tensors[name]
        if whole.dtype not in _FLOAT_TYPES:
            raise InputError(
                f"{self.where}: {name} is {whole.dtype}; quantized weights are not supported. Use the weights in fp32."
            )
        # The minimum and maximum are NaN if any value is; they take a tenth of the time of `isfinite`.
        if whole.numel() and not torch.stack(whole.aminmax()).isfinite().all():
            raise InputError(f"{self.where}: {name} has values that are not finite (NaN). Use an intact checkpoint.")
        return (whole if total == 1 else whole.chunk(total)[index]).float()

    def _parameters_by_name(self, heads: list[Shapes]) -> dict[str, list[StackedName]]:
        """Map each current name to the parameters that it fills: several if a task's head shares a pretraining head."""
        parameters: dict[str, list[StackedName]] = {}
        for name in [*encoder_shapes(self.model, 0), *(name for shapes in heads for name in shapes)]:
            for purpose in self.layout.out_modules if name.startswith("head.out") else ("sequence",):
                for part, theirs in enumerate(self.layout.names(name, purpose)):
                    if StackedName(name, part) not in parameters.setdefault(theirs, []):
                        parameters[theirs].append(StackedName(name, part))
        return parameters

    def _locate(self, ours: StackedName, chunk: _Chunk) -> None:
        if ours in self.chunks:
            raise InputError(
                f"{self.where}: {chunk.name} and {self.chunks[ours].name} both fill {ours.name}. Remove one of them."
            )
        self.chunks[ours] = chunk

    def _locate_tied(self) -> None:
        """Locate parameters that the file has only as the decoder's tensors, and the bias of an untied decoder."""
        for name in self.tensors:
            tied = self.layout.tied_parameter(name, self.model)
            if tied is not None and (StackedName(tied) not in self.chunks or not self.model.tied_decoder):
                self.chunks[StackedName(tied)] = _Chunk(name)

    def _reject_extra_layers(self, known_names: Mapping[str, Any]) -> None:
        layers = self.model.layers
        for name in sorted(self.tensors):
            index = self.layout.layer_index(name)
            if index is None or index < layers:
                continue
            names = self.layout.current_names(name)
            if any(current.replace(f".{index}.", f".{layers - 1}.", 1) in known_names for current in names):
                raise InputError(
                    f"{self.where}: has {name}, beyond the {layers} layers of its config. "
                    "Use the config.json that belongs to these weights."
                )


def _wrapper_prefix(source: _Source) -> str:
    """Return the prefix that a wrapper adds to all names of the encoder, such as "0.auto_model."; "" without one."""
    if StackedName("embeddings.word") in source.chunks:
        return ""
    (full,) = source.layout.names("embeddings.word")
    for known in (full, *(full[full.index(bare) :] for bare in source.layout.bare_prefixes if bare in full)):
        if name := next((name for name in source.tensors if name.endswith(f".{known}")), ""):
            return name.removesuffix(known)
    return ""


# ---- the backbone


def _backbone(source: _Source, arch: Architecture) -> dict[str, Tensor]:
    """Return the state dict of the encoder; every tensor must exist in the expected shape."""
    word = source.chunks.get(StackedName("embeddings.word"))
    rows = len(source.tensors[word.name]) if word else 0  # padding rows included
    state: dict[str, Tensor] = {}
    for ours, shape in encoder_shapes(arch.model, rows).items():
        if ours == "embeddings.token_type":
            state[ours] = _token_types(source, shape, arch.token_types)
        elif ours == "embeddings.position":
            padded_shape = (shape[0] + arch.first_position, *shape[1:])
            state[ours] = _gather(source, ours, padded_shape)[arch.first_position :]
        else:
            state[ours] = _gather(source, ours, shape)
    return state


def _token_types(source: _Source, shape: tuple[int, ...], rows: int) -> Tensor:
    """Return the token-type embeddings [2, E]: the file's two rows, its single row twice, or zeros if it has none."""
    if rows == 0:
        return torch.zeros(shape)
    table = _gather(source, "embeddings.token_type", (rows, *shape[1:]))
    return table.expand(2, -1).contiguous()


def _gather(source: _Source, ours: str, shape: tuple[int, ...]) -> Tensor:
    """Return one of our parameters in fp32; if the file splits it, the parts are stacked."""
    parts = []
    theirs = source.layout.names(ours)
    part_shape = [shape[0] // len(theirs), *shape[1:]]
    for part, name in enumerate(theirs):
        if StackedName(ours, part) not in source.chunks:
            examples = ", ".join(sorted(source.tensors)[:2])
            raise InputError(f"{source.where}: {name} is missing; the file has {examples}, ... Use complete weights.")
        name, _, total = source.chunks[StackedName(ours, part)]
        whole = source.tensors[name]
        expected = [part_shape[0] * total, *part_shape[1:]]
        if list(whole.shape) != expected:
            raise InputError(
                f"{source.where}: {name} has the shape {list(whole.shape)}; expected {expected}. "
                "The weights do not belong to this config."
            )
        parts.append(source.read(StackedName(ours, part)))
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


# ---- the heads


def _head_shapes(arch: Architecture, head: TaskHead) -> list[Shapes]:
    """Return the shapes of each head's parameters. `head` is the task head for sequences, which has the most layers."""
    hidden, layout = arch.model.hidden, arch.layout
    norm = {f"head.norm_{kind}": (hidden,) for kind in get_norm(head.norm).parameters} if head.norm else {}
    bias: Shapes = {"head.dense_bias": (hidden,)} if head.bias else {}
    pretraining: Shapes = {
        f"heads.{parameter.name}": parameter.shape
        # The size of the vocabulary is not known before the word embeddings are read.
        for parameter in head_parameters(arch.model, 0, layout.next_sentence)
    }
    pretraining |= {
        name: (None, *pretraining[name][1:]) for name in ("heads.mlm_bias", "heads.decoder") if name in pretraining
    }
    return [
        {"head.dense_weight": (hidden, hidden), **bias, **norm},
        {"head.out_weight": (None, hidden), "head.out_bias": (None,)},
        {name: shape for name, shape in pretraining.items() if name.startswith(("heads.pooler_", "heads.nsp_"))},
        {name: shape for name, shape in pretraining.items() if name.startswith(("heads.mlm_", "heads.decoder"))},
    ]


def _head_defect(head: Mapping[str, Tensor], shapes: Shapes, source: _Source, backbone: Mapping[str, Tensor]) -> str:
    """Return the reason why a head cannot be filled with the tensors of the file; "" if it can."""
    rows = len(backbone["embeddings.word"])
    for ours, shape in shapes.items():
        if ours not in head:
            return f"{source.layout.names(ours)[0]} is missing"
        actual = head[ours].shape
        if ours in ("heads.mlm_bias", "heads.decoder"):
            shape = (rows, *shape[1:])
        if len(actual) != len(shape) or any(size not in (None, n) for n, size in zip(actual, shape, strict=True)):
            return f"{ours} would have the shape {list(actual)}"
    if "head.out_weight" in head and len(head["head.out_weight"]) != len(head["head.out_bias"]):
        return "its weight and bias have different numbers of rows"
    if any(ours.startswith("heads.mlm_") for ours in shapes):
        parameters = {**backbone, **head}
        for name, tensor in source.tensors.items():
            tied = source.layout.tied_parameter(name, source.model)
            if tied in parameters and not torch.equal(tensor.float(), parameters[tied]):
                return f"{name} differs from {tied}; an untied decoder needs tie_word_embeddings: false in config.json"
    return ""


def _in_module_order(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters in the order of `pretrain.model.heads.Heads`: the next-sentence head comes first."""
    nsp_head = {name: tensor for name, tensor in state.items() if name.startswith(("heads.pooler_", "heads.nsp_"))}
    return {**nsp_head, **{name: state[name] for name in state if name.startswith(("heads.mlm_", "heads.decoder"))}}
