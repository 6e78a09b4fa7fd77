"""Measures of a model, each with its uncertainty."""
