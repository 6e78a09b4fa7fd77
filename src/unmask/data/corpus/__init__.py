"""Prepared corpora: text sources to a folder of token ids, and its splits."""

from unmask.data.corpus._manifest import PrepareConfig
from unmask.data.corpus._token_files import Split
from unmask.data.corpus.build import TRAIN_SPLIT, VALID_SPLIT
from unmask.data.corpus.corpus import Corpus, is_corpus
from unmask.data.corpus.prepare_corpus import prepare, stale_reasons
from unmask.data.corpus.text_stats import TextStats

__all__ = [
    "TRAIN_SPLIT",
    "VALID_SPLIT",
    "Corpus",
    "PrepareConfig",
    "Split",
    "TextStats",
    "is_corpus",
    "prepare",
    "stale_reasons",
]
