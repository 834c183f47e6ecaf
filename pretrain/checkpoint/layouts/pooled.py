"""Sequence heads that pool all tokens (mean or maximum), for families whose class in transformers reads only [CLS].

Models trained by sentence-transformers need this: their first token was never trained to represent the input. A
fine-tuned classifier is written under a custom model type with a modeling file, so that transformers requires
`trust_remote_code` and does not load it as a classifier of [CLS]. Its encoder is saved as well, in the family's layout.
"""

from collections.abc import Mapping
from typing import Any

POOLING = "classifier_pooling"  # key of the pooling in config.json, as in ModernBERT's
MODEL_TYPE = "pooled_encoder"
MODELING_FILE = "modeling_pooled.py"
ENCODER = "encoder"  # subfolder with the encoder, without the head
_CLASS = "PooledForSequenceClassification"
_TYPE_KEY, _OUTPUT_KEY = "encoder_model_type", "output_layer"
_ADDED_KEYS = (_TYPE_KEY, _OUTPUT_KEY, "auto_map")


def wrap(values: Mapping[str, Any], output_layer: str) -> dict[str, Any]:
    """Return config.json of a pooled classifier, given the `values` of the family's config.json.

    Args:
        output_layer: the family's name of the output layer, such as classifier.
    """
    module = MODELING_FILE.removesuffix(".py")
    return {
        **values,
        "model_type": MODEL_TYPE,
        "architectures": [_CLASS],
        _TYPE_KEY: values["model_type"],
        _OUTPUT_KEY: output_layer,
        "auto_map": {
            "AutoConfig": f"{module}.PooledConfig",
            "AutoModelForSequenceClassification": f"{module}.{_CLASS}",
        },
    }


def unwrap(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the family's config.json from a pooled classifier's; other configs are returned unchanged."""
    if config.get("model_type") != MODEL_TYPE or _TYPE_KEY not in config:
        return dict(config)
    return {**{key: value for key, value in config.items() if key not in _ADDED_KEYS}, "model_type": config[_TYPE_KEY]}
