"""Our layout, for models with parts that no released family has. transformers has no class for it.

config.json has a complete `ModelConfig` under `model`, and tensors have the names of `pretrain/model/parameters.py`,
with query, key and value stacked. So it can represent every model that can be trained.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.checkpoint.layouts.layout import Layout
from pretrain.checkpoint.layouts.task_heads import TaskHead, sequence_head
from pretrain.config import ModelConfig


@dataclass(frozen=True)
class BertrainLayout(Layout):
    """A layout without tables of names: names and fields of config.json are ours."""

    def names(self, ours: str, purpose: str = "sequence") -> list[str]:
        """Return the name unchanged, except that a task head's dense layer is the pooler of pretraining, as in BERT."""
        return [re.sub(r"^head\.dense_", "heads.pooler_", ours)]

    def model_of(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the shape in a config.json; parameters that fine-tuning adds get BERT's initialization.

        Raises:
            KeyError: config.json has no `model`.
            ValueError: `ModelConfig` rejects a value.
        """
        return ModelConfig.model_validate(config["model"]).model_copy(update={"attention_init": "normal"})

    def values_of(self, model: ModelConfig, config: Mapping[str, Any], token_types: int = 2) -> dict[str, Any]:
        """Return the fields of config.json that a shape determines."""
        return {"type_vocab_size": token_types if model.token_types else 0, "model": model.model_dump(mode="json")}

    def unsupported_parts(self, model: ModelConfig) -> str:
        """Return "": the layout can represent every model."""
        return ""

    @property
    def _prefix(self) -> str:
        return ""


def _head(config: Mapping[str, Any], model: ModelConfig, purpose: str) -> TaskHead:
    """Return BERT's head, with the model's pooling."""
    head = sequence_head("tanh")(config, model, purpose)
    return head._replace(pooling=model.pooling) if purpose == "sequence" else head


LAYOUT = BertrainLayout(
    family="bertrain",
    class_prefix="Bertrain",
    layer="layers",
    layer_modules={},
    other_modules={},
    decoder="",
    out_modules={"sequence": "head.out"},
    config_keys={},
    task_head=_head,
    bare_prefixes=(),
    unused={"heads.rtd_": "the head that detects replaced tokens"},
    default_token_types=2,
    next_sentence=True,
    tokenizer_class="PreTrainedTokenizerFast",
)
