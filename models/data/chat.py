"""The V3.2 prompt encoding of conversations, as segments of which the model's own words are marked.

The encoding is the released one in the part that is generated here: system, user, assistant and tool messages, chat and
thinking mode. `render` followed by the tokenizer gives the ids that the gateway sends for the same conversation.
"""

from __future__ import annotations

from dataclasses import dataclass

from baleen_eval.texts.conversation import Call, Conversation, Message, dumps

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"

TOOLS_BLOCK = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to \
the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<{DSML}function_calls>
...
</{DSML}function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the encoded text. `learned`: the model is to write it."""

    text: str
    learned: bool


def render(conversation: Conversation) -> list[Segment]:
    """The encoded conversation. Joins to the text that V3.2's encoding gives."""
    messages, thinking = conversation.messages, conversation.thinking
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    segments = [Segment(BOS, learned=False)]
    unanswered = 0
    for index, message in enumerate(messages):
        opener = THINK if thinking and index >= last_user else END_THINK
        if message.role == "system":
            segments.append(Segment(message.content + _tools(message), learned=False))
        elif message.role == "user":
            segments.append(Segment(f"{USER}{message.content}{ASSISTANT}{opener}", learned=False))
        elif message.role == "assistant":
            thought = f"{message.reasoning}{END_THINK}" if thinking and index > last_user else ""
            segments.append(Segment(thought + message.content + _calls(message.calls) + EOS, learned=True))
            unanswered = len(message.calls)
        else:
            first = messages[index - 1].role == "assistant"
            unanswered -= 1
            text = "\n\n<function_results>" if first else ""
            text += f"\n<result>{message.content}</result>"
            if not unanswered:
                text += f"\n</function_results>\n\n{opener}"
            segments.append(Segment(text, learned=False))
    # Neighbours that are only given become one, so that no token is cut where they meet.
    merged: list[Segment] = []
    for segment in segments:
        if merged and not segment.learned and not merged[-1].learned:
            segment = Segment(merged.pop().text + segment.text, learned=False)
        merged.append(segment)
    return merged


def _tools(message: Message) -> str:
    if not message.tools:
        return ""
    return "\n\n" + TOOLS_BLOCK + "".join(dumps(tool) + "\n" for tool in message.tools) + "</functions>\n"


def _calls(calls: tuple[Call, ...]) -> str:
    if not calls:
        return ""
    return f"\n\n<{DSML}function_calls>\n" + "\n".join(map(_call, calls)) + f"\n</{DSML}function_calls>"


def _call(call: Call) -> str:
    parameters = [
        f'<{DSML}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else dumps(value)}</{DSML}parameter>"
        for key, value in call.arguments.items()
    ]
    return f'<{DSML}invoke name="{call.name}">\n' + "\n".join(parameters) + f"\n</{DSML}invoke>"
