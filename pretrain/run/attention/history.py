"""Records the attention of a model's heads at each evaluation, in `attention.json` of the run folder.

A few held-out sequences are used, the same at every evaluation and for every number of workers. Recording only reads
the weights: it draws no random numbers and does not change the training state.
"""

import base64
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.common.errors import RunError
from pretrain.common.files import atomic_open
from pretrain.common.run_files import ATTENTION_HISTORY
from pretrain.config import ModelConfig
from pretrain.corpus.shards import TokenShards
from pretrain.model.padded import PaddedEncoder
from pretrain.run.attention.kinds import HeadStatistics, TokenMarks

logger = logging.getLogger(__name__)

FORMAT = 1
# The kinds of attended tokens that follow from token ids and positions alone; word boundaries are not known here.
RECORDED_KINDS = ("self", "previous", "next", "first", "separator", "same_token")
_NUM_SEQUENCES, _SEQUENCE_LENGTH = 8, 64  # number and maximum length of the held-out sequences
_MATRIX_LENGTH = 24  # length of the sequence whose attention matrices are kept, in tokens
_NUM_MATRICES = 24  # number of heads whose matrices are kept, evenly spaced over the model
_MAX_RECORDS = 32  # maximum number of records in the file, which stays below about 1 MB; see `thin_records`


class AttentionHistory:
    """Writes the attention history of one run.

    Args:
        folder: run folder.
        model: config of the encoder.
        held_out: validation split, from which the sequences are taken.
    """

    def __init__(self, folder: Path, model: ModelConfig, held_out: TokenShards) -> None:
        self._path, self._model = folder / ATTENTION_HISTORY, model
        self._sequences = _select_sequences(held_out, min(_SEQUENCE_LENGTH, model.max_positions))
        self._matrix_ids = self._sequences[0][:_MATRIX_LENGTH].copy() if self._sequences else np.zeros(0, np.int64)
        if len(self._matrix_ids) == _MATRIX_LENGTH:
            self._matrix_ids[-1] = held_out.special_ids["sep"]
        self._special_ids = held_out.special_ids

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step`, the step from which training resumes."""
        if content := read_history(self._path.parent):
            self._write({**content, "records": [record for record in content["records"] if record["step"] <= step]})

    def record(self, step: int, parameters: Mapping[str, Tensor], model: ModelConfig | None = None) -> None:
        """Record the attention of the weights after `step` steps, unless there is a record of that step.

        So averaged weights, which are evaluated after the trained weights of the same step, are not recorded.
        If the file cannot be written, a warning is logged and training continues.

        Args:
            step: number of optimizer steps so far.
            parameters: full tensors by name, in any precision and on any device; only the encoder's are used.
            model: config of the encoder in the current phase; None for the config passed at construction.
        """
        records = read_history(self._path.parent).get("records", [])
        if not self._sequences or any(record["step"] == step for record in records):
            return
        encoder = PaddedEncoder(model or self._model, {name: tensor.detach() for name, tensor in parameters.items()})
        statistics = HeadStatistics()
        for ids in self._sequences:
            statistics.add(self._attention_weights(encoder, ids), _mark_tokens(ids, self._special_ids))
        matrices = self._attention_weights(encoder, self._matrix_ids)
        record = {
            "step": step,
            "shares": {kind: statistics.shares[kind].round(4).tolist() for kind in RECORDED_KINDS},
            "entropy": statistics.entropy.round(4).tolist(),
            "matrices": [_pack_matrix(matrices[layer][head]) for layer, head in self._heads()],
        }
        self._write(
            {
                "format": FORMAT,
                "picture": self._matrix_ids.tolist(),  # token ids of the sequence of `matrices`
                "heads": self._heads(),
                "even_shares": {kind: round(statistics.uniform_shares[kind], 4) for kind in RECORDED_KINDS},
                "even_entropy": round(statistics.uniform_entropy, 4),
                "records": thin_records([*records, record]),
            }
        )

    def _attention_weights(self, encoder: PaddedEncoder, ids: np.ndarray) -> list[np.ndarray]:
        device = next(encoder.parameters()).device
        ids_1L = torch.from_numpy(ids)[None].to(device)
        collected: list[Tensor] = []
        with torch.no_grad():
            encoder.encode(ids_1L, torch.ones_like(ids_1L), None, attention=collected)
        return [layer_1NLL[0].float().cpu().numpy() for layer_1NLL in collected]

    def _heads(self) -> list[tuple[int, int]]:
        """Return (layer, head) of the heads whose matrices are kept: all, or `_NUM_MATRICES` evenly spaced ones."""
        count = self._model.depth * self._model.heads
        num_kept = min(count, _NUM_MATRICES)
        return [divmod(index * count // num_kept, self._model.heads) for index in range(num_kept)]

    def _write(self, content: dict[str, Any]) -> None:
        try:
            with atomic_open(self._path, "w") as file:
                json.dump(content, file, separators=(",", ":"))
        except (OSError, RunError) as error:
            logger.warning("could not record the attention of the heads: %s", error)


def read_history(run_dir: Path) -> dict[str, Any]:
    """Read a run's attention.json; {} if there is none that this version supports."""
    try:
        content = json.loads((run_dir / ATTENTION_HISTORY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) and content.get("format") == FORMAT else {}


def unpack_matrix(matrix: str) -> np.ndarray:
    """Return the attention weights in an entry of a record's `matrices`, float32 [L, L], exact to 1/255."""
    packed = np.frombuffer(base64.b64decode(matrix), np.uint8)
    length = round(len(packed) ** 0.5)
    return packed.reshape(length, length).astype(np.float32) / 255


def _pack_matrix(weights_LL: np.ndarray) -> str:
    return base64.b64encode(np.rint(weights_LL * 255).astype(np.uint8).tobytes()).decode()


def _select_sequences(shards: TokenShards, length: int) -> list[np.ndarray]:
    """Return up to `_NUM_SEQUENCES` sequences of at most `length` tokens, from evenly spaced documents: int64 [L]."""
    special, sequences = shards.special_ids, []
    documents = [(shard, index) for shard in shards.shards for index in range(len(shard.documents) - 1)]
    count = min(_NUM_SEQUENCES, len(documents))
    for i in range(count):
        shard, index = documents[i * len(documents) // count]
        start, end = (int(shard.documents[row, 1]) for row in (index, index + 1))
        tokens = shard.tokens[start : min(end, start + length - 2)].astype(np.int64)
        sequences.append(np.array([special["cls"], *tokens, special["sep"]], np.int64))
    return sequences


def _mark_tokens(ids: np.ndarray, special: Mapping[str, int]) -> TokenMarks:
    no_words = np.full(len(ids), -1)
    first, separator = ids == special["cls"], ids == special["sep"]
    return TokenMarks(ids, first, separator, np.zeros(len(ids), bool), word=no_words, word_index=no_words)


def thin_records(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the records with the closest neighbors until `_MAX_RECORDS` are left; always keep the first and the last."""
    while len(records) > _MAX_RECORDS:
        gaps = [records[i + 1]["step"] - records[i - 1]["step"] for i in range(1, len(records) - 1)]
        del records[1 + gaps.index(min(gaps))]
    return records
