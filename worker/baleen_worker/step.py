"""The two halves of one engine step, as plain data: what the scheduler asks for and what the runner answers.

Nothing here imports torch, holds a device object, or refers to scheduler state, so a plan can be sent to several
ranks and executed by each in lockstep. (Structs of msgspec, because a step builds hundreds of them and they cost a
third of a dataclass.)

A *slot* is a row of the runner's persistent tables (page table, sampling parameters). The scheduler grants a slot when
a request starts to run and takes it back when the request leaves; slots are small integers below
`max_running_requests`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec

from baleen_worker.request import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Admission(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request takes a slot: whatever the slot held before is void.

    `token_ids` are its tokens so far, the prompt (`num_prompt` of them) and what was generated before a preemption;
    both are left empty unless its sampling depends on them (`SamplingParams.needs_history`).
    `resumes`: the request has the slot already and keeps its pages; only what sampling remembers begins anew, because a
    row is computed again that may have been computed before.
    """

    slot: int
    sampling: SamplingParams
    token_ids: Sequence[int] = ()
    num_prompt: int = 0
    resumes: bool = False


class PlannedRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one request to be computed in this step.

    `token_ids` sit at positions `start`, `start + 1`, …; keys of all earlier positions are already in the pages.
    `new_pages` extend the slot's page table from index `first_new_page`; position p lives in page `p // 64` of that
    table at offset `p % 64`.
    `sample` asks for the token that follows the last one; it is output number `output_index` of its request.
    `score_token_ids` asks for log-probabilities of given tokens: element i is scored by the logits at `start + i`.
    `from_device`: the row is one token that an earlier step in flight samples for this slot, and that the runner has
    kept; `token_ids` is empty.
    `mask` says which tokens may be sampled: bit v % 32 of little-endian int32 number v // 32 is set for token v; empty
    allows all.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    first_new_page: int
    new_pages: Sequence[int]
    sample: bool
    output_index: int
    score_token_ids: Sequence[int] = ()
    mask: bytes = b""
    from_device: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens the row computes."""
        return len(self.token_ids) or 1


class PageCopies(msgspec.Struct, frozen=True, array_like=True):
    """Whole pages, all layers and both stores, between device and host; `out` is done before `back`.

    `out`: (page, host page) pairs, no host page twice; `back`: (host page, page) pairs, no page twice.
    """

    out: Sequence[tuple[int, int]]
    back: Sequence[tuple[int, int]]


class RunnerLostError(RuntimeError):
    """The runner cannot go on, whatever it is given. `what` opens the sentence for the operator."""

    what: ClassVar[str]


class CopyError(RunnerLostError):
    """What the runner's pages contain is unknown."""

    what = "pages could not be copied between device and host"


class DeviceLostError(RunnerLostError):
    """The device computes nothing any more. The process must end without giving memory back: that can abort it."""

    what = "the device is lost"


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step: copies come first, then admissions, then rows. Rows are decodes first, then prefill chunks.

    The scheduler gives `rows` as `step_columns.PlannedRows`, which a runner may read by columns.
    """

    step: int
    admissions: Sequence[Admission]
    rows: Sequence[PlannedRow]
    copies: PageCopies | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes, over all rows."""
        return sum(row.num_tokens for row in self.rows)


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of consecutive tokens, before any sampling change (float32 log-softmax of the logits).

    `top_token_ids[i]` and `top_logprobs[i]` list the likeliest tokens at that place, likeliest first, lower id first
    among equals; empty where none were asked for.
    """

    token_ids: list[int] = msgspec.field(default_factory=list[int])
    logprobs: list[float] = msgspec.field(default_factory=list[float])
    top_token_ids: list[list[int]] = msgspec.field(default_factory=list[list[int]])
    top_logprobs: list[list[float]] = msgspec.field(default_factory=list[list[float]])

    def part(self, start: int, end: int) -> TokenLogprobs:
        """Those of tokens `start` to `end` of these."""
        return TokenLogprobs(
            self.token_ids[start:end],
            self.logprobs[start:end],
            self.top_token_ids[start:end],
            self.top_logprobs[start:end],
        )


class StepOutput(msgspec.Struct, array_like=True):
    """What a step produced. `token_ids` is aligned with `plan.rows`: 0..k tokens a row; `step_columns.OneTokenEach` may
    stand for one in every row.

    The other three are keyed by row index. A row in `errors` produced nothing: the message says what broke for it
    alone (non-finite logits, a page that is not its own); its neighbours stand.
    """

    step: int
    token_ids: Sequence[list[int]]
    logprobs: dict[int, TokenLogprobs] = msgspec.field(default_factory=dict[int, TokenLogprobs])
    prompt_logprobs: dict[int, TokenLogprobs] = msgspec.field(default_factory=dict[int, TokenLogprobs])
    errors: dict[int, str] = msgspec.field(default_factory=dict[int, str])


class StepHandle(Protocol):
    """A step in flight."""

    def collect(self) -> StepOutput:
        """Waits for the step and returns its output. Called once. Raises as `Runner` does."""
        ...


class Runner(Protocol):
    """Executes plans. Holds tensors and pages' contents; knows nothing of queues, budgets or clients.

    Computing a row again at the same positions rewrites the same page contents: the engine relies on it to find the
    one row that makes a step raise. By then a later step may have been launched; it is computed again as well. Nothing
    is computed again after a RunnerLostError.
    """

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts the step, perhaps before an earlier one is collected; steps are collected in launch order.

        Copies are made before anything else can raise, and only once; CopyError when they cannot be.

        Pages of a slot that lie before the start of its first row hold what an earlier request has computed for the
        same tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class Region:
    """Where a store's pages are, one after the other: `address` is the first one's, in this process."""

    address: int
    page_bytes: int


class DevicePages(Protocol):
    """What can be done to pages on a device without taking them to the host. From one thread."""

    digest: str  # names the function, so that two workers can tell whether theirs is the same
    index: int  # the device's, among those that this process sees
    max_pages: int  # of one `fill`

    def digests(self, pages: Sequence[int]) -> list[int]:
        """Of each page's bytes; waits for the device."""
        ...

    def fill(self, sources: Sequence[int], theirs: Sequence[int], ours: Sequence[int]) -> Callable[[], list[int]]:
        """Starts to fill own pages from memory that the device reaches, with the same regions at these addresses.

        Returns what waits for the end, on any thread, and then has the digests of what is in own pages. Those started
        later are done later.
        """
        ...


class PageStore(Protocol):
    """Pages as bytes: all layers, latents and index keys, in one order on all workers of a layout.

    `regions`: the stores whose pages, in this order, make up a page; none where they are no memory.
    """

    page_bytes: int
    num_pages: int
    regions: Sequence[Region]

    @property
    def device(self) -> DevicePages | None:
        """None for pages in host memory."""
        ...

    def views(self, pages: Sequence[int]) -> list[NDArray[np.uint8]]:
        """The bytes of pages where they are, to be read and written there: store by store, in each in their order.

        Each [consecutive pages, bytes of a page in that store]. None where pages are no bytes of host memory.
        """
        ...

    def read(self, pages: Sequence[int], into: memoryview) -> None:
        """Copies pages out, into [pages, page_bytes]."""
        ...

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        """Inverse of `read`."""
        ...


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner that is ready, and what it says about itself.

    `num_pages` counts the sink page. `layout_id` names the byte layout of a page: workers exchange pages only when it
    is equal. `computes_beside`: a launch returns before the step is done, so that planning the next one costs no time.
    `num_host_pages`: pages that `PageCopies` may name.
    `features`: the arithmetic and the kernels that it computes with.
    `poison` spoils the contents of pages that nobody may read any more; for tests.
    `page_store` reads and writes whole pages as bytes, from any thread, while no step touches them.
    """

    runner: Runner
    num_pages: int
    device: str
    dtype: str
    layout_id: str
    weights_bytes: int
    kv_bytes: int
    poison: Callable[[Sequence[int]], None]
    computes_beside: bool = False
    num_host_pages: int = 0
    features: tuple[str, ...] = ()
    page_store: PageStore | None = None
