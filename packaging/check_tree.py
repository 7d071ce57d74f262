"""Checks the README's tree against what git tracks: every entry exists, and every tracked file is covered.

A file is covered when it has a line of its own, or lies in a folder that has one and none of whose contents is listed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = re.compile(r"<!-- tree -->\n```\n(.*?)```", re.DOTALL)


def listed_paths(readme: str) -> list[str]:
    """Paths of the tree, joined along its indentation; a folder ends with a slash."""
    match = TREE.search(readme)
    if match is None:
        raise SystemExit("error: README.md has no tree: a fenced block after the line <!-- tree -->")
    paths: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in match.group(1).splitlines():
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        while parents and parents[-1][0] >= indent:
            parents.pop()
        path = "".join(folder for _, folder in parents[-1:]) + line.split()[0]
        if path.endswith("/"):
            parents.append((indent, path))
        paths.append(path)
    return paths


def problems(listed: list[str], tracked: list[str]) -> list[str]:
    """One sentence for each entry that does not exist and each tracked file that no entry covers."""
    folders = {f"{parent.as_posix()}/" for path in tracked for parent in Path(path).parents}
    known = folders | set(tracked)
    found = [f"README.md's tree lists {path}, which git does not track" for path in listed if path not in known]
    whole = {
        path
        for path in listed
        if path.endswith("/") and not any(other != path and other.startswith(path) for other in listed)
    }
    for path in tracked:
        if path not in listed and not any(path.startswith(folder) for folder in whole):
            found.append(f"README.md's tree has no line for {path}")
    return found


def main() -> int:
    """Prints what is wrong; the exit code is 1 when anything is."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = problems(listed_paths((ROOT / "README.md").read_text("utf-8")), listing.stdout.splitlines())
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
