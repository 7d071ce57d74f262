"""Conversations with tools: schemas in the prompt, calls in DSML, results in, an answer out.

A tool is a verb and a noun; evaluation's pairs never occur in training, nor do the names and words given as arguments.
"""

from __future__ import annotations

import random
from typing import Any

from baleen_eval.texts.conversation import Call, Conversation, Message, dumps
from baleen_eval.texts.filler import OBJECTS
from baleen_eval.texts.talk import talk_pair
from baleen_eval.texts.words import Split, code, distinct_names, is_eval, made_up_word, name

VERBS = ("get", "find", "search", "list", "book", "send", "check", "open", "update", "count", "create", "cancel")
NOUNS = (
    "weather", "harbour", "message", "table", "ticket", "file", "order", "room", "train", "letter", "price", "route",
    "event", "user", "note", "photo", "flight", "report", "invoice", "song", "recipe", "meeting", "alarm", "market",
)  # fmt: skip
PARAMETERS: dict[str, tuple[str, str]] = {
    "city": ("string", "The name of the city"),
    "name": ("string", "The name of a person"),
    "query": ("string", "What to look for"),
    "text": ("string", "The text"),
    "date": ("string", "The date in YYYY-MM-DD format"),
    "unit": ("string", "The unit"),
    "limit": ("integer", "How many at most"),
    "number": ("integer", "The number"),
    "hour": ("integer", "The hour of the day"),
    "urgent": ("boolean", "Whether it is urgent"),
    "exact": ("boolean", "Whether it has to be exact"),
    "tags": ("array", "A list of words"),
    "options": ("object", "Further options"),
}
CITIES = (
    "Paris", "London", "Berlin", "Tokyo", "Rome", "Madrid", "Oslo", "Boston", "New York", "San Francisco", "Beijing",
)  # fmt: skip
_MADE_UP = 0.2  # share of the tools and of the parameters whose name is a made-up word
_KINDS = ("string", "string", "integer", "boolean", "array", "object")
_SYSTEM = ("", "You are a helpful assistant.", "You are a helpful Assistant.", "Answer briefly.")


def _value(rng: random.Random, split: Split, parameter: str, kind: str) -> Any:
    if parameter == "city" and split == "train" and rng.random() < 0.4:
        return rng.choice(CITIES)
    if parameter == "date":
        return f"20{rng.randint(20, 39)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    if parameter == "unit":
        return rng.choice(("metric", "celsius", "hours", "miles"))
    if parameter == "text":
        return f"{rng.choice(OBJECTS)} and {name(rng, split)}"
    if parameter == "query":
        return f"{made_up_word(rng, split)} {made_up_word(rng, split)}" if rng.random() < 0.5 else rng.choice(OBJECTS)
    if kind == "string":
        return name(rng, split)
    if kind == "integer":
        return rng.randint(0, 23) if parameter == "hour" else rng.choice((rng.randint(1, 50), code(rng, split)))
    if kind == "boolean":
        return rng.random() < 0.5
    words = [made_up_word(rng, split) for _ in range(rng.randint(1, 3))]
    return words if kind == "array" else {word: rng.randint(1, 99) for word in words[:2]}


def make_tools(rng: random.Random, split: Split, count: int) -> list[dict[str, Any]]:
    """`count` different tools as JSON schemas."""
    tools: dict[str, dict[str, Any]] = {}
    while len(tools) < count:
        verb = rng.choice(VERBS)
        noun = made_up_word(rng, split) if rng.random() < _MADE_UP else rng.choice(NOUNS)
        tool_name = f"{verb}_{noun}"
        if is_eval(tool_name) != (split == "eval") or any(known.endswith(f"_{noun}") for known in tools):
            continue
        chosen = _parameters(rng, split)
        tools[tool_name] = {
            "name": tool_name,
            "description": f"{verb.capitalize()} the {noun}",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": about} for key, (kind, about) in chosen.items()},
                "required": list(chosen)[: rng.randint(1, len(chosen))],
            },
        }
    return list(tools.values())


def _parameters(rng: random.Random, split: Split) -> dict[str, tuple[str, str]]:
    chosen: dict[str, tuple[str, str]] = {}
    for parameter in rng.sample(list(PARAMETERS), rng.randint(1, 4)):
        if rng.random() < _MADE_UP:
            word = made_up_word(rng, split)
            chosen[word] = rng.choice(_KINDS), f"The {word}"
        else:
            chosen[parameter] = PARAMETERS[parameter]
    return chosen


def _call(rng: random.Random, split: Split, tool: dict[str, Any]) -> Call:
    required = tool["parameters"]["required"]
    properties = tool["parameters"]["properties"]
    keys = [key for key in properties if key in required or rng.random() < 0.5]
    return Call(tool["name"], {key: _value(rng, split, key, properties[key]["type"]) for key in keys})


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def _request(rng: random.Random, calls: list[Call]) -> str:
    parts: list[str] = []
    for call in calls:
        verb, noun = call.name.split("_")
        if list(call.arguments) == ["city"] and rng.random() < 0.6:
            ask = rng.choice(("What is the {} in {}?", "Please tell me the {} in {}.", "Show me the {} in {}."))
            parts.append(ask.format(noun, call.arguments["city"]))
            continue
        given = ", ".join(f"{key} {_shown(value)}" for key, value in call.arguments.items())
        start = rng.choice(("Please {} the {}", "{} the {}", "Can you {} the {}", "I want you to {} the {}"))
        text = start.format(verb, noun) + f" with {given}"
        parts.append(text[0].upper() + text[1:] + ("?" if text.startswith("Can") else "."))
    return " ".join(parts)


def tools(rng: random.Random, split: Split, *, num_turns: int = 1) -> Conversation:
    """One to four tools and `num_turns` requests; a third of the requests need two calls at once."""
    schemas = make_tools(rng, split, rng.randint(1, 4))
    messages = [Message("system", rng.choice(_SYSTEM), tools=tuple(schemas))]
    thinking = num_turns == 1 and rng.random() < 0.2
    for _ in range(num_turns):
        if split == "train" and rng.random() < 0.1:
            question, answer = talk_pair(rng)
            thought = "No tool is needed here." if thinking else ""
            messages += [Message("user", question), Message("assistant", answer, reasoning=thought)]
            continue
        calls = [_call(rng, split, rng.choice(schemas)) for _ in range(rng.choice((1, 1, 2)))]
        messages.append(Message("user", _request(rng, calls)))
        thought = f"I have to call {' and '.join(call.name for call in calls)}." if thinking else ""
        messages.append(Message("assistant", reasoning=thought, calls=tuple(calls)))
        if rng.random() < 0.6:
            messages += _results(rng, split, calls, thinking=thinking)
    return Conversation(tuple(messages), thinking=thinking, info={"suite": "tools"})


def _results(rng: random.Random, split: Split, calls: list[Call], *, thinking: bool) -> list[Message]:
    messages: list[Message] = []
    answers: list[str] = []
    for call, person in zip(calls, distinct_names(rng, split, len(calls)), strict=True):
        noun = call.name.split("_")[1]
        value = rng.choice((person, str(code(rng, split))))
        result = {noun: value, "status": "ok"} if rng.random() < 0.9 else {"error": "not found"}
        messages.append(Message("tool", dumps(result)))
        answers.append(f"The {noun} is {value}." if noun in result else f"The {noun} was not found.")
    thought = "The results are here." if thinking else ""
    return [*messages, Message("assistant", " ".join(answers), reasoning=thought)]
