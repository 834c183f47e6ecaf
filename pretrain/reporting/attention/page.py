"""The page of a model's attention on a passage: all heads as small matrices, one enlarged, and their averages."""

import base64
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pretrain.common.errors import InputError
from pretrain.common.files import disk_errors
from pretrain.common.wording import counted
from pretrain.reporting.attention.strips import percent, strip_chart
from pretrain.reporting.attention.weights import AttentionModel, DisplayTokens
from pretrain.reporting.pages import write_page
from pretrain.run.attention.kinds import KINDS, HeadStatistics

_MAX_WEIGHTS = 12_000_000  # maximum number of weights of all heads: 32 MB of HTML, which a phone can still open
_WINDOW_TOKENS = 512  # maximum number of tokens in a window, into which long lines are cut (BERT's maximum)
_NUM_STRONGEST = 3  # number of heads listed for each kind of token


class StrongHead(NamedTuple):
    """A head and its value; layers and heads count from 1, as in Clark et al. (4-10 is the tenth head of layer 4)."""

    layer: int
    head: int
    value: float

    @property
    def name(self) -> str:
        return f"{self.layer}-{self.head}"


def write_attention_page(
    folder: Path, out: Path, *, text: str | None = None, pair: str | None = None, texts: Path | None = None
) -> str:
    """Write the page to `out` atomically and return a summary for the terminal.

    Args:
        folder: a run, an export, a released or a fine-tuned model.
        text: the input whose matrices are drawn; by default the first line of `texts`.
        pair: the second segment of a pair.
        texts: UTF-8 file with one input per line, over which each head is averaged; by default only over `text`.

    Raises:
        InputError: there is no input, it is too long to draw, or the model or the file cannot be read.
    """
    lines = read_texts(texts) if texts else []
    if text is None:
        if not lines:
            raise InputError("attention: no text is given. Add --text TEXT, or --texts FILE.")
        text = lines[0]
    values = page_values(folder, text, pair, lines)
    write_page(out, "attention.html.j2", name=folder.resolve().name, folder=folder, heads=values)
    summary = ["the heads (layer-head) that attend most to"]
    for kind, uniform, heads in values["strongest"]:
        shares = "   ".join(f"{head.name} {head.value:.1%}" for head in heads)
        summary.append(f"  {kind:26}{shares}   (uniform {uniform})")
    return "\n".join(summary)


def page_values(folder: Path, text: str, pair: str | None = None, lines: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values for the template heads.html.j2; averages are over `lines`, or over `text` if [] is given."""
    model = AttentionModel(folder)
    shape = model.shape
    tokens = _tokens_to_draw(model, text, pair)
    weights = model.weights(tokens)
    statistics = _head_statistics(model, lines) if lines else HeadStatistics()
    if not lines:
        statistics.add(weights, tokens.marks)
    return {
        "model": f"{model.family}, {shape.depth} layers x {shape.hidden}, {shape.heads} heads per layer",
        "data": _page_data(tokens, weights, statistics),
        "tokens": len(tokens),
        "averaged": f"{statistics.tokens:,} tokens of {counted(statistics.texts, 'text')}",
        "strongest": [
            (KINDS[kind], f"{uniform:.1%}", strongest_heads(statistics.shares[kind], _NUM_STRONGEST))
            for kind, uniform in _present_kinds(statistics)
        ],
        "strips": list(_strips(statistics)),
    }


def read_texts(path: Path) -> list[str]:
    """Read the non-blank lines of a UTF-8 file. Raises `InputError` if there are none, or it cannot be read."""
    try:
        with disk_errors(path):
            lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file. Give a text file with one text per line.") from None
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise InputError(f"{path}: not a UTF-8 text file ({error}). Give one with one text per line.") from None
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        raise InputError(f"{path}: has no text. Write one text per line.")
    return lines


def _tokens_to_draw(model: AttentionModel, text: str, pair: str | None) -> DisplayTokens:
    """Return the tokens to draw. Raises `InputError` if there are none, or too many."""
    tokens = model.tokens(text, pair)
    heads = model.shape.depth * model.shape.heads
    max_tokens = min(model.shape.max_positions, math.isqrt(_MAX_WEIGHTS // heads))
    if len(tokens) > max_tokens:
        raise InputError(
            f"attention: the text has {len(tokens)} tokens, and the page can show {max_tokens} for this model "
            f"({heads} heads, {model.shape.max_positions} positions). Give a shorter one; lines of --texts may have "
            "any length."
        )
    if (tokens.marks.first | tokens.marks.separator).all():
        raise InputError("attention: the text has no token. Give one with words.")
    return tokens


def _head_statistics(model: AttentionModel, lines: Sequence[str]) -> HeadStatistics:
    statistics = HeadStatistics()
    for line in lines:
        for window in model.windows(line, min(_WINDOW_TOKENS, model.shape.max_positions)):
            statistics.add(model.weights(window), window.marks)
    return statistics


def _page_data(tokens: DisplayTokens, weights: list[np.ndarray], statistics: HeadStatistics) -> dict[str, Any]:
    """Return the data for the page's script. Weights are uint16 (65,535 means 1), base64 of [N, L, L] per layer."""
    special = tokens.marks.first | tokens.marks.separator
    return {
        "heads": len(weights[0]),
        "tokens": [
            {"text": text, "special": bool(is_special), "joined": joined}
            for text, is_special, joined in zip(tokens.spellings, special, tokens.continues_word, strict=True)
        ],
        "weights": [base64.b64encode(np.rint(NLL * 65535).astype("<u2").tobytes()).decode() for NLL in weights],
        "kinds": [
            {
                "name": kind,
                "label": KINDS[kind],
                "even": round(uniform, 4),
                "shares": statistics.shares[kind].round(4).tolist(),
            }
            for kind, uniform in _present_kinds(statistics)
        ],
        "entropy": statistics.entropy.round(4).tolist(),
        "even_entropy": round(statistics.uniform_entropy, 4),
    }


def _present_kinds(statistics: HeadStatistics) -> Iterator[tuple[str, float]]:
    """Return (kind, its share under uniform attention) of the kinds of tokens that occur in the input."""
    return ((kind, uniform) for kind, uniform in statistics.uniform_shares.items() if uniform > 0)


def strongest_heads(values: np.ndarray, count: int) -> list[StrongHead]:
    """Return the `count` heads with the highest values [layers, heads], highest first."""
    order = np.argsort(-values, axis=None, kind="stable")[:count]
    indices = (divmod(int(index), values.shape[1]) for index in order)
    return [StrongHead(layer + 1, head + 1, float(values[layer, head])) for layer, head in indices]


def _strips(statistics: HeadStatistics) -> Iterator[str]:
    for kind, uniform in _present_kinds(statistics):
        label = KINDS[kind]
        title = f"{label[0].upper()}{label[1:]}"
        yield strip_chart(title, statistics.shares[kind], uniform, format_y=percent)
    yield strip_chart("Entropy, nats", statistics.entropy, statistics.uniform_entropy, format_y="{:.3g}".format)
