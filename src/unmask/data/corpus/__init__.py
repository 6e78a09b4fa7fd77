"""Tokenized text on disk: building, splits, shards, manifests."""
