"""Settings, tokenizer and initial weights of a run that continues from a checkpoint (`start_from`).

The checkpoint determines `model` and `corpus.vocabulary`. Missing parameters are initialized as in a new run, with two
exceptions. The row of a word that the corpus's vocabulary adds is the mean of the rows of the tokens that the word
replaces, so all other logits stay the same. A missing decoder bias is the logarithm of the token frequencies in the
corpus, so that a new masked-language-modeling head starts by predicting these frequencies.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from pretrain.checkpoint.mapping import LEFT_OUT, mapping_table
from pretrain.checkpoint.released import ReleasedModel, read_released
from pretrain.checkpoint.sentence_transformers import module_warnings
from pretrain.checkpoint.tokenizer import is_run, read_tokenizer, released_folder
from pretrain.common.addresses import local_path
from pretrain.common.errors import InputError
from pretrain.common.settings import AnyConfig, Overrides, load, unvalidated_values
from pretrain.config import ModelConfig, PretrainConfig, run_folder, used_start_from
from pretrain.config.families import SIZES, PublishedSize
from pretrain.corpus.extension import replaced_ids
from pretrain.corpus.manifest import check_same_tokenizer
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.corpus.stored import open_corpus
from pretrain.corpus.vocabulary import tokenizer_from_json, vocabulary_size
from pretrain.model.heads import PretrainingModel
from pretrain.objectives.objective import FrozenModel
from pretrain.storage.runs import fetched_model

# Settings of the model that its weights do not determine.
_NOT_IN_WEIGHTS = ("hidden_dropout", "attention_dropout", "init_std")
# Parameters with one row per entry of the vocabulary.
_VOCABULARY_PARAMETERS = ("embeddings.word", "heads.decoder", "heads.mlm_bias")
# BERT's pooler -> its name in `ReleasedModel.head`.
_POOLER = {"heads.pooler_weight": "dense_weight", "heads.pooler_bias": "dense_bias"}
# Parameters that may also be the first layer of a task's head -> their names in `ReleasedModel.head`.
_SHARED_WITH_TASKS = {
    **_POOLER,
    "heads.mlm_transform_weight": "dense_weight",
    "heads.mlm_transform_bias": "dense_bias",
    "heads.mlm_norm_weight": "norm_weight",
    "heads.mlm_norm_bias": "norm_bias",
}


# ---- settings


def start_overrides(config: AnyConfig, overrides: Overrides, *, resume: bool) -> list[str]:
    """Return overrides of a run's `config` with the settings that the checkpoint in `start_from` determines.

    A resumed run reads them from its run folder and no longer needs the checkpoint.

    Raises:
        InputError: the checkpoint cannot be read, or the config sets something that contradicts it.
    """
    config_values = unvalidated_values(config, PretrainConfig, overrides)
    earlier_config = _earlier_config(config_values) if resume else None
    if earlier_config is not None:
        return _resume_overrides(earlier_config, config_values)
    location = config_values.get("start_from")
    if not location or not isinstance(location, str):
        return []
    released = read_released(fetched_model(location))
    tokenizer = start_tokenizer(fetched_model(location), released)
    vocabulary = _section(_section(config_values, "corpus"), "vocabulary")
    model = _model_config(released, 0 if vocabulary.get("added_words") else vocabulary_size(tokenizer))
    return [*_model_overrides(location, model, config_values), *_vocabulary_overrides(location, tokenizer, vocabulary)]


def start_tokenizer(folder: Path, released: ReleasedModel | None = None) -> Tokenizer:
    """Read the tokenizer of the checkpoint in `folder`, in the form that the preparation of a corpus needs.

    Raises `InputError` if the tokenizer is missing, or cannot be used to prepare a corpus.
    """
    tokenizer = read_tokenizer(folder, released.vocabulary_size if released else None)
    content = json.loads(tokenizer.to_str())
    lowercase = (content["normalizer"] or {}).get("lowercase", False)
    return tokenizer_from_json(folder, json.dumps(content), lowercase=lowercase)


def _earlier_config(config_values: Mapping[str, Any]) -> PretrainConfig | None:
    """Return the config that the run started with if it used `start_from` and saved a checkpoint, otherwise None."""
    folder = run_folder(config_values)
    return load(folder / "config.yaml", PretrainConfig) if used_start_from(folder) else None


def _resume_overrides(earlier_config: PretrainConfig, config_values: Mapping[str, Any]) -> list[str]:
    keys = ("size", "lowercase", "added_words")
    values = {f"corpus.vocabulary.{key}": getattr(earlier_config.corpus.vocabulary, key) for key in keys}
    if not config_values.get("start_from"):
        values["start_from"] = earlier_config.start_from
    overrides = [_override(key, value) for key, value in values.items()]
    return [*_model_overrides(earlier_config.start_from, earlier_config.model, config_values), *overrides]


def _model_config(released: ReleasedModel, entries: int) -> ModelConfig:
    """Return the checkpoint's shape, with the padding rows after the vocabulary's `entries`; 0 drops these rows."""
    rows = released.vocabulary_size if 0 < entries < released.vocabulary_size else 0
    return released.model.model_copy(update={"attention_init": "normal", "vocabulary_rows": rows})


def _model_overrides(location: str, model: ModelConfig, config_values: Mapping[str, Any]) -> list[str]:
    """Return overrides with the checkpoint's shape, except for settings of the config that may differ from it."""
    section = _section(config_values, "model")
    _reject_contradictions(location, model, section)
    values = model.model_dump(mode="json")
    return [_override(f"model.{key}", values[key]) for key in values if not (key in _NOT_IN_WEIGHTS and key in section)]


def _reject_contradictions(location: str, model: ModelConfig, section: Mapping[str, Any]) -> None:
    """Raise `InputError` for the first setting of the model in the config that contradicts the checkpoint."""
    from_size = {name for name in PublishedSize._fields if section.get(name) == 0}
    settings = {name: value for name, value in section.items() if name not in (*_NOT_IN_WEIGHTS, "size", *from_size)}
    size = SIZES[model.family].get(str(section.get("size")))
    if size is not None:
        settings = {**size._asdict(), **settings}
    for name, value in settings.items():
        if name in ModelConfig.model_fields and value != getattr(model, name):
            where = (
                f"model.size: {section['size']} has {name} {value!r}"
                if name not in section
                else f"model.{name}: {value!r}"
            )
            raise InputError(
                f"{where}, but the checkpoint in start_from ({location}) has {getattr(model, name)!r}. "
                "Remove it: the checkpoint determines the model."
            )


def _vocabulary_overrides(location: str, tokenizer: Tokenizer, vocabulary: Mapping[str, Any]) -> list[str]:
    """Return overrides of the config's section `vocabulary`; `InputError` if it contradicts the tokenizer."""
    lowercase = bool(getattr(tokenizer.normalizer, "lowercase", False))
    strip_accents = getattr(tokenizer.normalizer, "strip_accents", None)
    strip_accents = lowercase if strip_accents is None else strip_accents
    if vocabulary.get("path"):
        raise InputError(
            f"corpus.vocabulary.path: {vocabulary['path']}, but start_from ({location}) has a tokenizer. Remove it."
        )
    for name, value in (("lowercase", lowercase), ("strip_accents", strip_accents)):
        if vocabulary.get(name) not in (None, value):
            raise InputError(
                f"corpus.vocabulary.{name}: {json.dumps(vocabulary[name])}, but the tokenizer of start_from "
                f"({location}) has {json.dumps(value)}. Remove it."
            )
    added_words = vocabulary.get("added_words", 0)
    size = vocabulary_size(tokenizer) + (added_words if isinstance(added_words, int) else 0)
    return [_override("corpus.vocabulary.size", max(64, size)), _override("corpus.vocabulary.lowercase", lowercase)]


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


# ---- weights


@dataclass(frozen=True)
class Start:
    """The initial weights of a run.

    Attributes:
        state: the parameters of `pretrain.model.heads.PretrainingModel` that are in the checkpoint; fp32.
        fingerprint: SHA-256 of the tensors that were read, as hexadecimal digits.
        old_rows: number of rows of the word embeddings that the checkpoint has.
        initialized: names of the parameters that are not in `state`.
        table: lines for the user: the parameter that each tensor fills, and how other parameters are initialized.
        family: a key of `layouts.LAYOUTS`.
        config: config.json of the checkpoint; {} if it is one of our runs.
        sentence_files: as in `released.ReleasedModel`.
    """

    state: dict[str, Tensor]
    fingerprint: str
    old_rows: int
    initialized: tuple[str, ...]
    table: str
    family: str
    config: dict[str, Any]
    sentence_files: dict[str, Any]


def check_start_corpus(config: PretrainConfig) -> None:
    """Raise `InputError` unless the corpus and the replay corpus were prepared with the checkpoint's tokenizer."""
    tokenizer = start_tokenizer(fetched_model(config.start_from))
    for folder in filter(None, (config.corpus.dir, config.adaptation.replay_corpus)):
        open_shards(local_path(folder), "train")
        check_same_tokenizer(local_path(folder), tokenizer, extended=folder == config.corpus.dir)


def start_table(config: PretrainConfig) -> str:
    """Return `Start.table`, without reading the corpus's tokens. Raises as `read_start` does."""
    shards = open_corpus(config.corpus, "train", needs_tokens=False)
    with torch.device("meta"):
        rows = config.model.rows(shards.vocabulary_size)
        model = PretrainingModel(config.model, rows, config.pairs.has_classifier)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return read_start(config, shapes, shards, count_tokens=False).table


def read_start(
    config: PretrainConfig, shapes: Mapping[str, Sequence[int]], shards: TokenShards, *, count_tokens: bool = True
) -> Start:
    """Read the checkpoint in `config.start_from` for a model with parameters of these shapes.

    Args:
        config: the run.
        shapes: shape of each parameter of the model, by name.
        shards: the corpus, whose vocabulary is the checkpoint's or extends it.
        count_tokens: whether to compute a missing decoder bias from the corpus's tokens; if not, that bias is 0.

    Raises:
        InputError: the checkpoint cannot be read, or `config.model` was taken from another checkpoint.
    """
    folder = fetched_model(config.start_from)
    released = read_released(folder)
    tokenizer = start_tokenizer(folder, released)
    state = {**released.backbone, **released.pretraining}
    for ours, theirs in _POOLER.items():
        if ours in shapes and theirs in released.head:
            state[ours] = released.head[theirs]
    state = {name: tensor for name, tensor in state.items() if name in shapes}
    fingerprint = digest(state)
    old_rows = vocabulary_size(tokenizer)
    id_lists = _ids_replaced_by_added_words(tokenizer, shards)
    if not id_lists:
        old_rows = config.model.rows(old_rows)
    for name in _VOCABULARY_PARAMETERS:
        if name in state:
            state[name] = _with_mean_rows(state[name][:old_rows], id_lists)
    bias = "heads.mlm_bias"
    bias_from_corpus = bias in shapes and bias not in state
    if bias_from_corpus:
        state[bias] = torch.zeros(shapes[bias][0])
        if count_tokens:
            state[bias] = log_frequencies(shards, rows=shapes[bias][0])
    for name, tensor in state.items():
        if list(tensor.shape) != list(shapes[name]):
            raise InputError(
                f"start_from: {folder}: {name} is {list(tensor.shape)}, but this run's model has {list(shapes[name])}. "
                "Start a new run, whose model is taken from the checkpoint."
            )
    missing = tuple(name for name in shapes if name not in state)
    if required := [name for name in missing if not name.startswith("heads.")]:
        raise InputError(f"start_from: {folder} has no {required[0]}, which this run's model needs. Start a new run.")
    table = weights_table(released, shapes, missing, bias_from_corpus=bias_from_corpus, added_words=len(id_lists))
    table = "\n".join([table, *module_warnings(folder)])
    config_json = {} if is_run(released_folder(folder)) else released.config
    return Start(state, fingerprint, old_rows, missing, table, released.family, config_json, released.sentence_files)


def log_frequencies(shards: TokenShards, *, rows: int) -> Tensor:
    """Return the logarithm of each token's frequency in the corpus, fp32 [rows], with 1 added to every count.

    Special tokens and padding rows, which are never predicted, occur in no shard and so have the lowest value.
    """
    counts = np.ones(rows, np.float64)
    for tokens in shards.some_tokens():
        counts += np.bincount(tokens, minlength=len(counts))
    return torch.from_numpy(np.log(counts / counts.sum())).float()


def _ids_replaced_by_added_words(tokenizer: Tokenizer, shards: TokenShards) -> list[list[int]]:
    """Return, for each added entry of the corpus's vocabulary in order of id, the old ids that the entry replaces."""
    extended = Tokenizer.from_file(str(shards.folder / "tokenizer.json"))
    entries = [extended.id_to_token(index) or "" for index in range(vocabulary_size(tokenizer), shards.vocabulary_size)]
    return replaced_ids(tokenizer, entries)


def _with_mean_rows(rows_VH: Tensor, id_lists: Sequence[Sequence[int]]) -> Tensor:
    """Append to `rows_VH` [V, ...] a row for each list in `id_lists`: the mean of the rows with these ids."""
    if not id_lists:
        return rows_VH.contiguous()
    return torch.cat([rows_VH, torch.stack([rows_VH[list(ids)].mean(0) for ids in id_lists])])


def digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the tensors' names, shapes and values, as hexadecimal digits."""
    sha256 = hashlib.sha256()
    for name in sorted(state):
        sha256.update(f"{name} {list(state[name].shape)}\n".encode())
        sha256.update(state[name].contiguous().numpy().tobytes())
    return sha256.hexdigest()


def weights_table(
    released: ReleasedModel,
    shapes: Mapping[str, Sequence[int]],
    missing: Sequence[str],
    *,
    bias_from_corpus: bool,
    added_words: int,
) -> str:
    """Return lines that say which parameter each tensor fills, and how missing parameters are initialized."""
    targets = {tensor.target for tensor in released.mapping}
    shared_with_task = [
        part for ours, part in _SHARED_WITH_TASKS.items() if ours in shapes and ours not in {*targets, *missing}
    ]
    used = {*shapes, *(f"head.{part}" for part in shared_with_task)}
    mapping = [
        tensor._replace(target=f"{LEFT_OUT}this run has no such head")
        if tensor.is_read and tensor.target.startswith("head") and tensor.target not in used
        else tensor
        for tensor in released.mapping
    ]
    lines = [mapping_table(mapping)]
    heads = dict.fromkeys(f"{name.rpartition('_')[0]}.*" for name in missing)
    if heads:
        lines.append(f"initialized as in a new run: {', '.join(heads)}")
    if bias_from_corpus:
        lines.append("initialized from the frequencies of tokens in the corpus: heads.mlm_bias")
    if added_words:
        lines.append(f"initialized from the mean of their pieces: the rows of {added_words:,} added words")
    return "\n".join(lines)


# ---- a frozen model


def read_frozen(config: PretrainConfig, setting: str) -> FrozenModel:
    """Read the model at the location that the config's field `setting` contains.

    Raises:
        InputError: the model cannot be read, has no complete head for masked language modeling, has too few positions,
            or has another vocabulary than the corpus.
    """
    location = attrgetter(setting)(config)
    where = f"{setting}: {location}"
    released = read_released(fetched_model(location))
    tokenizer = start_tokenizer(fetched_model(location), released)
    shards = open_corpus(config.corpus, "train", needs_tokens=False)
    check_same_tokenizer(shards.folder, tokenizer, setting=setting)
    model, rows = released.model, config.model.rows(vocabulary_size(tokenizer))
    if rows > released.vocabulary_size:
        raise InputError(
            f"{where} has {released.vocabulary_size} rows of word embeddings, but model.vocabulary_rows is {rows}. "
            "Make them equal."
        )
    next_sentence = "heads.nsp_weight" in released.pretraining
    state, missing = released.prediction_state(next_sentence=next_sentence)
    if missing:
        raise InputError(
            f"{where} has no {missing}, so it cannot predict masked tokens. Choose a model for masked language "
            "modeling, or train its head first with start_from."
        )
    longest = max(phase.sequence_length for phase in config.phases)
    if model.max_positions < longest:
        raise InputError(
            f"{where} has {model.max_positions} positions, but phases have sequences of {longest} tokens. Shorten them."
        )
    for name in _VOCABULARY_PARAMETERS:
        if name in state:
            state[name] = state[name][:rows].contiguous()
    return FrozenModel(location, model, next_sentence, state, digest(state))
