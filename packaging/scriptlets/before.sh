# ---- Before anything is unpacked

check_host() { # refuse a host on which the installation could not be completed
    if ! python >/dev/null; then
        found=$(/usr/bin/python3 -c 'import sys; print("is %d.%d" % sys.version_info[:2])' 2>/dev/null || echo "is missing")
        say "/usr/bin/python3 $found, but 3.9 or later is required: install one, for example python3.11, and try again"
        exit 1
    fi
    for directory in /usr /etc /var; do
        if ! can_be_written "$directory"; then
            say "$directory is not writable: check whether it is mounted read-only (findmnt -T $directory), and try again"
            exit 1
        fi
        free_mib=$(stat -f -c '%a %S' "$directory" | { read -r blocks size; echo $((blocks * size / 1048576)); })
        if [ "$free_mib" -lt "$required_mib" ]; then
            say "$directory has $free_mib MiB free, but $required_mib MiB are required: free disk space (df -h $directory), and try again"
            exit 1
        fi
    done
}

can_be_written() { tried=$(mktemp -d "$1/.yunion-mps.XXXXXX" 2>/dev/null) && rmdir "$tried"; }

note_cloudpods() { # record the state of Cloudpods' service, because the removal of its rpm disables and stops it
    [ -e /opt/yunion/bin/mps-daemon ] && systemd_runs || return 0
    {
        systemctl --quiet is-enabled "$unit" 2>/dev/null && echo enabled
        [ "$(systemctl show --property ActiveState --value "$unit")" = inactive ] || echo started # it may have failed
        echo noted
    } >"$before"
}
