"""The attention page: the weights are transformers', the averages those of Clark et al., and the page holds both."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from html_page import Page
from tiny_checkpoints import make_bert, make_distilbert, make_roberta

from finetune.cli import main
from pretrain.model.padded import PaddedEncoder
from pretrain.reporting.attention.page import strongest_heads, write_attention_page
from pretrain.reporting.attention.strips import strip_chart
from pretrain.reporting.attention.weights import AttentionModel, DisplayTokens
from pretrain.run.attention.kinds import KINDS, HeadStatistics, TokenMarks
from tests import parity
from tests.tasks.refusals import refused

TEXT = "The film was good, the book was not: a zebra is a Film."
PAIR = "It was great!"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    bert = make_bert(root / "bert")
    made = {"bert": bert, "roberta": make_roberta(root / "roberta", bert)}
    made["distilbert"] = make_distilbert(root / "distilbert", bert)
    for folder in made.values():
        _sharpen(folder)
    return made


def _sharpen(folder: Path) -> None:
    """Queries and keys far from zero: fresh weights attend to all tokens alike, whatever is wrong with them."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("query", "key", "q_lin", "k_lin")):
                parameter.add_(torch.randn_like(parameter) * 0.4)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def bert(folders: dict[str, Path]) -> AttentionModel:
    return AttentionModel(folders["bert"])


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_weights_are_those_of_transformers(folders: dict[str, Path], family: str) -> None:
    from transformers import AutoModel

    ours = AttentionModel(folders[family])
    theirs: Any = AutoModel.from_pretrained(folders[family], attn_implementation="eager").eval()
    for pair in (None, PAIR):
        tokens = ours.tokens(TEXT, pair)
        more = {"token_type_ids": torch.from_numpy(tokens.token_types)[None]} if family == "bert" else {}
        with torch.no_grad():
            expected = theirs(torch.from_numpy(tokens.marks.ids)[None], output_attentions=True, **more).attentions
        found = ours.weights(tokens)
        assert len(found) == len(expected) == 2
        for layer, wanted in zip(found, expected, strict=True):
            assert np.abs(layer - wanted[0].numpy()).max() < 1e-5
            assert layer.max() > 0.3  # far from even


@pytest.mark.parametrize("family", [*parity.FAMILIES, *parity.OTHERS])
def test_weights_of_every_family_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs: Any = parity.make_theirs("AutoModelForMaskedLM", family, parity.SHAPES[0])
    released = parity.read_back(theirs, tmp_path)
    theirs.set_attn_implementation("eager")
    ids = torch.randint(parity.ROWS, (1, 40), generator=torch.Generator().manual_seed(2))
    collected: list[torch.Tensor] = []
    with torch.no_grad():
        PaddedEncoder(released.model, released.backbone).encode(ids, torch.ones_like(ids), attention=collected)
        expected = theirs(input_ids=ids, output_attentions=True).attentions
    assert len(collected) == len(expected) == released.model.layers
    for number, (layer, wanted) in enumerate(zip(collected, expected, strict=True)):
        assert (layer - wanted).abs().max() < 1e-5
        if window := released.model.window(number):
            assert (layer[0, :, 0, window + 1 :] == 0).all()


def test_tokens_are_shown_as_in_the_text(bert: AttentionModel) -> None:
    tokens = bert.tokens(TEXT, PAIR)
    assert tokens.spellings[:7] == ("[CLS]", "The", "film", "was", "good", ",", "the")
    assert tokens.spellings[-6:] == ("[SEP]", "It", "was", "great", "!", "[SEP]")
    zebra = tokens.spellings.index("z")
    assert "".join(tokens.spellings[zebra : zebra + 5]) == "zebra"
    assert tokens.continues_word[zebra : zebra + 6] == (False, True, True, True, True, False)
    assert not any(tokens.continues_word[:zebra])
    marked = tokens.marks
    assert np.flatnonzero(marked.first).tolist() == [0]
    assert [tokens.spellings[at] for at in np.flatnonzero(marked.separator)] == ["[SEP]", "[SEP]"]
    assert [tokens.spellings[at] for at in np.flatnonzero(marked.punctuation)] == [",", "."]
    assert len(set(marked.word_index[zebra : zebra + 5])) == 1
    film, again = 2, tokens.spellings.index("Film")
    assert marked.word[film] == marked.word[again]
    assert marked.word_index[film] != marked.word_index[again]
    assert (marked.word[[0, -1]] == -1).all()
    assert tokens.token_types.tolist() == [0] * (len(tokens) - 5) + [1] * 5


def test_a_long_text_is_divided_and_nothing_is_left_out(bert: AttentionModel) -> None:
    whole = bert.tokens(TEXT).marks.ids[1:-1]
    windows = list(bert.windows(TEXT, 8))
    assert max(map(len, windows)) == 8
    assert np.concatenate([window.marks.ids[1:-1] for window in windows]).tolist() == whole.tolist()
    assert all(window.spellings[0] == "[CLS]" and window.spellings[-1] == "[SEP]" for window in windows)
    assert len(bert.tokens(TEXT)) == len(whole) + 2  # the division does not last


def hand_made() -> DisplayTokens:
    """[CLS] a b ##c , a [SEP] with the words a, bc and the comma."""
    ids = np.array([2, 10, 11, 12, 13, 10, 3])
    first, separator = ids == 2, ids == 3
    marked = TokenMarks(
        ids, first, separator, ids == 13, np.array([-1, 0, 1, 1, 2, 0, -1]), np.array([-1, 0, 1, 1, 2, 3, -1])
    )
    return DisplayTokens(tuple("CabcdaS"), (False,) * 7, np.zeros(7, np.int64), marked)


def random_weights(length: int, layers: int = 2, heads: int = 3, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    scores = random.normal(size=(layers, heads, length, length)).astype(np.float32) * 3
    return list(np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))


def test_shares_and_entropy_follow_their_definitions() -> None:
    """Against loops over pairs of tokens, for two texts of different lengths."""
    marked = hand_made().marks
    shorter = TokenMarks(**{name: values[:-1] for name, values in marked.__dict__.items()})
    texts = [(marked, random_weights(7)), (shorter, random_weights(6, seed=1))]
    statistics = HeadStatistics()
    for marked, weights in texts:
        statistics.add(weights, marked)
    is_kind = {
        "self": lambda m, i, j: i == j,
        "previous": lambda m, i, j: j == i - 1,
        "next": lambda m, i, j: j == i + 1,
        "first": lambda m, i, j: j == 0,
        "separator": lambda m, i, j: m.ids[j] == 3,
        "punctuation": lambda m, i, j: m.ids[j] == 13,
        "same_token": lambda m, i, j: i != j and m.ids[i] == m.ids[j],
        "same_word": lambda m, i, j: i != j and m.ids[i] == m.ids[j] == 10,
    }
    assert set(is_kind) == set(KINDS)
    for kind, chosen in is_kind.items():
        mass, even = np.zeros((2, 3)), 0.0
        for marked, weights in texts:
            length = len(marked.ids)
            pairs = [(i, j) for i in range(length) for j in range(length) if chosen(marked, i, j)]
            for i, j in pairs:
                mass += np.array([[weights[layer][head][i, j] for head in range(3)] for layer in range(2)])
            even += len(pairs) / length
        assert np.allclose(statistics.shares[kind], mass / 13, atol=1e-6), kind
        assert statistics.uniform_shares[kind] == pytest.approx(even / 13), kind
    entropies = [-(w * np.log(w)).sum(-1).sum(-1) for _, weights in texts for w in weights]
    assert np.allclose(statistics.entropy[0], (entropies[0] + entropies[2]) / 13, atol=1e-5)
    assert statistics.uniform_entropy == pytest.approx((7 * math.log(7) + 6 * math.log(6)) / 13)


def test_a_head_of_even_weights_has_the_even_figures_and_one_of_zeros_no_entropy() -> None:
    marked, even = hand_made().marks, np.full((1, 7, 7), 1 / 7, np.float32)
    statistics = HeadStatistics()
    statistics.add([even, np.eye(7, dtype=np.float32)[None]], marked)
    for kind in KINDS:
        assert statistics.shares[kind][0, 0] == pytest.approx(statistics.uniform_shares[kind], abs=1e-6)
    assert statistics.entropy[0, 0] == pytest.approx(statistics.uniform_entropy, abs=1e-5)
    assert (statistics.entropy[1, 0], statistics.shares["self"][1, 0]) == (0, 1)


def test_a_word_of_several_tokens_occurs_elsewhere() -> None:
    ids = np.array([5, 6, 7, 5, 6])
    no = np.zeros(5, bool)
    marked = TokenMarks(ids, no, no, no, np.array([0, 0, 1, 0, 0]), np.array([0, 0, 1, 2, 2]))
    same_word = marked.selectors()[list(KINDS).index("same_word")]
    assert same_word[0].tolist() == [0, 0, 0, 1, 1]
    assert same_word[2].tolist() == [0] * 5
    assert marked.selectors()[list(KINDS).index("same_token")][0].tolist() == [0, 0, 0, 1, 0]


def test_heads_are_ranked_by_their_values() -> None:
    found = strongest_heads(np.array([[0.1, 0.5], [0.9, 0.2]]), 3)
    assert [(head.name, head.value) for head in found] == [("2-1", 0.9), ("1-2", 0.5), ("2-2", 0.2)]


def page_data(path: Path) -> dict[str, Any]:
    text = path.read_text()
    begin = text.index('id="data">') + len('id="data">')
    return json.loads(text[begin : text.index("</script>", begin)])


def test_the_page_holds_every_weight_and_stands_alone(folders, bert, tmp_path) -> None:
    nasty = "the </script><b> film was good & bad"
    out = tmp_path / "page.html"
    summary = write_attention_page(folders["bert"], out, text=nasty, pair=PAIR)
    page = Page(out.read_text())
    page.assert_stands_alone()
    data, tokens = page_data(out), bert.tokens(nasty, PAIR)
    assert [token["text"] for token in data["tokens"]] == list(tokens.spellings)
    assert [token["special"] for token in data["tokens"]].count(True) == 3
    for packed, layer in zip(data["weights"], bert.weights(tokens), strict=True):
        held = np.frombuffer(base64.b64decode(packed), "<u2").reshape(layer.shape) / 65535
        assert np.abs(held - layer).max() <= 0.5 / 65535 + 1e-7
    statistics = HeadStatistics()
    statistics.add(bert.weights(tokens), tokens.marks)
    shares = {kind["name"]: kind["shares"] for kind in data["kinds"]}
    assert np.allclose(shares["previous"], statistics.shares["previous"], atol=1e-4)
    assert "punctuation" not in shares  # there is none in this text
    (strongest,) = strongest_heads(statistics.shares["next"], 1)
    assert f"the next token            {strongest.name} {strongest.value:.1%}" in summary
    assert f"Averaged over {len(tokens)} tokens of 1 text" in page.text
    assert page.html.count("<circle") == 4 * (len(shares) + 1)


def test_averages_over_a_file_are_of_all_its_texts(folders, bert, tmp_path) -> None:
    long = " ".join(["good film,"] * 60)  # more than the model's 64 positions
    (tmp_path / "texts.txt").write_text(f"{TEXT}\n\n{long}\n")
    write_attention_page(folders["bert"], tmp_path / "page.html", texts=tmp_path / "texts.txt")
    data = page_data(tmp_path / "page.html")
    assert [token["text"] for token in data["tokens"]] == list(bert.tokens(TEXT).spellings)  # the first one is drawn
    statistics = HeadStatistics()
    for line in (TEXT, long):
        for window in bert.windows(line, 64):
            statistics.add(bert.weights(window), window.marks)
    shares = {kind["name"]: kind["shares"] for kind in data["kinds"]}
    assert np.allclose(shares["punctuation"], statistics.shares["punctuation"], atol=1e-4)
    assert np.allclose(data["entropy"], statistics.entropy, atol=1e-4)
    text = Page((tmp_path / "page.html").read_text()).text
    assert f"{statistics.tokens:,} tokens of {statistics.texts} texts" in text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "no text is given. Add --text TEXT, or --texts FILE."),
        ({"text": "  "}, "the text has no token"),
        ({"text": "good " * 63}, "the text has 65 tokens, and the page can show 64 for this model"),
        ({"texts": Path("no.txt")}, "no.txt: no such file"),
        ({"texts": Path("empty.txt")}, "empty.txt: has no text"),
        ({"texts": Path("bytes.txt")}, "bytes.txt: not a UTF-8 text file"),
    ],
)
def test_what_is_refused(folders: dict[str, Path], tmp_path: Path, given: Any, expected: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n \n")
    Path("bytes.txt").write_bytes(b"caf\xe9")
    refused(expected, write_attention_page, folders["bert"], Path("page.html"), **given)
    assert not Path("page.html").exists()


def test_the_command_writes_the_page(folders: dict[str, Path], tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["attention", str(folders["roberta"]), "--text", TEXT]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{(tmp_path / 'attention.html').as_uri()}\n")
    assert Page((tmp_path / "attention.html").read_text()).text
    assert main(["attention", str(tmp_path / "none"), "--text", TEXT]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_strip_has_a_dot_for_each_head_at_its_value() -> None:
    svg = strip_chart("a <b>", np.array([[0.0, 0.5], [1.0, 0.25]]), 0.25, format_y=lambda value: f"{value:g}")
    assert "a &lt;b&gt;" in svg
    assert svg.count("<circle") == 4
    heights = [float(part.split('"')[1]) for part in svg.split("cy=")[1:]]
    assert heights[0] > heights[3] > heights[1] > heights[2]
    assert 'data-head="2-1"' in svg
