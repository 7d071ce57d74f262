"""Baleen's worker: owns tokens, pages and devices; knows no text. Start it with `python -m baleen_worker MODEL_DIR`."""
