"""A model put together from the tensors of a released file by their names, with a record of each (invariant 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.layouts import KeyMapping, ReleasedFacts, StackedName
from pretrain.checkpoint.mapping import LEFT_OUT, MappedTensor
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig
from pretrain.model.encoder import Encoder
from pretrain.model.parameters import head_parameters

_REFUSAL = "A partly filled model is refused; use a whole checkpoint."


@dataclass(frozen=True)
class Released:
    """A model as it was read; all tensors fp32.

    Attributes:
        family: "bert", "distilbert", "roberta" or "electra".
        model: the shape of the encoder.
        backbone: state of `pretrain.model.encoder.Encoder`, always whole.
        head: those of dense_weight [H, H], dense_bias [H] (BERT's pooler, DistilBERT's pre_classifier, the
            classifier.dense of RoBERTa and ELECTRA), out_weight [labels, H] and out_bias [labels] that the file has.
        config: config.json as read; {} for TensorFlow checkpoints and runs of ours.
        mapping: one entry for each tensor in the file.
        token_types: how many segments the model knows: 2, or less, and then every token must have type 0.
        pretraining: state of those `pretrain.model.heads.Heads` that the file has whole.
    """

    family: str
    model: ModelConfig
    backbone: dict[str, Tensor]
    head: dict[str, Tensor]
    config: dict[str, Any]
    mapping: tuple[MappedTensor, ...]
    token_types: int = 2
    pretraining: dict[str, Tensor] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        """Rows of the word embeddings, padding included."""
        return len(self.backbone["embeddings.word"])


def assemble(
    tensors: Mapping[str, Tensor], facts: ReleasedFacts, config: dict[str, Any], *, where: str = "checkpoint"
) -> Released:
    """The model of a family's tensors by their names.

    The backbone must be whole. A head that is partly missing or has another shape is left out as a whole, and so is a
    masked-language-modelling head whose decoder is not the word embeddings.

    Raises:
        InputError: the backbone is not whole; `where` is the file for the message.
    """
    layout, model = facts.layout, facts.model
    places = _places(tensors, layout, where)
    backbone = _backbone(tensors, facts, places, where)
    targets = {name: f"{LEFT_OUT}{layout.why_left_out(name)}" for name in tensors}
    targets |= {name: place.name for place, name in places.items()}
    parts: dict[str, Tensor] = {}
    for shapes in _heads(model, len(backbone["embeddings.word"])):
        names = {ours: places[StackedName(ours)] for ours in shapes if StackedName(ours) in places}
        if not names:
            continue
        head = {ours: tensors[name].float().contiguous() for ours, name in names.items()}
        reason = _why_no_head(head, shapes, tensors, backbone, layout)
        if reason:
            targets |= dict.fromkeys(names.values(), f"{LEFT_OUT}{reason}")
        else:
            parts |= head
    for name in tensors:
        tied = layout.tied(name)
        if tied and targets[name] != tied:
            targets[name] = f"{LEFT_OUT}tied to {tied}"
            if "heads.mlm_bias" not in parts:
                targets[name] = f"{LEFT_OUT}its head is not read"
    return Released(
        family=layout.family,
        model=model,
        backbone=backbone,
        head={ours.removeprefix("head."): tensor for ours, tensor in parts.items() if ours.startswith("head.")},
        config=config,
        mapping=tuple(MappedTensor(name, tuple(tensor.shape), targets[name]) for name, tensor in tensors.items()),
        token_types=facts.token_types,
        pretraining=_pretraining(parts),
    )


# ---- the backbone


def _places(tensors: Mapping[str, Tensor], layout: KeyMapping, where: str) -> dict[StackedName, str]:
    """The name of the tensor that fills each place."""
    places: dict[StackedName, str] = {}
    for name in tensors:
        place = layout.place(name)
        if place is None:
            continue
        if place in places:
            raise InputError(f"{where}: {name} and {places[place]} both are {place.name}. Remove one of them.")
        places[place] = name
    # A file may have either of two tied tensors.
    for name in tensors:
        tied = layout.tied(name)
        if tied is not None and StackedName(tied) not in places:
            places[StackedName(tied)] = name
    return places


def _backbone(
    tensors: Mapping[str, Tensor], facts: ReleasedFacts, places: Mapping[StackedName, str], where: str
) -> dict[str, Tensor]:
    """State of the encoder; every tensor must be there in the right shape, and there must be no further layers."""
    word = places.get(StackedName("embeddings.word"))
    rows = len(tensors[word]) if word else 0  # may be more than the tokenizer's entries
    with torch.device("meta"):
        expected = Encoder(facts.model, rows).state_dict()
    beyond = [place for place in places if not place.name.startswith("head") and place.name not in expected]
    if beyond:
        raise InputError(
            f"{where}: has {places[min(beyond)]}, beyond the {facts.model.layers} layers of its config. "
            "Use the config.json that belongs to these weights."
        )
    state: dict[str, Tensor] = {}
    for ours, like in expected.items():
        if ours == "embeddings.token_type":
            state[ours] = _token_types(like, tensors, facts, places, where)
        elif ours == "embeddings.position":
            longer = like.new_empty(len(like) + facts.first_position, like.shape[1])
            state[ours] = _gather(ours, longer, tensors, facts.layout, places, where)[facts.first_position :]
        else:
            state[ours] = _gather(ours, like, tensors, facts.layout, places, where)
    return state


def _token_types(
    like: Tensor, tensors: Mapping[str, Tensor], facts: ReleasedFacts, places: Mapping[StackedName, str], where: str
) -> Tensor:
    """[2, E]: the rows of the file, a single one twice; zeros if the family has none."""
    if facts.token_types == 0:
        return torch.zeros(like.shape)
    table = _gather("embeddings.token_type", like[: facts.token_types], tensors, facts.layout, places, where)
    return table.expand(2, -1).contiguous()


def _gather(
    ours: str,
    like: Tensor,
    tensors: Mapping[str, Tensor],
    layout: KeyMapping,
    places: Mapping[StackedName, str],
    where: str,
) -> Tensor:
    """One parameter of ours, its parts stacked, fp32."""
    parts = []
    theirs = layout.names(ours)
    for part, (name, meta) in enumerate(zip(theirs, like.chunk(len(theirs)), strict=True)):
        if StackedName(ours, part) not in places:
            raise InputError(f"{where}: {name} is missing. {_REFUSAL}")
        name = places[StackedName(ours, part)]
        tensor = tensors[name]
        if tensor.shape != meta.shape:
            raise InputError(
                f"{where}: {name} has the shape {list(tensor.shape)}; expected {list(meta.shape)}. "
                "The weights do not belong to this config."
            )
        if not tensor.is_floating_point():
            raise InputError(
                f"{where}: {name} is {tensor.dtype}; quantised weights are not supported. Give the weights in fp32."
            )
        parts.append(tensor.float())
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


# ---- the heads


def _heads(model: ModelConfig, vocabulary: int) -> list[dict[str, tuple[int | None, ...]]]:
    """The shape of each head's parameters; None is any number."""
    hidden = model.hidden
    shapes: dict[str, tuple[int | None, ...]] = {
        f"heads.{parameter.name}": parameter.shape for parameter in head_parameters(model, vocabulary, True)
    }
    return [
        {"head.dense_weight": (hidden, hidden), "head.dense_bias": (hidden,)},
        {"head.out_weight": (None, hidden), "head.out_bias": (None,)},
        *({name: shapes[name] for name in shapes if name.startswith(head)} for head in ("heads.nsp_", "heads.mlm_")),
    ]


def _why_no_head(
    head: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int | None, ...]],
    tensors: Mapping[str, Tensor],
    backbone: Mapping[str, Tensor],
    layout: KeyMapping,
) -> str:
    """Why a head cannot be filled with the tensors that there are; "" if it can."""
    for ours, shape in shapes.items():
        if ours not in head:
            return f"{layout.names(ours)[0]} is missing"
        actual = head[ours].shape
        if len(actual) != len(shape) or any(b is not None and a != b for a, b in zip(actual, shape, strict=True)):
            return f"{ours} would be {list(actual)}"
    if "head.out_weight" in head and len(head["head.out_weight"]) != len(head["head.out_bias"]):
        return "its rows and biases differ in number"
    if "heads.mlm_bias" in head:
        for name, tensor in tensors.items():
            tied = layout.tied(name)
            of = backbone.get(tied or "", head["heads.mlm_bias"])
            if tied and not torch.equal(tensor.float(), of):
                return f"{name} differs from {tied}; an untied decoder is not supported"
    return ""


def _pretraining(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State of `Heads`, in its order; the next-sentence head needs the pooler."""
    heads = {name: tensor for name, tensor in parts.items() if name.startswith("heads.mlm_")}
    if "heads.nsp_weight" in parts and "head.dense_weight" in parts:
        pooler = {f"heads.pooler_{kind}": parts[f"head.dense_{kind}"] for kind in ("weight", "bias")}
        heads = {**pooler, **{name: parts[name] for name in ("heads.nsp_weight", "heads.nsp_bias")}, **heads}
    return heads
