"""The stage of `prepare` that finds near-duplicates, after all documents are read: one or more calls for each band."""

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

_RESULT = "near_duplicates.hashes"  # file in the work folder
_KEY_BYTES = 8  # bytes per document and band, for the progress bar


def find_near_duplicates(
    pool: Pool, work_dir: Path, settings: NearDuplicatesConfig, precedence: Precedence, bar: StageBar
) -> None:
    """Compare the documents whose sketches are in `work_dir`, if the search is enabled and not done yet."""
    result = work_dir / _RESULT
    if not settings.enabled or result.exists():
        return
    documents = int(SketchFiles(work_dir).file_starts[-1])
    if not documents:  # `Documents.load` reports this error
        return
    share_count = -(-documents // MAX_DOCUMENTS)
    calls = [
        (f"pairs-{band:04d}-{share:04d}-{share_count:04d}.npy", band, share, share_count, precedence)
        for band in range(BANDS)
        for share in range(share_count)
    ]
    with bar.stage("finding near-duplicates", _KEY_BYTES * documents * BANDS) as advance:
        for _ in pool.run(stages.find_pairs, calls, lambda name, *_: (work_dir / name).exists() or None):
            advance(_KEY_BYTES * documents // share_count)
    merge_pairs([work_dir / name for name, *_ in calls], work_dir, BANDS * ROWS, result, precedence)


def load_near_duplicates(work_dir: Path, settings: NearDuplicatesConfig) -> NearDuplicates | None:
    """Load the result of the search; None if the search is disabled, or if there are no documents."""
    result = work_dir / _RESULT
    return NearDuplicates.load(result) if settings.enabled and result.exists() else None
