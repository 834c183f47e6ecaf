"""The stage of `prepare` that searches all documents for near-duplicates, with `filters.near_duplicates`."""

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

_RESULT = "near_duplicates.hashes"  # file in the work folder with the hashes of the documents to drop
_KEY_BYTES = 8  # size of a document's key in one band, for the progress bar


def find_near_duplicates(
    pool: Pool, work_dir: Path, settings: NearDuplicatesConfig, precedence: Precedence, bar: StageBar
) -> None:
    """Compare the sketches in `work_dir`, unless this is disabled or done. `precedence` decides which ones are kept."""
    result = work_dir / _RESULT
    if not settings.enabled or result.exists():
        return
    document_count = int(SketchFiles(work_dir).file_starts[-1])
    if not document_count:  # `Documents.load` reports this error
        return
    partition_count = -(-document_count // MAX_DOCUMENTS)
    calls = [
        (f"pairs-{band:04d}-{partition:04d}-{partition_count:04d}.npy", band, partition, partition_count, precedence)
        for band in range(BANDS)
        for partition in range(partition_count)
    ]
    with bar.stage("finding near-duplicates", _KEY_BYTES * document_count * BANDS) as advance:
        for _ in pool.run(stages.find_pairs, calls, lambda name, *_: (work_dir / name).exists() or None):
            advance(_KEY_BYTES * document_count // partition_count)
    merge_pairs([work_dir / name for name, *_ in calls], work_dir, BANDS * ROWS, result, precedence)


def load_near_duplicates(work_dir: Path, settings: NearDuplicatesConfig) -> NearDuplicates | None:
    """Load the result of the search; None if the search is disabled, or if there are no documents."""
    result = work_dir / _RESULT
    return NearDuplicates.load(result) if settings.enabled and result.exists() else None
