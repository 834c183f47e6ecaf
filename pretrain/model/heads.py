"""The pretraining heads: masked language modeling, and next-sentence prediction.

Shape letters: T tokens, S sequences, K masked tokens, H hidden width, V vocabulary.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.model.block import BlockFunctions, linear, norm_weights
from pretrain.model.compile import maybe_compile
from pretrain.model.encoder import Encoder
from pretrain.model.initialization import create_parameters
from pretrain.model.kernels.fused_cross_entropy import vocabulary_losses
from pretrain.model.kernels.layout import UnpaddedBatch
from pretrain.model.kernels.rounding import num_padding_rows, pad_rows
from pretrain.model.parameters import head_parameters

_IGNORED_LABEL = -100  # label of positions that the loss ignores


class PretrainingBatch(UnpaddedBatch, Protocol):
    """The additional fields that pretraining reads from a batch, such as a `pretrain.batches.batch.MicroBatch`."""

    @property
    def masked_rows(self) -> Tensor: ...  # int64 [K], indices of the masked tokens
    @property
    def masked_labels(self) -> Tensor: ...  # int64 [K], their ids before masking
    @property
    def nsp_labels(self) -> Tensor: ...  # int64 [S], as `MicroBatch.nsp_labels`


class Losses(NamedTuple):
    """Sums over the micro-batch, fp32 scalars; the engine divides them by global counts (docs/invariants.md, 3)."""

    mlm_loss: Tensor  # cross-entropy in nats
    nsp_loss: Tensor
    mlm_correct: Tensor  # number of masked tokens whose label has the highest score; a tie of n labels counts as 1/n
    nsp_correct: Tensor


class PretrainingModel(Encoder):
    """The encoder with its pretraining heads. Arguments are as for `Encoder`; `next_sentence` adds an NSP head."""

    def __init__(
        self,
        shape: ModelConfig,
        vocabulary_size: int,
        next_sentence: bool = True,
        *,
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(shape, vocabulary_size, compile=compile, activation_checkpointing=activation_checkpointing)
        self.heads = Heads(shape, vocabulary_size, next_sentence, compile)
        self.embeddings.tied = shape.tied_decoder

    def forward(self, batch: PretrainingBatch) -> Losses:
        """Return losses and correct predictions of a micro-batch; the heads compute only positions that a loss uses."""
        if self.heads.next_sentence and self.shape.pooling != "cls":
            hidden_TH = self.encode(batch)
            pooled_SH = pool(hidden_TH, batch.cu_seqlens, self.shape.pooling)
            hidden_RH = torch.cat([pooled_SH, hidden_TH.index_select(0, batch.masked_rows)])
        else:
            queries_R, order_R = torch.cat([batch.cu_seqlens[:-1].long(), batch.masked_rows]).sort()
            hidden_RH = self.encode(batch, queries_R)[order_R.argsort()]
        return self.heads(hidden_RH, self._decoder(), batch.masked_labels, batch.nsp_labels)

    def masked_logits(self, batch: PretrainingBatch) -> Tensor:
        """Return [K, V], the logits over the vocabulary at the masked positions."""
        hidden_KH = self.encode(batch, batch.masked_rows)
        padded_KH = pad_rows(hidden_KH, num_padding_rows(len(hidden_KH), hidden_KH))
        transformed_KH = self.heads.transform(padded_KH, self.heads.fused)
        return F.linear(transformed_KH, self._decoder(), self.heads.decoder_bias)[: len(hidden_KH)]

    def _decoder(self) -> Tensor:
        """Return [V, H], the word embeddings or a separate table."""
        return self.embeddings.word if self.shape.tied_decoder else self.heads.decoder


class MlmWeights(NamedTuple):
    """The parameters of `mlm_transform`."""

    weight: Tensor  # [H, H]
    bias: Tensor | None
    norm: tuple[Tensor, ...]  # as `norms.Norm.parameters`, each [H]


class Heads(nn.Module):
    """MLM transform and decoder, and pooler with NSP classifier (Devlin et al., section 3.1).

    A model may lack the transform, its bias or the decoder's bias; a tied decoder is not a parameter of the heads.
    """

    mlm_transform_weight: nn.Parameter
    decoder: nn.Parameter  # [V, H]
    mlm_bias: nn.Parameter  # [V]
    pooler_weight: nn.Parameter
    pooler_bias: nn.Parameter
    nsp_weight: nn.Parameter  # [2, H]
    nsp_bias: nn.Parameter

    def __init__(self, shape: ModelConfig, vocabulary_size: int, next_sentence: bool, compile: bool) -> None:
        super().__init__()
        self.shape = shape
        self.fused = compile
        self.next_sentence = next_sentence
        self.functions = BlockFunctions.of(shape)
        self.fused_transform = maybe_compile(mlm_transform, True, ("K",))
        create_parameters(self, head_parameters(shape, vocabulary_size, next_sentence), shape.init_std)

    def forward(self, hidden_RH: Tensor, decoder_VH: Tensor, masked_labels_K: Tensor, nsp_labels_S: Tensor) -> Losses:
        """Return the losses; `hidden_RH` has the pooled state of each sequence, then the state of each masked token."""
        sequence_count = hidden_RH.shape[0] - masked_labels_K.shape[0]
        padding = num_padding_rows(len(masked_labels_K), hidden_RH)
        transformed_KH = self.transform(pad_rows(hidden_RH[sequence_count:], padding), self.fused)
        masked_labels_K = pad_rows(masked_labels_K, padding, _IGNORED_LABEL)
        mlm_loss, mlm_correct = vocabulary_losses(
            transformed_KH, decoder_VH, self.decoder_bias, masked_labels_K, self.fused
        )
        if not self.next_sentence:
            zero = mlm_loss.new_zeros(())
            return Losses(mlm_loss, zero, mlm_correct, zero)
        logits_S2 = nsp_logits(hidden_RH[:sequence_count], self.nsp_weights()).float()
        nsp_loss = F.cross_entropy(logits_S2, nsp_labels_S, reduction="sum")
        nsp_correct = (logits_S2.argmax(-1) == nsp_labels_S).sum().float()
        return Losses(mlm_loss, nsp_loss, mlm_correct, nsp_correct)

    def transform(self, hidden_KH: Tensor, fused: bool) -> Tensor:
        """Map [K, H] to [K, H], the decoder's input."""
        if not self.shape.mlm_transform:
            return hidden_KH
        norm = norm_weights(self, "mlm_norm", self.functions)
        weights = MlmWeights(self.mlm_transform_weight, getattr(self, "mlm_transform_bias", None), norm)
        return (self.fused_transform if fused else mlm_transform)(hidden_KH, weights, self.functions)

    @property
    def decoder_bias(self) -> Tensor | None:
        """The decoder's bias [V], or None if it has none."""
        return self.mlm_bias if self.shape.decoder_bias else None

    def nsp_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pooler weight [H, H] and bias [H], next-sentence weight [2, H] and bias [2]."""
        return self.pooler_weight, self.pooler_bias, self.nsp_weight, self.nsp_bias


def mlm_transform(hidden_KH: Tensor, weights: MlmWeights, functions: BlockFunctions) -> Tensor:
    """[K, H] -> [K, H]: dense, activation, norm (google-research/bert run_pretraining.py, get_masked_lm_output)."""
    inner_KH = functions.activation(linear(hidden_KH, weights.weight, weights.bias))
    return functions.norm(inner_KH, *weights.norm, eps=functions.eps).to(hidden_KH.dtype)


def nsp_logits(hidden_SH: Tensor, weights: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """NSP logits [S, 2] (google-research/bert modeling.py, pooler; run_pretraining.py, get_next_sentence_output)."""
    pooler_weight, pooler_bias, weight, bias = weights
    return F.linear(torch.tanh(F.linear(hidden_SH, pooler_weight, pooler_bias)), weight, bias)


def pool(hidden_TH: Tensor, cu_seqlens: Tensor, pooling: str) -> Tensor:
    """Pool each sequence to [S, H]: its first token ("cls"), or the mean or maximum of its tokens ("mean", "max").

    Args:
        hidden_TH: hidden states; mean and maximum are taken in fp32 and returned in their dtype.
        cu_seqlens: int32 [S + 1], the offsets of the sequences; no sequence is empty.
        pooling: as `ModelConfig.pooling`.
    """
    if pooling == "cls":
        return hidden_TH.index_select(0, cu_seqlens[:-1].long())
    pooled_SH = torch.segment_reduce(hidden_TH.float(), pooling, lengths=cu_seqlens.diff().long(), unsafe=True)
    return pooled_SH.to(hidden_TH.dtype)
