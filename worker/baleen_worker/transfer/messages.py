"""What the two ends of a transfer tell each other: a fixed set of records, decoded strictly. Owns no bytes of pages.

One connection serves one leg. The decode side asks (`Want`), reads and acknowledges; the prefill side announces and
answers. Places count the pages of the request, from 0; page numbers and generations are the prefill side's own.
"""

from __future__ import annotations

import msgspec

from baleen_worker.step import TokenLogprobs

VERSION = 3

# (request_id, attempt): names both legs of a request on both workers.
Key = tuple[bytes, int]

# --- greetings --------------------------------------------------------------------------------------------------------


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """Prefill side: what it is. Nothing else is told before the peer has proven that it knows the key."""

    version: int
    boot_epoch: int
    layout_id: str
    nonce: bytes


class Response(msgspec.Struct, frozen=True, array_like=True, tag="response"):
    """Decode side: the same of itself, whose pages it wants (`dp_rank`), and the proof."""

    version: int
    layout_id: str
    dp_rank: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Prefill side: its own proof."""

    proof: bytes


# --- decode to prefill ------------------------------------------------------------------------------------------------


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Which leg this connection is for. `copies`: its pages are copied out of lent memory, so `Computed` is of use."""

    request_id: bytes
    attempt: int
    copies: bool = False


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """In place of `Want`: one page of nobody, to try the way that pages take."""


class Lend(msgspec.Struct, frozen=True, array_like=True, tag="lend"):
    """In place of `Want`: the memory that pages are in, to be read from there. May be asked again.

    `sample_only`: the memory has been lent already, on another connection.
    """

    sample_only: bool = False


class Read(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Send the pages at places `first`, `first + 1`, …, which were announced under these numbers and generations."""

    first: int
    pages: list[int]
    generations: list[int]


class Took(msgspec.Struct, frozen=True, array_like=True, tag="took"):
    """As `Read`, of pages that have been copied out of lent memory: only `Sealed` or `Stale` is asked for."""

    first: int
    pages: list[int]
    generations: list[int]


class Gather(msgspec.Struct, frozen=True, array_like=True, tag="gather"):
    """On a loan's connection: copy these pages into a slot of the staging memory that was lent."""

    slot: int
    pages: list[int]


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """Everything is here and verified: the pages need not be held any more."""


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """Still wants the pages, though it cannot take them yet."""


# --- prefill to decode ------------------------------------------------------------------------------------------------


class Wait(msgspec.Struct, frozen=True, array_like=True, tag="wait"):
    """Nothing new, but alive."""


class Computed(msgspec.Struct, frozen=True, array_like=True, tag="computed"):
    """These pages are computed, and a `Chunk` follows when they are digested: they may be copied, and prove nothing."""

    first: int
    pages: list[int]
    generations: list[int]


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk"):
    """Pages that are computed, from place `first` on; an earlier announcement of the same places is void.

    `digests`: of each page's bytes, all layers, latents and index keys together: XXH3_64 of pages in host memory,
    `baleen_kernels.page_digest` of those on a device. Workers whose digests differ have different layout ids.
    """

    first: int
    pages: list[int]
    generations: list[int]
    digests: list[int]


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data"):
    """Beginning of the answer to a `Read`: `num_bytes` of pages follow the frame, then `Sealed` or `Stale`.

    Pages in host memory follow store by store (`PageStore.views`), others page by page (`PageStore.read`).
    """

    first: int
    num_bytes: int


class Sealed(msgspec.Struct, frozen=True, array_like=True, tag="sealed"):
    """End of the answer: the pages still had these generations when the last byte had been copied."""

    first: int
    generations: list[int]


class Stale(msgspec.Struct, frozen=True, array_like=True, tag="stale"):
    """Answer to a `Read` of pages that are not what was announced any more; they are announced anew.

    Instead of `Data`, or after the bytes, which are void then.
    """

    first: int
    count: int


class Scores(msgspec.Struct, frozen=True, array_like=True, tag="scores"):
    """Log-probabilities of the prompt's next tokens. All of them come before `Final`, and again on a new connection."""

    first: int
    logprobs: TokenLogprobs


class Final(msgspec.Struct, frozen=True, array_like=True, tag="final"):
    """The first token, and how many of the prompt's were cached where it was computed."""

    token_id: int
    cached_tokens: int
    num_pages: int
    logprobs: TokenLogprobs | None = None


class Released(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """Answer to `Ack`."""


class Sampled(msgspec.Struct, frozen=True, array_like=True, tag="sampled"):
    """Answer to `Sample`; `num_bytes` of one page follow the frame, with this XXH3_64."""

    num_bytes: int
    digest: int


class Lent(msgspec.Struct, frozen=True, array_like=True, tag="lent"):
    """Answer to `Lend`. The memory may be read until the connection ends, by way of `backend`, on `host` alone.

    `memory` is that backend's to write and to read; `sample` is the digest that the sink page had a moment ago.
    """

    backend: str
    host: str
    memory: bytes
    sample: int


class Gathered(msgspec.Struct, frozen=True, array_like=True, tag="gathered"):
    """Answer to `Gather`: the slot may be read, until the peer has it filled again."""

    slot: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The leg cannot be had; the connection ends."""

    reason: str


FromDecode = Response | Want | Sample | Lend | Read | Took | Gather | Ack | Alive
FromPrefill = (
    Challenge
    | Welcome
    | Wait
    | Computed
    | Chunk
    | Data
    | Sealed
    | Stale
    | Scores
    | Final
    | Released
    | Sampled
    | Lent
    | Gathered
    | Refused
)
