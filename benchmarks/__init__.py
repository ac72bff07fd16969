"""Programs that measure what Atoll claims: `python -m benchmarks.NAME`. They share `tests/support` with the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
