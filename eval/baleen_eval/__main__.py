"""`python -m baleen_eval`: asks one suite's questions of a server and writes down how many it answers.

Exit code 0: every question got an answer, right or wrong. 1: some got none. 2: nothing could be asked.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from baleen_eval import report
from baleen_eval.client import Client, Sampling
from baleen_eval.errors import UsageError
from baleen_eval.question import Question
from baleen_eval.run import Outcome, ask_all, comparer, grader
from baleen_eval.suites import SUITES, Choice, Suite, choose
from baleen_eval.texts.examples import LENGTHS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is the module docstring's."""
    args = _parser().parse_args(arguments)
    try:
        document = evaluate(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report.table(document))
    if not document["transport_errors"]:
        return 0
    for reason, count in list(document["errors"].items())[:3]:
        print(f"error: {count} × {reason}", file=sys.stderr)
    return 1


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Everything between the command line and the table. UsageError where nothing can be asked or written."""
    suite = choose(args.suite)
    _check(args, suite)
    choice = Choice(args.seed, args.num, tuple(args.lengths), args.shots, args.data)
    questions = [_told_to_think(question, args.thinking) for question in suite.questions(choice)]
    sampling = Sampling(args.max_tokens or suite.max_tokens, args.temperature, args.top_p)
    started = time.monotonic()
    model, outcomes = asyncio.run(_ask(args, questions, sampling, compares=suite.compares))
    document = {
        "suite": args.suite,
        "model": model,
        "seed": args.seed,
        "command": f"python -m baleen_eval {shlex.join(sys.argv[1:])}",
        "sampling": dataclasses.asdict(sampling),
        **report.summary(outcomes),
        "seconds": round(time.monotonic() - started, 3),
    }
    if args.json is not None:
        report.write_json(document, args.json)
    if args.plot is not None:
        report.draw(document, args.plot)
    return document


async def _ask(
    args: argparse.Namespace, questions: list[Question], sampling: Sampling, *, compares: bool
) -> tuple[str, list[Outcome]]:
    api_key = os.environ.get("OPENAI_API_KEY")
    async with AsyncExitStack() as stack:
        clients: list[Client] = []
        for url in [args.base_url, *([args.against or args.base_url] if compares else [])]:
            client = Client(url, api_key=api_key, timeout_s=args.timeout, parallel=args.parallel)
            clients.append(await stack.enter_async_context(client))
        model = await clients[0].model_name(args.model)
        if compares:
            other = await clients[1].model_name(args.against_model or (args.model if args.against else model))
            ask = comparer(clients[0], clients[1], (model, other), sampling)
        else:
            ask = grader(clients[0], model, sampling)
        # disable=None: no bar where nobody watches.
        with tqdm(total=len(questions) * args.repeat, desc=args.suite, unit="question", disable=None) as bar:
            outcomes = await ask_all(
                questions, ask, seed=args.seed, repeat=args.repeat, parallel=args.parallel, on_done=bar.update
            )
    return model, outcomes


def _check(args: argparse.Namespace, suite: Suite) -> None:
    """UsageError for what does not go together, before anything is read or asked."""
    if args.data is not None and not suite.reads_file and args.suite != "arith":
        raise UsageError(f"--data is read by arith, gsm8k, gpqa and aime, not by {args.suite}")
    if (args.against or args.against_model) and not suite.compares:
        raise UsageError(f"--against is for --suite invariance, not for {args.suite}")
    if suite.compares and args.temperature:
        raise UsageError("--suite invariance compares greedy answers: leave --temperature out")
    if args.json is not None:
        report.require_writable(args.json, "--json")
    if args.plot is not None:
        report.require_writable(args.plot, "--plot")
        report.require_plotting()


def _told_to_think(question: Question, thinking: str) -> Question:
    return question if thinking == "suite" else dataclasses.replace(question, thinking=thinking == "on")


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:11} {suite.about}" for name, suite in SUITES.items())
    parser = argparse.ArgumentParser(
        prog="python -m baleen_eval",
        description="Asks a server, through the OpenAI API, questions whose answers are known.",
        epilog=f"suites:\n{listing}\n\n$OPENAI_API_KEY is sent where it is set.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base-url", required=True, metavar="URL", help="with or without /v1")
    parser.add_argument("--suite", required=True, metavar="NAME")
    parser.add_argument("--seed", type=int, default=0, help="draws questions, orders choices, seeds sampling")
    parser.add_argument(
        "--num", type=_positive, metavar="N", help="questions (needle, track: of each length); 100, or a file's all"
    )
    parser.add_argument("--model", metavar="M", help="as the server names it; may be left out where it has one")
    parser.add_argument("--parallel", type=_positive, default=8, metavar="P", help="questions in flight (8)")
    parser.add_argument("--repeat", type=_positive, default=1, metavar="R", help="rounds, each with its own seed (1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for the result")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="file for a plot, .svg or .png")
    parser.add_argument("--data", type=Path, metavar="FILE", help="questions of gsm8k, gpqa or aime")
    parser.add_argument("--lengths", type=_positive, nargs="+", default=list(LENGTHS), metavar="TOKENS")
    parser.add_argument("--shots", type=_natural, metavar="K", help="solved problems shown first (gsm8k: 8)")
    parser.add_argument("--max-tokens", type=_positive, metavar="T", help="of an answer; the suite's own")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, greedy")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--thinking", choices=("suite", "on", "off"), default="suite", help="as the suite has it")
    parser.add_argument("--against", metavar="URL", help="second server of invariance; the first one again")
    parser.add_argument("--against-model", metavar="M", help="its model; the same name")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds without a byte (600)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
