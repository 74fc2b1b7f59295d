# Called by the packages' scripts. Nothing here fails them: what goes wrong is said in one line each.

installed() { # the files are there, for the first time or in another version
    compile_bytecode
    make_group
    make_configuration
    if systemd_runs; then
        systemd-tmpfiles --create yunion-mps.conf || say "systemd-tmpfiles failed: see above"
        systemctl daemon-reload || say "systemctl daemon-reload failed: see above"
        go_on
    else
        say "systemd does not run here, so nothing is started; where it does: systemctl enable --now yunion-mps-daemon"
    fi
}

compile_bytecode() {
    remove_bytecode
    if python=$(python) && ! "$python" -IS -m compileall -q "$library" >/dev/null 2>&1; then
        remove_bytecode
        say "no bytecode could be written to $library (is the disk full?); all works without, but starts slower"
    fi
}

remove_bytecode() { find "$library" -name __pycache__ -prune -exec rm -rf {} +; }

make_group() {
    getent group yunion-mps >/dev/null ||
        systemd-sysusers yunion-mps.conf 2>/dev/null ||
        groupadd --system yunion-mps 2>/dev/null ||
        say "the group yunion-mps cannot be made, so only root can ask the daemon; make it: groupadd --system yunion-mps"
}

make_configuration() { # where there is none: on a host with Cloudpods both files are Cloudpods'
    mkdir -p "$configuration" "$state"
    chmod 0700 "$state"
    for name in host.conf host_container_device.yml; do
        file=$configuration/$name
        if [ -e "$file" ] || [ -L "$file" ]; then
            continue
        fi
        if cp "$examples/$name" "$file.new" && mv "$file.new" "$file"; then
            (cd "$configuration" && sha256sum "$name") >>"$made"
        else
            rm -f "$file.new"
            say "$file could not be written; copy it: cp $examples/$name $file"
        fi
    done
}

# ---- A daemon that ran before

go_on() {
    if [ -e "$before" ]; then
        follow_cloudpods
    elif systemctl --quiet is-active "$unit"; then
        run_anew
    else
        others | while read -r pid directory; do
            say "a control daemon (PID $pid) that is not ours serves $directory, and is left alone"
        done
    fi
}

run_anew() { # an upgrade ends no job: the daemon runs the new program in its own process
    configuration_is_right "the daemon of before goes on; correct it, then: systemctl reload $unit" || return 0
    if why=$(timeout 180 yunion-mps daemon-reexec 2>&1); then
        say "$why"
    else
        say "the daemon of before goes on: $(first "$why"); when no job runs: systemctl restart $unit"
    fi
}

configuration_is_right() { # else say so, and $1
    why=$(timeout 180 yunion-mps-daemon --check 2>&1) && return
    say "this version refuses the configuration ($(first "$why")); $1"
    return 1
}

first() { echo "$1" | sed '1s/^<[0-7]>//;1s/^[-0-9]* [0-9:,]* [A-Z]* //;1s/^yunion-mps[a-z-]*: //;1q'; }

follow_cloudpods() { # take the place of Cloudpods' daemon: enabled and running where that was
    was=$(cat "$before")
    rm -f "$before"
    case $was in *enabled*) systemctl --quiet enable "$unit" ;; esac
    case $was in *wanted*) ;; *) return 0 ;; esac
    configuration_is_right "correct it, then: systemctl restart $unit" || return 0
    systemctl stop "$unit" # Cloudpods' daemon tells its control daemon to end once its jobs have
    pipe=$(yunion-mps config show --output csv | sed -n 's/^cuda_mps_pipe_directory,\([^,]*\),.*/\1/p')
    others | while read -r pid directory; do
        [ "$directory" = "$pipe" ] || continue
        say "Cloudpods' control daemon (PID $pid) is asked to end once its jobs have"
        echo quit | CUDA_MPS_PIPE_DIRECTORY=/proc/$pid/root$directory timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1 || :
    done
    systemctl start "$unit" || say "the service does not serve yet; see: systemctl status $unit"
}

# ---- The end

going() { # for good: the daemon puts the compute modes back as it stops
    remove_bytecode
    [ -x /usr/bin/systemctl ] || return 0
    systemctl --quiet disable "$unit" 2>/dev/null || :
    systemd_runs || return 0
    systemctl stop "$unit" || say "the service could not be stopped: see above"
    if [ -e /run/yunion-mps/former-compute-modes.json ]; then # it had been killed: the next one ends what it left
        { systemctl start "$unit" && systemctl stop "$unit"; } ||
            say "the GPUs' compute modes could not be put back; see: nvidia-smi --query-gpu=uuid,compute_mode --format=csv"
    fi
    systemctl reset-failed "$unit" 2>/dev/null || :
}

case $1 in
nothing) ;; # the tests call one function after another
installed) installed ;;
python-changed) compile_bytecode ;;
going) going ;;
leaving-bytecode) remove_bytecode ;;
*) say "usage: maintain installed|python-changed|going|leaving-bytecode" && exit 2 ;;
esac
