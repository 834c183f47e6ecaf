"""A classifier of the mean or maximum of an encoder's last hidden states, for transformers' `trust_remote_code`.

Shape letters: B sequences padded to L tokens, H hidden width, C labels.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class PooledConfig(PretrainedConfig):
    """The config of the encoder, with `encoder_model_type`, `classifier_pooling` and `output_layer`."""

    model_type = "pooled_encoder"

    @property
    def encoder(self) -> Any:
        """The config of the encoder."""
        values = {key: value for key, value in self.to_dict().items() if key not in ("model_type", "auto_map")}
        return AutoConfig.for_model(self.encoder_model_type, **values)


class PooledForSequenceClassification(PreTrainedModel):
    """Logits [B, C] of the last hidden states' mean (or maximum) over the tokens that are not padding."""

    config_class = PooledConfig
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # transformers' Trainer: the loss is a mean

    def __init__(self, config: PooledConfig) -> None:
        super().__init__(config)
        encoder = config.encoder
        model_class: Any = MODEL_MAPPING[type(encoder)]
        parameters = inspect.signature(model_class).parameters
        options = {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}
        self.base_model_prefix = model_class.base_model_prefix
        setattr(self, self.base_model_prefix, model_class(encoder, **options))
        rate = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(getattr(encoder, "hidden_dropout_prob", 0.1) if rate is None else rate)
        output = nn.Linear(encoder.hidden_size, int(config.num_labels or 2))
        self._output, _, inner = config.output_layer.partition(".")
        setattr(self, self._output, nn.Sequential(OrderedDict({inner: output})) if inner else output)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Return the logits, and the loss if there are labels ([B], or fp32 [B, C]); other inputs are int64 [B, L].

        `kwargs` and `inputs_embeds` [B, L, E], an alternative to `input_ids`, are passed to the encoder.
        """
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        if inputs is None:
            raise ValueError("pass input_ids or inputs_embeds")
        if attention_mask is None:
            attention_mask = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        if token_type_ids is not None:  # some encoders have none
            kwargs["token_type_ids"] = token_type_ids
        outputs = self.base_model(
            input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        hidden_BLH, real_BL1 = outputs[0], attention_mask[..., None].bool()
        if self.config.classifier_pooling == "max":
            pooled_BH = hidden_BLH.masked_fill(~real_BL1, torch.finfo(hidden_BLH.dtype).min).amax(1)
        else:
            pooled_BH = (hidden_BLH * real_BL1).sum(1) / real_BL1.sum(1)
        logits_BC = getattr(self, self._output)(self.dropout(pooled_BH))
        output = SequenceClassifierOutput(
            loss=self._loss(logits_BC, labels),
            logits=logits_BC,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return output.to_tuple() if return_dict is False else output

    def _loss(self, logits_BC: Tensor, labels: Tensor | None) -> Tensor | None:
        if labels is None:
            return None
        if self.config.problem_type == "regression":
            return F.mse_loss(logits_BC.squeeze(-1), labels.to(logits_BC.dtype))
        if self.config.problem_type == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits_BC, labels.to(logits_BC.dtype))
        return F.cross_entropy(logits_BC, labels)
