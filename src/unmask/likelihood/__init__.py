"""Estimates of likelihood bounds, with their standard errors."""
