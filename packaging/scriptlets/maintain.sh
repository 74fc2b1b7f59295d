#!/bin/sh
# Called by the packages' scripts. A problem never makes them fail, but is reported in one line.

#INCLUDE names.sh

installed() { # the files have been installed for the first time, or in another version
    compile_bytecode
    make_group
    mkdir -p "$state"
    chmod 0700 "$state"
    if systemd_runs; then
        systemd-tmpfiles --create yunion-mps.conf || say "systemd-tmpfiles failed: see above"
        systemctl daemon-reload || say "systemctl daemon-reload failed: see above"
        go_on
    else
        say "systemd is not running, so nothing was started; with systemd: systemctl enable --now yunion-mps-daemon"
    fi
}

compile_bytecode() { # in directories $@, otherwise in the whole library, where the kubelet plugin's files are, too
    [ $# -gt 0 ] || set -- "$library"
    remove_bytecode "$@"
    if python=$(python) && ! "$python" -IS -m compileall -q "$@" >/dev/null 2>&1; then
        remove_bytecode "$@"
        say "cannot write bytecode to $library (is the disk full?); everything works without it, but starts more slowly"
    fi
}

remove_bytecode() { find "$@" -name __pycache__ -prune -exec rm -rf {} +; }

make_group() {
    getent group yunion-mps >/dev/null ||
        systemd-sysusers yunion-mps.conf 2>/dev/null ||
        groupadd --system yunion-mps 2>/dev/null ||
        say "cannot create the group yunion-mps, so only root can use the daemon; create it: groupadd --system yunion-mps"
}

# Only at the first installation, because a file that is missing later was removed on purpose; and only if there is no file,
# because on a host with Cloudpods both files are Cloudpods'.
make_configuration() {
    mkdir -p "$configuration" "$state"
    chmod 0700 "$state"
    if make_file host.conf; then
        say "$configuration/host.conf was created from the example; it takes effect when the service starts"
        if make_file host_container_device.yml; then
            say "$configuration/host_container_device.yml was created, too: list your GPUs there"
        fi
    fi
}

make_file() { # create $1 from the example; returns whether it was created
    file=$configuration/$1
    if [ -e "$file" ] || [ -L "$file" ]; then
        return 1
    fi
    if cp "$examples/$1" "$file.new" && mv "$file.new" "$file"; then
        (cd "$configuration" && sha256sum "$1") >>"$made"
    else
        rm -f "$file.new"
        say "$file could not be written; copy it: cp $examples/$1 $file"
        return 1
    fi
}

# ---- A daemon from before the installation

go_on() {
    if [ -e "$before" ]; then
        follow_cloudpods
    elif systemctl --quiet is-active "$unit"; then
        reexec
    else
        if systemctl --quiet is-enabled "$unit" 2>/dev/null; then
            configuration_is_right "correct it, then: systemctl restart $unit" || :
        fi
        others | while read -r pid directory; do
            say "a control daemon (PID $pid) of another program serves $directory; it is not touched"
        done
    fi
}

reexec() { # run the new program in the daemon's process, so that an upgrade ends no job
    configuration_is_right "the previous daemon continues; correct it, then: yunion-mps daemon-reexec" || return 0
    changes=$(timeout 180 "$programs/yunion-mps" plan --output csv 2>/dev/null | sed 1d) || changes=
    if [ -n "$changes" ]; then
        say "the configuration has changed since the daemon read it; the daemon now applies these changes:"
        timeout 180 "$programs/yunion-mps" plan 2>/dev/null | sed 1d >&2 || :
    fi
    if why=$(timeout 180 "$programs/yunion-mps" daemon-reexec 2>&1); then
        printf '%s\n' "$why" | while IFS= read -r line; do say "$line"; done
        systemctl --quiet try-restart yunion-mps-gateway.service 2>/dev/null || :
        systemctl --quiet start yunion-mps-gateway.path 2>/dev/null || : # earlier releases did not have it
    else
        say "the previous daemon continues: $(first "$why"); when no job is running: systemctl restart $unit"
    fi
}

configuration_is_right() { # otherwise report that, with the hint $1; $2 may be --require-driver
    why=$(timeout 180 "$programs/yunion-mps-daemon" --check ${2:-} 2>&1) && return
    if [ $? = 6 ]; then what="rejects the configuration"; else what="cannot start on this host"; fi # for example without a driver that is required
    say "this version $what ($(first "$why")); $1"
    return 1
}

first() { printf '%s\n' "$1" | sed '1s/^<[0-7]>//;1s/^[-0-9]* [0-9:,]* [A-Z]* //;1s/^yunion-mps[a-z-]*: //;1q'; }

follow_cloudpods() { # replace Cloudpods' daemon: enable and start this one if that one was enabled and running
    was=$(cat "$before")
    rm -f "$before"
    case $was in *enabled*) systemctl --quiet enable "$unit" ;; esac
    case $was in *started*) ;; *) return 0 ;; esac
    configuration_is_right "correct it, then: systemctl restart $unit" --require-driver || return 0
    go_on_with_cloudpods
    systemctl stop "$unit" # if its control daemon was not adopted, Cloudpods' daemon tells it to exit after its jobs
    cloudpods_control_daemons | while read -r pid directory; do
        say "Cloudpods' control daemon (PID $pid) was asked to exit when its jobs have ended"
        echo quit | CUDA_MPS_PIPE_DIRECTORY=/proc/$pid/root$directory timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1 || :
    done
    systemctl start "$unit" || say "the service is not ready yet; see: systemctl status $unit"
}

# Adopt Cloudpods' control daemon with its jobs, and kill Cloudpods' daemon, because stopping it would stop the control daemon.
go_on_with_cloudpods() {
    cloudpods_control_daemons | while read -r pid directory; do
        if why=$(with_the_hosts_files timeout 180 "$programs/yunion-mps-daemon" --adopt "$pid" 2>&1); then
            systemctl daemon-reload # our unit does not end other processes when its main process is killed
            main=$(systemctl show --property MainPID --value "$unit")
            [ "${main:-0}" = 0 ] || kill -KILL "$main"
            say "Cloudpods' control daemon (PID $pid) was adopted with its jobs"
        else
            say "$(first "$why")"
        fi
    done
}

with_the_hosts_files() { # rpm 4.20 and later run scripts with a private /tmp, in which control daemons cannot be found
    if systemd_runs; then nsenter --mount --target 1 "$@"; else "$@"; fi
}

cloudpods_control_daemons() { # PID and directory of each control daemon that is not ours and serves our pipe directory
    pipe=$("$programs/yunion-mps" config show --output csv | sed -n 's/^cuda_mps_pipe_directory,\([^,]*\),.*/\1/p')
    others | while read -r pid directory; do
        [ "$directory" != "$pipe" ] || printf '%s %s\n' "$pid" "$directory"
    done
}

before_cloudpods_goes() { # Cloudpods' rpm stops the service before the last script of ours runs
    case $(cat "$before" 2>/dev/null) in *started*) ;; *) return 0 ;; esac
    if systemd_runs && timeout 180 "$programs/yunion-mps-daemon" --check --require-driver >/dev/null 2>&1; then
        go_on_with_cloudpods
    fi
}

# ---- Removal

going() { # the package is removed: stop the daemon, which restores the compute modes
    if systemd_runs; then
        say_whose_jobs_end
        systemctl stop "$unit" || say "the service could not be stopped: see above"
        systemctl stop 'yunion-mps-job@*.service' || : # jobs that are not clients of MPS
        systemctl reset-failed "$unit" 'yunion-mps-job@*.service' 2>/dev/null || :
    fi
    if command -v systemctl >/dev/null; then
        systemctl --quiet disable "$unit" 2>/dev/null || :
        for link in "$enabled"/yunion-mps-job@?*.service; do
            [ ! -L "$link" ] || systemctl --quiet disable "${link##*/}" 2>/dev/null || :
        done
    fi
    if [ -e "$running/former-compute-modes.json" ] || control_daemons | grep -q ' ours$'; then # the daemon was killed
        with_the_hosts_files "$programs/yunion-mps-daemon" --restore ||
            say "not everything could be restored: see above; to try again: yunion-mps-daemon --restore"
    fi
    remove_bytecode "$library"
}

say_whose_jobs_end() {
    units=$(systemctl list-units --plain --no-legend --state=active,activating 'yunion-mps-job@*.service' | cut -d ' ' -f 1 | paste -s -d , | sed 's/,/, /g')
    [ -z "$units" ] || say "these jobs are stopped: $units"
    jobs=$(timeout 60 "$programs/yunion-mps" who --clients --output csv 2>/dev/null | sed 1d | cut -d , -f 1,2) || return 0
    [ -n "$jobs" ] || return 0
    wait_s=$(timeout 60 "$programs/yunion-mps" config show --output csv 2>/dev/null | sed -n 's/^cuda_mps_stop_timeout_s,\([0-9]*\),.*/\1/p')
    number=$(printf '%s\n' "$jobs" | wc -l)
    whose=$(printf '%s\n' "$jobs" | head -n 10 | sed 's/,$/,an unknown user/; s/\([^,]*\),\(.*\)/PID \1 of \2/' | paste -s -d , | sed 's/,/, /g')
    [ "$number" -le 10 ] || whose="$whose and others"
    say "$number job(s) on the GPUs have ${wait_s:-10} s to end; after that, they are ended: $whose"
}

replaced() { # Cloudpods' package replaces this one; that must not end jobs
    say "Cloudpods' package replaces this one; running jobs continue; to switch over when they have ended: systemctl restart $unit"
    ! systemd_runs || systemctl --quiet stop yunion-mps-gateway.path yunion-mps-gateway.service || :
}

# ---- The package of the kubelet plugin, which depends on this one; $plugin_files are its directories

plugin_installed() { # for the first time, or in another version
    # shellcheck disable=SC2086 # one word a directory
    compile_bytecode $plugin_files
    systemd_runs || return 0
    systemctl daemon-reload || say "systemctl daemon-reload failed: see above"
    systemctl --quiet try-restart "$plugin" || say "the kubelet plugin does not run; see: systemctl status $plugin"
}

plugin_going() { # running containers keep their devices
    ! systemd_runs || systemctl --quiet stop "$plugin" || say "the kubelet plugin could not be stopped: see above"
    ! command -v systemctl >/dev/null || systemctl --quiet disable "$plugin" 2>/dev/null || :
    # shellcheck disable=SC2086 # one word a directory
    remove_bytecode $plugin_files
}

case $1 in
nothing) ;; # for tests, which call single functions
first) make_configuration ;;
before-cloudpods-goes) before_cloudpods_goes ;;
installed) installed ;;
python-changed) compile_bytecode ;;
going) going ;;
leaving-bytecode) remove_bytecode "$library" ;;
replaced) replaced ;;
plugin-installed) plugin_installed ;;
plugin-going) plugin_going ;;
# shellcheck disable=SC2086 # one word a directory
plugin-leaving-bytecode) remove_bytecode $plugin_files ;;
*) say "usage: maintain nothing|first|…; see the end of $0" && exit 2 ;;
esac
