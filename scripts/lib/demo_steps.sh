# The steps of scripts/demo on the host below $YUNION_MPS_ROOT. All output is that of the programs.
#
#   demo_steps.sh reference|jobs
#
# reference: from the two files to the list of devices in Cloudpods' format; jobs: what operators and users type.
set -eu
root=$YUNION_MPS_ROOT
lib=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
daemon='' job=''
step() { printf '\n==> %s\n' "$1"; }
run() { # a command, on a terminal of 100 columns if standard output is not a terminal
    printf '$ %s\n' "$*"
    if [ -t 1 ]; then "$@"; else python3 "$lib/columns.py" 100 "$@"; fi
}
modes() { nvidia-smi --query-gpu=gpu_uuid,gpu_name,gpu_bus_id,memory.total,compute_mode --format=csv; }

start_daemon() {
    before=$(modes)
    echo "$ yunion-mps-daemon &"
    yunion-mps-daemon &
    daemon=$!
    tries=0
    until yunion-mps status >/dev/null 2>&1; do
        tries=$((tries + 1))
        if [ "$tries" -gt 200 ] || ! kill -0 "$daemon" 2>/dev/null; then
            echo "demo: the daemon did not become ready; see its messages above" >&2
            exit 1
        fi
        sleep 0.05
    done
}

end() { # what is still running
    for pid in $job $daemon; do { kill "$pid" && wait "$pid"; } 2>/dev/null || :; done # without "Terminated"
    daemon='' job=''
}
trap end EXIT
trap 'exit 1' HUP INT TERM

stop_daemon() {
    step "$1. The daemon stops: the control daemon exits, and the compute modes are restored"
    echo "$ kill \$!"
    end
    after=$(modes)
    echo "$after"
    if [ "$before" != "$after" ]; then
        echo "demo: the compute modes were not restored; they were:" >&2
        echo "$before" >&2
        exit 1
    fi
    echo "The compute modes are as they were before."
}

reference() {
    step "1. The configuration: the file shared with Cloudpods' host agent, and the device file"
    for file in "$root"/etc/yunion/*; do
        printf '$ cat %s\n' "${file#"$root"}"
        cat "$file"
    done
    run yunion-mps config check

    step "2. The daemon starts: it sets compute modes and limits, and reads them back before it is ready"
    start_daemon

    step "3. The GPUs as NVIDIA's own nvidia-smi now shows them"
    echo "$ nvidia-smi --query-gpu=gpu_uuid,gpu_name,gpu_bus_id,memory.total,compute_mode --format=csv"
    modes

    step "4. The devices that this host offers, as Cloudpods lists them"
    run yunion-mps isolated-device-list

    step "5. The limits according to the real control daemon (it prints whole GiB: 5760M is 5G)"
    gpus=$(nvidia-smi -L | grep -c '^GPU')
    device=0
    while [ "$device" -lt "$gpus" ]; do
        echo "$ echo get_default_device_pinned_mem_limit $device | nvidia-cuda-mps-control"
        ask "get_default_device_pinned_mem_limit $device"
        device=$((device + 1))
    done
    echo "$ echo get_default_active_thread_percentage | nvidia-cuda-mps-control"
    ask get_default_active_thread_percentage

    step "6. The state of the host"
    run yunion-mps status

    step "7. A job: not started, because MPS cannot enforce a budget on a GPU older than Volta"
    run yunion-mps run python3 train.py || :
    stop_daemon 8
}

ask() { echo "$1" | CUDA_MPS_PIPE_DIRECTORY=$root/tmp/nvidia-mps/pipe nvidia-cuda-mps-control; }

jobs() {
    step "9. The devices as users see them"
    start_daemon
    run yunion-mps list

    step "10. A job has a device of its own until it ends, and its budget in its environment"
    echo '$ yunion-mps run env | grep -E "CUDA|YUNION_MPS_DEVICE" | sort'
    yunion-mps run env | grep -E "CUDA|YUNION_MPS_DEVICE" | sort
    echo "$ yunion-mps run python3 demo_job.py 8192 &"
    (cd "$lib" && exec yunion-mps run python3 demo_job.py 8192) >"$root/tmp/job" &
    job=$!
    tries=0
    until [ -s "$root/tmp/job" ]; do
        tries=$((tries + 1))
        if [ "$tries" -gt 200 ] || ! kill -0 "$job" 2>/dev/null; then
            echo "demo: the job did not start" >&2
            exit 1
        fi
        sleep 0.05
    done
    cat "$root/tmp/job"
    if command -v simhost-ctl >/dev/null; then
        echo "(The simulated driver measures nothing: the demo tells it that the job uses 8192 MiB.)"
        simhost-ctl process 0 add "$job" 8192 --type M+C
    fi

    step "11. Who uses which device, and how much of its memory"
    run yunion-mps who

    step "12. Another user: MPS serves one user at a time, so their job is refused, or waits with --wait"
    run setpriv --reuid=nobody --clear-groups yunion-mps run true || :
    run yunion-mps list --gpu "$(yunion-mps list -o csv | sed -n '2s/-[0-9]*,.*//p')"

    step "13. Everything that is known to make MPS fail on a host is checked"
    run yunion-mps doctor || :
    ! command -v simhost-ctl >/dev/null || simhost-ctl process 0 remove "$job"
    stop_daemon 14
}

"$1"
