"""`completion SHELL`: a script with which a shell asks `mtrain __complete` for candidates."""

from __future__ import annotations

import click

from mtrain.cli.command import Verb, refusal
from mtrain.cli.offers import SHELLS, shells
from mtrain.errors import say_page

BASH = r"""# bash: eval "$(mtrain completion bash)", or save this as a file in the folder of bash completions
_mtrain() {
    _mtrain_ask "${COMP_LINE:0:COMP_POINT}" "$1"
}
_mtrain_python() {  # python launch.py ..., where that launch.py is the one of mtrain
    local line="${COMP_LINE:0:COMP_POINT}" script
    COMPREPLY=()
    if [[ $line =~ ^[[:space:]]*[^[:space:]]+[[:space:]]+([^[:space:]]*launch\.py)[[:space:]] ]]; then
        script="${BASH_REMATCH[1]}"
        grep -qs 'mtrain\.cli\.main' "$script" && _mtrain_ask "mtrain ${line#*launch.py}" "$1" "$script"
    fi
}
_mtrain_ask() {
    local line="$1" word candidate
    shift
    word="${line##*[[:space:]]}"
    # bash cuts words at = and :, so what stands in front of the last one is not part of the answer
    local front="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    while IFS= read -r candidate; do
        [[ -n $candidate ]] && COMPREPLY+=("${candidate#"$front"}")
    done < <("$@" __complete "$line" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o default -F _mtrain mtrain
complete -o default -F _mtrain_python python python3
"""
ZSH = r"""#compdef mtrain
# zsh: eval "$(mtrain completion zsh)", or save this as _mtrain in a folder of $fpath
_mtrain() {
    _mtrain_ask 1 ${words[1]}
}
_mtrain_python() {  # python launch.py ..., where that launch.py is the one of mtrain
    if (( CURRENT > 2 )) && [[ ${words[2]} == *launch.py ]] && grep -qs 'mtrain\.cli\.main' ${words[2]}; then
        _mtrain_ask 2 ${words[1]} ${words[2]}
    else
        _default
    fi
}
_mtrain_ask() {
    local -a found open whole
    local first=$1
    shift
    found=("${(@f)$("$@" __complete "mtrain ${(j: :)words[first+1,CURRENT-1]} ${PREFIX}" 2>/dev/null)}")
    open=(${(M)found:#*[=.]})
    whole=(${found:#*[=.]})
    (( ${#open} )) && compadd -Q -S '' -- $open
    (( ${#whole} )) && compadd -Q -- $whole
    (( ${#found} )) || _files
}
compdef _mtrain mtrain
compdef _mtrain_python python python3
"""
FISH = r"""# fish: mtrain completion fish | source, or save this as ~/.config/fish/completions/mtrain.fish
function __mtrain_complete
    set -l found (mtrain __complete (commandline -cp) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c mtrain -f -a '(__mtrain_complete)'
function __mtrain_launches  # python launch.py ..., where that launch.py is the one of mtrain
    set -l words (commandline -opc)
    test (count $words) -gt 1; and string match -q '*launch.py' -- $words[2]
    and grep -qs 'mtrain\.cli\.main' $words[2]
end
function __mtrain_complete_python
    set -l words (commandline -opc)
    $words[1] $words[2] __complete (string join ' ' -- mtrain $words[3..-1] (commandline -ct)) 2>/dev/null
end
for name in python python3
    complete -c $name -n __mtrain_launches -f -a '(__mtrain_complete_python)'
end
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@click.command(
    "completion",
    cls=Verb,
    short_help="a script that completes verbs, choices and keys: completion bash|zsh|fish",
    usage="completion bash|zsh|fish",
    help=(
        "Print a script with which a shell completes verbs, flags, choices, layouts, keys, recipes"
        " and runs."
    ),
    arguments=(("bash|zsh|fish", "the shell"),),
    examples=(("completion bash", 'for this shell: eval "$(... completion bash)"'),),
    offers=shells,
)
def completion(words: list[str]) -> int:
    """Print the script of a shell.

    Raises:
        ConfigError: the shell is missing or unknown.
    """
    if not words:
        raise refusal("the shell is missing", "completion bash")
    if words[0] not in SCRIPTS:
        rule = f"there is no completion for {words[0]}; shells: {', '.join(SHELLS)}"
        raise refusal(rule, "completion bash")
    say_page(SCRIPTS[words[0]])
    return 0
