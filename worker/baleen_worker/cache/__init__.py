"""Pages: who holds which (`pages`), and what is in them (`storage`)."""
