"""Our own layout, for models with parts that no released family has. transformers has no class for it.

config.json has a whole `ModelConfig` under `model`, and tensors have the names of `pretrain/model/parameters.py`, with
query, key and value stacked. So it holds every model that can be trained.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.checkpoint.layouts.layout import KeyMapping
from pretrain.checkpoint.layouts.task_heads import TaskHead, sequence_head
from pretrain.config import ModelConfig


@dataclass(frozen=True)
class OwnLayout(KeyMapping):
    """A layout without tables: names and fields are ours."""

    def names(self, ours: str, purpose: str = "sequence") -> list[str]:
        """The name itself. The dense layer of a task's head is the pooler of pretraining, as BERT's is."""
        return [re.sub(r"^head\.dense_", "heads.pooler_", ours)]

    def model_of(self, config: Mapping[str, Any]) -> ModelConfig:
        """The shape in a config.json.

        What fine-tuning initializes again gets BERT's values, as that of a run does.

        Raises:
            KeyError: there is none.
            ValueError: a value that `ModelConfig` refuses.
        """
        return ModelConfig.model_validate(config["model"]).model_copy(update={"attention_init": "normal"})

    def values_of(self, model: ModelConfig, config: Mapping[str, Any], token_types: int = 2) -> dict[str, Any]:
        """The fields of config.json that a shape decides."""
        return {"type_vocab_size": token_types if model.token_types else 0, "model": model.model_dump(mode="json")}

    def without_counterpart(self, model: ModelConfig) -> str:
        """Nothing: it can hold every model."""
        return ""

    @property
    def _prefix(self) -> str:
        return ""


def _head(config: Mapping[str, Any], model: ModelConfig, purpose: str) -> TaskHead:
    """BERT's, which reads what the model's own pooling gives."""
    head = sequence_head("tanh")(config, model, purpose)
    return head._replace(pooling=model.pooling) if purpose == "sequence" else head


LAYOUT = OwnLayout(
    family="bertrain",
    classes="Bertrain",
    layer="layers",
    in_layer={},
    elsewhere={},
    decoder="",
    out={"sequence": "head.out"},
    config={},
    task_head=_head,
    bare=(),
    unused={"heads.rtd_": "the head that detects replaced tokens"},
    token_types=2,
    next_sentence=True,
    tokenizer_class="PreTrainedTokenizerFast",
)
