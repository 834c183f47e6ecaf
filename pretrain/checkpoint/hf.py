"""Released formats out and in: the Hugging Face layout of BERT, with the fate of every tensor named (law 6).

Our names and BertForPreTraining's; qkv is query, key and value stacked:

    embeddings.{word,position,token_type} bert.embeddings.{word,position,token_type}_embeddings.weight
    embeddings.norm_{weight,bias}         bert.embeddings.LayerNorm.{weight,bias}
    layers.N.qkv_{weight,bias}            bert.encoder.layer.N.attention.self.{query,key,value}.{weight,bias}
    layers.N.attention_out_{weight,bias}  bert.encoder.layer.N.attention.output.dense.{weight,bias}
    layers.N.attention_norm_{weight,bias} bert.encoder.layer.N.attention.output.LayerNorm.{weight,bias}
    layers.N.ffn_in_{weight,bias}         bert.encoder.layer.N.intermediate.dense.{weight,bias}
    layers.N.ffn_out_{weight,bias}        bert.encoder.layer.N.output.dense.{weight,bias}
    layers.N.ffn_norm_{weight,bias}       bert.encoder.layer.N.output.LayerNorm.{weight,bias}
    heads.pooler_{weight,bias}            bert.pooler.dense.{weight,bias}
    heads.nsp_{weight,bias}               cls.seq_relationship.{weight,bias}
    heads.mlm_transform_{weight,bias}     cls.predictions.transform.dense.{weight,bias}
    heads.mlm_norm_{weight,bias}          cls.predictions.transform.LayerNorm.{weight,bias}
    heads.mlm_bias                        cls.predictions.bias

The decoder is tied to the word embeddings and, as transformers does, not written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pretrain.checkpoint import store
from pretrain.config import Model, RunConfig, load_config
from pretrain.errors import InputError
from pretrain.files import (
    MANIFEST,
    disk_errors,
    fsync_folder,
    read_manifest,
    sha256_file,
    verify_manifest,
    write_json,
    write_manifest,
)
from pretrain.model.heads import PretrainingModel
from pretrain.model.parts import LAYER_NORM_EPS
from pretrain.settings import dump
from pretrain.tracking import read_records

_WEIGHTS = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "tokenizer_config.json")


def to_hf(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters under BertForPreTraining's names, fp32; the tied decoder is left out."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        theirs = _their_names(name)
        parts = tensor.detach().float().chunk(len(theirs))
        # Clones, because safetensors refuses tensors that share their storage.
        tensors.update(zip(theirs, (part.clone().contiguous() for part in parts), strict=True))
    return tensors


def from_hf(
    tensors: Mapping[str, Tensor], shape: Model | None = None, *, where: str = "checkpoint"
) -> dict[str, Tensor]:
    """The tensors of a BERT checkpoint as our parameters, fp32.

    Accepts names with and without `bert.` and `module.`, and LayerNorm's old gamma and beta. A head that the
    file does not have is left out; `fates` says what becomes of each tensor that it has.

    Args:
        tensors: as read from the file.
        shape: what the backbone must be; None takes it from the tensors themselves.
        where: the file, for messages.

    Raises:
        InputError: a backbone tensor is missing or of another shape, a head is there in part, two tensors
            claim the same place, or the decoder is not tied to the word embeddings.
    """
    places = _places(tensors, where)
    shape = shape or _shape_of(tensors, places, where)
    word = places.get(("embeddings.word", 0))
    vocabulary_size = len(tensors[word]) if word else 0
    with torch.device("meta"):
        expected = PretrainingModel(shape, vocabulary_size, next_sentence=True).state_dict()
    present = {ours for ours, _ in places}
    state: dict[str, Tensor] = {}
    for ours, like in expected.items():
        head = next((head for head in _HEADS if ours.startswith(head)), None)
        if head is not None and not any(name.startswith(head) for name in present):
            continue
        state[ours] = _gather(ours, like, tensors, places, where)
    beyond = sorted(present - expected.keys())
    if beyond:
        raise InputError(
            f"{where}: has {places[beyond[0], 0]}, beyond the {shape.layers} layers of its config. "
            "Use the config.json that belongs to these weights."
        )
    _check_tied(tensors, state, where)
    return state


def fates(names: Iterable[str]) -> dict[str, str]:
    """What `from_hf` does with each tensor: the parameter of ours that it fills, or `left out: ` and why."""
    return {name: place[0] if (place := _place(name)) else _why_left_out(name) for name in names}


def export(
    state: Mapping[str, Tensor],
    model: Model,
    tokenizer_folder: Path,
    out: Path,
    *,
    next_sentence: bool,
    card: str,
) -> None:
    """Write a checkpoint that transformers loads, atomically; an earlier export at `out` is replaced.

    Args:
        state: our parameters.
        model: their shape.
        tokenizer_folder: where tokenizer.json, vocab.txt and tokenizer_config.json are.
        out: folder to make.
        next_sentence: BertForPreTraining, else BertForMaskedLM.
        card: README.md in Markdown.
    """
    vocabulary = _read_vocabulary(tokenizer_folder, len(state["embeddings.word"]))
    if out.exists() and not (out / MANIFEST).is_file() and any(out.iterdir()):
        raise InputError(f"{out}: exists and is no export. Choose another folder, or remove it.")
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with disk_errors(out):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            _save_weights(to_hf(state), aside / _WEIGHTS)
            write_json(aside / "config.json", _config_json(model, vocabulary, next_sentence))
            _copy_tokenizer(tokenizer_folder, aside, model.max_positions)
            (aside / "README.md").write_text(card, encoding="utf-8")
            for path in aside.iterdir():
                _fsync_file(path)
            write_manifest(aside, {"format": 1})
            _replace_folder(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def export_run(run_dir: Path, out: Path, checkpoint: str | None = None) -> None:
    """Export a run's checkpoint with its model card: the one named, the "best", or the newest that verifies.

    Raises `InputError` where the run, the checkpoint or the corpus's tokenizer is not there or damaged.
    """
    if not (run_dir / "config.yaml").is_file():
        raise InputError(
            f"{run_dir}: has no config.yaml, so it is no run folder. Give one such as runs/bert-mini."
        )
    config = load_config(run_dir / "config.yaml")
    path = _choose_checkpoint(run_dir / "checkpoints", checkpoint)
    state = store.read_weights(path)
    corpus = Path(config.corpus.dir)
    export(
        state,
        config.model,
        corpus,
        out,
        next_sentence=config.pairs.next_sentence,
        card=_model_card(config, run_dir, store.step_of(path), sum(p.numel() for p in state.values())),
    )


def load(export_dir: Path) -> tuple[Model, dict[str, Tensor], bool]:
    """Read a BERT checkpoint in the Hugging Face layout: (shape, our parameters in fp32, whether it has NSP).

    Where the folder has a manifest, as ours do, the weights must be the ones it names. Raises `InputError`.
    """
    config_path, weights_path = export_dir / "config.json", export_dir / _WEIGHTS
    for path in (config_path, weights_path):
        if not path.is_file():
            raise InputError(f"{path}: not found. Give a folder with config.json and {_WEIGHTS}.")
    shape = _model_of(config_path)
    if (export_dir / MANIFEST).is_file():
        listed = read_manifest(export_dir)["files"].get(_WEIGHTS, {})
        if sha256_file(weights_path) != listed.get("sha256"):
            raise InputError(
                f"{weights_path}: its SHA-256 differs from the manifest's; altered. Export again."
            )
    try:
        tensors = load_file(weights_path)
    except SafetensorError as error:
        raise InputError(f"{weights_path}: damaged ({error}). Download or export it again.") from None
    state = from_hf(tensors, shape, where=str(weights_path))
    return shape, state, "heads.nsp_weight" in state


# ---- names

_HEADS = ("heads.pooler_", "heads.nsp_", "heads.mlm_")

_EMBEDDINGS = {
    "embeddings.word": "bert.embeddings.word_embeddings.weight",
    "embeddings.position": "bert.embeddings.position_embeddings.weight",
    "embeddings.token_type": "bert.embeddings.token_type_embeddings.weight",
    "heads.mlm_bias": "cls.predictions.bias",
}
# Each stands for a weight and a bias.
_MODULES = {
    "embeddings.norm": "bert.embeddings.LayerNorm",
    "heads.pooler": "bert.pooler.dense",
    "heads.nsp": "cls.seq_relationship",
    "heads.mlm_transform": "cls.predictions.transform.dense",
    "heads.mlm_norm": "cls.predictions.transform.LayerNorm",
}
_LAYER_MODULES = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention_out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "ffn_in": ("intermediate.dense",),
    "ffn_out": ("output.dense",),
    "ffn_norm": ("output.LayerNorm",),
}

_OURS_IN_LAYER = re.compile(r"layers\.(\d+)\.(\w+)_(weight|bias)")
_THEIRS_IN_LAYER = re.compile(r"bert\.encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")
_PART_OF_MODULE = {
    theirs: (ours, part) for ours, modules in _LAYER_MODULES.items() for part, theirs in enumerate(modules)
}
_THEIRS_ELSEWHERE = {theirs: ours for ours, theirs in _EMBEDDINGS.items()} | {
    f"{theirs}.{kind}": f"{ours}_{kind}" for ours, theirs in _MODULES.items() for kind in ("weight", "bias")
}
_OURS_ELSEWHERE = {ours: theirs for theirs, ours in _THEIRS_ELSEWHERE.items()}


def _their_names(ours: str) -> list[str]:
    """The Hugging Face names of one parameter of ours: three for qkv, else one."""
    match = _OURS_IN_LAYER.fullmatch(ours)
    if match is None:
        return [_OURS_ELSEWHERE[ours]]
    number, module, kind = match.groups()
    return [f"bert.encoder.layer.{number}.{theirs}.{kind}" for theirs in _LAYER_MODULES[module]]


def _place(theirs: str) -> tuple[str, int] | None:
    """(our parameter, which of its stacked parts) of a Hugging Face name in any accepted spelling."""
    name = _plain(theirs)
    match = _THEIRS_IN_LAYER.fullmatch(name)
    if match is None:
        return (_THEIRS_ELSEWHERE[name], 0) if name in _THEIRS_ELSEWHERE else None
    number, module, kind = match.groups()
    if module not in _PART_OF_MODULE:
        return None
    ours, part = _PART_OF_MODULE[module]
    return f"layers.{int(number)}.{ours}_{kind}", part


def _plain(name: str) -> str:
    """The name as transformers writes it today."""
    name = name.removeprefix("module.")
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    return f"bert.{name}" if name.startswith(("embeddings.", "encoder.", "pooler.")) else name


_TIED = {
    "cls.predictions.decoder.weight": "embeddings.word",
    "cls.predictions.decoder.bias": "heads.mlm_bias",
}


def _why_left_out(theirs: str) -> str:
    name = _plain(theirs)
    if name in _TIED:
        return f"left out: tied to {_TIED[name]}"
    if name.endswith("embeddings.position_ids"):
        return "left out: a constant, 0, 1, 2, ..."
    return "left out: not of BERT's backbone or pretraining heads"


# ---- reading


def _places(tensors: Mapping[str, Tensor], where: str) -> dict[tuple[str, int], str]:
    """(our parameter, part) -> the name of the tensor that fills it."""
    places: dict[tuple[str, int], str] = {}
    for name in tensors:
        place = _place(name)
        if place is None:
            continue
        if place in places:
            raise InputError(f"{where}: {name} and {places[place]} both are {place[0]}. Remove one of them.")
        places[place] = name
    return places


def _shape_of(tensors: Mapping[str, Tensor], places: dict[tuple[str, int], str], where: str) -> Model:
    """The sizes that the tensors themselves have; the number of heads cannot be seen and is given as 1."""

    def rows(ours: str) -> tuple[int, ...]:
        if (ours, 0) not in places:
            raise InputError(f"{where}: {_their_names(ours)[0]} is missing. {_REFUSAL}")
        return tuple(tensors[places[ours, 0]].shape)

    numbers = [int(match[1]) for ours, _ in places if (match := _OURS_IN_LAYER.fullmatch(ours))]
    sizes = {
        "layers": max(numbers, default=0) + 1,
        "hidden": rows("embeddings.word")[-1],
        "intermediate": rows("layers.0.ffn_in_weight")[0],
        "max_positions": rows("embeddings.position")[0],
    }
    return Model.model_validate({"size": "custom", "heads": 1, **sizes})


_REFUSAL = "A partly filled model is refused; use a whole BERT checkpoint."


def _gather(
    ours: str, like: Tensor, tensors: Mapping[str, Tensor], places: dict[tuple[str, int], str], where: str
) -> Tensor:
    """One parameter of ours, its parts stacked; each must be there in the right shape."""
    parts = []
    theirs = _their_names(ours)
    for part, (name, meta) in enumerate(zip(theirs, like.chunk(len(theirs)), strict=True)):
        if (ours, part) not in places:
            raise InputError(f"{where}: {name} is missing. {_REFUSAL}")
        found = tensors[places[ours, part]]
        if found.shape != meta.shape:
            raise InputError(
                f"{where}: {places[ours, part]} is {list(found.shape)} where {list(meta.shape)} is needed. "
                "The weights do not belong to this config."
            )
        parts.append(found.float())
    return torch.cat(parts)


def _check_tied(tensors: Mapping[str, Tensor], state: dict[str, Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        ours = _TIED.get(_plain(name))
        if ours in state and not torch.equal(tensor.float(), state[ours]):
            raise InputError(f"{where}: {name} differs from {ours}; an untied decoder is not supported.")


def _model_of(path: Path) -> Model:
    """The shape in a config.json; `InputError` for what our encoder is not."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        needed = {
            "model_type": "bert",
            "hidden_act": "gelu",
            "layer_norm_eps": LAYER_NORM_EPS,
            "position_embedding_type": "absolute",
            "type_vocab_size": 2,
        }
        for key, value in needed.items():
            if values.get(key, value) != value:
                raise InputError(f"{path}: {key} is {values[key]!r}; only {value!r} is supported.")
        sizes = {
            "layers": values["num_hidden_layers"],
            "hidden": values["hidden_size"],
            "heads": values["num_attention_heads"],
            "intermediate": values["intermediate_size"],
            "max_positions": values["max_position_embeddings"],
            "hidden_dropout": values.get("hidden_dropout_prob", 0.1),
            "attention_dropout": values.get("attention_probs_dropout_prob", 0.1),
            "init_std": values.get("initializer_range", 0.02),
        }
        return Model.model_validate({"size": "custom", **sizes})
    except KeyError as error:
        raise InputError(f"{path}: {error} is missing. Give the config.json of a BERT model.") from None
    except (ValueError, AttributeError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: not the config of a BERT model ({reason}).") from None


# ---- a run


def _choose_checkpoint(folder: Path, name: str | None) -> Path:
    if name is None:
        path = store.newest(folder)
        if path is None:
            raise InputError(f"{folder}: holds no complete checkpoint. Train first.")
        return path
    if name == "best":
        path = store.best(folder)
        if path is None:
            raise InputError(
                f"{folder}: no checkpoint was evaluated, so none is the best. Name one, or none."
            )
    else:
        path = folder / name
        if path not in store.list_checkpoints(folder):
            found = ", ".join(p.name for p in store.list_checkpoints(folder)) or "none"
            raise InputError(f"{path}: no such checkpoint. There: {found}.")
    verify_manifest(path)
    return path


def _model_card(config: RunConfig, run_dir: Path, step: int, parameters: int) -> str:
    """README.md of an export: what it is, how it was made, what was measured, on which text."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("pretrain"), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    corpus_card = Path(config.corpus.dir) / "card.md"
    return templates.get_template("model_card.md.j2").render(
        config=config,
        model=config.model,
        parameters=parameters,
        step=step,
        measured=_measured(run_dir, step),
        corpus_card=_two_levels_down(corpus_card.read_text(encoding="utf-8"))
        if corpus_card.is_file()
        else "",
        config_yaml=dump(config).strip(),
    )


def _measured(run_dir: Path, step: int) -> list[tuple[str, str]]:
    """Labels and values of the last evaluation up to `step`; [] without one."""
    evaluations = [
        record
        for record in read_records(run_dir)
        if record.get("split") == "validation" and record.get("step", 0) <= step
    ]
    if not evaluations:
        return []
    last = evaluations[-1]
    labels = {
        "step": ("step", "{:,}"),
        "mlm_loss": ("masked-language-modelling loss", "{:.4f}"),
        "mlm_accuracy": ("masked-token accuracy", "{:.2%}"),
        "nsp_loss": ("next-sentence loss", "{:.4f}"),
        "nsp_accuracy": ("next-sentence accuracy", "{:.2%}"),
    }
    return [
        (label, form.format(last[key])) for key, (label, form) in labels.items() if last.get(key) is not None
    ]


def _two_levels_down(markdown: str) -> str:
    """The corpus card's headings as subheadings of the model card."""
    return re.sub(r"^#", "###", markdown, flags=re.MULTILINE).strip()


# ---- writing


def _config_json(model: Model, vocabulary: list[str], next_sentence: bool) -> dict[str, Any]:
    """The fields of transformers' BertConfig, as 5.x writes them; 4.x reads them too."""
    return {
        "architectures": ["BertForPreTraining" if next_sentence else "BertForMaskedLM"],
        "model_type": "bert",
        "dtype": "float32",
        "vocab_size": len(vocabulary),
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.intermediate,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": 2,
        "initializer_range": model.init_std,
        "layer_norm_eps": LAYER_NORM_EPS,
        "pad_token_id": vocabulary.index("[PAD]"),
        "bos_token_id": None,
        "eos_token_id": None,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "use_cache": True,
        "classifier_dropout": None,
        "is_decoder": False,
        "add_cross_attention": False,
    }


def _read_vocabulary(folder: Path, size: int) -> list[str]:
    """The entries of vocab.txt; the tokenizer must be whole and of the model's size."""
    for name in _TOKENIZER_FILES:
        if not (folder / name).is_file():
            raise InputError(f"{folder / name}: not found. Give the folder of the prepared corpus.")
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    vocabulary = vocabulary[:-1] if vocabulary[-1] == "" else vocabulary
    if len(vocabulary) != size:
        raise InputError(
            f"{folder / 'vocab.txt'}: {len(vocabulary)} entries where the model has {size}. "
            "Use the corpus that the model was trained on."
        )
    if "[PAD]" not in vocabulary:
        raise InputError(f"{folder / 'vocab.txt'}: has no [PAD]. Prepare the corpus again.")
    return vocabulary


def _copy_tokenizer(folder: Path, out: Path, max_positions: int) -> None:
    for name in _TOKENIZER_FILES:
        shutil.copyfile(folder / name, out / name)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(out / "tokenizer_config.json", {**settings, "model_max_length": max_positions})


def _save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        # Without this entry transformers 4.x refuses the file.
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors wraps the operating system's error in words; give it back its number.
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else 0, str(error)) from error


def _fsync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _replace_folder(aside: Path, out: Path) -> None:
    """Rename `aside` to `out`; what was there is moved away first and removed last."""
    fsync_folder(aside)
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        out.rename(old)
    aside.rename(out)
    fsync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)
