"""Assertions of the beam searches' shared checks show what differs, as those in test modules do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("beam_search_scene")
