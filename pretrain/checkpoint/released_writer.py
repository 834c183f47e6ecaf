"""Writes models under their family's names, in the form that transformers loads (invariant 6 in docs/invariants.md)."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint.layouts import BERTRAIN, LAYOUTS, Architecture, Layout, pooled, task_head, write_config
from pretrain.checkpoint.sentence_transformers import write_sentence_files
from pretrain.checkpoint.tokenizer import ModelTokenizer, copy_tokenizer
from pretrain.checkpoint.weight_files import FOR_TRANSFORMERS, WEIGHTS, atomic_folder, save_weights
from pretrain.common.errors import InputError
from pretrain.common.files import write_json
from pretrain.config import ModelConfig
from pretrain.model.norms import get_norm
from pretrain.model.positions import sinusoids

# Purpose of a head -> suffix of its class in transformers.
_CLASS_SUFFIXES = {
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
    tokenizer_folder: Path,
    card: str,
    extra: Mapping[str, str] | None = None,
    sentence_files: Mapping[str, Any] | None = None,
) -> None:
    """Write a fine-tuned model in its family's layout, atomically; an earlier export at `out` is replaced.

    DistilBERT has no token types, so the embedding of type 0 is added to its positions. A RoBERTa or GTE model that
    had one token type gets two if our embeddings of the two types differ.

    Args:
        out: folder to create.
        family: a key of `LAYOUTS`.
        model: the shape.
        backbone, head: as in `assembly.ReleasedModel`; the head needs all layers of the family's `layouts.TaskHead`.
        purpose: "sequence", "tokens" or "spans", a key of `_CLASS_SUFFIXES`.
        config: fields of config.json besides the shape's: the fields that were read, id2label, problem_type.
        tokenizer_folder: a folder with the model's tokenizer.
        card: content of README.md.
        extra: additional text files, name -> content.
        sentence_files: as in `assembly.ReleasedModel`; written to the folder of the encoder.

    Raises:
        InputError: the tokenizer cannot be read, the layout cannot represent the model, `out` is not an export, or
            writing fails.
        ValueError: the head lacks parameters, or has another number of labels than id2label.
    """
    layout = LAYOUTS[family]
    needed = _head_parameters(layout, config, model, purpose)
    if missing := sorted(needed - head.keys()):
        raise ValueError(f"a head for {purpose} needs {', '.join(missing)}")
    labels = _labels(config, len(head["out_weight"]), purpose)
    tokenizer = ModelTokenizer.read(tokenizer_folder)
    arch, ids = written_architecture(layout, model, backbone, config, tokenizer.special_ids)
    rows = len(backbone["embeddings.word"])
    values = write_config({**config, **labels}, arch, _CLASS_SUFFIXES[purpose], rows, ids["pad"], ids)
    state = {**backbone, **{f"head.{name}": tensor for name, tensor in head.items() if name in needed}}
    parts = {"": (values, state)}
    with atomic_folder(out) as target:
        if values["model_type"] == pooled.MODEL_TYPE:
            shutil.copyfile(Path(__file__).parent / "templates" / pooled.MODELING_FILE, target / pooled.MODELING_FILE)
            parts[pooled.ENCODER] = write_config(config, arch, "Model", rows, ids["pad"], ids), dict(backbone)
        for subfolder, (content, tensors) in parts.items():
            write_part(target / subfolder, content, tensors, arch, tokenizer, purpose, for_words=purpose == "tokens")
        write_sentence_files({} if layout is BERTRAIN else sentence_files or {}, target / list(parts)[-1])
        for name, text in {**(extra or {}), "README.md": card}.items():
            (target / name).write_text(text, encoding="utf-8")


def released_tensors(state: Mapping[str, Tensor], arch: Architecture, purpose: str = "sequence") -> dict[str, Tensor]:
    """Return our parameters under a family's names, fp32, each with separate storage; a tied decoder is left out.

    `purpose` is the task of head.out.
    """
    layout = arch.layout
    state = {name: tensor.detach().float() for name, tensor in state.items()}
    if arch.token_types == 0 and "embeddings.token_type" in state:
        # Every token has type 0, so the type's embedding can be added to the positions.
        type_embeddings = state.pop("embeddings.token_type")
        state["embeddings.position"] = state["embeddings.position"] + type_embeddings[0]
    elif arch.token_types == 1:
        state["embeddings.token_type"] = state["embeddings.token_type"][:1]
    if first_position := arch.first_position:
        # The position table starts with rows that no token uses.
        positions = state["embeddings.position"]
        unused = positions.new_zeros(first_position, positions.shape[1])
        state["embeddings.position"] = torch.cat([unused, positions])
    tensors: dict[str, Tensor] = {}
    for ours, tensor in state.items():
        theirs = layout.names(ours, purpose)
        if not theirs:
            raise InputError(
                f"{ours}: the layout of {layout.family} has no such parameter. Leave it out of the objective's "
                "exports, as docs/extend/add-an-objective.md shows."
            )
        if not arch.model.tied_decoder and ours == "heads.mlm_bias" and layout.decoder:
            # transformers reads BERT's separate bias only if the decoder is tied.
            tensors[f"{layout.decoder}.bias"] = tensor.clone().contiguous()
        # Clones, because safetensors rejects tensors that share their storage.
        parts = (part.clone().contiguous() for part in tensor.chunk(len(theirs)))
        tensors.update(zip(theirs, parts, strict=True))
    return tensors


def with_position_table(model: ModelConfig, state: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Convert sinusoidal positions to a table of learned ones, which all BERT-like layouts support."""
    if model.positions != "sinusoidal":
        return model, dict(state)
    table = sinusoids(torch.arange(model.max_positions), model.embedding or model.hidden)
    return model.model_copy(update={"positions": "learned"}), {**state, "embeddings.position": table}


def written_architecture(
    layout: Layout,
    model: ModelConfig,
    backbone: Mapping[str, Tensor],
    config: Mapping[str, Any],
    special_ids: Mapping[str, int],
) -> tuple[Architecture, dict[str, int | None]]:
    """Return the architecture that determines config.json, and the ids of special tokens by role.

    Args:
        config: config.json of the model that was read, whose pad_token_id takes precedence; {} for our runs.
        special_ids: the ids in the tokenizer.
    """
    ids: dict[str, int | None] = {"pad": None, **special_ids}
    if (pad := config.get("pad_token_id")) is not None:
        ids["pad"] = pad
    token_types = 0 if layout.default_token_types is None or not model.token_types else 2
    if token_types and layout.family in ("roberta", "gte") and config.get("type_vocab_size", 1) == 1:
        token_types = 1 if torch.equal(*backbone["embeddings.token_type"]) else 2
    first_position = (1 if ids["pad"] is None else ids["pad"]) + 1 if layout.padded_positions else 0
    return Architecture(layout, model, token_types, first_position), ids


def write_part(
    folder: Path,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    arch: Architecture,
    tokenizer: ModelTokenizer,
    purpose: str = "sequence",
    **options: Any,
) -> None:
    """Write weights, config.json and tokenizer of a model to a folder; `options` are passed on to `copy_tokenizer`."""
    layout, limit = arch.layout, arch.model.max_positions
    prefix = layout.variants.get(pooled.unwrap(config)["model_type"], layout.class_prefix)
    tokenizer_class = layout.tokenizer_class or f"{prefix}Tokenizer"
    folder.mkdir(exist_ok=True)
    save_weights(released_tensors(state, arch, purpose), folder / WEIGHTS, FOR_TRANSFORMERS)
    write_json(folder / "config.json", config)
    copy_tokenizer(tokenizer, folder, tokenizer_class=tokenizer_class, max_positions=limit, **options)


def _head_parameters(layout: Layout, config: Mapping[str, Any], model: ModelConfig, purpose: str) -> set[str]:
    """Return the names of the parameters that a task's head has in this family."""
    head = task_head(layout.family, config, model, purpose)
    needed = {"out_weight", "out_bias"}
    if head.activation:
        needed |= {"dense_weight", *(("dense_bias",) if head.bias else ())}
    if head.norm:
        needed |= {f"norm_{kind}" for kind in get_norm(head.norm).parameters}
    return needed


def _labels(config: Mapping[str, Any], count: int, purpose: str) -> dict[str, Any]:
    """Return id2label and label2id for transformers, which assumes two labels if a config names none."""
    if purpose == "spans":
        return {}
    id2label = config.get("id2label") or {index: f"LABEL_{index}" for index in range(count)}
    if len(id2label) != count:
        raise ValueError(f"id2label names {len(id2label)} labels, but the head has {count}")
    id2label = {str(index): label for index, label in id2label.items()}
    return {"id2label": id2label, "label2id": {label: int(index) for index, label in id2label.items()}}
