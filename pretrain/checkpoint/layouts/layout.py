"""The description of a released layout: the names of our parameters in a family's files, and its config.json.

`pretrain/model/parameters.py` has our names. `Layout` maps our modules, which have weights and biases, to the family's:

    embeddings.word, .position, .token_type    the three tables
    embeddings.norm, .project                  norm of their sum; projection to the hidden width, if any
    relative.table, .norm                      embeddings of distances, and their norm
    layers.N.qkv (or .q, .kv), .attention_out, .attention_norm, .ffn_in (or .gated_in), .ffn_out, .ffn_norm
    final.norm                                 norm after the last layer of a pre-norm model
    heads.mlm_transform, .mlm_norm, .mlm       masked-language-modeling head, and the bias of its decoder
    heads.decoder                              that decoder's weight, if it is not the word embeddings
    heads.pooler, .nsp                         next-sentence classifier
    head.dense, .norm                          first layer of a task's head: BERT's pooler, or a separate layer
    head.out                                   classifier of sequences or tokens, or span scores
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pretrain.checkpoint.layouts.task_heads import TaskHead
from pretrain.config import ModelConfig
from pretrain.config.families import FAMILY_SETTINGS
from pretrain.model.activations import ACTIVATIONS, get_activation
from pretrain.model.parameters import (
    embedding_parameters,
    final_parameters,
    layer_parameters,
    position_parameters,
)

# Our parameters whose names have no suffix _weight or _bias. In the files, each is a module's weight.
TABLES = ("embeddings.word", "embeddings.position", "embeddings.token_type", "relative.table", "heads.decoder")
_SIZES = ("layers", "hidden", "heads", "intermediate", "max_positions", "embedding")


class StackedName(NamedTuple):
    """One of our parameters, or, if it stacks several tensors of a file, the part with this index."""

    name: str
    part: int = 0


def _no_fields(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Layout:
    """The names of one family, and its config.json.

    Attributes:
        family: a key of `LAYOUTS`.
        class_prefix: prefix of transformers' class names.
        layer: name, without `prefix`, of the module list of layers, such as encoder.layer.
        layer_modules: our module of a layer -> the family's modules that it stacks, in this order.
        other_modules: our module outside the layers -> the family's, including the prefix if it has one.
        decoder: the module of the masked-language-modeling decoder; "" if the layout uses our names.
        out_modules: task (sequence, tokens, spans) -> the module written for head.out; any of them may be read.
        config_keys: field of `ModelConfig` -> key of config.json.
        task_head: (config.json, shape, task) -> the layers between the encoder and head.out.
        model_type: transformers' name of the family; "" if it is `family`.
        model_family: `ModelConfig.family`, which determines the parts of the block.
        prefix: prefix of the encoder's names in a model with a head; "" stands for the family and a period.
        bare_prefixes: prefixes of the encoder's names in a file without a head, where they lack `prefix`.
        spellings: regular expressions of older names, without the prefix, and their current replacement.
        fused: module of older files -> the current modules that it stacks, in this order.
        unused: prefix of names that fill none of our parameters -> a description of these tensors.
        defaults: values of `ModelConfig` if config.json has none, where they differ from `model_family`'s.
        supported: key of config.json -> the supported values; the first is assumed if the key is absent.
        modernize: converts a config.json to the current keys, for families whose keys changed.
        read: current config.json -> fields of `ModelConfig` that need more than renaming a key.
        write: (shape, config.json) -> fields of config.json, from which `read` restores the shape.
        activation_key: the key of config.json for `ModelConfig.activation`.
        mlm_activation: activation of the masked-language-modeling head if it is fixed; "" means as in the layers.
        default_token_types: number of token types if config.json does not say; None if the family never has any.
        padded_positions: whether the position table starts with unused rows, up to the padding token's id.
        next_sentence: whether the family has a next-sentence head.
        special_ids: key of config.json for the id of a special token (besides pad_token_id) -> the token's role.
        tokenizer_class: transformers' class of its tokenizers; "" stands for `class_prefix` + "Tokenizer".
        variants: model_type of other families with the same layout -> the prefix of their classes.
        legacy_model_types: earlier values of model_type for this family; models are written with the current one.
    """

    family: str
    class_prefix: str
    layer: str
    layer_modules: Mapping[str, tuple[str, ...]]
    other_modules: Mapping[str, str]
    decoder: str
    out_modules: Mapping[str, str]
    config_keys: Mapping[str, str]
    task_head: Callable[[Mapping[str, Any], ModelConfig, str], TaskHead]
    model_type: str = ""
    model_family: str = "bert"
    prefix: str = ""
    bare_prefixes: tuple[str, ...] = ("embeddings.",)
    spellings: tuple[tuple[str, str], ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    modernize: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_fields
    write: Callable[[ModelConfig, Mapping[str, Any]], dict[str, Any]] = _no_fields
    activation_key: str = "hidden_act"
    mlm_activation: str = ""
    default_token_types: int | None = None
    padded_positions: bool = False
    next_sentence: bool = False
    special_ids: Mapping[str, str] = field(default_factory=dict)
    tokenizer_class: str = ""
    variants: Mapping[str, str] = field(default_factory=dict)
    legacy_model_types: tuple[str, ...] = ()

    # ---- names

    def names(self, ours: str, purpose: str = "sequence") -> list[str]:
        """Return the family's current names of one of our parameters: several if its files split it, such as qkv.

        [] if the family has no such parameter.
        """
        module, _, kind = (ours, "", "weight") if ours in TABLES else ours.rpartition("_")
        if kind not in ("weight", "bias"):
            return []
        match = re.fullmatch(r"layers\.(\d+)\.(\w+)", module)
        if match is not None:
            layer = f"{self._prefix}{self.layer}.{match[1]}"
            return [f"{layer}.{theirs}.{kind}" for theirs in self.layer_modules.get(match[2], ())]
        theirs = self.out_modules[purpose] if module == "head.out" else self.other_modules.get(module)
        return [] if theirs is None else [f"{theirs}.{kind}"]

    def current_names(self, name: str) -> tuple[str, ...]:
        """Return transformers' current names for a tensor of a file: more than one if the tensor is stacked."""
        name = self.normalize(name)
        module, _, kind = name.rpartition(".")
        for fused, parts in self.fused.items():
            if module == fused or module.endswith(f".{fused}"):
                parent = module.removesuffix(fused)
                return tuple(f"{parent}{part}.{kind}" for part in parts)
        return (name,)

    def normalize(self, name: str) -> str:
        """Convert one of the family's names to the current spelling."""
        # DataParallel, torch.compile and Lightning each add a prefix.
        while name.startswith(("module.", "_orig_mod.", "model.")):
            name = name.partition(".")[2]
        # TensorFlow's names of LayerNorm parameters, which torch checkpoints used until 2019.
        name = re.sub(r"(LayerNorm|layer_norm)\.gamma$", r"\1.weight", name)
        name = re.sub(r"(LayerNorm|layer_norm)\.beta$", r"\1.bias", name)
        for pattern, current in self.spellings:
            name = re.sub(pattern, current, name)
        return self._prefix + name if name.startswith(self.bare_prefixes) else name

    def tied_parameter(self, theirs: str, model: ModelConfig) -> str | None:
        """Return the parameter of ours that a tensor of the decoder duplicates; None for all other tensors."""
        duplicated = {f"{self.decoder}.bias": "heads.mlm_bias"}
        if model.tied_decoder:
            duplicated[f"{self.decoder}.weight"] = "embeddings.word"
        name = self.normalize(theirs)
        return duplicated.get(name) if name not in self.names("heads.mlm_bias") else None

    def layer_index(self, theirs: str) -> int | None:
        """Return the index of the layer that a tensor of a file belongs to; None outside the layers."""
        match = re.match(rf"{re.escape(self._prefix + self.layer)}\.(\d+)\.", self.normalize(theirs))
        return None if match is None else int(match[1])

    def skip_reason(self, theirs: str) -> str:
        """Return the reason, for the mapping table, why a tensor that fills no parameter is not read."""
        name = self.normalize(theirs)
        if name.endswith("embeddings.position_ids"):
            return "a constant: 0, 1, 2, ..."
        if name.endswith("embeddings.token_type_ids"):
            return "a constant: all 0"
        if name.endswith("inv_freq"):
            return "a constant: the rotary frequencies"
        for prefix, reason in self.unused.items():
            if name.startswith(prefix):
                return reason
        return "not a parameter of the encoder or its heads"

    # ---- config.json

    def model_of(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the shape in a config.json.

        Raises:
            KeyError: a size is missing.
            ValueError: our encoder does not support a value, or values are inconsistent.
        """
        model = self._shape_of(config)
        if reason := self._differences(model, model):
            raise ValueError(reason)
        return model

    def _shape_of(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the shape as `model_of` does, but do not check that the layout has names for all parameters."""
        config = self.modernize(config)
        for key, supported in self.supported.items():
            if config.get(key, supported[0]) not in supported:
                raise ValueError(f"{key} is {config[key]!r}; only {supported[0]!r} is supported")
        fields = {ours: config[key] for ours, key in self.config_keys.items() if key in config or ours in _SIZES}
        if fields.get("embedding") == fields["hidden"]:
            fields["embedding"] = 0
        if self.padded_positions:
            fields["max_positions"] -= first_position(config)
        fixed = {"family": self.model_family, "size": "custom", "activation": self._activation(config)}
        return ModelConfig.model_validate({**self.defaults, **fixed, **fields, **self.read(config)})

    def values_of(self, model: ModelConfig, config: Mapping[str, Any], token_types: int = 2) -> dict[str, Any]:
        """Return the fields of config.json that a shape determines.

        Args:
            config: other fields of config.json, as far as they are known.
            token_types: number of token types in the file.
        """
        values = {key: getattr(model, ours) for ours, key in self.config_keys.items()}
        if "embedding_size" in values:
            values["embedding_size"] = model.embedding or model.hidden
        values[self.activation_key] = get_activation(model.activation).released_names[0]
        if self.default_token_types is not None:
            values["type_vocab_size"] = token_types if model.token_types else 0
        return values | self.write(model, config)

    def unsupported_parts(self, model: ModelConfig) -> str:
        """Describe the parts of a model that this layout cannot represent; "" if it can represent all of it.

        Detects them by writing the shape to a config.json and reading it again.
        """
        if not get_activation(model.activation).released_names:
            return f"model.activation is {model.activation}, which transformers does not have"
        try:
            values = self.values_of(model, {})
            if self.padded_positions:
                values["max_position_embeddings"] += first_position(values)
            reread = self._shape_of(values)
        except (KeyError, ValueError) as error:
            positions = FAMILY_SETTINGS[self.model_family].get("positions", "learned")
            if model.positions != positions:  # config.json then lacks fields that are needed to read it
                return f"model.positions is {model.positions}, and {self.family} supports only {positions}"
            return " ".join(str(error).split())
        return self._differences(model, reread)

    def _differences(self, model: ModelConfig, reread: ModelConfig) -> str:
        """Describe the differences between the model and `reread`, the shape in this family's config.json."""
        reasons = [
            f"model.{name} is {value}, and {self.family} supports only {other}"
            for (name, value), other in zip(_traits(model).items(), _traits(reread).values(), strict=True)
            if value != other
        ]
        if self.mlm_activation not in ("", model.activation):
            reasons.append(
                f"model.activation is {model.activation}, and {self.family}'s head has {self.mlm_activation}"
            )
        ours = {_without_layer_index(name) for name in encoder_shapes(model, 0)}
        theirs = {_without_layer_index(name) for name in encoder_shapes(reread, 0) if self.names(name)}
        if self.default_token_types is None and model.token_types:
            theirs.add("embeddings.token_type")  # DistilBERT adds it to the positions
        if ours - theirs:
            reasons.append(f"it has no counterpart of {', '.join(sorted(ours - theirs))}")
        if theirs - ours:
            reasons.append(f"the model lacks {', '.join(sorted(theirs - ours))}")
        return "; ".join(reasons)

    def _activation(self, config: Mapping[str, Any]) -> str:
        """Return our name of the activation in a config.json; raises ValueError for an unknown one."""
        default = FAMILY_SETTINGS[self.model_family].get("activation", "gelu")
        return activation_name(self.activation_key, config.get(self.activation_key, default))

    @property
    def written_model_type(self) -> str:
        """Return the model_type in the config.json of written models."""
        return self.model_type or self.family

    @property
    def _prefix(self) -> str:
        return self.prefix or f"{self.family}."


def first_position(config: Mapping[str, Any]) -> int:
    """Return the row of a sequence's first token in a position table that starts with unused rows.

    As in create_position_ids_from_input_ids of transformers (models/roberta/modeling_roberta.py).
    """
    pad = config.get("pad_token_id")
    return (1 if pad is None else pad) + 1


def activation_name(key: str, value: Any) -> str:
    """Return our name of an activation of transformers; raises ValueError, naming the `key`, for an unknown one."""
    for name, activation in ACTIVATIONS.items():
        if value in activation.released_names:
            return name
    known = ", ".join(repr(names[0]) for _, _, names in ACTIVATIONS.values() if names)
    raise ValueError(f"{key} is {value!r}; only {known} are supported")


def encoder_shapes(model: ModelConfig, vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of `pretrain.model.encoder.Encoder` by name, in its order."""
    return {
        f"{part}.{parameter.name}": parameter.shape
        for part, parameters in _parameters(model, vocabulary_size)
        for parameter in parameters
    }


def _parameters(model: ModelConfig, vocabulary_size: int) -> Iterator[tuple[str, Any]]:
    yield "embeddings", embedding_parameters(model, vocabulary_size)
    yield "relative", position_parameters(model)
    for layer in range(model.layers):
        yield f"layers.{layer}", layer_parameters(model, layer)
    yield "final", final_parameters(model)


def _without_layer_index(name: str) -> str:
    return re.sub(r"^layers\.\d+", "layers.*", name)


def _traits(model: ModelConfig) -> dict[str, Any]:
    """Return the settings, besides sizes, that must be equal in equivalent shapes, with defaults resolved."""
    names = (
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
    layers = range(model.layers)
    return {
        **{name: getattr(model, name) for name in names},
        "local_attention": [model.window(layer) * 2 for layer in layers],
        "local_rotary_base": [model.rotary_base_of(layer) for layer in layers],
        "kv_heads": model.kv_heads or model.heads,
        "embedding": model.embedding or model.hidden,
    }
