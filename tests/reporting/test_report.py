"""The report is self-contained, shows the values of the records and the model's predictions for masked words."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import SPECIALS, write_corpus
from html_page import Page
from hypothesis import given
from hypothesis import strategies as st

from pretrain.checkpoint import hf
from pretrain.checkpoint.tokenizer import read_tokenizer
from pretrain.common.settings import dump
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.corpus.shards import open_shards
from pretrain.model.heads import PretrainingModel
from pretrain.reporting import charts, fill_mask, report
from pretrain.reporting.fill_mask import MaskedSentence, fill, held_out_sentences
from tests.tasks.refusals import refused

WORDS = [f"{a}{b}{c}" for a in "bdfglm" for b in "aeiou" for c in "nrst"]
VOCABULARY = [*SPECIALS, ".", ",", "<b>", "##ing", "##s", *WORDS, "[unused0]", "[unused1]"]
SHAPE = ModelConfig.model_validate(
    {"size": "custom", "layers": 2, "hidden": 16, "heads": 2, "intermediate": 32, "max_positions": 64}
)


def sentence(random: np.random.Generator, words: int) -> np.ndarray:
    """Whole words, one of them with an ending, and a full stop."""
    ids = random.integers(VOCABULARY.index(WORDS[0]), VOCABULARY.index(WORDS[-1]) + 1, words)
    return np.array([*ids, VOCABULARY.index("##ing"), VOCABULARY.index(".")])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    documents = [[sentence(random, int(random.integers(2, 60))) for _ in range(12)] for _ in range(30)]
    folder = tmp_path_factory.mktemp("corpus")
    splits = {"train": [(0, documents[:10])], "validation": [(0, documents[10:20]), (0, documents[20:])]}
    return write_corpus(folder / "corpus", splits, VOCABULARY)


@pytest.fixture(scope="module")
def exported(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = PretrainingModel(SHAPE, len(VOCABULARY), next_sentence=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    out = tmp_path_factory.mktemp("export") / "export"
    hf.export(model.state_dict(), SHAPE, corpus, out, next_sentence=True, card="")
    return out


@pytest.fixture
def run(corpus: Path, exported: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    phase = {"sequence_length": 32, "global_sequences": 8, "steps": 80, "peak_learning_rate": 1e-3}
    text = {"dir": str(corpus), "sources": [{"kind": "books", "path": "a<b>.txt"}]}
    values = {"name": "small", "corpus": text, "model": SHAPE.model_dump(), "scheduling": {"workers": 2}}
    phases = [phase, {**phase, "sequence_length": 64, "steps": 20}]
    config = PretrainConfig.model_validate({**values, "phases": phases})
    (folder / "config.yaml").write_text(dump(config))
    (folder / "environment.json").write_text(json.dumps({"packages": {"torch": "2.13.0"}, "gpus": []}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    (folder / "export").symlink_to(exported)
    return folder


def records() -> list[dict[str, Any]]:
    fixed = {"nsp_loss": 0.7, "lr": 1e-3, "grad_norm": None, "mfu": 0.4, "data_stall_fraction": 0.01}
    found: list[dict[str, Any]] = []
    for step in range(10, 101, 10):
        losses = {"loss": 5 - step / 50, "mlm_loss": 4 - step / 50}
        accuracies = {"mlm_accuracy": step / 200, "nsp_accuracy": 0.5 + step / 400}
        speed = {"tokens_per_second": 2000.0 + step, "seconds": float(step), "memory_bytes": 2_000_000_000}
        found.append({"step": step, "tokens": 1000 * step, **losses, **accuracies, **fixed, **speed})
    validation = {"split": "validation", "loss": 4.0, "mlm_loss": 3.25, "mlm_accuracy": 0.405, "nsp_accuracy": 0.75}
    return [*found[:5], {**validation, "step": 50, "mlm_loss": 3.5}, *found[5:], {**validation, "step": 100}]


class TestPage:
    @pytest.fixture
    def page(self, run: Path, tmp_path: Path) -> Page:
        return Page(report.write_report([run], tmp_path / "report.html").read_text())

    def test_is_self_contained_and_escapes_the_text_of_the_corpus(self, page: Page) -> None:
        page.assert_stands_alone()
        assert "a&lt;b&gt;.txt" in page.html
        assert "a<b>.txt" not in page.html
        written = r"Written 20\d\d-\d\d-\d\d \d\d:\d\d UTC by bertrain"
        assert re.search(written, " ".join(page.text.split())), "dates are in ISO order"

    def test_shows_the_figures_of_the_last_evaluation_and_the_medians(self, page: Page) -> None:
        figures = ("3.250", "40.5%", "75.0%", "held-out, step 100", "2,055", "40% MFU", "100k", "1:40")
        for expected in (*figures, "2 workers", "2 layers x 16", "run/config.yaml", '{"torch": "2.13.0"}'):
            assert expected in page.text, expected

    def test_draws_every_curve_there_is(self, page: Page) -> None:
        # The gradient norm was never finite: there is no curve of it, and no error.
        assert len(page.charts) == 10
        training, held_out = page.charts[1]
        assert [point[2:] for point in held_out["points"]] == [["step 50", "3.5"], ["step 100", "3.25"]]
        assert training["points"][0][2:] == ["step 10", "3.8"]
        assert training["points"][-1][2:] == ["step 100", "2"]

    def test_fills_ten_sentences_with_five_words_each(self, page: Page) -> None:
        html = page.html
        assert html.count('<p class="sentence">') == html.count('class="blank"') == 10
        assert re.search(r"is the first guess in \d+ and among the guesses in \d+ of 100 sentences like these", html)
        assert html.count('class="truth"') + html.count('class="truth elsewhere"') == 10
        assert html.count('<li style="--share') == 50

    def test_shows_the_corpus_card(self, run: Path, tmp_path: Path) -> None:
        corpus = tmp_path / "elsewhere"
        corpus.mkdir()
        (corpus / "card.md").write_text("# Corpus card\n\n| novels | <b> | CC-BY-SA-4.0 |\n")
        config = run / "config.yaml"
        config.write_text(re.sub(r"(?m)^  dir: .*$", f"  dir: {corpus}", config.read_text()))
        (run / "export").unlink()
        page = Page(report.write_report([run], tmp_path / "report.html").read_text())
        assert f"{corpus}/card.md# Corpus card" in page.text.replace("\n", "")
        assert "| novels | <b> | CC-BY-SA-4.0 |" in page.text

    def test_without_an_export_it_says_so(self, run: Path, tmp_path: Path) -> None:
        (run / "export").unlink()
        (run / "environment.json").unlink()
        text = Page(report.write_report([run], tmp_path / "report.html").read_text()).text
        assert "Not shown: the run has no export folder" in text

    def test_refusals(self, run: Path, tmp_path: Path) -> None:
        refused(r"no metrics\.jsonl in this folder", report.write_report, [tmp_path / "export"], tmp_path / "r.html")

    def test_an_unfinished_demo_shows_the_scores_that_exist(self, run: Path, tmp_path: Path) -> None:
        scores = {"Which?": {"pretrained": 0.75, "random": 0.5}, "Where?": {"pretrained": 0.5, "random": 0.5}}
        scores |= {"Which words?": {"pretrained": 0.25}, "Who?": {}}
        tasks = [
            {"title": title, "metric": "f1" if each else "", "train": 3, "dev": 1, "scores": each, "examples": []}
            for title, each in scores.items()
        ]
        (run / report.FINETUNED).write_text(json.dumps(tasks))
        rows = [["Which?", "f1", "0.750", "0.500"], ["Where?", "f1", "0.500", "0.500"], ["Which words?", "f1", "0.250"]]
        lines = report.summary([run]).splitlines()[-5:]
        assert [re.split("  +", line) for line in lines][1:] == [*rows, ["Who?"]]
        page = report.write_report([run], tmp_path / "report.html").read_text()
        table = page.partition("Benefit of pretraining")[2].partition("</table>")[0]
        assert re.findall(r"<td>([^<]+)</td>", table) == [cell for row in [*rows, ["Who?"]] for cell in row]

    def test_the_summary_has_the_figures(self, run: Path) -> None:
        (run / "fork.json").write_text('{"name": "first", "step": 7}')
        assert [re.split("  +", line.strip()) for line in report.summary([run]).splitlines()] == [
            ["small: finished at step 100, forked from first at step 7"],
            ["MLM loss", "3.250", "held-out, step 100"],
            ["MLM accuracy", "40.5%", "held-out, step 100"],
            ["NSP accuracy", "75.0%", "held-out, step 100"],
            ["useful tokens/s", "2,055", "median, 40% MFU, data stall 1.0%"],
            ["tokens trained on 100k", "in 100 steps"],
            ["training time", "1:40", "on 2 workers"],
        ]


class TestFillings:
    def test_probabilities_are_those_of_transformers(self, corpus: Path, exported: Path) -> None:
        from transformers import BertForMaskedLM

        chosen = held_out_sentences(open_shards(corpus, "validation"), VOCABULARY, 10)
        theirs: Any = BertForMaskedLM.from_pretrained(exported)
        for one, filling in zip(chosen, fill(exported, chosen), strict=True):
            ids = [VOCABULARY.index("[CLS]"), *one.tokens, VOCABULARY.index("[SEP]")]
            ids[one.masked_index + 1] = VOCABULARY.index("[MASK]")
            with torch.no_grad():
                expected = theirs.eval()(torch.tensor([ids])).logits[0, one.masked_index + 1].softmax(-1)
            top = expected.topk(5)
            assert [word for word, _ in filling.guesses] == [VOCABULARY[token] for token in top.indices]
            assert [p for _, p in filling.guesses] == pytest.approx(top.values.tolist(), abs=1e-5)
            truth = one.tokens[one.masked_index]
            assert filling.truth == VOCABULARY[truth]
            assert filling.probability == pytest.approx(expected[truth].item(), abs=1e-5)
            assert filling.rank == 1 + int((expected > expected[truth]).sum())

    def test_sentences_are_whole_held_out_ones_with_a_whole_word_to_guess(self, corpus: Path) -> None:
        shards = open_shards(corpus, "validation")
        chosen = held_out_sentences(shards, VOCABULARY, 10)
        assert len({one.tokens for one in chosen}) == 10
        assert chosen == held_out_sentences(shards, VOCABULARY, 10)
        held_out = {
            tuple(shard.tokens[begin:end].tolist())
            for shard in shards.shards
            for begin, end in zip(shard.sentences[:-1].tolist(), shard.sentences[1:].tolist(), strict=True)
        }
        for one in chosen:
            assert one.tokens in held_out
            assert 10 <= len(one.tokens) <= 40
            assert VOCABULARY[one.tokens[one.masked_index]] in WORDS
            assert not VOCABULARY[one.tokens[one.masked_index + 1]].startswith("##")
        # Spread over both shards, and not always the same place.
        first = {tuple(shards.shards[0].tokens[:].tolist()[i : i + 5]) for i in range(len(shards.shards[0].tokens))}
        assert {one.tokens[:5] in first for one in chosen} == {True, False}
        assert len({one.masked_index for one in chosen}) > 3

    def test_text_unfit_to_show_is_skipped(self) -> None:
        def found(text: str) -> list[int]:
            return fill_mask.maskable_words([fill_mask.spell_wordpiece(entry) for entry in text.split()])

        good = "ban bar bas bat ben ber bes bet bin ##ing ."
        assert found(good) == [0, 1, 2, 3, 4, 5, 6, 7]
        for bad in ("ban bar .", good.replace("ban", "[UNK]"), good[:-2], "ban , , , , , , , , , ."):
            assert found(bad) == []

    def test_an_export_without_the_head_is_refused(self, exported: Path, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = {k: v for k, v in load_file(exported / "model.safetensors").items() if k.startswith("bert.")}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((exported / "config.json").read_text())
        refused("no masked-language-modeling head", fill, tmp_path, [MaskedSentence((11, 12, 13), 1)])

    def test_a_filling_puts_the_sentence_around_the_blank(self, exported: Path) -> None:
        tokenizer, zeros = read_tokenizer(exported), [0.0] * len(VOCABULARY)
        mask = VOCABULARY.index("[MASK]")
        tokens = tuple(VOCABULARY.index(token) for token in ["ban", ",", "bar", "##s", "bat", "."])
        filling = fill_mask.make_filling(MaskedSentence(tokens, 4), zeros, tokenizer, mask)
        assert (filling.before, filling.truth, filling.after) == ("ban, bars ", "bat", ".")
        filling = fill_mask.make_filling(MaskedSentence(tokens, 0), zeros, tokenizer, mask)
        assert (filling.before, filling.truth, filling.after) == ("", "ban", ", bars bat.")


class TestCharts:
    finite = st.floats(-1e9, 1e9, allow_nan=False)

    @given(low=finite, high=finite, count=st.integers(2, 6))
    def test_ticks_span_the_range_in_few_round_steps(self, low: float, high: float, count: int) -> None:
        low, high = min(low, high), max(low, high)
        found = charts.ticks(low, high, count)
        slack = 1e-6 * max(abs(low), abs(high), 1e-9)
        assert found[0] <= low + slack
        assert found[-1] >= high - slack
        assert 2 <= len(found) <= count + 2
        inside = charts.ticks(low, high, count, inside=True)
        if high - low > 1e-3:
            assert all(low - slack <= tick <= high + slack for tick in inside)

    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [(0, 1, [0, 0.25, 0.5, 0.75, 1]), (2.1, 9.7, [2, 4, 6, 8, 10]), (5, 5, [5, 7.5, 10])],
    )
    def test_ticks_are_what_one_would_choose(self, low: float, high: float, expected: list[float]) -> None:
        found = charts.ticks(low, high, 4)
        assert found == expected or (low == high and found[0] <= low)

    @given(st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=700))
    def test_any_curve_stays_inside_the_drawing(self, values: list[float]) -> None:
        series = [charts.Series("a", list(enumerate(values)), smooth=len(values) % 2 == 0)]
        (curve,) = Page(charts.line_chart("t", series, format_y=str, format_x=str)).charts[0]
        assert 1 <= len(curve["points"]) <= 300
        for x, y, *_ in curve["points"]:
            assert 48 <= x <= 390
            assert 12 <= y <= 194
        assert all(math.isfinite(x) and math.isfinite(y) for x, y, *_ in curve["points"])

    def test_the_last_label_of_the_x_axis_is_not_cut_off(self) -> None:
        points = [(0.0, 1.0), (100.0, 3.0)]
        for form_x, drawn in (
            ("{:.0f}".format, '<text x="390.0" y="214" text-anchor="middle">100<'),
            ("{:,.1f} FLOP".format, '<text x="400" y="214" text-anchor="end">100.0 FLOP<'),
        ):
            chart = charts.line_chart("t", [charts.Series("a", points)], format_y=str, format_x=form_x)
            assert drawn in chart
            ends = [point[:2] for point in Page(chart).charts[0][0]["points"]]
            assert ends == [[48.0, 194.0], [390.0, 12.0]], "up is up"

    def test_a_noisy_curve_is_smoothed_only_where_there_is_enough_of_it(self) -> None:
        def plot(count: int) -> tuple[set[str], str]:
            points = [(float(i), float(i % 2)) for i in range(count)]
            html = charts.line_chart("t", [charts.Series("a", points, smooth=True)], format_y=str, format_x=str)
            return {text for *_, text in Page(html).charts[0][0]["points"]}, html

        few, html = plot(40)
        assert few == {"0.0", "1.0"}
        assert html.count("<circle") == 40
        many, html = plot(200)
        assert not few & set(sorted(many)[1:-1])
        assert 'class="train raw"' in html

    def test_a_long_curve_is_averaged_not_sampled_and_keeps_a_spike(self) -> None:
        points = [(float(i), float(i % 2)) for i in range(6000)]
        points[4321] = (4321.0, 41.0)
        html = charts.line_chart("t", [charts.Series("a", points)], format_y=str, format_x=str)
        (curve,) = Page(html).charts[0]
        assert {float(text) for *_, text in curve["points"]} == {0.5, 2.5}
        (faint,) = re.findall(r'class="train raw" points="([^"]*)"', html)
        drawn = [float(point.split(",")[1]) for point in faint.split()]
        assert len(drawn) == 600
        assert drawn.count(min(drawn)) == 1

    def test_many_curves_share_the_points_of_a_chart(self) -> None:
        series = [charts.Series(str(run), [(float(step), 1.0) for step in range(1000)]) for run in range(20)]
        (drawn,) = Page(charts.line_chart("t", series, format_y=str, format_x=str)).charts
        assert {len(curve["points"]) for curve in drawn} == {112}  # means of 9 steps

    def test_nothing_to_draw(self) -> None:
        assert charts.line_chart("t", [charts.Series("a", [])], format_y=str, format_x=str) == ""
