"""The stage of `prepare` that finds near-duplicates once all documents are read, with one or more calls per band."""

from pathlib import Path

from pretrain.config import NearDuplicatesConfig
from pretrain.corpus import stages
from pretrain.corpus.filters.near_duplicates import (
    BANDS,
    MAX_DOCUMENTS,
    ROWS,
    NearDuplicates,
    Precedence,
    SketchFiles,
    merge_pairs,
)
from pretrain.corpus.parallel import Pool
from pretrain.corpus.stage_bar import StageBar

_RESULT = "near_duplicates.hashes"
_KEY_BYTES = 8


def find_near_duplicates(
    pool: Pool, work: Path, settings: NearDuplicatesConfig, precedence: Precedence, bar: StageBar
) -> None:
    """Compare the documents whose sketches are in `work`, if the search is enabled and not done yet."""
    result = work / _RESULT
    if not settings.enabled or result.exists():
        return
    documents = int(SketchFiles(work).first[-1])
    if not documents:  # a later stage reports this error
        return
    shares = -(-documents // MAX_DOCUMENTS)
    calls = [
        (f"pairs-{band:04d}-{share:04d}-{shares:04d}.npy", band, share, shares, precedence)
        for band in range(BANDS)
        for share in range(shares)
    ]
    with bar.stage("finding near-duplicates", _KEY_BYTES * documents * BANDS) as advance:
        for _ in pool.run(stages.find_pairs, calls, lambda name, *_: (work / name).exists() or None):
            advance(_KEY_BYTES * documents // shares)
    merge_pairs([work / name for name, *_ in calls], work, BANDS * ROWS, result, precedence)


def near_duplicates(work: Path, settings: NearDuplicatesConfig) -> NearDuplicates | None:
    """Load the result of the search; None if the search is disabled, or if there are no documents."""
    result = work / _RESULT
    return NearDuplicates.load(result) if settings.enabled and result.exists() else None
