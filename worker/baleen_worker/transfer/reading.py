"""By what means a rank reads its peer's pages, and lends its own. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baleen_worker.transfer.lending import Backend

if TYPE_CHECKING:
    from baleen_worker.transfer.couriers import Couriers
    from baleen_worker.transfer.lending import Lender


@dataclass(frozen=True, slots=True)
class Reading:
    """How a rank's pages are read: `lender` is there unless the backend is TCP, and not always then for AUTO."""

    backend: Backend = Backend.TCP
    lender: Lender | Couriers | None = None
