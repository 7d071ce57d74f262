"""Lets the tests import `models.*` from the repository's root, wherever pytest starts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
