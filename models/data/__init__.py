"""Training and evaluation texts of the micro model: generated here, seeded, in V3.2's prompt format."""
