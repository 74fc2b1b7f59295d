# What the scripts of both packages share. scripts/package puts it before the others: see tree.py, deb.py and rpm.py.

unit=yunion-mps-daemon.service
programs=/usr/bin # not those of a wheel in /usr/local/bin
library=/usr/lib/yunion-mps
configuration=/etc/yunion
examples=/usr/share/yunion-mps
state=/var/lib/yunion-mps
made=$state/made-by-package
recorded=$state/directories
running=/run/yunion-mps
taken_over=$running/taken-over.json
before=/run/yunion-mps-daemon.cloudpods
devices=/run/cdi
enabled=/etc/systemd/system/multi-user.target.wants
processes=/proc

say() { echo "yunion-mps-daemon: $*" >&2; }

systemd_runs() { [ -d /run/systemd/system ]; }

python() { # the Python that the programs run with: the same search as in /usr/bin/yunion-mps
    [ -x /usr/bin/python3 ] || return 1
    for python in /usr/bin/python3 /usr/bin/python3.9 /usr/bin/python3.[1-9][0-9]; do
        if "$python" -IS -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    return 1
}

control_daemons() { # PID of each control daemon that runs, and whether it is ours
    for process in "$processes"/[1-9]*; do
        case $(readlink "$process/exe" 2>/dev/null) in */nvidia-cuda-mps-control) ;; *) continue ;; esac
        case $(tr '\0' ' ' <"$process/cmdline" 2>/dev/null) in *" -"[df]*) ;; *) continue ;; esac # a front-end
        variables=$(tr '\0' '\n' <"$process/environ" 2>/dev/null) || continue
        pid=${process##*/}
        case $variables in
        *YUNION_MPS_DOMAIN=*) echo "$pid ours" ;;
        *) if is_taken_over "$pid"; then echo "$pid ours"; else echo "$pid another's"; fi ;;
        esac
    done
}

is_taken_over() { # by its PID and its start in clock ticks: yunion_mps/mps/taken_over.py wrote them down
    ticks=$(sed 's/.*) //' "$processes/$1/stat" 2>/dev/null | cut -d ' ' -f 20)
    grep -q "\"pid\": $1, \"started_ticks\": $ticks," "$taken_over" 2>/dev/null
}

variable() { tr '\0' '\n' <"$processes/$1/environ" 2>/dev/null | sed -n "s/^$2=//p"; } # what a process has in its environment

others() { # PID and pipe directory of each control daemon that is not ours
    control_daemons | while read -r pid whose; do
        [ "$whose" = ours ] || echo "$pid $(variable "$pid" CUDA_MPS_PIPE_DIRECTORY)"
    done
}
