#compdef mtrain
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
