"""Compares our models with transformers' classes on the same random weights: largest differences, by model family.

`python -m tests.parity` measures all of `SHAPES` in fp32 and prints the table of docs/benchmarks/parity.md; the tests
measure the first shape.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.artifacts.export import write_onnx
from finetune.artifacts.padded import PaddedModel
from finetune.tasks.base import Head, Objective
from finetune.training.model.batches import LabeledBatch
from finetune.training.model.task_model import TaskModel, head_parameters
from pretrain.batches.batch import MicroBatch
from pretrain.checkpoint.layouts import read_config
from pretrain.checkpoint.released import ReleasedModel, read_released
from pretrain.checkpoint.released_writer import released_tensors
from pretrain.model.heads import PretrainingModel
from tests.batches_by_hand import make_batch
from tests.bench.baselines import pad

LIMIT = 1e-4
ROWS = 101


class Shape(NamedTuple):
    """Sizes of a model, and lengths of the sequences in a batch. Local layers attend to 4 tokens on each side."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    lengths: tuple[int, ...]


SHAPES = (Shape(4, 32, 4, 48, (5, 9, 9, 30)), Shape(7, 64, 2, 96, (1, 2, 60, 33)))
SHAPES += (Shape(3, 48, 6, 200, (17,) * 6), Shape(12, 128, 4, 192, (64, 3, 41)))
ONNX_SHAPE = Shape(2, 16, 2, 24, (5, 9, 9, 20))  # the export takes half a minute and grows with the layers


def usual(shape: Shape, **more: Any) -> dict[str, Any]:
    """Return values for a config of transformers, with the names that most families use."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    sizes = dict(zip(names, shape[:4], strict=True))
    return {"vocab_size": ROWS, **sizes, "max_position_embeddings": 66, "pad_token_id": 0, **more}


def _distilbert(shape: Shape) -> dict[str, Any]:
    sizes = dict(zip(("n_layers", "dim", "n_heads", "hidden_dim"), shape[:4], strict=True))
    return {"vocab_size": ROWS, **sizes, "max_position_embeddings": 66}


_MODERN = {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
_DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "p2c|c2p",
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_buckets": 12,
    "max_relative_positions": 40,
}
_DEBERTA_V2 = {"pos_att_type": "c2p", "norm_rel_ebd": "none", "share_att_key": False, "position_buckets": -1}
_EURO = {"bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
_ALL_BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
# {name in the table: (transformers' config class, function that returns its arguments)}
FAMILIES: dict[str, tuple[str, Callable[[Shape], dict[str, Any]]]] = {
    "BERT": ("BertConfig", usual),
    "RoBERTa": ("RobertaConfig", lambda shape: usual(shape, type_vocab_size=1)),
    "XLM-R": ("XLMRobertaConfig", lambda shape: usual(shape, type_vocab_size=1)),
    "DistilBERT": ("DistilBertConfig", _distilbert),
    "ELECTRA": ("ElectraConfig", lambda shape: usual(shape, embedding_size=24)),
    "ModernBERT": ("ModernBertConfig", lambda shape: usual(shape, **_MODERN)),
    "ModernBERT with biases, untied, mean": (
        "ModernBertConfig",
        lambda shape: usual(shape, **_MODERN, **_ALL_BIASES, tie_word_embeddings=False, classifier_pooling="mean"),
    ),
    "EuroBERT, fewer key heads, late": (
        "EuroBertConfig",
        lambda shape: usual(shape, **_EURO, num_key_value_heads=shape.heads // 2),
    ),
    "EuroBERT, tied, first token": (
        "EuroBertConfig",
        lambda shape: usual(shape, **_EURO, tie_word_embeddings=True, classifier_pooling="bos"),
    ),
    "Nomic BERT": ("NomicBertConfig", usual),
    "DeBERTa-v3": ("DebertaV2Config", lambda shape: usual(shape, **_DEBERTA)),
    "DeBERTa-v3 with lm_predictions": ("DebertaV2Config", lambda shape: usual(shape, **_DEBERTA, legacy=False)),
    "DeBERTa-v2, c2p, own projections, untied": (
        "DebertaV2Config",
        lambda shape: usual(shape, **{**_DEBERTA, **_DEBERTA_V2}, tie_word_embeddings=False),
    ),
    "GTE": ("GteConfig", usual),
    "GTE without segments": ("GteConfig", lambda shape: usual(shape, type_vocab_size=0)),
}
# Variants that are tested, but are not in the table.
_BOTH_KINDS = ("full_attention", "sliding_attention")
_OTHER_WINDOWS = {
    "local_attention": 6,
    "layer_types": list(_BOTH_KINDS) * 2,
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 500.0} for kind in _BOTH_KINDS},
}
_P2C = {"position_buckets": -1, "max_relative_positions": 21, "pos_att_type": "p2c", "norm_rel_ebd": "none"}
_C2P = {"position_buckets": 7, "max_relative_positions": -1, "pos_att_type": ["c2p"], "share_att_key": False}
OTHERS: dict[str, tuple[str, Callable[[Shape], dict[str, Any]]]] = {
    "RoBERTa with two types": ("RobertaConfig", lambda shape: usual(shape, type_vocab_size=2, layer_norm_eps=0.01)),
    "ELECTRA as wide": ("ElectraConfig", lambda shape: usual(shape, embedding_size=shape.hidden)),
    # The window is wider than every sequence.
    "ModernBERT, wide": (
        "ModernBertConfig",
        lambda shape: {**usual(shape, **_MODERN), "local_attention": 128, "max_position_embeddings": 128},
    ),
    "ModernBERT, every second": ("ModernBertConfig", lambda shape: usual(shape, **{**_MODERN, **_OTHER_WINDOWS})),
    "EuroBERT, all key heads": ("EuroBertConfig", lambda shape: usual(shape, **_EURO)),
    "EuroBERT, one key head": ("EuroBertConfig", lambda shape: usual(shape, **_EURO, num_key_value_heads=1)),
    "DeBERTa-v3 as released": (
        "DebertaV2Config",
        lambda shape: usual(shape, **{**_DEBERTA, "position_buckets": 256, "max_relative_positions": 512}),
    ),
    "DeBERTa, c2p": ("DebertaV2Config", lambda shape: usual(shape, **{**_DEBERTA, **_C2P})),
    "DeBERTa, p2c, no buckets": ("DebertaV2Config", lambda shape: usual(shape, **{**_DEBERTA, **_P2C})),
}
MLM, GRADIENTS, ONNX = "MLM logits", "MLM gradients", "ONNX"
HEADS: dict[str, tuple[Head, Objective]] = {
    "classification": ("sequence", "classes"),
    "tokens": ("tokens", "classes"),
    "spans": ("spans", "span"),
}
CLASSES = {
    "sequence": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "spans": "AutoModelForQuestionAnswering",
}


def measure(family: str, shape: Shape, cells: tuple[str, ...] = (MLM, GRADIENTS, *HEADS, ONNX)) -> dict[str, float]:
    """Return the largest difference of each cell, relative to the largest value if that exceeds 1.

    A cell is missing if transformers has no such class. `ONNX` compares onnxruntime with transformers for sequence
    classification.
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        if {MLM, GRADIENTS} & set(cells):
            found |= _measure_mlm(family, shape, Path(folder) / "mlm")
        for cell, (head, objective) in HEADS.items():
            if cell in cells or (cell == "classification" and ONNX in cells):
                found |= _measure_task(family, shape, Path(folder) / cell, cell, head, objective, ONNX in cells)
    return {cell: found[cell] for cell in cells if cell in found}


def measure_all(family: str) -> dict[str, float]:
    """Return the largest difference of each cell over all shapes; ONNX is measured on one shape."""
    found = [measure(family, shape, (MLM, GRADIENTS, *HEADS)) for shape in SHAPES]
    return {cell: max(one[cell] for one in found) for cell in found[0]} | measure(family, ONNX_SHAPE, (ONNX,))


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest value if that exceeds 1."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))


def make_theirs(kind: str, family: str, shape: Shape) -> Any | None:
    """Return a model of transformers with only random parameters, so that swapped parameters would be noticed.

    Their standard deviation preserves the size of activations: larger weights would only increase rounding errors.
    """
    import transformers

    name, values = {**FAMILIES, **OTHERS}[family]
    labels = {"id2label": {0: "none", 1: "some", 2: "all"}} if "Classification" in kind else {}
    config = getattr(transformers, name)(**values(shape), **labels)
    torch.manual_seed(0)
    try:
        model = getattr(transformers, kind).from_config(config).eval()
    except ValueError:  # no such class
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * shape.hidden**-0.5)
    return model


def read_back(model: Any, folder: Path) -> ReleasedModel:
    """Save a model with transformers, and read it with our code."""
    model.save_pretrained(folder)
    return read_released(folder)


def batch_for(released: ReleasedModel, shape: Shape) -> MicroBatch:
    """Return a batch with the shape's lengths; all tokens are in one segment if the model has only one."""
    batch = make_batch(shape.lengths, ROWS)
    return batch if released.token_types == 2 else MicroBatch(**{**vars(batch), "token_types": 0 * batch.token_types})


def inputs_of(batch: MicroBatch, released: ReleasedModel) -> dict[str, Tensor]:
    """Return the arguments of transformers' models."""
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if released.token_types == 2 else [])]
    padded = pad(batch)
    return {name: padded[name] for name in names}


# ---- masked language modeling


def _measure_mlm(family: str, shape: Shape, folder: Path) -> dict[str, float]:
    theirs = make_theirs("AutoModelForMaskedLM", family, shape)
    assert theirs is not None
    released = read_back(theirs, folder)
    model, batch = mlm_model(released), batch_for(released, shape)
    inputs = inputs_of(batch, released)
    logits_KV = theirs(**inputs).logits[inputs["attention_mask"].bool()][batch.masked_rows]
    with torch.no_grad():
        ours_KV = model.masked_logits(batch)
    F.cross_entropy(logits_KV, batch.masked_labels, reduction="sum").backward()
    model(batch).mlm_loss.backward()
    return {MLM: difference(ours_KV, logits_KV.detach()), GRADIENTS: _gradient_difference(model, theirs, released)}


def mlm_model(released: ReleasedModel) -> PretrainingModel:
    """Return our pretraining model, with the head from the checkpoint."""
    model = PretrainingModel(released.model, ROWS, next_sentence=False).eval()
    model.load_state_dict({**released.backbone, **released.pretraining})
    return model


def mlm_logits(released: ReleasedModel, shape: Shape) -> Tensor:
    """Return the logits at the masked tokens of the shape's batch, [K, V]."""
    with torch.no_grad():
        return mlm_model(released).masked_logits(batch_for(released, shape))


def _gradient_difference(model: PretrainingModel, theirs: Any, released: ReleasedModel) -> float:
    """Return the largest difference over the gradients of all parameters, by transformers' names."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    arch = read_config(released.config)
    if arch.token_types == 0:
        gradients.pop("embeddings.token_type", None)  # DistilBERT has none
    ours = released_tensors(gradients, arch)
    found = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    # DeBERTa's second head has names that are not written.
    other = {name if name in ours else arch.layout.normalize(name): grad for name, grad in found.items()}
    bias = f"{arch.layout.decoder}.bias"
    if bias not in other:  # two names of one parameter
        ours.pop(bias, None)
    for name in {*other} - {*ours}:  # torch lists a tied parameter under the first of its names
        (ours[name],) = (ours[one] for one in arch.layout.names(arch.layout.tied_parameter(name, arch.model) or ""))
    return max(difference(ours[name], other[name]) for name in other)


# ---- tasks


def _measure_task(
    family: str, shape: Shape, folder: Path, cell: str, head: Head, objective: Objective, onnx: bool
) -> dict[str, float]:
    theirs = make_theirs(CLASSES[head], family, shape)
    if theirs is None:
        return {}
    released = read_back(theirs, folder)
    inputs = inputs_of(batch_for(released, shape), released)
    with torch.no_grad():
        expected_RC = their_logits(theirs, inputs, head)
        ours_RC = task_model(released, head, objective).eval()(task_batch(released, shape, head)).logits
    found = {cell: difference(ours_RC, expected_RC)}
    if onnx and head == "sequence":
        found[ONNX] = difference(_onnx_logits(released, inputs, folder), expected_RC)
    return found


def padded_logits(released: ReleasedModel, inputs: dict[str, Tensor], head: Head) -> Tensor:
    """Return the logits of the padded model from which the ONNX export is made, [R, C]."""
    model = PaddedModel(released, head).eval()
    with torch.no_grad():
        outputs = model(*(_given(inputs, name) for name in model.inputs))
    if head == "sequence":
        return outputs[0]
    return (torch.stack(outputs, -1) if head == "spans" else outputs[0])[inputs["attention_mask"].bool()]


def task_model(released: ReleasedModel, head: Head, objective: Objective) -> TaskModel:
    """Return our fine-tuning model, with the head from the checkpoint."""
    outputs = len(released.head["out_weight"])
    model = TaskModel(released.model, released.vocabulary_size, head, objective, outputs, released.task_head(head))
    model.load_state_dict({**released.backbone, **{f"head.{name}": tensor for name, tensor in released.head.items()}})
    return model


def task_shapes(released: ReleasedModel, head: Head) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a task head's parameters, for 2 outputs."""
    return {p.name: p.shape for p in head_parameters(released.model, 2, released.task_head(head))}


def task_batch(released: ReleasedModel, shape: Shape, head: Head) -> LabeledBatch:
    """Return the tokens of `batch_for` as labeled windows; the head reads the first token of each, or all tokens."""
    batch = batch_for(released, shape)
    lengths = torch.tensor(shape.lengths)
    rows = batch.cu_seqlens[:-1].long() if head == "sequence" else torch.arange(int(lengths.sum()))
    windows = torch.arange(len(lengths))
    labels = torch.zeros(len(rows), 2) if head == "spans" else torch.zeros(len(rows), dtype=torch.long)
    names = ("input_ids", "token_types", "positions", "cu_seqlens", "token_keys", "lengths")
    return LabeledBatch(
        **{name: getattr(batch, name) for name in names},
        query_positions=rows,
        window_of_query=windows if head == "sequence" else torch.repeat_interleave(windows, lengths),
        example_of_window=windows,
        examples=len(windows),
        labels=labels,
        weights=torch.ones(len(rows)),
        query_indices=rows.numpy(),
    )


def their_logits(theirs: Any, inputs: dict[str, Tensor], head: Head) -> Tensor:
    """Return their logits at the tokens that our head reads, [R, C]."""
    output = theirs(**inputs)
    if head == "sequence":
        return output.logits
    logits_BLC = torch.stack([output.start_logits, output.end_logits], -1) if head == "spans" else output.logits
    return logits_BLC[inputs["attention_mask"].bool()]


def _onnx_logits(released: ReleasedModel, inputs: dict[str, Tensor], folder: Path) -> Tensor:
    import onnxruntime

    model = PaddedModel(released, "sequence").eval()
    write_onnx(model, folder / "model.onnx")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    fed = {name: _given(inputs, name).numpy() for name in model.inputs}
    return torch.from_numpy(session.run(list(model.outputs), fed)[0])


def _given(inputs: dict[str, Tensor], name: str) -> Tensor:
    return inputs.get(name, torch.zeros_like(inputs["input_ids"]))


# ---- the page


def main() -> int:
    """Print the rows of docs/benchmarks/parity.md. Exits with 1 if a difference exceeds the limit."""
    columns = (MLM, GRADIENTS, *HEADS, ONNX)
    print(f"| Family | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    measured = {family: measure_all(family) for family in FAMILIES}
    for family, cells in measured.items():
        print(f"| {family} |", *(f"{cells[c]:.0e} |" if c in cells else "no class |" for c in columns))
    return int(any(value > LIMIT for cells in measured.values() for value in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
