# Sourced by scripts/demo and scripts/test: ends them at once where they could only fail later, and less clearly.
if [ "$(id -u)" != 0 ]; then
    echo "$0: root is required, to change compute modes and to run jobs of other users" >&2
    echo "$0: run it as root: sudo $0" >&2
    exit 1
fi
