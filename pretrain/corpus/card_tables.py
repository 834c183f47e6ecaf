"""Sections of the corpus card with tables, in Markdown."""

from typing import Any


def table_row(*cells: Any) -> str:
    """Format a row of a table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def filter_lines(filtered: list[dict[str, Any]], sources: list[dict[str, Any]]) -> list[str]:
    """Return the section on filters: documents dropped, by rule and source, and examples; [] if there are none."""
    if not filtered:
        return []
    titles = ("filter", "rule", "documents dropped", "share of documents read", *(source["name"] for source in sources))
    documents_read = max(1, sum(source["documents_read"] for source in sources))
    rows = [
        table_row(
            entry["filter"],
            entry["rule"],
            f"{entry['documents']:,}",
            f"{100 * entry['documents'] / documents_read:.2f} %",
            *(f"{count:,}" for count in entry["by_source"]),
        )
        for entry in filtered
    ]
    header = [table_row(*titles), table_row(*["---"] * 2, *["---:"] * (2 + len(sources)))]
    return [
        "## Filters",
        "",
        *header,
        *rows,
        "",
        "Examples: the first documents that each rule dropped, in the order of the corpus:",
        "",
        *_examples(filtered),
        "",
    ]


def skipped_lines(sources: list[dict[str, Any]]) -> list[str]:
    """Return the section on paragraphs that were skipped as headings or ornaments; [] if there are none."""
    rows = [
        table_row(
            source["name"],
            f"{left_out['paragraphs']:,}",
            f"{left_out['characters']:,}",
            f"{100 * left_out['characters'] / left_out['read_characters']:.2f} %",
        )
        for source in sources
        if (left_out := source.get("left_out"))
    ]
    header = [table_row("source", "paragraphs", "characters", "share of characters"), table_row("---", *["---:"] * 3)]
    return ["## Headings and ornaments that were left out", "", *header, *rows, ""] if rows else []


def evaluation_lines(sets: list[dict[str, Any]]) -> list[str]:
    """Return the section on how much of each evaluation set occurs in the sources; [] if there are no sets."""
    if not sets:
        return []
    rows = [
        table_row(
            entry["name"],
            *(f"{entry[key]:,}" for key in ("texts", "too_short", "found")),
            f"{100 * entry['found'] / searched:.2f} %"
            if (searched := entry["texts"] - entry["too_short"])
            else "none searched",
        )
        for entry in sets
    ]
    titles = ("evaluation set", "examples", "too short to search for", "found in the sources", "share found")
    header = [table_row(*titles), table_row("---", *["---:"] * 4)]
    return ["## Evaluation sets", "", *header, *rows, ""]


def _examples(filtered: list[dict[str, Any]]) -> list[str]:
    lines = []
    for entry in filtered:
        for example in entry["examples"]:
            text = example["text"].replace("`", "'")
            lines.append(f"- {entry['rule']}, {example['found']}: `{text}`")
    return lines


def reading_lines(readings: list[dict[str, Any]], phases: list[str]) -> list[str]:
    """Return the section on how often an epoch reads each token, by sequence length, and on each phase's sources."""
    if not readings:
        return []
    titles = (
        "sequence length",
        "input format",
        "mean reads per token",
        "tokens never read",
        "tokens read twice",
        "mean sample length",
        "samples that end at a sentence boundary",
        "labeled pairs",
    )
    rows = [
        table_row(
            f"{reading['sequence_length']:,}",
            reading["input_format"],
            f"{reading['reads']:.3f}",
            f"{reading['unread']:.2%}",
            f"{reading['twice']:.2%}",
            f"{reading['mean_length']:.1f}",
            f"{reading['at_sentence_ends']:.0%}",
            f"{reading['labeled']:.1%}" if reading["input_format"] == "segment_pairs" else "",
        )
        for reading in readings
    ]
    intro = (
        f"How often an epoch reads each token, measured by planning all samples from {readings[0]['tokens']:,} tokens."
    )
    return [
        "## How training reads the corpus",
        "",
        intro,
        "",
        table_row(*titles),
        table_row(*["---"] * len(titles)),
        *rows,
        "",
        *(f"- {line}" for line in phases),
        *([""] if phases else []),
    ]
