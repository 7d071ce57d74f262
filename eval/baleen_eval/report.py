"""What an evaluation found: the numbers, the file, the table and the plot."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from baleen_eval.errors import UsageError
from baleen_eval.run import Outcome

_LISTED_MISTAKES = 20
_SHOWN_CHARACTERS = 400


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """n questions asked, of which `transport_errors` got no answer; accuracy is of those answered.

    by_bucket has the same for each bucket, by_depth (only where questions have depths) by bucket, then depth.
    """
    buckets: dict[str, list[Outcome]] = {}
    cells: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        question = outcome.question
        buckets.setdefault(question.bucket, []).append(outcome)
        if question.depth is not None:
            cells.setdefault(question.bucket, {}).setdefault(f"{question.depth:.2f}", []).append(outcome)
    found: dict[str, Any] = {**_tally(outcomes), "by_bucket": {key: _tally(part) for key, part in buckets.items()}}
    if cells:
        found["by_depth"] = {
            bucket: {depth: _tally(part) for depth, part in depths.items()} for bucket, depths in cells.items()
        }
    found["prompt_tokens"] = sum(outcome.prompt_tokens for outcome in outcomes)
    found["completion_tokens"] = sum(outcome.completion_tokens for outcome in outcomes)
    found["finish_reasons"] = dict(Counter(outcome.finish_reason for outcome in outcomes if not outcome.error))
    found["errors"] = dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common())
    wrong = [outcome for outcome in outcomes if outcome.correct is False]
    found["mistakes"] = [_mistake(outcome) for outcome in wrong[:_LISTED_MISTAKES]]
    return found


def _tally(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    verdicts = Counter(outcome.correct for outcome in outcomes)
    answered = verdicts[True] + verdicts[False]
    return {
        "n": verdicts.total(),
        "correct": verdicts[True],
        "transport_errors": verdicts[None],
        "accuracy": round(verdicts[True] / answered, 4) if answered else None,
    }


def _mistake(outcome: Outcome) -> dict[str, str]:
    asked = outcome.question.messages[-1].content
    return {
        "bucket": outcome.question.bucket,
        "asked": ("… " if len(asked) > _SHOWN_CHARACTERS else "") + asked[-_SHOWN_CHARACTERS:],
        "expected": outcome.question.expected,
        "got": outcome.got[:_SHOWN_CHARACTERS],
        "finish_reason": outcome.finish_reason,
    }


def table(found: dict[str, Any]) -> str:
    """The buckets in lines, with a column for each depth where there are depths."""
    depths = list(next(iter(found.get("by_depth", {}).values()), {}))
    head = f"{'bucket':>14} {'n':>6} {'correct':>8} {'accuracy':>9} {'errors':>7}"
    lines = [head + "".join(f" {'@' + depth:>6}" for depth in depths)]
    for bucket, tally in [*found["by_bucket"].items(), ("all", found)]:
        line = f"{bucket:>14} {tally['n']:>6} {tally['correct']:>8} {_share(tally):>9} {tally['transport_errors']:>7}"
        cells = found.get("by_depth", {}).get(bucket, {})
        lines.append(line + "".join(f" {_share(cells[depth]):>6}" for depth in depths if depth in cells))
    return "\n".join(lines)


def _share(tally: dict[str, Any]) -> str:
    return "-" if tally["accuracy"] is None else f"{tally['accuracy']:.3f}"


def require_writable(path: Path, option: str) -> None:
    """UsageError where the file cannot be made, asked before the first question rather than after the last."""
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")


def require_plotting() -> None:
    """UsageError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot draws with matplotlib, which is not installed: pip install 'baleen[eval]'")


def write_json(document: dict[str, Any], path: Path) -> None:
    """UsageError where the file cannot be written."""
    try:
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written: {error.strerror or error}") from error


def draw(document: dict[str, Any], path: Path) -> None:
    """A heat-map by length and depth where there are depths, else a bar for each bucket. The suffix of the path
    chooses the format; UsageError where matplotlib knows none such.
    """
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "baleen"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    cells = document.get("by_depth")
    if cells:
        depths = list(next(iter(cells.values())))
        grid = [[cells[bucket].get(depth, {}).get("accuracy") or 0.0 for bucket in cells] for depth in depths]
        image = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(cells)), list(cells))
        axes.set_yticks(range(len(depths)), depths)
        axes.set(xlabel="prompt length, tokens", ylabel="depth")
        figure.colorbar(image, label="accuracy")
    else:
        buckets = document["by_bucket"]
        axes.bar(list(buckets), [tally["accuracy"] or 0.0 for tally in buckets.values()])
        axes.set(ylim=(0, 1), ylabel="accuracy")
    axes.set_title(f"{document['suite']}, {document['model']}, n = {document['n']}")
    figure.tight_layout()
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path} cannot be drawn: {error}") from error
    finally:
        pyplot.close(figure)
