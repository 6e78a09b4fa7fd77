"""Tokenizers and their fast encoders."""
