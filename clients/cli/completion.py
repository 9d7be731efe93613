"""`radixmesh completion SHELL`: what a shell is told so that Tab completes verbs, flags and files."""

import argparse

# A verb's flags are read from its own --help, so that they are always those of the installed version.
_FLAGS = r"grep -oE -- '(^|[ ,[])--?[a-zA-Z][a-zA-Z0-9-]*' | tr -d ' ,[' | sort -u"
_BASH = """\
# eval "$(radixmesh completion bash)", or write it to ~/.local/share/bash-completion/completions/radixmesh
_radixmesh() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@VERBS@" -- "$word"))
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$(radixmesh "${COMP_WORDS[1]}" --help 2>/dev/null | @FLAGS@)" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}
complete -o filenames -F _radixmesh radixmesh
"""
_ZSH = """\
#compdef radixmesh
# eval "$(radixmesh completion zsh)" after compinit, or write it to _radixmesh in a folder of $fpath
_radixmesh() {
    if (( CURRENT == 2 )); then
        compadd -- @VERBS@
    elif [[ $words[CURRENT] == -* ]]; then
        compadd -- ${(f)"$(radixmesh $words[2] --help 2>/dev/null | @FLAGS@)"}
    else
        _files
    fi
}
compdef _radixmesh radixmesh
"""
_FISH = """\
# radixmesh completion fish > ~/.config/fish/completions/radixmesh.fish
complete -c radixmesh -n __fish_use_subcommand -f -a "@VERBS@"
complete -c radixmesh -n "string match -q -- '-*' (commandline -ct)" -f \
    -a "(radixmesh (commandline -opc)[2] --help 2>/dev/null | @FLAGS@)"
"""
_SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def run(arguments: list[str]) -> int:
    """Prints the script: 0."""
    from radixmesh.cli.__main__ import all_verbs

    parser = argparse.ArgumentParser(prog="radixmesh completion", description="Print the completion of a shell.")
    parser.add_argument("shell", choices=sorted(_SHELLS))
    options = parser.parse_args(arguments)
    print(_SHELLS[options.shell].replace("@VERBS@", " ".join(all_verbs())).replace("@FLAGS@", _FLAGS), end="")
    return 0
