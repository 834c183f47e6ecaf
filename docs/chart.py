"""python docs/chart.py [RUN]: draw the images of the README from recorded data; RUN is a demo's folder to record.

One shows the first table of docs/benchmarks/index.md, the other a recorded demo, docs/images/demo.json.
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path
from typing import Any

from pretrain.common.records import read_records
from pretrain.reporting.charts import Series, line_chart
from pretrain.reporting.report import FINETUNED, summary

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks/index.md"
CHART = ROOT / "docs/images/equal-time.svg"
RECORD = ROOT / "docs/images/demo.json"
REPORT = ROOT / "docs/images/report.svg"
COMMAND = "python docs/chart.py"

_TITLE = "Held-out loss after equal training time"
_SECTION = "## Loss after equal time\n"
_STYLE = (
    'text{font-family:-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#1c2430}'
    ".t{font-size:15px;font-weight:600}.n{font-size:12px;fill:#4d5a70}"
    "svg svg text{font-size:10.5px;fill:#4d5a70}svg svg .l{font-size:11.5px;font-weight:600}"
    ".grid{stroke:#e1e5ec}polyline{fill:none;stroke-width:2.2}"
)
# CSS classes of curves and their labels.
_COLORS = {"own": "#2f6fb5", "other-1": "#d08a2e", "other-2": "#b5463c"}


def published(page: str) -> tuple[list[str], list[list[float]]]:
    """Return the headings of the table, and its rows of numbers: minutes, then a loss for each heading."""
    table = page.partition(_SECTION)[2].partition("\n|")[2].partition("\n\n")[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return head[1:], [[float(cell) for cell in row] for row in rows]


def svg(page: str) -> str:
    """The chart of the page's numbers: a chart of the reports, with its own style and the names beside the curves."""
    figure = line_chart(_TITLE, _series(page), form="{:.3g}".format, form_x="{:g} min".format)
    drawing = figure.partition("<svg ")[2].partition("</svg>")[0]
    curves = json.loads(html.unescape(figure.partition('data-chart="')[2].partition('"')[0]))
    ends = {curve["name"]: (curve["kind"], *curve["points"][-1]) for curve in curves}
    labels = [
        f'<text class="l {kind}" x="{x + 8}" y="{y + 4}">{html.escape(name)} {loss}</text>'
        for name, (kind, x, y, _, loss) in ends.items()
    ]
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 330" width="760" height="330" role="img" '
            f'aria-label="{_TITLE}">',
            f"<style>{_STYLE}{_colors()}</style>",
            '<rect width="760" height="330" rx="12" fill="#fbfbfa"/>',
            f'<text x="20" y="28" class="t">{_TITLE} on one CPU core</text>',
            '<text x="20" y="47" class="n">masked language modeling, nats, lower is better; 4 layers of 256, same '
            "text, vocabulary and batch</text>",
            f'<svg x="10" y="60" width="480" height="264" overflow="visible" {drawing}{"".join(labels)}</svg>',
            "</svg>\n",
        ]
    )


def _colors() -> str:
    return "".join(
        f"polyline.{kind}{{stroke:{color}}}circle.{kind},svg svg text.{kind},text.l.{kind}{{fill:{color}}}"
        for kind, color in _COLORS.items()
    )


def _series(page: str) -> list[Series]:
    """Return the curves. Those of bertrain have one color; the others take the colors in order."""
    names, rows = published(page)
    others = iter([kind for kind in _COLORS if kind != "own"])
    series = []
    for column, name in enumerate(names, start=1):
        own = name.startswith("mini.yaml")
        points = [(row[0], row[column]) for row in rows]
        series.append(Series("bertrain" if own else name, points, "own" if own else next(others)))
    return series


# The demo's report


def recorded(run: Path) -> dict[str, Any]:
    """Return the data of a demo's run folder that the image shows."""
    title, *lines = summary([run]).splitlines()
    tiles = [[line[2:20].strip(), *line[20:].split("   ")] for line in lines]
    points = [(record["step"], record.get("mlm_accuracy"), "split" in record) for record in read_records(run)]
    accuracy = {
        name: [
            (step, round(value, 4)) for step, value, held_out in points if value and held_out == (name == "held-out")
        ]
        for name in ("training", "held-out")
    }
    tasks = json.loads((run / FINETUNED).read_text(encoding="utf-8"))
    scores = [(task["title"], task["metric"], task["scores"]) for task in tasks]
    return {"title": title, "tiles": tiles[:5], "accuracy": accuracy, "scores": scores}


def report_svg(record: dict[str, Any]) -> str:
    """Return the image of a demo's report: key figures, scores with and without pretraining, accuracy over steps."""
    parts = [f'<text x="20" y="32" class="t">{html.escape(record["title"])}</text>']
    for number, (label, value, note) in enumerate(record["tiles"]):
        x = 20 + 148 * number
        parts += [f'<text x="{x}" y="62" class="n">{label}</text><text x="{x}" y="86" class="v">{value}</text>']
        parts += [f'<text x="{x}" y="103" class="s">{html.escape(note.partition(",")[0])}</text>']
    bars = [
        (text, task[2][start], kind)
        for task in record["scores"]
        for text, start, kind in (
            (f"{task[0]} {task[1]}", "pretrained", "own"),
            ("the same from random weights", "random", "no"),
        )
    ]
    parts.append('<text x="20" y="142" class="t">What pretraining added</text>')
    for number, (text, score, kind) in enumerate(bars):
        y = 166 + 36 * number
        parts.append(
            f'<text x="20" y="{y}" class="n">{html.escape(text)}</text>'
            f'<text x="340" y="{y}" class="n e">{score:.3f}</text>'
        )
        parts.append(f'<rect class="{kind}" x="20" y="{y + 5}" width="{320 * score:.1f}" height="11" rx="2"/>')
    curves = [
        Series(name, record["accuracy"][name], kind) for name, kind in (("training", "own"), ("held-out", "other-1"))
    ]
    figure = line_chart("", curves, form="{:.0%}".format, form_x="{:g}".format, from_zero=True)
    drawing = figure.partition("<svg ")[2].partition("</svg>")[0]
    parts.append('<text x="380" y="142" class="t">MLM accuracy</text>')
    parts.append(
        '<text x="600" y="142" class="n l own">training</text><text x="670" y="142" class="n l other-1">held-out</text>'
    )
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 384" width="760" height="384" role="img" '
            'aria-label="Report of the demo">',
            f"<style>{_STYLE}{_colors()}.v{{font-size:20px;font-weight:600}}.s{{font-size:10.5px;fill:#4d5a70}}"
            ".e{text-anchor:end}rect.own{fill:#2f6fb5}rect.no{fill:#aab0bb}</style>",
            '<rect width="760" height="384" rx="12" fill="#fbfbfa"/>',
            *parts,
            f'<svg x="372" y="150" width="370" height="222" {drawing}</svg>',
            "</svg>\n",
        ]
    )


def main() -> int:
    """Write the charts. Return an exit code."""
    for run in map(Path, sys.argv[1:]):
        RECORD.write_text(json.dumps(recorded(run)) + "\n", encoding="utf-8")
    CHART.write_text(svg(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    REPORT.write_text(report_svg(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"{CHART.relative_to(ROOT)}, {REPORT.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
