# ---- Purge: remove everything. Only the deb can be purged; docs/install.md has the commands for the rpm.

purge() {
    remove_what_clients_saw
    for name in host.conf host_container_device.yml; do
        if is_ours "$name"; then
            rm -f "$configuration/$name"
        fi
    done
    rmdir "$configuration" 2>/dev/null || :
    rm -rf "$before"
    rm -f "$devices"/yunion-mps.json "$devices"/yunion-mps-lease-*.json # left by a daemon that was killed
    remove_notes
    if getent group yunion-mps >/dev/null; then
        groupdel yunion-mps || say "the group yunion-mps was not removed: see above"
    fi
}

remove_what_clients_saw() { # remove what the daemon has recorded (yunion_mps/mps/directories.py), and nothing else
    serving=$(control_daemons | while read -r pid _; do
        variable "$pid" CUDA_MPS_PIPE_DIRECTORY | grep . || echo /tmp/nvidia-mps # NVIDIA's default
        variable "$pid" CUDA_MPS_LOG_DIRECTORY
    done)
    [ -f "$recorded" ] || return 0
    LC_ALL=C sort -r -k 2 "$recorded" | while IFS= read -r line; do # deeper directories come first
        directory=${line#* }
        if printf '%s\n' "$serving" | grep -qxF -e "$directory"; then
            say "$directory was not removed: a control daemon uses it"
            continue
        fi
        case $line in
        "made "* | "used "*) remove_files_of_mps "$directory" ;;
        esac
        case $line in
        "made "* | "above "*) [ -L "$directory" ] || rmdir "$directory" 2>/dev/null || : ;;
        esac
    done
}

remove_files_of_mps() ( # by name, and only in a directory of root that is not reached through a symlink
    cd -P "$1" 2>/dev/null && [ "$(pwd -P)" = "$1" ] && [ -O . ] || return 0
    for name in control control_lock control_privileged log nvidia-cuda-mps-control.pid \
        control.log control.log.1 server.log server.log.1; do
        [ -d "$name" ] || grep -qxF -e "theirs $1/$name" "$recorded" || rm -f "$name"
    done
)

remove_notes() { # remove all records, except those that are needed to restore what has not been restored yet
    if control_daemons | grep -q ' ours$'; then
        say "a control daemon of yunion-mps is still running, so $state was not removed; reinstall the package, then:" \
            "yunion-mps-daemon --restore"
        return
    fi
    rm -rf "$state"
    modes=$running/former-compute-modes.json
    if [ -e "$modes" ]; then
        grep -o '"GPU-[^"]*": "[A-Za-z_]*"' "$modes" | tr -d '":' | while read -r gpu mode; do
            mode=$(printf '%s\n' "$mode" | tr '[:lower:]' '[:upper:]')
            say "the compute mode of $gpu differs from the original; restore it: nvidia-smi -i $gpu -c $mode"
        done
        find "$running" -mindepth 1 ! -path "$modes" -delete
    else
        rm -rf "$running"
    fi
}

is_ours() { # whether the package created the file, and no other software has used it since
    grep -q " $1\$" "$made" 2>/dev/null || return 1
    ! dpkg-query -S "$configuration/$1" >/dev/null 2>&1 || return 1
    case $1 in # what is ours is in keys.sh
    host.conf) ours=$our_keys named=$(keys_of "$configuration/$1") ;;
    *) ours=$our_types named=$(types_of "$configuration/$1") ;;
    esac
    foreign=$(printf '%s\n' "$named" | grep -vxF -e "$ours" | grep -m 1 .) || return 0
    say "$configuration/$1 was not removed: other software uses it, too ($foreign)"
    return 1
}

without_comments() { sed 's/\(^\|[[:space:]]\)#.*//' "$1" 2>/dev/null; }

keys_of() { # the keys of the file, with or without quotes, of lines `key: value` and `key = value`; dashes are underscores
    quote="[\"']\\{0,1\\}"
    without_comments "$1" | sed -n "s/^$quote\([A-Za-z_][A-Za-z0-9_-]*\)$quote[[:space:]]*[:=].*/\1/p" | tr - _
}

types_of() { # the types of the entries in the file
    quote="[\"']\\{0,1\\}" begin="type[\"']\\{0,1\\}[[:space:]]*:[[:space:]]*"
    without_comments "$1" | grep -o "$begin$quote[A-Za-z0-9_]*" | sed "s/^$begin$quote//"
}
