"""Model options that a whole test run is to use: `make test-products` sets them."""

from __future__ import annotations

import os
from typing import Any

FORCED: dict[str, Any] = {
    "linear_backend": os.environ.get("BATON_TEST_PRODUCTS", "auto"),
    "attention_backend": os.environ.get("BATON_TEST_ATTENTION", "auto"),
}
