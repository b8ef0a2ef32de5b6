# fish: mtrain completion fish | source, or save this as ~/.config/fish/completions/mtrain.fish
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
