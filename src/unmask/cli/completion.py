"""Completion of commands and options in a shell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import tyro

Shell = Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]


def completion(shell: Shell) -> None:
    """Print a script that completes commands and options in your shell.

    For example:
      unmask completion bash > ~/.local/share/bash-completion/completions/unmask
      source <(unmask completion zsh)
      unmask completion fish > ~/.config/fish/completions/unmask.fish

    Args:
        shell: The shell that is to read the script.
    """
    from unmask.cli import COMMANDS, function

    print_script({name: function(name) for name in COMMANDS}, shell)


def print_script(commands: Mapping[str, Callable[..., Any]], shell: str) -> None:
    """The script of all commands together; parsing them is tyro's, and so is knowing them."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            dict(commands),
            prog="unmask",
            args=["--tyro-print-completion", shell],
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except SystemExit as stop:  # tyro prints the script and leaves
        if stop.code:
            raise
    if shell == "bash":  # tyro's script knows no files; where it knows nothing, bash is to look for them
        print("complete -o default $(complete -p unmask | sed 's/^complete //')")
