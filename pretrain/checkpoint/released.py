"""Released models of the BERT family read and written, with the fate of every tensor named (law 6).

Read: BERT, DistilBERT, RoBERTa and ELECTRA as transformers, NVIDIA and Google (TensorFlow 1) wrote them, and our own runs
and exports. Written: a fine-tuned model in its family's own names. The names are in `layouts`.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.checkpoint import store
from pretrain.checkpoint.layouts import (
    BERT,
    HEAD_ACTIVATION,
    LAYOUTS,
    KeyMapping,
    ReleasedFacts,
    StackedName,
    read_config,
    write_config,
)
from pretrain.checkpoint.tensorflow1 import Checkpoint
from pretrain.checkpoint.tokenizer import copy_tokenizer, is_run, read_tokenizer, released_folder
from pretrain.checkpoint.weight_files import WEIGHTS, read_json, read_weights, save_weights, whole_folder
from pretrain.common.errors import InputError
from pretrain.common.files import write_json
from pretrain.config import ModelConfig, load_config
from pretrain.model.encoder import Encoder

__all__ = ["HEAD_ACTIVATION", "Fate", "Released", "assemble", "fate_table", "read_released", "write_released"]


class Fate(NamedTuple):
    """What became of one tensor of a file."""

    name: str
    shape: tuple[int, ...]
    fate: str  # our parameter that it fills, as `layouts` names them, or "left out: " and why


@dataclass(frozen=True)
class Released:
    """A model as it was read; all tensors fp32.

    Attributes:
        family: "bert", "distilbert", "roberta" or "electra".
        model: the shape of the encoder.
        backbone: state of `pretrain.model.encoder.Encoder`, always whole.
        head: what there is of dense_weight [H, H], dense_bias [H] (BERT's pooler, DistilBERT's pre_classifier, the
            classifier.dense of RoBERTa and ELECTRA) and out_weight [labels, H], out_bias [labels].
        config: config.json as read; {} for TensorFlow checkpoints and runs of ours.
        fates: one for each tensor in the file.
        token_types: how many segments the model knows: 2, or less, and then every token is to be given type 0.
        pretraining: what there is of the state of `pretrain.model.heads.Heads`, each head whole.
    """

    family: str
    model: ModelConfig
    backbone: dict[str, Tensor]
    head: dict[str, Tensor]
    config: dict[str, Any]
    fates: tuple[Fate, ...]
    token_types: int = 2
    pretraining: dict[str, Tensor] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        """Rows of the word embeddings, padding included."""
        return len(self.backbone["embeddings.word"])


def read_released(folder: Path) -> Released:
    """The model in `folder`: config and weights of a release, or a run (its newest checkpoint), or an export of ours.

    Raises:
        InputError: something is missing or damaged, the architecture is not our encoder's, or a tensor of the backbone
            is missing or of another shape.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Give one with config.json and the weights.")
    folder = released_folder(folder)
    if is_run(folder):
        return _read_run(folder)
    config_path = next(
        (folder / name for name in ("config.json", "bert_config.json") if (folder / name).is_file()), None
    )
    if config_path is None:
        raise InputError(f"{folder}: has no config.json (Google's: bert_config.json). Give a released model's folder.")
    config = read_json(config_path)
    facts = _facts(config, config_path)
    prefix = _tensorflow_prefix(folder)
    if prefix is not None:
        return _read_tensorflow(prefix, facts)
    path, tensors = read_weights(folder)
    return assemble(tensors, facts, config, where=str(path))


def assemble(
    tensors: Mapping[str, Tensor], facts: ReleasedFacts, config: dict[str, Any], *, where: str = "checkpoint"
) -> Released:
    """The model of a family's tensors by their names.

    The backbone must be whole. A head that is there in part, or in another shape, is left out whole, and so is a
    masked-language-modelling head whose decoder is not the word embeddings.

    Raises:
        InputError: about the backbone; `where` is the file for the message.
    """
    layout, model = facts.layout, facts.model
    places = _places(tensors, layout, where)
    backbone = _backbone(tensors, facts, places, where)
    fates = {name: f"left out: {layout.why_left_out(name)}" for name in tensors}
    fates |= {name: place.name for place, name in places.items()}
    parts: dict[str, Tensor] = {}
    vocabulary, embedding = backbone["embeddings.word"].shape
    for shapes in _heads(model.hidden, embedding, vocabulary):
        names = {ours: places[StackedName(ours)] for ours in shapes if StackedName(ours) in places}
        if not names:
            continue
        found = {ours: tensors[name].float().contiguous() for ours, name in names.items()}
        reason = _why_no_head(found, shapes, tensors, backbone, layout)
        if reason:
            fates |= dict.fromkeys(names.values(), f"left out: {reason}")
        else:
            parts |= found
    for name in tensors:
        tied = layout.tied(name)
        if tied and fates[name] != tied:
            fates[name] = f"left out: tied to {tied}"
            if "heads.mlm_bias" not in parts:
                fates[name] = "left out: its head is not read"
    return Released(
        family=layout.family,
        model=model,
        backbone=backbone,
        head={ours.removeprefix("head."): tensor for ours, tensor in parts.items() if ours.startswith("head.")},
        config=config,
        fates=tuple(Fate(name, tuple(tensor.shape), fates[name]) for name, tensor in tensors.items()),
        token_types=facts.token_types,
        pretraining=_pretraining(parts),
    )


def fate_table(fates: Iterable[Fate]) -> str:
    """A line for all tensors that go the same way, layers folded; then those left out, by reason and name."""
    filled: dict[str, list[str]] = defaultdict(list)
    left_out: dict[str, list[str]] = defaultdict(list)
    for name, _, fate in fates:
        if fate.startswith("left out"):
            left_out[fate].append(name)
        else:
            filled[re.sub(r"^(layers|embeddings|heads?\.[a-z]+).*", r"\1.*", fate)].append(name)
    rows = [(_pattern(names), _count(names), target) for target, names in filled.items()]
    wide, high = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    lines = [f"{pattern:<{wide}}  {count:>{high}} -> {target}" for pattern, count, target in rows]
    for reason, names in left_out.items():
        folded = _folded(names)
        beyond = f" and {len(folded) - _MOST_NAMES} more" if len(folded) > _MOST_NAMES else ""
        lines.append(f"{', '.join(folded[:_MOST_NAMES])}{beyond}: {_count(names)} {reason}")
    return "\n".join(lines)


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

    The token type of a DistilBERT, which has none, goes into its positions; a RoBERTa with one is written with one while
    both of ours are equal, and else with two.

    Args:
        out: folder to make.
        family: a key of `LAYOUTS`.
        model: the shape.
        backbone, head: as in `Released`; the sequence head needs both of its layers, the others the second alone.
        purpose: "sequence", "tokens" or "spans": ...ForSequenceClassification, ForTokenClassification, ForQuestionAnswering.
        config: goes into config.json where the shape does not decide: the one that was read, id2label, problem_type.
        tokenizer: a folder that `read_tokenizer` reads.
        card: README.md in Markdown.
        extra: further text files, name -> content.

    Raises:
        InputError: the tokenizer cannot be read, `out` is something else, or the disk refuses.
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

    `token_types` and `first_position` are those of `Facts`.
    """
    state = {name: tensor.detach().float() for name, tensor in state.items()}
    if token_types == 0:
        # No tokens but those of type 0: what it adds to each of them, its position may add as well.
        types = state.pop("embeddings.token_type")
        state["embeddings.position"] = state["embeddings.position"] + types[0]
    elif token_types == 1:
        state["embeddings.token_type"] = state["embeddings.token_type"][:1]
    if first_position:
        # Rows that no token of a sequence has.
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


# ---- the backbone

_REFUSAL = "A partly filled model is refused; use a whole checkpoint."


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
    # Of two tied tensors a file may have either.
    for name in tensors:
        tied = layout.tied(name)
        if tied is not None and StackedName(tied) not in places:
            places[StackedName(tied)] = name
    return places


def _backbone(
    tensors: Mapping[str, Tensor], facts: ReleasedFacts, places: Mapping[StackedName, str], where: str
) -> dict[str, Tensor]:
    """State of the encoder; each tensor must be there in the right shape, and no layer beyond."""
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
    """[2, E]: as many rows as there are, the only one twice; zeros where the family has none."""
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
        found = tensors[name]
        if found.shape != meta.shape:
            raise InputError(
                f"{where}: {name} is {list(found.shape)} where {list(meta.shape)} is needed. "
                "The weights do not belong to this config."
            )
        if not found.is_floating_point():
            raise InputError(f"{where}: {name} is {found.dtype}; quantised weights are not read. Give those in fp32.")
        parts.append(found.float())
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


# ---- the heads


def _heads(hidden: int, embedding: int, vocabulary: int) -> list[dict[str, tuple[int | None, ...]]]:
    """The shape of each head's parameters; None is any number."""
    return [
        {"head.dense_weight": (hidden, hidden), "head.dense_bias": (hidden,)},
        {"head.out_weight": (None, hidden), "head.out_bias": (None,)},
        {"heads.nsp_weight": (2, hidden), "heads.nsp_bias": (2,)},
        {
            "heads.mlm_transform_weight": (embedding, hidden),
            "heads.mlm_transform_bias": (embedding,),
            "heads.mlm_norm_weight": (embedding,),
            "heads.mlm_norm_bias": (embedding,),
            "heads.mlm_bias": (vocabulary,),
        },
    ]


def _why_no_head(
    found: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int | None, ...]],
    tensors: Mapping[str, Tensor],
    backbone: Mapping[str, Tensor],
    layout: KeyMapping,
) -> str:
    """Why a head cannot be filled with what was found of it; "" where it can."""
    for ours, shape in shapes.items():
        if ours not in found:
            return f"{layout.names(ours)[0]} is missing"
        actual = found[ours].shape
        if len(actual) != len(shape) or any(b is not None and a != b for a, b in zip(actual, shape, strict=True)):
            return f"{ours} would be {list(actual)}"
    if "head.out_weight" in found and len(found["head.out_weight"]) != len(found["head.out_bias"]):
        return "as many rows as biases are needed"
    if "heads.mlm_bias" in found:
        for name, tensor in tensors.items():
            tied = layout.tied(name)
            of = backbone.get(tied or "", found["heads.mlm_bias"])
            if tied and not torch.equal(tensor.float(), of):
                return f"{name} differs from {tied}; an untied decoder is not supported"
    return ""


def _pretraining(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State of `Heads`, in its order; the next-sentence head stands on the pooler."""
    heads = {name: tensor for name, tensor in parts.items() if name.startswith("heads.mlm_")}
    if "heads.nsp_weight" in parts and "head.dense_weight" in parts:
        pooler = {f"heads.pooler_{kind}": parts[f"head.dense_{kind}"] for kind in ("weight", "bias")}
        heads = {**pooler, **{name: parts[name] for name in ("heads.nsp_weight", "heads.nsp_bias")}, **heads}
    return heads


def _labels(config: Mapping[str, Any], count: int, purpose: str) -> dict[str, Any]:
    """id2label and label2id for transformers, which takes two labels where a config names none."""
    if purpose == "spans":
        return {}
    id2label = config.get("id2label") or {number: f"LABEL_{number}" for number in range(count)}
    if len(id2label) != count:
        raise ValueError(f"id2label names {len(id2label)} labels where the head has {count}")
    id2label = {str(number): label for number, label in id2label.items()}
    return {"id2label": id2label, "label2id": {label: int(number) for number, label in id2label.items()}}


def _one_type(backbone: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
    first, second = backbone["embeddings.token_type"]
    return config.get("type_vocab_size", 1) == 1 and torch.equal(first, second)


_CLASSES = {
    "sequence": "ForSequenceClassification",
    "tokens": "ForTokenClassification",
    "spans": "ForQuestionAnswering",
}


# ---- other sources


def _facts(config: dict[str, Any], path: Path) -> ReleasedFacts:
    try:
        return read_config(config)
    except KeyError as error:
        raise InputError(f"{path}: {error} is missing. Give the config.json of a BERT model.") from None
    except (ValueError, AttributeError, TypeError) as error:  # pydantic's errors are ValueErrors
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not the config of a model that our encoder is ({reason}).") from None


def _read_run(folder: Path) -> Released:
    checkpoint = store.newest(folder / "checkpoints")
    if checkpoint is None:
        raise InputError(f"{folder / 'checkpoints'}: holds no complete checkpoint. Train first.")
    state = store.read_weights(checkpoint)
    pretraining = {name: tensor for name, tensor in state.items() if name.startswith("heads.")}
    return Released(
        family=BERT.family,
        # What is drawn anew here, is BERT's as from an export, which does not say how its run began.
        model=load_config(folder / "config.yaml").model.model_copy(update={"attention_init": "normal"}),
        backbone={name: tensor for name, tensor in state.items() if name not in pretraining},
        head={
            f"dense_{kind}": pretraining[f"heads.pooler_{kind}"]
            for kind in ("weight", "bias")
            if f"heads.pooler_{kind}" in pretraining
        },
        config={},
        fates=tuple(
            Fate(name, tuple(tensor.shape), name.replace("heads.pooler_", "head.dense_"))
            for name, tensor in state.items()
        ),
        pretraining=pretraining,
    )


def _tensorflow_prefix(folder: Path) -> Path | None:
    """The TensorFlow checkpoint in `folder`, where there are no torch weights: the only one, or the one that is named
    in `checkpoint`; None without one."""
    if any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
        return None
    found = sorted(path.with_suffix("") for path in folder.glob("*.index"))
    if len(found) > 1 and (folder / "checkpoint").is_file():
        text = (folder / "checkpoint").read_text(encoding="utf-8", errors="replace")
        newest = re.search(r'^model_checkpoint_path: "(?:.*/)?([^"/]+)"', text, re.MULTILINE)
        found = [path for path in found if newest and path.name == newest[1]] or found
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise InputError(f"{folder}: has several TensorFlow checkpoints ({names}). Leave the one to read.")
    return found[0] if found else None


def _read_tensorflow(prefix: Path, facts: ReleasedFacts) -> Released:
    checkpoint = Checkpoint(prefix)
    tensors: dict[str, Tensor] = {}
    original: dict[str, str] = {}
    left_out: list[Fate] = []
    for name, variable in checkpoint.variables.items():
        theirs = _torch_name(name)
        if theirs is None or not variable.readable:
            reason = "no values of a model" if theirs else "the optimizer's"
            left_out.append(Fate(name, variable.shape, f"left out: {reason}"))
            continue
        values = checkpoint.read(name)
        tensors[theirs] = values.T if name.endswith("/kernel") else values
        original[theirs] = name
    released = assemble(tensors, facts, {}, where=f"{prefix}.index")
    fates = (
        Fate(original[fate.name], checkpoint.variables[original[fate.name]].shape, fate.fate) for fate in released.fates
    )
    return replace(released, fates=(*fates, *left_out))


# google-research/bert: run_classifier.py, run_squad.py and run_pretraining.py name their heads so.
_TENSORFLOW_HEADS = {
    "output_": "classifier.",
    "cls/squad/output_": "qa_outputs.",
    "cls/seq_relationship/output_": "cls.seq_relationship.",
}


def _torch_name(name: str) -> str | None:
    """A variable of Google's BERT under transformers' name; None for an optimizer's."""
    if name == "global_step" or name.rpartition("/")[2] in ("adam_m", "adam_v"):
        return None
    if name == "cls/predictions/output_bias":
        return "cls.predictions.bias"
    for beginning, module in _TENSORFLOW_HEADS.items():
        if name in (f"{beginning}weights", f"{beginning}bias"):
            return module + ("weight" if name.endswith("weights") else "bias")
    name = re.sub(r"/layer_(\d+)/", r"/layer/\1/", name)
    name = re.sub(r"/(kernel|gamma)$", "/weight", name)
    name = re.sub(r"/beta$", "/bias", name)
    name = re.sub(r"_embeddings$", "_embeddings/weight", name)
    return name.replace("/", ".")


# ---- the table

_MOST_NAMES = 6


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor" + "s" * (len(names) > 1)


def _pattern(names: list[str]) -> str:
    """What all names begin with, whole parts only, and a star; the name itself where there is one."""
    folded = _folded(names)
    if len(folded) == 1:
        return folded[0]
    parts = zip(*(re.split(r"(?<=[./])", name) for name in folded), strict=False)
    same = itertools.takewhile(lambda column: len(set(column)) == 1, parts)
    return "".join(column[0] for column in same) + "*"


def _folded(names: list[str]) -> list[str]:
    """Distinct names, with the numbers in them as ranges: encoder.layer.0-11.output.dense.weight."""
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in names:
        match = re.search(r"(?<=[._])\d+(?=[./])", name)
        key = (name, "") if match is None else (name[: match.start()], name[match.end() :])
        numbers[key] |= set() if match is None else {int(match[0])}
    return [
        before + ("" if not found else str(*found) if len(found) == 1 else f"{min(found)}-{max(found)}") + after
        for (before, after), found in numbers.items()
    ]
