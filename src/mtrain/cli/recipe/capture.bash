# What bash reads as it starts under `recipe import --capture`; BIN and SITE are replaced by folders.
#
# Before each command, the folders of the recorders come back to PATH and PYTHONPATH. A command that
# is given one of the two for itself, `PYTHONPATH=x nohup y`, gets a function of its name, once,
# which brings them back in there. The script sees no change: `$_` is passed through, no
# regular expression sets BASH_REMATCH, and nothing fails that `set -e` or `set -u` would end the
# script for. A script with a trap of its own for RETURN would meet it in every function under
# `set -T`, which is then left.

mtrain_capture_keep() {
  case "${PATH-}" in
    BIN:*) ;;
    *) export PATH=BIN${PATH:+:$PATH} ;;
  esac
  case "${PYTHONPATH-}" in
    SITE | SITE:*) ;;
    *) export PYTHONPATH=SITE${PYTHONPATH:+:$PYTHONPATH} ;;
  esac
}
mtrain_capture_once() {
  case "$1" in
    exec | command) ;;
    *) if ! type -P "$1" > /dev/null || declare -F "$1" > /dev/null; then return 0; fi ;;
  esac
  mtrain_capture_defined+=("$1")
  local how=$1
  if [ "$1" = exec ]; then how="builtin exec"; fi
  eval "function $1 { unset -f $1; mtrain_capture_keep; $how \"\$@\"; }"
}
mtrain_capture_before() {
  local said=$BASH_COMMAND word options=$-
  mtrain_capture_keep
  for word in ${mtrain_capture_defined[@]+"${mtrain_capture_defined[@]}"}; do unset -f "$word"; done
  mtrain_capture_defined=()
  case "$said" in
    "trap "*RETURN*) set +T ;;
    "trap "*DEBUG*) eval "$mtrain_capture_trap" ;;
    PATH=*\ * | PYTHONPATH=*\ * | [A-Za-z_]*=*" PATH="*\ * | [A-Za-z_]*=*" PYTHONPATH="*\ *)
      set +u
      while [ -n "$said" ]; do
        word=${said%%[[:space:]]*}
        said=${said#"$word"}
        said=${said#[[:space:]]}
        case "$word" in
          "" | -* | *=* | *[!A-Za-z0-9_/.+\${}\"-]*) continue ;;
        esac
        case "$word" in
          *[\$\"]*) { eval "word=$word"; } 2> /dev/null || continue ;;
        esac
        word=${word%%[[:space:]]*}
        case "$word" in
          "" | *[!A-Za-z0-9_/.+-]*) ;;
          *) mtrain_capture_once "$word" ;;
        esac
      done
      case "$options" in *u*) set -u ;; esac
      ;;
  esac
  return 0
}
mtrain_capture_defined=()
mtrain_capture_trap='trap() {
  unset -f trap
  if [ "${1-}" = -- ]; then shift; fi
  builtin trap "$@" || return
  case "${1-}" in
    -p | -l) ;;
    DEBUG | - | "") builtin trap "mtrain_capture_before \"\$_\"" DEBUG ;;
    *) builtin trap "mtrain_capture_before \"\$_\"; $1" DEBUG ;;
  esac
}'
set -T
trap 'mtrain_capture_before "$_"' DEBUG
