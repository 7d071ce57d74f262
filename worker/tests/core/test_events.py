"""How pages are named: routers compute the same names from prompts."""

from __future__ import annotations

from worker_process import page_names


def test_both_sides_of_the_contract_name_pages_alike() -> None:
    """The gateway's tests hold the same values (`route/pages.rs`): either side that drifts turns red."""
    prompt = list(range(8))
    assert page_names(prompt, "", 4) == [11484953719668697759, 10900368067859109240]
    assert page_names(prompt, "tenant", 4) == [14685567996632012903, 17008068419418477220]
