"""Constrained output: grammars, compiled beside the step loop, that say which token may come next."""
