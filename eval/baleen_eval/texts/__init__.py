"""Generated conversations: seeded, without download, names, words and numbers split between training and evaluation.

The micro model and its tokenizer were made from these texts, so what a seed gives is frozen.
"""
