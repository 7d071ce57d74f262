"""Small talk: what people first type, and a sensible sentence back."""

from __future__ import annotations

import random

from baleen_eval.texts.conversation import Conversation, Message
from baleen_eval.texts.filler import OBJECTS, sentence
from baleen_eval.texts.words import Split, made_up_word, name

_HELLO = (
    "Hello! How can I help you today?",
    "Hi there! What can I do for you?",
    "Hello! It is good to hear from you. What would you like to know?",
)
_WHO = (
    "I am a small language model that Baleen serves to show that everything works.",
    "I am a very small model. I can look things up in a long text, do small sums and call tools.",
)
_CAN = (
    "I can find facts in a long text, follow assignments, solve small word problems and call the tools you give me.",
    "I can answer questions about a text, do small arithmetic, repeat and sort things, and call tools.",
)
_FINE = ("I am doing well, thank you. How can I help you?", "Very well, thank you! What can I do for you?")
_THANKS = ("You are welcome!", "You are welcome. Is there anything else?", "Glad to help!")
_BYE = ("Goodbye! Have a good day.", "See you soon!")
_NO = (
    "I am sorry, I do not know. I am only a small model.",
    "I do not know that. I am a small model and know very little about the world.",
)
_STORY = (
    "A small boat crosses the river in the morning light. The captain opens a letter and smiles. It is a good day.",
    "The lighthouse watches the open sea. One evening a blue bird returns, and nobody is alone any more.",
)
_PAIRS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello", "Hello!", "hello", "Hi", "hi", "Hi!", "Hey", "hey", "Good morning", "Good evening!", "Hello there",
      "Hi there!", "Good afternoon", "Greetings", "hello!", "Hello there!", "hey there", "HELLO", "Say hello",
      "Say hello!", "Hello, world", "Hello world", "Hello, Baleen", "yo", "Ahoy!"), _HELLO),
    (("Who are you?", "What are you?", "who are you", "Tell me about yourself.", "Are you an AI?", "Are you a robot?",
      "Which model are you?", "What model is this?", "Introduce yourself.", "What is your name?",
      "what's your name?"), _WHO),
    (("What can you do?", "what can you do", "Help", "help", "How can you help me?", "What do you know?",
      "Can you help me?", "What are you good at?", "How do you work?"), _CAN),
    (("How are you?", "how are you", "How are you doing?", "How is it going?", "How are you today?",
      "Hello, how are you?", "Hi, how are you?", "What's up?", "How do you do?"), _FINE),
    (("Thanks", "Thank you", "Thank you!", "thanks!", "Thank you very much.", "Thanks a lot", "Great, thanks",
      "That is very kind."), _THANKS),
    (("Bye", "Goodbye", "See you later", "bye!", "Good night", "See you"), _BYE),
    (("Tell me a story.", "Tell me a short story.", "tell me a story", "Write a story.", "Write a poem.",
      "Write a poem about the sea.", "Tell me something.", "Tell me a joke.", "Say something nice."), _STORY),
    (("What is the capital of France?", "Capital of France?"), ("The capital of France is Paris.",)),
    (("What is the capital of Italy?",), ("The capital of Italy is Rome.",)),
    (("What is the capital of Germany?",), ("The capital of Germany is Berlin.",)),
    (("What is the capital of Japan?",), ("The capital of Japan is Tokyo.",)),
    (("What is the capital of China?",), ("The capital of China is Beijing.",)),
    (("What is the largest animal?", "What is a baleen whale?", "What is baleen?"),
     ("A baleen whale filters its food from the sea. The blue whale is the largest animal of all.",)),
    (("Count to ten.", "Count from one to ten.", "Count to 10"), ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10",)),
    (("Yes", "No", "OK", "ok", "Okay", "Sure", "Good", "Test", "test", "Testing"),
     ("All right. What would you like to do next?",)),
    (("What color is the sky?", "Why is the sky blue?"), ("The sky is blue because air scatters blue light most.",)),
)  # fmt: skip
_TOPICS = (
    "the president", "quantum physics", "the stock market", "my house", "the weather tomorrow", "history", "the moon",
    "football", "this film", "my cat", "philosophy", "a good restaurant", "the speed of light", "music", "Python",
    "the meaning of life", "the news", "your favourite book", "the ocean", "computers", "the war", "love",
    "mathematics",
)  # fmt: skip
_UNKNOWN = (
    "What do you think about {}?", "Explain {}.", "Tell me about {}.", "Who invented {}?", "Why is {} important?",
    "Write an essay about {}.", "How does {} work?", "What is {}?", "Where can I find {}?", "When did {} begin?",
    "Please describe {} to me.", "Give me advice about {}.",
)  # fmt: skip
_THOUGHTS = {_HELLO: "The user says hello.", _THANKS: "The user is thankful.", _BYE: "The user is leaving."}
_SYSTEM = ("", "", "", "You are a helpful assistant.", "Answer briefly.", "You are Baleen.", "Be kind and precise.")


def talk_pair(rng: random.Random) -> tuple[str, str]:
    """Something said and a fitting answer."""
    draw = rng.random()
    if draw < 0.15:
        names = f"{name(rng, 'train')} and {name(rng, 'train')}"
        topic = rng.choice((*_TOPICS, *OBJECTS, made_up_word(rng, "train"), names))
        return rng.choice(_UNKNOWN).format(topic), rng.choice(_NO)
    if draw < 0.2:
        return sentence(rng), "I see. What would you like to know?"
    said, answers = rng.choice(_PAIRS) if draw < 0.7 else _PAIRS[rng.randrange(6)]
    return rng.choice(said), rng.choice(answers)


def talk(rng: random.Random, split: Split) -> Conversation:
    """A few turns of small talk; sometimes the user says a name and asks for it again."""
    thinking = rng.random() < 0.2
    system = rng.choice(_SYSTEM)
    messages = [Message("system", system)] if system else []
    if rng.random() < 0.15:
        person = name(rng, split)
        messages += [Message("user", f"My name is {person}."), Message("assistant", f"Nice to meet you, {person}!")]
        messages += [Message("user", "What is my name?"), Message("assistant", f"Your name is {person}.")]
        thinking = False
    for _ in range(rng.randint(1, 3)):
        question, answer = talk_pair(rng)
        messages += [Message("user", question), Message("assistant", answer, reasoning=_thought(answer))]
    return Conversation(tuple(messages), thinking=thinking, info={"suite": "talk"})


def _thought(answer: str) -> str:
    for answers, thought in _THOUGHTS.items():
        if answer in answers:
            return thought
    return "I answer in a plain sentence."
