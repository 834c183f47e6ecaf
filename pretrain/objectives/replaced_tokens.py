"""Replaced-token detection (ELECTRA): a discriminator detects which tokens a small generator has replaced.

It follows Clark et al. 2020, "ELECTRA", section 2. The discriminator is the run's encoder; the generator, a masked
language model, is a second model. They share their embeddings, or the discriminator adds differences to the
generator's (He et al. 2021, DeBERTaV3, section 3.2).

Shape letters: T tokens, K masked tokens, C masked tokens of a chunk, H hidden width, E embedding width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.common.records import Metric
from pretrain.config import ElectraConfig, ModelConfig, PretrainConfig
from pretrain.model import cost
from pretrain.model.block import BlockFunctions
from pretrain.model.encoder import Embeddings, Encoder, look_up
from pretrain.model.heads import PretrainingBatch, PretrainingModel
from pretrain.model.initialization import create_parameters
from pretrain.model.kernels.fused_cross_entropy import empty_scores, vocabulary_losses
from pretrain.model.kernels.hash_rng import hash_bits
from pretrain.model.kernels.layout import Tokens
from pretrain.model.parameters import Parameter, embedding_parameters, linear_parameters, matrix_entries, total
from pretrain.objectives.masked import MLM_METRICS
from pretrain.objectives.objective import Exported, Objective, ReadFrozen, Term

# Maximum number of logits per chunk; their cumulative sums, for sampling, take 32 MiB in fp64.
CHUNK_LOGITS = 1 << 22
# XORed with token keys, so that the generator's dropout, the sampling and the discriminator's dropout are independent.
_GENERATOR_SALT, _SAMPLING_SALT = 0x1B873593, 0x52DCE729

_GENERATOR_PREFIX = "generator."  # prefix of the generator's parameters in a checkpoint
_DIFFERENCE_TABLES = ("embeddings.word", "embeddings.position")  # tables that may be stored as differences


class ReplacedTokens(Objective):
    """ELECTRA's objective: masked language modeling by the generator, and replaced-token detection."""

    setting = "electra"
    metrics: ClassVar[Mapping[str, Metric]] = {
        **MLM_METRICS,
        "rtd_loss": Metric(
            "nats", "Binary cross-entropy of the discriminator per token; mean since the last record.", "RTD loss"
        ),
        "rtd_accuracy": Metric(
            "fraction", "Accuracy on all tokens since the last record.", "RTD accuracy", "rtd", live=True
        ),
    }

    def __init__(
        self, config: PretrainConfig, vocabulary_size: int = 0, frozen_config: ModelConfig | None = None
    ) -> None:
        super().__init__(config, vocabulary_size, frozen_config)
        self.settings = config.electra
        self.generator = config.electra.generator(config.model)
        self.shapes = [config.model, self.generator]

    def build(self, read: ReadFrozen) -> None:
        self.model = ElectraModel(self.config.model, self.vocabulary, settings=self.settings, **self.forward_options)

    @property
    def terms(self) -> tuple[Term, ...]:
        # The generator's loss is a mean over the masked tokens, the discriminator's over all tokens.
        return Term("mlm", "masked", 1.0, shown="mlm"), Term("rtd", "tokens", self.settings.rtd_weight, shown="rtd")

    def parameters(self) -> list[tuple[str, int, str]]:
        model, generator = self.shapes
        embeddings_and_layers = sum(cost.parameter_count(model, self.vocabulary, False)[:2])
        discriminator = embeddings_and_layers + total(discriminator_parameters(model))
        generator_count = cost.parameter_count(generator, self.vocabulary, False).total
        if self.settings.embeddings == "shared":
            shared = (p for p in embedding_parameters(generator, self.vocabulary) if not p.name.startswith("project_"))
            generator_count -= total(shared)
        return [
            ("model", discriminator, "; the discriminator, which fine-tuning uses"),
            ("generator", generator_count, "; without shared parameters"),
        ]

    def useful_flops(self, lengths: Sequence[float], masked: float) -> float:
        """Count all tokens in the discriminator's last layer, and only the masked tokens in the generator's.

        Sampling computes the generator's logits a second time, without a backward pass.
        """
        model, generator = self.shapes
        discriminator_head = cost.FLOPS_PER_ENTRY * matrix_entries(discriminator_parameters(model)) * sum(lengths)
        heads = discriminator_head + cost.head_flops(generator, self.vocabulary, masked)
        sampling = cost.FLOPS_PER_ENTRY / 3 * (model.embedding or model.hidden) * self.vocabulary * masked
        return cost.layers_flops(model, lengths) + cost.encoder_flops(generator, lengths, masked) + heads + sampling

    def model_flops(self, lengths: Sequence[float], masked: float) -> float:
        return self.useful_flops(lengths, masked)

    def last_rows(self, tokens: float, sequences: float, masked: float) -> list[float]:
        return [tokens, masked]

    @property
    def exported(self) -> tuple[Exported, ...]:
        return (
            Exported(
                self.generator,
                "masked language modeling, as the generator of ELECTRA,",
                generator_state,
                suffix="-generator",
                layout="electra",
            ),
            Exported(
                self.config.model,
                "the detection of replaced tokens, as the discriminator of ELECTRA,",
                discriminator_state,
                layout="electra",
                head="ForPreTraining",
                usage="`ElectraForPreTraining` of `transformers` loads it: its head detects replaced tokens and does "
                "not fill masks. The generator,\nwhich does, is in the folder next to this one.",
            ),
        )


OBJECTIVE = ReplacedTokens


# ---- the model


class ElectraLosses(NamedTuple):
    """Sums over the micro-batch, fp32 scalars; `Objective` divides them by global counts (docs/invariants.md)."""

    mlm_loss: Tensor  # the generator's cross-entropy at the masked tokens, in nats
    rtd_loss: Tensor  # the discriminator's binary cross-entropy over all tokens, in nats
    mlm_correct: Tensor  # number of masked tokens that the generator predicted correctly
    rtd_correct: Tensor  # number of tokens classified correctly as original or replaced


class ElectraModel(Encoder):
    """The discriminator, with the generator as a submodule; takes `Encoder`'s arguments and the `electra` settings."""

    def __init__(self, shape: ModelConfig, vocabulary_size: int, *, settings: ElectraConfig, **options: bool) -> None:
        super().__init__(shape, vocabulary_size, **options)
        self.settings = settings
        self.generator = PretrainingModel(settings.generator(shape), vocabulary_size, False, **options)
        # Keep the parameters in the order of the forward pass, which the engine's gradient buckets need.
        self.layers = self._modules.pop("layers")
        self.heads = DiscriminatorHeads(shape)
        if settings.embeddings == "disentangled":
            self.embeddings = DisentangledEmbeddings(shape, vocabulary_size, self.fused, self.generator.embeddings)
        else:
            share_embeddings(self.embeddings, self.generator.embeddings)

    def forward(self, batch: PretrainingBatch) -> ElectraLosses:
        """Return losses and correct predictions of one micro-batch."""
        rows_K, labels_K = batch.masked_rows, batch.masked_labels
        generator, keys_T = self.generator, batch.token_keys
        hidden_KH = generator.encode(Tokens.of(batch, batch.input_ids, keys_T ^ _GENERATOR_SALT), rows_K)
        transformed_KE = generator.heads.transform(hidden_KH, generator.fused)
        decoder_VE, bias_V = generator._decoder(), generator.heads.decoder_bias
        mlm_loss, mlm_correct = vocabulary_losses(transformed_KE, decoder_VE, bias_V, labels_K, generator.fused)
        sampled_K = sample_tokens(transformed_KE, decoder_VE, bias_V, keys_T[rows_K])
        logits_T = self.detection_logits(Tokens.of(batch, batch.input_ids.index_copy(0, rows_K, sampled_K), keys_T))
        # If the generator samples the original token, the token counts as original.
        replaced_T = torch.zeros_like(logits_T).index_copy_(0, rows_K, (sampled_K != labels_K).float())
        rtd_loss = F.binary_cross_entropy_with_logits(logits_T, replaced_T, reduction="sum")
        rtd_correct = ((logits_T > 0) == (replaced_T > 0)).sum().float()
        return ElectraLosses(mlm_loss, rtd_loss, mlm_correct, rtd_correct)

    def detection_logits(self, tokens: Tokens) -> Tensor:
        """Return fp32 [T], the logit of each token for having been replaced."""
        return self.heads(self.encode(tokens))


class DiscriminatorHeads(nn.Module):
    """A dense layer, the activation and one logit per token (google-research/electra, _get_discriminator_output)."""

    rtd_dense_weight: nn.Parameter  # [H, H]
    rtd_dense_bias: nn.Parameter
    rtd_out_weight: nn.Parameter  # [1, H]
    rtd_out_bias: nn.Parameter

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.functions = BlockFunctions.of(shape)
        create_parameters(self, discriminator_parameters(shape), shape.init_std)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Map hidden states [T, H] to logits, fp32 [T]."""
        inner_TH = self.functions.activation(F.linear(hidden_TH, self.rtd_dense_weight, self.rtd_dense_bias))
        return F.linear(inner_TH, self.rtd_out_weight, self.rtd_out_bias)[:, 0].float()


def discriminator_parameters(model: ModelConfig) -> tuple[Parameter, ...]:
    """Return the parameters of `DiscriminatorHeads`."""
    return (*linear_parameters("rtd_dense", model.hidden, model.hidden), *linear_parameters("rtd_out", 1, model.hidden))


class DisentangledEmbeddings(Embeddings):
    """Embeddings that store words and positions as differences from another model's (DeBERTaV3, section 3.2).

    The differences start at 0. The other model's tables get no gradient from this model, so the two objectives do not
    conflict. Segment embeddings and the norm are not shared.

    Args:
        shape, vocabulary_size, compile: arguments of `Embeddings`.
        base: embeddings of the other model, with the same width.
    """

    def __init__(self, shape: ModelConfig, vocabulary_size: int, compile: bool, base: Embeddings) -> None:
        super().__init__(shape, vocabulary_size, compile)
        self._bases = (base,)  # in a tuple, since it is a submodule of the other model
        for table in (self.word, getattr(self, "position", None)):
            if table is not None:
                nn.init.zeros_(table)

    def embed_words(self, input_ids: Tensor) -> Tensor:
        return super().embed_words(input_ids) + look_up(self._bases[0].word, input_ids).detach()

    def embed_positions(self, positions: Tensor) -> Tensor:
        return super().embed_positions(positions) + look_up(self._bases[0].position, positions).detach()


def share_embeddings(source: Embeddings, target: Embeddings) -> None:
    """Let `target` use the tables and the norm of `source`, which has the same width; projections are not shared."""
    for name, parameter in source.named_parameters():
        if not name.startswith("project_"):
            target.register_parameter(name, parameter)


@torch.no_grad()
def sample_tokens(hidden_KE: Tensor, decoder_VE: Tensor, bias_V: Tensor | None, keys_K: Tensor) -> Tensor:
    """Sample tokens from the softmax of the logits; samples depend only on logits and keys (invariant 1).

    Args:
        hidden_KE: the decoder's input.
        decoder_VE, bias_V: the decoder's weight and bias.
        keys_K: token keys, int32; each token's random number is a hash of its key.

    Returns:
        Token ids, int64 [K].
    """
    bits_K = hash_bits(keys_K ^ _SAMPLING_SALT).long() & 0xFFFFFFFF
    uniform_K = (bits_K.double() + 0.5) / (1 << 32)
    chunk = max(1, CHUNK_LOGITS // len(decoder_VE))
    samples = [keys_K.new_empty(0, dtype=torch.int64)]
    for hidden_CE, uniform_C in zip(hidden_KE.split(chunk), uniform_K.split(chunk), strict=True):
        logits_CV = torch.mm(hidden_CE, decoder_VE.T, out=empty_scores(len(hidden_CE), decoder_VE)).float()
        if bias_V is not None:
            logits_CV = logits_CV + bias_V.float()
        # Inverse transform sampling needs one random number per token; the Gumbel-max trick would need V.
        sums_CV = logits_CV.softmax(-1).cumsum(-1, dtype=torch.float64)
        sampled_C1 = torch.searchsorted(sums_CV, uniform_C[:, None] * sums_CV[:, -1:], right=True)
        samples.append(sampled_C1[:, 0].clamp_(max=len(decoder_VE) - 1))
    return torch.cat(samples)


# ---- weights of the two models in a checkpoint


def discriminator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the discriminator; differences are added to the generator's embeddings."""
    weights = {name: tensor for name, tensor in state.items() if not name.startswith(_GENERATOR_PREFIX)}
    for name in _DIFFERENCE_TABLES:
        base = state.get(_GENERATOR_PREFIX + name)
        if base is not None:  # disentangled: the discriminator stores differences
            weights[name] = weights[name] + base
    return weights


def generator_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the generator, including shared embeddings, by `PretrainingModel`'s names."""
    weights = {
        name.removeprefix(_GENERATOR_PREFIX): tensor
        for name, tensor in state.items()
        if name.startswith(_GENERATOR_PREFIX)
    }
    shared = {
        name: tensor
        for name, tensor in state.items()
        if name.startswith("embeddings.") and not name.startswith("embeddings.project_")
    }
    return weights if _DIFFERENCE_TABLES[0] in weights else {**shared, **weights}
