"""Shell completion of commands, options and names.

The scripts contain all words, so that completing starts no Python process.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Annotated, Literal

from unmask.cli._signature import Argument, Positional, command_arguments, import_table

_Shell = Annotated[Literal["bash", "zsh", "fish"], Positional()]


def completion(shell: _Shell) -> None:
    """Print a script that completes commands, options and names in your shell.

    For example:
      unmask completion bash > ~/.local/share/bash-completion/completions/unmask
      source <(unmask completion zsh)
      unmask completion fish > ~/.config/fish/completions/unmask.fish

    Args:
        shell: The shell to complete in.
    """
    from unmask.cli import COMMANDS, command_function

    known = {name: command_arguments(command_function(name)) for name in COMMANDS}
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](known))


def _completions(argument: Argument) -> list[str]:
    """The values that an argument can be completed with; empty if they are not a list of names."""
    if argument.completions is None:
        return list(argument.choices)
    return list(import_table(argument.completions))


def _option_names(known: list[Argument]) -> list[str]:
    return [*(name for each in known if not each.positional for name in each.names), "-h", "--help"]


def _bash(known: dict[str, list[Argument]]) -> str:
    lines = [
        "_unmask() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" words="" options="" option="" after=0 free=0 i',
        "  COMPREPLY=()",
        "  if ((COMP_CWORD == 1)); then",
        f'    COMPREPLY=($(compgen -W {_quoted([*_first_words(known), "-h", "--help"])} -- "$cur")); return',
        "  fi",
        '  local command="${COMP_WORDS[1]}" first=2',
        '  case "$command" in',
        *(
            f'    {group}) if ((COMP_CWORD == 2)); then COMPREPLY=($(compgen -W {_quoted(members)} -- "$cur")); return;'
            f' fi; command="$command ${{COMP_WORDS[2]}}"; first=3;;'
            for group, members in _groups(known).items()
        ),
        "  esac",
        "  for ((i = first; i < COMP_CWORD; i++)); do",
        '    case "${COMP_WORDS[i]}" in',
        '      --*) option="${COMP_WORDS[i]}"; after=0;;',
        '      *) ((after += 1)); [[ -z "$option" ]] && ((free += 1));;',
        "    esac",
        "  done",
        '  case "$command" in',
    ]
    for name, each in known.items():
        lines.append(f"    {shlex.quote(name)}) options={_quoted(_option_names(each))}")
        cases = []
        for argument in each:
            if argument.positional:
                continue
            # After a flag, or after an option that has all its values, any word may follow.
            ended = "" if argument.nargs is None else f"((after >= {argument.nargs})) || "
            words = _quoted(_completions(argument))
            cases.append(f"        {'|'.join(argument.names)}) {ended}words={words};;")
        if cases:
            lines += ['      case "$option" in', *cases, "      esac"]
        for index, argument in enumerate(argument for argument in each if argument.positional):
            if _completions(argument):
                lines.append(
                    f'      [[ -z "$option" ]] && ((free == {index})) && words={_quoted(_completions(argument))}'
                )
        lines.append("      ;;")
    lines += [
        "  esac",
        '  [[ "$cur" == -* ]] && words="$options"',
        '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _unmask unmask",
    ]
    return "\n".join(lines)


def _zsh(known: dict[str, list[Argument]]) -> str:
    """The bash function, which zsh runs through bashcompinit."""
    return f"#compdef unmask\nautoload -U +X bashcompinit && bashcompinit\n{_bash(known)}"


def _fish(known: dict[str, list[Argument]]) -> str:
    lines = ["complete -c unmask -e"]
    lines += [f"complete -c unmask -f -n __fish_use_subcommand -a {name}" for name in _first_words(known)]
    for group, members in _groups(known).items():
        lines.append(f"complete -c unmask -f -n '__fish_seen_subcommand_from {group}' -a {_quoted(members)}")
    for name, each in known.items():
        inside = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        inside = f"complete -c unmask -n '{inside}'"
        for argument in each:
            words = _completions(argument)
            names = " ".join(f"-l {option.removeprefix('--')}" for option in argument.names)
            described = f"-d {shlex.quote(argument.help.partition('.')[0])}"
            if argument.positional and words:
                lines.append(f"{inside} -a {_quoted(words)}")
            elif not argument.positional:
                takes = "" if argument.nargs == 0 else " -r"
                from_list = f" -f -a {_quoted(words)}" if words else ""
                lines.append(f"{inside} {names}{takes}{from_list} {described}")
    return "\n".join(lines)


def _first_words(known: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.split()[0] for name in known))


def _groups(known: Iterable[str]) -> dict[str, list[str]]:
    """The second words of commands of two words, by their first."""
    groups: dict[str, list[str]] = {}
    for group, *member in map(str.split, known):
        if member:
            groups.setdefault(group, []).extend(member)
    return groups


def _quoted(words: list[str]) -> str:
    return shlex.quote(" ".join(words))
