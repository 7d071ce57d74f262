"""Runs every benchmark, one after another, and renews the table of results in bench/README.md.

python bench/run.py [BENCHMARK ...]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from report import RESULTS, ROOT

BENCHMARKS = (
    "cpu_serving",
    "engine_overhead",
    "prefix_cache",
    "transfer",
    "grammar_mask",
    "gateway_cpu",
    "text_path",
    "routers",
    "overload",
    "routing",
    "hostile",
    "startup",
)
README = ROOT / "bench" / "README.md"
TABLE = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end of results -->)", re.DOTALL)


def rows() -> list[str]:
    """One line a bar of every committed result."""
    lines = ["| host | what | measured | limit | met | commit |", "|---|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*/*.json")):
        result: dict[str, Any] = json.loads(path.read_text("utf-8"))
        link = path.relative_to(ROOT / "bench").as_posix()
        for bar in result.get("bars", ()):  # what has none is data behind another result
            measured, limit = f"{bar['measured']:.4g} {bar['unit']}", f"{bar['limit']:g} {bar['unit']}"
            cells = [path.parent.name, f"[{bar['what']}]({link})", measured, limit, "yes" if bar["met"] else "**no**"]
            lines.append(f"| {' | '.join(cells)} | {result['commit'][:8]} |")
    return lines


def renewed(text: str) -> str:
    """The page with the table of what is committed now."""
    table = "\n".join(["", *rows(), "", ""])
    return TABLE.sub(lambda _: table, text)


def main() -> int:
    """Exit code 1 when a benchmark failed to run; a missed bar is a result, not a failure."""
    failed: list[str] = []
    for name in sys.argv[1:] or BENCHMARKS:
        print(f"\n== {name}", flush=True)
        script = ROOT / "bench" / f"{name}.py"
        if subprocess.run([sys.executable, str(script)], cwd=ROOT, check=False).returncode != 0:
            failed.append(name)
    README.write_text(renewed(README.read_text("utf-8")), "utf-8")
    for name in failed:
        print(f"error: bench/{name}.py failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
