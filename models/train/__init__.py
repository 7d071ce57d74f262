"""Trains the micro model: modules with the serving parameter names, the stages of training, export and evaluation."""
