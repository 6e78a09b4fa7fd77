"""BatchSource from a corpus: row layouts, shuffling, prompt-completion pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unmask.registry import Family, LazyExports

if TYPE_CHECKING:  # written by `make exports`
    from unmask.data.loader.genome import GenomeWindows as GenomeWindows
    from unmask.data.loader.layouts import PerDocument as PerDocument
    from unmask.data.loader.layouts import RowLayout as RowLayout
    from unmask.data.loader.layouts import Rows as Rows
    from unmask.data.loader.layouts import Spans as Spans
    from unmask.data.loader.layouts import TokenSource as TokenSource
    from unmask.data.loader.layouts import Wrapped as Wrapped
    from unmask.data.loader.loader import Loader as Loader
    from unmask.data.loader.prompt_completion import PadIgnored as PadIgnored
    from unmask.data.loader.prompt_completion import PadWithEos as PadWithEos
    from unmask.data.loader.prompt_completion import PromptCompletionRows as PromptCompletionRows

ROW_LAYOUTS: Family[RowLayout] = Family(
    "unmask.data.loader.layouts:RowLayout",
    {
        "wrapped": "unmask.data.loader.layouts:Wrapped",
        "per-document": "unmask.data.loader.layouts:PerDocument",
        "prompt-completion": "unmask.data.loader.prompt_completion:PromptCompletionRows",
        "genome": "unmask.data.loader.genome:GenomeWindows",
    },
)

if not TYPE_CHECKING:
    __getattr__ = LazyExports(
        __name__,
        ROW_LAYOUTS,
        Loader="loader",
        PadIgnored="prompt_completion",
        PadWithEos="prompt_completion",
        RowLayout="layouts",
        Rows="layouts",
        Spans="layouts",
        TokenSource="layouts",
    )
