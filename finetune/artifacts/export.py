"""Export of a fine-tuned model: its Hugging Face folder, and optionally the same model as ONNX."""

from __future__ import annotations

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.training.folders import MODEL, model_folder
from finetune.training.saved import load_saved
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import verify_manifest
from pretrain.common.packages import EXTRAS, expect
from pretrain.common.run_files import SCORES

if TYPE_CHECKING:
    import torch

    from finetune.artifacts.padded import PaddedModel

ONNX = "model.onnx"
OPSET = 23  # the latest opset of torch.onnx in torch 2.11 to 2.13; onnxruntime 1.31 supports it
_README = "README.md"
_ONNX_HEADING = "\n## ONNX\n"


def export(model: Path, out: Path, *, onnx: bool = False) -> str:
    """Copy a fine-tuned model and, with `onnx`, add model.onnx; return a summary for the terminal.

    Args:
        model: the model's folder, or its run folder.
        out: folder to create; an earlier export in it is replaced when the new one is complete.

    Raises:
        InputError: the model is damaged, or `out` is not an export.
        MachineError: a package that `onnx` needs is not installed, or onnxruntime's logits differ from torch's.
    """
    folder = model_folder(model)
    _reject_model_folder(out, folder)
    if onnx:
        expect("--onnx", *EXTRAS["onnx"])
    file_names = verify_manifest(folder)["files"]
    from pretrain.checkpoint.layouts.pooled import ENCODER, MODELING_FILE
    from pretrain.checkpoint.released import unsupported_in_transformers
    from pretrain.checkpoint.weight_files import atomic_folder

    reason = unsupported_in_transformers(folder)
    layout = f"for bertrain only (transformers cannot load it: {reason})" if reason else "in the Hugging Face layout"
    if (folder / MODELING_FILE).is_file():
        layout += f", which transformers loads with trust_remote_code=True, and {ENCODER}/ without"
    summary = f"{out}: {layout}"
    with atomic_folder(out) as staging:
        for name in file_names:  # only verified files
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, staging / name)
        if onnx:
            summary += f"; {ONNX}: {_add_onnx(folder, staging)}"
    return summary


def write_onnx(model: PaddedModel, path: Path) -> float:
    """Write `model` as ONNX, run it in onnxruntime, and return the largest difference of its logits from torch's.

    Inputs are int64 [batch_size, sequence_length]. Weights of more than 1.5 GiB go to a second file next to `path`.

    Raises:
        MachineError: the logits differ by more than rounding errors.
    """
    import torch

    dynamic_axes: list[Any] = [{0: "batch_size", 1: "sequence_length"}]
    # The other inputs have the same shape, but name no axes: torch warns about repeated names.
    dynamic_axes += [dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)] * (len(model.inputs) - 1)
    with _silence_exporter():
        program = torch.onnx.export(
            model,
            _random_inputs(model, [7, 7]),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=tuple(dynamic_axes),
            input_names=model.inputs,
            output_names=model.outputs,
            verbose=False,
        )
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # remove paths of source files on this machine
        # Remove recorded shapes: quantizers transpose weights without updating them.
        for value in program.model.graph.initializers.values():
            value.type = value.shape = None
        program.save(path)
    return max_logit_difference(model, path)


def _add_onnx(folder: Path, staging: Path) -> str:
    """Add model.onnx to `staging`, and a section about it to the model card; return a description for the terminal."""
    from finetune.artifacts.padded import PaddedModel
    from pretrain.checkpoint.released import read_released

    saved = load_saved(folder)
    model = PaddedModel(read_released(folder), saved.config.make_task(saved.state).head).eval()
    description = f"opset {OPSET}, logits within {write_onnx(model, staging / ONNX):.0e} of torch's"
    inputs, outputs = (", ".join(f"`{name}`" for name in names) for names in (model.inputs, model.outputs))
    card = (folder / _README).read_text(encoding="utf-8").partition(_ONNX_HEADING)[0]
    (staging / _README).write_text(
        f"{card.rstrip()}\n{_ONNX_HEADING}\n`{ONNX}` is the same model ({description}). Its inputs are {inputs}, int64 "
        f"[batch_size, sequence_length], padded on the right; its outputs are {outputs}.\n",
        encoding="utf-8",
    )
    return description


def max_logit_difference(model: PaddedModel, path: Path) -> float:
    """Return the largest difference of onnxruntime's logits from torch's, over sequences of several lengths."""
    import onnxruntime
    import torch

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = _random_inputs(model, [1, 33, 12])
    feeds = {name: values.numpy() for name, values in zip(model.inputs, inputs, strict=True)}
    actual = [torch.from_numpy(logits) for logits in session.run(list(model.outputs), feeds)]
    with torch.no_grad():
        expected = model(*inputs)
    if model.head != "sequence":
        is_token = inputs[1].bool()
        actual, expected = [logits[is_token] for logits in actual], [logits[is_token] for logits in expected]
    difference = max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))
    scale = max(1.0, *(float(logits.abs().max()) for logits in expected))
    if not difference <= 1e-4 * scale:  # true for NaN, too
        raise MachineError(
            f"{ONNX}: onnxruntime {onnxruntime.__version__} computes logits that differ from torch's by "
            f"{difference:.1e}. No file was written. Install the versions of requirements.lock."
        )
    return difference


def _random_inputs(model: PaddedModel, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """Return random inputs of `model`: sequences of these `lengths`, truncated to its max_positions."""
    import torch

    generator = torch.Generator().manual_seed(0)
    vocabulary_size = len(model.embeddings.word)
    lengths_B = torch.tensor(lengths).clamp_max(model.shape.max_positions)
    shape = (len(lengths), int(lengths_B.max()))
    mask_BL = (torch.arange(shape[1]) < lengths_B[:, None]).long()
    ids_BL, types_BL = (torch.randint(count, shape, generator=generator) for count in (vocabulary_size, 2))
    return (ids_BL, mask_BL, types_BL)[: len(model.inputs)]


def _reject_model_folder(out: Path, folder: Path) -> None:
    """Raise `InputError` if `out` is `folder`, the exported model, or the model folder of any run."""
    if out.resolve() == folder.resolve():
        raise InputError(f"{out}: is the model itself. Choose another folder.")
    if out.name == MODEL and (out.parent / SCORES).is_file() and out.exists():
        raise InputError(f"{out}: is the model of a run, not an export. Choose another folder.")


@contextlib.contextmanager
def _silence_exporter() -> Iterator[None]:
    """Hide torch.onnx's messages about its internals; the exported model is checked afterwards."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
