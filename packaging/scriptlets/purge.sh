# ---- Purge: remove everything. Only the deb can be purged; docs/install.md has the commands for the rpm.

boot_directory=/tmp/nvidia-mps # created by tmpfiles.d

purge() {
    remove_what_clients_saw
    if [ -O "$boot_directory" ] && ! [ -L "$boot_directory" ]; then
        rmdir "$boot_directory" 2>/dev/null || :
    fi
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

remove_what_clients_saw() { # remove what the daemon has recorded (yunion_mps/mps/directory_record.py), and nothing else
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
    host.conf) foreign=$(foreign_in_host_conf "$configuration/$1") ;;
    *) foreign=$(foreign_in_device_file "$configuration/$1") ;;
    esac
    [ -n "$foreign" ] || return 0
    say "$configuration/$1 was not removed: it may have lines of other software: $foreign"
    return 1
}

# What is not certainly ours is foreign, because YAML can be written in many ways.

foreign_in_host_conf() { # the first key that is not ours, or line that is not `key: value` or `key = value`
    without_comments "$1" | ours=$our_keys awk '
        BEGIN { count = split(ENVIRON["ours"], keys, "\n"); for (i = 1; i <= count; i++) is_ours[keys[i]] = 1 }
        /^[ \t]*$/ || /^---[ \t]*$/ { next }
        match($0, /^["\047]?[A-Za-z_][A-Za-z0-9_.-]*["\047]?[ \t]*[:=]/) {
            key = substr($0, 1, RLENGTH)
            gsub(/["\047 \t:=]/, "", key)
            name = key
            gsub(/-/, "_", name)
            if (name in is_ours) next
            print key
            exit
        }
        { print substr($0, 1, 40); exit }'
}

foreign_in_device_file() { # the first key or type of an entry that is not ours; a type is on the line of its key
    without_comments "$1" | ours=$our_entry_keys types=$our_types awk '
        BEGIN {
            count = split(ENVIRON["ours"], keys, "\n")
            for (i = 1; i <= count; i++) { gsub(/_/, "", keys[i]); is_ours[keys[i]] = 1 }
            count = split(ENVIRON["types"], types, "\n")
            for (i = 1; i <= count; i++) is_type[types[i]] = 1
        }
        {
            rest = $0
            while (match(rest, /["\047]?[A-Za-z_][A-Za-z0-9_.-]*["\047]?[ \t]*:([ \t]|$)/)) {
                key = substr(rest, RSTART, RLENGTH)
                rest = substr(rest, RSTART + RLENGTH)
                gsub(/["\047 \t:]/, "", key)
                name = tolower(key)
                gsub(/[_-]/, "", name)
                if (!(name in is_ours)) { print key; exit }
                if (name != "type") continue
                type = rest
                sub(/^[ \t]*["\047]?/, "", type)
                sub(/[^A-Za-z0-9_].*/, "", type)
                if (!(type in is_type)) { print (type == "" ? key : type); exit }
            }
        }'
}

without_comments() { sed 's/\(^\|[[:space:]]\)#.*//' "$1" 2>/dev/null; }
