"""Datasets of the Hugging Face hub, streamed by the package `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unmask.data.readers._text import validate_text
from unmask.data.readers.tables import ColumnOptions, first_available_columns
from unmask.io.errors import first_line, import_optional
from unmask.io.hub import UNREACHABLE_MESSAGE, hub_session


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset on the hub, or of a local dataset folder."""

    name: str
    config: str | None
    split: str
    revision: str | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows, streamed."""
        with self._loader() as datasets:
            # Only errors of loading are raised here; errors of the consumer of a row are not.
            yield from datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=True
            )

    def values(self, options: ColumnOptions) -> Iterator[tuple[str, tuple[str, ...], list[Any]]]:
        """Of each row its location (for error messages), the selected columns and their values."""
        for number, row in enumerate(self.rows(), start=1):
            location = f"{self.name} {self.split} row {number}"
            columns = first_available_columns(options, row, location)
            yield location, columns, [row[column] for column in columns]

    def read_texts(self, options: ColumnOptions) -> Iterator[str]:
        """The text of each row, empty ones included; several columns are joined by a space."""
        for location, columns, values in self.values(options):
            yield join_columns(location, columns, values)

    def builder_hash(self) -> str:
        """The fingerprint of the dataset's revision and files."""
        with self._loader() as datasets:
            return str(datasets.load_dataset_builder(self.name, self.config, revision=self.revision).hash)

    @contextmanager
    def _loader(self) -> Iterator[Any]:
        """The package `datasets`, with its errors as one sentence."""
        datasets: Any = import_optional("datasets", "hub")
        try:
            with hub_session(self.name) as online:
                if not online:  # rows are streamed, so a cache would not help
                    raise ValueError(UNREACHABLE_MESSAGE)
                yield datasets
        except Exception as error:
            raise ValueError(f"the data set {self.name} cannot be loaded: {first_line(error)}") from None


def join_columns(location: str, columns: tuple[str, ...], values: Any) -> str:
    """The text of a row: its columns joined by a space."""
    pairs = zip(columns, values, strict=True)
    return " ".join(validate_text(value, location, column) for column, value in pairs)
