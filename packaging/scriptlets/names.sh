# Shared by the scripts of both packages; scripts/package puts it before the others.

unit=yunion-mps-daemon.service
programs=/usr/bin # and not /usr/local/bin, where a wheel may be installed
library=/usr/lib/yunion-mps
required_mib=16 # what both packages take at most, with bytecode
plugin=yunion-mps-kubelet-plugin.service
plugin_files="$library/yunion_mps/kubernetes $library/vendor-kubelet-plugin"
configuration=/etc/yunion
examples=/usr/share/yunion-mps
state=/var/lib/yunion-mps
made=$state/made-by-package
recorded=$state/directories
running=/run/yunion-mps
adopted=$running/adopted.json
before=/run/yunion-mps-daemon.cloudpods
devices=/run/cdi
enabled=/etc/systemd/system/multi-user.target.wants
processes=/proc

# The text may quote a process or a file, so use no echo: Debian's sh would interpret backslashes, for example as ESC.
say() { printf 'yunion-mps-daemon: %s\n' "$(one_line "$*")" >&2; }

one_line() { # replace control characters, line ends and changes of the writing direction (UTF-8) by question marks
    printf '%s' "$1" | LC_ALL=C tr '\001-\037\177' '?' |
        LC_ALL=C sed 's/\xc2[\x80-\x9f]/?/g; s/\xe2\x80[\x8e\x8f\xa8-\xae]/?/g; s/\xe2\x81[\xa0-\xaf]/?/g; s/\xef\xbb\xbf/?/g'
}

systemd_runs() { [ -d /run/systemd/system ]; }

python() { # print the Python that runs the programs, found as /usr/bin/yunion-mps does
    [ -x /usr/bin/python3 ] || return 1
    for python in /usr/bin/python3 /usr/bin/python3.9 /usr/bin/python3.[1-9][0-9]; do
        if "$python" -IS -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
            echo "$python"
            return
        fi
    done
    return 1
}

control_daemons() { # PID of each running control daemon of root, and to whom it belongs
    for process in "$processes"/[1-9]*; do
        [ -O "$process" ] || continue # another user's process may have this name, our mark and any directory
        program=$(readlink "$process/exe" 2>/dev/null) || continue # a kernel thread
        case ${program% (deleted)} in */nvidia-cuda-mps-control) ;; *) continue ;; esac # an upgrade deletes it
        case $(tr '\0' ' ' <"$process/cmdline" 2>/dev/null) in *" -"[df]*) ;; *) continue ;; esac # a front-end
        pid=${process##*/}
        [ -r "$process/environ" ] || continue
        if ! [ "$process/root" -ef / ]; then # its directories are not the host's, and our mark is that of another daemon
            echo "$pid a container's"
        elif variables "$pid" | grep -q '^YUNION_MPS_DOMAIN=' || is_adopted "$pid"; then
            echo "$pid ours"
        else
            echo "$pid another's"
        fi
    done
}

is_adopted() { # compare its PID and start time in clock ticks with the record of yunion_mps/mps/processes.py
    ticks=$(sed 's/.*) //' "$processes/$1/stat" 2>/dev/null | cut -d ' ' -f 20)
    grep -q "\"pid\": $1, \"started_ticks\": $ticks," "$adopted" 2>/dev/null
}

variables() { tr '\0\n' '\n?' <"$processes/$1/environ" 2>/dev/null; } # the environment of a process, one variable per line

variable() { variables "$1" | sed -n "s/^$2=//p"; }

others() { # PID and pipe directory of each control daemon of root on the host that is not ours
    control_daemons | while read -r pid whose; do
        [ "$whose" != "another's" ] || printf '%s %s\n' "$pid" "$(variable "$pid" CUDA_MPS_PIPE_DIRECTORY)"
    done
}
