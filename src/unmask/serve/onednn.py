"""What torch keeps of every shape that it has multiplied, within bounds.

oneDNN makes code for each shape of a product and keeps the last 1,024 of them; torch's layer above it keeps
its own 1,024, with their working space. A server meets any number of shapes, so both fill up: about 700 MB,
whatever the size of the model. Making one again costs nothing that can be measured beside using it.
"""

from __future__ import annotations

import os

_CACHE_CAPACITY = 32
"""Products whose code is kept; a few calls of the network have as many. (With 0 torch crashes.)"""

_CACHE_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables that are read when torch multiplies for the first time."""


def limit_onednn_caches() -> None:
    """Keep little of each shape; to be called before torch computes.

    Who has set a variable is not overruled.
    """
    for name in _CACHE_VARIABLES:
        os.environ.setdefault(name, str(_CACHE_CAPACITY))
