"""The table of results in bench/README.md shows the results that are committed."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_the_table_is_that_of_the_results() -> None:
    sys.path.insert(0, str(BENCH))
    # By its path: tests/run.py has the same name.
    spec = spec_from_file_location("bench_run", BENCH / "run.py")
    assert spec is not None
    assert spec.loader is not None
    run = module_from_spec(spec)
    spec.loader.exec_module(run)
    page = run.README.read_text("utf-8")
    assert run.renewed(page) == page, "python bench/run.py renews the table, whatever it measures"
