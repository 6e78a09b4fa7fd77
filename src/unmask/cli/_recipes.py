"""`unmask recipes`."""

from __future__ import annotations


def recipes() -> None:
    """List the recipes: named experiments for `unmask train`.

    For example:
      unmask recipes
    """
    from unmask.recipes import RECIPES

    for name, function in RECIPES.items():
        print(f"{name:12} {(function.__doc__ or '').strip()}")
