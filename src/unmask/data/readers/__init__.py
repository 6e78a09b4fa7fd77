"""Readers of text sources: files, folders, tables, FASTA, saved datasets, the hub."""

from unmask.data.readers._class_folders import LABEL_COLUMN, TEXT_COLUMNS, class_folders
from unmask.data.readers._records import AnyPairFormat, ChatRecord, PromptCompletion
from unmask.data.readers._text import validate_text
from unmask.data.readers.config import SourceConfig
from unmask.data.readers.hub_dataset import HubDataset
from unmask.data.readers.sources import STDLIB_SOURCE, Sources, read_texts
from unmask.data.readers.tables import ColumnOptions

__all__ = [
    "LABEL_COLUMN",
    "STDLIB_SOURCE",
    "TEXT_COLUMNS",
    "AnyPairFormat",
    "ChatRecord",
    "ColumnOptions",
    "HubDataset",
    "PromptCompletion",
    "SourceConfig",
    "Sources",
    "class_folders",
    "read_texts",
    "validate_text",
]
