"""Training texts of the micro model: the mixture of generated conversations, in V3.2's prompt format."""
