"""Moves a request's pages from the worker that computed its prompt to the one that generates its answer."""
