# bash: eval "$(mtrain completion bash)", or save this as a file in the folder of bash completions
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
