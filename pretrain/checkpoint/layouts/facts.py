"""Reads and writes config.json of released models of all families (invariant 6 in docs/invariants.md)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pretrain.checkpoint.layouts import families
from pretrain.checkpoint.layouts.layout import Layout, first_position
from pretrain.checkpoint.layouts.pooled import POOLING, wrap
from pretrain.checkpoint.layouts.task_heads import TaskHead
from pretrain.common.errors import InputError
from pretrain.common.kinds import kind_names, load_kind
from pretrain.config import ModelConfig

LAYOUTS: dict[str, Layout] = {name: load_kind(families.__name__, name).LAYOUT for name in kind_names(families.__name__)}
BERT = LAYOUTS["bert"]
BERTRAIN = LAYOUTS["bertrain"]


class Architecture(NamedTuple):
    """A model's shape and layout, as described by its config.json."""

    layout: Layout
    model: ModelConfig
    token_types: int = 2  # number of token types in the file; 0 if it has no table of them
    first_position: int = 0  # row of a sequence's first token in the position table


def read_config(config: Mapping[str, Any]) -> Architecture:
    """Read a config.json or a bert_config.json.

    Raises:
        KeyError: a size is missing.
        ValueError: our encoder does not support a family, activation or other property, or sizes are inconsistent.
    """
    layout = LAYOUTS.get(_family(config))
    if layout is None:
        known = [name for x in LAYOUTS.values() for name in (x.written_model_type, *x.variants, *x.legacy_model_types)]
        raise ValueError(f"model_type is {config['model_type']!r}; {', '.join(known)} are supported")
    for key in _HEAD_DROPOUTS:
        rate = config.get(key)
        if rate is not None and not (isinstance(rate, int | float) and 0 <= rate < 1):
            raise ValueError(f"{key} is {rate!r}; expected a number from 0 to below 1")
    token_types = 0 if layout.default_token_types is None else config.get("type_vocab_size", layout.default_token_types)
    if token_types not in (0, 1, 2):
        raise ValueError(f"type_vocab_size is {token_types}; 1 and 2 are supported")
    return Architecture(
        layout, layout.model_of(config), token_types, first_position(config) if layout.padded_positions else 0
    )


def write_config(
    config: Mapping[str, Any],
    arch: Architecture,
    class_suffix: str,
    vocabulary_size: int,
    pad_id: int | None,
    special_ids: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Return config.json of a model in fp32: `config`, except that `arch` determines some fields.

    Args:
        class_suffix: suffix of the class's name, such as ForPreTraining.
        pad_id: id of the padding token, if `config` has none.
        special_ids: role -> id of special tokens, for keys of `Layout.special_ids` that `config` lacks.

    Raises:
        InputError: the family's layout cannot represent the model.
    """
    layout, model, token_types, first_position = arch
    check_supported(layout, model)
    model_type = config["model_type"] if config.get("model_type") in layout.variants else layout.written_model_type
    values = layout.values_of(model, config, token_types)
    if first_position:
        values["max_position_embeddings"] += first_position
    ids = {key: (special_ids or {}).get(role) for key, role in layout.special_ids.items()}
    content = {
        "pad_token_id": pad_id,
        **{key: index for key, index in ids.items() if index is not None},
        **{key: value for key, value in config.items() if key not in _NOT_COPIED},
        "architectures": [layout.variants.get(model_type, layout.class_prefix) + class_suffix],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": vocabulary_size,
        **values,
    }
    if class_suffix == "ForSequenceClassification" and needs_custom_code(layout.family, model, config):
        return wrap(content, layout.names("head.out_weight", "sequence")[0].removesuffix(".weight"))
    return content


def needs_custom_code(family: str, model: ModelConfig, config: Mapping[str, Any]) -> bool:
    """Return whether a sequence classifier needs `trust_remote_code`: no class of transformers has its pooling."""
    return config.get(POOLING, "cls") != "cls" and POOLING not in LAYOUTS[family].values_of(model, config)


def check_supported(layout: Layout, model: ModelConfig) -> None:
    """Raise `InputError` if the layout cannot represent the model."""
    if reason := layout.unsupported_parts(model):
        raise InputError(
            f"The released layout of {layout.family} cannot represent this model: {reason}. "
            "Export it without naming a family, or train with the family's standard architecture."
        )


def layout_of(model: ModelConfig, family: str = "") -> Layout:
    """Return the layout for exporting a pretrained model: its family's, or ours if that cannot represent the model.

    Args:
        family: a key of `LAYOUTS`, if it is not `model.family`.
    """
    layout = LAYOUTS[family or model.family]
    return BERTRAIN if layout.unsupported_parts(model) else layout


def unsupported_parts(model: ModelConfig) -> str:
    """Return the settings that prevent an export in the layout of the model's family; "" if none does."""
    # A discriminator of ELECTRA has the architecture of another family.
    reasons = filter(None, (LAYOUTS[family].unsupported_parts(model) for family in (model.family, "electra")))
    reason = next(reasons, "")
    settings = [part for part in reason.split("; ") if part.startswith("model.")]
    return "; ".join(settings) or reason


def task_head(family: str, config: Mapping[str, Any], model: ModelConfig, purpose: str) -> TaskHead:
    """Return a family's head for a task, as in transformers.

    Args:
        family: a key of `LAYOUTS`.
        config: config.json, or {} for the family's defaults.
        model: the shape; its dropout applies if `config` names none for the head.
        purpose: "sequence", "tokens" or "spans".
    """
    return LAYOUTS[family].task_head(config, model, purpose)


_HEAD_DROPOUTS = ("classifier_dropout", "seq_classif_dropout", "qa_dropout")
# Fields that are not copied from a config.json that was read to the one that is written.
_NOT_COPIED = (
    "transformers_version",
    "torch_dtype",
    "_name_or_path",
    "auto_map",
    "quantization_config",
    "num_labels",
)


def _family(config: Mapping[str, Any]) -> str:
    """Return the key of the family in `LAYOUTS`, or "". Configs from before 2020 have no model_type."""
    model_type: str | None = config.get("model_type")
    if model_type is not None:
        names: dict[str, str] = {
            name: layout.family
            for layout in LAYOUTS.values()
            for name in (layout.written_model_type, *layout.variants, *layout.legacy_model_types)
        }
        return names.get(model_type, "")
    architecture = (config.get("architectures") or [""])[0]
    for layout in LAYOUTS.values():
        if architecture.startswith(layout.class_prefix):
            return layout.family
    return "distilbert" if "n_layers" in config else "bert"
