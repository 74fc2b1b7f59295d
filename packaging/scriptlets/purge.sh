# ---- Nothing of ours is to stay. Only the deb knows a purge; docs/install.md says it for the rpm.

purge() {
    [ -n "$(others)" ] || remove_what_clients_saw
    for name in host.conf host_container_device.yml; do
        if is_ours "$name"; then
            rm -f "$configuration/$name"
        fi
    done
    rmdir "$configuration" 2>/dev/null || :
    rm -rf "$state" /run/yunion-mps "$before"
    if getent group yunion-mps >/dev/null; then
        groupdel yunion-mps || say "the group yunion-mps is left: see above"
    fi
}

remove_what_clients_saw() { # by name, and only in root's own directories: some lie in /tmp
    for key in pipe log; do
        directory=$(sed -n "s/^cuda_mps_${key}_directory: *\([^ #]*\).*/\1/p" "$configuration/host.conf" 2>/dev/null)
        directory=${directory:-/tmp/nvidia-mps/$key}
        for one in "$directory"/*/ "$directory/"; do
            if [ -O "$one" ] && [ ! -L "${one%/}" ] && [ -O "$one.." ]; then
                (cd -P "$one" && rm -f control control_lock control_privileged log nvidia-cuda-mps-control.pid \
                    control.log control.log.1 server.log)
                rmdir "$one" 2>/dev/null || :
            fi
        done
    done
    rmdir /tmp/nvidia-mps 2>/dev/null || :
}

is_ours() { # whether we made the file, and it has not become another's since
    grep -q " $1\$" "$made" 2>/dev/null || return 1
    ! dpkg-query -S "$configuration/$1" >/dev/null 2>&1 || return 1
    case $1 in
    host.conf) every='^[A-Za-z]' ours='^\(enable_cuda_mps\|container_device_config_file\|cuda_mps_[a-z_]*\):' ;;
    *) every='type:' ours='NVIDIA_MPS' ;;
    esac
    if grep "$every" "$configuration/$1" 2>/dev/null | grep -qv "$ours"; then
        say "$configuration/$1 is left: other software uses it as well"
        return 1
    fi
}
