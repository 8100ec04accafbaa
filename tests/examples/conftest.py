"""Makes the repository's `examples` package importable, also when pytest is not run as `python -m pytest`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
