"""A fine-tuned model written in its family's own names, as transformers loads it (invariant 6)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.layouts import LAYOUTS, KeyMapping, ReleasedFacts, write_config
from pretrain.checkpoint.tokenizer import copy_tokenizer, read_tokenizer
from pretrain.checkpoint.weight_files import WEIGHTS, save_weights, whole_folder
from pretrain.common.files import write_json
from pretrain.config import ModelConfig

_CLASSES = {
    "sequence": "ForSequenceClassification",
    "tokens": "ForTokenClassification",
    "spans": "ForQuestionAnswering",
}


def write_released(
    out: Path,
    *,
    family: str,
    model: ModelConfig,
    backbone: Mapping[str, Tensor],
    head: Mapping[str, Tensor],
    purpose: str,
    config: dict[str, Any],
    tokenizer: Path,
    card: str,
    extra: Mapping[str, str] | None = None,
) -> None:
    """Write a fine-tuned model that transformers loads, atomically; an earlier export at `out` is replaced.

    DistilBERT has no token types, so ours are added to its positions. A RoBERTa with one token type is written with one
    if both of ours are equal, otherwise with two.

    Args:
        out: folder to make.
        family: a key of `LAYOUTS`.
        model: the shape.
        backbone, head: as in `assembly.Released`; a sequence head needs both layers, others the second one.
        purpose: "sequence", "tokens" or "spans", a key of `_CLASSES`.
        config: fields of config.json that the shape does not decide: the config that was read, id2label, problem_type.
        tokenizer: a folder that `read_tokenizer` reads.
        card: README.md in Markdown.
        extra: further text files, name -> content.

    Raises:
        InputError: the tokenizer cannot be read, the layout cannot hold the model, `out` is something else, or the disk
            refuses.
        ValueError: labels or head that do not fit together.
    """
    layout = LAYOUTS[family]
    needed = {"out_weight", "out_bias", *(("dense_weight", "dense_bias") if purpose == "sequence" else ())}
    if missing := sorted(needed - head.keys()):
        raise ValueError(f"a head for {purpose} needs {', '.join(missing)}")
    token_types = 0 if family == "distilbert" else 1 if family == "roberta" and _one_type(backbone, config) else 2
    pad = config.get("pad_token_id")
    if pad is None:
        pad = read_tokenizer(tokenizer).token_to_id("<pad>" if family == "roberta" else "[PAD]")
    first_position = (1 if pad is None else pad) + 1 if family == "roberta" else 0
    values = write_config(
        {**config, **_labels(config, len(head["out_weight"]), purpose)},
        ReleasedFacts(layout, model, token_types, first_position),
        _CLASSES[purpose],
        len(backbone["embeddings.word"]),
        pad,
    )
    state = {**backbone, **{f"head.{name}": tensor for name, tensor in head.items() if name in needed}}
    tensors = their_tensors(state, layout, token_types=token_types, first_position=first_position, purpose=purpose)
    with whole_folder(out) as aside:
        save_weights(tensors, aside / WEIGHTS)
        write_json(aside / "config.json", values)
        tokenizer_class = f"{values['architectures'][0].removesuffix(_CLASSES[purpose])}Tokenizer"
        copy_tokenizer(
            tokenizer,
            aside,
            tokenizer_class=tokenizer_class,
            max_positions=model.max_positions,
            for_words=purpose == "tokens",
        )
        for name, text in {**(extra or {}), "README.md": card}.items():
            (aside / name).write_text(text, encoding="utf-8")


def their_tensors(
    state: Mapping[str, Tensor],
    layout: KeyMapping,
    *,
    token_types: int = 2,
    first_position: int = 0,
    purpose: str = "sequence",
) -> dict[str, Tensor]:
    """Our parameters under a family's names, fp32, each with storage of its own; the tied decoder is left out.

    `token_types` and `first_position` are those of `layouts.ReleasedFacts`.
    """
    state = {name: tensor.detach().float() for name, tensor in state.items()}
    if token_types == 0:
        # Every token has type 0, so its position can add what the type adds.
        types = state.pop("embeddings.token_type")
        state["embeddings.position"] = state["embeddings.position"] + types[0]
    elif token_types == 1:
        state["embeddings.token_type"] = state["embeddings.token_type"][:1]
    if first_position:
        # Rows that no token reads.
        positions = state["embeddings.position"]
        unused = positions.new_zeros(first_position, positions.shape[1])
        state["embeddings.position"] = torch.cat([unused, positions])
    tensors: dict[str, Tensor] = {}
    for ours, tensor in state.items():
        theirs = layout.names(ours, purpose)
        # Clones, because safetensors refuses tensors that share their storage.
        parts = (part.clone().contiguous() for part in tensor.chunk(len(theirs)))
        tensors.update(zip(theirs, parts, strict=True))
    return tensors


def _labels(config: Mapping[str, Any], count: int, purpose: str) -> dict[str, Any]:
    """id2label and label2id for transformers, which assumes two labels if a config names none."""
    if purpose == "spans":
        return {}
    id2label = config.get("id2label") or {number: f"LABEL_{number}" for number in range(count)}
    if len(id2label) != count:
        raise ValueError(f"id2label names {len(id2label)} labels, but the head has {count}")
    id2label = {str(number): label for number, label in id2label.items()}
    return {"id2label": id2label, "label2id": {label: int(number) for number, label in id2label.items()}}


def _one_type(backbone: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
    first, second = backbone["embeddings.token_type"]
    return config.get("type_vocab_size", 1) == 1 and torch.equal(first, second)
