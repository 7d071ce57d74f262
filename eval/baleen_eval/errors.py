"""The two ways an evaluation goes wrong apart from wrong answers."""

from __future__ import annotations


class UsageError(Exception):
    """Nothing can be evaluated as asked. The message is one sentence for the user."""


class TransportError(Exception):
    """A question got no answer: refused connection, timeout, error status, or a body that is not an answer."""
