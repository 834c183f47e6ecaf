"""ELECTRA: a discriminator that detects the tokens that a small generator has replaced (Clark et al. 2020).

The discriminator is the encoder of the run; the generator, a masked language model, lies beside it. Both read one table
of embeddings, or the discriminator adds differences to the generator's (He et al. 2021, DeBERTaV3, section 3.2).

Shape letters: T tokens, K masked tokens, C of them at a time, H hidden width, E width of the embeddings, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config import ElectraConfig, ModelConfig
from pretrain.model.block import BlockFunctions
from pretrain.model.encoder import Embeddings, Encoder, look_up
from pretrain.model.heads import PretrainingBatch, PretrainingModel
from pretrain.model.initialization import create_parameters
from pretrain.model.kernels.fused_cross_entropy import empty_scores, vocabulary_losses
from pretrain.model.kernels.hash_rng import hash_bits
from pretrain.model.parameters import discriminator_parameters

# Scores that are summed at a time to sample from them: 32 MiB of fp64.
_SCORES_AT_ONCE = 1 << 22
# They separate the random numbers of a token: the discriminator's dropout, the generator's, and the sample.
_GENERATOR, _SAMPLE = 0x1B873593, 0x52DCE729


class ElectraLosses(NamedTuple):
    """Sums over the micro-batch, fp32 scalars; the training task divides them by global counts (invariant 3)."""

    mlm_loss: Tensor  # the generator's cross-entropy at the masked tokens, in nats
    rtd_loss: Tensor  # the discriminator's binary cross-entropy over all tokens, in nats
    mlm_correct: Tensor
    rtd_correct: Tensor  # tokens that are recognized as original or replaced


class Tokens(NamedTuple):
    """What an encoder reads of a batch (`encoder.UnpaddedBatch`), with other tokens or other keys."""

    input_ids: Tensor
    token_types: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    token_keys: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, batch: PretrainingBatch, input_ids: Tensor, token_keys: Tensor) -> Tokens:
        return cls(input_ids, batch.token_types, batch.positions, batch.cu_seqlens, token_keys, batch.lengths)


class ElectraModel(Encoder):
    """The discriminator, whose `generator` is a `PretrainingModel`; arguments as `Encoder`, and the generator's."""

    def __init__(
        self,
        shape: ModelConfig,
        vocabulary_size: int,
        *,
        settings: ElectraConfig,
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(shape, vocabulary_size, compile=compile, activation_checkpointing=activation_checkpointing)
        self.settings = settings
        self.generator = PretrainingModel(
            settings.generator(shape),
            vocabulary_size,
            False,
            compile=compile,
            activation_checkpointing=activation_checkpointing,
        )
        # Parameters are named in the order of the forward pass, on which the engine's buckets rely.
        self.layers = self._modules.pop("layers")
        self.heads = DiscriminatorHeads(shape)
        if settings.embeddings == "disentangled":
            self.embeddings = DisentangledEmbeddings(shape, vocabulary_size, compile, self.generator.embeddings)
        else:
            share_embeddings(self.embeddings, self.generator.embeddings)

    def forward(self, batch: PretrainingBatch) -> ElectraLosses:
        """Losses and correct predictions of one micro-batch."""
        rows_K, labels_K = batch.masked_rows, batch.masked_labels
        generator, keys_T = self.generator, batch.token_keys
        hidden_KH = generator.encode(Tokens.of(batch, batch.input_ids, keys_T ^ _GENERATOR), rows_K)
        transformed_KE = generator.heads.transform(hidden_KH, generator.fused)
        decoder_VE, bias_V = generator._decoder(), generator.heads.decoder_bias
        mlm_loss, mlm_correct = vocabulary_losses(transformed_KE, decoder_VE, bias_V, labels_K, generator.fused)
        sampled_K = sample_tokens(transformed_KE, decoder_VE, bias_V, keys_T[rows_K], self.settings.temperature)
        logits_T = self.scores(Tokens.of(batch, batch.input_ids.index_copy(0, rows_K, sampled_K), keys_T))
        # A sample that is the original token counts as original.
        replaced_T = torch.zeros_like(logits_T).index_copy_(0, rows_K, (sampled_K != labels_K).float())
        rtd_loss = F.binary_cross_entropy_with_logits(logits_T, replaced_T, reduction="sum")
        rtd_correct = ((logits_T > 0) == (replaced_T > 0)).sum().float()
        return ElectraLosses(mlm_loss, rtd_loss, mlm_correct, rtd_correct)

    def scores(self, tokens: Tokens) -> Tensor:
        """fp32 [T]: how much each token seems to be replaced; above 0, rather than not."""
        return self.heads(self.encode(tokens))


class DiscriminatorHeads(nn.Module):
    """A dense layer, the activation and one score per token (google-research/electra, _get_discriminator_output)."""

    rtd_dense_weight: nn.Parameter  # [H, H]
    rtd_dense_bias: nn.Parameter
    rtd_out_weight: nn.Parameter  # [1, H]
    rtd_out_bias: nn.Parameter

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.functions = BlockFunctions.of(shape)
        create_parameters(self, discriminator_parameters(shape), shape.init_std)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> fp32 [T]"""
        inner_TH = self.functions.activation(F.linear(hidden_TH, self.rtd_dense_weight, self.rtd_dense_bias))
        return F.linear(inner_TH, self.rtd_out_weight, self.rtd_out_bias)[:, 0].float()


class DisentangledEmbeddings(Embeddings):
    """Embeddings whose tables of words and positions are differences from another model's (DeBERTaV3, section 3.2).

    They begin as 0. The other model's tables get no gradient from here, so the two objectives do not pull them apart.
    Segments and the norm are not shared.

    Args:
        shape, vocabulary_size, compile: as `Embeddings`.
        base: the other model's, of the same width.
    """

    def __init__(self, shape: ModelConfig, vocabulary_size: int, compile: bool, base: Embeddings) -> None:
        super().__init__(shape, vocabulary_size, compile)
        self._bases = (base,)  # in a tuple: it is the other model's submodule
        for table in (self.word, getattr(self, "position", None)):
            if table is not None:
                nn.init.zeros_(table)

    def word_rows(self, input_ids: Tensor) -> Tensor:
        return super().word_rows(input_ids) + look_up(self._bases[0].word, input_ids).detach()

    def position_rows(self, positions: Tensor) -> Tensor:
        return super().position_rows(positions) + look_up(self._bases[0].position, positions).detach()


def share_embeddings(owner: Embeddings, other: Embeddings) -> None:
    """Let `other` use the tables and the norm of `owner`, which has the same width; their projections stay apart."""
    for name, parameter in owner.named_parameters():
        if not name.startswith("project_"):
            other.register_parameter(name, parameter)


@torch.no_grad()
def sample_tokens(
    hidden_KE: Tensor, word_VE: Tensor, bias_V: Tensor | None, keys_K: Tensor, temperature: float
) -> Tensor:
    """Tokens drawn from the softmax of the scores: a function of the scores and the keys alone (invariant 1).

    Args:
        hidden_KE: what the decoder reads.
        word_VE, bias_V: the decoder.
        keys_K: int32, one random number for each token is a hash of its key.
        temperature: by which the scores are divided.

    Returns:
        int64 [K].
    """
    bits_K = hash_bits(keys_K ^ _SAMPLE).long() & 0xFFFFFFFF
    uniform_K = (bits_K.double() + 0.5) / (1 << 32)
    rows = max(1, _SCORES_AT_ONCE // len(word_VE))
    samples = [keys_K.new_empty(0, dtype=torch.int64)]
    for hidden_CE, uniform_C in zip(hidden_KE.split(rows), uniform_K.split(rows), strict=True):
        scores_CV = torch.mm(hidden_CE, word_VE.T, out=empty_scores(len(hidden_CE), word_VE)).float()
        if bias_V is not None:
            scores_CV = scores_CV + bias_V.float()
        # The inverse of the distribution function, which needs one random number where Gumbel's noise needs V.
        sums_CV = (scores_CV / temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
        found_C1 = torch.searchsorted(sums_CV, uniform_C[:, None] * sums_CV[:, -1:], right=True)
        samples.append(found_C1[:, 0].clamp_(max=len(word_VE) - 1))
    return torch.cat(samples)
