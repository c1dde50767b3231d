"""Host pages that are their own bytes, for a lane without a device."""

from __future__ import annotations

from typing import Any

import numpy as np


class BytePages:
    """A PageForm: a page is one array, (page_bytes,) uint8."""

    def to_bytes(self, content: Any) -> np.ndarray:
        return content[0]

    def from_bytes(self, payload: np.ndarray) -> Any:
        return (payload.copy(),)


BYTES = BytePages()
