"""Where the matrix products of `engine.fp8` can be computed."""

from __future__ import annotations

import pytest
import torch

from pretrain.model.fp8 import fp8_linear


def _computable() -> bool:
    """Before 2.13 torch's product on CPUs scales whole matrices only; on GPUs it scales rows."""
    one = torch.ones(16, 16, dtype=torch.bfloat16)
    try:
        fp8_linear(one, one)
    except RuntimeError:
        return False
    return True


needs_fp8 = pytest.mark.skipif(not _computable(), reason="this torch multiplies no FP8 rows on a CPU")
