"""README and docs/: links, generated pages, length, and the site itself."""

from __future__ import annotations

import importlib.util
import json
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest
from pydantic import Field

from docs import build, chart, conf, generate
from finetune.training import config as finetune_config
from pretrain.common.records import SOURCE_LOSS
from pretrain.common.sections import Section
from pretrain.config import load_config, resume
from pretrain.planning.estimate import dry_run
from pretrain.reporting.panels import panels
from pretrain.run.metrics import TRAINING_METRICS
from pretrain.tracking.events import EVALUATION_FIELDS, PROBE_FIELDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def links(text: str) -> list[str]:
    """Targets of all links and images, without those in code."""
    plain = re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", text))
    return [one or two for one, two in _LINK.findall(plain)]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for title in re.findall(r"^#{1,6} +(.+?)\s*#*$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        kept = [one for one in title if one in "-_ " or unicodedata.category(one)[0] in "LNM"]
        slug = "".join(kept).replace(" ", "-")
        number = found.get(slug, 0)
        found[slug] = number + 1
        names.add(f"{slug}-{number}" if number else slug)
    return names


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_and_anchor_resolves(page: Path):
    broken = []
    for target in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or not file.is_relative_to(ROOT) or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_a_broken_link_and_anchor_are_noticed(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A `b`: c\n\n[x](gone.md) `[y](code.md)` ![z](z.png)\n\n```\n[k](k.md)\n# not a heading\n```\n")
    assert links(page.read_text()) == ["gone.md", "z.png"]
    assert anchors(page) == {"a-b-c"}


def test_pages_name_no_path_of_a_machine():
    path = re.compile(r"(?<![\w.~/])/(home|root|work|Users)/(?!bertrain)")
    assert [page for page in PAGES if path.search(page.read_text(encoding="utf-8"))] == []


def test_files_named_in_code_style_exist():
    missing = set()
    for page in PAGES:
        spans = re.findall(r"`([^`\n]+)`", _FENCE.sub("", page.read_text(encoding="utf-8")))
        paths = (re.fullmatch(r"(?:pretrain|finetune|cluster|configs|tests|docs)/[\w./-]*", span) for span in spans)
        missing |= {f"{name_of(page)}: {path[0]}" for path in paths if path and not (ROOT / path[0]).exists()}
    assert missing == set()


def test_images_are_small():
    for image in (ROOT / "docs/images").iterdir():
        assert image.stat().st_size < 150_000, image.name


def test_generated_pages_are_current():
    assert generate.stale() == [], f"Stale pages in docs/reference. Regenerate them: {generate.COMMAND}"
    assert "SUPPRESS" not in generate.commands_page()


def test_the_chart_is_of_the_published_numbers():
    page = chart.PAGE.read_text(encoding="utf-8")
    assert chart.CHART.read_text(encoding="utf-8") == chart.svg(page), f"Stale. Draw it again: {chart.COMMAND}"
    names, rows = chart.published(page)
    for name, loss in zip(names, rows[-1][1:], strict=True):
        assert f"{loss:.2f}" in (ROOT / "README.md").read_text(encoding="utf-8"), name
    assert chart.svg(page.replace("| 8.0 | 5.124 |", "| 8.0 | 5.024 |")) != chart.svg(page)


def test_the_picture_of_the_report_is_of_one_recorded_demo():
    record = json.loads(chart.RECORD.read_text(encoding="utf-8"))
    picture = chart.report_svg(record)
    assert chart.REPORT.read_text(encoding="utf-8") == picture, f"Stale. Draw it again: {chart.COMMAND}"
    steps, share = record["accuracy"]["held-out"][-1]
    page = (ROOT / "docs/guides/pretraining.md").read_text(encoding="utf-8")
    assert f"the demo, {steps} steps in 6 minutes of two cores: {100 * share:.1f} % of" in page
    record["scores"][0][2]["pretrained"] = 0.5
    assert chart.report_svg(record) != picture


def test_numbers_have_units_and_shares_are_fractions():
    class Example(Section):
        size: str = "base"
        vocabulary_size: int = 30522
        stop_words: tuple[str, ...] = ("the",)
        min_words: int = 50
        min_alphabetic_words: float = Field(default=0.8, ge=0, le=1)
        threshold: float | None = None
        spike_share: float = Field(default=0.2, ge=0)
        layers: tuple[int, ...] = ()

    units = {name: generate._unit(name, field) for name, field in Example.model_fields.items()}
    expected = {"vocabulary_size": "entries", "min_words": "words", "layers": "layers"}
    expected |= {"min_alphabetic_words": "fraction", "spike_share": "fraction"}
    assert {name: unit for name, unit in units.items() if unit} == expected


def test_a_stale_page_is_noticed(tmp_path: Path):
    folder = tmp_path / "reference"
    generate.write(folder)
    assert generate.stale(folder) == []
    (folder / "metrics.md").write_text("# Metrics\n")
    (folder / "exit-codes.md").unlink()
    guide = folder / generate.CONFIG_TABLE
    guide.write_text(guide.read_text().replace("1,300 of 128; 4.3 M", "1,300 of 128; 5.1 M"))
    assert generate.stale(folder) == ["metrics.md", "exit-codes.md", generate.CONFIG_TABLE]


def test_the_printed_dry_run_is_the_programs():
    """Its mean length was measured on the text."""
    page = (ROOT / "docs/guides/pretraining.md").read_text(encoding="utf-8")
    shown = page.partition("From the output of mini.yaml")[2].partition("```text\n")[2].partition("```")[0].splitlines()
    config = load_config("mini", ["corpus.dir=not-prepared"])
    printed = dry_run(config, on="8xH100", mean_length=float(shown[shown.index("Work") + 3].split()[1])).splitlines()
    assert [line for line in shown if line not in printed] == []


def test_every_metric_of_the_panels_is_described():
    described = {*TRAINING_METRICS, *EVALUATION_FIELDS, *PROBE_FIELDS, SOURCE_LOSS}
    assert {name for panel in panels() for name in panel.metrics} <= described


def test_the_table_of_what_may_change_on_resume_is_whole():
    page = (ROOT / "docs/guides/recovery.md").read_text(encoding="utf-8")
    table = page.partition("| Section | Pretraining | Fine-tuning |\n")[2].partition("\n\n")[0]
    found = set[str](), set[str]()
    for row in table.splitlines()[1:]:
        sections, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for names, cell in zip(found, [cells[0], cells[0] if cells[1] == "the same" else cells[1]], strict=True):
            for section in re.findall(r"`(\w+)`", sections) or [""]:
                within = [section] if cell.startswith("all") else re.findall(r"`(\w+)`", cell)
                names |= {f"{section}.{name}" if section not in ("", name) else name for name in within}
    pretraining = (*resume.FREE_IN_PRETRAINING, resume.FREE_WITHOUT_REPLAY, *resume.OBJECTIVE_FILE_SETTINGS)
    expected = (pretraining, finetune_config.FREE_IN_FINETUNING)
    assert found == tuple({name.replace(".*", "") for name in names} for names in expected)


def test_every_page_is_in_the_navigation():
    listed = {name for names in conf.NAVIGATION.values() for name in names} | {"index"}
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in pages if not re.match(r"decisions/\d", name)} == listed


def test_every_decision_is_in_the_index():
    index = (ROOT / "docs/decisions/index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs/decisions").glob("[0-9]*.md"):
        assert f"]({page.name})" in index, page.name


def test_links_out_of_the_docs_become_text_in_the_site():
    text = "[a](../pretrain/model/) [b](guides/x.md#y) [`c`](../SECURITY.md) ![d](images/d.png) [e](https://e.org)"
    expected = "a [b](guides/x.md#y) [`c`](security.md) ![d](images/d.png) [e](https://e.org)"
    assert conf.within_docs(text, "") == expected
    assert conf.within_docs("[a](../index.md) [b](../../README.md)", "guides") == "[a](../index.md) b"
    assert conf.within_docs("[a](docs/index.md) [b](README.md)", "..") == "[a](index.md) b"


class _Fetched(HTMLParser):
    """Everything that a browser fetches when it opens the page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        names = ("src", "srcset", "data") if tag != "link" else ("href",)
        self.urls += [values[name] or "" for name in names if name in values]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in ("sphinx", "myst_parser", "furo") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the docs extra is not installed: {', '.join(missing)}")
    out = tmp_path_factory.mktemp("site") / "html"
    assert build.main(["--build", str(out)]) == 0  # a warning fails the build
    return out


def test_the_site_builds_and_fetches_nothing_from_other_hosts(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES) - 3
    for page in pages:
        fetched = _Fetched()
        fetched.feed(page.read_text(encoding="utf-8"))
        assert [url for url in fetched.urls if re.match(r"(https?:)?//", url)] == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_the_site_has_every_page(site: Path):
    start = (site / "index.html").read_text(encoding="utf-8")
    for name in (name for names in conf.NAVIGATION.values() for name in names):
        assert f'href="{name}.html"' in start
        assert (site / f"{name}.html").is_file()
    assert "What is promised" in (site / "security.html").read_text(encoding="utf-8")
