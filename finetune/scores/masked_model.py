"""Prediction of masked tokens by a checkpoint with its tokenizer, in unpadded batches.

Shape letters: L tokens in a sequence, K tokens to predict, V vocabulary size, M tokens in groups.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer

from pretrain.batches.batch import MaskedSequence, masked_batch
from pretrain.checkpoint.released import ReleasedModel, read_released
from pretrain.checkpoint.start import digest
from pretrain.checkpoint.tokenizer import ModelTokenizer, read_tokenizer
from pretrain.common.errors import InputError
from pretrain.common.memory import hold_freed_memory
from pretrain.common.transfers import PendingCopy, arrivals, to_host
from pretrain.model.heads import PretrainingModel
from pretrain.model.precision import torch_dtype

Advance = Callable[[int], None]  # reports progress: called with the number of items finished since the last call

BATCH_TOKENS = 8192  # maximum number of tokens per forward pass
_MAX_LOGITS = 1 << 25  # maximum number of logits per forward pass, 128 MiB in fp32


@dataclass(frozen=True)
class Predictions:
    """A model's predictions of all masked tokens, in the order of the sequences.

    Attributes:
        log_probabilities: float64 [K], log probabilities of the true tokens, in nats.
        correct: bool [K], whether no other token is more probable than the true one.
    """

    log_probabilities: np.ndarray
    correct: np.ndarray


@dataclass(frozen=True)
class TokenGroups:
    """Groups of tokens to predict instead of single tokens; a group's probability is the sum over its tokens.

    Attributes:
        tokens: int64 [M], ids of the tokens in groups; other tokens cannot be predicted.
        groups: int64 [M], index of the group of each token, 0 to `count` - 1.
        count: number of groups.
    """

    tokens: np.ndarray
    groups: np.ndarray
    count: int

    def group_logits(self, logits_KV: torch.Tensor) -> torch.Tensor:
        """Return the logits of the groups, fp64 [K, count]."""
        tokens, groups = (torch.from_numpy(x).to(logits_KV.device) for x in (self.tokens, self.groups))
        logits_KM = logits_KV[:, tokens].double()
        largest_K1 = logits_KM.amax(-1, keepdim=True)
        sums = logits_KM.new_zeros(len(logits_KM), self.count).index_add_(1, groups, (logits_KM - largest_K1).exp())
        return sums.log() + largest_K1


class MaskedModel:
    """A model for masked language modeling, in evaluation mode, on a GPU if there is one.

    Args:
        folder: a model that `pretrain.checkpoint.released.read_released` reads.
        precision: fp32 or bf16, for weights and activations; fp32 scores are the same on every machine, up to rounding.
        released: the model in `folder`, if the caller has already read it.

    Attributes:
        precision: fp32 or bf16.
        tokenizer: tokenizer of the `tokenizers` library, without truncation and padding; "[MASK]" and
            other special tokens in a document are tokenized like words, as in a prepared corpus.
        special_ids: ids of the special tokens by role.
        mask_id: id of the mask token.
        unknown_id: id of the unknown token; -1 if there is none, as in byte-level vocabularies.
        max_positions: maximum sequence length, special tokens included.

    Raises:
        InputError: the model or its tokenizer cannot be read, has no head for masked language modeling, or no mask
            token.
    """

    def __init__(
        self, folder: Path, precision: Literal["fp32", "bf16"] = "fp32", released: ReleasedModel | None = None
    ) -> None:
        self.precision, released = precision, released or read_released(folder)
        state, missing = released.prediction_state()
        if missing:
            raise InputError(
                f"{folder}: has no head for masked language modeling ({missing} is missing), so it has neither a "
                "held-out loss nor a BLiMP score. Give a model with one, or compare fine-tunings: finetune --seeds N."
            )
        _, self.tokenizer, self.special_ids = ModelTokenizer.read(folder, released.vocabulary_size)
        self.tokenizer.encode_special_tokens = True
        if "mask" not in self.special_ids:
            raise InputError(f"{folder}: its tokenizer has no mask token. Give a model for masked language modeling.")
        self.unknown_id = _unknown_id(self.tokenizer)
        self.mask_id, self.max_positions = self.special_ids["mask"], released.model.max_positions
        with torch.device("meta"):
            model = PretrainingModel(released.model, released.vocabulary_size, next_sentence=False)
        model.load_state_dict(state, assign=True)
        torch.set_float32_matmul_precision("highest")  # an earlier training in this process may have chosen TF32
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            hold_freed_memory()
        self._model = model.eval().to(self._device, torch_dtype(precision))
        self._max_predictions = max(1, _MAX_LOGITS // released.vocabulary_size)

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (token ids with special tokens, int64 [L]; whether each is not a special token, bool [L])."""
        prefix, suffix = enclosing_ids(self.special_ids)
        content = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        ids = np.concatenate([prefix, content, suffix])
        positions = np.arange(len(ids))
        return ids, (positions >= len(prefix)) & (positions < len(ids) - len(suffix))

    def predict(
        self,
        sequences: Sequence[MaskedSequence],
        advance: Advance = lambda count: None,
        groups: TokenGroups | None = None,
    ) -> Predictions:
        """Predict the masked tokens. The result does not depend on the batching, except for rounding.

        With `groups`, labels are indices of groups, and probabilities are normalized over all groups.
        """
        counts = np.array([len(sequence.masked_positions) for sequence in sequences], np.int64)
        starts = np.concatenate([[0], counts.cumsum()])
        log_probabilities, correct = np.zeros(starts[-1]), np.zeros(starts[-1], bool)
        pending = (
            (members, self._forward([sequences[index] for index in members], groups))
            for members in self._batches(sequences, counts)
        )
        for members, results_2K in arrivals(pending):
            indices = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in members])
            log_probabilities[indices], correct[indices] = results_2K.numpy()
            advance(len(indices))
        return Predictions(log_probabilities, correct)

    def _batches(self, sequences: Sequence[MaskedSequence], counts: np.ndarray) -> Iterator[list[int]]:
        """Yield the indices of the sequences in each forward pass, in ascending order of length."""
        lengths = np.array([len(sequence.ids) for sequence in sequences], np.int64)
        members: list[int] = []
        tokens = predictions = 0
        for index in np.argsort(lengths, kind="stable"):
            tokens, predictions = tokens + lengths[index], predictions + counts[index]
            if members and (tokens > BATCH_TOKENS or predictions > self._max_predictions):
                yield members
                members, tokens, predictions = [], lengths[index], counts[index]
            members.append(int(index))
        if members:
            yield members

    def _forward(self, sequences: Sequence[MaskedSequence], groups: TokenGroups | None) -> PendingCopy:
        """Return `log_probabilities` and `correct` of `Predictions` for these sequences, fp64 [2, K]."""
        batch = masked_batch(sequences).to(self._device)
        with torch.inference_mode():
            logits_KV = self._model.masked_logits(batch).float()
            if groups is not None:
                logits_KV = groups.group_logits(logits_KV)
            label_K = logits_KV.gather(1, batch.masked_labels[:, None])[:, 0]
            correct_K = label_K >= logits_KV.amax(-1)
            log_probabilities_K = label_K.double() - logits_KV.logsumexp(-1).double()
            return to_host(torch.stack([log_probabilities_K, correct_K.double()]))


def enclosing_ids(special_ids: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of the special tokens before and after a sequence, int64, as in pretraining."""
    prefix, suffix = ([special_ids[role]] if role in special_ids else [] for role in ("cls", "sep"))
    return np.array(prefix, np.int64), np.array(suffix, np.int64)


def fingerprint(folder: Path, released: ReleasedModel) -> str:
    """Return the SHA-256 of a model's tensors, tokenizer (in `folder`) and architecture, as hexadecimal digits."""
    tokenizer = read_tokenizer(folder, released.vocabulary_size)
    heads = {f"head.{name}": tensor for name, tensor in released.head.items()}
    tensors = digest({**released.backbone, **heads, **released.pretraining})
    # Without defaults, so that a new model setting does not change fingerprints.
    shape = released.model.model_dump(mode="json", exclude_defaults=True)
    architecture = [released.family, shape, released.token_types, released.task_head("sequence")]
    return text_digest(tensors, tokenizer.to_str(), json.dumps(architecture, sort_keys=True))


def text_digest(*strings: str) -> str:
    """Return the SHA-256 of strings, as hexadecimal digits."""
    import hashlib

    sha256 = hashlib.sha256()
    for string in strings:
        raw = string.encode()
        sha256.update(len(raw).to_bytes(8, "little") + raw)
    return sha256.hexdigest()


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[Advance]:
    """Show a progress bar over `total` items on stderr; yields the function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.update(task, advance=count)


def _unknown_id(tokenizer: Tokenizer) -> int:
    name = getattr(tokenizer.model, "unk_token", None)
    token_id = None if name is None else tokenizer.token_to_id(name)
    return -1 if token_id is None else token_id
