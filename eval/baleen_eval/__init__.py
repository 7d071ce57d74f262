"""Asks a served model questions whose answers are known, through the OpenAI API. `python -m baleen_eval --help`."""
