"""The report's section on attention: what heads attend to over the steps of a run, and a few matrices."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.reporting.attention.strips import percent
from pretrain.reporting.charts import Series, line_chart
from pretrain.run.attention.history import RECORDED_KINDS, read_history, unpack_matrix
from pretrain.run.attention.kinds import KINDS

_MAX_HEADS, _MAX_STEPS = 3, 6  # maximum number of heads, and of steps per head, whose matrices are drawn
_NUM_LEVELS = 6  # number of opacity levels


@dataclass(frozen=True)
class HeadPictures:
    """One head during training: a title, and (step, SVG of its matrix) at some steps."""

    title: str
    matrices: list[tuple[int, str]]


@dataclass(frozen=True)
class AttentionSection:
    """Contents of the section.

    Attributes:
        text: the text whose matrices are drawn; "" if the corpus's tokenizer no longer exists.
        heads: matrices of a few heads.
        charts: a <figure> for each kind of token: shares of attention over the steps.
    """

    text: str
    heads: list[HeadPictures]
    charts: list[str]


def attention_section(run_dir: Path, corpus: Path) -> AttentionSection | None:
    """Return the section of the run in `run_dir`; None if it recorded no attention. `corpus` has the tokenizer."""
    history = read_history(run_dir)
    if not history.get("records"):
        return None
    records, uniform = history["records"], {**history["even_shares"], "entropy": history["even_entropy"]}
    return AttentionSection(
        text=_decode(history["picture"], corpus),
        heads=_head_pictures(history, uniform),
        charts=[_chart(kind, records) for kind in (*RECORDED_KINDS, "entropy") if uniform[kind] > 0],
    )


def matrix_svg(weights_LL: np.ndarray, label: str) -> str:
    """Return an <svg> of a matrix of attention weights; opacity is the rounded square root of the weight."""
    length = len(weights_LL)
    levels_LL = np.rint(np.sqrt(weights_LL) * _NUM_LEVELS).astype(int)
    paths = [
        f'<path opacity="{level / _NUM_LEVELS:.2f}" d="{_rectangles(levels_LL == level)}"/>'
        for level in range(1, _NUM_LEVELS + 1)
        if (levels_LL == level).any()
    ]
    return f'<svg class="matrix" viewBox="0 0 {length} {length}" role="img" aria-label="{label}">{"".join(paths)}</svg>'


def _rectangles(chosen_LL: np.ndarray) -> str:
    """Return an SVG path that covers the chosen cells, with one rectangle for adjacent cells of a row."""
    parts = []
    for row, chosen_L in enumerate(chosen_LL):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen_L.astype(np.int8), [0]])))
        parts += [f"M{start} {row}h{end - start}v1H{start}z" for start, end in edges.reshape(-1, 2)]
    return "".join(parts)


def _decode(ids: list[int], corpus: Path) -> str:
    if not (corpus / "tokenizer.json").is_file():
        return ""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(corpus / "tokenizer.json")).decode(ids, skip_special_tokens=True)


def _head_pictures(history: dict[str, Any], uniform: dict[str, float]) -> list[HeadPictures]:
    """Draw the heads that attend most to a kind of token at the last step, one head per kind."""
    records, last = history["records"], len(history["records"]) - 1
    indices = (round(n * last / (_MAX_STEPS - 1)) for n in range(_MAX_STEPS))  # evenly spread
    shown_records = records if last < _MAX_STEPS else [records[index] for index in indices]
    pictures = []
    for index, kind, share in distinct_heads(history["heads"], records[-1]["shares"], uniform):
        layer, head = history["heads"][index]
        name = f"head {layer + 1}-{head + 1}"
        matrices = [
            (
                record["step"],
                matrix_svg(unpack_matrix(record["matrices"][index]), f"attention of {name}, step {record['step']}"),
            )
            for record in shown_records
        ]
        pictures.append(HeadPictures(f"{name.capitalize()}: {share:.0%} to {KINDS[kind]}", matrices))
    return pictures


def distinct_heads(
    heads: list[list[int]], shares: dict[str, Any], uniform: dict[str, float]
) -> list[tuple[int, str, float]]:
    """Return (index in `heads`, kind, share) of the heads that exceed `uniform` most, each head and kind only once."""
    candidates = sorted(
        (
            (shares[kind][layer][head] - uniform[kind], index, kind)
            for kind in RECORDED_KINDS
            for index, (layer, head) in enumerate(heads)
        ),
        reverse=True,
    )
    chosen: list[tuple[int, str, float]] = []
    for excess, index, kind in candidates:
        if len(chosen) < _MAX_HEADS and all(index != i and kind != k for i, k, _ in chosen):
            chosen.append((index, kind, excess + uniform[kind]))
    return chosen


def _chart(kind: str, records: list[dict[str, Any]]) -> str:
    """Draw a chart of the head that attends most to `kind` at the last step, and of the mean of all heads."""
    arrays = {r["step"]: np.array(r["entropy"] if kind == "entropy" else r["shares"][kind]) for r in records}
    last = arrays[records[-1]["step"]]
    index = int(last.argmin() if kind == "entropy" else last.argmax())
    layer, head = divmod(index, last.shape[1])
    series = [
        Series(f"head {layer + 1}-{head + 1}", [(step, float(array[layer, head])) for step, array in arrays.items()]),
        Series("mean of all heads", [(step, float(array.mean())) for step, array in arrays.items()], "held-out"),
    ]
    label = KINDS.get(kind, "entropy of the weights, nats")
    return line_chart(
        f"{label[0].upper()}{label[1:]}",
        series,
        format_y=percent if kind in KINDS else (lambda nats: f"{nats:.3g}"),
        format_x=lambda step: f"{step:,.0f}",
        from_zero=True,
    )
