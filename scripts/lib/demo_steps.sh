# The steps of scripts/demo, on the host below $YUNION_MPS_ROOT; every line of output is the programs' own.
set -eu
root=$YUNION_MPS_ROOT
step() { printf '\n==> %s\n' "$1"; }
run() {
    printf '$ %s\n' "$*"
    "$@"
}
modes() { nvidia-smi --query-gpu=gpu_uuid,gpu_name,gpu_bus_id,memory.total,compute_mode --format=csv; }

step "1. The configuration: the file that Cloudpods' host agent shares with us, and the one that divides the GPUs"
for file in "$root"/etc/yunion/*; do run cat "$file"; done
run yunion-mps config check
before=$(modes)

step "2. The daemon starts: compute modes, NVIDIA's control daemon, and every limit read back before it is READY"
echo "$ yunion-mps-daemon &"
yunion-mps-daemon &
daemon=$!
trap 'kill "$daemon" 2>/dev/null && wait "$daemon" || :' EXIT
trap 'exit 1' HUP INT TERM
tries=0
until yunion-mps status >/dev/null 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -gt 200 ] || ! kill -0 "$daemon" 2>/dev/null; then
        echo "demo: the daemon did not become ready; its lines above say why" >&2
        exit 1
    fi
    sleep 0.05
done

step "3. What NVIDIA's own nvidia-smi says of the GPUs now"
echo "$ nvidia-smi --query-gpu=gpu_uuid,gpu_name,gpu_bus_id,memory.total,compute_mode --format=csv"
modes

step "4. The devices that this host offers, as Cloudpods lists them"
run yunion-mps isolated-device-list

step "5. What the real control daemon answers for its limits (it shows whole G: 5760M is 5G)"
CUDA_MPS_PIPE_DIRECTORY=$root/tmp/nvidia-mps/pipe
export CUDA_MPS_PIPE_DIRECTORY
gpus=$(nvidia-smi -L | grep -c '^GPU')
device=0
while [ "$device" -lt "$gpus" ]; do
    echo "$ echo get_default_device_pinned_mem_limit $device | nvidia-cuda-mps-control"
    echo "get_default_device_pinned_mem_limit $device" | nvidia-cuda-mps-control
    device=$((device + 1))
done
echo "$ echo get_default_active_thread_percentage | nvidia-cuda-mps-control"
echo get_default_active_thread_percentage | nvidia-cuda-mps-control

step "6. How all of it is"
run yunion-mps status

step "7. The daemon stops: the control daemon quits, and the compute modes are what they were"
echo "$ kill $daemon"
kill "$daemon"
wait "$daemon"
trap - EXIT HUP INT TERM
after=$(modes)
echo "$after"
if [ "$before" != "$after" ]; then
    echo "demo: the compute modes are not what they were before:" >&2
    echo "$before" >&2
    exit 1
fi
echo "The compute modes are what they were."
