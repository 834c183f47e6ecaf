"""What a user did wrong is said in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pretrain.common.errors import InputError


def refused(message: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """The call raises an `InputError` of one line, in which the regular expression `message` occurs."""
    with pytest.raises(InputError, match=message) as caught:
        function(*arguments, **named)
    assert "\n" not in str(caught.value)
