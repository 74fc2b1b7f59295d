# Sourced by scripts that need root, so that they fail at once with a clear message.
if [ "$(id -u)" != 0 ]; then
    echo "$0: root is required to change compute modes and to run jobs as other users" >&2
    echo "$0: run it as root: sudo $0" >&2
    exit 1
fi
