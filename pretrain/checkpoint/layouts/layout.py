"""What describes a released layout: the names that a family's files give to our parameters, and its config.json.

`pretrain/model/parameters.py` has our names. The tables map modules, which have a weight and a bias in the files:

    embeddings.word, .position, .token_type    the three tables
    embeddings.norm, .project                  norm of their sum; projection to the hidden width, if any
    relative.table, .norm                      embeddings of distances, and their norm
    layers.N.qkv (or .q, .kv), .attention_out, .attention_norm, .ffn_in (or .gated_in), .ffn_out, .ffn_norm
    final.norm                                 norm after the last layer of a pre-norm model
    heads.mlm_transform, .mlm_norm, .mlm       masked-language-modeling head, and the bias of its decoder
    heads.decoder                              that decoder's weight, if it is not the word embeddings
    heads.pooler, .nsp                         next-sentence classifier
    head.dense, .norm                          first layer of a task's head: BERT's pooler, others' own
    head.out                                   classifier of sequences or tokens, or span scores
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pretrain.checkpoint.layouts.task_heads import TaskHead
from pretrain.config import ModelConfig
from pretrain.config.families import PARTS
from pretrain.model.activations import ACTIVATIONS, get_activation
from pretrain.model.parameters import (
    embedding_parameters,
    final_parameters,
    layer_parameters,
    position_parameters,
)

# Our parameters whose names have no kind; in the files each is the weight of a module.
TABLES = ("embeddings.word", "embeddings.position", "embeddings.token_type", "relative.table", "heads.decoder")
_SIZES = ("layers", "hidden", "heads", "intermediate", "max_positions", "embedding")


class StackedName(NamedTuple):
    """Which parameter of ours a tensor fills, and which of its stacked parts."""

    name: str
    part: int = 0


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class KeyMapping:
    """One family's names and its config.json.

    Attributes:
        family: a key of `LAYOUTS`.
        classes: the beginning of transformers' class names.
        layer: what precedes the number of a layer, without the prefix.
        in_layer: our module of a layer -> their modules, to be stacked in this order.
        elsewhere: our module -> theirs, with the prefix if they have it.
        decoder: the module of the masked-language-modeling decoder; "" if files have it under our names alone.
        out: the module of head.out by purpose, as it is written; any of them is read.
        config: field of `ModelConfig` -> key of config.json.
        task_head: (config.json, shape, purpose) -> what is between the encoder and head.out.
        model_type: transformers' name of the family, if it is not `family`.
        parts: `ModelConfig.family`, which sets the parts of the block.
        prefix: of the encoder's names in a model with a head; "" stands for the family and a point.
        bare: beginnings of the names of an encoder that is saved alone, without the prefix.
        spellings: patterns in older names, after the prefix, and what stands there today.
        fused: module of older files -> the modules of today that it stacks, in this order.
        unused: beginnings of names that fill no parameter of ours, and what they are.
        defaults: values of `ModelConfig` that a config.json without them has, if they are not those of `parts`.
        supported: key of config.json -> the values that our encoder supports; the first is that of an absent key.
        today: config.json -> the same with the keys of today, for families whose keys changed.
        read: config.json of today -> fields of `ModelConfig` that need more than a renamed key.
        write: (shape, config.json) -> what `read` reads.
        activation_key: the key of config.json that `ModelConfig.activation` becomes.
        mlm_activation: that of the masked-language-modeling head if it is fixed; otherwise it follows the layers'.
        token_types: rows of the segment table if config.json names none; None if the family never has one.
        padded_positions: whether the position table begins with unused rows up to the padding token's id.
        next_sentence: whether the family has a next-sentence head.
        special_ids: keys of config.json for ids of special tokens, besides pad_token_id, and the token's role.
        tokenizer_class: transformers' class of its tokenizers; "" is the classes' beginning and Tokenizer.
        alike: model_type of families whose layout is this one -> the beginning of their classes.
        older: model_type that this family had before; such a model is written with today's.
    """

    family: str
    classes: str
    layer: str
    in_layer: Mapping[str, tuple[str, ...]]
    elsewhere: Mapping[str, str]
    decoder: str
    out: Mapping[str, str]
    config: Mapping[str, str]
    task_head: Callable[[Mapping[str, Any], ModelConfig, str], TaskHead]
    model_type: str = ""
    parts: str = "bert"
    prefix: str = ""
    bare: tuple[str, ...] = ("embeddings.",)
    spellings: tuple[tuple[str, str], ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    today: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    write: Callable[[ModelConfig, Mapping[str, Any]], dict[str, Any]] = _nothing
    activation_key: str = "hidden_act"
    mlm_activation: str = ""
    token_types: int | None = None
    padded_positions: bool = False
    next_sentence: bool = False
    special_ids: Mapping[str, str] = field(default_factory=dict)
    tokenizer_class: str = ""
    alike: Mapping[str, str] = field(default_factory=dict)
    older: tuple[str, ...] = ()

    # ---- names

    def names(self, ours: str, purpose: str = "sequence") -> list[str]:
        """Their names of one parameter of ours as transformers writes them today: three for qkv, else one.

        [] if the family has no such parameter.
        """
        module, _, kind = (ours, "", "weight") if ours in TABLES else ours.rpartition("_")
        if kind not in ("weight", "bias"):
            return []
        match = re.fullmatch(r"layers\.(\d+)\.(\w+)", module)
        if match is not None:
            layer = f"{self._prefix}{self.layer}.{match[1]}"
            return [f"{layer}.{theirs}.{kind}" for theirs in self.in_layer.get(match[2], ())]
        theirs = self.out[purpose] if module == "head.out" else self.elsewhere.get(module)
        return [] if theirs is None else [f"{theirs}.{kind}"]

    def current_names(self, name: str) -> tuple[str, ...]:
        """The names that transformers gives today to what a tensor of a file holds: more than one if it stacks them."""
        name = self.plain(name)
        module, _, kind = name.rpartition(".")
        for fused, parts in self.fused.items():
            if module == fused or module.endswith(f".{fused}"):
                before = module.removesuffix(fused)
                return tuple(f"{before}{part}.{kind}" for part in parts)
        return (name,)

    def plain(self, name: str) -> str:
        """One of their names in today's spelling."""
        # DataParallel, torch.compile and Lightning each put something in front.
        while name.startswith(("module.", "_orig_mod.", "model.")):
            name = name.partition(".")[2]
        # TensorFlow's names of a LayerNorm, which torch checkpoints had until 2019.
        name = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", name)
        name = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", name)
        for pattern, today in self.spellings:
            name = re.sub(pattern, today, name)
        return self._prefix + name if name.startswith(self.bare) else name

    def tied(self, theirs: str, model: ModelConfig) -> str | None:
        """The parameter of ours that a tensor of the decoder repeats; None for all other tensors."""
        repeated = {f"{self.decoder}.bias": "heads.mlm_bias"}
        if model.tied_decoder:
            repeated[f"{self.decoder}.weight"] = "embeddings.word"
        name = self.plain(theirs)
        return repeated.get(name) if name not in self.names("heads.mlm_bias") else None

    def layer_number(self, theirs: str) -> int | None:
        """The number of the layer that a tensor of a file belongs to; None outside of the layers."""
        match = re.match(rf"{re.escape(self._prefix + self.layer)}\.(\d+)\.", self.plain(theirs))
        return None if match is None else int(match[1])

    def why_left_out(self, theirs: str) -> str:
        """Why a tensor that fills no parameter is not read."""
        name = self.plain(theirs)
        if name.endswith("embeddings.position_ids"):
            return "a constant: 0, 1, 2, ..."
        if name.endswith("embeddings.token_type_ids"):
            return "a constant: all 0"
        if name.endswith("inv_freq"):
            return "a constant: the rotary frequencies"
        for beginning, reason in self.unused.items():
            if name.startswith(beginning):
                return reason
        return "not a parameter of the encoder or its heads"

    # ---- config.json

    def model_of(self, config: Mapping[str, Any]) -> ModelConfig:
        """The shape in a config.json.

        Raises:
            KeyError: a size is missing.
            ValueError: a value that our encoder does not have, or values that do not fit.
        """
        model = self._shape_of(config)
        if reason := self._unlike(model, model):
            raise ValueError(reason)
        return model

    def _shape_of(self, config: Mapping[str, Any]) -> ModelConfig:
        """`model_of`, without a look at what the layout can name."""
        config = self.today(config)
        for key, supported in self.supported.items():
            if config.get(key, supported[0]) not in supported:
                raise ValueError(f"{key} is {config[key]!r}; only {supported[0]!r} is supported")
        sizes = {ours: config[theirs] for ours, theirs in self.config.items() if theirs in config or ours in _SIZES}
        if sizes.get("embedding") == sizes["hidden"]:
            sizes["embedding"] = 0
        if self.padded_positions:
            sizes["max_positions"] -= first_position(config)
        values = {"family": self.parts, "size": "custom", **self.defaults, "activation": self._activation(config)}
        return ModelConfig.model_validate({**values, **sizes, **self.read(config)})

    def values_of(self, model: ModelConfig, config: Mapping[str, Any], token_types: int = 2) -> dict[str, Any]:
        """The fields of config.json that a shape decides.

        Args:
            config: the rest of it, as it is known.
            token_types: rows of the segment table.
        """
        values = {key: getattr(model, ours) for ours, key in self.config.items()}
        if "embedding_size" in values:
            values["embedding_size"] = model.embedding or model.hidden
        values[self.activation_key] = get_activation(model.activation).released_names[0]
        if self.token_types is not None:
            values["type_vocab_size"] = token_types if model.token_types else 0
        return values | self.write(model, config)

    def without_counterpart(self, model: ModelConfig) -> str:
        """The parts of a model that this layout cannot hold; "" if it can hold all of it.

        They are found by writing the shape to a config.json and reading it again.
        """
        if not get_activation(model.activation).released_names:
            return f"model.activation is {model.activation}, which transformers does not have"
        try:
            values = self.values_of(model, {})
            if self.padded_positions:
                values["max_position_embeddings"] += first_position(values)
            back = self._shape_of(values)
        except (KeyError, ValueError) as error:
            positions = PARTS[self.parts].get("positions", "learned")
            if model.positions != positions:  # without its numbers, its config.json cannot be read
                return f"model.positions is {model.positions}, and {self.family} supports only {positions}"
            return " ".join(str(error).split())
        return self._unlike(model, back)

    def _unlike(self, model: ModelConfig, back: ModelConfig) -> str:
        """Where `back`, what a config.json of this family gives, is not the model."""
        reasons = [
            f"model.{name} is {value}, and {self.family} supports only {other}"
            for (name, value), other in zip(_traits(model).items(), _traits(back).values(), strict=True)
            if value != other
        ]
        if self.mlm_activation not in ("", model.activation):
            reasons.append(
                f"model.activation is {model.activation}, and {self.family}'s head has {self.mlm_activation}"
            )
        ours = {_any_layer(name) for name in encoder_shapes(model, 0)}
        theirs = {_any_layer(name) for name in encoder_shapes(back, 0) if self.names(name)}
        if self.token_types is None and model.token_types:
            theirs.add("embeddings.token_type")  # DistilBERT's positions take it up
        if ours - theirs:
            reasons.append(f"it has no counterpart of {', '.join(sorted(ours - theirs))}")
        if theirs - ours:
            reasons.append(f"the model lacks {', '.join(sorted(theirs - ours))}")
        return "; ".join(reasons)

    def _activation(self, config: Mapping[str, Any]) -> str:
        """Our name of the activation in a config.json; raises ValueError for an unknown one."""
        return activation_name(
            self.activation_key, config.get(self.activation_key, PARTS[self.parts].get("activation", "gelu"))
        )

    @property
    def released_name(self) -> str:
        """The model_type of what is written."""
        return self.model_type or self.family

    @property
    def _prefix(self) -> str:
        return self.prefix or f"{self.family}."


def first_position(config: Mapping[str, Any]) -> int:
    """The row of the first token in a position table that begins with padding.

    transformers models/roberta/modeling_roberta.py, create_position_ids_from_input_ids.
    """
    pad = config.get("pad_token_id")
    return (1 if pad is None else pad) + 1


def activation_name(key: str, given: Any) -> str:
    """Our name of an activation of transformers; raises ValueError, naming the `key`, for an unknown one."""
    for name, activation in ACTIVATIONS.items():
        if given in activation.released_names:
            return name
    known = ", ".join(repr(names[0]) for _, _, names in ACTIVATIONS.values() if names)
    raise ValueError(f"{key} is {given!r}; only {known} are supported")


def encoder_shapes(model: ModelConfig, vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of `pretrain.model.encoder.Encoder`, by name and in its order."""
    return {
        f"{part}.{parameter.name}": parameter.shape
        for part, parameters in _parts(model, vocabulary_size)
        for parameter in parameters
    }


def _parts(model: ModelConfig, vocabulary_size: int) -> Iterator[tuple[str, Any]]:
    yield "embeddings", embedding_parameters(model, vocabulary_size)
    yield "relative", position_parameters(model)
    for number in range(model.layers):
        yield f"layers.{number}", layer_parameters(model, number)
    yield "final", final_parameters(model)


def _any_layer(name: str) -> str:
    return re.sub(r"^layers\.\d+", "layers.*", name)


def _traits(model: ModelConfig) -> dict[str, Any]:
    """What two shapes must agree in to compute the same, besides their sizes; what stands for a default is resolved."""
    same = (
        "norm",
        "norm_placement",
        "layer_norm_eps",
        "embedding_norm",
        "token_types",
        "positions",
        "rotary_base",
        "relative_buckets",
        "relative_max_distance",
        "relative_terms",
        "relative_norm",
        "relative_projections",
        "recursions",
        "activation",
        "gated",
        "attention_bias",
        "ffn_in_bias",
        "ffn_out_bias",
        "mlm_transform",
        "mlm_transform_bias",
        "decoder_bias",
        "tied_decoder",
        "pooling",
    )
    numbers = range(model.layers)
    return {
        **{name: getattr(model, name) for name in same},
        "local_attention": [model.window(number) * 2 for number in numbers],
        "local_rotary_base": [model.rotary_base_of(number) for number in numbers],
        "kv_heads": model.kv_heads or model.heads,
        "embedding": model.embedding or model.hidden,
    }
