"""The names that released checkpoints of the BERT family give to our parameters, and their configs: a table each.

`pretrain/model/parameters.py` has our names. A module in these tables has a weight and a bias in the files, and qkv is
query, key and value stacked:

    embeddings.word, .position, .token_type    the three tables
    embeddings.norm, .project                  norm of their sum; projection to the hidden width, if any
    layers.N.qkv, .attention_out, .attention_norm, .ffn_in, .ffn_out, .ffn_norm
    heads.mlm_transform, .mlm_norm, .mlm_bias  masked-language-modelling head; the decoder is tied to embeddings.word
    heads.nsp                                  next-sentence classifier on top of head.dense
    head.dense                                 first layer of the sequence head: BERT's pooler, others' own
    head.out                                   classifier of sequences or tokens, or span scores

transformers: models/{bert,distilbert,roberta,electra}/modeling_*.py and configuration_*.py, 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pretrain.common.errors import InputError
from pretrain.config import ModelConfig
from pretrain.model.activations import ACTIVATIONS, get_activation
from pretrain.model.parameters import embedding_parameters, layer_parameters

# The activation between head.dense and head.out.
HEAD_ACTIVATION: dict[str, str] = {"bert": "tanh", "distilbert": "relu", "roberta": "tanh", "electra": "gelu"}


class HeadDropout(NamedTuple):
    """Dropout rates of a task's head in training; a head without head.dense has only the second."""

    before_dense: float = 0.0
    before_out: float = 0.0


def head_dropout(family: str, config: Mapping[str, Any], model: ModelConfig, purpose: str) -> HeadDropout:
    """The dropout rates of a family's head in transformers.

    Args:
        family: a key of `LAYOUTS`.
        config: config.json, or {} for the family's defaults.
        model: the shape; its dropout applies if `config` names none for the head.
        purpose: "sequence", "tokens" or "spans".
    """
    if family == "distilbert":
        own = {"sequence": ("seq_classif_dropout", 0.2), "spans": ("qa_dropout", 0.1)}
        return HeadDropout(before_out=config.get(*own[purpose]) if purpose in own else model.hidden_dropout)
    if purpose == "spans":  # google-research/bert run_squad.py, create_model, drops nothing either
        return HeadDropout()
    share = config.get("classifier_dropout")
    share = model.hidden_dropout if share is None else share
    # RobertaClassificationHead and ElectraClassificationHead drop their input as well.
    twice = purpose == "sequence" and family in ("roberta", "electra")
    return HeadDropout(share if twice else 0.0, share)


class StackedName(NamedTuple):
    """Which parameter of ours a tensor fills, and which of its stacked parts."""

    name: str
    part: int = 0


@dataclass(frozen=True)
class KeyMapping:
    """One family's names.

    Attributes:
        family: also transformers' model_type.
        classes: the beginning of transformers' class names.
        layer: what precedes the number of a layer, without the prefix `family.`.
        in_layer: our module of a layer -> their modules, to be stacked in this order.
        elsewhere: our module -> theirs, with the prefix if they have it.
        mlm_bias, decoder: the bias and the module of the masked-language-modelling head, whose weight is tied.
        out: the module of head.out by purpose, as it is written; any of them is read.
        unused: beginnings of names that fill no parameter of ours, and what they are.
        config: field of `ModelConfig` -> key of config.json.
        norm: the only `ModelConfig.norm` that the family has.
        activation_key: the key of config.json that `ModelConfig.activation` becomes.
        mlm_activation: that of the masked-language-modelling head if it is fixed; otherwise it follows the layers'.
    """

    family: str
    classes: str
    layer: str
    in_layer: Mapping[str, tuple[str, ...]]
    elsewhere: Mapping[str, str]
    mlm_bias: str
    decoder: str
    out: Mapping[str, str]
    unused: Mapping[str, str]
    config: Mapping[str, str]
    norm: str = "layer_norm"
    activation_key: str = "hidden_act"
    mlm_activation: str = ""
    _ours: dict[str, StackedName] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for kind in ("weight", "bias"):
            for ours, theirs in self.elsewhere.items():
                self._ours[f"{theirs}.{kind}"] = StackedName(f"{ours}_{kind}")
            for theirs in self.out.values():
                self._ours[f"{theirs}.{kind}"] = StackedName(f"head.out_{kind}")
        for ours in _TABLES:
            self._ours[f"{self._prefix}{_table_name(ours)}"] = StackedName(ours)
        if self.mlm_bias:
            self._ours[self.mlm_bias] = StackedName("heads.mlm_bias")

    def place(self, theirs: str) -> StackedName | None:
        """The parameter of ours that one of their names fills, in any accepted spelling; None if it fills none."""
        name = self.plain(theirs)
        match = re.fullmatch(rf"{re.escape(self._prefix + self.layer)}\.(\d+)\.(.+)\.(weight|bias)", name)
        if match is None:
            return self._ours.get(name)
        number, module, kind = match.groups()
        for ours, modules in self.in_layer.items():
            if module in modules:
                return StackedName(f"layers.{int(number)}.{ours}_{kind}", modules.index(module))
        return None

    def tied(self, theirs: str) -> str | None:
        """The parameter of ours that a tensor of the decoder repeats; None for all other tensors."""
        repeated = {
            f"{self.decoder}.weight": "embeddings.word",
            f"{self.decoder}.bias": "heads.mlm_bias",
        }
        return repeated.get(self.plain(theirs)) if self.decoder else None

    def names(self, ours: str, purpose: str = "sequence") -> list[str]:
        """Their names of one parameter of ours as transformers writes them today: three for qkv, else one."""
        if ours in _TABLES:
            return [self._prefix + _table_name(ours)]
        if ours == "heads.mlm_bias":
            return [self.mlm_bias]
        module, _, kind = ours.rpartition("_")
        match = re.fullmatch(r"layers\.(\d+)\.(\w+)", module)
        if match is not None:
            number, module = match.groups()
            layer = f"{self._prefix}{self.layer}.{number}"
            return [f"{layer}.{theirs}.{kind}" for theirs in self.in_layer[module]]
        theirs = self.out[purpose] if module == "head.out" else self.elsewhere[module]
        return [f"{theirs}.{kind}"]

    def plain(self, name: str) -> str:
        """One of their names in today's spelling."""
        # DataParallel, torch.compile and Lightning each put something in front.
        while name.startswith(("module.", "_orig_mod.", "model.")):
            name = name.partition(".")[2]
        # TensorFlow's names of a LayerNorm, which torch checkpoints had until 2019.
        name = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", name)
        name = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", name)
        # NVIDIA DeepLearningExamples modeling.py, LinearActivation.
        name = name.replace(".dense_act.", ".dense.")
        bare = ("embeddings.", "embeddings_project.", "encoder.", "transformer.", "pooler.")
        return self._prefix + name if name.startswith(bare) else name

    def without_counterpart(self, model: ModelConfig) -> str:
        """The parts of a model that this layout cannot hold; "" if it can hold all of it."""
        activation, reasons = get_activation(model.activation), []
        if model.norm != self.norm:
            reasons.append(f"model.norm is {model.norm}, and {self.family} supports only {self.norm}")
        if not activation.released_names:
            reasons.append(f"model.activation is {model.activation}, which transformers does not have")
        if self.mlm_activation not in ("", model.activation):
            reasons.append(
                f"model.activation is {model.activation}, and {self.family}'s head has {self.mlm_activation}"
            )
        ours, theirs = _our_names(model), self._names_in_files(model)
        if ours - theirs:
            reasons.append(f"it has no counterpart of {', '.join(sorted(ours - theirs))}")
        if theirs - ours:
            reasons.append(f"the model lacks {', '.join(sorted(theirs - ours))}")
        return "; ".join(reasons)

    def _names_in_files(self, model: ModelConfig) -> set[str]:
        """Our names of the parameters of embeddings and a layer that a file of the family has."""
        modules = [f"layers.*.{module}" for module in self.in_layer]
        modules += [module for module in self.elsewhere if module.startswith("embeddings.norm")]
        if model.embedding not in (0, model.hidden):
            modules += [module for module in self.elsewhere if module == "embeddings.project"]
        return {f"{module}_{kind}" for module in modules for kind in ("weight", "bias")} | set(_TABLES)

    def why_left_out(self, theirs: str) -> str:
        """Why a tensor that fills no parameter is not read."""
        name = self.plain(theirs)
        if name.endswith("embeddings.position_ids"):
            return "a constant: 0, 1, 2, ..."
        if name.endswith("embeddings.token_type_ids"):
            return "a constant: all 0"
        for beginning, reason in self.unused.items():
            if name.startswith(beginning):
                return reason
        return "not a parameter of the encoder or its heads"

    @property
    def _prefix(self) -> str:
        return f"{self.family}."


_TABLES = ("embeddings.word", "embeddings.position", "embeddings.token_type")


def _table_name(ours: str) -> str:
    return f"{ours}_embeddings.weight"


def _our_names(model: ModelConfig) -> set[str]:
    """The parameters of the embeddings and of one layer."""
    return {
        *(f"embeddings.{parameter.name}" for parameter in embedding_parameters(model, 0)),
        *(f"layers.*.{p.name}" for number in range(model.layers) for p in layer_parameters(model, number)),
    }


_BERT_LAYER = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention_out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "ffn_in": ("intermediate.dense",),
    "ffn_out": ("output.dense",),
    "ffn_norm": ("output.LayerNorm",),
}
_BERT_CONFIG = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_std": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
}

BERT = KeyMapping(
    family="bert",
    classes="Bert",
    layer="encoder.layer",
    in_layer=_BERT_LAYER,
    elsewhere={
        "embeddings.norm": "bert.embeddings.LayerNorm",
        "heads.mlm_transform": "cls.predictions.transform.dense",
        "heads.mlm_norm": "cls.predictions.transform.LayerNorm",
        "heads.nsp": "cls.seq_relationship",
        "head.dense": "bert.pooler.dense",
    },
    mlm_bias="cls.predictions.bias",
    decoder="cls.predictions.decoder",
    out={"sequence": "classifier", "tokens": "classifier", "spans": "qa_outputs"},
    unused={},
    config=_BERT_CONFIG,
)
DISTILBERT = KeyMapping(
    family="distilbert",
    classes="DistilBert",
    layer="transformer.layer",
    in_layer={
        "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention_out": ("attention.out_lin",),
        "attention_norm": ("sa_layer_norm",),
        "ffn_in": ("ffn.lin1",),
        "ffn_out": ("ffn.lin2",),
        "ffn_norm": ("output_layer_norm",),
    },
    elsewhere={
        "embeddings.norm": "distilbert.embeddings.LayerNorm",
        "heads.mlm_transform": "vocab_transform",
        "heads.mlm_norm": "vocab_layer_norm",
        "head.dense": "pre_classifier",
    },
    mlm_bias="vocab_projector.bias",
    decoder="vocab_projector",
    out={"sequence": "classifier", "tokens": "classifier", "spans": "qa_outputs"},
    unused={},
    config={
        "layers": "n_layers",
        "hidden": "dim",
        "heads": "n_heads",
        "intermediate": "hidden_dim",
        "max_positions": "max_position_embeddings",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "init_std": "initializer_range",
    },
    activation_key="activation",
)
ROBERTA = KeyMapping(
    family="roberta",
    classes="Roberta",
    layer="encoder.layer",
    in_layer=_BERT_LAYER,
    elsewhere={
        "embeddings.norm": "roberta.embeddings.LayerNorm",
        "heads.mlm_transform": "lm_head.dense",
        "heads.mlm_norm": "lm_head.layer_norm",
        "head.dense": "classifier.dense",
    },
    mlm_bias="lm_head.bias",
    decoder="lm_head.decoder",
    out={"sequence": "classifier.out_proj", "tokens": "classifier", "spans": "qa_outputs"},
    unused={"roberta.pooler.": "a pooler, which RoBERTa's heads do not use"},
    config=_BERT_CONFIG,
    mlm_activation="gelu",
)
ELECTRA = KeyMapping(
    family="electra",
    classes="Electra",
    layer="encoder.layer",
    in_layer=_BERT_LAYER,
    elsewhere={
        "embeddings.norm": "electra.embeddings.LayerNorm",
        "embeddings.project": "electra.embeddings_project",
        "head.dense": "classifier.dense",
    },
    mlm_bias="",
    decoder="",
    out={"sequence": "classifier.out_proj", "tokens": "classifier", "spans": "qa_outputs"},
    unused={
        "discriminator_predictions.": "the head that detects replaced tokens",
        "generator_": "the generator's head",
    },
    config={**_BERT_CONFIG, "embedding": "embedding_size"},
)
LAYOUTS = {layout.family: layout for layout in (BERT, DISTILBERT, ROBERTA, ELECTRA)}
# Families whose layout is another's, and the beginning of their classes: models/xlm_roberta/modular_xlm_roberta.py.
_LIKE = {"xlm-roberta": ("roberta", "XLMRoberta"), "camembert": ("roberta", "Camembert")}


class ReleasedFacts(NamedTuple):
    """The facts in a config.json about a model, besides the names of its tensors."""

    layout: KeyMapping
    model: ModelConfig
    token_types: int = 2  # rows of the table in the file; 0 if it has none
    first_position: int = 0  # row of the position table that the first token has


def read_config(config: Mapping[str, Any]) -> ReleasedFacts:
    """The facts in a config.json or a bert_config.json.

    Raises:
        KeyError: a size is missing.
        ValueError: a family, activation or other property that our encoder does not have, or sizes that do not fit.
    """
    layout = LAYOUTS.get(_family(config))
    if layout is None:
        raise ValueError(f"model_type is {config['model_type']!r}; {', '.join([*LAYOUTS, *_LIKE])} are supported")
    for key, supported in _SUPPORTED.items():
        if config.get(key, supported[0]) not in supported:
            raise ValueError(f"{key} is {config[key]!r}; only {supported[0]!r} is supported")
    for key in _HEAD_DROPOUTS:
        share = config.get(key)
        if share is not None and not (isinstance(share, int | float) and 0 <= share < 1):
            raise ValueError(f"{key} is {share!r}; expected a number from 0 to below 1")
    sizes = {ours: config[theirs] for ours, theirs in layout.config.items() if theirs in config or ours in _SIZES}
    if sizes.get("embedding") == sizes["hidden"]:
        sizes["embedding"] = 0
    token_types = 0 if layout is DISTILBERT else config.get("type_vocab_size", 2)
    if token_types not in (0, 1, 2):
        raise ValueError(f"type_vocab_size is {token_types}; 1 and 2 are supported")
    first_position = 0
    if layout is ROBERTA:
        # models/roberta/modeling_roberta.py, create_position_ids_from_input_ids: padding has a row, and none is before.
        pad = config.get("pad_token_id")
        first_position = (1 if pad is None else pad) + 1
        sizes["max_positions"] -= first_position
    activation = _activation(config, layout)
    model = ModelConfig.model_validate({"size": "custom", "attention_dropout": 0.1, "activation": activation, **sizes})
    if reason := layout.without_counterpart(model):
        raise ValueError(reason)
    return ReleasedFacts(layout, model, token_types, first_position)


def write_config(
    config: Mapping[str, Any], facts: ReleasedFacts, head: str, vocabulary_size: int, pad: int | None
) -> dict[str, Any]:
    """config.json of a model in fp32: `config`, with all fields that the facts decide replaced.

    Args:
        head: the end of the class's name, such as ForPreTraining.
        pad: id of the padding token, if `config` has none.

    Raises:
        InputError: the family's layout cannot hold the model.
    """
    layout, model, token_types, first_position = facts
    refuse_foreign(layout, model)
    same_family = _family(config) == layout.family and "model_type" in config
    model_type = config["model_type"] if same_family else layout.family
    _, classes = _LIKE.get(model_type, ("", layout.classes))
    values = {key: getattr(model, ours) for ours, key in layout.config.items()}
    if "embedding_size" in values:
        values["embedding_size"] = model.embedding or model.hidden
    values["max_position_embeddings"] += first_position
    values[layout.activation_key] = get_activation(model.activation).released_names[0]
    if layout is not DISTILBERT:
        values |= {"type_vocab_size": token_types, "position_embedding_type": "absolute"}
    return {
        "pad_token_id": pad,
        **{key: value for key, value in config.items() if key not in _NOT_COPIED},
        "architectures": [classes + head],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": vocabulary_size,
        **values,
    }


def refuse_foreign(layout: KeyMapping, model: ModelConfig) -> None:
    """Raise `InputError` if the layout cannot hold the model."""
    if reason := layout.without_counterpart(model):
        raise InputError(
            f"The released layout of {layout.family} cannot hold this model: {reason}. "
            "Keep the run's own checkpoints, or train with the family's own architecture."
        )


def _activation(config: Mapping[str, Any], layout: KeyMapping) -> str:
    """Our name of the activation in a config.json; raises ValueError for an unknown one."""
    given = config.get(layout.activation_key, "gelu")
    for name, activation in ACTIVATIONS.items():
        if given in activation.released_names:
            return name
    known = ", ".join(repr(names[0]) for _, _, names in ACTIVATIONS.values() if names)
    raise ValueError(f"{layout.activation_key} is {given!r}; only {known} are supported")


_SIZES = ("layers", "hidden", "heads", "intermediate", "max_positions", "embedding")
# What our encoder supports; the first of each is the meaning of a config without the key.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
}
_HEAD_DROPOUTS = ("classifier_dropout", "seq_classif_dropout", "qa_dropout")
# Fields that describe another file or another program.
_NOT_COPIED = (
    "transformers_version",
    "torch_dtype",
    "_name_or_path",
    "auto_map",
    "quantization_config",
    "num_labels",
)


def _family(config: Mapping[str, Any]) -> str:
    """The family in our table; configs from before 2020 have no model_type."""
    model_type = config.get("model_type")
    if model_type is not None:
        return _LIKE.get(model_type, (model_type, ""))[0]
    architecture = (config.get("architectures") or [""])[0]
    for layout in LAYOUTS.values():
        if architecture.startswith(layout.classes):
            return layout.family
    return "distilbert" if "n_layers" in config else "bert"
